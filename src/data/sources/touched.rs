//! What reading leaves in memory of a file, counted until it is let go.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// A cold read brings whole pages into the page cache.
const PAGE: u64 = 4 << 10;
/// Linux maps the whole of a large folio around a touched page, and none reaches over such an area: what one page
/// table holds where pages have 4 KiB.
const AREA: u64 = 2 << 20;
const BITS: u64 = u64::BITS as u64;

/// Counts bytes that were read, by the pages that they bring into the page cache.
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

impl Cached {
    pub(super) fn new(step: u64) -> Self {
        let none = u64::MAX;
        Self { step: step.max(1), bytes: 0.into(), last: none.into(), from: none.into(), to: 0.into() }
    }

    /// Counts a range. Where a step is full with it, the range in which all of the step lies.
    pub(super) fn add(&self, offset: u64, length: u64) -> Option<Range<u64>> {
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
        let from = self.from.swap(u64::MAX, Ordering::Relaxed).min(offset);
        let to = self.to.swap(0, Ordering::Relaxed).max(end);
        // The kernel keeps what lies in a range by a part only: the step before left some.
        Some(from.saturating_sub(self.step)..to)
    }
}

/// Knows the areas of a mapping that may be resident.
#[derive(Debug)]
pub(super) struct Resident {
    most: u64,
    areas: Box<[AtomicU64]>,
    count: AtomicU64,
}

impl Resident {
    /// Of a mapping of `len` bytes, of which about `most` may be resident.
    pub(super) fn new(len: u64, most: u64) -> Self {
        let words = len.div_ceil(AREA).div_ceil(BITS);
        Self { most, areas: (0..words).map(|_| AtomicU64::new(0)).collect(), count: 0.into() }
    }

    /// Notes a range of the mapping that was touched; true where more than may be is resident.
    pub(super) fn add(&self, offset: u64, length: u64) -> bool {
        if length == 0 {
            return false;
        }
        let new = (offset / AREA..=(offset + length - 1) / AREA).filter(|area| {
            let (word, bit) = (&self.areas[(area / BITS) as usize], 1 << (area % BITS));
            // Most often it is known, and a shared word is only read.
            word.load(Ordering::Relaxed) & bit == 0 && word.fetch_or(bit, Ordering::Relaxed) & bit == 0
        });
        let new = new.count() as u64;
        new > 0 && (self.count.fetch_add(new, Ordering::Relaxed) + new).saturating_mul(AREA) > self.most
    }

    /// Forgets all areas. Their pages are given back *afterwards*: what another thread touches after that, it
    /// notes after this.
    pub(super) fn clear(&self) {
        self.count.store(0, Ordering::Relaxed);
        self.areas.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_in_a_page_are_counted_once_and_strangers_by_their_pages() {
        let cached = Cached::new(8_192);
        let due: Vec<_> = (0..12).map(|row| cached.add(row * 1_024, 1_024)).collect();
        // The step is full with row 4, which begins the second page.
        assert_eq!(due[4], Some(0..5 * 1_024));
        assert_eq!(due.iter().flatten().count(), 1);
        let strangers = Cached::new(8_192);
        assert_eq!(strangers.add(1 << 40, 1), None);
        assert_eq!(strangers.add(20_480, 1), Some(20_480 - 8_192..(1 << 40) + 1));
        assert_eq!(strangers.add(0, 0), None, "nothing was touched");
        assert_eq!(Cached::new(0).add(3, 1), Some(2..4), "a step of nothing is after every read");
    }

    #[test]
    fn each_area_counts_once_until_all_are_forgotten() {
        let resident = Resident::new(100 * AREA - 5, 3 * AREA);
        // The last one is of the second word of bits.
        for (area, over) in [(0, false), (99, false), (0, false), (63, false), (99, false), (64, true)] {
            assert_eq!(resident.add(area * AREA + 7, 10), over, "{area}");
        }
        resident.clear();
        assert!(!resident.add(AREA - 1, AREA + 1), "two areas");
        assert!(!resident.add(2 * AREA - 1, 1), "the second again");
        assert!(resident.add(5 * AREA - 1, 2), "two more");
        assert!(!resident.add(7 * AREA, 0), "nothing was touched");
        let none = Resident::new(AREA, 0);
        assert!(none.add(0, 1));
        none.clear();
        assert!(none.add(0, 1), "after each read");
        let all = Resident::new(u64::MAX >> 20, u64::MAX);
        assert!(!all.add(0, u64::MAX >> 20));
        assert!(!Resident::new(0, 0).add(0, 0));
    }
}
