//! Files that are mapped into memory.
//!
//! Whoever touches a mapping beyond the end of a file that was cut after it was mapped is killed by
//! `SIGBUS`. No check can prevent that; those who map say so to their users.

use std::fs::File;
use std::io;

use memmap2::{MmapOptions, MmapRaw, UncheckedAdvice};

/// A file as memory to copy out of.
#[derive(Debug)]
pub(crate) struct Mapping(MmapRaw);

impl Mapping {
    /// Maps the first bytes of a file.
    pub(crate) fn open(file: &File, length: u64) -> io::Result<Self> {
        let length = usize::try_from(length).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        MmapOptions::new().len(length).map_raw_read_only(file).map(Self)
    }

    /// Copies bytes out; false where they would lie beyond the mapping.
    pub(crate) fn copy(&self, offset: u64, into: &mut [u8]) -> bool {
        let Ok(offset) = usize::try_from(offset) else { return false };
        if offset.checked_add(into.len()).is_none_or(|end| end > self.0.len()) {
            return false;
        }
        // SAFETY: the range lies in the mapping, which lives as long as self; no Rust reference to
        // it exists, so that another process that writes the file tears the copy and nothing else.
        unsafe {
            std::ptr::copy_nonoverlapping(self.0.as_ptr().add(offset), into.as_mut_ptr(), into.len());
        }
        true
    }

    /// Lets the kernel read no more than the page that is touched.
    #[cfg(all(test, target_os = "linux"))]
    pub(crate) fn read_nothing_around(&self) {
        self.0.advise(memmap2::Advice::Random).unwrap();
    }

    /// Gives the pages back that are resident through the mapping. The next touch of one finds it in the
    /// page cache, or on the disk.
    pub(crate) fn give_back(&self) {
        // SAFETY: the mapping is shared and never written: what a page held, its file holds.
        let _ = unsafe { self.0.unchecked_advise_range(UncheckedAdvice::DontNeed, 0, self.0.len()) };
    }
}

/// A part of a file as memory to write, of which nothing reaches the file.
#[derive(Debug)]
pub(crate) struct Private(MmapRaw);

impl Private {
    /// Maps `length` bytes from `offset` on.
    pub(crate) fn open(file: &File, offset: u64, length: usize) -> io::Result<Self> {
        let mut options = MmapOptions::new();
        // Pages that are only read take no memory of their own: none is to be promised for them.
        options.offset(offset).len(length).no_reserve_swap();
        // SAFETY: only the pointer is used from here on; nobody holds a Rust reference to bytes that
        // another process may change.
        unsafe { options.map_copy(file) }.map(|mapping| Self(mapping.into()))
    }

    /// Where it begins.
    pub(crate) fn as_mut_ptr(&self) -> *mut u8 {
        self.0.as_mut_ptr()
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

/// Bytes of a file that are in the page cache, by whole pages.
#[cfg(all(test, target_os = "linux"))]
pub(crate) fn cached(file: &File) -> u64 {
    let length = file.metadata().unwrap().len();
    let mapping = Mapping::open(file, length).unwrap();
    // SAFETY: asks for a number.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let mut pages = vec![0_u8; mapping.0.len().div_ceil(page)];
    // SAFETY: the range is the whole mapping, and there is one byte for each page of it.
    let done = unsafe { libc::mincore(mapping.0.as_mut_ptr().cast(), mapping.0.len(), pages.as_mut_ptr()) };
    assert_eq!(done, 0, "{}", io::Error::last_os_error());
    pages.iter().filter(|page| **page & 1 == 1).count() as u64 * page as u64
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file_of(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    #[test]
    fn a_mapping_lends_what_lies_in_it_and_nothing_beyond() {
        let mapping = Mapping::open(&file_of(b"0123456789"), 10).unwrap();
        let mut four = [0; 4];
        assert!(mapping.copy(6, &mut four));
        assert_eq!(&four, b"6789");
        mapping.give_back();
        assert!(mapping.copy(0, &mut four));
        assert_eq!(&four, b"0123");
        assert!(!mapping.copy(7, &mut four));
        assert!(!mapping.copy(u64::MAX, &mut four));
        assert!(mapping.copy(10, &mut []));
    }

    #[test]
    fn a_private_mapping_begins_at_any_byte_and_keeps_writes_from_the_file() {
        let file = file_of(&(0..=255).cycle().take(10_000).collect::<Vec<u8>>());
        let private = Private::open(&file, 5_001, 100).unwrap();
        assert_eq!(private.len(), 100);
        // SAFETY: both bytes lie in the mapping.
        unsafe {
            assert_eq!(*private.as_mut_ptr(), (5_001 % 256) as u8);
            *private.as_mut_ptr().add(99) = 7;
        }
        let mapping = Mapping::open(&file, 10_000).unwrap();
        let mut byte = [0];
        assert!(mapping.copy(5_100, &mut byte));
        assert_eq!(byte, [(5_100 % 256) as u8]);
    }
}
