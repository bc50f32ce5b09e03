//! Where things are in the repository and in the user's cache.

use std::env;
use std::path::{Path, PathBuf};

use crate::problem::{Problem, Result};

#[derive(Clone, Debug)]
pub struct Repo {
    root: PathBuf,
}

impl Repo {
    /// The repository that cargo runs xtask from.
    pub fn find() -> Self {
        let here = env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        Self::at(here.parent().unwrap_or(&here))
    }

    pub fn at(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn manifest(&self) -> PathBuf {
        self.root.join("Cargo.toml")
    }

    /// The provisioned libtorch; `.cargo/config.toml` names it to every build.
    pub fn libtorch(&self) -> PathBuf {
        self.root.join(".libtorch")
    }

    pub fn venv(&self) -> PathBuf {
        self.root.join(".venv")
    }

    pub fn target(&self) -> PathBuf {
        ["CARGO_TARGET_DIR", "CARGO_BUILD_TARGET_DIR"]
            .iter()
            .find_map(env::var_os)
            .map_or_else(|| self.root.join("target"), |folder| self.root.join(folder))
    }
}

/// `$XDG_CACHE_HOME/memfit`, or `~/.cache/memfit`.
pub fn user_cache() -> Result<PathBuf> {
    let absolute = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    absolute("XDG_CACHE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".cache")))
        .map(|cache| cache.join("memfit"))
        .ok_or_else(|| Problem::new("no folder for the cache: set HOME or XDG_CACHE_HOME"))
}
