//! Learning-rate schedules that tick only on steps that were taken.
//!
//! *Cost*: 0 bytes, no time.
//!
//! *When it acts*: in `build()` and after each step that was taken, it sets each group's rate for
//! the next update: its initial rate times the curve's factor. Accumulating and skipped windows
//! do not tick. The rate reaches an optimizer through every wrapper, since all share the groups.
//!
//! *Limits*: it owns the groups' rates: one set by hand holds for one update. It moves rates only:
//! momentum is no setting of a group. A resumed run has the same schedule and the same initial
//! rates, or the snapshot is refused.
//!
//! Lengths count the whole run, warm-up included: `Cosine::new(100).warm_up(10)` ends at update
//! 100. A curve of your own is a [`Curve`]:
//!
//! ```
//! use memfit::strategies::{Cosine, Curve, Schedule};
//!
//! let schedule = Cosine::new(100).warm_up(10);
//! assert_eq!(schedule.factor(4), 0.5); // the fifth of ten updates up
//! assert_eq!(schedule.factor(9), 1.0);
//! assert!(schedule.factor(100) < 1e-12);
//!
//! #[derive(Debug)]
//! struct Halving;
//! impl Curve for Halving {
//!     fn factor(&self, step: u64, _warm_up: u64) -> f64 {
//!         0.5_f64.powi((step / 1000) as i32)
//!     }
//! }
//! assert_eq!(Schedule::new(Halving).factor(2000), 0.25);
//! ```

mod chain;
mod constant;
mod cosine;
mod inverse_sqrt;
mod linear_decay;
mod one_cycle;
mod restarts;
mod strategy;

pub use chain::Chain;
pub use constant::Constant;
pub use cosine::Cosine;
pub use inverse_sqrt::InverseSqrt;
pub use linear_decay::LinearDecay;
pub use one_cycle::OneCycle;
pub use restarts::CosineRestarts;
pub use strategy::Schedule;

use std::fmt::Debug;

use crate::error::{Error, Result};

/// How a rate moves over a run, as a share of the initial rate.
///
/// A curve is a pure function of the update's number; [`Schedule`] counts, warms up, sets the
/// rates and keeps the state.
pub trait Curve: Debug + Send + Sync + 'static {
    /// What the initial rate is multiplied by in update `step`, counted from 0 at the start of
    /// the run. Asked only for steps from `warm_up` on: those before rise linearly. Finite and
    /// not negative; an update under another factor is refused.
    fn factor(&self, step: u64, warm_up: u64) -> f64;

    /// What the user wrote, with every setting: a resumed run must have the same. By default
    /// the `Debug` text.
    fn description(&self) -> String {
        format!("{self:?}")
    }

    /// Refuses settings that make no curve; called by `build()`.
    ///
    /// # Errors
    /// [`Error::Config`].
    fn check(&self, warm_up: u64) -> Result<()> {
        let _ = warm_up;
        Ok(())
    }
}

/// How far update `step` is on the way from the end of the warm-up (0) to update `end` (1).
fn way(step: u64, warm_up: u64, end: u64) -> f64 {
    let span = end.saturating_sub(warm_up).max(1) as f64;
    (step.saturating_sub(warm_up) as f64 / span).min(1.0)
}

/// Half a cosine from 1 down to `floor`.
fn half_cosine(way: f64, floor: f64) -> f64 {
    floor + (1.0 - floor) * 0.5 * (1.0 + (std::f64::consts::PI * way).cos())
}

/// A curve's own name with its floor, where it has one.
fn with_floor(name: String, floor: f64) -> String {
    if floor == 0.0 { name } else { format!("{name}.floor({floor})") }
}

fn check_length(curve: &'static str, steps: u64, warm_up: u64) -> Result<()> {
    if steps == 0 || warm_up > steps {
        return Err(Error::config(curve, "needs at least one step, and no more warm-up than steps"));
    }
    Ok(())
}

fn check_share(curve: &'static str, name: &str, share: f64) -> Result<()> {
    if !(0.0..=1.0).contains(&share) {
        return Err(Error::config(curve, format!("the {name} is a share from 0 to 1, not {share}")));
    }
    Ok(())
}
