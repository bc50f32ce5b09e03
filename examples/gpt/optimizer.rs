use super::Config;
use memfit::Result;
use memfit::optim::{
    AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, Lion, LionConfig, Optimizer, Parameters, Sgd, SgdConfig,
};
use memfit::tch::Kind;

/// The optimizers that a run can choose from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// With momentum 0.9.
    Sgd,
    Lion,
    AdamW,
    /// With moments in bf16.
    AdamWBf16,
    AdamW8bit,
}

/// Each with its name and its best rate of a grid (1, 2 and 5 × powers of ten) on the small model
/// and this repository's text, 1,000 steps under a cosine: `cargo xtask peers --only optimizers`.
const TUNED: [(Choice, &str, f64); 5] = [
    (Choice::Sgd, "sgd", 0.1),
    (Choice::Lion, "lion", 1e-3),
    (Choice::AdamW, "adamw", 5e-3),
    (Choice::AdamWBf16, "adamw-bf16", 5e-3),
    (Choice::AdamW8bit, "adamw8bit", 5e-3),
];

/// What is done with an optimizer, whichever it is.
pub trait With {
    type Out;

    /// # Errors
    /// Those of what is done.
    fn with<O: Optimizer + 'static>(self, optimizer: O) -> Result<Self::Out>;
}

impl Choice {
    pub const ALL: [Self; TUNED.len()] = {
        let mut all = [Self::AdamW; TUNED.len()];
        let mut index = 0;
        while index < all.len() {
            all[index] = TUNED[index].0;
            index += 1;
        }
        all
    };

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|choice| choice.name() == name)
    }

    pub fn name(self) -> &'static str {
        self.tuned().1
    }

    /// The learning rate that suits it where the user names none; it falls with the width, as
    /// Yang et al., *Tensor Programs V*, 2022, have it for Adam.
    pub fn rate(self, config: &Config) -> f64 {
        self.tuned().2 * Config::small().width as f64 / config.width as f64
    }

    fn tuned(self) -> (Self, &'static str, f64) {
        TUNED.into_iter().find(|(choice, ..)| *choice == self).unwrap_or(TUNED[0])
    }

    /// Makes the optimizer and hands it on.
    ///
    /// # Errors
    /// A rate that is none, and those of `with`.
    pub fn make<P: Parameters + ?Sized, W: With>(self, parameters: &P, lr: f64, with: W) -> Result<W::Out> {
        let adamw = AdamWConfig::default().lr(lr);
        match self {
            Self::Sgd => with.with(Sgd::new(parameters, SgdConfig::default().lr(lr).momentum(0.9))?),
            Self::Lion => with.with(Lion::new(parameters, LionConfig::default().lr(lr))?),
            Self::AdamW => with.with(AdamW::new(parameters, adamw)?),
            Self::AdamWBf16 => with.with(AdamW::new(parameters, adamw.moments(Kind::BFloat16))?),
            Self::AdamW8bit => with.with(AdamW8bit::new(parameters, AdamW8bitConfig::default().lr(lr))?),
        }
    }
}
