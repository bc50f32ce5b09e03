//! The full PyTorch in a virtual environment: for the Python peers and for CUDA.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{WANTED, otherwise, pip};
use crate::lock::Lock;
use crate::preflight;
use crate::problem::{Problem, Result};
use crate::repo::Repo;

/// Decodes and resizes pictures for PyTorch: its speed is compared, so its version is named.
const PILLOW: &str = "pillow==13.0.0";
/// Written when all is installed: an environment without it is installed into again.
const READY: &str = "memfit-ready";

/// Sees to it that `.venv` has PyTorch, numpy, Pillow and safetensors, and returns its interpreter.
pub fn ready(repo: &Repo) -> Result<PathBuf> {
    let venv = repo.venv();
    let python = venv.join("bin/python");
    let _lock = Lock::take(&venv.with_extension("lock"))?;
    let wanted = requirements().join("\n");
    if fs::read_to_string(venv.join(READY)).is_ok_and(|found| found == wanted) && python.exists() {
        return Ok(python);
    }
    make_environment(&venv, &python)?;
    install(&python)?;
    let marker = venv.join(READY);
    fs::write(&marker, wanted).map_err(|error| Problem::io("write", &marker, &error))?;
    Ok(python)
}

fn requirements() -> [String; 4] {
    [format!("torch=={WANTED}"), "numpy".to_owned(), "safetensors".to_owned(), PILLOW.to_owned()]
}

fn make_environment(venv: &Path, python: &Path) -> Result<()> {
    let works = || preflight::pip(python, "PyTorch", &otherwise()).is_ok();
    if works() {
        return Ok(());
    }
    preflight::pip(Path::new(pip::PYTHON), "PyTorch", &otherwise())?;
    eprintln!("making a virtual environment in {}", venv.display());
    let mut command = Command::new(pip::PYTHON);
    command.args(["-m", "venv"]).arg(venv).stdin(Stdio::null()).stdout(Stdio::null());
    let made = pip::watch(&mut command, || {})?;
    if made.is_ok() && works() {
        return Ok(());
    }
    Err(Problem::new(format!(
        "`{} -m venv` makes no environment with pip: install Python's venv (Debian and Ubuntu: \
         `apt install python3-venv`) and run again",
        pip::PYTHON
    )))
}

/// pip shows its own progress: a dozen packages, 4.7 GB.
fn install(python: &Path) -> Result<()> {
    let requirements = requirements();
    let mut command = Command::new(python);
    command.args(["-m", "pip", "install", "--disable-pip-version-check"]).args(&requirements);
    command.stdin(Stdio::null());
    if let Err(log) = pip::watch(&mut command, || {})? {
        return Err(Problem::new(pip::sentence(&requirements.join(" "), &log, &otherwise())));
    }
    let works = Command::new(python)
        .args(["-c", "import torch, numpy, safetensors, PIL"])
        .status()
        .is_ok_and(|status| status.success());
    if works {
        return Ok(());
    }
    Err(Problem::new(format!(
        "{} cannot import what pip installed: remove .venv and run again",
        python.display()
    )))
}
