//! Feeds bytes to everything that reads a snapshot. The first byte chooses: a manifest as it
//! is, one whose checksum is made right, or a file of tensors.
#![no_main]

use std::fs;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use memfit::Snapshot;
use memfit::snapshot::Weights;
use memfit::tch::{Device, nn};

static FOLDER: LazyLock<tempfile::TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder"));

fuzz_target!(|data: &[u8]| {
    let Some((choice, bytes)) = data.split_first() else { return };
    let folder = FOLDER.path();
    if choice % 3 == 2 {
        let file = folder.join("model.safetensors");
        fs::write(&file, bytes).expect("room");
        let vs = nn::VarStore::new(Device::Cpu);
        let _ = vs.root().zeros("w", &[2]);
        if let Ok(weights) = Weights::open(&file) {
            let _ = weights.casting().partial().load_into(&vs);
        }
        return;
    }
    let manifest = if choice % 3 == 1 {
        let head = format!("{{\"crc32\":\"{:08x}\",\n", crc32fast::hash(bytes));
        [head.as_bytes(), bytes].concat()
    } else {
        bytes.to_vec()
    };
    fs::write(folder.join("manifest.json"), manifest).expect("room");
    if let Ok(snapshot) = Snapshot::open(folder) {
        let _ = snapshot.verify();
        let _ = snapshot.entries();
    }
});
