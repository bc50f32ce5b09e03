//! Learning-rate schedules that tick only on steps that were taken.
//!
//! *Cost*: 0 bytes, no time.
//!
//! *When it acts*: in `build()` and after each step that was taken, it sets each group's rate for
//! the next update: its initial rate times the schedule's factor. Accumulating and skipped
//! windows do not tick.
//!
//! *Limits*: it owns the groups' rates: one set by hand holds for one update.
//!
//! ```
//! use memfit::strategies::Cosine;
//!
//! let schedule = Cosine::new(100).warm_up(10);
//! assert_eq!(schedule.factor(4), 0.5); // the fifth of ten steps up
//! assert_eq!(schedule.factor(9), 1.0);
//! assert!(schedule.factor(100) < 1e-12);
//! ```

use crate::error::{Error, Result};
use crate::optim::Optimizer;
use crate::state::StateVisitor;
use crate::step::{NextUpdate, Place, Preparation, Strategy, UpdatePhase, Verdict};

/// Linear warm-up, then half a cosine down to a floor. Source: Loshchilov and Hutter, *SGDR*,
/// 2017, without restarts.
#[derive(Clone, Debug, PartialEq)]
pub struct Cosine {
    steps: u64,
    warm_up: u64,
    floor: f64,
    taken: u64,
}

impl Cosine {
    /// Down to zero at `steps`, and zero from there on.
    pub fn new(steps: u64) -> Self {
        Self { steps, warm_up: 0, floor: 0.0, taken: 0 }
    }

    /// Rises linearly over the first `steps`: the last of them runs at the full rate.
    pub fn warm_up(mut self, steps: u64) -> Self {
        self.warm_up = steps;
        self
    }

    /// Ends at this share of the initial rate (0) instead of zero.
    pub fn floor(mut self, share: f64) -> Self {
        self.floor = share;
        self
    }

    /// What the initial rate is multiplied by in update `step`, from 0.
    pub fn factor(&self, step: u64) -> f64 {
        if step < self.warm_up {
            return (step + 1) as f64 / self.warm_up as f64;
        }
        let span = self.steps.saturating_sub(self.warm_up).max(1) as f64;
        let way = ((step - self.warm_up) as f64 / span).min(1.0);
        self.floor + (1.0 - self.floor) * 0.5 * (1.0 + (std::f64::consts::PI * way).cos())
    }

    fn set(&self, optimizer: &mut dyn Optimizer) {
        let factor = self.factor(self.taken);
        for group in optimizer.groups_mut() {
            group.lr = group.initial_lr() * factor;
        }
    }
}

impl Strategy for Cosine {
    fn name(&self) -> String {
        format!("Cosine::new({}).warm_up({})", self.steps, self.warm_up)
    }

    fn place(&self) -> Place {
        Place::Schedule
    }

    fn prepare(&mut self, preparation: &mut Preparation<'_>) -> Result<()> {
        if self.steps == 0 || self.warm_up > self.steps {
            return Err(Error::config("Cosine", "needs at least one step, and no more warm-up than steps"));
        }
        if !(0.0..=1.0).contains(&self.floor) {
            return Err(Error::config(
                "Cosine",
                format!("the floor is a share from 0 to 1, not {}", self.floor),
            ));
        }
        self.set(preparation.optimizer);
        Ok(())
    }

    fn update(&mut self, phase: &mut UpdatePhase<'_>, next: NextUpdate<'_>) -> Result<Verdict> {
        let verdict = next(phase)?;
        if verdict == Verdict::Stepped {
            self.taken += 1;
            self.set(phase.optimizer);
        }
        Ok(verdict)
    }

    fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        visitor.count("taken", &mut self.taken)
    }
}
