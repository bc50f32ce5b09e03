use std::fmt::{self, Debug, Formatter};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::lines::Lines;
use super::reading::Reading;
use super::source::{Here, Source};
use super::watch::{OnReading, Watch};
use super::{Monitor, Shared, run};
use crate::error::{Error, Result};

/// Settings of a [`Monitor`], made by [`Monitor::every`].
#[must_use = "nothing is watched before start"]
pub struct MonitorConfig {
    interval: Duration,
    warn_at: f64,
    margin: f64,
    lines: Option<PathBuf>,
    on_reading: Option<OnReading>,
}

impl MonitorConfig {
    pub(super) fn new(interval: Duration) -> Self {
        Self { interval, warn_at: 0.9, margin: 0.05, lines: None, on_reading: None }
    }

    /// Appends each reading to a file as one line of JSON, complete when the reading is over.
    ///
    /// Times are in seconds since the start and since 1970, everything else is whole bytes;
    /// `docs/system.md` lists the fields. Lines come behind those that the file has. Where
    /// writing fails the monitor goes on, and so does writing once there is room;
    /// [`Monitor::stop`] returns the first failure.
    pub fn write_json_lines(self, path: impl Into<PathBuf>) -> Self {
        Self { lines: Some(path.into()), ..self }
    }

    /// Calls a function with each reading, on the monitor's thread. While it runs no reading is
    /// taken. One that panics is not called again, and [`Monitor::stop`] returns its panic.
    pub fn on_reading(self, on_reading: impl FnMut(&Reading) + Send + 'static) -> Self {
        Self { on_reading: Some(Box::new(on_reading)), ..self }
    }

    /// Warns once this share of the machine's RAM, or of the control group's limit, is in use;
    /// 0.9 unless set. Page cache is left out, since it gives way.
    pub fn warn_at(self, share: f64) -> Self {
        Self { warn_at: share, ..self }
    }

    /// Warns again only after the share in use was below [`warn_at`](Self::warn_at) by this
    /// much; 0.05 unless set.
    pub fn margin(self, share: f64) -> Self {
        Self { margin: share, ..self }
    }

    /// Takes the first reading and starts the thread.
    ///
    /// # Errors
    /// [`Error::Config`] for an interval of zero, a share to warn at outside of 0 to 1, a margin
    /// that is negative or not below that share; [`Error::Io`] where the file cannot be opened;
    /// [`Error::Unsupported`] where the system gives no thread.
    pub fn start(self) -> Result<Monitor> {
        self.start_from(|| Box::new(Here::new()))
    }

    pub(super) fn start_from(self, source: impl FnOnce() -> Box<dyn Source>) -> Result<Monitor> {
        self.check()?;
        let lines = self.lines.as_deref().map(Lines::open).transpose()?;
        let mut watch = Watch::new(source(), self.warn_at, self.margin).telling(lines, self.on_reading);
        let first = watch.look();
        let shared = Arc::new(Shared::new(&first));
        let (theirs, interval) = (shared.clone(), self.interval);
        let run = move || run(watch, &theirs, first, interval);
        let thread = std::thread::Builder::new().name("memfit-monitor".to_owned()).spawn(run);
        let thread = thread.map_err(|error| Error::Unsupported {
            what: "a monitor".to_owned(),
            place: format!("where the system gives no thread ({error})"),
            remedy: "raise the limit on threads (ulimit -u), or read memory::stats in the loop".to_owned(),
        })?;
        Ok(Monitor { shared, thread: Some(thread) })
    }

    fn check(&self) -> Result<()> {
        if self.interval.is_zero() {
            return Err(Error::config("Monitor::every", "the interval must be above zero"));
        }
        if !(self.warn_at > 0.0 && self.warn_at <= 1.0) {
            let problem = format!("{} is not a share above 0 and up to 1", self.warn_at);
            return Err(Error::config("warn_at", problem));
        }
        if !(self.margin >= 0.0 && self.margin < self.warn_at) {
            let problem =
                format!("{} is not between 0 and the share to warn at, {}", self.margin, self.warn_at);
            return Err(Error::config("margin", problem));
        }
        Ok(())
    }
}

impl Debug for MonitorConfig {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("MonitorConfig");
        fields.field("interval", &self.interval).field("warn_at", &self.warn_at);
        fields.field("margin", &self.margin).field("lines", &self.lines).finish_non_exhaustive()
    }
}
