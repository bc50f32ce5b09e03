use std::path::Path;

use safetensors::tensor::Metadata;

use super::array_file::ArrayFile;
use super::reader::Reader;
use crate::data::dtype;
use crate::data::room::room;
use crate::error::Result;

/// The longest header that is read, as in the format's own reader.
const LONGEST: u64 = 100_000_000;

/// Tensors of a `.safetensors` file as sources; a record is a row of the first dimension.
///
/// Only the header is read when it is opened. Tensors that belong together, such as images and
/// labels, are joined with [`Zip`](super::Zip).
///
/// ```
/// use memfit::data::{Random, Safetensors, Source, Zip};
/// use memfit::tch::Tensor;
///
/// let folder = tempfile::tempdir().unwrap();
/// let path = folder.path().join("digits.safetensors");
/// let (x, y) = (Tensor::from_slice2(&[[0.5f32, 1.0], [2.0, 4.0]]), Tensor::from_slice(&[7i64, 9]));
/// Tensor::write_safetensors(&[("x", &x), ("y", &y)], &path)?;
///
/// let file = Safetensors::open(&path)?;
/// let digits = Zip::of(file.tensor("x")?, file.tensor("y")?)?;
/// let (image, label) = digits.get(1, &mut Random::of_sample(0, 0, 0))?;
/// assert_eq!((image.numbers::<f32>()?, label.numbers::<i64>()?), (vec![2.0, 4.0], vec![9]));
/// # Ok::<(), memfit::Error>(())
/// ```
#[derive(Debug)]
pub struct Safetensors {
    reader: Reader,
    metadata: Metadata,
    start: u64,
}

impl Safetensors {
    /// Opens a file.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) for what is no regular file; [`Error::Data`](crate::Error::Data) where
    /// the header is damaged, or does not describe the whole file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let reader = Reader::open(path.as_ref())?;
        let len = reader.len();
        if len < 8 {
            return Err(reader.broken("it is too short for a header"));
        }
        let mut size = [0; 8];
        reader.read(0, &mut size)?;
        let size = u64::from_le_bytes(size);
        if size > len - 8 || size > LONGEST {
            return Err(reader.broken(format!("its header is said to have {size} bytes")));
        }
        let mut header = room(size as usize)?;
        reader.read(8, &mut header)?;
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|error| reader.broken(format!("its header cannot be read: {error}")))?;
        let start = 8 + size;
        let described = start.checked_add(metadata.data_len() as u64);
        if described != Some(len) {
            let described = described.unwrap_or(u64::MAX);
            return Err(reader.broken(format!("it has {len} bytes, where its header speaks of {described}")));
        }
        Ok(Self { reader, metadata, start })
    }

    /// The names of its tensors, in alphabetical order.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.metadata.tensors().into_keys().collect();
        names.sort_unstable();
        names
    }

    /// The rows of a tensor.
    ///
    /// # Errors
    /// [`Error::Data`](crate::Error::Data) for an unknown name, one without dimensions, and a dtype that
    /// tch lacks.
    pub fn tensor(&self, name: &str) -> Result<ArrayFile> {
        let Some(info) = self.metadata.info(name) else {
            let names = self.names();
            let some = names.iter().take(10).map(String::as_str).collect::<Vec<_>>().join(", ");
            let more = if names.len() > 10 { ", …" } else { "" };
            return Err(self.reader.broken(format!("it has no tensor `{name}`; it has {some}{more}")));
        };
        let kind = dtype::kind_of(info.dtype)
            .ok_or_else(|| self.reader.broken(format!("`{name}` has the dtype {:?}", info.dtype)))?;
        let shape: Result<Vec<i64>, _> = info.shape.iter().map(|size| i64::try_from(*size)).collect();
        let shape = shape.map_err(|_| self.reader.broken(format!("`{name}` is too long")))?;
        let start = self.start + info.data_offsets.0 as u64;
        Ok(ArrayFile::new(self.reader.clone(), kind, &shape, start)?.named(name))
    }
}
