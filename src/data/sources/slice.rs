use std::ops::Range;

use super::reader::{found, inside};
use crate::data::identity::join;
use crate::data::{Origin, Random, Source};
use crate::error::{Error, Result};

/// Some records of another source: a validation part, a fold, what a filter chose.
///
/// A record's origin and errors are those of the source. To take several slices of one source,
/// put it into an `Arc`.
///
/// *Cost*: nothing for a range; 8 bytes per record for a list.
#[derive(Clone, Debug)]
pub struct Slice<S> {
    inner: S,
    chosen: Chosen,
}

#[derive(Clone, Debug)]
enum Chosen {
    Range(Range<u64>),
    List(Vec<u64>),
}

impl<S: Source> Slice<S> {
    /// The records of a range.
    ///
    /// # Errors
    /// [`Error::Config`] for a range beyond the source.
    pub fn range(source: S, range: Range<u64>) -> Result<Self> {
        inside("Slice::range", &range, source.len())?;
        Ok(Self { inner: source, chosen: Chosen::Range(range) })
    }

    /// The records of a list, in its order; one may be there more than once.
    ///
    /// # Errors
    /// [`Error::Config`] for a number beyond the source.
    pub fn list(source: S, records: Vec<u64>) -> Result<Self> {
        let len = source.len();
        match records.iter().find(|record| **record >= len) {
            Some(beyond) => {
                Err(Error::config("Slice::list", format!("{beyond} is not one of {len} records")))
            }
            None => Ok(Self { inner: source, chosen: Chosen::List(records) }),
        }
    }

    fn number(&self, index: u64) -> Option<u64> {
        match &self.chosen {
            Chosen::Range(range) => range.start.checked_add(index).filter(|number| *number < range.end),
            Chosen::List(records) => records.get(usize::try_from(index).ok()?).copied(),
        }
    }
}

impl<S: Source> Source for Slice<S> {
    type Sample = S::Sample;

    fn len(&self) -> u64 {
        match &self.chosen {
            Chosen::Range(range) => range.end - range.start,
            Chosen::List(records) => records.len() as u64,
        }
    }

    fn get(&self, index: u64, random: &mut Random) -> Result<S::Sample> {
        self.inner.get(found(self.number(index), self.len())?, random)
    }

    fn origin(&self, index: u64) -> Origin {
        self.number(index).map_or_else(|| Origin::record(index), |number| self.inner.origin(number))
    }

    fn order(&self) -> u64 {
        let inner = self.inner.order();
        match &self.chosen {
            // Where it ends says their number.
            Chosen::Range(range) => join(inner, range.start),
            Chosen::List(records) => records.iter().fold(inner, |list, record| join(list, *record)),
        }
    }
}
