//! One error type, its variants named by what the caller can do about them.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use tch::{Device, TchError};

/// What memfit's fallible calls return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong, by what the caller can do about it.
///
/// An overflowed gradient is not here: it is an outcome, see
/// [`StepOutcome::Skipped`](crate::StepOutcome::Skipped).
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device, or the [`Budget`](crate::strategies::Budget), has no room for a tensor.
    #[error("out of memory on {device:?}{}; use a smaller micro-batch, add a strategy, or raise the limit", room(*.requested, *.live, *.limit))]
    OutOfMemory {
        /// Bytes asked for, where libtorch tells.
        requested: Option<u64>,
        /// Bytes live at that moment, where they are counted.
        live: Option<u64>,
        /// The limit that was met, in bytes; `None` where it is the device's own.
        limit: Option<u64>,
        /// The device that is full.
        device: Device,
    },
    /// Memory ran out where no smaller micro-batch is left: one row does not fit.
    #[error("one row does not fit{}{advice}", refused(source))]
    DoesNotFit {
        /// What held the memory, and what would free some.
        advice: Box<crate::memory::Advice>,
        /// The failure.
        #[source]
        source: Box<Error>,
    },
    /// A setting is out of its range.
    #[error("bad setting {setting}: {problem}")]
    Config {
        /// The setting, as the user writes it.
        setting: &'static str,
        /// What is wrong and which values are right.
        problem: String,
    },
    /// Two parts of a stack cannot work together.
    #[error("{left} cannot be combined with {right}: {why}; instead, {remedy}")]
    Incompatible {
        /// One side.
        left: String,
        /// The other side.
        right: String,
        /// Why not.
        why: String,
        /// The nearest stack that works.
        remedy: String,
    },
    /// A call came at a moment when it has no meaning.
    #[error("{call} called {state}; {remedy}")]
    CallOrder {
        /// The call.
        call: &'static str,
        /// The state it came in.
        state: String,
        /// What to call first or instead.
        remedy: &'static str,
    },
    /// A gradient is not finite and no loss scaler is there to skip the step.
    #[error(
        "{what} is not finite ({value}); the step was not taken and nothing moved; add an AmpScaler to skip such steps, or lower the learning rate"
    )]
    NotFinite {
        /// What was measured.
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// The loss scale is at its floor and every step still overflows.
    #[error(
        "{skips} steps in a row overflowed at the lowest loss scale {scale}; the loss itself is likely not finite"
    )]
    LossScale {
        /// Consecutive skipped steps.
        skips: u64,
        /// The scale.
        scale: f64,
    },
    /// A recompute gave other tensors than the forward pass saved.
    #[error(
        "recompute of segment `{segment}` differs from its forward pass: {what}; the segment must compute the same from the same inputs"
    )]
    RecomputeMismatch {
        /// The segment.
        segment: String,
        /// What differs.
        what: String,
    },
    /// A tensor that backward needs was changed in place after forward saved it.
    #[error(
        "{what} was modified in place between forward and backward (version {found}, expected {expected}); run backward first, or change a copy"
    )]
    Modified {
        /// The tensor.
        what: String,
        /// Version saved in forward.
        expected: u64,
        /// Version found in backward.
        found: u64,
    },
    /// A state to load does not fit the object it is loaded into; the object is untouched.
    #[error("state does not fit: {}", .problems.join("; "))]
    State {
        /// Each missing, unknown or reshaped entry, by name.
        problems: Vec<String>,
    },
    /// Files of a snapshot are damaged, or not what they say; nothing was loaded.
    #[error("snapshot {} cannot be read: {}; load an older one", path.display(), .problems.join("; "))]
    Snapshot {
        /// The snapshot's folder, or the file.
        path: PathBuf,
        /// Each thing that is wrong.
        problems: Vec<String>,
    },
    /// The device or the build cannot do this.
    #[error("{what} is not supported {place}; {remedy}")]
    Unsupported {
        /// What was asked.
        what: String,
        /// Where it does not work.
        place: String,
        /// The way out.
        remedy: String,
    },
    /// A file could not be written or read; training state is intact.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// What was attempted.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// A record of the data cannot be used; the other records can.
    #[error("{origin}: {problem}")]
    Data {
        /// Which record.
        origin: crate::origin::Origin,
        /// What is wrong with it.
        problem: String,
        /// The failure behind it, if there is one.
        #[source]
        source: Option<Box<Error>>,
    },
    /// Of a batch of one of several ranks no record can be used, while the others have a batch
    /// in its place: a collective of theirs would wait for this rank for ever.
    #[error(
        "none of the {records} records of a batch of rank {rank} can be used, and other ranks of {world} may have a batch here; leave this step out on every rank, or mend the records or take larger batches"
    )]
    EmptyBatch {
        /// Records of the batch, all of them bad.
        records: u64,
        /// Of this process.
        rank: usize,
        /// Processes that train together.
        world: usize,
    },
    /// A failure in a later micro-batch dropped the open window: buffers, RNG and
    /// counters are as they were at its start.
    #[error(
        "window lost at micro-batch {micro}: {source}; buffers and generators are back at the window's start, run its micro-batches again"
    )]
    WindowLost {
        /// Index of the micro-batch that failed, from 0.
        micro: usize,
        /// The failure.
        #[source]
        source: Box<Error>,
    },
    /// A failure after the first parameter had moved: this state is not to be trained on.
    #[error("training state is poisoned: {source}; load a snapshot")]
    Poisoned {
        /// The failure.
        #[source]
        source: Box<Error>,
    },
    /// Memory that was made in a scope is still alive at its end.
    #[error(
        "{bytes} bytes in {blocks} blocks did not come back{}; drop what holds them, or name the tensors that may stay in LeakScope::check_except",
        crate::memory::listed_sites(sites)
    )]
    Leak {
        /// Bytes, of all devices.
        bytes: u64,
        /// Blocks on the CPU.
        blocks: u64,
        /// Where they were made, the most bytes first.
        sites: Vec<crate::memory::Site>,
    },
    /// A user's closure or module panicked.
    #[error("panic in {place}: {message}")]
    Panic {
        /// Where it ran.
        place: &'static str,
        /// The panic's text.
        message: String,
    },
    /// libtorch refused.
    #[error("libtorch: {0}")]
    Torch(String),
}

impl Error {
    /// A setting that is out of range.
    pub fn config(setting: &'static str, problem: impl Into<String>) -> Self {
        Self::Config { setting, problem: problem.into() }
    }

    /// A record that cannot be used; the [`Loader`](crate::data::Loader) adds where it comes from.
    pub fn data(problem: impl Into<String>) -> Self {
        Self::Data { origin: crate::origin::Origin::default(), problem: problem.into(), source: None }
    }

    /// Adds where a record comes from. Running out of memory is no matter of the record.
    pub(crate) fn at_record(self, origin: impl FnOnce() -> crate::origin::Origin) -> Self {
        match self {
            Self::Data { origin: known, problem, source } if known.is_empty() => {
                Self::Data { origin: origin(), problem, source }
            }
            Self::Data { .. } => self,
            error if error.is_out_of_memory() => error,
            error => {
                Self::Data { origin: origin(), problem: error.to_string(), source: Some(Box::new(error)) }
            }
        }
    }

    /// Whether it is one record's own, so that others follow.
    pub(crate) fn is_of_record(&self) -> bool {
        matches!(self, Self::Data { .. })
    }

    /// Whether memory ran out, and everything is as before.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory { .. } | Self::DoesNotFit { .. } => true,
            Self::WindowLost { source, .. } => source.is_out_of_memory(),
            _ => false,
        }
    }

    /// The typed error behind a text of libtorch's: one parked by [`Error::park`], an
    /// out-of-memory report, or [`Error::Torch`].
    pub(crate) fn from_text(text: &str) -> Self {
        let first = text.lines().next().unwrap_or_default();
        parked(text)
            .or_else(|| modified(first))
            .or_else(|| crate::memory::out_of_memory(text))
            .unwrap_or_else(|| Self::Torch(first.to_owned()))
    }

    /// Keeps the error while it travels through C++ as text; returns the mark that the
    /// text must contain. The oldest of 64 is dropped.
    pub(crate) fn park(self) -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        if let Ok(mut lot) = LOT.lock() {
            if lot.len() == 64 {
                lot.pop_front();
            }
            lot.push_back((id, self));
        }
        id
    }

    /// The text of an error that is parked; empty where it is not.
    pub(crate) fn parked_text(id: u64) -> String {
        let Ok(lot) = LOT.lock() else { return String::new() };
        let found = lot.iter().find(|(parked, _)| *parked == id);
        found.map(|(_, error)| error.to_string().replace('\0', " ")).unwrap_or_default()
    }

    /// The error of a caught panic: one sent by `resume_unwind`, or the panic's own text.
    pub(crate) fn from_panic(payload: Box<dyn std::any::Any + Send>, place: &'static str) -> Self {
        let payload = match payload.downcast::<Error>() {
            Ok(error) => return *error,
            Err(payload) => payload,
        };
        let message = match payload.downcast::<String>() {
            Ok(text) => *text,
            Err(payload) => payload.downcast_ref::<&str>().unwrap_or(&"unknown payload").to_string(),
        };
        // tch's infallible calls panic with the text of libtorch's error.
        match Self::from_text(&message) {
            Self::Torch(_) => Self::Panic { place, message },
            error => error,
        }
    }
}

impl From<TchError> for Error {
    fn from(error: TchError) -> Self {
        match error {
            TchError::Torch(text) => Self::from_text(&text),
            other => Self::Torch(other.to_string()),
        }
    }
}

static LOT: Mutex<VecDeque<(u64, Error)>> = Mutex::new(VecDeque::new());

/// The text that carries a parked error through C++.
pub(crate) const MARK: &str = "memfit error #";

fn parked(text: &str) -> Option<Error> {
    let (_, rest) = text.split_once(MARK)?;
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    let id: u64 = digits.parse().ok()?;
    let mut lot = LOT.lock().ok()?;
    let at = lot.iter().position(|(parked, _)| *parked == id)?;
    lot.remove(at).map(|(_, error)| error)
}

/// libtorch's own version check, for tensors that no link saw.
fn modified(text: &str) -> Option<Error> {
    let (_, rest) = text.split_once("modified by an inplace operation: ")?;
    let (what, rest) = rest.split_once(", which is").unwrap_or((rest, rest));
    let what = what.split(" is at version").next().unwrap_or(what);
    let number = |after: &str| -> Option<u64> {
        let (_, rest) = rest.split_once(after)?;
        rest.split(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok()
    };
    Some(Error::Modified {
        what: what.to_owned(),
        expected: number("expected version ")?,
        found: number("is at version ")?,
    })
}

/// The figures of a refusal, without what to do against any: its advice knows better.
fn refused(source: &Error) -> String {
    match source {
        Error::OutOfMemory { requested, live, limit, device } => {
            format!(" on {device:?}{}", room(*requested, *live, *limit))
        }
        other => format!(": {other}"),
    }
}

fn room(requested: Option<u64>, live: Option<u64>, limit: Option<u64>) -> String {
    let mut text = String::new();
    for (bytes, what) in [(requested, "bytes asked for"), (live, "live"), (limit, "the limit")] {
        if let Some(bytes) = bytes {
            let separator = if text.is_empty() { ": " } else { ", " };
            text.push_str(&format!("{separator}{bytes} {what}"));
        }
    }
    text
}
