//! An unpacked libtorch: put together beside its place, checked, and renamed at last.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use super::unpack::{Unpacked, unpack};
use super::wheels::{Package, remove_started};
use crate::problem::{Problem, Result};

/// Each file of the tree with its size; its presence says that xtask made the tree.
const MANIFEST: &str = "manifest.txt";
const BUILD_VERSION: &str = "build-version";

#[derive(Debug, PartialEq, Eq)]
pub enum State {
    Missing,
    Whole,
    /// Made by xtask, but not as it was made any more, or of another version.
    Damaged(String),
    /// Not made by xtask.
    Foreign,
}

pub struct Tree {
    path: PathBuf,
}

impl Tree {
    pub fn at(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    /// What is there, by names and sizes: a few milliseconds for 9,000 files.
    pub fn state(&self, version: &str) -> State {
        if fs::symlink_metadata(&self.path).is_err() {
            return State::Missing;
        }
        let Ok(manifest) = fs::read_to_string(self.path.join(MANIFEST)) else {
            return State::Foreign;
        };
        let found = fs::read_to_string(self.path.join(BUILD_VERSION)).unwrap_or_default();
        if found.trim() != version {
            return State::Damaged(format!("its build-version is `{}`", found.trim()));
        }
        let bad = manifest.lines().find(|line| !self.holds(line));
        bad.map_or(State::Whole, |line| State::Damaged(format!("`{line}` does not hold")))
    }

    /// Whether the file of a manifest line has the size it had.
    fn holds(&self, line: &str) -> bool {
        line.split_once(' ').is_some_and(|(size, path)| {
            fs::metadata(self.path.join(path)).is_ok_and(|file| file.len().to_string() == size)
        })
    }

    /// Makes the tree from the wheels that `wheel` gives. A damaged one is deleted and asked
    /// for once more. Until the last rename nothing at the tree's path changes.
    pub fn install(
        &self,
        version: &str,
        packages: &[Package],
        wheel: impl Fn(&Package) -> Result<PathBuf>,
    ) -> Result<()> {
        let parent = self.path.parent().unwrap_or(Path::new("."));
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        remove_started(parent, &format!("{name}.partial-"));
        remove_started(parent, &format!("{name}.old-"));
        // All wheels first: the network is what fails most.
        for package in packages {
            wheel(package)?;
        }
        let id = std::process::id();
        let partial = Self::at(&parent.join(format!("{name}.partial-{id}")));
        let made = partial.fill(version, packages, wheel);
        if made.is_err() {
            let _ = fs::remove_dir_all(&partial.path);
        }
        made?;
        self.replace_by(&partial, &parent.join(format!("{name}.old-{id}")))
    }

    fn fill(
        &self,
        version: &str,
        packages: &[Package],
        wheel: impl Fn(&Package) -> Result<PathBuf>,
    ) -> Result<()> {
        let mut manifest = String::new();
        for package in packages {
            manifest += &self.add(package, &wheel)?;
        }
        self.write(BUILD_VERSION, version)?;
        let _ = writeln!(manifest, "{} {BUILD_VERSION}", version.len());
        self.write(MANIFEST, &manifest)?;
        match self.state(version) {
            State::Whole => Ok(()),
            state => Err(Problem::new(format!("the unpacked libtorch is not whole: {state:?}"))),
        }
    }

    /// The manifest lines of one package's parts, unpacked.
    fn add(&self, package: &Package, wheel: impl Fn(&Package) -> Result<PathBuf>) -> Result<String> {
        let first = wheel(package)?;
        let why = match unpack(package, &first, &self.path)? {
            Unpacked::Files(lines) => return Ok(lines),
            Unpacked::DamagedWheel(why) => why,
        };
        eprintln!("{} is damaged ({why}): fetching it again", first.display());
        fs::remove_file(&first).map_err(|error| Problem::io("remove", &first, &error))?;
        self.remove_parts(package);
        let second = wheel(package)?;
        match unpack(package, &second, &self.path)? {
            Unpacked::Files(lines) => Ok(lines),
            Unpacked::DamagedWheel(why) => Err(Problem::new(format!(
                "the wheel of {} {} is damaged even when fetched anew ({why}): check the package \
                 index that pip uses",
                package.name, package.version
            ))),
        }
    }

    fn remove_parts(&self, package: &Package) {
        for (_, to) in package.parts {
            let path = self.path.join(to);
            let _ = if to.ends_with('/') { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        }
    }

    fn replace_by(&self, new: &Tree, old: &Path) -> Result<()> {
        let rename = |from: &Path, to: &Path| {
            fs::rename(from, to).map_err(|error| Problem::io("rename", from, &error))
        };
        if fs::symlink_metadata(&self.path).is_ok() {
            rename(&self.path, old)?;
        }
        rename(&new.path, &self.path)?;
        let _ = fs::remove_dir_all(old);
        Ok(())
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.path.join(name);
        fs::write(&path, text).map_err(|error| Problem::io("write", &path, &error))
    }
}

#[cfg(test)]
#[path = "tree_tests.rs"]
mod tests;
