//! Named state: one visit serves saving, comparing and loading.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tch::Tensor;

use crate::error::{Error, Result};

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

    /// Collects the state that `visit` names; tensors are copied.
    ///
    /// # Errors
    /// Those of `visit`, and a name given twice.
    pub fn collect(visit: impl FnOnce(&mut StateVisitor<'_>) -> Result<()>) -> Result<Self> {
        let mut state = Self::default();
        let mut visitor = StateVisitor::new(Purpose::Collect(&mut state));
        visit(&mut visitor)?;
        visitor.finish()?;
        Ok(state)
    }

    /// Loads into what `visit` names: all entries or, where one is missing, unknown or of
    /// another shape, dtype or sort, none.
    ///
    /// # Errors
    /// [`Error::State`] lists every problem; nothing was changed then.
    pub fn load(&self, mut visit: impl FnMut(&mut StateVisitor<'_>) -> Result<()>) -> Result<()> {
        let mut visitor = StateVisitor::new(Purpose::Check(self));
        visit(&mut visitor)?;
        for name in self.entries.keys().filter(|name| !visitor.seen.contains(*name)) {
            visitor.problems.push(format!("`{name}` is unknown"));
        }
        visitor.finish()?;
        let mut visitor = StateVisitor::new(Purpose::Load(self));
        visit(&mut visitor)?;
        visitor.finish()
    }
}

enum Purpose<'a> {
    Collect(&'a mut State),
    Check(&'a State),
    Load(&'a State),
}

/// Brings a tensor's bytes to memory for the moment a visit needs them.
pub(crate) trait Residence {
    /// Before the visit reads or writes the tensor.
    fn arrive(&self, tensor: &Tensor) -> Result<()>;

    /// After it.
    fn leave(&self, tensor: &Tensor) -> Result<()>;
}

/// Passes over an object's state, to read it or to write it.
///
/// An object names each part of its state once, in one method, whatever the visit is for.
pub struct StateVisitor<'a> {
    purpose: Purpose<'a>,
    prefix: String,
    seen: BTreeSet<String>,
    problems: Vec<String>,
    residences: Vec<Arc<dyn Residence>>,
}

impl<'a> StateVisitor<'a> {
    fn new(purpose: Purpose<'a>) -> Self {
        Self {
            purpose,
            prefix: String::new(),
            seen: BTreeSet::new(),
            problems: Vec::new(),
            residences: Vec::new(),
        }
    }

    /// Whether this visit reads the state out.
    pub fn collects(&self) -> bool {
        matches!(self.purpose, Purpose::Collect(_))
    }

    /// Whether this visit writes; a checking visit comes first.
    pub fn loads(&self) -> bool {
        matches!(self.purpose, Purpose::Load(_))
    }

    /// Visits the parts of `visit` under `name.`.
    ///
    /// # Errors
    /// Those of `visit`.
    pub fn nested(&mut self, name: &str, visit: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let length = self.prefix.len();
        self.prefix.push_str(name);
        self.prefix.push('.');
        let visited = visit(self);
        self.prefix.truncate(length);
        visited
    }

    /// Visits with `visit` what may be away; its bytes come one tensor at a time.
    pub(crate) fn residing(
        &mut self,
        residence: Arc<dyn Residence>,
        visit: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        self.residences.push(residence);
        let visited = visit(self);
        self.residences.pop();
        visited
    }

    /// A tensor, copied out or written in place (its version is bumped).
    ///
    /// # Errors
    /// libtorch's, in copying.
    pub fn tensor(&mut self, name: &str, tensor: &mut Tensor) -> Result<()> {
        let name = self.name(name);
        match &mut self.purpose {
            Purpose::Collect(state) => {
                let copy = with_bytes(&self.residences, tensor, || crate::ffi::tensor::copy_of(tensor))?;
                state.insert(name, Value::Tensor(copy));
            }
            Purpose::Check(state) => {
                match state.get(&name) {
                    Some(Value::Tensor(saved)) if saved.size() != tensor.size() => self
                        .problems
                        .push(format!("`{name}` has shape {:?}, wanted {:?}", saved.size(), tensor.size())),
                    Some(Value::Tensor(saved)) if saved.kind() != tensor.kind() => self
                        .problems
                        .push(format!("`{name}` has dtype {:?}, wanted {:?}", saved.kind(), tensor.kind())),
                    Some(Value::Tensor(_)) => {}
                    other => self.problems.push(wrong(&name, other, "a tensor")),
                }
            }
            Purpose::Load(state) => {
                if let Some(Value::Tensor(saved)) = state.get(&name) {
                    let whole = tensor.shallow_clone();
                    with_bytes(&self.residences, &whole, || {
                        Ok(tch::no_grad(|| tensor.f_copy_(saved).map(drop))?)
                    })?;
                }
            }
        }
        Ok(())
    }

    /// A real number.
    ///
    /// # Errors
    /// None of its own.
    pub fn float(&mut self, name: &str, value: &mut f64) -> Result<()> {
        let found = self.scalar(
            name,
            || Value::Float(*value),
            |saved| match saved {
                Value::Float(saved) => Some(*saved),
                _ => None,
            },
            "a real number",
        );
        if let Some(saved) = found {
            *value = saved;
        }
        Ok(())
    }

    /// A count.
    ///
    /// # Errors
    /// None of its own.
    pub fn count(&mut self, name: &str, value: &mut u64) -> Result<()> {
        let found = self.scalar(
            name,
            || Value::Int(*value as i64),
            |saved| match saved {
                Value::Int(saved) => u64::try_from(*saved).ok(),
                _ => None,
            },
            "a count",
        );
        if let Some(saved) = found {
            *value = saved;
        }
        Ok(())
    }

    /// A description that must be equal on both sides: a setting that is not loaded.
    ///
    /// # Errors
    /// None of its own.
    pub fn must_equal(&mut self, name: &str, wanted: &str) -> Result<()> {
        let name = self.name(name);
        match &mut self.purpose {
            Purpose::Collect(state) => state.insert(name, Value::Text(wanted.to_owned())),
            Purpose::Check(state) => match state.get(&name) {
                Some(Value::Text(saved)) if saved == wanted => {}
                Some(Value::Text(saved)) => {
                    self.problems.push(format!("`{name}` is {saved}, wanted {wanted}"))
                }
                other => self.problems.push(wrong(&name, other, "a text")),
            },
            Purpose::Load(_) => {}
        }
        Ok(())
    }

    fn scalar<T>(
        &mut self,
        name: &str,
        read: impl FnOnce() -> Value,
        take: impl FnOnce(&Value) -> Option<T>,
        sort: &str,
    ) -> Option<T> {
        let name = self.name(name);
        match &mut self.purpose {
            Purpose::Collect(state) => state.insert(name, read()),
            Purpose::Check(state) => {
                let saved = state.get(&name);
                if saved.and_then(take).is_none() {
                    self.problems.push(wrong(&name, saved, sort));
                }
            }
            Purpose::Load(state) => return state.get(&name).and_then(take),
        }
        None
    }

    fn name(&mut self, name: &str) -> String {
        let name = format!("{}{name}", self.prefix);
        if !self.seen.insert(name.clone()) {
            self.problems.push(format!("`{name}` is named twice"));
        }
        name
    }

    fn finish(self) -> Result<()> {
        if self.problems.is_empty() { Ok(()) } else { Err(Error::State { problems: self.problems }) }
    }
}

/// Runs `visit` with the bytes of a tensor that may be away.
fn with_bytes<T>(
    residences: &[Arc<dyn Residence>],
    tensor: &Tensor,
    visit: impl FnOnce() -> Result<T>,
) -> Result<T> {
    residences.iter().try_for_each(|residence| residence.arrive(tensor))?;
    let visited = visit();
    residences.iter().try_for_each(|residence| residence.leave(tensor))?;
    visited
}

fn wrong(name: &str, found: Option<&Value>, wanted: &str) -> String {
    match found {
        None => format!("`{name}` is missing"),
        Some(_) => format!("`{name}` is not {wanted}"),
    }
}
