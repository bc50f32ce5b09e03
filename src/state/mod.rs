//! Named state: one visit serves saving, comparing and loading.

mod problems;
mod source;
mod visitor;

pub(crate) use source::{Found, Sink, Source, is_dense, strides_of};
pub use visitor::StateVisitor;
pub(crate) use visitor::{Like, Residence, check, collect, describe, load};

use std::collections::BTreeMap;

use tch::Tensor;

use crate::error::Result;

/// A tensor with its name. Clones share the tensor.
#[derive(Debug)]
pub struct Named {
    /// Unique in its list, parts joined by dots.
    pub name: String,
    /// The tensor itself, not a copy.
    pub tensor: Tensor,
}

impl Named {
    /// Names a tensor.
    pub fn new(name: impl Into<String>, tensor: &Tensor) -> Self {
        Self { name: name.into(), tensor: tensor.shallow_clone() }
    }
}

impl Clone for Named {
    fn clone(&self) -> Self {
        Self::new(self.name.clone(), &self.tensor)
    }
}

/// One entry of a state.
#[derive(Debug)]
pub enum Value {
    /// A tensor, in its own dtype.
    Tensor(Tensor),
    /// A real number.
    Float(f64),
    /// A whole number.
    Int(i64),
    /// A choice or a description.
    Text(String),
}

/// Named tensors and scalars, in the order of their names.
#[derive(Debug, Default)]
pub struct State {
    entries: BTreeMap<String, Value>,
}

impl State {
    /// The entry of a name.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.entries.get(name)
    }

    /// Adds or replaces an entry.
    pub fn insert(&mut self, name: impl Into<String>, value: Value) {
        self.entries.insert(name.into(), value);
    }

    /// Takes an entry out.
    pub fn remove(&mut self, name: &str) -> Option<Value> {
        self.entries.remove(name)
    }

    /// Entries by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl State {
    /// Collects the state that `visit` names; tensors are copied.
    ///
    /// # Errors
    /// Those of `visit`, and a name given twice.
    pub fn collect(visit: impl FnOnce(&mut StateVisitor<'_>) -> Result<()>) -> Result<Self> {
        let mut state = Self::default();
        collect(&mut state, visit)?;
        Ok(state)
    }

    /// Loads into what `visit` names: all entries or, where one is missing, unknown or of
    /// another shape, dtype or sort, none.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) lists every problem; nothing was changed then.
    pub fn load(&self, mut visit: impl FnMut(&mut StateVisitor<'_>) -> Result<()>) -> Result<()> {
        check(self, &mut visit)?;
        load(self, &mut visit).map_err(|broken| broken.error)
    }
}

impl IntoIterator for State {
    type Item = (String, Value);
    type IntoIter = std::collections::btree_map::IntoIter<String, Value>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.into_iter()
    }
}
