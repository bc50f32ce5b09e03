use super::*;
use crate::libtorch::pip::PYTHON;
use crate::scratch::Scratch;
use std::cell::Cell;
use std::process::Command;

const PACKAGES: &[Package] = &[
    Package {
        name: "fake",
        version: "1.0",
        bytes: 1_000,
        parts: &[("fake/include/", "include/"), ("fake/lib/libfake.so", "lib/libfake.so")],
    },
    Package { name: "small", version: "2.0", bytes: 10, parts: &[("small/s.so", "lib/s.so")] },
];

const MAKE_WHEEL: &str = r#"
import base64, hashlib, sys, zipfile
path, name, *pairs = sys.argv[1:]
with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
    record = ""
    for folder in ["fake/", "fake/include/", "fake/include/deep/"]:
        archive.writestr(folder, "")
    for file, text in zip(pairs[::2], pairs[1::2]):
        archive.writestr(file, text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
        record += f"{file},sha256={digest.rstrip(b'=').decode()},{len(text)}\n"
    archive.writestr(f"{name}-1.dist-info/RECORD", record)
"#;

/// A tiny wheel per package, made when asked for and counted.
struct Wheels {
    scratch: Scratch,
    made: Cell<u32>,
}

impl Wheels {
    fn new() -> Self {
        Self { scratch: Scratch::new("tree"), made: Cell::new(0) }
    }

    fn tree(&self) -> Tree {
        Tree::at(&self.scratch.path().join("tree"))
    }

    fn path(&self, package: &Package) -> PathBuf {
        self.scratch.path().join(format!("{}.whl", package.name))
    }

    fn wheel(&self, package: &Package) -> Result<PathBuf> {
        let path = self.path(package);
        if !path.exists() {
            self.made.set(self.made.get() + 1);
            let library = "so".repeat(400);
            let files: &[&str] = match package.name {
                "fake" => &[
                    "fake/include/a.h",
                    "a",
                    "fake/include/deep/b.h",
                    "bb",
                    "fake/x.py",
                    "no",
                    "fake/lib/libfake.so",
                    &library,
                ],
                _ => &["small/s.so", "s"],
            };
            let mut command = Command::new(PYTHON);
            command.args(["-c", MAKE_WHEEL]).arg(&path).arg(package.name).args(files);
            assert!(command.status().unwrap().success());
        }
        Ok(path)
    }

    fn install(&self) -> Result<()> {
        self.tree().install("1.0", PACKAGES, |package| self.wheel(package))
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.scratch.path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

#[test]
fn a_tree_is_made_of_the_named_parts_only() {
    let wheels = Wheels::new();
    assert_eq!(wheels.tree().state("1.0"), State::Missing);
    wheels.install().unwrap();
    assert_eq!(wheels.tree().state("1.0"), State::Whole);
    let tree = wheels.tree().path;
    assert_eq!(fs::read_to_string(tree.join("include/deep/b.h")).unwrap(), "bb");
    assert_eq!(fs::metadata(tree.join("lib/libfake.so")).unwrap().len(), 800);
    assert_eq!(fs::read_to_string(tree.join("build-version")).unwrap(), "1.0");
    assert!(!tree.join("x.py").exists());
    assert_eq!(wheels.names(), ["fake.whl", "small.whl", "tree"]);
}

#[test]
fn a_lost_a_shortened_and_an_outdated_tree_are_not_whole() {
    let wheels = Wheels::new();
    wheels.install().unwrap();
    let tree = wheels.tree();
    assert!(matches!(tree.state("1.1"), State::Damaged(_)));
    fs::write(tree.path.join("lib/libfake.so"), "so").unwrap();
    assert!(matches!(tree.state("1.0"), State::Damaged(_)));
    wheels.install().unwrap();
    assert_eq!(tree.state("1.0"), State::Whole);
    fs::remove_file(tree.path.join("include/a.h")).unwrap();
    assert!(matches!(tree.state("1.0"), State::Damaged(_)));
    assert_eq!(wheels.made.get(), 2);
}

#[test]
fn what_an_interrupted_run_left_is_never_taken_for_whole() {
    let wheels = Wheels::new();
    let left = wheels.scratch.path().join("tree.partial-1/lib");
    fs::create_dir_all(&left).unwrap();
    fs::write(left.join("libfake.so"), "half").unwrap();
    assert_eq!(wheels.tree().state("1.0"), State::Missing);
    wheels.install().unwrap();
    assert_eq!(wheels.names(), ["fake.whl", "small.whl", "tree"]);
}

#[test]
fn a_failed_install_leaves_the_old_tree_and_no_rest() {
    let wheels = Wheels::new();
    wheels.install().unwrap();
    fs::write(wheels.tree().path.join("include/a.h"), "changed").unwrap();
    let fails = |package: &Package| match package.name {
        "fake" => wheels.wheel(package),
        _ => Err(Problem::new("no network")),
    };
    assert!(wheels.tree().install("1.0", PACKAGES, fails).is_err());
    assert_eq!(wheels.names(), ["fake.whl", "small.whl", "tree"]);
    assert_eq!(fs::read_to_string(wheels.tree().path.join("include/a.h")).unwrap(), "changed");
}

#[test]
fn every_damage_to_a_wheel_is_found_and_the_wheel_fetched_again() {
    let truncate: fn(&mut Vec<u8>) = |bytes| bytes.truncate(bytes.len() / 2);
    let empty: fn(&mut Vec<u8>) = |bytes| bytes.clear();
    // The packed library starts after the small files: its bytes, not its name, are changed.
    let flip: fn(&mut Vec<u8>) = |bytes| {
        let name = b"fake/lib/libfake.so";
        let at = bytes.windows(name.len()).position(|window| window == name).unwrap();
        bytes[at + name.len() + 3] ^= 0x55;
    };
    for damage in [truncate, empty, flip] {
        let wheels = Wheels::new();
        let path = wheels.wheel(&PACKAGES[0]).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        damage(&mut bytes);
        fs::write(&path, bytes).unwrap();
        wheels.install().unwrap();
        assert_eq!(wheels.tree().state("1.0"), State::Whole);
        assert_eq!(wheels.made.get(), 3, "the two packages and the damaged one once more");
    }
}

#[test]
fn a_wheel_that_stays_damaged_is_a_sentence() {
    let wheels = Wheels::new();
    let broken = |package: &Package| {
        let path = wheels.path(package);
        fs::write(&path, "not a wheel").unwrap();
        Ok(path)
    };
    let problem = wheels.tree().install("1.0", PACKAGES, broken).unwrap_err().to_string();
    assert!(problem.contains("damaged even when fetched anew"), "{problem}");
    assert_eq!(wheels.tree().state("1.0"), State::Missing);
}

#[test]
fn a_folder_without_a_manifest_is_somebody_elses() {
    let wheels = Wheels::new();
    fs::create_dir_all(wheels.tree().path.join("lib")).unwrap();
    assert_eq!(wheels.tree().state("1.0"), State::Foreign);
}
