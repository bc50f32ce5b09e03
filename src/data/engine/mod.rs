//! Batches in the making: what workers and the consumer share, and what each of them does with it.

mod consumer;
mod work;
mod worker;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use tch::Device;

use self::work::Work;
use super::buffers::Buffers;
use super::collate::Collate;
use super::feed::{Calls, Feed};
use super::{Interrupt, Origin, Random};
use crate::error::Result;

/// How a job becomes a sample, and samples a batch.
pub(crate) struct Pipeline<J, S, C: Collate<S>> {
    pub(crate) decode: Box<Decode<J, S>>,
    pub(crate) origin: Box<dyn Fn(&J) -> Origin + Send + Sync>,
    pub(crate) collate: C,
    /// Where batches go in the end.
    pub(crate) device: Device,
    pub(crate) buffers: Buffers,
    pub(crate) seed: u64,
}

pub(crate) type Decode<J, S> = dyn Fn(&J, &mut Random) -> Result<S> + Send + Sync;

/// What workers and the consumer share.
pub(crate) struct Engine<J, S, C: Collate<S>> {
    pipeline: Pipeline<J, S, C>,
    feed: Mutex<Box<dyn Feed<Job = J>>>,
    interrupt: Interrupt,
    /// Which order positions count in.
    order: u64,
    /// Samples of an epoch, where that is known.
    samples: Option<u64>,
    work: Mutex<Work<J, S, C>>,
    /// Workers wait for work.
    more: Condvar,
    /// The consumer waits for the batch in front.
    ready: Condvar,
    calls: Arc<Calls>,
}

impl<J, S, C> Engine<J, S, C>
where
    J: Send + Sync + 'static,
    S: Send + 'static,
    C: Collate<S>,
{
    /// With up to `prefetch` batches ready or in the making, of which a worker takes `share` rows at once.
    pub(crate) fn new(
        pipeline: Pipeline<J, S, C>,
        feed: Box<dyn Feed<Job = J>>,
        calls: Arc<Calls>,
        prefetch: usize,
        share: usize,
    ) -> Self {
        Self {
            pipeline,
            interrupt: feed.interrupt(),
            order: feed.order(),
            samples: feed.samples(),
            feed: Mutex::new(feed),
            work: Mutex::new(Work::new(prefetch, share)),
            more: Condvar::new(),
            ready: Condvar::new(),
            calls,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Work<J, S, C>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_feed(&self) -> MutexGuard<'_, Box<dyn Feed<Job = J>>> {
        self.feed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopped(&self) -> bool {
        self.calls.is_stopped()
    }
}
