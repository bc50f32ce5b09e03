//! Adafactor against a plain loop of the paper's formulas, and to the byte.

mod support;

use memfit::optim::{Adafactor, AdafactorConfig, GroupOptions, Optimizer, StepSize};
use memfit::state::{Named, State, Value};
use memfit::{CpuOffload, Error, Update, memory};
use support::{copies, difference, same};
use tch::{Device, Kind, Tensor};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Shapes that are cut in every way: a scalar, vectors, small and batched matrices, one of
/// several blocks with rows of several parts, one that is all columns.
const SHAPES: [&[i64]; 8] =
    [&[], &[7], &[70_000], &[6, 4], &[40, 3, 5, 4], &[200, 1_100], &[3, 90, 1_030], &[1, 2_500]];

fn leaf(shape: &[i64], kind: Kind) -> Tensor {
    let values = Tensor::randn(shape, CPU) * 0.3;
    values.to_kind(kind).set_requires_grad(true)
}

/// Gradients that no loss gave: of very unequal sizes, so that clipping acts.
fn gradient(w: &Tensor, step: usize) -> Tensor {
    let size = if step == 2 { 50.0 } else { 0.1 };
    (Tensor::randn(w.size(), CPU).exp() * Tensor::randn(w.size(), CPU) * size).to_kind(w.kind())
}

/// Gives a leaf a gradient with the strides of `grad`.
fn set_grad(w: &Tensor, grad: &Tensor) {
    if !w.grad().defined() {
        (w * 0.0).sum(Kind::Float).backward();
    }
    let mut copy = Tensor::empty_strided(grad.size(), grad.stride(), (grad.kind(), Device::Cpu));
    copy.copy_(grad);
    w.grad().set_data(&copy);
}

fn square_mean(t: &Tensor) -> f64 {
    t.square().mean(Kind::Double).double_value(&[])
}

/// The paper's algorithm, in fp64, with tensors of the full size.
struct Loop {
    config: AdafactorConfig,
    w: Tensor,
    rows: Tensor,
    columns: Tensor,
    momentum: Tensor,
    t: f64,
}

impl Loop {
    fn new(w: &Tensor, config: AdafactorConfig) -> Self {
        let w = w.detach().copy().to_kind(Kind::Double);
        let zero = Tensor::zeros([1], (Kind::Double, Device::Cpu));
        let momentum = w.zeros_like();
        Self { config, w, rows: zero.copy(), columns: zero, momentum, t: 0.0 }
    }

    fn step(&mut self, grad: &Tensor, lr: f64) {
        let c = self.config;
        self.t += 1.0;
        let beta2 = 1.0 - self.t.powf(-c.decay);
        let g = grad.to_kind(Kind::Double);
        let squares = g.square() + c.epsilon1;
        let v = if g.dim() > 1 {
            self.rows = &self.rows * beta2 + squares.mean_dim(-1, true, Kind::Double) * (1.0 - beta2);
            self.columns = &self.columns * beta2 + squares.mean_dim(-2, true, Kind::Double) * (1.0 - beta2);
            &self.rows * &self.columns / self.rows.mean_dim(-2, true, Kind::Double)
        } else {
            self.rows = &self.rows * beta2 + squares * (1.0 - beta2);
            self.rows.view(g.size().as_slice())
        };
        let u = g / v.sqrt();
        let u = &u / (square_mean(&u).sqrt() / c.clip).max(1.0);
        let alpha = match c.step_size {
            StepSize::Relative => c.epsilon2.max(square_mean(&self.w).sqrt()) * lr.min(1.0 / self.t.sqrt()),
            StepSize::Absolute => lr,
        };
        let u = if c.beta1 == 0.0 {
            u
        } else {
            self.momentum = &self.momentum * c.beta1 + u * (1.0 - c.beta1);
            self.momentum.copy()
        };
        self.w = &self.w * (1.0 - lr * c.weight_decay) - u * alpha;
    }
}

fn every_config() -> [AdafactorConfig; 4] {
    let config = AdafactorConfig::default();
    [
        config,
        config.lr(0.9).decay(0.5).clip(0.5).epsilons(1e-3, 1.0),
        config.absolute(0.03).weight_decay(0.2),
        config.beta1(0.8).lr(0.05),
    ]
}

fn one(w: &Tensor, config: AdafactorConfig) -> Adafactor {
    Adafactor::new(&vec![w.shallow_clone()], config).unwrap()
}

#[test]
fn five_steps_equal_the_papers_loop() {
    let _guard = support::serial();
    for (kind, tolerance) in [(Kind::Float, 2e-6), (Kind::Double, 1e-12)] {
        for config in every_config() {
            for shape in SHAPES {
                let w = leaf(shape, kind);
                let start = w.detach().copy();
                let (mut ours, mut plain) = (one(&w, config), Loop::new(&w, config));
                for step in 0..5 {
                    let grad = gradient(&w, step);
                    set_grad(&w, &grad);
                    ours.step(&Update::plain()).unwrap();
                    plain.step(&grad, config.lr);
                }
                let off = difference(&w.detach(), &plain.w);
                assert!(off < tolerance, "{shape:?} {kind:?} {config:?}: {off}");
                assert!(difference(&w.detach(), &start) > 1e-3);
                assert_eq!(ours.steps(), 5);
            }
        }
    }
}

#[test]
fn a_changed_rate_acts_as_if_it_had_always_been_there() {
    let _guard = support::serial();
    for config in every_config() {
        for shape in [&[6, 4][..], &[7]] {
            let (changed, always) = (leaf(shape, Kind::Float), leaf(shape, Kind::Float));
            let mut a = one(&changed, config.lr(0.5));
            let mut b = one(&always, config.lr(0.02));
            for step in 0..5 {
                let grad = gradient(&changed, step);
                if step == 4 {
                    a.groups_mut()[0].lr = 0.02;
                    tch::no_grad(|| always.shallow_clone().copy_(&changed));
                }
                for (w, optimizer) in [(&changed, &mut a), (&always, &mut b)] {
                    set_grad(w, &grad);
                    optimizer.step(&Update::plain()).unwrap();
                }
            }
            assert!(changed.detach().equal(&always.detach()));
            assert!(a.state_of(0, 0).iter().zip(b.state_of(0, 0)).all(|(a, b)| a.equal(b)));
        }
    }
}

#[test]
fn state_is_a_number_for_each_row_and_column() {
    let _guard = support::serial();
    let parameters =
        vec![leaf(&[6, 4], Kind::Float), leaf(&[3, 5, 4], Kind::BFloat16), leaf(&[7], Kind::Half)];
    let mut plain = Adafactor::new(&parameters, AdafactorConfig::default()).unwrap();
    let before = support::live();
    plain.allocate().unwrap();
    let bytes = 4 * ((6 + 4) + 3 * (5 + 4) + 7);
    assert_eq!(plain.state_bytes(), bytes);
    assert_eq!(support::live() - before, bytes);

    let mut with = Adafactor::new(&parameters, AdafactorConfig::default().beta1(0.9)).unwrap();
    with.allocate().unwrap();
    assert_eq!(with.state_bytes(), bytes + 4 * (24 + 60 + 7));

    let double = leaf(&[6, 4], Kind::Double);
    let mut double = one(&double, AdafactorConfig::default());
    double.allocate().unwrap();
    assert_eq!(double.state_bytes(), 8 * 10);

    let state = State::collect(|visitor| plain.visit_state(visitor)).unwrap();
    let shape = |name: &str| match state.get(name) {
        Some(Value::Tensor(tensor)) => (tensor.size(), tensor.kind()),
        other => panic!("{name}: {other:?}"),
    };
    assert_eq!(shape("0.row_var"), (vec![6, 1], Kind::Float));
    assert_eq!(shape("1.row_var"), (vec![3, 5, 1], Kind::Float));
    assert_eq!(shape("1.col_var"), (vec![3, 1, 4], Kind::Float));
    assert_eq!(shape("2.variance"), (vec![7], Kind::Float));
}

/// Case 47.
#[test]
fn scratch_is_as_documented_to_the_byte() {
    let _guard = support::serial();
    let scratch = |shapes: &[&[i64]], kind: Kind| {
        let parameters: Vec<Tensor> = shapes.iter().map(|shape| leaf(shape, kind)).collect();
        let mut optimizer = Adafactor::new(&parameters, AdafactorConfig::default()).unwrap();
        optimizer.allocate().unwrap();
        for w in &parameters {
            set_grad(w, &gradient(w, 0));
        }
        let before = support::live();
        let ((), peak) = memory::peak_of(Device::Cpu, || optimizer.step(&Update::plain()).unwrap()).unwrap();
        peak - before
    };
    // One block of rows: a number for each column, and 16 B.
    assert_eq!(scratch(&[&[6, 4]], Kind::Float), 4 * 4 + 16);
    assert_eq!(scratch(&[&[6, 4]], Kind::Double), 8 * 4 + 16);
    assert_eq!(scratch(&[&[6, 4]], Kind::BFloat16), 4 * 4 + 16);
    assert_eq!(scratch(&[&[7]], Kind::Float), 16);
    // 70,000 elements are two tasks; 64 × 2,048 = 2 × 65,536 elements two blocks.
    assert_eq!(scratch(&[&[70_000]], Kind::Float), 2 * 16);
    assert_eq!(scratch(&[&[64, 2_048]], Kind::Float), 2 * (4 * 2_048 + 16));
    // Never more than 32 blocks, and 16 rows or more in each.
    assert_eq!(scratch(&[&[8_192, 512]], Kind::Float), 32 * (4 * 512 + 16));
    assert_eq!(scratch(&[&[40, 8_192]], Kind::Float), 3 * (4 * 8_192 + 16));
    // The largest need alone.
    assert_eq!(scratch(&[&[6, 4], &[64, 2_048], &[70_000]], Kind::Float), 2 * (4 * 2_048 + 16));
}

/// Case 44.
#[test]
fn parameters_and_gradients_of_other_strides_move_alike() {
    let _guard = support::serial();
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half] {
        for (shape, config) in [(&[1_030, 90][..], every_config()[0]), (&[3, 5, 8], every_config()[3])] {
            let value = leaf(shape, kind).detach();
            let turned = |t: &Tensor| t.transpose(-1, -2).contiguous().transpose(-1, -2);
            let spaced = |t: &Tensor| Tensor::stack(&[t, t], -1).select(-1, 0);
            let grad = gradient(&value, 0);
            let mut moved = Vec::new();
            for w in [value.copy(), turned(&value), spaced(&value)] {
                for grad in [grad.copy(), turned(&grad), spaced(&grad)] {
                    let w = w.copy_strided().set_requires_grad(true);
                    let alias = w.detach();
                    let mut optimizer = one(&w, config);
                    for _ in 0..2 {
                        set_grad(&w, &grad);
                        optimizer.step(&Update::plain()).unwrap();
                    }
                    assert!(alias.equal(&w.detach()));
                    moved.push(w.detach().contiguous());
                }
            }
            assert!(moved.iter().all(|w| w.equal(&moved[0])), "{kind:?} {shape:?}");
            assert!(!moved[0].equal(&value));
        }
    }
}

trait CopyStrided {
    fn copy_strided(&self) -> Tensor;
}

impl CopyStrided for Tensor {
    fn copy_strided(&self) -> Tensor {
        let mut copy = Tensor::empty_strided(self.size(), self.stride(), (self.kind(), Device::Cpu));
        copy.copy_(self);
        copy
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let _guard = support::serial();
    for shape in SHAPES {
        let value = leaf(shape, Kind::Float).detach();
        let grad = gradient(&value, 0);
        let run = |threads: i32| {
            tch::set_num_threads(threads);
            let w = value.copy().set_requires_grad(true);
            let mut optimizer = one(&w, AdafactorConfig::default());
            set_grad(&w, &grad);
            optimizer.step(&Update::plain()).unwrap();
            tch::set_num_threads(1);
            w.detach()
        };
        assert!(run(1).equal(&run(2)), "{shape:?}");
    }
}

/// Case 46's other half: rounded once, from fp32 arithmetic.
#[test]
fn half_precision_weights_are_the_fp32_update_rounded() {
    let _guard = support::serial();
    for kind in [Kind::BFloat16, Kind::Half] {
        for shape in [&[33, 40][..], &[50]] {
            let narrow = leaf(shape, kind);
            let wide = narrow.detach().to_kind(Kind::Float).set_requires_grad(true);
            let (mut a, mut b) =
                (one(&narrow, AdafactorConfig::default()), one(&wide, AdafactorConfig::default()));
            let grad = gradient(&narrow, 0);
            set_grad(&narrow, &grad);
            set_grad(&wide, &grad.to_kind(Kind::Float));
            a.step(&Update::plain()).unwrap();
            b.step(&Update::plain()).unwrap();
            assert!(narrow.detach().equal(&wide.detach().to_kind(kind)));
        }
    }
}

#[test]
fn a_divisor_divides_the_gradients_to_the_bit() {
    let _guard = support::serial();
    for divisor in [1024.0, 3.0] {
        for shape in SHAPES {
            let by_hand = leaf(shape, Kind::Float);
            let folded = by_hand.detach().copy().set_requires_grad(true);
            let config = AdafactorConfig::default();
            let (mut a, mut b) = (one(&by_hand, config), one(&folded, config));
            let grad = gradient(&by_hand, 0);
            set_grad(&by_hand, &(&grad / divisor));
            set_grad(&folded, &grad);
            a.step(&Update::plain()).unwrap();
            b.step(&Update { divisor, ..Update::plain() }).unwrap();
            assert!(by_hand.detach().equal(&folded.detach()), "{shape:?} ÷ {divisor}");
            assert!(b.folds_divisor() && folded.grad().equal(&grad), "the gradient is left alone");
        }
    }
}

/// Case 45's rule.
#[test]
fn a_gradient_of_zeros_never_moves_a_weight() {
    let _guard = support::serial();
    for config in every_config().map(|config| config.weight_decay(0.0)) {
        for shape in SHAPES {
            let w = leaf(shape, Kind::Float);
            let before = w.detach().copy();
            let mut optimizer = one(&w, config);
            set_grad(&w, &w.zeros_like().detach());
            for _ in 0..5 {
                optimizer.step(&Update::plain()).unwrap();
            }
            assert!(w.detach().equal(&before), "{shape:?}");
        }
    }
}

/// Cases 47 and 49.
#[test]
fn frozen_and_absent_parameters_are_skipped() {
    let _guard = support::serial();
    let all = vec![leaf(&[6, 4], Kind::Float), leaf(&[6, 4], Kind::Float), leaf(&[5], Kind::Float)];
    set_grad(&all[0], &gradient(&all[0], 0));
    set_grad(&all[1], &gradient(&all[1], 0));
    let _ = all[1].set_requires_grad(false);
    let before = copies(&all);
    let mut optimizer = Adafactor::new(&all, AdafactorConfig::default()).unwrap();
    optimizer.step(&Update::plain()).unwrap();
    assert!(!all[0].detach().equal(&before[0]));
    assert!(same(&copies(&all[1..]), &before[1..]));
    assert_eq!(optimizer.state_bytes(), 4 * (10 + 5), "none for the frozen one");

    // Thawed, it starts with its own first step.
    let _ = all[1].set_requires_grad(true);
    let alone = before[1].copy().set_requires_grad(true);
    let grad = gradient(&alone, 0);
    let mut fresh = one(&alone, AdafactorConfig::default());
    for (w, optimizer) in [(&all[1], &mut optimizer), (&alone, &mut fresh)] {
        set_grad(w, &grad);
        optimizer.step(&Update::plain()).unwrap();
    }
    assert!(all[1].detach().equal(&alone.detach()));
}

/// Case 48.
#[test]
fn groups_have_rates_and_decays_of_their_own() {
    let _guard = support::serial();
    let (a, b) = (leaf(&[6, 4], Kind::Float), leaf(&[6, 4], Kind::Float));
    let mut optimizer = one(&a, AdafactorConfig::default());
    optimizer
        .add_group(vec![Named::new("b", &b)], GroupOptions::default().lr(0.25).weight_decay(0.5))
        .unwrap();
    assert_eq!(optimizer.state_bytes(), 2 * 4 * 10);
    let (mut plain_a, mut plain_b) = (
        Loop::new(&a, AdafactorConfig::default()),
        Loop::new(&b, AdafactorConfig::default().weight_decay(0.5)),
    );
    for (step, lr) in [0.25, 0.125].into_iter().enumerate() {
        optimizer.groups_mut()[1].lr = lr;
        let grads = [gradient(&a, step), gradient(&b, step)];
        set_grad(&a, &grads[0]);
        set_grad(&b, &grads[1]);
        optimizer.step(&Update::plain()).unwrap();
        plain_a.step(&grads[0], 1e-2);
        plain_b.step(&grads[1], lr);
    }
    assert!(difference(&a.detach(), &plain_a.w) < 1e-6 && difference(&b.detach(), &plain_b.w) < 1e-6);
}

#[test]
fn a_loaded_state_continues_to_the_bit() {
    let _guard = support::serial();
    for config in every_config() {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Double] {
            let all: Vec<Tensor> = SHAPES[..4].iter().map(|shape| leaf(shape, kind)).collect();
            let mut optimizer = Adafactor::new(&all, config).unwrap();
            let step = |optimizer: &mut Adafactor, all: &[Tensor], grads: &[Tensor]| {
                all.iter().zip(grads).for_each(|(w, grad)| set_grad(w, grad));
                optimizer.step(&Update::plain()).unwrap();
            };
            let grads: Vec<Tensor> = all.iter().map(|w| gradient(w, 0)).collect();
            step(&mut optimizer, &all, &grads);
            let state = State::collect(|visitor| optimizer.visit_state(visitor)).unwrap();
            let other: Vec<Tensor> = copies(&all).into_iter().map(|w| w.set_requires_grad(true)).collect();
            let mut loaded = Adafactor::new(&other, config.lr(0.7)).unwrap();
            loaded.load(&state).unwrap();
            assert_eq!(loaded.groups()[0].lr, config.lr);
            step(&mut optimizer, &all, &grads);
            step(&mut loaded, &other, &grads);
            assert!(same(&copies(&all), &copies(&other)));
        }
    }
    let matrix = leaf(&[6, 4], Kind::Float);
    let mut plain = one(&matrix, AdafactorConfig::default());
    plain.allocate().unwrap();
    let state = State::collect(|visitor| plain.visit_state(visitor)).unwrap();
    let refused = one(&matrix, AdafactorConfig::default().beta1(0.9)).load(&state);
    assert!(matches!(refused, Err(Error::State { .. })));
    let refused = one(&leaf(&[4, 6], Kind::Float), AdafactorConfig::default()).load(&state);
    assert!(matches!(refused, Err(Error::State { .. })));
}

#[test]
fn no_allocation_can_fail_once_a_parameter_has_moved() {
    let _guard = support::serial();
    let all: Vec<Tensor> = SHAPES.iter().map(|shape| leaf(shape, Kind::Float)).collect();
    for w in &all {
        let turned = gradient(w, 0);
        set_grad(
            w,
            &if w.dim() > 1 { turned.transpose(-1, -2).contiguous().transpose(-1, -2) } else { turned },
        );
    }
    let before = copies(&all);
    let mut optimizer = Adafactor::new(&all, AdafactorConfig::default()).unwrap();
    let mut failures = 0;
    for nth in 1.. {
        let failure = memory::FailAt::nth(nth).unwrap();
        let stepped = optimizer.step(&Update::plain());
        drop(failure);
        let Err(error) = stepped else { break };
        failures += 1;
        assert!(error.is_out_of_memory(), "{error}");
        assert!(same(&copies(&all), &before));
    }
    assert!(failures > 0 && !same(&copies(&all), &before));
}

/// Case 40.
#[test]
fn its_state_on_disk_changes_no_bit() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let all: Vec<Tensor> = SHAPES.iter().map(|shape| leaf(shape, Kind::Float)).collect();
    let other: Vec<Tensor> = copies(&all).into_iter().map(|w| w.set_requires_grad(true)).collect();
    let config = AdafactorConfig::default().beta1(0.9);
    let mut plain = Adafactor::new(&all, config).unwrap();
    let mut offloaded =
        CpuOffload::optimizer(Adafactor::new(&other, config).unwrap()).disk(folder.path()).unwrap();
    for step in 0..3 {
        let grads: Vec<Tensor> = all.iter().map(|w| gradient(w, step)).collect();
        for (list, optimizer) in [(&all, &mut plain as &mut dyn Optimizer), (&other, &mut offloaded)] {
            list.iter().zip(&grads).for_each(|(w, grad)| set_grad(w, grad));
            optimizer.step(&Update::plain()).unwrap();
        }
    }
    assert!(same(&copies(&all), &copies(&other)));
    assert_eq!(offloaded.get_ref().steps(), 3);
}

#[test]
fn a_step_bumps_versions_so_that_autograd_sees_it() {
    let _guard = support::serial();
    let w = leaf(&[6, 4], Kind::Float);
    let mut optimizer = one(&w, AdafactorConfig::default());
    set_grad(&w, &gradient(&w, 0));
    let loss = w.square().sum(Kind::Float);
    optimizer.step(&Update::plain()).unwrap();
    assert!(loss.f_backward().is_err(), "backward used a weight that had moved");
}

#[test]
fn bad_settings_are_typed_errors() {
    let _guard = support::serial();
    let w = vec![leaf(&[6, 4], Kind::Float)];
    let config = AdafactorConfig::default();
    let bad = [
        config.lr(-1.0),
        config.decay(0.0),
        config.epsilons(0.0, 1e-3),
        config.epsilons(1e-30, f64::NAN),
        config.clip(0.0),
        config.beta1(1.0),
        config.weight_decay(f64::INFINITY),
    ];
    assert!(bad.iter().all(|config| matches!(Adafactor::new(&w, *config), Err(Error::Config { .. }))));
    assert_eq!(Adafactor::new(&w, config).unwrap().name(), "Adafactor");
}

#[test]
fn empty_parameters_do_no_harm() {
    let _guard = support::serial();
    let w = leaf(&[0, 4], Kind::Float);
    let mut optimizer = one(&w, AdafactorConfig::default());
    w.sum(Kind::Float).backward();
    optimizer.step(&Update::plain()).unwrap();
    assert_eq!(optimizer.state_bytes(), 4 * 4);
}

/// Case 46.
#[test]
fn stochastic_rounding_moves_a_weight_by_the_update_on_average() {
    let _guard = support::serial();
    for shape in [&[4_096][..], &[64, 64]] {
        let run = |config: AdafactorConfig| {
            let w = Tensor::ones(shape, (Kind::BFloat16, Device::Cpu)).set_requires_grad(true);
            set_grad(&w, &w.ones_like().detach());
            one(&w, config.absolute(2f64.powi(-10))).step(&Update::plain()).unwrap();
            w.detach()
        };
        let nearest = run(AdafactorConfig::default());
        assert!(nearest.equal(&nearest.ones_like()), "lost");
        let config = AdafactorConfig::default().stochastic_rounding(3);
        let moved = run(config);
        let mean = 1.0 - moved.mean(Kind::Double).double_value(&[]);
        // A quarter of 4,096 elements by 2⁻⁸: five standard deviations.
        assert!((mean - 2f64.powi(-10)).abs() < 1.4e-4, "{mean}");
        assert!(run(config).equal(&moved) && !run(config.stochastic_rounding(4)).equal(&moved));
    }
}
