use std::sync::Arc;

use super::{Curve, Schedule};
use crate::error::{Error, Result};

/// Curves one after another, each from its own first update. After the last part's updates the
/// rate stays where that part has come to: its factor at the step after its last.
///
/// ```
/// use memfit::strategies::{Chain, Constant, LinearDecay};
///
/// // Warm up, hold, and fall over the last tenth.
/// let schedule = Chain::new().then(900, Constant::new().warm_up(50)).then(100, LinearDecay::new(100));
/// assert_eq!((schedule.factor(899), schedule.factor(950), schedule.factor(1000)), (1.0, 0.5, 0.0));
/// ```
#[derive(Clone, Debug)]
pub struct Chain {
    parts: Vec<(u64, Arc<dyn Curve>)>,
}

impl Chain {
    /// No part yet; `build()` refuses an empty chain.
    pub fn new() -> Schedule<Self> {
        Schedule::new(Self { parts: Vec::new() })
    }
}

impl Schedule<Chain> {
    /// Follows `curve`, a schedule with its own warm-up or a [`Curve`], for so many updates.
    pub fn then(mut self, updates: u64, curve: impl Curve) -> Self {
        self.curve_mut().parts.push((updates, Arc::new(curve)));
        self
    }
}

impl Curve for Chain {
    fn factor(&self, step: u64, warm_up: u64) -> f64 {
        let mut at = step.saturating_sub(warm_up);
        let last = self.parts.len().saturating_sub(1);
        for (index, (updates, curve)) in self.parts.iter().enumerate() {
            if at < *updates || index == last {
                return curve.factor(at.min(*updates), 0);
            }
            at -= updates;
        }
        1.0
    }

    fn description(&self) -> String {
        let part =
            |(updates, curve): &(u64, Arc<dyn Curve>)| format!(".then({updates}, {})", curve.description());
        format!("Chain::new(){}", self.parts.iter().map(part).collect::<String>())
    }

    fn check(&self, _warm_up: u64) -> Result<()> {
        if self.parts.is_empty() || self.parts.iter().any(|(updates, _)| *updates == 0) {
            return Err(Error::config("Chain", "needs at least one part, and an update in each"));
        }
        self.parts.iter().try_for_each(|(_, curve)| curve.check(0))
    }
}
