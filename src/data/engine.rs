use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use tch::Device;

use super::buffers::Buffers;
use super::collate::Collate;
use super::feed::Feed;
use super::slot::{Done, Front, Share, Slot};
use super::{Interrupt, Origin, Random, transfer};
use crate::error::{Error, Result};
use crate::step::DataPosition;

/// How a job becomes a sample, and samples a batch.
pub(super) struct Pipeline<J, S, C: Collate<S>> {
    pub(super) decode: Box<Decode<J, S>>,
    pub(super) origin: Box<dyn Fn(&J) -> Origin + Send + Sync>,
    pub(super) collate: C,
    /// Where batches go in the end.
    pub(super) device: Device,
    pub(super) buffers: Buffers,
    pub(super) seed: u64,
}

pub(super) type Decode<J, S> = dyn Fn(&J, &mut Random) -> Result<S> + Send + Sync;

/// What workers and the consumer share.
pub(super) struct Engine<J, S, C: Collate<S>> {
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
    stopped: Arc<AtomicBool>,
    prefetch: usize,
    /// Rows that a worker takes at once.
    share: usize,
}

struct Work<J, S, C: Collate<S>> {
    building: VecDeque<Arc<Slot<J, S, C>>>,
    /// A worker plans the next batch.
    feeding: bool,
    /// The epoch has no more batches to plan; no epoch is begun at first.
    ended: bool,
    /// Bumped where the position is set anew: plans of before are void.
    generation: u64,
    /// The consumer knows that the batch in front did not fit.
    told: bool,
    /// Nothing else is made until the batch in front is.
    tight: bool,
    /// What ended the epoch before its end.
    failed: Option<Error>,
}

/// One thing to do.
enum Task<J, S, C: Collate<S>> {
    Fill(Arc<Slot<J, S, C>>, Share),
    Plan(u64),
}

/// What the consumer gets.
pub(super) enum Next<B> {
    /// With the position after it.
    Batch(Done<B>, DataPosition),
    /// Memory ran out, and the batch is still there; or the source panicked, and the epoch ends.
    Failed(Error),
    EpochEnds,
}

impl<J, S, C> Engine<J, S, C>
where
    J: Send + Sync + 'static,
    S: Send + 'static,
    C: Collate<S>,
{
    pub(super) fn new(
        pipeline: Pipeline<J, S, C>,
        feed: Box<dyn Feed<Job = J>>,
        stopped: Arc<AtomicBool>,
        prefetch: usize,
        share: usize,
    ) -> Self {
        let work = Work {
            building: VecDeque::new(),
            feeding: false,
            ended: true,
            generation: 0,
            told: false,
            tight: false,
            failed: None,
        };
        Self {
            pipeline,
            interrupt: feed.interrupt(),
            order: feed.order(),
            samples: feed.samples(),
            feed: Mutex::new(feed),
            work: Mutex::new(work),
            more: Condvar::new(),
            ready: Condvar::new(),
            stopped,
            prefetch,
            share,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Work<J, S, C>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_feed(&self) -> MutexGuard<'_, Box<dyn Feed<Job = J>>> {
        self.feed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops what is built, and plans from a position on.
    pub(super) fn begin(&self, from: DataPosition) -> Result<()> {
        {
            let mut work = self.lock();
            work.generation += 1;
            work.building.clear();
            work.ended = true;
            (work.told, work.tight) = (false, false);
            work.failed = None;
        }
        let mut feed = self.lock_feed();
        caught("opening the data", || feed.begin(from))?;
        self.lock().ended = false;
        self.more.notify_all();
        Ok(())
    }

    /// Which order positions count in.
    pub(super) fn order(&self) -> u64 {
        self.order
    }

    /// Samples of an epoch, where that is known.
    pub(super) fn samples(&self) -> Option<u64> {
        self.samples
    }

    /// Whether the next batch is there already.
    pub(super) fn is_ready(&self) -> bool {
        self.lock().building.front().is_some_and(|slot| slot.is_done())
    }

    /// Ends every worker; one that waits in a read is woken where that can be done.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        if let Interrupt::With(wake) = &self.interrupt {
            wake();
        }
        // The lock is taken so that no worker is between its look at `stopped` and its wait.
        drop(self.lock());
        self.more.notify_all();
    }

    /// Whether a worker may be in a read that nothing ends.
    pub(super) fn may_hang(&self) -> bool {
        matches!(self.interrupt, Interrupt::Impossible) && self.lock().feeding
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// A worker's life.
    pub(super) fn work(&self) {
        crate::ffi::threads::alone();
        let _role = crate::memory::Role::Other.scope();
        loop {
            let mut work = self.lock();
            // Under the lock: whoever stops has then not yet asked who is in a read.
            if self.is_stopped() {
                return;
            }
            match self.task(&mut work) {
                Some(task) => {
                    drop(work);
                    self.run(task);
                }
                None => drop(self.more.wait(work)),
            }
        }
    }

    fn task(&self, work: &mut Work<J, S, C>) -> Option<Task<J, S, C>> {
        let most = if work.tight { 1 } else { usize::MAX };
        for slot in work.building.iter().take(most) {
            if let Some(share) = slot.share(self.share) {
                return Some(Task::Fill(slot.clone(), share));
            }
        }
        let full = work.tight || work.building.len() >= self.prefetch;
        if work.feeding || work.ended || full {
            return None;
        }
        work.feeding = true;
        Some(Task::Plan(work.generation))
    }

    fn run(&self, task: Task<J, S, C>) {
        match task {
            Task::Fill(slot, share) => self.fill(&slot, &share),
            Task::Plan(generation) => self.plan(generation),
        }
    }

    fn plan(&self, generation: u64) {
        let mut feed = self.lock_feed();
        let current = self.lock().generation == generation;
        let planned = if current { caught("reading the data", || Ok(feed.next())) } else { Ok(None) };
        let mut work = self.lock();
        work.feeding = false;
        if current && work.generation == generation {
            match planned {
                Ok(Some(planned)) => work.building.push_back(Arc::new(Slot::new(planned))),
                Ok(None) => work.ended = true,
                Err(error) => {
                    work.ended = true;
                    work.failed = Some(error);
                }
            }
        }
        drop(work);
        self.more.notify_all();
        self.ready.notify_all();
    }

    fn fill(&self, slot: &Slot<J, S, C>, share: &Share) {
        let Pipeline { collate, buffers, .. } = &self.pipeline;
        for (done, row) in share.rows.iter().enumerate() {
            if self.is_stopped() {
                return;
            }
            let Some(Some((place, job))) = slot.jobs.get(*row) else { continue };
            let sample = self.sample(job, slot.after.epoch, *place);
            let put = sample.and_then(|sample| {
                caught("collating a batch", || slot.put(share, *row, sample, collate, buffers))
            });
            match put {
                Ok(()) => {}
                Err(error) if error.is_out_of_memory() => {
                    slot.give_up(share, &share.rows[done..], error);
                    break;
                }
                Err(error) => {
                    let origin = caught("naming a record", || Ok((self.pipeline.origin)(job)));
                    slot.refuse(share, *row, error.at_record(|| origin.unwrap_or_default()));
                }
            }
        }
        let told = slot.leave(share, |partial, present| {
            caught("collating a batch", || {
                let batch = collate.end(partial, present)?;
                match self.pipeline.device {
                    Device::Cpu => Ok(batch),
                    device => transfer::pinned(&batch, device),
                }
            })
        });
        if told {
            // The lock is taken so that the consumer is not between its look and its wait.
            drop(self.lock());
            self.ready.notify_all();
        }
    }

    fn sample(&self, job: &J, epoch: u64, place: u64) -> Result<S> {
        let mut random = Random::of_sample(self.pipeline.seed, epoch, place);
        caught("a transform", || (self.pipeline.decode)(job, &mut random))
    }

    /// The next batch in order; without workers it is built here.
    pub(super) fn next(&self, workers: usize) -> Next<C::Batch> {
        let mut work = self.lock();
        // Told of a batch that did not fit, the consumer comes again.
        let mut tried = std::mem::take(&mut work.told) && self.make_room(&mut work);
        loop {
            let front = work.building.front().cloned();
            match front.as_ref().map(|slot| slot.front()) {
                Some(Front::Done(done)) => {
                    let after = front.map(|slot| slot.after).unwrap_or_default();
                    work.building.pop_front();
                    work.tight = false;
                    work.building.iter().for_each(|slot| slot.feed_again());
                    drop(work);
                    self.more.notify_all();
                    return Next::Batch(done, after);
                }
                Some(Front::Starved) => match front.filter(|_| tried).and_then(|slot| slot.tell()) {
                    Some(error) => {
                        work.told = true;
                        return Next::Failed(error);
                    }
                    None => tried = self.make_room(&mut work),
                },
                None if work.ended && !work.feeding => {
                    return work.failed.take().map_or(Next::EpochEnds, Next::Failed);
                }
                _ => {}
            }
            work = self.wait_or_work(work, workers);
        }
    }

    /// Lets the batch in front try again, once those behind it hold nothing: what was made ahead is
    /// no reason for it not to fit. False while a worker still has some of it.
    fn make_room(&self, work: &mut Work<J, S, C>) -> bool {
        work.tight = true;
        // Each of them is asked, also where one is busy.
        let busy = work.building.iter().skip(1).filter(|slot| !slot.hold()).count();
        let free = busy == 0;
        if free {
            work.building.front().inspect(|slot| slot.feed_again());
            self.more.notify_all();
        }
        free
    }

    fn wait_or_work<'a>(
        &'a self,
        mut work: MutexGuard<'a, Work<J, S, C>>,
        workers: usize,
    ) -> MutexGuard<'a, Work<J, S, C>> {
        if workers > 0 {
            return self.ready.wait(work).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(task) = self.task(&mut work) {
            drop(work);
            self.run(task);
            return self.lock();
        }
        work
    }
}

/// Runs a user's code; its panic is an error.
fn caught<R>(place: &'static str, body: impl FnOnce() -> Result<R>) -> Result<R> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => result,
        Err(payload) => Err(Error::from_panic(payload, place)),
    }
}
