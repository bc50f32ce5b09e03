use std::any::type_name;
use std::ops::{Range, RangeFrom, RangeFull};
use std::str::FromStr;

use super::row::Row;
use crate::data::Random;
use crate::error::{Error, Result};

/// Which fields of a [`Row`], in which order: a range, numbers, or names of the header.
#[derive(Clone, Debug)]
pub struct Fields(Which);

#[derive(Clone, Debug)]
enum Which {
    Range(usize, Option<usize>),
    Numbers(Vec<usize>),
    Names(Vec<String>),
}

impl From<Range<usize>> for Fields {
    fn from(range: Range<usize>) -> Self {
        Self(Which::Range(range.start, Some(range.end)))
    }
}

impl From<RangeFrom<usize>> for Fields {
    fn from(range: RangeFrom<usize>) -> Self {
        Self(Which::Range(range.start, None))
    }
}

impl From<RangeFull> for Fields {
    fn from(_: RangeFull) -> Self {
        Self(Which::Range(0, None))
    }
}

impl<const N: usize> From<[usize; N]> for Fields {
    fn from(numbers: [usize; N]) -> Self {
        Self(Which::Numbers(numbers.to_vec()))
    }
}

impl<const N: usize> From<[&str; N]> for Fields {
    fn from(names: [&str; N]) -> Self {
        Self(Which::Names(names.iter().map(|name| (*name).to_owned()).collect()))
    }
}

impl From<Vec<String>> for Fields {
    fn from(names: Vec<String>) -> Self {
        Self(Which::Names(names))
    }
}

impl Fields {
    /// The numbers that these fields of a row are.
    ///
    /// # Errors
    /// [`Error::Data`] for a field that is not there or cannot be read as T, naming it, and for a range
    /// without fields.
    pub fn of<T: FromStr>(&self, row: &Row) -> Result<Vec<T>> {
        match &self.0 {
            Which::Range(start, Some(end)) if start >= end => {
                Err(Error::data(format!("no field is in the range {start}..{end}")))
            }
            // A range that ends, or begins, behind the row names the field that is missing.
            Which::Range(start, end) => {
                let end = end.unwrap_or(row.len()).max(start.saturating_add(1));
                (*start..end).map(|at| number(row, at)).collect()
            }
            Which::Numbers(numbers) => numbers.iter().map(|at| number(row, *at)).collect(),
            Which::Names(names) => names.iter().map(|name| number(row, find(row, name)?)).collect(),
        }
    }
}

fn find(row: &Row, name: &str) -> Result<usize> {
    row.find(name).ok_or_else(|| Error::data(format!("no field is named `{name}`")))
}

/// Spaces around a number are not part of it.
fn number<T: FromStr>(row: &Row, field: usize) -> Result<T> {
    let text = row.text(field)?.trim();
    text.parse().map_err(|_| {
        let shown: String = text.chars().take(40).collect();
        let wanted = type_name::<T>().rsplit("::").next().unwrap_or_default();
        Error::data(format!("{}: `{shown}` is no {wanted}", row.label(field)))
    })
}

/// Makes each row the numbers in some of its fields, on the workers: for
/// [`LoaderBuilder::map`](crate::data::LoaderBuilder::map).
///
/// Fields are a range (`1..5`, `1..`, `..`), numbers (`[0, 3]`) or names (`["height", "width"]`).
/// [`Fields::of`] does the same for one row, where a sample needs more than one list.
///
/// ```
/// # fn main() -> memfit::Result<()> {
/// use memfit::data::{Csv, Loader, numbers};
///
/// let rows = Csv::of_reader(&b"height,name,width\n1.5,ball,2\n3,door,4e1\n"[..]);
/// let numbers = numbers::<f32>(["width", "height"]);
/// let mut loader = Loader::stream(rows).map(numbers).batch(2).build()?;
/// let batch = loader.next().expect("two rows")?.batch;
/// assert_eq!(Vec::<f32>::try_from(batch.view(-1))?, [2.0, 1.5, 40.0, 3.0]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// The transform's are [`Error::Data`] with the row's origin, the field and its text.
pub fn numbers<T: FromStr + Send + 'static>(
    fields: impl Into<Fields>,
) -> impl Fn(Row, &mut Random) -> Result<Vec<T>> + Send + Sync + 'static {
    let fields = fields.into();
    move |row, _| fields.of(&row)
}
