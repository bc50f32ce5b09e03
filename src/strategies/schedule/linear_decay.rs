use super::{Curve, Schedule, check_length, check_share, way, with_floor};
use crate::error::Result;

/// A straight line down to a floor, as in Devlin et al., *BERT*, 2019. Its shortcoming is
/// [`Cosine`](super::Cosine)'s: the length must be known from the start.
///
/// The first update after the warm-up runs at the full rate, the last one (`steps` − 1) one
/// `steps − warm-up`-th of the way above the floor; updates from `steps` on run at the floor.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearDecay {
    steps: u64,
    floor: f64,
}

impl LinearDecay {
    /// Down to zero at `steps`, warm-up included, and zero from there on.
    pub fn new(steps: u64) -> Schedule<Self> {
        Schedule::new(Self { steps, floor: 0.0 })
    }
}

impl Schedule<LinearDecay> {
    /// Ends at this share of the initial rate (0) instead of zero.
    pub fn floor(mut self, share: f64) -> Self {
        self.curve_mut().floor = share;
        self
    }
}

impl Curve for LinearDecay {
    fn factor(&self, step: u64, warm_up: u64) -> f64 {
        1.0 - (1.0 - self.floor) * way(step, warm_up, self.steps)
    }

    fn description(&self) -> String {
        with_floor(format!("LinearDecay::new({})", self.steps), self.floor)
    }

    fn check(&self, warm_up: u64) -> Result<()> {
        check_length("LinearDecay", self.steps, warm_up)?;
        check_share("LinearDecay", "floor", self.floor)
    }
}
