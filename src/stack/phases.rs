//! The phases of a step: each strategy around the ones further in.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{Error, Result};
use crate::step::{Backward, Mode, Strategy, UpdatePhase, Verdict};

type Strategies = [Box<dyn Strategy>];

pub(super) fn forward(
    strategies: &mut Strategies,
    mode: &mut Mode,
    work: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    match strategies.split_first_mut() {
        None => work(),
        Some((first, rest)) => first.forward(mode, &mut |mode| forward(rest, mode, work)),
    }
}

pub(super) fn backward(
    strategies: &mut Strategies,
    pass: &mut Backward<'_>,
    work: &mut dyn FnMut(&Backward<'_>) -> Result<()>,
) -> Result<()> {
    match strategies.split_first_mut() {
        None => work(pass),
        Some((first, rest)) => first.backward(pass, &mut |pass| backward(rest, pass, work)),
    }
}

pub(super) fn update(
    strategies: &mut Strategies,
    phase: &mut UpdatePhase<'_>,
    work: &mut dyn FnMut(&mut UpdatePhase<'_>) -> Result<Verdict>,
) -> Result<Verdict> {
    match strategies.split_first_mut() {
        None => work(phase),
        Some((first, rest)) => first.update(phase, &mut |phase| update(rest, phase, work)),
    }
}

/// Runs `body`; a panic becomes its error.
pub(super) fn caught<R>(place: &'static str, body: impl FnOnce() -> Result<R>) -> Result<R> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| Err(Error::from_panic(payload, place)))
}
