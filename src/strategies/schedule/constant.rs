use super::{Curve, Schedule, check_share};
use crate::error::Result;

/// The same rate in every update. It is there for its warm-up, and as a part of a
/// [`Chain`](super::Chain).
#[derive(Clone, Debug, PartialEq)]
pub struct Constant {
    share: f64,
}

impl Constant {
    /// The initial rate, in every update.
    pub fn new() -> Schedule<Self> {
        Self::at(1.0)
    }

    /// This share of the initial rate, in every update.
    pub fn at(share: f64) -> Schedule<Self> {
        Schedule::new(Self { share })
    }
}

impl Curve for Constant {
    fn factor(&self, _step: u64, _warm_up: u64) -> f64 {
        self.share
    }

    fn description(&self) -> String {
        if self.share == 1.0 { "Constant::new()".to_owned() } else { format!("Constant::at({})", self.share) }
    }

    fn check(&self, _warm_up: u64) -> Result<()> {
        check_share("Constant", "rate", self.share)
    }
}
