//! The wheels that a libtorch is made of, and the user's cache of them.

use std::fs;
use std::path::{Path, PathBuf};

use crate::problem::{Problem, Result};

/// One wheel, and what of it a CPU libtorch needs.
#[derive(Debug)]
pub struct Package {
    pub name: &'static str,
    pub version: &'static str,
    /// Roughly, for the progress line.
    pub bytes: u64,
    /// `(path in the wheel, path in the tree)`; with a slash at the end, all below it.
    pub parts: &'static [(&'static str, &'static str)],
}

/// The wheel of PyTorch without its CUDA half, and the two libraries that `libtorch_cpu.so`
/// is linked to all the same.
pub const PACKAGES: &[Package] = &[
    Package {
        name: "torch",
        version: super::WANTED,
        bytes: 526_605_292,
        parts: &[
            ("torch/include/", "include/"),
            ("torch/lib/libtorch_cpu.so", "lib/libtorch_cpu.so"),
            ("torch/lib/libc10.so", "lib/libc10.so"),
            ("torch/lib/libtorch.so", "lib/libtorch.so"),
            ("torch/lib/libgomp.so.1", "lib/libgomp.so.1"),
        ],
    },
    Package {
        name: "nvidia-cuda-runtime",
        version: "13.0.96",
        bytes: 2_243_632,
        parts: &[("nvidia/cu13/lib/libcudart.so.13", "lib/libcudart.so.13")],
    },
    Package {
        name: "nvidia-cuda-cupti",
        version: "13.0.85",
        bytes: 10_715_597,
        parts: &[("nvidia/cu13/lib/libcupti.so.13", "lib/libcupti.so.13")],
    },
];

impl Package {
    /// Whether a file name is that of this package's wheel, local versions (`+cpu`) included.
    fn owns(&self, file: &str) -> bool {
        let start = format!("{}-{}", self.name.replace('-', "_"), self.version);
        file.ends_with(".whl") && file.strip_prefix(&start).is_some_and(|rest| rest.starts_with(['-', '+']))
    }
}

/// A folder of whole wheels. Its owner holds the cache's lock.
pub struct Cache {
    folder: PathBuf,
}

impl Cache {
    pub fn at(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// The wheel of a package; where it is not there yet, `fetch` puts it into a folder of its
    /// own, from which it is renamed once it is whole.
    pub fn wheel(&self, package: &Package, fetch: impl Fn(&Package, &Path) -> Result<()>) -> Result<PathBuf> {
        if let Some(wheel) = wheel_in(&self.folder, package) {
            return Ok(wheel);
        }
        remove_started(&self.folder, "partial-");
        let partial = self.folder.join(format!("partial-{}", std::process::id()));
        fs::create_dir_all(&partial).map_err(|error| Problem::io("create", &partial, &error))?;
        let wheel = fetch(package, &partial).and_then(|()| self.adopt(package, &partial));
        let _ = fs::remove_dir_all(&partial);
        wheel
    }

    fn adopt(&self, package: &Package, partial: &Path) -> Result<PathBuf> {
        let fetched = wheel_in(partial, package).ok_or_else(|| {
            Problem::new(format!("pip fetched no wheel of {} {}", package.name, package.version))
        })?;
        let wheel = self.folder.join(fetched.file_name().unwrap_or_default());
        fs::rename(&fetched, &wheel).map_err(|error| Problem::io("rename", &fetched, &error))?;
        Ok(wheel)
    }
}

fn wheel_in(folder: &Path, package: &Package) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    paths.find(|path| {
        let name = path.file_name().unwrap_or_default();
        package.owns(&name.to_string_lossy()) && path.is_file()
    })
}

/// Removes what interrupted runs left in `folder`: everything whose name starts so.
pub fn remove_started(folder: &Path, start: &str) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(start) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    const PACKAGE: Package = Package { name: "a-b", version: "1.0", bytes: 4, parts: &[] };
    const FILE: &str = "a_b-1.0-py3-none-any.whl";

    #[test]
    fn only_the_packages_own_wheel_is_taken() {
        for file in [FILE, "a_b-1.0+cpu-py3-none-any.whl"] {
            assert!(PACKAGE.owns(file), "{file}");
        }
        for file in ["a_b-1.0.1-py3-none-any.whl", "a_b-1.0-py3-none-any.whl.part", "c-1.0-x.whl"] {
            assert!(!PACKAGE.owns(file), "{file}");
        }
    }

    #[test]
    fn a_wheel_is_fetched_once() {
        let scratch = Scratch::new("cache");
        let cache = Cache::at(scratch.path().join("wheels"));
        let write = |_: &Package, into: &Path| {
            fs::write(into.join(FILE), "whole").unwrap();
            Ok(())
        };
        let wheel = cache.wheel(&PACKAGE, write).unwrap();
        assert_eq!(fs::read_to_string(&wheel).unwrap(), "whole");
        let never = |_: &Package, _: &Path| panic!("fetched twice");
        assert_eq!(cache.wheel(&PACKAGE, never).unwrap(), wheel);
    }

    #[test]
    fn an_interrupted_fetch_leaves_no_wheel() {
        let scratch = Scratch::new("interrupted");
        let cache = Cache::at(scratch.path().to_owned());
        let left = scratch.path().join("partial-1");
        fs::create_dir(&left).unwrap();
        fs::write(left.join(FILE), "ha").unwrap();
        let fails = |_: &Package, into: &Path| {
            fs::write(into.join(FILE), "hal").unwrap();
            Err(Problem::new("no network"))
        };
        assert!(cache.wheel(&PACKAGE, fails).is_err());
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
    }
}
