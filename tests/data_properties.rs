//! Random data, settings, interruptions and resumes against an order that is computed here.

mod support;

use std::io::Write;
use std::path::{Path, PathBuf};

use memfit::data::{
    Csv, Lines, Loader, LoaderBuilder, Npy, Origin, Pad, Padded, Random, Source, Stream, Tokens,
};
use memfit::optim::{Sgd, SgdConfig};
use memfit::snapshot::Extras;
use memfit::strategies::GradAccumulator;
use memfit::tch::{self, Tensor};
use memfit::{Batch, DataPosition, Error, Loss, Mark, Result, Snapshots, Stack};
use proptest::prelude::*;
use support::{serial, values};
use tempfile::TempDir;

/// The oracle: what stands where in an epoch, by the description in `docs/data.md` and the
/// papers that it names, in 128 bits and one list, and with nothing of the library but a sample's
/// public generator.
mod oracle {
    use super::{Data, Kind, Random, Sample};

    fn finalize(bits: u64) -> u64 {
        let step = |bits: u64, shift: u32, factor: u64| (bits ^ (bits >> shift)).wrapping_mul(factor);
        let bits = step(step(bits, 30, 0xbf58_476d_1ce4_e5b9), 27, 0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// Twelve rounds on pairs of digits, to the bases a = ⌊√len⌋ and b = ⌈len / a⌉; who falls out
    /// of the range walks on.
    pub fn permutation(len: u64, seed: u64, epoch: u64) -> Vec<u64> {
        if len < 2 {
            return (0..len).collect();
        }
        let a = (1..=len).take_while(|a| a * a <= len).last().unwrap().max(2);
        let bases = [u128::from(a), u128::from(len.div_ceil(a))];
        let key =
            finalize(seed.wrapping_add(0x5851_f42d_4c95_7f2d)) ^ epoch.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let key = finalize(key);
        let encrypt = |number: u64| {
            let mut digits = [u128::from(number) / bases[1], u128::from(number) % bases[1]];
            for round in 0..12_usize {
                let (changed, other) = (round % 2, 1 - round % 2);
                let round_key = finalize(key.wrapping_add((round as u64 + 1) << 32));
                let bits = u128::from(finalize(digits[other] as u64 ^ round_key));
                // A fraction of 2^64 becomes that fraction of the base.
                digits[changed] = (digits[changed] + bits * bases[changed] / (1 << 64)) % bases[changed];
            }
            (digits[0] * bases[1] + digits[1]) as u64
        };
        let walk = |place| {
            let mut at = encrypt(place);
            while at >= len {
                at = encrypt(at);
            }
            at
        };
        (0..len).map(walk).collect()
    }

    /// The records of an epoch by their places; a stream's are permuted in blocks.
    pub fn order(data: Data, epoch: u64) -> Vec<u64> {
        let len = data.len;
        match (data.shuffle, data.kind.is_stream()) {
            (None, _) => (0..len).collect(),
            (Some(seed), false) => permutation(len, seed, epoch),
            (Some(seed), true) => {
                let blocks = (0..len).step_by(data.buffer);
                let block = |start: u64| {
                    let held = (len - start).min(data.buffer as u64);
                    permutation(held, seed ^ start.rotate_left(32), epoch)
                        .into_iter()
                        .map(move |at| start + at)
                };
                blocks.flat_map(block).collect()
            }
        }
    }

    /// The samples of an epoch by their places; a bad record is its number.
    pub fn epoch(data: Data, epoch: u64) -> Vec<Result<Sample, u64>> {
        let seed = data.shuffle.unwrap_or(0);
        let numbers = order(data, epoch).into_iter().zip(0..);
        let sample = |(number, place): (u64, u64)| match data.is_bad(number) {
            true => Err(number),
            false => Ok((number as i64, Random::of_sample(seed, epoch, place).uniform())),
        };
        numbers.map(sample).collect()
    }

    pub fn good(samples: &[Result<Sample, u64>]) -> Vec<Sample> {
        samples.iter().filter_map(|sample| sample.ok()).collect()
    }

    impl Kind {
        pub fn is_stream(self) -> bool {
            matches!(self, Kind::Stream | Kind::Lines | Kind::Gzip | Kind::Csv)
        }
    }
}

/// A number and a random one of its own, where the record is not bad.
type Sample = (i64, f64);

/// Where the records are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Source,
    Tokens,
    Npy,
    Stream,
    Lines,
    Gzip,
    Csv,
}

const KINDS: [Kind; 7] =
    [Kind::Source, Kind::Tokens, Kind::Npy, Kind::Stream, Kind::Lines, Kind::Gzip, Kind::Csv];

/// The records 0, 1, 2, … of which every `bad`-th cannot be used.
#[derive(Clone, Copy, Debug)]
struct Data {
    kind: Kind,
    len: u64,
    bad: u64,
    shuffle: Option<u64>,
    /// Of a stream.
    buffer: usize,
}

/// No record's number.
const BAD: u64 = 60_000;

impl Data {
    fn is_bad(self, number: u64) -> bool {
        self.bad > 0 && number % self.bad == self.bad - 1
    }

    /// What stands in a file.
    fn written(self) -> impl Iterator<Item = u64> {
        (0..self.len).map(move |number| if self.is_bad(number) { BAD } else { number })
    }

    fn get(self, index: u64) -> Result<i64> {
        if self.is_bad(index) { Err(Error::data("bad")) } else { Ok(index as i64) }
    }
}

impl Source for Data {
    type Sample = i64;

    fn len(&self) -> u64 {
        self.len
    }

    fn get(&self, index: u64, _: &mut Random) -> Result<i64> {
        Data::get(*self, index)
    }
}

/// The same one after another; the reader tells of a bad one.
struct Streamed {
    data: Data,
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
        (index < self.data.len).then(|| self.data.get(index).map(read).map_err(|_| Error::data("bad")))
    }

    fn mark(&self) -> Option<Mark> {
        Some(Mark { record: self.next, ..Mark::default() })
    }
}

/// The records, in a file where their kind has one.
struct Written {
    data: Data,
    path: PathBuf,
    _folder: TempDir,
}

fn write(data: Data) -> Written {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records");
    let lines = |first: &str| -> Vec<u8> {
        let word = |number: u64| if number == BAD { "bad".to_owned() } else { number.to_string() };
        let line = |number| format!("{}{}\n", word(number), " ".repeat((number % 7) as usize));
        (first.to_owned() + &data.written().map(line).collect::<String>()).into_bytes()
    };
    let bytes = match data.kind {
        Kind::Source | Kind::Stream => Vec::new(),
        Kind::Tokens => data.written().flat_map(|number| (number as u16).to_le_bytes()).collect(),
        Kind::Npy => npy(data),
        Kind::Lines => lines(""),
        Kind::Csv => lines("number\n"),
        Kind::Gzip => {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(&lines("")).unwrap();
            encoder.finish().unwrap()
        }
    };
    std::fs::write(&path, bytes).unwrap();
    Written { data, path, _folder: folder }
}

fn npy(data: Data) -> Vec<u8> {
    let header = format!("{{'descr': '<i8', 'fortran_order': False, 'shape': ({},), }}", data.len);
    let mut file = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
    file.extend(format!("{header:<117}\n").bytes());
    file.extend(data.written().flat_map(u64::to_le_bytes));
    file
}

fn parsed(text: &str) -> Result<i64> {
    text.trim_end().parse().map_err(|_| Error::data(format!("`{text}` is no number")))
}

#[derive(Clone, Copy, Debug)]
struct Settings {
    batch: usize,
    workers: usize,
    prefetch: usize,
    ranks: usize,
    /// Bad records that are passed over.
    over: u64,
}

impl Written {
    fn load<L>(&self, settings: Settings, rank: usize, finish: impl Finish<L>) -> L {
        let Self { data, path, .. } = self;
        let set = Set { data: *data, settings, rank };
        let path: &Path = path;
        match data.kind {
            Kind::Source => finish.of(set.on(Loader::new(*data))),
            Kind::Tokens => {
                let rows = Tokens::<u16>::open(path).unwrap().vocabulary(BAD).rows(1).unwrap();
                finish.of(set.on(Loader::new(rows).map(|row, _| Ok(row[0]))))
            }
            Kind::Npy => finish.of(set.on(Loader::new(Npy::open(path).unwrap()).map(|row, _| {
                let number = row.numbers::<i64>()?[0];
                if number as u64 == BAD { Err(Error::data("bad")) } else { Ok(number) }
            }))),
            Kind::Stream => {
                let stream = Loader::stream(Streamed { data: *data, next: 0 });
                finish.of(set.on(stream.shuffle_buffer(data.buffer)))
            }
            Kind::Lines | Kind::Gzip => {
                let lines = Loader::stream(Lines::of_file(path)).shuffle_buffer(data.buffer);
                finish.of(set.on(lines.map(|line, _| parsed(line.text()?))))
            }
            Kind::Csv => {
                let rows = Loader::stream(Csv::of_file(path)).shuffle_buffer(data.buffer);
                finish.of(set.on(rows.map(|row, _| parsed(row.text(0)?))))
            }
        }
    }

    fn pairs(&self, settings: Settings, rank: usize) -> Loader<(Tensor, Tensor)> {
        self.load(settings, rank, Pairs)
    }
}

#[derive(Clone, Copy)]
struct Set {
    data: Data,
    settings: Settings,
    rank: usize,
}

impl Set {
    fn on<J: Send + Sync + 'static>(self, loader: LoaderBuilder<J, i64>) -> LoaderBuilder<J, i64> {
        let Settings { batch, workers, prefetch, ranks, over } = self.settings;
        let loader = match self.data.shuffle {
            Some(seed) => loader.shuffle(seed),
            None => loader,
        };
        loader.batch(batch).workers(workers).prefetch(prefetch).rank(self.rank, ranks).pass_over(over)
    }
}

/// What samples and batches are made of the numbers.
trait Finish<L> {
    fn of<J: Send + Sync + 'static>(self, loader: LoaderBuilder<J, i64>) -> L;
}

struct Pairs;

impl Finish<Loader<(Tensor, Tensor)>> for Pairs {
    fn of<J: Send + Sync + 'static>(self, loader: LoaderBuilder<J, i64>) -> Loader<(Tensor, Tensor)> {
        loader.map(|number, random| Ok((number, random.uniform()))).build().unwrap()
    }
}

struct Lists;

/// Of every number a list of it, of 1 to 4.
impl Finish<Loader<Padded>> for Lists {
    fn of<J: Send + Sync + 'static>(self, loader: LoaderBuilder<J, i64>) -> Loader<Padded> {
        let loader = loader.map(|number, _| Ok(vec![number; 1 + number as usize % 4]));
        loader.collate(Pad::to_longest(-1_i64)).build().unwrap()
    }
}

fn samples(batch: &(Tensor, Tensor)) -> Vec<Sample> {
    values(&batch.0).into_iter().map(|number| number as i64).zip(values(&batch.1)).collect()
}

/// The start of an epoch, as the loader itself has it.
fn start(loader: &mut Loader<(Tensor, Tensor)>, epoch: u64) -> DataPosition {
    loader.seek(DataPosition::at_epoch(epoch)).unwrap();
    loader.data_position()
}

/// An item of a rank's.
#[derive(Debug, PartialEq)]
enum Item {
    Bad(u64),
    /// So many records of which none can be used, where other ranks have a batch.
    Empty(u64),
    /// The samples, and the samples consumed after it, of all ranks.
    Batch(Vec<Sample>, u64),
}

/// What a rank gets of the rest of an epoch, and how many records it passes over.
fn wanted(
    order: &[std::result::Result<Sample, u64>],
    from: usize,
    settings: Settings,
    rank: usize,
) -> (Vec<Item>, u64) {
    let (mut items, mut passed, mut at) = (Vec::new(), 0, from);
    for step in order[from..].chunks(settings.batch * settings.ranks) {
        at += step.len();
        let mine: Vec<_> = step.iter().copied().skip(rank).step_by(settings.ranks).collect();
        for number in mine.iter().filter_map(|sample| sample.err()) {
            if passed < settings.over {
                passed += 1;
            } else {
                items.push(Item::Bad(number));
            }
        }
        let good = oracle::good(&mine);
        if !good.is_empty() {
            items.push(Item::Batch(good, at as u64));
        } else if settings.ranks > 1 && !mine.is_empty() {
            items.push(Item::Empty(mine.len() as u64));
        }
    }
    (items, passed)
}

/// The same of a loader. Only sources number records whatever they begin with.
fn got(loader: &mut Loader<(Tensor, Tensor)>, kind: Kind) -> Vec<Item> {
    let item = |item: Result<memfit::data::Loaded<(Tensor, Tensor)>>| match item {
        Ok(batch) => Item::Batch(samples(&batch), batch.position.samples),
        Err(Error::Data { origin, .. }) if !kind.is_stream() => Item::Bad(origin.record.unwrap()),
        Err(Error::Data { .. }) => Item::Bad(0),
        Err(Error::EmptyBatch { records, .. }) => Item::Empty(records),
        Err(error) => panic!("{error}"),
    };
    loader.map(item).collect()
}

fn settings() -> impl Strategy<Value = Settings> {
    (1..9_usize, 0..4_usize, 1..4_usize).prop_map(|(batch, workers, prefetch)| Settings {
        batch,
        workers,
        prefetch,
        ranks: 1,
        over: u64::MAX,
    })
}

fn data() -> impl Strategy<Value = Data> {
    let bad = prop_oneof![Just(0), 1..9_u64];
    (prop::sample::select(&KINDS[..]), 0..90_u64, bad, prop::option::of(any::<u64>()), 1..40_usize).prop_map(
        |(kind, len, bad, shuffle, buffer)| {
            // A token file without a token is refused.
            let len = if kind == Kind::Tokens { len.max(1) } else { len };
            Data { kind, len, bad, shuffle, buffer }
        },
    )
}

proptest! {
    #![proptest_config(support::random::cases(150))]

    #[test]
    fn interrupted_and_resumed_at_will_an_epoch_is_the_order_that_is_computed(
        data in data(),
        parts in prop::collection::vec((settings(), 1..6_usize), 1..6),
        last in settings(),
        epoch in 0..3_u64,
    ) {
        let _serial = serial();
        let written = write(data);
        let mut position = start(&mut written.pairs(last, 0), epoch);
        let mut consumed = Vec::new();
        for (settings, steps) in parts.into_iter().chain([(last, usize::MAX)]) {
            let mut loader = written.pairs(settings, 0);
            loader.seek(position).unwrap();
            for batch in loader.take(steps) {
                let batch = batch.unwrap();
                consumed.extend(samples(&batch));
                position = batch.position;
            }
        }
        prop_assert_eq!(&consumed, &oracle::good(&oracle::epoch(data, epoch)));
    }

    #[test]
    fn each_rank_gets_its_share_of_what_is_left_and_the_errors_in_their_place(
        data in data(),
        settings in settings(),
        ranks in 1..4_usize,
        over in prop_oneof![Just(0), 1..6_u64, Just(u64::MAX)],
        from in 0.0..1.0_f64,
        epoch in 0..3_u64,
    ) {
        let _serial = serial();
        let written = write(data);
        let settings = Settings { ranks, over, ..settings };
        let order = oracle::epoch(data, epoch);
        let from = (from * order.len() as f64) as usize;
        for rank in 0..ranks {
            let mut loader = written.pairs(settings, rank);
            let mut position = start(&mut loader, epoch);
            (position.samples, position.mark) = (from as u64, None);
            loader.seek(position).unwrap();
            let (mut wanted, passed) = wanted(&order, from, settings, rank);
            for item in wanted.iter_mut().filter(|_| data.kind.is_stream()) {
                if let Item::Bad(number) = item {
                    *number = 0;
                }
            }
            prop_assert_eq!(got(&mut loader, data.kind), wanted, "rank {}", rank);
            prop_assert_eq!(loader.passed_over(), passed);
            prop_assert_eq!(loader.epoch(), epoch + 1);
        }
    }
}

/// A run of a real stack: one weight, whose gradient is the mean of a window's row means.
struct Run {
    w: Tensor,
    stack: Stack,
    seen: Vec<(Vec<i64>, bool)>,
    _vs: tch::nn::VarStore,
}

const RATE: f64 = 0.01;

impl Run {
    fn new(micros: usize) -> Self {
        let (vs, w) = support::vector(1);
        let sgd = Sgd::new(&vs, SgdConfig::default().lr(RATE)).unwrap();
        let stack = Stack::of(&vs, sgd).with(GradAccumulator::every(micros)).build().unwrap();
        Self { w, stack, seen: Vec::new(), _vs: vs }
    }

    /// Trains until so many micro-batches returned, or the epoch ends; counts errors.
    fn train(&mut self, loader: &mut Loader<Padded>, mut most: usize) -> usize {
        let mut errors = 0;
        for micro in self.stack.try_windows(loader) {
            let Ok(micro) = micro else {
                errors += 1;
                continue;
            };
            let Self { w, stack, seen, .. } = self;
            let batch: &Padded = &micro.batch;
            let length = batch.tokens.size()[1] as usize;
            let numbers: Vec<i64> = values(&batch.tokens).chunks(length).map(|row| row[0] as i64).collect();
            let lengths = numbers.iter().map(|number| 1 + number % 4);
            assert!(batch.lengths.iter().copied().eq(lengths), "{numbers:?}");
            assert_eq!(batch.tokens() as i64, batch.lengths.iter().sum::<i64>());
            seen.push((numbers, micro.last));
            let _ = stack
                .step(micro, |batch| {
                    let (x, mask) = (batch.tokens.to_kind(tch::Kind::Float), batch.mask()?);
                    let sums = (x * mask).sum_dim_intlist(1, false, tch::Kind::Float);
                    let rows = sums / Tensor::from_slice(&batch.lengths);
                    Ok(Loss::mean((&*w * rows).mean(tch::Kind::Float), batch.rows()))
                })
                .unwrap();
            most -= 1;
            if most == 0 {
                break;
            }
        }
        errors
    }
}

proptest! {
    #![proptest_config(support::random::cases(30))]

    #[test]
    fn a_stack_that_stops_and_resumes_sees_each_window_of_the_order_once(
        data in data(),
        before in settings(),
        after in settings(),
        micros in 1..5_usize,
        stop in 1..20_usize,
        told in any::<bool>(),
    ) {
        let _serial = serial();
        let written = write(data);
        let over = if told { 0 } else { u64::MAX };
        let (before, after) = (Settings { over, ..before }, Settings { over, batch: before.batch, ..after });
        let order = oracle::epoch(data, 0);
        let batches = order.chunks(before.batch).map(oracle::good).filter(|batch| !batch.is_empty());
        let batches: Vec<Vec<i64>> =
            batches.map(|batch| batch.into_iter().map(|(number, _)| number).collect()).collect();

        let folder = tempfile::tempdir().unwrap();
        let mut snapshots = Snapshots::in_folder(folder.path()).unwrap();
        let mut run = Run::new(micros);
        let mut errors = run.train(&mut written.load(before, 0, Lists), stop);
        snapshots.save(&mut run.stack, &Extras::new()).unwrap();
        let open = run.seen.last().is_some_and(|(_, last)| !last);
        if open {
            run.stack.discard().unwrap();
        }
        let mut resumed = Run::new(micros);
        let back = snapshots.latest().unwrap().unwrap().resume(&mut resumed.stack).unwrap();
        let mut loader = written.load(after, 0, Lists);
        loader.seek(back.data.unwrap_or_default()).unwrap();
        errors += resumed.train(&mut loader, usize::MAX);
        run.seen.append(&mut resumed.seen);

        let windows = batches.iter().enumerate();
        let windows = windows.map(|(at, batch)| {
            (batch.clone(), at % micros == micros - 1 || at + 1 == batches.len())
        });
        prop_assert_eq!(&run.seen, &windows.collect::<Vec<_>>());
        prop_assert!(resumed.stack.flush().unwrap().is_none());
        let mean = |window: &[Vec<i64>]| {
            let numbers = window.concat();
            numbers.iter().sum::<i64>() as f64 / numbers.len() as f64
        };
        let w = -RATE * batches.chunks(micros).map(mean).sum::<f64>();
        prop_assert!((values(&resumed.w)[0] - w).abs() < 1e-3, "{} is not {w}", values(&resumed.w)[0]);
        // Those after the last batch that was consumed are told again.
        let bad = order.iter().filter(|sample| sample.is_err()).count();
        prop_assert!(if told { errors >= bad } else { errors == 0 }, "{errors} of {bad}");
    }
}

/// What a shuffle promises, of the oracle and of the loader alike.
#[test]
fn long_orders_are_permutations_that_seeds_and_epochs_change_and_blocks_stay_blocks() {
    let _serial = serial();
    let settings = Settings { batch: 64, workers: 2, prefetch: 2, ranks: 1, over: 0 };
    for (kind, block) in [(Kind::Source, 5_000), (Kind::Stream, 700)] {
        let order = |seed: Option<u64>, epoch: u64| -> Vec<u64> {
            let data = Data { kind, len: 5_000, bad: 0, shuffle: seed, buffer: 700 };
            let written = write(data);
            let mut loader = written.pairs(settings, 0);
            start(&mut loader, epoch);
            let numbers: Vec<u64> =
                loader.flat_map(|batch| samples(&batch.unwrap())).map(|(number, _)| number as u64).collect();
            assert_eq!(numbers, oracle::order(data, epoch));
            numbers
        };
        assert!(order(None, 1).into_iter().eq(0..5_000));
        let orders = [order(Some(3), 0), order(Some(3), 1), order(Some(4), 0)];
        for (at, one) in orders.iter().enumerate() {
            for (start, part) in one.chunks(block).enumerate() {
                let mut part = part.to_vec();
                part.sort_unstable();
                let start = (start * block) as u64;
                assert!(part.into_iter().eq(start..(start + block as u64).min(5_000)));
            }
            // Of neighbours as many as in a random order: about one pair in a block is in order.
            let pairs = one.windows(2).filter(|pair| pair[1] == pair[0] + 1).count();
            assert!(pairs < 40, "{pairs}");
            for other in &orders[..at] {
                let same = one.iter().zip(other).filter(|(one, other)| one == other).count();
                assert!(same < 40, "{same}");
            }
        }
    }
}
