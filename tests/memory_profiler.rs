//! Profiles against arithmetic and the counter; and what profiling leaves alone.

mod support;

use memfit::checkpoint::ActivationCheckpoint;
use memfit::memory::{self, Profile, Profiler, SortBy};
use memfit::optim::{AdamW, AdamWConfig};
use memfit::strategies::{Budget, GradAccumulator, MemoryTimeline, MicroBatcher, ProfileSteps};
use memfit::tch::{Device, Kind, Tensor, nn, nn::Module};
use memfit::{Error, Loss, NextUpdate, Place, Stack, StackBuilder, Strategy, UpdatePhase, Verdict};
use support::{copies, same, serial};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

fn live() -> i64 {
    support::live() as i64
}

fn profile(training: &Stack) -> &Profile {
    training.strategy::<ProfileSteps>().unwrap().profile().unwrap()
}

/// Own and total memory of an operator.
fn memory_of(profile: &Profile, name: &str) -> (i64, i64) {
    let one = profile.operator(name).unwrap_or_else(|| panic!("no {name} in {profile}"));
    (one.own.memory, one.total.memory)
}

fn calls(profile: &Profile, name: &str) -> u64 {
    profile.operator(name).map_or(0, |one| one.calls)
}

fn mlp(vs: &nn::VarStore, checkpointed: bool) -> nn::Sequential {
    (0..3).fold(nn::seq(), |model, layer| {
        let linear = nn::linear(vs.root() / layer, 32, 32, Default::default());
        let block = nn::seq().add(linear).add_fn(|x| x.gelu("none").dropout(0.1, true));
        if checkpointed { model.add(ActivationCheckpoint::new(block)) } else { model.add(block) }
    })
}

fn stack(vs: &nn::VarStore) -> StackBuilder {
    Stack::of(vs, AdamW::new(vs, AdamWConfig::default()).unwrap())
}

fn step(training: &mut Stack, model: &nn::Sequential, x: &Tensor) -> memfit::Result<memfit::StepOutcome> {
    training.step_with(|| Ok(Loss::mean(model.forward(x).square().mean(Kind::Float), x.size()[0])))
}

/// What was only tried, or dropped, does not go on being recorded.
#[test]
fn a_window_that_is_dropped_ends_the_recording() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let model = mlp(&vs, false);
    let x = Tensor::randn([4, 32], CPU);
    let loss = |x: &Tensor| Ok(Loss::mean(model.forward(x).square().mean(Kind::Float), x.size()[0]));
    let builder = stack(&vs).with(GradAccumulator::every(2)).with(ProfileSteps::new(0, 2));
    let mut training = builder.build().unwrap();
    let free = || drop(Profiler::new().start().unwrap());
    training.estimate(&x, 4, loss).unwrap();
    free();
    training.find_max_batch(1..=2, |rows| loss(&x.narrow(0, 0, rows))).unwrap();
    free();
    let _ = training.step_with(|| loss(&x)).unwrap();
    training.discard().unwrap();
    free();
    for _ in 0..4 {
        let _ = training.step_with(|| loss(&x)).unwrap();
    }
    assert_eq!(calls(profile(&training), "aten::addmm"), 4 * 3);
}

#[test]
fn what_a_thread_records_ends_with_it() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let model = mlp(&vs, false);
    let x = Tensor::randn([4, 32], CPU);
    let mut training = stack(&vs).with(ProfileSteps::new(0, 3)).build().unwrap();
    let (mut training, model, x) = std::thread::spawn(move || {
        let _ = step(&mut training, &model, &x).unwrap();
        (training, model, x)
    })
    .join()
    .unwrap();
    drop(Profiler::new().start().unwrap());
    // The rest of that profile is lost, training is not.
    for _ in 0..3 {
        let _ = step(&mut training, &model, &x).unwrap();
    }
    let lost = training.strategy::<ProfileSteps>().unwrap().profile();
    assert!(matches!(lost, Err(Error::CallOrder { .. })), "{lost:?}");
    drop(training);
    drop(Profiler::new().start().unwrap());
}

#[test]
fn what_has_no_end_is_no_overflow() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let _model = mlp(&vs, false);
    let training = stack(&vs).with(ProfileSteps::new(1, u64::MAX)).build().unwrap();
    let early = training.strategy::<ProfileSteps>().unwrap().profile();
    assert!(matches!(early, Err(Error::CallOrder { .. })));
    let x = Tensor::randn([1, 32], CPU);
    let mut training = stack(&vs).build().unwrap();
    let loss = |x: &Tensor| Ok(Loss::mean(_model.forward(x).square().mean(Kind::Float), 1));
    let estimate = training.estimate(&x, i64::MAX, loss).unwrap();
    assert!(estimate.peak > 1 << 40, "{estimate}");
}

#[test]
fn memory_of_a_product_is_its_bytes() {
    let _guard = serial();
    let (a, b) = (Tensor::ones([64, 128], CPU), Tensor::ones([128, 32], CPU));
    let before = live();
    let profiling = Profiler::new().start().unwrap();
    let product = a.matmul(&b);
    let profile = profiling.stop().unwrap();
    let bytes = 64 * 32 * 4;
    // mm allocates its output itself; matmul only calls it.
    assert_eq!(memory_of(&profile, "aten::mm"), (bytes, bytes), "{profile}");
    assert_eq!(memory_of(&profile, "aten::matmul"), (0, bytes), "{profile}");
    assert_eq!((calls(&profile, "aten::mm"), calls(&profile, "aten::matmul")), (1, 1));
    assert_eq!(profile.total().memory, bytes);
    assert_eq!(live() - before, bytes);
    drop(product);
}

#[test]
fn what_is_freed_is_negative_wherever_it_was_made() {
    let _guard = serial();
    let old = Tensor::ones([1000], CPU);
    let profiling = Profiler::new().start().unwrap();
    let new = Tensor::zeros([500], CPU);
    drop(old);
    drop(new);
    let mut kept = Tensor::empty([10], CPU);
    let _ = kept.resize_([20]);
    let profile = profiling.stop().unwrap();
    assert_eq!(memory_of(&profile, "aten::zeros"), (0, 2000), "{profile}");
    // Two tensors are made by it: zeros' and the one that is kept.
    assert_eq!(memory_of(&profile, "aten::empty"), (2000 + 40, 2000 + 40), "{profile}");
    assert_eq!(memory_of(&profile, "aten::resize_"), (80 - 40, 80 - 40), "{profile}");
    assert_eq!(memory_of(&profile, "[memory]"), (-4000 - 2000, -6000), "{profile}");
    assert_eq!(calls(&profile, "[memory]"), 2);
    assert_eq!(profile.total().memory, 80 - 4000);
}

#[test]
fn own_memory_of_all_operators_is_the_change_of_live_bytes() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let model = mlp(&vs, true);
    let x = Tensor::randn([16, 32], CPU);
    let before = live();
    let profiling = Profiler::new().start().unwrap();
    model.forward(&x).square().mean(Kind::Float).backward();
    let grown = live() - before;
    let profile = profiling.stop().unwrap();
    // The gradients are there now, and nothing else.
    let gradients: i64 = vs.trainable_variables().iter().map(|w| w.numel() as i64 * 4).sum();
    assert_eq!((grown, profile.total().memory), (gradients, gradients), "{profile}");
    for one in profile.operators() {
        assert!(one.own.time <= one.total.time, "{one:?}");
        assert!(one.calls > 0, "{one:?}");
    }
    let own: std::time::Duration = profile.operators().iter().map(|one| one.own.time).sum();
    assert_eq!(own, profile.total().time);
}

#[test]
fn a_recompute_is_seen_and_backward_too() {
    let _guard = serial();
    let count = |checkpointed: bool| {
        let vs = nn::VarStore::new(Device::Cpu);
        let model = mlp(&vs, checkpointed);
        let x = Tensor::randn([16, 32], CPU);
        let profiling = Profiler::new().start().unwrap();
        model.forward(&x).square().mean(Kind::Float).backward();
        let profile = profiling.stop().unwrap();
        ["aten::addmm", "aten::gelu", "aten::gelu_backward", "AddmmBackward0"]
            .map(|name| calls(&profile, name))
    };
    assert_eq!(count(false), [3, 3, 3, 3]);
    // A recompute runs the layer and the activation again.
    assert_eq!(count(true), [6, 6, 3, 3]);
}

#[test]
fn without_memory_there_is_only_time() {
    let _guard = serial();
    let profiling = Profiler::new().without_memory().start().unwrap();
    let _kept = Tensor::ones([10], CPU).exp();
    let profile = profiling.stop().unwrap();
    assert_eq!(calls(&profile, "aten::exp"), 1);
    assert!(profile.operators().iter().all(|one| one.own.memory == 0 && one.total.memory == 0));
    assert!(profile.operator("[memory]").is_none());
}

#[test]
fn one_at_a_time_and_none_outside() {
    let _guard = serial();
    let profiling = Profiler::new().start().unwrap();
    let second = Profiler::new().start();
    assert!(matches!(&second, Err(Error::CallOrder { call: "Profiler::start", .. })), "{second:?}");
    let elsewhere = std::thread::spawn(|| matches!(Profiler::new().start(), Err(Error::CallOrder { .. })));
    assert!(elsewhere.join().unwrap());
    drop(profiling);
    let _unseen = Tensor::ones([7], CPU).exp();
    let profiling = Profiler::new().start().unwrap();
    std::thread::spawn(|| drop(Tensor::ones([7], CPU).log())).join().unwrap();
    let _seen = Tensor::ones([7], CPU).sin();
    let profile = profiling.stop().unwrap();
    let seen = ["aten::exp", "aten::log", "aten::sin"].map(|name| calls(&profile, name));
    assert_eq!(seen, [0, 0, 1], "{profile}");
}

#[test]
fn a_panic_while_profiling_ends_it() {
    let _guard = serial();
    let panicked = std::panic::catch_unwind(|| {
        let _profiling = Profiler::new().start().unwrap();
        std::panic::resume_unwind(Box::new("planned"))
    });
    assert!(panicked.is_err());
    assert!(Profiler::new().start().is_ok());
}

#[test]
fn traces_are_written_whole_again_and_after_the_next_profile() {
    let _guard = serial();
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    let record = |shapes: bool| {
        let profiler = if shapes { Profiler::new().shapes() } else { Profiler::new() };
        let profiling = profiler.start().unwrap();
        let _kept = Tensor::ones([3, 5], CPU).exp();
        profiling.stop().unwrap()
    };
    let (first, second) = (record(false), record(true));
    let paths = ["second.json", "first.json", "again.json"].map(|name| folder.join(name));
    second.save_trace(&paths[0]).unwrap();
    first.save_trace(&paths[1]).unwrap();
    first.save_trace(&paths[2]).unwrap();
    let texts = paths.each_ref().map(|path| std::fs::read_to_string(path).unwrap());
    assert_eq!(texts[1], texts[2]);
    for (text, shapes) in texts.iter().zip([true, false, false]) {
        let trace: serde_json::Value = serde_json::from_str(text).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let exp = events.iter().find(|event| event["name"] == "aten::exp").unwrap();
        assert_eq!(exp["ph"], "X");
        let dims = exp["args"].get("Input Dims");
        assert_eq!(dims.map(|dims| dims.to_string()).as_deref(), shapes.then_some("[[3,5]]"), "{exp}");
        let bytes = |event: &serde_json::Value| event["args"]["Bytes"].as_i64();
        assert!(events.iter().any(|event| event["name"] == "[memory]" && bytes(event) == Some(60)));
    }
    let names: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 3, "nothing else is left: {names:?}");
}

#[test]
fn a_trace_that_cannot_be_written_is_an_error_and_can_be_written_elsewhere() {
    let _guard = serial();
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    let profiling = Profiler::new().start().unwrap();
    let _kept = Tensor::ones([3], CPU).exp();
    let profile = profiling.stop().unwrap();
    let odd = profile.save_trace(folder.join("trace.txt"));
    assert!(matches!(odd, Err(Error::Config { setting: "Profile::save_trace", .. })), "{odd:?}");
    let missing = profile.save_trace(folder.join("missing/trace.json"));
    assert!(matches!(missing, Err(Error::Io { .. })), "{missing:?}");
    std::fs::create_dir(folder.join("taken.json")).unwrap();
    let taken = profile.save_trace(folder.join("taken.json"));
    assert!(matches!(taken, Err(Error::Io { .. })), "{taken:?}");
    // Names that would break the trace's text, or that Kineto would take for something else.
    let strange = folder.join("a:").join("b \"c\"\\");
    std::fs::create_dir_all(&strange).unwrap();
    profile.save_trace(strange.join("trace.JSON")).unwrap();
    let text = std::fs::read_to_string(strange.join("trace.JSON")).unwrap();
    assert!(serde_json::from_str::<serde_json::Value>(&text).is_ok());
    let left = std::fs::read_dir(folder).unwrap().count();
    assert_eq!(left, 2, "taken.json and a:");
}

#[test]
fn a_first_trace_under_a_strange_name_is_still_json() {
    let _guard = serial();
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    let strange = folder.join("b \"c\"\\");
    std::fs::create_dir_all(&strange).unwrap();
    let profiling = Profiler::new().start().unwrap();
    let _kept = Tensor::ones([3], CPU).exp();
    let profile = profiling.stop().unwrap();
    profile.save_trace(strange.join("trace.json")).unwrap();
    let text = std::fs::read_to_string(strange.join("trace.json")).unwrap();
    let trace = serde_json::from_str::<serde_json::Value>(&text);
    assert!(trace.is_ok(), "{trace:?} {}", &text[text.len().saturating_sub(300)..]);
}

#[test]
fn tables_are_sorted_and_say_what_they_show() {
    let _guard = serial();
    let profiling = Profiler::new().start().unwrap();
    let big = Tensor::ones([100_000], CPU);
    let small = Tensor::ones([10], CPU).exp();
    drop((big, small));
    let profile = profiling.stop().unwrap();
    let names = |by| profile.sorted(by).into_iter().map(|one| one.name.clone()).collect::<Vec<_>>();
    let by_memory = names(SortBy::SelfMemory);
    assert_eq!((by_memory[0].as_str(), by_memory.last().unwrap().as_str()), ("aten::empty", "[memory]"));
    let times: Vec<_> = profile.sorted(SortBy::SelfTime).iter().map(|one| one.own.time).collect();
    assert!(times.is_sorted_by(|a, b| a >= b));
    let totals: Vec<_> = profile.sorted(SortBy::TotalTime).iter().map(|one| one.total.time).collect();
    assert!(totals.is_sorted_by(|a, b| a >= b));
    let table = profile.table(SortBy::SelfMemory, 1);
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 4, "{table}");
    assert!(lines[0].starts_with("1 of ") && lines[2].starts_with("aten::empty"), "{table}");
    assert!(lines[2].contains("400.0 kB") && !lines[1].contains("device"), "{table}");
    let both = profile.to_string();
    assert!(both.contains("by self memory") && both.contains("by self CPU time"), "{both}");
}

#[test]
fn the_asked_steps_are_profiled_and_no_others() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let model = mlp(&vs, false);
    let mut training = stack(&vs).with(ProfileSteps::new(2, 3)).build().unwrap();
    let x = Tensor::randn([16, 32], CPU);
    for done in 0..7 {
        let ready = training.strategy::<ProfileSteps>().unwrap().profile();
        if done < 5 {
            assert!(matches!(ready, Err(Error::CallOrder { .. })), "{done} {ready:?}");
        } else {
            // Three steps of three layers.
            assert_eq!(calls(ready.unwrap(), "aten::linear"), 9);
        }
        let _ = step(&mut training, &model, &x).unwrap();
    }
    assert_eq!(calls(profile(&training), "AddmmBackward0"), 9);
    assert!(Profiler::new().start().is_ok());
}

#[test]
fn windows_of_several_micro_batches_are_profiled_whole() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let model = mlp(&vs, false);
    let builder = stack(&vs).with(GradAccumulator::every(4)).with(Budget::bytes(1 << 40));
    let mut training = builder.with(ProfileSteps::new(1, 1)).build().unwrap();
    let x = Tensor::randn([4, 32], CPU);
    for _ in 0..8 {
        let _ = step(&mut training, &model, &x).unwrap();
    }
    assert_eq!(calls(profile(&training), "aten::linear"), 4 * 3);
}

#[test]
fn profiling_changes_no_bit() {
    let _guard = serial();
    let train = |checkpointed: bool, profiled: bool| {
        memfit::tch::manual_seed(3);
        let vs = nn::VarStore::new(Device::Cpu);
        let model = mlp(&vs, checkpointed);
        let builder = stack(&vs);
        let builder = if profiled { builder.with(ProfileSteps::new(1, 2)) } else { builder };
        let mut training = builder.build().unwrap();
        for _ in 0..4 {
            let x = Tensor::randn([16, 32], CPU);
            let _ = step(&mut training, &model, &x).unwrap();
        }
        if profiled {
            // Twice per layer where forward runs again.
            let dropouts = if checkpointed { 12 } else { 6 };
            assert_eq!(calls(profile(&training), "aten::bernoulli_"), dropouts, "{}", profile(&training));
        }
        copies(&vs.trainable_variables())
    };
    for checkpointed in [false, true] {
        assert!(same(&train(checkpointed, false), &train(checkpointed, true)));
    }
}

#[test]
fn beside_a_timeline_both_see_the_same_bytes() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let model = mlp(&vs, true);
    let builder = stack(&vs).with(ProfileSteps::new(1, 1)).with(MemoryTimeline::new());
    let mut training = builder.build().unwrap();
    let x = Tensor::randn([16, 32], CPU);
    for _ in 0..2 {
        let _ = step(&mut training, &model, &x).unwrap();
    }
    let timeline = training.strategy::<MemoryTimeline>().unwrap().timeline().unwrap();
    let moments = timeline.moments();
    assert!(moments.iter().all(|moment| moment.roles.total() == moment.live));
    // The timeline goes on to the end of the update's phase, where gradients are dropped.
    let gradients: i64 = vs.trainable_variables().iter().map(|w| w.numel() as i64 * 4).sum();
    let change = moments.last().unwrap().live as i64 - moments[0].live as i64;
    let profiled = profile(&training).total().memory;
    assert!((profiled - gradients - change).abs() <= 8, "{profiled} {gradients} {change}");
}

#[test]
fn a_failed_step_ends_the_profile_and_the_next_window_begins_it_anew() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let model = mlp(&vs, false);
    let mut training = stack(&vs).with(ProfileSteps::new(0, 2)).build().unwrap();
    let x = Tensor::randn([4, 32], CPU);
    let _ = step(&mut training, &model, &x).unwrap();
    let failed = training.step_with(|| {
        let _ = model.forward(&x);
        std::panic::resume_unwind(Box::new("planned"))
    });
    assert!(matches!(failed, Err(Error::Panic { .. })), "{failed:?}");
    // Nobody records now.
    assert!(Profiler::new().start().is_ok());
    let bad = training.step_with(|| Ok(Loss::of(Tensor::ones([1], CPU).sum(Kind::Float))));
    assert!(matches!(bad, Err(Error::Config { .. })), "{bad:?}");
    assert!(Profiler::new().start().is_ok());
    let in_backward = training.step_with(|| {
        let mut y = model.forward(&x).exp();
        let loss = y.square().sum(Kind::Float);
        let _ = memfit::tch::no_grad(|| y.fill_(0.0));
        Ok(Loss::of(loss))
    });
    assert!(matches!(in_backward, Err(Error::Modified { .. })), "{in_backward:?}");
    assert!(Profiler::new().start().is_ok());
    for _ in 0..2 {
        assert!(training.strategy::<ProfileSteps>().unwrap().profile().is_err());
        let _ = step(&mut training, &model, &x).unwrap();
    }
    assert_eq!(calls(profile(&training), "aten::linear"), 2 * 3);
    // A failure after the profile is made leaves it.
    let failed = training.step_with(|| std::panic::resume_unwind(Box::new("planned")));
    assert!(matches!(failed, Err(Error::Panic { .. })), "{failed:?}");
    assert_eq!(calls(profile(&training), "aten::linear"), 2 * 3);
}

/// Fails its first two updates, once each way.
#[derive(Debug)]
struct Fails(u32);

impl Strategy for Fails {
    fn place(&self) -> Place {
        Place::Average
    }

    fn update(&mut self, phase: &mut UpdatePhase<'_>, next: NextUpdate<'_>) -> memfit::Result<Verdict> {
        self.0 += 1;
        match self.0 {
            1 => Err(Error::config("planned", "fails")),
            2 => std::panic::resume_unwind(Box::new("planned")),
            _ => next(phase),
        }
    }
}

#[test]
fn a_failed_update_ends_the_profile_too() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let model = mlp(&vs, false);
    let mut training = stack(&vs).with(ProfileSteps::new(0, 1)).with(Fails(0)).build().unwrap();
    let x = Tensor::randn([4, 32], CPU);
    for _ in 0..2 {
        assert!(step(&mut training, &model, &x).is_err());
        // Nobody records now.
        assert!(Profiler::new().start().is_ok());
    }
    let _ = step(&mut training, &model, &x).unwrap();
    assert_eq!(calls(profile(&training), "aten::linear"), 3);
}

#[test]
fn running_out_of_memory_and_again_profiles_the_window_that_fits() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().zeros("w", &[1024]);
    let builder = Stack::of(&vs, support::sgd(&vs)).with(MicroBatcher::new());
    let mut training = builder.with(ProfileSteps::new(0, 1)).build().unwrap();
    let batch = Tensor::randn([64, 1024], CPU);
    let limit = memory::Limit::new(support::live() + (100 << 10)).unwrap();
    let outcome = training
        .step_batch(&batch, |x| Ok(Loss::mean(x.f_mul(&w)?.f_exp()?.f_mean(Kind::Float)?, x.size()[0])))
        .unwrap();
    drop(limit);
    let split = outcome.split().unwrap();
    assert!(split.retries > 0);
    assert_eq!(calls(profile(&training), "aten::exp"), split.micro_batches as u64);
}

#[test]
fn a_discarded_window_is_not_in_the_profile() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let model = mlp(&vs, false);
    let builder = stack(&vs).with(GradAccumulator::every(2));
    let mut training = builder.with(ProfileSteps::new(0, 1)).build().unwrap();
    let x = Tensor::randn([4, 32], CPU);
    let _ = step(&mut training, &model, &x).unwrap();
    training.discard().unwrap();
    for _ in 0..2 {
        let _ = step(&mut training, &model, &x).unwrap();
    }
    assert_eq!(calls(profile(&training), "aten::linear"), 2 * 3);
}

#[test]
fn a_stack_dropped_or_moved_while_it_profiles_leaves_its_thread_sound() {
    let _guard = serial();
    let begun = || {
        let vs = nn::VarStore::new(Device::Cpu);
        let w = vs.root().zeros("w", &[16]);
        let mut training = Stack::of(&vs, support::sgd(&vs)).with(ProfileSteps::new(0, 2)).build().unwrap();
        let _ = training.step_with(|| Ok(Loss::of(w.exp().sum(Kind::Float)))).unwrap();
        (training, w)
    };
    drop(begun());
    assert!(Profiler::new().start().is_ok());
    let (mut training, w) = begun();
    std::thread::scope(|threads| {
        let moved = threads.spawn(|| {
            let w = w;
            let training = &mut training;
            let _ = training.step_with(|| Ok(Loss::of(w.exp().sum(Kind::Float)))).unwrap();
            let lost = training.strategy::<ProfileSteps>().unwrap().profile();
            assert!(matches!(lost, Err(Error::CallOrder { .. })), "{lost:?}");
        });
        moved.join().unwrap();
    });
    // The thread that started it can end it, and does so when it starts the next one.
    assert!(Profiler::new().start().is_ok());
}

#[test]
fn misuse_is_refused_by_name() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let _ = vs.root().zeros("w", &[4]);
    let none = stack(&vs).with(ProfileSteps::new(1, 0)).build();
    assert!(matches!(none, Err(Error::Config { setting: "ProfileSteps::new", .. })), "{none:?}");
    let two = stack(&vs).with(ProfileSteps::new(0, 1)).with(ProfileSteps::new(3, 1)).build();
    assert!(matches!(two, Err(Error::Incompatible { .. })), "{two:?}");
    let profiling = Profiler::new().start().unwrap();
    let mut training = stack(&vs).with(ProfileSteps::new(0, 1)).build().unwrap();
    let w = vs.trainable_variables();
    let refused = training.step_with(|| Ok(Loss::of(w[0].exp().sum(Kind::Float))));
    assert!(matches!(refused, Err(Error::CallOrder { .. })), "{refused:?}");
    drop(profiling);
    let _ = training.step_with(|| Ok(Loss::of(w[0].exp().sum(Kind::Float)))).unwrap();
    assert_eq!(calls(profile(&training), "aten::exp"), 1);
}

/// What a process prints in which a test runs alone, on a thread other than main's, as the tests are.
fn printed_by(test: &str) -> (String, Vec<String>) {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let command = command.args([test, "--exact", "--nocapture"]).env_remove("KINETO_LOG_LEVEL");
    let output = command.output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && printed.contains("1 passed"), "{output:?}");
    let own = |line: &&str| line.is_empty() || line.starts_with("running ") || line.starts_with("test ");
    // A warning may have a time or a process' number in it.
    let words = |text: &str| text.replace(|letter: char| letter.is_ascii_digit(), "");
    let foreign = printed.lines().filter(|line| !own(line)).map(words).collect();
    (words(&String::from_utf8_lossy(&output.stderr)), foreign)
}

/// Only what the same process prints without a profile: a loader or a library may warn of this machine.
#[test]
fn nothing_is_printed() {
    let _guard = serial();
    let plain = printed_by("an_operator_runs_without_a_profile");
    assert_eq!(printed_by("traces_are_written_whole_again_and_after_the_next_profile"), plain);
}

#[test]
fn an_operator_runs_without_a_profile() {
    let _guard = serial();
    assert_eq!(Tensor::zeros([3, 5], CPU).exp().sum(Kind::Float).double_value(&[]), 15.0);
}

#[test]
fn the_counter_is_left_as_it_was() {
    let _guard = serial();
    let before = memory::stats(Device::Cpu).unwrap();
    let profiling = Profiler::new().start().unwrap();
    drop(Tensor::zeros([10], CPU));
    let profile = profiling.stop().unwrap();
    let after = memory::stats(Device::Cpu).unwrap();
    assert_eq!((after.current, after.allocations), (before.current, before.allocations + 1));
    drop(profile);
}

/// What an operator costs while it is profiled: `cargo test --test memory_profiler -- --ignored
/// --nocapture`.
#[test]
#[ignore = "measures"]
fn the_cost() {
    let _guard = serial();
    let x = Tensor::ones([16], CPU);
    let run = |runs: usize| {
        let start = std::time::Instant::now();
        (0..runs).for_each(|_| drop(x.neg()));
        start.elapsed().as_secs_f64() * 1e9 / runs as f64
    };
    let runs = 100_000;
    let _ = run(runs);
    for _ in 0..3 {
        let plain = run(runs);
        let held = memory::resident().unwrap().anonymous;
        let profiling = Profiler::new().start().unwrap();
        let profiled = run(runs);
        let recorded = memory::resident().unwrap().anonymous;
        let start = std::time::Instant::now();
        let profile = profiling.stop().unwrap();
        let stop = start.elapsed().as_secs_f64() * 1e9 / runs as f64;
        let ended = memory::resident().unwrap().anonymous;
        let each = |bytes: u64| bytes.saturating_sub(held) / runs as u64;
        println!(
            "one operator, allocation and free: {:+.0} ns while recording, {stop:.0} ns in stop(); {} B recorded, \
             {} B after stop()",
            profiled - plain,
            each(recorded),
            each(ended)
        );
        drop(profile);
        memory::release_caches(Device::Cpu).unwrap();
    }
}
