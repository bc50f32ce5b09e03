use std::marker::PhantomData;

use tch::{Device, Tensor};

use super::Loaded;
use crate::error::Result;
use crate::ffi::device::{self, Event, Stream};

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

/// Copies batches to a device on a stream of its own.
pub(super) struct Mover<B> {
    stream: Stream,
    device: Device,
    batch: PhantomData<fn(B)>,
}

/// Copies a batch into pinned memory, on a worker.
pub(super) fn pinned<B: Transfer>(batch: &B, device: Device) -> Result<B> {
    batch.map_tensors(&mut |tensor| Ok(tensor.f_pin_memory(device)?))
}

/// A batch that may still be on its way.
pub(super) struct Sent<B> {
    loaded: Loaded<B>,
    copied: Event,
}

impl<B: Transfer> Mover<B> {
    /// Nothing to do for a CPU.
    pub(super) fn to(device: Device) -> Result<Option<Self>> {
        if device == Device::Cpu {
            return Ok(None);
        }
        device::index(device, "pinned transfer")?;
        Ok(Some(Self { stream: Stream::new(device)?, device, batch: PhantomData }))
    }

    /// Queues the copy behind those before it; the training's own stream is not waited for.
    pub(super) fn send(&self, loaded: &Loaded<B>) -> Result<Sent<B>> {
        let guard = self.stream.enter()?;
        let batch = loaded.batch.map_tensors(&mut |tensor: &Tensor| {
            Ok(tensor.f_to_device_(self.device, tensor.kind(), true, false)?)
        })?;
        let copied = self.stream.record()?;
        drop(guard);
        Ok(Sent { loaded: Loaded { batch, position: loaded.position }, copied })
    }

    /// The batch, for what this thread queues from now on.
    pub(super) fn land(&self, sent: Sent<B>) -> Result<Loaded<B>> {
        let current = Stream::current(self.device)?;
        current.wait(&sent.copied)?;
        let _same = sent.loaded.batch.map_tensors(&mut |tensor: &Tensor| {
            current.uses(tensor)?;
            Ok(tensor.shallow_clone())
        })?;
        Ok(sent.loaded)
    }
}
