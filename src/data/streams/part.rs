use std::ops::Range;

use crate::data::identity::join;
use crate::data::{Interrupt, Origin, Stream};
use crate::error::{Error, Result};
use crate::step::Mark;

/// Some of a stream's records as a stream of their own: those to train on, those to validate with.
///
/// The range counts the records of an epoch, from 0; one that cannot be used counts. A stream that
/// ends within the range gives what it has of it. Errors name the records by their own files.
///
/// *Cost*: an epoch passes over what comes before the range. No record beyond it is read.
///
/// *Limits*: the range is of the order in which the stream gives its records. A stream that shuffles its
/// files by epoch ([`Lines::shuffle_files`](super::Lines::shuffle_files)) has other records there in
/// each: take the parts of a list of files that stays, and leave the shuffling to
/// [`LoaderBuilder::shuffle`](crate::data::LoaderBuilder::shuffle).
///
/// ```
/// # fn main() -> memfit::Result<()> {
/// use memfit::data::{Lines, Loader, Part};
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let file = folder.path().join("lines.txt");
/// # std::fs::write(&file, "a\nb\nc\nd\ne\n").unwrap();
/// let part = |range| {
///     let lines = Part::of(Lines::of_file(&file), range);
///     Loader::stream(lines).map(|line, _| Ok(line.bytes()[0])).batch(4)
/// };
/// let training: Vec<_> = part(0..4).shuffle(1).build()?.collect::<memfit::Result<_>>()?;
/// let validation: Vec<_> = part(4..u64::MAX).build()?.collect::<memfit::Result<_>>()?;
/// assert_eq!((training[0].batch.size(), validation[0].batch.size()), (vec![4], vec![1]));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Part<S> {
    inner: S,
    range: Range<u64>,
    /// Records of the stream that come before the next one.
    at: u64,
}

impl<S: Stream> Part<S> {
    /// The records of a range.
    pub fn of(stream: S, range: Range<u64>) -> Self {
        Self { inner: stream, range, at: 0 }
    }

    fn is_over(&self) -> bool {
        self.range.is_empty() || self.at >= self.range.end
    }
}

impl<S: Stream> Stream for Part<S> {
    type Record = S::Record;

    fn begin(&mut self, epoch: u64, from: Option<Mark>) -> Result<()> {
        let from = from.map(|mark| of_stream(mark, &self.range)).transpose()?;
        self.inner.begin(epoch, from)?;
        self.at = from.map_or(0, |mark| mark.record);
        while self.at < self.range.start && !self.range.is_empty() && self.inner.skip()? {
            self.at += 1;
        }
        Ok(())
    }

    fn next(&mut self) -> Option<Result<(Self::Record, Origin)>> {
        if self.is_over() {
            return None;
        }
        let next = self.inner.next()?;
        self.at += 1;
        Some(next)
    }

    fn skip(&mut self) -> Result<bool> {
        let found = !self.is_over() && self.inner.skip()?;
        self.at += u64::from(found);
        Ok(found)
    }

    /// Counts the records of the part.
    fn mark(&self) -> Option<Mark> {
        let mark = self.inner.mark()?;
        Some(Mark { record: mark.record.checked_sub(self.range.start)?, ..mark })
    }

    fn order(&self) -> u64 {
        let Range { start, end } = self.range;
        join(join(self.inner.order(), start), end)
    }

    fn interrupt(&self) -> Interrupt {
        self.inner.interrupt()
    }
}

/// A mark of the part as one of its stream.
fn of_stream(mark: Mark, range: &Range<u64>) -> Result<Mark> {
    match mark.record.checked_add(range.start) {
        Some(record) if record <= range.end => Ok(Mark { record, ..mark }),
        _ => {
            let (at, len) = (mark.record, range.end.saturating_sub(range.start));
            let problem = format!("the data position is at record {at} of a part of {len}");
            Err(Error::State { problems: vec![problem] })
        }
    }
}
