//! AdamW, and Adam.
//!
//! Decoupled weight decay as in Loshchilov and Hutter, "Decoupled Weight Decay
//! Regularization" (2019), the decay multiplied by the learning rate; moments as in Kingma
//! and Ba, "Adam" (2015), bias-corrected, ε outside the root. Known shortcomings: it can fail
//! to converge on problems where the second moment forgets rare large gradients (Reddi et al.
//! 2018), and in half precision, rounded to nearest, small updates are lost.
//!
//! *Cost*: two tensors of each parameter's size and dtype (8 B per fp32 parameter), made
//! before the first update; one pass over parameter, gradient and moments. No temporary,
//! but up to 4 MiB where a gradient lies in memory in another order than its parameter.
//! [`AdamWConfig::moments`] sets 4 B (bf16) or 8 B (fp32) per parameter of any dtype, and takes
//! no temporary in any order.
//!
//! *Limits*: pure bf16 models lose small updates, unless under
//! [`MasterWeights`](crate::strategies::MasterWeights) or with
//! [`AdamWConfig::stochastic_rounding`]. Moments of another dtype than the parameter's, and
//! stochastic rounding, are updated on the CPU only. A divisor other than 1
//! ([`Update`](crate::Update)) may leave the gradients on CUDA divided.
//!
//! ```
//! use memfit::optim::{AdamW, AdamWConfig, Optimizer};
//! use tch::{Device, Kind, Tensor};
//!
//! let w = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
//! let mut optimizer = AdamW::new(&vec![w.shallow_clone()], AdamWConfig::default().lr(0.1))?;
//! w.square().sum(Kind::Float).backward();
//! optimizer.step(&memfit::Update::plain())?;
//! assert!((w.double_value(&[0]) - (1.0 - 0.1 * 0.01 - 0.1)).abs() < 1e-6);
//! # Ok::<(), memfit::Error>(())
//! ```

use tch::Kind;

use super::recipe::{Kept, Recipe, check_moments, only_on_cpu};
use super::slots::{Slots, Slotted};
use super::{Parameters, check_setting};
use crate::error::Result;
use crate::ffi;
use crate::ffi::mixed::{Adam, Rounding};
use crate::ffi::optim::{Moving, Rule};
use crate::state::Named;

/// Settings of [`AdamW`].
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Learning rate; 1e-3.
    pub lr: f64,
    /// Decay rates of the two moments; 0.9 and 0.999.
    pub betas: (f64, f64),
    /// Added to the root of the second moment; 1e-8.
    pub epsilon: f64,
    /// Weight decay; 0.01.
    pub weight_decay: f64,
    /// How weight decay acts.
    pub decay: Decay,
    /// The dtype of both moments; `None`: the parameter's, or Float for Half weights that are
    /// rounded at random.
    pub moments: Option<Kind>,
    /// The seed of stochastic rounding; `None`: half-precision weights are rounded to nearest.
    pub stochastic_rounding: Option<u64>,
}

/// How weight decay acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    /// Shrinks the parameter by lr × weight decay: AdamW.
    Decoupled,
    /// Adds weight decay × parameter to the gradient: Adam.
    InGradient,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            betas: (0.9, 0.999),
            epsilon: 1e-8,
            weight_decay: 0.01,
            decay: Decay::Decoupled,
            moments: None,
            stochastic_rounding: None,
        }
    }
}

impl AdamWConfig {
    /// Sets the learning rate.
    pub fn lr(mut self, lr: f64) -> Self {
        self.lr = lr;
        self
    }

    /// Sets the decay rates of the two moments.
    pub fn betas(mut self, first: f64, second: f64) -> Self {
        self.betas = (first, second);
        self
    }

    /// Sets what is added to the root of the second moment.
    pub fn epsilon(mut self, epsilon: f64) -> Self {
        self.epsilon = epsilon;
        self
    }

    /// Sets the weight decay.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = weight_decay;
        self
    }

    /// Sets how weight decay acts.
    pub fn decay(mut self, decay: Decay) -> Self {
        self.decay = decay;
        self
    }

    /// Keeps both moments in Float or BFloat16, whatever the parameter's dtype; the update is
    /// computed in fp32 (fp64 for Double weights).
    ///
    /// bf16 moments are rounded up or down at random, by bits made of the seed of
    /// [`AdamWConfig::stochastic_rounding`] (else 0), the parameter's place, its step and the
    /// element's index. To nearest, a second moment could not decay: 0.999 of a number with 8
    /// bits is that number again. Half is refused: squares of gradients below 2⁻¹² would be 0.
    pub fn moments(mut self, kind: Kind) -> Self {
        self.moments = Some(kind);
        self
    }

    /// Rounds BFloat16 and Half weights up or down at random, so that an update below their
    /// last bit moves them by its size on average. Float and Double weights are not rounded.
    ///
    /// The random bits are made of the seed, the parameter's place, its step and the element's
    /// index: a resumed run and any number of threads draw the same, and libtorch's generators
    /// are left alone. Half weights keep Float moments then, 8 B, unless
    /// [`AdamWConfig::moments`] names BFloat16.
    pub fn stochastic_rounding(mut self, seed: u64) -> Self {
        self.stochastic_rounding = Some(seed);
        self
    }

    pub(super) fn check(&self) -> Result<()> {
        check_moments(self.moments)?;
        check_setting("lr", self.lr, |v| v >= 0.0, "finite and not negative")?;
        check_setting("betas.0", self.betas.0, |v| (0.0..1.0).contains(&v), "in [0, 1)")?;
        check_setting("betas.1", self.betas.1, |v| (0.0..1.0).contains(&v), "in [0, 1)")?;
        check_setting("epsilon", self.epsilon, |v| v >= 0.0, "finite and not negative")?;
        check_setting("weight_decay", self.weight_decay, |v| v >= 0.0, "finite and not negative")
    }

    /// Whether one dtype and rounding to nearest serve a parameter.
    fn plain(&self, parameter: Kind) -> bool {
        let wide = matches!(parameter, Kind::Float | Kind::Double);
        match self.moments {
            None => wide || self.stochastic_rounding.is_none(),
            Some(kind) => wide && kind == parameter,
        }
    }
}

/// AdamW, or Adam, with fused updates.
#[derive(Debug)]
pub struct AdamW {
    slots: Slots<AdamWConfig>,
}

impl AdamW {
    /// One group of all parameters; a tensor under two names is taken once. Frozen ones are
    /// skipped while they are frozen.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for a setting out of range, a parameter of
    /// another dtype than Float, Double, Half or BFloat16, or one that is no leaf.
    pub fn new<P: Parameters + ?Sized>(parameters: &P, config: AdamWConfig) -> Result<Self> {
        config.check()?;
        Ok(Self { slots: Slots::new(parameters, config)? })
    }

    /// Adam: as [`AdamW::new`], with the decay in the gradient.
    ///
    /// # Errors
    /// As [`AdamW::new`].
    pub fn adam<P: Parameters + ?Sized>(parameters: &P, config: AdamWConfig) -> Result<Self> {
        Self::new(parameters, config.decay(Decay::InGradient))
    }

    /// The settings it was made with.
    pub fn config(&self) -> &AdamWConfig {
        self.slots.recipe()
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.slots.steps()
    }
}

impl Recipe for AdamWConfig {
    fn name(&self) -> String {
        match self.decay {
            Decay::Decoupled => "AdamW".to_owned(),
            Decay::InGradient => "Adam".to_owned(),
        }
    }

    fn defaults(&self) -> (f64, f64) {
        (self.lr, self.weight_decay)
    }

    fn settings(&self) -> String {
        let Self { lr: _, weight_decay: _, betas, epsilon, decay, moments, stochastic_rounding } = self;
        format!(
            "betas {betas:?}, epsilon {epsilon:?}, decay {decay:?}, moments {moments:?}, stochastic_rounding {stochastic_rounding:?}"
        )
    }

    fn state(&self, _group: usize, parameter: &Named) -> Vec<Kept> {
        let own = match (parameter.tensor.kind(), self.stochastic_rounding) {
            (Kind::Half, Some(_)) => Kind::Float,
            (kind, _) => kind,
        };
        let kind = self.moments.unwrap_or(own);
        vec![Kept::like("exp_avg", kind), Kept::like("exp_avg_sq", kind)]
    }

    fn check(&self, parameter: &Named) -> Result<()> {
        if self.plain(parameter.tensor.kind()) {
            return Ok(());
        }
        only_on_cpu(&self.name(), "moments of another dtype, and stochastic rounding,", parameter)
    }

    fn step(&self, moving: &mut [Moving<'_>], divisor: f64) -> Result<()> {
        let decoupled = self.decay == Decay::Decoupled;
        let mut trained = moving.iter().filter(|one| one.parameter.requires_grad());
        if trained.all(|one| self.plain(one.parameter.kind())) {
            let rule = Rule::Adam { betas: self.betas, epsilon: self.epsilon, decoupled };
            return ffi::optim::step(rule, moving, divisor);
        }
        let adam = Adam { betas: self.betas, epsilon: self.epsilon, decoupled };
        ffi::mixed::step(adam, Rounding::of(self.stochastic_rounding), moving, divisor)
    }
}

impl Slotted for AdamW {
    type Recipe = AdamWConfig;

    fn slots(&self) -> &Slots<AdamWConfig> {
        &self.slots
    }

    fn slots_mut(&mut self) -> &mut Slots<AdamWConfig> {
        &mut self.slots
    }
}
