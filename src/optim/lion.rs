//! Lion: one momentum, and steps of one size in the direction of its sign.
//!
//! As in Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023): with the gradient
//! g and the momentum m, the parameter moves by −lr·sign(β₁m + (1 − β₁)g), after it shrank by
//! lr × weight decay; then m ← β₂m + (1 − β₂)g. Known shortcomings: every element moves by the
//! whole rate at every step, so it wants a rate 3 to 10 times smaller and a weight decay that
//! much larger than AdamW's; small batches make the signs noise, and the gain over AdamW fades
//! with them (the authors' own account: below 64); elements with rare gradients move as far as
//! any other.
//!
//! *Cost*: one tensor of each parameter's size and dtype (4 B per fp32 parameter, 2 B with
//! `moments(Kind::BFloat16)`), made before the first update; one pass, no temporary.
//!
//! *Limits*: updated on the CPU; on CUDA under `CpuOffload::optimizer(o).host()`. A gradient
//! that is NaN makes its weight NaN.
//!
//! ```
//! use memfit::optim::{Lion, LionConfig, Optimizer};
//! use tch::{Device, Kind, Tensor};
//!
//! let w = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
//! let config = LionConfig::default().lr(0.25).weight_decay(0.0);
//! let mut optimizer = Lion::new(&vec![w.shallow_clone()], config)?;
//! w.square().sum(Kind::Float).backward();
//! optimizer.step(&memfit::Update::plain())?;
//! assert_eq!(w.double_value(&[0]), 0.75);
//! # Ok::<(), memfit::Error>(())
//! ```

use tch::Kind;

use super::recipe::{Kept, Recipe, check_moments, only_on_cpu};
use super::slots::{Slots, Slotted};
use super::{Parameters, check_setting};
use crate::error::Result;
use crate::ffi;
use crate::ffi::mixed::Rounding;
use crate::ffi::optim::Moving;
use crate::state::Named;

/// Settings of [`Lion`].
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LionConfig {
    /// Learning rate; 1e-4, a tenth of AdamW's.
    pub lr: f64,
    /// What the momentum weighs in the step, and its decay rate; 0.9 and 0.99.
    pub betas: (f64, f64),
    /// Weight decay; 0.1: with the rate, as strong as AdamW's.
    pub weight_decay: f64,
    /// The dtype of the momentum; `None`: the parameter's.
    pub moments: Option<Kind>,
    /// The seed of stochastic rounding; `None`: half-precision weights are rounded to nearest.
    pub stochastic_rounding: Option<u64>,
}

impl Default for LionConfig {
    fn default() -> Self {
        Self { lr: 1e-4, betas: (0.9, 0.99), weight_decay: 0.1, moments: None, stochastic_rounding: None }
    }
}

impl LionConfig {
    /// Sets the learning rate.
    pub fn lr(mut self, lr: f64) -> Self {
        self.lr = lr;
        self
    }

    /// Sets what the momentum weighs in the step, and its decay rate.
    pub fn betas(mut self, step: f64, momentum: f64) -> Self {
        self.betas = (step, momentum);
        self
    }

    /// Sets the weight decay.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = weight_decay;
        self
    }

    /// Keeps the momentum in Float or BFloat16, whatever the parameter's dtype. A momentum in
    /// half precision is rounded at random, as
    /// [`AdamWConfig::moments`](super::AdamWConfig::moments) says.
    pub fn moments(mut self, kind: Kind) -> Self {
        self.moments = Some(kind);
        self
    }

    /// Rounds BFloat16 and Half weights up or down at random, as
    /// [`AdamWConfig::stochastic_rounding`](super::AdamWConfig::stochastic_rounding).
    pub fn stochastic_rounding(mut self, seed: u64) -> Self {
        self.stochastic_rounding = Some(seed);
        self
    }

    fn check(&self) -> Result<()> {
        check_moments(self.moments)?;
        check_setting("lr", self.lr, |v| v >= 0.0, "finite and not negative")?;
        check_setting("betas.0", self.betas.0, |v| (0.0..1.0).contains(&v), "in [0, 1)")?;
        check_setting("betas.1", self.betas.1, |v| (0.0..1.0).contains(&v), "in [0, 1)")?;
        check_setting("weight_decay", self.weight_decay, |v| v >= 0.0, "finite and not negative")
    }
}

/// Lion with fused updates.
#[derive(Debug)]
pub struct Lion {
    slots: Slots<LionConfig>,
}

impl Lion {
    /// One group of all parameters; a tensor under two names is taken once. Frozen ones are
    /// skipped while they are frozen.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for a setting out of range, a parameter of
    /// another dtype than Float, Double, Half or BFloat16, or one that is no leaf.
    /// `build()`, or the first step, refuses parameters on CUDA.
    pub fn new<P: Parameters + ?Sized>(parameters: &P, config: LionConfig) -> Result<Self> {
        config.check()?;
        Ok(Self { slots: Slots::new(parameters, config)? })
    }

    /// The settings it was made with.
    pub fn config(&self) -> &LionConfig {
        self.slots.recipe()
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.slots.steps()
    }
}

impl Recipe for LionConfig {
    fn name(&self) -> String {
        "Lion".to_owned()
    }

    fn defaults(&self) -> (f64, f64) {
        (self.lr, self.weight_decay)
    }

    fn settings(&self) -> String {
        let Self { lr: _, weight_decay: _, betas, moments, stochastic_rounding } = self;
        format!("betas {betas:?}, moments {moments:?}, stochastic_rounding {stochastic_rounding:?}")
    }

    fn state(&self, _group: usize, parameter: &Named) -> Vec<Kept> {
        vec![Kept::like("exp_avg", self.moments.unwrap_or(parameter.tensor.kind()))]
    }

    fn check(&self, parameter: &Named) -> Result<()> {
        only_on_cpu(&self.name(), "updating", parameter)
    }

    fn step(&self, moving: &mut [Moving<'_>], divisor: f64) -> Result<()> {
        ffi::lion::step(self.betas, Rounding::of(self.stochastic_rounding), moving, divisor)
    }
}

impl Slotted for Lion {
    type Recipe = LionConfig;

    fn slots(&self) -> &Slots<LionConfig> {
        &self.slots
    }

    fn slots_mut(&mut self) -> &mut Slots<LionConfig> {
        &mut self.slots
    }
}
