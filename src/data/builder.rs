use std::sync::Arc;

use tch::Device;

use super::bad::{Bad, BadRecords};
use super::buffers::Buffers;
use super::collate::{Collate, Stacked, With};
use super::engine::{Engine, Pipeline};
use super::feed::{Calls, Deal, Feed, Numbers, Tail};
use super::loader::Loader;
use super::stream_feed::{Records, StreamJob};
use super::transfer::{self, Transfer};
use super::{Origin, Random, Source, Stream};
use crate::error::{Error, Result};
use crate::step::Batch;

/// Settings of a [`Loader`], and what becomes of a record on its way into a batch.
///
/// J is what a worker starts from, S the sample that it makes, C how samples become a batch.
#[must_use = "a loader begins with build()"]
pub struct LoaderBuilder<J, S, C = Stacked> {
    feed: Box<Plan<J>>,
    decode: Box<super::engine::Decode<J, S>>,
    origin: Box<dyn Fn(&J) -> Origin + Send + Sync>,
    collate: C,
    settings: Settings,
}

/// Makes a feed that deals records so, with a shuffle buffer of so many, until it is to stop.
type Plan<J> = dyn FnOnce(Deal, u64, Arc<Calls>) -> Box<dyn Feed<Job = J>>;

#[derive(Clone, Copy, Debug)]
struct Settings {
    deal: Deal,
    /// Records of the shuffle buffer of a stream.
    buffer: usize,
    seed: Option<u64>,
    workers: usize,
    prefetch: usize,
    bad: Bad,
    /// Where batches go.
    device: Device,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            deal: Deal { batch: 1, shuffle: None, rank: 0, world: 1, tail: Tail::Keep },
            buffer: 10_000,
            seed: None,
            workers: 0,
            prefetch: 2,
            bad: Bad::Tell,
            device: Device::Cpu,
        }
    }
}

impl<J, S, C> std::fmt::Debug for LoaderBuilder<J, S, C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoaderBuilder").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl<S: Send + 'static> LoaderBuilder<u64, S> {
    pub(super) fn of_source<O: Source<Sample = S>>(source: O) -> Self {
        let source = Arc::new(source);
        let (reader, namer) = (source.clone(), source.clone());
        Self {
            feed: Box::new(move |deal, _, _| Box::new(Numbers::new(source.len(), source.order(), deal))),
            decode: Box::new(move |index, random| reader.get(*index, random)),
            origin: Box::new(move |index| namer.origin(*index)),
            collate: Stacked,
            settings: Settings::default(),
        }
    }
}

impl<R: Clone + Send + Sync + 'static> LoaderBuilder<StreamJob<R>, R> {
    pub(super) fn of_stream<O: Stream<Record = R>>(stream: O) -> Self {
        Self {
            feed: Box::new(move |deal, buffer, calls| Box::new(Records::new(stream, deal, buffer, calls))),
            decode: Box::new(|job, _| Ok(job.record.clone())),
            origin: Box::new(|job| job.origin.clone()),
            collate: Stacked,
            settings: Settings::default(),
        }
    }
}

impl<R, S, C> LoaderBuilder<StreamJob<R>, S, C> {
    /// Records that [`shuffle`](LoaderBuilder::shuffle) holds and mixes at once; 10,000 unless set.
    ///
    /// The stream is shuffled block by block: each block of so many records is read, permuted and
    /// given out. *Cost*: so many records in memory. A stream whose neighbours are alike wants a
    /// buffer of many times that neighbourhood.
    pub fn shuffle_buffer(mut self, records: usize) -> Self {
        self.settings.buffer = records;
        self
    }
}

impl<J, S, C> LoaderBuilder<J, S, C>
where
    J: Send + Sync + 'static,
    S: Send + 'static,
{
    /// Samples in a batch, on each rank; 1 unless set.
    pub fn batch(mut self, samples: usize) -> Self {
        self.settings.deal.batch = samples;
        self
    }

    /// Another order in every epoch, made of this seed and the epoch's number alone.
    pub fn shuffle(mut self, seed: u64) -> Self {
        self.settings.deal.shuffle = Some(seed);
        self
    }

    /// What [`Random`] is seeded with; without it the seed of the shuffle, or 0.
    pub fn seed(mut self, seed: u64) -> Self {
        self.settings.seed = Some(seed);
        self
    }

    /// Threads that read and transform; 0, unless set, does it in the training's own thread.
    pub fn workers(mut self, threads: usize) -> Self {
        self.settings.workers = threads;
        self
    }

    /// Batches that may be ready or in the making; 2 unless set. All workers build one batch
    /// together, so more of them do not take more memory.
    ///
    /// *Cost*: with batches of b bytes (prefetch + 1)·b live beside the step and its own batch, the one that
    /// windows look ahead to among them. They count against a [`Budget`](crate::strategies::Budget) while the step
    /// runs, and a step that runs out of memory cannot have them back. Without workers nothing is made ahead.
    pub fn prefetch(mut self, batches: usize) -> Self {
        self.settings.prefetch = batches;
        self
    }

    /// The share of one of several processes that train together: every `world`-th sample of the
    /// epoch's order. A batch is then `world` times as much of the epoch.
    ///
    /// Every rank has as many batches with [`Tail::Drop`] only. Bad records make a batch of one rank
    /// shorter than those of the others; where none of its records is left the loader gives, after their
    /// own errors, [`Error::EmptyBatch`] in its place.
    pub fn rank(mut self, rank: usize, world: usize) -> Self {
        self.settings.deal.rank = rank;
        self.settings.deal.world = world;
        self
    }

    /// What becomes of samples at the epoch's end that fill no batch.
    pub fn tail(mut self, tail: Tail) -> Self {
        self.settings.deal.tail = tail;
        self
    }

    /// Passes over up to `most` bad records per epoch, and counts them
    /// ([`Loader::passed_over`]); their batches are shorter by them. Without it each is an error,
    /// in its place. A batch of which nothing is left does not come; where several ranks train together
    /// it is [`Error::EmptyBatch`].
    pub fn pass_over(mut self, most: u64) -> Self {
        self.settings.bad = Bad::PassOver { most };
        self
    }

    /// Brings batches to a device: through pinned memory and on a stream of their own on CUDA. The next
    /// batch is sent when one is given, if it is made by then, so that its copy runs beside the step;
    /// otherwise when it is asked for, and the step waits for the copy. Without
    /// [`workers`](Self::workers) none is ever made by then, and `build` warns. On a CPU it is nothing.
    ///
    /// *Cost*: [`prefetch`](Self::prefetch) is then at least 2, with a pinned copy of each batch that is ready on the
    /// host, and three batches on the device: the step's, the one that windows look ahead to, the one on its way.
    pub fn pin(mut self, device: Device) -> Self {
        self.settings.device = device;
        self
    }

    /// Transforms each sample, on the workers; `random` is the sample's own, see [`Random`]. A sample is made
    /// anew, of the same numbers, where memory ran out for its batch or an odd one came first.
    ///
    /// libtorch's operators may be called, and run on the worker's thread alone. *Limits*: those that draw random
    /// numbers (`Tensor::rand`, `dropout`, `bernoulli`, `randperm`, …) move libtorch's generator, which all
    /// threads share: what training draws then depends on what the workers did meanwhile, so that no two runs
    /// are equal and a resumed one is not bitwise the one that went on. Draw from `random`.
    pub fn map<T, F>(self, transform: F) -> LoaderBuilder<J, T, C>
    where
        T: Send + 'static,
        F: Fn(S, &mut Random) -> Result<T> + Send + Sync + 'static,
    {
        let Self { feed, decode, origin, collate, settings } = self;
        let decode = Box::new(move |job: &J, random: &mut Random| transform(decode(job, random)?, random));
        LoaderBuilder { feed, decode, origin, collate, settings }
    }

    /// Makes batches in another way than [`Stacked`].
    pub fn collate<D: Collate<S>>(self, collate: D) -> LoaderBuilder<J, S, D> {
        let Self { feed, decode, origin, settings, .. } = self;
        LoaderBuilder { feed, decode, origin, collate, settings }
    }

    /// Makes batches by a function of all samples of a batch. After out of memory it is asked again.
    ///
    /// *Cost*: what it allocates, anew for each batch; a [`Collate`] of your own can take tensors from
    /// [`Buffers`], which are used again.
    pub fn collate_with<B, F>(self, function: F) -> LoaderBuilder<J, S, With<F, B>>
    where
        B: Batch + Transfer + Send + 'static,
        F: Fn(&[&S]) -> Result<B> + Send + Sync + 'static,
    {
        self.collate(With::new(function))
    }
}

impl<J, S, C> LoaderBuilder<J, S, C>
where
    J: Send + Sync + 'static,
    S: Send + 'static,
    C: Collate<S>,
{
    /// A loader at the start of epoch 0. Threads begin with the first batch.
    ///
    /// # Errors
    /// [`Error::Config`] for a setting out of its range, [`Error::Unsupported`] for a device that
    /// is not there.
    pub fn build(self) -> Result<Loader<C::Batch>> {
        self.check()?;
        self.collate.check()?;
        let mover = transfer::mover_to(self.settings.device)?;
        if mover.is_some() && self.settings.workers == 0 {
            tracing::warn!("pin without workers: no batch is ready ahead, so each step waits for its copy");
        }
        let Self { feed, decode, origin, collate, settings } = self;
        let Settings { deal, buffer, seed, workers, prefetch, bad, device } = settings;
        let pipeline = Pipeline {
            decode,
            origin,
            collate,
            device,
            // Those in the making, the one in the step and the one that windows look ahead to.
            buffers: Buffers::keeping(prefetch.saturating_add(2)),
            seed: seed.or(deal.shuffle).unwrap_or_default(),
        };
        let share = deal.batch.div_ceil(workers.max(1).saturating_mul(2));
        // The batch on its way to a device is one that was made ahead.
        let prefetch = if mover.is_some() { prefetch.saturating_sub(1).max(1) } else { prefetch };
        let calls = Arc::<Calls>::default();
        let feed = feed(deal, buffer as u64, calls.clone());
        let engine = Engine::new(pipeline, feed, calls, prefetch, share);
        let bad = BadRecords::new(bad, deal.rank, deal.world);
        Ok(Loader::over(Arc::new(engine), deal, workers, bad, mover))
    }

    fn check(&self) -> Result<()> {
        let Settings { deal: Deal { batch, rank, world, .. }, buffer, prefetch, .. } = self.settings;
        let bad = |setting, problem: &str| Err(Error::config(setting, problem));
        match () {
            () if batch == 0 => bad("LoaderBuilder::batch", "0 samples; at least 1"),
            () if prefetch == 0 => bad("LoaderBuilder::prefetch", "0 batches; at least 1"),
            () if buffer == 0 => bad("LoaderBuilder::shuffle_buffer", "0 records; at least 1"),
            () if rank >= world => bad("LoaderBuilder::rank", "a rank is below the number of ranks"),
            () => Ok(()),
        }
    }
}
