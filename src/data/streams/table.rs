//! Cuts bytes into the rows of a CSV.

use std::io;
use std::sync::Arc;

use csv::{ByteRecord, ReaderBuilder};

use super::input::Input;
use super::pieces::Pieces;
use super::row::Names;

/// Rows of one input.
pub(super) struct Table {
    reader: Option<csv::Reader<Pieces>>,
    pub(super) first_row: FirstRow,
    pub(super) width: Width,
    pub(super) delimiter: u8,
    /// The most bytes of a row.
    pub(super) most: u64,
    pub(super) names: Option<Arc<Names>>,
    /// Fields of a row of this file, once they are known.
    pub(super) fields: Option<usize>,
    /// What was read last.
    pub(super) row: ByteRecord,
    start: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FirstRow {
    Names,
    Record,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    Equal,
    Any,
}

/// The csv crate's own, which holds a piece.
const PIECE: usize = 16 << 10;
/// A row's room that is kept for the next one.
const KEPT: usize = 1 << 20;

impl Table {
    pub(super) fn new() -> Self {
        Self {
            reader: None,
            first_row: FirstRow::Names,
            width: Width::Equal,
            delimiter: b',',
            most: 16 << 20,
            names: None,
            fields: None,
            row: ByteRecord::new(),
            start: 0,
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.reader.is_some()
    }

    /// Behind the row that was read last.
    pub(super) fn offset(&self) -> u64 {
        self.reader.as_ref().map_or(0, |reader| reader.get_ref().offset())
    }

    /// Where the row begins that was read last, or could not be read.
    pub(super) fn start(&self) -> u64 {
        self.start
    }

    pub(super) fn close(&mut self) {
        (self.reader, self.names, self.fields, self.start) = (None, None, None, 0);
        self.shrink();
    }

    /// Begins an input at an offset where a row begins; the header is read first.
    pub(super) fn open(&mut self, mut input: Input, offset: u64) -> io::Result<()> {
        self.close();
        let first = match self.first_row {
            FirstRow::Names => true,
            FirstRow::Record => offset > 0 && self.width == Width::Equal,
        };
        if first {
            if offset > 0 {
                input.keep();
            }
            self.reader = Some(self.over(input, 0));
            if self.next()? {
                self.fields = Some(self.row.len());
                if self.first_row == FirstRow::Names {
                    self.names = Some(Arc::new(Names::new(&self.row)));
                }
            }
            if offset == 0 {
                return Ok(());
            }
            let Some(reader) = self.reader.take() else { return Ok(()) };
            input = reader.into_inner().into_input();
        }
        if offset > 0 {
            input.go_to_record(offset, "row", b"\n\r")?;
        }
        self.reader = Some(self.over(input, offset));
        Ok(())
    }

    fn over(&self, input: Input, offset: u64) -> csv::Reader<Pieces> {
        let mut builder = ReaderBuilder::new();
        builder.has_headers(false).flexible(true).delimiter(self.delimiter).buffer_capacity(PIECE);
        builder.from_reader(Pieces::new(input, offset, self.most))
    }

    /// Reads a row; false at the end.
    pub(super) fn next(&mut self) -> io::Result<bool> {
        self.shrink();
        let Some(reader) = &mut self.reader else { return Ok(false) };
        let begun = reader.get_mut().begin_row();
        self.start = reader.get_ref().offset();
        if !begun? {
            return Ok(false);
        }
        reader.read_byte_record(&mut self.row).map_err(|error| {
            // Its room is not to be seen from outside.
            self.row = ByteRecord::new();
            match error.into_kind() {
                csv::ErrorKind::Io(error) => error,
                other => io::Error::other(format!("{other:?}")),
            }
        })
    }

    fn shrink(&mut self) {
        let ends = self.row.len().saturating_mul(size_of::<usize>());
        if self.row.as_slice().len().max(ends) > KEPT {
            self.row = ByteRecord::new();
        }
    }
}
