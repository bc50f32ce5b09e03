//! Moves what a step does not need at the moment out of memory, and back in time: saved
//! activations, optimizer state, weights.
//!
//! Three places in a step, three constructors of [`CpuOffload`]; all give the same bits as
//! training without them. Bytes go from a device to pinned host memory and from there, or
//! from a CPU at once, to a temporary file. On a CPU-only run the host tier is nothing, so a
//! folder on a disk is needed.
//!
//! | | leaves memory | *cost* in bytes | in time |
//! | --- | --- | --- | --- |
//! | [`activations`](CpuOffload::activations) | saved tensors, from the operator after the one that saved them to their use in backward | what one operator saves, plus one storage per `prefetch` | each byte out and back once |
//! | [`optimizer`](CpuOffload::optimizer) | optimizer state, but in the update | the largest parameter's state | state out and back per update |
//! | [`parameters`](CpuOffload::parameters) | a segment's weights, but in its forward, backward and update | one segment's weights | weights in twice per micro-batch |
//!
//! *Limits*: a folder that lies in memory (`tmpfs`) frees nothing and is warned of. What is in
//! the file is in the kernel's page cache as long as the kernel likes, where it is nobody's
//! anonymous memory and can be dropped at any time.
//!
//! ```
//! use memfit::tch::{Device, Kind, Tensor};
//! use memfit::offload::CpuOffload;
//!
//! let mut offload = CpuOffload::activations().disk(std::env::temp_dir());
//! let x = Tensor::ones([256, 256], (Kind::Float, Device::Cpu)).set_requires_grad(true);
//! let y = offload.around(Device::Cpu, &[], || Ok((&x * 2.0).tanh().square().sum(Kind::Float)))?;
//! assert_eq!(offload.moved().out_bytes, 256 * 256 * 4);
//! y.backward();
//! # Ok::<(), memfit::Error>(())
//! ```

mod activations;
mod berth;
mod carrier;
mod disk;
mod entry;
mod hidden;
mod ledger;
mod moved;
mod optimizer;
mod order;
mod parameters;
mod state_home;
mod weights;

pub use activations::ActivationOffload;
pub use moved::{Moved, Observer};
pub use optimizer::OptimizerOffload;
pub use parameters::{ParameterOffload, Plain, Present, WeightsHome, WithTrain};
pub use state_home::StateHome;
pub(crate) use weights::{Hold, hold, is_offloaded};

use crate::optim::{Optimizer, Parameters};

/// Moves bytes out of memory: the entrance to the three kinds.
#[derive(Clone, Copy, Debug)]
pub struct CpuOffload;

impl CpuOffload {
    /// Moves the tensors that forward saves for backward.
    pub fn activations() -> ActivationOffload {
        ActivationOffload::new()
    }

    /// Keeps an optimizer's state elsewhere: `CpuOffload::optimizer(o).disk(folder)?`.
    pub fn optimizer<O: Optimizer>(optimizer: O) -> StateHome<O> {
        StateHome::new(optimizer)
    }

    /// Keeps a segment's weights elsewhere: `CpuOffload::parameters(block, &vs).disk(folder)?`,
    /// where the store has the block's parameters and no others.
    pub fn parameters<M, P: Parameters + ?Sized>(module: M, weights: &P) -> WeightsHome<M> {
        WeightsHome::new(module, weights)
    }
}
