use super::{Curve, Schedule};

/// √(w/n) in the n-th update, n from 1, after a warm-up of w updates. Source: Vaswani et al.,
/// *Attention Is All You Need*, 2017; the paper's factor of the model's width belongs to the
/// initial rate here. Its shortcoming: it has no end, and a run's last updates are still large;
/// chain a [`LinearDecay`](super::LinearDecay) behind it.
///
/// The warm-up's last update and the curve meet at the full rate. Without a warm-up w is 1, and
/// the second update already runs at 0.71 of the rate.
#[derive(Clone, Debug, PartialEq)]
pub struct InverseSqrt(());

impl InverseSqrt {
    /// Falls with the square root of the updates, in units of the warm-up.
    pub fn new() -> Schedule<Self> {
        Schedule::new(Self(()))
    }
}

impl Curve for InverseSqrt {
    fn factor(&self, step: u64, warm_up: u64) -> f64 {
        (warm_up.max(1) as f64 / (step as f64 + 1.0)).sqrt()
    }

    fn description(&self) -> String {
        "InverseSqrt::new()".to_owned()
    }
}
