//! Fused optimizer steps.

use std::os::raw::c_int;

use tch::Tensor;
use torch_sys::C_tensor;

use super::check;
use crate::error::{Error, Result};

/// `mf_moving` of the header.
#[repr(C)]
struct RawMoving {
    parameter: *const C_tensor,
    state: [*const C_tensor; 2],
    count: u64,
    lr: f64,
    weight_decay: f64,
}

/// `mf_adam` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct RawAdam {
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    divisor: f64,
    decoupled: c_int,
}

/// `mf_sgd` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct RawSgd {
    momentum: f64,
    dampening: f64,
    divisor: f64,
    nesterov: c_int,
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
pub(crate) struct Moving<'a> {
    /// Skipped where it needs no gradient or has none.
    pub(crate) parameter: &'a Tensor,
    /// What the rule keeps for it: two moments, one, or none.
    pub(crate) state: &'a [Tensor],
    /// Its steps so far; one more where it moved.
    pub(crate) count: &'a mut u64,
    pub(crate) lr: f64,
    pub(crate) weight_decay: f64,
}

/// How parameters move.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rule {
    /// Adam, or AdamW where the decay is decoupled. State: first and second moment.
    Adam { betas: (f64, f64), epsilon: f64, decoupled: bool },
    /// SGD. State: the momentum, where it is not 0.
    Sgd { momentum: f64, dampening: f64, nesterov: bool },
}

impl Rule {
    fn needs(&self) -> usize {
        match self {
            Self::Adam { .. } => 2,
            Self::Sgd { momentum, .. } => usize::from(*momentum != 0.0),
        }
    }
}

/// Moves parameters by their gradients ÷ divisor.
///
/// # Errors
/// Before the first parameter moved: the error itself. After: [`Error::Poisoned`].
pub(crate) fn step(rule: Rule, moving: &mut [Moving<'_>], divisor: f64) -> Result<()> {
    let mut raw: Vec<RawMoving> =
        moving.iter().filter(|one| moves(one.parameter)).map(|one| raw_of(one)).collect();
    let needed = |one: &RawMoving| one.state.iter().filter(|state| !state.is_null()).count() == rule.needs();
    if !raw.iter().all(needed) {
        return Err(Error::CallOrder {
            call: "step_parameter",
            state: "for a parameter without state".to_owned(),
            remedy: "call begin first",
        });
    }
    let mut moved = 0;
    let status = match rule {
        Rule::Adam { betas: (beta1, beta2), epsilon, decoupled } => {
            let options = RawAdam { beta1, beta2, epsilon, divisor, decoupled: decoupled.into() };
            // SAFETY: all handles are borrowed for the call and the list is writable; each
            // entry has the two states that the rule reads.
            unsafe { mf_adam_step(raw.as_mut_ptr(), raw.len(), &options, &mut moved) }
        }
        Rule::Sgd { momentum, dampening, nesterov } => {
            let options = RawSgd { momentum, dampening, divisor, nesterov: nesterov.into() };
            // SAFETY: as above, with the state that the rule reads.
            unsafe { mf_sgd_step(raw.as_mut_ptr(), raw.len(), &options, &mut moved) }
        }
    };
    for (one, raw) in moving.iter_mut().filter(|one| moves(one.parameter)).zip(&raw) {
        *one.count = raw.count;
    }
    check(status).map_err(|error| match moved {
        0 => error,
        _ => Error::Poisoned { source: Box::new(error) },
    })
}

fn moves(parameter: &Tensor) -> bool {
    parameter.requires_grad()
}

fn raw_of(one: &Moving<'_>) -> RawMoving {
    let state = |index: usize| one.state.get(index).map_or(std::ptr::null(), |state| state.as_ptr());
    RawMoving {
        parameter: one.parameter.as_ptr(),
        state: [state(0), state(1)],
        count: *one.count,
        lr: one.lr,
        weight_decay: one.weight_decay,
    }
}
