//! Builds the C++ shim against the libtorch that torch-sys has found, and tells the linker
//! and our dependents where that libtorch is.

use std::env;
use std::path::{Path, PathBuf};

#[path = "build/shim.rs"]
mod shim;
#[path = "build/version.rs"]
mod version;

use version::Version;

const SHIM: &str = "src/ffi/shim";
const WANTED: &str = "2.13.0";

fn main() {
    println!("cargo::rerun-if-changed={}", nearest_existing(Path::new(SHIM)).display());
    if env::var_os("CARGO_FEATURE_DOC_ONLY").is_some() {
        return; // nothing links, so no libtorch is needed
    }
    if let Err(sentence) = build() {
        println!("cargo::error={sentence}");
    }
}

fn build() -> Result<(), String> {
    let lib = env::var_os("DEP_TCH_LIBTORCH_LIB").map(PathBuf::from).ok_or(format!(
        "torch-sys named no libtorch: memfit builds on Linux and macOS with the libtorch \
         {WANTED} that LIBTORCH or LIBTORCH_USE_PYTORCH=1 names"
    ))?;
    let include = include_folder(&lib);
    let version = supported_version(&include)?;

    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib.display());
    // A dependent's build script reads this as DEP_MEMFIT_LIBTORCH_LIB.
    println!("cargo::metadata=libtorch_lib={}", lib.display());

    let out = env::var_os("OUT_DIR").map(PathBuf::from).ok_or("cargo set no OUT_DIR")?;
    let includes = [include.clone(), include.join("torch/csrc/api/include")];
    shim::build(Path::new(SHIM), &includes, &version.to_string(), &out)
        .map_err(|error| format!("the C++ shim does not build: {error}"))
}

/// The headers beside the libraries, or those that LIBTORCH_INCLUDE names, as torch-sys reads it.
fn include_folder(lib: &Path) -> PathBuf {
    println!("cargo::rerun-if-env-changed=LIBTORCH_INCLUDE");
    match env::var_os("LIBTORCH_INCLUDE") {
        Some(root) if env::var_os("LIBTORCH_USE_PYTORCH").is_none() => PathBuf::from(root).join("include"),
        _ => lib.parent().unwrap_or(lib).join("include"),
    }
}

fn supported_version(include: &Path) -> Result<Version, String> {
    let version = Version::of_headers(include).ok_or(format!(
        "no libtorch headers under {}: point LIBTORCH at an unpacked libtorch {WANTED}",
        include.display()
    ))?;
    // The shim's sources also compile against 2.11, the libtorch of tch 0.24.
    if version.major == 2 && (version.minor == 13 || version.minor == 11) {
        return Ok(version);
    }
    Err(format!(
        "memfit wants libtorch {WANTED}, but {} is {version}: point LIBTORCH at a libtorch \
         {WANTED}, or set LIBTORCH_USE_PYTORCH=1 with PyTorch {WANTED} installed",
        include.display()
    ))
}

/// Cargo takes a path that does not exist for one that always changes.
fn nearest_existing(path: &Path) -> &Path {
    path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("build.rs"))
}
