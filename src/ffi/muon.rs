//! Muon's step, and AdamW's beside it.

use std::os::raw::c_int;

use super::mixed::{Adam, RawRounding, Rounding};
use super::optim::{Moving, RawAdam, RawMoving, run};
use crate::error::Result;

/// `mf_muon` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) momentum: f64,
    pub(crate) a: f64,
    pub(crate) b: f64,
    pub(crate) c: f64,
    pub(crate) epsilon: f64,
    pub(crate) divisor: f64,
    pub(crate) steps: c_int,
    pub(crate) nesterov: c_int,
    pub(crate) mixed: c_int,
    pub(crate) match_adam: c_int,
}

unsafe extern "C" {
    fn mf_muon_step(
        moving: *mut RawMoving,
        count: usize,
        options: *const Options,
        others: *const RawAdam,
        rounding: *const RawRounding,
        moved: *mut usize,
    ) -> c_int;
}

/// Moves matrices, which have one state, and others, which have two, by their gradients ÷
/// divisor.
///
/// # Errors
/// Before the first parameter moved: the error itself. After:
/// [`Error::Poisoned`](crate::Error::Poisoned).
pub(crate) fn step(
    options: &Options,
    others: Adam,
    rounding: Rounding,
    moving: &mut [Moving<'_>],
) -> Result<()> {
    let (adam, rounding) = (others.raw(options.divisor), rounding.raw());
    // SAFETY: `run` lends the list for the call; the kernel checks each state.
    run(moving, |raw, moved| unsafe {
        mf_muon_step(raw.as_mut_ptr(), raw.len(), options, &adam, &rounding, moved)
    })
}
