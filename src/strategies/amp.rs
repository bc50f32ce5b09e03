//! Mixed precision: autocast, and a dynamic loss scale for fp16.
//!
//! *Cost*: saved activations of matrix products in 2 bytes instead of 4, plus one 2-byte copy
//! of the weights that forward casts (kept until its backward); no host synchronisation beyond
//! the one that decides fp16's step.
//!
//! *When it acts*: around forward and evaluation (autocast), in backward (the loss times the
//! scale), before the update (skip on a gradient that is not finite). The scale is constant
//! within a window and moves once per window.
//!
//! *Limits*: bf16 needs no loss scale and has none. Below scale 1 a finite scaled gradient can
//! be infinite once unscaled, so the check looks at unscaled values. Source: Micikevicius et
//! al., *Mixed Precision Training*, 2018; its shortcoming: each overflow loses a step, and one
//! scale serves all layers.
//!
//! ```
//! use memfit::{Loss, Stack, optim::{AdamW, AdamWConfig}, strategies::AmpScaler};
//! use memfit::tch::{nn, nn::Module, Device, Kind, Tensor};
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let model = nn::linear(vs.root(), 4, 1, Default::default());
//! let mut training =
//!     Stack::of(&vs, AdamW::new(&vs, AdamWConfig::default())?).with(AmpScaler::bf16()).build()?;
//! let x = Tensor::randn([8, 4], (Kind::Float, Device::Cpu));
//! let outcome = training.step_with(|| {
//!     Ok(Loss::mean(model.forward(&x).to_kind(Kind::Float).square().mean(Kind::Float), 8))
//! })?;
//! assert!(outcome.stepped());
//! # Ok::<(), memfit::Error>(())
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Device, Kind};

use super::loss_scale::LossScale;
use crate::error::{Error, Result};
use crate::ffi;
use crate::state::StateVisitor;
use crate::step::{
    Backward, Cost, Exactness, Measure, Mode, ModelSize, NextBackward, NextForward, NextUpdate, Place,
    Preparation, SkipReason, Strategy, UpdatePhase, Verdict,
};

/// Settings of [`AmpScaler`].
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AmpConfig {
    /// The dtype that autocast computes in: bf16 or f16.
    pub dtype: Kind,
    /// First loss scale (65536).
    pub init_scale: f64,
    /// What the scale is multiplied by after `growth_interval` clean steps in a row (2).
    pub growth_factor: f64,
    /// Clean steps in a row until the scale grows (2000).
    pub growth_interval: u64,
    /// What the scale is multiplied by after an overflow (0.5).
    pub backoff_factor: f64,
    /// Lowest scale (2⁻¹⁴, fp16's smallest normal number).
    pub floor: f64,
    /// Highest scale (2⁶⁴: far from fp32's edge, where growth would make infinity).
    pub cap: f64,
    /// Skipped steps in a row at the floor until an error is returned (10).
    pub patience: u64,
}

impl AmpConfig {
    fn new(dtype: Kind) -> Self {
        Self {
            dtype,
            init_scale: 65536.0,
            growth_factor: 2.0,
            growth_interval: 2000,
            backoff_factor: 0.5,
            floor: (-14f64).exp2(),
            cap: 64f64.exp2(),
            patience: 10,
        }
    }
}

impl AmpConfig {
    /// What a run has to keep to be the same run; the first scale was for its beginning.
    pub(super) fn settings(&self) -> String {
        let Self {
            dtype,
            init_scale: _,
            growth_factor,
            growth_interval,
            backoff_factor,
            floor,
            cap,
            patience,
        } = self;
        format!(
            "dtype {dtype:?}, growth_factor {growth_factor:?}, growth_interval {growth_interval}, \
             backoff_factor {backoff_factor:?}, floor {floor:?}, cap {cap:?}, patience {patience}"
        )
    }
}

/// Autocast to bf16 or fp16, with a dynamic loss scale for fp16. See the [module](self).
#[derive(Debug)]
pub struct AmpScaler {
    dtype: Kind,
    scale: Option<Arc<Mutex<LossScale>>>,
    /// The scale of the window that this handle has open.
    window_scale: f64,
    device: Device,
}

impl AmpScaler {
    /// Autocast to bf16; no loss scale.
    pub fn bf16() -> Self {
        Self { dtype: Kind::BFloat16, scale: None, window_scale: 1.0, device: Device::Cpu }
    }

    /// Autocast to fp16 with a dynamic loss scale of the usual settings.
    pub fn fp16() -> Self {
        Self::scaled(LossScale::new(AmpConfig::new(Kind::Half)))
    }

    /// Autocast to fp16 with a loss scale of your own settings.
    ///
    /// # Errors
    /// A factor or bound out of its range.
    pub fn fp16_with(change: impl FnOnce(&mut AmpConfig)) -> Result<Self> {
        let mut config = AmpConfig::new(Kind::Half);
        change(&mut config);
        LossScale::checked(config).map(Self::scaled)
    }

    fn scaled(scale: LossScale) -> Self {
        let dtype = scale.config().dtype;
        Self { dtype, scale: Some(Arc::new(Mutex::new(scale))), window_scale: 1.0, device: Device::Cpu }
    }

    /// Another handle on the same loss scale, for a second stack: a GAN's two optimizers. Each
    /// window keeps the scale it began with; each update moves the one scale.
    pub fn share(&self) -> Self {
        Self { dtype: self.dtype, scale: self.scale.clone(), window_scale: 1.0, device: Device::Cpu }
    }

    /// The loss scale of the next window; `None` without scaling.
    pub fn scale(&self) -> Option<f64> {
        self.lock().map(|scale| scale.scale())
    }

    fn lock(&self) -> Option<MutexGuard<'_, LossScale>> {
        self.scale.as_ref().map(|scale| scale.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Strategy for AmpScaler {
    fn name(&self) -> String {
        let dtype = if self.dtype == Kind::Half { "fp16" } else { "bf16" };
        format!("AmpScaler::{dtype}()")
    }

    fn place(&self) -> Place {
        Place::Precision
    }

    fn exactness(&self) -> Exactness {
        match self.lock() {
            Some(scale) if !scale.is_power_of_two() => Exactness::SummationOrder,
            _ => Exactness::Bitwise,
        }
    }

    fn cost(&self, model: &ModelSize) -> Cost {
        let casts = model.parameters * 2;
        Cost::new(
            "≤ 2 B × parameters for cast weights; activations halve",
            Some(casts),
            "casts; faster products",
        )
    }

    fn prepare(&mut self, preparation: &mut Preparation<'_>) -> Result<()> {
        self.device = preparation.device;
        let half = preparation.parameters.iter().find(|one| one.tensor.kind() != Kind::Float);
        match (half, &self.scale) {
            (Some(parameter), Some(_)) => Err(Error::Incompatible {
                left: self.name(),
                right: format!("the {:?} parameter `{}`", parameter.tensor.kind(), parameter.name),
                why: "autocast to fp16 wants fp32 weights: f16 ones lose the updates, and operators \
                      such as BatchNorm refuse weights of another half precision"
                    .to_owned(),
                remedy: "keep the weights in fp32, or train a bf16 model with AmpScaler::bf16() or \
                         MasterWeights::fp32()"
                    .to_owned(),
            }),
            _ => Ok(()),
        }
    }

    fn measures(&self) -> Measure {
        if self.scale.is_some() { Measure::Finite } else { Measure::Nothing }
    }

    fn forward(&mut self, mode: &mut Mode, next: NextForward<'_>) -> Result<()> {
        let _autocast = ffi::autocast::enter(self.device, Some(self.dtype))?;
        next(mode)
    }

    fn backward(&mut self, pass: &mut Backward<'_>, next: NextBackward<'_>) -> Result<()> {
        if pass.micro.first() {
            self.window_scale = self.scale().unwrap_or(1.0);
        }
        pass.seed *= self.window_scale;
        next(pass)
    }

    fn update(&mut self, phase: &mut UpdatePhase<'_>, next: NextUpdate<'_>) -> Result<Verdict> {
        let overflow = phase.numbers.non_finite == Some(true);
        let Some(mut scale) = self.lock() else { return next(phase) };
        if overflow {
            let next_scale = scale.overflowed(self.window_scale)?;
            return Ok(Verdict::Skipped(SkipReason::NonFiniteGradient {
                scale: self.window_scale,
                next_scale,
            }));
        }
        drop(scale);
        let verdict = next(phase)?;
        if let (Verdict::Stepped, Some(mut scale)) = (verdict, self.lock()) {
            scale.stepped();
        }
        Ok(verdict)
    }

    fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        let Some(scale) = self.scale.clone() else { return Ok(()) };
        scale.lock().unwrap_or_else(PoisonError::into_inner).visit_state(visitor)?;
        if visitor.in_window() {
            visitor.float("window_scale", &mut self.window_scale)?;
        }
        Ok(())
    }
}

/// Runs `body` under autocast to `dtype` (bf16 or f16) on `device`, outside a stack. Works on
/// the CPU too, restores on panic.
///
/// # Errors
/// Those of `body`, and a device or dtype without autocast.
pub fn autocast<R>(device: Device, dtype: Kind, body: impl FnOnce() -> Result<R>) -> Result<R> {
    let _on = ffi::autocast::enter(device, Some(dtype))?;
    body()
}

/// Runs `body` without autocast on `device`: a sub-block that wants full precision. Cast its
/// inputs to fp32 yourself.
///
/// # Errors
/// Those of `body`, and a device without autocast.
pub fn full_precision<R>(device: Device, body: impl FnOnce() -> Result<R>) -> Result<R> {
    let _off = ffi::autocast::enter(device, None)?;
    body()
}
