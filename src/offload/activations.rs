use std::path::{Path, PathBuf};
use std::sync::Arc;

use tch::Device;

use super::carrier::Carrier;
use super::disk::Disk;
use super::ledger::{Ledger, Rules};
use super::moved::{Moved, Observer};
use crate::error::{Error, Result};
use crate::saved::{self, Link, Registration};
use crate::state::Named;

/// Storages smaller than this stay where they are, unless the user says otherwise: carrying
/// one costs a few system calls, about 10 µs.
const MIN_BYTES: usize = 64 << 10;

/// Moves the tensors that forward saves out of memory until backward needs them; made by
/// [`CpuOffload::activations`](super::CpuOffload::activations).
#[derive(Debug)]
pub struct ActivationOffload {
    folder: Option<PathBuf>,
    host_limit: Option<u64>,
    rules: Rules,
    observer: Observer,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    ledger: Arc<Ledger>,
    link: Link,
    _registered: Registration,
}

impl ActivationOffload {
    pub(super) fn new() -> Self {
        Self {
            folder: None,
            host_limit: None,
            rules: Rules { min_bytes: MIN_BYTES, keep_last: 0, prefetch: None },
            observer: Observer::default(),
            running: None,
        }
    }

    /// Uses a temporary file in this folder: below pinned host memory where the model is on
    /// CUDA, at once where it is on the CPU. The file has no name and goes with the process.
    pub fn disk(mut self, folder: impl AsRef<Path>) -> Self {
        self.folder = Some(folder.as_ref().to_owned());
        self
    }

    /// Bytes of pinned host memory to fill before the disk; without a folder nothing limits
    /// it. On the CPU there is no such tier.
    pub fn host_limit(mut self, bytes: u64) -> Self {
        self.host_limit = Some(bytes);
        self
    }

    /// Leaves storages under so many bytes where they are; 64 KiB unless set.
    pub fn min_bytes(mut self, bytes: usize) -> Self {
        self.rules.min_bytes = bytes;
        self
    }

    /// Whether storages leave whatever their size.
    pub(crate) fn moves_all(&self) -> bool {
        self.rules.min_bytes == 0
    }

    /// Keeps the last `storages` of a forward pass, which backward wants first; 0 unless set.
    pub fn keep_last(mut self, storages: usize) -> Self {
        self.rules.keep_last = storages;
        self
    }

    /// Brings up to so many storages back before backward asks, in reverse order, by a
    /// thread where they are on the disk. They are live that much longer: the peak grows by
    /// up to so many of the largest. Unless set: one from the host, none from the disk,
    /// where the kernel is told what comes next instead.
    pub fn prefetch(mut self, storages: usize) -> Self {
        self.rules.prefetch = Some(storages);
        self
    }

    /// What was carried so far.
    pub fn moved(&self) -> Moved {
        self.observer.moved()
    }

    /// A handle that watches it after it went into a stack.
    pub fn observer(&self) -> Observer {
        self.observer.clone()
    }

    /// Runs a forward pass of a plain tch loop; a stack does it by itself. `known` tensors,
    /// beside leaves that require a gradient, are never carried: name the buffers here.
    ///
    /// # Errors
    /// Those of `body`; an unusable folder, a full disk.
    pub fn around<T>(
        &mut self,
        device: Device,
        known: &[Named],
        body: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        self.start(device, known)?;
        self.while_saving(body)
    }

    /// A link for [`CheckpointChain::offload_through`](crate::checkpoint::CheckpointChain): it
    /// moves the inputs of the segments that a checkpointer wants moved, and nothing else.
    ///
    /// # Errors
    /// As [`ActivationOffload::around`].
    pub fn link(&mut self, device: Device) -> Result<Link> {
        self.start(device, &[])?;
        match &self.running {
            Some(running) => Ok(packing(&running.ledger)),
            None => Err(no_tier(&self.described(), device)),
        }
    }

    /// Opens the tiers for a model on `device`, once.
    pub(crate) fn start(&mut self, device: Device, known: &[Named]) -> Result<()> {
        if self.running.is_some() {
            return Ok(());
        }
        if self.folder.is_none() && !matches!(device, Device::Cuda(_)) {
            return Err(no_tier(&self.described(), device));
        }
        let disk = self.folder.as_deref().map(Disk::new).transpose()?;
        let carrier = Arc::new(Carrier::new(disk, self.host_limit.unwrap_or(u64::MAX)));
        self.observer.watch(&carrier);
        let ledger = Ledger::new(carrier, self.observer.clone(), self.rules);
        let link = packing(&ledger);
        self.running = Some(Running { ledger, link, _registered: saved::register(known)? });
        Ok(())
    }

    /// Runs `body` with saved tensors leaving; before [`ActivationOffload::start`] as it is.
    pub(crate) fn while_saving<T>(&mut self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        let Some(running) = &self.running else { return body() };
        let pushed = running.link.push();
        let done = body();
        drop(pushed);
        let done = done?;
        running.ledger.settle()?;
        Ok(done)
    }

    /// What the user wrote.
    pub(crate) fn described(&self) -> String {
        let mut text = "CpuOffload::activations()".to_owned();
        if let Some(folder) = &self.folder {
            text.push_str(&format!(".disk({:?})", folder.display().to_string()));
        }
        if let Some(bytes) = self.host_limit {
            text.push_str(&format!(".host_limit({bytes})"));
        }
        text
    }
}

fn packing(ledger: &Arc<Ledger>) -> Link {
    let ledger = ledger.clone();
    Link::new(move |tensor| ledger.pack(tensor))
}

/// The refusal of a host tier where the host is what is full.
pub(super) fn no_tier(what: &str, device: Device) -> Error {
    Error::Incompatible {
        left: what.to_owned(),
        right: format!("a model on {device:?}"),
        why: "the memory it would offload to is the memory it offloads from".to_owned(),
        remedy: "name a folder on a disk with `.disk(folder)`".to_owned(),
    }
}
