//! Opens a snapshot's files without trusting them, and reads tensors by positioned reads: a
//! file that is cut while it is read is an error, where a mapping would end the process.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crc32fast::Hasher;
use serde::de::IgnoredAny;
use tch::{Device, Kind, Tensor};

use super::dtype;
use super::manifest::{self, Manifest, TensorEntry};
use super::unique::Unique;
use super::write::failed;
use crate::error::{Error, Result};
use crate::ffi;
use crate::state::{Found, Source, Value, is_dense};
use crate::sys;

/// Bytes that are read and hashed at once.
const BLOCK: usize = 1 << 18;

/// An open file of tensors.
#[derive(Debug)]
pub(super) struct Tensors {
    path: PathBuf,
    file: File,
    spots: BTreeMap<String, Spot>,
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

/// An open snapshot.
#[derive(Debug)]
pub(super) struct Files {
    folder: PathBuf,
    pub(super) manifest: Manifest,
    open: BTreeMap<String, File>,
    tensors: BTreeMap<String, Tensors>,
    scalars: BTreeMap<String, Value>,
    /// A state's name of each tensor, with its file and its name there.
    pub(super) places: BTreeMap<String, (String, String)>,
}

impl Files {
    /// Reads the manifest and the files' headers, and holds them against each other.
    pub(super) fn open(folder: &Path) -> Result<Self> {
        let manifest = read_manifest(folder)?;
        let mut files = Self {
            folder: folder.to_owned(),
            manifest,
            open: BTreeMap::new(),
            tensors: BTreeMap::new(),
            scalars: BTreeMap::new(),
            places: BTreeMap::new(),
        };
        let problems = files.fill()?;
        if problems.is_empty() { Ok(files) } else { Err(broken(folder, problems)) }
    }

    fn fill(&mut self) -> Result<Vec<String>> {
        let mut problems = Vec::new();
        for (name, entry) in &self.manifest.files.0 {
            match open_as_said(&self.folder, name, entry.bytes)? {
                Ok(file) => drop(self.open.insert(name.clone(), file)),
                Err(problem) => problems.push(problem),
            }
        }
        for (name, file) in self.open.iter().filter(|(name, _)| name.ends_with(".safetensors")) {
            let path = self.folder.join(name);
            let file = file.try_clone().map_err(|source| failed("reading", &path, source))?;
            match Tensors::of(path, file)? {
                Ok(tensors) => drop(self.tensors.insert(name.clone(), tensors)),
                Err(problem) => problems.push(format!("{name}: {problem}")),
            }
        }
        if !problems.is_empty() {
            return Ok(problems);
        }
        for (name, scalar) in &self.manifest.scalars.0 {
            match scalar.value() {
                Some(value) => drop(self.scalars.insert(name.clone(), value)),
                None => problems.push(format!("`{name}` is no number")),
            }
        }
        self.match_tensors(&mut problems);
        self.match_names(&mut problems);
        Ok(problems)
    }

    /// Every tensor of the manifest is in its file, and every one of a file in the manifest.
    fn match_tensors(&mut self, problems: &mut Vec<String>) {
        let mut known = 0;
        for (name, entry) in &self.manifest.tensors.0 {
            let spot = self.tensors.get_mut(&entry.file).and_then(|file| file.spots.get_mut(&entry.key));
            match spot.map(|spot| spot.take_up(entry)) {
                None => problems.push(format!("`{name}` is not in {:?}", entry.file)),
                Some(Err(problem)) => problems.push(format!("`{name}` {problem}")),
                Some(Ok(())) => {
                    known += 1;
                    self.places.insert(name.clone(), (entry.file.clone(), entry.key.clone()));
                }
            }
            if self.scalars.contains_key(name) {
                problems.push(format!("`{name}` is both a tensor and a scalar"));
            }
        }
        let found: usize = self.tensors.values().map(|file| file.spots.len()).sum();
        if problems.is_empty() && found != known {
            problems.push(format!("the files hold {found} tensors, the manifest has {known}"));
        }
    }

    fn match_names(&self, problems: &mut Vec<String>) {
        for (name, file) in &self.manifest.scripts.0 {
            if !self.open.contains_key(file) {
                problems.push(format!("script `{name}` is not among the files"));
            }
        }
        for (alias, name) in &self.manifest.aliases.0 {
            let there = |list: &str| self.places.contains_key(&format!("{list}.{name}"));
            if !there("parameters") && !there("buffers") {
                problems.push(format!("`{alias}` is said to be `{name}`, which is not there"));
            }
        }
        if self.manifest.loss.is_some() && self.manifest.loss().is_none() {
            problems.push("the loss is no number".to_owned());
        }
    }

    /// Reads every file through and compares the checksums.
    pub(super) fn verify(&self) -> Result<()> {
        self.verify_some(|_| true)
    }

    fn verify_some(&self, which: impl Fn(&str) -> bool) -> Result<()> {
        let mut problems = Vec::new();
        let mut block = vec![0; BLOCK];
        for (name, entry) in self.manifest.files.0.iter().filter(|(name, _)| which(name)) {
            let Some(file) = self.open.get(name) else { continue };
            match checksum(file, entry.bytes, &mut block) {
                Ok(found) if found == entry.crc32 => {}
                Ok(_) => problems.push(format!("{name}: its checksum is not the manifest's")),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    problems.push(format!("{name} was cut off"));
                }
                Err(source) => return Err(failed("reading", &self.folder.join(name), source)),
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(broken(&self.folder, problems)) }
    }

    /// The file of the model's tensors, verified.
    pub(super) fn file(&self, name: &str) -> Result<Tensors> {
        self.verify_some(|file| file == name)?;
        match self.tensors.get(name) {
            Some(tensors) => tensors.duplicate(),
            None => Err(broken(&self.folder, vec![format!("{name} is missing")])),
        }
    }

    /// A script's archive, verified.
    pub(super) fn script(&self, name: &str) -> Result<File> {
        let named = self.manifest.scripts.0.get(name);
        let Some(file) = named.and_then(|file| Some((file, self.open.get(file)?))) else {
            return Err(broken(&self.folder, vec![format!("script `{name}` is missing")]));
        };
        self.verify_some(|name| name == file.0)?;
        file.1.try_clone().map_err(|source| failed("reading", &self.folder.join(file.0), source))
    }

    /// A copy of a tensor, on the host.
    pub(super) fn copy(&self, name: &str) -> Result<Option<Value>> {
        if let Some(scalar) = self.scalars.get(name) {
            return Ok(Some(match scalar {
                Value::Float(number) => Value::Float(*number),
                Value::Int(number) => Value::Int(*number),
                Value::Text(text) => Value::Text(text.clone()),
                Value::Tensor(tensor) => Value::Tensor(tensor.shallow_clone()),
            }));
        }
        let Some(Found::Tensor { size, kind, strides }) = self.find(name) else { return Ok(None) };
        let options = (kind, Device::Cpu);
        let tensor = match strides {
            Some(strides) => Tensor::f_empty_strided(&size, &strides, options)?,
            None => Tensor::f_empty(&size, options)?,
        };
        self.read(name, &tensor)?;
        Ok(Some(Value::Tensor(tensor)))
    }

    /// The names of everything that begins with `prefix`.
    pub(super) fn under<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a str> {
        let all = self.places.keys().chain(self.scalars.keys());
        all.map(String::as_str).filter(move |name| name.starts_with(prefix))
    }
}

impl Source for Files {
    fn names(&self) -> Vec<&str> {
        let all = self.places.keys().chain(self.scalars.keys());
        all.map(String::as_str).filter(|name| !name.starts_with(super::extras::ENTRIES)).collect()
    }

    fn find(&self, name: &str) -> Option<Found<'_>> {
        if let Some(scalar) = self.scalars.get(name) {
            return Some(Found::Scalar(scalar));
        }
        let (file, key) = self.places.get(name)?;
        let Spot { kind, size, strides, .. } = self.tensors.get(file)?.spots.get(key)?;
        Some(Found::Tensor { size: size.clone(), kind: *kind, strides: strides.clone() })
    }

    fn read(&self, name: &str, into: &Tensor) -> Result<()> {
        let place = self.places.get(name);
        match place.and_then(|(file, key)| Some((self.tensors.get(file)?, key))) {
            Some((file, key)) => file.read(key, into),
            None => Err(broken(&self.folder, vec![format!("`{name}` is missing")])),
        }
    }
}

impl Tensors {
    /// Opens a file of tensors that stands alone.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = sys::file::open_regular(path).map_err(|source| failed("opening", path, source))?;
        Self::of(path.to_owned(), file)?.map_err(|problem| broken(path, vec![problem]))
    }

    /// Reads the header, which must describe the whole file.
    fn of(path: PathBuf, file: File) -> Result<Result<Self, String>> {
        let length = file.metadata().map_err(|source| failed("reading", &path, source))?.len();
        let header = match header(&file, length) {
            Ok(Ok(header)) => header,
            Ok(Err(problem)) => return Ok(Err(problem)),
            Err(source) => return Err(failed("reading", &path, source)),
        };
        Ok(Self::described(&header, length).map(|(spots, metadata)| Self { path, file, spots, metadata }))
    }

    fn described(
        header: &[u8],
        length: u64,
    ) -> Result<(BTreeMap<String, Spot>, HashMap<String, String>), String> {
        let unreadable = |error: serde_json::Error| format!("its header cannot be read: {error}");
        serde_json::from_slice::<Unique<IgnoredAny>>(header).map_err(unreadable)?;
        let metadata: safetensors::tensor::Metadata = serde_json::from_slice(header).map_err(unreadable)?;
        let start = 8 + header.len() as u64;
        let end = start.checked_add(metadata.data_len() as u64);
        if end != Some(length) {
            return Err(format!("it has {length} bytes, its header speaks of another number"));
        }
        let mut spots = BTreeMap::new();
        for (name, info) in metadata.tensors() {
            let kind = dtype::kind_of(info.dtype).ok_or(format!("`{name}` has dtype {:?}", info.dtype))?;
            let size: Result<Vec<i64>, _> = info.shape.iter().map(|length| i64::try_from(*length)).collect();
            let size = size.map_err(|_| format!("`{name}` is too long"))?;
            let (from, to) = info.data_offsets;
            let spot = Spot {
                kind,
                size,
                strides: None,
                offset: start + from as u64,
                bytes: (to - from) as u64,
                crc32: None,
            };
            spots.insert(name, spot);
        }
        Ok((spots, metadata.metadata().clone().unwrap_or_default()))
    }

    pub(super) fn spots(&self) -> &BTreeMap<String, Spot> {
        &self.spots
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
        if into.device() == Device::Cpu && into.is_contiguous() && into.kind() == spot.kind {
            return self.read_bytes(key, spot, into);
        }
        let host = Tensor::f_empty(&spot.size, (spot.kind, Device::Cpu))?;
        self.read_bytes(key, spot, &host)?;
        tch::no_grad(|| into.shallow_clone().f_copy_(&host))?;
        Ok(())
    }

    fn read_bytes(&self, key: &str, spot: &Spot, into: &Tensor) -> Result<()> {
        let read = ffi::bytes::write(into, |bytes| {
            if bytes.len() as u64 != spot.bytes {
                return Err(broken(&self.path, vec![format!("`{key}` has another length")]));
            }
            let (mut hasher, mut offset) = (Hasher::new(), spot.offset);
            for block in bytes.chunks_mut(BLOCK) {
                self.file
                    .read_exact_at(block, offset)
                    .map_err(|source| failed("reading", &self.path, source))?;
                hasher.update(block);
                offset += block.len() as u64;
                if spot.kind == Kind::Bool && block.iter().any(|byte| *byte > 1) {
                    return Err(broken(&self.path, vec![format!("`{key}` is neither true nor false")]));
                }
            }
            Ok(hasher.finalize())
        })??;
        match spot.crc32 {
            Some(crc32) if crc32 != read => {
                Err(broken(&self.path, vec![format!("`{key}` changed while it was read")]))
            }
            _ => Ok(()),
        }
    }
}

impl Spot {
    /// Takes up what the manifest says beyond the header, where they agree.
    fn take_up(&mut self, entry: &TensorEntry) -> Result<(), String> {
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

/// Reads and parses the manifest.
pub(super) fn read_manifest(folder: &Path) -> Result<Manifest> {
    let path = folder.join(manifest::FILE);
    let file = sys::file::open_regular(&path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound if folder.is_dir() => broken(folder, vec!["it has no manifest".to_owned()]),
        io::ErrorKind::InvalidInput => broken(folder, vec!["the manifest is not a regular file".to_owned()]),
        _ if source.raw_os_error() == Some(libc::ELOOP) => {
            broken(folder, vec!["the manifest is a link".to_owned()])
        }
        _ => failed("opening", &path, source),
    })?;
    let length = file.metadata().map_err(|source| failed("reading", &path, source))?.len();
    if length > manifest::LONGEST {
        return Err(broken(folder, vec![format!("the manifest has {length} bytes")]));
    }
    let mut bytes = vec![0; length as usize];
    file.read_exact_at(&mut bytes, 0).map_err(|source| failed("reading", &path, source))?;
    Manifest::parse(&bytes).map_err(|problem| broken(folder, vec![problem]))
}

/// Opens a file that the manifest names; the inner error is the manifest's or the file's fault.
fn open_as_said(folder: &Path, name: &str, bytes: u64) -> Result<Result<File, String>> {
    let plain = |stem: &str| super::extras::is_plain(stem);
    if !name.strip_suffix(".safetensors").or(name.strip_suffix(".pt")).is_some_and(plain) {
        return Ok(Err(format!("{name:?} is no name of a file here")));
    }
    let path = folder.join(name);
    let file = match sys::file::open_regular(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(Err(format!("{name} is missing")));
        }
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            return Ok(Err(format!("{name} is not a regular file")));
        }
        Err(error) if matches!(error.raw_os_error(), Some(libc::ELOOP | libc::ENXIO)) => {
            return Ok(Err(format!("{name} is a link or a device")));
        }
        Err(source) => return Err(failed("opening", &path, source)),
    };
    let length = file.metadata().map_err(|source| failed("reading", &path, source))?.len();
    if length == bytes {
        Ok(Ok(file))
    } else {
        Ok(Err(format!("{name} has {length} bytes, the manifest says {bytes}")))
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

fn checksum(file: &File, length: u64, block: &mut [u8]) -> io::Result<u32> {
    let (mut hasher, mut offset) = (Hasher::new(), 0);
    while offset < length {
        let wanted = block.len().min((length - offset) as usize);
        let Some(part) = block.get_mut(..wanted) else { break };
        file.read_exact_at(part, offset)?;
        hasher.update(part);
        offset += wanted as u64;
    }
    Ok(hasher.finalize())
}

pub(super) fn broken(path: &Path, problems: Vec<String>) -> Error {
    Error::Snapshot { path: path.to_owned(), problems }
}
