//! Adafactor's step.

use std::os::raw::c_int;

use super::mixed::{RawRounding, Rounding};
use super::optim::{Moving, RawMoving, run};
use crate::error::Result;

/// `mf_adafactor` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) decay: f64,
    pub(crate) epsilon1: f64,
    pub(crate) epsilon2: f64,
    pub(crate) clip: f64,
    pub(crate) beta1: f64,
    pub(crate) divisor: f64,
    pub(crate) relative: c_int,
}

unsafe extern "C" {
    fn mf_adafactor_step(
        moving: *mut RawMoving,
        count: usize,
        options: *const Options,
        rounding: *const RawRounding,
        moved: *mut usize,
    ) -> c_int;
}

/// Moves parameters by their gradients ÷ divisor.
///
/// # Errors
/// Before the first parameter moved: the error itself. After:
/// [`Error::Poisoned`](crate::Error::Poisoned).
pub(crate) fn step(options: &Options, rounding: Rounding, moving: &mut [Moving<'_>]) -> Result<()> {
    let rounding = rounding.raw();
    // SAFETY: `run` lends the list for the call; the kernel checks each state.
    run(moving, |raw, moved| unsafe {
        mf_adafactor_step(raw.as_mut_ptr(), raw.len(), options, &rounding, moved)
    })
}
