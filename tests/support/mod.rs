//! The allocator, the default generator and the engine are process-wide: one test at a time.

use std::sync::{Mutex, MutexGuard};

static SERIAL: Mutex<()> = Mutex::new(());

/// Takes the one lock and seeds the generator.
pub fn serial() -> MutexGuard<'static, ()> {
    let guard = SERIAL.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    tch::manual_seed(0);
    guard
}
