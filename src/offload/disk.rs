//! A temporary file as a pool of extents.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::Tensor;

use crate::error::{Error, Result};
use crate::ffi::storage;
use crate::sys::file;

/// Extents start and end on pages, so that cached pages belong to one of them.
const PAGE: u64 = 4096;

/// A file without a name in a folder of the user's; extents are taken and given back.
#[derive(Debug)]
pub(crate) struct Disk {
    file: File,
    folder: PathBuf,
    space: Mutex<Space>,
}

#[derive(Debug, Default)]
struct Space {
    end: u64,
    /// Length by start; no two touch.
    free: BTreeMap<u64, u64>,
    live: u64,
    peak: u64,
}

/// A part of the file; given back when dropped.
#[derive(Debug)]
pub(crate) struct Extent {
    disk: Arc<Disk>,
    start: u64,
    room: u64,
}

impl Disk {
    /// Creates the file.
    ///
    /// # Errors
    /// [`Error::Io`] with the folder.
    pub(crate) fn new(folder: &Path) -> Result<Arc<Self>> {
        let io = |source| Error::Io {
            action: "cannot create a temporary file for offloading in",
            path: folder.to_owned(),
            source,
        };
        let file = file::temporary(folder).map_err(io)?;
        if file::is_memory(&file) {
            tracing::warn!(
                folder = %folder.display(),
                "this folder lies in memory: what is offloaded there frees none; name one on a disk"
            );
        }
        Ok(Arc::new(Self { file, folder: folder.to_owned(), space: Mutex::default() }))
    }

    /// Takes an extent of at least `bytes`, reserved on the disk.
    ///
    /// # Errors
    /// [`Error::Io`] where the disk is full.
    pub(crate) fn extent(self: &Arc<Self>, bytes: usize) -> Result<Extent> {
        let room = (bytes as u64).div_ceil(PAGE).max(1) * PAGE;
        let mut space = self.space();
        let start = match space.reuse(room) {
            Some(start) => start,
            None => {
                let start = space.end;
                file::reserve(&self.file, start, room)
                    .map_err(|source| self.failed("cannot reserve room for offloading in", source))?;
                space.end += room;
                start
            }
        };
        space.live += room;
        space.peak = space.peak.max(space.live);
        drop(space);
        Ok(Extent { disk: self.clone(), start, room })
    }

    /// Bytes of the extents taken, and the most they have been.
    pub(crate) fn live_and_peak(&self) -> (u64, u64) {
        let space = self.space();
        (space.live, space.peak)
    }

    fn space(&self) -> MutexGuard<'_, Space> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, action: &'static str, source: std::io::Error) -> Error {
        Error::Io { action, path: self.folder.clone(), source }
    }
}

impl Space {
    /// The smallest free part that is large enough: reuse keeps the cached pages few.
    fn reuse(&mut self, room: u64) -> Option<u64> {
        let (&start, &length) =
            self.free.iter().filter(|(_, length)| **length >= room).min_by_key(|(_, length)| **length)?;
        self.free.remove(&start);
        if length > room {
            self.free.insert(start + room, length - room);
        }
        Some(start)
    }

    fn give_back(&mut self, mut start: u64, mut length: u64) {
        self.live -= length;
        if let Some((&before, &size)) = self.free.range(..start).next_back()
            && before + size == start
        {
            self.free.remove(&before);
            start = before;
            length += size;
        }
        if let Some(size) = self.free.remove(&(start + length)) {
            length += size;
        }
        self.free.insert(start, length);
    }
}

impl Extent {
    /// Writes all bytes of a CPU tensor's storage.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn write(&self, tensor: &Tensor) -> Result<()> {
        self.fits(tensor)?;
        storage::write_to(tensor, &self.disk.file, self.start)?
            .map_err(|source| self.disk.failed("cannot write offloaded bytes in", source))
    }

    /// Fills a CPU tensor that nobody else knows with what was written.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn read(&self, tensor: &mut Tensor) -> Result<()> {
        self.fits(tensor)?;
        storage::read_from(tensor, &self.disk.file, self.start)?
            .map_err(|source| self.disk.failed("cannot read offloaded bytes in", source))
    }

    /// Lets the kernel start reading.
    pub(crate) fn will_need(&self) {
        file::will_need(&self.disk.file, self.start, self.room);
    }

    fn fits(&self, tensor: &Tensor) -> Result<()> {
        if storage::nbytes(tensor) as u64 <= self.room {
            return Ok(());
        }
        Err(Error::Torch("a tensor larger than its extent".to_owned()))
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        self.disk.space().give_back(self.start, self.room);
    }
}
