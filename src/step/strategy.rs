use std::any::Any;
use std::fmt::Debug;

use tch::Device;

use super::exactness::Exactness;
use super::outcome::Split;
use super::phases::{
    Backward, Closing, Measure, Mode, NextBackward, NextForward, NextUpdate, Numbers, UpdatePhase, Verdict,
};
use super::place::{Place, Relation};
use super::window::WindowRule;
use crate::error::{Error, Result};
use crate::optim::Optimizer;
use crate::state::{Named, StateVisitor};

/// One concern of a training step.
///
/// A strategy can answer for the window (asked before forward) and wrap the phases forward,
/// backward and update. Each phase's default calls the next one; a strategy that does not
/// call it keeps everything further in from happening. `docs/writing-a-strategy.md` builds
/// one from nothing.
pub trait Strategy: Debug + Any + Send {
    /// What the user wrote, as in `GradAccumulator::every(4)`; by default the type's name.
    fn name(&self) -> String {
        let path = std::any::type_name::<Self>();
        path.rsplit("::").next().unwrap_or(path).to_owned()
    }

    /// What it has to be equal in, to go on from a snapshot; by default its name. `None`:
    /// it leaves no trace in the values, and a run may go on with or without it.
    fn identity(&self) -> Option<String> {
        Some(self.name())
    }

    /// Where it acts.
    fn place(&self) -> Place;

    /// What it promises against the loop written by hand.
    fn exactness(&self) -> Exactness {
        Exactness::Bitwise
    }

    /// Its price on this model.
    fn cost(&self, model: &ModelSize) -> Cost {
        let _ = model;
        Cost::none()
    }

    /// Its order against another strategy at the same place.
    fn relation(&self, other: &dyn Strategy) -> Relation {
        let _ = other;
        Relation::Unknown
    }

    /// Why it cannot work beside another strategy, if so. Asked both ways round.
    fn conflict(&self, other: &dyn Strategy) -> Option<Conflict> {
        let _ = other;
        None
    }

    /// Called by `build()`, and again after a parameter group was added: check the model,
    /// allocate what an update will need.
    ///
    /// # Errors
    /// Whatever makes the stack impossible; nothing has been trained yet.
    fn prepare(&mut self, preparation: &mut Preparation<'_>) -> Result<()> {
        let _ = preparation;
        Ok(())
    }

    /// Where a window ends; asked at each window's start. At most one strategy answers.
    fn window(&self) -> Option<WindowRule> {
        None
    }

    /// The longest window that it will ever ask for: what other parts must be able to bear.
    fn longest_window(&self) -> Option<WindowRule> {
        self.window()
    }

    /// Rows per micro-batch when a whole batch of `rows` is split; asked before each try. At
    /// most one answers.
    fn split(&mut self, rows: i64) -> Option<i64> {
        let _ = rows;
        None
    }

    /// What it needs to know of the gradients before the update.
    fn measures(&self) -> Measure {
        Measure::Nothing
    }

    /// Where it leaves gradients between a backward and the update.
    fn gradients(&self) -> Gradients {
        Gradients::InPlace
    }

    /// Bytes of gradients that it keeps beside those that backward makes; for an estimate.
    fn kept_gradients(&self, model: &ModelSize) -> KeptGradients {
        let _ = model;
        KeptGradients::default()
    }

    /// How the bytes that it leaves in memory grow with a micro-batch's rows; for an estimate.
    fn row_bytes(&self) -> RowBytes {
        RowBytes::Line
    }

    /// Whether it runs a failed window again by itself.
    fn retries(&self) -> bool {
        false
    }

    /// What to do after a failure in forward or backward; called after the driver has
    /// dropped the failed graph, before it puts anything back.
    fn recover(&mut self, failure: &Failure<'_>) -> Recovery {
        let _ = failure;
        Recovery::Window
    }

    /// Called where an open window is dropped: after a failure that goes back to its start, by
    /// `discard`, by a load, and after each try of `find_max_batch`. Gradients, graph and losses
    /// are gone by then; frees what else it has kept for that window.
    fn window_dropped(&mut self) {}

    /// Has the last word on a failure of `step_batch` that nobody retries: an error that tells
    /// more than the one given. Everything is put back by then.
    fn explain(&mut self, error: Error, scene: &mut Scene<'_>) -> Error {
        let _ = scene;
        error
    }

    /// Called when all backward passes of a window are done, before the gradients are
    /// measured: puts final gradients into the tensors of the optimizer's groups.
    ///
    /// # Errors
    /// Any; the step is not taken.
    fn close(&mut self, window: &mut Closing<'_>) -> Result<()> {
        let _ = window;
        Ok(())
    }

    /// Agrees with others on the window's numbers before its update.
    ///
    /// # Errors
    /// Where no agreement can be had; the step is not taken.
    fn agree(&mut self, numbers: &mut Numbers) -> Result<()> {
        let _ = numbers;
        Ok(())
    }

    /// Wraps a forward pass, of training or of evaluation. Thread-local state is set by
    /// guards that restore on panic.
    ///
    /// # Errors
    /// Those of `next`, and its own.
    fn forward(&mut self, mode: &mut Mode, next: NextForward<'_>) -> Result<()> {
        next(mode)
    }

    /// Wraps a backward pass.
    ///
    /// # Errors
    /// Those of `next`, and its own.
    fn backward(&mut self, pass: &mut Backward<'_>, next: NextBackward<'_>) -> Result<()> {
        next(pass)
    }

    /// Wraps an update.
    ///
    /// # Errors
    /// Those of `next`, and its own.
    fn update(&mut self, phase: &mut UpdatePhase<'_>, next: NextUpdate<'_>) -> Result<Verdict> {
        next(phase)
    }

    /// Called after weights were loaded into the stack from outside, between windows or in one:
    /// takes over into copies of its own what was loaded.
    ///
    /// # Errors
    /// Any; the weights are loaded.
    fn weights_loaded(&self, loaded: &[Named]) -> Result<()> {
        let _ = loaded;
        Ok(())
    }

    /// Names its state, for saving and for loading.
    ///
    /// # Errors
    /// Those of the visitor.
    fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        let _ = visitor;
        Ok(())
    }
}

/// When a strategy is done with the gradients of a backward.
///
/// The driver's event "gradient final" is told from this: with every strategy at
/// `InPlace`, a gradient is final as soon as the last micro-batch's backward has added it up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gradients {
    /// It leaves them where backward put them: a gradient is final in its last backward.
    InPlace,
    /// It copies, moves or reduces them: a gradient is final after [`Strategy::close`].
    AfterClose,
}

/// Bytes of gradients that a strategy keeps beside those that backward makes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeptGradients {
    /// Of its own, while a window is open.
    pub own: u64,
    /// Of its own, from a window's second backward on.
    pub copies: u64,
    /// Of the parameters' gradients, which it takes away after each backward.
    pub taken: u64,
}

/// How bytes grow with a micro-batch's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowBytes {
    /// A fixed part and a part per row: a few rows tell the rest.
    Line,
    /// Otherwise: what a tensor's size decides, say.
    Threshold,
}

/// Why two parts of a stack cannot work together, and what does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// Why.
    pub why: String,
    /// The nearest stack that works.
    pub remedy: String,
}

impl Conflict {
    /// Why, and what works instead.
    pub fn new(why: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { why: why.into(), remedy: remedy.into() }
    }
}

/// What a strategy costs: formulas in words, and bytes filled in for a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Bytes as a formula, as in `4 B × parameters`.
    pub bytes_formula: String,
    /// The formula's value on this model; `None` where it depends on the batch.
    pub bytes: Option<u64>,
    /// Time, in words.
    pub time: String,
}

impl Cost {
    /// Bytes as a formula and, where the model alone tells, their number; time in words.
    pub fn new(formula: impl Into<String>, bytes: Option<u64>, time: impl Into<String>) -> Self {
        Self { bytes_formula: formula.into(), bytes, time: time.into() }
    }

    /// No bytes, no time.
    pub fn none() -> Self {
        Self::new("0 B", Some(0), "none")
    }
}

/// Sizes that cost formulas need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelSize {
    /// Elements of the parameters that are trained.
    pub parameters: u64,
    /// Their bytes.
    pub parameter_bytes: u64,
    /// Bytes of the buffers.
    pub buffer_bytes: u64,
}

/// What a strategy sees when the stack is built.
pub struct Preparation<'a> {
    /// The model's parameters, by name, each tensor once.
    pub parameters: &'a [Named],
    /// The model's buffers, by name.
    pub buffers: &'a [Named],
    /// Where the model lives.
    pub device: Device,
    /// The optimizer; a strategy may exchange the tensors of its groups (master weights).
    pub optimizer: &'a mut dyn Optimizer,
}

/// A failure in forward or backward.
#[derive(Debug)]
pub struct Failure<'a> {
    /// What happened.
    pub error: &'a Error,
    /// Micro-batch in its window, from 0.
    pub micro: usize,
    /// Rows of that micro-batch, where the driver split the batch itself.
    pub rows: Option<i64>,
    /// How it did.
    pub split: Option<Split>,
    /// Whether backward had begun.
    pub in_backward: bool,
    /// The model's parameters, by name.
    pub parameters: &'a [Named],
}

/// What is there to explain a failure with.
pub struct Scene<'a> {
    /// The optimizer and its state.
    pub optimizer: &'a mut dyn Optimizer,
    /// The model's parameters, by name.
    pub parameters: &'a [Named],
    /// The model's buffers, by name.
    pub buffers: &'a [Named],
    /// Names of the stack's strategies.
    pub strategies: &'a [String],
    /// The strategies beside the one that is asked.
    pub beside: &'a [&'a dyn Strategy],
}

/// What to do after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// Go back to the window's start and return the error.
    Window,
    /// The gradients are as before this micro-batch: only it is lost, the window goes on.
    MicroBatch,
    /// Go back to the window's start and run it again (only `step_batch` can).
    Retry,
}
