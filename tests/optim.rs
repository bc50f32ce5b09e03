//! Optimizers against the closed formula, tch's own, and the plain loop.

mod support;

use memfit::optim::{AdamW, AdamWConfig, GroupOptions, Optimizer, Sgd, SgdConfig, TchOptimizer};
use memfit::state::{Named, State, Value};
use memfit::{Error, Update, memory};
use tch::nn::OptimizerConfig;
use tch::{Device, Kind, Tensor, nn};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

fn leaf(values: &[f32]) -> Tensor {
    Tensor::from_slice(values).set_requires_grad(true)
}

/// Gives a leaf a gradient with the strides of `grad`, which autograd would not.
fn set_grad(w: &Tensor, grad: &Tensor) {
    w.sum(Kind::Float).backward();
    let mut copy = Tensor::empty_strided(grad.size(), grad.stride(), CPU);
    copy.copy_(grad);
    w.grad().set_data(&copy);
    assert_eq!(w.grad().stride(), grad.stride());
}

/// A model of two matrices and a bias, its loss, and inputs that do not change.
struct Net {
    vs: nn::VarStore,
    x: Tensor,
}

impl Net {
    fn new() -> Self {
        tch::manual_seed(7);
        let vs = nn::VarStore::new(Device::Cpu);
        let root = vs.root();
        let _ = root.randn("a", &[6, 4], 0.0, 0.5);
        let _ = root.randn("b", &[4, 3], 0.0, 0.5);
        let _ = root.randn("bias", &[3], 0.0, 0.5);
        Self { vs, x: Tensor::randn([5, 6], CPU) }
    }

    fn backward(&self, scale: f64) {
        let w = self.vs.trainable_variables();
        let y = self.x.matmul(&w[0]).tanh().matmul(&w[1]) + &w[2];
        (y.square().sum(Kind::Float) * scale).backward();
    }

    fn zero(&self) {
        for mut w in self.vs.trainable_variables() {
            w.zero_grad();
        }
    }

    fn weights(&self) -> Vec<Tensor> {
        self.vs.trainable_variables().iter().map(|w| w.detach().copy()).collect()
    }

    fn run(&self, steps: usize, optimizer: &mut dyn Optimizer, scale: f64) {
        for _ in 0..steps {
            self.zero();
            self.backward(scale);
            let update = Update { divisor: scale, ..Update::plain() };
            optimizer.step(&update).unwrap();
        }
    }

    fn run_tch(&self, steps: usize, mut optimizer: nn::Optimizer) {
        for _ in 0..steps {
            self.zero();
            self.backward(1.0);
            optimizer.step();
        }
    }
}

fn largest_difference(a: &[Tensor], b: &[Tensor]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs().max().double_value(&[])).fold(0.0, f64::max)
}

type Maker = fn(&nn::VarStore) -> Box<dyn Optimizer>;

#[test]
fn twenty_steps_equal_those_of_tch() {
    let _guard = support::serial();
    type Pair = (Maker, fn(&nn::VarStore) -> nn::Optimizer);
    let pairs: [Pair; 4] = [
        (
            |vs| Box::new(AdamW::new(vs, AdamWConfig::default().lr(0.01)).unwrap()),
            |vs| nn::AdamW::default().build(vs, 0.01).unwrap(),
        ),
        (
            |vs| Box::new(AdamW::adam(vs, AdamWConfig::default().lr(0.01).weight_decay(0.1)).unwrap()),
            |vs| nn::adam(0.9, 0.999, 0.1).build(vs, 0.01).unwrap(),
        ),
        (
            |vs| {
                Box::new(
                    Sgd::new(vs, SgdConfig::default().lr(0.001).nesterov(0.9).weight_decay(0.1)).unwrap(),
                )
            },
            |vs| nn::sgd(0.9, 0.0, 0.1, true).build(vs, 0.001).unwrap(),
        ),
        (
            |vs| Box::new(Sgd::new(vs, SgdConfig::default().lr(0.001).momentum(0.9).dampening(0.5)).unwrap()),
            |vs| nn::sgd(0.9, 0.5, 0.0, false).build(vs, 0.001).unwrap(),
        ),
    ];
    for (ours, theirs) in pairs {
        let (left, right) = (Net::new(), Net::new());
        let mut optimizer = ours(&left.vs);
        left.run(20, optimizer.as_mut(), 1.0);
        right.run_tch(20, theirs(&right.vs));
        let difference = largest_difference(&left.weights(), &right.weights());
        assert!(difference < 1e-6, "{} differs by {difference}", optimizer.name());
        assert!(largest_difference(&left.weights(), &Net::new().weights()) > 1e-3);
    }
}

#[test]
fn one_step_follows_the_formula() {
    let _guard = support::serial();
    let step = |optimizer: &mut dyn Optimizer, w: &Tensor| {
        (w * Tensor::from_slice(&[0.5f32, -2.0])).sum(Kind::Float).backward();
        optimizer.step(&Update::plain()).unwrap();
        Vec::<f32>::try_from(w.detach()).unwrap()
    };
    let (w, g, lr, wd, eps) = ([1.0f64, -3.0], [0.5f64, -2.0], 0.1, 0.2, 1e-2);
    let near = |found: Vec<f32>, wanted: [f64; 2]| {
        assert!(
            found.iter().zip(wanted).all(|(f, w)| (f64::from(*f) - w).abs() < 1e-6),
            "{found:?} {wanted:?}"
        );
    };

    // With bias correction the first moments are g and g²: a step of lr·g/(|g| + ε).
    let p = leaf(&[1.0, -3.0]);
    let config = AdamWConfig::default().lr(lr).weight_decay(wd).epsilon(eps);
    let mut adamw = AdamW::new(&vec![p.shallow_clone()], config).unwrap();
    near(step(&mut adamw, &p), [0, 1].map(|i| w[i] * (1.0 - lr * wd) - lr * g[i] / (g[i].abs() + eps)));

    let p = leaf(&[1.0, -3.0]);
    let mut adam = AdamW::adam(&vec![p.shallow_clone()], config).unwrap();
    near(
        step(&mut adam, &p),
        [0, 1].map(|i| {
            let g = g[i] + wd * w[i];
            w[i] - lr * g / (g.abs() + eps)
        }),
    );

    // Two steps of momentum: g, then μg + g.
    let p = leaf(&[1.0, -3.0]);
    let mut sgd = Sgd::new(&vec![p.shallow_clone()], SgdConfig::default().lr(lr).momentum(0.9)).unwrap();
    near(step(&mut sgd, &p), [0, 1].map(|i| w[i] - lr * g[i]));
    sgd.step(&Update::plain()).unwrap();
    near(Vec::<f32>::try_from(p.detach()).unwrap(), [0, 1].map(|i| w[i] - lr * g[i] * 2.9));
    assert_eq!(sgd.steps(), 2);
}

#[test]
fn state_is_named_after_its_parameter_and_a_wrong_one_is_refused_whole() {
    let _guard = support::serial();
    let net = Net::new();
    let mut optimizer = AdamW::new(&net.vs, AdamWConfig::default()).unwrap();
    net.run(1, &mut optimizer, 1.0);
    let mut state = State::collect(|visitor| optimizer.visit_state(visitor)).unwrap();
    assert!(matches!(state.get("a.exp_avg"), Some(Value::Tensor(t)) if t.size() == [6, 4]));
    assert!(matches!(state.get("bias.step"), Some(Value::Int(1))));
    let before = State::collect(|visitor| optimizer.visit_state(visitor)).unwrap();
    state.insert("a.exp_avg", Value::Tensor(Tensor::zeros([4, 6], CPU)));
    state.insert("b.exp_avg_sq", Value::Tensor(Tensor::ones([4, 3], CPU)));
    assert!(matches!(optimizer.load(&state), Err(Error::State { .. })));
    let after = State::collect(|visitor| optimizer.visit_state(visitor)).unwrap();
    let tensor = |state: &State| match state.get("b.exp_avg_sq") {
        Some(Value::Tensor(tensor)) => tensor.copy(),
        _ => panic!("no tensor"),
    };
    assert_eq!(tensor(&before), tensor(&after));
}

/// Case 42.
#[test]
fn a_tied_parameter_moves_once() {
    let _guard = support::serial();
    let w = leaf(&[1.0]);
    let twice = vec![Named::new("embed", &w), Named::new("head", &w)];
    let mut optimizer = Sgd::new(&twice, SgdConfig::default().lr(0.25)).unwrap();
    assert_eq!(optimizer.groups()[0].parameters().len(), 1);
    (&w * 2.0).sum(Kind::Float).backward();
    optimizer.step(&Update::plain()).unwrap();
    assert_eq!(w.double_value(&[0]), 0.5);
}

#[test]
fn a_large_gradient_in_another_order_is_the_same_update_in_small_memory() {
    let _guard = support::serial();
    let (rows, columns) = (1100, 900);
    let values = Tensor::randn([rows, columns], CPU);
    let grad = Tensor::randn([rows, columns], CPU);
    let run = |grad: Tensor| {
        let mut w = values.copy().set_requires_grad(true);
        let mut optimizer = AdamW::new(&vec![w.shallow_clone()], AdamWConfig::default()).unwrap();
        optimizer.allocate().unwrap();
        set_grad(&w, &grad);
        let live = memory::stats(Device::Cpu).unwrap().current;
        let (stepped, peak) = memory::peak_of(Device::Cpu, || optimizer.step(&Update::plain())).unwrap();
        stepped.unwrap();
        w.zero_grad();
        (w.detach().copy(), peak - live)
    };
    let (plain, none) = run(grad.copy());
    let (turned, some) = run(grad.tr().contiguous().tr());
    assert_eq!(plain, turned);
    assert_eq!(none, 0);
    assert!(some <= 5 << 20, "{some} bytes");
}

#[test]
fn a_parameter_without_gradient_is_skipped_and_not_counted() {
    let _guard = support::serial();
    let (a, b) = (leaf(&[1.0]), leaf(&[1.0]));
    let both = vec![Named::new("a", &a), Named::new("b", &b)];
    let mut optimizer = AdamW::new(&both, AdamWConfig::default().lr(0.1).weight_decay(0.0)).unwrap();
    a.sum(Kind::Float).backward();
    optimizer.step(&Update::plain()).unwrap();
    assert_eq!(b.double_value(&[0]), 1.0);
    // b's first step has the size of a first step, though it is the optimizer's second.
    b.sum(Kind::Float).backward();
    optimizer.step(&Update::plain()).unwrap();
    assert!((b.double_value(&[0]) - 0.9).abs() < 1e-6);
    let state = State::collect(|visitor| optimizer.visit_state(visitor)).unwrap();
    let counts = ["a.step", "b.step", "steps"].map(|name| match state.get(name) {
        Some(Value::Int(count)) => *count,
        _ => -1,
    });
    assert_eq!(counts, [2, 1, 2]);
}

/// Case 49.
#[test]
fn an_unfrozen_parameter_gets_state_when_it_first_steps() {
    let _guard = support::serial();
    let (a, b) = (leaf(&[1.0]), leaf(&[1.0]));
    let _ = b.set_requires_grad(false);
    let both = vec![Named::new("a", &a), Named::new("b", &b)];
    let mut optimizer = AdamW::new(&both, AdamWConfig::default()).unwrap();
    optimizer.allocate().unwrap();
    assert_eq!(optimizer.state_bytes(), 8);
    let _ = b.set_requires_grad(true);
    (&a + &b).sum(Kind::Float).backward();
    optimizer.step(&Update::plain()).unwrap();
    assert_eq!(optimizer.state_bytes(), 16);
    assert_eq!(a.double_value(&[0]), b.double_value(&[0]));
}

/// Case 48.
#[test]
fn each_step_reads_each_groups_rate() {
    let _guard = support::serial();
    let (a, b) = (leaf(&[1.0]), leaf(&[1.0]));
    let mut optimizer = Sgd::new(&vec![Named::new("a", &a)], SgdConfig::default().lr(0.5)).unwrap();
    optimizer.add_group(vec![Named::new("b", &b)], GroupOptions::default().lr(0.125)).unwrap();
    (&a + &b).sum(Kind::Float).backward();
    optimizer.step(&Update::plain()).unwrap();
    assert_eq!((a.double_value(&[0]), b.double_value(&[0])), (0.5, 0.875));
    optimizer.groups_mut()[0].lr = 0.25;
    optimizer.step(&Update::plain()).unwrap();
    assert_eq!((a.double_value(&[0]), b.double_value(&[0])), (0.25, 0.75));
}

#[test]
fn a_group_with_a_known_parameter_or_without_memory_is_refused_and_nothing_changes() {
    let _guard = support::serial();
    let (a, b) = (leaf(&[1.0]), Tensor::zeros([1 << 18], CPU).set_requires_grad(true));
    let mut optimizer = AdamW::new(&vec![Named::new("a", &a)], AdamWConfig::default()).unwrap();
    let again = optimizer.add_group(vec![Named::new("c", &a)], GroupOptions::default());
    assert!(matches!(again, Err(Error::Config { .. })));
    let limit = memory::Limit::new(memory::stats(Device::Cpu).unwrap().current + (1 << 20)).unwrap();
    let large = optimizer.add_group(vec![Named::new("b", &b)], GroupOptions::default());
    assert!(large.unwrap_err().is_out_of_memory());
    drop(limit);
    assert_eq!(optimizer.groups().len(), 1);
    optimizer.add_group(vec![Named::new("b", &b)], GroupOptions::default()).unwrap();
    assert_eq!(optimizer.state_bytes(), 8 + (8 << 18));
}

/// Large enough for libtorch's own transposing copy, which takes memory of its own.
#[test]
fn a_transposed_gradient_needs_no_memory_once_a_parameter_has_moved() {
    let _guard = support::serial();
    let kinds: [Maker; 2] = [
        |vs| Box::new(AdamW::new(vs, AdamWConfig::default().lr(0.01)).unwrap()),
        |vs| Box::new(Sgd::new(vs, SgdConfig::default().lr(0.01).momentum(0.9)).unwrap()),
    ];
    for make in kinds {
        let vs = nn::VarStore::new(Device::Cpu);
        let w = [vs.root().ones("aligned", &[64, 64]), vs.root().ones("transposed", &[64, 64])];
        let mut optimizer = make(&vs);
        optimizer.allocate().unwrap();
        let grad = Tensor::randn([64, 64], CPU);
        set_grad(&w[0], &grad);
        set_grad(&w[1], &grad.tr());
        let before: Vec<Tensor> = w.iter().map(|w| w.detach().copy()).collect();
        for nth in 1.. {
            let failure = memory::FailAt::nth(nth).unwrap();
            let stepped = optimizer.step(&Update::plain());
            drop(failure);
            let Err(error) = stepped else { break };
            assert!(error.is_out_of_memory(), "{}: {error}", optimizer.name());
            assert!(w.iter().zip(&before).all(|(w, before)| w.detach() == *before));
        }
        assert_eq!(w[0].detach().tr(), w[1].detach(), "each moved once, by its own gradient");
    }
}

#[test]
fn bad_settings_and_parameters_are_typed_errors() {
    let _guard = support::serial();
    let w = vec![leaf(&[1.0])];
    let adam = AdamWConfig::default();
    let bad = [
        adam.lr(-1.0),
        adam.lr(f64::NAN),
        adam.betas(1.0, 0.9),
        adam.betas(0.9, -0.1),
        adam.epsilon(-1e-8),
        adam.weight_decay(f64::INFINITY),
    ];
    assert!(bad.iter().all(|config| matches!(AdamW::new(&w, *config), Err(Error::Config { .. }))));
    let sgd = SgdConfig::default();
    let bad = [sgd.lr(-1.0), sgd.momentum(-0.5), sgd.nesterov(0.0), sgd.nesterov(0.9).dampening(0.1)];
    assert!(bad.iter().all(|config| matches!(Sgd::new(&w, *config), Err(Error::Config { .. }))));
    let integer = vec![Tensor::zeros([2], (Kind::Int64, Device::Cpu))];
    assert!(matches!(Sgd::new(&integer, sgd), Err(Error::Config { .. })));
    let computed = vec![&w[0] * 2.0];
    assert!(matches!(AdamW::new(&computed, adam), Err(Error::Config { .. })));
}

#[test]
fn half_precision_parameters_keep_state_of_their_own_dtype() {
    let _guard = support::serial();
    let w = Tensor::ones([4], (Kind::BFloat16, Device::Cpu)).set_requires_grad(true);
    let mut optimizer = AdamW::new(&vec![w.shallow_clone()], AdamWConfig::default().lr(0.5)).unwrap();
    w.sum(Kind::Float).backward();
    optimizer.step(&Update::plain()).unwrap();
    assert_eq!(optimizer.state_of(0, 0)[0].kind(), Kind::BFloat16);
    assert!((w.double_value(&[0]) - 0.5).abs() < 0.01);
}

#[test]
fn tchs_own_optimizer_joins_and_spares_frozen_weights() {
    let _guard = support::serial();
    let (left, right) = (Net::new(), Net::new());
    let inner = nn::Adam::default().build(&left.vs, 1.0).unwrap();
    let mut adapter = TchOptimizer::new(inner, &left.vs, 0.01).unwrap();
    left.run(3, &mut adapter, 8.0);
    right.run_tch(3, nn::Adam::default().build(&right.vs, 0.01).unwrap());
    assert!(largest_difference(&left.weights(), &right.weights()) < 1e-6);
    assert!(!adapter.has_state() && !adapter.folds_divisor());

    left.backward(1.0);
    let before = left.weights();
    let _ = left.vs.trainable_variables()[0].set_requires_grad(false);
    adapter.groups_mut()[0].lr = 0.0;
    adapter.step(&Update::plain()).unwrap();
    assert_eq!(left.weights(), before, "the new rate of 0 was told");
    adapter.groups_mut()[0].lr = 0.5;
    adapter.step(&Update::plain()).unwrap();
    assert_eq!(left.weights()[0], before[0]);
    assert_ne!(left.weights()[1], before[1]);
}
