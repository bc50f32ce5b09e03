//! Whether two sides' batches are the same work.

use std::fmt;

/// How far two sides' numbers are apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Apart {
    pub mean: f64,
    pub most: f64,
}

impl Apart {
    /// Of two batches whose last bytes, so many, are whole numbers, equal or not; before them are
    /// numbers of 32 bits. `None` where the last bytes differ, or the lengths do.
    pub fn of(ours: &[u8], theirs: &[u8], whole: usize) -> Option<Self> {
        let cut = |bytes: &[u8]| bytes.len().saturating_sub(whole);
        let (ours, our_labels) = ours.split_at(cut(ours));
        let (theirs, their_labels) = theirs.split_at(cut(theirs));
        if ours.len() != theirs.len() || our_labels != their_labels {
            return None;
        }
        if ours == theirs {
            return Some(Self { mean: 0.0, most: 0.0 });
        }
        let numbers = |bytes: &[u8]| -> Vec<f64> {
            let number = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            bytes.chunks_exact(4).map(|bytes| f64::from(number(bytes))).collect()
        };
        let (ours, theirs) = (numbers(ours), numbers(theirs));
        let differences: Vec<f64> =
            ours.iter().zip(&theirs).map(|(ours, theirs)| (ours - theirs).abs()).collect();
        // A maximum passes over what is no number.
        let most = if differences.iter().any(|difference| difference.is_nan()) {
            f64::NAN
        } else {
            differences.iter().copied().fold(0.0, f64::max)
        };
        Some(Self { mean: differences.iter().sum::<f64>() / differences.len() as f64, most })
    }

    pub fn is_within(self, most: Self) -> bool {
        self.mean <= most.mean && self.most <= most.most
    }
}

impl fmt::Display for Apart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.4} in the mean and {:.4} at most", self.mean, self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(numbers: [f32; 2], label: i64) -> Vec<u8> {
        [&numbers.map(f32::to_le_bytes).concat()[..], &label.to_le_bytes()].concat()
    }

    #[test]
    fn numbers_are_compared_by_how_far_and_labels_by_whether() {
        let ours = bytes([1.0, 2.0], 3);
        assert_eq!(Apart::of(&ours, &ours, 8), Some(Apart { mean: 0.0, most: 0.0 }));
        let apart = Apart::of(&ours, &bytes([1.5, 2.0], 3), 8).unwrap();
        assert_eq!(apart, Apart { mean: 0.25, most: 0.5 });
        assert_eq!(apart.to_string(), "0.2500 in the mean and 0.5000 at most");
        assert_eq!(Apart::of(&ours, &bytes([1.0, 2.0], 4), 8), None, "labels are equal or not");
        assert_eq!(Apart::of(&ours, &ours[..12], 8), None);
        assert_eq!(Apart::of(&ours, &ours[..4], 8), None);
        assert_eq!(Apart::of(&ours, &bytes([1.5, 2.0], 3), usize::MAX), None, "whole numbers are all");
        assert!(Apart::of(&ours, &ours, usize::MAX).is_some());
    }

    #[test]
    fn both_the_mean_and_the_most_are_held() {
        let tolerance = Apart { mean: 0.01, most: 0.1 };
        assert!(Apart { mean: 0.01, most: 0.1 }.is_within(tolerance));
        assert!(!Apart { mean: 0.02, most: 0.1 }.is_within(tolerance));
        assert!(!Apart { mean: 0.01, most: 0.2 }.is_within(tolerance));
        let lost = Apart::of(&bytes([1.0, f32::NAN], 3), &bytes([1.0, 2.0], 3), 8).unwrap();
        assert!(lost.most.is_nan() && !lost.is_within(tolerance));
    }
}
