//! The event "gradient final": tells an optimizer of gradients while backward makes them.
//!
//! The optimizer is lent to hooks on its parameters for the time of one backward. A gradient
//! is final when the window's last backward has added it up; parameters that are absent from
//! that backward are left for the optimizer's `step`. Strategies that reduce gradients say so
//! with `Gradients::AfterClose`, and then nothing is told early.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use crate::error::{Error, Result};
use crate::ffi;
use crate::ffi::hooks::{HookGuard, on_gradient};
use crate::optim::{Optimizer, ParamGroup};
use crate::state::{Named, StateVisitor};
use crate::step::{GradientUse, Gradients, Heard, MicroBatch, Ready, Strategy, Update, UpdatePhase};

/// Hooks on an optimizer's parameters, and what they told in the open window.
#[derive(Debug, Default)]
pub(super) struct Finals {
    desk: Arc<Desk>,
    /// In the order of the groups; `None` where a parameter needs no gradient.
    hooks: Vec<Vec<Option<Hook>>>,
    /// What the optimizer was told of the update in this window's backward passes.
    told: Option<Told>,
    /// Micro-batches of the window, where the optimizer was told so.
    of: Option<usize>,
}

#[derive(Debug)]
struct Hook {
    leaf: usize,
    _guard: HookGuard,
}

/// What parameters that moved in backward moved by.
#[derive(Clone, Debug, PartialEq)]
struct Told {
    divisor: f64,
    rates: Vec<(f64, f64)>,
}

/// One backward that the optimizer hears of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Event {
    pub(super) micro: MicroBatch,
    pub(super) update: Update,
}

/// Where hooks find the optimizer while it is lent.
#[derive(Debug, Default)]
struct Desk {
    lent: Mutex<Option<Lent>>,
    /// The thread that works at the desk.
    at_work: Mutex<Option<ThreadId>>,
}

#[derive(Debug)]
struct Lent {
    optimizer: Box<dyn Optimizer>,
    event: Event,
    /// Whether something changed that cannot be put back.
    changed: bool,
}

/// How a stack's optimizer hears of gradients beside these strategies.
pub(super) fn gradient_use(optimizer: &dyn Optimizer, strategies: &[Box<dyn Strategy>]) -> GradientUse {
    let wanted = optimizer.gradients();
    let later = strategies.iter().any(|strategy| strategy.gradients() == Gradients::AfterClose);
    if wanted == GradientUse::Announced && later { GradientUse::AtUpdate } else { wanted }
}

impl Finals {
    /// Forgets the window that was open: a load has put another state in its place.
    pub(super) fn forget(&mut self) {
        self.told = None;
        self.of = None;
    }

    /// Begins a window: hooks whatever parameter needs a gradient by now.
    pub(super) fn begin(&mut self, optimizer: &dyn Optimizer) -> Result<()> {
        self.forget();
        self.hooks.resize_with(optimizer.groups().len(), Vec::new);
        for (group, (hooks, members)) in self.hooks.iter_mut().zip(optimizer.groups()).enumerate() {
            hooks.resize_with(members.parameters().len(), || None);
            for (index, (hook, Named { tensor, .. })) in
                hooks.iter_mut().zip(members.parameters()).enumerate()
            {
                let leaf = ffi::tensor::identity(tensor);
                if hook.as_ref().is_none_or(|hook| hook.leaf != leaf) && tensor.requires_grad() {
                    let desk = self.desk.clone();
                    let guard = on_gradient(tensor, move || desk.ready(group, index))?;
                    *hook = Some(Hook { leaf, _guard: guard });
                }
            }
        }
        Ok(())
    }

    /// Runs a backward of which the optimizer hears.
    pub(super) fn during(
        &mut self,
        optimizer: &mut Box<dyn Optimizer>,
        event: Event,
        backward: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let rates = rates(optimizer.as_ref());
        let loan = Loan::new(&self.desk, optimizer, event);
        let ran = backward();
        if loan.end() {
            self.told = Some(Told { divisor: event.update.divisor, rates });
            self.of = event.micro.of;
        }
        ran
    }

    /// Whether the open window changed something in backward that cannot be put back.
    pub(super) fn changed(&self) -> bool {
        self.told.is_some()
    }

    /// Refuses a micro-batch that does not fit a window whose gradients are taken one by one.
    pub(super) fn check_micro(&self, micro: MicroBatch, weight: f64) -> Result<()> {
        let Some(of) = micro.of else {
            return Err(uneven("without the number of its window's micro-batches"));
        };
        if of > 1 && weight != 1.0 {
            return Err(uneven(&format!(
                "of {weight} times the first one's weight in a window of {of} micro-batches"
            )));
        }
        let fits =
            self.of.is_none_or(|told| told == of) && (micro.last == Some(true)) == (micro.index + 1 == of);
        if fits { Ok(()) } else { Err(uneven(&format!("as number {} of a window of {of}", micro.index))) }
    }

    /// Refuses to end a window after another number of micro-batches than was told.
    pub(super) fn check_end(&self, wanted: GradientUse, done: usize) -> Result<()> {
        match self.of {
            Some(of) if wanted == GradientUse::EachMicroBatch && of != done => {
                Err(uneven(&format!("to end a window of {of} micro-batches after {done}")))
            }
            _ => Ok(()),
        }
    }

    /// Refuses an update that differs from what parameters moved by in backward.
    pub(super) fn check_update(&self, phase: &UpdatePhase<'_>) -> Result<()> {
        let Some(told) = &self.told else { return Ok(()) };
        let now = Told { divisor: phase.update.divisor, rates: rates(phase.optimizer) };
        // A number of micro-batches and a sum of equal weights may differ in their last bit.
        let same = (now.divisor - told.divisor).abs() <= 1e-9 * told.divisor.abs();
        if same && now.rates == told.rates {
            return Ok(());
        }
        Err(Error::CallOrder {
            call: "Strategy::update",
            state: format!(
                "with another update than parameters already moved by in backward: divisor and (rate, decay) \
                 of each group {:?} {:?}, not {:?} {:?}",
                now.divisor, now.rates, told.divisor, told.rates
            ),
            remedy: "set rates in prepare and after a step, declare measures() where a strategy changes the \
                     divisor, or use an optimizer that does not update in backward",
        })
    }
}

fn rates(optimizer: &dyn Optimizer) -> Vec<(f64, f64)> {
    optimizer.groups().iter().map(|group| (group.lr, group.weight_decay)).collect()
}

fn uneven(state: &str) -> Error {
    Error::CallOrder {
        call: "a micro-batch whose gradients are added up in optimizer state",
        state: state.to_owned(),
        remedy: "use Stack::windows or step_batch with micro-batches of equal weight, or an optimizer that does \
                 not update in backward",
    }
}

impl Desk {
    /// A hook's call, on the thread that adds gradients up.
    fn ready(&self, group: usize, index: usize) -> Result<()> {
        let me = std::thread::current().id();
        if *lock(&self.at_work) == Some(me) {
            return Err(Error::CallOrder {
                call: "Optimizer::gradient_ready",
                state: "inside itself".to_owned(),
                remedy: "run no backward in it",
            });
        }
        let mut lent = lock(&self.lent);
        // A backward of the user's own, or of another stack.
        let Some(lent) = lent.as_mut() else { return Ok(()) };
        *lock(&self.at_work) = Some(me);
        let _leaving = Leaving(&self.at_work);
        lent.ready(group, index)
    }
}

/// Ends a thread's work at the desk, on a panic too.
struct Leaving<'a>(&'a Mutex<Option<ThreadId>>);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        *lock(self.0) = None;
    }
}

impl Lent {
    fn ready(&mut self, group: usize, index: usize) -> Result<()> {
        let Event { micro, mut update } = self.event;
        let changes = self.optimizer.gradients().changes_in_backward();
        if changes && !self.optimizer.folds_divisor() {
            divide(self.optimizer.as_ref(), group, index, update.divisor)?;
            update.divisor = 1.0;
        }
        let before = self.changed;
        // Until the optimizer says otherwise: it may panic half-way.
        self.changed |= changes;
        let heard = self.optimizer.gradient_ready(&Ready { group, index, micro, update });
        let changed = matches!(heard, Ok(Heard::Changed) | Err(Error::Poisoned { .. }));
        self.changed = before || changed;
        heard.map(drop)
    }
}

fn divide(optimizer: &dyn Optimizer, group: usize, index: usize, divisor: f64) -> Result<()> {
    let parameter = optimizer.groups().get(group).and_then(|group| group.parameters().get(index));
    if let Some(mut grad) = parameter.and_then(|parameter| ffi::grad::get(&parameter.tensor))
        && divisor != 1.0
    {
        let _no_grad = tch::no_grad_guard();
        let _ = grad.f_div_scalar_(divisor)?;
    }
    Ok(())
}

/// The optimizer at the desk; it comes back when this is dropped.
struct Loan<'a> {
    desk: &'a Desk,
    home: &'a mut Box<dyn Optimizer>,
}

impl<'a> Loan<'a> {
    fn new(desk: &'a Desk, home: &'a mut Box<dyn Optimizer>, event: Event) -> Self {
        let optimizer = std::mem::replace(home, Box::new(Away));
        *lock(&desk.lent) = Some(Lent { optimizer, event, changed: false });
        Self { desk, home }
    }

    /// Whether something changed.
    fn end(mut self) -> bool {
        self.take_back()
    }

    fn take_back(&mut self) -> bool {
        // Waits for a hook that still runs on a thread of libtorch's.
        let Some(lent) = lock(&self.desk.lent).take() else { return false };
        *self.home = lent.optimizer;
        lent.changed
    }
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        self.take_back();
    }
}

/// Stands where the optimizer was.
#[derive(Debug)]
struct Away;

impl Optimizer for Away {
    fn name(&self) -> String {
        "an optimizer that is lent to a backward".to_owned()
    }

    fn groups(&self) -> &[ParamGroup] {
        &[]
    }

    fn groups_mut(&mut self) -> &mut [ParamGroup] {
        &mut []
    }

    fn step(&mut self, _: &Update) -> Result<()> {
        Err(Error::CallOrder {
            call: "Optimizer::step",
            state: "during backward".to_owned(),
            remedy: "wait for the backward's end",
        })
    }

    fn visit_state(&mut self, _: &mut StateVisitor<'_>) -> Result<()> {
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
