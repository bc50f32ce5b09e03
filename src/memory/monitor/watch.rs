use std::panic::{AssertUnwindSafe, catch_unwind};

use super::lines::Lines;
use super::reading::{Reading, Warning};
use super::source::Source;
use crate::error::{Error, Result};
use crate::memory::bytes::readable;
use crate::memory::system::Pool;

/// What a user wants to be told of each reading.
pub(super) type OnReading = Box<dyn FnMut(&Reading) + Send>;

/// Looks at figures, warns of them and passes them on; when it looks is another's affair.
pub(super) struct Watch {
    source: Box<dyn Source>,
    alarms: [Alarm; 2],
    lines: Option<Lines>,
    on_reading: Option<OnReading>,
}

impl Watch {
    /// Warns from the share `warn_at` of a memory on, and again after it was below by `margin`.
    pub(super) fn new(source: Box<dyn Source>, warn_at: f64, margin: f64) -> Self {
        let alarm = |pool| Alarm { pool, warn_at, margin, ringing: false };
        Self { source, alarms: [Pool::Host, Pool::Cgroup].map(alarm), lines: None, on_reading: None }
    }

    pub(super) fn telling(self, lines: Option<Lines>, on_reading: Option<OnReading>) -> Self {
        Self { lines, on_reading, ..self }
    }

    /// One look.
    pub(super) fn look(&mut self) -> Reading {
        let mut reading = self.source.read();
        for alarm in &mut self.alarms {
            reading.warnings.extend(alarm.look(&reading));
        }
        reading
    }

    /// Passes a reading on. What fails is returned, the first of it, and the rest logged.
    pub(super) fn tell(&mut self, reading: &Reading) -> Result<()> {
        let written = self.lines.as_mut().map_or(Ok(()), |lines| lines.write(reading));
        let told = self.call(reading);
        match (written, told) {
            (Err(first), Err(second)) => {
                tracing::error!(error = %second, "a monitor cannot tell of its reading");
                Err(first)
            }
            (written, told) => written.and(told),
        }
    }

    /// Calls the user's function; one that panicked is not called again.
    fn call(&mut self, reading: &Reading) -> Result<()> {
        let Some(mut on_reading) = self.on_reading.take() else { return Ok(()) };
        match catch_unwind(AssertUnwindSafe(|| on_reading(reading))) {
            Ok(()) => {
                self.on_reading = Some(on_reading);
                Ok(())
            }
            Err(payload) => Err(Error::from_panic(payload, "Monitor's on_reading")),
        }
    }
}

/// One memory that is looked after.
struct Alarm {
    pool: Pool,
    warn_at: f64,
    margin: f64,
    ringing: bool,
}

impl Alarm {
    fn look(&mut self, reading: &Reading) -> Option<Warning> {
        let (used, total) = self.figures(reading)?;
        let share = used as f64 / total as f64;
        if self.ringing {
            self.ringing = share >= self.warn_at - self.margin;
            return None;
        }
        self.ringing = share >= self.warn_at;
        if !self.ringing {
            return None;
        }
        let (bytes, limit, percent) = (readable(used), readable(total), (share * 100.0).round());
        match self.pool {
            Pool::Host => tracing::warn!(
                used,
                total,
                "host memory is nearly full: {bytes} of {limit} ({percent} %); beyond it programs are \
                 swapped out or killed"
            ),
            Pool::Cgroup => tracing::warn!(
                used,
                total,
                "the cgroup's memory is nearly full: {bytes} of {limit} ({percent} %); beyond it the \
                 process is killed"
            ),
        }
        Some(Warning { pool: self.pool, used, total, time: reading.time })
    }

    /// Bytes in use and bytes that there are, where both are known.
    fn figures(&self, reading: &Reading) -> Option<(u64, u64)> {
        let (used, total) = match self.pool {
            Pool::Host => {
                let total = reading.ram_total?;
                (total.saturating_sub(reading.ram_available?), total)
            }
            Pool::Cgroup => {
                let group = reading.cgroup.as_ref()?;
                (group.used(), group.limit?)
            }
        };
        (total > 0).then_some((used, total))
    }
}
