//! A folder of snapshots: where a new one is prepared, published, and old ones removed.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::manifest::Manifest;
use super::read;
use super::write::{self, failed};
use crate::error::Result;
use crate::step::Position;
use crate::sys;

const LOCK: &str = ".memfit-lock";
const SAVING: &str = ".saving-";
const DELETING: &str = ".deleting-";

/// Which snapshots stay.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Keep {
    /// The newest so many; `None` for all.
    pub(super) last: Option<usize>,
    /// The one with the lowest loss too.
    pub(super) best: bool,
}

/// A place to prepare a snapshot in. Gone with everything in it unless it is published.
#[derive(Debug)]
pub(super) struct Slot {
    folder: PathBuf,
    pub(super) path: PathBuf,
    /// One saver per folder: whatever is unfinished while it is held is a dead one's.
    _lock: Option<File>,
    state: SlotState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotState {
    Preparing,
    Published,
}

/// A finished snapshot of the folder, as far as its manifest tells.
#[derive(Debug)]
pub(super) struct Listed {
    pub(super) path: PathBuf,
    pub(super) sequence: u64,
    pub(super) loss: Option<f64>,
}

impl Slot {
    /// Waits for other savers, removes what dead ones left, and makes a place.
    pub(super) fn open(folder: &Path) -> Result<Self> {
        let lock = lock(folder)?;
        clean(folder)?;
        let path = folder.join(unique(SAVING));
        fs::create_dir(&path).map_err(|source| failed("creating", &path, source))?;
        Ok(Self { folder: folder.to_owned(), path, _lock: lock, state: SlotState::Preparing })
    }

    /// The number of the snapshot that is being prepared.
    pub(super) fn sequence(&self) -> Result<u64> {
        let (listed, unreadable) = list(&self.folder)?;
        for error in unreadable {
            tracing::warn!(%error, "a snapshot in the folder is damaged");
        }
        let Some(newest) = listed.last() else { return Ok(1) };
        newest.sequence.checked_add(1).ok_or_else(|| {
            let problem = "its `sequence` is the highest there is: move it out of the folder".to_owned();
            read::broken(&newest.path, vec![problem])
        })
    }

    /// Writes the manifest and makes the whole visible at once, on the disk.
    pub(super) fn publish(mut self, manifest: &Manifest, keep: Keep) -> Result<(PathBuf, u64)> {
        let written = write::write_manifest(&self.path, manifest)?;
        sync(&self.path)?;
        let path = self.free_name(manifest.position.into())?;
        fs::rename(&self.path, &path).map_err(|source| failed("renaming", &self.path, source))?;
        self.state = SlotState::Published;
        sync(&self.folder)?;
        if let Err(error) = prune(&self.folder, &path, keep) {
            tracing::warn!(%error, "old snapshots stay");
        }
        Ok((path, written))
    }

    /// The first name of this step that is free.
    fn free_name(&self, position: Position) -> Result<PathBuf> {
        let name = format!("step-{:012}", position.steps);
        let mut path = self.folder.join(&name);
        let mut number = 1;
        while path.symlink_metadata().is_ok() {
            number += 1;
            path = self.folder.join(format!("{name}-{number}"));
        }
        Ok(path)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.state == SlotState::Preparing {
            // What stays is removed by the next saver.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// The finished snapshots, oldest first, and why others cannot be listed.
pub(super) fn list(folder: &Path) -> Result<(Vec<Listed>, Vec<crate::Error>)> {
    loop {
        // Where another process's `keep_last` took one away meanwhile, a newer one is there.
        if let Some(found) = list_once(folder)? {
            return Ok(found);
        }
    }
}

/// `None` where one went away while it was read.
fn list_once(folder: &Path) -> Result<Option<(Vec<Listed>, Vec<crate::Error>)>> {
    let (mut listed, mut unreadable) = (Vec::new(), Vec::new());
    for (name, path) in entries(folder)? {
        // Not through a link: what is listed is also removed.
        let is_folder = || path.symlink_metadata().map(|found| found.is_dir());
        match name.starts_with("step-").then(is_folder) {
            None | Some(Ok(false)) => continue,
            Some(Err(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Some(Ok(true) | Err(_)) => {}
        }
        match read::read_manifest(&path) {
            Ok(manifest) => {
                let (sequence, loss) = (manifest.sequence, manifest.loss());
                listed.push(Listed { path, sequence, loss });
            }
            Err(_) if is_gone(&path) => return Ok(None),
            Err(error) => unreadable.push(error),
        }
    }
    listed.sort_by(|a, b| a.sequence.cmp(&b.sequence).then_with(|| a.path.cmp(&b.path)));
    Ok(Some((listed, unreadable)))
}

/// Whether nothing has this name any more.
pub(super) fn is_gone(path: &Path) -> bool {
    path.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Makes a folder and those above it, each of them on the disk.
pub(super) fn make(folder: &Path) -> Result<()> {
    let mut parents = Vec::new();
    let mut missing = folder;
    while is_gone(missing) {
        let Some(parent) = missing.parent() else { break };
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        parents.push(parent);
        missing = parent;
    }
    fs::create_dir_all(folder).map_err(|source| failed("creating", folder, source))?;
    parents.into_iter().try_for_each(sync)
}

fn sync(path: &Path) -> Result<()> {
    #[cfg(test)]
    super::tests::note_sync(path);
    sys::file::sync_folder(path).map_err(|source| failed("syncing", path, source))
}

/// The one with the lowest loss; of equals the newest.
pub(super) fn best(listed: &[Listed]) -> Option<&Listed> {
    let scored = listed.iter().rev().filter(|one| one.loss.is_some_and(|loss| !loss.is_nan()));
    scored.min_by(|a, b| a.loss.unwrap_or(f64::NAN).total_cmp(&b.loss.unwrap_or(f64::NAN)))
}

fn prune(folder: &Path, newest: &Path, keep: Keep) -> Result<()> {
    let Some(last) = keep.last else { return Ok(()) };
    let (listed, _) = list(folder)?;
    let best = best(&listed).filter(|_| keep.best).map(|best| best.path.clone());
    let old = listed.len().saturating_sub(last.max(1));
    for Listed { path, .. } in listed.iter().take(old) {
        if path != newest && Some(path) != best.as_ref() {
            let away = folder.join(unique(DELETING));
            // Renamed first: a half-removed snapshot never stands under its name.
            fs::rename(path, &away).map_err(|source| failed("renaming", path, source))?;
            fs::remove_dir_all(&away).map_err(|source| failed("removing", &away, source))?;
        }
    }
    Ok(())
}

fn clean(folder: &Path) -> Result<()> {
    for (name, path) in entries(folder)? {
        let dead = name.starts_with(SAVING) || name.starts_with(DELETING);
        if dead && let Err(error) = fs::remove_dir_all(&path) {
            tracing::warn!(%error, path = %path.display(), "what a dead saver left stays");
        }
    }
    Ok(())
}

fn entries(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let read = || -> io::Result<Vec<_>> {
        let all = fs::read_dir(folder)?.map(|entry| {
            let entry = entry?;
            Ok((entry.file_name().to_string_lossy().into_owned(), entry.path()))
        });
        all.collect()
    };
    read().map_err(|source| failed("listing", folder, source))
}

fn lock(folder: &Path) -> Result<Option<File>> {
    let path = folder.join(LOCK);
    let mut options = OpenOptions::new();
    let file = options.create(true).truncate(false).read(true).write(true).open(&path);
    let file = file.map_err(|source| failed("opening", &path, source))?;
    match file.lock() {
        Ok(()) => Ok(Some(file)),
        // A file system without locks: whoever uses it has one saver per folder.
        Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(None),
        Err(source) => Err(failed("locking", &path, source)),
    }
}

fn unique(prefix: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{prefix}{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}
