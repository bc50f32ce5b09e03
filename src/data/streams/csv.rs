use std::fmt;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use super::course::Course;
use super::inputs::{Format, Inputs};
use super::interface::interface;
use super::row::Row;
use super::table::{FirstRow, Table, Width};
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
/// *Cost*: buffers of 80 KiB, and for a row and a file's first row up to twice their bytes + 8 per
/// field; each record has its bytes + 8 per field + 56. A row of [`max_row`](Csv::max_row) delimiters
/// takes 18 times `max_row` while it is read.
///
/// *Limits*: behind a row of more than [`max_row`](Csv::max_row) bytes, and behind a quote that is
/// still open at a file's end, nothing can be told: the stream ends by an error. See
/// `docs/data-streams.md`.
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
    table: Table,
}

interface!(Csv);

impl Csv {
    fn new(inputs: Inputs) -> Self {
        Self { course: Course::new(inputs), table: Table::new() }
    }

    /// The first row is a record like the others.
    pub fn no_header(mut self) -> Self {
        self.table.first_row = FirstRow::Record;
        self
    }

    /// What stands between fields; a comma unless set. A quote or a newline, which cannot, is
    /// [`Error::Config`] when an epoch begins.
    pub fn delimiter(mut self, byte: u8) -> Self {
        self.table.delimiter = byte;
        self
    }

    /// Rows may have any number of fields.
    pub fn flexible(mut self) -> Self {
        self.table.width = Width::Any;
        self
    }

    /// The most bytes of a row, with its quotes and one byte of its end; 16 MiB unless set. Empty
    /// lines before it do not count.
    pub fn max_row(mut self, bytes: u64) -> Self {
        self.table.most = bytes;
        self
    }

    fn check(&self) -> Result<()> {
        match self.table.delimiter {
            byte @ (b'"' | b'\n' | b'\r') => {
                let problem = format!("{:?}; any byte but a quote and the ends of lines", char::from(byte));
                Err(Error::config("Csv::delimiter", problem))
            }
            _ => Ok(()),
        }
    }

    /// Reads a row into `self.table`, and says where it begins.
    fn advance(&mut self) -> Option<Result<u64>> {
        loop {
            if self.course.failed() {
                return None;
            }
            if !self.table.is_open()
                && let Err(error) = self.course.open(0, |input| self.table.open(input, 0))?
            {
                return Some(Err(error));
            }
            match self.table.next() {
                Ok(true) => return Some(Ok(self.table.start())),
                Ok(false) => {
                    self.table.close();
                    self.course.leave();
                }
                Err(error) => return Some(Err(self.course.fail(self.table.start(), error))),
            }
        }
    }

    fn record(&mut self, origin: Origin) -> Result<(Row, Origin)> {
        let Table { row, width, names, fields, .. } = &mut self.table;
        let (found, wanted) = (row.len(), *fields.get_or_insert(row.len()));
        if *width == Width::Equal && found != wanted {
            let problem = format!("{found} fields where {wanted} are expected");
            return Err(Error::Data { origin, problem, source: None });
        }
        Ok((Row::new(row, names.clone()), origin))
    }
}

impl Stream for Csv {
    type Record = Row;

    fn begin(&mut self, epoch: u64, from: Option<Mark>) -> Result<()> {
        self.check()?;
        self.table.close();
        let offset = self.course.begin(epoch, from)?;
        self.course.open(offset, |input| self.table.open(input, offset)).unwrap_or(Ok(()))
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
            self.table.fields.get_or_insert(self.table.row.len());
            self.course.count();
        }
        Ok(found)
    }

    fn mark(&self) -> Option<Mark> {
        Some(self.course.mark(self.table.offset()))
    }

    fn interrupt(&self) -> Interrupt {
        self.course.inputs.interrupt()
    }

    fn order(&self) -> u64 {
        let header = u64::from(self.table.first_row == FirstRow::Record);
        self.course.inputs.identity(Format::Rows, u64::from(self.table.delimiter) << 8 | header)
    }
}
