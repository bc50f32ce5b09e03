//! Schedules: the shapes, who ticks, and whom the rate reaches.

mod support;

use std::f64::consts::PI;

use memfit::optim::{AdamW, AdamWConfig, GroupOptions, InBackward, Optimizer, Sgd, SgdConfig, TchOptimizer};
use memfit::strategies::{
    AmpScaler, Chain, Constant, Cosine, CosineRestarts, Curve, GradAccumulator, InverseSqrt, LinearDecay,
    MasterWeights, OneCycle, Schedule,
};
use memfit::tch::nn::{self, OptimizerConfig};
use memfit::tch::{Device, Kind, Tensor};
use memfit::{CpuOffload, Error, Loss, Named, Result, Stack, StepOutcome, Strategy};
use support::{serial, sgd, slope, values, vector};

/// What PyTorch 2.13's schedulers, printed once, give for these settings.
mod as_in_pytorch {
    use super::*;

    fn compare<C: Curve>(schedule: &Schedule<C>, wanted: &[f64]) {
        for (step, wanted) in wanted.iter().enumerate() {
            let found = schedule.factor(step as u64);
            assert!((found - wanted).abs() < 1e-12, "{} at {step}: {found}, not {wanted}", schedule.name());
        }
    }

    #[test]
    fn cosine_anneals_and_restarts() {
        let cosine = [1.0, 0.9657457896300791, 0.8681980515339464, 0.7222075445642905, 0.55];
        compare(&Cosine::new(8).floor(0.1), &cosine);
        let restarts = [
            1.0,
            0.775,
            0.325,
            1.0,
            0.9397114317029974,
            0.775,
            0.55,
            0.325,
            0.16028856829700258,
            1.0,
            0.9846666218300807,
            0.9397114317029974,
        ];
        compare(&CosineRestarts::new(3).multiplier(2).floor(0.1), &restarts);
    }

    #[test]
    fn one_cycle_has_two_phases_or_three() {
        let two = [
            0.04,
            0.52,
            1.0,
            0.9504846320134737,
            0.8117456539497631,
            0.6112620219362893,
            0.38874197806371075,
            0.18825834605023697,
            0.049519367986526286,
            4e-06,
            4e-06,
        ];
        compare(&OneCycle::new(10), &two);
        let three = [0.04, 0.52, 1.0, 0.52, 0.04, 0.0320008, 0.0240016, 0.0160024, 0.0080032, 4e-06];
        compare(&OneCycle::new(10).three_phases(), &three);
    }

    #[test]
    fn linear_decay_and_a_chain() {
        compare(&LinearDecay::new(4).floor(0.2), &[1.0, 0.8, 0.6, 0.4, 0.2, 0.2]);
        // SequentialLR of LinearLR(1/4 to 1 in 3 steps), ConstantLR and LinearLR(1 to 0 in 4).
        let chain = Chain::new().then(6, Constant::new().warm_up(4)).then(4, LinearDecay::new(4));
        compare(&chain, &[0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
    }
}

#[test]
fn the_first_and_the_last_update_get_what_the_documentation_says() {
    let n = 1_000_u64;
    let close = |found: f64, wanted: f64| assert!((found - wanted).abs() < 1e-12, "{found}, not {wanted}");
    let each = |schedule: &dyn Curve, wanted: &[(u64, f64)]| {
        wanted.iter().for_each(|(step, wanted)| close(schedule.factor(*step, 0), *wanted));
    };
    let step = 1.0 / 900.0;
    for (schedule, last) in [
        (&Cosine::new(n).warm_up(100) as &dyn Curve, 0.5 + 0.5 * (PI * (1.0 - step)).cos()),
        (&LinearDecay::new(n).warm_up(100), step),
    ] {
        each(
            schedule,
            &[(0, 0.01), (49, 0.5), (99, 1.0), (100, 1.0), (n - 1, last), (n, 0.0), (10 * n, 0.0)],
        );
    }
    let cycle = OneCycle::new(n).peak_at(0.25).start(0.1).end(0.01);
    each(&cycle, &[(0, 0.1), (249, 1.0), (n - 1, 0.01), (n, 0.01)]);
    let root = InverseSqrt::new().warm_up(100);
    each(&root, &[(0, 0.01), (99, 1.0), (399, 0.5), (9_999, 0.1)]);
    each(&InverseSqrt::new(), &[(0, 1.0), (3, 0.5)]);
    let restarts = CosineRestarts::new(100).warm_up(10);
    each(&restarts, &[(9, 1.0), (10, 1.0), (60, 0.5), (110, 1.0), (760, 0.5)]);
    let long = CosineRestarts::new(1).multiplier(2);
    assert_eq!(long.factor((1 << 62) - 1), 1.0);
    assert!(long.factor(u64::MAX).is_finite());
    let chain = Chain::new().then(10, Constant::at(0.5)).then(5, InverseSqrt::new()).warm_up(2);
    let sixth = 6_f64.powf(-0.5);
    each(&chain, &[(0, 0.5), (1, 1.0), (2, 0.5), (11, 0.5), (12, 1.0), (15, 0.5), (17, sixth), (99, sixth)]);
}

#[test]
fn settings_that_make_no_curve_are_refused() {
    let _guard = serial();
    let (vs, _w) = vector(1);
    fn refused<C: Curve>(vs: &nn::VarStore, schedule: Schedule<C>) {
        let name = schedule.name();
        let build = Stack::of(vs, sgd(vs)).with(schedule).build();
        assert!(matches!(build, Err(Error::Config { .. })), "{name}: {build:?}");
    }
    refused(&vs, LinearDecay::new(0));
    refused(&vs, LinearDecay::new(5).warm_up(6));
    refused(&vs, LinearDecay::new(5).floor(1.5));
    refused(&vs, CosineRestarts::new(0));
    refused(&vs, CosineRestarts::new(5).multiplier(0));
    refused(&vs, CosineRestarts::new(5).floor(f64::NAN));
    refused(&vs, OneCycle::new(1));
    refused(&vs, OneCycle::new(10).warm_up(1));
    refused(&vs, OneCycle::new(10).peak_at(f64::NAN));
    refused(&vs, OneCycle::new(10).three_phases().peak_at(0.6));
    refused(&vs, OneCycle::new(10).start(-0.1));
    refused(&vs, Constant::at(f64::INFINITY));
    refused(&vs, Chain::new());
    refused(&vs, Chain::new().then(0, Constant::new()));
    refused(&vs, Chain::new().then(10, Cosine::new(10).warm_up(11)));
    let two = Stack::of(&vs, sgd(&vs)).with(Constant::new()).with(Cosine::new(5)).build();
    assert!(matches!(two, Err(Error::Incompatible { .. })), "{two:?}");
}

/// Halves with each update.
#[derive(Debug)]
struct Halving;

impl Curve for Halving {
    fn factor(&self, step: u64, _warm_up: u64) -> f64 {
        0.5_f64.powi(step as i32)
    }
}

/// Trains two updates whose gradient is 1 and gives how far each moved the weight.
fn moves(vs: &nn::VarStore, w: &Tensor, optimizer: impl Optimizer + 'static) -> Vec<f64> {
    let mut training = Stack::of(vs, optimizer).with(Schedule::new(Halving)).build().unwrap();
    let mut before = values(w)[0];
    (0..2)
        .map(|step| {
            let outcome = training.step_with(|| Ok(Loss::of(slope(w, &[1.0])))).unwrap();
            let StepOutcome::Stepped { lr, .. } = outcome else { panic!("{outcome:?}") };
            assert_eq!(lr, [0.5_f64.powi(step + 1)]);
            let moved = before - values(w)[0];
            before = values(w)[0];
            moved
        })
        .collect()
}

/// Case 48.
#[test]
fn the_rate_that_was_set_is_used_by_the_next_update_through_every_wrapper() {
    let _guard = serial();
    let plain = |vs: &nn::VarStore| Sgd::new(vs, SgdConfig::default().lr(0.5)).unwrap();
    let adamw = |vs: &nn::VarStore| {
        AdamW::new(vs, AdamWConfig::default().lr(0.5).weight_decay(0.0).epsilon(0.0)).unwrap()
    };
    let disk = std::env::temp_dir();
    let exact = |found: Vec<f64>| assert_eq!(found, [0.5, 0.25]);
    // Adam's step on a gradient that never changes is the rate, but for rounding.
    let close = |found: Vec<f64>| {
        assert!((found[0] - 0.5).abs() < 1e-6 && (found[1] - 0.25).abs() < 1e-6, "{found:?}");
    };
    let (vs, w) = vector(1);
    exact(moves(&vs, &w, plain(&vs)));
    exact(moves(&vs, &w, CpuOffload::optimizer(plain(&vs)).disk(&disk).unwrap()));
    exact(moves(&vs, &w, InBackward::new(plain(&vs)).unwrap()));
    let away = CpuOffload::optimizer(plain(&vs)).disk(&disk).unwrap();
    exact(moves(&vs, &w, InBackward::new(away).unwrap()));
    exact(moves(
        &vs,
        &w,
        TchOptimizer::new(nn::sgd(0.0, 0.0, 0.0, false).build(&vs, 0.1).unwrap(), &vs, 0.5).unwrap(),
    ));
    close(moves(&vs, &w, adamw(&vs)));
    close(moves(&vs, &w, CpuOffload::optimizer(adamw(&vs)).disk(&disk).unwrap()));
    close(moves(&vs, &w, InBackward::new(adamw(&vs)).unwrap()));
}

#[test]
fn the_rate_reaches_master_weights_and_each_group_by_its_own_initial_rate() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().zeros("w", &[1]).to_kind(Kind::BFloat16).detach().set_requires_grad(true);
    let (named, none) = (vec![Named::new("w", &w)], Vec::<Named>::new());
    let optimizer = Sgd::new(&named, SgdConfig::default().lr(0.5)).unwrap();
    let mut training = Stack::tensors(&named, &none, optimizer)
        .with(MasterWeights::fp32())
        .with(Schedule::new(Halving))
        .build()
        .unwrap();
    let loss = |w: &Tensor| Ok(Loss::of(w.to_kind(Kind::Float).sum(Kind::Float)));
    for wanted in [-0.5, -0.75] {
        let _ = training.step_with(|| loss(&w)).unwrap();
        assert_eq!(values(&w), [wanted]);
    }
    let late = Tensor::zeros([1], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    training.add_group(vec![Named::new("late", &late)], GroupOptions::default().lr(8.0)).unwrap();
    let _ = training.step_with(|| loss(&late)).unwrap();
    assert_eq!(values(&late), [-2.0], "8 in update 2, from 0, of the run");
}

/// Case 48: ten updates of warm-up in windows of four peak after 40 micro-batches.
#[test]
fn warm_up_counts_updates_and_not_micro_batches() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let mut training = Stack::of(&vs, sgd(&vs))
        .with(GradAccumulator::every(4))
        .with(Constant::new().warm_up(10))
        .build()
        .unwrap();
    let mut rates = Vec::new();
    for _ in 0..44 {
        if let StepOutcome::Stepped { lr, .. } =
            training.step_with(|| Ok(Loss::mean(slope(&w, &[1.0]), 1))).unwrap()
        {
            rates.push(lr[0]);
        }
    }
    let wanted: Vec<f64> = (1..=11).map(|update| f64::from(update.min(10)) / 10.0).collect();
    assert_eq!(rates, wanted);
}

/// Case 6: skipped windows do not tick.
#[test]
fn a_skipped_window_does_not_tick() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let mut training =
        Stack::of(&vs, sgd(&vs)).with(AmpScaler::fp16()).with(Schedule::new(Halving)).build().unwrap();
    let mut step = |slope: f64| training.step_with(|| Ok(Loss::of((&w * slope).sum(Kind::Float)))).unwrap();
    assert!(step(1.0).stepped());
    for _ in 0..3 {
        assert!(!step(f64::INFINITY).stepped());
    }
    let StepOutcome::Stepped { lr, .. } = step(1.0) else { panic!("skipped") };
    assert_eq!(lr, [0.5]);
    assert_eq!(values(&w), [-1.5]);
}

#[test]
fn a_run_continues_where_it_was_and_only_under_its_own_schedule() {
    let _guard = serial();
    let (vs, w) = vector(1);
    fn build<C: Curve>(vs: &nn::VarStore, lr: f64, schedule: Schedule<C>) -> Stack {
        let optimizer = Sgd::new(vs, SgdConfig::default().lr(lr)).unwrap();
        Stack::of(vs, optimizer).with(schedule).build().unwrap()
    }
    let cycle = || Chain::new().then(3, CosineRestarts::new(2)).then(5, OneCycle::new(5).start(0.5));
    let step = |training: &mut Stack| {
        let StepOutcome::Stepped { lr, .. } = training.step_with(|| Ok(Loss::of(slope(&w, &[1.0])))).unwrap()
        else {
            panic!("skipped")
        };
        lr[0]
    };
    let mut straight = build(&vs, 1.0, cycle());
    let rates: Vec<f64> = (0..10).map(|_| step(&mut straight)).collect();
    for stop in 0..10 {
        let mut first = build(&vs, 1.0, cycle());
        let mut found: Vec<f64> = (0..stop).map(|_| step(&mut first)).collect();
        let mut second = build(&vs, 1.0, cycle());
        second.load_state(&first.state().unwrap()).unwrap();
        found.extend((stop..10).map(|_| step(&mut second)));
        assert_eq!(found, rates);
    }
    let state = straight.state().unwrap();
    let refusal = |result: Result<()>| match result {
        Err(Error::State { problems }) => problems.join("; "),
        other => panic!("{other:?}"),
    };
    let text = refusal(build(&vs, 1.0, cycle().warm_up(1)).load_state(&state));
    // Texts that long are shown from where they differ.
    assert!(text.contains("wanted …") && text.contains(".warm_up(1)"), "{text}");
    let text = refusal(build(&vs, 0.1, cycle()).load_state(&state));
    assert!(text.contains("[1.0], wanted [0.1]"), "{text}");
}

/// No number from update 2 on.
#[derive(Debug)]
struct Broken;

impl Curve for Broken {
    fn factor(&self, step: u64, _warm_up: u64) -> f64 {
        (1.5 - step as f64).sqrt()
    }
}

#[test]
fn a_factor_that_is_no_rate_stops_the_run_before_anything_moves() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let mut training = Stack::of(&vs, sgd(&vs)).with(Schedule::new(Broken)).build().unwrap();
    let mut step = || training.step_with(|| Ok(Loss::of(slope(&w, &[1.0]))));
    assert!(step().unwrap().stepped() && step().unwrap().stepped());
    let before = values(&w);
    let error = step().unwrap_err();
    assert!(error.to_string().contains("update 2"), "{error}");
    assert_eq!(values(&w), before);
}
