use std::fmt;
use std::sync::Arc;

use serde::de::DeserializeOwned;

use crate::data::Random;
use crate::error::{Error, Result};

/// A line of [`Lines`](super::Lines), without its end. A clone shares the bytes.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Line(Arc<[u8]>);

impl Line {
    pub(super) fn new(bytes: &[u8]) -> Self {
        Self(bytes.into())
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The text.
    ///
    /// # Errors
    /// [`Error::Data`] for what is no UTF-8, with the byte of the line where it ceases to be.
    pub fn text(&self) -> Result<&str> {
        text(&self.0).map_err(|at| Error::data(format!("no UTF-8 at byte {at} of the line")))
    }
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Line({:?})", String::from_utf8_lossy(&self.0))
    }
}

/// The text, or how many bytes of it are one.
pub(super) fn text(bytes: &[u8]) -> Result<&str, usize> {
    std::str::from_utf8(bytes).map_err(|error| error.valid_up_to())
}

/// Makes each line the value that it is the JSON of, on the workers: for
/// [`LoaderBuilder::map`](crate::data::LoaderBuilder::map).
///
/// Any type that serde can make of JSON, `serde_json::Value` too. Without
/// [`Lines::pass_over_empty`](super::Lines::pass_over_empty) an empty line is an error.
///
/// ```
/// # fn main() -> memfit::Result<()> {
/// use memfit::data::{Lines, Loader, json};
///
/// let lines = Lines::of_reader(&b"[1.0, 2.0]\n[3.0, 4.0]\n"[..]);
/// let mut loader = Loader::stream(lines).map(json::<Vec<f32>>()).batch(2).build()?;
/// let batch = loader.next().transpose()?.map(|loaded| loaded.batch.size());
/// assert_eq!(batch, Some(vec![2, 2]));
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// The transform's are [`Error::Data`] with the line's origin and the column, from 1, in bytes.
pub fn json<T: DeserializeOwned + Send + 'static>()
-> impl Fn(Line, &mut Random) -> Result<T> + Send + Sync + 'static {
    |line, _| {
        serde_json::from_slice(line.bytes()).map_err(|error| {
            let text = error.to_string();
            let place = format!(" at line {} column {}", error.line(), error.column());
            let problem = text.strip_suffix(place.as_str()).unwrap_or(&text);
            Error::data(format!("column {}: {problem}", error.column()))
        })
    }
}
