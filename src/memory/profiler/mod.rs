mod nest;
mod profile;
mod table;
mod trace;

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

pub use nest::{Figures, Operator};
pub use profile::Profile;
pub use table::SortBy;

use crate::error::{Error, Result};
use crate::ffi::profiler as ffi;

/// libtorch's own profiler (Kineto) around a stretch of code: what each operator took in time
/// and in memory, and a trace of all of them.
///
/// For a loop of your own; a [`Stack`](crate::Stack) takes
/// [`ProfileSteps`](crate::strategies::ProfileSteps) instead.
///
/// *Cost*: that of [`ProfileSteps`](crate::strategies::profile_steps), from [`Profiler::start`]
/// on: time until [`Profiling::stop`], bytes until the [`Profile`] is dropped.
///
/// *When it acts*: on the thread that starts it, and on those that run a backward which that
/// thread calls. Operators of other threads, and what these allocate and free, are not seen.
///
/// *Limits*: libtorch has one profiler, so one profile is recorded at a time.
///
/// ```
/// use memfit::memory::{Profiler, SortBy};
/// use memfit::tch::{Device, Kind, Tensor};
///
/// # let folder = tempfile::tempdir().unwrap();
/// let a = Tensor::ones([256, 64], (Kind::Float, Device::Cpu));
/// let profiling = Profiler::new().start()?;
/// let product = a.matmul(&a.tr());
/// let profile = profiling.stop()?;
/// let mm = profile.operator("aten::mm").unwrap();
/// assert_eq!((mm.calls, mm.total.memory), (1, 256 * 256 * 4));
/// println!("{}", profile.table(SortBy::SelfMemory, 10));
/// profile.save_trace(folder.path().join("product.json"))?;
/// # Ok::<(), memfit::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Profiler {
    shapes: bool,
    memory: bool,
}

impl Default for Profiler {
    fn default() -> Self {
        Self::new()
    }
}

impl Profiler {
    /// Records time and memory.
    pub fn new() -> Self {
        Self { shapes: false, memory: true }
    }

    /// Writes the shapes of operators' inputs into the trace, too.
    pub fn shapes(mut self) -> Self {
        self.shapes = true;
        self
    }

    /// Leaves memory out: fewer events, and every memory figure is 0.
    pub fn without_memory(mut self) -> Self {
        self.memory = false;
        self
    }

    /// Starts.
    ///
    /// # Errors
    /// [`Error::CallOrder`] while another profile is being recorded; libtorch's, where somebody
    /// else has started its profiler on this thread.
    pub fn start(self) -> Result<Profiling> {
        Ok(Profiling { session: Session::start(self)?, thread: PhantomData })
    }
}

/// A profile that is being recorded; dropped without [`Profiling::stop`], it is thrown away.
#[derive(Debug)]
#[must_use = "the recording ends when this is dropped"]
pub struct Profiling {
    session: Session,
    // libtorch's profiler belongs to a thread.
    thread: PhantomData<*mut ()>,
}

impl Profiling {
    /// Ends the recording.
    ///
    /// # Errors
    /// libtorch's, where somebody else has ended its profiler.
    pub fn stop(self) -> Result<Profile> {
        self.session.stop()
    }
}

/// What becomes of libtorch's one profiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Recorder {
    Idle,
    /// Records on a thread, for the session of a number.
    Records(ThreadId, u64),
    /// Records on a thread for nobody: who had begun it was dropped on another one.
    Orphaned(ThreadId),
}

static RECORDER: Mutex<Recorder> = Mutex::new(Recorder::Idle);

fn recorder() -> MutexGuard<'static, Recorder> {
    RECORDER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends what a thread records when the thread ends: no other one could.
struct EndOfThread(ThreadId);

impl Drop for EndOfThread {
    fn drop(&mut self) {
        let mut recorder = recorder();
        let ours = match *recorder {
            Recorder::Records(thread, _) | Recorder::Orphaned(thread) => thread == self.0,
            Recorder::Idle => false,
        };
        if ours {
            *recorder = Recorder::Idle;
            if let Err(error) = ffi::stop() {
                tracing::warn!(%error, "a profile could not be ended with its thread");
            }
        }
    }
}

thread_local! {
    static END_OF_THREAD: EndOfThread = EndOfThread(std::thread::current().id());
}

static SESSIONS: AtomicU64 = AtomicU64::new(0);

/// As [`Profiling`], but may be carried by another thread, which cannot end it.
#[derive(Debug)]
pub(crate) struct Session {
    thread: ThreadId,
    number: u64,
    ended: bool,
}

impl Session {
    pub(crate) fn start(profiler: Profiler) -> Result<Self> {
        let thread = std::thread::current().id();
        let mut recorder = recorder();
        if *recorder == Recorder::Orphaned(thread) {
            ffi::stop()?;
            *recorder = Recorder::Idle;
        }
        if *recorder != Recorder::Idle {
            return Err(Error::CallOrder {
                call: "Profiler::start",
                state: "while another profile is being recorded".to_owned(),
                remedy: "stop or drop that one first, on its own thread: libtorch has one profiler",
            });
        }
        ffi::start(profiler.shapes, profiler.memory)?;
        // After libtorch's own, so that it ends before them.
        END_OF_THREAD.with(|_| {});
        let number = SESSIONS.fetch_add(1, Ordering::Relaxed);
        *recorder = Recorder::Records(thread, number);
        Ok(Self { thread, number, ended: false })
    }

    pub(crate) fn stop(mut self) -> Result<Profile> {
        self.end().map(Profile::of)
    }

    fn end(&mut self) -> Result<ffi::Seen> {
        self.ended = true;
        let mut recorder = recorder();
        if *recorder != Recorder::Records(self.thread, self.number) {
            return Err(Error::CallOrder {
                call: "Profiling::stop",
                state: "after the thread that started it has ended".to_owned(),
                remedy: "start and stop on one thread",
            });
        }
        if std::thread::current().id() != self.thread {
            *recorder = Recorder::Orphaned(self.thread);
            return Err(Error::CallOrder {
                call: "Profiling::stop",
                state: "on another thread than the one that started it".to_owned(),
                remedy: "start and stop on one thread; that one's next start() ends what goes on there",
            });
        }
        *recorder = Recorder::Idle;
        ffi::stop()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if !self.ended
            && let Err(error) = self.end()
        {
            tracing::warn!(%error, "a profile could not be ended");
        }
    }
}
