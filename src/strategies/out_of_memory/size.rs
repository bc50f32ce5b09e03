//! Which size comes next: pure arithmetic over what was seen.

use crate::error::Result;
use crate::state::StateVisitor;

/// The grid of sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Steps {
    /// Half of what failed, twice what ran.
    Halves,
    /// One micro-batch more or fewer.
    EveryCount,
}

/// Live bytes when a window began, and those that the device may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Figures {
    pub(super) limit: u64,
    pub(super) live: u64,
}

impl Figures {
    pub(super) fn room(self) -> u64 {
        self.limit.saturating_sub(self.live)
    }
}

/// What a window took over what was live at its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Taken {
    /// At its peak.
    pub(super) most: u64,
    /// Of that, what stays from one micro-batch to the next, whatever their rows: gradients.
    pub(super) stays: u64,
}

impl Taken {
    /// At the peak of a window of larger micro-batches.
    fn at(self, rows: i64, larger: i64) -> f64 {
        let grows = self.most.saturating_sub(self.stays);
        self.stays as f64 + grows as f64 * larger as f64 / rows as f64
    }
}

/// The most rows of a micro-batch, as learned.
#[derive(Debug)]
pub(super) struct Size {
    pub(super) steps: Steps,
    pub(super) patience: u64,
    /// 0: nothing learned yet, whole batches.
    pub(super) most: u64,
    /// The largest batch so far.
    batch: u64,
    /// The largest size that ran and has not failed since.
    ran: u64,
    /// Windows since `most` last changed that ran clean and had room to grow.
    clean: u64,
    /// The smallest size that failed and has not run since, 0 for none, and how often sizes failed.
    failed: u64,
    failures: u64,
    /// The room from which on it is as good as new; 0 where nobody told.
    wanted: u64,
}

impl Size {
    pub(super) fn new(steps: Steps) -> Self {
        Self { steps, patience: 100, most: 0, batch: 0, ran: 0, clean: 0, failed: 0, failures: 0, wanted: 0 }
    }

    /// The most rows that are believed to fit, where batches have more.
    pub(super) fn rows(&self) -> Option<u64> {
        (self.most > 0 && (self.batch == 0 || self.most < self.batch)).then_some(self.most)
    }

    /// Rows per micro-batch for a batch: as equal as whole rows allow.
    pub(super) fn of(&mut self, batch: i64) -> i64 {
        self.batch = self.batch.max(batch.unsigned_abs());
        match i64::try_from(self.most) {
            Ok(most) if most > 0 && most < batch => over(batch, over(batch, most)),
            _ => batch,
        }
    }

    /// Such micro-batches failed, with so much room at the window's start and so many bytes
    /// missing. More than one row, or there is nothing smaller.
    pub(super) fn failed(&mut self, batch: i64, rows: i64, room: Option<u64>, missing: Option<u64>) {
        let smaller = match self.steps {
            Steps::Halves => over(rows, 2),
            Steps::EveryCount => next_smaller(batch, rows),
        };
        let size = rows.unsigned_abs();
        self.failed = if self.failed == 0 { size } else { self.failed.min(size) };
        if self.ran >= size {
            self.ran = 0;
        }
        self.failures += 1;
        // Live bytes differ a little from window to window; that is no room.
        self.wanted = room.map_or(0, |room| room + missing.unwrap_or(0).max(room / 8).max(1));
        self.clean = 0;
        self.most = smaller.unsigned_abs().max(self.ran);
    }

    /// A window of such micro-batches ran.
    pub(super) fn clean(&mut self, batch: i64, rows: i64, taken: Taken, figures: Option<Figures>) {
        self.ran = self.ran.max(rows.unsigned_abs());
        if self.ran >= self.failed {
            self.failed = 0;
        }
        if self.patience == 0 || self.most == 0 || rows >= batch {
            return;
        }
        let larger = match self.steps {
            Steps::Halves => rows.saturating_mul(2).min(batch),
            Steps::EveryCount => next_larger(batch, rows),
        };
        if figures.is_some_and(|figures| taken.at(rows, larger) > figures.room() as f64) {
            return;
        }
        self.clean += 1;
        let again = self.failed > 0 && larger.unsigned_abs() >= self.failed;
        let more_room = figures.is_some_and(|figures| self.wanted > 0 && figures.room() >= self.wanted);
        let doublings = if again && !more_room { self.failures.saturating_sub(1).min(16) } else { 0 };
        if self.clean >= self.patience.saturating_mul(1 << doublings) {
            self.clean = 0;
            self.most = self.most.max(larger.unsigned_abs());
        }
    }

    pub(super) fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        visitor.count("most", &mut self.most)?;
        visitor.count("batch", &mut self.batch)?;
        visitor.count("ran", &mut self.ran)?;
        visitor.count("clean", &mut self.clean)?;
        visitor.count("failed", &mut self.failed)?;
        visitor.count("failures", &mut self.failures)?;
        visitor.count("wanted", &mut self.wanted)
    }
}

/// ⌈a/b⌉ of positive numbers.
fn over(a: i64, b: i64) -> i64 {
    a / b + i64::from(a % b != 0)
}

/// The largest ⌈batch/k⌉ under `rows`, which is above 1.
fn next_smaller(batch: i64, rows: i64) -> i64 {
    over(batch, over(batch, rows - 1))
}

/// The smallest ⌈batch/k⌉ over `rows`, which is under `batch`.
fn next_larger(batch: i64, rows: i64) -> i64 {
    over(batch, (over(batch, rows) - 1).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: Taken = Taken { most: 0, stays: 0 };

    fn figures(limit: u64) -> Option<Figures> {
        Some(Figures { limit, live: 0 })
    }

    #[test]
    fn micro_batches_are_as_equal_as_whole_rows_allow() {
        let mut size = Size::new(Steps::Halves);
        size.most = 8;
        assert_eq!((size.of(18), size.of(16), size.of(5), size.of(17)), (6, 8, 5, 6));
    }

    #[test]
    fn the_fine_grid_is_every_count_of_micro_batches() {
        let mut size = Size::new(Steps::EveryCount);
        let mut rows = 64;
        let mut seen = Vec::new();
        while rows > 1 {
            size.failed(64, rows, None, None);
            rows = size.of(64);
            seen.push(rows);
        }
        assert_eq!(seen, [32, 22, 16, 13, 11, 10, 8, 7, 6, 5, 4, 3, 2, 1]);
        for pair in seen.windows(2) {
            assert_eq!(next_larger(64, pair[1]), pair[0]);
        }
    }

    #[test]
    fn patience_doubles_with_each_failure_until_more_room_comes() {
        let mut size = Size::new(Steps::Halves);
        size.patience = 2;
        let ten = Taken { most: 10, stays: 0 };
        let windows_until_growth = |size: &mut Size, limit| {
            (1..200).find(|_| {
                size.clean(16, 8, ten, figures(limit));
                size.of(16) == 16
            })
        };
        for waited in [2, 4, 8, 16] {
            size.failed(16, 16, Some(20), Some(3));
            // A byte more is not more room, 3 are: those that were missing.
            assert_eq!(windows_until_growth(&mut size, 20 + u64::from(waited > 2)), Some(waited));
        }
        size.failed(16, 16, Some(20), Some(3));
        assert_eq!(windows_until_growth(&mut size, 19), None, "20 bytes are needed");
        assert_eq!(windows_until_growth(&mut size, 23), Some(2));
        size.failed(16, 16, Some(80), None);
        assert_eq!(windows_until_growth(&mut size, 90), Some(2), "an eighth more");
    }

    /// 24 of the 30 bytes stay from one micro-batch to the next: twice the rows take 36.
    #[test]
    fn what_stays_between_micro_batches_does_not_grow_with_their_rows() {
        let mut size = Size::new(Steps::Halves);
        size.patience = 1;
        let taken = Taken { most: 30, stays: 24 };
        for (room, rows) in [(35, 8), (36, 16)] {
            size.failed(16, 16, None, None);
            size.failures = 0;
            size.clean(16, 8, taken, figures(room));
            assert_eq!(size.of(16), rows, "{room}");
        }
    }

    /// A training of batches of 64 rows whose epochs end with a batch of 10; so many rows fit.
    fn train(size: &mut Size, fits: i64, epochs: usize, windows: usize) -> Vec<usize> {
        let mut failures = Vec::new();
        for _ in 0..epochs {
            let mut failed = 0;
            for window in 0..=windows {
                let batch = if window == windows { 10 } else { 64 };
                while size.of(batch) > fits {
                    let rows = size.of(batch);
                    size.failed(batch, rows, None, None);
                    failed += 1;
                }
                let rows = size.of(batch);
                size.clean(batch, rows, NOTHING, None);
            }
            failures.push(failed);
        }
        failures
    }

    #[test]
    fn a_short_last_batch_makes_it_forget_nothing() {
        for steps in [Steps::Halves, Steps::EveryCount] {
            for fits in [8, 9, 10, 12] {
                let mut size = Size::new(steps);
                let failures = train(&mut size, fits, 40, 120);
                assert!(failures[1..].iter().all(|failed| *failed <= 1), "{steps:?} {fits}: {failures:?}");
                let later: usize = failures[20..].iter().sum();
                assert!(later <= 2, "{steps:?} {fits}: {failures:?}");
                let fits = fits.unsigned_abs();
                assert!(size.ran * 2 > fits && size.ran <= fits, "{steps:?} {fits}: {size:?}");
                assert!(size.rows().is_some());
            }
        }
    }

    #[test]
    fn windows_that_could_not_grow_do_not_count() {
        let mut size = Size::new(Steps::Halves);
        size.patience = 3;
        size.failed(64, 64, None, None);
        let ten = Taken { most: 10, stays: 0 };
        for _ in 0..50 {
            size.clean(32, 32, ten, None);
            size.clean(64, 32, ten, figures(19));
        }
        assert_eq!(size.of(64), 32);
        for (_, rows) in (0..3).zip([32, 32, 64]) {
            size.clean(64, 32, ten, figures(20));
            assert_eq!(size.of(64), rows);
        }
        assert_eq!(size.rows(), None, "whole batches again");
        assert_eq!(size.of(128), 64, "and a larger one begins with what ran");
        assert_eq!(size.rows(), Some(64));
    }

    #[test]
    fn a_size_that_ran_is_what_a_failed_growth_goes_back_to() {
        let mut size = Size::new(Steps::Halves);
        size.failed(64, 16, None, None);
        size.clean(64, 8, NOTHING, None);
        size.failed(10, 10, None, None);
        assert_eq!(size.of(64), 8);
        size.failed(64, 8, None, None);
        assert_eq!(size.of(64), 4, "until it fails as well");
    }
}
