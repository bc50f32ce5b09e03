//! The driver: evaluation, state, groups, refusals, its report.

mod support;

use memfit::checkpoint::{Checkpointer, RecomputeAll};
use memfit::optim::{AdamW, AdamWConfig, GroupOptions, Optimizer, Sgd, SgdConfig};
use memfit::strategies::{AmpScaler, Budget, Cosine, GradAccumulator, GradClip, MasterWeights, Rollback};
use memfit::tch::{Device, Kind, Tensor, nn, nn::Module};
use memfit::{Error, Loss, Named, Result, Stack, StepOutcome, Strategy};
use support::{copies, same, serial, sgd, slope, values, vector};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Case 17.
#[test]
fn evaluation_has_no_window_and_no_graph() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let mut training =
        Stack::of(&vs, sgd(&vs)).with(GradAccumulator::every(4)).with(AmpScaler::bf16()).build().unwrap();
    let _ = training.step_with(|| Ok(Loss::mean(slope(&w, &[1.0]), 1))).unwrap();
    let x = Tensor::ones([2, 2], CPU);
    let (loss, product) = training.evaluate(|| Ok((slope(&w, &[1.0]) + 8.0, x.matmul(&x)))).unwrap();
    assert_eq!(loss.double_value(&[]), 8.0);
    assert!(!loss.requires_grad());
    assert_eq!(product.kind(), Kind::BFloat16);
    assert!(slope(&w, &[1.0]).requires_grad());
    let failed: Result<()> = training.evaluate(|| panic!("in evaluation"));
    assert!(matches!(failed, Err(Error::Panic { .. })));
    assert!(slope(&w, &[1.0]).requires_grad());
    assert_eq!(x.matmul(&x).kind(), Kind::Float);
}

/// Case 21.
#[test]
fn losses_that_are_kept_hold_no_graph() {
    let _guard = serial();
    let (vs, w) = vector(1000);
    let mut training = Stack::of(&vs, sgd(&vs)).build().unwrap();
    let mut losses = Vec::new();
    let mut live = Vec::new();
    for _ in 0..100 {
        let outcome = training.step_with(|| Ok(Loss::of((&w * 2.0).square().sum(Kind::Float)))).unwrap();
        let StepOutcome::Stepped { loss, .. } = outcome else { panic!("{outcome:?}") };
        assert!(!loss.requires_grad());
        losses.push(loss);
        live.push(memfit::memory::stats(Device::Cpu).unwrap().current);
    }
    // One scalar more per step and nothing else.
    let steps: Vec<u64> = live.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(steps[1..].iter().all(|bytes| *bytes == steps[1] && *bytes <= 64), "{steps:?}");
}

#[test]
fn a_group_can_be_added_and_unfrozen_mid_run() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let a = vs.root().zeros("a", &[1]);
    let b = vs.root().zeros("b", &[1]).set_requires_grad(false);
    let optimizer = AdamW::new(&vs, AdamWConfig::default().lr(0.1).weight_decay(0.0)).unwrap();
    let mut training = Stack::of(&vs, optimizer).build().unwrap();
    let c = Tensor::zeros([1], CPU).set_requires_grad(true);
    let loss = || Ok(Loss::of((&a + &b + &c).sum(Kind::Float)));
    let _ = training.step_with(loss).unwrap();
    assert_eq!(values(&b), [0.0]);
    let _ = b.set_requires_grad(true);
    training.add_group(vec![Named::new("c", &c)], GroupOptions::default().lr(0.5)).unwrap();
    assert!(training.add_group(vec![Named::new("again", &c)], GroupOptions::default()).is_err());
    let outcome = training.step_with(loss).unwrap();
    let StepOutcome::Stepped { lr, .. } = outcome else { panic!("{outcome:?}") };
    assert_eq!(lr, [0.1, 0.5]);
    // AdamW's first step on a constant gradient moves by the rate.
    assert!((values(&b)[0] + 0.1).abs() < 1e-6);
    assert!((values(&c)[0] + 0.5).abs() < 1e-6);
}

/// Case 42.
#[test]
fn a_tied_parameter_moves_once() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let none: [Tensor; 0] = [];
    let twice = vec![Named::new("in", &w), Named::new("out", &w)];
    let mut training =
        Stack::tensors(&twice, &none[..], Sgd::new(&twice, SgdConfig::default().lr(1.0)).unwrap())
            .build()
            .unwrap();
    assert_eq!(training.parameters().len(), 1);
    let _ = training.step_with(|| Ok(Loss::of(slope(&w, &[1.0]) + slope(&w, &[2.0])))).unwrap();
    assert_eq!(values(&w), [-3.0]);
    drop(vs);
}

#[test]
fn the_state_continues_to_the_bit_and_refuses_what_does_not_fit() {
    let _guard = serial();
    let build = |vs: &nn::VarStore| {
        let optimizer = AdamW::new(vs, AdamWConfig::default().lr(0.01)).unwrap();
        Stack::of(vs, optimizer)
            .with(Cosine::new(20).warm_up(4))
            .with(AmpScaler::fp16())
            .with(GradAccumulator::every(2))
            .build()
            .unwrap()
    };
    let data: Vec<Tensor> = (0..20).map(|_| Tensor::randn([4, 3], CPU)).collect();
    let train = |training: &mut Stack, model: &nn::Linear, data: &[Tensor]| {
        for x in data {
            let loss = || Ok(Loss::mean(model.forward(x).to_kind(Kind::Float).square().mean(Kind::Float), 4));
            let _ = training.step_with(loss).unwrap();
        }
    };
    let vs = nn::VarStore::new(Device::Cpu);
    let model = nn::linear(vs.root(), 3, 2, Default::default());
    let mut training = build(&vs);
    train(&mut training, &model, &data[..10]);
    let (state, position) = (training.state().unwrap(), training.position());
    train(&mut training, &model, &data[10..]);

    let other_vs = nn::VarStore::new(Device::Cpu);
    let other_model = nn::linear(other_vs.root(), 3, 2, Default::default());
    let mut other = build(&other_vs);
    other.load_state(&state).unwrap();
    assert_eq!(other.position(), position);
    assert!(position.steps > 0 && position.windows == 5);
    train(&mut other, &other_model, &data[10..]);
    assert!(same(&vs.trainable_variables(), &other_vs.trainable_variables()));

    let wide_vs = nn::VarStore::new(Device::Cpu);
    let _wide = nn::linear(wide_vs.root(), 4, 2, Default::default());
    let _extra = wide_vs.root().zeros("extra", &[1]);
    let mut wide = build(&wide_vs);
    let before = copies(&wide_vs.trainable_variables());
    let Err(Error::State { problems }) = wide.load_state(&state) else { panic!("loaded") };
    assert!(
        problems.iter().any(|p| p.contains("`parameters.weight` has shape [2, 3], wanted [2, 4]")),
        "{problems:?}"
    );
    assert!(problems.iter().any(|p| p.contains("`parameters.extra` is missing")));
    assert!(same(&before, &wide_vs.trainable_variables()));
}

mod refusals {
    use super::*;

    #[test]
    fn two_strategies_at_one_place_are_refused_by_name() {
        let _guard = serial();
        let (vs, _w) = vector(1);
        let error = Stack::of(&vs, sgd(&vs))
            .with(GradClip::norm(1.0))
            .with(GradClip::value(1.0))
            .build()
            .unwrap_err();
        let text = error.to_string();
        assert!(text.contains("GradClip::norm(1)") && text.contains("GradClip::value(1)"), "{text}");
        for build in [
            Stack::of(&vs, sgd(&vs)).with(AmpScaler::bf16()).with(AmpScaler::fp16()).build(),
            Stack::of(&vs, sgd(&vs)).with(GradAccumulator::every(2)).with(GradAccumulator::tokens(2)).build(),
            Stack::of(&vs, sgd(&vs))
                .with(MasterWeights::fp32())
                .with(GradAccumulator::every(2).fp32())
                .build(),
            Stack::of(&vs, sgd(&vs)).with(MasterWeights::fp32()).with(Rollback::micro_batch()).build(),
            Stack::of(&vs, sgd(&vs))
                .with(Rollback::micro_batch())
                .with(GradAccumulator::every(2).fp32())
                .build(),
        ] {
            assert!(matches!(build, Err(Error::Incompatible { .. })), "{build:?}");
        }
    }

    #[test]
    fn settings_out_of_range_are_refused() {
        let _guard = serial();
        let (vs, _w) = vector(1);
        for build in [
            Stack::of(&vs, sgd(&vs)).with(GradAccumulator::every(0)).build(),
            Stack::of(&vs, sgd(&vs)).with(Cosine::new(0)).build(),
            Stack::of(&vs, sgd(&vs)).with(Cosine::new(5).warm_up(6)).build(),
            Stack::of(&vs, sgd(&vs)).with(Cosine::new(5).floor(f64::NAN)).build(),
        ] {
            assert!(matches!(build, Err(Error::Config { .. })), "{build:?}");
        }
        assert!(AmpScaler::fp16_with(|config| config.floor = 0.0).is_err());
        assert!(AmpScaler::fp16_with(|config| config.cap = f64::INFINITY).is_err());
        assert!(AmpScaler::fp16_with(|config| config.backoff_factor = 1.0).is_err());
        assert!(AmpScaler::fp16_with(|config| config.init_scale = f64::NAN).is_err());
        assert!(Budget::parse("many").is_err());
    }

    #[test]
    fn a_model_that_cannot_train_is_refused() {
        let _guard = serial();
        let empty = nn::VarStore::new(Device::Cpu);
        let (vs, w) = vector(1);
        let foreign = Stack::of(&empty, sgd(&vs)).build();
        assert!(matches!(foreign, Err(Error::Config { .. })), "{foreign:?}");
        let other = vector(2).0;
        assert!(Stack::of(&other, sgd(&vs)).build().unwrap_err().to_string().contains("`w`"));
        let _ = w.set_requires_grad(false);
        assert!(matches!(Stack::of(&vs, sgd(&vs)).build(), Err(Error::Config { .. })));
    }
}

#[test]
fn the_stack_prints_itself_in_the_order_it_acts() {
    let _guard = serial();
    let (vs, _w) = vector(1000);
    let optimizer = AdamW::new(&vs, AdamWConfig::default()).unwrap();
    let training = Stack::of(&vs, optimizer)
        .with(GradClip::norm(1.0))
        .with(AmpScaler::bf16())
        .with(GradAccumulator::every(4))
        .with(Cosine::new(100).warm_up(10))
        .build()
        .unwrap();
    let text = training.to_string();
    let at = |name: &str| text.find(name).unwrap_or_else(|| panic!("{name} in {text}"));
    assert!(at("GradAccumulator::every(4)") < at("Cosine::new(100).warm_up(10)"));
    assert!(at("Cosine") < at("AmpScaler::bf16()"));
    assert!(at("AmpScaler") < at("GradClip::norm(1)"));
    assert!(text.contains("1000 parameters") && text.contains("summation order"));
    let names: Vec<String> = training.strategies().map(|strategy| strategy.name()).collect();
    assert_eq!(names.len(), 4);
    assert_eq!(training.optimizer().groups().len(), 1);
}

#[test]
fn the_traits_are_object_safe() {
    let _guard = serial();
    fn objects(_: &dyn Strategy, _: &dyn Optimizer, _: &dyn Checkpointer) {}
    let (vs, _w) = vector(1);
    objects(&GradClip::norm(1.0), &sgd(&vs), &RecomputeAll);
}

#[test]
fn a_budget_refuses_loses_nothing_and_ends_with_its_stack() {
    let _guard = serial();
    let (vs, w) = vector(1024);
    let limit = memfit::memory::stats(Device::Cpu).unwrap().current + 64 * 1024;
    let mut training = Stack::of(&vs, sgd(&vs)).with(Budget::bytes(limit)).build().unwrap();
    let big = |rows: i64| Ok(Loss::of((&w * Tensor::f_ones([rows, 1024], CPU)?).mean(Kind::Float)));
    let error = training.step_with(|| big(1024)).unwrap_err();
    let Error::OutOfMemory { requested, live, limit: Some(met), device: Device::Cpu } = error else {
        panic!("{error:?}")
    };
    assert_eq!((requested, met), (Some(4 << 20), limit));
    assert!(live.unwrap() <= limit);
    assert_eq!(values(&w), vec![0.0; 1024]);
    assert!(training.step_with(|| big(2)).unwrap().stepped());
    drop(training);
    assert!(Tensor::f_ones([1024, 1024], CPU).is_ok());
}
