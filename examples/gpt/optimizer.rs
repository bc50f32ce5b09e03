use super::Config;
use memfit::optim::{
    Adafactor, AdafactorConfig, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, Lion, LionConfig, Muon,
    MuonConfig, Optimizer, Parameters, Scale, Sgd, SgdConfig,
};
use memfit::tch::Kind;
use memfit::{Named, Result};

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
    /// Its rate is a share of each weight's size.
    Adafactor,
    /// The blocks' matrices; the rest by AdamW.
    Muon,
}

/// Each with its name and its best rate of a coarse grid on the small model and this repository's
/// text (1,000 steps, one to three seeds); bf16 and 8-bit moments have AdamW's.
const TUNED: [(Choice, &str, f64); 7] = [
    (Choice::Sgd, "sgd", 0.2),
    (Choice::Lion, "lion", 1.2e-3),
    (Choice::AdamW, "adamw", 4e-3),
    (Choice::AdamWBf16, "adamw-bf16", 4e-3),
    (Choice::AdamW8bit, "adamw8bit", 4e-3),
    (Choice::Adafactor, "adafactor", 6e-2),
    (Choice::Muon, "muon", 5e-3),
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
            // Small batches: a shorter memory than the authors' 0.9 and 0.99.
            Self::Lion => with.with(Lion::new(parameters, LionConfig::default().lr(lr).betas(0.8, 0.95))?),
            Self::AdamW => with.with(AdamW::new(parameters, adamw)?),
            Self::AdamWBf16 => with.with(AdamW::new(parameters, adamw.moments(Kind::BFloat16))?),
            Self::AdamW8bit => with.with(AdamW8bit::new(parameters, AdamW8bitConfig::default().lr(lr))?),
            Self::Adafactor => with.with(Adafactor::new(parameters, AdafactorConfig::default().lr(lr))?),
            Self::Muon => {
                let (matrices, others): (Vec<Named>, Vec<Named>) =
                    parameters.named().into_iter().partition(is_hidden);
                let config = MuonConfig::default().lr(lr).scale(Scale::MatchAdamW).others(adamw);
                with.with(Muon::new(&matrices, &others, config)?)
            }
        }
    }
}

/// Whether a weight is a matrix between hidden layers: no embedding, no head.
fn is_hidden(weight: &Named) -> bool {
    let outer = ["tokens", "positions", "head"].iter().any(|name| weight.name.starts_with(name));
    weight.tensor.dim() == 2 && !outer
}
