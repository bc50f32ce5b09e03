//! Updates each parameter in backward, as soon as its gradient is final.
//!
//! *Cost*: no bytes of its own. Without windows, gradients take the bytes of those that one
//! operator's backward makes at once (a linear layer: its weight's and its bias's), not those
//! of the whole model. In windows, plain SGD keeps the one gradient set of any window; SGD with
//! momentum adds each micro-batch's gradient into its momentum and frees it.
//!
//! *When it acts*: during the backward of a window's last micro-batch, on the thread that adds
//! gradients up; with momentum in windows, during every backward. Parameters that are absent
//! from the last backward move right after it.
//!
//! *Limits*: nothing that looks at all gradients before the update (clipping, fp16's loss
//! scale), keeps them until then, or runs a window again works beside it: `build()` refuses.
//! A failure in backward after the first parameter moved is [`Error::Poisoned`]. In windows
//! only SGD without Nesterov's momentum works; with momentum, micro-batches have equal weights,
//! their number is known before the window begins ([`Stack::windows`](crate::Stack::windows)
//! looks a whole window ahead, so its batches are alive), and sums are in another order.
//! Source: Lv et al., *Full Parameter Fine-tuning for Large Language Models with Limited
//! Resources* (LOMO), 2023; its shortcoming: no bound on the gradient's norm in one pass.
//!
//! ```
//! use memfit::{Loss, Stack, optim::{AdamW, AdamWConfig, InBackward}};
//! use memfit::tch::{nn, nn::Module, Device, Kind, Tensor};
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let model = nn::linear(vs.root(), 4, 1, Default::default());
//! let optimizer = InBackward::new(AdamW::new(&vs, AdamWConfig::default())?)?;
//! let mut training = Stack::of(&vs, optimizer).build()?;
//! let x = Tensor::randn([8, 4], (Kind::Float, Device::Cpu));
//! let outcome = training.step_with(|| Ok(Loss::of(model.forward(&x).square().mean(Kind::Float))))?;
//! assert!(outcome.stepped());
//! # Ok::<(), memfit::Error>(())
//! ```

use std::collections::HashSet;

use tch::Tensor;

use super::{Accumulates, GroupOptions, Optimizer, ParamGroup, Share};
use crate::error::{Error, Result};
use crate::ffi::grad;
use crate::state::{Named, StateVisitor};
use crate::step::{Conflict, Exactness, GradientUse, Heard, MicroBatch, Ready, Strategy, Update, WindowRule};

/// Updates in backward. See the [module](self).
#[derive(Debug)]
pub struct InBackward<O> {
    inner: O,
    window: Window,
}

/// What happened in the open window.
#[derive(Debug, Default)]
struct Window {
    /// Whether the inner optimizer has begun its step.
    begun: bool,
    /// Whether a parameter or its state changed.
    changed: bool,
    /// Parameters whose gradients joined their state and that have not moved yet.
    joined: HashSet<(usize, usize)>,
    /// Whether gradients join the state in this window.
    joining: bool,
}

impl<O: Optimizer> InBackward<O> {
    /// Wraps an optimizer that steps parameter by parameter: one of memfit's own, or
    /// `CpuOffload::optimizer(…)` around one.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for tch's own optimizer, and for one that already hears of
    /// gradients in backward by itself.
    pub fn new(inner: O) -> Result<Self> {
        let what = if !inner.steps_parameters() {
            "updating in backward"
        } else if inner.gradients().changes_in_backward() {
            "updating in backward twice over"
        } else {
            return Ok(Self { inner, window: Window::default() });
        };
        Err(Error::Unsupported {
            what: what.to_owned(),
            place: format!("by {}", inner.name()),
            remedy:
                "give InBackward::new one of memfit's own optimizers, or CpuOffload::optimizer(…) around one"
                    .to_owned(),
        })
    }

    /// The optimizer.
    pub fn get_ref(&self) -> &O {
        &self.inner
    }

    /// The optimizer.
    pub fn get_mut(&mut self) -> &mut O {
        &mut self.inner
    }

    /// The optimizer.
    pub fn into_inner(self) -> O {
        self.inner
    }

    fn parameter(&self, group: usize, index: usize) -> Option<Tensor> {
        let parameter = self.inner.groups().get(group)?.parameters().get(index)?;
        Some(parameter.tensor.shallow_clone())
    }

    fn begin_once(&mut self, update: &Update) -> Result<()> {
        if !self.window.begun {
            self.inner.begin(update)?;
            self.window.begun = true;
        }
        Ok(())
    }

    /// Moves one parameter by its final gradient, which goes.
    fn finish(&mut self, group: usize, index: usize, update: &Update) -> Result<()> {
        self.inner.step_parameter(group, index, update).map_err(|error| self.failed(error))?;
        self.window.changed = true;
        self.drop_gradient(group, index);
        Ok(())
    }

    /// Lets one gradient join the state; it goes.
    fn join(&mut self, group: usize, index: usize, update: &Update) -> Result<()> {
        let first = !self.window.joined.contains(&(group, index));
        let share = if first { Share::First } else { Share::Later };
        self.inner.accumulate(group, index, update, share).map_err(|error| self.failed(error))?;
        self.window.joined.insert((group, index));
        self.window.changed = true;
        self.drop_gradient(group, index);
        Ok(())
    }

    /// Moves one parameter by the gradients that joined its state, if any did.
    fn finish_joined(&mut self, group: usize, index: usize, update: &Update) -> Result<()> {
        if self.window.joined.remove(&(group, index)) {
            self.inner.step_accumulated(group, index, update).map_err(poisoned)?;
        }
        Ok(())
    }

    /// What a failure of the inner optimizer is: itself, and the step not counted, where nothing
    /// changed before.
    fn failed(&mut self, error: Error) -> Error {
        if matches!(error, Error::Poisoned { .. }) || self.window.changed || !self.inner.cancel() {
            return poisoned(error);
        }
        self.window = Window::default();
        error
    }

    fn drop_gradient(&self, group: usize, index: usize) {
        if let Some(parameter) = self.parameter(group, index) {
            grad::take(&parameter);
        }
    }

    fn joins(&self, micro: MicroBatch) -> bool {
        self.gradients() == GradientUse::EachMicroBatch && micro.of != Some(1)
    }

    /// Everything that was not told of in backward.
    fn sweep(&mut self, update: &Update) -> Result<()> {
        for group in 0..self.inner.groups().len() {
            for index in 0..self.inner.groups()[group].parameters().len() {
                self.sweep_one(group, index, update)?;
            }
        }
        Ok(())
    }

    fn sweep_one(&mut self, group: usize, index: usize, update: &Update) -> Result<()> {
        let Some(parameter) = self.parameter(group, index).filter(Tensor::requires_grad) else {
            return Ok(());
        };
        let present = grad::get(&parameter).is_some();
        if present && !self.window.joining {
            return self.finish(group, index, update);
        }
        if present {
            self.join(group, index, update)?;
        }
        self.finish_joined(group, index, update)
    }
}

impl<O: Optimizer> Optimizer for InBackward<O> {
    fn name(&self) -> String {
        format!("InBackward({})", self.inner.name())
    }

    fn groups(&self) -> &[ParamGroup] {
        self.inner.groups()
    }

    fn groups_mut(&mut self) -> &mut [ParamGroup] {
        self.inner.groups_mut()
    }

    fn gradients(&self) -> GradientUse {
        match self.inner.accumulates() {
            Accumulates::InState => GradientUse::EachMicroBatch,
            Accumulates::InGradients | Accumulates::Nowhere => GradientUse::WhenFinal,
        }
    }

    fn gradient_ready(&mut self, ready: &Ready) -> Result<Heard> {
        let Ready { group, index, micro, update } = ready;
        let Some(parameter) = self.parameter(*group, *index) else { return Ok(Heard::Noted) };
        if grad::get(&parameter).is_none() {
            return Ok(Heard::Noted);
        }
        self.begin_once(update)?;
        if self.joins(*micro) {
            self.window.joining = true;
            self.join(*group, *index, update)?;
            if micro.last == Some(true) {
                self.finish_joined(*group, *index, update)?;
            }
        } else {
            self.finish(*group, *index, update)?;
        }
        Ok(Heard::Changed)
    }

    fn step(&mut self, update: &Update) -> Result<()> {
        self.begin_once(update)?;
        let swept = self.sweep(update);
        self.window = Window::default();
        swept
    }

    fn exactness(&self, window: WindowRule) -> Exactness {
        let sums = self.gradients() == GradientUse::EachMicroBatch && window != WindowRule::Micros(1);
        let own = if sums { Exactness::SummationOrder } else { Exactness::Bitwise };
        own.and(self.inner.exactness(window))
    }

    fn refuses_snapshot(&self) -> Option<String> {
        let inner = self.inner.refuses_snapshot();
        let open = self.window.begun || !self.window.joined.is_empty();
        inner.or_else(|| {
            open.then(|| format!("gradients of an open window are in the state of {} already", self.name()))
        })
    }

    /// Between windows it leaves no trace in the values.
    fn identity(&self) -> String {
        self.inner.identity()
    }

    fn conflict(&self, strategy: &dyn Strategy) -> Option<Conflict> {
        let one = || {
            Conflict::new(
                format!("{} cannot add up the gradients of a window in backward", self.inner.name()),
                "leave the accumulator out, use SGD without Nesterov's momentum, or update after backward",
            )
        };
        match (strategy.longest_window(), self.inner.accumulates()) {
            (None | Some(WindowRule::Micros(0 | 1)), _) | (_, Accumulates::InGradients) => {
                self.inner.conflict(strategy)
            }
            (Some(_), Accumulates::Nowhere) => Some(one()),
            (Some(WindowRule::Tokens(_)), Accumulates::InState) => Some(Conflict::new(
                "momentum that takes each gradient at once needs the window's number of micro-batches beforehand",
                "use GradAccumulator::every(n), SGD without momentum, or update after backward",
            )),
            (Some(WindowRule::Micros(_)), Accumulates::InState) => self.inner.conflict(strategy),
        }
    }

    fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        if visitor.loads() {
            // What a window that failed had begun is gone with the state that it had changed.
            self.window = Window::default();
        }
        self.inner.visit_state(visitor)
    }

    fn allocate(&mut self) -> Result<()> {
        self.inner.allocate()
    }

    fn begin(&mut self, update: &Update) -> Result<()> {
        self.inner.begin(update)
    }

    fn cancel(&mut self) -> bool {
        self.inner.cancel()
    }

    fn steps_parameters(&self) -> bool {
        true
    }

    fn step_parameter(&mut self, group: usize, index: usize, update: &Update) -> Result<()> {
        self.inner.step_parameter(group, index, update)
    }

    fn state_of(&mut self, group: usize, index: usize) -> Vec<&mut Tensor> {
        self.inner.state_of(group, index)
    }

    fn folds_divisor(&self) -> bool {
        self.inner.folds_divisor()
    }

    fn has_state(&self) -> bool {
        self.inner.has_state()
    }

    fn add_group(&mut self, parameters: Vec<Named>, options: GroupOptions) -> Result<()> {
        self.inner.add_group(parameters, options)
    }

    fn zero_grad(&mut self) {
        self.inner.zero_grad();
    }

    fn state_bytes(&mut self) -> u64 {
        self.inner.state_bytes()
    }
}

fn poisoned(error: Error) -> Error {
    match error {
        Error::Poisoned { .. } => error,
        error => Error::Poisoned { source: Box::new(error) },
    }
}
