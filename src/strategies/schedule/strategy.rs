use super::Curve;
use crate::error::{Error, Result};
use crate::optim::Optimizer;
use crate::state::StateVisitor;
use crate::step::{NextUpdate, Place, Preparation, Strategy, UpdatePhase, Verdict};

/// A curve that has been started: sets the groups' rates, counts the updates taken.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule<C> {
    curve: C,
    warm_up: u64,
    taken: u64,
    initial: Vec<f64>,
}

impl<C: Curve> Schedule<C> {
    /// Follows a curve from its first update.
    pub fn new(curve: C) -> Self {
        Self { curve, warm_up: 0, taken: 0, initial: Vec::new() }
    }

    /// Rises linearly over the first `updates`, from 1/`updates` in the first: the last of them
    /// runs at the full rate. The curve begins after them.
    pub fn warm_up(mut self, updates: u64) -> Self {
        self.warm_up = updates;
        self
    }

    /// What the initial rate is multiplied by in update `step`, from 0.
    pub fn factor(&self, step: u64) -> f64 {
        if step < self.warm_up {
            return (step + 1) as f64 / self.warm_up as f64;
        }
        self.curve.factor(step, self.warm_up)
    }

    /// The curve, without the warm-up.
    pub fn get_ref(&self) -> &C {
        &self.curve
    }

    /// Updates taken so far.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    pub(super) fn curve_mut(&mut self) -> &mut C {
        &mut self.curve
    }

    /// The factor of the coming update.
    fn coming(&self) -> Result<f64> {
        let factor = self.factor(self.taken);
        if factor.is_finite() && factor >= 0.0 {
            return Ok(factor);
        }
        let step = self.taken;
        Err(Error::config(
            "Schedule",
            format!(
                "the factor of update {step} must be finite and not negative, not {factor}: correct the curve"
            ),
        ))
    }

    fn set(&self, factor: f64, optimizer: &mut dyn Optimizer) {
        for group in optimizer.groups_mut() {
            group.lr = group.initial_lr() * factor;
        }
    }
}

impl<C: Curve> Strategy for Schedule<C> {
    fn name(&self) -> String {
        match self.warm_up {
            0 => self.curve.description(),
            updates => format!("{}.warm_up({updates})", self.curve.description()),
        }
    }

    fn place(&self) -> Place {
        Place::Schedule
    }

    fn prepare(&mut self, preparation: &mut Preparation<'_>) -> Result<()> {
        self.curve.check(self.warm_up)?;
        self.initial = preparation.optimizer.groups().iter().map(|group| group.initial_lr()).collect();
        self.set(self.coming()?, preparation.optimizer);
        Ok(())
    }

    fn update(&mut self, phase: &mut UpdatePhase<'_>, next: NextUpdate<'_>) -> Result<Verdict> {
        // A factor that cannot be used stops the run while nothing has moved.
        self.coming()?;
        let verdict = next(phase)?;
        if verdict == Verdict::Stepped {
            self.taken += 1;
            if let Ok(factor) = self.coming() {
                self.set(factor, phase.optimizer);
            }
        }
        Ok(verdict)
    }

    fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        visitor.must_equal("curve", &self.name())?;
        visitor.must_equal("initial_lr", &format!("{:?}", self.initial))?;
        visitor.count("taken", &mut self.taken)
    }
}

/// A schedule with its own warm-up is a part of a [`Chain`](super::Chain).
impl<C: Curve> Curve for Schedule<C> {
    fn factor(&self, step: u64, warm_up: u64) -> f64 {
        Schedule::factor(self, step.saturating_sub(warm_up))
    }

    fn description(&self) -> String {
        self.name()
    }

    fn check(&self, _warm_up: u64) -> Result<()> {
        self.curve.check(self.warm_up)
    }
}
