//! What both sides need: memfit's binary, the counting allocator as a library that Python can
//! load, and per model the files they start from.

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::Model;
use super::side::Side;
use crate::problem::{Problem, Result};
use crate::repo::Repo;
use crate::scratch::Scratch;

#[derive(Debug)]
pub struct Setup {
    root: PathBuf,
    target: PathBuf,
    python: PathBuf,
    binary: PathBuf,
    counter: PathBuf,
    scratch: Scratch,
    pub pytorch_version: String,
}

impl Setup {
    pub fn make(repo: &Repo, python: &Path) -> Result<Self> {
        let scratch = Scratch::try_new("peers")?;
        let counter = scratch.path().join("counter.so");
        let about = "import torch; print(torch.__path__[0]); print(torch.__version__)";
        let about = output(Command::new(python).args(["-c", about]))?;
        let mut lines = about.lines();
        let torch = PathBuf::from(lines.next().unwrap_or_default());
        let pytorch_version = lines.next().unwrap_or_default().to_owned();
        build_counter(repo.root(), &torch, &counter)?;
        let binary = build_bench(repo.root(), "peers")?;
        let (root, target, python) = (repo.root().to_owned(), repo.target(), python.to_owned());
        Ok(Self { root, target, python, binary, counter, scratch, pytorch_version })
    }

    /// Writes what both sides start from.
    pub fn prepare(&self, model: &Model) -> Result<Work<'_>> {
        let folder = self.folder(model.name)?;
        let words = [OsStr::new("prepare"), folder.as_os_str(), OsStr::new(model.name)];
        let size = output(Command::new(&self.binary).args(words))?;
        let size = size.split_whitespace().map(str::to_owned).collect();
        Ok(Work { setup: self, folder, model: model.name, size })
    }
}

/// What needs no files of a model.
impl Setup {
    /// PyTorch's optimizer over weights of these shapes.
    pub fn pytorch_optimizer(&self, name: &str, shapes: &str) -> Result<Side> {
        let mut command = self.script("optimizers.py");
        command.args(["--optimizer", name, "--shapes", shapes]);
        Side::start(format!("PyTorch {name}"), &mut command)
    }

    /// memfit's.
    pub fn memfit_optimizer(&self, name: &str, shapes: &str) -> Result<Side> {
        let mut command = Command::new(&self.binary);
        command.args(["update", name, shapes]);
        Side::start(format!("memfit {name}"), &mut command)
    }

    /// The rate that an optimizer is tuned to, and the validation loss of each of so many seeds
    /// after training the small model.
    pub fn losses(&self, name: &str, seeds: usize, steps: usize) -> Result<(f64, Vec<f64>)> {
        let words = ["losses", name, &seeds.to_string(), &steps.to_string()];
        let text = output(Command::new(&self.binary).args(words))?;
        let mut numbers = text.split_whitespace().map(|word| word.parse().unwrap_or(f64::NAN));
        Ok((numbers.next().unwrap_or(f64::NAN), numbers.collect()))
    }

    /// What a bench prints when it measures.
    pub fn bench(&self, name: &str) -> Result<String> {
        output(Command::new(self.built(name)?).current_dir(&self.root).arg("--bench"))
    }

    /// The program of a bench.
    pub fn built(&self, name: &str) -> Result<PathBuf> {
        build_bench(&self.root, name)
    }

    /// A script of `benches/peers`; what it is to do is still to be said.
    pub fn script(&self, name: &str) -> Command {
        let mut command = Command::new(&self.python);
        command.arg(self.root.join("benches/peers").join(name));
        command
    }

    /// Where what is built lies.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// A new folder for what both sides read; it goes away with the set-up.
    pub fn folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.scratch.path().join(name);
        std::fs::create_dir_all(&folder).map_err(|error| Problem::io("create", &folder, &error))?;
        Ok(folder)
    }

    /// Says what to do before anything was measured in vain: `what` needs a package that has a module.
    pub fn need(&self, what: &str, package: &str, module: &str) -> Result<()> {
        let python = &self.python;
        let import = format!("import {module}");
        let found = Command::new(python).args(["-c", &import]).stderr(Stdio::null()).status();
        match found {
            Ok(status) if status.success() => Ok(()),
            _ => Err(Problem::new(format!(
                "{what} needs {package}: run `{} -m pip install {package}`, or name something else with \
                 --only and --strategy",
                python.display()
            ))),
        }
    }
}

/// The files of one model, and how to start a side on them.
#[derive(Debug)]
pub struct Work<'a> {
    setup: &'a Setup,
    folder: PathBuf,
    model: &'static str,
    size: Vec<String>,
}

impl Work<'_> {
    pub fn pytorch(&self, strategy: &str) -> Result<Side> {
        let mut command = self.setup.script("peer.py");
        command.arg("--counter").arg(&self.setup.counter).arg("--folder").arg(&self.folder);
        command.args(["--strategy", strategy]).args(&self.size);
        Side::start(format!("PyTorch {strategy}"), &mut command)
    }

    pub fn memfit(&self, strategy: &str) -> Result<Side> {
        let mut command = Command::new(&self.setup.binary);
        command.arg("serve").arg(&self.folder).args([self.model, strategy]);
        Side::start(format!("memfit {strategy}"), &mut command)
    }
}

/// memfit's own allocator, built against the libtorch that Python loads.
fn build_counter(root: &Path, torch: &Path, counter: &Path) -> Result<()> {
    let compiler = env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let shim = root.join("src/ffi/shim");
    let library = torch.join("lib");
    let mut command = Command::new(compiler);
    command.args(["-std=c++17", "-O2", "-fPIC", "-shared", "-DNDEBUG", "-DMEMFIT_ALLOCATOR_ALONE"]);
    command.arg("-isystem").arg(torch.join("include")).arg("-I").arg(&shim);
    command.arg(shim.join("allocator.cpp")).arg("-L").arg(&library).arg("-lc10");
    command.arg(format!("-Wl,-rpath,{}", library.display())).arg("-o").arg(counter);
    output(&mut command).map(drop)
}

fn build_bench(root: &Path, name: &str) -> Result<PathBuf> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let words = ["bench", "--bench", name, "--no-run", "--message-format=json-render-diagnostics"];
    let messages = output(Command::new(cargo).current_dir(root).args(words))?;
    let found = messages.lines().rev().find_map(|message| executable(message, name));
    found.ok_or_else(|| Problem::new(format!("cargo did not say where it built the bench `{name}`")))
}

/// The path in cargo's message about a bench.
fn executable(message: &str, name: &str) -> Option<PathBuf> {
    let (_, rest) = message.split_once("\"executable\":\"")?;
    let (path, _) = rest.split_once('"')?;
    let named = message.contains(&format!("\"name\":\"{name}\""));
    named.then(|| PathBuf::from(path.replace("\\\\", "\\")))
}

/// What a command prints; its errors go to ours.
pub fn output(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let ran = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let ran = ran.map_err(|error| Problem::new(format!("{program} does not start: {error}")))?;
    if !ran.status.success() {
        return Err(Problem::new(format!("{program} ended with {}; what it wrote is above", ran.status)));
    }
    Ok(String::from_utf8_lossy(&ran.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_binary_is_found_in_cargos_messages() {
        let message = r#"{"target":{"name":"peers"},"executable":"/a/peers-1","fresh":true}"#;
        assert_eq!(executable(message, "peers"), Some(PathBuf::from("/a/peers-1")));
        assert_eq!(executable(r#"{"target":{"name":"peers"},"executable":null}"#, "peers"), None);
        assert_eq!(executable(r#"{"target":{"name":"x"},"executable":"/a/x"}"#, "peers"), None);
    }
}
