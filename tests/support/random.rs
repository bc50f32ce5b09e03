//! Random cases that can be had again.

use std::hash::{BuildHasher, Hasher, RandomState};

use proptest::prelude::ProptestConfig;
use proptest::test_runner::RngSeed;

/// So many cases, other ones in each run; a test that fails shows the seed that repeats them.
pub fn cases(count: u32) -> ProptestConfig {
    let mut config = ProptestConfig { cases: count, failure_persistence: None, ..Default::default() };
    let seed = match config.rng_seed {
        RngSeed::Fixed(seed) => seed,
        RngSeed::Random => RandomState::new().build_hasher().finish(),
    };
    config.rng_seed = RngSeed::Fixed(seed);
    println!("PROPTEST_RNG_SEED={seed} repeats these cases");
    config
}
