//! What a failure in backward leaves.

use super::*;

/// A segment whose recompute fails on demand.
fn failing(w: &Tensor, fails: &Arc<AtomicUsize>) -> impl Fn(&Tensor) -> Result<Tensor> {
    let shared = Shared::new((w.shallow_clone(), fails.clone()));
    move |x| {
        checkpoint(&shared, x, |(w, fails), x| {
            if fails.load(Ordering::Relaxed) > 0 && fails.fetch_add(1, Ordering::Relaxed) > 1 {
                panic!("in recompute");
            }
            (x * w).tanh()
        })
    }
}

#[test]
fn a_backward_that_fails_before_anything_moved_leaves_everything_and_after_it_poisons() {
    let _guard = serial();
    for moved in [false, true] {
        let vs = nn::VarStore::new(Device::Cpu);
        let a = vs.root().ones("a", &[2]);
        let b = vs.root().ones("b", &[2]);
        let fails = Arc::new(AtomicUsize::new(0));
        let segment = failing(&a, &fails);
        let mut training = Stack::of(&vs, InBackward::new(adamw(&vs)).unwrap()).build().unwrap();
        // `b` is final before the segment of `a` is computed again, or takes no part.
        let loss = || {
            let y = segment(&Tensor::ones([2], CPU))?;
            Ok(Loss::of(if moved { y * &b } else { y }.sum(Kind::Float)))
        };
        let _ = training.step_with(loss).unwrap();
        let (before, state) = (copies(&[a.shallow_clone(), b.shallow_clone()]), training.position());
        fails.store(1, Ordering::Relaxed);
        let error = training.step_with(loss).unwrap_err();
        assert_eq!(matches!(error, Error::Poisoned { .. }), moved, "{error}");
        assert!(error.to_string().contains("in recompute"), "{error}");
        fails.store(0, Ordering::Relaxed);
        // The optimizer is back from the backward it was lent to.
        assert_eq!(training.optimizer().name(), "InBackward(AdamW)");
        assert_eq!(training.position(), state);
        if moved {
            assert!(training.step_with(loss).is_err());
        } else {
            assert!(same(&before, &[a.shallow_clone(), b.shallow_clone()]));
            assert!(training.step_with(loss).unwrap().stepped());
        }
    }
}

#[test]
fn an_optimizer_that_fails_or_panics_in_backward_comes_back() {
    let _guard = serial();
    type Answer = fn(&Ready) -> Result<Heard>;
    let cases: [(Answer, bool, &str); 3] = [
        (|_| Err(Error::config("mine", "refused")), false, "refused"),
        (|_| Err(Error::Poisoned { source: Box::new(Error::config("mine", "half-way")) }), true, "half-way"),
        (|_| panic!("in a hook"), true, "in a hook"),
    ];
    for (then, poisons, text) in cases {
        let (vs, loss) = chain();
        let recorder = Recorder::new(&vs, GradientUse::WhenFinal, then);
        let mut training = Stack::of(&vs, recorder).build().unwrap();
        let error = training.step_with(|| Ok(Loss::of(loss()))).unwrap_err();
        assert_eq!(matches!(error, Error::Poisoned { .. }), poisons, "{error}");
        assert!(error.to_string().contains(text), "{error}");
        assert_eq!(training.optimizer().name(), "Recorder");
    }
}

#[test]
fn a_backward_inside_a_hook_is_an_error_and_no_hang() {
    let _guard = serial();
    let (vs, loss) = chain();
    let nested: fn(&Ready) -> Result<Heard> = |ready| {
        if ready.index == 2 {
            NESTED.lock().unwrap().as_ref().unwrap().f_backward()?;
        }
        Ok(Heard::Noted)
    };
    let mut training = Stack::of(&vs, Recorder::new(&vs, GradientUse::WhenFinal, nested)).build().unwrap();
    // Another leaf of the same optimizer.
    let other = (vs.variables()["a"].square()).sum(Kind::Float);
    *NESTED.lock().unwrap() = Some(other);
    let error = training.step_with(|| Ok(Loss::of(loss()))).unwrap_err();
    *NESTED.lock().unwrap() = None;
    assert!(error.to_string().contains("inside itself"), "{error}");
}

static NESTED: Mutex<Option<Tensor>> = Mutex::new(None);

#[test]
fn a_closure_that_panics_costs_nothing() {
    let _guard = serial();
    let (vs, loss) = chain();
    let mut training = Stack::of(&vs, InBackward::new(adamw(&vs)).unwrap()).build().unwrap();
    let before = copies(&vs.trainable_variables());
    assert!(training.step_with(|| panic!("the user's own")).is_err());
    assert!(same(&before, &vs.trainable_variables()));
    assert!(training.step_with(|| Ok(Loss::of(loss()))).unwrap().stepped());
}

/// A backward of the user's own, outside of a step, moves nothing.
#[test]
fn a_backward_outside_of_a_step_moves_nothing() {
    let _guard = serial();
    let (vs, loss) = chain();
    let mut training = Stack::of(&vs, InBackward::new(adamw(&vs)).unwrap()).build().unwrap();
    let outcome = training.step_with(|| Ok(Loss::of(loss()))).unwrap();
    assert!(matches!(outcome, StepOutcome::Stepped { .. }));
    let before = copies(&vs.trainable_variables());
    loss().backward();
    assert!(same(&before, &vs.trainable_variables()));
}
