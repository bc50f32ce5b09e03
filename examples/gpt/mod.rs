//! A byte-level GPT in plain tch, text to train it on, and the ways to train it within
//! memory; shared by the larger examples.
//!
//! Nothing in the model knows of memfit but one line: a block may stand behind an
//! [`memfit::ActivationCheckpoint`].
#![allow(dead_code, unused_imports)] // each example uses its part

mod model;
mod optimizer;
mod plan;
mod text;

pub use model::{Config, Gpt, Recompute};
pub use optimizer::{Choice, With};
pub use plan::{Amp, Plan, Split, Training, Watch, When};
pub use text::{Rows, Text};

/// What an example's functions fail with: one sentence for the user.
pub type Failure = Box<dyn std::error::Error>;
