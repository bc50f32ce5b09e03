use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tch::{Device, Kind, Tensor};

use crate::data::Origin;
use crate::data::sample::byte_len;
use crate::error::{Error, Result};
use crate::ffi;
use crate::sys::file;
use crate::sys::mapping::{Mapping, Private};

/// Bytes of a mapping that may be resident, unless set.
const RESIDENT: u64 = 64 << 20;
/// A cold read brings whole pages into the page cache.
const PAGE: u64 = 4 << 10;
/// Linux maps so much around a touched page, where the page cache has it (`fault_around_bytes`).
const AROUND: u64 = 64 << 10;

/// A file that stays a file: any thread reads any part of it, without a lock.
#[derive(Clone, Debug)]
pub(super) struct Reader {
    file: Arc<File>,
    path: Arc<Path>,
    len: u64,
    mapping: Option<Arc<(Mapping, Touched)>>,
    /// Where the page cache is to be kept small.
    behind: Option<Arc<Touched>>,
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
        let mapping = Mapping::open(&self.file, self.len).map_err(failed)?;
        self.mapping = Some(Arc::new((mapping, Touched::new(resident.unwrap_or(RESIDENT), AROUND))));
        Ok(self)
    }

    /// Drops the file's pages from the page cache each time that so many bytes were read.
    pub(super) fn drop_behind(mut self, bytes: u64) -> Self {
        self.behind = Some(Arc::new(Touched::new(bytes, PAGE)));
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
        let behind = self.behind.as_ref().and_then(|touched| touched.add(offset, length));
        if let Some(mapping) = &self.mapping {
            // The page cache drops no page that is mapped.
            if mapping.1.add(offset, length).is_some() || behind.is_some() {
                mapping.0.give_back();
            }
        }
        if let Some(range) = behind {
            file::drop_cached(&self.file, range.start, range.end - range.start);
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
        // Beyond the end a mapping succeeds, and the first touch is a bus error.
        if self.file.metadata().map_err(failed)?.len() < offset + bytes as u64 {
            return Err(self.failed(io::ErrorKind::UnexpectedEof.into()));
        }
        ffi::storage::over(Private::open(&self.file, offset, bytes).map_err(failed)?, kind, shape)
    }

    /// Where a record of the file is.
    pub(super) fn origin(&self, record: u64, offset: u64) -> Origin {
        Origin::of_file(&self.path, record, offset)
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
        let now = now.unwrap_or_else(|_| "an unknown place".to_owned());
        Error::data(format!("the file ends at byte {now}; it had {} when it was opened", self.len))
    }
}

/// A file as a whole cannot be used.
pub(super) fn broken(path: &Path, problem: impl Into<String>) -> Error {
    let origin = Origin { file: Some(path.into()), ..Origin::default() };
    Error::Data { origin, problem: problem.into(), source: None }
}

/// Counts bytes that were touched, by blocks that become resident together.
#[derive(Debug)]
struct Touched {
    step: u64,
    block: u64,
    bytes: AtomicU64,
    /// The block that was touched last: neighbours share blocks.
    last: AtomicU64,
    /// What was touched since the last full step lies between these.
    from: AtomicU64,
    to: AtomicU64,
}

impl Touched {
    fn new(step: u64, block: u64) -> Self {
        let (step, none) = (step.max(1), u64::MAX);
        Self { step, block, bytes: 0.into(), last: none.into(), from: none.into(), to: 0.into() }
    }

    /// Counts a range. Where a step is full with it, the range in which all of the step lies.
    fn add(&self, offset: u64, length: u64) -> Option<Range<u64>> {
        let end = offset.checked_add(length).filter(|end| *end > offset)?;
        self.from.fetch_min(offset, Ordering::Relaxed);
        self.to.fetch_max(end, Ordering::Relaxed);
        let (first, last) = (offset / self.block, (end - 1) / self.block);
        let known = self.last.swap(last, Ordering::Relaxed) == first;
        let bytes = (last - first + u64::from(!known)) * self.block;
        let before = self.bytes.fetch_add(bytes, Ordering::Relaxed);
        if before / self.step == before.wrapping_add(bytes) / self.step {
            return None;
        }
        let from = self.from.swap(u64::MAX, Ordering::Relaxed).min(offset);
        let to = self.to.swap(0, Ordering::Relaxed).max(end);
        // The kernel keeps what lies in a range by a part only: the step before left some.
        Some(from.saturating_sub(self.step)..to)
    }
}

/// Memory for the bytes of a record.
pub(super) fn room(bytes: usize) -> Result<Vec<u8>> {
    let mut room = Vec::new();
    if room.try_reserve_exact(bytes).is_err() {
        let requested = Some(bytes as u64);
        return Err(Error::OutOfMemory { requested, live: None, limit: None, device: Device::Cpu });
    }
    room.resize(bytes, 0);
    Ok(room)
}

/// A record's number, where there is such a record.
pub(super) fn within(index: u64, len: u64) -> Result<u64> {
    if index < len { Ok(index) } else { Err(Error::data(format!("there are {len} records"))) }
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

    #[test]
    fn neighbours_in_a_block_are_counted_once_and_strangers_by_their_blocks() {
        let touched = Touched::new(8_192, 4_096);
        let due: Vec<_> = (0..12).map(|row| touched.add(row * 1_024, 1_024)).collect();
        // The step is full with row 4, which begins the second block.
        assert_eq!(due[4], Some(0..5 * 1_024));
        assert_eq!(due.iter().flatten().count(), 1);
        let strangers = Touched::new(8_192, 4_096);
        assert_eq!(strangers.add(1 << 40, 1), None);
        assert_eq!(strangers.add(20_480, 1), Some(20_480 - 8_192..(1 << 40) + 1));
        assert_eq!(strangers.add(0, 0), None, "nothing was touched");
        assert_eq!(Touched::new(0, 4_096).add(3, 1), Some(2..4), "a step of nothing is after every read");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_page_cache_holds_no_more_of_the_file_than_was_asked_for() {
        use crate::sys::mapping::cached;

        const SIZE: u64 = 64 << 20;
        const STEP: u64 = 4 << 20;
        // What is kept of a page, or of several that the kernel holds as one.
        const SLACK: u64 = 2 << 20;
        let mut file = tempfile::NamedTempFile::new().unwrap();
        io::Write::write_all(&mut file, &vec![7; SIZE as usize]).unwrap();
        if file::is_memory(file.as_file()) {
            eprintln!("skipped: the temporary folder is in memory, where nothing can be dropped");
            return;
        }
        // Pages that are not on the disk yet are not dropped.
        file.as_file().sync_all().unwrap();
        let rows = SIZE / 4_096;
        let most = |reader: &Reader, order: &dyn Fn(u64) -> u64| {
            file::drop_cached(&reader.file, 0, 0);
            let mut most = 0;
            for row in 0..rows {
                let mut bytes = [0; 4_096];
                reader.read(order(row) * 4_096, &mut bytes).unwrap();
                assert_eq!(bytes, [7; 4_096]);
                if row % 64 == 0 {
                    most = most.max(cached(&reader.file));
                }
            }
            most
        };
        let plain = Reader::open(file.path()).unwrap();
        file::read_nothing_ahead(&plain.file);
        let all = most(&plain, &|row| row);
        assert!(all >= SIZE - STEP, "without the setting all of it stays: {all}");
        let behind = plain.clone().drop_behind(STEP);
        let sequential = most(&behind, &|row| row);
        assert!(sequential <= STEP + SLACK, "{sequential}");
        // An odd factor makes a permutation of a power of two.
        let shuffled = most(&behind, &|row| (row * 2_654_435_761) % rows);
        assert!(shuffled <= STEP + SLACK, "{shuffled}");
        let mapped = most(&plain.mapped(None).unwrap().drop_behind(STEP), &|row| row);
        // Around a page that a mapping misses the kernel reads as much as the disk's driver says.
        assert!(mapped <= SIZE / 2, "pages that are mapped are given back first: {mapped}");
    }
}
