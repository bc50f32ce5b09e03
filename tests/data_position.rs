//! The stack keeps how far training consumed its data, and a run that resumes gets what remains.

mod support;
#[path = "support/training.rs"]
mod training;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use memfit::data::{Loaded, Loader, Random, Source};
use memfit::optim::{AdamW, AdamWConfig, InBackward, Sgd, SgdConfig};
use memfit::snapshot::Extras;
use memfit::strategies::{AmpScaler, GradAccumulator, MicroBatcher};
use memfit::tch::{Device, Kind, Tensor, nn};
use memfit::{
    Backward, Batch, DataPosition, Error, Loss, Mark, NextBackward, NextUpdate, Place, Result, Snapshots,
    Stack, State, StepOutcome, Strategy, UpdatePhase, Value, Verdict, Windows,
};
use support::serial;
use training::difference_of;

/// 125 batches of 8 an epoch.
const LEN: u64 = 1_000;
const BATCH: usize = 8;

/// Records that are their own numbers.
struct Numbers;

impl Source for Numbers {
    type Sample = i64;

    fn len(&self) -> u64 {
        LEN
    }

    fn get(&self, index: u64, _: &mut Random) -> Result<i64> {
        Ok(index as i64)
    }
}

fn loader(workers: usize) -> Loader<Tensor> {
    Loader::new(Numbers).batch(BATCH).shuffle(7).workers(workers).prefetch(4).build().unwrap()
}

fn share(rank: usize, world: usize, workers: usize) -> Loader<Tensor> {
    let loader = Loader::new(Numbers).batch(BATCH).shuffle(7).workers(workers).prefetch(4);
    loader.rank(rank, world).build().unwrap()
}

fn numbers(batch: &Tensor) -> Vec<i64> {
    Vec::try_from(batch).unwrap()
}

/// What comes of one epoch from here on.
fn rest(loader: &mut Loader<Tensor>) -> Vec<i64> {
    loader.flat_map(|batch| numbers(&batch.unwrap())).collect()
}

fn sorted(mut numbers: Vec<i64>) -> Vec<i64> {
    numbers.sort_unstable();
    numbers
}

fn at(epoch: u64, samples: usize) -> Option<(u64, u64)> {
    Some((epoch, samples as u64))
}

/// A model whose weights depend on each number it has seen, and on their order.
struct Run {
    w: Tensor,
    stack: Stack,
    seen: Vec<Vec<i64>>,
    _vs: nn::VarStore,
}

impl Run {
    fn new(strategy: impl Strategy) -> Self {
        let (vs, w) = support::vector(2);
        let optimizer = AdamW::new(&vs, AdamWConfig::default().lr(0.1)).unwrap();
        let stack = Stack::of(&vs, optimizer).with(strategy).build().unwrap();
        Self { w, stack, seen: Vec::new(), _vs: vs }
    }

    fn every(micros: usize) -> Self {
        Self::new(GradAccumulator::every(micros))
    }

    fn step(&mut self, micro: memfit::Micro<Loaded<Tensor>>) -> Result<StepOutcome> {
        let Self { w, stack, seen, .. } = self;
        stack.step(micro, |batch| {
            seen.push(numbers(batch));
            Ok(loss(w, batch))
        })
    }

    /// Trains over epochs until so many micro-batches of this call have returned.
    fn train(&mut self, loader: &mut Loader<Tensor>, micros: usize) {
        let mut left = micros;
        while left > 0 {
            for micro in self.stack.try_windows(&mut *loader).take(left) {
                let _ = self.step(micro.unwrap()).unwrap();
                left -= 1;
            }
        }
    }

    fn at(&self) -> Option<(u64, u64)> {
        self.stack.data_position().map(|position| (position.epoch, position.samples))
    }
}

fn loss(w: &Tensor, batch: &Tensor) -> Loss {
    let x = batch.to_kind(Kind::Float) / LEN as f64;
    let off = w.get(0) * &x + w.get(1) - x.square();
    Loss::mean(off.square().mean(Kind::Float), batch.rows())
}

/// Case 56.
#[test]
fn stopped_at_batch_200_of_125_per_epoch_goes_on_at_201_with_the_same_permutation() {
    let _guard = serial();
    let mut straight = Run::every(1);
    straight.train(&mut loader(2), 375);
    for epoch in straight.seen.chunks(125) {
        assert_eq!(sorted(epoch.concat()), (0..LEN as i64).collect::<Vec<_>>());
    }
    for (before, after) in [(0, 4), (4, 1), (1, 0)] {
        let folder = tempfile::tempdir().unwrap();
        let mut snapshots = Snapshots::in_folder(folder.path()).unwrap();
        let (mut stopped, mut data) = (Run::every(1), loader(before));
        stopped.train(&mut data, 200);
        assert_eq!(stopped.at(), at(1, 75 * BATCH));
        // The one that `windows` looked ahead to left the loader, and was not consumed.
        assert_eq!(data.position().samples, 76 * BATCH as u64);
        snapshots.save(&mut stopped.stack, &Extras::new()).unwrap();
        stopped.train(&mut data, 20);

        let (mut resumed, mut data) = (Run::every(1), loader(after));
        resumed.train(&mut data, 3);
        let back = snapshots.latest().unwrap().unwrap().resume(&mut resumed.stack).unwrap();
        assert_eq!(back.data, resumed.stack.data_position());
        assert_eq!(resumed.at(), at(1, 75 * BATCH));
        resumed.seen.clear();
        data.seek(back.data.unwrap()).unwrap();
        resumed.train(&mut data, 175);
        assert_eq!(resumed.seen, straight.seen[200..]);
        let off = difference_of(&resumed.stack.state().unwrap(), &straight.stack.state().unwrap());
        assert_eq!(off, None);
    }
}

#[test]
fn the_loader_moves_no_generator_of_libtorchs() {
    let _guard = serial();
    let draws = |train: bool| {
        memfit::tch::manual_seed(5);
        if train {
            Run::every(2).train(&mut loader(2), 130);
        }
        support::values(&Tensor::rand([4], (Kind::Float, Device::Cpu)))
    };
    assert_eq!(draws(true), draws(false));
}

/// Windows look one micro-batch ahead, or all of the window, and threads run further ahead.
#[test]
fn what_was_read_ahead_is_not_consumed() {
    let _guard = serial();
    for whole_window in [false, true] {
        let (vs, w) = support::vector(2);
        let sgd = Sgd::new(&vs, SgdConfig::default().lr(0.01).momentum(0.5)).unwrap();
        let builder =
            if whole_window { Stack::of(&vs, InBackward::new(sgd).unwrap()) } else { Stack::of(&vs, sgd) };
        let mut stack = builder.with(GradAccumulator::every(3)).build().unwrap();
        assert_eq!(stack.data_position(), None);
        let mut data = loader(2);
        let mut windows = stack.try_windows(&mut data);
        for done in 0..8 {
            let micro = windows.next().unwrap().unwrap();
            let before = stack.data_position();
            assert_eq!(before.map_or(0, |position| position.samples), (done * BATCH) as u64);
            let _ = stack.step(micro, |batch| Ok(loss(&w, batch))).unwrap();
            let after = stack.data_position().unwrap();
            assert_eq!((after.epoch, after.samples), (0, ((done + 1) * BATCH) as u64));
        }
        drop(windows);
        assert_eq!(data.position().samples, 9 * BATCH as u64);
        stack.flush().unwrap_or_default();
    }
}

#[test]
fn a_snapshot_in_the_middle_of_a_window_keeps_what_the_window_consumed() {
    let _guard = serial();
    let end = 130;
    let mut straight = Run::every(4);
    straight.train(&mut loader(0), end);
    // The last window of the epoch has one micro-batch.
    for stop in [1, 2, 3, 4, 122, 125, 126] {
        let folder = tempfile::tempdir().unwrap();
        let mut snapshots = Snapshots::in_folder(folder.path()).unwrap();
        let (mut stopped, mut data) = (Run::every(4), loader(2));
        stopped.train(&mut data, stop);
        snapshots.save(&mut stopped.stack, &Extras::new()).unwrap();
        stopped.stack.discard().unwrap();

        let (mut resumed, mut data) = (Run::every(4), loader(3));
        let back = snapshots.latest().unwrap().unwrap().resume(&mut resumed.stack).unwrap();
        let samples = if stop > 125 { stop - 125 } else { stop } * BATCH;
        assert_eq!(resumed.at(), at(u64::from(stop > 125), samples));
        data.seek(back.data.unwrap()).unwrap();
        resumed.train(&mut data, end - stop);
        assert_eq!(resumed.seen, straight.seen[stop..], "stopped at {stop}");
        let off = difference_of(&resumed.stack.state().unwrap(), &straight.stack.state().unwrap());
        assert_eq!(off, None, "stopped at {stop}");
        // What a dropped window goes back to came along too.
        if stop < 4 {
            let mut again = Run::every(4);
            snapshots.latest().unwrap().unwrap().resume(&mut again.stack).unwrap();
            again.stack.discard().unwrap();
            assert_eq!(again.at(), None);
        }
        // 130 end one micro-batch into a window of the second epoch.
        resumed.stack.discard().unwrap();
        assert_eq!(resumed.at(), at(1, 4 * BATCH));
    }
    straight.stack.discard().unwrap();
}

/// Fails where it is told to.
#[derive(Debug)]
struct Fails {
    backward: Arc<AtomicBool>,
    update: Arc<AtomicBool>,
}

impl Strategy for Fails {
    fn place(&self) -> Place {
        Place::Average
    }

    fn backward(&mut self, pass: &mut Backward<'_>, next: NextBackward<'_>) -> Result<()> {
        if self.backward.swap(false, Ordering::Relaxed) {
            return Err(Error::config("planned", "fails"));
        }
        next(pass)
    }

    fn update(&mut self, phase: &mut UpdatePhase<'_>, next: NextUpdate<'_>) -> Result<Verdict> {
        if self.update.swap(false, Ordering::Relaxed) {
            return Err(Error::config("planned", "fails"));
        }
        next(phase)
    }
}

fn failing(micros: usize) -> (Run, Arc<AtomicBool>, Arc<AtomicBool>) {
    let (vs, w) = support::vector(2);
    let (backward, update) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
    let fails = Fails { backward: backward.clone(), update: update.clone() };
    let optimizer = AdamW::new(&vs, AdamWConfig::default().lr(0.1)).unwrap();
    let builder = Stack::of(&vs, optimizer).with(GradAccumulator::every(micros)).with(fails);
    let run = Run { w, stack: builder.build().unwrap(), seen: Vec::new(), _vs: vs };
    (run, backward, update)
}

fn next<I: Iterator<Item = Result<Loaded<Tensor>>>>(
    windows: &mut Windows<I>,
) -> memfit::Micro<Loaded<Tensor>> {
    windows.next().unwrap().unwrap()
}

#[test]
fn a_lost_window_was_not_consumed_and_can_be_had_again() {
    let _guard = serial();
    let mut straight = failing(3).0;
    straight.train(&mut loader(0), 9);

    let (mut run, backward, _) = failing(3);
    let mut data = loader(2);
    run.train(&mut data, 3);
    data.seek(run.stack.data_position().unwrap()).unwrap();
    let mut windows = run.stack.try_windows(&mut data);
    let _ = run.step(next(&mut windows)).unwrap();
    assert_eq!(run.at(), at(0, 4 * BATCH));
    // A failed forward loses its micro-batch, and the window stays.
    let micro = next(&mut windows);
    let refused = |_: &Loaded<Tensor>| Err(Error::config("planned", "fails"));
    assert!(run.stack.step(&micro, refused).is_err());
    assert_eq!(run.at(), at(0, 4 * BATCH));
    // A failed backward loses the window.
    backward.store(true, Ordering::Relaxed);
    let micro = next(&mut windows);
    assert!(matches!(run.step(micro), Err(Error::WindowLost { micro: 1, .. })));
    assert_eq!(run.at(), at(0, 3 * BATCH));
    drop(windows);

    data.seek(run.stack.data_position().unwrap()).unwrap();
    run.seen.truncate(3);
    run.train(&mut data, 6);
    assert_eq!(run.seen, straight.seen);
    assert_eq!(difference_of(&run.stack.state().unwrap(), &straight.stack.state().unwrap()), None);
}

#[test]
fn a_first_micro_batch_that_fails_consumes_nothing() {
    let _guard = serial();
    let (mut run, backward, _) = failing(2);
    let mut data = loader(0);
    let mut windows = run.stack.try_windows(&mut data);
    let micro = next(&mut windows);
    backward.store(true, Ordering::Relaxed);
    assert!(run.step(micro).is_err());
    assert_eq!(run.at(), None);
    let _ = run.step(next(&mut windows)).unwrap();
    assert_eq!(run.at(), at(0, 2 * BATCH), "the ones after it count on");
    run.stack.discard().unwrap();
    assert_eq!(run.at(), None);
}

#[test]
fn a_failed_update_consumes_nothing_of_its_window() {
    let _guard = serial();
    let (mut run, _, update) = failing(2);
    let mut data = loader(0);
    let mut windows = run.stack.try_windows(&mut data);
    for _ in 0..3 {
        let _ = run.step(next(&mut windows)).unwrap();
    }
    update.store(true, Ordering::Relaxed);
    let micro = next(&mut windows);
    assert!(run.step(micro).is_err());
    assert_eq!(run.at(), at(0, 2 * BATCH));
}

#[test]
fn a_batch_that_is_split_is_consumed_once_it_returns() {
    let _guard = serial();
    let mut run = Run::new(MicroBatcher::new().start(4));
    let mut data = loader(2);
    for done in 1..=3 {
        let batch = data.next().unwrap().unwrap();
        let mut micros = 0;
        let Run { w, stack, .. } = &mut run;
        let failed = stack.step_batch(&batch, |micro| {
            micros += 1;
            if micros == 2 { Err(Error::config("planned", "fails")) } else { Ok(loss(w, micro)) }
        });
        assert!(failed.is_err() && micros == 2);
        assert_eq!(run.at(), if done == 1 { None } else { at(0, (done - 1) * BATCH) });
        let Run { w, stack, .. } = &mut run;
        let mut rows = Vec::new();
        let outcome = stack.step_batch(&batch, |micro| {
            rows.extend(numbers(micro));
            Ok(loss(w, micro))
        });
        assert_eq!(outcome.unwrap().split().unwrap().micro_batches, 2);
        assert_eq!(rows, numbers(&batch));
        assert_eq!(run.at(), at(0, done * BATCH));
    }
}

#[test]
fn a_batch_that_ran_again_is_consumed_once() {
    let _guard = serial();
    let mut run = Run::new(MicroBatcher::new());
    let mut data = loader(0);
    let batch = data.next().unwrap().unwrap();
    let Run { w, stack, .. } = &mut run;
    let outcome = stack.step_batch(&batch, |micro| {
        if micro.rows() > 2 {
            let text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes.";
            return Err(memfit::tch::TchError::Torch(text.to_owned()).into());
        }
        Ok(loss(w, micro))
    });
    assert!(outcome.unwrap().split().unwrap().retries > 0);
    assert_eq!(run.at(), at(0, BATCH));
}

#[test]
fn a_skipped_step_consumed_its_data() {
    let _guard = serial();
    let mut run = Run::new(AmpScaler::fp16());
    let mut data = loader(0);
    let mut windows = run.stack.try_windows(&mut data);
    let micro = next(&mut windows);
    let Run { w, stack, .. } = &mut run;
    let outcome = stack.step(micro, |batch| Ok(Loss::mean(w.sum(Kind::Float) * f64::INFINITY, batch.rows())));
    assert!(matches!(outcome.unwrap(), StepOutcome::Skipped { .. }));
    assert_eq!(run.at(), at(0, BATCH));
}

#[test]
fn a_loop_of_ones_own_tells_what_it_consumed() {
    let _guard = serial();
    let mut run = Run::every(2);
    let mut data = loader(1);
    for done in 1..=3 {
        let batch = data.next().unwrap().unwrap();
        let w = &run.w;
        let _ = run.stack.step_with(|| Ok(loss(w, &batch))).unwrap();
        run.stack.consumed(batch.position);
        assert_eq!(run.at(), at(0, done * BATCH));
    }
    run.stack.discard().unwrap();
    assert_eq!(run.at(), at(0, 2 * BATCH));
    // Batches that know no position leave it alone.
    let w = &run.w;
    for micro in run.stack.windows([Tensor::ones([2], (Kind::Int64, Device::Cpu))]) {
        let _ = run.stack.step(micro.unwrap(), |batch| Ok(loss(w, batch))).unwrap();
    }
    assert_eq!(run.at(), at(0, 2 * BATCH));
}

/// Case 61, on resume.
#[test]
fn one_rank_that_becomes_two_and_one_again_gives_each_sample_once() {
    let _guard = serial();
    let (mut run, mut data) = (Run::every(4), loader(2));
    run.train(&mut data, 50);
    let from = run.stack.data_position().unwrap();
    let mut once = run.seen.concat();

    let mut ends = Vec::new();
    for rank in 0..2 {
        let (mut ranked, mut data) = (Run::every(4), share(rank, 2, rank * 3));
        ranked.stack.consumed(from);
        data.seek(from).unwrap();
        ranked.train(&mut data, 20);
        once.extend(ranked.seen.concat());
        ends.push(ranked.stack.data_position().unwrap());
    }
    assert_eq!(ends[0], ends[1], "a position counts over all ranks");
    assert_eq!((ends[0].epoch, ends[0].samples), (0, (50 + 2 * 20) * BATCH as u64));

    let mut data = loader(1);
    data.seek(ends[0]).unwrap();
    once.extend(rest(&mut data));
    assert_eq!(sorted(once), (0..LEN as i64).collect::<Vec<_>>());
    assert_eq!(data.epoch(), 1);
    assert_eq!(sorted(rest(&mut data)).len(), LEN as usize);
}

fn marked() -> DataPosition {
    let mut position = DataPosition::default();
    (position.epoch, position.samples, position.order) = (3, 5, u64::MAX - 1);
    position.mark = Some(Mark { file: 1, offset: 1 << 40, record: 4 });
    position
}

#[test]
fn a_state_puts_a_position_where_none_is_and_none_where_one_is() {
    let _guard = serial();
    let (mut with, mut without) = (Run::every(2), Run::every(2));
    with.stack.consumed(marked());
    let w = &with.w;
    let batch = Tensor::ones([2], (Kind::Int64, Device::Cpu));
    let _ = with.stack.step_with(|| Ok(loss(w, &batch))).unwrap();
    let mut later = marked();
    later.samples += 2;
    with.stack.consumed(later);
    let (some, none) = (with.stack.state().unwrap(), without.stack.state().unwrap());

    without.stack.load_state(&some).unwrap();
    assert_eq!(without.stack.data_position(), Some(later));
    without.stack.discard().unwrap();
    assert_eq!(without.stack.data_position(), Some(marked()));
    with.stack.load_state(&none).unwrap();
    assert_eq!(with.stack.data_position(), None);

    let folder = tempfile::tempdir().unwrap();
    let mut snapshots = Snapshots::in_folder(folder.path()).unwrap();
    snapshots.save(&mut without.stack, &Extras::new()).unwrap();
    let back = snapshots.latest().unwrap().unwrap().resume(&mut with.stack).unwrap();
    assert_eq!(back.data, Some(marked()));
    with.stack.load_state(&none).unwrap();
    snapshots.save(&mut with.stack, &Extras::new()).unwrap();
    let back = snapshots.latest().unwrap().unwrap().resume(&mut without.stack).unwrap();
    assert_eq!((back.data, without.stack.data_position()), (None, None));
}

#[test]
fn a_position_that_none_can_be_is_refused_and_nothing_moves() {
    let _guard = serial();
    let mut run = Run::every(2);
    run.stack.consumed(marked());
    let before = run.stack.state().unwrap();
    let lie = |state: &mut State, name: &str, value| {
        assert!(state.get(name).is_some(), "{name}");
        state.insert(name, value);
    };
    let lies = [
        ("data.known", Value::Int(2)),
        ("data.known", Value::Float(1.0)),
        ("data.known", Value::Int(0)), // the rest is unknown then
        ("data.epoch", Value::Int(-1)),
        ("data.samples", Value::Float(5.0)),
        ("data.order", Value::Text("5".to_owned())),
        ("data.mark.known", Value::Int(-1)),
        ("data.mark.offset", Value::Int(i64::MIN)),
    ];
    for (name, value) in lies {
        let mut state = run.stack.state().unwrap();
        lie(&mut state, name, value);
        let Err(Error::State { problems }) = run.stack.load_state(&state) else { panic!("{name}") };
        assert!(problems.iter().all(|problem| problem.contains("data.")), "{problems:?}");
        assert_eq!(difference_of(&run.stack.state().unwrap(), &before), None);
        assert_eq!(run.stack.data_position(), Some(marked()));
    }
    let mut state = run.stack.state().unwrap();
    state.remove("data.samples");
    assert!(run.stack.load_state(&state).is_err());
}

#[test]
fn a_tuple_has_the_position_of_its_first_part_that_has_one() {
    let _guard = serial();
    let tensor = || Tensor::ones([2], (Kind::Int64, Device::Cpu));
    let known = |samples: u64| {
        let mut position = marked();
        position.samples = samples;
        Loaded { batch: tensor(), position }
    };
    let samples = |position: Option<DataPosition>| position.map(|position| position.samples);
    assert_eq!(samples((tensor(), vec![tensor()]).data_position()), None);
    assert_eq!(samples((tensor(), known(4)).data_position()), Some(4));
    assert_eq!(samples((tensor(), (known(5), known(6)), known(7)).data_position()), Some(5));
    assert_eq!(samples(known(8).take_rows(0..1).unwrap().data_position()), Some(8));
}
