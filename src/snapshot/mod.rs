//! Snapshots: the whole training state on disk, and back to the bit.

mod dtype;
mod extras;
mod folder;
mod layout;
mod manifest;
mod open;
mod read;
mod save;
#[cfg(test)]
mod tests;
mod unique;
mod weights;
mod write;

pub use extras::{Extras, Script};
pub use open::{Resumed, Snapshot};
pub use save::{Saved, Snapshots};
pub use weights::{Target, Weights};
