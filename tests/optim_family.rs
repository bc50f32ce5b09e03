//! What holds for every optimizer, whatever its state is made of.

mod support;

use memfit::optim::{GroupOptions, Optimizer};
use memfit::state::{Named, State, Value};
use memfit::strategies::AmpScaler;
use memfit::tch::{self, Device, Kind, Tensor};
use memfit::{CpuOffload, Loss, Stack, StepOutcome, Update, memory};
use support::family::{ELEMENTS, Member, Net, every_optimizer};
use support::{copies, live, same, serial};

/// Gives a leaf a gradient with the strides of `grad`, which autograd would not.
fn set_strided(w: &Tensor, grad: &Tensor) {
    w.sum(w.kind()).backward();
    let mut copy = Tensor::empty_strided(grad.size(), grad.stride(), (grad.kind(), Device::Cpu));
    copy.copy_(grad);
    w.grad().set_data(&copy);
    assert_eq!(w.grad().stride(), grad.stride());
}

/// Case 20's arithmetic, in the optimizer.
#[test]
fn a_divisor_that_is_a_power_of_two_changes_no_bit() {
    let _guard = serial();
    for member in every_optimizer() {
        let (plain, scaled) = (Net::new(member.weights), Net::new(member.weights));
        let (mut a, mut b) = ((member.make)(&plain.named()), (member.make)(&scaled.named()));
        plain.run(5, a.as_mut(), 1.0);
        // Half-precision gradients would overflow beyond.
        scaled.run(5, b.as_mut(), 16.0);
        assert!(same(&plain.values(), &scaled.values()), "{}", member.name);
        assert!(!same(&plain.values(), &Net::new(member.weights).values()), "{} moved nothing", member.name);
        assert!(a.folds_divisor());
    }
}

#[test]
fn a_divisor_is_a_division_of_the_gradients() {
    let _guard = serial();
    for member in every_optimizer().iter().filter(|member| member.weights == Kind::Float) {
        let (by_hand, folded) = (Net::new(member.weights), Net::new(member.weights));
        let (mut a, mut b) = ((member.make)(&by_hand.named()), (member.make)(&folded.named()));
        for _ in 0..3 {
            for net in [&by_hand, &folded] {
                net.zero();
                net.backward(1.0);
            }
            by_hand.weights.iter().for_each(|w| drop(w.grad().g_div_scalar_(3.0)));
            a.step(&Update::plain()).unwrap();
            b.step(&Update { divisor: 3.0, ..Update::plain() }).unwrap();
        }
        assert!(same(&by_hand.values(), &folded.values()), "{}", member.name);
    }
}

#[test]
fn stepping_parameter_by_parameter_is_stepping() {
    let _guard = serial();
    for member in every_optimizer() {
        let (whole, single) = (Net::new(member.weights), Net::new(member.weights));
        let (mut a, mut b) = ((member.make)(&whole.named()), (member.make)(&single.named()));
        for _ in 0..3 {
            whole.run(1, a.as_mut(), 4.0);
            single.zero();
            single.backward(4.0);
            let update = Update { divisor: 4.0, ..Update::plain() };
            b.begin(&update).unwrap();
            for group in (0..b.groups().len()).rev() {
                for index in (0..b.groups()[group].parameters().len()).rev() {
                    b.step_parameter(group, index, &update).unwrap();
                }
            }
        }
        assert!(same(&whole.values(), &single.values()), "{}", member.name);
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let _guard = serial();
    for member in every_optimizer() {
        let run = |threads| {
            tch::set_num_threads(threads);
            let w = Tensor::randn([90_001], (Kind::Float, Device::Cpu)).to_kind(member.weights);
            let w = w.set_requires_grad(true);
            let mut optimizer = (member.make)(&[Named::new("w", &w)]);
            for _ in 0..3 {
                w.square().sum(member.weights).backward();
                optimizer.step(&Update::plain()).unwrap();
            }
            w.detach().copy()
        };
        tch::manual_seed(5);
        let one = run(1);
        tch::manual_seed(5);
        assert_eq!(one, run(3), "{}", member.name);
    }
}

/// Cases 43 and 55, the state's part of them.
#[test]
fn saved_and_loaded_state_goes_on_bit_equally() {
    let _guard = serial();
    for member in every_optimizer() {
        let (straight, stopped) = (Net::new(member.weights), Net::new(member.weights));
        let mut a = (member.make)(&straight.named());
        straight.run(6, a.as_mut(), 1.0);
        let mut b = (member.make)(&stopped.named());
        stopped.run(3, b.as_mut(), 1.0);
        let state = State::collect(|visitor| b.visit_state(visitor)).unwrap();
        let mut c = (member.make)(&stopped.named());
        c.load(&state).unwrap();
        stopped.run(3, c.as_mut(), 1.0);
        assert!(same(&straight.values(), &stopped.values()), "{}", member.name);
    }
}

/// Case 44.
#[test]
fn strides_of_gradient_and_parameter_do_not_matter() {
    let _guard = serial();
    for member in every_optimizer() {
        let of = |tensor: Tensor| tensor.to_kind(member.weights);
        let (values, grad) = (of(Tensor::randn([70, 65], FLOAT)), of(Tensor::randn([65, 70], FLOAT)));
        let run = |w: Tensor, grad: Tensor| {
            let w = w.detach().set_requires_grad(true);
            let mut optimizer = (member.make)(&[Named::new("w", &w)]);
            for _ in 0..3 {
                w.shallow_clone().zero_grad();
                set_strided(&w, &grad);
                optimizer.step(&Update { divisor: 2.0, ..Update::plain() }).unwrap();
            }
            w.detach().contiguous()
        };
        let name = member.name;
        let plain = run(values.tr().contiguous(), grad.copy());
        assert_ne!(plain, values.tr().contiguous());
        // Storage in another order, with gaps, in three dimensions, and gradients of one value.
        let base = values.copy();
        assert_eq!(run(base.tr(), grad.copy()), plain, "{name}");
        assert_eq!(base.tr().contiguous(), plain, "{name}: the view is still aliased");
        let wide = of(Tensor::zeros([65, 90], FLOAT));
        wide.narrow(1, 2, 70).copy_(&values.tr());
        assert_eq!(run(wide.narrow(1, 2, 70), grad.copy()), plain, "{name}");
        assert_eq!(wide.narrow(1, 72, 18), of(Tensor::zeros([65, 18], FLOAT)), "{name}: beyond the view");
        assert_eq!(run(values.tr().contiguous(), grad.tr().contiguous().tr()), plain, "{name}");
        assert_eq!(run(values.copy().tr(), grad.tr().contiguous().tr()), plain, "{name}: both");
        // To one that works on matrices, a cube is another parameter.
        if member.scratch > 0 {
            continue;
        }
        let cube =
            |tensor: &Tensor| tensor.view([5, 13, 70]).permute([2, 0, 1]).contiguous().permute([1, 2, 0]);
        let turned = run(cube(&values.tr().contiguous()), grad.view([5, 13, 70]));
        assert_eq!(turned.view([65, 70]), plain, "{name}");
    }
}

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Case 47.
#[test]
fn a_step_takes_no_more_than_its_scratch_and_leaves_frozen_parameters_and_libtorchs_generator_alone() {
    let _guard = serial();
    for member in every_optimizer() {
        let net = Net::new(member.weights);
        let mut optimizer = (member.make)(&net.named());
        optimizer.allocate().unwrap();
        net.backward(1.0);
        let _ = net.weights[1].set_requires_grad(false);
        net.weights[2].shallow_clone().zero_grad();
        let before = net.values();
        tch::manual_seed(11);
        let (stepped, peak) = {
            let live = live();
            let update = Update { divisor: 3.0, ..Update::plain() };
            let (stepped, peak) = memory::peak_of(Device::Cpu, || optimizer.step(&update)).unwrap();
            (stepped, peak - live)
        };
        stepped.unwrap();
        assert!(peak <= member.scratch, "{}: {peak}", member.name);
        let after = net.values();
        assert_ne!(after[0], before[0], "{}", member.name);
        assert_eq!(after[1], before[1], "frozen, with a stale gradient");
        let next = Tensor::rand([3], FLOAT);
        tch::manual_seed(11);
        assert_eq!(next, Tensor::rand([3], FLOAT));
    }
}

/// Case 47, where elements lie in different orders.
#[test]
fn an_update_of_our_own_kernels_takes_no_memory_in_any_order() {
    let _guard = serial();
    for member in every_optimizer() {
        let w = Tensor::randn([80, 60], FLOAT).to_kind(member.weights).set_requires_grad(true);
        let mut optimizer = (member.make)(&[Named::new("w", &w)]);
        optimizer.allocate().unwrap();
        set_strided(&w, &Tensor::randn([60, 80], FLOAT).to_kind(member.weights).tr());
        let before = live();
        let (stepped, peak) = memory::peak_of(Device::Cpu, || optimizer.step(&Update::plain())).unwrap();
        stepped.unwrap();
        let own = ["moments", "stochastic", "decoupled", "Lion", "8-bit"];
        let limit = if member.scratch == 0 && own.iter().any(|part| member.name.contains(part)) {
            0
        } else {
            4 << 20
        };
        assert!(peak - before <= limit, "{}: {}", member.name, peak - before);
    }
}

#[test]
fn no_allocation_can_fail_once_a_parameter_has_moved() {
    let _guard = serial();
    for member in every_optimizer() {
        let net = Net::new(member.weights);
        let mut optimizer = (member.make)(&net.named());
        net.backward(1.0);
        let before = net.values();
        for nth in 1.. {
            let failure = memory::FailAt::nth(nth).unwrap();
            let stepped = optimizer.step(&Update::plain());
            drop(failure);
            let Err(error) = stepped else { break };
            assert!(error.is_out_of_memory(), "{}: {error}", member.name);
            assert!(same(&net.values(), &before));
        }
        assert!(!same(&net.values(), &before), "{}", member.name);
    }
}

/// An error in the middle of a whole step: the second parameter's state is broken.
#[test]
fn a_whole_step_that_fails_half_way_is_poisoned_and_one_that_fails_before_is_not() {
    let _guard = serial();
    for member in every_optimizer() {
        for one_by_one in [false, true] {
            let net = Net::new(member.weights);
            let mut inner = (member.make)(&net.named());
            inner.allocate().unwrap();
            let Some(state) = inner.state_of(0, 1).pop() else { continue };
            *state = Tensor::zeros([2, 2, 2], (Kind::Int64, Device::Cpu));
            let mut optimizer: Box<dyn Optimizer> =
                if one_by_one { Box::new(CpuOffload::optimizer(inner).resident().unwrap()) } else { inner };
            net.backward(1.0);
            let before = net.values();
            let error = optimizer.step(&Update::plain()).unwrap_err();
            let poisoned = matches!(error, memfit::Error::Poisoned { .. });
            assert_eq!(poisoned, !same(&net.values(), &before), "{}: {error}", member.name);
            assert!(poisoned || !one_by_one, "{}: {error}", member.name);
        }
    }
}

/// The formulas of `docs/memory-model.md`.
#[test]
fn state_takes_the_bytes_that_its_formula_says() {
    let _guard = serial();
    for Member { name, weights, make, bytes, .. } in every_optimizer() {
        let net = Net::new(weights);
        let mut optimizer = make(&net.named());
        let before = live();
        optimizer.allocate().unwrap();
        let wanted: u64 = ELEMENTS.iter().map(|count| bytes(*count)).sum();
        assert_eq!(live() - before, wanted, "{name}");
        assert_eq!(optimizer.state_bytes(), wanted, "{name}");
    }
}

/// Case 40.
#[test]
fn state_on_disk_gives_the_same_weights_to_the_bit() {
    let _guard = serial();
    let folder = tempfile::tempdir().unwrap();
    for member in every_optimizer() {
        let (plain, offloaded) = (Net::new(member.weights), Net::new(member.weights));
        let mut a = (member.make)(&plain.named());
        plain.run(4, a.as_mut(), 2.0);
        let inner = Boxed((member.make)(&offloaded.named()));
        let mut b = CpuOffload::optimizer(inner).disk(folder.path()).unwrap();
        offloaded.run(4, &mut b, 2.0);
        assert!(same(&plain.values(), &offloaded.values()), "{}", member.name);
        same_state(member.name, &state_of(a.as_mut()), &state_of(&mut b));
    }
}

fn state_of(optimizer: &mut dyn Optimizer) -> State {
    State::collect(|visitor| optimizer.visit_state(visitor)).unwrap()
}

fn same_state(name: &str, a: &State, b: &State) {
    assert_eq!(a.len(), b.len());
    for ((entry, one), (_, other)) in a.iter().zip(b.iter()) {
        let equal = match (one, other) {
            (Value::Tensor(one), Value::Tensor(other)) => one.equal(other),
            (Value::Int(one), Value::Int(other)) => one == other,
            (Value::Float(one), Value::Float(other)) => one == other,
            (Value::Text(one), Value::Text(other)) => one == other,
            _ => false,
        };
        assert!(equal, "{name}: {entry}");
    }
}

/// Case 6.
#[test]
fn a_step_that_is_skipped_changes_no_state() {
    let _guard = serial();
    for member in every_optimizer().iter().filter(|member| member.weights == Kind::Float) {
        let (vs, w) = support::vector(5000);
        let optimizer = Boxed((member.make)(&[Named::new("w", &w)]));
        let mut training = Stack::of(&vs, optimizer).with(AmpScaler::fp16()).build().unwrap();
        let mut slopes = vec![1f32; 5000];
        let _ = training.step_with(|| Ok(Loss::of(support::slope(&w, &slopes)))).unwrap();
        let (weights, before) = (w.detach().copy(), state_of(training.optimizer_mut()));
        slopes[300] = f32::INFINITY;
        let outcome = training.step_with(|| Ok(Loss::of(support::slope(&w, &slopes)))).unwrap();
        assert!(matches!(outcome, StepOutcome::Skipped { .. }), "{outcome:?}");
        same_state(member.name, &before, &state_of(training.optimizer_mut()));
        assert_eq!(w.detach(), weights, "{}", member.name);
    }
}

#[test]
fn a_group_has_its_own_rate_and_decay_and_joins_late() {
    let _guard = serial();
    for member in every_optimizer() {
        let make = || Tensor::ones([5000], FLOAT).to_kind(member.weights).set_requires_grad(true);
        let (a, b) = (make(), make());
        let mut optimizer = (member.make)(&[Named::new("a", &a)]);
        let still = GroupOptions::default().lr(0.0).weight_decay(0.0);
        optimizer.add_group(vec![Named::new("b", &b)], still).unwrap();
        let before = b.detach().copy();
        for _ in 0..2 {
            (a.square().sum(member.weights) + b.square().sum(member.weights)).backward();
            optimizer.step(&Update::plain()).unwrap();
        }
        assert_eq!(b.detach(), before, "{}: rate 0", member.name);
        let was = a.detach().copy();
        let (late, first) = optimizer.groups_mut().split_last_mut().unwrap();
        late.lr = 0.25;
        first.iter_mut().for_each(|group| group.lr = 0.0);
        optimizer.step(&Update::plain()).unwrap();
        assert_ne!(b.detach(), before, "{}: the new rate was told", member.name);
        assert_eq!(a.detach(), was, "{}", member.name);
    }
}

#[test]
fn a_step_bumps_versions_so_that_autograd_sees_it() {
    let _guard = serial();
    for member in every_optimizer() {
        let net = Net::new(member.weights);
        let mut optimizer = (member.make)(&net.named());
        net.backward(1.0);
        let loss = net.weights[0].square().sum(member.weights);
        optimizer.step(&Update::plain()).unwrap();
        assert!(loss.f_backward().is_err(), "{}: backward used a weight that had moved", member.name);
    }
}

#[test]
fn scalars_and_empty_parameters_move_too() {
    let _guard = serial();
    for member in every_optimizer() {
        let scalar = Tensor::ones([], FLOAT).to_kind(member.weights).set_requires_grad(true);
        let empty = Tensor::ones([0, 3], FLOAT).to_kind(member.weights).set_requires_grad(true);
        let both = [Named::new("scalar", &scalar), Named::new("empty", &empty)];
        let mut optimizer = (member.make)(&both);
        (scalar.square() + empty.sum(member.weights)).backward();
        optimizer.step(&Update::plain()).unwrap();
        assert!(scalar.double_value(&[]) < 1.0, "{}", member.name);
        assert!(copies(&[empty])[0].size() == [0, 3]);
    }
}

/// An optimizer behind a pointer is one too.
#[derive(Debug)]
struct Boxed(Box<dyn Optimizer>);

impl Optimizer for Boxed {
    fn name(&self) -> String {
        self.0.name()
    }
    fn groups(&self) -> &[memfit::optim::ParamGroup] {
        self.0.groups()
    }
    fn groups_mut(&mut self) -> &mut [memfit::optim::ParamGroup] {
        self.0.groups_mut()
    }
    fn step(&mut self, update: &Update) -> memfit::Result<()> {
        self.0.step(update)
    }
    fn visit_state(&mut self, visitor: &mut memfit::state::StateVisitor<'_>) -> memfit::Result<()> {
        self.0.visit_state(visitor)
    }
    fn allocate(&mut self) -> memfit::Result<()> {
        self.0.allocate()
    }
    fn begin(&mut self, update: &Update) -> memfit::Result<()> {
        self.0.begin(update)
    }
    fn step_parameter(&mut self, group: usize, index: usize, update: &Update) -> memfit::Result<()> {
        self.0.step_parameter(group, index, update)
    }
    fn state_of(&mut self, group: usize, index: usize) -> Vec<&mut Tensor> {
        self.0.state_of(group, index)
    }
}
