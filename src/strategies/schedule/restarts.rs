use super::{Curve, Schedule, check_share, half_cosine, with_floor};
use crate::error::{Error, Result};

/// Half cosines one after another, each as long as the one before or a multiple of it. Source:
/// Loshchilov and Hutter, *SGDR*, 2017. Its shortcoming: each restart throws the loss back, so a
/// run should end with a period; and the warm-up is not repeated.
///
/// The first update of a period runs at the full rate, its last a little above the floor. It has
/// no end; a [`Chain`](super::Chain) gives it one. The first period begins after the warm-up.
#[derive(Clone, Debug, PartialEq)]
pub struct CosineRestarts {
    period: u64,
    multiplier: u64,
    floor: f64,
}

impl CosineRestarts {
    /// Starts again every `period` updates.
    pub fn new(period: u64) -> Schedule<Self> {
        Schedule::new(Self { period, multiplier: 1, floor: 0.0 })
    }

    /// The share of the period that `at` is in, from 0.
    fn way(&self, at: u64) -> f64 {
        let (mut start, mut period) = (0, self.period.max(1));
        if self.multiplier <= 1 {
            return (at % period) as f64 / period as f64;
        }
        // Periods grow geometrically, so this ends after at most 64 rounds.
        while at - start >= period {
            start += period;
            period = period.saturating_mul(self.multiplier);
        }
        (at - start) as f64 / period as f64
    }
}

impl Schedule<CosineRestarts> {
    /// Each period is this many times (1) as long as the one before.
    pub fn multiplier(mut self, multiplier: u64) -> Self {
        self.curve_mut().multiplier = multiplier;
        self
    }

    /// Each period ends at this share of the initial rate (0) instead of zero.
    pub fn floor(mut self, share: f64) -> Self {
        self.curve_mut().floor = share;
        self
    }
}

impl Curve for CosineRestarts {
    fn factor(&self, step: u64, warm_up: u64) -> f64 {
        half_cosine(self.way(step.saturating_sub(warm_up)), self.floor)
    }

    fn description(&self) -> String {
        let mut name = format!("CosineRestarts::new({})", self.period);
        if self.multiplier != 1 {
            name += &format!(".multiplier({})", self.multiplier);
        }
        with_floor(name, self.floor)
    }

    fn check(&self, _warm_up: u64) -> Result<()> {
        if self.period == 0 || self.multiplier == 0 {
            return Err(Error::config(
                "CosineRestarts",
                "needs a period of at least one update and a multiplier of at least 1",
            ));
        }
        check_share("CosineRestarts", "floor", self.floor)
    }
}
