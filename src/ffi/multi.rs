//! Many tensors in one pass: measure, scale, clamp, widen, cast.

use std::borrow::Borrow;
use std::os::raw::c_int;

use tch::Tensor;
use torch_sys::C_tensor;

use super::check;
use crate::error::Result;

#[repr(C)]
#[derive(Default)]
struct RawMeasured {
    squared_norm: f64,
    non_finite: c_int,
}

unsafe extern "C" {
    fn mf_measure(tensors: *const *const C_tensor, count: usize, factor: f64, out: *mut RawMeasured)
    -> c_int;
    fn mf_scale(tensors: *const *const C_tensor, count: usize, factor: f64) -> c_int;
    fn mf_clamp(tensors: *const *const C_tensor, count: usize, limit: f64, factor: f64) -> c_int;
    fn mf_add_to(sums: *const *const C_tensor, tensors: *const *const C_tensor, count: usize) -> c_int;
    fn mf_cast_into(to: *const C_tensor, from: *const C_tensor) -> c_int;
}

/// What one pass over gradients finds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Measured {
    /// Σ(gradient × factor)².
    pub(crate) squared_norm: f64,
    /// Whether a gradient × factor is infinite or not a number, in fp32 (fp64 for fp64).
    pub(crate) non_finite: bool,
}

/// Measures gradients × factor in one pass and with one readback. Without any: 0, finite.
pub(crate) fn measure<T: Borrow<Tensor>>(grads: &[T], factor: f64) -> Result<Measured> {
    let grads = handles(grads);
    let mut raw = RawMeasured::default();
    // SAFETY: the handles are borrowed for the call, `raw` is writable.
    check(unsafe { mf_measure(grads.as_ptr(), grads.len(), factor, &mut raw) })?;
    Ok(Measured { squared_norm: raw.squared_norm, non_finite: raw.non_finite != 0 })
}

/// Multiplies in place.
pub(crate) fn scale_<T: Borrow<Tensor>>(tensors: &[T], factor: f64) -> Result<()> {
    let tensors = handles(tensors);
    // SAFETY: the handles are borrowed for the call.
    check(unsafe { mf_scale(tensors.as_ptr(), tensors.len(), factor) })
}

/// Multiplies in place, then bounds each number to ±limit.
pub(crate) fn clamp_<T: Borrow<Tensor>>(tensors: &[T], limit: f64, factor: f64) -> Result<()> {
    let tensors = handles(tensors);
    // SAFETY: the handles are borrowed for the call.
    check(unsafe { mf_clamp(tensors.as_ptr(), tensors.len(), limit, factor) })
}

/// Adds each tensor to its sum, in the sum's dtype. Pairs beyond the shorter list are left.
pub(crate) fn add_to<S: Borrow<Tensor>, T: Borrow<Tensor>>(sums: &[S], tensors: &[T]) -> Result<()> {
    let count = sums.len().min(tensors.len());
    let (sums, tensors) = (handles(sums), handles(tensors));
    // SAFETY: both lists have `count` handles, borrowed for the call.
    check(unsafe { mf_add_to(sums.as_ptr(), tensors.as_ptr(), count) })
}

/// Copies into a tensor of the same shape, casting, below autograd; its version is bumped.
pub(crate) fn cast_into(to: &Tensor, from: &Tensor) -> Result<()> {
    // SAFETY: both handles are borrowed for the call.
    check(unsafe { mf_cast_into(to.as_ptr(), from.as_ptr()) })
}

fn handles<T: Borrow<Tensor>>(tensors: &[T]) -> Vec<*const C_tensor> {
    tensors.iter().map(|tensor| tensor.borrow().as_ptr()).collect()
}
