//! The steps that a change has to pass. All share one target folder, profile and set of
//! features, so that torch-sys' C++ is compiled once.

mod consumer;
mod examples;
mod fitted;
mod pictures;
mod resumed;

use std::fs;
use std::path::{Path, PathBuf};

use crate::invocation::Invocation;
use crate::libtorch::Libtorch;
use crate::manifest::Manifest;
use crate::problem::Result;
use crate::repo::Repo;

pub struct Step {
    pub name: &'static str,
    pub summary: &'static str,
    pub run: fn(&Context) -> Result<()>,
}

pub const STEPS: &[Step] = &[
    Step { name: "fmt", summary: "the sources are formatted", run: fmt },
    Step { name: "clippy", summary: "no lint warns, in any target", run: clippy },
    Step { name: "doc-only", summary: "it checks without a libtorch", run: doc_only },
    Step { name: "rustdoc", summary: "the documentation builds without a warning", run: rustdoc },
    Step { name: "tests", summary: "the tests pass", run: tests },
    Step { name: "doctests", summary: "the documentation's examples pass", run: doctests },
    Step { name: "examples", summary: "every example runs, small", run: examples::run },
    Step { name: "benches", summary: "every bench runs once", run: benches },
    Step { name: "consumer", summary: "a crate elsewhere uses memfit", run: consumer::run },
];

/// What the steps have in common.
pub struct Context {
    repo: Repo,
    libtorch: Libtorch,
    manifest: Manifest,
}

impl Context {
    pub fn new(repo: &Repo, libtorch: Libtorch) -> Result<Self> {
        let manifest = Manifest::read(&repo.manifest())?;
        Ok(Self { repo: repo.clone(), libtorch, manifest })
    }

    fn cargo(&self, args: &[&str]) -> Invocation {
        Invocation::cargo(self.repo.root()).args(args)
    }

    /// With every feature that can be on together.
    fn cargo_with_features(&self, args: &[&str]) -> Invocation {
        let features: Vec<String> =
            self.manifest.features().iter().map(|name| format!("memfit/{name}")).collect();
        let cargo = self.cargo(args);
        if features.is_empty() { cargo } else { cargo.arg("--features").arg(features.join(",")) }
    }

    /// The `.rs` files and the folders with a `main.rs` in a folder of cargo targets, by name.
    fn targets(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.repo.root().join(folder)).into_iter().flatten().flatten();
        let is_target = |path: &PathBuf| {
            path.extension().is_some_and(|end| end == "rs") || path.join("main.rs").is_file()
        };
        let paths = entries.map(|entry| entry.path()).filter(is_target);
        let mut names: Vec<String> =
            paths.filter_map(|path| Some(path.file_stem()?.to_string_lossy().into_owned())).collect();
        names.sort();
        names
    }
}

fn fmt(context: &Context) -> Result<()> {
    context.cargo(&["fmt", "--all", "--check"]).run()
}

/// Warnings are denied for our crates only: as RUSTFLAGS it would build tch again.
fn clippy(context: &Context) -> Result<()> {
    let cargo = context.cargo_with_features(&["clippy", "--workspace", "--all-targets"]);
    cargo.args(["--", "-D", "warnings"]).run()
}

fn doc_only(context: &Context) -> Result<()> {
    let nowhere = context.repo.target().join("no-libtorch-here");
    let cargo = context.cargo(&["check", "--features", "doc-only"]);
    cargo.env("LIBTORCH", nowhere).env_remove("LIBTORCH_USE_PYTORCH").run()
}

fn rustdoc(context: &Context) -> Result<()> {
    context.cargo_with_features(&["doc", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings").run()
}

fn tests(context: &Context) -> Result<()> {
    let cargo = context.cargo_with_features(&["test", "--workspace", "--lib", "--bins", "--tests"]);
    match python(&context.repo.root().join(".venv/bin/python")) {
        Some(python) => cargo.env("MEMFIT_PYTHON", python).run(),
        None => cargo.run(),
    }
}

/// The repository's own Python, where none is named and it has what the recipe for PyTorch needs.
fn python(python: &Path) -> Option<PathBuf> {
    if std::env::var_os("MEMFIT_PYTHON").is_some() || !python.is_file() {
        return None;
    }
    let mut probe = std::process::Command::new(python);
    // It finds its own libtorch.
    let probe = probe.args(["-c", "import torch, safetensors"]).env_remove("LD_LIBRARY_PATH").output();
    match probe {
        Ok(found) if found.status.success() => Some(python.to_owned()),
        _ => {
            println!("{} has no torch and safetensors: the recipe is not tested", python.display());
            None
        }
    }
}

fn doctests(context: &Context) -> Result<()> {
    context.cargo_with_features(&["test", "--doc"]).run()
}

fn benches(context: &Context) -> Result<()> {
    let names = context.targets("benches");
    if names.is_empty() {
        println!("there are no benches");
        return Ok(());
    }
    let chosen = names.iter().flat_map(|name| ["--bench", name]);
    context.cargo_with_features(&["test"]).args(chosen).run()
}
