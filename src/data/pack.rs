use std::ops::Range;

use tch::kind::Element;
use tch::{Kind, Tensor};

use super::buffers::Buffers;
use super::collate::{Collate, Waiting};
use super::lists::{self, Layout, Lists, Piece};
use super::pad::part_of;
use super::shifted::{self, Shifted};
use super::transfer::Transfer;
use crate::error::{Error, Result};
use crate::ffi::bytes;
use crate::step::Batch;

/// Lays documents of unequal length side by side in rows of one length, so that little of a row is
/// padding.
///
/// Each document goes, in the order of the batch, into the first row that has room for it (first
/// fit: never more than 1.7 times as many rows as would do); one that is longer than a row
/// is cut into rows. A batch of n samples has as many rows as that takes.
///
/// | sample | filled with | batch |
/// | --- | --- | --- |
/// | `Vec<T>` | `T` | [`Packed`] |
/// | `(Vec<A>, Vec<B>)` of equal length, up to four | `(A, B)` | `(Packed, Tensor)`: the others like the first |
///
/// *Cost*: the samples wait until the batch is complete: at its end their bytes, the batch's
/// (rows × length × the dtype's) and 8 bytes per token for the documents' numbers, these in [`Buffers`] that are
/// used again when their batch is gone. Each document looks at the rows before it.
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
pub struct Pack<F> {
    length: usize,
    fill: F,
}

impl<F> Pack<F> {
    /// Rows of `length`, filled up with `fill`.
    pub fn to(length: usize, fill: F) -> Self {
        Self { length, fill }
    }

    fn check(&self) -> Result<()> {
        match self.length {
            0 => Err(Error::config("Pack::to", "rows of length 0; at least 1")),
            _ => Ok(()),
        }
    }

    fn batch<L: Lists<Fill = F>>(&self, samples: &Waiting<L>) -> Result<L::Batch<Packed>> {
        let (layout, documents) = self.laid(samples.present());
        if documents.is_empty() {
            return Err(Error::data("no sample of this batch has a token"));
        }
        let buffers = samples.buffers.part(0);
        let tensor = |list| layout.tensor(list, &self.fill, &buffers);
        let segments = segments(&documents, self.length, &samples.buffers.part(1))?;
        L::batch(|tokens| Packed { tokens, segments, documents }, tensor)
    }

    /// Where each piece goes, and the lengths of those in each row.
    fn laid<'a, L: Lists>(&self, samples: impl Iterator<Item = &'a L>) -> (Layout<'a, L>, Vec<Vec<i64>>) {
        let mut layout = Layout { pieces: Vec::new(), used: Vec::new(), length: self.length };
        let mut documents: Vec<Vec<i64>> = Vec::new();
        for lists in samples {
            for start in (0..lists.length()).step_by(self.length.max(1)) {
                let range = start..lists.length().min(start + self.length);
                let fits = layout.used.iter().position(|used| used + range.len() <= self.length);
                let row = fits.unwrap_or(documents.len());
                if row == documents.len() {
                    layout.used.push(0);
                    documents.push(Vec::new());
                }
                documents[row].push(range.len() as i64);
                let at = row * self.length + layout.used[row];
                layout.used[row] += range.len();
                layout.pieces.push(Piece { lists, range, at });
            }
        }
        (layout, documents)
    }
}

/// Of each row, what is to be told of its tokens, by a token's place in its document and the document's number
/// in the row; 0 in the padding.
fn told(documents: &[i64], length: usize, tell: impl Fn(i64, i64) -> i64) -> Vec<i64> {
    let places =
        documents.iter().zip(0..).flat_map(|(length, document)| (0..*length).map(move |at| (at, document)));
    let mut row: Vec<i64> = places.map(|(at, document)| tell(at, document)).collect();
    row.resize(length, 0);
    row
}

/// Int64, `[rows, length]`.
fn segments(documents: &[Vec<i64>], length: usize, buffers: &Buffers) -> Result<Tensor> {
    let mut room = buffers.room(Kind::Int64, vec![documents.len() as i64, length as i64])?;
    for (row, documents) in documents.iter().enumerate() {
        let numbers = told(documents, length, |_, document| document + 1);
        room.put(row * std::mem::size_of_val(numbers.as_slice()), bytes::of(&numbers));
    }
    room.tensor(documents.len())
}

macro_rules! packs {
    ($lists:ty, $fill:ty, $batch:ty; $($number:ident)*) => {
        impl<$($number: Element + Copy + Send + Sync + 'static),*> Collate<$lists> for Pack<$fill> {
            type Partial = Waiting<$lists>;
            type Batch = $batch;

            fn check(&self) -> Result<()> {
                self.check()
            }

            fn begin(&self, rows: usize, _: &$lists, buffers: &Buffers) -> Result<Self::Partial> {
                Ok(Waiting::new(rows, buffers))
            }

            fn put(&self, partial: &mut Self::Partial, row: usize, sample: $lists) -> Result<()> {
                lists::check(&sample)?;
                partial.put(row, sample);
                Ok(())
            }

            fn end(&self, partial: &mut Self::Partial, _: &[usize]) -> Result<$batch> {
                self.batch(partial)
            }
        }
    };
}

packs!(Vec<A>, A, Packed; A);
packs!((Vec<A>, Vec<B>), (A, B), (Packed, Tensor); A B);
packs!((Vec<A>, Vec<B>, Vec<C>), (A, B, C), (Packed, Tensor, Tensor); A B C);
packs!((Vec<A>, Vec<B>, Vec<C>, Vec<D>), (A, B, C, D), (Packed, Tensor, Tensor, Tensor); A B C D);

/// Rows of one length that hold whole documents, or pieces of long ones.
#[derive(Debug)]
pub struct Packed {
    /// `[rows, length]`; of a sample of several lists, the first.
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
        let size = self.tokens.size();
        let row = |documents: &Vec<i64>| told(documents, size[1] as usize, |at, _| at);
        let places: Vec<i64> = self.documents.iter().flat_map(row).collect();
        Ok(Tensor::f_from_slice(&places)?.f_view(size.as_slice())?.f_to_device(self.tokens.device())?)
    }

    /// Inputs, and for each the token that follows it in its document; else `ignore`.
    ///
    /// # Errors
    /// libtorch's.
    pub fn next_token(&self, ignore: i64) -> Result<Shifted> {
        let count = self.documents.iter().flatten().map(|length| (length - 1).max(0) as u64).sum();
        shifted::by_tokens(&self.tokens, &self.follows()?, ignore, count)
    }

    /// Inputs, and for each the label that stands beside the token that follows it in its document, `[rows,
    /// length]` labels; else `ignore`.
    ///
    /// *Cost*: the labels that are not `ignore` are counted, for which CUDA is waited for.
    ///
    /// # Errors
    /// [`Error::Config`] for labels of another shape than the tokens; libtorch's.
    pub fn next_label(&self, labels: &Tensor, ignore: i64) -> Result<Shifted> {
        shifted::by_labels(&self.tokens, labels, &self.follows()?, ignore)
    }

    /// Of each token but a row's first, whether it follows one of its document.
    fn follows(&self) -> Result<Tensor> {
        let width = shifted::width(&self.segments)?;
        let length = (width - 1).max(0);
        let here = self.segments.f_narrow(1, 0, length)?;
        let next = self.segments.f_narrow(1, width - length, length)?;
        Ok(here.f_eq_tensor(&next)?.f_logical_and(&next.f_ne(0)?)?)
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
