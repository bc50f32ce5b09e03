//! Offloading: same bits, fewer bytes.

mod support;

use memfit::offload::{ActivationOffload, CpuOffload};
use memfit::optim::{AdamW, AdamWConfig, GroupOptions, Optimizer, Sgd, SgdConfig};
use memfit::state::Value;
use memfit::tch::nn::{self, Module};
use memfit::tch::{Device, Kind, Tensor};
use memfit::{Error, Named, State, Update};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

fn to_disk() -> ActivationOffload {
    CpuOffload::activations().disk(std::env::temp_dir()).min_bytes(1)
}

fn around<T>(offload: &mut ActivationOffload, body: impl FnOnce() -> T) -> T {
    offload.around(Device::Cpu, &[], || Ok(body())).expect("the forward pass")
}

fn leaf(sizes: &[i64]) -> Tensor {
    Tensor::randn(sizes, CPU).set_requires_grad(true)
}

/// Gradients of `leaves` under `body`, without and with offloading.
fn both(
    leaves: &[Tensor],
    offload: &mut ActivationOffload,
    body: impl Fn() -> Tensor,
) -> (Vec<Tensor>, Vec<Tensor>) {
    let gradients = |loss: Tensor| {
        loss.backward();
        let taken = leaves.iter().map(|leaf| leaf.grad().copy()).collect();
        for leaf in leaves {
            let _ = leaf.grad().zero_();
        }
        taken
    };
    (gradients(body()), gradients(around(offload, &body)))
}

/// Case 35.
#[test]
fn parameters_are_never_moved_and_a_shared_storage_moves_once() {
    let _guard = support::serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let linear = nn::linear(vs.root(), 64, 64, Default::default());
    let x = Tensor::randn([64, 64], CPU);
    let z = leaf(&[64, 64]);
    let mut offload = to_disk();
    let loss = around(&mut offload, || {
        let y = z.tanh();
        (&y * &y).sum(Kind::Float)
    });
    loss.backward();
    let moved = offload.moved();
    assert_eq!((moved.copies_out, moved.out_bytes), (1, 64 * 64 * 4));
    assert_eq!((moved.copies_in, moved.in_bytes), (1, 64 * 64 * 4));
    let t = z.tanh();
    let expected = &t * 2.0 * (1.0 - &t * &t);
    assert!(support::difference(&z.grad(), &expected) < 1e-5);

    let mut offload = to_disk();
    let loss = around(&mut offload, || linear.forward(&x).sum(Kind::Float));
    loss.backward();
    let moved = offload.moved();
    assert_eq!(moved.out_bytes, 64 * 64 * 4, "only the input of the linear layer left");
}

/// Case 36.
#[test]
fn views_come_back_as_they_were_in_any_order() {
    let _guard = support::serial();
    let a = leaf(&[2, 3]);
    let b = leaf(&[3, 2]);
    let mut offload = to_disk();
    let ids = Tensor::from_slice(&[0_i64, 2, 1, 2]);
    let (plain, moved) = both(&[a.shallow_clone(), b.shallow_clone()], &mut offload, || {
        let x = a.exp();
        let turned = x.tr() * b.slice(0, 0, 3, 1);
        let tail = x.slice(0, 1, None, 1) * x.slice(0, 1, None, 1);
        let picked = x.tr().index_select(0, &ids) * 3.0;
        turned.matmul(&x).sum(Kind::Float) + tail.sum(Kind::Float) + picked.square().sum(Kind::Float)
    });
    assert!(support::same(&plain, &moved));
    assert!(offload.moved().out_bytes > 0);
}

/// Case 37.
#[test]
fn two_forwards_a_dropped_graph_and_a_late_backward_free_everything() {
    let _guard = support::serial();
    let a = leaf(&[32, 32]);
    let run = || (a.exp() * a.sin()).tanh().sum(Kind::Float);
    run().backward();
    let plain = a.grad().copy();
    let mut offload = to_disk();
    for _ in 0..3 {
        let _ = a.grad().zero_();
        let first = around(&mut offload, run);
        let second = around(&mut offload, run);
        assert!(offload.moved().live_on_disk > 0);
        drop(first);
        second.backward();
        assert!(a.grad().equal(&plain));
        drop(second);
        assert_eq!(offload.moved().live_on_disk, 0);
    }
    let moved = offload.moved();
    assert_eq!(moved.out_bytes, 2 * moved.in_bytes);
    assert!(moved.peak_on_disk <= moved.out_bytes / 3, "extents are reused");
}

/// Case 37, kept graphs.
#[test]
fn a_kept_graph_runs_backward_twice() {
    let _guard = support::serial();
    let a = leaf(&[32, 32]);
    let mut offload = to_disk();
    let y = around(&mut offload, || {
        let y = a.tanh();
        (&y * &y).sum(Kind::Float)
    });
    for _ in 0..2 {
        Tensor::run_backward(&[&y], &[&a], true, false);
    }
    let first = Tensor::run_backward(&[&y], &[&a], true, false);
    let t = a.tanh();
    assert!(support::difference(&first[0], &(&t * 2.0 * (1.0 - &t * &t))) < 1e-5);
    assert_eq!((offload.moved().copies_out, offload.moved().copies_in), (1, 3));
    drop(y);
    assert_eq!(offload.moved().live_on_disk, 0);
}

/// Case 38.
#[test]
fn an_address_used_again_is_another_storage() {
    let _guard = support::serial();
    let a = leaf(&[128, 128]);
    let mut offload = to_disk();
    let leaves = [a.shallow_clone()];
    let (plain, moved) = both(&leaves, &mut offload, || {
        let mut x = a.shallow_clone();
        for _ in 0..20 {
            x = (&x * 1.1).sin().exp() * 0.5;
        }
        x.sum(Kind::Float)
    });
    assert!(support::same(&plain, &moved));
}

/// Case 29: moved, kept small, kept in the window.
#[test]
fn a_change_between_forward_and_backward_is_found_or_harmless() {
    let _guard = support::serial();
    let a = leaf(&[16, 16]);
    // In the same operator's wake: it has not left yet.
    let mut offload = to_disk().keep_last(8);
    let (loss, mut y) = around(&mut offload, || {
        let y = a.exp();
        ((&y * 1.0).sum(Kind::Float), y)
    });
    let _ = memfit::tch::no_grad(|| y.g_add_scalar_(1.0));
    let failed = loss.f_backward().map_err(Error::from);
    assert!(matches!(failed, Err(Error::Modified { .. })), "{failed:?}");
    // Small: kept by reference, found by the chain.
    let mut offload = to_disk().min_bytes(1 << 20);
    let (loss, mut y) = around(&mut offload, || {
        let y = a.exp();
        ((&y * 1.0).sum(Kind::Float), y)
    });
    let _ = memfit::tch::no_grad(|| y.g_add_scalar_(1.0));
    let failed = loss.f_backward().map_err(Error::from);
    assert!(matches!(failed, Err(Error::Modified { .. })), "{failed:?}");
    // Moved: what forward saw.
    let mut offload = to_disk();
    let (loss, mut y) = around(&mut offload, || {
        let y = a.exp();
        ((&y * 1.0).sum(Kind::Float), y)
    });
    let _ = memfit::tch::no_grad(|| y.g_add_scalar_(1.0));
    loss.backward();
    assert!(support::difference(&a.grad(), &a.exp()) < 1e-5);
}

#[test]
fn keep_last_keeps_the_last_storages_in_memory() {
    let _guard = support::serial();
    let a = leaf(&[32, 32]);
    let mut x = a.shallow_clone();
    let mut offload = to_disk().keep_last(3);
    let loss = around(&mut offload, || {
        for _ in 0..10 {
            x = x.tanh();
        }
        x.sum(Kind::Float)
    });
    assert_eq!(offload.moved().copies_out, 7);
    loss.backward();
    assert_eq!(offload.moved().copies_in, 7);
}

#[test]
fn storages_read_ahead_come_back_once_and_equal() {
    let _guard = support::serial();
    let a = leaf(&[256, 256]);
    let mut offload = to_disk().prefetch(2);
    let leaves = [a.shallow_clone()];
    let (plain, moved) = both(&leaves, &mut offload, || {
        let mut x = a.shallow_clone();
        for _ in 0..12 {
            x = x.tanh() * 1.5;
        }
        x.sum(Kind::Float)
    });
    assert!(support::same(&plain, &moved));
    let moved = offload.moved();
    assert_eq!(moved.copies_out, moved.copies_in);
    assert_eq!(moved.live_on_disk, 0);
}

/// A reader that comes late finds its storage asked for already.
#[test]
fn what_is_read_ahead_is_read_once_a_backward_also_in_a_graph_that_is_kept() {
    let _guard = support::serial();
    let a = leaf(&[64, 64]);
    for _ in 0..30 {
        let mut offload = to_disk().prefetch(2);
        let loss =
            around(&mut offload, || (0..8).fold(a.shallow_clone(), |x, _| x.tanh() * 1.5).sum(Kind::Float));
        for backwards in 1..=2 {
            let _ = Tensor::run_backward(&[&loss], &[&a], true, false);
            let moved = offload.moved();
            assert_eq!(moved.copies_in, backwards * moved.copies_out);
        }
    }
}

#[test]
fn a_model_on_the_cpu_needs_a_folder() {
    let _guard = support::serial();
    let refused = CpuOffload::activations().around(Device::Cpu, &[], || Ok(()));
    let Err(Error::Incompatible { remedy, .. }) = refused else { panic!("{refused:?}") };
    assert!(remedy.contains(".disk(folder)"));
}

#[test]
fn an_unusable_folder_is_an_io_error_with_its_path() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().expect("a folder");
    let missing = folder.path().join("missing");
    let refused = CpuOffload::activations().disk(&missing).around(Device::Cpu, &[], || Ok(()));
    let Err(Error::Io { path, .. }) = refused else { panic!("{refused:?}") };
    assert_eq!(path, missing);
}

#[test]
fn buffers_named_by_the_user_stay() {
    let _guard = support::serial();
    let a = leaf(&[64, 64]);
    let mask = Tensor::rand([64, 64], CPU);
    let mut offload = to_disk();
    let known = [Named::new("mask", &mask)];
    let loss = offload.around(Device::Cpu, &known, || Ok((&a * &mask).sum(Kind::Float))).expect("forward");
    loss.backward();
    assert_eq!(offload.moved().out_bytes, 0);
}

fn parameters(seed: i64) -> Vec<Tensor> {
    memfit::tch::manual_seed(seed);
    vec![leaf(&[1024]), leaf(&[7]), leaf(&[64, 33])]
}

fn two_groups(parameters: &[Tensor]) -> AdamW {
    let first = vec![Named::new("a", &parameters[0]), Named::new("b", &parameters[1])];
    let mut optimizer = AdamW::new(&first, AdamWConfig::default().lr(0.1)).expect("an optimizer");
    let second = vec![Named::new("c", &parameters[2])];
    optimizer.add_group(second, GroupOptions::default().lr(0.01)).expect("a second group");
    optimizer
}

fn train(optimizer: &mut dyn Optimizer, parameters: &[Tensor], steps: usize) {
    for _ in 0..steps {
        optimizer.zero_grad();
        let losses: Vec<Tensor> = parameters.iter().map(|p| p.sin().square().sum(Kind::Float)).collect();
        Tensor::stack(&losses, 0).sum(Kind::Float).backward();
        optimizer.step(&Update::plain()).expect("a step");
    }
}

/// Case 40.
#[test]
fn optimizer_state_on_disk_gives_the_same_bits_and_stays_there_after_a_load() {
    let _guard = support::serial();
    let (plain, moved) = (parameters(3), parameters(3));
    let mut reference = two_groups(&plain);
    let mut offloaded =
        CpuOffload::optimizer(two_groups(&moved)).disk(std::env::temp_dir()).expect("a folder");
    train(&mut reference, &plain, 3);
    train(&mut offloaded, &moved, 3);
    assert!(support::same(&plain, &moved));
    assert_eq!(offloaded.get_ref().steps(), 3, "each step is counted once");

    let state = State::collect(|visitor| offloaded.visit_state(visitor)).expect("the state");
    let expected = State::collect(|visitor| reference.visit_state(visitor)).expect("the state");
    assert_eq!(state.len(), expected.len());
    for (name, value) in expected.iter() {
        match (value, state.get(name)) {
            (Value::Tensor(expected), Some(Value::Tensor(found))) => assert!(found.equal(expected), "{name}"),
            (Value::Float(expected), Some(Value::Float(found))) => assert_eq!(expected, found),
            (Value::Int(expected), Some(Value::Int(found))) => assert_eq!(expected, found),
            (Value::Text(expected), Some(Value::Text(found))) => assert_eq!(expected, found),
            pair => panic!("{name}: {pair:?}"),
        }
    }

    let again = support::copies(&plain).into_iter().map(|p| p.set_requires_grad(true)).collect::<Vec<_>>();
    let mut loaded = CpuOffload::optimizer(two_groups(&again)).disk(std::env::temp_dir()).expect("a folder");
    loaded.allocate().expect("room");
    let before = memfit::memory::stats(Device::Cpu).expect("figures").current;
    loaded.load(&state).expect("a load");
    assert_eq!(memfit::memory::stats(Device::Cpu).expect("figures").current, before);
    let away = loaded.state_of(0, 0)[0].f_sum(Kind::Float);
    assert!(away.is_err_and(|error| error.to_string().contains("away")), "read while away");
    train(&mut loaded, &again, 2);
    train(&mut reference, &plain, 2);
    assert!(support::same(&plain, &again));
}

#[test]
fn an_update_has_one_parameters_state_in_memory() {
    let _guard = support::serial();
    let sizes = [4096, 65_536, 1024];
    let parameters: Vec<Tensor> = sizes.iter().map(|size| leaf(&[*size])).collect();
    let optimizer = AdamW::new(&parameters, AdamWConfig::default()).expect("an optimizer");
    let before = memfit::memory::stats(Device::Cpu).expect("figures").current;
    let mut offloaded = CpuOffload::optimizer(optimizer).disk(std::env::temp_dir()).expect("a folder");
    let (allocated, peak) = memfit::memory::peak_of(Device::Cpu, || offloaded.allocate()).expect("a peak");
    allocated.expect("room");
    assert_eq!(memfit::memory::stats(Device::Cpu).expect("figures").current, before);
    let largest = 65_536 * 8;
    // libtorch pads allocations to 64 bytes; nothing else may be there.
    assert!(peak <= before + largest + 4096, "{peak} over {before}: the state is made one by one");
    train(&mut offloaded, &parameters, 1);
    let live = memfit::memory::stats(Device::Cpu).expect("figures").current;
    for parameter in &parameters {
        let _ = parameter.grad().fill_(0.5);
    }
    let (stepped, peak) =
        memfit::memory::peak_of(Device::Cpu, || offloaded.step(&Update::plain())).expect("a peak");
    stepped.expect("a step");
    assert!(peak <= live + largest + 4096, "{}", peak - live);
    let total: u64 = sizes.iter().map(|size| *size as u64 * 8).sum();
    assert_eq!(offloaded.moved().live_on_disk, total, "whole pages here");
    assert_eq!(offloaded.state_bytes(), total);
}

#[test]
fn the_host_tier_of_an_optimizer_on_the_cpu_is_refused_with_the_way_out() {
    let _guard = support::serial();
    let optimizer = AdamW::new(&parameters(1), AdamWConfig::default()).expect("an optimizer");
    let refused = CpuOffload::optimizer(optimizer).host();
    assert!(matches!(&refused, Err(Error::Incompatible { remedy, .. }) if remedy.contains(".disk(folder)")));
}

/// Three blocks of a small model, each with a store of its own.
fn blocks(seed: i64) -> Vec<(nn::VarStore, nn::Sequential)> {
    memfit::tch::manual_seed(seed);
    let block = |_| {
        let vs = nn::VarStore::new(Device::Cpu);
        let first = nn::linear(vs.root() / "a", 64, 256, Default::default());
        let second = nn::linear(vs.root() / "b", 256, 64, Default::default());
        let block = nn::seq().add(first).add_fn(|x| x.gelu("tanh")).add(second);
        (vs, block)
    };
    (0..3).map(block).collect()
}

fn loss_of(model: &[impl Module], x: &Tensor) -> Tensor {
    model.iter().fold(x.shallow_clone(), |x, block| block.forward(&x)).square().mean(Kind::Float)
}

fn weights_of(stores: &[nn::VarStore]) -> Vec<Tensor> {
    stores.iter().flat_map(|vs| vs.trainable_variables()).collect()
}

fn live() -> u64 {
    memfit::memory::stats(Device::Cpu).expect("figures").current
}

#[test]
fn weights_visit_for_forward_backward_and_the_update() {
    let _guard = support::serial();
    let (stores, plain): (Vec<_>, Vec<_>) = blocks(5).into_iter().unzip();
    let mut reference = AdamW::new(&weights_of(&stores), AdamWConfig::default()).expect("an optimizer");
    let x = Tensor::randn([8, 64], CPU);

    let before = live();
    let (moved_stores, modules): (Vec<_>, Vec<_>) = blocks(5).into_iter().unzip();
    let with_weights = live() - before;
    let home = std::env::temp_dir();
    let offloaded: Vec<_> = moved_stores
        .iter()
        .zip(modules)
        .map(|(vs, block)| CpuOffload::parameters(block, vs).disk(&home).expect("a folder"))
        .collect();
    assert_eq!(live(), before, "all weights left");
    let optimizer = AdamW::new(&weights_of(&moved_stores), AdamWConfig::default()).expect("an optimizer");
    let mut optimizer = CpuOffload::optimizer(optimizer).disk(&home).expect("a folder");

    for step in 0..3 {
        reference.zero_grad();
        optimizer.zero_grad();
        loss_of(&plain, &x).backward();
        reference.step(&Update::plain()).expect("a step");
        // A graph that is dropped and a pass without gradients change nothing.
        drop(loss_of(&offloaded, &x));
        let evaluated = memfit::tch::no_grad(|| loss_of(&offloaded, &x));
        let start = live();
        let loss = loss_of(&offloaded, &x);
        assert!(live() - start < with_weights / 3, "weights left after forward");
        assert!(loss.equal(&evaluated));
        let (_, peak) = memfit::memory::peak_of(Device::Cpu, || loss.backward()).expect("a peak");
        if step > 0 {
            // Two segments at a change-over, and the gradients that this backward makes.
            assert!(peak - start < with_weights + with_weights * 3 / 4, "{peak} {start} {with_weights}");
        }
        drop(loss);
        optimizer.step(&Update::plain()).expect("a step");
        for weight in weights_of(&moved_stores) {
            assert!(weight.f_sum(Kind::Float).is_err(), "away between passes");
        }
    }
    let present: Vec<_> = offloaded.iter().map(|block| block.present().expect("the weights")).collect();
    assert!(support::same(&weights_of(&stores), &weights_of(&moved_stores)));
    drop(present);
    drop(offloaded);
    assert!(support::same(&weights_of(&stores), &weights_of(&moved_stores)), "they outlive the offload");
}

#[test]
fn a_plain_optimizer_refuses_weights_that_are_away_before_anything_moves() {
    let _guard = support::serial();
    let (vs, block) = blocks(6).remove(0);
    let before = support::copies(&vs.trainable_variables());
    let mut optimizer = Sgd::new(&vs, SgdConfig::default().lr(0.1)).expect("an optimizer");
    let block = CpuOffload::parameters(block, &vs).disk(std::env::temp_dir()).expect("a folder");
    block.forward(&Tensor::randn([4, 64], CPU)).square().sum(Kind::Float).backward();
    let refused = optimizer.step(&Update::plain());
    assert!(
        matches!(&refused, Err(Error::Incompatible { remedy, .. }) if remedy.contains(".resident()")),
        "{refused:?}"
    );
    drop(block);
    assert!(support::same(&before, &vs.trainable_variables()));
}

#[test]
fn a_segment_used_twice_frozen_or_failing_keeps_its_weights_right() {
    let _guard = support::serial();
    let (vs, block) = blocks(7).remove(0);
    let x = Tensor::randn([4, 64], CPU).set_requires_grad(true);
    let run = |block: &dyn Module| {
        let y = block.forward(&(&x * 2.0));
        block.forward(&y).square().sum(Kind::Float)
    };
    let gradients = || -> Vec<Tensor> {
        let weights = vs.trainable_variables();
        let all = weights.iter().chain([&x]).map(|t| t.grad().copy()).collect();
        weights.iter().chain([&x]).for_each(|t| drop(t.grad().zero_()));
        all
    };
    run(&block).backward();
    let expected = gradients();
    let block = CpuOffload::parameters(block, &vs).disk(std::env::temp_dir()).expect("a folder");
    run(&block).backward();
    assert!(support::same(&expected, &gradients()));
    let kept = run(&block);
    kept.f_backward().expect("backward");
    assert!(kept.f_backward().is_err(), "the graph is gone");
    let _ = gradients();
    // The failed backward left nothing behind that the next one trips over.
    run(&block).backward();
    assert!(support::same(&expected, &gradients()));
    for weight in vs.trainable_variables() {
        assert!(weight.f_sum(Kind::Float).is_err(), "away");
    }
    // All frozen: only the input's gradient passes.
    let mut frozen = vs.trainable_variables();
    frozen.iter_mut().for_each(|weight| drop(weight.requires_grad_(false)));
    run(&block).backward();
    assert!(x.grad().equal(expected.last().expect("the input's")));
    assert!(vs.trainable_variables().iter().all(|weight| weight.f_sum(Kind::Float).is_err()), "away");
}
