//! The driver: windows, weights, outcomes, failures.

mod support;

use memfit::optim::{AdamW, AdamWConfig, GroupOptions, Sgd, SgdConfig};
use memfit::strategies::{
    AmpScaler, Budget, Cosine, GradAccumulator, GradClip, MasterWeights, Rollback, autocast, full_precision,
};
use memfit::tch::{Device, Kind, Tensor, nn, nn::Module};
use memfit::{Batch, Error, Loss, Named, Result, SkipReason, Stack, StepOutcome};
use support::{copies, difference, same, serial};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

/// One weight vector, plain SGD with rate 1: the weight's change is minus the gradient.
fn vector(n: i64) -> (nn::VarStore, Tensor) {
    let vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().zeros("w", &[n]);
    (vs, w)
}

fn sgd(vs: &nn::VarStore) -> Sgd {
    Sgd::new(vs, SgdConfig::default().lr(1.0)).unwrap()
}

/// A loss whose gradient is `g`, whatever the weights.
fn slope(w: &Tensor, g: &[f32]) -> Tensor {
    (w * Tensor::from_slice(g)).sum(Kind::Float)
}

fn values(t: &Tensor) -> Vec<f64> {
    Vec::<f64>::try_from(t.detach().to_kind(Kind::Double).view(-1)).unwrap()
}

/// Case 14.
#[test]
fn a_window_of_unequal_micro_batches_is_the_joined_batch() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let mut training = Stack::of(&vs, sgd(&vs)).with(GradAccumulator::every(2)).build().unwrap();
    let first = training.step_with(|| Ok(Loss::mean(slope(&w, &[1.0]) + 1.0, 1))).unwrap();
    assert!(matches!(first, StepOutcome::Accumulating { done: 1, of: Some(2) }));
    // Per-token losses {1} and {3, 3, 3}: mean 2.5; gradients 1 and 3 likewise.
    let second = training.step_with(|| Ok(Loss::mean(slope(&w, &[3.0]) + 3.0, 3))).unwrap();
    let StepOutcome::Stepped { loss, tokens, .. } = second else { panic!("{second:?}") };
    assert_eq!(loss.double_value(&[]), 2.5);
    assert_eq!(tokens, 4.0);
    assert_eq!(values(&w), [-2.5]);
    assert!(!loss.requires_grad());
}

#[test]
fn a_sum_gives_the_gradient_of_the_mean() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let mut training = Stack::of(&vs, sgd(&vs)).with(GradAccumulator::every(2)).build().unwrap();
    let _ = training.step_with(|| Ok(Loss::sum(slope(&w, &[1.0]) + 1.0, 1))).unwrap();
    let outcome = training.step_with(|| Ok(Loss::sum(slope(&w, &[9.0]) + 9.0, 3))).unwrap();
    let StepOutcome::Stepped { loss, .. } = outcome else { panic!("{outcome:?}") };
    assert_eq!(loss.double_value(&[]), 2.5);
    assert_eq!(values(&w), [-2.5]);
}

/// Case 16.
#[test]
fn a_short_last_window_has_its_own_weight() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let mut training = Stack::of(&vs, sgd(&vs)).with(GradAccumulator::every(4)).build().unwrap();
    let batches: Vec<Tensor> = (1..=7).map(|g| Tensor::from_slice(&[g as f32])).collect();
    let mut updates = 0;
    for micro in training.windows(batches) {
        let micro = micro.unwrap();
        assert_eq!(micro.short, micro.index == 2 && micro.last);
        let outcome = training.step(&micro, |g| Ok(Loss::mean((&w * g).sum(Kind::Float), 1))).unwrap();
        updates += usize::from(outcome.stepped());
    }
    assert_eq!(updates, 2);
    // −(1+2+3+4)/4 − (5+6+7)/3
    assert_eq!(values(&w), [-2.5 - 6.0]);
    assert!(training.flush().unwrap().is_none());

    let (vs, w) = vector(1);
    let mut training = Stack::of(&vs, sgd(&vs)).with(GradAccumulator::every(8)).build().unwrap();
    for _ in 0..2 {
        for micro in training.windows((0..63).map(|_| Tensor::from_slice(&[1f32]))) {
            let _ = training.step(micro.unwrap(), |g| Ok(Loss::mean((&w * g).sum(Kind::Float), 1))).unwrap();
        }
    }
    assert_eq!(training.position().steps, 16);
    assert_eq!(training.position().micro_batches, 126);
}

#[test]
fn windows_by_tokens_end_with_the_micro_batch_that_fills_them() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let mut training = Stack::of(&vs, sgd(&vs)).with(GradAccumulator::tokens(10)).build().unwrap();
    let rows = [4, 4, 4, 9, 1, 3];
    let batches = rows.map(|n| Tensor::ones([n], CPU));
    let mut ends = Vec::new();
    for micro in training.windows(batches) {
        let outcome = training
            .step(micro.unwrap(), |x| {
                Ok(Loss::mean((&w * x.mean(Kind::Float)).sum(Kind::Float), x.size()[0]))
            })
            .unwrap();
        if let StepOutcome::Stepped { tokens, .. } = outcome {
            ends.push(tokens);
        }
    }
    assert_eq!(ends, [12.0, 10.0, 3.0]);
    // The same by hand: the loss tells the tokens, flush ends the last window.
    let (vs, w) = vector(1);
    let mut training = Stack::of(&vs, sgd(&vs)).with(GradAccumulator::tokens(10)).build().unwrap();
    let mut ends = Vec::new();
    for n in rows {
        if let StepOutcome::Stepped { tokens, .. } =
            training.step_with(|| Ok(Loss::mean(slope(&w, &[1.0]), n))).unwrap()
        {
            ends.push(tokens);
        }
    }
    if let Some(StepOutcome::Stepped { tokens, .. }) = training.flush().unwrap() {
        ends.push(tokens);
    }
    assert_eq!(ends, [12.0, 10.0, 3.0]);
}

#[test]
fn a_whole_batch_is_split_and_equals_the_whole() {
    let _guard = serial();
    let train = |every: usize| {
        memfit::tch::manual_seed(1);
        let vs = nn::VarStore::new(Device::Cpu);
        let model = nn::linear(vs.root(), 5, 3, Default::default());
        let x = Tensor::randn([10, 5], CPU);
        let y = Tensor::randn([10, 3], CPU);
        let mut training = Stack::of(&vs, sgd(&vs)).with(GradAccumulator::every(every)).build().unwrap();
        let outcome = training
            .step_batch(&(x, y), |(x, y)| {
                Ok(Loss::mean((model.forward(x) - y).square().mean(Kind::Float), x.size()[0]))
            })
            .unwrap();
        let StepOutcome::Stepped { loss, tokens, .. } = outcome else { panic!("{outcome:?}") };
        assert_eq!(tokens, 10.0);
        (loss, vs.trainable_variables())
    };
    let (whole_loss, whole) = train(1);
    for every in [2, 3, 4, 10, 25] {
        let (loss, split) = train(every);
        assert!(difference(&loss, &whole_loss) < 1e-6);
        for (a, b) in whole.iter().zip(&split) {
            assert!(difference(a, b) < 1e-6, "{every}");
        }
    }
}

#[test]
fn a_loss_without_weight_needs_a_window_of_one() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let mut training = Stack::of(&vs, sgd(&vs)).with(GradAccumulator::every(2)).build().unwrap();
    let refused = training.step_with(|| Ok(Loss::of(slope(&w, &[1.0]))));
    assert!(matches!(refused, Err(Error::Config { setting: "Loss", .. })), "{refused:?}");
    for bad in [f64::NAN, 0.0, -1.0] {
        assert!(matches!(
            training.step_with(|| Ok(Loss::mean(slope(&w, &[1.0]), bad))),
            Err(Error::Config { .. })
        ));
    }
    assert!(matches!(
        training.step_with(|| Ok(Loss::mean(&w * 1.0 + Tensor::zeros([3], CPU), 1))),
        Err(Error::Config { .. })
    ));
    assert!(matches!(
        training.step_with(|| Ok(Loss::mean(Tensor::from(1f32), 1))),
        Err(Error::Config { .. })
    ));
    assert_eq!(training.position().windows, 0);
}

#[test]
fn micro_batches_come_in_order_and_windows_do_not_overlap() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let mut training = Stack::of(&vs, sgd(&vs)).with(GradAccumulator::every(2)).build().unwrap();
    let loss = |g: &Tensor| Ok(Loss::mean((&w * g).sum(Kind::Float), 1));
    let batches = || (0..4).map(|_| Tensor::from_slice(&[1f32]));
    let micros: Vec<_> = training.windows(batches()).collect::<Result<_>>().unwrap();
    assert!(matches!(training.step(&micros[1], loss), Err(Error::CallOrder { .. })));
    let _ = training.step(&micros[0], loss).unwrap();
    let mut second = training.windows(batches());
    let refusal = second.next().unwrap().unwrap_err().to_string();
    assert!(refusal.contains("flush()") && refusal.contains("discard()"), "{refusal}");
    assert!(second.next().is_none());
    assert!(matches!(
        training.step_batch(&Tensor::ones([2, 1], CPU), |g| Ok(Loss::mean((&w * g).sum(Kind::Float), 2))),
        Err(Error::CallOrder { .. })
    ));
    assert!(matches!(training.state(), Err(Error::CallOrder { .. })));
    training.discard().unwrap();
    assert_eq!(values(&w), [0.0]);
    assert!(!w.grad().defined());
    assert!(training.windows(batches()).next().unwrap().is_ok());
}

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
            reason: SkipReason::NonFiniteGradient { scale: 65536.0, next_scale: 32768.0 }
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

/// Case 18.
#[test]
fn a_head_used_once_gets_its_share_and_a_frozen_one_nothing() {
    let _guard = serial();
    for fp32 in [false, true] {
        let vs = nn::VarStore::new(Device::Cpu);
        let (a, b) = (vs.root().zeros("a", &[1]), vs.root().zeros("b", &[1]));
        let frozen = vs.root().ones("frozen", &[1]).set_requires_grad(false);
        let unused = vs.root().ones("unused", &[1]);
        let accumulator = GradAccumulator::every(2);
        let accumulator = if fp32 { accumulator.fp32() } else { accumulator };
        let mut training = Stack::of(&vs, sgd(&vs)).with(accumulator).build().unwrap();
        let _ = training.step_with(|| Ok(Loss::mean((&a * &frozen).sum(Kind::Float), 1))).unwrap();
        let _ = training.step_with(|| Ok(Loss::mean((&a + &b * 6.0).sum(Kind::Float), 3))).unwrap();
        assert_eq!((values(&a), values(&b)), (vec![-1.0], vec![-4.5]));
        assert_eq!((values(&frozen), values(&unused)), (vec![1.0], vec![1.0]));
        assert!(!frozen.grad().defined());
    }
}

#[test]
fn fp32_sums_keep_what_bf16_sums_lose() {
    let _guard = serial();
    let train = |fp32: bool| {
        let mut vs = nn::VarStore::new(Device::Cpu);
        let w = vs.root().zeros("w", &[1]);
        vs.bfloat16();
        let accumulator = GradAccumulator::every(512);
        let accumulator = if fp32 { accumulator.fp32() } else { accumulator };
        let mut training = Stack::of(&vs, sgd(&vs)).with(accumulator).build().unwrap();
        for _ in 0..512 {
            let _ = training.step_with(|| Ok(Loss::sum(w.sum(Kind::BFloat16), 1))).unwrap();
        }
        values(&w)[0]
    };
    assert_eq!(train(true), -1.0);
    // A bf16 sum of ones stops at 256.
    assert_eq!(train(false), -0.5);
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
    let wanted = Tensor::from(master).to_kind(Kind::BFloat16).double_value(&[]);
    assert_eq!(values(&w), [wanted]);
    let state = training.state().unwrap();
    assert!(state.get("master.w").is_some());
}

/// A user's batch type that is neither a tensor nor a tuple of them.
struct Sentences {
    ids: Tensor,
}

impl Batch for Sentences {
    fn rows(&self) -> i64 {
        self.ids.size()[0]
    }
    fn take_rows(&self, rows: std::ops::Range<i64>) -> Result<Self> {
        Ok(Self { ids: self.ids.take_rows(rows)? })
    }
}

#[test]
fn a_batch_type_of_the_users_own_can_be_split() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let mut training = Stack::of(&vs, sgd(&vs)).with(GradAccumulator::every(2)).build().unwrap();
    let batch = Sentences { ids: Tensor::from_slice(&[1f32, 2.0, 6.0]) };
    let mut rows = Vec::new();
    let outcome = training.step_batch(&batch, |micro| {
        rows.push(micro.rows());
        Ok(Loss::mean((&w * micro.ids.mean(Kind::Float)).sum(Kind::Float), micro.rows()))
    });
    assert!(outcome.unwrap().stepped());
    assert_eq!(rows, [2, 1]);
    assert_eq!(values(&w), [-3.0]);
    assert!(Tensor::ones([3], CPU).take_rows(1..4).is_err());
    assert!((Tensor::ones([3], CPU), Tensor::ones([2], CPU)).take_rows(0..1).is_err());
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
    let twice = vec![Named::new("in", &w), Named::new("out", &w)];
    let mut training =
        Stack::tensors(twice.clone(), Vec::new(), Sgd::new(&twice, SgdConfig::default().lr(1.0)).unwrap())
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
