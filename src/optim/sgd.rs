//! Stochastic gradient descent with momentum, Nesterov's momentum and weight decay.
//!
//! The momentum is v ← μv + (1 − dampening)·g, from v = g at a parameter's first step; the
//! parameter moves by −lr·v, with Nesterov by −lr·(g + μv). Weight decay is added to the
//! gradient.
//!
//! *Cost*: with momentum one tensor of each parameter's size and dtype (4 B per fp32
//! parameter), made before the first update; without, none. One pass, no temporary, but up
//! to 4 MiB where a gradient lies in memory in another order than its parameter.
//!
//! *Limits*: an [`Update::divisor`] other than 1 may leave the gradients divided.
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

use tch::Tensor;

use super::accumulate::{join, move_joined};
use super::slots::Slots;
use super::{Accumulates, GroupOptions, Optimizer, ParamGroup, Parameters, Share, check_setting};
use crate::error::{Error, Result};
use crate::ffi::optim::Rule;
use crate::state::{Named, StateVisitor};
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
        Self { lr: 1e-2, momentum: 0.0, dampening: 0.0, kind: Momentum::Heavy, weight_decay: 0.0 }
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
    slots: Slots,
    config: SgdConfig,
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
        let names: &[&str] = if config.momentum == 0.0 { &[] } else { &["momentum"] };
        let slots = Slots::new(parameters, config.lr, config.weight_decay, names)?;
        Ok(Self { slots, config })
    }

    /// The settings it was made with.
    pub fn config(&self) -> &SgdConfig {
        &self.config
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.slots.steps()
    }

    fn rule(&self) -> Rule {
        Rule::Sgd {
            momentum: self.config.momentum,
            dampening: self.config.dampening,
            nesterov: self.config.kind == Momentum::Nesterov,
        }
    }
}

impl Optimizer for Sgd {
    fn name(&self) -> String {
        "Sgd".to_owned()
    }

    fn groups(&self) -> &[ParamGroup] {
        self.slots.groups()
    }

    fn groups_mut(&mut self) -> &mut [ParamGroup] {
        self.slots.groups_mut()
    }

    fn step(&mut self, update: &Update) -> Result<()> {
        self.slots.present(&self.name())?;
        self.slots.begin()?;
        self.slots.step(self.rule(), update.divisor)
    }

    fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        self.slots.visit(visitor)
    }

    fn allocate(&mut self) -> Result<()> {
        self.slots.allocate()
    }

    fn begin(&mut self, _: &Update) -> Result<()> {
        self.slots.begin()
    }

    fn steps_parameters(&self) -> bool {
        true
    }

    fn accumulates(&self) -> Accumulates {
        match (self.config.momentum == 0.0, self.config.kind) {
            (true, _) => Accumulates::InGradients,
            (false, Momentum::Heavy) => Accumulates::InState,
            (false, Momentum::Nesterov) => Accumulates::Nowhere,
        }
    }

    fn accumulate(&mut self, group: usize, index: usize, update: &Update, share: Share) -> Result<()> {
        let SgdConfig { momentum, dampening, .. } = self.config;
        join(&self.slots.one(group, index)?, momentum, dampening, update, share)
    }

    fn step_accumulated(&mut self, group: usize, index: usize, _: &Update) -> Result<()> {
        move_joined(self.slots.one(group, index)?)
    }

    fn step_parameter(&mut self, group: usize, index: usize, update: &Update) -> Result<()> {
        self.slots.step_one(self.rule(), group, index, update.divisor)
    }

    fn state_of(&mut self, group: usize, index: usize) -> Vec<&mut Tensor> {
        self.slots.state_of(group, index)
    }

    fn folds_divisor(&self) -> bool {
        true
    }

    fn add_group(&mut self, parameters: Vec<Named>, options: GroupOptions) -> Result<()> {
        self.slots.add_now(parameters, options, (self.config.lr, self.config.weight_decay))
    }
}
