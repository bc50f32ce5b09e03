//! One line on the terminal that says how far a long job is; a line every ten seconds elsewhere.

use std::io::{IsTerminal, Write, stderr};
use std::time::{Duration, Instant};

const REDRAW: Duration = Duration::from_millis(100);
const REPEAT: Duration = Duration::from_secs(10);
const MB: u64 = 1_000_000;

pub struct Progress {
    label: String,
    terminal: bool,
    shown: Option<Instant>,
}

impl Progress {
    pub fn new(label: impl Into<String>) -> Self {
        Self { label: label.into(), terminal: stderr().is_terminal(), shown: None }
    }

    /// Shows `done` of `total` bytes, unless a line was shown a moment ago.
    pub fn update(&mut self, done: u64, total: u64) {
        let pause = if self.terminal { REDRAW } else { REPEAT };
        if self.shown.is_some_and(|shown| shown.elapsed() < pause) {
            return;
        }
        self.shown = Some(Instant::now());
        let line = self.line(done, total);
        if self.terminal {
            eprint!("\r{line}\x1b[K");
            let _ = stderr().flush();
        } else {
            eprintln!("{line}");
        }
    }

    /// Replaces the line by how the job ended.
    pub fn finish(self, end: &str) {
        let start = if self.terminal { "\r" } else { "" };
        let clear = if self.terminal { "\x1b[K" } else { "" };
        eprintln!("{start}{}: {end}{clear}", self.label);
    }

    fn line(&self, done: u64, total: u64) -> String {
        let (done, total) = (done.min(total), total.max(1));
        let label = &self.label;
        format!("{label}: {} of {} MB ({} %)", done / MB, total.div_ceil(MB), done * 100 / total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_never_passes_its_total() {
        let progress = Progress::new("fetching");
        assert_eq!(progress.line(263 * MB, 526 * MB), "fetching: 263 of 526 MB (50 %)");
        assert_eq!(progress.line(600 * MB, 526 * MB), "fetching: 526 of 526 MB (100 %)");
        assert_eq!(progress.line(0, 0), "fetching: 0 of 1 MB (0 %)");
    }
}
