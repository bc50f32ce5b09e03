use super::amp::AmpConfig;
use crate::error::{Error, Result};
use crate::state::StateVisitor;

/// A dynamic loss scale: grows after clean steps, backs off after an overflow.
#[derive(Debug)]
pub(super) struct LossScale {
    config: AmpConfig,
    scale: f64,
    clean_steps: u64,
    skips_at_floor: u64,
}

impl LossScale {
    pub(super) fn new(config: AmpConfig) -> Self {
        Self { config, scale: config.init_scale, clean_steps: 0, skips_at_floor: 0 }
    }

    pub(super) fn checked(config: AmpConfig) -> Result<Self> {
        let AmpConfig { init_scale, growth_factor, backoff_factor, floor, cap, .. } = config;
        let problem = match () {
            () if !matches!(config.dtype, tch::Kind::Half | tch::Kind::BFloat16) => {
                "dtype must be f16 or bf16"
            }
            () if !(floor > 0.0 && floor <= cap && cap <= f64::from(f32::MAX)) => {
                "floor and cap must be positive, in order and within fp32"
            }
            () if !(floor..=cap).contains(&init_scale) => "init_scale must lie between floor and cap",
            () if !(growth_factor >= 1.0 && growth_factor.is_finite()) => "growth_factor must be at least 1",
            () if !(backoff_factor > 0.0 && backoff_factor < 1.0) => {
                "backoff_factor must lie between 0 and 1"
            }
            () if config.growth_interval == 0 => "growth_interval must be at least 1",
            () if config.patience == 0 => "patience must be at least 1",
            () => return Ok(Self::new(config)),
        };
        Err(Error::config("AmpScaler", problem))
    }

    pub(super) fn config(&self) -> &AmpConfig {
        &self.config
    }

    pub(super) fn scale(&self) -> f64 {
        self.scale
    }

    /// Whether the scale is a power of two for ever: then scaling loses no bit.
    pub(super) fn is_power_of_two(&self) -> bool {
        let AmpConfig { growth_factor, backoff_factor, floor, cap, .. } = self.config;
        [self.scale, growth_factor, backoff_factor, floor, cap]
            .iter()
            .all(|value| value.log2().fract() == 0.0)
    }

    /// After a step that moved the parameters.
    pub(super) fn stepped(&mut self) {
        self.skips_at_floor = 0;
        self.clean_steps += 1;
        if self.clean_steps >= self.config.growth_interval {
            self.clean_steps = 0;
            self.scale = (self.scale * self.config.growth_factor).min(self.config.cap);
        }
    }

    /// After a window at `used` that overflowed; the scale of the next one.
    pub(super) fn overflowed(&mut self, used: f64) -> Result<f64> {
        self.clean_steps = 0;
        if used > self.config.floor {
            // Where handles share the scale, another may have lowered it since.
            self.scale = self.scale.min((used * self.config.backoff_factor).max(self.config.floor));
            return Ok(self.scale);
        }
        self.skips_at_floor += 1;
        if self.skips_at_floor >= self.config.patience {
            return Err(Error::LossScale { skips: self.skips_at_floor, scale: used });
        }
        Ok(self.scale)
    }

    pub(super) fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        visitor.must_equal("settings", &self.config.settings())?;
        visitor.float("scale", &mut self.scale)?;
        visitor.count("clean_steps", &mut self.clean_steps)?;
        visitor.count("skips_at_floor", &mut self.skips_at_floor)
    }
}
