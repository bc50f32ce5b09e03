use super::random::mix;

/// The order of an epoch: a permutation of `0..len` that takes no memory.
///
/// A Feistel network over pairs (x / b, x mod b) of Z_a × Z_b with a·b just above `len`, where
/// a result outside walks on (Black, Rogaway 2002): each place of the order is found by itself,
/// so that workers, ranks and a resumed run need no list. Twelve rounds; the round function is
/// SplitMix64's finalizer over a key of seed, epoch and round. It is a shuffle for training, not
/// a cipher.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    len: u64,
    /// Both halves' moduli, or `None` for the source's own order.
    halves: Option<(u64, u64)>,
    keys: [u64; ROUNDS],
}

const ROUNDS: usize = 12;

impl Order {
    /// The source's own order.
    pub(crate) fn sequential(len: u64) -> Self {
        Self { len, halves: None, keys: [0; ROUNDS] }
    }

    /// The shuffled order of one epoch.
    pub(crate) fn shuffled(len: u64, seed: u64, epoch: u64) -> Self {
        let seed = mix(seed.wrapping_add(0x5851_f42d_4c95_7f2d));
        let base = mix(seed ^ epoch.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let keys = std::array::from_fn(|round| mix(base.wrapping_add((round as u64 + 1) << 32)));
        let a = len.isqrt().max(2);
        Self { len, halves: (len > 1).then(|| (a, len.div_ceil(a))), keys }
    }

    /// Which record stands at this place; places beyond the end have none.
    pub(crate) fn at(&self, place: u64) -> Option<u64> {
        if place >= self.len {
            return None;
        }
        let Some((a, b)) = self.halves else { return Some(place) };
        let mut at = place;
        loop {
            at = self.rounds(at, a, b);
            if at < self.len {
                return Some(at);
            }
        }
    }

    fn rounds(&self, at: u64, a: u64, b: u64) -> u64 {
        let (mut left, mut right) = (at / b, at % b);
        for pair in self.keys.chunks_exact(2) {
            left = add(left, scaled(mix(right ^ pair[0]), a), a);
            right = add(right, scaled(mix(left ^ pair[1]), b), b);
        }
        left * b + right
    }
}

/// Spreads 64 bits over `0..limit`.
fn scaled(bits: u64, limit: u64) -> u64 {
    ((u128::from(bits) * u128::from(limit)) >> 64) as u64
}

/// Below 2^33 both, so nothing overflows.
fn add(x: u64, y: u64, modulus: u64) -> u64 {
    let sum = x + y;
    if sum >= modulus { sum - modulus } else { sum }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn all(order: &Order) -> Vec<u64> {
        (0..order.len).map(|place| order.at(place).unwrap()).collect()
    }

    #[test]
    fn every_length_is_permuted() {
        for len in (0..200).chain([255, 256, 257, 4_095, 10_007]) {
            let order = Order::shuffled(len, 3, 1);
            let mut seen = all(&order);
            seen.sort_unstable();
            assert_eq!(seen, (0..len).collect::<Vec<_>>());
            assert_eq!(order.at(len), None);
        }
        let huge = Order::shuffled(u64::MAX, 1, 1);
        assert!(huge.at(u64::MAX - 1).is_some() && huge.at(u64::MAX).is_none());
        assert_eq!(all(&Order::sequential(4)), [0, 1, 2, 3]);
    }

    #[test]
    fn seed_and_epoch_make_the_order() {
        let order = |seed, epoch| all(&Order::shuffled(100, seed, epoch));
        assert_eq!(order(1, 2), order(1, 2));
        assert_ne!(order(1, 2), order(1, 3));
        assert_ne!(order(1, 2), order(2, 2));
        assert_ne!(order(1, 2), order(2, 1));
    }

    #[test]
    fn permutations_are_equally_likely() {
        // Of 4 records, where the halves are smallest: 24 orders over 24,000 seeds.
        let mut counts = HashMap::new();
        for seed in 0..24_000 {
            *counts.entry(all(&Order::shuffled(4, seed, 0))).or_insert(0_u32) += 1;
        }
        let chi: f64 = counts.values().map(|count| (f64::from(*count) - 1000.0).powi(2) / 1000.0).sum();
        assert!(counts.len() == 24 && chi < 56.0, "{chi} over {} orders", counts.len()); // 23 degrees: 1 in 10,000
    }

    #[test]
    fn places_and_neighbours_are_independent() {
        // Where record 0 lands, and how far neighbours land apart, over epochs: each as likely.
        let len = 50;
        let (mut lands, mut gaps) = (vec![0_u32; len], vec![0_u32; len]);
        for epoch in 0..20_000 {
            let order = Order::shuffled(len as u64, 9, epoch);
            let (first, second) = (order.at(0).unwrap() as usize, order.at(1).unwrap() as usize);
            lands[first] += 1;
            gaps[(second + len - first) % len] += 1;
        }
        let chi = |counts: &[u32], each: f64| -> f64 {
            counts.iter().map(|count| (f64::from(*count) - each).powi(2) / each).sum()
        };
        assert!(chi(&lands, 400.0) < 95.0, "{lands:?}"); // 49 degrees: 1 in 10,000
        assert_eq!(gaps[0], 0);
        assert!(chi(&gaps[1..], 20_000.0 / 49.0) < 94.0, "{gaps:?}");
    }
}
