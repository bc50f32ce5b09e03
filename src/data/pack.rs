use std::ops::Range;

use tch::kind::Element;
use tch::{Device, Tensor};

use super::buffers::Buffers;
use super::collate::{Collate, Waiting};
use super::pad::part_of;
use super::shifted::{Shifted, shifted};
use super::transfer::Transfer;
use crate::error::{Error, Result};
use crate::ffi::bytes::{self, Filling};
use crate::step::Batch;

/// Lays documents of unequal length side by side in rows of one length, so that little of a row is
/// padding.
///
/// Each document goes, in the order of the batch, into the first row that has room for it (first
/// fit: never more than 1.7 times as many rows as would do, plus one); one that is longer than a row
/// is cut into rows. A batch of n samples has as many rows as that takes.
///
/// *Cost*: the samples wait until the batch is complete: at its end their bytes, the batch's
/// (rows × length × the dtype's) and 8 bytes per token for the documents' numbers.
///
/// *Limits*: attention must not look from one document into another: give it
/// [`Packed::same_document`], and count positions with [`Packed::positions`].
///
/// ```
/// use memfit::data::{Loader, Pack, Random, Source};
///
/// struct Texts;
/// impl Source for Texts {
///     type Sample = Vec<i64>;
///     fn len(&self) -> u64 { 3 }
///     fn get(&self, index: u64, _: &mut Random) -> memfit::Result<Vec<i64>> {
///         Ok(vec![index as i64 + 1; 3])
///     }
/// }
/// let mut loader = Loader::new(Texts).batch(3).collate(Pack::to(8, 0)).build()?;
/// let batch = loader.next().expect("a batch")?;
/// assert_eq!(batch.tokens.size(), [2, 8]);            // [1 1 1 2 2 2 0 0], [3 3 3 0 0 0 0 0]
/// assert_eq!(batch.next_token(-100)?.count, 2 + 2 + 2);
/// # Ok::<(), memfit::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Pack<T> {
    length: usize,
    value: T,
}

impl<T: Element + Copy + 'static> Pack<T> {
    /// Rows of `length`, filled up with `value`.
    pub fn to(length: usize, value: T) -> Self {
        Self { length, value }
    }

    fn batch<'a>(&self, samples: impl Iterator<Item = &'a Vec<T>>) -> Result<Packed>
    where
        T: 'a,
    {
        let pieces: Vec<&[T]> = samples.flat_map(|sample| sample.chunks(self.length.max(1))).collect();
        if pieces.is_empty() {
            return Err(Error::data("no sample of this batch has a token"));
        }
        let mut documents: Vec<Vec<i64>> = Vec::new();
        let mut laid: Vec<(usize, usize)> = Vec::with_capacity(pieces.len());
        let mut used: Vec<usize> = Vec::new();
        for piece in &pieces {
            let fits = used.iter().position(|used| used + piece.len() <= self.length);
            let row = fits.unwrap_or(used.len());
            if row == used.len() {
                used.push(0);
                documents.push(Vec::new());
            }
            laid.push((row, used[row]));
            used[row] += piece.len();
            documents[row].push(piece.len() as i64);
        }
        let size = [used.len() as i64, self.length as i64];
        let mut filling = Filling::new(Tensor::f_empty(size, (bytes::kind_of::<T>(), Device::Cpu))?)?;
        let width = std::mem::size_of::<T>();
        for (piece, (row, at)) in pieces.iter().zip(laid) {
            filling.put((row * self.length + at) * width, bytes::of(piece));
        }
        let padding = vec![self.value; self.length];
        for (row, used) in used.into_iter().enumerate() {
            filling.put((row * self.length + used) * width, bytes::of(&padding[used..]));
        }
        let segments = numbered(&documents, self.length, |_, number| number + 1)?;
        Ok(Packed { tokens: filling.new_value().shallow_clone(), segments, documents })
    }
}

/// An int64 per token, `[rows, length]`, by its place in its document and the document's number in
/// its row; 0 in the padding.
fn numbered(documents: &[Vec<i64>], length: usize, number: impl Fn(i64, i64) -> i64) -> Result<Tensor> {
    let mut numbers = vec![0_i64; documents.len() * length];
    for (row, documents) in numbers.chunks_mut(length.max(1)).zip(documents) {
        let places =
            documents.iter().enumerate().flat_map(|(document, len)| (0..*len).map(move |at| (at, document)));
        for (slot, (at, document)) in row.iter_mut().zip(places) {
            *slot = number(at, document as i64);
        }
    }
    Ok(Tensor::f_from_slice(&numbers)?.f_view([documents.len() as i64, length as i64])?)
}

impl<T: Element + Copy + Send + Sync + 'static> Collate<Vec<T>> for Pack<T> {
    type Partial = Waiting<Vec<T>>;
    type Batch = Packed;

    fn check(&self) -> Result<()> {
        match self.length {
            0 => Err(Error::config("Pack::to", "rows of length 0; at least 1")),
            _ => Ok(()),
        }
    }

    fn begin(&self, rows: usize, _: &Vec<T>, _: &Buffers) -> Result<Self::Partial> {
        Ok(Waiting::new(rows))
    }

    fn put(&self, partial: &mut Self::Partial, row: usize, sample: Vec<T>) -> Result<()> {
        partial.put(row, sample);
        Ok(())
    }

    fn end(&self, partial: &mut Self::Partial, _: &[usize]) -> Result<Packed> {
        self.batch(partial.present())
    }
}

/// Rows of one length that hold whole documents, or pieces of long ones.
#[derive(Debug)]
pub struct Packed {
    /// `[rows, length]`.
    pub tokens: Tensor,
    /// The number of a token's document in its row, from 1; 0 in the padding. Int64,
    /// `[rows, length]`.
    pub segments: Tensor,
    /// Lengths of each row's documents.
    pub documents: Vec<Vec<i64>>,
}

impl Packed {
    /// Whether the token of a row's i-th place and that of its j-th belong together: bool,
    /// `[rows, length, length]`. The padding belongs to itself, so that no softmax is empty.
    ///
    /// # Errors
    /// libtorch's.
    pub fn same_document(&self) -> Result<Tensor> {
        Ok(self.segments.f_unsqueeze(2)?.f_eq_tensor(&self.segments.f_unsqueeze(1)?)?)
    }

    /// Each token's place in its document, from 0: int64, `[rows, length]`.
    ///
    /// # Errors
    /// libtorch's.
    pub fn positions(&self) -> Result<Tensor> {
        let length = self.tokens.size()[1] as usize;
        Ok(numbered(&self.documents, length, |at, _| at)?.f_to_device(self.tokens.device())?)
    }

    /// Inputs, and for each the token that follows it in its document; else `ignore`.
    ///
    /// # Errors
    /// libtorch's.
    pub fn next_token(&self, ignore: i64) -> Result<Shifted> {
        let length = self.segments.size()[1] - 1;
        let (here, next) = (self.segments.f_narrow(1, 0, length)?, self.segments.f_narrow(1, 1, length)?);
        let follows = here.f_eq_tensor(&next)?.f_logical_and(&next.f_ne(0)?)?;
        let count = self.documents.iter().flatten().map(|length| (length - 1).max(0) as u64).sum();
        shifted(&self.tokens, &follows, ignore, count)
    }
}

impl Batch for Packed {
    fn rows(&self) -> i64 {
        self.documents.len() as i64
    }

    /// Tokens that are no padding.
    fn tokens(&self) -> u64 {
        self.documents.iter().flatten().map(|length| *length as u64).sum()
    }

    fn take_rows(&self, rows: Range<i64>) -> Result<Self> {
        Ok(Self {
            tokens: self.tokens.take_rows(rows.clone())?,
            segments: self.segments.take_rows(rows.clone())?,
            documents: part_of(&self.documents, rows)?,
        })
    }
}

impl Transfer for Packed {
    fn map_tensors(&self, function: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            tokens: function(&self.tokens)?,
            segments: function(&self.segments)?,
            documents: self.documents.clone(),
        })
    }
}
