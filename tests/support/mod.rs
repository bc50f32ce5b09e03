//! What tests share: one lock, since the allocator, the default generator and the engine's
//! hooks are process-wide.
#![allow(dead_code)]

use std::sync::{Mutex, MutexGuard, PoisonError};

static LOCK: Mutex<()> = Mutex::new(());

/// Keeps other tests out and seeds the generator.
pub fn serial() -> MutexGuard<'static, ()> {
    let guard = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    tch::manual_seed(0);
    guard
}
