use std::ops::Range;

use tch::{Kind, Tensor};

use super::reader::{Reader, inside, within};
use crate::data::identity::{join, of_bytes};
use crate::data::room::room;
use crate::data::sample::byte_len;
use crate::data::{Array, Origin, Random, Source};
use crate::error::Result;

/// One array of a file, whose first dimension counts the records: made by [`Npy`](super::Npy) and
/// [`Safetensors`](super::Safetensors). A sample is an [`Array`] of the other dimensions.
///
/// *Cost*: the bytes of the records that are alive. Each is one positioned read, checked for its
/// length: a file that was cut underneath is an error of the record.
#[derive(Clone, Debug)]
pub struct ArrayFile {
    reader: Reader,
    kind: Kind,
    rows: u64,
    /// Of one row.
    shape: Vec<i64>,
    row_bytes: usize,
    start: u64,
    /// A number of which file's array it is, and which of it.
    order: u64,
}

impl ArrayFile {
    /// An array of a file, `start` bytes into it; it must not reach beyond the file's end.
    pub(super) fn new(reader: Reader, kind: Kind, shape: &[i64], start: u64) -> Result<Self> {
        let Some((rows, shape)) = shape.split_first() else {
            return Err(reader.broken("an array without dimensions has no rows; reshape it to (1,)"));
        };
        let too_large = || reader.broken(format!("no array is {rows} times {shape:?}"));
        let row_bytes = byte_len(kind, shape).ok_or_else(too_large)?;
        let rows = u64::try_from(*rows).map_err(|_| too_large())?;
        let bytes = rows.checked_mul(row_bytes as u64).ok_or_else(too_large)?;
        if start.checked_add(bytes).is_none_or(|end| end > reader.len()) {
            let there = reader.len().saturating_sub(start);
            return Err(reader.broken(format!("its array has {bytes} bytes, of which {there} are there")));
        }
        let order = reader.order();
        Ok(Self { shape: shape.to_vec(), reader, kind, rows, row_bytes, start, order })
    }

    /// It is the array of this name in its file.
    pub(super) fn named(self, name: &str) -> Self {
        Self { order: join(self.order, of_bytes(name.as_bytes())), ..self }
    }

    /// The dtype.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The shape of one record.
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// As [`Tokens::mapped`](super::Tokens::mapped); each tensor of a file has a mapping of its own.
    ///
    /// # Errors
    /// As there.
    pub fn mapped(self) -> Result<Self> {
        Ok(Self { reader: self.reader.mapped(None)?, ..self })
    }

    /// As [`Tokens::mapped_within`](super::Tokens::mapped_within).
    ///
    /// # Errors
    /// As for [`mapped`](Self::mapped).
    pub fn mapped_within(self, bytes: u64) -> Result<Self> {
        Ok(Self { reader: self.reader.mapped(Some(bytes))?, ..self })
    }

    /// As [`Tokens::drop_behind`](super::Tokens::drop_behind).
    pub fn drop_behind(self, bytes: u64) -> Self {
        Self { reader: self.reader.drop_behind(bytes), ..self }
    }

    /// Some records without a copy: a `[rows, shape…]` tensor over a private mapping of the file.
    ///
    /// *Cost*: nothing until it is touched; then pages of the page cache, which the system takes back
    /// when it wants them. libtorch's allocator, and so [`memory`](crate::memory), does not count them. A
    /// page that is written to becomes the process' own, 4 KiB each; nothing reaches the file.
    /// The mapping goes with the last tensor, view or graph that holds the storage.
    ///
    /// *Limits*: a file that is cut while the tensor is alive ends the process with `SIGBUS`, and so
    /// does a disk that fails; what others write into the file shows in pages that were not written to.
    /// Use it on files that nobody writes, and [`get`](Source::get) otherwise. Bytes of a `bool`
    /// array are not looked at.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for a range beyond the records;
    /// [`Error::Data`](crate::Error::Data) where the file was cut since it was opened, and where the array
    /// begins at a place that its dtype cannot have in memory.
    pub fn view(&self, rows: Range<u64>) -> Result<Tensor> {
        let count = inside("ArrayFile::view", &rows, self.rows)?;
        let mut shape = vec![count as i64];
        shape.extend_from_slice(&self.shape);
        self.reader.view(self.offset(rows.start), self.kind, &shape)
    }

    /// The byte after the array.
    pub(super) fn end(&self) -> u64 {
        self.offset(self.rows)
    }

    fn offset(&self, row: u64) -> u64 {
        self.start.saturating_add(row.saturating_mul(self.row_bytes as u64))
    }
}

impl Source for ArrayFile {
    type Sample = Array;

    fn len(&self) -> u64 {
        self.rows
    }

    fn get(&self, index: u64, _: &mut Random) -> Result<Array> {
        let offset = self.offset(within(index, self.rows)?);
        let mut bytes = room(self.row_bytes)?;
        self.reader.read(offset, &mut bytes)?;
        Array::from_bytes(self.kind, self.shape.clone(), bytes)
    }

    fn origin(&self, index: u64) -> Origin {
        self.reader.origin(index, self.offset(index))
    }

    fn order(&self) -> u64 {
        self.order
    }
}
