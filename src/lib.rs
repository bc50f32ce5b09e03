//! memfit makes training fit in memory.
#![deny(unsafe_code, unsafe_op_in_unsafe_fn)]
#![warn(missing_docs, clippy::undocumented_unsafe_blocks)]

pub mod error;
mod ffi;
pub mod memory;
pub mod optim;
pub mod rng;
pub mod state;
pub mod step;
mod sys;

pub use error::{Error, Result};
pub use step::*;
pub use tch;
