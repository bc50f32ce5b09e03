//! Stochastic gradient descent with momentum, Nesterov's momentum and weight decay.
//!
//! Robbins and Monro, "A Stochastic Approximation Method" (1951), with the momentum of Polyak,
//! "Some methods of speeding up the convergence of iteration methods" (1964), or Nesterov's as
//! Sutskever et al., "On the importance of initialization and momentum in deep learning" (2013)
//! write it: v ← μv + (1 − dampening)·g, from v = g at a parameter's first step; the parameter
//! moves by −lr·v, with Nesterov by −lr·(g + μv). Weight decay is added to the gradient, or
//! shrinks the parameter by lr × weight decay (Loshchilov and Hutter 2019); without momentum
//! both are the same.
//!
//! Known shortcomings: one rate serves all elements, so directions of small curvature are slow
//! and transformers train badly; at a constant rate the noise of the gradients keeps it from
//! settling, so the rate must fall; a large momentum overshoots and can diverge where the plain
//! step would not. v is kept without the rate, unlike in Sutskever et al.: a changed rate acts
//! on past gradients too. Decay in the gradient goes through the momentum and comes late.
//!
//! *Cost*: with momentum one tensor of each parameter's size and dtype (4 B per fp32
//! parameter), made before the first update; without, none. One pass, no temporary, but up
//! to 4 MiB where a gradient lies in memory in another order than its parameter; that neither
//! with [`Decay::Decoupled`] nor for half-precision weights that are rounded at random.
//!
//! *Limits*: those two are updated on the CPU, and take no gradients in a window's backward into
//! the momentum. An [`Update::divisor`] other than 1 may leave the gradients divided on CUDA.
//!
//! ```
//! use memfit::optim::{Optimizer, Sgd, SgdConfig};
//! use tch::{Device, Kind, Tensor};
//!
//! let w = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
//! let mut optimizer = Sgd::new(&vec![w.shallow_clone()], SgdConfig::default().lr(0.25))?;
//! w.square().sum(Kind::Float).backward();
//! optimizer.step(&memfit::Update::plain())?;
//! assert_eq!(w.double_value(&[0]), 0.5);
//! # Ok::<(), memfit::Error>(())
//! ```

use tch::Kind;

use super::adamw::Decay;
use super::recipe::{Kept, Recipe, only_on_cpu};
use super::slots::{Slots, Slotted};
use super::{Accumulates, Parameters, Share, accumulate, check_setting};
use crate::error::{Error, Result};
use crate::ffi;
use crate::ffi::mixed::Rounding;
use crate::ffi::optim::{Moving, Rule};
use crate::state::Named;
use crate::step::Update;

/// Settings of [`Sgd`].
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdConfig {
    /// Learning rate; 1e-2.
    pub lr: f64,
    /// Momentum; 0.
    pub momentum: f64,
    /// What is left out of a gradient that joins the momentum; 0.
    pub dampening: f64,
    /// How the momentum moves the parameter.
    pub kind: Momentum,
    /// Weight decay; 0.
    pub weight_decay: f64,
    /// How weight decay acts; in the gradient.
    pub decay: Decay,
    /// The seed of stochastic rounding; `None`: half-precision weights are rounded to nearest.
    pub stochastic_rounding: Option<u64>,
}

/// How a momentum moves the parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Momentum {
    /// By itself.
    Heavy,
    /// One step ahead of itself.
    Nesterov,
}

impl Default for SgdConfig {
    fn default() -> Self {
        Self {
            lr: 1e-2,
            momentum: 0.0,
            dampening: 0.0,
            kind: Momentum::Heavy,
            weight_decay: 0.0,
            decay: Decay::InGradient,
            stochastic_rounding: None,
        }
    }
}

impl SgdConfig {
    /// Sets the learning rate.
    pub fn lr(mut self, lr: f64) -> Self {
        self.lr = lr;
        self
    }

    /// Sets the momentum.
    pub fn momentum(mut self, momentum: f64) -> Self {
        self.momentum = momentum;
        self
    }

    /// Sets Nesterov's momentum.
    pub fn nesterov(mut self, momentum: f64) -> Self {
        self.momentum = momentum;
        self.kind = Momentum::Nesterov;
        self
    }

    /// Sets the dampening.
    pub fn dampening(mut self, dampening: f64) -> Self {
        self.dampening = dampening;
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

    /// Rounds BFloat16 and Half weights up or down at random, as
    /// [`AdamWConfig::stochastic_rounding`](super::AdamWConfig::stochastic_rounding); their
    /// momentum too.
    pub fn stochastic_rounding(mut self, seed: u64) -> Self {
        self.stochastic_rounding = Some(seed);
        self
    }

    /// Whether libtorch's arithmetic and rounding to nearest serve a parameter.
    fn plain(&self, parameter: Kind) -> bool {
        let wide = matches!(parameter, Kind::Float | Kind::Double);
        self.decay == Decay::InGradient && (wide || self.stochastic_rounding.is_none())
    }

    fn check(&self) -> Result<()> {
        check_setting("lr", self.lr, |v| v >= 0.0, "finite and not negative")?;
        check_setting("momentum", self.momentum, |v| v >= 0.0, "finite and not negative")?;
        check_setting("dampening", self.dampening, |_| true, "finite")?;
        check_setting("weight_decay", self.weight_decay, |v| v >= 0.0, "finite and not negative")?;
        if self.kind == Momentum::Nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            return Err(Error::config("nesterov", "needs a momentum above 0 and no dampening"));
        }
        Ok(())
    }
}

/// SGD with fused updates.
#[derive(Debug)]
pub struct Sgd {
    slots: Slots<SgdConfig>,
}

impl Sgd {
    /// One group of all parameters; a tensor under two names is taken once. Frozen ones are
    /// skipped while they are frozen.
    ///
    /// # Errors
    /// [`Error::Config`] for a setting out of range, a parameter of another dtype than
    /// Float, Double, Half or BFloat16, or one that is no leaf.
    pub fn new<P: Parameters + ?Sized>(parameters: &P, config: SgdConfig) -> Result<Self> {
        config.check()?;
        Ok(Self { slots: Slots::new(parameters, config)? })
    }

    /// The settings it was made with.
    pub fn config(&self) -> &SgdConfig {
        self.slots.recipe()
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.slots.steps()
    }
}

impl Recipe for SgdConfig {
    fn name(&self) -> String {
        "Sgd".to_owned()
    }

    fn defaults(&self) -> (f64, f64) {
        (self.lr, self.weight_decay)
    }

    fn settings(&self) -> String {
        let Self { lr: _, weight_decay: _, momentum, dampening, kind, decay, stochastic_rounding } = self;
        format!(
            "momentum {momentum:?}, dampening {dampening:?}, kind {kind:?}, decay {decay:?}, stochastic_rounding {stochastic_rounding:?}"
        )
    }

    fn state(&self, _group: usize, parameter: &Named) -> Vec<Kept> {
        if self.momentum == 0.0 { Vec::new() } else { vec![Kept::like("momentum", parameter.tensor.kind())] }
    }

    fn check(&self, parameter: &Named) -> Result<()> {
        if self.plain(parameter.tensor.kind()) {
            return Ok(());
        }
        only_on_cpu(&self.name(), "decoupled weight decay, and stochastic rounding,", parameter)
    }

    fn step(&self, moving: &mut [Moving<'_>], divisor: f64) -> Result<()> {
        let Self { momentum, dampening, .. } = *self;
        let nesterov = self.kind == Momentum::Nesterov;
        let mut trained = moving.iter().filter(|one| one.parameter.requires_grad());
        if trained.all(|one| self.plain(one.parameter.kind())) {
            return ffi::optim::step(Rule::Sgd { momentum, dampening, nesterov }, moving, divisor);
        }
        let decoupled = self.decay == Decay::Decoupled;
        let sgd = ffi::sgd::Sgd { momentum, dampening, nesterov, decoupled };
        ffi::sgd::step(sgd, Rounding::of(self.stochastic_rounding), moving, divisor)
    }

    fn accumulates(&self) -> Accumulates {
        // Joining rounds to nearest, and lets the decay join the gradient.
        let joins = self.decay == Decay::InGradient && self.stochastic_rounding.is_none();
        match (self.momentum == 0.0, self.kind) {
            (true, _) => Accumulates::InGradients,
            (false, Momentum::Heavy) if joins => Accumulates::InState,
            (false, _) => Accumulates::Nowhere,
        }
    }

    fn accumulate(&self, one: &mut Moving<'_>, update: &Update, share: Share) -> Result<()> {
        accumulate::join(one, (self.momentum, self.dampening), update, share)
    }

    fn step_accumulated(&self, one: &mut Moving<'_>) -> Result<()> {
        accumulate::move_joined(one)
    }
}

impl Slotted for Sgd {
    type Recipe = SgdConfig;

    fn slots(&self) -> &Slots<SgdConfig> {
        &self.slots
    }

    fn slots_mut(&mut self) -> &mut Slots<SgdConfig> {
        &mut self.slots
    }
}
