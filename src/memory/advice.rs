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
    /// Bytes that it frees at most, of those that were live at the peak; `None` where they were
    /// not seen.
    pub bytes: Option<u64>,
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

    /// What to add next: the cheapest that is known to free what is missing; else the first of
    /// which nobody knows how much it frees, since that may be enough; else the one that frees
    /// most.
    pub fn next(&self) -> Option<&Help> {
        let enough =
            |help: &&Help| help.bytes.zip(self.missing).is_some_and(|(bytes, missing)| bytes >= missing);
        let unknown = || self.helps.iter().find(|help| help.bytes.is_none());
        let most = || self.helps.iter().rev().max_by_key(|help| help.bytes);
        self.helps.iter().find(enough).or_else(unknown).or_else(most)
    }
}

impl Help {
    pub(crate) fn new(line: impl Into<String>, bytes: Option<u64>) -> Self {
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
            let bytes = help.bytes.map_or_else(|| "unknown".to_owned(), mebibytes);
            write!(f, "\n  {bytes:>12} {}", help.line)?;
        }
        let smaller = "use a smaller model or raise the limit";
        match self.next() {
            Some(help) => write!(f, "\nadd next: {}", help.line),
            None if self.peak.is_none() => write!(f, "\nwhat held the memory was not seen: {smaller}"),
            None => write!(f, "\nnothing in the crate frees any of it: {smaller}"),
        }
    }
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn advice(missing: Option<u64>, helps: &[(&str, Option<u64>)]) -> Advice {
        let helps = helps.iter().map(|(line, bytes)| Help::new(*line, *bytes)).collect();
        Advice::new(None, missing, helps)
    }

    #[test]
    fn next_is_the_cheapest_that_is_enough_then_what_may_be_then_the_most() {
        let next = |missing, helps: &[_]| advice(missing, helps).next().map(|help| help.line.clone());
        let known = [("a", Some(4)), ("b", Some(10)), ("c", Some(10)), ("d", Some(20))];
        assert_eq!(next(Some(10), &known).as_deref(), Some("b"));
        assert_eq!(next(Some(30), &known).as_deref(), Some("d"));
        assert_eq!(next(None, &known).as_deref(), Some("d"));
        let mixed = [("a", Some(4)), ("u", None), ("d", Some(20)), ("v", None)];
        assert_eq!(next(Some(20), &mixed).as_deref(), Some("d"));
        assert_eq!(next(Some(21), &mixed).as_deref(), Some("u"));
        assert_eq!(next(None, &mixed).as_deref(), Some("u"));
        assert_eq!(next(Some(1), &[]), None);
    }

    #[test]
    fn what_was_not_seen_is_unknown_and_not_nothing() {
        let text = advice(None, &[("a line", None)]).to_string();
        assert!(text.contains("unknown a line") && text.ends_with("add next: a line"), "{text}");
        let text = advice(None, &[]).to_string();
        assert!(text.contains("was not seen") && !text.contains("nothing in the crate"), "{text}");
    }
}
