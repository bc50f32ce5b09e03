use tch::{Device, Tensor};

use super::Loaded;
use super::stage::{Mover, Sent};
use crate::error::Result;
use crate::ffi::device;

/// A batch that can go to a device: its tensors, one by one.
pub trait Transfer: Sized {
    /// The same batch of other tensors.
    ///
    /// # Errors
    /// Those of `function`.
    fn map_tensors(&self, function: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self>;
}

impl Transfer for Tensor {
    fn map_tensors(&self, function: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        function(self)
    }
}

impl Transfer for Vec<Tensor> {
    fn map_tensors(&self, function: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        self.iter().map(function).collect()
    }
}

macro_rules! tuple_transfers {
    ($($part:ident $index:tt)*) => {
        impl<$($part: Transfer),*> Transfer for ($($part,)*) {
            fn map_tensors(&self, function: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
                Ok(($(self.$index.map_tensors(function)?,)*))
            }
        }
    };
}

tuple_transfers!(A 0);
tuple_transfers!(A 0 B 1);
tuple_transfers!(A 0 B 1 C 2);
tuple_transfers!(A 0 B 1 C 2 D 3);

/// Copies a batch into pinned memory, on a worker.
pub(super) fn pinned<B: Transfer>(batch: &B, device: Device) -> Result<B> {
    batch.map_tensors(&mut |tensor| Ok(tensor.f_pin_memory(device)?))
}

/// What brings batches to a device; nothing for a CPU.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) for a device that is not there.
pub(super) fn mover_to<B: Transfer + Send + 'static>(device: Device) -> Result<Option<Box<dyn Mover<B>>>> {
    if device == Device::Cpu {
        return Ok(None);
    }
    device::index(device, "pinned transfer")?;
    Ok(Some(Box::new(Copier { stream: device::Stream::new(device)?, device })))
}

/// Copies batches to a device on a stream of its own.
struct Copier {
    stream: device::Stream,
    device: Device,
}

impl<B: Transfer + Send + 'static> Mover<B> for Copier {
    /// Queues the copy behind those before it; the training's own stream is not waited for.
    fn send(&self, loaded: &Loaded<B>) -> Result<Sent<B>> {
        let guard = self.stream.enter()?;
        let batch = loaded.batch.map_tensors(&mut |tensor: &Tensor| {
            Ok(tensor.f_to_device_(self.device, tensor.kind(), true, false)?)
        })?;
        let copied = self.stream.record()?;
        drop(guard);
        let device = self.device;
        let land = move |batch: &B| {
            let current = device::Stream::current(device)?;
            current.wait(&copied)?;
            let _same = batch.map_tensors(&mut |tensor: &Tensor| {
                current.uses(tensor)?;
                Ok(tensor.shallow_clone())
            })?;
            Ok(())
        };
        Ok(Sent::new(Loaded { batch, position: loaded.position }, land))
    }
}
