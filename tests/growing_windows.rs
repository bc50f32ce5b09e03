//! Windows that grow while training goes on.

#[path = "support/training.rs"]
mod training;

mod support;

use memfit::optim::{AdamW, AdamWConfig, InBackward, Sgd, SgdConfig};
use memfit::strategies::{AmpScaler, Cosine, GradAccumulator, GradClip};
use memfit::tch::{Device, Kind, Tensor, nn, nn::Module};
use memfit::{Error, Exactness, Loss, Result, Stack, StackBuilder, StepOutcome};
use support::{copies, difference, same, serial, sgd, slope, vector};
use training::difference_of;

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

/// A model that mixes no rows and draws nothing.
fn model() -> (nn::VarStore, nn::Linear) {
    memfit::tch::manual_seed(3);
    let vs = nn::VarStore::new(Device::Cpu);
    let linear = nn::linear(vs.root(), 5, 3, Default::default());
    (vs, linear)
}

fn mean_square(linear: &nn::Linear, x: &Tensor) -> Tensor {
    linear.forward(x).tanh().square().mean(Kind::Float)
}

fn batches(count: usize) -> Vec<Tensor> {
    memfit::tch::manual_seed(4);
    (0..count).map(|_| Tensor::randn([4, 5], CPU)).collect()
}

fn half(vs: &nn::VarStore) -> Sgd {
    Sgd::new(vs, SgdConfig::default().lr(0.5)).unwrap()
}

/// The loop written by hand: windows of these lengths.
fn by_hand(lengths: &[usize], batches: &[Tensor]) -> Vec<Tensor> {
    let (vs, linear) = model();
    let mut batches = batches.iter();
    for length in lengths {
        batches.by_ref().take(*length).for_each(|x| mean_square(&linear, x).backward());
        memfit::tch::no_grad(|| {
            for mut w in vs.trainable_variables() {
                w -= (w.grad() / *length as f64) * 0.5;
                w.zero_grad();
            }
        });
    }
    copies(&vs.trainable_variables())
}

/// Micro-batches of each window that ran.
fn run_windows(training: &mut Stack, linear: &nn::Linear, batches: &[Tensor]) -> Vec<usize> {
    let mut lengths = Vec::new();
    for micro in training.windows(batches.iter().map(Tensor::shallow_clone)) {
        let micro = micro.unwrap();
        let (index, last) = (micro.index, micro.last);
        let outcome = training.step(micro, |x| Ok(Loss::mean(mean_square(linear, x), x.size()[0]))).unwrap();
        assert_eq!(outcome.stepped(), last);
        if last {
            lengths.push(index + 1);
        }
    }
    lengths
}

#[test]
fn each_window_is_as_long_as_the_updates_before_it_say_and_the_weights_are_the_loops() {
    let _guard = serial();
    let cases: [(GradAccumulator, &[usize]); 3] = [
        (GradAccumulator::every(1).growing(4, 4), &[1, 1, 2, 2, 4, 4, 3]),
        (GradAccumulator::every(1).at_step(2, 3), &[1, 1, 3, 3, 3, 3, 3]),
        (GradAccumulator::every(2).at_step(1, 3).growing(5, 3), &[2, 3, 3, 5, 4]),
    ];
    for (accumulator, lengths) in cases {
        let batches = batches(lengths.iter().sum());
        let (vs, linear) = model();
        let mut training = Stack::of(&vs, half(&vs)).with(accumulator).build().unwrap();
        assert_eq!(run_windows(&mut training, &linear, &batches), lengths);
        assert!(same(&by_hand(lengths, &batches), &copies(&vs.trainable_variables())), "{lengths:?}");
    }
}

#[test]
fn a_loop_of_ones_own_is_told_how_long_windows_are_and_flush_ends_the_last() {
    let _guard = serial();
    let (vs, linear) = model();
    let accumulator = GradAccumulator::every(1).growing(4, 2);
    let mut training = Stack::of(&vs, half(&vs)).with(accumulator).build().unwrap();
    let batches = batches(9);
    let mut told = Vec::new();
    for x in &batches {
        let outcome = training.step_with(|| Ok(Loss::mean(mean_square(&linear, x), 4))).unwrap();
        told.push(match outcome {
            StepOutcome::Accumulating { of, .. } => of.unwrap(),
            _ => 0,
        });
    }
    assert_eq!(told, [0, 2, 0, 4, 4, 4, 0, 4, 4]);
    assert!(training.flush().unwrap().unwrap().stepped());
    assert!(same(&by_hand(&[1, 2, 4, 2], &batches), &copies(&vs.trainable_variables())));
}

#[test]
fn windows_by_tokens_grow_too() {
    let _guard = serial();
    let (vs, linear) = model();
    let accumulator = GradAccumulator::tokens(4).growing(12, 2);
    let mut training = Stack::of(&vs, half(&vs)).with(accumulator).build().unwrap();
    // Four rows each: 4, then 8, then 12.
    assert_eq!(run_windows(&mut training, &linear, &batches(9)), [1, 2, 3, 3]);
}

/// A skipped window does not count, and neither do those that a schedule and clipping see.
#[test]
fn a_skipped_step_does_not_count() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let mut training = Stack::of(&vs, sgd(&vs))
        .with(GradAccumulator::every(1).growing(2, 1))
        .with(AmpScaler::fp16())
        .with(GradClip::norm(100.0))
        .with(Cosine::new(100))
        .build()
        .unwrap();
    let mut outcomes = Vec::new();
    for g in [f32::NAN, f32::INFINITY, 1.0, f32::NAN, 1.0, 1.0] {
        let outcome = training.step_with(|| Ok(Loss::mean(slope(&w, &[g]), 1))).unwrap();
        outcomes.push(match outcome {
            StepOutcome::Accumulating { .. } => 'a',
            StepOutcome::Skipped { .. } => 's',
            _ => 't',
        });
    }
    // Two skipped windows of 1, one taken; then windows of 2: one skipped, one open.
    assert_eq!(outcomes, ['s', 's', 't', 'a', 's', 'a']);
    training.discard().unwrap();
}

#[test]
fn a_run_is_gone_on_with_between_windows_and_in_one() {
    let _guard = serial();
    let accumulator = || GradAccumulator::every(1).growing(4, 4);
    let batches = batches(14);
    let build = || {
        let (vs, linear) = model();
        let adamw = AdamW::new(&vs, AdamWConfig::default()).unwrap();
        let training = Stack::of(&vs, adamw).with(accumulator()).with(Cosine::new(20)).build().unwrap();
        (vs, linear, training)
    };
    let run = |training: &mut Stack, linear: &nn::Linear, batches: &[Tensor]| {
        for x in batches {
            let _ = training.step_with(|| Ok(Loss::mean(mean_square(linear, x), 4))).unwrap();
        }
    };
    let (_vs, linear, mut straight) = build();
    run(&mut straight, &linear, &batches);
    let wanted = straight.state().unwrap();
    // 4: windows of two have begun. 5, 9: in the middle of one.
    for at in [1, 4, 5, 6, 9] {
        let (_vs, linear, mut first) = build();
        run(&mut first, &linear, &batches[..at]);
        let state = first.state().unwrap();
        first.discard().unwrap();
        let (_vs, linear, mut second) = build();
        second.load_state(&state).unwrap();
        run(&mut second, &linear, &batches[at..]);
        assert_eq!(difference_of(&wanted, &second.state().unwrap()), None, "at {at}");
        second.discard().unwrap();
        // The same through `windows`.
        let (_vs, linear, mut third) = build();
        third.load_state(&state).unwrap();
        run_windows(&mut third, &linear, &batches[at..]);
        assert_eq!(third.position().steps, 6, "at {at}");
    }
    straight.discard().unwrap();
    let (vs, _) = model();
    let adamw = AdamW::new(&vs, AdamWConfig::default()).unwrap();
    let other = GradAccumulator::every(1).growing(4, 5);
    let mut other = Stack::of(&vs, adamw).with(other).with(Cosine::new(20)).build().unwrap();
    let error = other.load_state(&wanted).unwrap_err();
    assert!(matches!(error, Error::State { .. }), "{error}");
}

fn heavy(vs: &nn::VarStore) -> Sgd {
    Sgd::new(vs, SgdConfig::default().lr(0.1).momentum(0.9)).unwrap()
}

#[test]
fn a_momentum_in_backward_knows_each_windows_length_when_it_begins() {
    let _guard = serial();
    let grown = || GradAccumulator::every(1).growing(4, 4);
    let batches = batches(1 + 1 + 2 + 2 + 4 + 3);
    let run = |builder: fn(&nn::VarStore) -> StackBuilder| {
        let (vs, linear) = model();
        let mut training = builder(&vs).with(grown()).build().unwrap();
        let lengths = run_windows(&mut training, &linear, &batches);
        (copies(&vs.trainable_variables()), lengths, training.exactness())
    };
    let (wanted, lengths, exactness) = run(|vs| Stack::of(vs, heavy(vs)));
    assert_eq!((lengths, exactness), (vec![1, 1, 2, 2, 4, 3], Exactness::Bitwise));
    let (got, lengths, exactness) = run(|vs| Stack::of(vs, InBackward::new(heavy(vs)).unwrap()));
    // A short window is told its own length.
    assert_eq!((lengths, exactness), (vec![1, 1, 2, 2, 4, 3], Exactness::SummationOrder));
    for (a, b) in wanted.iter().zip(&got) {
        assert!(difference(a, b) < 1e-6, "{}", difference(a, b));
    }
}

#[test]
fn what_cannot_bear_windows_cannot_bear_ones_that_begin_with_one_micro_batch() {
    let _guard = serial();
    let (vs, _) = model();
    let adamw = || InBackward::new(AdamW::new(&vs, AdamWConfig::default()).unwrap()).unwrap();
    assert!(Stack::of(&vs, adamw()).with(GradAccumulator::every(1)).build().is_ok());
    let refused = Stack::of(&vs, adamw()).with(GradAccumulator::every(1).growing(4, 4)).build();
    assert!(matches!(refused, Err(Error::Incompatible { .. })));
    let shrinking = Stack::of(&vs, half(&vs)).with(GradAccumulator::every(4).at_step(10, 2)).build();
    assert!(matches!(shrinking, Err(Error::Config { .. })));
}

#[test]
fn an_item_that_was_taken_before_its_window_had_a_length_is_refused() {
    let _guard = serial();
    let (vs, linear) = model();
    let accumulator = GradAccumulator::every(1).growing(2, 1);
    let mut training = Stack::of(&vs, half(&vs)).with(accumulator).build().unwrap();
    let loss = |x: &Tensor| Ok(Loss::mean(mean_square(&linear, x), 4));
    let early: Vec<_> = training.windows(batches(3)).collect::<Result<_>>().unwrap();
    assert!(training.step(&early[0], loss).unwrap().stepped());
    let error = training.step(&early[1], loss).unwrap_err();
    assert!(matches!(error, Error::CallOrder { .. }), "{error}");
    assert!(error.to_string().contains("Micros(1)"), "{error}");
    assert_eq!(run_windows(&mut training, &linear, &batches(4)), [2, 2]);
}

#[test]
fn a_batch_that_the_caller_gives_is_only_split_finer() {
    let _guard = serial();
    let (vs, linear) = model();
    let accumulator = GradAccumulator::every(1).growing(4, 2);
    let mut training = Stack::of(&vs, half(&vs)).with(accumulator).build().unwrap();
    let batch = Tensor::cat(&batches(2), 0);
    let rows: Vec<_> = (0..3)
        .map(|_| {
            let outcome =
                training.step_batch(&batch, |x| Ok(Loss::mean(mean_square(&linear, x), x.size()[0])));
            outcome.unwrap().split().unwrap().rows
        })
        .collect();
    assert_eq!(rows, [8, 4, 2]);
    assert_eq!(training.position().steps, 3);
}
