//! A timeline as files: chart, page, trace, table.

mod csv;
pub(super) mod escape;
mod html;
mod trace;

use std::path::Path;

use super::timeline::Timeline;
use crate::error::{Error, Result};

impl Timeline {
    /// Writes a file, of the kind that its name ends in:
    ///
    /// | ending | what |
    /// | --- | --- |
    /// | `.svg`, `.png` | the stacked area chart |
    /// | `.html` | a page that needs nothing else: hover for who holds the bytes, drag to zoom |
    /// | `.json` | a trace for Perfetto or `chrome://tracing` |
    /// | `.csv` | one line per event |
    ///
    /// A file of that name is replaced when the new one is whole. At [`EVENTS`](super::EVENTS)
    /// events the page has about 4 MB, the table 14 MB, the trace 10 MB.
    ///
    /// # Errors
    /// [`Error::Config`] for another ending, [`Error::Io`] where the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let bytes = match ending(path).as_deref() {
            Some("svg") => self.svg().into_bytes(),
            Some("png") => self.png()?,
            Some("html") => self.html().into_bytes(),
            Some("json") => self.trace().into_bytes(),
            Some("csv") => self.csv().into_bytes(),
            _ => {
                let problem =
                    format!("`{}` does not end in .svg, .png, .html, .json or .csv", path.display());
                return Err(Error::config("Timeline::save", problem));
            }
        };
        replace(path, &bytes)
    }
}

/// What a file's name ends in, without the dot and in lower case.
pub(super) fn ending(path: &Path) -> Option<String> {
    path.extension().map(|ending| ending.to_string_lossy().to_lowercase())
}

/// Writes a file beside its place and renames it when it is whole.
pub(super) fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(format!(".{}.part", std::process::id()));
    let written = std::fs::write(&unfinished, bytes).and_then(|()| std::fs::rename(&unfinished, path));
    written.map_err(|source| {
        // Nothing to add where it was not even made.
        let _ = std::fs::remove_file(&unfinished);
        Error::Io { action: "cannot write", path: path.to_owned(), source }
    })
}
