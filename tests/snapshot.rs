//! Saved, and brought back to the bit.

mod support;
#[path = "support/training.rs"]
mod training;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use memfit::optim::{AdamW, AdamWConfig, InBackward, Optimizer, TchOptimizer};
use memfit::snapshot::{Extras, Weights};
use memfit::strategies::GradAccumulator;
use memfit::tch::{Device, Kind, Tensor, nn, nn::Module, nn::OptimizerConfig};
use memfit::{CpuOffload, Error, Loss, Snapshot, Snapshots, Stack, State, StateVisitor, Value};
use support::family::{Member, Net, every_optimizer};
use support::process::{SmallPages, anonymous};
use support::serial;
use support::waiting::{until, until_others_wait};
use training::{KITS, Kit, Run, WINDOW, batch, difference_of, half, same_bits};

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn problems(error: Error) -> Vec<String> {
    match error {
        Error::State { problems } | Error::Snapshot { problems, .. } => problems,
        other => panic!("{other}"),
    }
}

/// Case 55.
#[test]
fn resumed_anywhere_in_a_window_equals_never_stopped() {
    let _guard = serial();
    for kit in KITS {
        for stop in [0, 1, 2, 3 * WINDOW as u64, 3 * WINDOW as u64 + 2] {
            let end = 8 * WINDOW as u64;
            let mut straight = Run::new(kit, 1);
            straight.train(0, end);
            let expected = straight.stack.state().unwrap();

            let dir = folder();
            let mut snapshots = Snapshots::in_folder(dir.path()).unwrap();
            let mut stopped = Run::new(kit, 1);
            stopped.train(0, stop);
            let saved = snapshots.save(&mut stopped.stack, &Extras::new()).unwrap();
            stopped.train(stop, stop + 4);
            drop(stopped);

            let mut resumed = Run::new(kit, 99);
            resumed.train(0, 5);
            let back = Snapshot::open(&saved.path).unwrap().resume(&mut resumed.stack).unwrap();
            assert_eq!(back.micro_batches(), stop, "{kit:?}");
            resumed.train(stop, end);
            let found = resumed.stack.state().unwrap();
            assert_eq!(difference_of(&found, &expected), None, "{kit:?} stopped at {stop}");
        }
    }
}

/// How an optimizer of the crate is wrapped.
#[derive(Clone, Copy, Debug)]
enum Wrapped {
    Bare,
    OnDisk,
    InBackward,
    Both,
}

fn wrapped(net: &Net, member: &Member, how: Wrapped) -> Stack {
    let (named, none) = (net.named(), Vec::<memfit::Named>::new());
    let optimizer = (member.make)(&named);
    let away = |optimizer| CpuOffload::optimizer(optimizer).disk(std::env::temp_dir()).unwrap();
    let optimizer: Box<dyn Optimizer> = match how {
        Wrapped::Bare => optimizer,
        Wrapped::OnDisk => Box::new(away(optimizer)),
        Wrapped::InBackward => Box::new(InBackward::new(optimizer).unwrap()),
        Wrapped::Both => Box::new(InBackward::new(away(optimizer)).unwrap()),
    };
    Stack::tensors(&named, &none, optimizer).build().unwrap()
}

/// Cases 43 and 55: 5 steps, a snapshot, a new model, 5 steps.
#[test]
fn every_optimizer_goes_on_to_the_bit_under_any_wrapper() {
    use Wrapped::{Bare, Both, InBackward, OnDisk};
    let _guard = serial();
    for member in every_optimizer() {
        let run = |net: &Net, stack: &mut Stack| {
            for _ in 0..5 {
                let _ = stack.step_with(|| Ok(Loss::of(net.loss()))).unwrap();
            }
        };
        let net = Net::new(member.weights);
        let mut straight = wrapped(&net, &member, Bare);
        run(&net, &mut straight);
        run(&net, &mut straight);
        let expected = straight.state().unwrap();
        let ways = [
            (Bare, Bare),
            (Bare, OnDisk),
            (OnDisk, Bare),
            (InBackward, InBackward),
            (InBackward, Bare),
            (OnDisk, Both),
        ];
        for (from, to) in ways {
            let dir = folder();
            let mut snapshots = Snapshots::in_folder(dir.path()).unwrap();
            let net = Net::new(member.weights);
            let mut stopped = wrapped(&net, &member, from);
            run(&net, &mut stopped);
            snapshots.save(&mut stopped, &Extras::new()).unwrap();
            run(&net, &mut stopped);
            drop((stopped, net));
            let other = Net::new(member.weights);
            let mut resumed = wrapped(&other, &member, to);
            run(&other, &mut resumed);
            snapshots.latest().unwrap().unwrap().resume(&mut resumed).unwrap();
            run(&other, &mut resumed);
            let off = difference_of(&resumed.state().unwrap(), &expected);
            assert_eq!(off, None, "{}: {from:?} to {to:?}", member.name);
        }
    }
}

/// Case 55, with gradients that are added up elsewhere.
#[test]
fn sums_of_an_open_window_come_back_in_their_dtype() {
    let _guard = serial();
    for masters in [true, false] {
        let run = |stack: &mut Stack, linear: &nn::Linear, from, to| {
            for number in from..to {
                let x = batch(number).to_kind(Kind::BFloat16);
                let loss = || Ok(Loss::mean(linear.forward(&x).square().mean(Kind::Float), x.size()[0]));
                let _ = stack.step_with(loss).unwrap();
            }
        };
        let (_vs, linear, mut straight) = half(masters, 1);
        run(&mut straight, &linear, 0, 11);
        let expected = straight.state().unwrap();
        let dir = folder();
        let mut snapshots = Snapshots::in_folder(dir.path()).unwrap();
        let (_vs, linear, mut stopped) = half(masters, 1);
        run(&mut stopped, &linear, 0, 5);
        snapshots.save(&mut stopped, &Extras::new()).unwrap();
        let (_vs, linear, mut resumed) = half(masters, 2);
        run(&mut resumed, &linear, 0, 4);
        snapshots.latest().unwrap().unwrap().resume(&mut resumed).unwrap();
        run(&mut resumed, &linear, 5, 11);
        assert_eq!(difference_of(&resumed.state().unwrap(), &expected), None, "masters: {masters}");
    }
}

#[test]
fn windows_go_on_with_the_window_that_was_open() {
    let _guard = serial();
    let build = || {
        memfit::tch::manual_seed(3);
        let vs = nn::VarStore::new(Device::Cpu);
        let linear = nn::linear(vs.root(), 4, 1, Default::default());
        let optimizer = AdamW::new(&vs, AdamWConfig::default().lr(0.1)).unwrap();
        // Rows are 3, 4, 5, 3, …: a window ends with the one that brings it to 8.
        let stack = Stack::of(&vs, optimizer).with(GradAccumulator::tokens(8)).build().unwrap();
        (vs, linear, stack)
    };
    let run = |stack: &mut Stack, linear: &nn::Linear, from: u64, stop: usize| {
        let mut ends = Vec::new();
        for micro in stack.windows((from..13).map(batch)).take(stop) {
            let outcome = stack
                .step(micro.unwrap(), |x| {
                    Ok(Loss::mean(linear.forward(x).square().mean(Kind::Float), x.size()[0]))
                })
                .unwrap();
            ends.push(outcome.stepped());
        }
        ends
    };
    let (_vs, linear, mut straight) = build();
    let all = run(&mut straight, &linear, 0, 99);
    for stop in [1, 2, 4, 5] {
        let dir = folder();
        let mut snapshots = Snapshots::in_folder(dir.path()).unwrap();
        let (_vs, linear, mut stopped) = build();
        let before = run(&mut stopped, &linear, 0, stop);
        snapshots.save(&mut stopped, &Extras::new()).unwrap();
        stopped.discard().unwrap();
        let (_vs, linear, mut resumed) = build();
        let back = snapshots.latest().unwrap().unwrap().resume(&mut resumed).unwrap();
        assert_eq!(back.micro_batches(), stop as u64);
        let after = run(&mut resumed, &linear, stop as u64, 99);
        assert_eq!([before, after].concat(), all);
        let (found, expected) = (resumed.state().unwrap(), straight.state().unwrap());
        assert_eq!(difference_of(&found, &expected), None, "stopped at {stop}");
        // Only once, and only that window.
        let x = batch(0);
        let _ = resumed.step_with(|| Ok(Loss::mean(linear.forward(&x).mean(Kind::Float), 3))).unwrap();
        assert!(resumed.windows([batch(1)]).next().unwrap().is_err());
        resumed.discard().unwrap();
    }
}

/// Case 58.
#[test]
fn what_does_not_fit_is_listed_and_nothing_moves() {
    let _guard = serial();
    let dir = folder();
    let mut snapshots = Snapshots::in_folder(dir.path()).unwrap();
    let of = |sizes: &[(&str, i64)]| {
        let vs = nn::VarStore::new(Device::Cpu);
        for (name, size) in sizes {
            let _ = vs.root().randn(name, &[*size], 0.0, 1.0);
        }
        let optimizer = AdamW::new(&vs, AdamWConfig::default()).unwrap();
        (Stack::of(&vs, optimizer).build().unwrap(), vs)
    };
    let (mut one, _) = of(&[("kept", 2), ("wide", 2), ("gone", 2)]);
    snapshots.save(&mut one, &Extras::new()).unwrap();
    let snapshot = snapshots.latest().unwrap().unwrap();
    let (mut other, vs) = of(&[("kept", 2), ("wide", 3), ("new", 2)]);
    let before = other.state().unwrap();
    let listed = problems(snapshot.resume(&mut other).unwrap_err());
    for wanted in [
        "`parameters.wide` has shape [2], wanted [3]",
        "`parameters.new` is missing",
        "`parameters.gone` is unknown",
        "`optimizer.new.exp_avg` is missing",
        "`optimizer.gone.step` is unknown",
    ] {
        assert!(listed.iter().any(|problem| problem == wanted), "{wanted}: {listed:#?}");
    }
    assert_eq!(difference_of(&other.state().unwrap(), &before), None);
    let listed = problems(snapshot.weights().unwrap().load_into(&vs).unwrap_err());
    assert_eq!(listed.len(), 3, "{listed:?}");
    assert_eq!(difference_of(&other.state().unwrap(), &before), None);
    let empty = nn::VarStore::new(Device::Cpu);
    let listed = problems(snapshot.weights().unwrap().partial().load_into(&empty).unwrap_err());
    assert_eq!(listed, ["the target has no tensors"]);
}

#[test]
fn another_stack_is_refused_naming_both_sides() {
    let _guard = serial();
    let dir = folder();
    let mut snapshots = Snapshots::in_folder(dir.path()).unwrap();
    let mut one = Run::new(Kit::AdamW, 1);
    snapshots.save(&mut one.stack, &Extras::new()).unwrap();
    let snapshot = snapshots.latest().unwrap().unwrap();
    for (kit, begins, here) in [
        (Kit::Sgd, "`stack.optimizer` is AdamW", ", wanted Sgd"),
        (Kit::Clipped, "`stack.strategies` is ", ", GradClip::norm(0.5)"),
        (Kit::Scaled, "`stack.strategies` is ", "AmpScaler::fp16"),
        (Kit::Scaled, "`precision.scale` is missing", ""),
    ] {
        let mut other = Run::new(kit, 2);
        let before = other.stack.state().unwrap();
        let error = snapshot.resume(&mut other.stack).unwrap_err();
        let text = error.to_string();
        let listed = problems(error);
        let found = listed.iter().find(|problem| problem.starts_with(begins));
        let Some(found) = found else { panic!("{kit:?}: {listed:#?}") };
        // Both sides: the saved one, then the one of this stack.
        let sides = found.split_once(", wanted ").map(|(saved, _)| saved.len() > begins.len() - 5);
        assert!(sides.unwrap_or(here.is_empty()) && found.contains(here), "{kit:?}: {found}");
        assert!(text.contains(found.as_str()), "the text has it too: {text}");
        assert_eq!(difference_of(&other.stack.state().unwrap(), &before), None);
    }
}

#[test]
fn offloading_leaves_no_trace_in_a_snapshot() {
    let _guard = serial();
    let mut straight = Run::new(Kit::AdamW, 1);
    straight.train(0, 20);
    let expected = straight.stack.state().unwrap();
    for (from, to) in [(Kit::AdamW, Kit::OffDisk), (Kit::OffDisk, Kit::AdamW), (Kit::OffDisk, Kit::OffDisk)] {
        let dir = folder();
        let mut snapshots = Snapshots::in_folder(dir.path()).unwrap();
        let mut one = Run::new(from, 1);
        one.train(0, 7);
        snapshots.save(&mut one.stack, &Extras::new()).unwrap();
        let mut other = Run::new(to, 2);
        snapshots.latest().unwrap().unwrap().resume(&mut other.stack).unwrap();
        other.train(7, 20);
        assert_eq!(difference_of(&other.stack.state().unwrap(), &expected), None, "{from:?} to {to:?}");
    }
}

#[test]
fn offloaded_weights_are_saved_and_loaded_where_they_live() {
    let _guard = serial();
    let build = |offloaded: bool| {
        memfit::tch::manual_seed(5);
        let vs = nn::VarStore::new(Device::Cpu);
        let linear = nn::linear(vs.root(), 64, 64, Default::default());
        let parameters = vs.trainable_variables();
        let optimizer = AdamW::new(&vs, AdamWConfig::default().lr(0.1)).unwrap();
        if offloaded {
            let home = CpuOffload::parameters(linear, &parameters).disk(std::env::temp_dir()).unwrap();
            let optimizer = CpuOffload::optimizer(optimizer).resident().unwrap();
            let stack = Stack::of(&vs, optimizer).build().unwrap();
            (vs, Box::new(home) as Box<dyn Module>, stack)
        } else {
            let stack = Stack::of(&vs, optimizer).build().unwrap();
            (vs, Box::new(linear) as Box<dyn Module>, stack)
        }
    };
    let step = |stack: &mut Stack, module: &dyn Module| {
        let x = Tensor::ones([2, 64], (Kind::Float, Device::Cpu));
        let _ = stack.step_with(|| Ok(Loss::of(module.forward(&x).square().mean(Kind::Float)))).unwrap();
    };
    let (_vs, module, mut plain) = build(false);
    (0..4).for_each(|_| step(&mut plain, module.as_ref()));
    let expected = plain.state().unwrap();
    for (from, to) in [(true, false), (false, true)] {
        let dir = folder();
        let mut snapshots = Snapshots::in_folder(dir.path()).unwrap();
        let (_vs, module, mut one) = build(from);
        (0..2).for_each(|_| step(&mut one, module.as_ref()));
        snapshots.save(&mut one, &Extras::new()).unwrap();
        let (_vs, module, mut other) = build(to);
        snapshots.latest().unwrap().unwrap().resume(&mut other).unwrap();
        (0..2).for_each(|_| step(&mut other, module.as_ref()));
        assert_eq!(difference_of(&other.state().unwrap(), &expected), None, "offloaded: {from} to {to}");
    }
}

/// Case 59.
#[test]
fn a_half_file_is_cast_only_where_asked() {
    let _guard = serial();
    let dir = folder();
    let file = dir.path().join("half.safetensors");
    let values = Tensor::from_slice(&[0.1f32, -2.5, 65504.0]);
    Tensor::write_safetensors(&[("w", &values.to_kind(Kind::Half))], &file).unwrap();
    let vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().zeros("w", &[3]);
    let listed = problems(Weights::open(&file).unwrap().load_into(&vs).unwrap_err());
    assert_eq!(listed, ["`w` has dtype Half, wanted Float; casting() casts it"]);
    assert!(w.equal(&w.zeros_like()));
    Weights::open(&file).unwrap().casting().load_into(&vs).unwrap();
    assert_eq!(w.kind(), Kind::Float);
    assert!(w.equal(&values.to_kind(Kind::Half).to_kind(Kind::Float)));
}

/// Case 59.
#[test]
fn tied_and_transposed_tensors_round_trip() {
    let _guard = serial();
    let build = || {
        let vs = nn::VarStore::new(Device::Cpu);
        let base = vs.root().randn("z_base", &[4, 6], 0.0, 1.0);
        let _ = vs.root().add("a_tied", base.shallow_clone(), true);
        let turned = Tensor::randn([6, 4], (Kind::Float, Device::Cpu)).tr();
        let turned = vs.root().add("turned", turned, true);
        let _ = vs.root().add("empty", Tensor::zeros([0, 3], (Kind::Float, Device::Cpu)), true);
        let _ = vs.root().add("flag", Tensor::from_slice(&[true, false]), false);
        let optimizer = AdamW::new(&vs, AdamWConfig::default().lr(0.1)).unwrap();
        let stack = Stack::of(&vs, optimizer).with(GradAccumulator::every(2)).build().unwrap();
        (vs, base, turned, stack)
    };
    let dir = folder();
    let mut snapshots = Snapshots::in_folder(dir.path()).unwrap();
    let (_, base, turned, mut one) = build();
    assert!(!turned.is_contiguous());
    for _ in 0..3 {
        let loss = || Ok(Loss::mean((&base * &turned).square().sum(Kind::Float), 2));
        let _ = one.step_with(loss).unwrap();
    }
    let saved = snapshots.save(&mut one, &Extras::new()).unwrap();
    let expected = one.state().unwrap();
    let (vs, base_2, turned_2, mut other) = build();
    Snapshot::open(&saved.path).unwrap().resume(&mut other).unwrap();
    assert_eq!(difference_of(&other.state().unwrap(), &expected), None);
    assert!(base_2.equal(&base) && turned_2.equal(&turned) && !turned_2.is_contiguous());
    assert_eq!(turned_2.grad().stride(), turned.grad().stride());
    // The plain file has each tensor once, and says what the other name is.
    let file = saved.path.join("model.safetensors");
    let names: Vec<String> = Tensor::read_safetensors(&file).unwrap().into_iter().map(|(n, _)| n).collect();
    assert_eq!(names.iter().filter(|name| *name == "a_tied" || *name == "z_base").count(), 1);
    let _ = memfit::tch::no_grad(|| base_2.shallow_clone().zero_());
    Weights::open(&file).unwrap().load_into(&vs).unwrap();
    assert!(base_2.equal(&base));
    let manifest = std::fs::read_to_string(saved.path.join("manifest.json")).unwrap();
    assert!(manifest.contains("\"z_base\": \"a_tied\""), "{manifest}");
}

/// State of every sort that an optimizer may keep.
#[derive(Debug)]
struct Odd {
    inner: memfit::optim::Sgd,
    codes: Tensor,
    moment: Tensor,
    exact: Tensor,
    perhaps: Option<Tensor>,
    numbers: [f64; 3],
}

impl Optimizer for Odd {
    fn name(&self) -> String {
        "Odd".to_owned()
    }

    fn groups(&self) -> &[memfit::optim::ParamGroup] {
        self.inner.groups()
    }

    fn groups_mut(&mut self) -> &mut [memfit::optim::ParamGroup] {
        self.inner.groups_mut()
    }

    fn step(&mut self, update: &memfit::Update) -> memfit::Result<()> {
        self.inner.step(update)
    }

    fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> memfit::Result<()> {
        self.inner.visit_state(visitor)?;
        visitor.tensor("codes", &mut self.codes)?;
        visitor.tensor("moment", &mut self.moment)?;
        visitor.tensor("exact", &mut self.exact)?;
        visitor.optional("perhaps", &mut self.perhaps, &self.codes)?;
        for (index, number) in self.numbers.iter_mut().enumerate() {
            visitor.float(&format!("number{index}"), number)?;
        }
        Ok(())
    }
}

/// Case 43.
#[test]
fn state_of_every_dtype_and_every_float_is_bit_equal() {
    let _guard = serial();
    let build = |filled: bool| {
        let (vs, _) = support::vector(2);
        let mut odd = Odd {
            inner: support::sgd(&vs),
            codes: Tensor::zeros([256], (Kind::Uint8, Device::Cpu)),
            moment: Tensor::zeros([5], (Kind::BFloat16, Device::Cpu)),
            exact: Tensor::zeros([1], (Kind::Float, Device::Cpu)),
            perhaps: (!filled).then(|| Tensor::ones([256], (Kind::Uint8, Device::Cpu))),
            numbers: [0.0; 3],
        };
        if filled {
            odd.codes = Tensor::arange(256, (Kind::Uint8, Device::Cpu));
            odd.moment =
                Tensor::from_slice(&[1.001f32, f32::NAN, f32::INFINITY, -0.0, 1e-40]).to_kind(Kind::BFloat16);
            odd.exact = Tensor::from_slice(&[1.001f32]);
            odd.numbers = [f64::NAN, f64::NEG_INFINITY, 0.1 + 0.2];
        }
        Stack::of(&vs, odd).build().unwrap()
    };
    let dir = folder();
    let mut snapshots = Snapshots::in_folder(dir.path()).unwrap();
    let mut one = build(true);
    snapshots.save(&mut one, &Extras::new()).unwrap();
    let mut other = build(false);
    snapshots.latest().unwrap().unwrap().resume(&mut other).unwrap();
    let state = other.state().unwrap();
    assert_eq!(difference_of(&state, &one.state().unwrap()), None);
    assert!(state.get("optimizer.perhaps").is_none());
    // And one that was there comes back though it is not here.
    snapshots.save(&mut build(false), &Extras::new()).unwrap();
    snapshots.latest().unwrap().unwrap().resume(&mut one).unwrap();
    let state = one.state().unwrap();
    let Some(Value::Tensor(perhaps)) = state.get("optimizer.perhaps") else { panic!("{state:?}") };
    assert!(same_bits(perhaps, &Tensor::ones([256], (Kind::Uint8, Device::Cpu))));
}

#[test]
fn saving_is_refused_where_it_cannot_be_right() {
    let _guard = serial();
    let dir = folder();
    let mut snapshots = Snapshots::in_folder(dir.path()).unwrap();
    let (vs, w) = support::vector(1);
    let optimizer = TchOptimizer::new(nn::Sgd::default().build(&vs, 0.1).unwrap(), &vs, 0.1).unwrap();
    let mut stack = Stack::of(&vs, optimizer).build().unwrap();
    assert!(matches!(snapshots.save(&mut stack, &Extras::new()), Err(Error::Unsupported { .. })));
    let mut other = Run::new(Kit::Sgd, 1);
    let outcome = stack.step_with(|| {
        let refused = snapshots.save(&mut other.stack, &Extras::new());
        assert!(matches!(refused, Err(Error::CallOrder { .. })), "{refused:?}");
        Ok(Loss::of(support::slope(&w, &[1.0])))
    });
    assert!(outcome.unwrap().stepped());
    let bad = Extras::new().entry("../up", State::default());
    assert!(matches!(snapshots.save(&mut other.stack, &bad), Err(Error::Config { .. })));
    assert!(snapshots.paths().unwrap().is_empty());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing was begun");
}

#[test]
fn the_newest_and_the_best_are_kept() {
    let _guard = serial();
    let dir = folder();
    let mut snapshots = Snapshots::in_folder(dir.path()).unwrap().keep_last(2).keep_best();
    let mut run = Run::new(Kit::Sgd, 1);
    let mut paths = Vec::new();
    for (index, loss) in [3.0, 1.0, f64::NAN, 2.0, 4.0].into_iter().enumerate() {
        run.train(0, WINDOW as u64);
        let saved = snapshots.save_scored(&mut run.stack, &Extras::new(), loss).unwrap();
        assert_eq!(saved.path, dir.path().join(format!("step-{:012}", index + 1)));
        paths.push(saved.path);
    }
    assert_eq!(snapshots.paths().unwrap(), [&paths[1], &paths[3], &paths[4]].map(Clone::clone));
    assert_eq!(snapshots.latest().unwrap().unwrap().path(), paths[4]);
    let best = snapshots.best().unwrap().unwrap();
    assert_eq!((best.path(), best.loss()), (paths[1].as_path(), Some(1.0)));
    // Going on from an older one: what is saved then is the latest.
    best.resume(&mut run.stack).unwrap();
    run.train(0, WINDOW as u64);
    let saved = snapshots.save(&mut run.stack, &Extras::new()).unwrap();
    assert_eq!(snapshots.latest().unwrap().unwrap().path(), saved.path);
    assert_eq!(snapshots.latest().unwrap().unwrap().position().steps, 3);
}

#[test]
fn what_a_dead_saver_left_goes_with_the_next_save() {
    let _guard = serial();
    let dir = folder();
    for left in [".saving-1-0", ".deleting-1-0"] {
        std::fs::create_dir(dir.path().join(left)).unwrap();
        std::fs::write(dir.path().join(left).join("model.safetensors"), [1, 2, 3]).unwrap();
    }
    let mut snapshots = Snapshots::in_folder(dir.path()).unwrap();
    assert!(snapshots.latest().unwrap().is_none());
    let mut run = Run::new(Kit::Sgd, 1);
    // A living one holds the folder.
    let lock = std::fs::File::create(dir.path().join(".memfit-lock")).unwrap();
    lock.lock().unwrap();
    snapshots.save_in_background(&mut run.stack, &Extras::new(), None).unwrap();
    until_others_wait();
    assert!(dir.path().join(".saving-1-0").exists());
    lock.unlock().unwrap();
    assert!(snapshots.wait().unwrap().is_some());
    let mut names: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, [".memfit-lock", "step-000000000000"]);
}

#[test]
fn a_background_save_has_the_moment_it_was_called_at() {
    let _guard = serial();
    let dir = folder();
    let mut snapshots = Snapshots::in_folder(dir.path()).unwrap();
    let mut run = Run::new(Kit::Scaled, 1);
    run.train(0, 7);
    let expected = run.stack.state().unwrap();
    snapshots.save_in_background(&mut run.stack, &Extras::new(), Some(0.5)).unwrap();
    run.train(7, 12);
    let saved = snapshots.wait().unwrap().unwrap();
    assert!(snapshots.wait().unwrap().is_none());
    let mut other = Run::new(Kit::Scaled, 2);
    Snapshot::open(&saved.path).unwrap().resume(&mut other.stack).unwrap();
    assert_eq!(difference_of(&other.stack.state().unwrap(), &expected), None);
}

#[test]
fn a_background_save_that_failed_is_reported_once() {
    let _guard = serial();
    let mut run = Run::new(Kit::Sgd, 1);
    let dir = folder();
    let fail = |run: &mut Run, away: &str| {
        let place = dir.path().join("snapshots");
        let mut snapshots = Snapshots::in_folder(&place).unwrap();
        let lock = std::fs::File::create(place.join(".memfit-lock")).unwrap();
        lock.lock().unwrap();
        snapshots.save_in_background(&mut run.stack, &Extras::new(), None).unwrap();
        until_others_wait();
        std::fs::rename(place, dir.path().join(away)).unwrap();
        lock.unlock().unwrap();
        snapshots
    };
    let mut snapshots = fail(&mut run, "first");
    assert!(matches!(snapshots.wait(), Err(Error::Io { .. })));
    assert!(snapshots.wait().unwrap().is_none());
    let mut snapshots = fail(&mut run, "second");
    assert!(matches!(snapshots.save(&mut run.stack, &Extras::new()), Err(Error::Io { .. })));
}

#[test]
fn entries_and_scripts_come_back() {
    let _guard = serial();
    let dir = folder();
    let mut snapshots = Snapshots::in_folder(dir.path()).unwrap();
    let script = memfit::tch::CModule::load("tests/data/block.pt").unwrap();
    let mut data = State::default();
    data.insert("epoch", Value::Int(-3));
    data.insert("order.of", Value::Tensor(Tensor::from_slice(&[4i64, 2, 7])));
    data.insert("nothing", Value::Float(f64::NAN));
    data.insert("name", Value::Text("\"quoted\"\n".to_owned()));
    let mut run = Run::new(Kit::Sgd, 1);
    let extras =
        Extras::new().entry("data", data).entry("empty", State::default()).script("encoder", &script);
    snapshots.save(&mut run.stack, &extras).unwrap();
    snapshots.save_in_background(&mut run.stack, &extras, None).unwrap();
    snapshots.wait().unwrap();
    for path in snapshots.paths().unwrap() {
        let snapshot = Snapshot::open(path).unwrap();
        let back = snapshot.resume(&mut run.stack).unwrap();
        assert!(back.entries["empty"].is_empty());
        let data = &back.entries["data"];
        assert!(matches!(data.get("epoch"), Some(Value::Int(-3))));
        assert!(matches!(data.get("nothing"), Some(Value::Float(number)) if number.is_nan()));
        assert!(matches!(data.get("name"), Some(Value::Text(text)) if text == "\"quoted\"\n"));
        let Some(Value::Tensor(order)) = data.get("order.of") else { panic!("{data:?}") };
        assert!(order.equal(&Tensor::from_slice(&[4i64, 2, 7])));
        let again = snapshot.script("encoder").unwrap();
        let names = |module: &memfit::tch::CModule| {
            let mut all: Vec<_> = module.named_parameters().unwrap();
            all.sort_by(|a, b| a.0.cmp(&b.0));
            all
        };
        for ((name, a), (_, b)) in names(&script).into_iter().zip(names(&again)) {
            assert!(a.equal(&b), "{name}");
        }
        assert!(snapshot.script("decoder").is_err());
    }
}

#[test]
fn saving_and_resuming_stay_within_the_largest_tensor_and_16_mib() {
    let _guard = serial();
    let _pages = SmallPages::hold();
    const MIB: u64 = 1 << 20;
    let vs = nn::VarStore::new(Device::Cpu);
    let shape = [1024, 1024];
    for index in 0..10 {
        let _ = vs.root().randn(&format!("w{index}"), &shape, 0.0, 1.0);
    }
    // 8 MiB, in the other order.
    let turned = Tensor::randn([2048, 1024], (Kind::Float, Device::Cpu)).tr();
    let _ = vs.root().add("turned", turned, true);
    let mut stack = Stack::of(&vs, AdamW::new(&vs, AdamWConfig::default()).unwrap()).build().unwrap();
    let allowed = 8 * MIB + 16 * MIB;
    let dir = folder();
    let mut snapshots = Snapshots::in_folder(dir.path()).unwrap();
    let measured = |what: &str, body: &mut dyn FnMut()| {
        let live = support::live();
        let resting = anonymous();
        let (seen, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        let watch = || {
            let mut most = 0;
            while !stop.load(Ordering::Relaxed) {
                most = most.max(anonymous());
                seen.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(std::time::Duration::from_micros(200));
            }
            most
        };
        // Once more where the watcher had no turn meanwhile.
        let mut during = 0;
        let enough = || {
            let before = seen.load(Ordering::Relaxed);
            body();
            during += seen.load(Ordering::Relaxed) - before;
            during >= 20
        };
        let run = || memfit::memory::peak_of(Device::Cpu, || until("the watcher sees it", enough)).unwrap().1;
        let (peak, most) = std::thread::scope(|scope| {
            let watcher = scope.spawn(watch);
            let peak = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
            stop.store(true, Ordering::Relaxed);
            (peak.unwrap(), watcher.join().unwrap())
        });
        println!(
            "{what}: counted {} KiB, resident {} KiB",
            (peak - live) >> 10,
            most.saturating_sub(resting) >> 10
        );
        assert!(peak - live <= allowed, "{what}: {} bytes", peak - live);
        assert!(most.saturating_sub(resting) <= allowed, "{what}: resident {}", most - resting);
    };
    measured("save", &mut || drop(snapshots.save(&mut stack, &Extras::new()).unwrap()));
    let snapshot = snapshots.latest().unwrap().unwrap();
    measured("resume", &mut || drop(snapshot.resume(&mut stack).unwrap()));
    let live = support::live();
    let (_, peak) = memfit::memory::peak_of(Device::Cpu, || snapshot.resume(&mut stack).unwrap()).unwrap();
    assert!(peak - live <= 2 * MIB, "rows are copied 1 MiB at a time, not {}", peak - live);
    measured("weights", &mut || snapshot.weights().unwrap().load_into(&vs).unwrap());
}

mod resumed_after_poison {
    use super::*;
    use memfit::optim::{InBackward, Sgd, SgdConfig};
    use memfit::step::{NextUpdate, UpdatePhase, Verdict};
    use memfit::{Place, Strategy};
    use std::sync::Arc;
    use support::{slope, vector};

    fn micro(stack: &mut Stack, w: &Tensor, g: f32, weight: i64) -> memfit::Result<memfit::StepOutcome> {
        stack.step_with(|| Ok(Loss::mean(slope(w, &[g]), weight)))
    }

    fn momentum() -> (Stack, Tensor) {
        let (vs, w) = vector(1);
        let config = SgdConfig::default().lr(1.0).momentum(0.5);
        let optimizer = InBackward::new(Sgd::new(&vs, config).unwrap()).unwrap();
        (Stack::of(&vs, optimizer).with(GradAccumulator::every(2)).build().unwrap(), w)
    }

    /// Case 55.
    #[test]
    fn a_poisoned_stack_that_is_resumed_goes_on_as_if_never_poisoned() {
        let _guard = serial();
        let (mut straight, v) = momentum();
        for g in [1.0, 2.0, 3.0, 4.0, 5.0, 6.0] {
            let _ = micro(&mut straight, &v, g, 1).unwrap();
        }
        let (mut stack, w) = momentum();
        for g in [1.0, 2.0] {
            let _ = micro(&mut stack, &w, g, 1).unwrap();
        }
        let dir = folder();
        let mut snapshots = Snapshots::in_folder(dir.path()).unwrap();
        snapshots.save(&mut stack, &Extras::new()).unwrap();
        let _ = micro(&mut stack, &w, 7.0, 1).unwrap();
        let poisoned = stack.discard().unwrap_err();
        assert!(matches!(poisoned, Error::Poisoned { .. }), "{poisoned}");
        let refused = micro(&mut stack, &w, 8.0, 1).unwrap_err().to_string();
        assert!(refused.contains("into this Stack, or into a new one"), "{refused}");
        snapshots.latest().unwrap().unwrap().resume(&mut stack).unwrap();
        assert_eq!(stack.optimizer().refuses_snapshot(), None);
        for g in [3.0, 4.0, 5.0, 6.0] {
            let _ = micro(&mut stack, &w, g, 1).unwrap();
        }
        // Momentum 1.5, then 0.75 + 3.5, then 2.125 + 5.5.
        assert_eq!(w.double_value(&[0]), -(1.5 + 4.25 + 7.625));
        assert_eq!(difference_of(&stack.state().unwrap(), &straight.state().unwrap()), None);
    }

    #[test]
    fn sums_beside_the_momentum_are_not_resumed_into_it() {
        let _guard = serial();
        let (vs, w) = vector(1);
        let config = SgdConfig::default().lr(1.0).momentum(0.5);
        let optimizer = Sgd::new(&vs, config).unwrap();
        let mut after = Stack::of(&vs, optimizer).with(GradAccumulator::every(2)).build().unwrap();
        let _ = micro(&mut after, &w, 1.0, 1).unwrap();
        let state = after.state().unwrap();
        let (mut within, v) = momentum();
        let before = within.state().unwrap();
        let error = within.load_state(&state).unwrap_err();
        assert!(matches!(error, Error::Incompatible { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("InBackward(Sgd)") && text.contains("open window"), "{text}");
        assert_eq!(difference_of(&within.state().unwrap(), &before), None);
        // Between windows they are one optimizer.
        let _ = micro(&mut after, &w, 3.0, 1).unwrap();
        within.load_state(&after.state().unwrap()).unwrap();
        assert_eq!(v.double_value(&[0]), -2.0);
    }

    #[derive(Debug)]
    struct Fails(Arc<AtomicBool>);

    impl Strategy for Fails {
        fn place(&self) -> Place {
            Place::Watch
        }

        fn update(&mut self, phase: &mut UpdatePhase<'_>, next: NextUpdate<'_>) -> memfit::Result<Verdict> {
            if self.0.load(Ordering::Relaxed) {
                return Err(Error::config("Fails", "as it was told"));
            }
            next(phase)
        }
    }

    #[test]
    fn what_moved_before_a_resume_does_not_poison_after_it() {
        let _guard = serial();
        let (vs, w) = vector(1);
        let optimizer = InBackward::new(support::sgd(&vs)).unwrap();
        let fails = Arc::new(AtomicBool::new(false));
        let builder = Stack::of(&vs, optimizer).with(GradAccumulator::every(2)).with(Fails(fails.clone()));
        let mut stack = builder.build().unwrap();
        let _ = micro(&mut stack, &w, 1.0, 1).unwrap();
        let state = stack.state().unwrap();
        fails.store(true, Ordering::Relaxed);
        let poisoned = micro(&mut stack, &w, 3.0, 1).unwrap_err();
        assert!(matches!(poisoned, Error::Poisoned { .. }), "{poisoned}");
        fails.store(false, Ordering::Relaxed);
        stack.load_state(&state).unwrap();
        assert_eq!(w.double_value(&[0]), 0.0);
        // A backward that fails before anything moves: its graph is gone.
        let used = w.square().sum(Kind::Float);
        used.backward();
        let failed = stack.step_with(|| Ok(Loss::mean(used.shallow_clone(), 1))).unwrap_err();
        assert!(matches!(failed, Error::WindowLost { .. }), "{failed}");
        for g in [1.0, 3.0] {
            let _ = micro(&mut stack, &w, g, 1).unwrap();
        }
        assert_eq!(w.double_value(&[0]), -2.0);
    }
}

#[test]
fn weights_loaded_into_a_stack_reach_its_fp32_masters() {
    let _guard = serial();
    let mut vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().ones("w", &[2]);
    let kept = vs.root().ones("kept", &[1]);
    vs.bfloat16();
    let optimizer = memfit::optim::Sgd::new(&vs, memfit::optim::SgdConfig::default().lr(2f64.powi(-10)));
    let masters = memfit::strategies::MasterWeights::fp32();
    let mut stack = Stack::of(&vs, optimizer.unwrap()).with(masters).build().unwrap();
    let step = |stack: &mut Stack| {
        let loss = || Ok(Loss::of(w.sum(Kind::Float) + kept.sum(Kind::Float)));
        assert!(stack.step_with(loss).unwrap().stepped());
    };
    step(&mut stack);
    let dir = folder();
    let file = dir.path().join("x.safetensors");
    let loaded = Tensor::from_slice(&[3f32, -5.0]).to_kind(Kind::BFloat16);
    Tensor::write_safetensors(&[("w", &loaded)], &file).unwrap();
    Weights::open(&file).unwrap().partial().load_into(&stack).unwrap();
    let state = stack.state().unwrap();
    let master = |name: &str| match state.get(&format!("master.{name}")) {
        Some(Value::Tensor(master)) => support::values(master),
        other => panic!("{other:?}"),
    };
    assert_eq!(master("w"), [3.0, -5.0]);
    assert_eq!(master("kept"), [1.0 - 2f64.powi(-10)], "what was not loaded keeps its low bits");
    step(&mut stack);
    assert!((support::values(&w)[0] - 3.0).abs() < 0.02);
}

#[test]
fn other_settings_are_refused_naming_both() {
    let _guard = serial();
    use memfit::optim::{Sgd, SgdConfig};
    use memfit::strategies::AmpScaler;
    let refused = |one: &dyn Fn(&nn::VarStore) -> Stack, other: &dyn Fn(&nn::VarStore) -> Stack| {
        let vs = nn::VarStore::new(Device::Cpu);
        let _ = vs.root().ones("w", &[1]);
        let state = one(&vs).state().unwrap();
        let listed = problems(other(&vs).load_state(&state).unwrap_err());
        one(&vs).load_state(&state).unwrap();
        listed.join("; ")
    };
    let adamw = |config: AdamWConfig| {
        move |vs: &nn::VarStore| Stack::of(vs, AdamW::new(vs, config).unwrap()).build().unwrap()
    };
    let config = AdamWConfig::default();
    let text = refused(&adamw(config.betas(0.9, 0.99)), &adamw(config));
    assert!(text.contains("(0.9, 0.99)") && text.contains("(0.9, 0.999)"), "{text}");
    // Rates are a group's, and are loaded.
    let vs = nn::VarStore::new(Device::Cpu);
    let _ = vs.root().ones("w", &[1]);
    let state = adamw(config.lr(0.5).weight_decay(0.25))(&vs).state().unwrap();
    let mut other = adamw(config)(&vs);
    other.load_state(&state).unwrap();
    assert_eq!((other.optimizer().groups()[0].lr, other.optimizer().groups()[0].weight_decay), (0.5, 0.25));

    let sgd = |momentum: f64| {
        move |vs: &nn::VarStore| {
            let config = SgdConfig::default().momentum(momentum);
            Stack::of(vs, Sgd::new(vs, config).unwrap()).build().unwrap()
        }
    };
    let text = refused(&sgd(0.5), &sgd(0.75));
    assert!(text.contains("momentum 0.5") && text.contains("momentum 0.75"), "{text}");

    let scaled = |interval: u64| {
        move |vs: &nn::VarStore| {
            let scaler = AmpScaler::fp16_with(|config| config.growth_interval = interval).unwrap();
            Stack::of(vs, support::sgd(vs)).with(scaler).build().unwrap()
        }
    };
    let text = refused(&scaled(100), &scaled(200));
    assert!(text.contains("growth_interval 100") && text.contains("growth_interval 200"), "{text}");
}

#[test]
fn a_window_that_no_training_can_have_is_refused() {
    let _guard = serial();
    let (vs, w) = support::vector(1);
    let build = |rule: GradAccumulator| Stack::of(&vs, support::sgd(&vs)).with(rule).build().unwrap();
    for tokens in [false, true] {
        let rule = || if tokens { GradAccumulator::tokens(9) } else { GradAccumulator::every(3) };
        let mut stack = build(rule());
        let _ = stack.step_with(|| Ok(Loss::mean(support::slope(&w, &[1.0]), 1))).unwrap();
        let mut state = stack.state().unwrap();
        let before = stack.state().unwrap();
        for done in [0, 3, i64::MAX] {
            if tokens && done > 0 {
                continue;
            }
            state.insert("window.done", Value::Int(done));
            let listed = problems(stack.load_state(&state).unwrap_err());
            assert!(listed[0].contains("window.done"), "{listed:?}");
            assert_eq!(difference_of(&stack.state().unwrap(), &before), None);
        }
    }
    // By tokens any number fits, and none is a reason to allocate.
    let mut stack = build(GradAccumulator::tokens(9));
    let _ = stack.step_with(|| Ok(Loss::mean(support::slope(&w, &[1.0]), 1))).unwrap();
    let mut state = stack.state().unwrap();
    state.insert("window.done", Value::Int(1 << 50));
    stack.load_state(&state).unwrap();
    let micro = stack.windows([batch(0), batch(1)]).next().unwrap().unwrap();
    assert_eq!(micro.index, 1 << 50);
    stack.discard().unwrap();
}

#[test]
fn windows_from_before_a_load_do_not_go_on_with_their_own_sums() {
    let _guard = serial();
    let (vs, w) = support::vector(1);
    let tokens = GradAccumulator::tokens(8);
    let mut stack = Stack::of(&vs, support::sgd(&vs)).with(tokens).build().unwrap();
    let step = |stack: &mut Stack, micro| {
        let loss = |x: &Tensor| Ok(Loss::mean(support::slope(&w, &[1.0]), x.size()[0]));
        stack.step(micro, loss).unwrap().stepped()
    };
    // Rows are 3, 4, 5, 3, 4, …
    let mut old = stack.windows((0..20).map(batch));
    assert!(!step(&mut stack, old.next().unwrap().unwrap()));
    let state = stack.state().unwrap();
    assert!(!step(&mut stack, old.next().unwrap().unwrap()));
    stack.load_state(&state).unwrap();
    let refused = old.next().unwrap().unwrap_err();
    assert!(refused.to_string().contains("after the load"), "{refused}");
    assert!(old.next().is_none());
    let mut new = stack.windows((1..20).map(batch));
    assert!(!step(&mut stack, new.next().unwrap().unwrap()));
    assert!(step(&mut stack, new.next().unwrap().unwrap()), "3 + 4 + 5 reach 8");
    // Between windows a load changes nothing that an iterator knows.
    let state = stack.state().unwrap();
    stack.load_state(&state).unwrap();
    assert!(!step(&mut stack, new.next().unwrap().unwrap()));
}
