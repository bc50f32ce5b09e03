use super::reader::found;
use crate::data::{Random, Source};
use crate::error::Result;

/// Samples that are in memory; a record is a clone of one.
///
/// *Cost*: all samples, and the clones that are alive. Samples that are large and read by many are
/// cheaper to clone as `Arc`s, which [`LoaderBuilder::map`](crate::data::LoaderBuilder::map) then
/// reads through.
#[derive(Clone, Debug)]
pub struct InMemory<T>(Vec<T>);

impl<T: Clone + Send + Sync + 'static> InMemory<T> {
    /// Takes the samples.
    pub fn of(samples: Vec<T>) -> Self {
        Self(samples)
    }
}

impl<T: Clone + Send + Sync + 'static> Source for InMemory<T> {
    type Sample = T;

    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn get(&self, index: u64, _: &mut Random) -> Result<T> {
        let sample = usize::try_from(index).ok().and_then(|index| self.0.get(index));
        found(sample, self.len()).cloned()
    }
}
