//! Closures that libtorch calls at moments of a backward pass.

use std::os::raw::{c_int, c_void};

use tch::Tensor;
use torch_sys::C_tensor;

use super::{Closure, check};
use crate::error::Result;

#[repr(C)]
struct RawHook {
    opaque: [u8; 0],
}

unsafe extern "C" {
    fn mf_hook_on_gradient(leaf: *const C_tensor, closure: *mut c_void, hook: *mut *mut RawHook) -> c_int;
    fn mf_hook_before_backward(tensor: *const C_tensor, closure: *mut c_void) -> c_int;
    fn mf_hook_after_backward(closure: *mut c_void) -> c_int;
    fn mf_hook_drop(hook: *mut RawHook);
}

/// Keeps a hook on a leaf; dropping it ends the calls.
#[derive(Debug)]
#[must_use = "dropping the guard removes the hook"]
pub(crate) struct HookGuard(*mut RawHook);

// SAFETY: C++ locks what the pointer leads to; any thread may drop it.
unsafe impl Send for HookGuard {}

impl Drop for HookGuard {
    fn drop(&mut self) {
        // SAFETY: the pointer is owned and given back once.
        unsafe { mf_hook_drop(self.0) }
    }
}

/// Calls `body` whenever the gradient of a leaf is final in a backward, once per backward
/// that reaches it, on the thread that accumulates.
pub(crate) fn on_gradient(
    leaf: &Tensor,
    mut body: impl FnMut() -> Result<()> + Send + 'static,
) -> Result<HookGuard> {
    let closure = Closure::new(move |_| body());
    let mut hook = std::ptr::null_mut();
    // SAFETY: the leaf is borrowed, the closure given; `hook` is written on success.
    check(unsafe { mf_hook_on_gradient(leaf.as_ptr(), closure.into_raw(), &mut hook) })?;
    Ok(HookGuard(hook))
}

/// Calls `body` in each backward when the gradient of `tensor` is complete, before the node
/// that made the tensor runs. The graph owns the closure.
pub(crate) fn before_backward(
    tensor: &Tensor,
    mut body: impl FnMut() -> Result<()> + Send + 'static,
) -> Result<()> {
    let closure = Closure::new(move |_| body());
    // SAFETY: the tensor is borrowed, the closure given.
    check(unsafe { mf_hook_before_backward(tensor.as_ptr(), closure.into_raw()) })
}

/// From inside a backward: calls `body` when that backward ends well.
pub(crate) fn after_backward(mut body: impl FnMut() -> Result<()> + Send + 'static) -> Result<()> {
    let closure = Closure::new(move |_| body());
    // SAFETY: the closure is given.
    check(unsafe { mf_hook_after_backward(closure.into_raw()) })
}
