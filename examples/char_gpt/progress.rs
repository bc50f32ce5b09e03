//! How far the run is: a bar on a terminal, a line now and then elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressStyle};
use memfit::tch::Device;
use memfit::{Split, StepOutcome, memory};

use crate::gpt::Failure;

/// Between two plain lines.
const PAUSE: Duration = Duration::from_secs(5);

/// Shows a run.
pub struct Progress {
    bar: ProgressBar,
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
    /// Of a run of `steps`, of which `from` are done; `losses` prints each.
    pub fn new(steps: u64, from: u64, losses: bool) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bar = if terminal { ProgressBar::new(steps) } else { ProgressBar::hidden() };
        if let Ok(style) = ProgressStyle::with_template("{bar:20} {pos}/{len} {msg}") {
            bar.set_style(style);
        }
        let now = Instant::now();
        let (tokens, rows, peak, skipped) = (0.0, None, 0, 0);
        let shown = now.checked_sub(PAUSE).unwrap_or(now);
        Self {
            bar,
            terminal,
            start: now,
            shown,
            steps,
            from,
            done: from,
            losses,
            tokens,
            rows,
            peak,
            skipped,
        }
    }

    /// Counts one step and shows it.
    ///
    /// # Errors
    /// Statistics that cannot be read.
    pub fn step(&mut self, outcome: &StepOutcome) -> Result<(), Failure> {
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
            _ => return Ok(()),
        };
        let last = self.done == self.steps;
        if self.terminal || last || self.shown.elapsed() >= PAUSE {
            self.shown = Instant::now();
            self.show(loss + &scale.map_or(String::new(), |scale| format!(" scale {scale}")))?;
        }
        Ok(())
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

    fn show(&self, loss: String) -> Result<(), Failure> {
        let seconds = self.start.elapsed().as_secs_f64();
        let live = memory::stats(Device::Cpu)?.current as f64 / 1e6;
        let (here, left) = ((self.done - self.from) as f64, self.steps.saturating_sub(self.done) as f64);
        let left = Duration::from_secs_f64(seconds / here * left);
        let message = format!(
            "{loss} | {:.0} tokens/s | live {live:.1} peak {:.1} MB | {} left",
            self.tokens / seconds,
            self.peak as f64 / 1e6,
            HumanDuration(left),
        );
        self.bar.set_position(self.done);
        self.bar.set_message(message.clone());
        if !self.terminal {
            println!("step {}/{} {message}", self.done, self.steps);
        }
        Ok(())
    }

    /// Ends the bar.
    pub fn finish(&self) {
        self.bar.finish();
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
