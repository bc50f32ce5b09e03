//! libtorch's default generators.

use std::os::raw::c_int;

use tch::Tensor;
use torch_sys::C_tensor;

use super::check;
use crate::error::Result;

#[repr(C)]
struct RawRng {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    safe fn mf_rng_capture() -> *mut RawRng;
    fn mf_rng_restore(saved: *mut RawRng);
    fn mf_rng_moved(saved: *mut RawRng) -> c_int;
    safe fn mf_rng_bytes() -> usize;
    fn mf_rng_free(saved: *mut RawRng);
    fn mf_rng_pack(saved: *mut RawRng, out: *mut *mut C_tensor) -> c_int;
    fn mf_rng_unpack(state: *const C_tensor, out: *mut *mut RawRng) -> c_int;
    fn mf_rng_device_state(device: c_int, out: *mut *mut C_tensor) -> c_int;
    fn mf_rng_set_device_state(device: c_int, state: *const C_tensor) -> c_int;
}

/// A copy of the default CPU generator.
#[derive(Debug)]
pub(crate) struct CpuRng(*mut RawRng);

// SAFETY: the copy is plain data that only this value reaches; whichever thread holds it
// may read or free it, and the generator itself is guarded by its own mutex.
unsafe impl Send for CpuRng {}
// SAFETY: as above; nothing writes to the copy after it was made.
unsafe impl Sync for CpuRng {}

impl CpuRng {
    /// Copies the generator's engine and its cached samples.
    pub(crate) fn capture() -> Self {
        Self(mf_rng_capture())
    }

    /// Puts the generator back.
    pub(crate) fn restore(&self) {
        // SAFETY: the copy is ours and alive.
        unsafe { mf_rng_restore(self.0) };
    }

    /// Whether the generator is in another state now.
    pub(crate) fn moved(&self) -> bool {
        // SAFETY: the copy is ours and alive.
        unsafe { mf_rng_moved(self.0) != 0 }
    }

    /// The copy as libtorch's own state tensor, on the host.
    pub(crate) fn pack(&self) -> Result<Tensor> {
        let mut state = std::ptr::null_mut();
        // SAFETY: the copy is ours and alive; `state` is written on success.
        check(unsafe { mf_rng_pack(self.0, &mut state) })?;
        // SAFETY: the handle is owned by us alone.
        Ok(unsafe { Tensor::from_ptr(state) })
    }

    /// A copy from libtorch's own state tensor.
    pub(crate) fn unpack(state: &Tensor) -> Result<Self> {
        let mut saved = std::ptr::null_mut();
        // SAFETY: the handle is borrowed for the call; `saved` is written on success.
        check(unsafe { mf_rng_unpack(state.as_ptr(), &mut saved) })?;
        Ok(Self(saved))
    }

    /// Bytes of a copy.
    pub(crate) fn bytes() -> usize {
        mf_rng_bytes()
    }
}

impl Drop for CpuRng {
    fn drop(&mut self) {
        // SAFETY: the copy is ours and is freed once.
        unsafe { mf_rng_free(self.0) };
    }
}

/// The state of the accelerator's default generator.
pub(crate) fn device_state(device: usize) -> Result<Tensor> {
    let mut state = std::ptr::null_mut();
    // SAFETY: `state` is writable; on success it holds an owned handle.
    check(unsafe { mf_rng_device_state(device as c_int, &mut state) })?;
    // SAFETY: the handle is owned by us alone.
    Ok(unsafe { Tensor::from_ptr(state) })
}

/// Sets the state of the accelerator's default generator.
pub(crate) fn set_device_state(device: usize, state: &Tensor) -> Result<()> {
    // SAFETY: the handle is borrowed for the call.
    check(unsafe { mf_rng_set_device_state(device as c_int, state.as_ptr()) })
}
