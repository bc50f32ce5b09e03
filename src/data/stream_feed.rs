use std::sync::Arc;

use super::feed::{Calls, Deal, Feed, Planned, PlannedSample, Whose};
use super::order::Order;
use super::random::mix;
use super::{Interrupt, Origin, Stream};
use crate::error::{Error, Result};
use crate::step::{DataPosition, Mark};

/// The records of a [`Stream`], in its order or shuffled block by block.
///
/// A block of the shuffle is as long as the shuffle buffer, and is the part of the stream that is
/// in memory. Where a block begins is known by counting, so a position needs no list of what
/// the buffer held.
pub(super) struct Records<S: Stream> {
    stream: S,
    deal: Deal,
    /// Records of a block; 1 without shuffling.
    block: u64,
    at: DataPosition,
    /// Records that were read ahead, by their places in the block; those that were given are gone.
    held: Vec<Option<Read<S>>>,
    order: Order,
    /// Where the block begins that `held` is of.
    start: u64,
    start_mark: Option<Mark>,
    /// What ended the stream before its end, until it is told.
    failed: Option<Error>,
    /// The stream is at its end, whatever it would say.
    ended: bool,
    /// Whether nobody waits for what is read.
    calls: Arc<Calls>,
}

type Read<S> = Result<StreamJob<<S as Stream>::Record>>;

/// What became of a record.
enum Taken<S: Stream> {
    Mine(Read<S>),
    /// It is another rank's.
    PassedBy,
}

/// What a worker makes a stream's sample of.
#[derive(Clone, Debug)]
pub struct StreamJob<R> {
    pub(super) record: R,
    pub(super) origin: Origin,
}

impl<S: Stream> Records<S> {
    pub(super) fn new(stream: S, deal: Deal, buffer: u64, calls: Arc<Calls>) -> Self {
        let block = if deal.shuffle.is_some() { buffer.max(1) } else { 1 };
        Self {
            stream,
            deal,
            block,
            at: DataPosition::default(),
            held: Vec::new(),
            order: Order::sequential(0),
            start: 0,
            start_mark: None,
            failed: None,
            ended: false,
            calls,
        }
    }

    /// The next record of the stream. An error that is no record's own ends it.
    fn read(&mut self) -> Option<Read<S>> {
        if self.is_over() {
            return None;
        }
        match self.stream.next() {
            Some(Err(error)) if !error.is_of_record() => {
                self.fail(error);
                None
            }
            Some(read) => Some(read.map(|(record, origin)| StreamJob { record, origin })),
            None => {
                self.ended = true;
                None
            }
        }
    }

    fn fail(&mut self, error: Error) {
        self.failed = Some(error);
        self.ended = true;
    }

    /// Reads the block that begins at `start`.
    fn fill(&mut self, start: u64) {
        self.start = start;
        self.start_mark = self.stream.mark();
        self.held.clear();
        while (self.held.len() as u64) < self.block {
            match self.read() {
                Some(read) => self.held.push(Some(read)),
                None => break,
            }
        }
        if self.failed.is_some() {
            // A part has another order than the whole: a run that resumes would mix them up.
            self.held.clear();
        }
        let len = self.held.len() as u64;
        self.order = match self.deal.shuffle {
            // Each block is an epoch of its own to the order.
            Some(seed) => Order::shuffled(len, seed ^ start.rotate_left(32), self.at.epoch),
            None => Order::sequential(len),
        };
    }

    /// The record at a place of the epoch; `None` at its end.
    fn take(&mut self, place: u64, whose: Whose) -> Option<Taken<S>> {
        if self.block == 1 {
            return self.take_next(whose);
        }
        let start = place - place % self.block;
        if self.held.is_empty() || start != self.start {
            self.fill(start);
        }
        let at = self.order.at(place - start)?;
        let read = self.held.get_mut(usize::try_from(at).ok()?)?.take()?;
        Some(match whose {
            Whose::Mine => Taken::Mine(read),
            Whose::Others => Taken::PassedBy,
        })
    }

    /// Without a shuffle the others' records are passed over unread.
    fn take_next(&mut self, whose: Whose) -> Option<Taken<S>> {
        if whose == Whose::Mine {
            return self.read().map(Taken::Mine);
        }
        match self.skip() {
            Ok(more) => more.then_some(Taken::PassedBy),
            Err(error) => {
                self.fail(error);
                None
            }
        }
    }

    fn skip(&mut self) -> Result<bool> {
        if !self.is_over() {
            self.ended = !self.stream.skip()?;
        }
        Ok(!self.ended)
    }

    fn is_over(&mut self) -> bool {
        self.ended |= self.calls.are_waiting();
        self.ended
    }
}

impl<S: Stream> Feed for Records<S> {
    type Job = StreamJob<S::Record>;

    fn begin(&mut self, from: DataPosition) -> Result<()> {
        let order = self.order();
        let start = from.samples - from.samples % self.block;
        let marked = from.mark.map_or(0, |mark| mark.record);
        if marked > start {
            let problem = format!(
                "the data position is at record {start}, and its mark at record {marked}; begin the epoch with DataPosition::at_epoch"
            );
            return Err(Error::State { problems: vec![problem] });
        }
        self.stream.begin(from.epoch, from.mark)?;
        self.held.clear();
        (self.failed, self.ended) = (None, false);
        self.at = DataPosition { order, ..from };
        for record in marked..start {
            if !self.skip()? {
                let problem = format!("the data position is at record {start} of a stream of {record}");
                return Err(Error::State { problems: vec![problem] });
            }
        }
        Ok(())
    }

    fn next(&mut self) -> Option<Planned<Self::Job>> {
        let from = self.at.samples;
        let mut jobs = Vec::with_capacity(self.deal.batch.min(4096));
        let mut taken = 0;
        while taken < self.deal.whole() {
            let place = from + taken;
            let Some(record) = self.take(place, self.deal.whose(taken)) else { break };
            taken += 1;
            if let Taken::Mine(job) = record {
                jobs.push(PlannedSample { place, job });
            }
        }
        let taken = self.deal.take(taken);
        if taken == 0 {
            jobs.clear();
        }
        // Every rank hears of it, after the records before it. It is no sample of the order.
        if let Some(error) = self.failed.take() {
            jobs.push(PlannedSample { place: from + taken, job: Err(error) });
        }
        if jobs.is_empty() {
            return None;
        }
        self.at.samples += taken;
        let in_block = self.block > 1 && self.at.samples < self.start + self.block;
        let mark = if in_block { self.start_mark } else { self.stream.mark() };
        // One behind records that were read and are not consumed would lose them. From an earlier mark there is
        // more to pass over, and no less.
        let start = self.at.samples - self.at.samples % self.block;
        self.at.mark = match mark {
            Some(mark) if mark.record > start => self.at.mark,
            mark => mark,
        };
        Some(Planned { jobs, after: self.at })
    }

    fn order(&self) -> u64 {
        self.deal.order(mix(self.stream.order()) ^ self.block ^ (1 << 63))
    }

    fn samples(&self) -> Option<u64> {
        None
    }

    fn interrupt(&self) -> Interrupt {
        self.stream.interrupt()
    }
}
