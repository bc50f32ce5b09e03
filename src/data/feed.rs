use std::sync::atomic::{AtomicBool, Ordering};

use super::Interrupt;
use super::identity::join;
use super::order::Order;
use super::random::mix;
use crate::error::{Error, Result};
use crate::step::DataPosition;

/// Plans an epoch, one batch after the other.
pub(super) trait Feed: Send {
    /// What a worker turns into a sample.
    type Job: Send + Sync + 'static;

    /// Goes to a position of its order; its epoch is planned from there on.
    fn begin(&mut self, from: DataPosition) -> Result<()>;

    /// The next batch; `None` at the epoch's end.
    fn next(&mut self) -> Option<Planned<Self::Job>>;

    /// Which order positions count in.
    fn order(&self) -> u64;

    /// Samples of an epoch that all ranks get, where that is known.
    fn samples(&self) -> Option<u64>;

    fn interrupt(&self) -> Interrupt;
}

/// What is asked of a feed that another thread is in.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// The loader is dropped.
    stop: AtomicBool,
    /// It is to begin elsewhere.
    begin: AtomicBool,
}

impl Calls {
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Nobody wants what is planned now.
    pub(super) fn begin_elsewhere(&self) {
        self.begin.store(true, Ordering::Release);
    }

    /// Whoever called is in the feed.
    pub(super) fn are_heard(&self) {
        self.begin.store(false, Ordering::Release);
    }

    /// Whether the feed is to come to an end with what it is at.
    pub(super) fn are_waiting(&self) -> bool {
        self.is_stopped() || self.begin.load(Ordering::Acquire)
    }
}

/// A batch before it is read.
#[derive(Debug)]
pub(super) struct Planned<J> {
    pub(super) jobs: Vec<PlannedSample<J>>,
    /// The position once the batch is consumed.
    pub(super) after: DataPosition,
}

/// A sample before it is read: its place in the epoch's order, and its job.
#[derive(Debug)]
pub(super) struct PlannedSample<J> {
    pub(super) place: u64,
    pub(super) job: Result<J>,
}

/// How an epoch is dealt out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deal {
    pub(super) batch: usize,
    pub(super) shuffle: Option<u64>,
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) tail: Tail,
}

/// What becomes of the samples at an epoch's end that fill no batch on every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tail {
    /// They come as a shorter batch. Of several ranks, the first ones then get a sample more and,
    /// where fewer samples than ranks are left, a batch more than the others.
    #[default]
    Keep,
    /// They are left out of this epoch, so that every batch has its full size and every rank as
    /// many of them.
    Drop,
}

/// Which rank a sample goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    Mine,
    Others,
}

impl Deal {
    /// How many of `left` samples the next batches of all ranks take; 0 ends the epoch.
    pub(super) fn take(&self, left: u64) -> u64 {
        let whole = self.whole();
        match self.tail {
            Tail::Drop if left < whole => 0,
            _ => left.min(whole),
        }
    }

    /// Whose sample it is that is the n-th of a batch of all ranks.
    pub(super) fn whose(&self, nth: u64) -> Whose {
        if nth % self.world as u64 == self.rank as u64 { Whose::Mine } else { Whose::Others }
    }

    /// Samples in one batch of every rank.
    pub(super) fn whole(&self) -> u64 {
        (self.batch as u64).saturating_mul(self.world as u64)
    }

    /// Batches that this rank gets of an epoch of so many samples, those of all ranks.
    pub(super) fn batches(&self, samples: u64) -> u64 {
        samples / self.whole() + u64::from(samples % self.whole() > self.rank as u64)
    }

    /// A number of what makes the order, beside `of`. It fits 62 bits, and is not 0.
    pub(super) fn order(&self, of: u64) -> u64 {
        let seed = self.shuffle.map_or(0, |seed| mix(seed.wrapping_add(1)) | 1);
        (mix(seed ^ mix(of)) >> 2) | 1
    }
}

/// Refuses a position of another order.
pub(super) fn check(from: DataPosition, order: u64) -> Result<()> {
    if from.order == order || from == DataPosition::at_epoch(from.epoch) {
        return Ok(());
    }
    let problem = "the data position is of another order: the seed of the shuffle, the files, which \
                   of their records there are, or the shuffle buffer differ"
        .to_owned();
    Err(Error::State { problems: vec![problem] })
}

/// The records of a [`Source`](super::Source), by their numbers.
#[derive(Debug)]
pub(super) struct Numbers {
    len: u64,
    /// What the source says of its order.
    source: u64,
    deal: Deal,
    order: Order,
    at: DataPosition,
}

impl Numbers {
    pub(super) fn new(len: u64, source: u64, deal: Deal) -> Self {
        Self { len, source, deal, order: Order::sequential(len), at: DataPosition::default() }
    }
}

impl Feed for Numbers {
    type Job = u64;

    fn begin(&mut self, from: DataPosition) -> Result<()> {
        let order = self.order();
        self.order = match self.deal.shuffle {
            Some(seed) => Order::shuffled(self.len, seed, from.epoch),
            None => Order::sequential(self.len),
        };
        self.at = DataPosition { order, mark: None, ..from };
        Ok(())
    }

    fn next(&mut self) -> Option<Planned<u64>> {
        let from = self.at.samples;
        let to = from + self.deal.take(self.len.saturating_sub(from));
        let places = (from.saturating_add(self.deal.rank as u64)..to).step_by(self.deal.world);
        let jobs: Vec<_> = places
            .filter_map(|place| Some(PlannedSample { place, job: Ok(self.order.at(place)?) }))
            .collect();
        if jobs.is_empty() {
            return None;
        }
        self.at.samples = to;
        Some(Planned { jobs, after: self.at })
    }

    fn order(&self) -> u64 {
        self.deal.order(join(self.source, self.len))
    }

    fn samples(&self) -> Option<u64> {
        Some(match self.deal.tail {
            Tail::Keep => self.len,
            Tail::Drop => self.len - self.len % self.deal.whole(),
        })
    }

    fn interrupt(&self) -> Interrupt {
        Interrupt::Needless
    }
}
