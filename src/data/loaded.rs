use std::ops::{Deref, Range};

use crate::error::Result;
use crate::step::{Batch, DataPosition};

/// A batch from a [`Loader`](super::Loader), with the position of the data after it.
#[derive(Debug)]
pub struct Loaded<B> {
    /// The batch.
    pub batch: B,
    /// How far the data is consumed once it is.
    pub position: DataPosition,
}

impl<B> Deref for Loaded<B> {
    type Target = B;

    fn deref(&self) -> &B {
        &self.batch
    }
}

impl<B: Batch> Batch for Loaded<B> {
    fn rows(&self) -> i64 {
        self.batch.rows()
    }

    fn tokens(&self) -> u64 {
        self.batch.tokens()
    }

    fn data_position(&self) -> Option<DataPosition> {
        Some(self.position)
    }

    fn take_rows(&self, rows: Range<i64>) -> Result<Self> {
        Ok(Self { batch: self.batch.take_rows(rows)?, position: self.position })
    }
}
