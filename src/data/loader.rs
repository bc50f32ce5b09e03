use std::sync::Arc;
use std::thread::JoinHandle;

use super::bad::BadRecords;
use super::builder::LoaderBuilder;
use super::deliver::{Deliver, Done, Next};
use super::feed::{self, Deal};
use super::loaded::Loaded;
use super::stage::{Mover, Stage};
use super::stream_feed::StreamJob;
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
    bad: BadRecords,
    position: DataPosition,
    begun: bool,
    /// It was told that the epoch cannot be begun.
    refused: bool,
    /// What comes before anything new.
    stage: Stage<B>,
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

impl<B: 'static> Loader<B> {
    pub(super) fn over(
        engine: Arc<dyn Deliver<B>>,
        deal: Deal,
        workers: usize,
        bad: BadRecords,
        mover: Option<Box<dyn Mover<B>>>,
    ) -> Self {
        Self {
            engine,
            deal,
            workers,
            threads: Vec::new(),
            bad,
            position: DataPosition::default(),
            begun: false,
            refused: false,
            stage: Stage::new(mover),
        }
    }

    /// The position after the batch that was given last. What *training* consumed is
    /// [`Stack::data_position`](crate::Stack::data_position).
    pub fn data_position(&self) -> DataPosition {
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

    /// Batches of a whole epoch that this rank gets, for a schedule; `None` for a stream. Fewer come
    /// where all records of one are bad.
    ///
    /// ```
    /// use memfit::data::{InMemory, Loader, Tail};
    ///
    /// let of_two = |tail| Loader::new(InMemory::of(vec![0_i64; 10])).batch(4).rank(1, 2).tail(tail).build();
    /// assert_eq!(of_two(Tail::Keep)?.batches(), Some(2)); // of 4 and 1
    /// assert_eq!(of_two(Tail::Drop)?.batches(), Some(1));
    /// # Ok::<(), memfit::Error>(())
    /// ```
    pub fn batches(&self) -> Option<u64> {
        self.engine.samples().map(|samples| self.deal.batches(samples))
    }

    /// Bad records that were passed over so far, of all epochs.
    pub fn passed_over(&self) -> u64 {
        self.bad.passed_over()
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
        self.stage.clear();
        self.bad.forget_ahead();
        (self.begun, self.refused) = (false, false);
        self.engine.begin(position)?;
        if position.samples == 0 || position.epoch != self.position.epoch {
            self.bad.begin_epoch();
        }
        self.position = DataPosition { order: self.engine.order(), ..position };
        self.begun = true;
        Ok(())
    }

    fn begin(&mut self) -> Result<()> {
        self.engine.begin(self.position)?;
        self.begun = true;
        if self.position.samples == 0 {
            self.bad.begin_epoch();
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
        let (of_records, mut last): (Vec<_>, Vec<_>) = errors.into_iter().partition(Error::is_of_record);
        let bad = of_records.len();
        let told = self.bad.told_of(of_records);
        last.splice(0..0, own);
        if batch.is_none() && last.is_empty() {
            last.extend(self.bad.nothing_left(bad));
        }
        told.into_iter().for_each(|error| self.stage.push_error(error));
        batch.into_iter().for_each(|batch| self.stage.push_batch(Loaded { batch, position: after }));
        last.into_iter().for_each(|error| self.stage.push_error(error));
        self.stage.end_batch(after);
    }

    /// Gives what is there, and sends the next batch on its way where it is ready.
    fn give(&mut self) -> Option<Result<Loaded<B>>> {
        let (item, after) = self.stage.give()?;
        if let Some(after) = after {
            self.position = after;
            self.bad.settle();
        }
        if item.is_ok() {
            self.send_ahead();
        }
        Some(item)
    }

    /// Waits for nothing: a batch that is not ready yet is sent when it is asked for.
    fn send_ahead(&mut self) {
        if !self.stage.has_room_ahead() || !self.engine.is_ready() {
            return;
        }
        if let Next::Batch(done, after) = self.engine.next(self.workers) {
            self.take(done, after);
        }
        // One that does not fit yet is tried again, and told of, when it is asked for.
        let _ = self.stage.send();
    }
}

impl<B: 'static> Iterator for Loader<B> {
    type Item = Result<Loaded<B>>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(item) = self.give() {
                return Some(item);
            }
            // A loop that goes on after errors ends here, at the same epoch's start.
            if std::mem::take(&mut self.refused) {
                return None;
            }
            let ready = if self.begun { Ok(()) } else { self.begin() };
            if let Err(error) = ready.and_then(|()| self.start_threads()) {
                self.refused = true;
                return Some(Err(error));
            }
            match self.engine.next(self.workers) {
                Next::Batch(done, after) => self.take(done, after),
                Next::Failed(error) => return Some(Err(error)),
                Next::EpochEnds => {
                    self.bad.settle();
                    self.position = DataPosition::at_epoch(self.position.epoch.saturating_add(1));
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
