//! AdamW whose moments take one byte per element.
//!
//! Blockwise dynamic quantisation as in Dettmers et al., "8-bit Optimizers via Block-wise
//! Quantization" (2022): 256 elements share a scale, the largest magnitude among them; each is
//! the nearest of 256 values that are dense near the scale and reach down seven decades. The
//! update itself is AdamW's, in fp32. Known shortcomings: a large element costs its block
//! precision; values decay by what rounding leaves of it (0.999 of a second moment is mostly the
//! same code again, until the block's largest shrinks); embeddings with rare rows train worse
//! (the authors add a layer norm behind them, or keep those in fp32: give those to
//! [`AdamW8bit::add_fp32`]); the first moment's negative values end at −0.993 of the scale.
//!
//! *Cost*: 2·(n + 4·⌈n/256⌉) bytes for n elements, 2.03 B per element; parameters of fewer than
//! 4,096 elements, and those of [`AdamW8bit::add_fp32`], keep both moments in fp32, 8 B. Made before the first update; one pass over
//! parameter, gradient and state, no temporary.
//!
//! *Limits*: updated on the CPU; on CUDA under `CpuOffload::optimizer(o).host()`. Double weights
//! are refused. A second moment above zero is never rounded to zero, which would let the step
//! explode: it is at least 3·10⁻⁷ of its block's largest, so such elements move less than
//! AdamW moves them. A gradient that is not finite makes the moments of its block NaN.
//!
//! ```
//! use memfit::optim::{AdamW8bit, AdamW8bitConfig, Optimizer};
//! use tch::{Device, Kind, Tensor};
//!
//! let w = Tensor::ones([64, 64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
//! let mut optimizer = AdamW8bit::new(&vec![w.shallow_clone()], AdamW8bitConfig::default().lr(0.1))?;
//! w.square().sum(Kind::Float).backward();
//! optimizer.step(&memfit::Update::plain())?;
//! assert!((w.double_value(&[0, 0]) - (1.0 - 0.1 * 0.01 - 0.1)).abs() < 1e-6);
//! assert_eq!(optimizer.state_bytes(), 2 * (4096 + 4 * 16));
//! # Ok::<(), memfit::Error>(())
//! ```

use tch::Kind;

use super::recipe::{Kept, Recipe, only_on_cpu};
use super::slots::{Slots, Slotted};
use super::{GroupOptions, Optimizer, Parameters, check_setting};
use crate::error::{Error, Result};
use crate::ffi;
use crate::ffi::adamw8bit::BLOCK;
use crate::ffi::mixed::{Adam, Rounding};
use crate::ffi::optim::Moving;
use crate::state::{Named, StateVisitor};

/// Parameters with fewer elements keep fp32 moments.
const LEAST: usize = 4096;

/// Bytes of the state of one parameter with so many elements.
pub(crate) fn state_bytes_of(elements: u64) -> u64 {
    if elements < LEAST as u64 { 8 * elements } else { 2 * (elements + 4 * elements.div_ceil(BLOCK as u64)) }
}

/// Settings of [`AdamW8bit`].
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW8bitConfig {
    /// Learning rate; 1e-3.
    pub lr: f64,
    /// Decay rates of the two moments; 0.9 and 0.999.
    pub betas: (f64, f64),
    /// Added to the root of the second moment; 1e-8.
    pub epsilon: f64,
    /// Weight decay; 0.01.
    pub weight_decay: f64,
    /// The seed of stochastic rounding; `None`: half-precision weights are rounded to nearest.
    pub stochastic_rounding: Option<u64>,
}

impl Default for AdamW8bitConfig {
    fn default() -> Self {
        Self { lr: 1e-3, betas: (0.9, 0.999), epsilon: 1e-8, weight_decay: 0.01, stochastic_rounding: None }
    }
}

impl AdamW8bitConfig {
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

    /// Sets what is added to the root of the second moment; above 0, since an element without
    /// gradient divides by it.
    pub fn epsilon(mut self, epsilon: f64) -> Self {
        self.epsilon = epsilon;
        self
    }

    /// Sets the weight decay.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = weight_decay;
        self
    }

    /// Rounds BFloat16 and Half weights up or down at random, as
    /// [`AdamWConfig::stochastic_rounding`](super::AdamWConfig::stochastic_rounding).
    pub fn stochastic_rounding(mut self, seed: u64) -> Self {
        self.stochastic_rounding = Some(seed);
        self
    }

    fn check(&self) -> Result<()> {
        check_setting("lr", self.lr, |v| v >= 0.0, "finite and not negative")?;
        check_setting("betas.0", self.betas.0, |v| (0.0..1.0).contains(&v), "in [0, 1)")?;
        check_setting("betas.1", self.betas.1, |v| (0.0..1.0).contains(&v), "in [0, 1)")?;
        check_setting("epsilon", self.epsilon, |v| v >= f64::from(f32::MIN_POSITIVE), "above 0, in fp32")?;
        check_setting("weight_decay", self.weight_decay, |v| v >= 0.0, "finite and not negative")
    }
}

/// AdamW with quantised moments.
#[derive(Debug)]
pub struct AdamW8bit {
    slots: Slots<AdamW8bitRecipe>,
}

impl AdamW8bit {
    /// One group of all parameters; a tensor under two names is taken once. Frozen ones are
    /// skipped while they are frozen.
    ///
    /// # Errors
    /// [`Error::Config`] for a setting out of range, a parameter of another dtype than Float,
    /// Half or BFloat16, or one that is no leaf. `build()`, or the first step, refuses
    /// parameters on CUDA.
    pub fn new<P: Parameters + ?Sized>(parameters: &P, config: AdamW8bitConfig) -> Result<Self> {
        config.check()?;
        for parameter in parameters.named().iter().filter(|parameter| parameter.tensor.defined()) {
            check_width(parameter)?;
        }
        let recipe = AdamW8bitRecipe { config, fp32: Vec::new() };
        Ok(Self { slots: Slots::new(parameters, recipe)? })
    }

    /// Adds a group whose moments stay in fp32, 8 B per element, whatever its size: for
    /// embeddings. A state saved with them in another layout is refused.
    ///
    /// # Errors
    /// As [`Optimizer::add_group`].
    pub fn add_fp32(&mut self, parameters: Vec<Named>, options: GroupOptions) -> Result<()> {
        let group = self.groups().len();
        self.slots.recipe_mut().fp32.push(group);
        let added = self.add_group(parameters, options);
        if added.is_err() {
            self.slots.recipe_mut().fp32.pop();
        }
        added
    }

    /// The settings it was made with.
    pub fn config(&self) -> &AdamW8bitConfig {
        &self.slots.recipe().config
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.slots.steps()
    }
}

fn check_width(parameter: &Named) -> Result<()> {
    if parameter.tensor.f_kind()? == Kind::Double {
        let problem =
            format!("`{}` is Double; AdamW8bit moves Float, Half or BFloat16: use AdamW", parameter.name);
        return Err(Error::config("parameters", problem));
    }
    Ok(())
}

/// The settings, and which groups are not quantised.
#[derive(Debug)]
pub struct AdamW8bitRecipe {
    config: AdamW8bitConfig,
    fp32: Vec<usize>,
}

impl Recipe for AdamW8bitRecipe {
    fn name(&self) -> String {
        "AdamW8bit".to_owned()
    }

    fn defaults(&self) -> (f64, f64) {
        (self.config.lr, self.config.weight_decay)
    }

    fn settings(&self) -> String {
        let AdamW8bitConfig { lr: _, weight_decay: _, betas, epsilon, stochastic_rounding } = &self.config;
        format!("betas {betas:?}, epsilon {epsilon:?}, stochastic_rounding {stochastic_rounding:?}")
    }

    fn state(&self, group: usize, parameter: &Named) -> Vec<Kept> {
        let count = parameter.tensor.numel();
        if count < LEAST || self.fp32.contains(&group) {
            return vec![Kept::like("exp_avg", Kind::Float), Kept::like("exp_avg_sq", Kind::Float)];
        }
        let blocks = vec![count.div_ceil(BLOCK) as i64];
        vec![
            Kept::of("exp_avg.codes", Kind::Uint8, parameter.tensor.size()),
            Kept::of("exp_avg.scales", Kind::Float, blocks.clone()),
            Kept::of("exp_avg_sq.codes", Kind::Uint8, parameter.tensor.size()),
            Kept::of("exp_avg_sq.scales", Kind::Float, blocks),
        ]
    }

    fn check(&self, parameter: &Named) -> Result<()> {
        check_width(parameter)?;
        only_on_cpu(&self.name(), "updating", parameter)
    }

    fn step(&self, moving: &mut [Moving<'_>], divisor: f64) -> Result<()> {
        let AdamW8bitConfig { betas, epsilon, stochastic_rounding, .. } = self.config;
        let adam = Adam { betas, epsilon, decoupled: true };
        ffi::adamw8bit::step(adam, Rounding::of(stochastic_rounding), moving, divisor)
    }

    fn visit_layout(&self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        visitor.nested("quantised", |visitor| {
            visitor.must_equal("block", &BLOCK.to_string())?;
            visitor.must_equal("map", "dynamic")
        })
    }
}

impl Slotted for AdamW8bit {
    type Recipe = AdamW8bitRecipe;

    fn slots(&self) -> &Slots<AdamW8bitRecipe> {
        &self.slots
    }

    fn slots_mut(&mut self) -> &mut Slots<AdamW8bitRecipe> {
        &mut self.slots
    }
}
