use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use csv::ByteRecord;

use super::line::text;
use crate::data::ends;
use crate::error::{Error, Result};

/// A row of a [`Csv`](super::Csv): fields without their quotes. A clone shares the bytes.
#[derive(Clone)]
pub struct Row(Arc<Cells>);

struct Cells {
    bytes: Box<[u8]>,
    /// Where each field ends.
    ends: Box<[usize]>,
    names: Option<Arc<Names>>,
}

/// Names of the fields, from a file's first row.
pub(super) struct Names {
    names: Vec<String>,
    numbers: HashMap<String, usize>,
}

impl Names {
    /// Of a name that comes twice, the first field has it.
    pub(super) fn new(row: &ByteRecord) -> Self {
        let names: Vec<String> = row.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect();
        let mut numbers = HashMap::new();
        for (number, name) in names.iter().enumerate() {
            numbers.entry(name.clone()).or_insert(number);
        }
        Self { names, numbers }
    }
}

impl Row {
    pub(super) fn new(row: &ByteRecord, names: Option<Arc<Names>>) -> Self {
        let ends = (0..row.len()).filter_map(|field| Some(row.range(field)?.end)).collect();
        Self(Arc::new(Cells { bytes: row.as_slice().into(), ends, names }))
    }

    /// Number of fields.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.0.ends.len()
    }

    /// The bytes of a field, by its number from 0.
    pub fn get(&self, field: usize) -> Option<&[u8]> {
        self.0.bytes.get(ends::part(&self.0.ends, field)?)
    }

    /// The number of the field with this name, which a file's header gives.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.0.names.as_ref()?.numbers.get(name).copied()
    }

    /// The name of a field.
    pub fn name(&self, field: usize) -> Option<&str> {
        Some(self.0.names.as_ref()?.names.get(field)?.as_str())
    }

    /// The text of a field.
    ///
    /// # Errors
    /// [`Error::Data`] for a field that the row has not, and for what is no UTF-8.
    pub fn text(&self, field: usize) -> Result<&str> {
        let missing = || Error::data(format!("no {}: the row has {}", self.label(field), self.len()));
        let bytes = self.get(field).ok_or_else(missing)?;
        text(bytes).map_err(|at| Error::data(format!("{}: no UTF-8 at byte {at} of it", self.label(field))))
    }

    /// How errors name a field.
    pub(super) fn label(&self, field: usize) -> String {
        match self.name(field) {
            Some(name) => format!("field {field} ({name})"),
            None => format!("field {field}"),
        }
    }
}

impl fmt::Debug for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields = (0..self.len()).filter_map(|field| self.get(field)).map(String::from_utf8_lossy);
        f.debug_list().entries(fields).finish()
    }
}
