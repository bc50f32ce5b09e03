//! A temporary folder that goes away with the value that names it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::problem::{Problem, Result};

#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    keep: bool,
}

impl Scratch {
    /// A new empty folder in the system's folder for temporary files.
    pub fn try_new(name: &str) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self::made(std::env::temp_dir().join(format!("memfit-{name}-{}-{number}", std::process::id())))
    }

    /// A new empty folder elsewhere.
    pub fn in_folder(folder: &Path, name: &str) -> Result<Self> {
        Self::made(folder.join(format!("memfit-{name}-{}", std::process::id())))
    }

    fn made(path: PathBuf) -> Result<Self> {
        fs::create_dir_all(&path).map_err(|error| Problem::io("create", &path, &error))?;
        Ok(Self { path, keep: false })
    }

    #[cfg(test)]
    pub fn new(name: &str) -> Self {
        Self::try_new(name).unwrap()
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Leaves the folder where it is, for someone to look at.
    pub fn keep(mut self) {
        self.keep = true;
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.keep {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}
