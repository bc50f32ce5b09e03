use crate::error::Result;
use crate::state::StateVisitor;

/// How far training has consumed its data: what a run that resumes needs to get exactly the
/// samples that remain. It counts over all ranks, so that their number may change.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DataPosition {
    /// The epoch, from 0.
    pub epoch: u64,
    /// Samples consumed of the epoch's order, by all ranks; bad ones that were passed over count.
    pub samples: u64,
    /// Which order it counts in: a number of the seed, the length and what else makes the order.
    pub order: u64,
    /// Where in the files that is, or somewhere before it: a shortcut.
    pub mark: Option<Mark>,
}

impl DataPosition {
    /// Visits it as a part of some state: of a strategy's, or of what a snapshot takes along as
    /// [`Extras`](crate::snapshot::Extras). The stack visits its own.
    ///
    /// # Errors
    /// The visitor's.
    pub fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        let Self { epoch, samples, order, mark } = self;
        visitor.count("epoch", epoch)?;
        visitor.count("samples", samples)?;
        visitor.bits("order", order)?;
        visitor.nested("mark", |visitor| visit_mark(visitor, mark))
    }

    /// The start of an epoch. [`Loader::seek`](crate::data::Loader::seek) takes it whatever the order
    /// is.
    pub fn at_epoch(epoch: u64) -> Self {
        Self { epoch, ..Self::default() }
    }
}

/// A place in the files of a stream, in the order that the epoch reads them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// Number of the file in the epoch's order.
    pub file: u64,
    /// Bytes of it before the next record; of what was decompressed, in a compressed file.
    pub offset: u64,
    /// Records of the epoch before the next one.
    pub record: u64,
}

fn visit_mark(visitor: &mut StateVisitor<'_>, mark: &mut Option<Mark>) -> Result<()> {
    let mut there = visitor.exists("known", mark.is_some())?.then(|| mark.unwrap_or_default());
    if let Some(Mark { file, offset, record }) = &mut there {
        visitor.count("file", file)?;
        visitor.count("offset", offset)?;
        visitor.count("record", record)?;
    }
    if visitor.loads() {
        *mark = there;
    }
    Ok(())
}
