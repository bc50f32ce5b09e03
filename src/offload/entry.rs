//! One storage that forward saved: kept, gone, or back for a while.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tch::{Device, Tensor};

use super::carrier::{Arriving, Carrier, Home};
use super::ledger::{Ahead, Ledger};
use super::moved::Observer;
use crate::error::{Error, Result};
use crate::ffi::storage::{StorageId, Version, View};
use crate::memory::Role;

/// The bytes of one storage at one version, whoever saved it.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Keeps the storage's address from meaning another one.
    id: StorageId,
    version: Option<Version>,
    expected: u64,
    bytes: usize,
    device: Device,
    /// Order of packing.
    pub(crate) number: u64,
    content: Mutex<Content>,
    ledger: Weak<Ledger>,
}

#[derive(Debug)]
struct Content {
    place: Place,
    /// Brought back for those who still have to ask.
    back: Option<Back>,
    /// Saved tensors of this storage.
    users: usize,
    /// Users that have not asked in this round: one backward, usually.
    unasked: usize,
    round: u64,
}

#[derive(Debug)]
enum Place {
    Kept(Tensor),
    Away(Home),
    /// Changed in place before it left; found at this version.
    Modified(u64),
}

#[derive(Debug)]
enum Back {
    Arriving(Arriving, #[expect(dead_code, reason = "its drop counts")] Ahead),
    There(Tensor),
}

/// One saved tensor's claim on an entry.
#[derive(Debug)]
pub(crate) struct Slot {
    entry: Arc<Entry>,
    view: View,
    asked_in: Option<u64>,
}

impl Entry {
    pub(crate) fn new(
        id: StorageId,
        base: Tensor,
        saved: &Tensor,
        number: u64,
        ledger: Weak<Ledger>,
    ) -> Self {
        let version = Version::of(saved);
        Self {
            id,
            expected: version.as_ref().map(Version::now).unwrap_or_default(),
            version,
            bytes: crate::ffi::storage::nbytes(&base),
            device: base.device(),
            number,
            content: Mutex::new(Content {
                place: Place::Kept(base),
                back: None,
                users: 0,
                unasked: 0,
                round: 0,
            }),
            ledger,
        }
    }

    /// What tells it from other storages, and from this one after a change.
    pub(crate) fn key(&self) -> (usize, u64) {
        (self.id.key(), self.expected)
    }

    /// Copies the bytes out and lets the storage go; nothing if that was done.
    pub(crate) fn leave(&self, carrier: &Carrier, observer: &Observer) -> Result<()> {
        let mut content = self.content();
        let Place::Kept(base) = &content.place else { return Ok(()) };
        content.place = match self.changed() {
            Some(found) => Place::Modified(found),
            None => {
                let home = carrier.out(base)?;
                observer.count_out(self.bytes as u64);
                Place::Away(home)
            }
        };
        Ok(())
    }

    /// Starts to bring the bytes back before anybody asks in this round; who came late finds the
    /// next one.
    pub(crate) fn fetch_ahead(
        &self,
        round: u64,
        carrier: &Carrier,
        observer: &Observer,
        ahead: Ahead,
    ) -> Result<()> {
        let mut content = self.content();
        let asked = content.round != round || content.unasked != content.users;
        if content.back.is_some() || content.users == 0 || asked {
            return Ok(());
        }
        let Place::Away(home) = &content.place else { return Ok(()) };
        let _role = Role::Activations.scope();
        let arriving = carrier.back(home, self.bytes, self.device)?;
        observer.count_in(self.bytes as u64);
        content.back = Some(Back::Arriving(arriving, ahead));
        Ok(())
    }

    /// Lets the kernel start to read, where the bytes are on the disk.
    pub(crate) fn announce(&self) {
        if let Place::Away(Home::Disk(extent)) = &self.content().place {
            extent.will_need();
        }
    }

    /// Whether the bytes are in host memory, so that they come back without this thread.
    pub(crate) fn on_host(&self) -> bool {
        matches!(self.content().place, Place::Away(Home::Host(_)))
    }

    fn changed(&self) -> Option<u64> {
        let found = self.version.as_ref().map(Version::now)?;
        (found != self.expected).then_some(found)
    }

    fn modified(&self, found: u64) -> Error {
        Error::Modified {
            what: format!("a saved tensor ({} bytes on {:?})", self.bytes, self.device),
            expected: self.expected,
            found,
        }
    }

    /// The bytes on their device again.
    fn present(&self, content: &mut Content, carrier: &Carrier, observer: &Observer) -> Result<Tensor> {
        match &content.place {
            Place::Kept(base) => match self.changed() {
                Some(found) => return Err(self.modified(found)),
                None => return Ok(base.shallow_clone()),
            },
            Place::Modified(found) => return Err(self.modified(*found)),
            Place::Away(_) => {}
        }
        let there = match (content.back.take(), &content.place) {
            (Some(Back::There(there)), _) => there,
            (Some(Back::Arriving(arriving, _)), _) => arriving.land()?,
            (None, Place::Away(home)) => {
                let _role = Role::Activations.scope();
                let there = carrier.back(home, self.bytes, self.device)?.land()?;
                observer.count_in(self.bytes as u64);
                there
            }
            (None, _) => return Err(Error::Torch("bytes without a home".to_owned())),
        };
        content.back = Some(Back::There(there.shallow_clone()));
        Ok(there)
    }

    fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Content {
    fn asked(&mut self) {
        self.unasked = self.unasked.saturating_sub(1);
        if self.unasked == 0 {
            self.back = None;
            self.unasked = self.users;
            self.round += 1;
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(ledger) = self.ledger.upgrade() {
            ledger.forget(self.key(), self.number);
        }
    }
}

impl Slot {
    pub(crate) fn new(entry: Arc<Entry>, saved: &Tensor) -> Self {
        let mut content = entry.content();
        content.users += 1;
        content.unasked += 1;
        drop(content);
        Self { entry, view: View::of(saved), asked_in: None }
    }

    /// The saved tensor.
    pub(crate) fn unpack(&mut self, carrier: &Carrier, observer: &Observer) -> Result<Tensor> {
        let (base, round);
        {
            let mut content = self.entry.content();
            round = content.round;
            base = self.entry.present(&mut content, carrier, observer)?;
            if self.asked_in != Some(content.round) {
                self.asked_in = Some(content.round);
                content.asked();
            }
        }
        if let Some(ledger) = self.entry.ledger.upgrade() {
            ledger.look_ahead(self.entry.number, round);
        }
        self.view.over(&base)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut content = self.entry.content();
        content.users = content.users.saturating_sub(1);
        if self.asked_in != Some(content.round) {
            content.asked();
        }
    }
}
