//! libtorch beyond tch: safe wrappers over the C++ shim. `docs/ffi.md` is its manual.
//!
//! Only safe functions leave this room. Each submodule mirrors one `.cpp` file.
#![allow(unsafe_code)]

pub(crate) mod accumulate;
pub(crate) mod adafactor;
pub(crate) mod adamw8bit;
pub(crate) mod autocast;
pub(crate) mod bytes;
mod callback;
pub(crate) mod device;
pub(crate) mod grad;
pub(crate) mod hooks;
pub(crate) mod lion;
pub(crate) mod loss;
pub(crate) mod memory;
pub(crate) mod mixed;
pub(crate) mod multi;
pub(crate) mod muon;
pub(crate) mod optim;
pub(crate) mod profiler;
pub(crate) mod recompute;
pub(crate) mod rng;
pub(crate) mod saved;
pub(crate) mod sgd;
mod status;
pub(crate) mod storage;
pub(crate) mod tensor;
pub(crate) mod threads;
pub(crate) mod timeline;

pub(crate) use callback::{Arguments, Closure};
use status::check;
