//! A hard upper bound on live bytes.
//!
//! *Cost*: 0 bytes; one comparison per allocation.
//!
//! *When it acts*: on the CPU at each allocation, from `build()` until the stack is dropped: a
//! breach is [`Error::OutOfMemory`](crate::Error::OutOfMemory) and nothing is lost. The limit holds for the whole process.
//!
//! *Limits*: on CUDA nothing can refuse an allocation, so there the peak is checked after each
//! step and a breach is logged as not enforced. Batches that a [`Loader`](crate::data::Loader) makes ahead count as
//! all else does: (prefetch + 1)·b beside the step, of b bytes each. Memory that libtorch's CPU libraries take
//! beside its allocator is not seen: `docs/memory-model.md`.
//!
//! ```
//! use memfit::{Error, Loss, Stack, optim::{Sgd, SgdConfig}, strategies::Budget};
//! use memfit::tch::{nn, Device, Kind, Tensor};
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let w = vs.root().zeros("w", &[1024]);
//! let mut training = Stack::of(&vs, Sgd::new(&vs, SgdConfig::default().lr(0.1))?)
//!     .with(Budget::parse("1MiB")?)
//!     .build()?;
//! let outcome = training.step_with(|| Ok(Loss::of((&w * Tensor::f_ones([1024, 1024], (Kind::Float, Device::Cpu))?).sum(Kind::Float))));
//! assert!(matches!(outcome, Err(Error::OutOfMemory { limit: Some(1_048_576), .. })));
//! # Ok::<(), memfit::Error>(())
//! ```

use tch::Device;

use crate::error::Result;
use crate::memory::{self, Bytes, Limit};
use crate::step::{Cost, ModelSize, NextUpdate, Place, Preparation, Strategy, UpdatePhase, Verdict};

/// Bounds the live bytes of the training device. See the [module](self).
#[derive(Debug)]
pub struct Budget {
    bytes: u64,
    device: Device,
    limit: Option<Limit>,
}

impl Budget {
    /// At most so many bytes.
    pub fn bytes(bytes: u64) -> Self {
        Self { bytes, device: Device::Cpu, limit: None }
    }

    /// As a person writes it: `250MiB`, `1.5GB`.
    ///
    /// # Errors
    /// A text that is no size.
    pub fn parse(text: &str) -> Result<Self> {
        text.parse::<Bytes>().map(|bytes| Self::bytes(bytes.get()))
    }
}

impl Strategy for Budget {
    fn name(&self) -> String {
        let enforced = if self.device == Device::Cpu { "" } else { " (checked, not enforced)" };
        format!("Budget::bytes({}){enforced}", self.bytes)
    }

    fn identity(&self) -> Option<String> {
        None
    }

    fn place(&self) -> Place {
        Place::Watch
    }

    fn cost(&self, _model: &ModelSize) -> Cost {
        Cost::none()
    }

    fn prepare(&mut self, preparation: &mut Preparation<'_>) -> Result<()> {
        self.device = preparation.device;
        if self.device == Device::Cpu && self.limit.is_none() {
            self.limit = Some(Limit::new(self.bytes)?);
        }
        Ok(())
    }

    fn update(&mut self, phase: &mut UpdatePhase<'_>, next: NextUpdate<'_>) -> Result<Verdict> {
        let verdict = next(phase)?;
        if self.device != Device::Cpu {
            let peak = memory::stats(self.device)?.peak;
            if peak > self.bytes {
                tracing::warn!(
                    "peak of {peak} bytes on {:?} is over the budget of {}, which nothing enforces there",
                    self.device,
                    self.bytes
                );
            }
        }
        Ok(verdict)
    }
}
