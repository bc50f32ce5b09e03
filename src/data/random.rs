/// Random numbers of one sample, for transforms.
///
/// They depend on the loader's seed, the epoch and the sample's place in the epoch's order, and
/// on nothing else: not on the number of workers, nor on which of them runs the transform, nor
/// on what was drawn before. libtorch's generator is not touched: the process has one, it is the training's, and a
/// transform that calls `Tensor::rand`, `dropout` or others that draw moves it from a worker at any moment, so that a
/// run cannot be repeated and its resume is not bitwise. A tensor of these numbers does not:
///
/// ```
/// use memfit::{data::Random, tch::Tensor};
///
/// let mut random = Random::of_sample(7, 0, 0);                   // a transform is given its sample's
/// let noise: Vec<f32> = (0..6).map(|_| random.normal() as f32).collect();
/// let kept: Vec<bool> = (0..6).map(|_| random.chance(0.9)).collect();
/// let dropped = Tensor::from_slice(&noise).view([2, 3]) * Tensor::from_slice(&kept).view([2, 3]) / 0.9;
/// assert_eq!(dropped.size(), [2, 3]);
/// ```
///
/// The algorithm is SplitMix64 (Steele, Lea, Flood 2014): fast, of 64 bits of state, and no good for secrets.
#[derive(Clone, Debug)]
pub struct Random(u64);

/// SplitMix64's step, the golden ratio of 64 bits.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64's finalizer: each bit of the result depends on each of the argument's.
pub(crate) fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

impl Random {
    /// The numbers of the sample at `position` of an epoch.
    pub fn of_sample(seed: u64, epoch: u64, position: u64) -> Self {
        let epoch = mix(seed.wrapping_add(STEP)).wrapping_add(mix(epoch.wrapping_add(STEP)).rotate_left(17));
        Self(mix(mix(epoch).wrapping_add(position.wrapping_mul(STEP))))
    }

    /// All 64 bits at random.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// A whole number below `limit`, each as likely; 0 where `limit` is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        if limit == 0 {
            return 0;
        }
        // Lemire 2019: of the products' low halves, those below 2^64 mod limit would be one too many.
        let unfair = limit.wrapping_neg() % limit;
        loop {
            let product = u128::from(self.next_u64()) * u128::from(limit);
            if product as u64 >= unfair {
                return (product >> 64) as u64;
            }
        }
    }

    /// A real number from 0 up to, and without, 1; 53 bits.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.uniform() < probability
    }

    /// A number of the normal distribution of mean 0 and deviation 1 (Box, Muller 1958).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_samples_numbers_depend_on_seed_epoch_and_position_alone() {
        let first = |seed, epoch, position| Random::of_sample(seed, epoch, position).next_u64();
        assert_eq!(first(1, 2, 3), first(1, 2, 3));
        let others = [first(2, 2, 3), first(1, 3, 3), first(1, 2, 4), first(2, 1, 3), first(3, 2, 1)];
        let mut all = vec![first(1, 2, 3)];
        all.extend(others);
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 6);
    }

    #[test]
    fn numbers_have_the_moments_of_their_distributions() {
        let n = 40_000;
        let mut random = Random::of_sample(7, 0, 0);
        let mean = |draw: &mut dyn FnMut() -> f64| (0..n).map(|_| draw()).sum::<f64>() / f64::from(n);
        // Five standard errors each.
        assert!((mean(&mut || random.uniform()) - 0.5).abs() < 5.0 * 0.289 / 200.0);
        assert!(mean(&mut || random.normal()).abs() < 5.0 / 200.0);
        assert!((mean(&mut || random.normal().powi(2)) - 1.0).abs() < 5.0 * 1.415 / 200.0);
        assert!((mean(&mut || f64::from(u8::from(random.chance(0.25)))) - 0.25).abs() < 5.0 * 0.433 / 200.0);
        let mut counts = [0_u32; 6];
        for _ in 0..n {
            counts[random.below(6) as usize] += 1;
        }
        let expected = f64::from(n) / 6.0;
        let chi: f64 = counts.iter().map(|count| (f64::from(*count) - expected).powi(2) / expected).sum();
        assert!(chi < 25.7, "{counts:?}"); // of 5 degrees of freedom: 1 in 10,000
        assert_eq!(random.below(0), 0);
        assert_eq!(random.below(1), 0);
    }
}
