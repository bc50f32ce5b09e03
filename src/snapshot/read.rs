//! Opens a snapshot's files without trusting them, and reads tensors by positioned reads: a
//! file that is cut while it is read is an error, where a mapping would end the process.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crc32fast::Hasher;
use tch::{Device, Tensor};

use super::extras::ENTRIES;
use super::hashing::checksum;
use super::manifest::{self, Manifest};
use super::tensors::{Spot, Tensors};
use super::write::failed;
use crate::error::{Error, Result};
use crate::state::{Found, Source, Value};
use crate::sys;

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
        let mut problems = self.manifest.file_problems();
        if !problems.is_empty() {
            return Ok(problems);
        }
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
            let spot = self.tensors.get_mut(&entry.file).and_then(|file| file.spot_mut(&entry.key));
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
        let found: usize = self.tensors.values().map(|file| file.spots().len()).sum();
        if problems.is_empty() && found != known {
            problems.push(format!("the files hold {found} tensors, the manifest has {known}"));
        }
    }

    fn match_names(&self, problems: &mut Vec<String>) {
        let listed: BTreeSet<&str> = self.manifest.entries.iter().map(String::as_str).collect();
        if listed.len() != self.manifest.entries.len() {
            problems.push("an entry stands twice in `entries`".to_owned());
        }
        for name in self.under(ENTRIES) {
            let entry = name.strip_prefix(ENTRIES).and_then(|rest| rest.split_once('.'));
            if !entry.is_some_and(|(entry, _)| listed.contains(entry)) {
                problems.push(format!("`{name}` belongs to no entry of `entries`"));
            }
        }
        for (name, said) in self.manifest.position.counts() {
            let name = format!("position.{name}");
            match self.scalars.get(&name) {
                Some(Value::Int(count)) if u64::try_from(*count) == Ok(said) => {}
                Some(_) => problems.push(format!("`{name}` is not {said}, which `position` says")),
                None => problems.push(format!("`{name}` is missing")),
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
        for (name, entry) in self.manifest.files.0.iter().filter(|(name, _)| which(name)) {
            let Some(file) = self.open.get(name) else { continue };
            match checksum(file, 0, entry.bytes).map(Hasher::finalize) {
                Ok(found) if found == entry.crc32 => {}
                Ok(_) => problems.push(format!("{name}: its checksum is not the manifest's")),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    problems.push(format!("{name} was cut off"));
                }
                Err(source) => return Err(failed("reading", &self.folder.join(name), source)),
            }
        }
        if problems.is_empty() {
            for (name, tensors) in self.tensors.iter().filter(|(name, _)| which(name)) {
                let found = tensors.false_bools(|_| true)?;
                problems.extend(found.into_iter().map(|problem| format!("{name}: {problem}")));
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
        all.map(String::as_str).filter(|name| !name.starts_with(ENTRIES)).collect()
    }

    fn find(&self, name: &str) -> Option<Found<'_>> {
        if let Some(scalar) = self.scalars.get(name) {
            return Some(Found::Scalar(scalar));
        }
        let (file, key) = self.places.get(name)?;
        let Spot { kind, size, strides, .. } = self.tensors.get(file)?.spots().get(key)?;
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

pub(super) fn broken(path: &Path, problems: Vec<String>) -> Error {
    Error::Snapshot { path: path.to_owned(), problems }
}
