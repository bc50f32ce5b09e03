//! The largest size that fits.

use super::*;

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

/// Case 52, for a sequence's length: attention's scores take 4·T² bytes, twice in forward.
#[test]
fn the_longest_sequence_is_found_and_trains() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().randn("w", &[8, 8], 0.0, 0.3);
    let sgd = Sgd::new(&vs, SgdConfig::default().lr(0.01)).unwrap();
    let mut stack = Stack::of(&vs, sgd).build().unwrap();
    let x = floats(&[2, 512, 8]);
    let loss = |length: i64| {
        let x = x.narrow(1, 0, length).matmul(&w);
        let scores = x.matmul(&x.transpose(1, 2)).softmax(-1, Kind::Float);
        Ok(Loss::mean(scores.matmul(&x).square().mean(Kind::Float), 2 * length))
    };
    let _ = stack.step_with(|| loss(8)).unwrap();
    let saved = state(&mut stack);
    let before = live();
    let room = 2 * 4 * 2 * 128 * 128;
    let limit = Limit::new(live() + room).unwrap();
    let found = stack.find_max_batch(Search::new(1..=512).start(16), loss).unwrap();
    assert!((32..128).contains(&found.size), "{found:?}");
    assert!(found.trials.iter().any(|trial| trial.size == found.size && trial.ran));
    assert!(found.trials.iter().any(|trial| trial.size == found.size + 1 && !trial.ran));
    drop(limit);
    assert_eq!(live(), before);
    assert!(difference_of(&saved, &state(&mut stack)).is_none());
    let _limit = Limit::new(live() + room).unwrap();
    assert!(stack.step_with(|| loss(found.size)).unwrap().stepped());
    assert!(stack.step_with(|| loss(found.size + 1)).unwrap_err().is_out_of_memory());
}

/// Under `MicroBatcher` a batch is several micro-batches, and the second one runs on top of the
/// first one's gradients: as many bytes as the weights.
#[test]
fn a_size_found_beside_a_micro_batcher_leaves_room_for_the_gradients() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let layer = nn::linear(vs.root(), 256, 256, Default::default());
    let sgd = Sgd::new(&vs, SgdConfig::default().lr(0.01)).unwrap();
    let mut stack = Stack::of(&vs, sgd).with(MicroBatcher::new()).build().unwrap();
    let x = floats(&[512, 256]);
    let loss = |x: &Tensor| Ok(Loss::mean(x.apply(&layer).tanh().square().mean(Kind::Float), x.size()[0]));
    let _ = stack.step_batch(&x.narrow(0, 0, 2), |x| loss(x)).unwrap();
    let room = live() + 1_000_000;
    let limit = Limit::new(room).unwrap();
    let found = stack.find_max_batch(Search::new(1..=256).start(8), |n| loss(&x.narrow(0, 0, n))).unwrap();
    assert!((2..256).contains(&found.size), "{found:?}");
    *stack.strategy_mut::<MicroBatcher>().unwrap() = MicroBatcher::new().start(found.size);
    let split = stack.step_batch(&x.narrow(0, 0, 2 * found.size), |x| loss(x)).unwrap().split().unwrap();
    assert_eq!((split.rows, split.micro_batches, split.retries), (found.size, 2, 0));
    drop(limit);
}
