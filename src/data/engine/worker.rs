//! What a worker does; without workers the consumer does it.

use std::sync::Arc;

use tch::Device;

use super::work::Task;
use super::{Engine, Pipeline};
use crate::data::caught::caught;
use crate::data::collate::Collate;
use crate::data::slot::{Share, Slot};
use crate::data::{Random, transfer};
use crate::error::Result;

impl<J, S, C> Engine<J, S, C>
where
    J: Send + Sync + 'static,
    S: Send + 'static,
    C: Collate<S>,
{
    /// A worker's life.
    pub(super) fn live(&self) {
        crate::ffi::threads::alone();
        let _role = crate::memory::Role::Other.scope();
        loop {
            let mut work = self.lock();
            // Under the lock: whoever stops has then not yet asked who is in a read.
            if self.is_stopped() {
                return;
            }
            match work.task() {
                Some(task) => {
                    drop(work);
                    // All that can fail is told where it failed; this is what a drop of the user's may do.
                    let _ = caught("a data thread", || {
                        self.run(task);
                        Ok(())
                    });
                }
                None => drop(self.more.wait(work)),
            }
        }
    }

    pub(super) fn run(&self, task: Task<J, S, C>) {
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
            // What becomes of these rows now is for others to say.
            if !slot.wants(share) {
                break;
            }
            let Some(Some((place, job))) = slot.jobs.get(*row) else { continue };
            let sample = self.sample(job, slot.after.epoch, *place);
            let put = sample.and_then(|sample| slot.put(share, *row, sample, collate, buffers));
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
        if slot.leave(share, |partial, present| self.end(partial, present)) {
            // The lock is taken so that the consumer is not between its look and its wait.
            drop(self.lock());
            self.ready.notify_all();
        }
    }

    fn sample(&self, job: &J, epoch: u64, place: u64) -> Result<S> {
        let mut random = Random::of_sample(self.pipeline.seed, epoch, place);
        caught("a transform", || (self.pipeline.decode)(job, &mut random))
    }

    fn end(&self, partial: &mut C::Partial, present: &[usize]) -> Result<C::Batch> {
        let Pipeline { collate, device, .. } = &self.pipeline;
        caught("collating a batch", || {
            let batch = collate.end(partial, present)?;
            match device {
                Device::Cpu => Ok(batch),
                device => transfer::pinned(&batch, *device),
            }
        })
    }
}
