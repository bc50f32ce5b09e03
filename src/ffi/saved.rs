//! Saved-tensor links: `shim/saved.cpp` and `shim/registry.cpp`.

use std::ffi::{CStr, CString};
use std::marker::PhantomData;
use std::os::raw::{c_char, c_int, c_void};
use std::ptr::null_mut;

use tch::Tensor;
use torch_sys::C_tensor;

use super::{Closure, check};
use crate::error::{Error, Result};
use crate::state::Named;

unsafe extern "C" {
    fn mf_link_new(pack: *mut c_void) -> *mut c_void;
    fn mf_link_drop(link: *mut c_void);
    fn mf_link_push(link: *mut c_void) -> *mut c_void;
    fn mf_links_pause() -> *mut c_void;
    fn mf_place_end(place: *mut c_void);
    fn mf_register(
        tensors: *const *const C_tensor,
        names: *const *const c_char,
        count: usize,
        registration: *mut *mut c_void,
    ) -> c_int;
    fn mf_unregister(registration: *mut c_void);
    fn mf_is_parameter(tensor: *const C_tensor) -> c_int;
}

#[unsafe(no_mangle)]
extern "C" fn mf_park_modified(what: *const c_char, expected: u64, found: u64) -> u64 {
    // SAFETY: the shim passes a NUL-ended text that outlives the call.
    let what = unsafe { CStr::from_ptr(what) }.to_string_lossy().into_owned();
    Error::Modified { what, expected, found }.park()
}

/// Gives a tensor back that a link has taken; called each time backward asks, and dropped
/// with the graph. It may run on another thread than forward.
pub type Unpack = Box<dyn FnMut() -> Result<Tensor> + Send>;

/// One link of the chain: it sees each tensor that forward saves for backward, and may take
/// its place.
///
/// Tensors are shown detached. Parameters are never shown, see [`register`].
#[derive(Debug)]
pub struct Link {
    raw: *mut c_void,
}

// SAFETY: the link is a counted C++ object whose closure is `Send` and guarded by a lock
// there; the thread that pushes it calls it.
unsafe impl Send for Link {}

impl Link {
    /// A link that calls `pack` for each saved tensor: `None` declines, so that the tensor
    /// passes to the next link outward; a closure takes it.
    ///
    /// `pack` runs without gradients and with all links hidden. Its error ends the forward
    /// pass: tch's call returns or panics with it.
    pub fn new(mut pack: impl FnMut(&Tensor) -> Result<Option<Unpack>> + Send + 'static) -> Self {
        let closure = Closure::new(move |args| {
            let Some(tensor) = args.input() else { return Ok(()) };
            if let Some(mut unpack) = pack(&tensor)? {
                args.give_closure(Closure::new(move |args| {
                    args.give_tensor(unpack()?);
                    Ok(())
                }));
            }
            Ok(())
        });
        // SAFETY: the closure is given; the link is owned by `Self`.
        Self { raw: unsafe { mf_link_new(closure.into_raw()) } }
    }

    /// Makes it the innermost link of this thread until the guard is dropped.
    #[must_use = "the link is in the chain while the guard lives"]
    pub fn push(&self) -> LinkGuard {
        // SAFETY: the link is alive; the place is owned by the guard.
        LinkGuard(Place::new(unsafe { mf_link_push(self.raw) }))
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // SAFETY: owned by `self`, dropped once.
        unsafe { mf_link_drop(self.raw) };
    }
}

/// Keeps a [`Link`] in the chain of the thread that pushed it.
#[derive(Debug)]
pub struct LinkGuard(#[expect(dead_code, reason = "its drop ends the place")] Place);

/// Hides all links of this thread until it is dropped.
#[derive(Debug)]
pub struct Pause(#[expect(dead_code, reason = "its drop ends the place")] Place);

/// Hides all links of this thread: for work whose saved tensors are nobody's business.
#[must_use = "links are hidden while the guard lives"]
pub fn pause() -> Pause {
    // SAFETY: no argument; the place is owned by the guard.
    Pause(Place::new(unsafe { mf_links_pause() }))
}

#[derive(Debug)]
struct Place {
    raw: *mut c_void,
    // A place belongs to the chain of its thread.
    not_send: PhantomData<*mut ()>,
}

impl Place {
    fn new(raw: *mut c_void) -> Self {
        Self { raw, not_send: PhantomData }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // SAFETY: owned by `self`, ended once, on its own thread since `Self` is not `Send`.
        unsafe { mf_place_end(self.raw) };
    }
}

/// Keeps tensors registered; they are forgotten when it is dropped.
#[derive(Debug)]
pub struct Registration {
    raw: *mut c_void,
}

// SAFETY: the registry is guarded by a lock in C++; any thread may give a registration back.
unsafe impl Send for Registration {}
// SAFETY: nothing is reachable through a shared reference.
unsafe impl Sync for Registration {}

impl Drop for Registration {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: owned by `self`, given back once.
            unsafe { mf_unregister(self.raw) };
        }
    }
}

/// Registers parameters and buffers by the identity of their storage, for all threads.
///
/// A registered tensor and its views are kept by reference where forward saves them, their
/// version checked in backward, and errors call them by name. A leaf that requires a gradient
/// is treated so without being registered. The registration keeps no tensor alive.
///
/// # Errors
/// Out of host memory.
pub fn register(named: &[Named]) -> Result<Registration> {
    let tensors: Vec<_> = named.iter().map(|named| named.tensor.as_ptr()).collect();
    let names: Vec<CString> =
        named.iter().map(|named| CString::new(named.name.replace('\0', " ")).unwrap_or_default()).collect();
    let pointers: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
    let mut registration = Registration { raw: null_mut() };
    // SAFETY: both arrays hold `len` valid pointers for the call; the out-parameter is owned
    // by `registration`.
    check(unsafe { mf_register(tensors.as_ptr(), pointers.as_ptr(), named.len(), &mut registration.raw) })?;
    Ok(registration)
}

/// Whether links leave this tensor alone: its storage is registered, or it is a leaf that
/// requires a gradient, or a view of one.
pub fn is_parameter(tensor: &Tensor) -> bool {
    // SAFETY: the handle is borrowed for the call.
    unsafe { mf_is_parameter(tensor.as_ptr()) != 0 }
}
