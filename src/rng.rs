//! libtorch's default generators, captured and put back.
//!
//! *Cost*: about 2.5 KB and a fraction of a microsecond for the CPU generator; an
//! accelerator's generator is a tensor of 16 bytes on the host.
//!
//! *Limits*: the default generators are process-wide. Drawing from another thread between
//! capture and restore is seen, and undone, too.
//!
//! ```
//! use memfit::rng::Generators;
//! use tch::{Device, Kind, Tensor};
//!
//! let generators = Generators::capture(Device::Cpu)?;
//! let first = Tensor::randn([5], (Kind::Float, Device::Cpu));
//! assert!(generators.moved_since());
//! generators.restore()?;
//! assert_eq!(first, Tensor::randn([5], (Kind::Float, Device::Cpu)));
//! # Ok::<(), memfit::Error>(())
//! ```

use tch::{Device, Tensor};

use crate::error::{Error, Result};
use crate::ffi::rng::{self, CpuRng};

/// The state of the CPU's default generator and, where one is named, a device's.
#[derive(Debug)]
pub struct Generators {
    cpu: CpuRng,
    device: Option<(usize, Tensor)>,
}

impl Generators {
    /// Copies the state, the cached half of the last pair of normal samples included.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device's generator cannot be read.
    pub fn capture(device: Device) -> Result<Self> {
        let device = match device {
            Device::Cpu => None,
            Device::Cuda(index) => {
                crate::ffi::device::index(device, WHAT)?;
                Some((index, rng::device_state(index)?))
            }
            other => return Err(unsupported(other)),
        };
        Ok(Self { cpu: CpuRng::capture(), device })
    }

    /// Puts the state back. The capture can be restored again.
    ///
    /// # Errors
    /// libtorch's, for a device's generator.
    pub fn restore(&self) -> Result<()> {
        self.cpu.restore();
        match &self.device {
            Some((index, state)) => rng::set_device_state(*index, state),
            None => Ok(()),
        }
    }

    /// Whether a generator is in another state now: something was drawn, or it was seeded.
    /// A device that cannot be read counts as moved.
    pub fn moved_since(&self) -> bool {
        let device_moved = |(index, state): &(usize, Tensor)| {
            rng::device_state(*index).map_or(true, |now| now.f_equal(state).map_or(true, |same| !same))
        };
        self.cpu.moved() || self.device.as_ref().is_some_and(device_moved)
    }

    /// The states as tensors on the host: libtorch's own 5,056 bytes of the CPU generator,
    /// which `torch.set_rng_state` reads, and, where there is one, a device's.
    ///
    /// # Errors
    /// libtorch's, in making the tensors.
    pub fn to_tensors(&self) -> Result<(Tensor, Option<Tensor>)> {
        Ok((self.cpu.pack()?, self.device.as_ref().map(|(_, state)| state.shallow_clone())))
    }

    /// From such tensors; nothing is restored yet.
    ///
    /// # Errors
    /// Tensors that are no states; a state for a `device` that has none, or none for one that
    /// has.
    pub fn from_tensors(device: Device, cpu: &Tensor, of_device: Option<&Tensor>) -> Result<Self> {
        let device = match (device, of_device) {
            (Device::Cpu, None) => None,
            (Device::Cuda(index), Some(state)) => Some((index, state.shallow_clone())),
            (device, _) => return Err(unsupported(device)),
        };
        Ok(Self { cpu: CpuRng::unpack(cpu)?, device })
    }

    pub(crate) fn device(&self) -> Device {
        self.device.as_ref().map_or(Device::Cpu, |(index, _)| Device::Cuda(*index))
    }

    /// Bytes that the capture holds.
    pub fn bytes(&self) -> usize {
        CpuRng::bytes()
            + self.device.as_ref().map_or(0, |(_, state)| state.numel() * state.kind().elt_size_in_bytes())
    }
}

const WHAT: &str = "capturing the random generator";

fn unsupported(device: Device) -> Error {
    Error::Unsupported {
        what: WHAT.to_owned(),
        place: format!("on {device:?}"),
        remedy: "train on Device::Cpu or Device::Cuda, or turn dropout off in checkpointed segments"
            .to_owned(),
    }
}
