use std::path::Path;

use super::array_file::ArrayFile;
use super::npy_header;
use super::reader::Reader;
use crate::data::room::room;
use crate::error::Result;

/// What every version begins with.
const MAGIC: &[u8] = b"\x93NUMPY";
/// The longest header that is read. numpy writes 118 bytes for an array of numbers.
const LONGEST: u64 = 64 << 10;

/// Files that `numpy.save` writes; a record is a row of the first dimension.
///
/// Versions 1 to 3; bool, i8, u8, i16, i32, i64, f16, f32 and f64, little-endian and in C order. All
/// else is an error that says what to write instead. Only the header is read when it is opened.
///
/// ```
/// use memfit::data::{Npy, Random, Source};
///
/// let folder = tempfile::tempdir().unwrap();
/// let path = folder.path().join("x.npy");
/// // What np.save(path, np.array([[1, 2], [3, 4], [5, 6]], np.uint8)) writes.
/// let header = "{'descr': '|u1', 'fortran_order': False, 'shape': (3, 2), }";
/// let header = format!("\u{1}\0\u{76}\0{header:<117}\n");
/// std::fs::write(&path, [b"\x93NUMPY", header.as_bytes(), &[1, 2, 3, 4, 5, 6]].concat()).unwrap();
///
/// let rows = Npy::open(&path)?;
/// assert_eq!((rows.len(), rows.shape()), (3, &[2][..]));
/// assert_eq!(rows.get(1, &mut Random::of_sample(0, 0, 0))?.bytes(), [3, 4]);
/// # Ok::<(), memfit::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Npy;

impl Npy {
    /// Opens a file with one array.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) for what is no regular file; [`Error::Data`](crate::Error::Data) for
    /// one that is damaged, or has what libtorch cannot take.
    pub fn open(path: impl AsRef<Path>) -> Result<ArrayFile> {
        let reader = Reader::open(path.as_ref())?;
        let (start, length) = header_range(&reader)?;
        let mut header = room(length)?;
        reader.read(start, &mut header)?;
        let header = npy_header::parse(&header).map_err(|problem| reader.broken(problem))?;
        let start = start + length as u64;
        let len = reader.len();
        let file = ArrayFile::new(reader.clone(), header.kind, &header.shape, start)?;
        match len - file.end() {
            0 => Ok(file),
            more => Err(reader.broken(format!(
                "{more} bytes follow its array; np.save one array per file, or np.savez and unpack it"
            ))),
        }
    }
}

/// Where the header's text begins, and its length.
fn header_range(reader: &Reader) -> Result<(u64, usize)> {
    let mut prefix = [0; 12];
    let there = reader.len().min(12) as usize;
    let (known, _) = prefix.split_at_mut(there);
    reader.read(0, known)?;
    if prefix.starts_with(b"PK") {
        return Err(reader.broken("it is a zip archive, as np.savez writes; np.save each array"));
    }
    if !prefix.starts_with(MAGIC) || reader.len() < 10 {
        return Err(reader.broken("it does not begin as a .npy file does"));
    }
    let [.., major, _, a, b, c, d] = prefix;
    let (start, length) = match major {
        1 => (10, u64::from(u16::from_le_bytes([a, b]))),
        2 | 3 => (12, u64::from(u32::from_le_bytes([a, b, c, d]))),
        other => return Err(reader.broken(format!("it is of version {other}, where 1 to 3 are known"))),
    };
    if length > LONGEST || start + length > reader.len() {
        return Err(reader.broken(format!("its header is said to have {length} bytes")));
    }
    Ok((start, length as usize))
}
