//! What the loader asks of the engine, on the training's own thread.

use std::sync::{MutexGuard, PoisonError};

use super::Engine;
use super::work::Work;
use crate::data::Interrupt;
use crate::data::caught::caught;
use crate::data::collate::Collate;
use crate::data::deliver::{Deliver, Next};
use crate::data::slot::Front;
use crate::error::Result;
use crate::step::DataPosition;

impl<J, S, C> Deliver<C::Batch> for Engine<J, S, C>
where
    J: Send + Sync + 'static,
    S: Send + 'static,
    C: Collate<S>,
{
    fn begin(&self, from: DataPosition) -> Result<()> {
        self.lock().abandon();
        // A worker that fills a shuffle buffer leaves it at the next record.
        self.calls.begin_elsewhere();
        let mut feed = self.lock_feed();
        self.calls.are_heard();
        caught("opening the data", || feed.begin(from))?;
        self.lock().ended = false;
        self.more.notify_all();
        Ok(())
    }

    fn next(&self, workers: usize) -> Next<C::Batch> {
        let mut work = self.lock();
        // Told of a batch that did not fit, the consumer comes again.
        let mut tried = std::mem::take(&mut work.told) && self.make_room(&mut work);
        loop {
            let front = work.building.front().cloned();
            match front.as_ref().map(|slot| slot.front()) {
                Some(Front::Done(done)) => {
                    let after = front.map(|slot| slot.after).unwrap_or_default();
                    work.give_front();
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

    fn order(&self) -> u64 {
        self.order
    }

    fn samples(&self) -> Option<u64> {
        self.samples
    }

    fn is_ready(&self) -> bool {
        self.lock().building.front().is_some_and(|slot| slot.is_done())
    }

    fn work(&self) {
        self.live();
    }

    fn stop(&self) {
        self.calls.stop();
        if let Interrupt::With(wake) = &self.interrupt {
            wake();
        }
        // The lock is taken so that no worker is between its look at the call and its wait.
        drop(self.lock());
        self.more.notify_all();
    }

    fn may_hang(&self) -> bool {
        matches!(self.interrupt, Interrupt::Impossible) && self.lock().feeding
    }
}

impl<J, S, C> Engine<J, S, C>
where
    J: Send + Sync + 'static,
    S: Send + 'static,
    C: Collate<S>,
{
    fn make_room(&self, work: &mut Work<J, S, C>) -> bool {
        let free = work.make_room();
        if free {
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
        if let Some(task) = work.task() {
            drop(work);
            self.run(task);
            return self.lock();
        }
        work
    }
}
