//! What must be there before anything is built, and the one sentence where it is not.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::libtorch::WANTED;
use crate::problem::{Problem, Result};
use crate::version::Version;

const TARGET: &str = "x86_64_unknown_linux_gnu";

/// A C++ compiler, found as the `cc` crate finds it.
pub fn compiler() -> Result<()> {
    compiler_named(&named_compiler(|name| env::var(name).ok()))
}

fn named_compiler(variable: impl Fn(&str) -> Option<String>) -> String {
    [&format!("CXX_{}", TARGET.replace('_', "-")), &format!("CXX_{TARGET}"), "HOST_CXX", "CXX"]
        .iter()
        .find_map(|name| variable(name).filter(|value| !value.trim().is_empty()))
        .unwrap_or_else(|| "c++".to_owned())
}

fn compiler_named(compiler: &str) -> Result<()> {
    // The variable may hold a wrapper and flags: `ccache g++ -m64`.
    let mut words = compiler.split_whitespace();
    let runs = words.next().is_some_and(|program| {
        output(Command::new(program).args(words).arg("--version"))
            .is_some_and(|output| output.status.success())
    });
    if runs {
        return Ok(());
    }
    Err(Problem::new(format!(
        "no C++ compiler: `{compiler}` does not run; install one (Debian and Ubuntu: \
         `apt install g++`, Fedora: `dnf install gcc-c++`) or name one in CXX"
    )))
}

/// The platform that the wheels are for.
pub fn platform() -> Result<()> {
    platform_is(env::consts::OS, env::consts::ARCH, cfg!(target_env = "gnu"))
}

fn platform_is(os: &str, arch: &str, gnu: bool) -> Result<()> {
    if os == "linux" && arch == "x86_64" && gnu {
        return Ok(());
    }
    let libc = if os == "linux" && !gnu { ", not glibc" } else { "" };
    Err(Problem::new(format!(
        "a libtorch is provisioned on x86-64 Linux with glibc only and this is {arch} {os}{libc}: \
         set LIBTORCH to a libtorch {WANTED}, or LIBTORCH_USE_PYTORCH=1 with PyTorch {WANTED} \
         installed"
    )))
}

/// Python 3 with pip, which fetches the wheels of `what`; `otherwise` is what someone does who
/// has none.
pub fn pip(python: &Path, what: &str, otherwise: &str) -> Result<()> {
    let Some(output) = output(Command::new(python).args(["-m", "pip", "--version"])) else {
        return Err(Problem::new(format!(
            "no `{}`: {what} is fetched with Python 3 and pip; install them (Debian and \
             Ubuntu: `apt install python3-pip`) or {otherwise}",
            python.display()
        )));
    };
    if output.status.success() {
        return Ok(());
    }
    Err(Problem::new(format!(
        "`{0} -m pip` does not run: install pip (Debian and Ubuntu: `apt install python3-pip`, \
         elsewhere `{0} -m ensurepip --user`) or {otherwise}",
        python.display()
    )))
}

/// The libtorch that the user's own LIBTORCH names.
pub fn named_libtorch(path: &Path, variable: impl Fn(&str) -> Option<OsString>) -> Result<()> {
    let shown = path.display();
    if path.as_os_str().is_empty() || path.is_relative() {
        return Err(Problem::new(format!(
            "LIBTORCH is `{shown}`, not an absolute path: unset it to have a libtorch \
             provisioned, or name one by its whole path"
        )));
    }
    let root = variable("LIBTORCH_INCLUDE").map_or_else(|| path.to_owned(), PathBuf::from);
    match Version::of_headers(&root.join("include")) {
        Some(found) => version_is(&found.to_string(), &format!("LIBTORCH ({shown})"), variable),
        None => Err(Problem::new(format!(
            "LIBTORCH names {shown}, where no `include/torch/…/version.h` is: point it at an \
             unpacked libtorch {WANTED}, or unset it to have one provisioned"
        ))),
    }
}

/// The PyTorch that LIBTORCH_USE_PYTORCH selects, found by the interpreter torch-sys asks.
pub fn installed_pytorch() -> Result<()> {
    let python = if env::var_os("VIRTUAL_ENV").is_some() { "python" } else { "python3" };
    let ask = "import torch; print(torch.__version__.split('+')[0])";
    match output(Command::new(python).args(["-c", ask])).filter(|output| output.status.success()) {
        Some(output) => {
            let version = String::from_utf8_lossy(&output.stdout);
            version_is(version.trim(), "LIBTORCH_USE_PYTORCH's PyTorch", |name| env::var_os(name))
        }
        None => Err(Problem::new(format!(
            "LIBTORCH_USE_PYTORCH is set but `{python}` cannot import torch: activate an \
             environment with PyTorch {WANTED} (`cargo xtask libtorch --pytorch` makes one in \
             .venv), or unset it"
        ))),
    }
}

/// tch's own way round its version check holds here too.
fn version_is(found: &str, owner: &str, variable: impl Fn(&str) -> Option<OsString>) -> Result<()> {
    if found == WANTED || variable("LIBTORCH_BYPASS_VERSION_CHECK").is_some() {
        return Ok(());
    }
    Err(Problem::new(format!(
        "{owner} is version {found}, but tch 0.26 wants {WANTED}: name a libtorch {WANTED}, or \
         unset the variable to have one provisioned"
    )))
}

/// `None` where the program does not start at all.
fn output(command: &mut Command) -> Option<Output> {
    command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()
}

#[cfg(test)]
#[path = "preflight_tests.rs"]
mod tests;
