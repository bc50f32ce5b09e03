//! Chains of blocks under a checkpointer.

mod support;

use memfit::checkpoint::{
    CheckpointChain, Checkpointer, EveryNth, Halves, KeepAll, Plan, Ranges, RecomputeAll,
};
use memfit::saved::Link;
use memfit::{Error, memory, tch};
use support::{live, same, serial};
use tch::nn::{self, Module, ModuleT};
use tch::{Device, Kind, Tensor};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Blocks whose weights are made from one seed, so that two chains are equal.
fn blocks(n: i64) -> (Vec<nn::SequentialT>, nn::VarStore) {
    tch::manual_seed(5);
    let vs = nn::VarStore::new(Device::Cpu);
    let blocks = (0..n)
        .map(|i| {
            let path = vs.root() / i;
            nn::seq_t()
                .add(nn::linear(&path / "up", 32, 128, Default::default()))
                .add_fn(|x| x.gelu("none"))
                .add(nn::linear(&path / "down", 128, 32, Default::default()))
                .add_fn_t(|x, train| x.dropout(0.1, train))
        })
        .collect();
    (blocks, vs)
}

fn train(forward: &dyn Fn(&Tensor) -> Tensor, vs: &nn::VarStore) -> Vec<Tensor> {
    tch::manual_seed(9);
    let x = Tensor::randn([16, 32], FLOAT).set_requires_grad(true);
    forward(&x).square().sum(Kind::Float).backward();
    let mut all: Vec<_> = vs.trainable_variables().iter().map(|w| w.grad().copy()).collect();
    all.extend([x.grad().copy(), Tensor::rand([3], FLOAT)]);
    all
}

fn checkpointers() -> Vec<(Box<dyn Checkpointer>, u64)> {
    vec![
        (Box::new(KeepAll), 0),
        (Box::new(RecomputeAll), 9),
        (Box::new(EveryNth::new(2).unwrap()), 5),
        (Box::new(Ranges::new(5).unwrap()), 5),
        (Box::new(Ranges::new(3).unwrap().nested(RecomputeAll)), 3 + 9),
        (Box::new(Ranges::new(2).unwrap().nested(Ranges::new(2).unwrap().nested(RecomputeAll))), 2 + 4 + 9),
        // 9 = (3 + 2) + (2 + 2): two halves, four quarters, 9 blocks and one pair among them.
        (Box::new(Halves), 2 + 4 + 9 + 1),
    ]
}

/// Case 31.
#[test]
fn every_decision_gives_the_bits_of_the_plain_run() {
    let _guard = serial();
    let (plain, vs) = blocks(9);
    let right = train(&|x| plain.iter().fold(x.shallow_clone(), |x, block| block.forward_t(&x, true)), &vs);
    for (checkpointer, recomputes) in checkpointers() {
        let (blocks, vs) = blocks(9);
        let chain = CheckpointChain::with_train(blocks, &checkpointer).unwrap().checked().unwrap();
        let got = train(&|x| chain.forward_t(x, true), &vs);
        assert!(same(&got, &right), "{checkpointer:?}");
        assert_eq!(chain.recomputes(), recomputes, "{checkpointer:?}");
    }
}

/// Case 34.
#[test]
fn nine_blocks_in_five_ranges_are_two_two_two_two_one() {
    let _guard = serial();
    let sizes = |count: usize, n: usize| -> Vec<usize> {
        Ranges::new(count).unwrap().decide(n).unwrap().iter().map(|plan| plan.range().len()).collect()
    };
    assert_eq!(sizes(5, 9), [2, 2, 2, 2, 1]);
    assert_eq!(sizes(4, 8), [2, 2, 2, 2]);
    assert_eq!(sizes(5, 3), [1, 1, 1]);
    assert!(sizes(3, 0).is_empty());
    let recomputed: Vec<_> = EveryNth::new(2).unwrap().decide(5).unwrap();
    assert_eq!(recomputed[1], Plan::Keep(1..2));
    assert_eq!(recomputed[4], Plan::recompute(4..5));
}

/// Case 28.
#[test]
fn a_chain_holds_the_inputs_of_its_ranges() {
    let _guard = serial();
    let input = 16 * 32 * 4;
    for (checkpointer, held) in [
        (Box::new(RecomputeAll) as Box<dyn Checkpointer>, 9),
        (Box::new(Ranges::new(3).unwrap()), 3),
        (Box::new(Halves), 2),
    ] {
        let (blocks, _vs) = blocks(9);
        let chain = CheckpointChain::with_train(blocks, &checkpointer).unwrap();
        let x = Tensor::randn([16, 32], FLOAT);
        chain.forward_t(&x, false).sum(Kind::Float).backward();
        let before = live();
        let y = chain.forward_t(&x, false);
        // The first range's input is the caller's; the output is one more.
        assert_eq!(live() - before, held * input, "{checkpointer:?}");
        y.sum(Kind::Float).backward();
        drop(y);
        assert_eq!(live(), before);
    }
}

#[test]
fn nesting_lowers_the_peak_of_long_ranges() {
    let _guard = serial();
    let peak = |checkpointer: &dyn Checkpointer| {
        let (blocks, _vs) = blocks(16);
        let chain = CheckpointChain::with_train(blocks, checkpointer).unwrap();
        let x = Tensor::randn([256, 32], FLOAT);
        let step = || chain.forward_t(&x, false).sum(Kind::Float).backward();
        step();
        let before = live();
        let ((), peak) = memory::peak_of(Device::Cpu, step).unwrap();
        peak - before
    };
    let (kept, ranges) = (peak(&KeepAll), peak(&Ranges::new(4).unwrap()));
    let nested = peak(&Ranges::new(4).unwrap().nested(RecomputeAll));
    assert!(ranges < kept && nested < ranges, "{kept} {ranges} {nested}");
}

/// Case 37: two forwards and one backward, and a graph dropped.
#[test]
fn two_forwards_and_one_backward_free_everything() {
    let _guard = serial();
    let (blocks, _vs) = blocks(4);
    let chain = CheckpointChain::with_train(blocks, &Ranges::new(2).unwrap()).unwrap();
    let x = Tensor::randn([16, 32], FLOAT);
    chain.forward_t(&x, true).sum(Kind::Float).backward();
    let before = live();
    let first = chain.forward_t(&x, true);
    let second = chain.forward_t(&x, true);
    second.sum(Kind::Float).backward();
    drop(second);
    assert!(live() > before);
    drop(first);
    assert_eq!(live(), before);
}

/// A decision written by hand.
#[derive(Debug)]
struct Fixed(Vec<Plan>);

impl Checkpointer for Fixed {
    fn decide(&self, _: usize) -> memfit::Result<Vec<Plan>> {
        Ok(self.0.clone())
    }
}

#[test]
fn decisions_that_do_not_cover_the_chain_are_refused() {
    use memfit::checkpoint::Plan::{Keep, OffloadInput, Recompute};
    let _guard = serial();
    let inner = |inner| vec![Keep(0..1), OffloadInput(Box::new(Recompute { range: 1..3, inner }))];
    for bad in [
        inner(vec![Keep(1..2)]),
        inner(vec![Keep(1..99)]),
        inner(vec![OffloadInput(Box::new(Recompute { range: 1..3, inner: vec![Keep(1..3)] }))]),
        vec![Keep(0..2), OffloadInput(Box::new(Keep(2..3)))],
    ] {
        let (blocks, _vs) = blocks(3);
        assert!(CheckpointChain::with_train(blocks, &Fixed(bad)).is_err());
    }
    let refuse = |plans: Vec<Plan>| {
        let (blocks, _vs) = blocks(3);
        CheckpointChain::with_train(blocks, &Fixed(plans)).unwrap_err()
    };
    let gap = vec![Plan::Keep(0..1), Plan::recompute(2..3)];
    let short = vec![Plan::recompute(0..2)];
    let overlap = vec![Plan::Keep(0..2), Plan::Keep(1..3)];
    let inner = vec![Plan::Recompute { range: 0..3, inner: vec![Plan::Keep(0..2)] }];
    for plans in [gap, short, overlap, inner] {
        assert!(matches!(refuse(plans), Error::Config { setting: "Plan", .. }));
    }
    let reserved = vec![Plan::Keep(0..2), Plan::KeepOperators { segment: 2, operators: vec![] }];
    assert!(matches!(refuse(reserved), Error::Unsupported { .. }));
    assert!(EveryNth::new(0).is_err() && Ranges::new(0).is_err());
    let unlinked = Fixed(vec![Plan::OffloadInput(Box::new(Plan::recompute(0..3)))]);
    let (blocks, _vs) = blocks(3);
    let chain = CheckpointChain::with_train(blocks, &unlinked).unwrap();
    let x = Tensor::randn([2, 32], FLOAT);
    assert!(matches!(chain.try_forward_t(&x, false), Err(Error::Config { .. })));
}

/// Case 38: a link outside a region sees the region's input, and nothing else.
#[test]
fn links_outside_see_the_inputs_of_ranges() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    let _guard = serial();
    let counting = || {
        let seen = Arc::new(AtomicUsize::new(0));
        let count = seen.clone();
        let link = Link::new(move |tensor| {
            count.fetch_add(1, Ordering::Relaxed);
            let copy = tensor.copy();
            Ok(Some(Box::new(move || Ok(copy.shallow_clone()))))
        });
        (link, seen)
    };
    let (plain, vs) = blocks(4);
    let right = train(&|x| plain.iter().fold(x.shallow_clone(), |x, block| block.forward_t(&x, true)), &vs);

    let (link, seen) = counting();
    let (chain_blocks, vs) = blocks(4);
    let chain = CheckpointChain::with_train(chain_blocks, &Ranges::new(2).unwrap()).unwrap();
    let outer = link.push();
    let got = train(&|x| chain.forward_t(x, true), &vs);
    drop(outer);
    assert!(same(&got, &right));
    assert_eq!(
        seen.load(Ordering::Relaxed),
        1 + 1,
        "one range input (the first is a leaf, which stays) and the square's"
    );

    let (link, seen) = counting();
    let (chain_blocks, vs) = blocks(4);
    let plan =
        vec![Plan::Keep(0..1), Plan::OffloadInput(Box::new(Plan::recompute(1..3))), Plan::recompute(3..4)];
    let chain = CheckpointChain::with_train(chain_blocks, &Fixed(plan)).unwrap().offload_through(link);
    assert!(same(&train(&|x| chain.forward_t(x, true), &vs), &right));
    assert_eq!(seen.load(Ordering::Relaxed), 1);
}

#[test]
fn a_failing_block_names_nothing_lost_and_the_chain_goes_on() {
    let _guard = serial();
    let blocks = vec![
        Box::new(nn::func_t(|x, _| x.tanh())) as Box<dyn ModuleT>,
        Box::new(nn::func_t(|x, train| {
            assert!(!train, "no training today");
            x.sin()
        })),
    ];
    let chain = CheckpointChain::boxed(blocks, &RecomputeAll).unwrap().named("tower").unwrap();
    let x = Tensor::ones([2], FLOAT).set_requires_grad(true);
    let error = chain.try_forward_t(&x, true).unwrap_err();
    assert!(matches!(error, Error::Panic { .. }), "{error:?}");
    chain.try_forward_t(&x, false).unwrap().sum(Kind::Float).backward();
    let right = 1.0f64.tanh().cos() * (1.0 - 1.0f64.tanh().powi(2));
    assert!((x.grad().double_value(&[0]) - right).abs() < 1e-6);
    let chain = CheckpointChain::new(vec![nn::func(|x| x.tanh())], &RecomputeAll).unwrap();
    assert_eq!(chain.forward(&x), x.tanh());
}
