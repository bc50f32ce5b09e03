//! Windows: their ends, their weights, and what they hold.

mod support;

use std::sync::{Arc, Mutex};

use memfit::memory::{PeakScope, stats};
use memfit::strategies::GradAccumulator;
use memfit::tch::{Device, Kind, Tensor, nn, nn::Module};
use memfit::{Batch, Error, Loss, Result, Stack, StepOutcome};
use support::{difference, serial, sgd, slope, values, vector};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

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
    for bad in [f64::NAN, f64::INFINITY, -1.0] {
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
    assert!(training.state().is_ok());
    training.discard().unwrap();
    assert_eq!(values(&w), [0.0]);
    assert!(!w.grad().defined());
    assert!(training.windows(batches()).next().unwrap().is_ok());
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

/// Cases 15 and 19.
#[test]
fn a_window_holds_one_gradient_set_and_no_graph() {
    let _guard = serial();
    let model_bytes = 4 * (256 * 256 + 256) as u64;
    let run = |every: usize| {
        let vs = nn::VarStore::new(Device::Cpu);
        let model = nn::linear(vs.root(), 256, 256, Default::default());
        let mut training = Stack::of(&vs, sgd(&vs)).with(GradAccumulator::every(every)).build().unwrap();
        let x = Tensor::randn([8, 256], CPU);
        let before = stats(Device::Cpu).unwrap().current;
        let scope = PeakScope::new(Device::Cpu).unwrap();
        let mut live = Vec::new();
        for _ in 0..every {
            let _ = training
                .step_with(|| Ok(Loss::mean(model.forward(&x).square().mean(Kind::Float), 8)))
                .unwrap();
            live.push(stats(Device::Cpu).unwrap().current - before);
        }
        (live, scope.peak() - before)
    };
    let (live, window_peak) = run(5);
    // Backward is not postponed: each micro-batch leaves one gradient set and its loss, 4 bytes.
    assert!(live[..4].iter().all(|bytes| *bytes == model_bytes + 4), "{live:?}");
    assert_eq!(live[4], 0);
    // The first micro-batch's gradients are taken over, later ones are added to them.
    let (_, single_peak) = run(1);
    assert!(
        window_peak >= single_peak && window_peak <= single_peak + model_bytes + 4,
        "{single_peak} {window_peak}"
    );
}

#[test]
fn a_split_that_moves_batch_norm_is_warned_of_once() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let norm = nn::batch_norm1d(vs.root() / "norm", 4, Default::default());
    let warnings = Warnings::default();
    let seen = warnings.0.clone();
    tracing::subscriber::with_default(warnings, || {
        let mut training = Stack::of(&vs, sgd(&vs)).with(GradAccumulator::every(2)).build().unwrap();
        let batch = Tensor::randn([8, 4], CPU);
        for _ in 0..3 {
            let _ = training
                .step_batch(&batch, |x| {
                    Ok(Loss::mean(x.apply_t(&norm, true).square().mean(Kind::Float), x.size()[0]))
                })
                .unwrap();
        }
        // Dropped with an open window: that is told, too.
        let _ = training
            .step_with(|| Ok(Loss::mean(batch.apply_t(&norm, true).square().mean(Kind::Float), 8)))
            .unwrap();
    });
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 2, "{seen:?}");
    assert!(seen[0].contains("batch_norm") && seen[0].contains("norm.running_mean"), "{seen:?}");
    assert!(seen[1].contains("open window") && seen[1].contains("flush()"), "{seen:?}");
}

/// A subscriber that keeps the texts of warnings.
#[derive(Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0.push_str(&format!("{value:?}"));
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}
