//! The built-in strategies, one file each.

pub mod accumulate;
pub mod amp;
pub mod budget;
pub mod clip;
mod growth;
mod loss_scale;
pub mod master_weights;
pub mod max_batch;
pub mod memory_timeline;
mod offload;
pub mod out_of_memory;
pub mod profile_steps;
pub mod rollback;
pub mod schedule;

pub use accumulate::GradAccumulator;
pub use amp::{AmpConfig, AmpScaler, autocast, full_precision};
pub use budget::Budget;
pub use clip::{GradClip, NormClip, ValueClip};
pub use master_weights::MasterWeights;
pub use max_batch::{Found, Search, Trial, find_max_batch};
pub use memory_timeline::MemoryTimeline;
pub use out_of_memory::MicroBatcher;
pub use profile_steps::ProfileSteps;
pub use rollback::Rollback;
pub use schedule::{
    Chain, Constant, Cosine, CosineRestarts, Curve, InverseSqrt, LinearDecay, OneCycle, Schedule,
};
