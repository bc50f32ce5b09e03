//! Files that are damaged or lie: a typed error, and the running training untouched.

mod support;
#[path = "support/training.rs"]
mod training;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use memfit::snapshot::{Extras, Weights};
use memfit::tch::{Device, nn};
use memfit::{Error, Snapshot, Snapshots, State, Value};
use proptest::prelude::*;
use support::serial;
use training::{Kit, Run, difference_of};

const FILES: [&str; 4] =
    ["manifest.json", "model.safetensors", "optimizer.safetensors", "training.safetensors"];

/// A good snapshot, and a training that must not notice what is done to it.
struct Scene {
    _dir: tempfile::TempDir,
    path: PathBuf,
    run: Run,
    before: State,
}

impl Scene {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut run = Run::new(Kit::AdamW, 1);
        run.train(0, 4);
        let script = memfit::tch::CModule::load("tests/data/block.pt").unwrap();
        let mut data = State::default();
        data.insert("next", Value::Int(4));
        let extras = Extras::new().entry("data", data).script("block", &script);
        let saved = Snapshots::in_folder(dir.path()).unwrap().save(&mut run.stack, &extras).unwrap();
        run.train(4, 9);
        let before = run.stack.state().unwrap();
        Self { _dir: dir, path: saved.path, run, before }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Opening or resuming fails, and says so; nothing of the training has moved.
    fn refused(&mut self, what: &str) -> Vec<String> {
        let resumed = Snapshot::open(&self.path).and_then(|snapshot| snapshot.resume(&mut self.run.stack));
        let error = resumed.map(drop).expect_err(what);
        let after = self.run.stack.state().unwrap();
        assert_eq!(difference_of(&after, &self.before), None, "{what}");
        match error {
            Error::Snapshot { path, problems } => {
                assert!(path.starts_with(&self.path), "{path:?}");
                problems
            }
            Error::State { problems } => problems,
            other => panic!("{what}: {other}"),
        }
    }

    /// As [`Scene::refused`], for one edit of a file that is then put back.
    fn refused_with(&mut self, name: &str, what: &str, edit: impl FnOnce(Vec<u8>) -> Vec<u8>) -> Vec<String> {
        let path = self.file(name);
        let good = fs::read(&path).unwrap();
        fs::write(&path, edit(good.clone())).unwrap();
        let problems = self.refused(what);
        fs::write(&path, good).unwrap();
        problems
    }

    /// An edit of the manifest's JSON, with its checksum made right again.
    fn lie(&mut self, what: &str, from: &str, to: &str) -> Vec<String> {
        self.refused_with("manifest.json", what, |text| {
            let text = String::from_utf8(text).unwrap();
            let (_, body) = text.split_once(",\n").unwrap();
            assert!(body.contains(from), "{from} in {body}");
            sealed(&body.replacen(from, to, 1))
        })
    }

    fn loads(&mut self) {
        Snapshot::open(&self.path).unwrap().resume(&mut self.run.stack).unwrap();
    }
}

fn sealed(body: &str) -> Vec<u8> {
    format!("{{\"crc32\":\"{:08x}\",\n{body}", crc32fast::hash(body.as_bytes())).into_bytes()
}

fn has(problems: &[String], part: &str) {
    assert!(problems.iter().any(|problem| problem.contains(part)), "{part}: {problems:?}");
}

/// Case 57.
#[test]
fn truncated_or_flipped_anywhere_is_refused() {
    let _guard = serial();
    let mut scene = Scene::new();
    for name in FILES.into_iter().chain(["script-block.pt"]) {
        let length = fs::metadata(scene.file(name)).unwrap().len() as usize;
        for at in (0..length).step_by(length / 24 + 1).chain([length - 1]) {
            let what = format!("{name} cut at {at}");
            scene.refused_with(name, &what, |bytes| bytes[..at].to_vec());
            let what = format!("{name} flipped at {at}");
            scene.refused_with(name, &what, |mut bytes| {
                bytes[at] ^= 1 << (at % 8);
                bytes
            });
        }
        scene.refused_with(name, "longer", |bytes| [bytes, vec![0]].concat());
    }
    scene.loads();
}

#[test]
fn a_missing_file_is_named() {
    let _guard = serial();
    let mut scene = Scene::new();
    for name in FILES.into_iter().chain(["script-block.pt"]) {
        let away = scene.path.with_extension("away");
        fs::rename(scene.file(name), &away).unwrap();
        let wanted = if name == "manifest.json" { "no manifest" } else { name };
        has(&scene.refused(name), wanted);
        fs::rename(&away, scene.file(name)).unwrap();
    }
    scene.loads();
}

#[test]
fn links_and_devices_are_not_followed() {
    let _guard = serial();
    let mut scene = Scene::new();
    for name in FILES {
        let away = scene.path.with_extension("away");
        fs::rename(scene.file(name), &away).unwrap();
        symlink(&away, scene.file(name)).unwrap();
        has(&scene.refused(name), "link");
        fs::remove_file(scene.file(name)).unwrap();
        fs::create_dir(scene.file(name)).unwrap();
        has(&scene.refused(name), "regular");
        fs::remove_dir(scene.file(name)).unwrap();
        let made = std::process::Command::new("mkfifo").arg(scene.file(name)).status();
        if made.is_ok_and(|status| status.success()) {
            has(&scene.refused(name), "regular");
            fs::remove_file(scene.file(name)).unwrap();
        }
        fs::rename(&away, scene.file(name)).unwrap();
    }
    scene.loads();
}

#[test]
fn a_manifest_that_lies_is_refused() {
    let _guard = serial();
    let mut scene = Scene::new();
    has(&scene.lie("another format", "memfit snapshot", "somebody's"), "format");
    has(&scene.lie("a later version", "\"version\": 1", "\"version\": 2"), "version 2");
    has(&scene.lie("a length", "\"bytes\": ", "\"bytes\": 1"), "bytes");
    has(&scene.lie("a length beyond all", "\"bytes\": ", "\"bytes\": 99999999999999999"), "manifest");
    has(&scene.lie("a negative length", "\"bytes\": ", "\"bytes\": -"), "manifest");
    let other = "\"dtype\": \"F64\"";
    has(&scene.lie("a dtype", "\"dtype\": \"F32\"", other), "in the manifest");
    has(&scene.lie("an unknown dtype", "\"dtype\": \"F32\"", "\"dtype\": \"Q7\""), "in the manifest");
    let to = "\"shape\": [\n        18446744073709551615,\n";
    has(&scene.lie("a shape", "\"shape\": [\n", to), "too long");
    for name in ["../model.safetensors", "/etc/model.safetensors", "", ".", "a/b.safetensors", "passwd"] {
        let what = format!("a file called {name:?}");
        has(&scene.lie(&what, "\"model.safetensors\": {", &format!("\"{name}\": {{")), "no name of a file");
    }
    has(&scene.lie("a file of nowhere", "\"file\": \"model.", "\"file\": \"nowhere."), "is not in");
    has(&scene.lie("a key of nowhere", "\"key\": \"first.weight\"", "\"key\": \"nowhere\""), "is not in");
    has(&scene.lie("a key twice", "\"key\": \"first.weight\"", "\"key\": \"first.bias\""), "first.weight");
    has(&scene.lie("an unknown key", "\"sequence\"", "\"surprise\": 1,\n  \"sequence\""), "surprise");
    has(&scene.lie("a JSON key twice", "\"sequence\"", "\"sequence\": 1,\n  \"sequence\""), "sequence");
    let twice = "\"scalars\": {\"position.steps\": {\"int\": 7},";
    has(&scene.lie("a scalar twice", "\"scalars\": {", twice), "stands twice");
    has(&scene.lie("an unknown scalar", "\"position.steps\"", "\"position.leaps\""), "position.steps");
    let bits = "\"optimizer.group0.lr\": {\n      \"float\": 0.01";
    let start = "\"optimizer.group0.lr\": {\n";
    let _ = bits;
    has(
        &scene.lie("half a float", start, "\"x\": {\"float_bits\": \"7ff\"},\n \"optimizer.group0.lr\": {\n"),
        "`x`",
    );
    has(
        &scene.lie(
            "a negative count",
            "\"optimizer.steps\": {\n      \"int\": ",
            "\"optimizer.steps\": {\n      \"int\": -",
        ),
        "count",
    );
    has(
        &scene.lie("an alias of nothing", "\"tied_again\": \"tied\"", "\"tied_again\": \"nothing\""),
        "nothing",
    );
    has(
        &scene.lie("a script of nowhere", "\"block\": \"script-block.pt\"", "\"block\": \"gone.pt\""),
        "script",
    );
    scene.loads();
}

/// A file whose header is made by hand, with a manifest that agrees about length and sum.
#[test]
fn a_header_that_lies_is_refused() {
    let _guard = serial();
    let mut scene = Scene::new();
    let path = scene.file("model.safetensors");
    let (good, manifest) = (fs::read(&path).unwrap(), fs::read(scene.file("manifest.json")).unwrap());
    let size = u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let header = String::from_utf8(good[8..8 + size].to_vec()).unwrap();
    let data = &good[8 + size..];
    let framed = |header: &str| [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat();
    let entry = |at: &str| {
        let from = header.find(&format!("\"{at}\":")).unwrap();
        header[from..from + header[from..].find('}').unwrap() + 1].to_owned()
    };
    let first = entry("first.bias");
    let cases = [
        ("a length beyond the file", [&u64::MAX.to_le_bytes()[..], &good[8..]].concat()),
        ("no header", vec![1, 0]),
        ("no JSON", framed("{]")),
        ("a key twice", framed(&header.replacen(&first, &format!("{first},{first}"), 1))),
        (
            "overlapping tensors",
            framed(&header.replacen("\"data_offsets\":[24,", "\"data_offsets\":[20,", 1)),
        ),
        ("a huge shape", framed(&header.replacen("\"shape\":[6]", "\"shape\":[4611686018427387904,8]", 1))),
        ("another shape", framed(&header.replacen("\"shape\":[6,4]", "\"shape\":[4,6]", 1))),
        ("another dtype", framed(&header.replacen("\"F32\"", "\"I32\"", 1))),
        ("a tensor less", framed(&header.replacen("\"first.bias\"", "\"first.bios\"", 1))),
    ];
    for (what, bytes) in cases {
        assert_ne!(bytes, good, "{what}");
        fs::write(&path, &bytes).unwrap();
        let entry = |bytes: &[u8]| {
            format!("\"bytes\": {},\n      \"crc32\": {}", bytes.len(), crc32fast::hash(bytes))
        };
        let text = String::from_utf8(manifest.clone()).unwrap();
        let (_, body) = text.split_once(",\n").unwrap();
        assert!(body.contains(&entry(&good)), "{body}");
        fs::write(scene.file("manifest.json"), sealed(&body.replacen(&entry(&good), &entry(&bytes), 1)))
            .unwrap();
        scene.refused(what);
    }
    fs::write(&path, &good).unwrap();
    fs::write(scene.file("manifest.json"), manifest).unwrap();
    scene.loads();
}

#[test]
fn a_state_that_no_generator_can_have_is_refused() {
    let _guard = serial();
    let mut scene = Scene::new();
    let path = scene.file("training.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    // The generator's bytes, as the file itself tells; then every checksum is made right.
    let size = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = String::from_utf8(bytes[8..8 + size].to_vec()).unwrap();
    let at = header.find("\"rng.cpu\":{\"data_offsets\":[").expect(&header) + 27;
    let offsets = &header[at..at + header[at..].find(']').unwrap()];
    let (from, to) = offsets.split_once(',').unwrap();
    let range = 8 + size + from.parse::<usize>().unwrap()..8 + size + to.parse::<usize>().unwrap();
    let old = (crc32fast::hash(&bytes), crc32fast::hash(&bytes[range.clone()]));
    bytes[range.clone()].fill(0xff);
    let new = (crc32fast::hash(&bytes), crc32fast::hash(&bytes[range]));
    fs::write(&path, &bytes).unwrap();
    let text = fs::read_to_string(scene.file("manifest.json")).unwrap();
    let (_, body) = text.split_once(",\n").unwrap();
    let body =
        body.replace(&old.0.to_string(), &new.0.to_string()).replace(&old.1.to_string(), &new.1.to_string());
    fs::write(scene.file("manifest.json"), sealed(&body)).unwrap();
    let resumed = Snapshot::open(&scene.path).unwrap().resume(&mut scene.run.stack);
    assert!(matches!(resumed, Err(Error::Torch(_))), "{resumed:?}");
    assert_eq!(difference_of(&scene.run.stack.state().unwrap(), &scene.before), None);
}

#[test]
fn a_damaged_manifest_keeps_latest_from_guessing() {
    let _guard = serial();
    let scene = Scene::new();
    fs::write(scene.file("manifest.json"), b"{}").unwrap();
    let snapshots = Snapshots::in_folder(scene.path.parent().unwrap()).unwrap();
    assert!(matches!(snapshots.latest(), Err(Error::Snapshot { .. })));
    assert!(snapshots.paths().unwrap().is_empty());
    assert!(matches!(Snapshot::open("/nowhere/at/all"), Err(Error::Io { .. })));
}

/// Writes bytes as a file of weights and loads them: never a panic.
fn weights_survive(folder: &Path, bytes: &[u8]) {
    let file = folder.join("x.safetensors");
    fs::write(&file, bytes).unwrap();
    let vs = nn::VarStore::new(Device::Cpu);
    let _ = vs.root().zeros("w", &[2]);
    if let Ok(weights) = Weights::open(&file) {
        let _ = weights.casting().partial().load_into(&vs);
    }
}

fn edited(bytes: &[u8], edits: &[(prop::sample::Index, u8, Edit)]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for (at, value, edit) in edits {
        if bytes.is_empty() {
            break;
        }
        let at = at.index(bytes.len());
        match edit {
            Edit::Flip => bytes[at] ^= value.max(&1),
            Edit::Cut => bytes.truncate(at),
            Edit::Insert => bytes.insert(at, *value),
            Edit::Double => {
                let copy = bytes[at..(at + usize::from(*value)).min(bytes.len())].to_vec();
                bytes.splice(at..at, copy);
            }
            Edit::Text => {
                let words: [&[u8]; 8] =
                    [b"\"", b"}", b"{", b"99999999999999999999", b"-1", b"null", b"..", b"[1e400]"];
                let word = words[usize::from(*value) % words.len()];
                bytes.splice(at..at, word.iter().copied());
            }
        }
    }
    bytes
}

#[derive(Clone, Copy, Debug)]
enum Edit {
    Flip,
    Cut,
    Insert,
    Double,
    Text,
}

fn edits() -> impl Strategy<Value = Vec<(prop::sample::Index, u8, Edit)>> {
    let edit = prop_oneof![
        Just(Edit::Flip),
        Just(Edit::Cut),
        Just(Edit::Insert),
        Just(Edit::Double),
        Just(Edit::Text)
    ];
    prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), edit), 1..4)
}

/// Changed anywhere, a snapshot is refused; where the checksums are made right again it may be
/// read or refused, but nobody panics, and a refusal has touched nothing.
#[test]
fn edited_at_random_it_is_refused() {
    let _guard = serial();
    let mut scene = Scene::new();
    let good: Vec<Vec<u8>> = FILES.iter().map(|name| fs::read(scene.file(name)).unwrap()).collect();
    let mut config = ProptestConfig::with_cases(200);
    config.failure_persistence = None;
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let scene = std::cell::RefCell::new(&mut scene);
    runner
        .run(&(0..FILES.len(), edits(), any::<bool>()), |(which, edits, seal)| {
            let mut scene = scene.borrow_mut();
            let mut bytes = edited(&good[which], &edits);
            if bytes == good[which] {
                return Ok(());
            }
            let sealed_again = seal && which == 0;
            if sealed_again {
                let text = String::from_utf8_lossy(&bytes).into_owned();
                bytes = sealed(text.split_once(",\n").map_or("", |(_, body)| body));
            }
            fs::write(scene.file(FILES[which]), &bytes).unwrap();
            if sealed_again {
                let opened = Snapshot::open(&scene.path);
                if opened.and_then(|snapshot| snapshot.resume(&mut scene.run.stack)).is_ok() {
                    scene.before = scene.run.stack.state().unwrap();
                }
                let after = scene.run.stack.state().unwrap();
                assert_eq!(difference_of(&after, &scene.before), None);
            } else {
                scene.refused(FILES[which]);
            }
            if which > 0 {
                weights_survive(scene.path.parent().unwrap(), &bytes);
            }
            fs::write(scene.file(FILES[which]), &good[which]).unwrap();
            Ok(())
        })
        .unwrap();
}
