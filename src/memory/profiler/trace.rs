//! The trace's file: written by Kineto once, copied from then on.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::ffi::profiler::Trace;

#[derive(Debug)]
pub(super) struct TraceFile(Mutex<Kept>);

#[derive(Debug)]
struct Kept {
    trace: Trace,
    /// What Kineto wrote, under whatever name or none; it can write once.
    written: Option<File>,
}

impl TraceFile {
    pub(super) fn new(trace: Trace) -> Self {
        Self(Mutex::new(Kept { trace, written: None }))
    }

    pub(super) fn save(&self, path: &Path) -> Result<()> {
        let named = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("json"));
        if !named {
            let problem = format!("`{}` does not end in .json", path.display());
            return Err(Error::config("Profile::save_trace", problem));
        }
        let failed = |source| Error::Io { action: "cannot write", path: path.to_owned(), source };
        let temporary = Temporary::beside(path).map_err(failed)?;
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Kept { trace, written } = &mut *kept;
        if let Some(written) = written {
            temporary.copy(written).map_err(failed)?;
        } else if temporary.is_plain() {
            trace.save(&temporary.path)?;
            *written = Some(temporary.whole().map_err(failed)?);
        } else {
            let other = Temporary::within(&std::env::temp_dir()).map_err(failed)?;
            trace.save(&other.path)?;
            let mut whole = other.whole().map_err(failed)?;
            let copied = temporary.copy(&mut whole).map_err(failed);
            *written = Some(whole);
            copied?;
        }
        temporary.rename(path).map_err(failed)
    }
}

/// A file that is removed unless it gets its name.
struct Temporary {
    path: PathBuf,
    named: bool,
}

impl Temporary {
    /// In the folder where `path` will be, so that it can be renamed.
    fn beside(path: &Path) -> io::Result<Self> {
        match path.parent() {
            Some(folder) if folder != Path::new("") => Self::within(folder),
            _ => Self::within(Path::new(".")),
        }
    }

    fn within(folder: &Path) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // Kineto takes what precedes "://" for a protocol.
        let folder = fs::canonicalize(folder)?;
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = folder.join(format!(".memfit-{}-{number}.json", std::process::id()));
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => return made.map(|_| Self { path, named: false }),
            }
        }
    }

    /// Whether Kineto can write to it: it takes a backslash for a slash, and puts the name into
    /// the trace as it is.
    fn is_plain(&self) -> bool {
        let odd = |letter: char| letter.is_control() || matches!(letter, '"' | '\\');
        self.path.to_str().is_some_and(|path| !path.contains(odd))
    }

    /// The file that Kineto was to write, checked: it tells nobody when the disk is full.
    fn whole(&self) -> io::Result<File> {
        let mut file = File::open(&self.path)?;
        let length = file.metadata()?.len();
        let mut end = [0; 16];
        let from = length.saturating_sub(end.len() as u64);
        file.seek(SeekFrom::Start(from))?;
        let end = end.get_mut(..(length - from) as usize).unwrap_or_default();
        file.read_exact(end)?;
        match end.iter().rfind(|byte| !byte.is_ascii_whitespace()) {
            Some(b'}') => Ok(file),
            _ => Err(io::Error::other("the trace was cut short: is the disk full?")),
        }
    }

    fn copy(&self, from: &mut File) -> io::Result<()> {
        from.seek(SeekFrom::Start(0))?;
        let mut to = OpenOptions::new().write(true).truncate(true).open(&self.path)?;
        io::copy(from, &mut to).map(drop)
    }

    fn rename(mut self, path: &Path) -> io::Result<()> {
        fs::rename(&self.path, path)?;
        self.named = true;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.named {
            // Kineto writes to the second name first, and may have failed before either was there.
            let _ = fs::remove_file(&self.path);
            let _ = fs::remove_file(self.path.with_extension("json.tmp"));
        }
    }
}
