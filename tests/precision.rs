//! Autocast, loss scaling, clipping, master weights.

mod support;

use half::bf16;
use memfit::memory::stats;
use memfit::optim::{AdamW, AdamWConfig, Sgd, SgdConfig};
use memfit::strategies::{
    AmpScaler, Cosine, GradAccumulator, GradClip, MasterWeights, autocast, full_precision,
};
use memfit::tch::{Device, Kind, Tensor, nn};
use memfit::{Error, Loss, SkipReason, Split, Stack, StepOutcome};
use support::{serial, sgd, slope, values, vector};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Case 9, and its norm of 0.5.
#[test]
fn clipping_sees_unscaled_gradients() {
    let _guard = serial();
    for scale in [1.0, 1024.0] {
        for (gradient, applied) in [([3.0, 4.0], [0.6, 0.8]), ([0.3, 0.4], [0.3, 0.4])] {
            let (vs, w) = vector(2);
            let scaler = AmpScaler::fp16_with(|config| config.init_scale = scale).unwrap();
            let mut training =
                Stack::of(&vs, sgd(&vs)).with(scaler).with(GradClip::norm(1.0)).build().unwrap();
            let outcome = training.step_with(|| Ok(Loss::of(slope(&w, &gradient)))).unwrap();
            let StepOutcome::Stepped { grad_norm: Some(norm), .. } = outcome else { panic!("{outcome:?}") };
            assert!((norm - f64::from(gradient[0].hypot(gradient[1]))).abs() < 1e-6);
            for (value, wanted) in values(&w).iter().zip(applied) {
                assert!((value + wanted).abs() < 1e-6, "{value} {wanted}");
            }
        }
    }
}

/// Case 10.
#[test]
fn clipping_is_on_the_window() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let scaler = AmpScaler::fp16();
    let mut training = Stack::of(&vs, sgd(&vs))
        .with(GradClip::norm(1.0))
        .with(GradAccumulator::every(2))
        .with(scaler)
        .build()
        .unwrap();
    for g in [20.0, -19.0] {
        let _ = training.step_with(|| Ok(Loss::mean(slope(&w, &[g]), 1))).unwrap();
    }
    assert_eq!(values(&w), [-0.5]);
}

/// Case 13.
#[test]
fn clip_by_value_and_by_norm_differ() {
    let _guard = serial();
    let (vs, w) = vector(2);
    let mut training = Stack::of(&vs, sgd(&vs)).with(GradClip::value(1.0)).build().unwrap();
    let _ = training.step_with(|| Ok(Loss::of(slope(&w, &[3.0, 4.0])))).unwrap();
    assert_eq!(values(&w), [-1.0, -1.0]);
    for bad in [0.0, -1.0, f64::NAN] {
        assert!(matches!(
            Stack::of(&vs, sgd(&vs)).with(GradClip::norm(bad)).build(),
            Err(Error::Config { setting: "GradClip::norm", .. })
        ));
    }
}

/// Case 12.
#[test]
fn a_norm_that_is_not_finite_is_an_error_or_a_skip() {
    let _guard = serial();
    let (vs, w) = vector(2);
    let bad = [1.0, f32::INFINITY];
    let mut training = Stack::of(&vs, sgd(&vs)).with(GradClip::norm(1.0)).build().unwrap();
    let error = training.step_with(|| Ok(Loss::of(slope(&w, &bad)))).unwrap_err();
    assert!(matches!(error, Error::NotFinite { .. }), "{error}");
    assert_eq!(values(&w.grad()), [1.0, f64::INFINITY]);
    assert_eq!(values(&w), [0.0, 0.0]);
    assert_eq!(training.position().windows, 0);
    let _ = training.step_with(|| Ok(Loss::of(slope(&w, &[1.0, 0.0])))).unwrap();

    let (vs, w) = vector(2);
    let mut training =
        Stack::of(&vs, sgd(&vs)).with(AmpScaler::fp16()).with(GradClip::norm(1.0)).build().unwrap();
    let outcome = training.step_with(|| Ok(Loss::of(slope(&w, &bad)))).unwrap();
    assert!(matches!(
        outcome,
        StepOutcome::Skipped {
            reason: SkipReason::NonFiniteGradient { scale: 65536.0, next_scale: 32768.0 },
            split: None,
        }
    ));
    assert_eq!(values(&w.grad()), [65536.0, f64::INFINITY]);
}

/// Case 12: no gradients at all have norm 0.
#[test]
fn a_parameter_without_gradient_counts_nothing() {
    let _guard = serial();
    let (vs, _w) = vector(2);
    let other = vs.root().zeros("other", &[1]).set_requires_grad(false);
    let free = Tensor::ones([1], CPU).set_requires_grad(true);
    let mut training = Stack::of(&vs, sgd(&vs)).with(GradClip::norm(1.0)).build().unwrap();
    let outcome = training.step_with(|| Ok(Loss::of((&free + other).sum(Kind::Float)))).unwrap();
    assert!(matches!(outcome, StepOutcome::Stepped { grad_norm: Some(0.0), .. }), "{outcome:?}");
}

/// Case 6.
#[test]
fn an_overflow_skips_and_moves_only_the_scale() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let optimizer = AdamW::new(&vs, AdamWConfig::default().lr(0.1)).unwrap();
    let mut training =
        Stack::of(&vs, optimizer).with(AmpScaler::fp16()).with(Cosine::new(10).warm_up(2)).build().unwrap();
    let before = training.state().unwrap();
    let outcome = training.step_with(|| Ok(Loss::of(slope(&w, &[f32::NAN])))).unwrap();
    assert!(matches!(outcome, StepOutcome::Skipped { .. }));
    assert_eq!(values(&w), [0.0]);
    assert_eq!(training.position().steps, 0);
    assert_eq!(training.strategy::<AmpScaler>().unwrap().scale(), Some(32768.0));
    let after = training.state().unwrap();
    for (name, value) in before.iter() {
        let scale =
            name.starts_with("precision.") || name == "position.windows" || name == "position.micro_batches";
        if !scale {
            assert_eq!(format!("{value:?}"), format!("{:?}", after.get(name).unwrap()), "{name}");
        }
    }
    let outcome = training.step_with(|| Ok(Loss::of(slope(&w, &[1.0])))).unwrap();
    let StepOutcome::Stepped { lr, scale, .. } = outcome else { panic!("{outcome:?}") };
    assert_eq!(lr, [0.05]);
    assert_eq!(scale, Some(32768.0));
}

#[test]
fn a_skipped_batch_tells_how_it_was_split() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let accumulator = GradAccumulator::every(2);
    let mut training = Stack::of(&vs, sgd(&vs)).with(AmpScaler::fp16()).with(accumulator).build().unwrap();
    let batch = Tensor::from_slice(&[1.0, f32::NAN, 1.0]);
    let outcome =
        training.step_batch(&batch, |g| Ok(Loss::mean((&w * g).mean(Kind::Float), g.size()[0]))).unwrap();
    assert!(matches!(outcome, StepOutcome::Skipped { .. }), "{outcome:?}");
    assert_eq!(outcome.split(), Some(Split { batch: 3, rows: 2, micro_batches: 2, retries: 0 }));
}

/// Case 7.
#[test]
fn below_scale_one_the_check_looks_at_unscaled_gradients() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let scaler = AmpScaler::fp16_with(|config| {
        config.init_scale = 1e-30;
        config.floor = 1e-30;
    });
    let mut training = Stack::of(&vs, sgd(&vs)).with(scaler.unwrap()).build().unwrap();
    // Scaled 1e10, unscaled 1e40: beyond fp32.
    let outcome =
        training.step_with(|| Ok(Loss::of((&w * Tensor::from(1e20f32)).sum(Kind::Float) * 1e20))).unwrap();
    assert!(matches!(outcome, StepOutcome::Skipped { .. }), "{outcome:?}");
    assert_eq!(values(&w), [0.0]);
}

/// Case 8.
#[test]
fn a_scale_at_its_floor_gives_up_and_a_growing_one_stays_finite() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let scaler = AmpScaler::fp16_with(|config| {
        config.init_scale = 2.0;
        config.floor = 1.0;
        config.patience = 3;
    });
    let mut training = Stack::of(&vs, sgd(&vs)).with(scaler.unwrap()).build().unwrap();
    for _ in 0..3 {
        let outcome = training.step_with(|| Ok(Loss::of(slope(&w, &[f32::NAN])))).unwrap();
        assert!(matches!(outcome, StepOutcome::Skipped { .. }));
    }
    let error = training.step_with(|| Ok(Loss::of(slope(&w, &[f32::NAN])))).unwrap_err();
    assert!(matches!(error, Error::LossScale { skips: 3, scale: 1.0 }), "{error}");

    let (vs, w) = vector(1);
    let scaler = AmpScaler::fp16_with(|config| config.growth_interval = 1).unwrap();
    let mut training = Stack::of(&vs, sgd(&vs)).with(scaler).build().unwrap();
    for _ in 0..1000 {
        assert!(training.step_with(|| Ok(Loss::of(slope(&w, &[0.5])))).unwrap().stepped());
    }
    assert_eq!(training.strategy::<AmpScaler>().unwrap().scale(), Some(64f64.exp2()));
    assert_eq!(values(&w), [-500.0]);
}

/// Case 11.
#[test]
fn a_loss_scale_continues_after_a_load() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let build = || {
        let scaler = AmpScaler::fp16_with(|config| config.init_scale = 131072.0).unwrap();
        Stack::of(&vs, sgd(&vs)).with(scaler).build().unwrap()
    };
    let mut training = build();
    for _ in 0..1999 {
        let _ = training.step_with(|| Ok(Loss::of(slope(&w, &[0.001])))).unwrap();
    }
    let state = training.state().unwrap();
    let mut resumed = build();
    resumed.load_state(&state).unwrap();
    assert_eq!(resumed.strategy::<AmpScaler>().unwrap().scale(), Some(131072.0));
    assert!(resumed.step_with(|| Ok(Loss::of(slope(&w, &[0.001])))).unwrap().stepped());
    assert_eq!(resumed.strategy::<AmpScaler>().unwrap().scale(), Some(262144.0));
}

/// Case 20.
#[test]
fn the_scale_moves_once_per_window() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let scaler = AmpScaler::fp16_with(|config| {
        config.init_scale = 8.0;
        config.growth_interval = 1;
    });
    let mut training =
        Stack::of(&vs, sgd(&vs)).with(scaler.unwrap()).with(GradAccumulator::every(4)).build().unwrap();
    for g in [1.0, 2.0, 3.0, 6.0] {
        let _ = training.step_with(|| Ok(Loss::mean(slope(&w, &[g]), 5))).unwrap();
    }
    assert_eq!(values(&w), [-3.0]);
    assert_eq!(training.strategy::<AmpScaler>().unwrap().scale(), Some(16.0));
}

#[test]
fn autocast_can_be_switched_off_for_a_block() {
    let _guard = serial();
    let x = Tensor::ones([2, 2], CPU);
    let kinds = autocast(Device::Cpu, Kind::BFloat16, || {
        let inner = full_precision(Device::Cpu, || Ok(x.matmul(&x).kind()))?;
        Ok((x.matmul(&x).kind(), inner))
    });
    assert_eq!(kinds.unwrap(), (Kind::BFloat16, Kind::Float));
}

#[test]
fn master_weights_train_a_bf16_model() {
    let _guard = serial();
    let mut vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().ones("w", &[1]);
    vs.bfloat16();
    let optimizer = Sgd::new(&vs, SgdConfig::default().lr(0.001)).unwrap();
    let mut training = Stack::of(&vs, optimizer).with(MasterWeights::fp32()).build().unwrap();
    for _ in 0..100 {
        assert!(training.step_with(|| Ok(Loss::of(w.sum(Kind::Float)))).unwrap().stepped());
    }
    let mut master = 1f32;
    (0..100).for_each(|_| master -= 0.001);
    assert_eq!(values(&w), [bf16::from_f32(master).to_f64()]);
    let state = training.state().unwrap();
    assert!(state.get("master.w").is_some());
}

#[test]
fn two_optimizers_share_one_scale() {
    let _guard = serial();
    let (g_vs, g) = vector(1);
    let (d_vs, d) = vector(1);
    let scaler = AmpScaler::fp16();
    let mut d_training = Stack::of(&d_vs, sgd(&d_vs)).with(scaler.share()).build().unwrap();
    let mut g_training = Stack::of(&g_vs, sgd(&g_vs)).with(scaler.share()).build().unwrap();
    // The generator's loss reaches the discriminator too: its gradient must not stay.
    let _ = g_training.step_with(|| Ok(Loss::of((&g * 2.0 + &d * 5.0).sum(Kind::Float)))).unwrap();
    let _ = d_training.step_with(|| Ok(Loss::of(slope(&d, &[1.0])))).unwrap();
    assert_eq!((values(&g), values(&d)), (vec![-2.0], vec![-1.0]));
    let skipped = d_training.step_with(|| Ok(Loss::of(slope(&d, &[f32::NAN])))).unwrap();
    assert!(matches!(skipped, StepOutcome::Skipped { .. }));
    assert_eq!(scaler.scale(), Some(32768.0));
    let outcome = g_training.step_with(|| Ok(Loss::of(slope(&g, &[1.0])))).unwrap();
    assert!(matches!(outcome, StepOutcome::Stepped { scale: Some(32768.0), .. }));
}

/// Case 4.
#[test]
fn forwards_without_gradients_in_one_autocast_scope_keep_nothing() {
    let _guard = serial();
    let w = Tensor::randn([64, 64], CPU).set_requires_grad(true);
    let x = Tensor::randn([4, 64], CPU);
    let live = autocast(Device::Cpu, Kind::BFloat16, || {
        let _no_grad = memfit::tch::no_grad_guard();
        let forward = || {
            let _ = x.matmul(&w);
            stats(Device::Cpu).unwrap().current
        };
        Ok((0..10).map(|_| forward()).collect::<Vec<_>>())
    });
    let live = live.unwrap();
    assert!(live.iter().all(|bytes| *bytes == live[0]), "{live:?}");
}
