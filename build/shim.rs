//! Compiles `src/ffi/shim/*.cpp` into one static library, each file only when something it
//! is made from has changed: libtorch's headers cost seconds per file.

use std::collections::hash_map::DefaultHasher;
use std::env;
use std::fs;
use std::hash::{Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};

const LIBRARY: &str = "memfit_shim";

/// One `.cpp` file, the object made from it, and the note that says from what it was made.
struct Unit {
    source: PathBuf,
    note: PathBuf,
    key: u64,
}

/// Builds the shim from the `.cpp` files in `folder` and prints the lines that link it.
/// Does nothing where the folder has none.
pub fn build(folder: &Path, includes: &[PathBuf], libtorch: &str, out: &Path) -> io::Result<()> {
    let sources = files_with(folder, &["cpp"])?;
    if sources.is_empty() {
        return Ok(());
    }
    let compiler = compiler(folder, includes);
    let objects = compile_changed(&compiler, &units(folder, sources, libtorch, &compiler, out)?)?;
    // `ar` only adds to an archive: an object whose source is gone would stay in an old one.
    let _ = fs::remove_file(out.join(format!("lib{LIBRARY}.a")));
    cc::Build::new()
        .cpp(true)
        .cargo_metadata(false)
        .objects(objects)
        .try_compile(LIBRARY)
        .map_err(io::Error::other)?;
    println!("cargo::rustc-link-search=native={}", out.display());
    // Whole: a linker takes an object from an archive only for a symbol that something asks
    // for, and nobody asks for an object that is there for its static initialiser.
    println!("cargo::rustc-link-lib=static:+whole-archive={LIBRARY}");
    let apple = env::var("CARGO_CFG_TARGET_VENDOR").is_ok_and(|vendor| vendor == "apple");
    println!("cargo::rustc-link-lib=dylib={}", if apple { "c++" } else { "stdc++" });
    Ok(())
}

/// The same flags in every profile. `NDEBUG` decides class layouts in libtorch's headers, so
/// it has to be as it was when libtorch was built; unoptimised hooks would distort every
/// measured time.
fn compiler(folder: &Path, includes: &[PathBuf]) -> cc::Build {
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .pic(true)
        .opt_level(2)
        .debug(false)
        .cargo_metadata(false)
        .warnings(true)
        .extra_warnings(true)
        // A root that sets errno keeps the optimizers' loops from being made of vectors.
        .flag_if_supported("-fno-math-errno")
        .define("NDEBUG", None)
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        .include(folder);
    for include in includes {
        // As system folders, so that only our own warnings show.
        build.flag(format!("-isystem{}", include.display()));
    }
    build
}

/// Pairs each source with the key of all that its object depends on. Headers of the shim are
/// counted in whole, so that no dependency is ever missed.
fn units(
    folder: &Path,
    sources: Vec<PathBuf>,
    libtorch: &str,
    compiler: &cc::Build,
    out: &Path,
) -> io::Result<Vec<Unit>> {
    let mut shared = DefaultHasher::new();
    libtorch.hash(&mut shared);
    format!("{:?}", compiler.get_compiler().to_command()).hash(&mut shared);
    for header in files_with(folder, &["h", "hpp"])? {
        header.hash(&mut shared);
        fs::read(&header)?.hash(&mut shared);
    }
    sources
        .into_iter()
        .map(|source| {
            let mut hasher = shared.clone();
            fs::read(&source)?.hash(&mut hasher);
            let stem = source.file_stem().unwrap_or_default().to_string_lossy();
            Ok(Unit { note: out.join(format!("{stem}.made")), key: hasher.finish(), source })
        })
        .collect()
}

/// Compiles the units whose note does not match, together so that they run in parallel, and
/// returns the objects of all.
fn compile_changed(compiler: &cc::Build, units: &[Unit]) -> io::Result<Vec<PathBuf>> {
    let stale: Vec<&Unit> = units.iter().filter(|unit| made(unit).is_none()).collect();
    if !stale.is_empty() {
        let mut build = compiler.clone();
        build.files(stale.iter().map(|unit| &unit.source));
        let objects = build.try_compile_intermediates().map_err(io::Error::other)?;
        for (unit, object) in stale.iter().zip(objects) {
            fs::write(&unit.note, format!("{}\n{}", unit.key, object.display()))?;
        }
    }
    units
        .iter()
        .map(|unit| made(unit).ok_or_else(|| io::Error::other("an object file has vanished")))
        .collect()
}

/// The object of a unit, where it exists and was made from what is there now.
fn made(unit: &Unit) -> Option<PathBuf> {
    let note = fs::read_to_string(&unit.note).ok()?;
    let (key, object) = note.split_once('\n')?;
    let object = PathBuf::from(object);
    (key == unit.key.to_string() && object.is_file()).then_some(object)
}

fn files_with(folder: &Path, extensions: &[&str]) -> io::Result<Vec<PathBuf>> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let mut files: Vec<PathBuf> =
        fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<_>>()?;
    files.retain(|path| {
        path.extension().is_some_and(|found| extensions.iter().any(|wanted| found == *wanted))
    });
    files.sort();
    Ok(files)
}
