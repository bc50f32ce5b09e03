use std::fmt;
use std::sync::Arc;

use super::Origin;
use crate::error::{Error, Result};
use crate::step::Mark;

/// Records that come one after another: lines of a file, rows of a CSV, what a pipe brings.
///
/// One thread at a time calls it. What takes time per record belongs into
/// [`LoaderBuilder::map`](super::LoaderBuilder::map), which runs on all workers.
pub trait Stream: Send + 'static {
    /// A record as it is read. Cheap to clone: the clone is what transforms get.
    type Record: Clone + Send + Sync + 'static;

    /// Begins an epoch, at its start or where a mark of this epoch says.
    ///
    /// # Errors
    /// Files that cannot be opened; a second epoch of what can be read once only; a mark that is
    /// not of these files.
    fn begin(&mut self, epoch: u64, from: Option<Mark>) -> Result<()>;

    /// The next record with its origin; `None` at the epoch's end.
    ///
    /// [`Error::Data`] is one record's own. After any other error nothing
    /// follows: the epoch ends with it, on every rank.
    fn next(&mut self) -> Option<Result<(Self::Record, Origin)>>;

    /// Passes over one record; false at the epoch's end. A record that cannot be used counts.
    ///
    /// # Errors
    /// Where nothing can follow.
    fn skip(&mut self) -> Result<bool> {
        match self.next() {
            Some(Err(error)) if !matches!(error, Error::Data { .. }) => Err(error),
            next => Ok(next.is_some()),
        }
    }

    /// Where the next record begins; `begin` goes on from there. `None` where only the start of an
    /// epoch can be gone back to.
    fn mark(&self) -> Option<Mark> {
        None
    }

    /// A number of what makes the order of the records: which files, and how they are shuffled.
    /// Positions of another number are refused.
    fn order(&self) -> u64 {
        0
    }

    /// Ends a read that waits, when the loader is dropped.
    fn interrupt(&self) -> Interrupt {
        Interrupt::Needless
    }
}

/// How a read that waits is ended.
#[derive(Clone, Default)]
pub enum Interrupt {
    /// Reads come back by themselves: files.
    #[default]
    Needless,
    /// This makes the read that waits, and later ones, fail.
    With(Arc<dyn Fn() + Send + Sync>),
    /// Nothing does: the thread that reads is left behind and ends when its read does.
    Impossible,
}

impl fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Needless => "Needless",
            Self::With(_) => "With",
            Self::Impossible => "Impossible",
        })
    }
}
