//! Recompute regions: `shim/region.cpp` and `shim/recompute.cpp`.

use std::ffi::CStr;
use std::marker::PhantomData;
use std::os::raw::{c_char, c_int, c_void};
use std::ptr::null_mut;

use tch::Tensor;
use torch_sys::C_tensor;

use super::{Closure, check};
use crate::error::{Error, Result};

#[repr(C)]
struct RawForward {
    _opaque: [u8; 0],
}

#[repr(C)]
struct RawOptions {
    segment: *const c_char,
    checked: c_int,
    early_stop: c_int,
}

unsafe extern "C" {
    safe fn mf_region_wanted() -> c_int;
    fn mf_region_begin(
        inputs: *const *const C_tensor,
        count: usize,
        recompute: *mut c_void,
        options: *const RawOptions,
        out: *mut *mut RawForward,
    ) -> c_int;
    fn mf_region_end(forward: *mut RawForward, outputs: *const *const C_tensor, count: usize) -> c_int;
    fn mf_region_abandon(forward: *mut RawForward);
    safe fn mf_recompute_leaving() -> c_int;
}

#[unsafe(no_mangle)]
extern "C" fn mf_park_mismatch(segment: *const c_char, what: *const c_char) -> u64 {
    // SAFETY: the shim passes NUL-ended texts that outlive the call.
    let [segment, what] =
        [segment, what].map(|text| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned());
    Error::RecomputeMismatch { segment, what }.park()
}

/// How a region is recomputed and checked.
pub(crate) struct Options<'a> {
    pub(crate) segment: &'a CStr,
    pub(crate) checked: bool,
    pub(crate) early_stop: bool,
}

/// Whether a segment entered now is to be a region: gradients are on, and no region's forward
/// pass is in progress on this thread.
pub(crate) fn wanted() -> bool {
    mf_region_wanted() != 0
}

/// Whether this thread unwinds out of a recompute that has all it needs, or that has failed
/// for a reason that C++ reports.
pub(crate) fn leaving() -> bool {
    mf_recompute_leaving() != 0
}

/// Puts this thread's gradient mode back when dropped, also by a panic: tch's closures leave
/// theirs behind then.
#[derive(Debug)]
pub(crate) struct GradMode {
    enabled: c_int,
    // The mode belongs to a thread.
    not_send: PhantomData<*mut ()>,
}

impl GradMode {
    pub(crate) fn hold() -> Self {
        // SAFETY: it only swaps a thread-local flag and returns the former one.
        let enabled = unsafe { torch_sys::at_grad_set_enabled(1) };
        // SAFETY: as above; this puts the flag back at once.
        unsafe { torch_sys::at_grad_set_enabled(enabled) };
        Self { enabled, not_send: PhantomData }
    }
}

impl Drop for GradMode {
    fn drop(&mut self) {
        // SAFETY: it only sets a thread-local flag, on its own thread as `Self` is not `Send`.
        unsafe { torch_sys::at_grad_set_enabled(self.enabled) };
    }
}

/// A forward pass under a region. Dropped without [`Forward::end`], it has failed.
#[derive(Debug)]
pub(crate) struct Forward {
    raw: *mut RawForward,
    // The region is a link in the chain of its thread.
    not_send: PhantomData<*mut ()>,
}

impl Forward {
    /// Starts a region. `recompute` is called in backward with copies of the inputs.
    pub(crate) fn begin(inputs: &[&Tensor], recompute: Closure, options: &Options<'_>) -> Result<Self> {
        let inputs = handles(inputs);
        let raw_options = RawOptions {
            segment: options.segment.as_ptr(),
            checked: c_int::from(options.checked),
            early_stop: c_int::from(options.early_stop),
        };
        let mut raw = null_mut();
        // SAFETY: the handles are of tensors that the caller borrows to us for the call; the
        // closure is given; `raw` is owned on success.
        let status = unsafe {
            mf_region_begin(inputs.as_ptr(), inputs.len(), recompute.into_raw(), &raw_options, &mut raw)
        };
        if status == 2 {
            return Err(Error::Unsupported {
                what: format!("checkpointing segment `{}`", options.segment.to_string_lossy()),
                place: "on a device whose random generator cannot be captured".to_owned(),
                remedy: "train on Device::Cpu or Device::Cuda, or leave out the checkpoint".to_owned(),
            });
        }
        check(status)?;
        Ok(Self { raw, not_send: PhantomData })
    }

    /// Ends the forward pass. The outputs tell which parameters it has read.
    pub(crate) fn end(mut self, outputs: &[&Tensor]) -> Result<()> {
        let outputs = handles(outputs);
        let raw = std::mem::replace(&mut self.raw, null_mut());
        // SAFETY: `raw` is owned and given; the handles are of tensors that the caller borrows
        // to us for the call.
        check(unsafe { mf_region_end(raw, outputs.as_ptr(), outputs.len()) })
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: owned and given, on the thread that began it since `Self` is not `Send`.
            unsafe { mf_region_abandon(self.raw) };
        }
    }
}

fn handles(tensors: &[&Tensor]) -> Vec<*const C_tensor> {
    tensors.iter().map(|tensor| tensor.as_ptr()).collect()
}
