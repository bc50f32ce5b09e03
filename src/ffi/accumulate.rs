//! Gradients that join a momentum one by one.

use std::os::raw::c_int;

use tch::Tensor;
use torch_sys::C_tensor;

use super::check;
use crate::error::Result;

/// momentum ← keep · momentum + rise · (gradient ÷ divisor + decay · parameter): `mf_join` of
/// the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Join {
    pub(crate) keep: f64,
    pub(crate) rise: f64,
    pub(crate) decay: f64,
    pub(crate) divisor: f64,
}

unsafe extern "C" {
    fn mf_momentum_join(
        parameter: *const C_tensor,
        grad: *const C_tensor,
        momentum: *const C_tensor,
        options: *const Join,
    ) -> c_int;
    fn mf_momentum_move(parameter: *const C_tensor, momentum: *const C_tensor, lr: f64) -> c_int;
}

/// Lets a gradient join; takes no memory.
///
/// # Errors
/// Tensors that do not fit each other; nothing changed.
pub(crate) fn join(parameter: &Tensor, grad: &Tensor, momentum: &Tensor, options: Join) -> Result<()> {
    // SAFETY: all handles are borrowed for the call, as are the options.
    check(unsafe { mf_momentum_join(parameter.as_ptr(), grad.as_ptr(), momentum.as_ptr(), &options) })
}

/// Moves a parameter by −lr · momentum; takes no memory.
///
/// # Errors
/// As [`join`].
pub(crate) fn move_by(parameter: &Tensor, momentum: &Tensor, lr: f64) -> Result<()> {
    // SAFETY: both handles are borrowed for the call.
    check(unsafe { mf_momentum_move(parameter.as_ptr(), momentum.as_ptr(), lr) })
}
