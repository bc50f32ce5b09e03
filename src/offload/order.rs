use std::collections::HashMap;

/// In which order gradients became final.
#[derive(Debug, Default)]
pub(super) struct Order {
    places: HashMap<(usize, usize), usize>,
    told: usize,
    /// Bytes of state that the kernel was asked to read ahead.
    pub(super) announced: u64,
}

/// State that is announced during backward, at most: page cache, not memory of the process.
pub(super) const AHEAD: u64 = 64 << 20;

impl Order {
    pub(super) fn add(&mut self, parameter: (usize, usize)) {
        self.told += 1;
        self.places.insert(parameter, self.told);
    }

    /// Those that were never told of come last, in their own order.
    pub(super) fn place(&self, parameter: (usize, usize)) -> usize {
        self.places.get(&parameter).copied().unwrap_or(usize::MAX)
    }
}
