use std::fmt::Debug;

use tch::{Device, Kind, Tensor};

use super::{Accumulates, Share, unsupported};
use crate::error::{Error, Result};
use crate::ffi;
use crate::ffi::optim::Moving;
use crate::state::{Named, StateVisitor};
use crate::step::Update;

/// What makes one optimizer differ from another: which state it keeps and how it moves.
///
/// The settings of an optimizer are its recipe; [`Slots`](super::slots::Slots) does the rest.
pub trait Recipe: Debug + Send {
    /// What the user wrote, as in `AdamW`.
    fn name(&self) -> String;

    /// Learning rate and weight decay of a group that names none.
    fn defaults(&self) -> (f64, f64);

    /// As [`Recipe::defaults`], where they depend on the group.
    fn defaults_of(&self, group: usize) -> (f64, f64) {
        let _ = group;
        self.defaults()
    }

    /// The state of one parameter of a group. Empty where it needs none.
    fn state(&self, group: usize, parameter: &Named) -> Vec<Kept>;

    /// Refuses a parameter that it cannot move, before its state is made.
    ///
    /// # Errors
    /// Any; nothing has moved.
    fn check(&self, parameter: &Named) -> Result<()> {
        let _ = parameter;
        Ok(())
    }

    /// Refuses gradients that it cannot use, before a step is counted: asked about all of a
    /// step, and about each parameter that moves by itself.
    ///
    /// # Errors
    /// Any; nothing has moved.
    fn ready(&self, moving: &[Moving<'_>], divisor: f64) -> Result<()> {
        let _ = (moving, divisor);
        Ok(())
    }

    /// Moves parameters whose state is there; skips those without a gradient. What it needs is
    /// allocated before the first one moves.
    ///
    /// # Errors
    /// Before the first parameter moved: any error. After: `Error::Poisoned`.
    fn step(&self, moving: &mut [Moving<'_>], divisor: f64) -> Result<()>;

    /// Where it can add up a window's gradients.
    fn accumulates(&self) -> Accumulates {
        Accumulates::Nowhere
    }

    /// Lets a gradient join a parameter's state.
    ///
    /// # Errors
    /// By default always; where [`Recipe::accumulates`] is `InState`, those of the kernel.
    fn accumulate(&self, one: &mut Moving<'_>, update: &Update, share: Share) -> Result<()> {
        let _ = (one, update, share);
        Err(unsupported(self.name(), "adding gradients up in its state"))
    }

    /// Moves a parameter by the gradients that joined its state, and counts its step.
    ///
    /// # Errors
    /// As [`Recipe::accumulate`].
    fn step_accumulated(&self, one: &mut Moving<'_>) -> Result<()> {
        let _ = one;
        Err(unsupported(self.name(), "adding gradients up in its state"))
    }

    /// The settings that a run has to keep to be the same run: all but learning rate and weight
    /// decay, which are a group's.
    fn settings(&self) -> String;

    /// Whether the state tensors of a parameter must be equal in layout to be loaded: names
    /// what else must be, as in a block size.
    ///
    /// # Errors
    /// Those of the visitor.
    fn visit_layout(&self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        let _ = visitor;
        Ok(())
    }
}

/// One state tensor of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    /// Its name in the state.
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    /// `None`: that of the parameter, its order in memory too.
    pub(super) shape: Option<Vec<i64>>,
}

impl Kept {
    /// Of the parameter's shape, in a dtype of its own.
    pub(super) fn like(name: &'static str, kind: Kind) -> Self {
        Self { name, kind, shape: None }
    }

    /// Of another shape.
    pub(super) fn of(name: &'static str, kind: Kind, shape: impl Into<Vec<i64>>) -> Self {
        Self { name, kind, shape: Some(shape.into()) }
    }

    /// Zeros, beside the parameter.
    pub(super) fn make(&self, parameter: &Tensor) -> Result<Tensor> {
        let device = parameter.device();
        match &self.shape {
            Some(shape) => Ok(Tensor::f_zeros(shape, (self.kind, device))?),
            // Of a detached handle, so that its strides are kept and no graph is made.
            None if parameter.kind() == self.kind => Ok(parameter.f_detach()?.f_zeros_like()?),
            None => {
                let like = Tensor::f_empty_strided(parameter.size(), dense(parameter), (self.kind, device))?;
                Ok(tch::no_grad(|| like.shallow_clone().f_zero_())?)
            }
        }
    }
}

/// The parameter's strides where its elements lie without gaps, else those of rows.
fn dense(parameter: &Tensor) -> Vec<i64> {
    let (sizes, strides) = (parameter.size(), parameter.stride());
    let last: i64 = sizes.iter().zip(&strides).map(|(size, stride)| (size - 1) * stride).sum();
    if parameter.numel() as i64 == last + 1 {
        return strides;
    }
    let mut rows = vec![1; sizes.len()];
    for dimension in (1..sizes.len()).rev() {
        rows[dimension - 1] = rows[dimension] * sizes[dimension].max(1);
    }
    rows
}

/// The gradients that a step will use.
pub(super) fn gradients<'a>(moving: &'a [Moving<'_>]) -> impl Iterator<Item = Tensor> + 'a {
    let trained = moving.iter().filter(|one| one.parameter.requires_grad());
    trained.filter_map(|one| ffi::grad::get(one.parameter))
}

/// Refuses a parameter elsewhere, for updates whose kernel is memfit's own.
///
/// # Errors
/// [`Error::Unsupported`], naming the way out.
pub(super) fn only_on_cpu(optimizer: &str, what: &str, parameter: &Named) -> Result<()> {
    match parameter.tensor.device() {
        Device::Cpu => Ok(()),
        device => Err(Error::Unsupported {
            what: format!("{what} for `{}`", parameter.name),
            place: format!("by {optimizer} on {device:?}"),
            remedy: format!("keep state and update on the host: CpuOffload::optimizer({optimizer}).host()"),
        }),
    }
}

/// Refuses a dtype that moments are not kept in.
///
/// # Errors
/// [`Error::Config`].
pub(super) fn check_moments(kind: Option<Kind>) -> Result<()> {
    match kind {
        None | Some(Kind::Float | Kind::BFloat16) => Ok(()),
        Some(kind) => Err(Error::config("moments", format!("must be Float or BFloat16, not {kind:?}"))),
    }
}
