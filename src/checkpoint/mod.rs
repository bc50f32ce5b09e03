//! Activations that are dropped in forward and computed again in backward.
//!
//! Wrap a block in [`ActivationCheckpoint`], a closure over several tensors in [`checkpoint`],
//! or a chain of blocks in a [`CheckpointChain`] under a [`Checkpointer`]. A segment keeps its
//! inputs, the state of the random generators where it moved them, and the versions of the
//! parameters it read; backward runs it again when it needs the first of its saved tensors.
//! Gradients are bit-equal to those of the plain loop.
//!
//! *Cost*: bytes after forward: Σ segment inputs + outputs (+ 2.5 KB per segment that draws
//! random numbers); at the peak, one segment's activations on top. Time: one more forward of
//! each segment, less what follows the last tensor that backward needs; about a microsecond
//! per saved tensor beside that. No device synchronisation.
//!
//! *When it acts*: where gradients are on. Without them, and inside another segment's forward,
//! the module simply runs. What was set in forward is set again for the recompute: generators,
//! autocast, gradient mode, the train flag, TorchScript's optimiser (off both times, since it
//! changes what is saved from call to call). Running statistics move once: what the recompute
//! does to them, to integer counters and to registered buffers is undone. A wrapped segment
//! needs no `Stack`.
//!
//! *Limits*: a segment must compute the same from the same inputs; another number, shape or
//! dtype is [`Error::RecomputeMismatch`](crate::Error::RecomputeMismatch), other values are
//! found by [`Segment::checked`]. A segment's input, or a parameter it read, changed in place
//! before backward is [`Error::Modified`](crate::Error::Modified); a frozen tensor that is
//! added but not saved (a bias) is watched only where it is registered, as a `Stack` does.
//! Early stop leaves a segment by unwinding: it chains one panic hook that is silent for it
//! alone, and needs `panic = "unwind"`.
//!
//! ```
//! use memfit::ActivationCheckpoint;
//! use memfit::tch::nn::{self, Module};
//! use memfit::tch::{Device, Kind, Tensor};
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let block = nn::seq().add(nn::linear(vs.root(), 8, 8, Default::default())).add_fn(|x| x.gelu("none"));
//! let block = ActivationCheckpoint::new(block).named("block 0");
//! let x = Tensor::ones([2, 8], (Kind::Float, Device::Cpu));
//! block.forward(&x).sum(Kind::Float).backward();
//! assert_eq!(block.recomputes(), 1);
//! ```

mod activation;
mod chain;
mod checkpointer;
mod function;
mod quiet;
mod segment;
mod shared;
mod tensors;

pub use activation::{ActivationCheckpoint, Plain, WithTrain};
pub use chain::CheckpointChain;
pub use checkpointer::{Checkpointer, EveryNth, Halves, KeepAll, Plan, Ranges, RecomputeAll};
pub use function::checkpoint;
pub use segment::{EarlyStop, Segment};
pub use shared::Shared;
pub use tensors::Tensors;
