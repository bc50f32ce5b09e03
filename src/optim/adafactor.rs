//! Adafactor: a second moment in rows and columns instead of elements.
//!
//! Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (2018).
//! Of a gradient's squares only the means R of rows and C of columns are kept, with
//! β₂ = 1 − t^−0.8; the update U = G ÷ √(R·C ÷ mean(R)) is clipped to a root mean square of
//! `clip`, and the parameter moves by −α·U, α = max(ε₂, RMS(w)) · min(lr, 1/√t). Over a
//! tensor's last two dimensions, those before them one by one; a vector keeps its whole
//! second moment. Weight decay shrinks the parameter by lr × weight decay, and the state
//! holds nothing of a learning rate.
//!
//! Known shortcomings: an update that a matrix of rank one describes badly is scaled badly,
//! so the loss may end above Adam's; without a momentum it is less stable at large steps; a
//! relative step moves parameters that start at 0 by ε₂ × ρ only.
//!
//! *Cost*: rows + columns numbers in fp32 (fp64 for fp64), of a vector its elements; with
//! `beta1` 4 B per element more. Four passes over the gradient and two over the parameter.
//! While it updates, for the one parameter that needs most: 4 B (8 for fp64) per column of
//! each of its matrices and each block of rows, and 16 B for each task. A matrix of at most
//! 65,536 elements is one block; of more, min(32, rows ÷ 16, elements ÷ 65,536), rounded up.
//! So it is at most a sixteenth of the parameter and one row of each matrix.
//!
//! *When it acts*: a gradient that is not finite, or gradients whose squares sum up to more
//! than fp32 holds (a norm of 1.8·10¹⁹), are found before anything moves:
//! [`Error::NotFinite`], and neither state nor count has seen them.
//!
//! *Limits*: on the CPU; parameters on CUDA need `CpuOffload::optimizer(o).host()`. The
//! kernels of a convolution are small matrices: one of 3 × 3 keeps 6 numbers for 9.
//!
//! ```
//! use memfit::optim::{Adafactor, AdafactorConfig, Optimizer};
//! use tch::{Device, Kind, Tensor};
//!
//! let w = Tensor::ones([4, 8], (Kind::Float, Device::Cpu)).set_requires_grad(true);
//! let mut optimizer = Adafactor::new(&vec![w.shallow_clone()], AdafactorConfig::default())?;
//! w.square().sum(Kind::Float).backward();
//! optimizer.step(&memfit::Update::plain())?;
//! assert!((w.double_value(&[0, 0]) - 0.99).abs() < 1e-6);
//! assert_eq!(optimizer.state_bytes(), 4 * (4 + 8));
//! # Ok::<(), memfit::Error>(())
//! ```

use tch::Kind;

use super::recipe::{Kept, Recipe, gradients, only_on_cpu};
use super::slots::{Slots, Slotted};
use super::{Parameters, check_setting};
use crate::error::{Error, Result};
use crate::ffi;
use crate::ffi::mixed::Rounding;
use crate::ffi::optim::Moving;
use crate::state::Named;

/// Settings of [`Adafactor`].
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdafactorConfig {
    /// Learning rate: the largest relative step, or the step itself; 1e-2.
    pub lr: f64,
    /// What the learning rate means.
    pub step_size: StepSize,
    /// The second moment forgets with t^−decay; 0.8.
    pub decay: f64,
    /// Added to each square of a gradient; 1e-30.
    pub epsilon1: f64,
    /// The least size of a parameter that a relative step is a part of; 1e-3.
    pub epsilon2: f64,
    /// The most that the root mean square of an update may be; 1.
    pub clip: f64,
    /// Decay rate of a momentum of updates, 0 for none; 0.
    pub beta1: f64,
    /// Weight decay; 0.
    pub weight_decay: f64,
    /// The seed of stochastic rounding; `None`: half-precision weights are rounded to nearest.
    pub stochastic_rounding: Option<u64>,
}

/// What Adafactor's learning rate means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepSize {
    /// A part of the parameter's root mean square, and at most 1/√t of it: as published.
    Relative,
    /// The step, whatever the parameter: for schedules of one's own.
    Absolute,
}

impl Default for AdafactorConfig {
    fn default() -> Self {
        Self {
            lr: 1e-2,
            step_size: StepSize::Relative,
            decay: 0.8,
            epsilon1: 1e-30,
            epsilon2: 1e-3,
            clip: 1.0,
            beta1: 0.0,
            weight_decay: 0.0,
            stochastic_rounding: None,
        }
    }
}

impl AdafactorConfig {
    /// Sets the learning rate.
    pub fn lr(mut self, lr: f64) -> Self {
        self.lr = lr;
        self
    }

    /// Makes the learning rate the step itself.
    pub fn absolute(mut self, lr: f64) -> Self {
        self.lr = lr;
        self.step_size = StepSize::Absolute;
        self
    }

    /// Sets how fast the second moment forgets; in (0, 1]. With 1 it is the mean of all steps.
    pub fn decay(mut self, decay: f64) -> Self {
        self.decay = decay;
        self
    }

    /// Sets the two regularisers: of a gradient's square and of a parameter's size.
    pub fn epsilons(mut self, square: f64, size: f64) -> Self {
        self.epsilon1 = square;
        self.epsilon2 = size;
        self
    }

    /// Sets the most that the root mean square of an update may be.
    pub fn clip(mut self, clip: f64) -> Self {
        self.clip = clip;
        self
    }

    /// Keeps a momentum of updates; 4 B per element.
    pub fn beta1(mut self, beta1: f64) -> Self {
        self.beta1 = beta1;
        self
    }

    /// Sets the weight decay.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = weight_decay;
        self
    }

    /// Rounds half-precision weights up or down at random, as
    /// [`AdamWConfig::stochastic_rounding`](super::AdamWConfig::stochastic_rounding).
    pub fn stochastic_rounding(mut self, seed: u64) -> Self {
        self.stochastic_rounding = Some(seed);
        self
    }

    fn check(&self) -> Result<()> {
        check_setting("lr", self.lr, |v| v >= 0.0, "finite and not negative")?;
        check_setting("decay", self.decay, |v| v > 0.0 && v <= 1.0, "in (0, 1]")?;
        check_setting("epsilon1", self.epsilon1, |v| v >= 1e-37, "1e-37 or more")?;
        check_setting("epsilon2", self.epsilon2, |v| v >= 0.0, "finite and not negative")?;
        check_setting("clip", self.clip, |v| v > 0.0, "above 0")?;
        check_setting("beta1", self.beta1, |v| (0.0..1.0).contains(&v), "in [0, 1)")?;
        check_setting("weight_decay", self.weight_decay, |v| v >= 0.0, "finite and not negative")
    }
}

/// Adafactor, on the CPU.
#[derive(Debug)]
pub struct Adafactor {
    slots: Slots<AdafactorConfig>,
}

impl Adafactor {
    /// One group of all parameters; a tensor under two names is taken once. Frozen ones are
    /// skipped while they are frozen.
    ///
    /// # Errors
    /// [`Error::Config`] for a setting out of range, a parameter of another dtype than Float,
    /// Double, Half or BFloat16, or one that is no leaf.
    pub fn new<P: Parameters + ?Sized>(parameters: &P, config: AdafactorConfig) -> Result<Self> {
        config.check()?;
        Ok(Self { slots: Slots::new(parameters, config)? })
    }

    /// The settings it was made with.
    pub fn config(&self) -> &AdafactorConfig {
        self.slots.recipe()
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.slots.steps()
    }
}

impl Recipe for AdafactorConfig {
    fn name(&self) -> String {
        "Adafactor".to_owned()
    }

    fn defaults(&self) -> (f64, f64) {
        (self.lr, self.weight_decay)
    }

    fn settings(&self) -> String {
        let Self {
            lr: _,
            weight_decay: _,
            step_size,
            decay,
            epsilon1,
            epsilon2,
            clip,
            beta1,
            stochastic_rounding,
        } = self;
        format!(
            "step_size {step_size:?}, decay {decay:?}, epsilon1 {epsilon1:?}, epsilon2 {epsilon2:?}, clip {clip:?}, beta1 {beta1:?}, stochastic_rounding {stochastic_rounding:?}"
        )
    }

    fn state(&self, _group: usize, parameter: &Named) -> Vec<Kept> {
        let kind = wide_kind(parameter);
        let shape = parameter.tensor.size();
        let mut kept = match shape.as_slice() {
            [leading @ .., rows, columns] => vec![
                Kept::of("row_var", kind, [leading, &[*rows, 1]].concat()),
                Kept::of("col_var", kind, [leading, &[1, *columns]].concat()),
            ],
            _ => vec![Kept::of("variance", kind, shape.clone())],
        };
        if self.beta1 != 0.0 {
            kept.push(Kept::of("momentum", kind, shape));
        }
        kept
    }

    fn check(&self, parameter: &Named) -> Result<()> {
        only_on_cpu(&self.name(), "an update", parameter)
    }

    fn ready(&self, moving: &[Moving<'_>], divisor: f64) -> Result<()> {
        let (wide, narrow): (Vec<_>, Vec<_>) =
            gradients(moving).partition(|grad| grad.kind() == Kind::Double);
        let wide = ffi::multi::measure(&wide, 1.0 / divisor)?;
        let narrow = ffi::multi::measure(&narrow, 1.0 / divisor)?;
        // Sums of squares are kept in fp32.
        let squares = wide.squared_norm + f64::from(narrow.squared_norm as f32);
        if wide.non_finite || narrow.non_finite || !squares.is_finite() {
            return Err(Error::NotFinite { what: "the sum of the gradients' squares", value: squares });
        }
        Ok(())
    }

    fn step(&self, moving: &mut [Moving<'_>], divisor: f64) -> Result<()> {
        let options = ffi::adafactor::Options {
            decay: self.decay,
            epsilon1: self.epsilon1,
            epsilon2: self.epsilon2,
            clip: self.clip,
            beta1: self.beta1,
            divisor,
            relative: (self.step_size == StepSize::Relative).into(),
        };
        ffi::adafactor::step(&options, Rounding::of(self.stochastic_rounding), moving)
    }
}

impl Slotted for Adafactor {
    type Recipe = AdafactorConfig;

    fn slots(&self) -> &Slots<AdafactorConfig> {
        &self.slots
    }

    fn slots_mut(&mut self) -> &mut Slots<AdafactorConfig> {
        &mut self.slots
    }
}

/// What a parameter's update is computed and kept in.
pub(super) fn wide_kind(parameter: &Named) -> Kind {
    match parameter.tensor.kind() {
        Kind::Double => Kind::Double,
        _ => Kind::Float,
    }
}
