//! Sources of records: files that stay files, memory, and what is made of other sources.

mod arrays;
mod compositions;
mod files;
mod order;
mod safetensors;
mod tokens;
mod views;

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

use memfit::data::{Random, Source};
use memfit::{Error, Result};

/// A folder with one file in it.
pub struct OneFile {
    folder: tempfile::TempDir,
    pub path: PathBuf,
}

impl OneFile {
    pub fn of(bytes: &[u8]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        std::fs::write(&path, bytes).unwrap();
        Self { folder, path }
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Another process cuts the file, or makes it longer.
    pub fn set_len(&self, bytes: u64) {
        self.try_set_len(bytes).unwrap();
    }

    pub fn try_set_len(&self, bytes: u64) -> std::io::Result<()> {
        OpenOptions::new().write(true).open(&self.path).and_then(|file: File| file.set_len(bytes))
    }
}

/// One record.
pub fn get<S: Source>(source: &S, index: u64) -> Result<S::Sample> {
    source.get(index, &mut Random::of_sample(0, 0, 0))
}

/// All records.
pub fn all<S: Source>(source: &S) -> Vec<S::Sample> {
    (0..source.len()).map(|index| get(source, index).unwrap()).collect()
}

/// An error about the data, as text.
pub fn data_error<T>(result: Result<T>) -> String {
    match result.err().expect("an error") {
        error @ Error::Data { .. } => error.to_string(),
        other => panic!("{other:?}"),
    }
}

/// Whether a setting was refused.
pub fn is_config<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::Config { .. }))
}

/// Whether the file was refused by the system, or as none that can be read at any place.
pub fn is_io<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::Io { .. }))
}
