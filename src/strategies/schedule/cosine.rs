use super::{Curve, Schedule, check_length, check_share, half_cosine, way, with_floor};
use crate::error::Result;

/// Half a cosine down to a floor. Source: Loshchilov and Hutter, *SGDR*, 2017, without restarts.
/// Its shortcoming: the length must be known from the start, and a run that is cut short ends at
/// a rate that is still high.
///
/// The first update after the warm-up runs at the full rate, the last one (`steps` − 1) a little
/// above the floor; updates from `steps` on run at the floor.
#[derive(Clone, Debug, PartialEq)]
pub struct Cosine {
    steps: u64,
    floor: f64,
}

impl Cosine {
    /// Down to zero at `steps`, warm-up included, and zero from there on.
    pub fn new(steps: u64) -> Schedule<Self> {
        Schedule::new(Self { steps, floor: 0.0 })
    }
}

impl Schedule<Cosine> {
    /// Ends at this share of the initial rate (0) instead of zero.
    pub fn floor(mut self, share: f64) -> Self {
        self.curve_mut().floor = share;
        self
    }
}

impl Curve for Cosine {
    fn factor(&self, step: u64, warm_up: u64) -> f64 {
        half_cosine(way(step, warm_up, self.steps), self.floor)
    }

    fn description(&self) -> String {
        with_floor(format!("Cosine::new({})", self.steps), self.floor)
    }

    fn check(&self, warm_up: u64) -> Result<()> {
        check_length("Cosine", self.steps, warm_up)?;
        check_share("Cosine", "floor", self.floor)
    }
}
