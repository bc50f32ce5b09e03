use std::collections::BTreeSet;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::Value;
use super::problems::{contrast, misfit, wrong};
use super::source::{Found, Sink, Source};
use crate::error::{Error, Result};

/// Passes over an object's state, to read it or to write it.
///
/// An object names each part of its state once, in one method, whatever the visit is for.
pub struct StateVisitor<'a> {
    purpose: Purpose<'a>,
    prefix: String,
    seen: BTreeSet<String>,
    problems: Vec<String>,
    residences: Vec<Arc<dyn Residence>>,
    in_window: bool,
    touched: bool,
}

enum Purpose<'a> {
    /// Names, shapes and scalars; no tensor's bytes are needed.
    Describe(&'a mut dyn Sink),
    /// One tensor at a time, its bytes here.
    Collect(&'a mut dyn Sink),
    Check(&'a dyn Source),
    Load(&'a dyn Source),
}

/// Brings a tensor's bytes to memory for the moment a visit needs them.
pub(crate) trait Residence {
    /// Before the visit reads or writes the tensor.
    fn arrive(&self, tensor: &Tensor) -> Result<()>;

    /// After it.
    fn leave(&self, tensor: &Tensor) -> Result<()>;
}

/// What a tensor that a load makes has to be.
#[derive(Clone, Debug)]
pub(crate) struct Like {
    pub(crate) size: Vec<i64>,
    /// `None`: whatever was saved.
    pub(crate) kind: Option<Kind>,
    pub(crate) device: Device,
}

/// A load that did not come to its end.
pub(crate) struct Broken {
    pub(crate) error: Error,
    /// Whether a tensor was written before.
    pub(crate) touched: bool,
}

/// Names and describes everything for `sink`, without the tensors' bytes.
pub(crate) fn describe(
    sink: &mut dyn Sink,
    visit: impl FnOnce(&mut StateVisitor<'_>) -> Result<()>,
) -> Result<()> {
    run(Purpose::Describe(sink), visit).map_err(|broken| broken.error)
}

/// Hands everything to `sink`, one tensor at a time.
pub(crate) fn collect(
    sink: &mut dyn Sink,
    visit: impl FnOnce(&mut StateVisitor<'_>) -> Result<()>,
) -> Result<()> {
    run(Purpose::Collect(sink), visit).map_err(|broken| broken.error)
}

/// Whether `source` fits what `visit` names: all of it, and nothing else.
pub(crate) fn check(
    source: &dyn Source,
    visit: impl FnOnce(&mut StateVisitor<'_>) -> Result<()>,
) -> Result<()> {
    let mut visitor = StateVisitor::new(Purpose::Check(source));
    visit(&mut visitor)?;
    for name in source.names() {
        if !visitor.seen.contains(name) {
            visitor.problems.push(format!("`{name}` is unknown"));
        }
    }
    visitor.finish()
}

/// Loads from a source that was checked.
pub(crate) fn load(
    source: &dyn Source,
    visit: impl FnOnce(&mut StateVisitor<'_>) -> Result<()>,
) -> Result<(), Broken> {
    run(Purpose::Load(source), visit)
}

fn run(purpose: Purpose<'_>, visit: impl FnOnce(&mut StateVisitor<'_>) -> Result<()>) -> Result<(), Broken> {
    let mut visitor = StateVisitor::new(purpose);
    let visited = visit(&mut visitor);
    let touched = visitor.touched;
    visited.and_then(|()| visitor.finish()).map_err(|error| Broken { error, touched })
}

impl<'a> StateVisitor<'a> {
    fn new(purpose: Purpose<'a>) -> Self {
        Self {
            purpose,
            prefix: String::new(),
            seen: BTreeSet::new(),
            problems: Vec::new(),
            residences: Vec::new(),
            in_window: false,
            touched: false,
        }
    }

    /// Whether this visit reads the state out.
    pub fn collects(&self) -> bool {
        matches!(self.purpose, Purpose::Describe(_) | Purpose::Collect(_))
    }

    /// Whether this visit writes; a checking visit comes first.
    pub fn loads(&self) -> bool {
        matches!(self.purpose, Purpose::Load(_))
    }

    /// Whether the state is that of an open window: what only lives within one is visited
    /// only then.
    pub fn in_window(&self) -> bool {
        self.in_window
    }

    pub(crate) fn set_in_window(&mut self, in_window: bool) {
        self.in_window = in_window;
    }

    /// Whether the bytes of tensors have to be here.
    pub(crate) fn needs_bytes(&self) -> bool {
        matches!(self.purpose, Purpose::Collect(_) | Purpose::Load(_))
    }

    /// Visits the parts of `visit` under `name.`.
    ///
    /// # Errors
    /// Those of `visit`.
    pub fn nested<T>(&mut self, name: &str, visit: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
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

    /// A tensor, read out or written in place (its version is bumped).
    ///
    /// # Errors
    /// libtorch's, in copying; the sink's or the source's.
    pub fn tensor(&mut self, name: &str, tensor: &mut Tensor) -> Result<()> {
        let name = self.name(name);
        match &mut self.purpose {
            Purpose::Describe(sink) => sink.tensor(&name, tensor)?,
            Purpose::Collect(sink) => {
                with_bytes(&self.residences, tensor, || sink.tensor(&name, tensor))?;
            }
            Purpose::Check(source) => {
                self.problems.extend(misfit(&name, source.find(&name), &tensor.size(), Some(tensor.kind())));
            }
            Purpose::Load(source) => {
                self.touched = true;
                with_bytes(&self.residences, tensor, || source.read(&name, tensor))?;
            }
        }
        Ok(())
    }

    /// A tensor that may be absent: loading makes it, or takes it away, as it was saved. It
    /// has the shape, dtype and device of `like`.
    ///
    /// # Errors
    /// As [`StateVisitor::tensor`]; out of memory.
    pub fn optional(&mut self, name: &str, tensor: &mut Option<Tensor>, like: &Tensor) -> Result<()> {
        let like = Like { size: like.size(), kind: Some(like.kind()), device: like.device() };
        let made = self.made(name, tensor.as_ref(), &like)?;
        if self.loads() {
            *tensor = made;
        }
        Ok(())
    }

    /// A tensor that a load makes, where one was saved; nothing else is written.
    pub(crate) fn made(
        &mut self,
        name: &str,
        tensor: Option<&Tensor>,
        like: &Like,
    ) -> Result<Option<Tensor>> {
        let name = self.name(name);
        match (&mut self.purpose, tensor) {
            (Purpose::Describe(sink), Some(tensor)) => sink.tensor(&name, tensor)?,
            (Purpose::Collect(sink), Some(tensor)) => {
                with_bytes(&self.residences, tensor, || sink.tensor(&name, tensor))?;
            }
            (Purpose::Describe(_) | Purpose::Collect(_), None) => {}
            (Purpose::Check(source), _) => {
                if let found @ Some(_) = source.find(&name) {
                    self.problems.extend(misfit(&name, found, &like.size, like.kind));
                }
            }
            (Purpose::Load(source), _) => {
                let Some(Found::Tensor { size, kind, strides }) = source.find(&name) else { return Ok(None) };
                let options = (kind, like.device);
                let tensor = match strides {
                    Some(strides) => Tensor::f_empty_strided(&size, &strides, options)?,
                    None => Tensor::f_empty(&size, options)?,
                };
                source.read(&name, &tensor)?;
                return Ok(Some(tensor));
            }
        }
        Ok(None)
    }

    /// In a check, that the next entry of this name was saved.
    pub(crate) fn must_have(&mut self, name: &str) {
        if let Purpose::Check(source) = &self.purpose {
            let name = format!("{}{name}", self.prefix);
            if source.find(&name).is_none() {
                self.problems.push(wrong(&name, false, "a tensor"));
            }
        }
    }

    /// A real number.
    ///
    /// # Errors
    /// The sink's.
    pub fn float(&mut self, name: &str, value: &mut f64) -> Result<()> {
        let read = Value::Float(*value);
        let take = |saved: &Value| match saved {
            Value::Float(saved) => Some(*saved),
            _ => None,
        };
        if let Some(saved) = self.scalar(name, read, take, "a real number")? {
            *value = saved;
        }
        Ok(())
    }

    /// A count.
    ///
    /// # Errors
    /// The sink's.
    pub fn count(&mut self, name: &str, value: &mut u64) -> Result<()> {
        let read = Value::Int(*value as i64);
        let take = |saved: &Value| match saved {
            Value::Int(saved) => u64::try_from(*saved).ok(),
            _ => None,
        };
        if let Some(saved) = self.scalar(name, read, take, "a count")? {
            *value = saved;
        }
        Ok(())
    }

    /// A number of which all 64 bits count.
    ///
    /// # Errors
    /// The sink's.
    pub(crate) fn bits(&mut self, name: &str, value: &mut u64) -> Result<()> {
        let read = Value::Int(value.cast_signed());
        let take = |saved: &Value| match saved {
            Value::Int(saved) => Some(saved.cast_unsigned()),
            _ => None,
        };
        if let Some(saved) = self.scalar(name, read, take, "a whole number")? {
            *value = saved;
        }
        Ok(())
    }

    /// Whether something exists: as it is when reading, as it was saved when checking and
    /// loading.
    pub(crate) fn exists(&mut self, name: &str, here: bool) -> Result<bool> {
        let full = self.name(name);
        let found = match &mut self.purpose {
            Purpose::Describe(sink) | Purpose::Collect(sink) => {
                sink.scalar(&full, Value::Int(i64::from(here)))?;
                return Ok(here);
            }
            Purpose::Check(source) | Purpose::Load(source) => source.find(&full),
        };
        match found {
            Some(Found::Scalar(Value::Int(there @ (0 | 1)))) => Ok(*there == 1),
            other => {
                self.problems.push(wrong(&full, other.is_some(), "0 or 1"));
                Ok(false)
            }
        }
    }

    /// A description that must be equal on both sides: a setting that is not loaded.
    ///
    /// # Errors
    /// The sink's.
    pub fn must_equal(&mut self, name: &str, wanted: &str) -> Result<()> {
        let name = self.name(name);
        match &mut self.purpose {
            Purpose::Describe(sink) | Purpose::Collect(sink) => {
                sink.scalar(&name, Value::Text(wanted.to_owned()))?;
            }
            Purpose::Check(source) => match source.find(&name) {
                Some(Found::Scalar(Value::Text(saved))) if saved == wanted => {}
                Some(Found::Scalar(Value::Text(saved))) => {
                    let (saved, wanted) = contrast(saved, wanted);
                    self.problems.push(format!("`{name}` is {saved}, wanted {wanted}"));
                }
                other => self.problems.push(wrong(&name, other.is_some(), "a text")),
            },
            Purpose::Load(_) => {}
        }
        Ok(())
    }

    fn scalar<T>(
        &mut self,
        name: &str,
        read: Value,
        take: impl FnOnce(&Value) -> Option<T>,
        sort: &str,
    ) -> Result<Option<T>> {
        let name = self.name(name);
        match &mut self.purpose {
            Purpose::Describe(sink) | Purpose::Collect(sink) => sink.scalar(&name, read)?,
            Purpose::Check(source) => {
                let found = source.find(&name);
                let taken = found.as_ref().and_then(Found::scalar).and_then(take);
                if taken.is_none() {
                    self.problems.push(wrong(&name, found.is_some(), sort));
                }
            }
            Purpose::Load(source) => {
                return Ok(source.find(&name).as_ref().and_then(Found::scalar).and_then(take));
            }
        }
        Ok(None)
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
