//! SGD's step with random rounding or decoupled decay.

use std::os::raw::c_int;

use super::mixed::{RawRounding, Rounding};
use super::optim::{Moving, RawMoving, RawSgd, run};
use crate::error::Result;

unsafe extern "C" {
    fn mf_sgd_mixed_step(
        moving: *mut RawMoving,
        count: usize,
        options: *const RawSgd,
        decoupled: c_int,
        rounding: *const RawRounding,
        moved: *mut usize,
    ) -> c_int;
}

/// What SGD's updates depend on beside rates and decay.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sgd {
    pub(crate) momentum: f64,
    pub(crate) dampening: f64,
    pub(crate) nesterov: bool,
    pub(crate) decoupled: bool,
}

/// Moves parameters on the CPU by their gradients ÷ divisor. State: the momentum, where it is
/// not 0.
///
/// # Errors
/// Any; nothing has moved.
pub(crate) fn step(sgd: Sgd, rounding: Rounding, moving: &mut [Moving<'_>], divisor: f64) -> Result<()> {
    let Sgd { momentum, dampening, nesterov, decoupled } = sgd;
    let options = RawSgd { momentum, dampening, divisor, nesterov: nesterov.into() };
    let rounding = rounding.raw();
    // SAFETY: `run` lends the list for the call; the kernel checks the states it finds.
    run(moving, |raw, moved| unsafe {
        mf_sgd_mixed_step(raw.as_mut_ptr(), raw.len(), &options, decoupled.into(), &rounding, moved)
    })
}
