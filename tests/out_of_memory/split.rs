//! The size is found, kept and grown; the step is the whole batch's.

use super::*;

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
fn a_start_below_one_row_is_refused_by_build() {
    let _guard = serial();
    let net = Net::new();
    for start in [0, -4] {
        let sgd = Sgd::new(&net.vs, SgdConfig::default()).unwrap();
        let built = Stack::of(&net.vs, sgd).with(MicroBatcher::new().start(start)).build();
        assert!(matches!(built, Err(Error::Config { setting: "MicroBatcher::start", .. })), "{start}");
    }
}

/// Epochs of batches of 64 rows with a last one of 10, where 8 to 12 rows fit: an epoch later it
/// still knows.
#[test]
fn batches_of_varying_size_take_nothing_back_of_what_was_learned() {
    let _guard = serial();
    let net = Net::new();
    for fine in [false, true] {
        for fits in [8, 12] {
            let sgd = Sgd::new(&net.vs, SgdConfig::default().lr(0.01)).unwrap();
            let batcher = MicroBatcher::new().patience(4);
            let batcher = if fine { batcher.fine() } else { batcher };
            let mut training = Stack::of(&net.vs, sgd).with(batcher).build().unwrap();
            let mut retries = Vec::new();
            for _ in 0..12 {
                let mut epoch = 0;
                for rows in [64, 64, 64, 64, 64, 10] {
                    let x = floats(&[rows, WIDTH]);
                    let fit = |x: &Tensor| if x.size()[0] > fits { Err(shrunk(0)) } else { Ok(net.loss(x)) };
                    epoch += training.step_batch(&x, fit).unwrap().split().unwrap().retries;
                }
                retries.push(epoch);
            }
            assert!(retries[0] >= 3 && retries[1..].iter().all(|epoch| *epoch <= 2), "{retries:?}");
            assert!(retries[6..].iter().sum::<usize>() <= 3, "{retries:?}");
            let known = training.strategy::<MicroBatcher>().unwrap().rows().unwrap();
            assert!(known <= fits && 2 * known > fits, "{known} of {fits}");
        }
    }
}

/// Of 64 rows 16 fit, then all: ⌈64/4⌉, ⌈64/3⌉, ⌈64/2⌉, 64.
#[test]
fn in_fine_steps_it_grows_to_every_count_of_micro_batches() {
    let _guard = serial();
    let net = Net::new();
    let sgd = Sgd::new(&net.vs, SgdConfig::default().lr(0.01)).unwrap();
    let mut training = Stack::of(&net.vs, sgd).with(MicroBatcher::new().fine().patience(1)).build().unwrap();
    let mut fits = 16;
    let x = floats(&[64, WIDTH]);
    let mut seen = Vec::new();
    for step in 0..80 {
        if step == 1 {
            fits = 64;
        }
        let fit = |x: &Tensor| if x.size()[0] > fits { Err(shrunk(0)) } else { Ok(net.loss(x)) };
        let split = training.step_batch(&x, fit).unwrap().split().unwrap();
        if seen.last() != Some(&split.rows) {
            seen.push(split.rows);
        }
    }
    assert_eq!(seen, [16, 22, 32, 64]);
}

/// 1 MiB of gradients is there for every micro-batch, however many rows it has, and another one
/// while it is added up. Growth from 16 to 32 rows takes twice the rest.
#[test]
fn growth_is_tried_where_activations_fit_beside_the_gradients() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let layer = nn::linear(vs.root(), 512, 512, Default::default());
    let sgd = Sgd::new(&vs, SgdConfig::default().lr(0.01)).unwrap();
    let batcher = MicroBatcher::new().start(16).patience(1);
    let mut training = Stack::of(&vs, sgd).with(batcher).build().unwrap();
    let x = floats(&[64, 512]);
    let loss = |x: &Tensor| Ok(Loss::mean(x.apply(&layer).tanh().square().mean(Kind::Float), x.size()[0]));
    let _limit = Limit::new(live() + (7 << 19)).unwrap();
    let first = training.step_batch(&x, |x| loss(x)).unwrap().split().unwrap();
    let second = training.step_batch(&x, |x| loss(x)).unwrap().split().unwrap();
    assert_eq!((first.rows, second.rows, second.retries), (16, 32, 0));
}

/// Its forward ran alone, so it tells nothing of what a window takes.
#[test]
fn a_window_of_ignored_labels_alone_teaches_nothing() {
    let _guard = serial();
    let x = floats(&[8, WIDTH]);
    let net = Net::new();
    let sgd = Sgd::new(&net.vs, SgdConfig::default().lr(0.05)).unwrap();
    let batcher = MicroBatcher::new().start(4).patience(1);
    let mut training = Stack::of(&net.vs, sgd).with(batcher).build().unwrap();
    let _limit = Limit::new(live() + (10 << 20)).unwrap();
    let rows = |training: &Stack| training.strategy::<MicroBatcher>().unwrap().rows();
    for _ in 0..3 {
        let ignored = training.step_batch(&x, |x| Ok(Loss::mean(net.loss(x).tensor() * 0.0, 0)));
        assert!(!ignored.unwrap().stepped());
        assert_eq!(rows(&training), Some(4));
    }
    assert!(training.step_batch(&x, |x| Ok(net.loss(x))).unwrap().stepped());
    assert_eq!(rows(&training), None, "a real one is clean, and the whole batch has room");
}
