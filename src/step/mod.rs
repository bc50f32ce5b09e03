//! The words of a training step: what a strategy is, and what passes between the driver,
//! the strategies and the optimizer. No logic of its own.

mod batch;
mod data_position;
mod exactness;
mod final_gradients;
mod inside;
mod loss;
mod outcome;
mod phases;
mod place;
mod ready;
mod strategy;
mod window;

pub use batch::Batch;
pub use data_position::{DataPosition, Mark};
pub use exactness::Exactness;
pub(crate) use final_gradients::needs_gradients;
pub(crate) use inside::{InsideStep, is_inside, unwind};
pub use loss::Loss;
pub use outcome::{SkipReason, Split, StepOutcome};
pub use phases::{
    Backward, Closing, Measure, Mode, NextBackward, NextForward, NextUpdate, Numbers, Update, UpdatePhase,
    Verdict,
};
pub use place::{Place, Relation};
pub use ready::{GradientUse, Heard, Ready};
pub use strategy::{
    Conflict, Cost, Failure, Gradients, KeptGradients, ModelSize, Preparation, Recovery, RowBytes, Scene,
    Strategy,
};
pub use window::{MicroBatch, Position, WindowRule};
