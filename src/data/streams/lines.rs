use std::fmt;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use super::course::Course;
use super::inputs::Inputs;
use super::line::Line;
use super::split::{Cut, Splitter};
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
/// *Limits*: a mark of a plain file is gone to at once; compressed content, pipes and readers are read
/// up to it. See `docs/data-streams.md`.
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

impl Lines {
    fn new(inputs: Inputs) -> Self {
        Self { course: Course::new(inputs), splitter: Splitter::new(), empty: Empty::Record }
    }

    /// Of a file, or of a named pipe, which each epoch opens anew.
    pub fn of_file(path: impl Into<PathBuf>) -> Self {
        Self::of_files([path])
    }

    /// Of several files, in this order, as one stream. They are opened one by one.
    pub fn of_files<P: Into<PathBuf>>(paths: impl IntoIterator<Item = P>) -> Self {
        Self::new(Inputs::of_files(paths))
    }

    /// Of a reader, for one epoch. A read that waits cannot be ended: a loader that is dropped
    /// leaves its thread behind until the read comes back.
    pub fn of_reader(read: impl Read + Send + 'static) -> Self {
        Self::new(Inputs::of_reader(read))
    }

    /// Of a pipe, a child's output or another open file, from where it stands, for one epoch.
    /// Dropping the loader ends a read that waits.
    pub fn of_pipe(pipe: impl Into<OwnedFd>) -> Self {
        Self::new(Inputs::of_pipe(pipe))
    }

    /// Of the standard input, as [`of_pipe`](Lines::of_pipe). What [`std::io::stdin`] has buffered
    /// is not seen.
    ///
    /// # Errors
    /// [`Error::Io`] where there is none.
    pub fn stdin() -> Result<Self> {
        Ok(Self::new(Inputs::stdin()?))
    }

    /// Of what this opens, anew for each epoch, and for each [`seek`](crate::data::Loader::seek). As for
    /// [`of_reader`](Lines::of_reader), a read that waits cannot be ended.
    pub fn with(open: impl FnMut() -> io::Result<Box<dyn Read + Send>> + Send + 'static) -> Self {
        Self::new(Inputs::with(open))
    }

    /// Reads the files in another order each epoch, made of this seed and the epoch alone.
    pub fn shuffle_files(mut self, seed: u64) -> Self {
        self.course.inputs.shuffle = Some(seed);
        self
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

    /// Drops a regular file's pages from the page cache each time so many bytes of it were read.
    /// Reading them again is then reading the disk.
    pub fn drop_behind(mut self, bytes: u64) -> Self {
        self.course.inputs.reading.behind = Some(bytes);
        self
    }

    /// The largest window, as a power of two, that a zstd file may ask for, which is its decoder's memory; 23,
    /// which is 8 MiB, unless set. `zstd --ultra -22` and `zstd --long` need 27.
    pub fn zstd_window(mut self, log2: u32) -> Self {
        self.course.inputs.reading.window = log2;
        self
    }

    fn open_at(&mut self, offset: u64) -> Option<Result<()>> {
        let opened = match self.course.open()? {
            Ok(input) => self.splitter.open(input, offset).map_err(|error| self.course.fail(offset, error)),
            Err(error) => Err(error),
        };
        Some(opened)
    }

    fn cut(&mut self, keep: bool) -> Option<Result<Cut>> {
        loop {
            if self.course.failed() {
                return None;
            }
            if !self.splitter.is_open()
                && let Err(error) = self.open_at(0)?
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
        self.open_at(offset).unwrap_or(Ok(()))
    }

    fn next(&mut self) -> Option<Result<(Line, Origin)>> {
        let cut = match self.cut(true)? {
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
        let cut = self.cut(false).transpose()?;
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
        self.course.inputs.identity() ^ u64::from(self.empty == Empty::PassedOver)
    }
}

impl fmt::Debug for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lines").field("next", &self.mark()).finish_non_exhaustive()
    }
}
