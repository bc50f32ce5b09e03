//! The libtorch that memfit is built with: the user's own, or one provisioned from wheels.

pub mod pip;
pub mod pytorch;
pub mod tree;
pub mod unpack;
pub mod wheels;

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use crate::lock::Lock;
use crate::preflight;
use crate::problem::{Problem, Result};
use crate::repo::{Repo, user_cache};
use crate::version::Version;
use tree::{State, Tree};
use wheels::{Cache, PACKAGES};

/// The one version that tch 0.26 works with.
pub const WANTED: &str = "2.13.0";

/// What someone does who cannot fetch it, at the end of a sentence.
fn otherwise() -> String {
    format!("set LIBTORCH to a libtorch {WANTED}")
}

/// Where the libtorch in use comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Libtorch {
    /// Python's PyTorch, by LIBTORCH_USE_PYTORCH.
    PyTorch,
    /// The user's own LIBTORCH.
    Named(PathBuf),
    /// `.libtorch` in the repository.
    Provisioned(PathBuf),
}

impl Libtorch {
    /// What a crate outside the repository sets LIBTORCH to, where it has to set it.
    pub fn variable(&self) -> Option<&Path> {
        match self {
            Self::PyTorch => None,
            Self::Named(path) | Self::Provisioned(path) => Some(path),
        }
    }
}

/// Sees to it that a build will find a libtorch, and provisions one where the user named none.
pub fn ready(repo: &Repo) -> Result<Libtorch> {
    preflight::compiler()?;
    let libtorch = chosen(repo, |name| env::var_os(name));
    match &libtorch {
        Libtorch::PyTorch => preflight::installed_pytorch()?,
        Libtorch::Named(path) => preflight::named_libtorch(path, |name| env::var_os(name))?,
        Libtorch::Provisioned(path) => provision(path)?,
    }
    Ok(libtorch)
}

/// Who decides: torch-sys gives LIBTORCH_USE_PYTORCH precedence, and `.cargo/config.toml` has
/// set LIBTORCH to `.libtorch` where the user has not set it.
fn chosen(repo: &Repo, variable: impl Fn(&str) -> Option<OsString>) -> Libtorch {
    let ours = repo.libtorch();
    if variable("LIBTORCH_USE_PYTORCH").is_some() {
        return Libtorch::PyTorch;
    }
    match variable("LIBTORCH").map(PathBuf::from) {
        Some(path) if path != ours => Libtorch::Named(path),
        _ => Libtorch::Provisioned(ours),
    }
}

/// Makes `path` a whole libtorch, from the wheels in the user's cache and, where they are not
/// there yet, from pip.
fn provision(path: &Path) -> Result<()> {
    if is_whole(path)? {
        return Ok(());
    }
    preflight::platform()?;
    let _tree = Lock::take(&path.with_extension("lock"))?;
    if is_whole(path)? {
        return Ok(()); // another run has made it meanwhile
    }
    preflight::pip(Path::new(pip::PYTHON), "libtorch", &otherwise())?;
    let folder = user_cache()?;
    let _wheels = Lock::take(&folder.join("lock"))?;
    let cache = Cache::at(folder.join("wheels"));
    Tree::at(path).install(WANTED, PACKAGES, |package| {
        cache.wheel(package, |package, folder| pip::download(package, folder, &otherwise()))
    })?;
    Ok(())
}

/// Whether a build can use what is at `path`; a folder that xtask has not made is left alone.
fn is_whole(path: &Path) -> Result<bool> {
    match Tree::at(path).state(WANTED) {
        State::Whole => Ok(true),
        State::Missing => Ok(false),
        State::Damaged(why) => {
            eprintln!("{} is not whole ({why}): making it anew", path.display());
            Ok(false)
        }
        State::Foreign => foreign(path).map(|()| true),
    }
}

fn foreign(path: &Path) -> Result<()> {
    let version = Version::of_headers(&path.join("include")).map(|found| found.to_string());
    let library = fs::metadata(path.join("lib/libtorch_cpu.so")).is_ok_and(|file| file.len() > 0);
    if version.as_deref() == Some(WANTED) && library {
        return Ok(());
    }
    Err(Problem::new(format!(
        "{} was not made by xtask and is no libtorch {WANTED}: remove it and run again",
        path.display()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn chosen_with(variables: &[(&str, &str)]) -> Libtorch {
        chosen(&Repo::at(Path::new("/repo")), |name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
        })
    }

    #[test]
    fn the_users_own_variables_win() {
        let ours = Libtorch::Provisioned("/repo/.libtorch".into());
        assert_eq!(chosen_with(&[]), ours);
        assert_eq!(chosen_with(&[("LIBTORCH", "/repo/.libtorch")]), ours);
        assert_eq!(chosen_with(&[("LIBTORCH", "/mine")]), Libtorch::Named("/mine".into()));
        let both = [("LIBTORCH", "/mine"), ("LIBTORCH_USE_PYTORCH", "1")];
        assert_eq!(chosen_with(&both), Libtorch::PyTorch);
    }

    #[test]
    fn a_foreign_folder_is_refused_and_left_alone() {
        let scratch = Scratch::new("foreign");
        let theirs = scratch.path().join("theirs");
        fs::write(&theirs, "precious").unwrap();
        let problem = is_whole(scratch.path()).unwrap_err().to_string();
        assert!(problem.contains("was not made by xtask"), "{problem}");
        assert_eq!(fs::read_to_string(theirs).unwrap(), "precious");
    }
}
