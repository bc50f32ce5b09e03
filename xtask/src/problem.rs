//! What goes wrong, as one sentence that says what to do.

use std::fmt;
use std::io;
use std::path::Path;

pub type Result<T> = std::result::Result<T, Problem>;

#[derive(Debug, PartialEq, Eq)]
pub enum Problem {
    /// The command line makes no sense: exit code 2, with the usage text.
    Usage(String),
    /// Anything else: exit code 1.
    Failure(String),
}

impl Problem {
    pub fn new(sentence: impl Into<String>) -> Self {
        Self::Failure(sentence.into())
    }

    /// An error of the file system, with what was tried on which path.
    pub fn io(what: &str, path: &Path, error: &io::Error) -> Self {
        let remedy = match error.kind() {
            io::ErrorKind::StorageFull => "; make room on that disk and run again",
            io::ErrorKind::PermissionDenied => "; check who owns it",
            _ => "",
        };
        Self::new(format!("cannot {what} {}: {error}{remedy}", path.display()))
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(sentence) | Self::Failure(sentence) => f.write_str(sentence),
        }
    }
}
