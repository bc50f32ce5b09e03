//! Bytes and recomputes as promised.

use super::*;

/// Case 28.
#[test]
fn eight_layers_hold_their_inputs_and_nothing_after_backward() {
    let _guard = serial();
    let layers: Vec<_> = (0..8)
        .map(|_| {
            ActivationCheckpoint::new(Block {
                weights: vec![leaf(&[64, 256]), leaf(&[256, 64])],
                body: |w, x| x.matmul(&w[0]).gelu("none").matmul(&w[1]),
            })
        })
        .collect();
    let x = leaf(&[128, 64]);
    let forward = || layers.iter().fold(x.shallow_clone(), |x, layer| layer.forward(&x));
    forward().sum(Kind::Float).backward();

    let before = live();
    let y = forward();
    let activation = 128 * 64 * 4;
    // Seven hidden inputs and the output; the first input is the caller's.
    assert_eq!(live() - before, 8 * activation);
    y.sum(Kind::Float).backward();
    drop(y);
    assert_eq!(live(), before);

    let y = forward();
    drop(y);
    assert_eq!(live(), before);
}

/// Case 28.
#[test]
fn fifty_steps_half_of_them_dropped_stay_flat() {
    let _guard = serial();
    let block = ActivationCheckpoint::new(Block {
        weights: vec![leaf(&[32, 32])],
        body: |w, x| x.matmul(&w[0]).dropout(0.1, true).tanh(),
    });
    let x = leaf(&[16, 32]);
    let mut after = Vec::new();
    for step in 0..50 {
        let loss = block.forward(&block.forward(&x)).sum(Kind::Float);
        if step % 2 == 0 {
            loss.backward();
        }
        drop(loss);
        after.push(live());
    }
    assert!(after[2..].iter().all(|bytes| *bytes == after[2]), "{after:?}");
}

/// Case 27.
#[test]
fn a_recompute_stops_before_the_last_matmul() {
    let _guard = serial();
    use std::sync::atomic::{AtomicUsize, Ordering};
    static REACHED: AtomicUsize = AtomicUsize::new(0);
    for (early_stop, reached) in [(EarlyStop::On, 1), (EarlyStop::Off, 2)] {
        REACHED.store(0, Ordering::Relaxed);
        let block = ActivationCheckpoint::new(Block {
            weights: vec![leaf(&[8, 8]), leaf(&[8, 8])],
            body: |w, x| {
                let y = x.matmul(&w[0]).tanh().matmul(&w[1]);
                REACHED.fetch_add(1, Ordering::Relaxed);
                y
            },
        })
        .early_stop(early_stop);
        block.forward(&leaf(&[4, 8])).sum(Kind::Float).backward();
        assert_eq!(REACHED.load(Ordering::Relaxed), reached);
        assert_eq!(block.recomputes(), 1);
    }
}

#[test]
fn without_gradients_a_segment_costs_nothing() {
    let _guard = serial();
    let block = ActivationCheckpoint::new(Block {
        weights: vec![leaf(&[4, 4])],
        body: |w, x| x.matmul(&w[0]).tanh(),
    });
    let x = leaf(&[2, 4]);
    let before = live();
    let y = tch::no_grad(|| block.forward(&x));
    assert!(!y.requires_grad());
    drop(y);
    assert_eq!((live(), block.recomputes()), (before, 0));
    let inner = block.into_inner().unwrap();
    assert_eq!(inner.weights.len(), 1);
}

#[test]
fn a_module_comes_back_when_no_graph_needs_it() {
    let _guard = serial();
    let block = ActivationCheckpoint::new(Block {
        weights: vec![leaf(&[4, 4])],
        body: |w, x| x.matmul(&w[0]).tanh(),
    });
    let y = block.forward(&leaf(&[2, 4]));
    let block = block.into_inner().unwrap_err();
    assert_eq!(block.with(|block| block.weights.len()).unwrap(), 1);
    drop(y);
    assert!(block.into_inner().is_ok());
}

#[test]
fn the_peak_falls_with_checkpoints() {
    let _guard = serial();
    let run = |wrapped: bool| {
        let blocks: Vec<_> = (0..8)
            .map(|_| Block {
                weights: vec![leaf(&[64, 256]), leaf(&[256, 64])],
                body: |w, x| x.matmul(&w[0]).gelu("none").matmul(&w[1]),
            })
            .collect();
        let blocks: Vec<Box<dyn Module>> = blocks
            .into_iter()
            .map(|block| -> Box<dyn Module> {
                if wrapped { Box::new(ActivationCheckpoint::new(block)) } else { Box::new(block) }
            })
            .collect();
        let x = leaf(&[128, 64]);
        let step = || {
            blocks.iter().fold(x.shallow_clone(), |x, block| block.forward(&x)).sum(Kind::Float).backward()
        };
        step();
        let before = live();
        let ((), peak) = memory::peak_of(Device::Cpu, step).unwrap();
        peak - before
    };
    let (plain, wrapped) = (run(false), run(true));
    assert!(wrapped * 3 < plain, "{wrapped} of {plain}");
}
