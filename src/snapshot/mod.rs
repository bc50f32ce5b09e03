//! Snapshots: the whole training state on disk, and back to the bit.
//!
//! One call saves parameters, buffers, the optimizer's and the strategies' state, an open
//! window with its partial gradients, the generators, the position and entries of your own.
//! One call brings all of it back into an equal stack: the run then goes on as if it had never
//! stopped. `docs/snapshots.md` describes the files, `docs/interop.md` how PyTorch reads and
//! writes them.
//!
//! *Cost*: on disk the bytes of the state. In memory, while saving or resuming, 1 MiB for rows
//! of a tensor that is not contiguous or not on the CPU (one row, where it is longer), 256 KiB
//! per reading thread (at most four),
//! and names, shapes and the manifest: some KB per tensor, so megabytes where there are
//! thousands. Resuming into a state with an open window makes its gradients, sums and copies of
//! buffers anew before those that are there go: their bytes once more for that time.
//! [`Snapshots::save_in_background`] copies the whole state to host memory until it is written.
//! Time is the disk's: each file is synced before the snapshot gets its name.
//!
//! *When it acts*: where you call it, between steps, in the middle of a window too.
//!
//! *Limits*: refused with tch's own optimizer, whose state is out of reach, and inside a step.
//! Offloading may differ between the two sides; any other difference of the stacks is refused
//! by name. Peaks are measured anew after a resume. A folder belongs to one run: savers wait
//! for each other. Files are little-endian, and Unix is needed.
//!
//! ```
//! use memfit::{Loss, Snapshots, Stack, optim::{AdamW, AdamWConfig}, snapshot::Extras};
//! use memfit::tch::{nn, nn::Module, Device, Kind, Tensor};
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let model = nn::linear(vs.root(), 4, 1, Default::default());
//! let mut training = Stack::of(&vs, AdamW::new(&vs, AdamWConfig::default())?).build()?;
//! let x = Tensor::randn([8, 4], (Kind::Float, Device::Cpu));
//! let folder = tempfile::tempdir().unwrap();
//! let mut snapshots = Snapshots::in_folder(folder.path())?.keep_last(3);
//! if let Some(snapshot) = snapshots.latest()? {
//!     println!("resumed at step {}", snapshot.resume(&mut training)?.position.steps);
//! }
//! let _ = training.step_with(|| Ok(Loss::of(model.forward(&x).square().mean(Kind::Float))))?;
//! println!("{:?}", snapshots.save(&mut training, &Extras::new())?);
//! # Ok::<(), memfit::Error>(())
//! ```

mod extras;
mod folder;
mod hashing;
mod layout;
mod manifest;
mod open;
mod read;
mod save;
mod tensors;
#[cfg(test)]
mod tests;
mod unique;
mod weights;
mod write;

pub use extras::{Extras, Script};
pub use open::{Resumed, Snapshot};
pub use save::{Saved, Snapshots};
pub use weights::{Target, Weights, read_tensors};
