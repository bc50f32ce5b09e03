//! The one trampoline through which C++ calls Rust.

use std::os::raw::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::{Error, Result};

/// What a closure gets from C++ and gives back: `mf_args` of the header.
#[repr(C)]
pub(crate) struct RawArguments {
    input: *mut C_tensor,
    output: *mut C_tensor,
    closure: *mut c_void,
    inputs: *const *mut C_tensor,
    count: usize,
}

/// The safe face of [`RawArguments`].
pub(crate) struct Arguments<'a> {
    raw: &'a mut RawArguments,
}

impl Arguments<'_> {
    /// The tensor that C++ passes in, if any.
    pub(crate) fn input(&self) -> Option<Tensor> {
        if self.raw.input.is_null() {
            return None;
        }
        // SAFETY: the handle is valid for the call; the shallow clone owns itself.
        Some(unsafe { Tensor::clone_from_ptr(self.raw.input) })
    }

    /// The tensors that C++ passes in where it passes several; undefined ones stay so.
    pub(crate) fn inputs(&self) -> Vec<Tensor> {
        if self.raw.count == 0 {
            return Vec::new();
        }
        // SAFETY: C++ passes `count` handles that are valid for the call.
        let handles = unsafe { std::slice::from_raw_parts(self.raw.inputs, self.raw.count) };
        // SAFETY: as above; each shallow clone owns itself.
        handles.iter().map(|handle| unsafe { Tensor::clone_from_ptr(*handle) }).collect()
    }

    /// Hands a tensor to C++.
    pub(crate) fn give_tensor(&mut self, tensor: Tensor) {
        // SAFETY: the clone made here is owned by nobody else; the receiver frees it.
        self.raw.output = unsafe { torch_sys::at_shallow_clone(tensor.as_ptr().cast_mut()) };
    }

    /// Hands a closure to C++.
    pub(crate) fn give_closure(&mut self, closure: Closure) {
        self.raw.closure = closure.into_raw();
    }
}

type Body = Box<dyn FnMut(&mut Arguments<'_>) -> Result<()> + Send>;

/// A Rust closure that C++ may call, one call at a time, on any thread.
pub(crate) struct Closure(Box<Body>);

impl Closure {
    /// Boxes a closure. It must not be called again while it runs; C++ keeps that for the
    /// links and hooks it makes of it.
    pub(crate) fn new(body: impl FnMut(&mut Arguments<'_>) -> Result<()> + Send + 'static) -> Self {
        Self(Box::new(Box::new(body)))
    }

    /// Gives it to C++, which frees it with `mf_drop_closure`.
    pub(super) fn into_raw(self) -> *mut c_void {
        Box::into_raw(self.0).cast()
    }
}

#[unsafe(no_mangle)]
extern "C" fn mf_call(closure: *mut c_void, args: *mut RawArguments) -> u64 {
    let caught = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: `closure` came from `into_raw` and is not freed while C++ owns it; C++
        // makes one call at a time.
        let body = unsafe { &mut *closure.cast::<Body>() };
        // SAFETY: `args` lives on the caller's stack for the call.
        let raw = unsafe { &mut *args };
        body(&mut Arguments { raw })
    }));
    match caught {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => error.park(),
        Err(payload) => Error::from_panic(payload, "a closure called by libtorch").park(),
    }
}

#[unsafe(no_mangle)]
extern "C" fn mf_drop_closure(closure: *mut c_void) {
    let dropped = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: `closure` came from `into_raw`; C++ gives it back once.
        drop(unsafe { Box::from_raw(closure.cast::<Body>()) });
    }));
    if dropped.is_err() {
        tracing::error!("a closure panicked while it was dropped");
    }
}

#[unsafe(no_mangle)]
extern "C" fn mf_parked_text(parked: u64, buffer: *mut c_char, capacity: usize) {
    let Some(room) = capacity.checked_sub(1) else { return };
    let text = Error::parked_text(parked);
    let mut length = text.len().min(room);
    while !text.is_char_boundary(length) {
        length -= 1;
    }
    // SAFETY: C++ passes a buffer of `capacity` bytes; `length` is less.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast(), length);
        buffer.add(length).write(0);
    }
}
