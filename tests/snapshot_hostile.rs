//! Files that are damaged or lie: a typed error, and the running training untouched.

mod support;
#[path = "support/training.rs"]
mod training;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use memfit::optim::{AdamW, AdamWConfig};
use memfit::snapshot::{Extras, Weights};
use memfit::tch::{Device, Tensor, nn};
use memfit::{Error, Snapshot, Snapshots, Stack, State, Value};
use proptest::prelude::*;
use serde_json::{Value as Json, json};
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
        data.insert("seen", Value::Tensor(Tensor::from_slice(&[true, false, true])));
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

/// A snapshot taken apart, to be put together again with every checksum right.
#[derive(Clone)]
struct Forged {
    manifest: Json,
    headers: Vec<Json>,
    data: Vec<Vec<u8>>,
}

impl Forged {
    fn of(folder: &Path) -> Self {
        let text = fs::read_to_string(folder.join(FILES[0])).unwrap();
        let manifest = serde_json::from_str(&text).unwrap();
        let (headers, data) = FILES[1..].iter().map(|name| Self::parts(&folder.join(name))).unzip();
        Self { manifest, headers, data }
    }

    fn parts(file: &Path) -> (Json, Vec<u8>) {
        let bytes = fs::read(file).unwrap();
        let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        (serde_json::from_slice(&bytes[8..end]).unwrap(), bytes[end..].to_vec())
    }

    fn write(mut self, folder: &Path) {
        for (index, name) in FILES[1..].iter().enumerate() {
            let mut header = serde_json::to_vec(&self.headers[index]).unwrap();
            header.resize(header.len().next_multiple_of(8), b' ');
            let length = (header.len() as u64).to_le_bytes();
            let bytes = [&length[..], &header, &self.data[index]].concat();
            self.manifest["files"][name] = json!({ "bytes": bytes.len(), "crc32": crc32fast::hash(&bytes) });
            fs::write(folder.join(name), bytes).unwrap();
        }
        for (_, tensor) in self.manifest["tensors"].as_object_mut().unwrap() {
            let file = FILES[1..].iter().position(|name| tensor["file"] == *name).unwrap();
            let offsets = &self.headers[file][tensor["key"].as_str().unwrap()]["data_offsets"];
            let at = |index: usize| offsets[index].as_u64().unwrap_or(u64::MAX) as usize;
            if let Some(bytes) = self.data[file].get(at(0)..at(1)) {
                tensor["crc32"] = json!(crc32fast::hash(bytes));
            }
        }
        self.manifest.as_object_mut().unwrap().remove("crc32");
        let json = serde_json::to_string(&self.manifest).unwrap();
        fs::write(folder.join(FILES[0]), sealed(&json[1..])).unwrap();
    }

    /// A tensor's entry in the manifest, its place in the file's header, and its data.
    fn tensor(&mut self, name: &str) -> (&mut Json, &mut Json, &mut [u8]) {
        let entry = &mut self.manifest["tensors"][name];
        let file = FILES[1..].iter().position(|file| entry["file"] == *file).unwrap();
        let place = &mut self.headers[file][entry["key"].as_str().unwrap()];
        let at = |index: usize| place["data_offsets"][index].as_u64().unwrap() as usize;
        let bytes = at(0)..at(1);
        (entry, place, &mut self.data[file][bytes])
    }

    fn names(&self, of: &str) -> Vec<String> {
        self.manifest[of].as_object().unwrap().keys().cloned().collect()
    }
}

/// Checksums that are right over contents that are wrong.
#[derive(Clone, Debug)]
enum Lie {
    Dtype(&'static str),
    Shape(Vec<i64>),
    Offsets(u64, u64),
    Byte(prop::sample::Index, u8),
    Scalar(i64),
}

fn lies() -> impl Strategy<Value = (prop::sample::Index, Lie)> {
    let dtypes = prop::sample::select(vec!["BOOL", "U8", "I32", "F32", "F64", "BF16", "I64", "F8_E4M3"]);
    let number = || prop_oneof![Just(0), Just(-1), Just(i64::MAX), Just(i64::MIN), -9i64..99];
    let lie = prop_oneof![
        dtypes.prop_map(Lie::Dtype),
        prop::collection::vec(prop_oneof![0i64..50, number()], 0..4).prop_map(Lie::Shape),
        (0u64..400, 0u64..400).prop_map(|(from, to)| Lie::Offsets(from, to)),
        (any::<prop::sample::Index>(), any::<u8>()).prop_map(|(at, byte)| Lie::Byte(at, byte)),
        number().prop_map(Lie::Scalar),
    ];
    (any::<prop::sample::Index>(), lie)
}

fn tell(forged: &mut Forged, at: prop::sample::Index, lie: &Lie) {
    if let Lie::Scalar(number) = lie {
        let names = forged.names("scalars");
        // One in four is about the window.
        let name = if at.index(4) == 0 { "window.done" } else { &names[at.index(names.len())] };
        forged.manifest["scalars"][name] = json!({ "int": number });
        return;
    }
    let names = forged.names("tensors");
    let (entry, place, bytes) = forged.tensor(&names[at.index(names.len())]);
    match lie {
        Lie::Dtype(dtype) => (entry["dtype"], place["dtype"]) = (json!(dtype), json!(dtype)),
        Lie::Shape(shape) => (entry["shape"], place["shape"]) = (json!(shape), json!(shape)),
        Lie::Offsets(from, to) => place["data_offsets"] = json!([from, to]),
        Lie::Byte(at, byte) if !bytes.is_empty() => bytes[at.index(bytes.len())] = *byte,
        Lie::Byte(..) | Lie::Scalar(_) => {}
    }
}

/// Sealed again over wrong contents it may be taken or refused; nobody panics, and a refusal
/// has touched nothing and leaves the stack sound.
#[test]
fn contents_that_lie_under_right_checksums_touch_nothing_or_load() {
    let _guard = serial();
    let mut scene = Scene::new();
    let good = Forged::of(&scene.path);
    let mut runner = proptest::test_runner::TestRunner::new(support::random::cases(300));
    let cell = std::cell::RefCell::new(&mut scene);
    runner
        .run(&prop::collection::vec(lies(), 1..3), |lies| {
            let mut scene = cell.borrow_mut();
            let mut forged = good.clone();
            for (at, lie) in &lies {
                if matches!(lie, Lie::Offsets(..)) || forged.data == good.data {
                    tell(&mut forged, *at, lie);
                }
                if matches!(lie, Lie::Offsets(..)) {
                    // The next lie would look for its bytes there.
                    break;
                }
            }
            forged.write(&scene.path);
            let opened = Snapshot::open(&scene.path);
            match opened.and_then(|snapshot| snapshot.resume(&mut scene.run.stack)) {
                Ok(_) => scene.before = scene.run.stack.state().unwrap(),
                Err(Error::Poisoned { source }) => panic!("{lies:?}: poisoned by {source}"),
                Err(_) => {
                    let after = scene.run.stack.state().unwrap();
                    assert_eq!(difference_of(&after, &scene.before), None, "{lies:?}");
                }
            }
            Ok(())
        })
        .unwrap();
    good.write(&scene.path);
    scene.loads();
}

#[test]
fn a_truth_value_that_is_none_is_found_before_anything_is_written() {
    let _guard = serial();
    let dir = tempfile::tempdir().unwrap();
    let vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().zeros("w", &[2]);
    let _ = vs.root().add("flag", Tensor::from_slice(&[true, false]), false);
    let optimizer = AdamW::new(&vs, AdamWConfig::default()).unwrap();
    let mut stack = Stack::of(&vs, optimizer).build().unwrap();
    let saved = Snapshots::in_folder(dir.path()).unwrap().save(&mut stack, &Extras::new()).unwrap();
    let mut forged = Forged::of(&saved.path);
    forged.tensor("buffers.flag").2[1] = 7;
    forged.write(&saved.path);
    let _ = memfit::tch::no_grad(|| w.shallow_clone().fill_(5.0));
    let before = stack.state().unwrap();
    let refused = Snapshot::open(&saved.path).unwrap().resume(&mut stack).unwrap_err();
    let Error::Snapshot { problems, .. } = refused else { panic!("{refused}") };
    has(&problems, "`flag` is neither true nor false");
    assert_eq!(difference_of(&stack.state().unwrap(), &before), None);
    let file = Weights::open(saved.path.join(FILES[1])).unwrap();
    let Err(Error::State { problems }) = file.load_into(&vs) else { panic!("loaded") };
    has(&problems, "`flag` is neither true nor false");
    assert_eq!(w.double_value(&[0]), 5.0);
}

#[test]
fn names_that_contradict_each_other_are_refused() {
    let _guard = serial();
    let mut scene = Scene::new();
    let good = Forged::of(&scene.path);
    let mut refused = |what: &str, part: &str, edit: &dyn Fn(&mut Json)| {
        let mut forged = good.clone();
        edit(&mut forged.manifest);
        forged.write(&scene.path);
        has(&scene.refused(what), part);
    };
    refused("an entry twice", "twice", &|manifest| manifest["entries"] = json!(["data", "data"]));
    refused("an entry unlisted", "belongs to no entry", &|manifest| manifest["entries"] = json!([]));
    refused("another position", "`position.steps` is not 77", &|manifest| {
        manifest["position"]["steps"] = json!(77);
    });
    let extra = scene.file("extra.safetensors");
    fs::copy(scene.file(FILES[1]), &extra).unwrap();
    let mut refused = |what: &str, edit: &dyn Fn(&mut Json)| {
        let mut forged = good.clone();
        edit(&mut forged.manifest);
        forged.write(&scene.path);
        has(&scene.refused(what), "no name of a file");
    };
    let entry = |manifest: &Json| manifest["files"][FILES[1]].clone();
    refused("a file more", &|manifest| manifest["files"]["extra.safetensors"] = entry(manifest));
    refused("a script unlisted", &|manifest| manifest["scripts"] = json!({}));
    good.clone().write(&scene.path);
    scene.loads();
}

#[test]
fn a_sequence_without_a_successor_is_an_error() {
    let _guard = serial();
    let mut scene = Scene::new();
    let good = Forged::of(&scene.path);
    let mut forged = good.clone();
    forged.manifest["sequence"] = json!(u64::MAX);
    forged.write(&scene.path);
    let mut snapshots = Snapshots::in_folder(scene.path.parent().unwrap()).unwrap();
    let refused = snapshots.save(&mut scene.run.stack, &Extras::new()).unwrap_err();
    assert!(matches!(&refused, Error::Snapshot { path, .. } if *path == scene.path), "{refused}");
    good.write(&scene.path);
    snapshots.save(&mut scene.run.stack, &Extras::new()).unwrap();
}

#[test]
fn what_could_not_be_read_is_not_written() {
    let _guard = serial();
    let mut scene = Scene::new();
    let folder = scene.path.parent().unwrap().to_owned();
    let mut snapshots = Snapshots::in_folder(&folder).unwrap();
    // Six letters each in JSON, beyond the 100 MiB that are read.
    let long = "\u{1}".repeat((100 << 20) / 6 + 1);
    let mut text = State::default();
    text.insert("text", Value::Text(long.clone()));
    let mut name = State::default();
    name.insert(long, Value::Tensor(Tensor::from(1.0)));
    for (what, entry) in [("manifest", text), ("header", name)] {
        let refused = snapshots.save(&mut scene.run.stack, &Extras::new().entry("long", entry)).unwrap_err();
        let Error::Unsupported { what: found, .. } = &refused else { panic!("{what}") };
        assert!(found.contains(what), "{found}");
        assert_eq!(snapshots.paths().unwrap(), [scene.path.clone()]);
    }
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 2, "the lock and the one that was there");
}

#[test]
fn leftovers_and_links_do_not_keep_a_folder_from_working() {
    let _guard = serial();
    let mut scene = Scene::new();
    let folder = scene.path.parent().unwrap().to_owned();
    // It is no folder, so it cannot be removed as one.
    fs::write(folder.join(".saving-1-0"), b"odd").unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let theirs = Snapshots::in_folder(elsewhere.path()).unwrap().save(&mut scene.run.stack, &Extras::new());
    let theirs = theirs.unwrap().path;
    symlink(&theirs, folder.join("step-999999999999")).unwrap();
    symlink(folder.join("nowhere"), folder.join("step-999999999998")).unwrap();
    let mut snapshots = Snapshots::in_folder(&folder).unwrap().keep_last(1);
    assert_eq!(snapshots.paths().unwrap(), [scene.path.clone()]);
    let saved = snapshots.save(&mut scene.run.stack, &Extras::new()).unwrap();
    assert_eq!(snapshots.latest().unwrap().unwrap().path(), saved.path);
    assert_eq!(snapshots.paths().unwrap(), [saved.path]);
    assert!(theirs.join(FILES[0]).is_file(), "a link's target is not ours to remove");
}

#[test]
fn snapshots_that_another_process_removes_are_skipped() {
    let _guard = serial();
    let mut scene = Scene::new();
    let folder = scene.path.parent().unwrap().to_owned();
    let reader = Snapshots::in_folder(&folder).unwrap();
    let done = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let told = done.clone();
    let reading = std::thread::spawn(move || {
        let mut opened = 0;
        while !told.load(std::sync::atomic::Ordering::Relaxed) {
            assert!(reader.latest().unwrap().is_some());
            assert!(reader.best().unwrap().is_none());
            assert!(!reader.paths().unwrap().is_empty());
            opened += 1;
        }
        opened
    });
    let mut saver = Snapshots::in_folder(&folder).unwrap().keep_last(1);
    for _ in 0..60 {
        saver.save(&mut scene.run.stack, &Extras::new()).unwrap();
    }
    done.store(true, std::sync::atomic::Ordering::Relaxed);
    assert!(reading.join().unwrap() > 0);
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
    let mut runner = proptest::test_runner::TestRunner::new(support::random::cases(200));
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

/// Writes a good manifest, one without its checksum and a good file of tensors into the folder that
/// MEMFIT_SEEDS names: what the fuzz target of `fuzz/` begins with, its first byte before each.
#[test]
#[ignore = "writes the fuzz target's first inputs"]
fn seeds_for_the_fuzz_target() {
    let _guard = serial();
    let folder = PathBuf::from(std::env::var_os("MEMFIT_SEEDS").unwrap());
    fs::create_dir_all(&folder).unwrap();
    let scene = Scene::new();
    let manifest = fs::read(scene.file("manifest.json")).unwrap();
    // The checksum stands alone in the first line.
    let body = manifest.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    let tensors = fs::read(scene.file("model.safetensors")).unwrap();
    for (choice, bytes) in [(0, &manifest[..]), (1, &manifest[body..]), (2, &tensors[..])] {
        fs::write(folder.join(format!("seed-{choice}")), [&[choice], bytes].concat()).unwrap();
    }
}
