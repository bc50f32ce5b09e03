//! Where a stream stands among its files.

use std::io;
use std::path::Path;
use std::sync::Arc;

use super::input::Input;
use super::inputs::Inputs;
use crate::data::Origin;
use crate::error::{Error, Result};
use crate::step::Mark;

/// The way through the files of an epoch.
pub(super) struct Course {
    pub(super) inputs: Inputs,
    /// Of the file that is read, or comes next, in the epoch's order.
    number: u64,
    file: Option<Arc<Path>>,
    /// Records of the epoch that were read.
    record: u64,
    /// Records of the file that were read, where it was begun at its start.
    in_file: Option<u64>,
    /// Nothing comes any more.
    failed: bool,
    /// Where the record begins that could not be read.
    failed_at: Option<u64>,
}

impl Course {
    pub(super) fn new(inputs: Inputs) -> Self {
        // Nothing comes before `begin`.
        Self { inputs, number: 0, file: None, record: 0, in_file: None, failed: true, failed_at: None }
    }

    /// Goes to the file of a mark; the offset in it is the caller's to go to.
    pub(super) fn begin(&mut self, epoch: u64, from: Option<Mark>) -> Result<u64> {
        (self.failed, self.failed_at) = (true, None);
        self.inputs.begin(epoch)?;
        let Mark { file, offset, record } = from.unwrap_or_default();
        let count = self.inputs.count();
        if file > count {
            let problem = format!("the data position is in file {file} of a stream of {count} files");
            return Err(Error::State { problems: vec![problem] });
        }
        (self.number, self.record, self.failed) = (file, record, false);
        // A mark counts the records of the epoch, not those of its file.
        self.in_file = if offset == 0 { Some(0) } else { (file == 0).then_some(record) };
        Ok(offset)
    }

    /// Opens the next file and enters it at an offset; `None` behind the last one.
    pub(super) fn open(
        &mut self,
        offset: u64,
        enter: impl FnOnce(Input) -> io::Result<()>,
    ) -> Option<Result<()>> {
        if self.failed || self.number >= self.inputs.count() {
            return None;
        }
        self.file = self.inputs.path(self.number);
        Some(match self.inputs.open(self.number) {
            Ok(input) => enter(input).map_err(|error| self.fail(offset, error)),
            Err(error) => {
                self.failed = true;
                Err(error)
            }
        })
    }

    /// The file is at its end.
    pub(super) fn leave(&mut self) {
        self.number += 1;
        self.in_file = Some(0);
    }

    /// A record was read, or passed over.
    pub(super) fn count(&mut self) {
        self.record += 1;
        self.in_file = self.in_file.map(|record| record + 1);
    }

    pub(super) fn failed(&self) -> bool {
        self.failed
    }

    /// Of the record that comes next and begins at this offset.
    pub(super) fn origin(&self, offset: u64) -> Origin {
        Origin { file: self.file.clone(), record: self.in_file, offset: Some(offset) }
    }

    /// Ends the stream by an error, at the record that comes next.
    pub(super) fn fail(&mut self, offset: u64, error: io::Error) -> Error {
        (self.failed, self.failed_at) = (true, Some(offset));
        self.inputs.failure(self.number, self.origin(offset), error)
    }

    /// Before the record that comes next.
    pub(super) fn mark(&self, offset: u64) -> Mark {
        Mark { file: self.number, offset: self.failed_at.unwrap_or(offset), record: self.record }
    }
}
