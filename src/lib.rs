//! memfit makes training fit in memory.
#![deny(unsafe_code, unsafe_op_in_unsafe_fn)]
#![warn(missing_docs, clippy::undocumented_unsafe_blocks)]

pub mod checkpoint;
pub mod error;
mod ffi;
pub mod memory;
pub mod optim;
pub mod rng;
pub mod saved;
pub mod state;
pub mod step;
mod sys;

pub use checkpoint::{ActivationCheckpoint, Checkpointer, checkpoint};
pub use error::{Error, Result};
pub use state::Named;
pub use step::*;
pub use tch;
