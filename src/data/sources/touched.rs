//! What touching a mapping leaves in memory of it, counted until it is let go.

use std::sync::atomic::{AtomicU64, Ordering};

/// Linux maps the whole of a large folio around a touched page, and none reaches over such an area: what one page
/// table holds where pages have 4 KiB.
const AREA: u64 = 2 << 20;
const BITS: u64 = u64::BITS as u64;

/// Knows the areas of a mapping that may be resident.
#[derive(Debug)]
pub(super) struct Touched {
    len: u64,
    most: u64,
    areas: Box<[AtomicU64]>,
    count: AtomicU64,
}

impl Touched {
    /// Of a mapping of `len` bytes, of which about `most` may be resident.
    pub(super) fn new(len: u64, most: u64) -> Self {
        let words = len.div_ceil(AREA).div_ceil(BITS);
        Self { len, most, areas: (0..words).map(|_| AtomicU64::new(0)).collect(), count: 0.into() }
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
        if new == 0 {
            return false;
        }
        let areas = self.count.fetch_add(new, Ordering::Relaxed) + new;
        areas.saturating_mul(AREA).min(self.len) > self.most
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
    fn each_area_counts_once_until_all_are_forgotten() {
        let resident = Touched::new(100 * AREA - 5, 3 * AREA);
        // The last one is of the second word of bits.
        for (area, over) in [(0, false), (99, false), (0, false), (63, false), (99, false), (64, true)] {
            assert_eq!(resident.add(area * AREA + 7, 10), over, "{area}");
        }
        resident.clear();
        assert!(!resident.add(AREA - 1, AREA + 1), "two areas");
        assert!(!resident.add(2 * AREA - 1, 1), "the second again");
        assert!(resident.add(5 * AREA - 1, 2), "two more");
        assert!(!resident.add(7 * AREA, 0), "nothing was touched");
        // A file that is no whole number of areas, in a bound that is its length.
        let fits = Touched::new(AREA + 1, AREA + 1);
        assert!(!fits.add(0, AREA + 1));
        assert!(Touched::new(AREA + 1, AREA).add(0, AREA + 1));
        let none = Touched::new(AREA, 0);
        assert!(none.add(0, 1));
        none.clear();
        assert!(none.add(0, 1), "after each read");
        let all = Touched::new(u64::MAX >> 20, u64::MAX);
        assert!(!all.add(0, u64::MAX >> 20));
        assert!(!Touched::new(0, 0).add(0, 0));
    }
}
