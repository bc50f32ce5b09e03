use tch::Tensor;

use super::outcome::SkipReason;
use super::window::{MicroBatch, Position};
use crate::error::Result;
use crate::optim::Optimizer;
use crate::state::Named;

/// The rest of a forward phase: the strategies further in, then the pass itself.
pub type NextForward<'a> = &'a mut dyn FnMut(&mut Mode) -> Result<()>;

/// The rest of a backward phase.
pub type NextBackward<'a> = &'a mut dyn for<'b> FnMut(&mut Backward<'b>) -> Result<()>;

/// The rest of an update phase.
pub type NextUpdate<'a> = &'a mut dyn for<'b> FnMut(&mut UpdatePhase<'b>) -> Result<Verdict>;

/// What a forward pass is for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mode {
    /// One micro-batch of a window.
    Train(MicroBatch),
    /// No gradients, no window.
    Evaluate,
}

/// The backward phase of one micro-batch.
#[derive(Debug)]
pub struct Backward<'a> {
    /// The loss, attached to its graph.
    pub loss: &'a Tensor,
    /// What backward starts with: n/n₀ (1 for a micro-batch of weight 0, whose phase runs
    /// without a backward in it), times whatever strategies multiply in. The product
    /// of their factors is one number per window, divided out of the gradients in
    /// [`Update::divisor`].
    pub seed: f64,
    /// The micro-batch.
    pub micro: MicroBatch,
    /// The model's parameters, by name.
    pub parameters: &'a [Named],
}

/// A window whose backward passes are all done.
pub struct Closing<'a> {
    /// The optimizer, whose groups hold the tensors that will move.
    pub optimizer: &'a mut dyn Optimizer,
    /// The model's parameters, by name.
    pub parameters: &'a [Named],
}

/// The numbers of a window, agreed upon before its update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Numbers {
    /// Σn: rows or tokens of the window.
    pub tokens: f64,
    /// Σn/n₀; 1 where Σn is 0, and then the parameters do not move.
    pub weight: f64,
    /// What strategies multiplied the loss by.
    pub scale: f64,
    /// Σg² over unscaled, averaged, unclipped gradients; where measured.
    pub squared_norm: Option<f64>,
    /// Whether a gradient is not finite; where measured.
    pub non_finite: Option<bool>,
}

/// What a strategy needs to know of the gradients before the update: one pass and one
/// readback serve all strategies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Measure {
    /// Nothing.
    Nothing,
    /// Whether all are finite.
    Finite,
    /// Their norm, and with it whether all are finite.
    Norm,
}

/// What an optimizer needs to know of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// Divides each gradient: Σn/n₀ × loss scale ÷ clip coefficient. A divisor, since a
    /// division by Σn/n₀ alone is what the loop written by hand does, to the bit.
    pub divisor: f64,
    /// Position before the update.
    pub position: Position,
}

impl Update {
    /// An update of gradients as they are.
    pub fn plain() -> Self {
        Self { divisor: 1.0, position: Position::default() }
    }
}

/// The update phase of one window.
pub struct UpdatePhase<'a> {
    /// What the optimizer will be told.
    pub update: Update,
    /// The window's numbers.
    pub numbers: Numbers,
    /// The optimizer: learning rates, gradients (`groups_mut`).
    pub optimizer: &'a mut dyn Optimizer,
    /// The model's parameters, by name.
    pub parameters: &'a [Named],
    /// The model's buffers, by name.
    pub buffers: &'a [Named],
}

/// What an update phase came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Verdict {
    /// The parameters moved.
    Stepped,
    /// They did not.
    Skipped(SkipReason),
}
