//! Tensors whose bytes have a home elsewhere and visit memory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Device, Tensor};

use super::carrier::{Carrier, Home};
use super::moved::Observer;
use crate::error::Result;
use crate::ffi::{storage, tensor};
use crate::state::Residence;

/// One storage and its home. Identity, views and version stay while the bytes are away.
#[derive(Debug)]
pub(crate) struct Berth {
    tensor: Tensor,
    bytes: usize,
    device: Device,
    home: Option<Home>,
    /// The version that the home has.
    written: Option<u64>,
}

/// Whether bytes that leave are written first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Write {
    /// For writers that may not count versions.
    Always,
    /// Where the version is another than the home's.
    IfChanged,
}

const AWAY: &str = "memfit: these bytes are offloaded and away; they come back for forward, backward and the \
                    update by themselves, for anything else ask the offload that has them";

impl Berth {
    /// Makes room at home and writes there; the bytes stay for now.
    pub(crate) fn new(tensor: &Tensor, carrier: &Carrier, observer: &Observer) -> Result<Self> {
        let mut berth = Self {
            tensor: tensor.shallow_clone(),
            bytes: storage::nbytes(tensor),
            device: tensor.device(),
            home: None,
            written: None,
        };
        berth.write(carrier, observer)?;
        Ok(berth)
    }

    pub(crate) fn is_away(&self) -> bool {
        storage::is_away(&self.tensor)
    }

    /// Lets the bytes go; nothing where they are away. On an error they stay.
    pub(crate) fn leave(&mut self, write: Write, carrier: &Carrier, observer: &Observer) -> Result<()> {
        if self.bytes == 0 || self.is_away() {
            return Ok(());
        }
        if write == Write::Always || self.written != Some(tensor::version(&self.tensor)) {
            self.write(carrier, observer)?;
        }
        storage::take(&self.tensor, AWAY).map(drop)
    }

    /// Brings the bytes back; nothing where they are here.
    pub(crate) fn arrive(&self, carrier: &Carrier, observer: &Observer) -> Result<()> {
        let Some(home) = self.home.as_ref().filter(|_| self.is_away()) else { return Ok(()) };
        let bytes = carrier.back(home, self.bytes, self.device)?.land()?;
        storage::give(&self.tensor, bytes)?;
        observer.count_in(self.bytes as u64);
        Ok(())
    }

    /// Lets the kernel start to read.
    pub(crate) fn announce(&self) {
        if let Some(Home::Disk(extent)) = &self.home
            && self.is_away()
        {
            extent.will_need();
        }
    }

    fn write(&mut self, carrier: &Carrier, observer: &Observer) -> Result<()> {
        let base = storage::base(&self.tensor)?;
        let version = tensor::version(&self.tensor);
        match &self.home {
            Some(Home::Disk(extent)) => carrier.write(extent, &base)?,
            _ => self.home = Some(carrier.out(&base)?),
        }
        self.written = Some(version);
        observer.count_out(self.bytes as u64);
        Ok(())
    }
}

/// The state of one optimizer, by storage.
#[derive(Debug)]
pub(crate) struct Berths {
    carrier: Arc<Carrier>,
    observer: Observer,
    by_storage: Mutex<HashMap<usize, Berth>>,
}

impl Berths {
    pub(crate) fn new(carrier: Arc<Carrier>, observer: Observer) -> Arc<Self> {
        Arc::new(Self { carrier, observer, by_storage: Mutex::default() })
    }

    /// Gives a tensor a home, where it has none, and lets its bytes go there.
    pub(crate) fn adopt(&self, tensor: &Tensor) -> Result<()> {
        let mut berths = self.berths();
        let key = tensor::storage_identity(tensor);
        let berth = match berths.entry(key) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(free) => {
                free.insert(Berth::new(tensor, &self.carrier, &self.observer)?)
            }
        };
        berth.leave(Write::IfChanged, &self.carrier, &self.observer)
    }

    /// Writes a tensor home and lets its bytes go.
    pub(crate) fn go_home(&self, tensor: &Tensor) -> Result<()> {
        match self.berths().get_mut(&tensor::storage_identity(tensor)) {
            Some(berth) => berth.leave(Write::Always, &self.carrier, &self.observer),
            None => Ok(()),
        }
    }

    pub(crate) fn announce(&self, tensor: &Tensor) {
        if let Some(berth) = self.berths().get(&tensor::storage_identity(tensor)) {
            berth.announce();
        }
    }

    fn berths(&self) -> MutexGuard<'_, HashMap<usize, Berth>> {
        self.by_storage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Residence for Berths {
    fn arrive(&self, tensor: &Tensor) -> Result<()> {
        match self.berths().get(&tensor::storage_identity(tensor)) {
            Some(berth) => berth.arrive(&self.carrier, &self.observer),
            None => Ok(()),
        }
    }

    fn leave(&self, tensor: &Tensor) -> Result<()> {
        match self.berths().get_mut(&tensor::storage_identity(tensor)) {
            Some(berth) => berth.leave(Write::IfChanged, &self.carrier, &self.observer),
            None => Ok(()),
        }
    }
}
