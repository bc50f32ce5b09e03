//! Random sources, settings, interruptions and resumes against a plain loop in memory.

mod support;

use memfit::data::{Loader, LoaderBuilder, Origin, Random, Source, Stream};
use memfit::tch::Tensor;
use memfit::{DataPosition, Error, Mark, Result};
use proptest::prelude::*;
use support::{serial, values};

/// A number and a random one of its own, where the record is not bad.
type Sample = (i64, f64);

/// The records 0, 1, 2, … of which every `bad`-th cannot be used.
#[derive(Clone, Copy, Debug)]
struct Records {
    len: u64,
    bad: u64,
}

impl Records {
    fn get(self, index: u64) -> Result<i64> {
        let bad = self.bad > 0 && index % self.bad == self.bad - 1;
        if bad { Err(Error::data("bad")) } else { Ok(index as i64) }
    }
}

impl Source for Records {
    type Sample = i64;

    fn len(&self) -> u64 {
        self.len
    }

    fn get(&self, index: u64, _: &mut Random) -> Result<i64> {
        Records::get(*self, index)
    }
}

/// The same one after another; a bad one is told by the reader or by the transform.
struct Streamed {
    records: Records,
    next: u64,
}

impl Stream for Streamed {
    type Record = i64;

    fn begin(&mut self, _: u64, from: Option<Mark>) -> Result<()> {
        self.next = from.map_or(0, |mark| mark.record);
        Ok(())
    }

    fn next(&mut self) -> Option<Result<(i64, Origin)>> {
        let index = self.next;
        self.next += 1;
        let read = |number| (number, Origin::record(index));
        (index < self.records.len).then(|| self.records.get(index).map(read).map_err(|_| Error::data("bad")))
    }

    fn mark(&self) -> Option<Mark> {
        Some(Mark { record: self.next, ..Mark::default() })
    }
}

#[derive(Clone, Copy, Debug)]
struct Settings {
    batch: usize,
    workers: usize,
    prefetch: usize,
    ranks: usize,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Source,
    Stream { buffer: usize },
}

#[derive(Clone, Copy, Debug)]
struct Data {
    records: Records,
    kind: Kind,
    shuffle: Option<u64>,
}

fn finished<J: Send + Sync + 'static>(
    loader: LoaderBuilder<J, i64>,
    data: Data,
    settings: Settings,
    rank: usize,
) -> Loader<(Tensor, Tensor)> {
    let loader = match data.shuffle {
        Some(seed) => loader.shuffle(seed),
        None => loader,
    };
    let Settings { batch, workers, prefetch, ranks } = settings;
    let loader = loader.batch(batch).workers(workers).prefetch(prefetch).rank(rank, ranks);
    loader.pass_over(u64::MAX).map(|number, random| Ok((number, random.uniform()))).build().unwrap()
}

fn load(data: Data, settings: Settings, rank: usize) -> Loader<(Tensor, Tensor)> {
    match data.kind {
        Kind::Source => finished(Loader::new(data.records), data, settings, rank),
        Kind::Stream { buffer } => {
            let stream = Streamed { records: data.records, next: 0 };
            finished(Loader::stream(stream).shuffle_buffer(buffer), data, settings, rank)
        }
    }
}

fn samples(batch: &(Tensor, Tensor)) -> Vec<Sample> {
    values(&batch.0).into_iter().map(|number| number as i64).zip(values(&batch.1)).collect()
}

/// The plain loop: one sample after another, nothing beside it.
fn plain(data: Data, epoch: u64) -> Vec<Sample> {
    let mut loader = load(data, Settings { batch: 1, workers: 0, prefetch: 1, ranks: 1 }, 0);
    let mut position = DataPosition::default();
    position.epoch = epoch;
    loader.seek(position).unwrap();
    loader.flat_map(|batch| samples(&batch.unwrap())).collect()
}

/// Up to `steps` steps of all ranks: what they consumed, rank by rank, and where that ends.
fn run(
    data: Data,
    settings: Settings,
    from: DataPosition,
    steps: usize,
) -> (Vec<Sample>, DataPosition, bool) {
    let mut consumed = Vec::new();
    let (mut after, mut ended) = (from, false);
    for rank in 0..settings.ranks {
        let mut loader = load(data, settings, rank);
        loader.seek(from).unwrap();
        for _ in 0..steps {
            match loader.next() {
                Some(batch) => {
                    let batch = batch.unwrap();
                    consumed.extend(samples(&batch));
                    // Where a rank's records are all bad, another one knows better.
                    if batch.position.samples > after.samples {
                        after = batch.position;
                    }
                }
                None => {
                    ended = true;
                    break;
                }
            }
        }
    }
    (consumed, after, ended)
}

fn sorted(mut samples: Vec<Sample>) -> Vec<Sample> {
    samples.sort_by(|a, b| a.partial_cmp(b).unwrap());
    samples
}

fn settings() -> impl Strategy<Value = Settings> {
    (1..9_usize, 0..4_usize, 1..4_usize).prop_map(|(batch, workers, prefetch)| Settings {
        batch,
        workers,
        prefetch,
        ranks: 1,
    })
}

fn data() -> impl Strategy<Value = Data> {
    let kind = prop_oneof![Just(Kind::Source), (1..40_usize).prop_map(|buffer| Kind::Stream { buffer })];
    (0..90_u64, prop_oneof![Just(0), 2..9_u64], kind, prop::option::of(any::<u64>()))
        .prop_map(|(len, bad, kind, shuffle)| Data { records: Records { len, bad }, kind, shuffle })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 250, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn interrupted_and_resumed_at_will_an_epoch_is_the_plain_loops(
        data in data(),
        parts in prop::collection::vec((settings(), 1..6_usize), 1..6),
        last in settings(),
        epoch in 0..3_u64,
    ) {
        let _serial = serial();
        let wanted = plain(data, epoch);
        let mut position = DataPosition::default();
        position.epoch = epoch;
        let mut consumed = Vec::new();
        for (settings, steps) in parts {
            let (more, after, ended) = run(data, settings, position, steps);
            consumed.extend(more);
            position = after;
            if ended {
                break;
            }
        }
        consumed.extend(run(data, last, position, 200).0);
        prop_assert_eq!(&consumed, &wanted);
        // Every good record once.
        let numbers = sorted(consumed).into_iter().map(|(number, _)| number);
        let good = (0..data.records.len).filter_map(|index| data.records.get(index).ok());
        prop_assert!(numbers.eq(good));
    }

    #[test]
    fn ranks_of_any_number_share_what_is_left(
        data in data(),
        first in settings(),
        steps in 0..5_usize,
        ranks in (1..4_usize, 1..4_usize),
        second in settings(),
    ) {
        let _serial = serial();
        // Bad records make a step's batches unequal, which the ranks' own loop has to bear.
        let data = Data { records: Records { bad: 0, ..data.records }, ..data };
        let start = DataPosition::default();
        let (mut consumed, position, _) = run(data, Settings { ranks: ranks.0, ..first }, start, steps);
        consumed.extend(run(data, Settings { ranks: ranks.1, ..second }, position, 200).0);
        prop_assert_eq!(sorted(consumed), sorted(plain(data, 0)));
    }
}
