//! Muon against a plain loop of its formulas, and to the byte.

mod support;

use memfit::optim::{AdamW, AdamWConfig, GroupOptions, Momentum, Muon, MuonConfig, Optimizer, Scale};
use memfit::state::{Named, State, Value};
use memfit::{CpuOffload, Error, Update, memory};
use support::{copies, difference, same};
use tch::{Device, Kind, Tensor};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Tall, wide and square; with and without a polynomial of its own; of one and several tiles
/// and blocks; a convolution's kernel.
const SHAPES: [&[i64]; 8] =
    [&[6, 4], &[4, 6], &[5, 5], &[1, 9], &[150, 140], &[150, 1_900], &[1_900, 150], &[8, 3, 3, 2]];

fn leaf(shape: &[i64], kind: Kind) -> Tensor {
    (Tensor::randn(shape, CPU) * 0.3).to_kind(kind).set_requires_grad(true)
}

fn gradient(w: &Tensor) -> Tensor {
    Tensor::randn(w.size(), CPU).to_kind(w.kind())
}

/// Gives a leaf a gradient with the strides of `grad`, whose memory is its own.
fn set_grad(w: &Tensor, grad: &Tensor) {
    if !w.grad().defined() {
        (w * 0.0).sum(Kind::Float).backward();
    }
    let mut copy = Tensor::empty_strided(grad.size(), grad.stride(), (grad.kind(), Device::Cpu));
    copy.copy_(grad);
    w.grad().set_data(&copy);
}

fn nothing() -> Vec<Tensor> {
    Vec::new()
}

fn one(w: &Tensor, config: MuonConfig) -> Muon {
    Muon::new(&vec![w.shallow_clone()], &nothing(), config).unwrap()
}

fn every_config() -> [MuonConfig; 3] {
    let config = MuonConfig::default().lr(0.02);
    [
        config,
        config.momentum(0.8, Momentum::Heavy).scale(Scale::MatchAdamW).weight_decay(0.5),
        config.iteration(3, (1.5, -0.5, 0.0)),
    ]
}

/// The published algorithm, in fp64, with whole tensors.
struct Loop {
    config: MuonConfig,
    w: Tensor,
    momentum: Tensor,
}

impl Loop {
    fn new(w: &Tensor, config: MuonConfig) -> Self {
        let w = w.detach().copy().to_kind(Kind::Double);
        let momentum = w.zeros_like();
        Self { config, w, momentum }
    }

    fn step(&mut self, grad: &Tensor, lr: f64) {
        let c = self.config;
        let g = grad.to_kind(Kind::Double);
        self.momentum = &self.momentum * c.momentum + &g * (1.0 - c.momentum);
        let m = match c.kind {
            Momentum::Nesterov => g * (1.0 - c.momentum) + &self.momentum * c.momentum,
            Momentum::Heavy => self.momentum.copy(),
        };
        let shape = self.w.size();
        let (rows, columns) = (shape[0], shape[1..].iter().product::<i64>());
        let mut x = m.reshape([rows, columns]);
        x = &x / x.norm().double_value(&[]).max(c.epsilon);
        let (a, b, c3) = c.coefficients;
        for _ in 0..c.steps {
            let gram = x.matmul(&x.tr());
            x = &x * a + (&gram * b + gram.matmul(&gram) * c3).matmul(&x);
        }
        let scale = match c.scale {
            Scale::Original => (rows as f64 / columns as f64).max(1.0).sqrt(),
            Scale::MatchAdamW => 0.2 * (rows.max(columns) as f64).sqrt(),
        };
        self.w = &self.w * (1.0 - lr * c.weight_decay) - x.reshape(shape) * (lr * scale);
    }
}

#[test]
fn steps_equal_those_of_the_published_loop() {
    let _guard = support::serial();
    for (kind, tolerance) in [(Kind::Float, 1e-5), (Kind::Double, 1e-11)] {
        for config in every_config() {
            for shape in SHAPES {
                let w = leaf(shape, kind);
                let start = w.detach().copy();
                let (mut ours, mut plain) = (one(&w, config), Loop::new(&w, config));
                let steps = if w.numel() > 100_000 { 1 } else { 4 };
                for _ in 0..steps {
                    let grad = gradient(&w);
                    set_grad(&w, &grad);
                    ours.step(&Update::plain()).unwrap();
                    plain.step(&grad, config.lr);
                }
                let off = difference(&w.detach(), &plain.w);
                assert!(off < tolerance, "{shape:?} {kind:?} {config:?}: {off}");
                assert!(difference(&w.detach(), &start) > 1e-3);
            }
        }
    }
}

/// With coefficients that converge, the update is U·Vᵀ of the gradient's singular values.
#[test]
fn an_update_is_orthogonal() {
    let _guard = support::serial();
    let w = leaf(&[12, 5], Kind::Float);
    let start = w.detach().copy();
    let config = MuonConfig::default().lr(1.0).weight_decay(0.0).iteration(40, (1.5, -0.5, 0.0));
    let mut optimizer = one(&w, config);
    set_grad(&w, &gradient(&w));
    optimizer.step(&Update::plain()).unwrap();
    let x = (start - w.detach()) / (12.0f64 / 5.0).sqrt();
    assert!(difference(&x.tr().matmul(&x), &Tensor::eye(5, CPU)) < 1e-4);
}

/// Case 48.
#[test]
fn the_others_move_as_by_adamw_at_a_rate_of_their_own() {
    let _guard = support::serial();
    let adamw = AdamWConfig::default().lr(0.03).weight_decay(0.2);
    let (w, bias, embedding) =
        (leaf(&[6, 4], Kind::Float), leaf(&[6], Kind::Float), leaf(&[9, 4], Kind::Float));
    let others = vec![bias.shallow_clone(), embedding.shallow_clone()];
    let alone: Vec<Tensor> = copies(&others).into_iter().map(|w| w.set_requires_grad(true)).collect();
    let config = MuonConfig::default().lr(0.02).others(adamw);
    let mut muon = Muon::new(&vec![w.shallow_clone()], &others, config).unwrap();
    let mut plain = AdamW::new(&alone, adamw).unwrap();
    let mut matrix = Loop::new(&w, config);
    assert_eq!([muon.groups()[0].lr, muon.groups()[1].lr], [0.02, 0.03]);
    assert_eq!([muon.groups()[0].weight_decay, muon.groups()[1].weight_decay], [0.1, 0.2]);
    for (rate, other) in [(0.02, 0.03), (0.01, 0.3)] {
        muon.groups_mut()[0].lr = rate;
        muon.groups_mut()[1].lr = other;
        plain.groups_mut()[0].lr = other;
        let grad = gradient(&w);
        set_grad(&w, &grad);
        for (a, b) in others.iter().zip(&alone) {
            let grad = gradient(a);
            set_grad(a, &grad);
            set_grad(b, &grad);
        }
        muon.step(&Update::plain()).unwrap();
        plain.step(&Update::plain()).unwrap();
        matrix.step(&grad, rate);
    }
    assert!(same(&copies(&others), &copies(&alone)));
    assert!(difference(&w.detach(), &matrix.w) < 1e-5);
}

#[test]
fn added_groups_are_matrices_or_others_as_asked() {
    let _guard = support::serial();
    let all: Vec<Tensor> = (0..3).map(|_| leaf(&[6, 4], Kind::Float)).collect();
    let config = MuonConfig::default().lr(0.02).others(AdamWConfig::default().lr(0.5));
    let mut muon = one(&all[0], config);
    muon.add_matrices(vec![Named::new("b", &all[1])], GroupOptions::default()).unwrap();
    muon.add_group(vec![Named::new("c", &all[2])], GroupOptions::default()).unwrap();
    let rates: Vec<f64> = muon.groups().iter().map(|group| group.lr).collect();
    assert_eq!(rates, [0.02, 0.5, 0.02, 0.5]);
    assert_eq!(muon.state_bytes(), 24 * (4 + 4 + 8));
    let vector = vec![Named::new("v", &leaf(&[4], Kind::Float))];
    assert!(matches!(muon.add_matrices(vector, GroupOptions::default()), Err(Error::Config { .. })));
    let twice = vec![Named::new("a", &all[0])];
    assert!(matches!(muon.add_matrices(twice, GroupOptions::default()), Err(Error::Config { .. })));
    assert_eq!(muon.groups().len(), 4);
    let late = leaf(&[4], Kind::Float);
    muon.add_group(vec![Named::new("d", &late)], GroupOptions::default()).unwrap();
    assert_eq!(muon.state_bytes(), 24 * (4 + 4 + 8) + 8 * 4);
}

#[test]
fn state_is_four_bytes_for_matrices_and_eight_for_others() {
    let _guard = support::serial();
    for (kind, matrix, others) in [(Kind::Float, 4, 8), (Kind::BFloat16, 4, 4), (Kind::Double, 8, 16)] {
        let (w, bias) = (leaf(&[6, 4], kind), leaf(&[6], kind));
        let mut muon = Muon::new(&vec![w], &vec![bias], MuonConfig::default()).unwrap();
        let before = support::live();
        muon.allocate().unwrap();
        assert_eq!(muon.state_bytes(), matrix * 24 + others * 6);
        assert_eq!(support::live() - before, muon.state_bytes());
    }
}

/// Case 47: at most the largest parameter and a constant, where a gradient can be used up.
#[test]
fn scratch_is_as_documented_to_the_byte() {
    let _guard = support::serial();
    let scratch = |shape: &[i64], kind: Kind, turned: bool| {
        let w = leaf(shape, kind);
        let mut optimizer = one(&w, MuonConfig::default());
        optimizer.allocate().unwrap();
        let grad = gradient(&w);
        set_grad(&w, &if turned { grad.tr().contiguous().tr() } else { grad });
        let before = support::live();
        let ((), peak) = memory::peak_of(Device::Cpu, || optimizer.step(&Update::plain()).unwrap()).unwrap();
        (peak - before) as i64
    };
    let lines = |bytes: i64| (bytes + 63) / 64 * 64;
    let lane = |r: i64, c: i64| lines(4 * r * c.min(32.max((1 << 18) / r / 16 * 16)));
    let gram = |r: i64| lines(4 * r * r);
    // Square: the Gram matrix alone. From 2r = c on the polynomial too.
    assert_eq!(scratch(&[150, 150], Kind::Float, false), 64 + gram(150) + lane(150, 150));
    assert_eq!(scratch(&[61, 90], Kind::Float, false), 64 + gram(61) + lane(61, 90));
    assert_eq!(scratch(&[90, 61], Kind::Float, false), 64 + gram(61) + lane(61, 90));
    assert_eq!(scratch(&[60, 120], Kind::Float, false), 64 + 2 * gram(60) + lane(60, 120));
    let sums = lines(8 * 34);
    assert_eq!(scratch(&[520, 1_040], Kind::Float, false), sums + 2 * gram(520) + lane(520, 1_040));
    // A gradient that cannot be used up is copied.
    let copy = lines(4 * 61 * 90);
    assert_eq!(scratch(&[61, 90], Kind::Float, true), 64 + copy + gram(61) + lane(61, 90));
    assert_eq!(scratch(&[61, 90], Kind::BFloat16, false), 64 + copy + gram(61) + lane(61, 90));
    let double = |bytes: i64| lines(2 * bytes);
    assert_eq!(scratch(&[60, 90], Kind::Double, false), 64 + double(4 * 60 * 60) + 2 * lane(60, 90));
    for shape in [[700, 700], [300, 2_000]] {
        let parameter = 4 * shape[0] * shape[1];
        assert!(scratch(&shape, Kind::Float, false) <= parameter + parameter / 2_048 + (1 << 20));
    }
}

/// A gradient of another holder's memory is not used up.
#[test]
fn a_gradient_is_used_up_only_where_its_memory_is_its_own() {
    let _guard = support::serial();
    let (w, other) = (leaf(&[6, 4], Kind::Float), leaf(&[6, 4], Kind::Float));
    tch::no_grad(|| other.shallow_clone().copy_(&w));
    let grad = gradient(&w);
    set_grad(&w, &grad);
    set_grad(&other, &grad);
    let held = other.grad().view([24]);
    one(&w, MuonConfig::default()).step(&Update::plain()).unwrap();
    one(&other, MuonConfig::default()).step(&Update::plain()).unwrap();
    assert!(!w.grad().equal(&grad));
    assert!(other.grad().equal(&grad) && held.equal(&grad.view([24])));
    assert!(w.detach().equal(&other.detach()));
}

#[test]
fn an_overflow_never_reaches_the_momentum() {
    let _guard = support::serial();
    for bad in [f64::INFINITY, f64::NAN, 3e38] {
        for at in 0..3 {
            let matrices = vec![leaf(&[6, 4], Kind::Float), leaf(&[5, 5], Kind::Float)];
            let others = vec![leaf(&[6], Kind::Float)];
            let all: Vec<Tensor> = matrices.iter().chain(&others).map(Tensor::shallow_clone).collect();
            let mut muon = Muon::new(&matrices, &others, MuonConfig::default()).unwrap();
            all.iter().for_each(|w| set_grad(w, &gradient(w)));
            muon.step(&Update::plain()).unwrap();
            let grads: Vec<Tensor> = all.iter().map(gradient).collect();
            let _ = grads[at].view([-1]).get(1).fill_(bad);
            all.iter().zip(&grads).for_each(|(w, grad)| set_grad(w, grad));
            let collected = |muon: &mut Muon| {
                let state = State::collect(|visitor| muon.visit_state(visitor)).unwrap();
                state.iter().map(|(name, value)| format!("{name} {}", text(value))).collect::<Vec<_>>()
            };
            let (weights, state) = (copies(&all), collected(&mut muon));
            // 3e38 is finite, ÷ 0.5 it is not.
            let update = Update { divisor: 0.5, ..Update::plain() };
            let refused = muon.step(&update);
            assert!(matches!(refused, Err(Error::NotFinite { .. })), "{refused:?}");
            assert!(same(&copies(&all), &weights));
            assert!(all.iter().zip(&grads).all(|(w, grad)| w.grad().allclose(grad, 0.0, 0.0, true)));
            assert_eq!(collected(&mut muon), state);

            // By itself, that parameter alone is refused.
            let place = [(0, 0), (0, 1), (1, 0)][at];
            assert!(matches!(muon.begin(&update), Err(Error::NotFinite { .. })));
            let refused = muon.step_parameter(place.0, place.1, &update);
            assert!(matches!(refused, Err(Error::NotFinite { .. })));
            assert_eq!(collected(&mut muon), state);
        }
    }
}

fn text(value: &Value) -> String {
    match value {
        Value::Tensor(tensor) => format!("{:?}", support::values(tensor)),
        other => format!("{other:?}"),
    }
}

/// Their squares overflow fp32; they do not.
#[test]
fn large_finite_gradients_are_no_overflow() {
    let _guard = support::serial();
    let (w, other) = (leaf(&[6, 4], Kind::Float), leaf(&[6, 4], Kind::Float));
    tch::no_grad(|| other.shallow_clone().copy_(&w));
    let grad = gradient(&w);
    set_grad(&w, &grad);
    set_grad(&other, &(&grad * 2f64.powi(100)));
    one(&w, MuonConfig::default()).step(&Update::plain()).unwrap();
    one(&other, MuonConfig::default()).step(&Update::plain()).unwrap();
    assert!(difference(&w.detach(), &other.detach()) < 1e-7);
}

/// Case 44.
#[test]
fn parameters_and_gradients_of_other_strides_move_alike() {
    let _guard = support::serial();
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half] {
        for shape in [&[30, 1_040][..], &[6, 5, 4]] {
            let value = leaf(shape, kind).detach();
            let turned = |t: &Tensor| t.transpose(-1, -2).contiguous().transpose(-1, -2);
            let grad = gradient(&value);
            let mut moved = Vec::new();
            for w in [value.copy(), turned(&value)] {
                for grad in [grad.copy(), turned(&grad)] {
                    let mut leaf = Tensor::empty_strided(w.size(), w.stride(), (kind, Device::Cpu));
                    leaf.copy_(&w);
                    let w = leaf.set_requires_grad(true);
                    let alias = w.detach();
                    set_grad(&w, &grad);
                    one(&w, MuonConfig::default()).step(&Update::plain()).unwrap();
                    assert!(alias.equal(&w.detach()));
                    moved.push(w.detach().contiguous());
                }
            }
            assert!(moved.iter().all(|w| w.equal(&moved[0])), "{kind:?} {shape:?}");
            assert!(!moved[0].equal(&value));
        }
    }
}

#[test]
fn half_precision_weights_are_the_fp32_update_rounded() {
    let _guard = support::serial();
    for kind in [Kind::BFloat16, Kind::Half] {
        let narrow = leaf(&[33, 40], kind);
        let wide = narrow.detach().to_kind(Kind::Float).set_requires_grad(true);
        let grad = gradient(&narrow);
        set_grad(&narrow, &grad);
        set_grad(&wide, &grad.to_kind(Kind::Float));
        one(&narrow, MuonConfig::default()).step(&Update::plain()).unwrap();
        one(&wide, MuonConfig::default()).step(&Update::plain()).unwrap();
        assert!(narrow.detach().equal(&wide.detach().to_kind(kind)));
    }
}

#[test]
fn a_divisor_divides_the_gradients_to_the_bit() {
    let _guard = support::serial();
    for divisor in [1024.0, 3.0] {
        for shape in SHAPES {
            let by_hand = leaf(shape, Kind::Float);
            let folded = by_hand.detach().copy().set_requires_grad(true);
            let grad = gradient(&by_hand);
            set_grad(&by_hand, &(&grad / divisor));
            set_grad(&folded, &grad);
            one(&by_hand, MuonConfig::default()).step(&Update::plain()).unwrap();
            one(&folded, MuonConfig::default()).step(&Update { divisor, ..Update::plain() }).unwrap();
            assert!(by_hand.detach().equal(&folded.detach()), "{shape:?} ÷ {divisor}");
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let _guard = support::serial();
    for shape in [&[150, 140][..], &[130, 2_100], &[300, 5_000]] {
        let value = leaf(shape, Kind::Float).detach();
        let grad = gradient(&value);
        let run = |threads: i32| {
            tch::set_num_threads(threads);
            let w = value.copy().set_requires_grad(true);
            set_grad(&w, &grad);
            one(&w, MuonConfig::default()).step(&Update::plain()).unwrap();
            tch::set_num_threads(1);
            w.detach()
        };
        assert!(run(1).equal(&run(2)), "{shape:?}");
    }
}

/// Case 45's rule.
#[test]
fn a_gradient_of_zeros_never_moves_a_weight() {
    let _guard = support::serial();
    for shape in SHAPES {
        let w = leaf(shape, Kind::Float);
        let before = w.detach().copy();
        let mut optimizer = one(&w, MuonConfig::default().weight_decay(0.0));
        set_grad(&w, &w.zeros_like().detach());
        for _ in 0..3 {
            optimizer.step(&Update::plain()).unwrap();
        }
        assert!(w.detach().equal(&before), "{shape:?}");
    }
}

/// Cases 47 and 49.
#[test]
fn frozen_and_absent_parameters_are_skipped() {
    let _guard = support::serial();
    let all: Vec<Tensor> = (0..3).map(|_| leaf(&[6, 4], Kind::Float)).collect();
    set_grad(&all[0], &gradient(&all[0]));
    // A stale gradient that is not finite does not stop the others.
    set_grad(&all[1], &(gradient(&all[1]) * f64::INFINITY));
    let _ = all[1].set_requires_grad(false);
    let before = copies(&all);
    let mut optimizer = Muon::new(&all, &nothing(), MuonConfig::default()).unwrap();
    optimizer.step(&Update::plain()).unwrap();
    assert!(!all[0].detach().equal(&before[0]));
    assert!(same(&copies(&all[1..]), &before[1..]));
    assert_eq!(optimizer.state_bytes(), 2 * 4 * 24);
}

#[test]
fn a_loaded_state_continues_to_the_bit() {
    let _guard = support::serial();
    for kind in [Kind::Float, Kind::BFloat16, Kind::Double] {
        let all = [leaf(&[6, 4], kind), leaf(&[3, 2, 2], kind), leaf(&[5], kind)];
        let named = |all: &[Tensor]| -> Vec<Named> {
            let names = ["a", "b", "c"].iter().zip(all);
            names.map(|(name, w)| Named::new(*name, w)).collect()
        };
        let build = |all: &[Tensor], lr: f64| {
            let named = named(all);
            Muon::new(&named[..2], &named[2..], MuonConfig::default().lr(lr)).unwrap()
        };
        let step = |muon: &mut Muon, all: &[Tensor], grads: &[Tensor]| {
            all.iter().zip(grads).for_each(|(w, grad)| set_grad(w, grad));
            muon.step(&Update::plain()).unwrap();
        };
        let grads: Vec<Tensor> = all.iter().map(gradient).collect();
        let mut muon = build(&all, 0.02);
        step(&mut muon, &all, &grads);
        let state = State::collect(|visitor| muon.visit_state(visitor)).unwrap();
        assert!(state.get("a.momentum_buffer").is_some() && state.get("c.exp_avg_sq").is_some());
        let other: Vec<Tensor> = copies(&all).into_iter().map(|w| w.set_requires_grad(true)).collect();
        let mut loaded = build(&other, 0.7);
        loaded.load(&state).unwrap();
        let grads: Vec<Tensor> = all.iter().map(gradient).collect();
        step(&mut muon, &all, &grads);
        step(&mut loaded, &other, &grads);
        assert!(same(&copies(&all), &copies(&other)));
    }
}

#[test]
fn no_allocation_can_fail_once_a_parameter_has_moved() {
    let _guard = support::serial();
    let turned = |t: Tensor| t.tr().contiguous().tr();
    let matrices = vec![leaf(&[150, 140], Kind::Float), leaf(&[60, 130], Kind::Float)];
    let others = vec![leaf(&[64, 64], Kind::Float), leaf(&[6], Kind::Float)];
    let all: Vec<Tensor> = matrices.iter().chain(&others).map(Tensor::shallow_clone).collect();
    all.iter().for_each(|w| set_grad(w, &if w.dim() > 1 { turned(gradient(w)) } else { gradient(w) }));
    let before = copies(&all);
    let mut muon = Muon::new(&matrices, &others, MuonConfig::default()).unwrap();
    let mut failures = 0;
    for nth in 1.. {
        let failure = memory::FailAt::nth(nth).unwrap();
        let stepped = muon.step(&Update::plain());
        drop(failure);
        let Err(error) = stepped else { break };
        failures += 1;
        assert!(error.is_out_of_memory(), "{error}");
        assert!(same(&copies(&all), &before));
    }
    assert!(failures > 3, "{failures}");
    assert!(copies(&all).iter().zip(&before).all(|(w, before)| !w.equal(before)));
}

/// Case 40.
#[test]
fn its_state_on_disk_changes_no_bit() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let all: Vec<Tensor> = SHAPES.iter().map(|shape| leaf(shape, Kind::Float)).collect();
    let other: Vec<Tensor> = copies(&all).into_iter().map(|w| w.set_requires_grad(true)).collect();
    let mut plain = Muon::new(&all, &nothing(), MuonConfig::default()).unwrap();
    let mut offloaded = CpuOffload::optimizer(Muon::new(&other, &nothing(), MuonConfig::default()).unwrap())
        .disk(folder.path())
        .unwrap();
    for _ in 0..3 {
        let grads: Vec<Tensor> = all.iter().map(gradient).collect();
        for (list, optimizer) in [(&all, &mut plain as &mut dyn Optimizer), (&other, &mut offloaded)] {
            list.iter().zip(&grads).for_each(|(w, grad)| set_grad(w, grad));
            optimizer.step(&Update::plain()).unwrap();
        }
    }
    assert!(same(&copies(&all), &copies(&other)));
    // An overflow in the last parameter stops the whole step there too.
    let before = copies(&other);
    other.iter().for_each(|w| set_grad(w, &gradient(w)));
    set_grad(&other[7], &(gradient(&other[7]) * f64::INFINITY));
    assert!(matches!(offloaded.step(&Update::plain()), Err(Error::NotFinite { .. })));
    assert!(same(&copies(&other), &before));
    assert_eq!(offloaded.get_ref().steps(), 3);
}

#[test]
fn a_step_bumps_versions_so_that_autograd_sees_it() {
    let _guard = support::serial();
    let w = leaf(&[6, 4], Kind::Float);
    set_grad(&w, &gradient(&w));
    let loss = w.square().sum(Kind::Float);
    one(&w, MuonConfig::default()).step(&Update::plain()).unwrap();
    assert!(loss.f_backward().is_err(), "backward used a weight that had moved");
}

#[test]
fn bad_settings_and_parameters_are_typed_errors() {
    let _guard = support::serial();
    let w = vec![leaf(&[6, 4], Kind::Float)];
    let config = MuonConfig::default();
    let bad = [
        config.lr(-1.0),
        config.weight_decay(f64::NAN),
        config.momentum(1.0, Momentum::Nesterov),
        config.iteration(0, config.coefficients),
        config.iteration(5, (f64::NAN, 0.0, 0.0)),
        config.epsilon(0.0),
        config.others(AdamWConfig::default().betas(1.0, 0.9)),
    ];
    assert!(bad.iter().all(|config| matches!(Muon::new(&w, &nothing(), *config), Err(Error::Config { .. }))));
    let vector = vec![leaf(&[4], Kind::Float)];
    assert!(matches!(Muon::new(&vector, &nothing(), config), Err(Error::Config { .. })));
    assert!(matches!(Muon::new(&w, &w, config), Err(Error::Config { .. })));
    assert_eq!(Muon::new(&nothing(), &vector, config).unwrap().name(), "Muon");
}

/// Case 46.
#[test]
fn stochastic_rounding_moves_a_weight_by_the_update_on_average() {
    let _guard = support::serial();
    let (start, grad) = (Tensor::ones([64, 64], CPU), Tensor::randn([64, 64], CPU).to_kind(Kind::BFloat16));
    let run = |kind: Kind, seed: u64| {
        let w = start.to_kind(kind).copy().set_requires_grad(true);
        set_grad(&w, &grad.to_kind(kind));
        let config = MuonConfig::default().others(AdamWConfig::default().stochastic_rounding(seed));
        one(&w, config).step(&Update::plain()).unwrap();
        w.detach()
    };
    let (narrow, wide) = (run(Kind::BFloat16, 3), run(Kind::Float, 3));
    let off = narrow.to_kind(Kind::Double) - wide.to_kind(Kind::Double);
    assert!(off.abs().max().double_value(&[]) < 2f64.powi(-7));
    // At most half of 2⁻⁷ each, over 4,096 elements: five standard deviations.
    assert!(off.mean(Kind::Double).double_value(&[]).abs() < 3.1e-4);
    assert!(run(Kind::BFloat16, 3).equal(&narrow) && !run(Kind::BFloat16, 4).equal(&narrow));
}

#[test]
fn the_others_may_keep_narrow_moments() {
    let _guard = support::serial();
    let adamw = AdamWConfig::default().lr(0.03).moments(Kind::BFloat16);
    let bias = leaf(&[6], Kind::Float);
    let alone = bias.detach().copy().set_requires_grad(true);
    let mut muon =
        Muon::new(&nothing(), &vec![bias.shallow_clone()], MuonConfig::default().others(adamw)).unwrap();
    // The random bits of its moments are those of its place.
    let mut plain = AdamW::new(&nothing(), adamw).unwrap();
    plain.add_group(vec![Named::new("b", &alone)], GroupOptions::default()).unwrap();
    for _ in 0..3 {
        let grad = gradient(&bias);
        for (w, optimizer) in [(&bias, &mut muon as &mut dyn Optimizer), (&alone, &mut plain)] {
            set_grad(w, &grad);
            optimizer.step(&Update::plain()).unwrap();
        }
    }
    assert_eq!(muon.state_bytes(), 4 * 6);
    assert!(bias.detach().equal(&alone.detach()));
}
