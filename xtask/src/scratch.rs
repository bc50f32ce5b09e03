//! A temporary folder that goes away with the value that names it.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{fs, io};

use crate::problem::{Problem, Result};

#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    keep: bool,
}

impl Scratch {
    /// A new empty folder in the system's folder for temporary files.
    pub fn try_new(name: &str) -> Result<Self> {
        Self::in_folder(&std::env::temp_dir(), name)
    }

    /// A new empty folder elsewhere.
    pub fn in_folder(folder: &Path, name: &str) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        fs::create_dir_all(folder).map_err(|error| Problem::io("create", folder, &error))?;
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = folder.join(format!("memfit-{name}-{}-{number}", std::process::id()));
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Self { path, keep: false }),
                // Of a process that was killed and had this one's number.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(Problem::io("create", &path, &error)),
            }
        }
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
