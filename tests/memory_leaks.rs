//! Memory that does not come back is named; long runs stay flat.

mod support;

use memfit::checkpoint::ActivationCheckpoint;
use memfit::memory::{self, LeakScope, Phase};
use memfit::optim::{AdamW, AdamWConfig};
use memfit::strategies::{GradAccumulator, MemoryTimeline};
use memfit::tch::{Device, Kind, Tensor, nn, nn::Module};
use memfit::{Error, Loss, Stack};
use support::process::{SmallPages, anonymous};
use support::serial;

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

#[test]
fn what_stays_is_named_by_step_phase_segment_and_size() {
    let _guard = serial();
    let older = Tensor::zeros([3], CPU);
    let scope = LeakScope::new().unwrap();
    drop(older);
    let mut kept = Vec::new();
    for step in 0..3 {
        let _in = Phase::Forward.enter_step(step);
        let _segment = memory::segment("head");
        drop(Tensor::zeros([100], CPU));
        kept.push(Tensor::zeros([100], CPU));
    }
    let pair = {
        let _in = Phase::Update.enter_step(2);
        [Tensor::zeros([5], CPU), Tensor::zeros([5], CPU)]
    };
    let Err(error) = scope.check() else { panic!("three tensors and a pair are alive") };
    let text = error.to_string();
    let Error::Leak { bytes, blocks, sites } = error else { panic!("{text}") };
    assert_eq!((bytes, blocks, sites.len()), (3 * 400 + 2 * 20, 5, 4));
    let head = &sites[0];
    assert_eq!(
        (head.phase, head.segment.as_deref(), head.size, head.blocks),
        (Phase::Forward, Some("head"), 400, 1)
    );
    let mut steps: Vec<u32> = sites[..3].iter().map(|site| site.step).collect();
    steps.sort_unstable();
    assert_eq!(steps, [0, 1, 2]);
    assert_eq!((sites[3].phase, sites[3].size, sites[3].blocks), (Phase::Update, 20, 2));
    assert!(text.contains("forward of step 0, segment head"), "{text}");
    drop(pair);
    scope.check_except(&kept).unwrap();
    assert!(matches!(scope.check_except(&kept[1..]), Err(Error::Leak { bytes: 400, .. })));
    kept.clear();
    scope.check().unwrap();
}

#[test]
fn scopes_overlap_and_end_in_any_order() {
    let _guard = serial();
    let outer = LeakScope::new().unwrap();
    let first = Tensor::zeros([10], CPU);
    let inner = LeakScope::new().unwrap();
    let second = Tensor::zeros([20], CPU);
    drop(outer);
    assert!(matches!(inner.check(), Err(Error::Leak { bytes: 80, .. })));
    drop((first, second));
    inner.check().unwrap();
    drop(inner);
    // Listed blocks that outlive every scope are freed all the same.
    let late = {
        let _scope = LeakScope::new().unwrap();
        Tensor::zeros([10], CPU)
    };
    let again = LeakScope::new().unwrap();
    drop(late);
    again.check().unwrap();
}

#[test]
fn a_view_or_a_graph_keeps_its_storage() {
    let _guard = serial();
    let scope = LeakScope::new().unwrap();
    let view = Tensor::zeros([100, 10], CPU).narrow(0, 0, 1);
    assert!(matches!(scope.check(), Err(Error::Leak { bytes: 4000, .. })));
    scope.check_except([&view]).unwrap();
    drop(view);
    let w = Tensor::ones([10], CPU).set_requires_grad(true);
    let loss = w.exp().exp().sum(Kind::Float);
    // The two results of exp wait for backward.
    assert!(matches!(scope.check_except([&w, &loss]), Err(Error::Leak { bytes: 80, blocks: 2, .. })));
    drop(loss);
    scope.check_except([&w]).unwrap();
}

#[test]
fn a_thousand_steps_and_evaluations_stay_flat() {
    let _guard = serial();
    let _pages = SmallPages::hold();
    let vs = nn::VarStore::new(Device::Cpu);
    let mut model = nn::seq();
    for layer in 0..2 {
        let linear = nn::linear(vs.root() / layer, 32, 32, Default::default());
        model = model.add(ActivationCheckpoint::new(linear)).add_fn(Tensor::relu);
    }
    let mut training = Stack::of(&vs, AdamW::new(&vs, AdamWConfig::default()).unwrap())
        .with(GradAccumulator::every(2))
        .with(MemoryTimeline::new().capacity(1 << 12))
        .build()
        .unwrap();
    let mut run = |steps: u64| {
        for step in 0..2 * steps {
            let x = Tensor::randn([16, 32], CPU);
            let outcome = training
                .step_with(|| Ok(Loss::mean(model.forward(&x).square().mean(Kind::Float), 16)))
                .unwrap();
            assert_eq!(outcome.stepped(), step % 2 == 1);
            if step % 2 == 1 {
                training.evaluate(|| Ok(model.forward(&x).sum(Kind::Float).double_value(&[]))).unwrap();
            }
        }
    };
    run(100);
    memory::release_caches(Device::Cpu).unwrap();
    let scope = LeakScope::new().unwrap();
    let before = memory::stats(Device::Cpu).unwrap();
    let held = anonymous();
    run(1000);
    memory::release_caches(Device::Cpu).unwrap();
    let after = memory::stats(Device::Cpu).unwrap();
    assert_eq!(after.current, before.current);
    assert_eq!(after.allocations - after.frees, before.allocations - before.frees);
    scope.check().unwrap();
    let grown = anonymous().saturating_sub(held);
    assert!(grown < 2 << 20, "{grown} bytes");
}
