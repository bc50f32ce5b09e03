use std::path::Path;

use super::nest::{Figures, Operator, operators};
use super::table::SortBy;
use super::trace::TraceFile;
use crate::error::Result;
use crate::ffi::profiler::Seen;

/// What operators took in time and in memory. From a [`Profiler`](super::Profiler) or from
/// [`ProfileSteps`](crate::strategies::ProfileSteps).
///
/// Memory on the host is counted as [`memory::stats`](crate::memory::stats) counts it, so that the
/// own memory of all operators, `[memory]` included, adds up to the change of the live bytes
/// that the profiled threads made.
///
/// `Display` writes two tables: the 15 operators with the most memory of their own, and the 15
/// with the most time.
#[derive(Debug)]
pub struct Profile {
    operators: Vec<Operator>,
    trace: TraceFile,
}

impl Profile {
    pub(super) fn of(seen: Seen) -> Self {
        let mut operators = operators(&seen.events, &seen.names);
        operators.sort_by(|a, b| b.own.time.cmp(&a.own.time).then_with(|| a.name.cmp(&b.name)));
        Self { operators, trace: TraceFile::new(seen.trace) }
    }

    /// All operators, those with the most time of their own first.
    pub fn operators(&self) -> &[Operator] {
        &self.operators
    }

    /// The operator of a name: `aten::mm`.
    pub fn operator(&self, name: &str) -> Option<&Operator> {
        self.operators.iter().find(|one| one.name == name)
    }

    /// All operators in another order, the most first.
    pub fn sorted(&self, by: SortBy) -> Vec<&Operator> {
        let mut sorted: Vec<&Operator> = self.operators.iter().collect();
        sorted.sort_by(|a, b| by.compare(a, b));
        sorted
    }

    /// The own figures of all operators together.
    pub fn total(&self) -> Figures {
        self.operators.iter().fold(Figures::default(), |mut sum, one| {
            sum += one.own;
            sum
        })
    }

    /// Writes libtorch's Chrome trace, for Perfetto or `chrome://tracing`: every operator,
    /// allocation and kernel. The file appears whole or not at all.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for a name that does not end in `.json`;
    /// [`Error::Io`](crate::Error::Io) where the file cannot be written.
    pub fn save_trace(&self, path: impl AsRef<Path>) -> Result<()> {
        self.trace.save(path.as_ref())
    }
}
