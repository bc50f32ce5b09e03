use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::step::WindowRule;

/// What a stack and its [`Windows`](super::Windows) agree on without borrowing each other.
#[derive(Debug)]
pub(super) struct Clock {
    rule: Mutex<WindowRule>,
    /// Bumped when the stack's window is no longer the one that `Windows` counts.
    breaks: AtomicU64,
    /// Bumped by each load of a state.
    loads: AtomicU64,
    /// Micro-batches done in the open window.
    done: AtomicU64,
    /// A window that came from a snapshot: its micro-batches and their tokens. The next
    /// `Windows` goes on with it.
    resumed: Mutex<Option<(usize, u64)>>,
    /// Whether a window's number of micro-batches has to be known when it begins.
    whole: AtomicBool,
}

impl Clock {
    pub(super) fn new(rule: WindowRule) -> Arc<Self> {
        Arc::new(Self {
            rule: Mutex::new(rule),
            breaks: AtomicU64::new(0),
            loads: AtomicU64::new(0),
            done: AtomicU64::new(0),
            resumed: Mutex::new(None),
            whole: AtomicBool::new(false),
        })
    }

    pub(super) fn set_whole(&self, whole: bool) {
        self.whole.store(whole, Ordering::Release);
    }

    pub(super) fn whole(&self) -> bool {
        self.whole.load(Ordering::Acquire)
    }

    pub(super) fn set_rule(&self, rule: WindowRule) {
        *self.rule.lock().unwrap_or_else(PoisonError::into_inner) = rule;
    }

    pub(super) fn rule(&self) -> WindowRule {
        *self.rule.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn advance(&self, done: usize) {
        self.done.store(done as u64, Ordering::Release);
    }

    /// A micro-batch failed: the window has `done` left.
    pub(super) fn broke(&self, done: usize) {
        self.advance(done);
        self.breaks.fetch_add(1, Ordering::AcqRel);
    }

    /// The stack's window is now one from a snapshot, or there is none.
    pub(super) fn resume(&self, window: Option<(usize, u64)>) {
        self.broke(window.map_or(0, |(done, _)| done));
        *self.resumed.lock().unwrap_or_else(PoisonError::into_inner) = window;
        self.loads.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn loads(&self) -> u64 {
        self.loads.load(Ordering::Acquire)
    }

    pub(super) fn take_resumed(&self) -> Option<(usize, u64)> {
        self.resumed.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(super) fn breaks(&self) -> u64 {
        self.breaks.load(Ordering::Acquire)
    }

    pub(super) fn done(&self) -> usize {
        self.done.load(Ordering::Acquire) as usize
    }
}
