#![doc = include_str!("../README.md")]
#![deny(unsafe_code, unsafe_op_in_unsafe_fn)]
#![warn(missing_docs, clippy::undocumented_unsafe_blocks)]

pub mod checkpoint;
pub mod data;
pub mod error;
mod ffi;
pub mod loss;
pub mod memory;
pub mod offload;
pub mod optim;
mod origin;
pub mod rng;
pub mod saved;
pub mod snapshot;
pub mod stack;
pub mod state;
pub mod step;
pub mod strategies;
mod sys;

pub use checkpoint::{ActivationCheckpoint, Checkpointer, checkpoint};
pub use error::{Error, Result};
pub use offload::CpuOffload;
pub use snapshot::{Snapshot, Snapshots};
pub use stack::{Micro, Stack, StackBuilder, Windows};
pub use state::{Named, State, StateVisitor, Value};
pub use step::*;
pub use strategies::find_max_batch;
pub use tch;

#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../docs/writing-a-strategy.md")]
    struct WritingAStrategy;
    #[doc = include_str!("../docs/data-sources.md")]
    struct DataSources;
    #[doc = include_str!("../docs/snapshots.md")]
    struct Snapshots;
    #[doc = include_str!("../docs/data.md")]
    struct Data;
    #[doc = include_str!("../docs/interop.md")]
    struct Interop;
    #[doc = include_str!("../docs/system.md")]
    struct System;
    #[doc = include_str!("../docs/profiling.md")]
    struct Profiling;
    #[doc = include_str!("../docs/data-streams.md")]
    struct DataStreams;
}
