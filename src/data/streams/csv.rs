use std::fmt;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use csv::{ByteRecord, ReaderBuilder};

use super::course::Course;
use super::input::Input;
use super::inputs::Inputs;
use super::row::{Names, Row};
use crate::data::{Interrupt, Origin, Stream};
use crate::error::{Error, Result};
use crate::step::Mark;

/// Rows of CSV files, of a pipe or of any reader, one after the other.
///
/// Each file has a header, whose names fields can be asked by, unless
/// [`no_header`](Csv::no_header) is set. A row has as many fields as the header, or as its file's
/// first row; another number is one bad record, after which the stream goes on, unless
/// [`flexible`](Csv::flexible) is set. Empty lines are passed over. Gzip and zstd are decompressed as
/// for [`Lines`](super::Lines).
///
/// *Cost*: a buffer of 64 KiB and up to twice a row; each record has its bytes + 8 per field + 56.
///
/// *Limits*: behind a row of more than [`max_row`](Csv::max_row) bytes, which is what an open quote
/// makes of the rest of a file, nothing can be told, and the stream ends by an error. Offsets count from the
/// end of the row before; after `\r\n` they are one too low. See `docs/data-streams.md`.
///
/// ```
/// # fn main() -> memfit::Result<()> {
/// use memfit::data::{Csv, Loader};
///
/// let rows = Csv::of_reader(&b"1;\"a;b\"\n2;c\n"[..]).no_header().delimiter(b';');
/// let lengths = Loader::stream(rows).map(|row, _| Ok(row.text(1)?.len() as i64)).batch(2);
/// let batches: Vec<_> = lengths.build()?.collect::<memfit::Result<_>>()?;
/// assert_eq!(Vec::<i64>::try_from(&batches[0].batch)?, [3, 1]);
/// # Ok(())
/// # }
/// ```
pub struct Csv {
    course: Course,
    header: Header,
    width: Width,
    delimiter: u8,
    most: u64,
    reader: Option<csv::Reader<Limited>>,
    /// Where the reader began.
    base: u64,
    names: Option<Arc<Names>>,
    /// Fields of a row of this file, once they are known.
    fields: Option<usize>,
    row: ByteRecord,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Header {
    FirstRow,
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    Equal,
    Any,
}

const BUFFER: usize = 64 << 10;

impl Csv {
    fn new(inputs: Inputs) -> Self {
        Self {
            course: Course::new(inputs),
            header: Header::FirstRow,
            width: Width::Equal,
            delimiter: b',',
            most: 16 << 20,
            reader: None,
            base: 0,
            names: None,
            fields: None,
            row: ByteRecord::new(),
        }
    }

    /// Of a file, or of a named pipe, which each epoch opens anew.
    pub fn of_file(path: impl Into<PathBuf>) -> Self {
        Self::of_files([path])
    }

    /// Of several files, in this order, as one stream. They are opened one by one; each has a
    /// header of its own.
    pub fn of_files<P: Into<PathBuf>>(paths: impl IntoIterator<Item = P>) -> Self {
        Self::new(Inputs::of_files(paths))
    }

    /// Of a reader, for one epoch; see [`Lines::of_reader`](super::Lines::of_reader).
    pub fn of_reader(read: impl Read + Send + 'static) -> Self {
        Self::new(Inputs::of_reader(read))
    }

    /// Of a pipe or another open file, for one epoch; see [`Lines::of_pipe`](super::Lines::of_pipe).
    pub fn of_pipe(pipe: impl Into<OwnedFd>) -> Self {
        Self::new(Inputs::of_pipe(pipe))
    }

    /// Of the standard input; see [`Lines::stdin`](super::Lines::stdin).
    ///
    /// # Errors
    /// [`Error::Io`] where there is none.
    pub fn stdin() -> Result<Self> {
        Ok(Self::new(Inputs::stdin()?))
    }

    /// Of what this opens, anew for each epoch; see [`Lines::with`](super::Lines::with).
    pub fn with(open: impl FnMut() -> io::Result<Box<dyn Read + Send>> + Send + 'static) -> Self {
        Self::new(Inputs::with(open))
    }

    /// Reads the files in another order each epoch, made of this seed and the epoch alone.
    pub fn shuffle_files(mut self, seed: u64) -> Self {
        self.course.inputs.shuffle = Some(seed);
        self
    }

    /// The first row is a record like the others.
    pub fn no_header(mut self) -> Self {
        self.header = Header::None;
        self
    }

    /// What stands between fields; a comma unless set.
    pub fn delimiter(mut self, byte: u8) -> Self {
        self.delimiter = byte;
        self
    }

    /// Rows may have any number of fields.
    pub fn flexible(mut self) -> Self {
        self.width = Width::Any;
        self
    }

    /// The most bytes of a row, with its quotes and its end; 16 MiB unless set.
    pub fn max_row(mut self, bytes: u64) -> Self {
        self.most = bytes;
        self
    }

    /// See [`Lines::drop_behind`](super::Lines::drop_behind).
    pub fn drop_behind(mut self, bytes: u64) -> Self {
        self.course.inputs.reading.behind = Some(bytes);
        self
    }

    /// See [`Lines::zstd_window`](super::Lines::zstd_window).
    pub fn zstd_window(mut self, log2: u32) -> Self {
        self.course.inputs.reading.window = log2;
        self
    }

    fn over(&self, input: Input) -> csv::Reader<Limited> {
        let mut builder = ReaderBuilder::new();
        builder.has_headers(false).flexible(true).delimiter(self.delimiter).buffer_capacity(BUFFER);
        builder.from_reader(Limited { input, left: 0, most: self.most })
    }

    /// Begins an input at an offset where a row begins; the header is read first.
    fn enter(&mut self, mut input: Input, offset: u64) -> io::Result<()> {
        (self.reader, self.base, self.names, self.fields) = (None, 0, None, None);
        let first = match self.header {
            Header::FirstRow => true,
            Header::None => offset > 0 && self.width == Width::Equal,
        };
        if first {
            if offset > 0 {
                input.keep();
            }
            let mut reader = self.over(input);
            let found = read(&mut reader, &mut self.row, self.most)?;
            self.fields = found.then(|| self.row.len());
            if found && self.header == Header::FirstRow {
                self.names = Some(Arc::new(Names::new(&self.row)));
            }
            if offset == 0 {
                self.reader = Some(reader);
                return Ok(());
            }
            input = reader.into_inner().input;
        }
        if offset > 0 {
            input.go_to(offset)?;
        }
        self.base = offset;
        self.reader = Some(self.over(input));
        Ok(())
    }

    fn open_at(&mut self, offset: u64) -> Option<Result<()>> {
        let opened = match self.course.open()? {
            Ok(input) => self.enter(input, offset).map_err(|error| self.course.fail(offset, error)),
            Err(error) => Err(error),
        };
        Some(opened)
    }

    fn offset(&self) -> u64 {
        self.reader.as_ref().map_or(0, |reader| self.base + reader.position().byte())
    }

    /// Reads a row into `self.row`, and says where it begins.
    fn advance(&mut self) -> Option<Result<u64>> {
        loop {
            if self.course.failed() {
                return None;
            }
            let start = self.offset();
            let Some(reader) = &mut self.reader else {
                match self.open_at(0)? {
                    Ok(()) => continue,
                    Err(error) => return Some(Err(error)),
                }
            };
            match read(reader, &mut self.row, self.most) {
                Ok(true) => return Some(Ok(start)),
                Ok(false) => {
                    self.reader = None;
                    self.course.leave();
                }
                Err(error) => return Some(Err(self.course.fail(start, error))),
            }
        }
    }

    fn record(&mut self, origin: Origin) -> Result<(Row, Origin)> {
        let (found, wanted) = (self.row.len(), *self.fields.get_or_insert(self.row.len()));
        if self.width == Width::Equal && found != wanted {
            let problem = format!("{found} fields where {wanted} are expected");
            return Err(Error::Data { origin, problem, source: None });
        }
        Ok((Row::new(&self.row, self.names.clone()), origin))
    }
}

/// Reads a row; false at the end.
fn read(reader: &mut csv::Reader<Limited>, row: &mut ByteRecord, most: u64) -> io::Result<bool> {
    let start = reader.position().byte();
    // What is in the reader's buffer already may be of the row before.
    reader.get_mut().left = most.saturating_add(BUFFER as u64);
    let found = reader.read_byte_record(row)?;
    match found && reader.position().byte() - start > most {
        true => Err(too_long(most)),
        false => Ok(found),
    }
}

fn too_long(most: u64) -> io::Error {
    let problem = format!("a row of more than {most} bytes, perhaps by a quote that is not closed");
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

/// Ends a row that has no end.
struct Limited {
    input: Input,
    /// Bytes that the row may still take.
    left: u64,
    most: u64,
}

impl Read for Limited {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            return Err(too_long(self.most));
        }
        loop {
            match self.input.read(into) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => {
                    self.left = self.left.saturating_sub(read.as_ref().map_or(0, |len| *len as u64));
                    return read;
                }
            }
        }
    }
}

impl Stream for Csv {
    type Record = Row;

    fn begin(&mut self, epoch: u64, from: Option<Mark>) -> Result<()> {
        self.reader = None;
        let offset = self.course.begin(epoch, from)?;
        self.open_at(offset).unwrap_or(Ok(()))
    }

    fn next(&mut self) -> Option<Result<(Row, Origin)>> {
        let origin = match self.advance()? {
            Ok(start) => self.course.origin(start),
            Err(error) => return Some(Err(error)),
        };
        self.course.count();
        Some(self.record(origin))
    }

    fn skip(&mut self) -> Result<bool> {
        let found = self.advance().transpose()?.is_some();
        if found {
            // The first row of a file says how many fields the others have.
            self.fields.get_or_insert(self.row.len());
            self.course.count();
        }
        Ok(found)
    }

    fn mark(&self) -> Option<Mark> {
        Some(self.course.mark(self.offset()))
    }

    fn interrupt(&self) -> Interrupt {
        self.course.inputs.interrupt()
    }

    fn order(&self) -> u64 {
        self.course.inputs.identity() ^ (u64::from(self.header == Header::None) << 1)
    }
}

impl fmt::Debug for Csv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Csv").field("next", &self.mark()).finish_non_exhaustive()
    }
}
