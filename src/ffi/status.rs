use std::ffi::CStr;
use std::os::raw::{c_char, c_int};

use crate::error::{Error, Result};

unsafe extern "C" {
    fn mf_last_error() -> *const c_char;
}

/// Turns a status of the shim into a result.
pub(super) fn check(status: c_int) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: the pointer is to a NUL-ended text that lives until the next failure on this
    // thread; it is copied here, before any other call.
    let text = unsafe { CStr::from_ptr(mf_last_error()) };
    Err(Error::from_text(&text.to_string_lossy()))
}
