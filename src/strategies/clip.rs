//! Gradient clipping, by norm or by value, on the window's mean gradient.
//!
//! *Cost*: 0 bytes. By norm: one reading pass over the gradients and one host
//! synchronisation, shared with a loss scaler's check; the coefficient is folded into the
//! update. By value: one pass more.
//!
//! *When it acts*: before the update, after unscaling and averaging.
//!
//! *Limits*: a gradient that is not finite is an error, unless a loss scaler skips such steps.
//! Source: Pascanu et al., *On the difficulty of training recurrent neural networks*, 2013.
//! Clipping by value turns the gradient's direction.
//!
//! ```
//! use memfit::{Loss, Stack, StepOutcome, optim::{Sgd, SgdConfig}, strategies::GradClip};
//! use memfit::tch::{nn, Device, Kind, Tensor};
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let w = vs.root().zeros("w", &[2]);
//! let mut training = Stack::of(&vs, Sgd::new(&vs, SgdConfig::default().lr(1.0))?)
//!     .with(GradClip::norm(1.0))
//!     .build()?;
//! let outcome = training.step_with(|| Ok(Loss::of((&w * Tensor::from_slice(&[3f32, 4.0])).sum(Kind::Float))))?;
//! assert!(matches!(outcome, StepOutcome::Stepped { grad_norm: Some(5.0), .. }));
//! assert!((w.double_value(&[0]) + 0.6).abs() < 1e-6); // (3, 4) became (0.6, 0.8)
//! # Ok::<(), memfit::Error>(())
//! ```

use crate::error::{Error, Result};
use crate::optim::gradients;
use crate::step::{
    Cost, Exactness, Measure, ModelSize, NextUpdate, Place, Preparation, Strategy, UpdatePhase, Verdict,
};

/// Bounds the gradients of an update. See the [module](self).
#[derive(Clone, Copy, Debug)]
pub struct GradClip;

impl GradClip {
    /// Scales the whole gradient down to a norm of at most `max_norm`.
    pub fn norm(max_norm: f64) -> NormClip {
        NormClip { max_norm }
    }

    /// Clamps each element to `-limit ..= limit`.
    pub fn value(limit: f64) -> ValueClip {
        ValueClip { limit }
    }
}

/// Clips by the norm of the whole gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormClip {
    max_norm: f64,
}

/// Clips each element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ValueClip {
    limit: f64,
}

impl Strategy for NormClip {
    fn name(&self) -> String {
        format!("GradClip::norm({})", self.max_norm)
    }

    fn place(&self) -> Place {
        Place::Clip
    }

    fn exactness(&self) -> Exactness {
        Exactness::SummationOrder
    }

    fn cost(&self, _model: &ModelSize) -> Cost {
        Cost::new("0 B", Some(0), "one pass over gradients, one synchronisation")
    }

    fn prepare(&mut self, _preparation: &mut Preparation<'_>) -> Result<()> {
        check("GradClip::norm", self.max_norm)
    }

    fn measures(&self) -> Measure {
        Measure::Norm
    }

    fn update(&mut self, phase: &mut UpdatePhase<'_>, next: NextUpdate<'_>) -> Result<Verdict> {
        let norm = phase.numbers.squared_norm.unwrap_or(0.0).sqrt();
        refuse_non_finite(phase, norm)?;
        if norm > self.max_norm {
            phase.update.divisor *= norm / self.max_norm;
        }
        next(phase)
    }
}

impl Strategy for ValueClip {
    fn name(&self) -> String {
        format!("GradClip::value({})", self.limit)
    }

    fn place(&self) -> Place {
        Place::Clip
    }

    fn cost(&self, _model: &ModelSize) -> Cost {
        Cost::new("0 B", Some(0), "two passes over gradients, one synchronisation")
    }

    fn prepare(&mut self, _preparation: &mut Preparation<'_>) -> Result<()> {
        check("GradClip::value", self.limit)
    }

    fn measures(&self) -> Measure {
        Measure::Finite
    }

    fn update(&mut self, phase: &mut UpdatePhase<'_>, next: NextUpdate<'_>) -> Result<Verdict> {
        refuse_non_finite(phase, f64::INFINITY)?;
        for mut grad in gradients(phase.optimizer) {
            if phase.update.divisor != 1.0 {
                let _ = grad.f_div_scalar_(phase.update.divisor)?;
            }
            let _ = grad.f_clamp_(-self.limit, self.limit)?;
        }
        phase.update.divisor = 1.0;
        next(phase)
    }
}

fn check(setting: &'static str, bound: f64) -> Result<()> {
    if bound.is_finite() && bound > 0.0 {
        return Ok(());
    }
    Err(Error::config(setting, format!("the bound must be positive and finite, not {bound}")))
}

fn refuse_non_finite(phase: &UpdatePhase<'_>, value: f64) -> Result<()> {
    match phase.numbers.non_finite {
        Some(true) => Err(Error::NotFinite { what: "the gradient", value }),
        _ => Ok(()),
    }
}
