//! Carries bytes between a device, host memory and the disk.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tch::{Device, Kind, Tensor};

use super::disk::{Disk, Extent};
use crate::error::{Error, Result};
use crate::ffi::device::{Event, Stream};
use crate::ffi::storage;
use crate::memory::Role;

/// Where bytes are that left their device.
#[derive(Debug)]
pub(crate) enum Home {
    /// In host memory, pinned; behind the event where the copy may still run.
    Host(HostBytes),
    /// In a file.
    Disk(Extent),
}

/// A pinned copy, counted while it lives.
#[derive(Debug)]
pub(crate) struct HostBytes {
    bytes: Tensor,
    _count: Count,
}

/// Bytes counted while this lives.
#[derive(Debug)]
struct Count {
    bytes: u64,
    live: Arc<AtomicU64>,
}

impl Drop for Count {
    fn drop(&mut self) {
        self.live.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Bytes on their way back, perhaps behind an event.
#[derive(Debug)]
pub(crate) struct Arriving {
    bytes: Tensor,
    copied: Option<Event>,
}

impl Arriving {
    /// The bytes, for work that this thread queues from now on.
    pub(crate) fn land(self) -> Result<Tensor> {
        if let Some(copied) = self.copied {
            let current = Stream::current(self.bytes.device())?;
            current.wait(&copied)?;
            current.uses(&self.bytes)?;
        }
        Ok(self.bytes)
    }
}

/// The tiers, filled from the top: pinned host memory up to its limit, then the disk.
#[derive(Debug)]
pub(crate) struct Carrier {
    disk: Option<Arc<Disk>>,
    host_limit: u64,
    host_live: Arc<AtomicU64>,
    /// One stream of copies per accelerator.
    streams: Mutex<HashMap<usize, Arc<Stream>>>,
}

impl Carrier {
    pub(crate) fn new(disk: Option<Arc<Disk>>, host_limit: u64) -> Self {
        Self { disk, host_limit, host_live: Arc::default(), streams: Mutex::default() }
    }

    /// Whether bytes of this device have somewhere to go: those on the host only to disk.
    pub(crate) fn takes(&self, device: Device) -> bool {
        self.disk.is_some() || matches!(device, Device::Cuda(_))
    }

    pub(crate) fn disk(&self) -> Option<&Arc<Disk>> {
        self.disk.as_ref()
    }

    /// Bytes in pinned host memory.
    pub(crate) fn host_live(&self) -> u64 {
        self.host_live.load(Ordering::Relaxed)
    }

    /// Copies bytes out. `base` is a whole storage as uint8; it may be freed at once.
    ///
    /// # Errors
    /// [`Error::Io`] where the disk is full, out of memory where the host is.
    pub(crate) fn out(&self, base: &Tensor) -> Result<Home> {
        let bytes = storage::nbytes(base);
        let Device::Cuda(index) = base.device() else { return self.to_disk(base, bytes) };
        let _role = Role::HostCopies.scope();
        if self.disk.is_some() && self.host_live() + bytes as u64 > self.host_limit {
            let staged = base.f_to_device_(Device::Cpu, Kind::Uint8, false, true)?;
            return self.to_disk(&staged, bytes);
        }
        let stream = self.stream(index)?;
        let made = Stream::current(base.device())?.record()?;
        stream.wait(&made)?;
        let entered = stream.enter()?;
        // To the host without blocking: libtorch makes the copy pinned.
        let copy = base.f_to_device_(Device::Cpu, Kind::Uint8, true, true)?;
        stream.uses(base)?;
        drop(entered);
        let live = self.host_live.clone();
        live.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(Home::Host(HostBytes { bytes: copy, _count: Count { bytes: bytes as u64, live } }))
    }

    fn to_disk(&self, base: &Tensor, bytes: usize) -> Result<Home> {
        let disk = self.disk.as_ref().ok_or_else(|| Error::Torch("no disk to go to".to_owned()))?;
        let extent = disk.extent(bytes)?;
        extent.write(base)?;
        Ok(Home::Disk(extent))
    }

    /// Writes bytes again to the extent they have.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn write(&self, extent: &Extent, base: &Tensor) -> Result<()> {
        match base.device() {
            Device::Cpu => extent.write(base),
            _ => extent.write(&base.f_to_device(Device::Cpu)?),
        }
    }

    /// Brings bytes back to the device they came from, as a uint8 tensor that owns them.
    ///
    /// # Errors
    /// [`Error::Io`], out of memory.
    pub(crate) fn back(&self, home: &Home, bytes: usize, device: Device) -> Result<Arriving> {
        match (home, device) {
            (Home::Host(host), Device::Cuda(index)) => {
                let stream = self.stream(index)?;
                let entered = stream.enter()?;
                // Queued behind the copy out, which ran on the same stream.
                let copy = host.bytes.f_to_device_(device, Kind::Uint8, true, true)?;
                let copied = stream.record()?;
                drop(entered);
                Ok(Arriving { bytes: copy, copied: Some(copied) })
            }
            (Home::Host(host), _) => Ok(Arriving {
                bytes: host.bytes.f_to_device_(device, Kind::Uint8, false, true)?,
                copied: None,
            }),
            (Home::Disk(extent), _) => {
                let mut read = Tensor::f_empty([bytes as i64], (Kind::Uint8, Device::Cpu))?;
                extent.read(&mut read)?;
                let back = if device == Device::Cpu { read } else { read.f_to_device(device)? };
                Ok(Arriving { bytes: back, copied: None })
            }
        }
    }

    fn stream(&self, index: usize) -> Result<Arc<Stream>> {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stream) = streams.get(&index) {
            return Ok(stream.clone());
        }
        let stream = Arc::new(Stream::new(Device::Cuda(index))?);
        streams.insert(index, stream.clone());
        Ok(stream)
    }
}
