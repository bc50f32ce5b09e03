//! The built-in strategies, one file each.

mod accumulate;
mod amp;
mod budget;
mod clip;
mod loss_scale;
mod master_weights;
mod offload;
mod rollback;
mod schedule;

pub use accumulate::GradAccumulator;
pub use amp::{AmpConfig, AmpScaler, autocast, full_precision};
pub use budget::Budget;
pub use clip::{GradClip, NormClip, ValueClip};
pub use master_weights::MasterWeights;
pub use rollback::Rollback;
pub use schedule::Cosine;
