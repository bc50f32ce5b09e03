//! Identity and version of tensors and storages.

use std::os::raw::c_int;

use tch::Tensor;
use torch_sys::C_tensor;

use super::check;
use crate::error::Result;

unsafe extern "C" {
    fn mf_tensor_identity(tensor: *const C_tensor) -> usize;
    fn mf_storage_identity(tensor: *const C_tensor) -> usize;
    fn mf_tensor_version(tensor: *const C_tensor) -> u64;
    fn mf_tensor_bump(tensor: *const C_tensor);
    fn mf_tensor_put_back(tensor: *const C_tensor, bytes: *const C_tensor) -> c_int;
}

/// Equal for all handles of one tensor, while one of them is alive.
pub(crate) fn identity(tensor: &Tensor) -> usize {
    // SAFETY: the handle is borrowed for the call.
    unsafe { mf_tensor_identity(tensor.as_ptr()) }
}

/// Equal for all views of one storage, while one of them is alive; 0 without a storage.
pub(crate) fn storage_identity(tensor: &Tensor) -> usize {
    // SAFETY: the handle is borrowed for the call.
    unsafe { mf_storage_identity(tensor.as_ptr()) }
}

/// The version counter: how often the tensor was changed in place.
pub(crate) fn version(tensor: &Tensor) -> u64 {
    // SAFETY: the handle is borrowed for the call.
    unsafe { mf_tensor_version(tensor.as_ptr()) }
}

/// Counts a change that was made below libtorch.
pub(crate) fn bump(tensor: &Tensor) {
    // SAFETY: the handle is borrowed for the call.
    unsafe { mf_tensor_bump(tensor.as_ptr()) };
}

/// Puts a value back that the tensor held before, without counting a change.
pub(crate) fn put_back(tensor: &Tensor, value: &Tensor) -> Result<()> {
    // SAFETY: both handles are borrowed for the call.
    check(unsafe { mf_tensor_put_back(tensor.as_ptr(), value.as_ptr()) })
}

/// A detached copy with the same strides.
pub(crate) fn copy_of(tensor: &Tensor) -> Result<Tensor> {
    let copy = tensor.f_detach()?.f_empty_like()?;
    put_back(&copy, tensor)?;
    Ok(copy)
}
