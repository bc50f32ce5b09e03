//! Micro-batches of weight 0: labels that are all ignored.

mod support;
#[path = "support/training.rs"]
mod training;

use memfit::optim::{AdamW, AdamWConfig, InBackward, Optimizer, Sgd, SgdConfig};
use memfit::strategies::{
    AmpScaler, Cosine, GradAccumulator, GradClip, MasterWeights, MicroBatcher, Rollback,
};
use memfit::tch::{Device, Kind, Tensor, nn, nn::ModuleT};
use memfit::{CpuOffload, Error, Loss, Result, SkipReason, Split, Stack, StackBuilder, StepOutcome};
use support::{copies, live, serial, sgd, values, vector};
use training::same_bits;

/// A slope, and how many tokens it speaks for.
type Micro = (f32, u32);

const EMPTY: Micro = (7.0, 0);

/// A mean over `n` tokens with this slope; over none it is 0/0, with a graph.
fn loss(w: &Tensor, (slope, n): Micro) -> Result<Loss> {
    let sum = (w.f_to_kind(Kind::Float)? * f64::from(slope) * f64::from(n)).f_sum(Kind::Float)?;
    Ok(Loss::mean(sum / f64::from(n), n))
}

/// A stack whose windows have so many micro-batches.
type Maker = fn(&nn::VarStore, usize) -> StackBuilder;

fn momentum(vs: &nn::VarStore) -> Sgd {
    Sgd::new(vs, SgdConfig::default().lr(0.3).momentum(0.9)).unwrap()
}

fn adamw(vs: &nn::VarStore) -> AdamW {
    AdamW::new(vs, AdamWConfig::default().lr(0.1)).unwrap()
}

fn of(vs: &nn::VarStore, optimizer: impl Optimizer + 'static, window: usize) -> StackBuilder {
    Stack::of(vs, optimizer).with(GradAccumulator::every(window))
}

const MAKERS: [(&str, Kind, Maker); 10] = [
    ("plain", Kind::Float, |vs, window| of(vs, sgd(vs), window)),
    ("momentum", Kind::Float, |vs, window| of(vs, momentum(vs), window)),
    ("scaled", Kind::Float, |vs, window| of(vs, adamw(vs), window).with(AmpScaler::fp16())),
    ("clipped", Kind::Float, |vs, window| of(vs, momentum(vs), window).with(GradClip::norm(0.5))),
    ("by value", Kind::Float, |vs, window| of(vs, sgd(vs), window).with(GradClip::value(0.7))),
    ("rollback", Kind::Float, |vs, window| of(vs, adamw(vs), window).with(Rollback::micro_batch())),
    ("masters", Kind::BFloat16, |vs, window| of(vs, adamw(vs), window).with(MasterWeights::fp32())),
    ("fp32 sums", Kind::BFloat16, |vs, window| {
        Stack::of(vs, momentum(vs)).with(GradAccumulator::every(window).fp32())
    }),
    ("in backward", Kind::Float, |vs, window| of(vs, InBackward::new(sgd(vs)).unwrap(), window)),
    ("on disk", Kind::Float, |vs, window| {
        of(vs, CpuOffload::optimizer(adamw(vs)).disk(std::env::temp_dir()).unwrap(), window)
    }),
];

/// Windows of these micro-batches; the weights afterwards, and each window's loss and tokens.
fn run(maker: Maker, kind: Kind, windows: &[&[Micro]]) -> (Vec<Tensor>, Vec<(f64, f64)>) {
    let mut vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().ones("w", &[3]);
    vs.set_kind(kind);
    let mut training = maker(&vs, windows[0].len()).with(Cosine::new(50)).build().unwrap();
    let mut told = Vec::new();
    for window in windows {
        for micro in *window {
            if let StepOutcome::Stepped { loss, tokens, .. } =
                training.step_with(|| loss(&w, *micro)).unwrap()
            {
                told.push((loss.double_value(&[]), tokens));
            }
        }
    }
    assert_eq!(told.len(), windows.len());
    (copies(&vs.trainable_variables()), told)
}

#[test]
fn an_empty_micro_batch_leaves_its_window_as_it_would_be_without_it() {
    let _guard = serial();
    let (a, b, c, d) = ((1.3, 3), (-0.4, 7), (2.9, 5), (0.6, 1));
    for (name, kind, maker) in MAKERS {
        let wanted = run(maker, kind, &[&[a, b], &[c, d]]);
        let windows: [[&[Micro]; 2]; 4] = [
            [&[EMPTY, a, b], &[EMPTY, c, d]],
            [&[a, EMPTY, b], &[c, EMPTY, d]],
            [&[a, b, EMPTY], &[c, d, EMPTY]],
            [&[EMPTY, a, b, EMPTY], &[EMPTY, c, EMPTY, d]],
        ];
        for (at, windows) in windows.iter().enumerate() {
            let got = run(maker, kind, windows);
            assert!(same_bits(&wanted.0[0], &got.0[0]), "{name}, {at}: {:?}", values(&got.0[0]));
            assert_eq!(wanted.1, got.1, "{name}, {at}");
        }
    }
}

/// By arithmetic: slopes 1 of 1 token and 3 of 3.
#[test]
fn its_loss_is_in_no_mean_and_its_gradient_in_no_sum() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let mut training = Stack::of(&vs, sgd(&vs)).with(GradAccumulator::every(3)).build().unwrap();
    let first = training.step_with(|| loss(&w, EMPTY)).unwrap();
    assert!(matches!(first, StepOutcome::Accumulating { done: 1, of: Some(3) }));
    assert!(!w.grad().defined(), "it had no backward");
    let _ = training.step_with(|| Ok(Loss::mean(&w.sum(Kind::Float) + 1.0, 1))).unwrap();
    let outcome = training.step_with(|| Ok(Loss::sum(w.sum(Kind::Float) * 9.0 + 9.0, 3))).unwrap();
    let StepOutcome::Stepped { loss, tokens, .. } = outcome else { panic!("{outcome:?}") };
    assert_eq!((loss.double_value(&[]), tokens), (2.5, 4.0));
    assert_eq!(values(&w), [-2.5]);
}

#[test]
fn a_window_of_nothing_is_skipped_and_moves_nothing_but_the_count() {
    let _guard = serial();
    for (name, kind, maker) in MAKERS {
        let mut vs = nn::VarStore::new(Device::Cpu);
        let w = vs.root().ones("w", &[3]);
        vs.set_kind(kind);
        let mut training = maker(&vs, 2).with(Cosine::new(9).warm_up(2)).build().unwrap();
        let _ = training.step_with(|| loss(&w, (1.0, 2))).unwrap();
        assert!(training.step_with(|| loss(&w, (2.0, 3))).unwrap().stepped());
        let before = training.state().unwrap();
        let _ = training.step_with(|| loss(&w, EMPTY)).unwrap();
        let outcome = training.step_with(|| loss(&w, EMPTY)).unwrap();
        let nothing = |outcome: &StepOutcome| {
            matches!(outcome, StepOutcome::Skipped { reason: SkipReason::NoTokens, split: None })
        };
        assert!(nothing(&outcome), "{name}: {outcome:?}");
        let position = training.position();
        assert_eq!((position.steps, position.windows, position.micro_batches), (1, 2, 4), "{name}");
        let after = training.state().unwrap();
        for (part, value) in before.iter().filter(|(part, _)| !part.starts_with("position.")) {
            assert_eq!(format!("{value:?}"), format!("{:?}", after.get(part).unwrap()), "{name}: {part}");
        }
        // A window that flush ends, and one that trains again.
        let _ = training.step_with(|| loss(&w, EMPTY)).unwrap();
        assert!(nothing(&training.flush().unwrap().unwrap()), "{name}");
        let _ = training.step_with(|| loss(&w, (1.0, 2))).unwrap();
        assert!(training.step_with(|| loss(&w, (2.0, 3))).unwrap().stepped(), "{name}");
    }
}

#[test]
fn batches_and_windows_by_tokens_have_empty_parts_too() {
    let _guard = serial();
    let (vs, w) = vector(1);
    // Slopes, and whether a label counts.
    let labelled = |slopes: &[f32], counts: &[f32]| (Tensor::from_slice(slopes), Tensor::from_slice(counts));
    let masked = |(slopes, counts): &(Tensor, Tensor)| {
        let n = counts.sum(Kind::Float).double_value(&[]);
        Ok(Loss::mean((&w * slopes * counts).sum(Kind::Float) / n, n))
    };
    let mut training = Stack::of(&vs, sgd(&vs)).with(GradAccumulator::every(3)).build().unwrap();
    let some = labelled(&[5.0, 1.0, 9.0, 9.0, 2.0, 3.0], &[0.0, 1.0, 0.0, 0.0, 1.0, 1.0]);
    let outcome = training.step_batch(&some, masked).unwrap();
    assert!(matches!(outcome, StepOutcome::Stepped { tokens: 3.0, .. }), "{outcome:?}");
    assert_eq!(values(&w), [-2.0]);
    let none = labelled(&[1.0, 2.0, 3.0], &[0.0; 3]);
    let outcome = training.step_batch(&none, masked).unwrap();
    let split = Split { batch: 3, rows: 1, micro_batches: 3, retries: 0 };
    let skipped =
        |outcome: &StepOutcome| matches!(outcome, StepOutcome::Skipped { reason: SkipReason::NoTokens, .. });
    assert!(skipped(&outcome) && outcome.split() == Some(split), "{outcome:?}");

    let mut finding = Stack::of(&vs, sgd(&vs)).with(MicroBatcher::new().start(1)).build().unwrap();
    assert!(skipped(&finding.step_batch(&none, masked).unwrap()));

    let (vs, w) = vector(1);
    let mut training = Stack::of(&vs, sgd(&vs)).with(GradAccumulator::tokens(4)).build().unwrap();
    let mut told = Vec::new();
    let micros = [EMPTY, (1.0, 2), EMPTY, (2.0, 2), EMPTY];
    for micro in micros {
        if let StepOutcome::Stepped { tokens, .. } = training.step_with(|| loss(&w, micro)).unwrap() {
            told.push(tokens);
        }
    }
    assert_eq!((told, values(&w)), (vec![4.0], vec![-1.5]));
    assert!(skipped(&training.flush().unwrap().unwrap()));
}

#[test]
fn its_forward_counts_for_buffers_and_generators_and_its_graph_goes() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let norm =
        nn::batch_norm1d(vs.root() / "norm", 2, nn::BatchNormConfig { momentum: 0.5, ..Default::default() });
    let mut training = Stack::of(&vs, sgd(&vs)).with(GradAccumulator::every(2)).build().unwrap();
    let x = Tensor::from_slice(&[1f32, 3.0, 3.0, 5.0]).view([2, 2]);
    let before = live();
    memfit::tch::manual_seed(1);
    let _ = training
        .step_with(|| Ok(Loss::mean(norm.forward_t(&x, true).dropout(0.5, true).sum(Kind::Float), 0)))
        .unwrap();
    assert_eq!(live(), before);
    let drawn = Tensor::rand([4], (Kind::Float, Device::Cpu));
    assert_eq!(values(&norm.running_mean), [1.0, 2.0]);
    memfit::tch::manual_seed(1);
    let _ = x.dropout(0.5, true);
    assert!(same_bits(&drawn, &Tensor::rand([4], (Kind::Float, Device::Cpu))));
    // No graph is needed, since there is no backward.
    let outcome = training.step_with(|| Ok(Loss::mean(Tensor::from(f32::NAN), 0))).unwrap();
    assert!(matches!(outcome, StepOutcome::Skipped { reason: SkipReason::NoTokens, .. }));
    assert_eq!(values(&norm.running_mean), [1.0, 2.0]);
}

#[test]
fn a_momentum_that_takes_each_gradient_at_once_refuses_it_and_nothing_joined() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let optimizer = InBackward::new(momentum(&vs)).unwrap();
    let mut training = Stack::of(&vs, optimizer).with(GradAccumulator::every(2)).build().unwrap();
    let error = training.step_with(|| loss(&w, EMPTY)).unwrap_err();
    assert!(matches!(error, Error::CallOrder { .. }), "{error}");
    assert!(error.to_string().contains("of 0 times"), "{error}");
    // The window goes on with others; one that ends with it would need another divisor.
    let _ = training.step_with(|| loss(&w, (1.0, 2))).unwrap();
    assert!(matches!(training.step_with(|| loss(&w, EMPTY)), Err(Error::CallOrder { .. })));
    assert!(training.step_with(|| loss(&w, (3.0, 2))).unwrap().stepped());
    assert!((values(&w)[0] + 0.6).abs() < 1e-6, "{:?}", values(&w));
    // Alone in its window it is skipped like any other.
    let optimizer = InBackward::new(momentum(&vs)).unwrap();
    let mut training = Stack::of(&vs, optimizer).build().unwrap();
    let outcome = training.step_with(|| loss(&w, EMPTY)).unwrap();
    assert!(matches!(outcome, StepOutcome::Skipped { reason: SkipReason::NoTokens, .. }));
}

#[test]
fn a_window_that_began_with_it_is_saved_and_gone_on_with() {
    let _guard = serial();
    let run = |resume: bool| {
        let (vs, w) = vector(1);
        let mut training = of(&vs, momentum(&vs), 3).build().unwrap();
        let _ = training.step_with(|| loss(&w, EMPTY)).unwrap();
        if resume {
            let state = training.state().unwrap();
            let _ = training.step_with(|| loss(&w, (9.0, 9))).unwrap();
            training.load_state(&state).unwrap();
        }
        let _ = training.step_with(|| loss(&w, (1.0, 3))).unwrap();
        assert!(training.step_with(|| loss(&w, (2.0, 4))).unwrap().stepped());
        values(&w)
    };
    assert_eq!(run(true), run(false));
}
