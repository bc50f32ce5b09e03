use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;

use super::builder::LoaderBuilder;
use super::collate::Collate;
use super::engine::{Engine, Next};
use super::feed::{self, Deal};
use super::loaded::Loaded;
use super::slot::Done;
use super::stream_feed::StreamJob;
use super::transfer::{Mover, Sent, Transfer};
use super::{Source, Stream};
use crate::error::{Error, Result};
use crate::step::DataPosition;

/// Batches of an epoch, one after the other, made ahead by threads.
///
/// An iterator of `Result<Loaded<B>>`. It ends where the epoch ends; the next call begins the next
/// epoch, so that `for micro in training.try_windows(&mut loader)` is one epoch. Where an epoch cannot
/// be begun, an error and an end come, and the next call tries the same epoch again. See the
/// [module](super).
pub struct Loader<B> {
    engine: Arc<dyn Deliver<B>>,
    deal: Deal,
    workers: usize,
    threads: Vec<JoinHandle<()>>,
    bad: Bad,
    passed_over: u64,
    /// Of this epoch.
    passed_over_here: u64,
    position: DataPosition,
    begun: bool,
    /// It was told that the epoch cannot be begun.
    refused: bool,
    /// What comes before anything new: errors of a batch, then the batch.
    waiting: VecDeque<Waiting<B>>,
    /// Where batches go to a device.
    mover: Option<Mover<B>>,
}

/// What is given next.
enum Waiting<B> {
    /// With the position to go on from, where it is the last of its batch.
    Error(Error, Option<DataPosition>),
    /// On the host.
    Batch(Loaded<B>),
    /// On its way to the device.
    Sent(Sent<B>),
}

/// What becomes of a record that cannot be used.
#[derive(Clone, Copy, Debug)]
pub(super) enum Bad {
    Tell,
    PassOver { most: u64 },
}

/// An engine, whatever its jobs and samples are.
pub(super) trait Deliver<B>: Send + Sync {
    fn begin(&self, from: DataPosition) -> Result<()>;
    fn next(&self, workers: usize) -> Next<B>;
    fn order(&self) -> u64;
    fn samples(&self) -> Option<u64>;
    fn is_ready(&self) -> bool;
    fn work(&self);
    fn stop(&self);
    fn may_hang(&self) -> bool;
}

impl<J, S, C> Deliver<C::Batch> for Engine<J, S, C>
where
    J: Send + Sync + 'static,
    S: Send + 'static,
    C: Collate<S>,
{
    fn begin(&self, from: DataPosition) -> Result<()> {
        self.begin(from)
    }

    fn next(&self, workers: usize) -> Next<C::Batch> {
        self.next(workers)
    }

    fn order(&self) -> u64 {
        self.order()
    }

    fn samples(&self) -> Option<u64> {
        self.samples()
    }

    fn is_ready(&self) -> bool {
        self.is_ready()
    }

    fn work(&self) {
        self.work();
    }

    fn stop(&self) {
        self.stop();
    }

    fn may_hang(&self) -> bool {
        self.may_hang()
    }
}

impl Loader<()> {
    /// Records of a [`Source`], by number.
    #[allow(clippy::new_ret_no_self)]
    pub fn new<S: Source>(source: S) -> LoaderBuilder<u64, S::Sample> {
        LoaderBuilder::of_source(source)
    }

    /// Records of a [`Stream`], as they come.
    pub fn stream<S: Stream>(stream: S) -> LoaderBuilder<StreamJob<S::Record>, S::Record> {
        LoaderBuilder::of_stream(stream)
    }
}

impl<B: Transfer + Send + 'static> Loader<B> {
    pub(super) fn over(
        engine: Arc<dyn Deliver<B>>,
        deal: Deal,
        workers: usize,
        bad: Bad,
        mover: Option<Mover<B>>,
    ) -> Self {
        Self {
            mover,
            engine,
            deal,
            workers,
            threads: Vec::new(),
            bad,
            passed_over: 0,
            passed_over_here: 0,
            position: DataPosition::default(),
            begun: false,
            refused: false,
            waiting: VecDeque::new(),
        }
    }

    /// The position after the batch that was given last. What *training* consumed is
    /// [`Stack::data_position`](crate::Stack::data_position).
    pub fn position(&self) -> DataPosition {
        self.position
    }

    /// The epoch that the next batch is of.
    pub fn epoch(&self) -> u64 {
        self.position.epoch
    }

    /// Samples of an epoch that all ranks get together; `None` for a stream.
    pub fn samples(&self) -> Option<u64> {
        self.engine.samples()
    }

    /// Batches of a whole epoch that this rank gets, for a schedule; `None` for a stream. One whose
    /// records are all bad does not come.
    pub fn batches(&self) -> Option<u64> {
        self.engine.samples().map(|samples| self.deal.batches(samples))
    }

    /// Bad records that were passed over so far, of all epochs.
    pub fn passed_over(&self) -> u64 {
        self.passed_over
    }

    /// Goes to a position: what comes next are the samples that remain after it. Batches that
    /// were made ahead are dropped. Batch size, workers and ranks may be others than those that the
    /// position was taken with.
    ///
    /// # Errors
    /// [`Error::State`] for a position of another order; those of opening the files. The loader is
    /// then where it was, at the start of what was not given yet.
    pub fn seek(&mut self, position: DataPosition) -> Result<()> {
        feed::check(position, self.engine.order())?;
        // What was made ahead is gone from here on, whether the files can be opened or not.
        self.waiting.clear();
        self.begun = false;
        self.engine.begin(position)?;
        self.position = DataPosition { order: self.engine.order(), ..position };
        self.passed_over_here = 0;
        self.begun = true;
        Ok(())
    }

    fn begin(&mut self) -> Result<()> {
        self.engine.begin(self.position)?;
        self.begun = true;
        if self.position.samples == 0 {
            self.passed_over_here = 0;
        }
        Ok(())
    }

    fn start_threads(&mut self) -> Result<()> {
        while self.threads.len() < self.workers {
            let engine = self.engine.clone();
            let name = format!("memfit-data-{}", self.threads.len());
            let thread = std::thread::Builder::new().name(name).spawn(move || engine.work());
            let io = |source| Error::Io { action: "starting", path: "a data thread".into(), source };
            self.threads.push(thread.map_err(io)?);
        }
        Ok(())
    }

    /// Errors of records first, each in its place, then the batch of the others, then what ends it.
    fn take(&mut self, done: Done<B>, after: DataPosition) {
        let Done { errors, batch, own } = done;
        let (of_records, fatal): (Vec<_>, Vec<_>) = errors.into_iter().partition(Error::is_of_record);
        for error in of_records {
            match self.bad {
                Bad::PassOver { most } if self.passed_over_here < most => {
                    tracing::warn!(%error, "a record was passed over");
                    self.passed_over += 1;
                    self.passed_over_here += 1;
                }
                _ => self.waiting.push_back(Waiting::Error(error, None)),
            }
        }
        self.waiting.extend(batch.map(|batch| Waiting::Batch(Loaded { batch, position: after })));
        self.waiting.extend(own.into_iter().chain(fatal).map(|error| Waiting::Error(error, None)));
        if let Some(Waiting::Error(_, position)) = self.waiting.back_mut() {
            *position = Some(after);
        }
    }

    /// Gives what waits first, and sends the next batch on its way where it is ready.
    fn give(&mut self) -> Option<Result<Loaded<B>>> {
        let item = match self.waiting.pop_front()? {
            Waiting::Error(error, after) => {
                self.position = after.unwrap_or(self.position);
                Err(error)
            }
            Waiting::Sent(sent) => self.land(sent),
            Waiting::Batch(loaded) => match self.send(loaded) {
                Ok(Waiting::Sent(sent)) => self.land(sent),
                Ok(Waiting::Batch(loaded)) => Ok(loaded),
                Ok(Waiting::Error(error, _)) | Err(error) => Err(error),
            },
        };
        if let Ok(loaded) = &item {
            self.position = loaded.position;
            self.send_ahead();
        }
        Some(item)
    }

    /// Queues a batch's copy to the device, where it is to go to one; where that fails it waits in
    /// front again.
    fn send(&mut self, loaded: Loaded<B>) -> Result<Waiting<B>> {
        let Some(mover) = &self.mover else { return Ok(Waiting::Batch(loaded)) };
        match mover.send(&loaded) {
            Ok(sent) => Ok(Waiting::Sent(sent)),
            Err(error) => {
                self.waiting.push_front(Waiting::Batch(loaded));
                Err(error)
            }
        }
    }

    fn land(&self, sent: Sent<B>) -> Result<Loaded<B>> {
        self.mover.as_ref().map_or_else(|| Err(Error::data("no device")), |mover| mover.land(sent))
    }

    fn send_ahead(&mut self) {
        if self.mover.is_none() || !self.waiting.is_empty() || !self.engine.is_ready() {
            return;
        }
        if let Next::Batch(done, after) = self.engine.next(self.workers) {
            self.take(done, after);
        }
        if let Some(Waiting::Batch(loaded)) =
            self.waiting.pop_front_if(|item| matches!(item, Waiting::Batch(_)))
        {
            // One that does not fit yet is tried again, and told of, when it is asked for.
            if let Ok(sent) = self.send(loaded) {
                self.waiting.push_front(sent);
            }
        }
    }
}

impl<B: Transfer + Send + 'static> Iterator for Loader<B> {
    type Item = Result<Loaded<B>>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(item) = self.give() {
                return Some(item);
            }
            let ready = if self.begun { Ok(()) } else { self.begin() };
            if let Err(error) = ready.and_then(|()| self.start_threads()) {
                // A loop that goes on after errors ends here, at the same epoch's start.
                self.refused = !self.refused;
                return self.refused.then_some(Err(error));
            }
            self.refused = false;
            match self.engine.next(self.workers) {
                Next::Batch(done, after) => self.take(done, after),
                Next::Failed(error) => return Some(Err(error)),
                Next::EpochEnds => {
                    self.position = DataPosition::at_epoch(self.position.epoch + 1);
                    self.begun = false;
                    return None;
                }
            }
        }
    }
}

impl<B> Drop for Loader<B> {
    fn drop(&mut self) {
        self.engine.stop();
        // A thread in a read that nothing ends is left behind; it ends when the read does.
        if self.engine.may_hang() {
            return;
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl<B> std::fmt::Debug for Loader<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loader")
            .field("position", &self.position)
            .field("workers", &self.workers)
            .finish_non_exhaustive()
    }
}
