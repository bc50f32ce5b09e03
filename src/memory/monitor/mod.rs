//! Figures of a run while it runs.

mod config;
mod lines;
mod reading;
mod source;
#[cfg(test)]
mod tests;
mod watch;

use std::fmt::{self, Debug, Formatter};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

pub use config::MonitorConfig;
pub use reading::{CgroupReading, DeviceReading, MonitorSummary, Reading, Warning};
use watch::Watch;

use crate::error::{Error, Result};

/// Warnings that a monitor remembers; older ones are dropped.
pub const WARNINGS: usize = 256;

/// Looks at the memory of devices, process, machine and control group again and again, on a
/// thread of its own.
///
/// Readings go to a file, to a function of yours, or wait to be asked for. Memory that is nearly
/// full is warned of through [`tracing`] before the kernel kills the process: once, and again
/// only after it had come down.
///
/// *Cost*: under a millisecond of one core per reading, for the counters and some twenty small
/// files of `/proc` and `/sys`. It takes no counted memory, draws no random number and waits for
/// no device.
///
/// *Limits*: what rises and falls between two readings is not seen, except the peaks that
/// allocators count themselves. The group to watch is looked up at the start. Outside Linux
/// only devices have figures.
///
/// ```
/// use memfit::memory::Monitor;
/// use std::time::Duration;
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let file = folder.path().join("memory.jsonl");
/// let monitor = Monitor::every(Duration::from_millis(500)).write_json_lines(&file).start()?;
/// // … train; for a progress bar:
/// println!("live on the CPU: {} B", monitor.latest().devices[0].live);
/// let summary = monitor.stop()?;
/// assert!(summary.readings >= 2); // one at the start, one at the end
/// # Ok::<(), memfit::Error>(())
/// ```
#[must_use = "a monitor ends when it is dropped"]
pub struct Monitor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Monitor {
    /// One that looks at each interval, once it is [started](MonitorConfig::start).
    pub fn every(interval: Duration) -> MonitorConfig {
        MonitorConfig::new(interval)
    }

    /// The newest reading.
    pub fn latest(&self) -> Reading {
        self.shared.state.lock().latest.clone()
    }

    /// The highest figures so far.
    pub fn summary(&self) -> MonitorSummary {
        self.shared.state.lock().summary.clone()
    }

    /// The warnings so far, the newest [`WARNINGS`] of them.
    pub fn warnings(&self) -> Vec<Warning> {
        self.shared.state.lock().summary.warnings.clone()
    }

    /// Takes a last reading, ends and returns the highest figures.
    ///
    /// # Errors
    /// The first failure of writing lines, or the panic of the function that is called with
    /// readings; [`Monitor::summary`], asked before, has the figures nevertheless.
    pub fn stop(mut self) -> Result<MonitorSummary> {
        self.end(Ending::AfterAReading)?;
        let mut state = self.shared.state.lock();
        state.failure.take().map_or_else(|| Ok(state.summary.clone()), Err)
    }

    /// Ends the thread and waits for that; the wait between readings ends at once.
    fn end(&mut self, ending: Ending) -> Result<()> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        self.shared.state.lock().ending = Some(ending);
        self.shared.woken.notify_all();
        // Dropped by the function that it calls, it cannot wait for itself.
        if thread.thread().id() == std::thread::current().id() {
            return Ok(());
        }
        thread.join().map_err(|payload| Error::from_panic(payload, "a monitor's thread"))
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let ended = self.end(Ending::Now);
        let failure = self.shared.state.lock().failure.take();
        if let Some(error) = ended.err().or(failure) {
            tracing::error!(%error, "a monitor failed");
        }
    }
}

impl Debug for Monitor {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Monitor").field("summary", &self.summary()).finish_non_exhaustive()
    }
}

/// What the monitor's thread and its owner both see.
struct Shared {
    state: Mutex<State>,
    woken: Condvar,
}

struct State {
    latest: Reading,
    summary: MonitorSummary,
    failure: Option<Error>,
    ending: Option<Ending>,
}

/// How the thread is to end.
#[derive(Clone, Copy)]
enum Ending {
    Now,
    AfterAReading,
}

impl Shared {
    fn new(first: &Reading) -> Self {
        let mut summary = MonitorSummary::default();
        summary.add(first);
        let state = State { latest: first.clone(), summary, failure: None, ending: None };
        Self { state: Mutex::new(state), woken: Condvar::new() }
    }

    fn publish(&self, reading: &Reading) {
        let mut state = self.state.lock();
        state.summary.add(reading);
        state.latest = reading.clone();
    }

    /// Keeps the first failure for `stop` and logs the others.
    fn failed(&self, error: Error) {
        let mut state = self.state.lock();
        match state.failure {
            Some(_) => tracing::debug!(%error, "a monitor failed again"),
            None => state.failure = Some(error),
        }
    }

    /// Waits until it is time for the next reading, or until the monitor is to end. A time that
    /// no clock reaches never comes.
    fn wait(&self, due: Option<Instant>) -> Option<Ending> {
        let mut state = self.state.lock();
        while state.ending.is_none() {
            match due {
                None => self.woken.wait(&mut state),
                Some(due) if self.woken.wait_until(&mut state, due).timed_out() => break,
                Some(_) => {}
            }
        }
        state.ending
    }
}

/// The thread.
fn run(mut watch: Watch, shared: &Shared, first: Reading, interval: Duration) {
    let tell = |watch: &mut Watch, reading: &Reading| {
        if let Err(error) = watch.tell(reading) {
            shared.failed(error);
        }
    };
    tell(&mut watch, &first);
    let mut due = Instant::now().checked_add(interval);
    loop {
        let ending = shared.wait(due);
        if matches!(ending, Some(Ending::Now)) {
            return;
        }
        let reading = watch.look();
        shared.publish(&reading);
        tell(&mut watch, &reading);
        if ending.is_some() {
            return;
        }
        // Readings that came too late are left out, not caught up with.
        let now = Instant::now();
        due = due.and_then(|due| due.checked_add(interval)).filter(|due| *due > now);
        due = due.or_else(|| now.checked_add(interval));
    }
}
