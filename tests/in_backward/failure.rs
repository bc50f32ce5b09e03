//! What a failure in backward leaves.

use memfit::memory::FailAt;
use memfit::optim::{Adafactor, AdafactorConfig, Muon, MuonConfig, Parameters};

use super::training::difference_of;
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

/// Case 50, in backward: either nothing changed and the next step is as ever, or what moved is
/// poisoned; never half a step that looks like one.
#[test]
fn a_failure_at_any_allocation_changes_nothing_or_poisons() {
    let _guard = serial();
    let makers: [(&str, Maker, usize); 6] = [
        ("AdamW", |vs| Box::new(adamw(vs)), 1),
        ("momentum in windows", |vs| Box::new(heavy(vs)), 2),
        ("plain in windows", |vs| Box::new(plain(vs)), 2),
        ("Adafactor", |vs| Box::new(Adafactor::new(vs, AdafactorConfig::default()).unwrap()), 1),
        ("Muon", |vs| Box::new(muon(vs)), 1),
        ("on disk", |vs| Box::new(CpuOffload::optimizer(muon(vs)).disk(std::env::temp_dir()).unwrap()), 1),
    ];
    for (name, make, every) in makers {
        let x = batches(&[4]).remove(0);
        let start = || {
            let model = Model::new(true);
            let builder = Stack::of(&model.vs, InBackward::new(make(&model.vs)).unwrap());
            let training = builder.with(GradAccumulator::every(every)).build().unwrap();
            (model, training)
        };
        let micro = |model: &Model, training: &mut Stack| {
            training.step_with(|| Ok(Loss::mean(model.loss(&x, true), 4))).map(drop)
        };
        let window = |model: &Model, training: &mut Stack| {
            (0..every).try_for_each(|_| micro(model, training)).unwrap();
        };
        let (calm, mut training) = start();
        window(&calm, &mut training);
        memfit::tch::manual_seed(9);
        window(&calm, &mut training);
        let (mut unchanged, mut poisoned) = (0, 0);
        for nth in 1.. {
            let (model, mut training) = start();
            window(&model, &mut training);
            let mut outcome = Ok(());
            memfit::tch::manual_seed(9);
            let (before, state) = (model.weights(), training.state().unwrap());
            let fault = FailAt::nth(nth).unwrap();
            let done = (0..every).map_while(|_| {
                outcome = micro(&model, &mut training);
                outcome.is_ok().then_some(())
            });
            let done = done.count();
            drop(fault);
            match outcome {
                Ok(()) => {
                    assert!(same(&model.weights(), &calm.weights()), "{name} {nth}");
                    break;
                }
                Err(Error::Poisoned { source }) => {
                    assert!(source.is_out_of_memory(), "{name} {nth}: {source}");
                    assert!(matches!(micro(&model, &mut training), Err(Error::CallOrder { .. })));
                    poisoned += 1;
                }
                Err(error) => {
                    assert!(error.is_out_of_memory(), "{name} {nth}: {error}");
                    // Those before a forward that failed stay in their window.
                    let lost = matches!(error, Error::WindowLost { .. });
                    let done = if lost { 0 } else { done };
                    if done == 0 {
                        assert!(same(&model.weights(), &before), "{name} {nth}");
                        assert_eq!(difference_of(&training.state().unwrap(), &state), None, "{name} {nth}");
                    }
                    (done..every).for_each(|_| micro(&model, &mut training).unwrap());
                    assert!(same(&model.weights(), &calm.weights()), "{name} {nth}");
                    unchanged += 1;
                }
            }
        }
        assert!(unchanged > 20 && poisoned > 0, "{name}: {unchanged} unchanged, {poisoned} poisoned");
    }
}

fn muon(vs: &nn::VarStore) -> Muon {
    let (matrices, others): (Vec<Named>, Vec<Named>) =
        vs.named().into_iter().partition(|named| named.tensor.dim() > 1);
    Muon::new(&matrices, &others, MuonConfig::default()).unwrap()
}

/// Refuses to move its parameter number `at`.
#[derive(Debug)]
struct Stubborn {
    inner: Sgd,
    at: usize,
    moved: usize,
    cancels: bool,
}

impl Optimizer for Stubborn {
    fn name(&self) -> String {
        "Stubborn".to_owned()
    }
    fn groups(&self) -> &[ParamGroup] {
        self.inner.groups()
    }
    fn groups_mut(&mut self) -> &mut [ParamGroup] {
        self.inner.groups_mut()
    }
    fn step(&mut self, update: &Update) -> Result<()> {
        self.inner.step(update)
    }
    fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        self.inner.visit_state(visitor)
    }
    fn allocate(&mut self) -> Result<()> {
        self.inner.allocate()
    }
    fn begin(&mut self, update: &Update) -> Result<()> {
        self.inner.begin(update)
    }
    fn cancel(&mut self) -> bool {
        self.cancels && self.inner.cancel()
    }
    fn steps_parameters(&self) -> bool {
        true
    }
    fn step_parameter(&mut self, group: usize, index: usize, update: &Update) -> Result<()> {
        self.moved += 1;
        if self.moved == self.at + 1 {
            return Err(Error::config("mine", "refused"));
        }
        self.inner.step_parameter(group, index, update)
    }
    fn folds_divisor(&self) -> bool {
        true
    }
}

#[test]
fn a_step_that_was_counted_but_moved_nothing_is_taken_back_or_poisoned() {
    let _guard = serial();
    for (at, cancels) in [(0, true), (0, false), (1, true)] {
        for early in [true, false] {
            let (vs, loss) = chain();
            let stubborn = Stubborn { inner: plain(&vs), at, moved: 0, cancels };
            // Without updates in backward, the offloading wrapper steps one by one.
            let optimizer: Box<dyn Optimizer> = if early {
                Box::new(InBackward::new(stubborn).unwrap())
            } else {
                Box::new(CpuOffload::optimizer(stubborn).resident().unwrap())
            };
            let mut training = Stack::of(&vs, optimizer).build().unwrap();
            let state = training.state().unwrap();
            let error = training.step_with(|| Ok(Loss::of(loss()))).unwrap_err();
            assert!(error.to_string().contains("refused"), "{error}");
            let taken_back = at == 0 && cancels;
            assert_eq!(!matches!(error, Error::Poisoned { .. }), taken_back, "{at} {cancels} {early}");
            if taken_back {
                assert_eq!(difference_of(&training.state().unwrap(), &state), None);
                assert!(training.step_with(|| Ok(Loss::of(loss()))).unwrap().stepped());
            }
        }
    }
}

/// A window that was lost is not continued by a state that is loaded after it.
#[test]
fn a_loaded_state_begins_a_new_window() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let optimizer = InBackward::new(heavy(&vs)).unwrap();
    let mut training = Stack::of(&vs, optimizer).with(GradAccumulator::every(2)).build().unwrap();
    let step = |training: &mut Stack| training.step_with(|| Ok(Loss::mean(slope(&w, &[1.0]), 1)));
    let state = training.state().unwrap();
    let _ = step(&mut training).unwrap();
    assert!(matches!(training.discard(), Err(Error::Poisoned { .. })));
    training.load_state(&state).unwrap();
    assert_eq!(difference_of(&training.state().unwrap(), &state), None);
    let _ = step(&mut training).unwrap();
    assert!(step(&mut training).unwrap().stepped());
    // g = 1 and 1, their mean 1; and one step is counted.
    assert!((values(&w)[0] + 0.05).abs() < 1e-9, "{:?}", values(&w));
    let now = training.state().unwrap();
    assert!(matches!(now.get("optimizer.steps"), Some(memfit::Value::Int(1))), "{now:?}");
}
