//! Muon: matrices move by the orthogonal matrix nearest to their momentum; the rest by AdamW.
//!
//! Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024): the
//! momentum M ← μM + (1 − μ)G, with Nesterov's look ahead, is divided by its norm and taken
//! through five steps X ← aX + (bA + cA²)X, A = XXᵀ, of a Newton–Schulz iteration. The
//! parameter moves by −lr · scale · X; the two scales are Jordan's and that of Liu et al.,
//! "Muon is Scalable for LLM Training" (2025), with which rates tuned for AdamW fit. Weight
//! decay is decoupled.
//!
//! Known shortcomings: it is for the matrices of hidden layers; embeddings, heads, vectors
//! and scalars do worse than under AdamW and belong to the others. An iteration costs some
//! 20 multiplications by the matrix's short side per element, which small batches do not hide.
//! It ends with singular values between about 0.7 and 1.2, not at 1, and steps that do not
//! shrink with the gradient need a schedule or weight decay. A direction the momentum hardly
//! has is scaled up with its noise.
//!
//! *Cost*: the momentum, 4 B per element of the matrices (8 for fp64); 8 for the others. An
//! fp32 or fp64 gradient that is contiguous and has its memory alone is **used up**: it holds
//! the update afterwards. While it updates, for the one matrix that needs most, of short side
//! r and long side c: 4·r² B; as much again where 2r ≤ c; per thread, of at most c ÷ w, 4·r·w
//! with w = min(c, max(32, 2¹⁸ ÷ r rounded down to sixteens)), 1 MiB where r ≤ 8,192; 8 B per
//! 16,384 elements; 4·r·c where the gradient cannot be used up (half precision, other
//! strides). Each is rounded up to 64 B, and twice as much for fp64.
//!
//! *When it acts*: a gradient that is not finite is found in one pass before anything moves:
//! [`Error::NotFinite`], and neither momentum nor count has seen it.
//!
//! *Limits*: on the CPU; parameters on CUDA need `CpuOffload::optimizer(o).host()`. The
//! iteration runs in fp32, in libtorch's matrix products, cut so that the number of threads
//! changes no result where r ≥ 128. A convolution's kernel given as a matrix is flattened to
//! its output channels × the rest.
//!
//! ```
//! use memfit::optim::{Muon, MuonConfig, Optimizer};
//! use tch::{Device, Kind, Tensor};
//!
//! let leaf = |shape: &[i64]| Tensor::ones(shape, (Kind::Float, Device::Cpu)).set_requires_grad(true);
//! let (w, bias) = (leaf(&[8, 4]), leaf(&[4]));
//! let config = MuonConfig::default().lr(0.02);
//! let mut optimizer = Muon::new(&vec![w.shallow_clone()], &vec![bias.shallow_clone()], config)?;
//! (w.sum_dim_intlist(0, false, Kind::Float) + &bias).square().sum(Kind::Float).backward();
//! optimizer.step(&memfit::Update::plain())?;
//! assert_eq!(optimizer.state_bytes(), 4 * 32 + 8 * 4);
//! # Ok::<(), memfit::Error>(())
//! ```

use std::collections::HashSet;

use super::adafactor::wide_kind;
use super::adamw::{AdamWConfig, Decay};
use super::recipe::{Kept, Recipe, gradients, only_on_cpu};
use super::sgd::Momentum;
use super::slots::{Slots, Slotted};
use super::{GroupOptions, Optimizer, Parameters, check_setting};
use crate::error::{Error, Result};
use crate::ffi;
use crate::ffi::mixed::{Adam, Rounding};
use crate::ffi::muon::Options;
use crate::ffi::optim::Moving;
use crate::state::Named;

/// Settings of [`Muon`].
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MuonConfig {
    /// Learning rate of the matrices; 1e-3.
    pub lr: f64,
    /// Weight decay of the matrices; 0.1.
    pub weight_decay: f64,
    /// Decay rate of the momentum; 0.95.
    pub momentum: f64,
    /// How the momentum moves a matrix; Nesterov.
    pub kind: Momentum,
    /// What the learning rate is multiplied by; the original.
    pub scale: Scale,
    /// Steps of the iteration; 5.
    pub steps: u32,
    /// The iteration's a, b and c; 3.4445, −4.775 and 2.0315.
    pub coefficients: (f64, f64, f64),
    /// The least norm a momentum is divided by; 1e-7.
    pub epsilon: f64,
    /// Settings of all other parameters, learning rate and weight decay among them; its
    /// stochastic rounding is that of the matrices too.
    pub others: AdamWConfig,
}

/// What the learning rate of an r × c matrix is multiplied by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// √max(1, r ÷ c).
    Original,
    /// 0.2·√max(r, c): the update is as large as AdamW's.
    MatchAdamW,
}

impl Default for MuonConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            weight_decay: 0.1,
            momentum: 0.95,
            kind: Momentum::Nesterov,
            scale: Scale::Original,
            steps: 5,
            coefficients: (3.4445, -4.775, 2.0315),
            epsilon: 1e-7,
            others: AdamWConfig::default(),
        }
    }
}

impl MuonConfig {
    /// Sets the learning rate of the matrices.
    pub fn lr(mut self, lr: f64) -> Self {
        self.lr = lr;
        self
    }

    /// Sets the weight decay of the matrices.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = weight_decay;
        self
    }

    /// Sets the momentum, and how it moves a matrix.
    pub fn momentum(mut self, momentum: f64, kind: Momentum) -> Self {
        self.momentum = momentum;
        self.kind = kind;
        self
    }

    /// Sets what the learning rate is multiplied by.
    pub fn scale(mut self, scale: Scale) -> Self {
        self.scale = scale;
        self
    }

    /// Sets the number of steps and the coefficients of the iteration.
    pub fn iteration(mut self, steps: u32, coefficients: (f64, f64, f64)) -> Self {
        self.steps = steps;
        self.coefficients = coefficients;
        self
    }

    /// Sets the least norm that a momentum is divided by.
    pub fn epsilon(mut self, epsilon: f64) -> Self {
        self.epsilon = epsilon;
        self
    }

    /// Sets how the parameters that are no matrices are trained.
    pub fn others(mut self, others: AdamWConfig) -> Self {
        self.others = others;
        self
    }

    fn check(&self) -> Result<()> {
        let (a, b, c) = self.coefficients;
        check_setting("lr", self.lr, |v| v >= 0.0, "finite and not negative")?;
        check_setting("weight_decay", self.weight_decay, |v| v >= 0.0, "finite and not negative")?;
        check_setting("momentum", self.momentum, |v| (0.0..1.0).contains(&v), "in [0, 1)")?;
        check_setting("steps", self.steps.into(), |v| (1.0..100.0).contains(&v), "from 1 to 99")?;
        check_setting("coefficients", a + b + c, |_| true, "finite")?;
        check_setting("epsilon", self.epsilon, |v| v >= f64::from(f32::MIN_POSITIVE), "above 0, in fp32")
    }
}

/// Muon for matrices and AdamW for the rest, on the CPU.
#[derive(Debug)]
pub struct Muon {
    slots: Slots<MuonRecipe>,
}

impl Muon {
    /// Group 0: the matrices, by Muon. Group 1: the others, by AdamW. Either may be empty; a
    /// tensor under two names is taken once. Frozen ones are skipped while they are frozen.
    /// In the state, a name that both lists have is `others.name` for the other.
    ///
    /// # Errors
    /// [`Error::Config`] for a setting out of range, a matrix of fewer than two dimensions, a
    /// tensor among both, one of another dtype than Float, Double, Half or BFloat16, or one
    /// that is no leaf.
    pub fn new<M, P>(matrices: &M, others: &P, config: MuonConfig) -> Result<Self>
    where
        M: Parameters + ?Sized,
        P: Parameters + ?Sized,
    {
        config.check()?;
        config.others.check()?;
        let matrices = matrices.named();
        check_matrices(&matrices)?;
        let recipe = MuonRecipe { config, matrices: vec![0] };
        let mut slots = Slots::new(matrices.as_slice(), recipe)?;
        slots.add(apart(others.named(), &matrices), GroupOptions::default())?;
        Ok(Self { slots })
    }

    /// Adds a group of matrices, moved by Muon; [`Optimizer::add_group`] adds one for AdamW.
    ///
    /// # Errors
    /// As [`Optimizer::add_group`]; [`Error::Config`] for one of fewer than two dimensions.
    pub fn add_matrices(&mut self, matrices: Vec<Named>, options: GroupOptions) -> Result<()> {
        check_matrices(&matrices)?;
        let group = self.groups().len();
        self.slots.recipe_mut().matrices.push(group);
        let added = self.add_group(matrices, options);
        if added.is_err() {
            self.slots.recipe_mut().matrices.pop();
        }
        added
    }

    /// The settings it was made with.
    pub fn config(&self) -> &MuonConfig {
        &self.slots.recipe().config
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.slots.steps()
    }
}

/// The settings, and which groups are matrices.
#[derive(Debug)]
pub struct MuonRecipe {
    config: MuonConfig,
    matrices: Vec<usize>,
}

impl Recipe for MuonRecipe {
    fn name(&self) -> String {
        "Muon".to_owned()
    }

    fn defaults(&self) -> (f64, f64) {
        (self.config.lr, self.config.weight_decay)
    }

    fn defaults_of(&self, group: usize) -> (f64, f64) {
        match self.matrices.contains(&group) {
            true => self.defaults(),
            false => (self.config.others.lr, self.config.others.weight_decay),
        }
    }

    fn settings(&self) -> String {
        let MuonConfig {
            lr: _,
            weight_decay: _,
            momentum,
            kind,
            scale,
            steps,
            coefficients,
            epsilon,
            others,
        } = &self.config;
        format!(
            "momentum {momentum:?}, kind {kind:?}, scale {scale:?}, steps {steps}, coefficients {coefficients:?}, \
             epsilon {epsilon:?}, matrices {:?}, others: {}",
            self.matrices,
            others.settings()
        )
    }

    fn state(&self, group: usize, parameter: &Named) -> Vec<Kept> {
        if self.matrices.contains(&group) {
            return vec![Kept::of("momentum_buffer", wide_kind(parameter), parameter.tensor.size())];
        }
        self.config.others.state(group, parameter)
    }

    fn check(&self, parameter: &Named) -> Result<()> {
        only_on_cpu(&self.name(), "an update", parameter)
    }

    fn ready(&self, moving: &[Moving<'_>], divisor: f64) -> Result<()> {
        let grads: Vec<_> = gradients(moving).collect();
        let measured = ffi::multi::measure(&grads, 1.0 / divisor)?;
        if measured.non_finite {
            let value = measured.squared_norm.sqrt();
            return Err(Error::NotFinite { what: "the norm of the gradients", value });
        }
        Ok(())
    }

    fn step(&self, moving: &mut [Moving<'_>], divisor: f64) -> Result<()> {
        let config = &self.config;
        let (a, b, c) = config.coefficients;
        let options = Options {
            momentum: config.momentum,
            a,
            b,
            c,
            epsilon: config.epsilon,
            divisor,
            steps: config.steps.try_into().unwrap_or_default(),
            mixed: (config.others.moments.is_some() || config.others.stochastic_rounding.is_some()).into(),
            nesterov: (config.kind == Momentum::Nesterov).into(),
            match_adam: (config.scale == Scale::MatchAdamW).into(),
        };
        let AdamWConfig { betas, epsilon, decay, stochastic_rounding, .. } = config.others;
        let others = Adam { betas, epsilon, decoupled: decay == Decay::Decoupled };
        ffi::muon::step(&options, others, Rounding::of(stochastic_rounding), moving)
    }
}

impl Slotted for Muon {
    type Recipe = MuonRecipe;

    fn slots(&self) -> &Slots<MuonRecipe> {
        &self.slots
    }

    fn slots_mut(&mut self) -> &mut Slots<MuonRecipe> {
        &mut self.slots
    }
}

/// Bare tensors are named by their position in either list.
fn apart(mut others: Vec<Named>, matrices: &[Named]) -> Vec<Named> {
    let taken: HashSet<&str> = matrices.iter().map(|named| named.name.as_str()).collect();
    for named in others.iter_mut().filter(|named| taken.contains(named.name.as_str())) {
        named.name.insert_str(0, "others.");
    }
    others
}

fn check_matrices(matrices: &[Named]) -> Result<()> {
    match matrices.iter().find(|named| named.tensor.defined() && named.tensor.dim() < 2) {
        None => Ok(()),
        Some(named) => {
            let problem = format!(
                "`{}` has shape {:?}; give what is no matrix among the others",
                named.name,
                named.tensor.size()
            );
            Err(Error::config("matrices", problem))
        }
    }
}
