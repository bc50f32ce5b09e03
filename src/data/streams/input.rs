//! The bytes of one file, decompressed, from any offset on.

use std::fs::File;
use std::io::{self, Cursor, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::compressed::{Compression, decoded, sniffed};
use crate::sys::file::drop_cached;
use crate::sys::pipe::{Waiting, Wake};

/// Settings of how files are read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading {
    /// Bytes after which a file's cached pages are dropped.
    pub(super) behind: Option<u64>,
    /// Logarithm of the largest window of zstd.
    pub(super) window: u32,
}

/// Bytes of a file, a pipe or a reader.
pub(super) struct Input {
    from: From,
    wake: Arc<Wake>,
    /// Of the byte that is handed out next.
    offset: u64,
    /// What was handed out since `keep`.
    kept: Option<Vec<u8>>,
    /// Comes before what `from` has.
    again: Cursor<Vec<u8>>,
}

enum From {
    Plain(Sequential),
    /// Its first bytes, which may have to be waited for, will tell how it is compressed.
    Unknown(Option<Box<dyn Read + Send>>, Reading),
    Other(Box<dyn Read + Send>),
}

impl Input {
    /// Of a regular file.
    pub(super) fn of_file(file: File, length: u64, reading: Reading, wake: &Arc<Wake>) -> io::Result<Self> {
        let mut head = [0; 4];
        let len = file.read_at(&mut head, 0)?;
        let file = Sequential { file, length, position: 0, behind: reading.behind, dropped: 0 };
        let from = match Compression::of(head.get(..len).unwrap_or_default()) {
            Compression::None => From::Plain(file),
            compression => From::Other(decoded(Box::new(file), compression, reading.window)?),
        };
        Ok(Self::new(from, wake))
    }

    /// Of a pipe or the like.
    pub(super) fn of_pipe(file: File, reading: Reading, wake: &Arc<Wake>) -> io::Result<Self> {
        Ok(Self::of_reader(Box::new(Waiting::new(file, wake)?), reading, wake))
    }

    /// Of anything.
    pub(super) fn of_reader(read: Box<dyn Read + Send>, reading: Reading, wake: &Arc<Wake>) -> Self {
        Self::new(From::Unknown(Some(read), reading), wake)
    }

    fn new(from: From, wake: &Arc<Wake>) -> Self {
        Self { from, wake: wake.clone(), offset: 0, kept: None, again: Cursor::default() }
    }

    /// Keeps what is handed out from now on, for a way back.
    pub(super) fn keep(&mut self) {
        if !matches!(self.from, From::Plain(_)) {
            self.kept = Some(Vec::new());
        }
    }

    /// Goes to an offset: at once in a plain file, elsewhere by reading on, or back into what was
    /// kept.
    pub(super) fn go_to(&mut self, offset: u64) -> io::Result<()> {
        let kept = self.kept.take().unwrap_or_default();
        if let From::Plain(file) = &mut self.from {
            file.go_to(offset)?;
            self.offset = offset;
            return Ok(());
        }
        if let Some(back) = self.offset.checked_sub(offset).and_then(|back| usize::try_from(back).ok()) {
            let from = kept.len().checked_sub(back).ok_or_else(|| beyond(offset, self.offset))?;
            self.again = Cursor::new(kept.get(from..).unwrap_or_default().to_vec());
            self.offset = offset;
            return Ok(());
        }
        let mut scratch = [0; 16 << 10];
        while self.offset < offset {
            let most = (offset - self.offset).min(scratch.len() as u64) as usize;
            match self.read(scratch.get_mut(..most).unwrap_or_default()) {
                Ok(0) => return Err(beyond(offset, self.offset)),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Goes to an offset where a record begins: behind a byte that ends one, or at the end.
    pub(super) fn go_to_record(&mut self, offset: u64, record: &str, ends: &[u8]) -> io::Result<()> {
        self.go_to(offset.saturating_sub(1))?;
        let begins = match self.byte()? {
            Some(byte) if ends.contains(&byte) => true,
            Some(_) => self.byte()?.is_none(),
            None => false,
        };
        if begins {
            return Ok(());
        }
        let problem = format!("no {record} begins at byte {offset}: the data position is of other data");
        Err(io::Error::new(io::ErrorKind::InvalidData, problem))
    }

    /// The next byte; `None` at the end.
    fn byte(&mut self) -> io::Result<Option<u8>> {
        let mut byte = [0];
        loop {
            match self.read(&mut byte) {
                Ok(len) => return Ok((len > 0).then_some(byte[0])),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

fn beyond(offset: u64, end: u64) -> io::Error {
    let problem = format!("the data position is at byte {offset}, the data ends at byte {end}");
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

impl Read for Input {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.wake.check()?;
        let mut len = self.again.read(into)?;
        if len == 0 {
            len = self.from.read(into)?;
        }
        // A reader of the user's may say anything.
        let read = into.get(..len).ok_or_else(|| io::Error::other("more bytes read than asked for"))?;
        if let Some(kept) = &mut self.kept {
            kept.extend_from_slice(read);
        }
        self.offset += len as u64;
        Ok(len)
    }
}

impl Read for From {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if let Self::Unknown(read, reading) = self {
            let read = read.take().ok_or_else(|| io::Error::other("the first read failed"))?;
            *self = Self::Other(sniffed(read, reading.window)?);
        }
        match self {
            Self::Plain(file) => file.read(into),
            Self::Unknown(..) => Ok(0),
            Self::Other(read) => read.read(into),
        }
    }
}

/// A regular file that is read from front to back.
struct Sequential {
    file: File,
    /// When it was opened.
    length: u64,
    position: u64,
    behind: Option<u64>,
    /// Pages up to here were dropped.
    dropped: u64,
}

/// Largest page there is; what is dropped ends on one.
const PAGE: u64 = 64 << 10;
/// The page cache keeps several pages as one, which goes only as a whole: the part to drop reaches
/// back over more than the largest.
const FOLIO: u64 = 4 << 20;

impl Sequential {
    fn go_to(&mut self, offset: u64) -> io::Result<()> {
        let end = self.file.metadata()?.len();
        if offset > end {
            return Err(beyond(offset, end));
        }
        self.file.seek(SeekFrom::Start(offset))?;
        (self.position, self.dropped) = (offset, offset - offset % PAGE);
        Ok(())
    }

    fn drop_to(&mut self, end: u64) {
        let from = self.dropped.saturating_sub(FOLIO);
        if end == from {
            return;
        }
        // No length is up to the file's end.
        let len = if end < self.length { end - from } else { 0 };
        drop_cached(&self.file, from, len);
        self.dropped = end;
    }
}

impl Read for Sequential {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let len = self.file.read(into)?;
        if len == 0 && !into.is_empty() && self.position < self.length {
            let (now, before) = (self.position, self.length);
            let problem = format!("the file ends at byte {now}, it had {before} bytes when it was opened");
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, problem));
        }
        self.position += len as u64;
        let read = self.position - self.position % PAGE;
        if self.behind.is_some_and(|behind| read - self.dropped >= behind.max(PAGE)) {
            self.drop_to(read);
        }
        Ok(len)
    }
}

impl Drop for Sequential {
    fn drop(&mut self) {
        if self.behind.is_some() {
            self.drop_to(self.position);
        }
    }
}
