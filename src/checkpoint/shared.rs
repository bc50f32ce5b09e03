use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{ReentrantMutex, ReentrantMutexGuard};

use crate::error::{Error, Result};

/// How long a segment waits for another thread to leave the module: far longer than any
/// pass takes, so that only a circle of waits ends in the error.
const PATIENCE: Duration = Duration::from_secs(60);

/// A module that forward and recompute share, on whichever threads they run.
///
/// A clone is another handle of the same module. The lock is re-entrant: a segment may enter
/// itself on its own thread; other threads take turns.
pub struct Shared<M> {
    inner: Arc<ReentrantMutex<M>>,
}

impl<M: Send> Shared<M> {
    /// Shares a module.
    pub fn new(module: M) -> Self {
        Self { inner: Arc::new(ReentrantMutex::new(module)) }
    }

    /// Lends the module.
    ///
    /// # Errors
    /// [`Error::CallOrder`] where another thread does not leave it for a minute: it waits for
    /// this one.
    pub fn with<R>(&self, f: impl FnOnce(&M) -> R) -> Result<R> {
        Ok(f(&*self.lock()?))
    }

    /// The module, where no other handle and no graph still holds it; else the handle.
    ///
    /// # Errors
    /// The handle itself.
    pub fn into_inner(self) -> Result<M, Self> {
        Arc::try_unwrap(self.inner).map(ReentrantMutex::into_inner).map_err(|inner| Self { inner })
    }

    pub(super) fn lock(&self) -> Result<ReentrantMutexGuard<'_, M>> {
        self.inner.try_lock_for(PATIENCE).ok_or_else(|| Error::CallOrder {
            call: "a checkpointed segment",
            state: "while another thread, which waits for this one, is inside its module".to_owned(),
            remedy: "do not run backward inside a segment whose graph leaves its thread",
        })
    }
}

impl<M> Clone for Shared<M> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<M: fmt::Debug> fmt::Debug for Shared<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.inner.try_lock() {
            Some(module) => module.fmt(f),
            None => f.write_str("a module that another thread is in"),
        }
    }
}
