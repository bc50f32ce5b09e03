use std::cell::{Cell, RefCell};
use std::io;
use std::path::{Path, PathBuf};

use tch::{Device, Kind, Tensor, nn};

use super::{Extras, Snapshot, Snapshots};
use crate::error::{Error, Result};
use crate::optim::{AdamW, AdamWConfig};
use crate::stack::Stack;
use crate::step::Loss;

thread_local! {
    static BLOCKS_LEFT: Cell<Option<u64>> = const { Cell::new(None) };
    static SYNCED: RefCell<Vec<PathBuf>> = const { RefCell::new(Vec::new()) };
}

/// Remembers the folder that is being synced.
pub(super) fn note_sync(path: &Path) {
    SYNCED.with_borrow_mut(|synced| synced.push(path.to_owned()));
}

#[test]
fn a_folder_that_is_made_is_entered_on_the_disk_with_those_above_it() -> Result<()> {
    let dir = tempfile::tempdir().map_err(|error| Error::Torch(error.to_string()))?;
    let synced = || SYNCED.with_borrow_mut(std::mem::take);
    let _ = synced();
    Snapshots::in_folder(dir.path().join("a/b/c"))?;
    assert_eq!(synced(), [dir.path().join("a/b"), dir.path().join("a"), dir.path().to_owned()]);
    Snapshots::in_folder(dir.path().join("a/b/c"))?;
    assert!(synced().is_empty(), "nothing was made");
    Ok(())
}

/// Fails the block that the test asked for.
pub(super) fn count_block() -> io::Result<()> {
    let left = BLOCKS_LEFT.get();
    BLOCKS_LEFT.set(left.map(|left| left.saturating_sub(1)));
    if left == Some(0) { Err(io::Error::other("the disk is full")) } else { Ok(()) }
}

fn training() -> Result<(nn::VarStore, Stack)> {
    let vs = nn::VarStore::new(Device::Cpu);
    // More than one block.
    let _ = vs.root().randn("large", &[300, 300], 0.0, 1.0);
    let _ = vs.root().randn("small", &[3], 0.0, 1.0);
    let optimizer = AdamW::new(&vs, AdamWConfig::default())?;
    let stack = Stack::of(&vs, optimizer).build()?;
    Ok((vs, stack))
}

fn step(vs: &nn::VarStore, stack: &mut Stack) -> Result<()> {
    let sum = |one: &Tensor| one.square().sum(Kind::Float);
    let weights = vs.trainable_variables();
    let outcome = stack.step_with(|| Ok(Loss::of(sum(&weights[0]) + sum(&weights[1]))))?;
    assert!(outcome.stepped());
    Ok(())
}

/// Case 57.
#[test]
fn failed_at_any_block_the_previous_snapshot_loads() -> Result<()> {
    let dir = tempfile::tempdir().map_err(|error| Error::Torch(error.to_string()))?;
    let mut snapshots = Snapshots::in_folder(dir.path())?.keep_last(1);
    let (vs, mut stack) = training()?;
    let first = snapshots.save(&mut stack, &Extras::new())?;
    step(&vs, &mut stack)?;
    let mut failures = 0;
    let saved = loop {
        BLOCKS_LEFT.set(Some(failures));
        let saved = snapshots.save(&mut stack, &Extras::new());
        BLOCKS_LEFT.set(None);
        match saved {
            Ok(saved) => break saved,
            Err(Error::Io { .. }) => failures += 1,
            Err(other) => return Err(other),
        }
        let names: Vec<_> = std::fs::read_dir(dir.path()).into_iter().flatten().flatten().collect();
        assert_eq!(names.len(), 2, "only the lock and the previous one: {names:?}");
        let Some(latest) = snapshots.latest()? else { panic!("the previous one is gone") };
        assert_eq!(latest.path(), first.path);
        let (_vs, mut other) = training()?;
        latest.resume(&mut other)?;
    };
    // Three headers, three tensors of two blocks and three of one, the window's, the manifest.
    assert!(failures > 12, "{failures} blocks");
    assert_eq!(Snapshot::open(&saved.path)?.position().steps, 1);
    assert!(!first.path.exists());
    Ok(())
}
