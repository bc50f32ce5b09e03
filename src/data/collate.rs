use std::marker::PhantomData;

use super::buffers::Buffers;
use super::sample::Sample;
use super::transfer::Transfer;
use crate::error::Result;
use crate::step::Batch;

/// Makes a batch of samples, which come one at a time, in any order, from several threads.
///
/// [`Stacked`] is the usual one; [`Pad`](super::Pad) and [`Pack`](super::Pack) are for samples of
/// unequal length; a closure over all samples of a batch, through
/// [`LoaderBuilder::collate_with`](super::LoaderBuilder::collate_with), is for all else.
pub trait Collate<S>: Send + Sync + 'static {
    /// A batch that is being filled.
    type Partial: Send + 'static;
    /// What the training gets.
    type Batch: Batch + Transfer + Send + 'static;

    /// Asked once, when the loader is built.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for a setting out of its range.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Whether the first sample that comes decides which others fit. Where one then does not, the
    /// batch is made anew in the order of its rows, so that the same ones fit each time.
    fn first_decides(&self) -> bool {
        false
    }

    /// Begins a batch of up to `rows` samples like `first`. Tensors that come from `buffers` use memory of
    /// batches that are gone.
    ///
    /// # Errors
    /// Out of memory: it is asked again, with the same sample. [`Error::Data`](crate::Error::Data) for a sample that
    /// can be in no batch: the next one is the first.
    fn begin(&self, rows: usize, first: &S, buffers: &Buffers) -> Result<Self::Partial>;

    /// Takes the sample of a row, while the batch's other workers wait: nothing here should take long.
    ///
    /// # Errors
    /// [`Error::Data`](crate::Error::Data) for a sample that does not fit its batch. Out of memory: the sample is
    /// made again.
    fn put(&self, partial: &mut Self::Partial, row: usize, sample: S) -> Result<()>;

    /// The batch of the rows that are `present`, in ascending order; at least one is.
    ///
    /// # Errors
    /// Out of memory: it is asked again.
    fn end(&self, partial: &mut Self::Partial, present: &[usize]) -> Result<Self::Batch>;
}

/// Samples of one shape, stacked: see [`Sample`].
///
/// *Cost*: the batch's bytes, written once, in [`Buffers`] that are used again when their batch is gone.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stacked;

impl<S: Sample> Collate<S> for Stacked {
    type Partial = S::Rows;
    type Batch = S::Batch;

    fn begin(&self, rows: usize, first: &S, buffers: &Buffers) -> Result<S::Rows> {
        first.rows(rows, buffers)
    }

    fn put(&self, partial: &mut S::Rows, row: usize, sample: S) -> Result<()> {
        sample.put(partial, row)
    }

    fn end(&self, partial: &mut S::Rows, present: &[usize]) -> Result<S::Batch> {
        S::batch(partial, present)
    }

    fn first_decides(&self) -> bool {
        true
    }
}

/// Samples that wait for their batch to be complete.
#[derive(Debug)]
pub struct Waiting<S> {
    samples: Vec<Option<S>>,
    /// For the batch.
    pub(super) buffers: Buffers,
}

impl<S> Waiting<S> {
    pub(super) fn new(rows: usize, buffers: &Buffers) -> Self {
        Self { samples: (0..rows).map(|_| None).collect(), buffers: buffers.clone() }
    }

    pub(super) fn put(&mut self, row: usize, sample: S) {
        if let Some(place) = self.samples.get_mut(row) {
            *place = Some(sample);
        }
    }

    /// Those that came, in the order of their rows.
    pub(super) fn present(&self) -> impl Iterator<Item = &S> + Clone {
        self.samples.iter().flatten()
    }
}

/// All samples of a batch, by a function of the user's.
///
/// *Cost*: the samples wait until the batch is complete; what the function allocates is its own.
#[derive(Debug)]
pub struct With<F, B> {
    function: F,
    batch: PhantomData<fn() -> B>,
}

impl<F, B> With<F, B> {
    pub(super) fn new(function: F) -> Self {
        Self { function, batch: PhantomData }
    }
}

impl<S, F, B> Collate<S> for With<F, B>
where
    S: Send + 'static,
    F: Fn(&[&S]) -> Result<B> + Send + Sync + 'static,
    B: Batch + Transfer + Send + 'static,
{
    type Partial = Waiting<S>;
    type Batch = B;

    fn begin(&self, rows: usize, _: &S, buffers: &Buffers) -> Result<Waiting<S>> {
        Ok(Waiting::new(rows, buffers))
    }

    fn put(&self, partial: &mut Waiting<S>, row: usize, sample: S) -> Result<()> {
        partial.put(row, sample);
        Ok(())
    }

    fn end(&self, partial: &mut Waiting<S>, _: &[usize]) -> Result<B> {
        let samples: Vec<&S> = partial.present().collect();
        (self.function)(&samples)
    }
}
