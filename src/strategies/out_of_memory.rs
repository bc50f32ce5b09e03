//! Finds the largest micro-batch that fits, and survives running out of memory.
//!
//! *Cost*: no bytes. A failed try costs the part of the window that ran; a window that is split
//! into k costs k forwards and backwards of fewer rows.
//!
//! *When it acts*: in [`Stack::step_batch`](crate::Stack::step_batch). A batch of n rows runs in
//! ⌈n/m⌉ micro-batches that are as equal as whole rows allow, m being the most rows that are
//! believed to fit: all of them at first. When memory runs out in forward or backward, the
//! window begins again (buffers and generators as at its start, no gradients), caches are given
//! back, and m becomes the largest size that ran before or half of what failed; with
//! [`MicroBatcher::fine`] the next smaller ⌈n/k⌉. Then m is doubled (or becomes the next larger
//! ⌈n/k⌉, at most the batch) when [`patience`] windows were clean that were split and whose figures
//! had room: live bytes, what stays from one micro-batch to the next (gradients), and what comes
//! and goes, times the growth, within the limit. Where a failed size is to be tried again and no
//! more room has come since (what was missing, an eighth at least), patience doubles with each
//! failure. A batch that is shorter than others takes nothing back that these have taught.
//!
//! *Limits*: [`Stack::step`](crate::Stack::step) and `step_with` have no way back to a window's
//! start, so there it does nothing. Operators that mix rows or draw random numbers see
//! micro-batches. The closure runs again when its window does, for rows that it has seen, so what
//! else it counts or collects it counts twice; and what it returns must have a weight
//! ([`Loss::mean`](crate::Loss::mean)), since any batch may be split. A failure in the update is returned: a smaller micro-batch cannot help there.
//! When one row does not fit, it runs once more under a
//! [`Recording`](crate::memory::Recording), and the error is
//! [`Error::DoesNotFit`] with what was seen.
//!
//! [`patience`]: MicroBatcher::patience
//!
//! ```
//! use memfit::{Loss, Stack, memory::{self, Limit}, optim::{Sgd, SgdConfig}, strategies::MicroBatcher};
//! use memfit::tch::{nn, Device, Kind, Tensor};
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let w = vs.root().zeros("w", &[1024]);
//! let mut training = Stack::of(&vs, Sgd::new(&vs, SgdConfig::default().lr(0.1))?)
//!     .with(MicroBatcher::new())
//!     .build()?;
//! let batch = Tensor::randn([64, 1024], (Kind::Float, Device::Cpu));
//! let _limit = Limit::new(memory::stats(Device::Cpu)?.current + (100 << 10))?;
//! let outcome = training.step_batch(&batch, |x| {
//!     Ok(Loss::mean(x.f_mul(&w)?.f_exp()?.f_mean(Kind::Float)?, x.size()[0]))
//! })?;
//! assert!(outcome.split().is_some_and(|split| split.rows < 64 && split.retries > 0));
//! # Ok::<(), memfit::Error>(())
//! ```

mod explain;
mod helps;
mod size;

use tch::Device;

use crate::error::{Error, Result};
use crate::memory::{self, PeakScope};
use crate::state::StateVisitor;
use crate::step::{
    Conflict, Cost, Failure, Mode, ModelSize, NextForward, NextUpdate, Place, Preparation, Recovery, Scene,
    Strategy, UpdatePhase, Verdict,
};

use explain::{Stuck, missing};
use size::{Figures, Size, Steps, Taken};

/// Splits whole batches into the largest micro-batches that fit. See the [module](self).
#[derive(Debug)]
pub struct MicroBatcher {
    size: Size,
    device: Device,
    /// The rows that [`MicroBatcher::start`] was told.
    start: Option<i64>,
    /// Whether memory ran out in the window that is being dropped.
    short: bool,
    /// The window that runs, if `step_batch` split it.
    now: Option<Now>,
    /// What is known of a single row that failed.
    stuck: Option<Stuck>,
}

#[derive(Debug)]
struct Now {
    batch: i64,
    rows: i64,
    watched: Option<Watched>,
}

#[derive(Debug)]
struct Watched {
    /// Live bytes at its start, and the highest since.
    live: u64,
    peak: PeakScope,
    /// Live bytes over those at its start when the last micro-batch began.
    stays: u64,
}

impl MicroBatcher {
    /// Begins with whole batches and halves micro-batches that fail.
    pub fn new() -> Self {
        Self {
            size: Size::new(Steps::Halves),
            device: Device::Cpu,
            start: None,
            short: false,
            now: None,
            stuck: None,
        }
    }

    /// Takes the next smaller ⌈n/k⌉ rows instead of the half: larger micro-batches, found with
    /// more tries.
    pub fn fine(mut self) -> Self {
        self.size.steps = Steps::EveryCount;
        self
    }

    /// Begins with so many rows per micro-batch instead of all; `build()` refuses less than 1.
    pub fn start(mut self, rows: i64) -> Self {
        self.start = Some(rows);
        self.size.most = u64::try_from(rows).unwrap_or_default();
        self
    }

    /// Windows that must run clean before a larger micro-batch is tried; 100 unless set. At 0
    /// it never grows.
    pub fn patience(mut self, windows: u64) -> Self {
        self.size.patience = windows;
        self
    }

    /// The most rows that are believed to fit; `None` where the largest batch so far does.
    pub fn rows(&self) -> Option<i64> {
        self.size.rows().map(|rows| i64::try_from(rows).unwrap_or(i64::MAX))
    }

    fn figures(&self, live: u64) -> Option<Figures> {
        let limit = match self.device {
            Device::Cpu => memory::limit()?,
            device => memory::stats(device).ok()?.reserved + memory::device_memory(device).ok()?.0,
        };
        Some(Figures { limit, live })
    }

    /// Takes a smaller size, or says that there is none.
    fn shrink(&mut self, failure: &Failure<'_>) -> Recovery {
        let Some(split) = failure.split else { return Recovery::Window };
        self.short = true;
        let watched = self.now.take().and_then(|now| now.watched);
        if split.rows > 1 {
            let room = watched.and_then(|watched| self.figures(watched.live)).map(Figures::room);
            self.size.failed(split.batch, split.rows, room, missing(failure.error));
            return Recovery::Retry;
        }
        match &mut self.stuck {
            None => {
                let (stuck, recovery) = Stuck::begin(self.device);
                self.stuck = Some(stuck);
                recovery
            }
            Some(stuck) => {
                stuck.label_gradients(failure.parameters);
                Recovery::Window
            }
        }
    }
}

impl Default for MicroBatcher {
    fn default() -> Self {
        Self::new()
    }
}

impl Strategy for MicroBatcher {
    fn name(&self) -> String {
        let fine = if self.size.steps == Steps::EveryCount { ".fine()" } else { "" };
        format!("MicroBatcher::new(){fine}")
    }

    fn place(&self) -> Place {
        Place::Window
    }

    fn cost(&self, _model: &ModelSize) -> Cost {
        Cost::new(
            "0 B; activations of the micro-batch that fits",
            Some(0),
            "one forward and backward per micro-batch; a failed try runs its window again",
        )
    }

    fn conflict(&self, other: &dyn Strategy) -> Option<Conflict> {
        (other.place() == Place::Window).then(|| {
            Conflict::new(
                "both say how a batch is split",
                "keep one: MicroBatcher finds the size itself, a GradAccumulator is told",
            )
        })
    }

    fn prepare(&mut self, preparation: &mut Preparation<'_>) -> Result<()> {
        self.device = preparation.device;
        match self.start {
            Some(rows) if rows < 1 => {
                Err(Error::config("MicroBatcher::start", format!("at least 1 row, not {rows}")))
            }
            _ => Ok(()),
        }
    }

    fn split(&mut self, rows: i64) -> Option<i64> {
        let each = self.size.of(rows);
        self.now = Some(Now { batch: rows, rows: each, watched: None });
        Some(each)
    }

    fn retries(&self) -> bool {
        true
    }

    fn recover(&mut self, failure: &Failure<'_>) -> Recovery {
        if failure.error.is_out_of_memory() {
            return self.shrink(failure);
        }
        self.now = None;
        self.stuck = None;
        Recovery::Window
    }

    /// Gradients and graph are gone by now, so what they held is in the caches.
    fn window_dropped(&mut self) {
        if std::mem::take(&mut self.short)
            && let Err(error) = memory::release_caches(self.device)
        {
            tracing::debug!(%error, "caches were not given back");
        }
    }

    fn explain(&mut self, error: Error, scene: &mut Scene<'_>) -> Error {
        self.now = None;
        match self.stuck.take() {
            Some(stuck) if error.is_out_of_memory() => stuck.explain(error, scene),
            _ => error,
        }
    }

    fn forward(&mut self, mode: &mut Mode, next: NextForward<'_>) -> Result<()> {
        if let (Mode::Train(micro), Some(now)) = (&*mode, &mut self.now) {
            let live = memory::stats(self.device)?.current;
            match &mut now.watched {
                Some(watched) if !micro.first() => watched.stays = live.saturating_sub(watched.live),
                watched => *watched = Some(Watched { live, peak: PeakScope::new(self.device)?, stays: 0 }),
            }
        }
        next(mode)
    }

    fn update(&mut self, phase: &mut UpdatePhase<'_>, next: NextUpdate<'_>) -> Result<Verdict> {
        let now = self.now.take();
        self.stuck = None;
        let verdict = next(phase)?;
        // A window of ignored labels alone had no backward: it tells nothing.
        let counts = phase.numbers.tokens > 0.0;
        if let Some(Now { batch, rows, watched: Some(Watched { live, peak, stays }) }) = now
            && counts
        {
            let taken = Taken { most: peak.peak().saturating_sub(live), stays };
            self.size.clean(batch, rows, taken, self.figures(live));
        }
        Ok(verdict)
    }

    fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        self.size.visit_state(visitor)
    }
}
