//! Lion, moments of their own dtype, stochastic rounding and 8-bit state against the loops that
//! the papers' formulas make, and against arithmetic.

mod support;

use memfit::Error;
use memfit::Update;
use memfit::optim::{
    Accumulates, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, Decay, Lion, LionConfig, Optimizer, Sgd,
    SgdConfig,
};
use memfit::state::{Named, State, Value};
use memfit::tch::{Device, Kind, Tensor};
use support::{difference, serial, set_grad, values};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

fn leaf(values: &Tensor, kind: Kind) -> Tensor {
    values.copy().to_kind(kind).set_requires_grad(true)
}

/// Twenty gradients that change slowly, as in training, with sizes over several decades.
fn gradients(count: i64) -> Vec<Tensor> {
    let sizes = (Tensor::rand([count], CPU) * -3.0 * 10f64.ln()).exp();
    let slope = Tensor::randn([count], CPU);
    (0..20).map(|_| (&slope + Tensor::randn([count], CPU)) * &sizes).collect()
}

/// The formulas of the AdamW paper in fp64.
fn adamw_by_hand(w: &Tensor, gradients: &[Tensor], lr: f64, decay: f64) -> Tensor {
    let mut w = w.to_kind(Kind::Double);
    let (mut m, mut v) = (w.zeros_like(), w.zeros_like());
    for (index, g) in gradients.iter().enumerate() {
        let g = g.to_kind(Kind::Double);
        let step = index as i32 + 1;
        m = m * 0.9 + &g * 0.1;
        v = v * 0.999 + g.square() * 0.001;
        let (first, second) = (&m / (1.0 - 0.9f64.powi(step)), &v / (1.0 - 0.999f64.powi(step)));
        w = &w * (1.0 - lr * decay) - first / (second.sqrt() + 1e-8) * lr;
    }
    w
}

fn run(optimizer: &mut dyn Optimizer, w: &Tensor, gradients: &[Tensor]) {
    for g in gradients {
        set_grad(w, &g.to_kind(w.kind()));
        optimizer.step(&Update::plain()).unwrap();
    }
}

#[test]
fn lion_follows_the_papers_loop() {
    let _guard = serial();
    for (kind, bound) in [(Kind::Double, 1e-12), (Kind::Float, 1e-5)] {
        let start = Tensor::randn([3000], CPU);
        let gradients = gradients(3000);
        let w = leaf(&start, kind);
        let config = LionConfig::default().lr(0.01).weight_decay(0.1);
        let mut optimizer = Lion::new(&vec![w.shallow_clone()], config).unwrap();
        run(&mut optimizer, &w, &gradients);
        let mut wanted = start.to_kind(Kind::Double);
        let mut m = wanted.zeros_like();
        for g in &gradients {
            let g = g.to_kind(Kind::Double);
            wanted = &wanted - ((&m * 0.9 + &g * 0.1).sign() + &wanted * 0.1) * 0.01;
            m = &m * 0.99 + &g * 0.01;
        }
        // A sign of a sum that rounds to zero may differ where the sum is tiny: none does here.
        let off = difference(&w.detach(), &wanted);
        assert!(off < bound, "{kind:?}: {off}");
        assert_eq!(optimizer.steps(), 20);
    }
}

#[test]
fn lion_leaves_an_element_without_gradient_and_shows_a_nan() {
    let _guard = serial();
    let w = leaf(&Tensor::from_slice(&[1f32, 1.0, 1.0]), Kind::Float);
    let config = LionConfig::default().lr(0.25).weight_decay(0.0);
    let mut optimizer = Lion::new(&vec![w.shallow_clone()], config).unwrap();
    set_grad(&w, &Tensor::from_slice(&[0f32, -1e-30, f32::NAN]));
    optimizer.step(&Update::plain()).unwrap();
    let found = values(&w);
    assert_eq!(&found[..2], [1.0, 1.25]);
    assert!(found[2].is_nan(), "a lost weight is not hidden");
}

#[test]
fn fp32_moments_make_of_bf16_weights_what_the_loop_makes() {
    let _guard = serial();
    let start = Tensor::randn([3000], CPU).to_kind(Kind::BFloat16);
    let w = leaf(&start, Kind::BFloat16);
    let config = AdamWConfig::default().lr(0.1).moments(Kind::Float);
    let mut optimizer = AdamW::new(&vec![w.shallow_clone()], config).unwrap();
    let gradients: Vec<Tensor> = gradients(3000).iter().map(|g| g.to_kind(Kind::BFloat16)).collect();
    // One step: the loop's result, rounded to nearest.
    run(&mut optimizer, &w, &gradients[..1]);
    let wanted = adamw_by_hand(&start, &gradients[..1], 0.1, 0.01);
    let found = w.detach().to_kind(Kind::Double);
    // Half a unit in the last of 8 bits, and what fp32 rounds.
    let bound: Tensor = wanted.abs() * (2f64.powi(-8) + 1e-6) + 1e-6;
    let excess = ((found - wanted).abs() - bound).max().double_value(&[]);
    assert!(excess <= 0.0, "{excess}");
    let moments = optimizer.state_of(0, 0).iter().map(|state| state.kind()).collect::<Vec<_>>();
    assert_eq!(moments, [Kind::Float, Kind::Float]);
    // Many steps: the second moment is the loop's, though the weights are rounded.
    run(&mut optimizer, &w, &gradients[1..]);
    let mut v = start.to_kind(Kind::Double).zeros_like();
    for g in &gradients {
        v = v * 0.999 + g.to_kind(Kind::Double).square() * 0.001;
    }
    let found = optimizer.state_of(0, 0)[1].to_kind(Kind::Double);
    assert!(((found - &v).abs() / v).max().double_value(&[]) < 1e-5);
}

/// Rounded to nearest, 0.999·v is v again in bf16, and the moment would never fall.
#[test]
fn bf16_second_moments_decay_as_fp32_ones_do_on_average() {
    let _guard = serial();
    let count = 20_000;
    let w = leaf(&Tensor::zeros([count], CPU), Kind::Float);
    let config = AdamWConfig::default().moments(Kind::BFloat16);
    let mut optimizer = AdamW::new(&vec![w.shallow_clone()], config).unwrap();
    set_grad(&w, &Tensor::full([count], 32.0, CPU));
    optimizer.step(&Update::plain()).unwrap();
    set_grad(&w, &Tensor::zeros([count], CPU));
    for _ in 0..400 {
        optimizer.step(&Update::plain()).unwrap();
    }
    let wanted = 1024.0 * 0.001 * 0.999f64.powi(400);
    let state = optimizer.state_of(0, 0);
    assert_eq!(state[1].kind(), Kind::BFloat16);
    // Each step rounds by at most 2⁻⁷ of the value: 400 of them spread an element by at most
    // √400·2⁻⁷/2 = 8 %, the mean of 20,000 by 0.06 %; five of those.
    let mean = state[1].to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
    assert!((mean / wanted - 1.0).abs() < 0.003, "{mean} {wanted}");
}

/// Case 46, for each optimizer that has it, and each dtype.
#[test]
fn stochastic_rounding_moves_weights_by_the_update_on_average() {
    let _guard = serial();
    type Make = fn(&Tensor) -> Box<dyn Optimizer>;
    let trials = 40_000;
    let makes: [(&str, Make); 3] = [
        ("AdamW", |w| {
            let config = AdamWConfig::default().lr(1.0 / 1024.0).weight_decay(0.0).stochastic_rounding(9);
            Box::new(AdamW::new(&vec![w.shallow_clone()], config).unwrap())
        }),
        ("Lion", |w| {
            let config = LionConfig::default().lr(1.0 / 1024.0).weight_decay(0.0).stochastic_rounding(9);
            Box::new(Lion::new(&vec![w.shallow_clone()], config).unwrap())
        }),
        ("8-bit", |w| {
            let config = AdamW8bitConfig::default().lr(1.0 / 1024.0).weight_decay(0.0).stochastic_rounding(9);
            Box::new(AdamW8bit::new(&vec![w.shallow_clone()], config).unwrap())
        }),
    ];
    for (name, make) in makes {
        let moved = |trials: i64, kind, update: f64| {
            let w = leaf(&Tensor::ones([trials], CPU), kind);
            let mut optimizer = make(&w);
            optimizer.groups_mut()[0].lr = update;
            set_grad(&w, &Tensor::full([trials], -1.0, (kind, Device::Cpu)));
            optimizer.step(&Update::plain()).unwrap();
            let moved = w.detach().to_kind(Kind::Double) - 1.0;
            let above = moved.gt(0.0).to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
            (moved.mean(Kind::Double).double_value(&[]), moved.max().double_value(&[]), above)
        };
        // The next bf16 above 1 is 1 + 2⁻⁷: an eighth of the elements goes there.
        let (mean, largest, share) = moved(trials, Kind::BFloat16, 2f64.powi(-10));
        assert_eq!(largest, 2f64.powi(-7), "{name}");
        let deviation = (0.125 * 0.875 / trials as f64).sqrt();
        assert!((share - 0.125).abs() < 4.0 * deviation, "{name}: {share}");
        assert!((mean - 2f64.powi(-10)).abs() < 4.0 * deviation * 2f64.powi(-7), "{name}: {mean}");
        let (mean, ..) = moved(1000, Kind::BFloat16, 2f64.powi(-10));
        assert!(
            (mean - 2f64.powi(-10)).abs() < 4.0 * (0.125f64 * 0.875 / 1e3).sqrt() / 128.0,
            "{name}: {mean}"
        );
        // The next half above 1 is 1 + 2⁻¹⁰.
        let (_, largest, share) = moved(trials, Kind::Half, 2f64.powi(-13));
        assert_eq!(largest, 2f64.powi(-10), "{name}");
        assert!((share - 0.125).abs() < 4.0 * deviation, "{name}: {share}");
        // To nearest nothing would move; fp32 is not rounded.
        let (mean, ..) = moved(3, Kind::Float, 2f64.powi(-10));
        assert!((mean - 2f64.powi(-10)).abs() < 1e-7, "{name}");
    }
}

#[test]
fn random_bits_differ_by_seed_step_parameter_and_element_and_repeat() {
    let _guard = serial();
    let count = 4096;
    let step = |seed: u64, parameters: usize, steps: usize| {
        let all: Vec<Tensor> =
            (0..parameters).map(|_| leaf(&Tensor::ones([count], CPU), Kind::BFloat16)).collect();
        let config = LionConfig::default().lr(1.0 / 256.0).weight_decay(0.0).stochastic_rounding(seed);
        let mut optimizer = Lion::new(&all, config).unwrap();
        for w in &all {
            set_grad(w, &Tensor::full([count], -1.0, (Kind::BFloat16, Device::Cpu)));
        }
        for _ in 0..steps {
            for w in &all {
                let _ = memfit::tch::no_grad(|| w.shallow_clone().fill_(1.0));
            }
            optimizer.step(&Update::plain()).unwrap();
        }
        // Up or not: half of the elements is.
        all.iter().map(|w| w.detach().gt(1.0).to_kind(Kind::Double)).collect::<Vec<_>>()
    };
    let base = step(1, 2, 1);
    assert_eq!(base, step(1, 2, 1));
    let others =
        [&base[1], &step(2, 1, 1)[0], &step(1, 1, 2)[0], &base[0].roll([1], [0]), &base[0].roll([16], [0])];
    // Independent halves agree in half of the places, ± 4 × √(0.25/4096).
    for other in others {
        let agree = base[0].eq_tensor(other).to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
        assert!((agree - 0.5).abs() < 4.0 * (0.25f64 / 4096.0).sqrt(), "{agree}");
    }
}

#[test]
fn what_is_exact_and_what_is_not_finite_is_not_rounded() {
    let _guard = serial();
    for kind in [Kind::BFloat16, Kind::Half] {
        let large = if kind == Kind::Half { 65504.0 } else { 2f32.powi(127) };
        let tiny = if kind == Kind::Half { 2f32.powi(-24) } else { 2f32.powi(-126) };
        let start = [0.0, 1.0, -1.5, large, -large, tiny, -3.0 * tiny, f32::INFINITY, f32::NAN];
        let w = leaf(&Tensor::from_slice(&start).repeat([100]), kind);
        let before = w.detach().copy();
        let config = LionConfig::default().lr(0.0).stochastic_rounding(5);
        let mut optimizer = Lion::new(&vec![w.shallow_clone()], config).unwrap();
        set_grad(&w, &Tensor::ones([900], (kind, Device::Cpu)));
        optimizer.step(&Update::plain()).unwrap();
        assert_eq!(w.detach().nan_to_num(7.0, 8.0, 9.0), before.nan_to_num(7.0, 8.0, 9.0), "{kind:?}");
    }
}

/// Every half, and every bf16, through the conversions of the shim: libtorch's own are right.
#[test]
fn elements_become_numbers_and_elements_again_as_libtorch_converts() {
    let _guard = serial();
    for kind in [Kind::Half, Kind::BFloat16] {
        let bits = Tensor::arange(1 << 16, (Kind::Int, Device::Cpu)).to_kind(Kind::Int16);
        let all = bits.view_dtype(kind);
        let w = leaf(&all, kind);
        // Halfway to the next, just beside it, and elsewhere: what to-nearest must decide.
        for part in [0.5, 0.499, 0.501, 0.25] {
            memfit::tch::no_grad(|| w.shallow_clone().copy_(&all));
            let finite = all.to_kind(Kind::Float);
            // Lion's decay computes w·(1 − lr·decay) in fp32.
            let shrink = part * 2f64.powi(if kind == Kind::Half { -10 } else { -7 });
            let config = LionConfig::default().lr(shrink).weight_decay(1.0).moments(Kind::Float);
            let mut optimizer = Lion::new(&vec![w.shallow_clone()], config).unwrap();
            set_grad(&w, &Tensor::zeros([1 << 16], (kind, Device::Cpu)));
            optimizer.step(&Update::plain()).unwrap();
            let by_hand = (&finite * (1.0 - shrink)).to_kind(kind);
            let same =
                w.detach().eq_tensor(&by_hand).logical_or(&by_hand.isnan().logical_and(&w.detach().isnan()));
            assert_eq!(same.all().int64_value(&[]), 1, "{kind:?} {part}");
        }
    }
}

/// Case 45.
#[test]
fn a_gradient_of_zero_leaves_the_weight_as_it_is() {
    let _guard = serial();
    let count = 5000;
    let w = leaf(&Tensor::randn([count], CPU), Kind::Float);
    let before = w.detach().copy();
    let config = AdamW8bitConfig::default().lr(0.1).weight_decay(0.0);
    let mut optimizer = AdamW8bit::new(&vec![w.shallow_clone()], config).unwrap();
    // All zero, for ever; then zero for every second element only, in blocks that move.
    set_grad(&w, &Tensor::zeros([count], CPU));
    (0..50).for_each(|_| optimizer.step(&Update::plain()).unwrap());
    assert_eq!(w.detach(), before);
    let odd = Tensor::arange(count, CPU).remainder(2.0);
    for _ in 0..50 {
        set_grad(&w, &(Tensor::randn([count], CPU) * &odd));
        optimizer.step(&Update::plain()).unwrap();
    }
    let moved = (w.detach() - before).ne(0.0).to_kind(Kind::Float);
    assert_eq!(moved, odd);
}

/// Case 45.
#[test]
fn tensors_under_4096_elements_keep_fp32_state_and_move_as_adamw_does() {
    let _guard = serial();
    let start = Tensor::randn([4095], CPU);
    let gradients = gradients(4095);
    let (a, b) = (leaf(&start, Kind::Float), leaf(&start, Kind::Float));
    let mut eight = AdamW8bit::new(&vec![a.shallow_clone()], AdamW8bitConfig::default().lr(0.1)).unwrap();
    let mut plain = AdamW::new(&vec![b.shallow_clone()], AdamWConfig::default().lr(0.1)).unwrap();
    run(&mut eight, &a, &gradients);
    run(&mut plain, &b, &gradients);
    assert_eq!(a.detach(), b.detach());
    assert_eq!(eight.state_bytes(), 8 * 4095);
    let large = leaf(&Tensor::zeros([4096], CPU), Kind::Float);
    let mut eight = AdamW8bit::new(&vec![large], AdamW8bitConfig::default()).unwrap();
    eight.allocate().unwrap();
    assert_eq!(eight.state_bytes(), 2 * (4096 + 4 * 16));
}

#[test]
fn an_8_bit_step_is_adamws_from_moments_a_code_away() {
    let _guard = serial();
    let count = 10_000;
    let start = Tensor::randn([count], CPU);
    let gradients = gradients(count);
    let w = leaf(&start, Kind::Float);
    let config = AdamW8bitConfig::default().lr(0.01);
    let mut optimizer = AdamW8bit::new(&vec![w.shallow_clone()], config).unwrap();
    // The first step starts from moments that are exactly zero: it is AdamW's.
    run(&mut optimizer, &w, &gradients[..1]);
    let wanted = adamw_by_hand(&start, &gradients[..1], 0.01, 0.01);
    let off = difference(&w.detach(), &wanted);
    assert!(off < 1e-6, "{off}");
    // Later ones: weights have gone nearly as far in nearly the same direction.
    run(&mut optimizer, &w, &gradients[1..]);
    let wanted = adamw_by_hand(&start, &gradients, 0.01, 0.01) - &start;
    let found = w.detach() - &start;
    let cosine = (&found * &wanted).sum(Kind::Double) / (found.norm() * wanted.norm());
    assert!(cosine.double_value(&[]) > 0.99, "{}", cosine.double_value(&[]));
    let largest = found.abs().max().double_value(&[]);
    assert!(largest < 1.5 * 20.0 * 0.01, "no step explodes: {largest}");
}

/// Case 43.
#[test]
fn a_moment_of_1_001_is_still_fp32_after_a_load() {
    let _guard = serial();
    let w = leaf(&Tensor::ones([2], CPU), Kind::BFloat16);
    let config = AdamWConfig::default().moments(Kind::Float);
    let make = || AdamW::new(&vec![Named::new("w", &w)], config).unwrap();
    let mut optimizer = make();
    optimizer.allocate().unwrap();
    let _ = optimizer.state_of(0, 0)[0].fill_(1.001);
    let state = State::collect(|visitor| optimizer.visit_state(visitor)).unwrap();
    let mut other = make();
    other.load(&state).unwrap();
    let moment = other.state_of(0, 0)[0].copy();
    assert_eq!(moment, Tensor::full([2], 1.001, CPU));
    assert_eq!(moment.kind(), Kind::Float);
}

/// Case 43.
#[test]
fn codes_and_scales_come_back_bit_equal_and_another_block_size_is_refused() {
    let _guard = serial();
    let w = leaf(&Tensor::randn([70, 70], CPU), Kind::Float);
    let make = || AdamW8bit::new(&vec![Named::new("w", &w)], AdamW8bitConfig::default()).unwrap();
    let mut optimizer = make();
    let gradient = Tensor::randn([70, 70], CPU);
    run(&mut optimizer, &w, &[gradient]);
    let mut state = State::collect(|visitor| optimizer.visit_state(visitor)).unwrap();
    let mut other = make();
    other.load(&state).unwrap();
    let names = ["exp_avg.codes", "exp_avg.scales", "exp_avg_sq.codes", "exp_avg_sq.scales"];
    for (name, loaded) in names.iter().zip(other.state_of(0, 0)) {
        let Some(Value::Tensor(saved)) = state.get(&format!("w.{name}")) else { panic!("no {name}") };
        assert_eq!(&*loaded, saved, "{name}");
        let kind = if name.ends_with("codes") { Kind::Uint8 } else { Kind::Float };
        assert_eq!(saved.kind(), kind);
    }
    state.insert("quantised.block", Value::Text("128".to_owned()));
    let Err(Error::State { problems }) = other.load(&state) else { panic!("128 was taken for 256") };
    assert!(problems[0].contains("128") && problems[0].contains("256"), "{problems:?}");
}

#[test]
fn a_gradient_that_is_not_finite_costs_8_bit_state_its_block_and_no_other() {
    let _guard = serial();
    let w = leaf(&Tensor::ones([5000], CPU), Kind::Float);
    let mut optimizer = AdamW8bit::new(&vec![w.shallow_clone()], AdamW8bitConfig::default()).unwrap();
    let gradient = Tensor::ones([5000], CPU);
    let _ = gradient.get(300).fill_(f64::INFINITY);
    run(&mut optimizer, &w, &[gradient, Tensor::ones([5000], CPU)]);
    let lost = w.detach().isnan();
    assert_eq!(lost.narrow(0, 256, 256).all().int64_value(&[]), 1);
    assert_eq!(lost.sum(Kind::Int64).int64_value(&[]), 256);
}

#[test]
fn settings_that_cannot_work_are_typed_errors() {
    let _guard = serial();
    let w = vec![leaf(&Tensor::ones([2], CPU), Kind::Float)];
    let refused = |result: Option<Error>| matches!(result, Some(Error::Config { .. }));
    for config in [
        LionConfig::default().lr(-1.0),
        LionConfig::default().betas(1.0, 0.9),
        LionConfig::default().moments(Kind::Half),
    ] {
        assert!(refused(Lion::new(&w, config).err()), "{config:?}");
    }
    assert!(refused(AdamW::new(&w, AdamWConfig::default().moments(Kind::Int64)).err()));
    for config in [AdamW8bitConfig::default().epsilon(0.0), AdamW8bitConfig::default().epsilon(1e-60)] {
        assert!(refused(AdamW8bit::new(&w, config).err()), "{config:?}");
    }
    let wide = vec![leaf(&Tensor::ones([2], CPU), Kind::Double)];
    assert!(refused(AdamW8bit::new(&wide, AdamW8bitConfig::default()).err()));
}

/// Case 49.
#[test]
fn a_layer_that_comes_later_is_added_as_a_group_and_a_thawed_one_gets_state() {
    let _guard = serial();
    let (a, b) =
        (leaf(&Tensor::ones([5000], CPU), Kind::Float), leaf(&Tensor::ones([5000], CPU), Kind::Float));
    let frozen = leaf(&Tensor::ones([5000], CPU), Kind::Float);
    set_grad(&frozen, &Tensor::ones([5000], CPU));
    let _ = frozen.set_requires_grad(false);
    let first = vec![Named::new("a", &a), Named::new("frozen", &frozen)];
    let mut optimizer = AdamW8bit::new(&first, AdamW8bitConfig::default().lr(0.1)).unwrap();
    optimizer.allocate().unwrap();
    let each = 2 * (5000 + 4 * 20);
    assert_eq!(optimizer.state_bytes(), each);
    optimizer.add_group(vec![Named::new("b", &b)], Default::default()).unwrap();
    assert_eq!(optimizer.state_bytes(), 2 * each);
    for w in [&a, &b] {
        set_grad(w, &Tensor::ones([5000], CPU));
    }
    optimizer.step(&Update::plain()).unwrap();
    assert_eq!(a.detach(), b.detach());
    assert_eq!(frozen.double_value(&[0]), 1.0);
    let _ = frozen.set_requires_grad(true);
    optimizer.step(&Update::plain()).unwrap();
    assert_eq!(optimizer.state_bytes(), 3 * each);
    assert!(frozen.double_value(&[0]) < 1.0);
}

#[test]
fn sgd_with_decoupled_decay_follows_its_loop() {
    let _guard = serial();
    let base = SgdConfig::default().lr(0.01).weight_decay(0.3).decay(Decay::Decoupled);
    for config in [base, base.momentum(0.9).dampening(0.1), base.nesterov(0.8)] {
        for (kind, bound) in [(Kind::Double, 1e-12), (Kind::Float, 1e-5)] {
            let start = Tensor::randn([3000], CPU);
            let gradients = gradients(3000);
            let w = leaf(&start, kind);
            let mut optimizer = Sgd::new(&vec![w.shallow_clone()], config).unwrap();
            run(&mut optimizer, &w, &gradients);
            let mut wanted = start.to_kind(Kind::Double);
            let mut v = wanted.zeros_like();
            for (index, g) in gradients.iter().enumerate() {
                let g = g.to_kind(Kind::Double);
                v = if index == 0 { g.copy() } else { &v * config.momentum + &g * (1.0 - config.dampening) };
                let step = if config == base.nesterov(0.8) { &g + &v * 0.8 } else { v.copy() };
                wanted = &wanted * (1.0 - 0.01 * 0.3) - step * 0.01;
            }
            assert!(difference(&w.detach(), &wanted) < bound, "{config:?} {kind:?}");
        }
    }
}

#[test]
fn sgd_without_decay_is_the_same_to_the_bit_however_it_would_act() {
    let _guard = serial();
    let base = SgdConfig::default().lr(0.01);
    for config in [base, base.momentum(0.9).dampening(0.1), base.nesterov(0.8)] {
        for kind in [Kind::Double, Kind::Float] {
            let (start, gradients) = (Tensor::randn([3000], CPU), gradients(3000));
            let (a, b) = (leaf(&start, kind), leaf(&start, kind));
            run(&mut Sgd::new(&vec![a.shallow_clone()], config).unwrap(), &a, &gradients);
            let decoupled = config.decay(Decay::Decoupled);
            run(&mut Sgd::new(&vec![b.shallow_clone()], decoupled).unwrap(), &b, &gradients);
            assert!(a.detach().equal(&b.detach()), "{config:?} {kind:?}");
        }
    }
}

/// Case 46.
#[test]
fn sgd_rounded_at_random_moves_a_weight_by_updates_below_its_last_bit() {
    let _guard = serial();
    for kind in [Kind::BFloat16, Kind::Half] {
        let run = |config: SgdConfig| {
            let w = leaf(&Tensor::ones([4096], CPU), kind);
            let mut optimizer = Sgd::new(&vec![w.shallow_clone()], config.lr(2f64.powi(-14))).unwrap();
            // 64 steps of 2⁻¹⁴ are 2⁻⁸ together.
            for _ in 0..64 {
                set_grad(&w, &Tensor::ones([4096], CPU).to_kind(kind));
                optimizer.step(&Update::plain()).unwrap();
            }
            w.detach()
        };
        let config = SgdConfig::default();
        assert!(run(config).equal(&Tensor::ones([4096], CPU).to_kind(kind)), "to nearest it stalls");
        let moved = run(config.stochastic_rounding(5));
        let mean = 1.0 - moved.to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
        // A step of 2⁻⁸ or less is taken with a variance of at most 2⁻⁸ · 2⁻¹⁴: over 64 steps and
        // 4,096 weights five standard deviations are 5 · 2⁻⁸ · 2⁻⁶.
        assert!((mean - 2f64.powi(-8)).abs() < 5.0 * 2f64.powi(-14), "{kind:?}: {mean}");
        assert!(moved.equal(&run(config.stochastic_rounding(5))));
        assert!(!moved.equal(&run(config.stochastic_rounding(6))));
    }
}

#[test]
fn a_momentum_with_rounding_or_decay_of_its_own_takes_no_gradients_within_a_window() {
    let _guard = serial();
    let accumulates = |config: SgdConfig| {
        let w = leaf(&Tensor::ones([4], CPU), Kind::Float);
        Sgd::new(&vec![w], config.momentum(0.9)).unwrap().accumulates()
    };
    let config = SgdConfig::default();
    assert_eq!(accumulates(config), Accumulates::InState);
    assert_eq!(accumulates(config.decay(Decay::Decoupled)), Accumulates::Nowhere);
    assert_eq!(accumulates(config.stochastic_rounding(1)), Accumulates::Nowhere);
}
