use std::fmt::Display;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::touched::Touched;
use crate::data::cached::Cached;
use crate::data::sample::byte_len;
use crate::data::{Origin, identity};
use crate::error::{Error, Result};
use crate::ffi;
use crate::sys::file;
use crate::sys::mapping::{Mapping, Private};

/// Bytes of a mapping that may be resident, unless set.
const RESIDENT: u64 = 64 << 20;

/// A file that stays a file: any thread reads any part of it, without a lock.
#[derive(Clone, Debug)]
pub(super) struct Reader {
    file: Arc<File>,
    path: Arc<Path>,
    len: u64,
    mapping: Option<Arc<(Mapping, Touched)>>,
    /// Where the page cache is to be kept small.
    behind: Option<Arc<Cached>>,
}

impl Reader {
    /// Opens a regular file.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let failed = |source| Error::Io { action: "opening", path: path.to_owned(), source };
        let file = file::open_data(path).map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len();
        Ok(Self { file: Arc::new(file), path: path.into(), len, mapping: None, behind: None })
    }

    /// Bytes that the file had when it was opened.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Reads through a mapping from now on, of which about `resident` bytes stay in memory.
    pub(super) fn mapped(mut self, resident: Option<u64>) -> Result<Self> {
        let failed = |source| Error::Io { action: "mapping", path: self.path.to_path_buf(), source };
        self.check_reaches(self.len)?;
        let mapping = Mapping::open(&self.file, self.len).map_err(failed)?;
        self.mapping = Some(Arc::new((mapping, Touched::new(self.len, resident.unwrap_or(RESIDENT)))));
        Ok(self)
    }

    /// Drops the file's pages from the page cache each time that so many bytes were read.
    pub(super) fn drop_behind(mut self, bytes: u64) -> Self {
        self.behind = Some(Arc::new(Cached::new(bytes)));
        self
    }

    /// Fills `into` from `offset` on.
    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        match &self.mapping {
            None => self.file.read_exact_at(into, offset).map_err(|error| self.failed(error))?,
            Some(mapping) if mapping.0.copy(offset, into) => {}
            Some(_) => return Err(self.failed(io::ErrorKind::UnexpectedEof.into())),
        }
        self.give_back(offset, into.len() as u64);
        Ok(())
    }

    fn give_back(&self, offset: u64, length: u64) {
        let behind = self.behind.as_ref().and_then(|cached| cached.add(offset, length));
        if let Some((mapping, resident)) = self.mapping.as_deref() {
            // The page cache drops no page that is mapped.
            if resident.add(offset, length) || behind.is_some() {
                resident.clear();
                mapping.give_back();
            }
        }
        if let Some(part) = behind {
            part.drop_from(&self.file);
        }
    }

    /// A tensor over a private mapping of the file from `offset` on.
    pub(super) fn view(&self, offset: u64, kind: Kind, shape: &[i64]) -> Result<Tensor> {
        let bytes = byte_len(kind, shape).ok_or_else(|| self.broken(format!("no tensor is {shape:?}")))?;
        if bytes == 0 {
            return Ok(Tensor::f_empty(shape, (kind, Device::Cpu))?);
        }
        if !offset.is_multiple_of(kind.elt_size_in_bytes() as u64) {
            return Err(self.broken(format!(
                "its numbers begin at byte {offset}, which is no place for {kind:?} in memory; read it row by row"
            )));
        }
        let failed = |source| Error::Io { action: "mapping", path: self.path.to_path_buf(), source };
        self.check_reaches(offset.saturating_add(bytes as u64))?;
        ffi::storage::over(Private::open(&self.file, offset, bytes).map_err(failed)?, kind, shape)
    }

    /// An error where the file ends before `end` now. Beyond the end a mapping succeeds, and the first touch is a
    /// bus error.
    fn check_reaches(&self, end: u64) -> Result<()> {
        let now = self.file.metadata().map_err(|error| self.failed(error))?.len();
        if now < end { Err(self.failed(io::ErrorKind::UnexpectedEof.into())) } else { Ok(()) }
    }

    /// Where a record of the file is.
    pub(super) fn origin(&self, record: u64, offset: u64) -> Origin {
        Origin::of_file(&self.path, record, offset)
    }

    /// A number of the file's name.
    pub(super) fn order(&self) -> u64 {
        identity::of_files([&*self.path].into_iter())
    }

    /// The file as a whole cannot be used.
    pub(super) fn broken(&self, problem: impl Into<String>) -> Error {
        broken(&self.path, problem)
    }

    fn failed(&self, error: io::Error) -> Error {
        if error.kind() != io::ErrorKind::UnexpectedEof {
            return Error::Io { action: "reading", path: self.path.to_path_buf(), source: error };
        }
        let now = self.file.metadata().map(|metadata| metadata.len().to_string());
        cut(now.as_deref().unwrap_or("an unknown place"), self.len)
    }
}

/// A file ends earlier than it did.
pub(super) fn cut(now: impl Display, len: u64) -> Error {
    Error::data(format!("the file ends at byte {now}; it had {len} when it was opened"))
}

/// A file as a whole cannot be used.
pub(super) fn broken(path: &Path, problem: impl Into<String>) -> Error {
    let origin = Origin { file: Some(path.into()), ..Origin::default() };
    Error::Data { origin, problem: problem.into(), source: None }
}

/// A record, or the way to it, where there is such a record.
pub(super) fn found<T>(record: Option<T>, len: u64) -> Result<T> {
    record.ok_or_else(|| Error::data(format!("there are {len} records")))
}

/// A record's number, where there is such a record.
pub(super) fn within(index: u64, len: u64) -> Result<u64> {
    found((index < len).then_some(index), len)
}

/// A range of records, where it lies in them; how many they are.
pub(super) fn inside(setting: &'static str, range: &Range<u64>, len: u64) -> Result<u64> {
    match range.end.checked_sub(range.start) {
        Some(count) if range.end <= len => Ok(count),
        _ => Err(Error::config(setting, format!("{range:?} is no range of 0..{len}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn the_page_cache_holds_no_more_of_the_file_than_was_asked_for() {
        use crate::sys::mapping::cached;

        const SIZE: u64 = 64 << 20;
        const STEP: u64 = 4 << 20;
        // What is kept of a page, or of several that the kernel holds as one.
        const SLACK: u64 = 2 << 20;
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let content = noise(SIZE);
        io::Write::write_all(&mut file, &content).unwrap();
        // Pages that are not on the disk yet are not dropped.
        file.as_file().sync_all().unwrap();
        file::drop_cached(file.as_file(), 0, 0);
        if cached(file.as_file()) > SLACK {
            eprintln!("skipped: this system keeps the pages of files in the temporary folder");
            return;
        }
        let rows = SIZE / 4_096;
        let most = |reader: &Reader, order: &dyn Fn(u64) -> u64| {
            file::drop_cached(&reader.file, 0, 0);
            let mut most = 0;
            for row in 0..rows {
                let mut bytes = [0; 4_096];
                reader.read(order(row) * 4_096, &mut bytes).unwrap();
                let begin = order(row) as usize * 4_096;
                assert!(bytes == content[begin..begin + 4_096]);
                if row % 64 == 0 {
                    most = most.max(cached(&reader.file));
                }
            }
            most
        };
        let plain = Reader::open(file.path()).unwrap();
        file::read_nothing_ahead(&plain.file);
        let all = most(&plain, &|row| row);
        // Of what is kept without the setting a group with little memory keeps little.
        if all < 4 * (STEP + SLACK) {
            eprintln!("skipped: {all} bytes of {SIZE} are all that this system keeps");
            return;
        }
        let behind = plain.clone().drop_behind(STEP);
        let sequential = most(&behind, &|row| row);
        assert!(sequential <= STEP + SLACK, "{sequential}");
        // An odd factor makes a permutation of a power of two.
        let shuffled = most(&behind, &|row| (row * 2_654_435_761) % rows);
        assert!(shuffled <= STEP + SLACK, "{shuffled}");
        // What the kernel reads around a page that a mapping misses, up to twice, is beyond the step.
        let mapped = plain.mapped(None).unwrap().drop_behind(STEP);
        let around = most(&mapped, &|row| row);
        assert!(around <= STEP + 2 * read_ahead(&mapped.file) + SLACK, "{around}");
        mapped.mapping.as_ref().unwrap().0.read_nothing_around();
        let alone = most(&mapped, &|row| row);
        assert!(alone <= STEP + SLACK, "pages that are mapped are given back first: {alone}");
    }

    /// Bytes that no file system stores as fewer.
    #[cfg(target_os = "linux")]
    fn noise(bytes: u64) -> Vec<u8> {
        // A generator by Marsaglia: shifts of 13, 7 and 17.
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let words = (0..bytes / 8).flat_map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        });
        words.collect()
    }

    /// Bytes that the file's disk reads ahead; where the system does not tell, the most that any does.
    #[cfg(target_os = "linux")]
    fn read_ahead(file: &File) -> u64 {
        use std::os::unix::fs::MetadataExt;

        let kib = |path: std::path::PathBuf| -> Option<u64> {
            std::fs::read_to_string(path.join("read_ahead_kb")).ok()?.trim().parse().ok()
        };
        let device = file.metadata().unwrap().dev();
        let name = format!("{}:{}", libc::major(device), libc::minor(device));
        let all = Path::new("/sys/class/bdi");
        let most = || all.read_dir().ok()?.filter_map(|entry| kib(entry.ok()?.path())).max();
        kib(all.join(name)).or_else(most).unwrap_or(0) << 10
    }
}
