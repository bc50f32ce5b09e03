//! Writes the files of a layout, one tensor at a time.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crc32fast::Hasher;
use tch::{Device, Tensor};

use super::layout::Layout;
use super::manifest::{self, FileEntry, Manifest};
use crate::error::{Error, Result};
use crate::ffi;
use crate::state::{Sink, Value};
use crate::sys;

/// Bytes that are hashed and written at once: they stay in the processor's cache between.
const BLOCK: usize = 1 << 18;
/// Bytes of a tensor that are copied at once, where they lie in another order or elsewhere.
const SLAB: usize = 1 << 20;
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

    /// Writes the next part of a tensor.
    fn write(&mut self, file: usize, part: &mut Part, bytes: &[u8]) -> Result<()> {
        let Some(out) = self.outs.get_mut(file) else { return Ok(()) };
        for block in bytes.chunks(BLOCK) {
            part.hasher.update(block);
            write_block(&out.file, block, part.offset)
                .map_err(|source| failed("writing", &out.path, source))?;
            part.offset += block.len() as u64;
            if part.offset >= out.started + AHEAD {
                sys::file::start_writing(&out.file, out.started, part.offset - out.started);
                out.started = part.offset;
            }
        }
        Ok(())
    }
}

/// How far the writing, or the reading, of a tensor is.
pub(super) struct Part {
    pub(super) offset: u64,
    pub(super) hasher: Hasher,
}

impl Sink for Writer {
    fn scalar(&mut self, _: &str, _: Value) -> Result<()> {
        Ok(())
    }

    fn tensor(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        let Some(spot) = self.layout.spots.get(name).cloned() else { return Err(changed(name)) };
        let mut part = Part { offset: spot.offset, hasher: Hasher::new() };
        slabs(tensor, |slab| {
            let host = slab.f_to_device(Device::Cpu)?.f_contiguous()?;
            ffi::bytes::read(&host, |bytes| self.write(spot.file, &mut part, bytes))?
        })?;
        if part.offset != spot.offset + spot.bytes {
            return Err(changed(name));
        }
        self.hashes.insert(name.to_owned(), part.hasher);
        Ok(())
    }
}

/// Writes the manifest, the last file.
pub(super) fn write_manifest(folder: &Path, manifest: &Manifest) -> Result<u64> {
    let path = folder.join(manifest::FILE);
    let text = manifest.text().map_err(|error| Error::Torch(format!("{}: {error}", path.display())))?;
    manifest::check_length("a manifest", text.len() as u64)?;
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

/// Gives `body` the whole of a tensor that lies in CPU memory as in a file, or else some rows
/// at a time: what they are copied to stays small.
pub(super) fn slabs(tensor: &Tensor, mut body: impl FnMut(&Tensor) -> Result<()>) -> Result<()> {
    let tensor = tensor.f_detach()?;
    let lies_ready = tensor.device() == Device::Cpu && tensor.is_contiguous();
    let rows = match tensor.size().first() {
        Some(rows) if !lies_ready && tensor.numel() > 0 => *rows,
        _ => return body(&tensor),
    };
    let row = tensor.numel() / rows as usize * tensor.kind().elt_size_in_bytes();
    let step = (SLAB / row.max(1)).max(1) as i64;
    let mut from = 0;
    while from < rows {
        let some = step.min(rows - from);
        body(&tensor.f_narrow(0, from, some)?)?;
        from += some;
    }
    Ok(())
}

fn changed(name: &str) -> Error {
    Error::CallOrder {
        call: "saving a snapshot",
        state: format!("while `{name}` changes its shape or comes and goes"),
        remedy: "let visit_state name the same entries each time it is called",
    }
}
