use std::path::Path;

use tch::{CModule, TrainableCModule};

use crate::error::{Error, Result};
use crate::state::{Sink, State, Value};

/// What a snapshot takes along beside the stack: entries of your own, such as the settings of
/// a run, and TorchScript modules, whose tensors are out of the stack's reach.
///
/// ```
/// use memfit::{State, Value, snapshot::Extras};
///
/// let mut settings = State::default();
/// settings.insert("epochs", Value::Int(3));
/// let extras = Extras::new().entry("settings", settings);
/// # let _ = extras;
/// ```
#[derive(Debug, Default)]
pub struct Extras<'a> {
    entries: Vec<(String, State)>,
    scripts: Vec<(String, &'a dyn Script)>,
}

/// A TorchScript module that can be written as an archive.
pub trait Script: std::fmt::Debug {
    /// Writes the archive.
    ///
    /// # Errors
    /// libtorch's.
    fn save_to(&self, path: &Path) -> Result<()>;
}

impl Script for CModule {
    fn save_to(&self, path: &Path) -> Result<()> {
        Ok(self.save(path)?)
    }
}

impl Script for TrainableCModule {
    fn save_to(&self, path: &Path) -> Result<()> {
        Ok(self.save(path)?)
    }
}

impl<'a> Extras<'a> {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an entry; it comes back under its name, as it was, on the host.
    pub fn entry(mut self, name: impl Into<String>, state: State) -> Self {
        self.entries.push((name.into(), state));
        self
    }

    /// Adds a module as an archive of its own.
    pub fn script(mut self, name: impl Into<String>, module: &'a dyn Script) -> Self {
        self.scripts.push((name.into(), module));
        self
    }

    pub(super) fn scripts(&self) -> impl Iterator<Item = (&str, &'a dyn Script)> {
        self.scripts.iter().map(|(name, module)| (name.as_str(), *module))
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.entries.iter().map(|(name, _)| name.clone()).collect()
    }

    /// Names become parts of file names and of other names.
    pub(super) fn check(&self) -> Result<()> {
        let names =
            || self.entries.iter().map(|(name, _)| name).chain(self.scripts.iter().map(|(name, _)| name));
        if let Some(name) = names().find(|name| !is_plain(name)) {
            let problem = format!("{name:?}: a name is made of letters, digits, `_` and `-`");
            return Err(Error::config("Extras", problem));
        }
        let twice = |names: Vec<&String>| {
            let mut seen = std::collections::HashSet::new();
            names.into_iter().find(|name| !seen.insert(*name)).cloned()
        };
        let entries = twice(self.entries.iter().map(|(name, _)| name).collect());
        let scripts = twice(self.scripts.iter().map(|(name, _)| name).collect());
        match entries.or(scripts) {
            None => Ok(()),
            Some(name) => Err(Error::config("Extras", format!("`{name}` is there twice"))),
        }
    }

    /// Hands the entries on.
    pub(super) fn visit(&self, sink: &mut dyn Sink) -> Result<()> {
        for (entry, state) in &self.entries {
            for (key, value) in state.iter() {
                hand_on(&format!("{ENTRIES}{entry}.{key}"), value, sink)?;
            }
        }
        Ok(())
    }
}

/// What names of entries begin with.
pub(super) const ENTRIES: &str = "entries.";

/// Hands one value on.
pub(super) fn hand_on(name: &str, value: &Value, sink: &mut dyn Sink) -> Result<()> {
    match value {
        Value::Tensor(tensor) => sink.tensor(name, tensor),
        Value::Float(number) => sink.scalar(name, Value::Float(*number)),
        Value::Int(number) => sink.scalar(name, Value::Int(*number)),
        Value::Text(text) => sink.scalar(name, Value::Text(text.clone())),
    }
}

/// The file of a script's archive.
pub(super) fn script_file(name: &str) -> String {
    format!("script-{name}.pt")
}

/// Whether a name can be part of a file's name.
pub(super) fn is_plain(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    !name.is_empty() && name.len() <= 100 && name.bytes().all(plain)
}
