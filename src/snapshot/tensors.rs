//! One `.safetensors` file, opened without trusting it.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crc32fast::Hasher;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::IgnoredAny;
use tch::{Device, Kind, Tensor};

use super::hashing::{BLOCK, read_into};
use super::manifest::{self, TensorEntry};
use super::read::broken;
use super::unique::Unique;
use super::write::{Part, failed, slabs};
use crate::data::dtype;
use crate::error::Result;
use crate::ffi;
use crate::state::is_dense;
use crate::sys;

/// An open file of tensors.
#[derive(Debug)]
pub(super) struct Tensors {
    path: PathBuf,
    file: File,
    spots: Spots,
    metadata: HashMap<String, String>,
}

/// One tensor in its file.
#[derive(Clone, Debug)]
pub(super) struct Spot {
    pub(super) kind: Kind,
    pub(super) size: Vec<i64>,
    pub(super) strides: Option<Vec<i64>>,
    offset: u64,
    bytes: u64,
    crc32: Option<u32>,
}

/// Where each tensor lies, by its name in the file.
pub(super) type Spots = BTreeMap<String, Spot>;

impl Tensors {
    /// Opens a file of tensors that stands alone.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = sys::file::open_regular(path).map_err(|source| failed("opening", path, source))?;
        Self::of(path.to_owned(), file)?.map_err(|problem| broken(path, vec![problem]))
    }

    /// Reads the header, which must describe the whole file.
    pub(super) fn of(path: PathBuf, file: File) -> Result<Result<Self, String>> {
        let length = file.metadata().map_err(|source| failed("reading", &path, source))?.len();
        let header = match header(&file, length) {
            Ok(Ok(header)) => header,
            Ok(Err(problem)) => return Ok(Err(problem)),
            Err(source) => return Err(failed("reading", &path, source)),
        };
        Ok(Self::described(&header, length).map(|(spots, metadata)| Self { path, file, spots, metadata }))
    }

    fn described(header: &[u8], length: u64) -> Result<(Spots, HashMap<String, String>), String> {
        let unreadable = |error: serde_json::Error| format!("its header cannot be read: {error}");
        serde_json::from_slice::<Unique<IgnoredAny>>(header).map_err(unreadable)?;
        let metadata: Metadata = serde_json::from_slice(header).map_err(unreadable)?;
        let start = 8 + header.len() as u64;
        if start.checked_add(metadata.data_len() as u64) != Some(length) {
            return Err(format!("it has {length} bytes, its header speaks of another number"));
        }
        let mut spots = Spots::new();
        for (name, info) in metadata.tensors() {
            let spot = Spot::of(info, start).map_err(|problem| format!("`{name}` {problem}"))?;
            spots.insert(name, spot);
        }
        Ok((spots, metadata.metadata().clone().unwrap_or_default()))
    }

    pub(super) fn spots(&self) -> &Spots {
        &self.spots
    }

    pub(super) fn spot_mut(&mut self, key: &str) -> Option<&mut Spot> {
        self.spots.get_mut(key)
    }

    /// The free texts of the header.
    pub(super) fn metadata(&self) -> &HashMap<String, String> {
        &self.metadata
    }

    /// Another handle on the same file.
    pub(super) fn duplicate(&self) -> Result<Self> {
        let file = self.file.try_clone().map_err(|source| failed("reading", &self.path, source))?;
        let Self { path, spots, metadata, .. } = self;
        Ok(Self { path: path.clone(), file, spots: spots.clone(), metadata: metadata.clone() })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads a tensor into one of its shape, cast where its dtype is another; its version is
    /// bumped.
    pub(super) fn read(&self, key: &str, into: &Tensor) -> Result<()> {
        let Some(spot) = self.spots.get(key) else {
            return Err(broken(&self.path, vec![format!("`{key}` is missing")]));
        };
        let mut part = Part { offset: spot.offset, hasher: Hasher::new() };
        if into.device() == Device::Cpu && into.is_contiguous() && into.kind() == spot.kind {
            self.read_part(key, spot, &mut part, into)?;
        } else {
            slabs(into, |slab| {
                let host = Tensor::f_empty(slab.size(), (spot.kind, Device::Cpu))?;
                self.read_part(key, spot, &mut part, &host)?;
                ffi::multi::cast_into(slab, &host)
            })?;
            ffi::tensor::bump(into);
        }
        match spot.crc32 {
            Some(crc32) if crc32 != part.hasher.finalize() => {
                Err(broken(&self.path, vec![format!("`{key}` changed while it was read")]))
            }
            _ => Ok(()),
        }
    }

    /// Tensors of truth values whose bytes are not 0 or 1, among those that are asked for.
    pub(super) fn false_bools(&self, asked: impl Fn(&str) -> bool) -> Result<Vec<String>> {
        let mut problems = Vec::new();
        let mut block = vec![0; BLOCK];
        let bools = self.spots.iter().filter(|(key, spot)| spot.kind == Kind::Bool && asked(key));
        for (key, spot) in bools {
            let end = spot.offset + spot.bytes;
            let mut offset = spot.offset;
            while offset < end {
                let wanted = block.len().min((end - offset) as usize);
                let Some(part) = block.get_mut(..wanted) else { break };
                let read = self.file.read_exact_at(part, offset);
                read.map_err(|source| failed("reading", &self.path, source))?;
                if part.iter().any(|byte| *byte > 1) {
                    problems.push(format!("`{key}` is neither true nor false"));
                    break;
                }
                offset += wanted as u64;
            }
        }
        Ok(problems)
    }

    /// Fills a contiguous tensor with the next part of a saved one.
    fn read_part(&self, key: &str, spot: &Spot, part: &mut Part, into: &Tensor) -> Result<()> {
        ffi::bytes::write(into, |bytes| {
            if part.offset + bytes.len() as u64 > spot.offset + spot.bytes {
                return Err(broken(&self.path, vec![format!("`{key}` has another length")]));
            }
            let read = read_into(&self.file, part.offset, bytes);
            part.hasher.combine(&read.map_err(|source| failed("reading", &self.path, source))?);
            part.offset += bytes.len() as u64;
            if spot.kind == Kind::Bool && bytes.iter().any(|byte| *byte > 1) {
                return Err(broken(&self.path, vec![format!("`{key}` is neither true nor false")]));
            }
            Ok(())
        })?
    }
}

impl Spot {
    fn of(info: &TensorInfo, start: u64) -> Result<Self, String> {
        let kind = dtype::kind_of(info.dtype).ok_or(format!("has dtype {:?}", info.dtype))?;
        let size: Result<Vec<i64>, _> = info.shape.iter().map(|length| i64::try_from(*length)).collect();
        let size = size.map_err(|_| "is too long".to_owned())?;
        let (from, to) = info.data_offsets;
        let (offset, bytes) = (start + from as u64, (to - from) as u64);
        Ok(Self { kind, size, strides: None, offset, bytes, crc32: None })
    }

    /// Takes up what the manifest says beyond the header, where they agree.
    pub(super) fn take_up(&mut self, entry: &TensorEntry) -> Result<(), String> {
        let signed = |numbers: &[u64]| -> Result<Vec<i64>, String> {
            let numbers = numbers.iter().map(|number| i64::try_from(*number));
            numbers.collect::<Result<_, _>>().map_err(|_| "is too long".to_owned())
        };
        if dtype::named(&entry.dtype) != Some(self.kind) || signed(&entry.shape)? != self.size {
            let Self { kind, size, .. } = self;
            let TensorEntry { dtype, shape, .. } = entry;
            return Err(format!("is {kind:?} {size:?} in its file, {dtype} {shape:?} in the manifest"));
        }
        if let Some(strides) = &entry.strides {
            let strides = signed(strides)?;
            if !is_dense(&self.size, &strides) {
                return Err(format!("has impossible strides {strides:?}"));
            }
            self.strides = Some(strides);
        }
        self.crc32 = Some(entry.crc32);
        Ok(())
    }
}

/// The header's JSON; the inner error is the file's fault.
fn header(file: &File, length: u64) -> io::Result<Result<Vec<u8>, String>> {
    if length < 8 {
        return Ok(Err("it is too short for a header".to_owned()));
    }
    let mut size = [0; 8];
    file.read_exact_at(&mut size, 0)?;
    let size = u64::from_le_bytes(size);
    if size > length - 8 || size > manifest::LONGEST {
        return Ok(Err(format!("its header is said to have {size} bytes")));
    }
    let mut header = vec![0; size as usize];
    file.read_exact_at(&mut header, 8)?;
    Ok(Ok(header))
}
