//! Lion's step.

use std::os::raw::c_int;

use super::mixed::{RawRounding, Rounding};
use super::optim::{Moving, RawMoving, run};
use crate::error::Result;

/// `mf_lion` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct RawLion {
    beta1: f64,
    beta2: f64,
    divisor: f64,
}

unsafe extern "C" {
    fn mf_lion_step(
        moving: *mut RawMoving,
        count: usize,
        options: *const RawLion,
        rounding: *const RawRounding,
        moved: *mut usize,
    ) -> c_int;
}

/// Moves parameters on the CPU by their gradients ÷ divisor. State: the momentum.
///
/// # Errors
/// Any; nothing has moved.
pub(crate) fn step(
    betas: (f64, f64),
    rounding: Rounding,
    moving: &mut [Moving<'_>],
    divisor: f64,
) -> Result<()> {
    let options = RawLion { beta1: betas.0, beta2: betas.1, divisor };
    let rounding = rounding.raw();
    // SAFETY: `run` lends the list for the call; the kernel checks the states it finds.
    run(moving, |raw, moved| unsafe { mf_lion_step(raw.as_mut_ptr(), raw.len(), &options, &rounding, moved) })
}
