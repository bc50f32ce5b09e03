//! Running out of memory: the split is right, nothing is lost, and the end is explained.

#[path = "support/training.rs"]
mod training;

mod support;

use memfit::memory::{FailAt, Limit, Role};
use memfit::optim::{AdamW, AdamWConfig, Sgd, SgdConfig};
use memfit::strategies::{AmpScaler, GradAccumulator, MicroBatcher, Search};
use memfit::tch::{Device, Kind, Tensor, nn};
use memfit::{Error, Loss, Result, Split, Stack, State, Value, find_max_batch};
use support::{copies, difference, live, serial, values};
use training::difference_of;

const WIDTH: i64 = 64;

fn floats(size: &[i64]) -> Tensor {
    Tensor::randn(size, (Kind::Float, Device::Cpu))
}

fn shrunk(rows: i64) -> Error {
    let room = Tensor::f_zeros([1 << 40], (Kind::Float, Device::Cpu));
    room.err().map_or_else(|| Error::config("rows", format!("{rows}")), Error::from)
}

/// A model that mixes no rows and draws nothing.
struct Net {
    vs: nn::VarStore,
    first: nn::Linear,
    last: nn::Linear,
}

impl Net {
    fn new() -> Self {
        memfit::tch::manual_seed(5);
        let vs = nn::VarStore::new(Device::Cpu);
        let first = nn::linear(vs.root() / "first", WIDTH, WIDTH, Default::default());
        let last = nn::linear(vs.root() / "last", WIDTH, 1, Default::default());
        Self { vs, first, last }
    }

    fn loss(&self, x: &Tensor) -> Loss {
        let _segment = memfit::memory::segment("the block");
        let y = x.apply(&self.first).tanh().exp().tanh().apply(&self.last).square();
        Loss::mean(y.mean(Kind::Float), x.size()[0])
    }

    fn weights(&self) -> Vec<Tensor> {
        copies(&self.vs.trainable_variables())
    }

    fn stack(&self) -> Stack {
        let sgd = Sgd::new(&self.vs, SgdConfig::default().lr(0.05)).unwrap();
        Stack::of(&self.vs, sgd).with(MicroBatcher::new()).build().unwrap()
    }

    /// One step by hand, in micro-batches of so many rows.
    fn by_hand(&self, x: &Tensor, rows: i64) {
        let all = x.size()[0];
        let mut start = 0;
        while start < all {
            let here = rows.min(all - start);
            let loss = self.loss(&x.narrow(0, start, here));
            (loss.tensor() * (here as f64 / all as f64)).backward();
            start += here;
        }
        memfit::tch::no_grad(|| {
            for mut w in self.vs.trainable_variables() {
                w -= w.grad() * 0.05;
                w.zero_grad();
            }
        });
    }
}

/// Case 51.
#[test]
fn a_batch_of_16_that_fits_one_row_at_a_time_runs_as_16_and_equals_both_loops() {
    let _guard = serial();
    let x = floats(&[16, WIDTH]);
    let (net, split, whole) = (Net::new(), Net::new(), Net::new());
    let mut training = net.stack();
    let mut used = Vec::new();
    let rows = Tensor::arange(16, (Kind::Float, Device::Cpu));
    let outcome = training
        .step_batch(&(x.shallow_clone(), rows), |(x, rows)| {
            if x.size()[0] > 1 {
                return Err(shrunk(x.size()[0]));
            }
            used.extend(values(rows));
            Ok(net.loss(x))
        })
        .unwrap();
    assert_eq!(outcome.split(), Some(Split { batch: 16, rows: 1, micro_batches: 16, retries: 4 }));
    assert_eq!(used, (0..16).map(f64::from).collect::<Vec<_>>());
    split.by_hand(&x, 1);
    whole.by_hand(&x, 16);
    for ((a, b), c) in net.weights().iter().zip(split.weights()).zip(whole.weights()) {
        assert!(difference(a, &b) < 1e-6);
        assert!(difference(a, &c) < 1e-6);
    }
}

/// Case 51, under a budget, with rows that do not split evenly.
#[test]
fn under_a_limit_it_finds_a_size_keeps_it_and_the_step_is_the_whole_batchs() {
    let _guard = serial();
    let x = floats(&[50, WIDTH]);
    let (net, whole) = (Net::new(), Net::new());
    let mut training = net.stack();
    let limit = Limit::new(live() + 50_000).unwrap();
    let first = training.step_batch(&x, |x| Ok(net.loss(x))).unwrap().split().unwrap();
    assert!(first.retries > 0 && first.rows < 50, "{first:?}");
    assert_eq!(first.micro_batches as i64, (50 + first.rows - 1) / first.rows);
    let second = training.step_batch(&x, |x| Ok(net.loss(x))).unwrap().split().unwrap();
    assert_eq!((second.rows, second.retries), (first.rows, 0));
    drop(limit);
    whole.by_hand(&x, 50);
    whole.by_hand(&x, 50);
    for (a, b) in net.weights().iter().zip(whole.weights()) {
        assert!(difference(a, &b) < 1e-6, "{}", difference(a, &b));
    }
}

#[test]
fn it_grows_again_when_memory_comes_back_and_not_before() {
    let _guard = serial();
    let x = floats(&[64, WIDTH]);
    let net = Net::new();
    let sgd = Sgd::new(&net.vs, SgdConfig::default().lr(0.05)).unwrap();
    let mut training = Stack::of(&net.vs, sgd).with(MicroBatcher::new().patience(2)).build().unwrap();
    let run = |training: &mut Stack| {
        let split = training.step_batch(&x, |x| Ok(net.loss(x))).unwrap().split().unwrap();
        (split.rows, split.retries)
    };
    let limit = Limit::new(live() + 60_000).unwrap();
    let (small, retries) = run(&mut training);
    assert!(retries > 0);
    for _ in 0..20 {
        assert_eq!(run(&mut training), (small, 0), "never tries what cannot fit");
    }
    drop(limit);
    let _limit = Limit::new(live() + (10 << 20)).unwrap();
    let sizes: Vec<i64> = (0..20).map(|_| run(&mut training).0).collect();
    assert_eq!(sizes.last(), Some(&64));
    assert!(sizes.windows(2).all(|pair| pair[1] == pair[0] || pair[1] == 2 * pair[0]), "{sizes:?}");
    assert_eq!(training.strategy::<MicroBatcher>().unwrap().rows(), None);
}

/// A training with BatchNorm, dropout, moments and a loss scale.
fn whole_state(seed: i64) -> (nn::VarStore, training::Net, Stack) {
    memfit::tch::manual_seed(seed);
    let vs = nn::VarStore::new(Device::Cpu);
    let net = training::Net::new(&vs.root());
    let adamw = AdamW::new(&vs, AdamWConfig::default().lr(0.01)).unwrap();
    let stack = Stack::of(&vs, adamw)
        .with(MicroBatcher::new())
        .with(AmpScaler::fp16_with(|config| config.init_scale = 64.0).unwrap())
        .build()
        .unwrap();
    (vs, net, stack)
}

/// What the size of micro-batches is not a part of.
fn state(stack: &mut Stack) -> State {
    stack.state().unwrap()
}

fn only_the_size_differs(a: &State, b: &State) {
    let others = |state: &'static str| move |(name, _): &(&str, _)| !name.starts_with(state);
    let (mut left, mut right) = (a.iter().filter(others("window.")), b.iter().filter(others("window.")));
    loop {
        match (left.next(), right.next()) {
            (None, None) => return,
            (Some((name, a)), Some((other, b))) => {
                assert_eq!(name, other);
                match (a, b) {
                    (Value::Tensor(a), Value::Tensor(b)) => assert!(training::same_bits(a, b), "{name}"),
                    (a, b) => assert_eq!(format!("{a:?}"), format!("{b:?}"), "{name}"),
                }
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Case 50: at 64 rows in forward, in backward of micro-batch 1, in backward of 2 of 4.
#[test]
fn a_failure_wherever_it_comes_leaves_no_trace_and_smaller_micro_batches_succeed() {
    let _guard = serial();
    let x = floats(&[256, 4]);
    for (in_backward, at) in [(false, 0), (true, 0), (true, 1)] {
        let run = |fails: bool| {
            let (_vs, net, mut stack) = whole_state(9);
            // A size of its own each, so that nothing else differs.
            let start = if fails { 64 } else { 32 };
            *stack.strategy_mut::<MicroBatcher>().unwrap() = MicroBatcher::new().start(start);
            let mut micro = 0;
            let mut armed = None;
            let split = stack
                .step_batch(&x, |x| {
                    let here = (x.size()[0] == 64 && micro == at, micro += 1).0;
                    let loss = net.loss(x);
                    match (here, in_backward) {
                        (false, _) => Ok(Loss::mean(loss, x.size()[0])),
                        (true, false) => Err(shrunk(64)),
                        (true, true) => {
                            // The first few are the driver's, then come the graph's nodes.
                            armed = Some(FailAt::nth(6).unwrap());
                            Ok(Loss::mean(loss, x.size()[0]))
                        }
                    }
                })
                .unwrap()
                .split()
                .unwrap();
            assert_eq!(armed.is_some(), fails && in_backward);
            assert_eq!((split.rows, split.micro_batches, split.retries), (32, 8, usize::from(fails)));
            state(&mut stack)
        };
        only_the_size_differs(&run(true), &run(false));
    }
}

/// Case 50: every single allocation of a step, in turn.
#[test]
fn a_failure_at_any_allocation_ends_in_the_right_step_or_in_an_untouched_state() {
    let _guard = serial();
    let x = floats(&[8, 4]);
    let mut reached = 0;
    for n in 1.. {
        let (_vs, net, mut stack) = whole_state(11);
        let before = state(&mut stack);
        let armed = FailAt::nth(n).unwrap();
        let failures = memfit::memory::stats(Device::Cpu).unwrap().failures;
        let outcome = stack.step_batch(&x, |x| Ok(Loss::mean(net.loss(x), x.size()[0])));
        let failed = memfit::memory::stats(Device::Cpu).unwrap().failures > failures;
        drop(armed);
        match outcome {
            Ok(outcome) => {
                let split = outcome.split().unwrap();
                assert_eq!(split.retries > 0, failed, "allocation {n}");
                let (_vs, net, mut plain) = whole_state(11);
                let rows = split.rows;
                *plain.strategy_mut::<MicroBatcher>().unwrap() = MicroBatcher::new().start(rows);
                let _ = plain.step_batch(&x, |x| Ok(Loss::mean(net.loss(x), x.size()[0]))).unwrap();
                only_the_size_differs(&state(&mut stack), &state(&mut plain));
            }
            Err(error) => {
                assert!(error.is_out_of_memory(), "allocation {n}: {error}");
                only_the_size_differs(&before, &state(&mut stack));
                assert!(stack.step_batch(&x, |x| Ok(Loss::mean(net.loss(x), 8))).unwrap().stepped());
            }
        }
        if !failed {
            break;
        }
        reached = n;
    }
    assert!(reached > 20, "a step has more allocations than {reached}");
}

/// Case 52.
#[test]
fn a_limit_of_13_is_found_from_either_side_and_has_itself_run() {
    let _guard = serial();
    for start in [1, 13, 14, 64] {
        let mut ran = Vec::new();
        let found = find_max_batch(Search::new(1..=64).start(start), |n| {
            if n > 13 {
                return Err(shrunk(n));
            }
            ran.push(n);
            Ok(())
        })
        .unwrap();
        assert_eq!((found.size, found.largest), (13, 13));
        assert!(ran.contains(&13));
    }
    let margin =
        find_max_batch(Search::new(1..=64).margin(0.1), |n| if n > 13 { Err(shrunk(n)) } else { Ok(()) });
    let margin = margin.unwrap();
    assert_eq!((margin.size, margin.largest), (11, 13));
    assert!(margin.trials.iter().any(|trial| trial.size == 11 && trial.ran));
    let none = find_max_batch(Search::new(1..=64).start(64), |n| Err(shrunk(n)));
    assert!(matches!(none, Err(Error::OutOfMemory { .. })), "{none:?}");
    for bad in [Search::new(0..=4), Search::new(2..=4).start(5), Search::new(1..=4).margin(1.0)] {
        assert!(matches!(find_max_batch(bad, |_| Ok(())), Err(Error::Config { .. })));
    }
    let other = find_max_batch(1..=4, |_| Err(Error::config("x", "y")));
    assert!(matches!(other, Err(Error::Config { .. })));
}

/// Case 52, with a whole training under a limit.
#[test]
fn a_search_over_a_training_puts_everything_back_and_its_size_then_trains() {
    let _guard = serial();
    let (_vs, net, mut stack) = whole_state(3);
    let x = floats(&[512, 4]);
    let before = state(&mut stack);
    let limit = Limit::new(live() + 20_000).unwrap();
    let loss = |n: i64| Ok(Loss::mean(net.loss(&x.narrow(0, 0, n)), n));
    let found = stack.find_max_batch(Search::new(1..=512).start(512), loss).unwrap();
    assert!((2..512).contains(&found.size), "{found:?}");
    only_the_size_differs(&before, &state(&mut stack));
    drop(limit);
    assert!(difference_of(&before, &state(&mut stack)).is_none());
    let smallest_failed = found.trials.iter().filter(|trial| !trial.ran).map(|trial| trial.size).min();
    assert_eq!(smallest_failed, Some(found.size + 1));
    let _limit = Limit::new(live() + 20_000).unwrap();
    assert!(
        stack
            .step_batch(&x.narrow(0, 0, found.size), |x| Ok(Loss::mean(net.loss(x), 1)))
            .unwrap()
            .split()
            .unwrap()
            .retries
            == 0
    );
}

/// Case 53.
#[test]
fn a_failure_in_evaluation_leaves_the_size_alone() {
    let _guard = serial();
    let net = Net::new();
    let mut training = net.stack();
    let x = floats(&[16, WIDTH]);
    let failed: Result<()> = training.evaluate(|| Err(shrunk(16)));
    assert!(failed.unwrap_err().is_out_of_memory());
    assert_eq!(training.strategy::<MicroBatcher>().unwrap().rows(), None);
    let split = training.step_batch(&x, |x| Ok(net.loss(x))).unwrap().split().unwrap();
    assert_eq!((split.rows, split.retries), (16, 0));
}

/// Case 53.
#[test]
fn a_failure_while_optimizer_state_is_made_moves_nothing() {
    let _guard = serial();
    let net = Net::new();
    let before = net.weights();
    let limit = Limit::new(live() + 1000).unwrap();
    let adamw = AdamW::new(&net.vs, AdamWConfig::default());
    let built = adamw.and_then(|adamw| Stack::of(&net.vs, adamw).with(MicroBatcher::new()).build());
    drop(limit);
    assert!(matches!(built, Err(Error::OutOfMemory { .. })));
    assert!(support::same(&before, &net.weights()));
}

/// Case 54: the text of a refusal, through a step, with the bytes asked for.
#[test]
fn one_row_that_does_not_fit_is_explained() {
    let _guard = serial();
    let net = Net::new();
    let mut training = net.stack();
    let x = floats(&[4, WIDTH]);
    let before = net.weights();
    let limit = Limit::new(live() + 10_000).unwrap();
    let error = training
        .step_batch(&x, |x| {
            let _segment = memfit::memory::segment("wide");
            let wide = (x.repeat([1, 32]) * net.vs.trainable_variables()[0].sum(Kind::Float)).exp();
            Ok(Loss::mean(wide.mean(Kind::Float), 1))
        })
        .unwrap_err();
    drop(limit);
    let Error::DoesNotFit { advice, source } = &error else { panic!("{error}") };
    let bytes = (WIDTH * 32 * 4) as u64;
    let Error::OutOfMemory { requested, .. } = &**source else { panic!("{source}") };
    assert_eq!(*requested, Some(bytes));
    let peak = advice.peak.as_ref().unwrap();
    assert_eq!((peak.phase.name(), peak.segment.as_deref()), ("forward", Some("wide")));
    assert!(advice.holders.len() <= 5);
    let weights: u64 = before.iter().map(|weight| 4 * weight.numel() as u64).sum();
    assert!(advice.holders.iter().any(|one| one.role == Role::Parameters && one.bytes == weights), "{error}");
    let text = error.to_string();
    assert!(text.lines().last().unwrap().starts_with("add next: "), "{text}");
    assert!(support::same(&before, &net.weights()));
    assert!(training.step_batch(&x, |x| Ok(net.loss(x))).unwrap().stepped());
}

#[test]
fn other_errors_are_returned_and_two_splitters_are_refused() {
    let _guard = serial();
    let net = Net::new();
    let mut training = net.stack();
    let mut calls = 0;
    let error = training.step_batch(&floats(&[8, WIDTH]), |_| {
        calls += 1;
        Err(Error::config("loss", "is wrong"))
    });
    assert!(matches!(error, Err(Error::Config { .. })));
    assert_eq!(calls, 1);
    let sgd = Sgd::new(&net.vs, SgdConfig::default()).unwrap();
    let both = Stack::of(&net.vs, sgd).with(MicroBatcher::new()).with(GradAccumulator::every(2)).build();
    assert!(matches!(both, Err(Error::Incompatible { .. })));
}

#[test]
fn the_learned_size_goes_with_the_state() {
    let _guard = serial();
    let (net, other) = (Net::new(), Net::new());
    let mut training = net.stack();
    let x = floats(&[16, WIDTH]);
    let fits = |x: &Tensor, net: &Net| if x.size()[0] > 4 { Err(shrunk(5)) } else { Ok(net.loss(x)) };
    let _ = training.step_batch(&x, |x| fits(x, &net)).unwrap();
    let mut resumed = other.stack();
    resumed.load_state(&training.state().unwrap()).unwrap();
    let split = resumed.step_batch(&x, |x| fits(x, &other)).unwrap().split().unwrap();
    assert_eq!((split.rows, split.retries), (4, 0));
}
