//! Optimizers: the trait, parameter groups, and the built-in ones.

mod accumulate;
pub mod adafactor;
pub mod adamw;
pub mod adamw8bit;
mod boxed;
mod group;
pub mod in_backward;
pub mod lion;
pub mod muon;
mod recipe;
pub mod sgd;
mod slots;
pub mod tch_adapter;

pub use adafactor::{Adafactor, AdafactorConfig, StepSize};
pub use adamw::{AdamW, AdamWConfig, Decay};
pub use adamw8bit::{AdamW8bit, AdamW8bitConfig};
pub use group::{GroupOptions, ParamGroup, Parameters};
pub use in_backward::InBackward;
pub use lion::{Lion, LionConfig};
pub use muon::{Muon, MuonConfig, Scale};
pub use sgd::{Momentum, Sgd, SgdConfig};
pub use tch_adapter::TchOptimizer;

use std::fmt::Debug;

use crate::error::{Error, Result};
use crate::state::{Named, State, StateVisitor};
use crate::step::{Conflict, Exactness, GradientUse, Heard, Ready, Strategy, Update, WindowRule};

/// Turns gradients into new parameters.
///
/// `groups`, `groups_mut`, `step` and `visit_state` make an optimizer; the rest has defaults.
/// All state and scratch that an update needs is allocated before its first parameter
/// moves.
pub trait Optimizer: Debug + Send {
    /// What the user wrote, as in `AdamW`.
    fn name(&self) -> String;

    /// The parameter groups.
    fn groups(&self) -> &[ParamGroup];

    /// The parameter groups, to set learning rates or to exchange tensors.
    fn groups_mut(&mut self) -> &mut [ParamGroup];

    /// Moves every parameter that requires a gradient and has one, and counts one step.
    /// A frozen parameter is skipped, whatever gradient it still holds.
    ///
    /// # Errors
    /// Before the first parameter moved: any error. After: [`Error::Poisoned`].
    fn step(&mut self, update: &Update) -> Result<()>;

    /// Names its state.
    ///
    /// # Errors
    /// Those of the visitor.
    fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()>;

    /// Allocates what `step` needs for every parameter that requires a gradient and has
    /// no state yet. Called by `build()`, and by `step` itself first.
    ///
    /// # Errors
    /// Out of memory; nothing moved.
    fn allocate(&mut self) -> Result<()> {
        Ok(())
    }

    /// What it does with gradients before the update.
    fn gradients(&self) -> GradientUse {
        GradientUse::AtUpdate
    }

    /// Told of a gradient during backward, as [`Optimizer::gradients`] asks for.
    /// [`Optimizer::step`] follows and deals with all that were not told of.
    ///
    /// # Errors
    /// Before anything changed in this window: any error. After: [`Error::Poisoned`].
    fn gradient_ready(&mut self, ready: &Ready) -> Result<Heard> {
        let _ = ready;
        Ok(Heard::Noted)
    }

    /// What it keeps of the loop written by hand, where windows end by `window`.
    fn exactness(&self, window: WindowRule) -> Exactness {
        let _ = window;
        Exactness::Bitwise
    }

    /// Whether it has [`Optimizer::begin`] and [`Optimizer::step_parameter`].
    fn steps_parameters(&self) -> bool {
        false
    }

    /// Where it can add up a window's gradients.
    fn accumulates(&self) -> Accumulates {
        Accumulates::Nowhere
    }

    /// Lets one parameter's gradient of one micro-batch join its state, after
    /// [`Optimizer::begin`]; `update.divisor` is that of the whole window.
    ///
    /// # Errors
    /// As [`Optimizer::step`].
    fn accumulate(&mut self, group: usize, index: usize, update: &Update, share: Share) -> Result<()> {
        let _ = (group, index, update, share);
        Err(unsupported(self.name(), "adding gradients up in its state"))
    }

    /// Moves one parameter by the gradients that joined its state.
    ///
    /// # Errors
    /// As [`Optimizer::step`].
    fn step_accumulated(&mut self, group: usize, index: usize, update: &Update) -> Result<()> {
        let _ = (group, index, update);
        Err(unsupported(self.name(), "adding gradients up in its state"))
    }

    /// Starts one step: counts it and allocates, moves nothing. [`Optimizer::step`] is
    /// `begin`, then [`Optimizer::step_parameter`] for each.
    ///
    /// # Errors
    /// Out of memory; nothing moved.
    fn begin(&mut self, update: &Update) -> Result<()> {
        let _ = update;
        Err(unsupported(self.name(), "stepping parameter by parameter"))
    }

    /// Takes back [`Optimizer::begin`], where nothing moved since. Whether it could: where not, a
    /// failure before the first parameter moved is [`Error::Poisoned`] too.
    fn cancel(&mut self) -> bool {
        false
    }

    /// Moves one parameter, after [`Optimizer::begin`].
    ///
    /// # Errors
    /// As [`Optimizer::step`].
    fn step_parameter(&mut self, group: usize, index: usize, update: &Update) -> Result<()> {
        let _ = (group, index, update);
        Err(unsupported(self.name(), "stepping parameter by parameter"))
    }

    /// The state tensors of one parameter, for a wrapper that moves them; empty before
    /// [`Optimizer::allocate`] and for a frozen parameter.
    fn state_of(&mut self, group: usize, index: usize) -> Vec<&mut tch::Tensor> {
        let _ = (group, index);
        Vec::new()
    }

    /// Whether `step` divides gradients by [`Update::divisor`] itself; otherwise the
    /// driver does it in one pass before.
    fn folds_divisor(&self) -> bool {
        false
    }

    /// Whether its state can be reached, saved and moved.
    fn has_state(&self) -> bool {
        true
    }

    /// Why no snapshot can be taken at this moment, if so.
    fn refuses_snapshot(&self) -> Option<String> {
        None
    }

    /// What it has to be equal in, to go on from a snapshot; by default its name. A wrapper
    /// that leaves no trace in the values is what it wraps.
    fn identity(&self) -> String {
        self.name()
    }

    /// Adds a group; its state is allocated now.
    ///
    /// # Errors
    /// A parameter that is in a group already, bad options, out of memory.
    fn add_group(&mut self, parameters: Vec<Named>, options: GroupOptions) -> Result<()> {
        let _ = (parameters, options);
        Err(unsupported(self.name(), "adding a group"))
    }

    /// Why it cannot work beside a strategy, if so.
    fn conflict(&self, strategy: &dyn Strategy) -> Option<Conflict> {
        let _ = strategy;
        None
    }

    /// Drops the gradients of all its parameters, frozen ones too.
    fn zero_grad(&mut self) {
        let parameters = self.groups().iter().flat_map(ParamGroup::parameters);
        crate::ffi::grad::drop_all(parameters.map(|parameter| &parameter.tensor));
    }

    /// Bytes of state, by device; an offloading wrapper counts what it keeps elsewhere too.
    fn state_bytes(&mut self) -> u64 {
        let mut bytes = 0;
        for group in 0..self.groups().len() {
            for index in 0..self.groups()[group].parameters().len() {
                bytes += self.state_of(group, index).iter().map(|tensor| bytes_of(tensor)).sum::<u64>();
            }
        }
        bytes
    }

    /// Loads a state collected from the same kind of optimizer over the same names.
    ///
    /// # Errors
    /// [`Error::State`]; nothing was changed.
    fn load(&mut self, state: &State) -> Result<()> {
        self.allocate()?;
        state.load(|visitor| self.visit_state(visitor))
    }
}

/// Where an optimizer can add up the gradients of a window that it is told of in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accumulates {
    /// Its update is no sum over gradients.
    Nowhere,
    /// In the gradients themselves: nothing is gained in a window but the last backward.
    InGradients,
    /// In its state.
    InState,
}

/// Which gradient of a window joins a parameter's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// The first one, with which the state takes its step.
    First,
    /// A later one.
    Later,
}

/// The gradients that an update will use: not those of frozen parameters.
pub(crate) fn gradients(optimizer: &dyn Optimizer) -> Vec<tch::Tensor> {
    let parameters = optimizer.groups().iter().flat_map(|group| group.parameters());
    let trained = parameters.filter(|parameter| parameter.tensor.requires_grad());
    trained.filter_map(|parameter| crate::ffi::grad::get(&parameter.tensor)).collect()
}

/// Bytes of a tensor's elements.
pub(crate) fn bytes_of(tensor: &tch::Tensor) -> u64 {
    (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64
}

fn unsupported(optimizer: String, what: &str) -> Error {
    Error::Unsupported {
        what: what.to_owned(),
        place: format!("by {optimizer}"),
        remedy: "use one of memfit's own optimizers".to_owned(),
    }
}

/// An error where a setting is not finite or not as it must be.
fn check_setting(setting: &'static str, value: f64, right: fn(f64) -> bool, wanted: &str) -> Result<()> {
    if value.is_finite() && right(value) {
        return Ok(());
    }
    Err(Error::config(setting, format!("must be {wanted}, not {value}")))
}
