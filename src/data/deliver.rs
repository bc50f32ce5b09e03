use crate::error::{Error, Result};
use crate::step::DataPosition;

/// An engine, whatever its jobs and samples are.
pub(super) trait Deliver<B>: Send + Sync {
    /// Drops what is built, and plans from a position on.
    fn begin(&self, from: DataPosition) -> Result<()>;

    /// The next batch in order; without workers it is built here.
    fn next(&self, workers: usize) -> Next<B>;

    /// Which order positions count in.
    fn order(&self) -> u64;

    /// Samples of an epoch, where that is known.
    fn samples(&self) -> Option<u64>;

    /// Whether the next batch is there already.
    fn is_ready(&self) -> bool;

    /// A worker's life.
    fn work(&self);

    /// Ends every worker; one that waits in a read is woken where that can be done.
    fn stop(&self);

    /// Whether a worker may be in a read that nothing ends.
    fn may_hang(&self) -> bool;
}

/// What the consumer gets.
pub(super) enum Next<B> {
    /// With the position after it.
    Batch(Done<B>, DataPosition),
    /// Memory ran out, and the batch is still there; or the source panicked, and the epoch ends.
    Failed(Error),
    EpochEnds,
}

/// A batch that is complete.
pub(super) struct Done<B> {
    /// Of rows, in their order.
    pub(super) errors: Vec<Error>,
    /// The other rows; `None` where there are none.
    pub(super) batch: Option<B>,
    /// Why the batch as a whole could not be made.
    pub(super) own: Option<Error>,
}
