use crate::data::identity::join;
use crate::data::{Origin, Random, Source};
use crate::error::{Error, Result};

/// Two sources side by side: images and their labels. A sample is the pair of their samples.
///
/// The origin of a record is the first source's; an error names the source that it comes from. A third
/// source goes into a `Zip` with the first two.
#[derive(Clone, Debug)]
pub struct Zip<A, B> {
    first: A,
    second: B,
}

impl<A: Source, B: Source> Zip<A, B> {
    /// Joins two sources.
    ///
    /// # Errors
    /// [`Error::Config`] where one has more records than the other.
    pub fn of(first: A, second: B) -> Result<Self> {
        let (here, there) = (first.len(), second.len());
        if here != there {
            return Err(Error::config("Zip::of", format!("{here} records beside {there}; Slice takes some")));
        }
        Ok(Self { first, second })
    }
}

impl<A: Source, B: Source> Source for Zip<A, B> {
    type Sample = (A::Sample, B::Sample);

    fn len(&self) -> u64 {
        self.first.len()
    }

    fn get(&self, index: u64, random: &mut Random) -> Result<Self::Sample> {
        let first = self.first.get(index, random);
        let first = first.map_err(|error| error.at_record(|| self.first.origin(index)))?;
        let second = self.second.get(index, random);
        Ok((first, second.map_err(|error| error.at_record(|| self.second.origin(index)))?))
    }

    fn origin(&self, index: u64) -> Origin {
        self.first.origin(index)
    }

    fn order(&self) -> u64 {
        join(self.first.order(), self.second.order())
    }
}
