//! Hands a row's bytes to the csv crate, and none of the next one's.

use std::io::{self, Read};
use std::ops::Range;

use memchr::memchr2;

use super::input::Input;

const BUFFER: usize = 64 << 10;
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The bytes of one input in pieces that end where a row may end: what was handed out is what the
/// csv crate took.
pub(super) struct Pieces {
    input: Input,
    buffer: Box<[u8]>,
    /// What of the buffer was not handed out yet.
    rest: Range<usize>,
    /// Of the first byte of `rest`.
    offset: u64,
    /// Bytes of the row that is read.
    row: u64,
    most: u64,
    before: Before,
    /// The input ended in this row.
    ended: bool,
}

/// The csv crate passes over a byte order mark in the first piece, but only in a whole one, and
/// wherever that piece is from. It gets an empty line first instead.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    ByteOrderMark,
    EmptyLine,
    Nothing,
}

impl Pieces {
    pub(super) fn new(input: Input, offset: u64, most: u64) -> Self {
        let buffer = vec![0; BUFFER].into_boxed_slice();
        let before = if offset == 0 { Before::ByteOrderMark } else { Before::EmptyLine };
        Self { input, buffer, rest: 0..0, offset, row: 0, most, before, ended: false }
    }

    pub(super) fn into_input(self) -> Input {
        self.input
    }

    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    fn rest(&self) -> &[u8] {
        self.buffer.get(self.rest.clone()).unwrap_or_default()
    }

    /// Reads what comes, behind what is there; false at the end.
    fn fill(&mut self) -> io::Result<bool> {
        if self.rest.is_empty() {
            self.rest = 0..0;
        }
        loop {
            match self.input.read(self.buffer.get_mut(self.rest.end..).unwrap_or_default()) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => {
                    let len = read?;
                    self.rest.end += len;
                    return Ok(len > 0);
                }
            }
        }
    }

    fn pass(&mut self, len: usize) {
        self.rest.start += len;
        self.offset += len as u64;
    }

    /// Passes over empty lines, and the rest of the row's end; false where no row follows.
    pub(super) fn begin_row(&mut self) -> io::Result<bool> {
        if self.before == Before::ByteOrderMark {
            while self.rest().len() < BYTE_ORDER_MARK.len()
                && BYTE_ORDER_MARK.starts_with(self.rest())
                && self.fill()?
            {}
            self.before = Before::EmptyLine;
            if self.rest().starts_with(BYTE_ORDER_MARK) {
                self.pass(BYTE_ORDER_MARK.len());
            }
        }
        (self.row, self.ended) = (0, false);
        loop {
            let ends = self.rest().iter().take_while(|byte| matches!(byte, b'\n' | b'\r')).count();
            self.pass(ends);
            if !self.rest.is_empty() {
                return Ok(true);
            }
            if !self.fill()? {
                return Ok(false);
            }
        }
    }
}

impl Read for Pieces {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let invalid = |problem: String| Err(io::Error::new(io::ErrorKind::InvalidData, problem));
        if self.before != Before::Nothing {
            self.before = Before::Nothing;
            return (&b"\n"[..]).read(into);
        }
        if self.rest.is_empty() && !self.fill()? {
            // A newline ends the last row, unless a quote is open.
            return match std::mem::replace(&mut self.ended, true) {
                false => (&b"\n"[..]).read(into),
                true => invalid("the data ends in a quote that is not closed".to_owned()),
            };
        }
        let piece = self.rest();
        let piece = piece.get(..into.len()).unwrap_or(piece);
        let piece = memchr2(b'\n', b'\r', piece).map_or(piece, |end| &piece[..=end]);
        let len = (&*piece).read(into)?;
        self.row += len as u64;
        if self.row > self.most {
            let most = self.most;
            return invalid(format!(
                "a row of more than {most} bytes, perhaps by a quote that is not closed"
            ));
        }
        self.pass(len);
        Ok(len)
    }
}
