//! Writes the files of a layout, one tensor at a time.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crc32fast::Hasher;
use tch::{Device, Tensor};

use super::layout::{Layout, Spot};
use super::manifest::{self, FileEntry, Manifest};
use crate::error::{Error, Result};
use crate::ffi;
use crate::state::{Sink, Value};
use crate::sys;

/// Bytes that are hashed and written at once: they stay in the processor's cache between.
const BLOCK: usize = 1 << 18;
/// The kernel is told to begin with the disk after so many bytes.
const AHEAD: u64 = 8 << 20;

/// Takes the tensors of a layout.
pub(super) struct Writer {
    layout: Layout,
    outs: Vec<Out>,
    hashes: BTreeMap<String, Hasher>,
}

/// A file that is being written.
struct Out {
    path: PathBuf,
    file: File,
    /// Up to where the kernel was told to begin.
    started: u64,
}

impl Writer {
    /// Makes the files at full length, so that a full disk is found before much is written.
    pub(super) fn new(folder: &Path, layout: Layout) -> Result<Self> {
        let mut outs = Vec::new();
        for planned in &layout.files {
            let path = folder.join(planned.name);
            let file = create(&path)?;
            let made = sys::file::reserve(&file, 0, planned.bytes)
                .and_then(|()| write_block(&file, &planned.header, 0));
            made.map_err(|source| failed("writing", &path, source))?;
            outs.push(Out { path, file, started: 0 });
        }
        Ok(Self { layout, outs, hashes: BTreeMap::new() })
    }

    /// Syncs the files and enters them, and the tensors, into the manifest.
    pub(super) fn finish(mut self, manifest: &mut Manifest) -> Result<()> {
        for (out, planned) in self.outs.iter().zip(&self.layout.files) {
            let mut whole = Hasher::new();
            whole.update(&planned.header);
            for name in &planned.order {
                let Some(hash) = self.hashes.get(name) else { return Err(changed(name)) };
                whole.combine(hash);
                if let Some(entry) = self.layout.entries.get_mut(name) {
                    entry.crc32 = hash.clone().finalize();
                }
            }
            out.file.sync_all().map_err(|source| failed("syncing", &out.path, source))?;
            let entry = FileEntry { bytes: planned.bytes, crc32: whole.finalize() };
            manifest.files.0.insert(planned.name.to_owned(), entry);
        }
        manifest.tensors.0 = self.layout.entries;
        Ok(())
    }

    fn write(&mut self, spot: &Spot, bytes: &[u8]) -> Result<Hasher> {
        let Some(out) = self.outs.get_mut(spot.file) else { return Ok(Hasher::new()) };
        let mut hasher = Hasher::new();
        let mut offset = spot.offset;
        for block in bytes.chunks(BLOCK) {
            hasher.update(block);
            write_block(&out.file, block, offset).map_err(|source| failed("writing", &out.path, source))?;
            offset += block.len() as u64;
            if offset >= out.started + AHEAD {
                sys::file::start_writing(&out.file, out.started, offset - out.started);
                out.started = offset;
            }
        }
        Ok(hasher)
    }
}

impl Sink for Writer {
    fn scalar(&mut self, _: &str, _: Value) -> Result<()> {
        Ok(())
    }

    fn tensor(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        let Some(spot) = self.layout.spots.get(name).cloned() else { return Err(changed(name)) };
        let host = on_host(tensor)?;
        let hash = ffi::bytes::read(&host, |bytes| {
            if bytes.len() as u64 == spot.bytes { self.write(&spot, bytes) } else { Err(changed(name)) }
        })??;
        self.hashes.insert(name.to_owned(), hash);
        Ok(())
    }
}

/// Writes the manifest, the last file.
pub(super) fn write_manifest(folder: &Path, manifest: &Manifest) -> Result<u64> {
    let path = folder.join(manifest::FILE);
    let text = manifest.text().map_err(|error| Error::Torch(format!("{}: {error}", path.display())))?;
    let file = create(&path)?;
    let written = write_block(&file, text.as_bytes(), 0).and_then(|()| file.sync_all());
    written.map_err(|source| failed("writing", &path, source))?;
    Ok(text.len() as u64)
}

/// Length and checksum of a file that something else wrote, once it is on the disk.
pub(super) fn enter(path: &Path) -> Result<FileEntry> {
    let read = || -> io::Result<FileEntry> {
        let file = sys::file::open_regular(path)?;
        file.sync_all()?;
        let (mut hasher, mut bytes, mut block) = (Hasher::new(), 0, vec![0; BLOCK]);
        loop {
            match file.read_at(&mut block, bytes)? {
                0 => return Ok(FileEntry { bytes, crc32: hasher.finalize() }),
                read => {
                    hasher.update(block.get(..read).unwrap_or_default());
                    bytes += read as u64;
                }
            }
        }
    };
    read().map_err(|source| failed("reading", path, source))
}

pub(super) fn failed(action: &'static str, path: &Path, source: io::Error) -> Error {
    Error::Io { action, path: path.to_owned(), source }
}

fn create(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    let created = options.read(true).write(true).create_new(true).mode(0o644).open(path);
    created.map_err(|source| failed("creating", path, source))
}

fn write_block(file: &File, block: &[u8], offset: u64) -> io::Result<()> {
    #[cfg(test)]
    super::tests::count_block()?;
    file.write_all_at(block, offset)
}

/// A contiguous tensor on the host with the same values, itself where it is one.
pub(super) fn on_host(tensor: &Tensor) -> Result<Tensor> {
    let tensor = tensor.f_detach()?;
    let host = if tensor.device() == Device::Cpu { tensor } else { tensor.f_to_device(Device::Cpu)? };
    Ok(host.f_contiguous()?)
}

fn changed(name: &str) -> Error {
    Error::CallOrder {
        call: "saving a snapshot",
        state: format!("while `{name}` changes its shape or comes and goes"),
        remedy: "let visit_state name the same entries each time it is called",
    }
}
