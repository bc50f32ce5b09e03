use std::fmt;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use super::course::Course;
use super::inputs::{Format, Inputs};
use super::interface::interface;
use super::line::Line;
use super::split::{Cut, Keep, Splitter};
use crate::data::{Interrupt, Origin, Stream};
use crate::error::{Error, Result};
use crate::step::Mark;

/// Lines of files, of a pipe or of any reader, one after the other.
///
/// A line ends at `\n` or `\r\n`; the last one need not end. Empty lines are records unless
/// [`pass_over_empty`](Lines::pass_over_empty) is set. Content that begins as gzip or zstd does is
/// decompressed while it is read, whatever the file's name is. A line that is too long is one bad
/// record, after which the stream goes on.
///
/// *Cost*: a buffer of 128 KiB; for a line that does not lie in it, up to its bytes once more, and
/// never more than [`max_line`](Lines::max_line) of them; each record has its bytes + 16. Compressed
/// files add their window: 32 KiB for gzip, up to 8 MiB for zstd.
///
/// *Limits*: where memory for a line runs out, the epoch ends by [`Error::OutOfMemory`]. A mark of a
/// plain file is gone to at once; compressed content, pipes and readers are read up to it. See
/// `docs/data-streams.md`.
///
/// ```
/// # fn main() -> memfit::Result<()> {
/// use memfit::data::{Lines, Loader};
///
/// let lines = Lines::of_reader(&b"1\n22\r\n\n333"[..]).pass_over_empty();
/// let lengths = Loader::stream(lines).map(|line, _| Ok(line.bytes().len() as i64));
/// let batches: Vec<_> = lengths.batch(3).build()?.collect::<memfit::Result<_>>()?;
/// assert_eq!(Vec::<i64>::try_from(&batches[0].batch)?, [1, 2, 3]);
/// # Ok(())
/// # }
/// ```
pub struct Lines {
    course: Course,
    splitter: Splitter,
    empty: Empty,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Empty {
    Record,
    PassedOver,
}

interface!(Lines);

impl Lines {
    fn new(inputs: Inputs) -> Self {
        Self { course: Course::new(inputs), splitter: Splitter::new(), empty: Empty::Record }
    }

    /// Lines without a byte are no records.
    pub fn pass_over_empty(mut self) -> Self {
        self.empty = Empty::PassedOver;
        self
    }

    /// The most bytes of a line, its end not counted; 16 MiB unless set.
    pub fn max_line(mut self, bytes: usize) -> Self {
        self.splitter.most = bytes.min(usize::MAX / 4);
        self
    }

    fn cut(&mut self, keep: Keep) -> Option<Result<Cut>> {
        loop {
            if self.course.failed() {
                return None;
            }
            if !self.splitter.is_open()
                && let Err(error) = self.course.open(0, |input| self.splitter.open(input, 0))?
            {
                return Some(Err(error));
            }
            let start = self.splitter.offset();
            match self.splitter.next(keep) {
                Ok(Some(cut)) if cut.len == 0 && self.empty == Empty::PassedOver => {}
                Ok(Some(cut)) => return Some(Ok(cut)),
                Ok(None) => {
                    self.splitter.close();
                    self.course.leave();
                }
                Err(error) => return Some(Err(self.course.fail(start, error))),
            }
        }
    }
}

impl Stream for Lines {
    type Record = Line;

    fn begin(&mut self, epoch: u64, from: Option<Mark>) -> Result<()> {
        self.splitter.close();
        let offset = self.course.begin(epoch, from)?;
        self.course.open(offset, |input| self.splitter.open(input, offset)).unwrap_or(Ok(()))
    }

    fn next(&mut self) -> Option<Result<(Line, Origin)>> {
        let cut = match self.cut(Keep::Bytes)? {
            Ok(cut) => cut,
            Err(error) => return Some(Err(error)),
        };
        let origin = self.course.origin(cut.offset);
        self.course.count();
        Some(match self.splitter.bytes(&cut) {
            Some(bytes) => Ok((Line::new(bytes), origin)),
            None => {
                let problem = format!("a line of {} bytes; at most {}", cut.len, self.splitter.most);
                Err(Error::Data { origin, problem, source: None })
            }
        })
    }

    fn skip(&mut self) -> Result<bool> {
        let cut = self.cut(Keep::Nothing).transpose()?;
        if cut.is_some() {
            self.course.count();
        }
        Ok(cut.is_some())
    }

    fn mark(&self) -> Option<Mark> {
        Some(self.course.mark(self.splitter.offset()))
    }

    fn interrupt(&self) -> Interrupt {
        self.course.inputs.interrupt()
    }

    fn order(&self) -> u64 {
        self.course.inputs.identity(Format::Lines, u64::from(self.empty == Empty::PassedOver))
    }
}
