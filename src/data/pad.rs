use std::ops::Range;

use tch::kind::Element;
use tch::{Kind, Tensor};

use super::buffers::Buffers;
use super::collate::{Collate, Waiting};
use super::lists::{self, Layout, Lists, Piece};
use super::sample::Sample;
use super::shifted::{self, Shifted};
use super::transfer::Transfer;
use crate::error::{Error, Result};
use crate::step::Batch;

/// Makes lists of unequal length rows of one length, filled up at their ends.
///
/// | sample | filled with | batch |
/// | --- | --- | --- |
/// | `Vec<T>` | `T` | [`Padded`] |
/// | `(Vec<A>, Vec<B>)` of equal length, up to four | `(A, B)` | `(Padded, Tensor)`: the others like the first |
/// | `(either, U)` with a [`Sample`] U | as above | `(either's, U's)` |
///
/// *Cost*: the samples wait until the batch is complete: at its end their bytes and the batch's,
/// n × length × the dtype's, in [`Buffers`] that are used again when their batch is gone. What the padding
/// costs the training is the part of the batch that [`Batch::tokens`] does not count;
/// [`Pack`](super::Pack) has less of it.
///
/// ```
/// use memfit::data::{Loader, Pad, Random, Source};
///
/// struct Answers;
/// impl Source for Answers {
///     type Sample = (Vec<i64>, Vec<i64>);                       // tokens, and labels that leave the question out
///     fn len(&self) -> u64 { 2 }
///     fn get(&self, index: u64, _: &mut Random) -> memfit::Result<Self::Sample> {
///         Ok(if index == 0 { (vec![5, 6], vec![-100, 6]) } else { (vec![7, 8, 9], vec![-100, 8, 9]) })
///     }
/// }
/// let mut loader = Loader::new(Answers).batch(2).collate(Pad::to_longest((0, -100))).build()?;
/// let (padded, labels) = loader.next().expect("a batch")?.batch; // [5 6 0], [7 8 9]
/// assert_eq!((padded.tokens.size(), labels.size()), (vec![2, 3], vec![2, 3]));
/// assert_eq!(padded.next_label(&labels, -100)?.count, 1 + 2);   // what Loss::mean needs
/// # Ok::<(), memfit::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Pad<F> {
    fill: F,
    /// `None` for that of the batch's longest.
    length: Option<usize>,
    multiple: usize,
    longer: Longer,
}

#[derive(Clone, Copy, Debug)]
enum Longer {
    Refused,
    Cut,
}

impl<F> Pad<F> {
    /// To the length of the longest sample of each batch.
    pub fn to_longest(fill: F) -> Self {
        Self { fill, length: None, multiple: 1, longer: Longer::Refused }
    }

    /// To one length for all batches; a longer sample is an error.
    pub fn to(length: usize, fill: F) -> Self {
        Self { length: Some(length), ..Self::to_longest(fill) }
    }

    /// Rounds the length up to a multiple, so that fewer shapes occur.
    pub fn multiple_of(mut self, multiple: usize) -> Self {
        self.multiple = multiple.max(1);
        self
    }

    /// Cuts the ends of samples that are longer than [`Pad::to`].
    pub fn cut_longer(mut self) -> Self {
        self.longer = Longer::Cut;
        self
    }

    fn fit(&self, sample: &mut impl Lists) -> Result<()> {
        lists::check(sample)?;
        match (self.length, self.longer) {
            (Some(length), Longer::Refused) if sample.length() > length => Err(Error::data(format!(
                "it has {} elements where rows have {length}; cut it with Pad::cut_longer, or take longer rows",
                sample.length()
            ))),
            (Some(length), Longer::Cut) => {
                sample.truncate(length);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// A length of rows, of which so many can be.
    fn rounded(&self, length: usize, rows: usize) -> Result<usize> {
        let rounded = length.checked_next_multiple_of(self.multiple);
        let all = |length: &usize| length.checked_mul(rows).and_then(|all| i64::try_from(all).ok());
        rounded.filter(|length| all(length).is_some()).ok_or_else(|| {
            let multiple = self.multiple;
            Error::config(
                "Pad",
                format!("{rows} rows of {length} elements or more, a multiple of {multiple}"),
            )
        })
    }

    fn batch<L: Lists<Fill = F>>(&self, samples: &Waiting<L>) -> Result<L::Batch<Padded>> {
        let used: Vec<usize> = samples.present().map(Lists::length).collect();
        let longest = used.iter().copied().max().unwrap_or_default();
        let length = self.rounded(self.length.unwrap_or(longest), used.len())?;
        let lengths = used.iter().map(|length| *length as i64).collect();
        let piece =
            |(row, lists): (usize, _)| Piece { lists, range: 0..Lists::length(lists), at: row * length };
        let layout = Layout { pieces: samples.present().enumerate().map(piece).collect(), used, length };
        L::batch(
            |tokens| Padded { tokens, lengths },
            |list| layout.tensor(list, &self.fill, &samples.buffers),
        )
    }
}

macro_rules! pads {
    ($lists:ty, $fill:ty, $batch:ty; $($number:ident)*) => {
        impl<$($number: Element + Copy + Send + Sync + 'static),*> Collate<$lists> for Pad<$fill> {
            type Partial = Waiting<$lists>;
            type Batch = $batch;

            fn check(&self) -> Result<()> {
                self.rounded(self.length.unwrap_or_default(), 1).map(|_| ())
            }

            fn begin(&self, rows: usize, _: &$lists, buffers: &Buffers) -> Result<Self::Partial> {
                Ok(Waiting::new(rows, buffers))
            }

            fn put(&self, partial: &mut Self::Partial, row: usize, mut sample: $lists) -> Result<()> {
                self.fit(&mut sample)?;
                partial.put(row, sample);
                Ok(())
            }

            fn end(&self, partial: &mut Self::Partial, _: &[usize]) -> Result<$batch> {
                self.batch(partial)
            }
        }

        impl<$($number: Element + Copy + Send + Sync + 'static,)* U: Sample> Collate<($lists, U)> for Pad<$fill> {
            type Partial = (Waiting<$lists>, U::Rows);
            type Batch = ($batch, U::Batch);

            fn check(&self) -> Result<()> {
                self.rounded(self.length.unwrap_or_default(), 1).map(|_| ())
            }

            fn first_decides(&self) -> bool {
                true
            }

            fn begin(&self, rows: usize, first: &($lists, U), buffers: &Buffers) -> Result<Self::Partial> {
                Ok((Waiting::new(rows, &buffers.part(0)), first.1.rows(rows, &buffers.part(1))?))
            }

            fn put(&self, partial: &mut Self::Partial, row: usize, sample: ($lists, U)) -> Result<()> {
                let (mut lists, beside) = sample;
                self.fit(&mut lists)?;
                beside.put(&mut partial.1, row)?;
                partial.0.put(row, lists);
                Ok(())
            }

            fn end(&self, partial: &mut Self::Partial, present: &[usize]) -> Result<Self::Batch> {
                let padded = self.batch(&partial.0)?;
                Ok((padded, U::batch(&mut partial.1, present)?))
            }
        }
    };
}

pads!(Vec<A>, A, Padded; A);
pads!((Vec<A>, Vec<B>), (A, B), (Padded, Tensor); A B);
pads!((Vec<A>, Vec<B>, Vec<C>), (A, B, C), (Padded, Tensor, Tensor); A B C);
pads!((Vec<A>, Vec<B>, Vec<C>, Vec<D>), (A, B, C, D), (Padded, Tensor, Tensor, Tensor); A B C D);

/// Rows of one length, of which each begins with a sample.
#[derive(Debug)]
pub struct Padded {
    /// `[n, length]`; of a sample of several lists, the first.
    pub tokens: Tensor,
    /// Of each row, how many elements are the sample's.
    pub lengths: Vec<i64>,
}

impl Padded {
    /// Which elements are the samples': bool, `[n, length]`, on the device of the tokens.
    ///
    /// # Errors
    /// libtorch's.
    pub fn mask(&self) -> Result<Tensor> {
        let device = self.tokens.device();
        let places = Tensor::f_arange(shifted::width(&self.tokens)?, (Kind::Int64, device))?;
        let lengths = Tensor::f_from_slice(&self.lengths)?.f_to_device(device)?;
        Ok(places.f_lt_tensor(&lengths.f_unsqueeze(1)?)?)
    }

    /// Inputs, and for each the token that follows it: labels beyond a sample's end are `ignore`.
    ///
    /// # Errors
    /// libtorch's.
    pub fn next_token(&self, ignore: i64) -> Result<Shifted> {
        let count = self.lengths.iter().map(|length| (length - 1).max(0) as u64).sum();
        shifted::by_tokens(&self.tokens, &self.follows()?, ignore, count)
    }

    /// Inputs, and for each the label that stands beside the token that follows it, `[n, length]` labels: those
    /// beyond a sample's end are `ignore`.
    ///
    /// *Cost*: the labels that are not `ignore` are counted, for which CUDA is waited for.
    ///
    /// # Errors
    /// [`Error::Config`] for labels of another shape than the tokens; libtorch's.
    pub fn next_label(&self, labels: &Tensor, ignore: i64) -> Result<Shifted> {
        shifted::by_labels(&self.tokens, labels, &self.follows()?, ignore)
    }

    /// Of each token but a row's first, whether it follows one.
    fn follows(&self) -> Result<Tensor> {
        let width = shifted::width(&self.tokens)?;
        let followed = (width - 1).max(0);
        Ok(self.mask()?.f_narrow(1, width - followed, followed)?)
    }
}

impl Batch for Padded {
    fn rows(&self) -> i64 {
        self.lengths.len() as i64
    }

    /// Elements that are the samples'.
    fn tokens(&self) -> u64 {
        self.lengths.iter().map(|length| *length as u64).sum()
    }

    fn take_rows(&self, rows: Range<i64>) -> Result<Self> {
        let tokens = self.tokens.take_rows(rows.clone())?;
        Ok(Self { tokens, lengths: part_of(&self.lengths, rows)? })
    }
}

/// What a batch knows of some of its rows.
pub(super) fn part_of<R: Clone>(list: &[R], rows: Range<i64>) -> Result<Vec<R>> {
    let (from, to) = (usize::try_from(rows.start), usize::try_from(rows.end));
    let part = from.ok().zip(to.ok()).and_then(|(from, to)| list.get(from..to));
    let missing = || Error::config("Batch::take_rows", format!("rows {rows:?} of a batch of {}", list.len()));
    part.map(<[R]>::to_vec).ok_or_else(missing)
}

impl Transfer for Padded {
    fn map_tensors(&self, function: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self { tokens: function(&self.tokens)?, lengths: self.lengths.clone() })
    }
}
