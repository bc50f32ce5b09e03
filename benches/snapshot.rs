//! How close do snapshots come to the disk's own speed? The same bytes are written plainly
//! (one file, sequential, fsync) and read plainly, in turns with saving and resuming.

mod support;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use memfit::optim::{AdamW, AdamWConfig};
use memfit::snapshot::Extras;
use memfit::tch::{Device, nn};
use memfit::{Loss, Snapshot, Snapshots, Stack, memory};

/// A model of AdamW whose parameters and moments have so many MB together.
fn training(megabytes: i64) -> (nn::VarStore, Stack) {
    let vs = nn::VarStore::new(Device::Cpu);
    let layers = 12;
    let width = ((megabytes * 1_000_000 / 12 / layers) as f64).sqrt() as i64;
    for layer in 0..layers {
        let _ = vs.root().randn(&format!("w{layer}"), &[width, width], 0.0, 1.0);
    }
    let mut stack =
        Stack::of(&vs, AdamW::new(&vs, AdamWConfig::default()).expect("adamw")).build().expect("a stack");
    let weights = vs.trainable_variables();
    let outcome = stack.step_with(|| {
        let sums = weights.iter().map(|weight| weight.square().sum(memfit::tch::Kind::Float));
        Ok(Loss::of(sums.reduce(|a, b| a + b).expect("weights")))
    });
    assert!(outcome.expect("a step").stepped());
    (vs, stack)
}

fn plain_write(path: &Path, bytes: &[u8]) {
    let mut file = File::create(path).expect("a file");
    for block in bytes.chunks(1 << 20) {
        file.write_all(block).expect("room");
    }
    file.sync_all().expect("a sync");
}

fn plain_read(path: &Path, into: &mut [u8]) {
    let mut file = File::open(path).expect("a file");
    for block in into.chunks_mut(1 << 20) {
        file.read_exact(block).expect("bytes");
    }
}

/// Takes files out of the page cache; false where `dd` cannot.
fn forget(paths: &[&Path]) -> bool {
    paths.iter().all(|path| {
        let of = format!("of={}", path.display());
        let dd =
            Command::new("dd").args([&of, "oflag=nocache", "conv=notrunc,fdatasync", "count=0"]).output();
        dd.is_ok_and(|output| output.status.success())
    })
}

fn seconds(body: impl FnOnce()) -> f64 {
    let start = Instant::now();
    body();
    start.elapsed().as_secs_f64()
}

fn main() {
    let measures = support::measures();
    let (megabytes, pairs) = if measures { (400, 7) } else { (4, 1) };
    let (_vs, mut stack) = training(megabytes);
    let folder = tempfile::tempdir_in(std::env::var_os("MEMFIT_BENCH_FOLDER").unwrap_or_else(|| {
        // The default temporary folder may be memory.
        std::env::current_dir().map(Into::into).unwrap_or_default()
    }))
    .expect("a folder");
    let mut snapshots = Snapshots::in_folder(folder.path().join("snapshots")).expect("a folder");
    let first = snapshots.save(&mut stack, &Extras::new()).expect("a snapshot");
    let plain = folder.path().join("plain");
    let mut bytes = vec![7; first.bytes as usize];
    let before = memory::stats(Device::Cpu).expect("figures").current;

    let mut ratios: [Vec<f64>; 3] = Default::default();
    let mut speeds = Vec::new();
    for pair in 0..pairs {
        let save = |snapshots: &mut Snapshots, stack: &mut Stack| {
            seconds(|| drop(snapshots.save(stack, &Extras::new()).expect("a snapshot")))
        };
        let write = |bytes: &[u8]| {
            let _ = fs::remove_file(&plain);
            seconds(|| plain_write(&plain, bytes))
        };
        let (ours, theirs) = if pair % 2 == 0 {
            let ours = save(&mut snapshots, &mut stack);
            (ours, write(&bytes))
        } else {
            let theirs = write(&bytes);
            (save(&mut snapshots, &mut stack), theirs)
        };
        ratios[0].push(theirs / ours);
        speeds.push(first.bytes as f64 / 1e6 / theirs);
        // Removing is not timed, on neither side.
        let paths = snapshots.paths().expect("a folder");
        for path in paths.iter().rev().skip(1) {
            fs::remove_dir_all(path).expect("a snapshot");
        }
        let snapshot: Snapshot = snapshots.latest().expect("a folder").expect("a snapshot");
        let files: Vec<_> = fs::read_dir(snapshot.path())
            .expect("files")
            .map(|entry| entry.expect("a file").path())
            .collect();
        let mut both = |cold: bool, ratio: &mut Vec<f64>| {
            let forgotten = |paths: &[&Path]| !cold || forget(paths);
            if !forgotten(&files.iter().map(AsRef::as_ref).collect::<Vec<_>>()) || !forgotten(&[&plain]) {
                return;
            }
            let ours = seconds(|| drop(snapshot.resume(&mut stack).expect("a resume")));
            let theirs = seconds(|| plain_read(&plain, &mut bytes));
            ratio.push(theirs / ours);
        };
        both(true, &mut ratios[1]);
        both(false, &mut ratios[2]);
    }
    let after = memory::stats(Device::Cpu).expect("figures").current;
    println!("{:.1} MB; live bytes grew by {}", first.bytes as f64 / 1e6, after.saturating_sub(before));
    if measures {
        println!("plain write with fsync: {:.0} MB/s", support::median(speeds));
        let names = ["save", "resume from disk", "resume from the page cache"];
        for (name, ratio) in names.iter().zip(ratios) {
            println!(
                "{name}: {:.2} of the plain speed (median of {})",
                support::median(ratio.clone()),
                ratio.len()
            );
        }
    }
}
