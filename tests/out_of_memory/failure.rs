//! What a failure leaves.

use super::*;

/// Case 50: at 64 rows in forward, in backward of micro-batch 1, in backward of 2 of 4.
#[test]
fn a_failure_wherever_it_comes_leaves_no_trace_and_smaller_micro_batches_succeed() {
    let _guard = serial();
    let x = floats(&[256, 4]);
    for (in_backward, at) in [(false, 0), (false, 2), (true, 0), (true, 1)] {
        let run = |fails: bool| {
            let spy = Spy::default();
            let (_vs, net, mut stack) = whole_state_with(9, |builder| builder.with(spy.clone()));
            // A size of its own each, so that nothing else differs.
            let start = if fails { 64 } else { 32 };
            *stack.strategy_mut::<MicroBatcher>().unwrap() = MicroBatcher::new().start(start);
            let (mut micro, mut done) = (0, 0);
            let mut armed = None;
            // Live bytes where each try of the window begins.
            let mut begins = Vec::new();
            let split = stack
                .step_batch(&x, |x| {
                    if x.size()[0] != done {
                        (done, micro) = (x.size()[0], 0);
                        begins.push(live());
                    }
                    let here = (done == 64 && micro == at, micro += 1).0;
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
            assert_eq!(spy.seen(), if fails { vec![(at, in_backward)] } else { vec![] });
            assert_eq!(begins.len(), 1 + usize::from(fails));
            assert_eq!(begins.first(), begins.last(), "live bytes come back to the byte");
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

/// Half-precision weights whose gradients are added up in fp32, in the master weights or beside.
fn half(masters: bool) -> (nn::VarStore, nn::Linear, Stack) {
    training::half(masters, 4)
}

#[test]
fn whatever_drops_a_window_frees_what_strategies_kept_for_it() {
    let _guard = serial();
    let x = floats(&[6, 4]).to_kind(Kind::BFloat16);
    for masters in [true, false] {
        let (_vs, linear, mut stack) = half(masters);
        let loss = || Ok(Loss::mean(linear.forward(&x).square().mean(Kind::Float), 6));
        for _ in 0..training::WINDOW {
            let _ = stack.step_with(loss).unwrap();
        }
        let before = live();
        let back = |what: &str| assert_eq!(live(), before, "{what}, masters {masters}");

        let saved = state(&mut stack);
        let at_saved = live() - before;
        let _ = stack.step_with(loss).unwrap();
        stack.discard().unwrap();
        assert_eq!(live() - at_saved, before, "discard, masters {masters}");

        let _ = stack.step_with(loss).unwrap();
        stack.load_state(&saved).unwrap();
        drop(saved);
        back("load_state");

        let found = stack.find_max_batch(1..=6, |n| {
            Ok(Loss::mean(linear.forward(&x.narrow(0, 0, n)).square().mean(Kind::Float), n))
        });
        assert_eq!(found.unwrap().size, 6);
        back("find_max_batch");

        let _ = stack.step_with(loss).unwrap();
        let mut armed = None;
        let lost = stack.step_with(|| {
            let loss = loss()?;
            armed = Some(FailAt::nth(4).unwrap());
            Ok(loss)
        });
        assert!(matches!(lost, Err(Error::WindowLost { micro: 1, .. })), "{lost:?}");
        drop((lost, armed));
        back("a failed backward");

        let failed = stack.step_batch(&x, |x| if x.size()[0] < 6 { Err(shrunk(2)) } else { loss() });
        assert!(failed.is_err());
        drop(failed);
        back("a failed batch");
    }
}

/// A search asks nobody to recover, so a copy of the gradients has no other end.
#[test]
fn a_search_that_fails_in_a_later_backward_frees_the_copies_of_gradients() {
    let _guard = serial();
    let net = Net::new();
    let sgd = Sgd::new(&net.vs, SgdConfig::default().lr(0.01)).unwrap();
    let mut stack = Stack::of(&net.vs, sgd)
        .with(GradAccumulator::every(2))
        .with(Rollback::micro_batch())
        .build()
        .unwrap();
    let x = floats(&[8, WIDTH]);
    for _ in 0..2 {
        let _ = stack.step_with(|| Ok(net.loss(&x))).unwrap();
    }
    let before = live();
    let (mut calls, mut armed) = (0, None);
    let found = stack.find_max_batch(8..=8, |n| {
        calls += 1;
        let loss = net.loss(&x.narrow(0, 0, n));
        if calls == 2 {
            // After the driver's two and a copy per parameter.
            armed = Some(FailAt::nth(2 + 4 + 3).unwrap());
        }
        Ok(loss)
    });
    assert!(found.unwrap_err().is_out_of_memory());
    drop(armed);
    assert_eq!((calls, live()), (2, before));
}

/// The gradient sums of a window that is gone must not be in the next one's.
#[test]
fn a_window_after_a_dropped_one_is_the_window_alone() {
    let _guard = serial();
    let x = floats(&[6, 4]).to_kind(Kind::BFloat16);
    for masters in [true, false] {
        let run = |drops: bool| {
            let (vs, linear, mut stack) = half(masters);
            let loss = |factor: f64| {
                let y = linear.forward(&x).square().mean(Kind::Float) * factor;
                Ok(Loss::mean(y, 6))
            };
            if drops {
                let _ = stack.step_with(|| loss(3.0)).unwrap();
                stack.discard().unwrap();
            }
            for _ in 0..training::WINDOW {
                let _ = stack.step_with(|| loss(1.0)).unwrap();
            }
            copies(&vs.trainable_variables())
        };
        assert!(support::same(&run(true), &run(false)), "masters {masters}");
    }
}

/// Pages of the C heap that nobody uses, as the process holds them.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[test]
fn caches_are_given_back_after_the_window_is_dropped() {
    use crate::support::process::{SmallPages, anonymous};

    let _guard = serial();
    let _pages = SmallPages::hold();
    for rows in [2, 1] {
        let vs = nn::VarStore::new(Device::Cpu);
        // Blocks that are too small for mappings of their own.
        let weights: Vec<Tensor> = (0..800).map(|i| vs.root().ones(&format!("w{i}"), &[1 << 14])).collect();
        let sgd = Sgd::new(&vs, SgdConfig::default().lr(0.1)).unwrap();
        let batcher = MicroBatcher::new().start(rows);
        let mut stack = Stack::of(&vs, sgd).with(batcher).build().unwrap();
        let x = floats(&[4, 1]);
        let mut pins = Vec::new();
        let (mut calls, mut held, mut given_back) = (0, 0, 0);
        let outcome = stack.step_batch(&x, |x| {
            calls += 1;
            match calls {
                // 800 gradients of 64 KiB, and something that lies over them.
                2 => {
                    pins.push(floats(&[1 << 12]));
                    held = anonymous();
                    return Err(shrunk(x.size()[0]));
                }
                3 => given_back = held.saturating_sub(anonymous()),
                _ => {}
            }
            let sum = weights.iter().fold(x.mean(Kind::Float), |sum, w| sum + w.mean(Kind::Float));
            Ok(Loss::mean(sum, x.size()[0]))
        });
        assert!(outcome.unwrap().stepped());
        let gradients = 800 << 16;
        assert!(given_back > gradients / 2, "{rows}: {given_back} of {gradients}");
    }
}

/// Would hang.
#[derive(Debug)]
struct Stubborn;

impl Strategy for Stubborn {
    fn place(&self) -> Place {
        Place::Recovery
    }
    fn retries(&self) -> bool {
        true
    }
    fn recover(&mut self, _: &Failure<'_>) -> Recovery {
        Recovery::Retry
    }
}

#[test]
fn a_strategy_that_retries_without_end_is_stopped() {
    let _guard = serial();
    let net = Net::new();
    let before = net.weights();
    let sgd = Sgd::new(&net.vs, SgdConfig::default()).unwrap();
    let mut stack = Stack::of(&net.vs, sgd).with(Stubborn).build().unwrap();
    let mut calls = 0;
    let error = stack.step_batch(&floats(&[4, WIDTH]), |_| {
        calls += 1;
        Err(Error::config("loss", "is wrong"))
    });
    let error = error.unwrap_err();
    assert!(matches!(error, Error::CallOrder { call: "Strategy::recover", .. }), "{error}");
    assert!(error.to_string().contains("is wrong") && (5..=20).contains(&calls), "{calls}: {error}");
    assert!(support::same(&before, &net.weights()));
    assert!(stack.step_batch(&floats(&[4, WIDTH]), |x| Ok(net.loss(x))).unwrap().stepped());
}
