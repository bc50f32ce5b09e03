//! Cuts bytes at newlines.

use std::io::{self, Read};
use std::ops::Range;

use memchr::memchr;

use super::input::Input;

/// Lines of one input, found in a buffer that is used again and again.
pub(super) struct Splitter {
    input: Option<Input>,
    buffer: Box<[u8]>,
    /// What of the buffer is not cut yet.
    rest: Range<usize>,
    /// Of the first byte of `rest`.
    offset: u64,
    /// A line that does not lie in the buffer as a whole.
    long: Vec<u8>,
    /// The most bytes of a line.
    pub(super) most: usize,
}

/// Whether the bytes of a line are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keep {
    Bytes,
    Nothing,
}

/// A line that was cut, without its end.
#[derive(Debug)]
pub(super) struct Cut {
    pub(super) offset: u64,
    pub(super) len: u64,
    place: Place,
}

#[derive(Debug)]
enum Place {
    Buffer(usize),
    Long,
    /// It is longer than lines may be, or was not asked for.
    Nowhere,
}

pub(super) const BUFFER: usize = 128 << 10;
/// Room for long lines that is kept between them.
const KEPT: usize = 1 << 20;

impl Splitter {
    pub(super) fn new() -> Self {
        let buffer = vec![0; BUFFER].into_boxed_slice();
        Self { input: None, buffer, rest: 0..0, offset: 0, long: Vec::new(), most: 16 << 20 }
    }

    pub(super) fn is_open(&self) -> bool {
        self.input.is_some()
    }

    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    pub(super) fn close(&mut self) {
        (self.input, self.rest, self.offset) = (None, 0..0, 0);
    }

    /// Begins an input, at an offset where a line begins.
    pub(super) fn open(&mut self, mut input: Input, offset: u64) -> io::Result<()> {
        self.close();
        if offset > 0 {
            input.go_to_record(offset, "line", b"\n")?;
        }
        (self.input, self.offset) = (Some(input), offset);
        Ok(())
    }

    /// Reads what comes; false at the end.
    fn fill(&mut self) -> io::Result<bool> {
        let Some(input) = &mut self.input else { return Ok(false) };
        self.rest = 0..0;
        loop {
            match input.read(&mut self.buffer) {
                Ok(len) => {
                    self.rest = 0..len;
                    return Ok(len > 0);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Cuts the next line; `None` at the end. Where nothing is kept, no byte is copied.
    pub(super) fn next(&mut self, keep: Keep) -> io::Result<Option<Cut>> {
        self.long.clear();
        self.long.shrink_to(KEPT);
        let (offset, mut len, mut last) = (self.offset, 0_u64, 0);
        loop {
            if self.rest.is_empty() && !self.fill()? {
                let place = if len <= self.most as u64 { Place::Long } else { Place::Nowhere };
                return Ok((len > 0).then_some(Cut { offset, len, place }));
            }
            let piece = self.buffer.get(self.rest.clone()).unwrap_or_default();
            let newline = memchr(b'\n', piece);
            let piece = &piece[..newline.unwrap_or(piece.len())];
            let whole = len == 0 && newline.is_some();
            let start = self.rest.start;
            len += piece.len() as u64;
            last = piece.last().copied().unwrap_or(last);
            // One byte more may be a carriage return.
            if keep == Keep::Bytes && !whole && len <= self.most as u64 + 1 {
                extend(&mut self.long, piece, self.most + 1)?;
            }
            let passed = piece.len() + usize::from(newline.is_some());
            self.rest.start += passed;
            self.offset += passed as u64;
            if newline.is_none() {
                continue;
            }
            if len > 0 && last == b'\r' {
                len -= 1;
            }
            let place = match () {
                () if len > self.most as u64 => Place::Nowhere,
                () if whole => Place::Buffer(start),
                () => Place::Long,
            };
            return Ok(Some(Cut { offset, len, place }));
        }
    }

    /// The bytes of the line that was cut last and kept; `None` where it is too long.
    pub(super) fn bytes(&self, cut: &Cut) -> Option<&[u8]> {
        let len = usize::try_from(cut.len).ok()?;
        match cut.place {
            Place::Buffer(start) => self.buffer.get(start..start + len),
            Place::Long => self.long.get(..len),
            Place::Nowhere => None,
        }
    }
}

/// Grows by doubling, and never beyond what a line may have.
fn extend(long: &mut Vec<u8>, piece: &[u8], most: usize) -> io::Result<()> {
    let wanted = long.len() + piece.len();
    if wanted > long.capacity() {
        let capacity = wanted.max(long.capacity() * 2).min(most.max(wanted));
        long.try_reserve_exact(capacity - long.len()).map_err(|_| io::ErrorKind::OutOfMemory)?;
    }
    long.extend_from_slice(piece);
    Ok(())
}
