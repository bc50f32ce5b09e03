use std::ops::Range;

use tch::kind::Element;
use tch::{Device, Kind, Tensor};

use super::buffers::Buffers;
use super::collate::{Collate, Waiting};
use super::sample::Sample;
use super::shifted::{Shifted, shifted};
use super::transfer::Transfer;
use crate::error::{Error, Result};
use crate::ffi;
use crate::step::Batch;

/// Makes lists of unequal length rows of one length, filled up at their ends.
///
/// Collates samples `Vec<T>` into [`Padded`], and `(Vec<T>, U)` into `(Padded, U's batch)`.
///
/// *Cost*: the samples wait until the batch is complete: at its end their bytes and the batch's,
/// n × length × the dtype's. What the padding costs the training is the part of the batch that
/// [`Batch::tokens`] does not count; [`Pack`](super::Pack) has less of it.
///
/// ```
/// use memfit::data::{Loader, Pad, Random, Source};
///
/// struct Words;
/// impl Source for Words {
///     type Sample = Vec<i64>;
///     fn len(&self) -> u64 { 2 }
///     fn get(&self, index: u64, _: &mut Random) -> memfit::Result<Vec<i64>> {
///         Ok(vec![7; 2 + 2 * index as usize])
///     }
/// }
/// let mut loader = Loader::new(Words).batch(2).collate(Pad::to_longest(0)).build()?;
/// let batch = loader.next().expect("a batch")?;
/// assert_eq!(batch.tokens.size(), [2, 4]);
/// assert_eq!(batch.next_token(-100)?.count, 1 + 3);   // what Loss::mean needs
/// # Ok::<(), memfit::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Pad<T> {
    value: T,
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

impl<T: Element + Copy + 'static> Pad<T> {
    /// To the length of the longest sample of each batch.
    pub fn to_longest(value: T) -> Self {
        Self { value, length: None, multiple: 1, longer: Longer::Refused }
    }

    /// To one length for all batches; a longer sample is an error.
    pub fn to(length: usize, value: T) -> Self {
        Self { length: Some(length), ..Self::to_longest(value) }
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

    fn check(&self, sample: &mut Vec<T>) -> Result<()> {
        match (self.length, self.longer) {
            (Some(length), Longer::Refused) if sample.len() > length => Err(Error::data(format!(
                "it has {} elements where rows have {length}; cut it with Pad::cut_longer, or take longer rows",
                sample.len()
            ))),
            (Some(length), Longer::Cut) => {
                sample.truncate(length);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn batch<'a>(&self, samples: impl Iterator<Item = &'a Vec<T>> + Clone) -> Result<Padded>
    where
        T: 'a,
    {
        let longest = samples.clone().map(Vec::len).max().unwrap_or_default();
        let length = self.length.unwrap_or(longest).next_multiple_of(self.multiple);
        let lengths: Vec<i64> = samples.clone().map(|sample| sample.len() as i64).collect();
        let size = [lengths.len() as i64, length as i64];
        let mut filling =
            ffi::bytes::Filling::new(Tensor::f_empty(size, (ffi::bytes::kind_of::<T>(), Device::Cpu))?)?;
        let padding = vec![self.value; length];
        let width = std::mem::size_of::<T>();
        for (row, sample) in samples.enumerate() {
            filling.put(row * length * width, ffi::bytes::of(sample));
            filling.put((row * length + sample.len()) * width, ffi::bytes::of(&padding[sample.len()..]));
        }
        Ok(Padded { tokens: filling.new_value().shallow_clone(), lengths })
    }
}

impl<T: Element + Copy + Send + Sync + 'static> Collate<Vec<T>> for Pad<T> {
    type Partial = Waiting<Vec<T>>;
    type Batch = Padded;

    fn begin(&self, rows: usize, _: &Vec<T>, _: &Buffers) -> Result<Self::Partial> {
        Ok(Waiting::new(rows))
    }

    fn put(&self, partial: &mut Self::Partial, row: usize, mut sample: Vec<T>) -> Result<()> {
        self.check(&mut sample)?;
        partial.put(row, sample);
        Ok(())
    }

    fn end(&self, partial: &mut Self::Partial, _: &[usize]) -> Result<Padded> {
        self.batch(partial.present())
    }
}

impl<T, U> Collate<(Vec<T>, U)> for Pad<T>
where
    T: Element + Copy + Send + Sync + 'static,
    U: Sample,
{
    type Partial = (Waiting<Vec<T>>, U::Rows);
    type Batch = (Padded, U::Batch);

    fn first_decides(&self) -> bool {
        true
    }

    fn begin(&self, rows: usize, first: &(Vec<T>, U), buffers: &Buffers) -> Result<Self::Partial> {
        Ok((Waiting::new(rows), first.1.rows(rows, buffers)?))
    }

    fn put(&self, partial: &mut Self::Partial, row: usize, sample: (Vec<T>, U)) -> Result<()> {
        let (mut list, beside) = sample;
        self.check(&mut list)?;
        beside.put(&mut partial.1, row)?;
        partial.0.put(row, list);
        Ok(())
    }

    fn end(&self, partial: &mut Self::Partial, present: &[usize]) -> Result<Self::Batch> {
        Ok((self.batch(partial.0.present())?, U::batch(&mut partial.1, present)?))
    }
}

/// Rows of one length, of which each begins with a sample.
#[derive(Debug)]
pub struct Padded {
    /// `[n, length]`.
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
        let places = Tensor::f_arange(self.tokens.size()[1], (Kind::Int64, device))?;
        let lengths = Tensor::f_from_slice(&self.lengths)?.f_to_device(device)?;
        Ok(places.f_lt_tensor(&lengths.f_unsqueeze(1)?)?)
    }

    /// Inputs, and for each the token that follows it: labels beyond a sample's end are `ignore`.
    ///
    /// # Errors
    /// libtorch's.
    pub fn next_token(&self, ignore: i64) -> Result<Shifted> {
        let width = self.tokens.size()[1];
        let followed = (width - 1).max(0);
        let follows = self.mask()?.f_narrow(1, width - followed, followed)?;
        let count = self.lengths.iter().map(|length| (length - 1).max(0) as u64).sum();
        shifted(&self.tokens, &follows, ignore, count)
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
