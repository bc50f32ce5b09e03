//! How far the run is: a bar on a terminal, a line now and then elsewhere.

use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressStyle};
use memfit::memory::Monitor;
use memfit::{Split, StepOutcome};

use crate::gpt::Failure;

/// Between two plain lines.
const PAUSE: Duration = Duration::from_secs(5);

/// Between two looks at memory.
const LOOK: Duration = Duration::from_millis(500);

/// Shows a run.
pub struct Progress {
    bar: ProgressBar,
    monitor: Option<Monitor>,
    terminal: bool,
    start: Instant,
    shown: Instant,
    steps: u64,
    from: u64,
    done: u64,
    losses: bool,
    tokens: f64,
    /// Rows of a micro-batch, where batches are split.
    rows: Option<i64>,
    /// Highest live bytes of all steps.
    pub peak: u64,
    /// Updates left out because a gradient overflowed.
    pub skipped: u64,
}

impl Progress {
    /// Of a run of `steps`, of which `from` are done; `losses` prints each, `lines` gets what
    /// memory was in use.
    ///
    /// # Errors
    /// A file that cannot be opened.
    pub fn new(steps: u64, from: u64, losses: bool, lines: Option<&Path>) -> Result<Self, Failure> {
        let terminal = std::io::stderr().is_terminal();
        let bar = if terminal { ProgressBar::new(steps) } else { ProgressBar::hidden() };
        if let Ok(style) = ProgressStyle::with_template("{bar:20} {pos}/{len} {msg}") {
            bar.set_style(style);
        }
        let monitor = Monitor::every(LOOK);
        let monitor = lines.into_iter().fold(monitor, |monitor, file| monitor.write_json_lines(file));
        let monitor = Some(monitor.start()?);
        let now = Instant::now();
        let (tokens, rows, peak, skipped) = (0.0, None, 0, 0);
        let shown = now.checked_sub(PAUSE).unwrap_or(now);
        let (start, done) = (now, from);
        Ok(Self {
            bar,
            monitor,
            terminal,
            start,
            shown,
            steps,
            from,
            done,
            losses,
            tokens,
            rows,
            peak,
            skipped,
        })
    }

    /// Counts one step and shows it.
    pub fn step(&mut self, outcome: &StepOutcome) {
        self.done += 1;
        if let Some(split) = outcome.split() {
            self.tell_change(split);
        }
        let (loss, scale) = match outcome {
            StepOutcome::Stepped { loss, scale, tokens, peak, .. } => {
                self.tokens += tokens;
                self.peak = self.peak.max(*peak);
                let loss = loss.double_value(&[]);
                if self.losses {
                    self.bar.suspend(|| println!("loss of step {}: {loss}", self.done));
                }
                (format!("loss {loss:.3}"), *scale)
            }
            StepOutcome::Skipped { .. } => {
                self.skipped += 1;
                ("skipped".to_owned(), None)
            }
            _ => return,
        };
        let last = self.done == self.steps;
        if self.terminal || last || self.shown.elapsed() >= PAUSE {
            self.shown = Instant::now();
            self.show(loss + &scale.map_or(String::new(), |scale| format!(" scale {scale}")));
        }
    }

    /// A size that was found is worth a line.
    fn tell_change(&mut self, split: Split) {
        let Split { batch, rows, micro_batches, retries } = split;
        if self.rows.is_none_or(|known| known == rows) && retries == 0 {
            self.rows = Some(rows);
            return;
        }
        self.rows = Some(rows);
        let found = match retries {
            0 => "more memory was left".to_owned(),
            1 => "memory ran out once".to_owned(),
            times => format!("memory ran out {times} times"),
        };
        let line = format!("{found}: {batch} rows now run as {micro_batches} micro-batches of {rows}");
        self.bar.suspend(|| println!("{line}"));
    }

    fn show(&self, loss: String) {
        let seconds = self.start.elapsed().as_secs_f64();
        let (here, left) = ((self.done - self.from) as f64, self.steps.saturating_sub(self.done) as f64);
        let left = Duration::from_secs_f64(seconds / here * left);
        let message = format!(
            "{loss} | {:.0} tokens/s | {} | {} left",
            self.tokens / seconds,
            self.memory(),
            HumanDuration(left),
        );
        self.bar.set_position(self.done);
        self.bar.set_message(message.clone());
        if !self.terminal {
            println!("step {}/{} {message}", self.done, self.steps);
        }
    }

    /// Counted bytes, live when last looked at and at the peak of all steps; and what the whole
    /// process keeps.
    fn memory(&self) -> String {
        let megabytes = |bytes: u64| format!("{:.1}", bytes as f64 / 1e6);
        let now = self.monitor.as_ref().map(Monitor::latest);
        let live = now.as_ref().and_then(|now| now.devices.first()).map_or(0, |cpu| cpu.live);
        let resident = now.and_then(|now| now.resident);
        let resident =
            resident.map_or(String::new(), |own| format!(" resident {}", megabytes(own.anonymous)));
        format!("live {} peak {}{resident} MB", megabytes(live), megabytes(self.peak))
    }

    /// Ends the bar and the looks at memory. Lines that could not be written are told of, and
    /// are no reason to lose the run.
    pub fn finish(&mut self) {
        self.bar.finish();
        if let Some(Err(error)) = self.monitor.take().map(Monitor::stop) {
            eprintln!("lines of memory are missing: {error}");
        }
    }

    /// Steps done, those before this call too.
    pub fn done(&self) -> u64 {
        self.done
    }

    /// Steps of this call and the seconds that they took.
    pub fn here(&self) -> (u64, f64) {
        (self.done - self.from, self.start.elapsed().as_secs_f64())
    }
}
