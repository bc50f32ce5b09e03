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

/// The most rows of a micro-batch, as learned.
#[derive(Debug)]
pub(super) struct Size {
    pub(super) steps: Steps,
    pub(super) patience: u64,
    /// 0: whole batches.
    pub(super) most: u64,
    /// Clean windows since it last changed.
    clean: u64,
    /// The smallest size that failed, 0 for none, and how often sizes failed.
    failed: u64,
    failures: u64,
    /// Room there was when it failed; 0 where nobody told.
    room: u64,
}

impl Size {
    pub(super) fn new(steps: Steps) -> Self {
        Self { steps, patience: 100, most: 0, clean: 0, failed: 0, failures: 0, room: 0 }
    }

    /// Rows per micro-batch for a batch: as equal as whole rows allow.
    pub(super) fn of(&self, batch: i64) -> i64 {
        match i64::try_from(self.most) {
            Ok(most) if most > 0 && most < batch => over(batch, over(batch, most)),
            _ => batch,
        }
    }

    pub(super) fn failed(&mut self, batch: i64, rows: i64, room: Option<u64>) {
        let smaller = match self.steps {
            Steps::Halves => over(rows, 2),
            Steps::EveryCount => next_smaller(batch, rows),
        };
        self.failed = rows.unsigned_abs();
        self.failures += 1;
        self.room = room.unwrap_or(0);
        self.clean = 0;
        self.most = smaller.unsigned_abs();
    }

    /// A window of such micro-batches ran; it took `took` bytes over those that were live.
    pub(super) fn clean(&mut self, batch: i64, rows: i64, took: u64, figures: Option<Figures>) {
        self.clean += 1;
        if self.patience == 0 || self.most == 0 || rows >= batch {
            return;
        }
        let larger = match self.steps {
            Steps::Halves => rows.saturating_mul(2).min(batch),
            Steps::EveryCount => next_larger(batch, rows),
        };
        let needs = took as f64 * larger as f64 / rows as f64;
        if figures.is_some_and(|figures| needs > figures.room() as f64) {
            return;
        }
        let again = self.failed > 0 && larger.unsigned_abs() >= self.failed;
        let more_room = figures.is_some_and(|figures| self.room > 0 && figures.room() > self.room);
        let doublings = if again && !more_room { self.failures.saturating_sub(1).min(16) } else { 0 };
        if self.clean >= self.patience.saturating_mul(1 << doublings) {
            self.clean = 0;
            self.most = if larger >= batch { 0 } else { larger.unsigned_abs() };
        }
    }

    pub(super) fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        visitor.count("most", &mut self.most)?;
        visitor.count("clean", &mut self.clean)?;
        visitor.count("failed", &mut self.failed)?;
        visitor.count("failures", &mut self.failures)?;
        visitor.count("room", &mut self.room)
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
            size.failed(64, rows, None);
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
        let figures = |limit| Some(Figures { limit, live: 0 });
        let windows_until_growth = |size: &mut Size, limit| {
            (1..100).find(|_| {
                size.clean(16, 8, 10, figures(limit));
                size.of(16) == 16
            })
        };
        for waited in [2, 4, 8] {
            size.failed(16, 16, Some(20));
            assert_eq!(windows_until_growth(&mut size, 20), Some(waited));
        }
        size.failed(16, 16, Some(20));
        assert_eq!(windows_until_growth(&mut size, 19), None, "20 bytes are needed");
        size.failed(16, 16, Some(20));
        assert_eq!(windows_until_growth(&mut size, 21), Some(2));
    }
}
