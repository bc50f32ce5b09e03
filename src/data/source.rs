use super::{Origin, Random};
use crate::error::Result;

/// Records that can be had in any order, from any thread.
///
/// Reading is a call per record. A source holds no more than it needs to find a record: files
/// stay files. Transforms belong into [`LoaderBuilder::map`](super::LoaderBuilder::map), or here,
/// where they need what only the source knows; `random` is the sample's own.
///
/// ```
/// use memfit::Result;
/// use memfit::data::{Random, Source};
///
/// /// The squares, as rows of one number and its label.
/// struct Squares(u64);
///
/// impl Source for Squares {
///     type Sample = (f32, i64);
///
///     fn len(&self) -> u64 {
///         self.0
///     }
///
///     fn get(&self, index: u64, _random: &mut Random) -> Result<Self::Sample> {
///         Ok(((index * index) as f32, index as i64))
///     }
/// }
/// ```
#[allow(clippy::len_without_is_empty)]
pub trait Source: Send + Sync + 'static {
    /// What a record is read as.
    type Sample: Send + 'static;

    /// Number of records.
    fn len(&self) -> u64;

    /// Reads one record, of `0..len`.
    ///
    /// # Errors
    /// [`Error::data`](crate::Error::data) for a record that cannot be used. The loader adds where
    /// it comes from.
    fn get(&self, index: u64, random: &mut Random) -> Result<Self::Sample>;

    /// Where a record comes from, for errors.
    fn origin(&self, index: u64) -> Origin {
        Origin::record(index)
    }

    /// A number of what the records' numbers stand for: which files, which of their rows, which of
    /// another source's records. Positions of another number are refused, and so are those of another
    /// [`len`](Self::len). A loader asks once, when it is built.
    ///
    /// It is 0 unless given: right for a source that has nothing to tell apart. One that wraps others
    /// hands theirs on.
    fn order(&self) -> u64 {
        0
    }
}

macro_rules! sources_behind {
    ($($pointer:ty)*) => {$(
        impl<S: Source + ?Sized> Source for $pointer {
            type Sample = S::Sample;

            fn len(&self) -> u64 {
                (**self).len()
            }

            fn get(&self, index: u64, random: &mut Random) -> Result<Self::Sample> {
                (**self).get(index, random)
            }

            fn origin(&self, index: u64) -> Origin {
                (**self).origin(index)
            }

            fn order(&self) -> u64 {
                (**self).order()
            }
        }
    )*};
}

sources_behind!(std::sync::Arc<S> Box<S>);
