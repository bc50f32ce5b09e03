//! A lock between processes: two xtasks never write the same folder at once.

use std::fs::{self, File, TryLockError};
use std::path::Path;

use crate::problem::{Problem, Result};

/// Held until dropped; the system lets go of it when the process ends, however it ends.
#[must_use = "the lock is let go when this is dropped"]
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    /// Waits until no other process holds the lock at `path`.
    pub fn take(path: &Path) -> Result<Self> {
        let file = open(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                eprintln!("waiting for another run that holds {}", path.display());
                file.lock().map_err(|error| Problem::io("lock", path, &error))?;
            }
            Err(TryLockError::Error(error)) => return Err(Problem::io("lock", path, &error)),
        }
        Ok(Self { _file: file })
    }
}

fn open(path: &Path) -> Result<File> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(|error| Problem::io("create", folder, &error))?;
    }
    File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .map_err(|error| Problem::io("open", path, &error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    #[test]
    fn a_second_taker_waits_for_the_first() {
        let scratch = Scratch::new("lock");
        let path = scratch.path().join("deep/lock");
        let first = Lock::take(&path).unwrap();
        assert!(matches!(open(&path).unwrap().try_lock(), Err(TryLockError::WouldBlock)));
        let released = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _second = Lock::take(&path).unwrap();
                assert!(released.load(Ordering::SeqCst));
            });
            std::thread::sleep(Duration::from_millis(100));
            released.store(true, Ordering::SeqCst);
            drop(first);
        });
    }

    #[test]
    fn a_lock_left_behind_by_a_dead_process_is_free() {
        let scratch = Scratch::new("stale-lock");
        let path = scratch.path().join("lock");
        drop(Lock::take(&path).unwrap());
        assert!(path.exists());
        let _again = Lock::take(&path).unwrap();
    }
}
