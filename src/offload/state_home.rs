use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::disk::Disk;
use super::optimizer::OptimizerOffload;
use crate::error::Result;
use crate::optim::Optimizer;

/// Where an optimizer's state will live; made by
/// [`CpuOffload::optimizer`](super::CpuOffload::optimizer).
#[derive(Debug)]
#[must_use = "say where the state lives: `.disk(folder)?` or `.host()?`"]
pub struct StateHome<O> {
    inner: O,
}

impl<O: Optimizer> StateHome<O> {
    pub(super) fn new(inner: O) -> Self {
        Self { inner }
    }

    /// The state lives in a temporary file in this folder. It is made, and the file reserved
    /// at full size, by `build()`, or by [`Optimizer::allocate`] in a plain loop.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) for an unusable folder; [`Error::Unsupported`](crate::Error::Unsupported) for an
    /// optimizer whose state cannot be reached; out of memory.
    pub fn disk(self, folder: impl AsRef<Path>) -> Result<OptimizerOffload<O>> {
        let disk = Disk::new(folder.as_ref())?;
        OptimizerOffload::new(self.inner, Home::Disk(disk, folder.as_ref().to_owned()))
    }

    /// The state stays where it is: for weights that are offloaded, see
    /// [`ParameterOffload`](super::ParameterOffload).
    ///
    /// # Errors
    /// As [`StateHome::disk`].
    pub fn resident(self) -> Result<OptimizerOffload<O>> {
        OptimizerOffload::new(self.inner, Home::Resident)
    }

    /// The state of parameters on CUDA lives, and their update runs, on the host.
    ///
    /// # Errors
    /// [`Error::Incompatible`](crate::Error::Incompatible) where no parameter is on CUDA: the host is where the state is
    /// already. As [`StateHome::disk`].
    pub fn host(self) -> Result<OptimizerOffload<O>> {
        OptimizerOffload::new(self.inner, Home::Host)
    }
}

#[derive(Debug)]
pub(super) enum Home {
    Resident,
    Host,
    Disk(Arc<Disk>, PathBuf),
}
