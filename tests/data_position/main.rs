//! The stack keeps how far training consumed its data, and a run that resumes gets what remains.

mod failures;
mod states;
#[path = "../support/mod.rs"]
mod support;
#[path = "../support/training.rs"]
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
        assert_eq!(data.data_position().samples, 76 * BATCH as u64);
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
        assert_eq!(data.data_position().samples, 9 * BATCH as u64);
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
