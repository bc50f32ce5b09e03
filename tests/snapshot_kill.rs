//! A training process that is killed at any moment, resumed each time, ends with the bits of
//! one that was never killed.

mod support;
#[path = "support/training.rs"]
mod training;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use memfit::snapshot::Extras;
use memfit::{Snapshot, Snapshots, State, Value};
use support::serial;
use training::{Kit, Run, difference_of};

/// Micro-batches of the whole run; no multiple of the window.
const END: u64 = 400;
const FOLDER: &str = "MEMFIT_KILL_FOLDER";

/// Trains to the end from the newest snapshot of the folder, saving after every other
/// micro-batch, in the foreground and in the background.
fn train(folder: &Path) {
    let mut snapshots = Snapshots::in_folder(folder).unwrap().keep_last(3);
    let mut run = Run::new(Kit::Scaled, 7);
    let mut from = 0;
    if let Some(snapshot) = snapshots.latest().unwrap() {
        let back = snapshot.resume(&mut run.stack).unwrap();
        from = back.micro_batches();
        let Some(Value::Int(next)) = back.entries["data"].get("next") else { panic!("{back:?}") };
        assert_eq!(*next as u64, from);
    }
    for number in from..END {
        run.train(number, number + 1);
        let mut data = State::default();
        data.insert("next", Value::Int(number as i64 + 1));
        let extras = Extras::new().entry("data", data);
        match number % 4 {
            0 => drop(snapshots.save(&mut run.stack, &extras).unwrap()),
            2 => snapshots.save_in_background(&mut run.stack, &extras, None).unwrap(),
            _ => {}
        }
    }
    let mut data = State::default();
    data.insert("next", Value::Int(END as i64));
    snapshots.save(&mut run.stack, &Extras::new().entry("data", data)).unwrap();
}

/// Not a test: what the test below runs in a process of its own.
#[test]
#[ignore = "run by killed_at_random_moments"]
fn the_training_process() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let _guard = serial();
    train(Path::new(&folder));
}

fn start(folder: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_training_process", "--ignored", "--nocapture"])
        .env(FOLDER, folder)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// How far the newest snapshot is; everything in the folder under a snapshot's name loads.
fn reached(folder: &Path) -> Option<u64> {
    let snapshots = Snapshots::in_folder(folder).unwrap();
    for path in snapshots.paths().unwrap() {
        Snapshot::open(&path).and_then(|snapshot| snapshot.verify()).unwrap();
    }
    let entries = snapshots.latest().unwrap()?.entries().unwrap();
    match entries["data"].get("next") {
        Some(Value::Int(next)) => Some(*next as u64),
        _ => None,
    }
}

/// Numbers without a pattern, the same in every run.
fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Case 57.
#[test]
fn killed_at_random_moments_it_ends_with_the_same_bits() {
    let _guard = serial();
    let kills: u64 = std::env::var("MEMFIT_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(5);
    let mut straight = Run::new(Kit::Scaled, 7);
    straight.train(0, END);
    let expected = straight.stack.state().unwrap();

    let dir = tempfile::tempdir().unwrap();
    let (mut seed, mut done, mut in_the_middle) = (0x2545_f491_4f6c_dd1d, 0, 0);
    while done < kills {
        let before = reached(dir.path());
        let at_start = names(dir.path());
        let mut child = start(dir.path());
        let began = Instant::now();
        // Once it saves: the next kill falls anywhere in the following saves.
        while finished(&at_start) == finished(&names(dir.path())) && child.try_wait().unwrap().is_none() {
            assert!(began.elapsed() < Duration::from_secs(300), "it does not get on");
            std::thread::sleep(Duration::from_millis(2));
        }
        std::thread::sleep(Duration::from_micros(random(&mut seed) % 60_000));
        if child.try_wait().unwrap().is_some() {
            // Through before its turn: once more from the start.
            for path in Snapshots::in_folder(dir.path()).unwrap().paths().unwrap() {
                std::fs::remove_dir_all(path).unwrap();
            }
            continue;
        }
        child.kill().unwrap();
        child.wait().unwrap();
        done += 1;
        in_the_middle += u64::from(has_leftover(dir.path()));
        let after = reached(dir.path());
        assert!(after >= before, "{after:?} after {before:?}");
        println!("kill {done} of {kills}: {} micro-batches are saved", after.unwrap_or(0));
    }
    println!("{done} kills, {in_the_middle} of them in the middle of a save");
    assert!(start(dir.path()).wait().unwrap().success());
    assert!(!has_leftover(dir.path()));
    let mut resumed = Run::new(Kit::Scaled, 8);
    let snapshots = Snapshots::in_folder(dir.path()).unwrap();
    let back = snapshots.latest().unwrap().unwrap().resume(&mut resumed.stack).unwrap();
    assert_eq!(back.micro_batches(), END);
    assert_eq!(difference_of(&resumed.stack.state().unwrap(), &expected), None);
}

fn finished(names: &[String]) -> Vec<&String> {
    names.iter().filter(|name| name.starts_with("step-")).collect()
}

fn has_leftover(folder: &Path) -> bool {
    names(folder).iter().any(|name| name.starts_with(".saving-") || name.starts_with(".deleting-"))
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}
