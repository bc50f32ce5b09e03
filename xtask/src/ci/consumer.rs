//! A user's crate: what the README tells to write and nothing else, in a folder elsewhere.

use std::fs;
use std::path::Path;

use super::Context;
use crate::invocation::Invocation;
use crate::problem::{Problem, Result};
use crate::scratch::Scratch;

const MANIFEST: &str = include_str!("../../consumer/Cargo.toml.in");
const BUILD: &str = include_str!("../../consumer/build.rs");
const MAIN: &str = include_str!("../../consumer/main.rs");
const NAME: &str = "memfit-consumer";

pub fn run(context: &Context) -> Result<()> {
    let scratch = Scratch::try_new("consumer")?;
    let folder = scratch.path();
    write_crate(context, folder)?;
    let result = build_and_run(context, folder);
    if result.is_err() {
        eprintln!("the crate stays in {}", folder.display());
        scratch.keep();
    }
    result
}

fn write_crate(context: &Context, folder: &Path) -> Result<()> {
    let root = context.repo.root();
    let mut manifest = MANIFEST.replace("@MEMFIT@", &root.display().to_string());
    // Another profile would compile all dependencies again.
    for section in ["profile.dev", "profile.dev.build-override"] {
        manifest += &format!("\n[{section}]\n");
        manifest.extend(context.manifest.section(section).flat_map(|line| [line, "\n"]));
    }
    write(&folder.join("Cargo.toml"), &manifest)?;
    write(&folder.join("build.rs"), BUILD)?;
    write(&folder.join("src/main.rs"), MAIN)?;
    // So would other versions of them.
    let lock = root.join("Cargo.lock");
    let text = fs::read_to_string(&lock).map_err(|error| Problem::io("read", &lock, &error))?;
    write(&folder.join("Cargo.lock"), &text)
}

/// The binary runs on its own: cargo adds folders to the loader's path, a user's shell does not.
fn build_and_run(context: &Context, folder: &Path) -> Result<()> {
    let target = context.repo.target();
    let build = Invocation::cargo(folder).arg("build").env("CARGO_TARGET_DIR", &target);
    // Another target's binaries lie in a folder of their own.
    let build = build.env_remove("CARGO_BUILD_TARGET");
    match context.libtorch.variable() {
        Some(libtorch) => build.env("LIBTORCH", libtorch).run()?,
        None => build.run()?,
    }
    Invocation::new(target.join("debug").join(NAME), folder).env_remove("LD_LIBRARY_PATH").run()
}

fn write(path: &Path, text: &str) -> Result<()> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).map_err(|error| Problem::io("create", folder, &error))?;
    fs::write(path, text).map_err(|error| Problem::io("write", path, &error))
}
