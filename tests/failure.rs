//! What a failure leaves: rule 7 of `docs/design.md`, wherever in a step it happens.

mod support;

use memfit::memory::{FailAt, Limit, stats};
use memfit::optim::{AdamW, AdamWConfig, Sgd, SgdConfig};
use memfit::strategies::{AmpScaler, Cosine, GradAccumulator, Rollback};
use memfit::tch::{Device, Kind, Tensor, nn, nn::Module};
use memfit::{Error, Loss, Result, Stack, StepOutcome, Value};
use support::{copies, same, serial};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

/// A model with buffers that move and a generator that draws.
struct Fixture {
    vs: nn::VarStore,
    linear: nn::Linear,
    norm: nn::BatchNorm,
}

impl Fixture {
    fn new() -> Self {
        memfit::tch::manual_seed(2);
        let vs = nn::VarStore::new(Device::Cpu);
        let linear = nn::linear(vs.root() / "linear", 8, 8, Default::default());
        let norm = nn::batch_norm1d(vs.root() / "norm", 8, Default::default());
        Self { vs, linear, norm }
    }

    fn loss(&self, x: &Tensor) -> Result<Loss> {
        let hidden = self.linear.forward(x).apply_t(&self.norm, true).dropout(0.5, true);
        Ok(Loss::mean(hidden.square().mean(Kind::Float), x.size()[0]))
    }

    fn stack(&self, every: usize, rollback: bool) -> Stack {
        let optimizer = AdamW::new(&self.vs, AdamWConfig::default().lr(0.01)).unwrap();
        let builder = Stack::of(&self.vs, optimizer)
            .with(AmpScaler::fp16())
            .with(Cosine::new(50).warm_up(5))
            .with(GradAccumulator::every(every));
        if rollback { builder.with(Rollback::micro_batch()).build() } else { builder.build() }.unwrap()
    }

    /// Everything that training can move, and what the generator would draw next.
    fn everything(&self) -> Vec<Tensor> {
        let mut named: Vec<_> = self.vs.variables().into_iter().collect();
        named.sort_by(|a, b| a.0.cmp(&b.0));
        let mut all = copies(&named.into_iter().map(|(_, tensor)| tensor).collect::<Vec<_>>());
        let generators = memfit::rng::Generators::capture(Device::Cpu).unwrap();
        all.push(Tensor::rand([4], CPU));
        generators.restore().unwrap();
        all
    }

    fn gradients(&self) -> usize {
        self.vs.trainable_variables().iter().filter(|p| p.grad().defined()).count()
    }
}

fn data() -> Vec<Tensor> {
    memfit::tch::manual_seed(4);
    (0..8).map(|_| Tensor::randn([16, 8], CPU)).collect()
}

fn texts(training: &mut Stack) -> Vec<String> {
    let state = training.state().unwrap();
    let text = |value: &Value| match value {
        Value::Tensor(tensor) => {
            format!("{:?}", Vec::<f64>::try_from(tensor.to_kind(Kind::Double).view(-1)).unwrap())
        }
        other => format!("{other:?}"),
    };
    state.iter().map(|(name, value)| format!("{name} {}", text(value))).collect()
}

fn panics(_: &Tensor) -> Result<Loss> {
    panic!("the user's own")
}

/// A loss whose backward asks for more than is left.
fn starved(model: &Fixture, x: &Tensor, limit: &mut Option<Limit>, room: u64) -> Result<Loss> {
    let loss = model.loss(x)?;
    *limit = Some(Limit::new(stats(Device::Cpu)?.current + room)?);
    Ok(loss)
}

#[test]
fn a_failed_forward_leaves_everything_as_before() {
    let _guard = serial();
    let model = Fixture::new();
    let mut training = model.stack(1, false);
    let data = data();
    let (before, state) = (model.everything(), texts(&mut training));
    let error = training
        .step_with(|| {
            let _ = model.loss(&data[0])?;
            panics(&data[0])
        })
        .unwrap_err();
    assert!(
        matches!(&error, Error::Panic { place: "forward", message } if message == "the user's own"),
        "{error}"
    );
    assert!(same(&before, &model.everything()));
    assert_eq!(state, texts(&mut training));
    assert_eq!(model.gradients(), 0);
    assert!(training.step_with(|| model.loss(&data[0])).unwrap().stepped());
}

#[test]
fn a_failed_forward_in_a_window_costs_only_its_micro_batch() {
    let _guard = serial();
    let data = data();
    let run = |fail: bool| {
        let model = Fixture::new();
        let mut training = model.stack(3, false);
        for x in &data[..3] {
            if fail {
                let failed = training.step_with(|| {
                    let _ = model.loss(&data[7])?;
                    Err(Error::config("test", "fails"))
                });
                assert!(matches!(failed, Err(Error::Config { .. })));
            }
            let _ = training.step_with(|| model.loss(x)).unwrap();
        }
        assert_eq!(training.position().steps, 1);
        model.everything()
    };
    memfit::tch::manual_seed(9);
    let calm = run(false);
    memfit::tch::manual_seed(9);
    assert!(same(&calm, &run(true)));
}

#[test]
fn a_failed_backward_of_the_first_micro_batch_leaves_everything_as_before() {
    let _guard = serial();
    let model = Fixture::new();
    let mut training = model.stack(2, false);
    let data = data();
    let (before, state) = (model.everything(), texts(&mut training));
    let mut limit = None;
    let error = training.step_with(|| starved(&model, &data[0], &mut limit, 64)).unwrap_err();
    drop(limit);
    assert!(matches!(error, Error::OutOfMemory { requested: Some(_), limit: Some(_), .. }), "{error}");
    assert!(same(&before, &model.everything()));
    assert_eq!(state, texts(&mut training));
    assert_eq!(model.gradients(), 0);
}

#[test]
fn a_failed_backward_later_loses_the_window_and_goes_back_to_its_start() {
    let _guard = serial();
    let model = Fixture::new();
    let mut training = model.stack(3, false);
    let data = data();
    for x in &data[..3] {
        let _ = training.step_with(|| model.loss(x)).unwrap();
    }
    let (before, state) = (model.everything(), texts(&mut training));
    let _ = training.step_with(|| model.loss(&data[3])).unwrap();
    let mut limit = None;
    let error = training.step_with(|| starved(&model, &data[4], &mut limit, 64)).unwrap_err();
    drop(limit);
    assert!(matches!(&error, Error::WindowLost { micro: 1, .. }) && error.is_out_of_memory(), "{error}");
    assert!(same(&before, &model.everything()));
    assert_eq!(state, texts(&mut training));
    assert_eq!(model.gradients(), 0);
    assert_eq!(training.position().steps, 1);
}

#[test]
fn with_rollback_only_the_micro_batch_is_lost() {
    let _guard = serial();
    let data = data();
    let run = |fail: bool| {
        let model = Fixture::new();
        let mut training = model.stack(3, true);
        for (index, x) in data[..3].iter().enumerate() {
            for room in if fail && index > 0 { vec![64, 600] } else { vec![] } {
                // With little room the copy of the gradients fails, with more backward does.
                let mut limit = None;
                let error = training.step_with(|| starved(&model, &data[7], &mut limit, room)).unwrap_err();
                drop(limit);
                assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
            }
            let _ = training.step_with(|| model.loss(x)).unwrap();
        }
        assert_eq!(training.position().steps, 1);
        model.everything()
    };
    memfit::tch::manual_seed(9);
    let calm = run(false);
    memfit::tch::manual_seed(9);
    assert!(same(&calm, &run(true)));
}

#[test]
fn a_failed_split_goes_back_and_can_run_again() {
    let _guard = serial();
    let model = Fixture::new();
    let mut training = model.stack(4, false);
    let batch = Tensor::randn([16, 8], CPU);
    let (before, state) = (model.everything(), texts(&mut training));
    let mut calls = 0;
    let error = training
        .step_batch(&batch, |x| {
            calls += 1;
            if calls == 3 { panics(x) } else { model.loss(x) }
        })
        .unwrap_err();
    assert!(matches!(error, Error::Panic { .. }), "{error}");
    assert!(same(&before, &model.everything()));
    assert_eq!(state, texts(&mut training));
    assert!(training.step_batch(&batch, |x| model.loss(x)).unwrap().stepped());
}

/// Case 50: a failure at every single allocation of a step, in turn.
#[test]
fn a_failure_at_any_allocation_of_a_step_changes_nothing() {
    let _guard = serial();
    let model = Fixture::new();
    let mut training = model.stack(2, false);
    let batch = Tensor::randn([16, 8], CPU);
    let _ = training.step_batch(&batch, |x| model.loss(x)).unwrap();
    let (before, state) = (model.everything(), texts(&mut training));
    let mut failures = 0;
    for nth in 1.. {
        let fault = FailAt::nth(nth).unwrap();
        let outcome = training.step_batch(&batch, |x| model.loss(x));
        drop(fault);
        match outcome {
            Err(error) => {
                assert!(error.is_out_of_memory(), "allocation {nth}: {error}");
                assert!(same(&before, &model.everything()), "allocation {nth}");
                assert_eq!(state, texts(&mut training), "allocation {nth}");
                failures += 1;
            }
            Ok(outcome) => {
                assert!(outcome.stepped());
                break;
            }
        }
    }
    assert!(failures > 20, "{failures}");
}

#[test]
fn windows_follow_what_a_failure_did() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().zeros("w", &[1]);
    let optimizer = Sgd::new(&vs, SgdConfig::default().lr(1.0)).unwrap();
    let mut training = Stack::of(&vs, optimizer).with(GradAccumulator::every(2)).build().unwrap();
    let mut outcomes = Vec::new();
    for (number, micro) in training.windows((0..7).map(|_| Tensor::ones([1], CPU))).enumerate() {
        let outcome = training.step(micro.unwrap(), |x| {
            if number == 1 || number == 4 {
                return Err(Error::config("test", "fails"));
            }
            Ok(Loss::mean((&w * x).sum(Kind::Float), 1))
        });
        outcomes.push(match outcome {
            Ok(StepOutcome::Stepped { tokens, .. }) => format!("{tokens}"),
            Ok(_) => "…".to_owned(),
            Err(_) => "failed".to_owned(),
        });
    }
    // A failed forward leaves its window open: the next micro-batch takes its place.
    assert_eq!(outcomes, ["…", "failed", "2", "…", "failed", "2", "1"]);
}

#[test]
fn a_strategy_that_panics_is_an_error_and_the_next_step_works() {
    let _guard = serial();
    #[derive(Debug)]
    struct Nervous(u32);
    impl memfit::Strategy for Nervous {
        fn place(&self) -> memfit::Place {
            memfit::Place::Average
        }
        fn update(
            &mut self,
            phase: &mut memfit::UpdatePhase<'_>,
            next: memfit::NextUpdate<'_>,
        ) -> Result<memfit::Verdict> {
            self.0 += 1;
            if self.0 == 1 {
                panic!("nervous");
            }
            next(phase)
        }
    }
    let vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().zeros("w", &[1]);
    let optimizer = Sgd::new(&vs, SgdConfig::default().lr(1.0)).unwrap();
    let mut training = Stack::of(&vs, optimizer).with(Nervous(0)).build().unwrap();
    let error = training.step_with(|| Ok(Loss::of(w.sum(Kind::Float)))).unwrap_err();
    assert!(matches!(error, Error::Panic { place: "update", .. }), "{error}");
    assert_eq!(w.double_value(&[0]), 0.0);
    assert!(training.step_with(|| Ok(Loss::of(w.sum(Kind::Float)))).unwrap().stepped());
    assert_eq!(w.double_value(&[0]), -1.0);
}
