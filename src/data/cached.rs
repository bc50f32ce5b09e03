//! What reading leaves of a file in the page cache, counted until it is dropped.

use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sys::file::drop_cached;

/// A cold read brings whole pages into the page cache.
const PAGE: u64 = 4 << 10;
/// The page cache keeps several pages as one, which goes only as a whole: more than the largest.
const FOLIO: u64 = 4 << 20;

/// Counts bytes that were read, in whatever order and from any thread, by the pages that they bring
/// into the page cache.
#[derive(Debug)]
pub(super) struct Cached {
    step: u64,
    bytes: AtomicU64,
    /// The page that was read last: neighbours share pages.
    last: AtomicU64,
    /// What was read since the last full step lies between these.
    from: AtomicU64,
    to: AtomicU64,
}

/// A part of a file that is to be dropped.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Due {
    from: u64,
    to: u64,
}

impl Due {
    pub(super) fn drop_from(self, file: &File) {
        drop_cached(file, self.from, self.to - self.from);
    }
}

impl Cached {
    pub(super) fn new(step: u64) -> Self {
        let none = u64::MAX;
        Self { step: step.max(1), bytes: 0.into(), last: none.into(), from: none.into(), to: 0.into() }
    }

    /// Counts a range. Where a step is full with it, the part in which all of the step lies.
    pub(super) fn add(&self, offset: u64, length: u64) -> Option<Due> {
        let end = offset.checked_add(length).filter(|end| *end > offset)?;
        self.from.fetch_min(offset, Ordering::Relaxed);
        self.to.fetch_max(end, Ordering::Relaxed);
        let (first, last) = (offset / PAGE, (end - 1) / PAGE);
        let known = self.last.swap(last, Ordering::Relaxed) == first;
        let bytes = (last - first + u64::from(!known)) * PAGE;
        let before = self.bytes.fetch_add(bytes, Ordering::Relaxed);
        if before / self.step == before.wrapping_add(bytes) / self.step {
            return None;
        }
        self.take(offset, end)
    }

    /// The part in which all lies that was read since the last full step.
    pub(super) fn rest(&self) -> Option<Due> {
        self.take(u64::MAX, 0)
    }

    fn take(&self, from: u64, to: u64) -> Option<Due> {
        let from = self.from.swap(u64::MAX, Ordering::Relaxed).min(from);
        let to = self.to.swap(0, Ordering::Relaxed).max(to);
        // What lies in the part with a piece of itself only is kept: the step before left some.
        (from < to).then(|| Due { from: from.saturating_sub(FOLIO), to })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn due(from: u64, to: u64) -> Option<Due> {
        Some(Due { from, to })
    }

    #[test]
    fn neighbours_in_a_page_are_counted_once_and_strangers_by_their_pages() {
        let far = 1 << 40;
        let cached = Cached::new(8_192);
        let parts: Vec<_> = (0..12).map(|row| cached.add(far + row * 1_024, 1_024)).collect();
        // The step is full with row 4, which begins the second page.
        assert_eq!(parts[4], due(far - FOLIO, far + 5 * 1_024));
        assert_eq!(parts.iter().flatten().count(), 1);
        let strangers = Cached::new(8_192);
        assert_eq!(strangers.add(far, 1), None);
        assert_eq!(strangers.add(2 * FOLIO, 1), due(FOLIO, far + 1));
        assert_eq!(strangers.add(0, 0), None, "nothing was touched");
        assert_eq!(Cached::new(0).add(3, 1), due(0, 4), "a step of nothing is after every read");
        assert_eq!(Cached::new(2 * FOLIO).add(3 * FOLIO, 2 * FOLIO), due(2 * FOLIO, 5 * FOLIO));
    }

    #[test]
    fn what_no_full_step_has_can_be_had() {
        let cached = Cached::new(1 << 20);
        assert_eq!(cached.rest(), None);
        assert_eq!((cached.add(70_000, 10), cached.add(50_000, 10)), (None, None));
        assert_eq!((cached.rest(), cached.rest()), (due(0, 70_010), None));
    }
}
