//! Timelines against arithmetic: roles, phases, segments, refusals; and what observing leaves alone.

mod support;

use memfit::checkpoint::{ActivationCheckpoint, EarlyStop};
use memfit::memory::{self, Limit, Moment, Phase, Recording, Role, RoleBytes, Timeline};
use memfit::offload::CpuOffload;
use memfit::optim::{AdamW, AdamWConfig, GroupOptions, Sgd, SgdConfig};
use memfit::strategies::{
    AmpScaler, Budget, GradAccumulator, GradClip, MasterWeights, MemoryTimeline, Rollback,
};
use memfit::tch::{Device, Kind, Tensor, nn, nn::Module};
use memfit::{Error, Loss, Named, Stack, StackBuilder, StepOutcome};
use support::{copies, same, serial};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);
const N: u64 = 1000;

fn timeline(training: &Stack) -> Timeline {
    training.strategy::<MemoryTimeline>().unwrap().timeline().unwrap()
}

/// Every moment's roles are its live bytes.
fn assert_adds_up(timeline: &Timeline) {
    let off = |moment: &&Moment| moment.roles.total() != moment.live;
    assert_eq!(timeline.moments().iter().find(off), None);
}

fn roles(known: &[(Role, u64)]) -> RoleBytes {
    let mut roles = RoleBytes::default();
    known.iter().for_each(|(role, bytes)| roles[*role] = *bytes);
    roles
}

fn peak_of(outcome: StepOutcome) -> u64 {
    let StepOutcome::Stepped { peak, .. } = outcome else { panic!("{outcome:?}") };
    peak
}

/// A weight vector, AdamW over it, and what else the process holds.
fn vector() -> (nn::VarStore, Tensor, StackBuilder, u64) {
    let held = support::live();
    let (vs, w) = support::vector(N as i64);
    let optimizer = AdamW::new(&vs, AdamWConfig::default()).unwrap();
    let builder = Stack::of(&vs, optimizer).with(MemoryTimeline::new());
    (vs, w, builder, held)
}

#[test]
fn the_peaks_roles_are_those_of_arithmetic() {
    let _guard = serial();
    let (_vs, w, builder, held) = vector();
    let mut training = builder.build().unwrap();
    for _ in 0..2 {
        let peak = peak_of(training.step_with(|| Ok(Loss::of((w.exp() * 2.0).sum(Kind::Float)))).unwrap());
        let timeline = timeline(&training);
        assert_adds_up(&timeline);
        let found = timeline.peak();
        // In backward: exp's output waits, its gradient has come, the weight's is being made.
        let expected = [
            (Role::Parameters, 4 * N),
            (Role::OptimizerState, 8 * N),
            (Role::Gradients, 4 * N),
            (Role::Activations, 4 * N + 4),
        ];
        for (role, bytes) in expected {
            assert_eq!(found.roles[role], bytes, "{timeline}");
        }
        let temporary = found.roles[Role::Temporaries];
        assert!((4 * N..4 * N + 64).contains(&temporary), "{timeline}");
        assert_eq!(found.roles.total(), found.bytes);
        assert_eq!(found.bytes, peak, "the counter's own peak");
        assert_eq!(found.phase, Phase::Backward);
        // Beside the model: what the process held, and the driver's and the optimizer's scalars.
        assert!((held..held + 64).contains(&found.roles[Role::Other]), "{held} {timeline}");
    }
}

#[test]
fn buffers_and_momentum_have_their_roles() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let norm = nn::batch_norm1d(vs.root(), 64, Default::default());
    let sgd = SgdConfig::default().lr(0.1).momentum(0.9);
    let optimizer = Sgd::new(&vs, sgd).unwrap();
    let mut training = Stack::of(&vs, optimizer).with(MemoryTimeline::new()).build().unwrap();
    let x = Tensor::randn([8, 64], CPU);
    let loss = || Ok(Loss::of(nn::ModuleT::forward_t(&norm, &x, true).square().mean(Kind::Float)));
    let _ = training.step_with(loss).unwrap();
    let timeline = timeline(&training);
    assert_adds_up(&timeline);
    let end = timeline.moments().last().unwrap().roles;
    let expected =
        [(Role::Parameters, 2 * 64 * 4), (Role::Buffers, 2 * 64 * 4), (Role::OptimizerState, 2 * 64 * 4)];
    for (role, bytes) in expected {
        assert_eq!(end[role], bytes, "{timeline}");
    }
    assert_eq!(end[Role::Gradients], 0, "dropped within the update");
}

fn mlp(vs: &nn::VarStore, checkpointed: bool) -> nn::Sequential {
    let mut model = nn::seq();
    for layer in 0..4 {
        let path = vs.root() / layer;
        let block = nn::seq().add(nn::linear(path, 32, 32, Default::default())).add_fn(|x| x.gelu("none"));
        model = if checkpointed {
            let name = format!("block {layer}");
            model.add(ActivationCheckpoint::new(block).named(name).early_stop(EarlyStop::Off))
        } else {
            model.add(block)
        };
    }
    model
}

/// Every kind of strategy around one model, and the model itself.
fn stacks() -> Vec<(&'static str, nn::Sequential, nn::VarStore, Stack)> {
    let with =
        ["plain", "accumulate", "bf16", "clip", "checkpoint", "disk", "budget", "rollback", "optimizer"];
    with.into_iter()
        .map(|name| {
            let vs = nn::VarStore::new(Device::Cpu);
            let model = mlp(&vs, name == "checkpoint");
            let adam = AdamW::new(&vs, AdamWConfig::default()).unwrap();
            let folder = std::env::temp_dir();
            let builder = if name == "optimizer" {
                Stack::of(&vs, CpuOffload::optimizer(adam).disk(folder.clone()).unwrap())
            } else {
                Stack::of(&vs, adam)
            };
            let builder = match name {
                "accumulate" => builder.with(GradAccumulator::every(2)),
                "bf16" => builder.with(AmpScaler::bf16()),
                "clip" => builder.with(GradClip::norm(0.1)),
                "disk" => builder.with(CpuOffload::activations().disk(folder)),
                "budget" => builder.with(Budget::bytes(1 << 40)),
                "rollback" => builder.with(Rollback::micro_batch()).with(GradAccumulator::every(2)),
                _ => builder,
            };
            let training = builder.with(MemoryTimeline::new()).build().unwrap();
            (name, model, vs, training)
        })
        .collect()
}

#[test]
fn under_every_strategy_the_roles_add_up_to_the_counted_peak() {
    let _guard = serial();
    for (name, model, vs, mut training) in stacks() {
        let weights: u64 = vs.trainable_variables().iter().map(|w| w.numel() as u64 * 4).sum();
        let x = Tensor::randn([16, 32], CPU);
        for step in 0..3 {
            let loss = |x: &Tensor| {
                Ok(Loss::mean(
                    model.forward(x).to_kind(Kind::Float).square().mean(Kind::Float),
                    x.size()[0] as u64,
                ))
            };
            let peak = peak_of(training.step_batch(&x, loss).unwrap());
            let timeline = timeline(&training);
            assert_adds_up(&timeline);
            let found = timeline.peak();
            assert_eq!(found.bytes, peak, "{name} in step {step}: {timeline}");
            let held: u64 = found.holders.iter().map(|holder| holder.bytes).sum();
            assert_eq!(held, peak, "{name} in step {step}: {timeline}");
            assert_eq!(found.roles[Role::Parameters], weights, "{name}: {timeline}");
            let highest = timeline.highest();
            assert_eq!(highest[Role::Gradients], weights, "{name}: {timeline}");
            let state = if name == "optimizer" { 0..2 * weights } else { 2 * weights..2 * weights + 1 };
            assert!(state.contains(&highest[Role::OptimizerState]), "{name}: {timeline}");
            assert!(highest[Role::Activations] > 0, "{name}: {timeline}");
        }
    }
}

#[test]
fn observing_changes_no_bit() {
    let _guard = serial();
    let train = |observe: bool| {
        memfit::tch::manual_seed(3);
        let vs = nn::VarStore::new(Device::Cpu);
        let model = mlp(&vs, true);
        let builder = Stack::of(&vs, AdamW::new(&vs, AdamWConfig::default()).unwrap());
        let builder = if observe { builder.with(MemoryTimeline::new()) } else { builder };
        let mut training = builder.build().unwrap();
        for _ in 0..3 {
            let x = Tensor::randn([16, 32], CPU);
            let _ = training
                .step_with(|| Ok(Loss::of(model.forward(&x).dropout(0.5, true).square().mean(Kind::Float))))
                .unwrap();
        }
        copies(&vs.trainable_variables())
    };
    assert!(same(&train(false), &train(true)));
}

#[test]
fn libtorch_still_checks_versions() {
    let _guard = serial();
    let (_vs, w, builder, _) = vector();
    let mut training = builder.build().unwrap();
    let stepped = training.step_with(|| {
        let mut y = &w * 2.0;
        let loss = y.square().sum(Kind::Float);
        let _ = memfit::tch::no_grad(|| y.fill_(0.0));
        Ok(Loss::of(loss))
    });
    assert!(matches!(stepped, Err(Error::Modified { .. })), "{stepped:?}");
}

#[test]
fn segments_name_their_activations_and_their_recompute() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let model = mlp(&vs, true);
    let adam = AdamW::new(&vs, AdamWConfig::default()).unwrap();
    let mut training = Stack::of(&vs, adam).with(MemoryTimeline::new()).build().unwrap();
    let x = Tensor::randn([16, 32], CPU);
    let _ = training.step_with(|| Ok(Loss::of(model.forward(&x).square().mean(Kind::Float)))).unwrap();
    let timeline = timeline(&training);
    let recomputed: Vec<&str> = timeline
        .spans()
        .iter()
        .filter(|span| span.phase == Phase::Recompute)
        .filter_map(|span| span.segment.as_deref())
        .collect();
    assert_eq!(recomputed, ["block 3", "block 2", "block 1", "block 0"]);
    // A recomputed block keeps its linear layer's output: 16 × 32 fp32.
    let of = |name: &str, phase: Phase| -> u64 {
        let made = timeline.blocks().iter().filter(|block| {
            (block.segment.as_deref(), block.phase, block.role)
                == (Some(name), Some(phase), Role::Activations)
        });
        made.map(|block| block.bytes).sum()
    };
    // What forward keeps of a segment is its output.
    assert_eq!(of("block 1", Phase::Forward), 16 * 32 * 4);
    assert!(of("block 1", Phase::Recompute) >= 16 * 32 * 4, "{timeline}");
    assert!(timeline.spans().windows(2).all(|pair| pair[0].end <= pair[1].start));
}

#[test]
fn a_plain_loop_says_its_phases_and_segments() {
    let _guard = serial();
    let w = Tensor::ones([1000], CPU).set_requires_grad(true);
    let mut recording = Recording::start().unwrap();
    recording.label(Role::Parameters, [&w]);
    let loss = {
        let _in = Phase::Forward.enter_step(4);
        let kept = {
            let _segment = memory::segment("exponential");
            w.exp()
        };
        kept.sum(Kind::Float)
    };
    {
        let _in = Phase::Backward.enter_step(4);
        loss.backward();
    }
    recording.label_gradients([&w]);
    let kept = {
        let _role = Role::HostCopies.scope();
        Tensor::zeros([50], CPU)
    };
    let timeline = recording.finish().unwrap();
    drop(kept);
    assert_adds_up(&timeline);
    let highest = timeline.highest();
    let known = roles(&[
        (Role::Parameters, 4000),
        (Role::Gradients, 4000),
        (Role::Activations, 4004),
        (Role::HostCopies, 200),
    ]);
    for (role, bytes) in known.iter().filter(|(_, bytes)| *bytes > 0) {
        assert_eq!(highest[role], bytes, "{timeline}");
    }
    let exponential = timeline.blocks().iter().find(|block| block.segment.as_deref() == Some("exponential"));
    let exponential = exponential.unwrap();
    assert_eq!((exponential.bytes, exponential.role, exponential.step), (4000, Role::Activations, 4));
    assert_eq!(Phase::now(), Phase::Idle);
}

#[test]
fn what_another_thread_makes_is_no_activation() {
    let _guard = serial();
    let recording = Recording::start().unwrap();
    let (ours, theirs) = {
        let _in = Phase::Forward.enter();
        let ours = Tensor::zeros([10], CPU);
        (ours, std::thread::spawn(|| Tensor::zeros([20], CPU)).join().unwrap())
    };
    let timeline = recording.finish().unwrap();
    let role = |bytes: u64| timeline.blocks().iter().find(|block| block.bytes == bytes).unwrap().role;
    assert_eq!((role(40), role(80)), (Role::Activations, Role::Other));
    drop((ours, theirs));
}

#[test]
fn threads_together_still_add_up() {
    let _guard = serial();
    let recording = Recording::start().unwrap();
    let scope = memory::PeakScope::new(Device::Cpu).unwrap();
    std::thread::scope(|threads| {
        for seed in 0..4i64 {
            threads.spawn(move || {
                let mut held = Vec::new();
                for i in 0..500 {
                    held.push(Tensor::zeros([1 + (seed * 7 + i * 13) % 50], CPU));
                    if i % 7 == 0 {
                        held.clear();
                    }
                }
            });
        }
    });
    let timeline = recording.finish().unwrap();
    assert_adds_up(&timeline);
    assert_eq!(timeline.peak().bytes, scope.peak());
    assert_eq!(timeline.moments().len(), 1 + 2 * 4 * 500);
}

#[test]
fn a_failed_step_tells_who_held_the_memory() {
    let _guard = serial();
    let (_vs, w, builder, _) = vector();
    let mut training = builder.build().unwrap();
    let limit = Limit::new(support::live() + 10 * N).unwrap();
    let failed = training.step_with(|| {
        let _segment = memory::segment("wide");
        let y = w.exp();
        let wide = Tensor::f_zeros([4, N as i64], CPU)?;
        Ok(Loss::of((y * wide).sum(Kind::Float)))
    });
    drop(limit);
    assert!(failed.is_err_and(|error| error.is_out_of_memory()));
    let timeline = timeline(&training);
    assert_adds_up(&timeline);
    let refusal = timeline.refusals()[0];
    assert_eq!((timeline.refusals().len(), refusal.bytes), (1, 16 * N));
    // Known before any update has run.
    assert_eq!(timeline.peak().roles[Role::OptimizerState], 8 * N, "{timeline}");
    let holders = timeline.peak().holders;
    let wide = holders.iter().find(|holder| holder.segment.as_deref() == Some("wide")).unwrap();
    // What waits for backward, though the error drops it while forward still runs.
    assert_eq!((wide.role, wide.bytes), (Role::Activations, 4 * N));
    let _ = training.step_with(|| Ok(Loss::of(w.exp().sum(Kind::Float)))).unwrap();
}

#[test]
fn a_panic_leaves_the_phase_as_it_was() {
    let _guard = serial();
    let (_vs, w, builder, _) = vector();
    let mut training = builder.build().unwrap();
    let failed = training.step_with(|| {
        let _segment = memory::segment("inner");
        let _role = Role::HostCopies.scope();
        std::panic::resume_unwind(Box::new("planned"))
    });
    assert!(matches!(failed, Err(Error::Panic { .. })));
    assert_eq!(Phase::now(), Phase::Idle);
    let _ = training.step_with(|| Ok(Loss::of(w.exp().sum(Kind::Float)))).unwrap();
    let timeline = timeline(&training);
    assert_eq!(timeline.highest()[Role::HostCopies], 0);
    assert!(timeline.spans().iter().all(|span| span.segment.is_none()));
}

#[test]
fn the_ring_keeps_the_newest_windows() {
    let _guard = serial();
    let (_vs, w, builder, _) = vector();
    drop(builder);
    let sgd = support::sgd(&_vs);
    let mut training =
        Stack::of(&_vs, sgd).with(MemoryTimeline::new().capacity(200).keep(3)).build().unwrap();
    for _ in 0..50 {
        let _ = training.step_with(|| Ok(Loss::of(w.exp().sum(Kind::Float)))).unwrap();
    }
    let watch = training.strategy::<MemoryTimeline>().unwrap();
    let kept: Vec<Timeline> = watch.timelines().map(Result::unwrap).collect();
    let steps: Vec<u32> = kept.iter().map(|timeline| timeline.peak().step).collect();
    assert_eq!(steps, [47, 48, 49]);
    let _ = training
        .step_with(|| {
            for _ in 0..200 {
                drop(Tensor::zeros([1], CPU));
            }
            Ok(Loss::of(w.exp().sum(Kind::Float)))
        })
        .unwrap();
    let watch = training.strategy::<MemoryTimeline>().unwrap();
    // A window beyond the room: its newest events, which still add up.
    let timeline = watch.timeline().unwrap();
    assert_adds_up(&timeline);
    assert!(timeline.lost() > 200, "{}", timeline.lost());
    assert!(timeline.moments().len() <= 201 && timeline.moments().len() > 50, "{}", timeline.moments().len());
    assert_eq!(timeline.peak().roles[Role::Parameters], 4 * N, "{timeline}");
    assert!(timeline.to_string().contains("older ones did not fit"), "{timeline}");
}

/// Events take the processor's own counter; times are those of the clock.
#[test]
fn times_are_those_of_the_clock() {
    let _guard = serial();
    let recording = Recording::start().unwrap();
    let start = std::time::Instant::now();
    drop(Tensor::zeros([1], CPU));
    std::thread::sleep(std::time::Duration::from_millis(40));
    drop(Tensor::zeros([1], CPU));
    let passed = start.elapsed().as_secs_f64();
    let timeline = recording.timeline().unwrap();
    let times: Vec<f64> = timeline.moments().iter().map(|moment| moment.time.as_secs_f64()).collect();
    let between = times[times.len() - 1] - times[1];
    assert!((0.0399..=passed * 1.01).contains(&between), "{between} of {passed}");
    assert!(times.is_sorted(), "{times:?}");
}

/// What another thread asks or names does not make it the one that trains.
#[test]
fn another_thread_that_looks_on_changes_no_role() {
    let _guard = serial();
    let (_vs, w, builder, _) = vector();
    let mut training = builder.build().unwrap();
    let _ = training
        .step_with(|| {
            std::thread::scope(|scope| {
                let looks = scope.spawn(|| {
                    let _segment = memory::segment("loading");
                    Phase::now()
                });
                assert_eq!(looks.join().unwrap(), Phase::Forward);
            });
            Ok(Loss::of((w.exp() * 2.0).sum(Kind::Float)))
        })
        .unwrap();
    let timeline = timeline(&training);
    assert!(timeline.highest()[Role::Activations] >= 4 * N, "{timeline}");
    let marks = timeline.moments().len();
    for _ in 0..100 {
        let _ = Phase::now();
    }
    assert_eq!(training.strategy::<MemoryTimeline>().unwrap().timeline().unwrap().moments().len(), marks);
}

#[test]
fn a_timeline_in_an_open_forward_has_activations() {
    let _guard = serial();
    let w = Tensor::zeros([N as i64], CPU).set_requires_grad(true);
    let recording = Recording::start().unwrap();
    let _in = Phase::Forward.enter();
    let y = w.exp();
    assert_eq!(recording.timeline().unwrap().peak().roles[Role::Activations], 4 * N);
    drop(y);
}

#[test]
fn room_beyond_the_address_space_is_a_typed_error() {
    let _guard = serial();
    for events in [usize::MAX, usize::MAX / 40, usize::MAX / 80 + 1] {
        assert!(matches!(Recording::with_capacity(events), Err(Error::Config { .. })), "{events}");
        let (_vs, _w, builder, _) = vector();
        drop(builder);
        let sgd = support::sgd(&_vs);
        let built = Stack::of(&_vs, sgd).with(MemoryTimeline::new().capacity(events)).build();
        assert!(matches!(built, Err(Error::Config { .. })), "{events}");
    }
}

#[test]
fn recordings_share_the_ring_and_misuse_is_a_typed_error() {
    let _guard = serial();
    assert!(matches!(Recording::with_capacity(0), Err(Error::Config { .. })));
    let first = Recording::with_capacity(1000).unwrap();
    let second = Recording::with_capacity(10).unwrap();
    assert!(matches!(Recording::with_capacity(1001), Err(Error::Config { .. })));
    drop(Tensor::zeros([7], CPU));
    drop(first);
    drop(Tensor::zeros([9], CPU));
    assert_eq!(second.finish().unwrap().moments().len(), 1 + 4);
    assert!(Recording::with_capacity(1001).is_ok());
    let (_vs, _w, builder, _) = vector();
    let training = builder.build().unwrap();
    let none = training.strategy::<MemoryTimeline>().unwrap().timeline();
    assert!(matches!(none, Err(Error::CallOrder { .. })));
}

#[test]
fn watching_takes_no_counted_memory() {
    let _guard = serial();
    let before = memory::stats(Device::Cpu).unwrap();
    let recording = Recording::start().unwrap();
    let scope = memory::LeakScope::new().unwrap();
    drop(Tensor::zeros([10], CPU));
    let timeline = recording.timeline().unwrap();
    drop((recording, scope));
    let after = memory::stats(Device::Cpu).unwrap();
    assert_eq!((after.current, after.allocations), (before.current, before.allocations + 1));
    assert_eq!(timeline.moments().len(), 1 + 2);
}

#[test]
fn weights_that_visit_are_parameters_while_they_are_here() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let mut model = nn::seq();
    for layer in 0..3 {
        let linear = nn::linear(vs.root() / layer, 64, 64, Default::default());
        let weights = vec![linear.ws.shallow_clone()];
        model = model.add(CpuOffload::parameters(linear, &weights).disk(std::env::temp_dir()).unwrap());
    }
    let sgd = Sgd::new(&vs, SgdConfig::default()).unwrap();
    let mut training = Stack::of(&vs, CpuOffload::optimizer(sgd).resident().unwrap())
        .with(MemoryTimeline::new())
        .build()
        .unwrap();
    let x = Tensor::randn([4, 64], CPU);
    for _ in 0..2 {
        let peak = peak_of(
            training.step_with(|| Ok(Loss::of(model.forward(&x).square().mean(Kind::Float)))).unwrap(),
        );
        let timeline = timeline(&training);
        assert_adds_up(&timeline);
        assert_eq!(timeline.peak().bytes, peak);
        // Three biases stay; of the weights one is here, two at a change-over.
        let (biases, weight) = (3 * 64 * 4, 64 * 64 * 4);
        let most = timeline.highest()[Role::Parameters];
        assert!(most == biases + weight || most == biases + 2 * weight, "{most} {timeline}");
    }
}

#[test]
fn a_group_added_in_the_run_has_its_roles() {
    let _guard = serial();
    let (_vs, w, builder, _) = vector();
    let mut training = builder.build().unwrap();
    let late = Tensor::zeros([500], CPU).set_requires_grad(true);
    let _ = training.step_with(|| Ok(Loss::of(w.exp().sum(Kind::Float)))).unwrap();
    training.add_group(vec![Named::new("late", &late)], GroupOptions::default()).unwrap();
    for _ in 0..2 {
        let loss = || Ok(Loss::of(w.exp().sum(Kind::Float) + late.exp().sum(Kind::Float)));
        let _ = training.step_with(loss).unwrap();
        let timeline = timeline(&training);
        assert_adds_up(&timeline);
        let end = timeline.moments().last().unwrap().roles;
        assert_eq!(end[Role::Parameters], 4 * N + 2000, "{timeline}");
        assert_eq!(end[Role::OptimizerState], 8 * N + 4000, "{timeline}");
        assert_eq!(timeline.highest()[Role::Gradients], 4 * N + 2000, "{timeline}");
    }
}

#[test]
fn a_weight_that_gets_other_bytes_is_labelled_anew() {
    let _guard = serial();
    let (_vs, mut w, builder, _) = vector();
    let mut training = builder.build().unwrap();
    let mut held = Vec::new();
    let end = |training: &mut Stack, w: &Tensor| {
        let _ = training.step_with(|| Ok(Loss::of(w.exp().sum(Kind::Float)))).unwrap();
        let timeline = timeline(training);
        assert_adds_up(&timeline);
        timeline.moments().last().unwrap().roles
    };
    for old_stays in [true, false] {
        let before = end(&mut training, &w);
        assert_eq!((before[Role::Parameters], before[Role::OptimizerState]), (4 * N, 8 * N));
        if old_stays {
            held.push(w.detach());
        }
        w.set_data(&Tensor::zeros([N as i64], CPU));
        let after = end(&mut training, &w);
        assert_eq!((after[Role::Parameters], after[Role::OptimizerState]), (4 * N, 8 * N));
        let other = before[Role::Other] + if old_stays { 4 * N } else { 0 };
        assert_eq!(after[Role::Other], other, "what the old bytes are now");
    }
}

#[test]
fn a_frozen_weight_that_grows_in_its_storage_is_labelled_anew() {
    let _guard = serial();
    let (vs, w, builder, _) = vector();
    drop(builder);
    let mut frozen = vs.root().zeros_no_train("frozen", &[100]);
    let named = [Named::new("w", &w), Named::new("frozen", &frozen)];
    let builder = Stack::tensors(&named[..], &[] as &[Named], support::sgd(&vs));
    let mut training = builder.with(MemoryTimeline::new()).build().unwrap();
    for rows in [100, 200, 400] {
        let _ = memfit::tch::no_grad(|| frozen.resize_([rows]));
        let _ = training.step_with(|| Ok(Loss::of(w.exp().sum(Kind::Float)))).unwrap();
        let timeline = timeline(&training);
        assert_adds_up(&timeline);
        let parameters = timeline.moments().last().unwrap().roles[Role::Parameters];
        assert_eq!(parameters, 4 * N + 4 * rows as u64, "{timeline}");
    }
}

#[test]
fn a_weight_that_is_unfrozen_in_the_run_has_its_state_labelled_from_its_second_update() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let (w, late) = (vs.root().zeros("w", &[N as i64]), vs.root().zeros("late", &[500]));
    let _ = late.set_requires_grad(false);
    let adam = AdamW::new(&vs, AdamWConfig::default()).unwrap();
    let mut training = Stack::of(&vs, adam).with(MemoryTimeline::new()).build().unwrap();
    let mut end = || {
        let loss = || Ok(Loss::of(w.exp().sum(Kind::Float) + late.exp().sum(Kind::Float)));
        let _ = training.step_with(loss).unwrap();
        let timeline = timeline(&training);
        assert_adds_up(&timeline);
        timeline.moments().last().unwrap().roles[Role::OptimizerState]
    };
    assert_eq!((end(), end()), (8 * N, 8 * N));
    let _ = late.set_requires_grad(true);
    end();
    assert_eq!((end(), end()), (8 * N + 4000, 8 * N + 4000));
}

#[test]
fn master_weights_are_optimizer_state_and_bf16_weights_parameters() {
    let _guard = serial();
    let mut vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().zeros("w", &[N as i64]);
    vs.bfloat16();
    let adam = AdamW::new(&vs, AdamWConfig::default()).unwrap();
    let builder = Stack::of(&vs, adam).with(MasterWeights::fp32());
    let mut training = builder.with(MemoryTimeline::new()).build().unwrap();
    for _ in 0..3 {
        let _ = training.step_with(|| Ok(Loss::of(w.exp().sum(Kind::Float)))).unwrap();
        let timeline = timeline(&training);
        assert_adds_up(&timeline);
        let end = timeline.moments().last().unwrap().roles;
        assert_eq!((end[Role::Parameters], end[Role::OptimizerState]), (2 * N, 12 * N), "{timeline}");
    }
}

#[test]
fn two_stacks_in_turn_keep_their_roles_apart() {
    let _guard = serial();
    let (vs, v, first, _) = vector();
    let mut first = first.build().unwrap();
    let other = nn::VarStore::new(Device::Cpu);
    let w = other.root().zeros("w", &[500]);
    let sgd = Sgd::new(&other, SgdConfig::default().lr(0.1).momentum(0.9)).unwrap();
    let mut second = Stack::of(&other, sgd).with(MemoryTimeline::new()).build().unwrap();
    for _ in 0..3 {
        for (training, w, expected) in [(&mut first, &v, (4 * N, 8 * N)), (&mut second, &w, (2000, 2000))] {
            let _ = training.step_with(|| Ok(Loss::of(w.exp().sum(Kind::Float)))).unwrap();
            let timeline = timeline(training);
            assert_adds_up(&timeline);
            let end = timeline.moments().last().unwrap().roles;
            assert_eq!((end[Role::Parameters], end[Role::OptimizerState]), expected, "{timeline}");
        }
    }
    // Blocks that were followed end here, and none of the first stack's.
    drop((second, other, w));
    let _ = first.step_with(|| Ok(Loss::of(v.exp().sum(Kind::Float)))).unwrap();
    let timeline = timeline(&first);
    assert_adds_up(&timeline);
    let end = timeline.moments().last().unwrap().roles;
    assert_eq!((end[Role::Parameters], end[Role::OptimizerState]), (4 * N, 8 * N), "{timeline}");
    drop(vs);
}

#[test]
fn state_that_ended_between_windows_is_not_counted_in_one_that_fails() {
    let _guard = serial();
    let (_vs, w, builder, _) = vector();
    let mut training = builder.build().unwrap();
    let _ = training.step_with(|| Ok(Loss::of(w.exp().sum(Kind::Float)))).unwrap();
    for moment in training.optimizer_mut().state_of(0, 0) {
        *moment = Tensor::zeros([0], CPU);
    }
    let failed = training.step_with(|| std::panic::resume_unwind(Box::new("planned")));
    assert!(matches!(failed, Err(Error::Panic { .. })));
    let timeline = timeline(&training);
    assert_adds_up(&timeline);
    assert_eq!(timeline.highest()[Role::OptimizerState], 0, "{timeline}");
}

#[test]
fn two_timelines_in_one_stack_are_refused() {
    let _guard = serial();
    let (_vs, _w, builder, _) = vector();
    assert!(matches!(builder.with(MemoryTimeline::new()).build(), Err(Error::Incompatible { .. })));
}

#[test]
fn evaluation_ends_a_window_and_is_a_phase_of_its_own() {
    let _guard = serial();
    let (_vs, w, builder, _) = vector();
    let mut training = builder.build().unwrap();
    let _ = training.step_with(|| Ok(Loss::of(w.exp().sum(Kind::Float)))).unwrap();
    let phase = training.evaluate(|| Ok(Phase::now())).unwrap();
    assert_eq!(phase, Phase::Evaluate);
    let timeline = timeline(&training);
    let phases: Vec<Phase> = timeline.spans().iter().map(|span| span.phase).collect();
    let mut busy: Vec<Phase> = phases.into_iter().filter(|phase| *phase != Phase::Idle).collect();
    busy.dedup();
    assert_eq!(busy, [Phase::Forward, Phase::Backward, Phase::Update]);
}
