//! Fused optimizer steps.

use std::os::raw::c_int;

use tch::Tensor;
use torch_sys::C_tensor;

use super::check;
use crate::error::{Error, Result};

/// Most state tensors that one parameter has.
const STATES: usize = 4;

/// `mf_moving` of the header.
#[repr(C)]
pub(super) struct RawMoving {
    parameter: *const C_tensor,
    state: [*const C_tensor; STATES],
    count: u64,
    lr: f64,
    weight_decay: f64,
    key: u64,
}

/// `mf_adam` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct RawAdam {
    pub(super) beta1: f64,
    pub(super) beta2: f64,
    pub(super) epsilon: f64,
    pub(super) divisor: f64,
    pub(super) decoupled: c_int,
}

/// `mf_sgd` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct RawSgd {
    pub(super) momentum: f64,
    pub(super) dampening: f64,
    pub(super) divisor: f64,
    pub(super) nesterov: c_int,
}

unsafe extern "C" {
    fn mf_adam_step(
        moving: *mut RawMoving,
        count: usize,
        options: *const RawAdam,
        moved: *mut usize,
    ) -> c_int;
    fn mf_sgd_step(moving: *mut RawMoving, count: usize, options: *const RawSgd, moved: *mut usize) -> c_int;
}

/// One parameter of a step.
#[derive(Debug)]
pub struct Moving<'a> {
    /// Skipped where it needs no gradient or has none.
    pub(crate) parameter: &'a Tensor,
    /// What the optimizer keeps for it, at most four tensors.
    pub(crate) state: &'a [Tensor],
    /// Whether that was made.
    pub(crate) allocated: bool,
    /// Its steps so far; one more where it moved.
    pub(crate) count: &'a mut u64,
    pub(crate) lr: f64,
    pub(crate) weight_decay: f64,
    /// Tells it from the other parameters: random rounding draws from this.
    pub(crate) key: u64,
}

/// How parameters move.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rule {
    /// Adam, or AdamW where the decay is decoupled. State: first and second moment.
    Adam { betas: (f64, f64), epsilon: f64, decoupled: bool },
    /// SGD. State: the momentum, where it is not 0.
    Sgd { momentum: f64, dampening: f64, nesterov: bool },
}

/// Moves parameters by their gradients ÷ divisor.
///
/// # Errors
/// Before the first parameter moved: the error itself. After: [`Error::Poisoned`].
pub(crate) fn step(rule: Rule, moving: &mut [Moving<'_>], divisor: f64) -> Result<()> {
    match rule {
        Rule::Adam { betas: (beta1, beta2), epsilon, decoupled } => {
            let options = RawAdam { beta1, beta2, epsilon, divisor, decoupled: decoupled.into() };
            // SAFETY: `run` lends the list for the call; its entries have the states that the
            // recipe of AdamW keeps.
            run(moving, |raw, moved| unsafe { mf_adam_step(raw.as_mut_ptr(), raw.len(), &options, moved) })
        }
        Rule::Sgd { momentum, dampening, nesterov } => {
            let options = RawSgd { momentum, dampening, divisor, nesterov: nesterov.into() };
            // SAFETY: as above, with the states of SGD.
            run(moving, |raw, moved| unsafe { mf_sgd_step(raw.as_mut_ptr(), raw.len(), &options, moved) })
        }
    }
}

/// Lends the parameters that are trained to a kernel and takes up how far it came. The kernel
/// skips those without a gradient.
///
/// # Errors
/// As [`step`]; a parameter whose state was not made.
pub(super) fn run(
    moving: &mut [Moving<'_>],
    kernel: impl FnOnce(&mut [RawMoving], &mut usize) -> c_int,
) -> Result<()> {
    let mut due: Vec<_> = moving.iter_mut().filter(|one| one.parameter.requires_grad()).collect();
    if due.iter().any(|one| !one.allocated) {
        return Err(Error::CallOrder {
            call: "step_parameter",
            state: "for a parameter without state".to_owned(),
            remedy: "call begin first",
        });
    }
    let mut raw: Vec<RawMoving> = due.iter().map(|one| raw_of(one)).collect();
    let mut moved = 0;
    let status = kernel(&mut raw, &mut moved);
    for (one, raw) in due.iter_mut().zip(&raw) {
        *one.count = raw.count;
    }
    check(status).map_err(|error| match moved {
        0 => error,
        _ => Error::Poisoned { source: Box::new(error) },
    })
}

fn raw_of(one: &Moving<'_>) -> RawMoving {
    let state = |index: usize| one.state.get(index).map_or(std::ptr::null(), |state| state.as_ptr());
    RawMoving {
        parameter: one.parameter.as_ptr(),
        state: std::array::from_fn(state),
        count: *one.count,
        lr: one.lr,
        weight_decay: one.weight_decay,
        key: one.key,
    }
}
