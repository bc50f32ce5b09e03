use std::fmt::{self, Display, Formatter};

use super::phase::Phase;
use super::tables::shown;
use super::timeline::{Holder, Peak};

/// What held the memory when it ran out, and what would free some of it.
///
/// `Display` writes it as lines; the last one is the line of code to add next.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct Advice {
    /// The highest live bytes before the failure and where they fell, where they were recorded.
    pub peak: Option<Where>,
    /// Who held them: the five largest at most, the largest first.
    pub holders: Vec<Holder>,
    /// Bytes that were missing, where they are known.
    pub missing: Option<u64>,
    /// What would help, the cheapest in time first.
    pub helps: Vec<Help>,
}

/// A moment of training, and its live bytes.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Where {
    /// Live bytes.
    pub bytes: u64,
    /// The phase.
    pub phase: Phase,
    /// The step.
    pub step: u32,
    /// The segment, if one was named.
    pub segment: Option<String>,
}

/// One way to need less.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Help {
    /// The line of code.
    pub line: String,
    /// Bytes that it frees at most, of those that were live at the peak.
    pub bytes: u64,
}

impl Advice {
    pub(crate) fn new(peak: Option<&Peak>, missing: Option<u64>, helps: Vec<Help>) -> Self {
        let place = |peak: &Peak| Where {
            bytes: peak.bytes,
            phase: peak.phase,
            step: peak.step,
            segment: peak.segment.clone(),
        };
        let holders = peak.map(|peak| peak.holders.iter().take(5).cloned().collect());
        Self { peak: peak.map(place), holders: holders.unwrap_or_default(), missing, helps }
    }

    /// What to add next: the cheapest that frees what is missing, or the one that frees most.
    pub fn next(&self) -> Option<&Help> {
        let enough = |help: &&Help| self.missing.is_some_and(|missing| help.bytes >= missing);
        let most = || self.helps.iter().rev().max_by_key(|help| help.bytes);
        self.helps.iter().find(enough).or_else(most)
    }
}

impl Help {
    pub(crate) fn new(line: impl Into<String>, bytes: u64) -> Self {
        Self { line: line.into(), bytes }
    }
}

impl Display for Advice {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if let Some(peak) = &self.peak {
            let segment = peak.segment.as_deref().map(|name| format!(", segment {}", shown(name)));
            let (bytes, phase) = (mebibytes(peak.bytes), peak.phase.name());
            write!(f, "\nat the peak, {phase} of step {}{}, ", peak.step, segment.unwrap_or_default())?;
            write!(f, "{bytes} were live; the largest holders:")?;
        }
        for holder in &self.holders {
            let segment = holder.segment.as_deref().unwrap_or("(no segment)");
            write!(f, "\n  {:>12} {} of {}", mebibytes(holder.bytes), holder.role.name(), shown(segment))?;
        }
        if let Some(missing) = self.missing {
            write!(f, "\n{} were missing", mebibytes(missing))?;
        }
        if !self.helps.is_empty() {
            write!(f, "\nwould free at most:")?;
        }
        for help in &self.helps {
            write!(f, "\n  {:>12} {}", mebibytes(help.bytes), help.line)?;
        }
        match self.next() {
            Some(help) => write!(f, "\nadd next: {}", help.line),
            None => {
                write!(f, "\nnothing in the crate frees any of it: use a smaller model or raise the limit")
            }
        }
    }
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20))
}
