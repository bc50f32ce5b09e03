//! AdamW's step with moments of a dtype of their own.

use std::os::raw::c_int;

use super::optim::{Moving, RawAdam, RawMoving, run};
use crate::error::Result;

/// `mf_rounding` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct RawRounding {
    seed: u64,
    weights: c_int,
}

unsafe extern "C" {
    fn mf_adam_mixed_step(
        moving: *mut RawMoving,
        count: usize,
        options: *const RawAdam,
        rounding: *const RawRounding,
        moved: *mut usize,
    ) -> c_int;
}

/// How half-precision weights are rounded. Half-precision moments are always rounded at random.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// To nearest.
    Nearest,
    /// Up or down at random, from this seed.
    Stochastic(u64),
}

impl Rounding {
    /// As a seed that was asked for or not.
    pub(crate) fn of(seed: Option<u64>) -> Self {
        seed.map_or(Self::Nearest, Self::Stochastic)
    }

    pub(super) fn raw(self) -> RawRounding {
        match self {
            Self::Nearest => RawRounding { seed: 0, weights: 0 },
            Self::Stochastic(seed) => RawRounding { seed, weights: 1 },
        }
    }
}

/// What AdamW's updates depend on beside rates and decay.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Adam {
    pub(crate) betas: (f64, f64),
    pub(crate) epsilon: f64,
    pub(crate) decoupled: bool,
}

impl Adam {
    pub(super) fn raw(self, divisor: f64) -> RawAdam {
        let (beta1, beta2) = self.betas;
        RawAdam { beta1, beta2, epsilon: self.epsilon, divisor, decoupled: self.decoupled.into() }
    }
}

/// Moves parameters on the CPU by their gradients ÷ divisor. State: first and second moment, in
/// any of the dtypes Float, BFloat16 and Half, for Double weights Double too.
///
/// # Errors
/// Any; nothing has moved.
pub(crate) fn step(adam: Adam, rounding: Rounding, moving: &mut [Moving<'_>], divisor: f64) -> Result<()> {
    let (options, rounding) = (adam.raw(divisor), rounding.raw());
    // SAFETY: `run` lends the list for the call; the kernel checks the states it finds.
    run(moving, |raw, moved| unsafe {
        mf_adam_mixed_step(raw.as_mut_ptr(), raw.len(), &options, &rounding, moved)
    })
}
