//! A window's gradients in a momentum: v ← μv + (1 − dampening)·(wd·w + g₁/W), then
//! v ← v + (1 − dampening)·gᵢ/W, then w ← w − lr·v.

use super::Share;
use crate::error::{Error, Result};
use crate::ffi::accumulate::{self, Join};
use crate::ffi::grad;
use crate::ffi::optim::Moving;
use crate::step::Update;

/// Lets one parameter's gradient join its momentum.
pub(super) fn join(
    one: &Moving<'_>,
    (momentum, dampening): (f64, f64),
    update: &Update,
    share: Share,
) -> Result<()> {
    let (Some(grad), [kept]) = (grad::get(one.parameter), one.state) else { return Err(incomplete()) };
    // A first step takes the gradient as momentum, undampened.
    let rise = if *one.count == 0 { 1.0 } else { 1.0 - dampening };
    let (keep, decay) = match share {
        Share::First => (momentum, one.weight_decay),
        Share::Later => (1.0, 0.0),
    };
    let join = Join { keep, rise, decay, divisor: update.divisor };
    accumulate::join(one.parameter, &grad, kept, join)
}

/// Moves one parameter by its momentum and counts its step.
pub(super) fn move_joined(one: &mut Moving<'_>) -> Result<()> {
    let [kept] = one.state else { return Err(incomplete()) };
    accumulate::move_by(one.parameter, kept, one.lr)?;
    *one.count += 1;
    Ok(())
}

fn incomplete() -> Error {
    Error::CallOrder {
        call: "Optimizer::accumulate",
        state: "for a parameter without gradient or momentum".to_owned(),
        remedy: "call begin and backward first",
    }
}
