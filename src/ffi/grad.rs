//! Gradients: get, take, set, and backward with a seed.

use std::os::raw::c_int;

use tch::Tensor;
use torch_sys::C_tensor;

use super::check;
use crate::error::Result;

unsafe extern "C" {
    fn mf_grad_get(tensor: *const C_tensor) -> *mut C_tensor;
    fn mf_grad_take(tensor: *const C_tensor) -> *mut C_tensor;
    fn mf_grads_drop(tensors: *const *const C_tensor, count: usize);
    fn mf_grad_set(tensor: *const C_tensor, grad: *const C_tensor) -> c_int;
    fn mf_backward(root: *const C_tensor, seed: f64, keep_graph: c_int, create_graph: c_int) -> c_int;
}

/// What backward leaves of the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Graph {
    /// Freed.
    Free,
    /// Kept for another backward.
    Keep,
}

/// The gradient, shared, if there is one.
pub(crate) fn get(tensor: &Tensor) -> Option<Tensor> {
    // SAFETY: the handle is borrowed for the call.
    owned(unsafe { mf_grad_get(tensor.as_ptr()) })
}

/// Takes the gradient away from the tensor.
pub(crate) fn take(tensor: &Tensor) -> Option<Tensor> {
    // SAFETY: the handle is borrowed for the call.
    owned(unsafe { mf_grad_take(tensor.as_ptr()) })
}

/// Drops the gradients of many tensors.
pub(crate) fn drop_all<'a>(tensors: impl Iterator<Item = &'a Tensor>) {
    let handles: Vec<_> = tensors.map(Tensor::as_ptr).collect();
    // SAFETY: the handles are borrowed for the call, and there are as many as said.
    unsafe { mf_grads_drop(handles.as_ptr(), handles.len()) };
}

/// Sets the gradient, sharing the handle.
pub(crate) fn set(tensor: &Tensor, grad: &Tensor) -> Result<()> {
    // SAFETY: both handles are borrowed for the call.
    check(unsafe { mf_grad_set(tensor.as_ptr(), grad.as_ptr()) })
}

/// Backward from a one-element root, seeded with `seed`.
pub(crate) fn backward(root: &Tensor, seed: f64, graph: Graph) -> Result<()> {
    let keep = c_int::from(graph == Graph::Keep);
    // SAFETY: the handle is borrowed for the call.
    check(unsafe { mf_backward(root.as_ptr(), seed, keep, 0) })
}

fn owned(handle: *mut C_tensor) -> Option<Tensor> {
    // SAFETY: a handle that is not null is owned by us alone.
    (!handle.is_null()).then(|| unsafe { Tensor::from_ptr(handle) })
}
