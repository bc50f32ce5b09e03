use std::ops::Range;

use tch::Tensor;

use super::DataPosition;
use crate::error::{Error, Result};

/// A batch that knows its rows, so that it can be split into micro-batches.
///
/// Implemented for a tensor (rows: its first dimension), tuples of batches and vectors of
/// tensors, whose parts must have as many rows each.
pub trait Batch: Sized {
    /// Number of rows.
    fn rows(&self) -> i64;

    /// Number of tokens that windows by tokens count; rows unless a type knows better.
    fn tokens(&self) -> u64 {
        u64::try_from(self.rows()).unwrap_or_default()
    }

    /// How far the data is consumed once this batch is; `None` where nobody counts. What a
    /// [`Loader`](crate::data::Loader) gives knows it, and a [`Stack`](crate::Stack) keeps that of the
    /// last step that returned.
    fn data_position(&self) -> Option<DataPosition> {
        None
    }

    /// The rows of a range, as views where the type allows.
    ///
    /// # Errors
    /// Where the range lies outside the batch or its parts differ in rows.
    fn take_rows(&self, rows: Range<i64>) -> Result<Self>;
}

impl Batch for Tensor {
    fn rows(&self) -> i64 {
        self.size().first().copied().unwrap_or(1)
    }

    /// Elements of an integer tensor of two or more dimensions (token ids), rows otherwise.
    fn tokens(&self) -> u64 {
        let ids = self.dim() >= 2 && !self.is_floating_point();
        u64::try_from(if ids { self.numel() as i64 } else { self.rows() }).unwrap_or_default()
    }

    fn take_rows(&self, rows: Range<i64>) -> Result<Self> {
        if rows.start < 0 || rows.end > self.rows() || rows.start > rows.end {
            let problem = format!("rows {rows:?} of a tensor with {} rows", self.rows());
            return Err(Error::config("Batch::take_rows", problem));
        }
        Ok(self.f_narrow(0, rows.start, rows.end - rows.start)?)
    }
}

impl Batch for Vec<Tensor> {
    fn rows(&self) -> i64 {
        self.first().map_or(0, Batch::rows)
    }

    fn tokens(&self) -> u64 {
        self.first().map_or(0, Batch::tokens)
    }

    fn take_rows(&self, rows: Range<i64>) -> Result<Self> {
        same_rows(self.iter().map(Batch::rows))?;
        self.iter().map(|part| part.take_rows(rows.clone())).collect()
    }
}

macro_rules! tuple_batch {
    ($first:ident $($rest:ident)*) => {
        impl<$first: Batch, $($rest: Batch),*> Batch for ($first, $($rest,)*) {
            fn rows(&self) -> i64 {
                self.0.rows()
            }

            fn tokens(&self) -> u64 {
                self.0.tokens()
            }

            /// That of its first part which has one.
            #[allow(non_snake_case)]
            fn data_position(&self) -> Option<DataPosition> {
                let ($first, $($rest,)*) = self;
                $first.data_position()$(.or_else(|| $rest.data_position()))*
            }

            #[allow(non_snake_case)]
            fn take_rows(&self, rows: Range<i64>) -> Result<Self> {
                let ($first, $($rest,)*) = self;
                same_rows([$first.rows(), $($rest.rows()),*].into_iter())?;
                Ok(($first.take_rows(rows.clone())?, $($rest.take_rows(rows.clone())?,)*))
            }
        }
    };
}

tuple_batch!(A);
tuple_batch!(A B);
tuple_batch!(A B C);
tuple_batch!(A B C D);

fn same_rows(mut rows: impl Iterator<Item = i64>) -> Result<()> {
    let first = rows.next();
    match rows.find(|other| Some(*other) != first) {
        Some(other) => {
            let problem = format!("its parts have {} and {other} rows", first.unwrap_or_default());
            Err(Error::config("Batch", problem))
        }
        None => Ok(()),
    }
}
