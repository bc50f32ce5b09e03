use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// Where a record comes from, as far as its source knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// The file.
    pub file: Option<Arc<Path>>,
    /// Number of the record in its file, or in its source where it has no file; from 0.
    pub record: Option<u64>,
    /// Where the record begins in its file, in bytes; of what was decompressed, where the file
    /// is compressed.
    pub offset: Option<u64>,
}

impl Origin {
    /// A record of a source without files.
    pub fn record(record: u64) -> Self {
        Self { record: Some(record), ..Self::default() }
    }

    /// A record of a file.
    pub fn of_file(file: &Arc<Path>, record: u64, offset: u64) -> Self {
        Self { file: Some(file.clone()), record: Some(record), offset: Some(offset) }
    }

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.record {
            Some(record) => write!(f, "record {record}")?,
            None => write!(f, "the data")?,
        }
        if let Some(offset) = self.offset {
            write!(f, " at byte {offset}")?;
        }
        match &self.file {
            Some(file) => write!(f, " of {}", file.display()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_says_what_it_knows() {
        let file: Arc<Path> = Path::new("a.bin").into();
        assert_eq!(Origin::of_file(&file, 3, 24).to_string(), "record 3 at byte 24 of a.bin");
        assert_eq!(Origin::record(3).to_string(), "record 3");
        assert_eq!(Origin::default().to_string(), "the data");
    }
}
