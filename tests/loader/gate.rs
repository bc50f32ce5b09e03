//! Samples that wait until a test lets them go on, so that it knows what workers are at.

use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// A count that only grows, and that threads wait for.
#[derive(Default)]
pub struct Gate {
    count: Mutex<u64>,
    changed: Condvar,
}

impl Gate {
    pub fn add(&self) {
        *self.count.lock().unwrap() += 1;
        self.changed.notify_all();
    }

    /// Until it is at least so much. A test whose workers never come says so.
    pub fn wait_for(&self, least: u64) {
        assert!(self.reaches(least, Duration::from_secs(20)), "nobody came");
    }

    pub fn reaches(&self, least: u64, within: Duration) -> bool {
        let count = self.count.lock().unwrap();
        let (count, _) = self.changed.wait_timeout_while(count, within, |count| *count < least).unwrap();
        *count >= least
    }
}
