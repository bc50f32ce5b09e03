//! The bytes of one file, decompressed, from any offset on.

use std::fs::File;
use std::io::{self, Cursor, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::compressed::{Compression, decoded, sniffed};
use crate::data::cached::Cached;
use crate::sys::pipe::{Wake, WakingRead};

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
    content: Content,
    wake: Arc<Wake>,
    /// Of the byte that is handed out next.
    offset: u64,
    /// What was handed out since `keep`.
    kept: Option<Vec<u8>>,
    /// Comes before what `content` has.
    again: Cursor<Vec<u8>>,
}

enum Content {
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
        let file = Sequential { file, length, position: 0, behind: reading.behind.map(Cached::new) };
        let content = match Compression::of(head.get(..len).unwrap_or_default()) {
            Compression::None => Content::Plain(file),
            compression => Content::Other(decoded(Box::new(file), compression, reading.window)?),
        };
        Ok(Self::new(content, wake))
    }

    /// Of a pipe or the like.
    pub(super) fn of_pipe(file: File, reading: Reading, wake: &Arc<Wake>) -> io::Result<Self> {
        Ok(Self::of_reader(Box::new(WakingRead::new(file, wake)?), reading, wake))
    }

    /// Of anything.
    pub(super) fn of_reader(read: Box<dyn Read + Send>, reading: Reading, wake: &Arc<Wake>) -> Self {
        Self::new(Content::Unknown(Some(read), reading), wake)
    }

    fn new(content: Content, wake: &Arc<Wake>) -> Self {
        Self { content, wake: wake.clone(), offset: 0, kept: None, again: Cursor::default() }
    }

    /// Keeps what is handed out from now on, for a way back.
    pub(super) fn keep(&mut self) {
        if !matches!(self.content, Content::Plain(_)) {
            self.kept = Some(Vec::new());
        }
    }

    /// Goes to an offset: at once in a plain file, elsewhere by reading on, or back into what was
    /// kept.
    pub(super) fn go_to(&mut self, offset: u64) -> io::Result<()> {
        let kept = self.kept.take().unwrap_or_default();
        if let Content::Plain(file) = &mut self.content {
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
            len = self.content.read(into)?;
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

impl Read for Content {
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
    /// Where the page cache is to be kept small.
    behind: Option<Cached>,
}

impl Sequential {
    fn go_to(&mut self, offset: u64) -> io::Result<()> {
        let end = self.file.metadata()?.len();
        if offset > end {
            return Err(beyond(offset, end));
        }
        // What lies between is not read, and others may want it.
        self.drop_rest();
        self.position = self.file.seek(SeekFrom::Start(offset))?;
        Ok(())
    }

    fn drop_rest(&self) {
        if let Some(part) = self.behind.as_ref().and_then(Cached::rest) {
            part.drop_from(&self.file);
        }
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
        if let Some(part) = self.behind.as_ref().and_then(|cached| cached.add(self.position, len as u64)) {
            part.drop_from(&self.file);
        }
        self.position += len as u64;
        Ok(len)
    }
}

impl Drop for Sequential {
    fn drop(&mut self) {
        self.drop_rest();
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::sys::file::is_memory;
    use crate::sys::mapping::cached;

    const MIB: u64 = 1 << 20;

    /// A header is read before a position is gone to.
    #[test]
    fn what_a_seek_passes_over_stays_in_the_page_cache() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        io::Write::write_all(&mut file, &vec![7; 20 * MIB as usize]).unwrap();
        // Pages that are not on the disk yet are not dropped.
        file.as_file().sync_all().unwrap();
        let all = cached(file.as_file());
        if is_memory(file.as_file()) || all < 20 * MIB {
            eprintln!("skipped: the temporary folder is in memory, or nothing of it is cached");
            return;
        }
        let mut bytes = vec![0; 4 * MIB as usize];
        for step in [MIB, 12 * MIB] {
            // Whatever was dropped is there again.
            io::copy(&mut file.reopen().unwrap(), &mut io::sink()).unwrap();
            let reading = Reading { behind: Some(step), window: 23 };
            let mut input =
                Input::of_file(file.reopen().unwrap(), 20 * MIB, reading, &Arc::default()).unwrap();
            input.read_exact(&mut bytes[..100 << 10]).unwrap();
            input.go_to(16 * MIB).unwrap();
            input.read_exact(&mut bytes).unwrap();
            drop(input);
            let left = cached(file.as_file());
            // Before what is read it reaches back over 4 MiB; all behind it goes.
            assert!(left >= 11 * MIB, "{left} of {all} at {step}");
            assert!(left <= 16 * MIB, "{left} of {all} at {step}");
        }
    }
}
