//! What is refused, and what comes too late.

use super::*;

/// A strategy of a user's that says nothing of what it does.
#[derive(Debug)]
struct Silent(fn(&mut UpdatePhase<'_>, NextUpdate<'_>) -> Result<Verdict>);

impl Strategy for Silent {
    fn place(&self) -> Place {
        Place::Clip
    }
    fn update(&mut self, phase: &mut UpdatePhase<'_>, next: NextUpdate<'_>) -> Result<Verdict> {
        (self.0)(phase, next)
    }
}

fn refusal(builder: StackBuilder, other: &str) {
    match builder.build() {
        Err(Error::Incompatible { left, right, remedy, .. }) => {
            assert!(left.starts_with("InBackward("), "{left}");
            assert!(right.contains(other), "{right} is not {other}");
            assert!(!remedy.is_empty());
        }
        other => panic!("{other:?}"),
    }
}

/// Case 41.
#[test]
fn what_needs_all_gradients_is_refused_by_name_of_both() {
    let _guard = serial();
    let (vs, _w) = vector(1);
    let early = || Stack::of(&vs, InBackward::new(plain(&vs)).unwrap());
    refusal(early().with(GradClip::norm(1.0)), "GradClip::norm");
    refusal(early().with(GradClip::value(1.0)), "GradClip::value");
    refusal(early().with(AmpScaler::fp16()), "AmpScaler::fp16");
    refusal(early().with(MasterWeights::fp32()), "MasterWeights");
    refusal(early().with(Rollback::micro_batch()), "Rollback");
    refusal(early().with(GradAccumulator::every(2).fp32()), "fp32");
    let window = |optimizer: Box<dyn Optimizer>| Stack::of(&vs, InBackward::new(optimizer).unwrap());
    refusal(window(Box::new(adamw(&vs))).with(GradAccumulator::every(2)), "GradAccumulator::every(2)");
    refusal(window(Box::new(heavy(&vs))).with(GradAccumulator::tokens(2)), "GradAccumulator::tokens(2)");
    let nesterov = Sgd::new(&vs, SgdConfig::default().nesterov(0.9)).unwrap();
    assert_eq!(nesterov.config().kind, Momentum::Nesterov);
    refusal(window(Box::new(nesterov)).with(GradAccumulator::every(2)), "GradAccumulator::every(2)");
    assert!(window(Box::new(adamw(&vs))).with(GradAccumulator::every(1)).build().is_ok());
}

#[test]
fn optimizers_that_cannot_are_refused() {
    let _guard = serial();
    let (vs, _w) = vector(1);
    let tch = TchOptimizer::new(nn::Sgd::default().build(&vs, 0.1).unwrap(), &vs, 0.1).unwrap();
    assert!(matches!(InBackward::new(tch), Err(Error::Unsupported { .. })));
    let twice = InBackward::new(InBackward::new(plain(&vs)).unwrap());
    assert!(matches!(twice, Err(Error::Unsupported { .. })));
    let inside = CpuOffload::optimizer(InBackward::new(plain(&vs)).unwrap()).resident();
    assert!(inside.unwrap_err().to_string().contains("InBackward::new(CpuOffload::optimizer"));
}

fn poisoned(error: Error, contains: &str) {
    assert!(matches!(error, Error::Poisoned { .. }), "{error}");
    assert!(error.to_string().contains(contains), "{error}");
}

/// Momentum in backward, in windows of three.
fn in_threes(vs: &nn::VarStore) -> Stack {
    let optimizer = InBackward::new(heavy(vs)).unwrap();
    Stack::of(vs, optimizer).with(GradAccumulator::every(3)).build().unwrap()
}

fn out_of_order(error: Error, contains: &str) {
    assert!(matches!(error, Error::CallOrder { .. }), "{error}");
    assert!(error.to_string().contains(contains), "{error}");
}

#[test]
fn what_does_not_fit_a_window_is_refused_before_it_joins_and_the_window_goes_on() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let stack = || in_threes(&vs);
    let loss = |n: i32| Ok(Loss::mean(slope(&w, &[1.0]), n));
    let (mut training, mut disturbed) = (stack(), stack());
    for _ in 0..3 {
        let _ = training.step_with(|| loss(1)).unwrap();
    }
    let moved = w.double_value(&[0]);
    let _ = tch::no_grad(|| w.shallow_clone().fill_(0.0));
    let _ = disturbed.step_with(|| loss(1)).unwrap();
    out_of_order(disturbed.flush().unwrap_err(), "windows");
    out_of_order(disturbed.step_with(|| loss(2)).unwrap_err(), "equal weight");
    let _ = disturbed.step_with(|| loss(1)).unwrap();
    assert!(disturbed.step_with(|| loss(1)).unwrap().stepped());
    assert_eq!(w.double_value(&[0]), moved);
    assert!(moved < 0.0);
}

#[test]
fn a_window_that_cannot_be_undone_is_poisoned() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let stack = || in_threes(&vs);
    let loss = |n: i32| Ok(Loss::mean(slope(&w, &[1.0]), n));
    let mut training = stack();
    let _ = training.step_with(|| loss(1)).unwrap();
    poisoned(training.discard().unwrap_err(), "discard");
    // Rows that do not split evenly are refused before anything moves.
    let mut training = stack();
    let uneven = training.step_batch(&Tensor::ones([10, 1], CPU), |x| loss(x.size()[0] as i32));
    assert!(matches!(uneven, Err(Error::Incompatible { .. })), "{uneven:?}");
    assert!(training.step_batch(&Tensor::ones([9, 1], CPU), |_| loss(3)).unwrap().stepped());
}

#[test]
fn a_strategy_that_changes_its_mind_after_parameters_moved_poisons() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let run = |silent: Silent| {
        let optimizer = InBackward::new(plain(&vs)).unwrap();
        let mut training = Stack::of(&vs, optimizer).with(silent).build().unwrap();
        training.step_with(|| Ok(Loss::of(slope(&w, &[1.0])))).unwrap_err()
    };
    let skip = Silent(|_, _| Ok(Verdict::Skipped(SkipReason::Strategy("late"))));
    poisoned(run(skip), "did not call next");
    let clip = Silent(|phase, next| {
        phase.update.divisor *= 2.0;
        next(phase)
    });
    poisoned(run(clip), "divisor");
    let rate = Silent(|phase, next| {
        phase.optimizer.groups_mut()[0].lr = 9.0;
        next(phase)
    });
    poisoned(run(rate), "rate");
}

/// Case 29: a weight whose value another node still needs.
#[test]
fn a_weight_that_backward_still_needs_is_never_silently_changed() {
    let _guard = serial();
    for checkpointed in [false, true] {
        let run = |early: bool| {
            let vs = nn::VarStore::new(Device::Cpu);
            memfit::tch::manual_seed(3);
            let first = vs.root().randn("first", &[4, 4], 0.0, 1.0);
            let w = vs.root().randn("w", &[4, 4], 0.0, 1.0);
            let x = Tensor::ones([2, 4], CPU);
            let loss = || {
                let hidden = x.matmul(&first);
                // The value of `w` is read without a gradient, and again with one.
                let read = if checkpointed {
                    let shared = Shared::new(w.detach());
                    checkpoint(&shared, &hidden, |w, hidden| hidden.matmul(w).tanh())?
                } else {
                    hidden.matmul(&w.detach()).tanh()
                };
                Ok(Loss::of(read.matmul(&w).sum(Kind::Float)))
            };
            let builder = if early {
                Stack::of(&vs, InBackward::new(plain(&vs)).unwrap())
            } else {
                Stack::of(&vs, plain(&vs))
            };
            let outcome = builder.build().unwrap().step_with(loss);
            (outcome.map(|_| ()), copies(&vs.trainable_variables()))
        };
        assert!(run(false).0.is_ok());
        let error = run(true).0.unwrap_err();
        let Error::Poisoned { source } = &error else { panic!("{error}") };
        assert!(matches!(**source, Error::Modified { .. }), "{source}");
    }
}
