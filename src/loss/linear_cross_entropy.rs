use tch::{Device, Kind, Tensor};

use super::Inputs;
use super::range::Scales;
use crate::error::{Error, Result};
use crate::ffi;
use crate::ffi::loss::{Counted, Options};
use crate::step::Loss;

/// How the losses of tokens become one number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// Their sum over the number of tokens that count, or over the sum of their weights.
    #[default]
    Mean,
    /// Their sum.
    Sum,
}

/// Settings of [`LinearCrossEntropy`].
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearCrossEntropyConfig {
    /// The target of tokens that do not count; −100.
    pub ignore_index: i64,
    /// Share of each target that is spread over all classes, 0 to 1; 0.
    pub label_smoothing: f64,
    /// Coefficient of the squared log of the softmax's denominator, which a token's loss gets on
    /// top (and which its weight weighs too); 0. Source: Chowdhery et al., *PaLM*, 2022.
    pub z_loss: f64,
    /// Mean or sum; mean.
    pub reduction: Reduction,
    /// Most bytes of logits at once, of one row at least; 16 MiB.
    pub chunk_bytes: u64,
}

impl Default for LinearCrossEntropyConfig {
    fn default() -> Self {
        Self {
            ignore_index: -100,
            label_smoothing: 0.0,
            z_loss: 0.0,
            reduction: Reduction::Mean,
            chunk_bytes: 16 << 20,
        }
    }
}

impl LinearCrossEntropyConfig {
    /// Sets the target of tokens that do not count.
    pub fn ignore_index(mut self, label: i64) -> Self {
        self.ignore_index = label;
        self
    }

    /// Sets the share of each target that is spread over all classes.
    pub fn label_smoothing(mut self, share: f64) -> Self {
        self.label_smoothing = share;
        self
    }

    /// Sets the coefficient of the squared log of the softmax's denominator.
    pub fn z_loss(mut self, coefficient: f64) -> Self {
        self.z_loss = coefficient;
        self
    }

    /// Sets mean or sum.
    pub fn reduction(mut self, reduction: Reduction) -> Self {
        self.reduction = reduction;
        self
    }

    /// Sets the most bytes of logits at once.
    pub fn chunk_bytes(mut self, bytes: u64) -> Self {
        self.chunk_bytes = bytes;
        self
    }
}

/// The loss of a batch's tokens, with what its [`Loss`] needs.
#[non_exhaustive]
#[derive(Debug)]
pub struct TokenLoss {
    /// The loss: 0-d, fp32 (fp64 for fp64), attached to its graph. 0, with gradients of 0, where
    /// no token counts; the plain form's mean is NaN there.
    pub loss: Tensor,
    /// What the mean is over: the sum of the weights of the tokens that count, without weights
    /// their number. It is the `n` of [`Loss::mean`] and [`Loss::sum`].
    pub weight: f64,
    /// Tokens that count: their target is not ignored and their weight not 0.
    pub tokens: u64,
    reduction: Reduction,
}

impl TokenLoss {
    /// The loss with its weight, for a step. A micro-batch in which no token counts has the weight
    /// 0 and counts for nothing in its window.
    pub fn into_loss(self) -> Loss {
        match self.reduction {
            Reduction::Mean => Loss::mean(self.loss, self.weight),
            Reduction::Sum => Loss::sum(self.loss, self.weight),
        }
    }
}

/// The last linear layer and the cross-entropy, in chunks. See the [module](super).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearCrossEntropy {
    config: LinearCrossEntropyConfig,
}

impl LinearCrossEntropy {
    /// Checks the settings.
    ///
    /// # Errors
    /// [`Error::Config`] for one that is out of its range.
    pub fn new(config: LinearCrossEntropyConfig) -> Result<Self> {
        if !(0.0..=1.0).contains(&config.label_smoothing) {
            let problem = format!("a share of 0 to 1, not {}", config.label_smoothing);
            return Err(Error::config("label_smoothing", problem));
        }
        if !(config.z_loss >= 0.0 && config.z_loss.is_finite()) {
            return Err(Error::config(
                "z_loss",
                format!("a finite number of 0 or more, not {}", config.z_loss),
            ));
        }
        if config.chunk_bytes == 0 {
            return Err(Error::config("chunk_bytes", "1 byte or more, not 0"));
        }
        Ok(Self { config })
    }

    /// The settings.
    pub fn config(&self) -> &LinearCrossEntropyConfig {
        &self.config
    }

    /// The loss, one node of the graph.
    ///
    /// # Errors
    /// [`Error::Config`] where shapes, dtypes or devices do not fit, or a target is neither a
    /// class nor the ignored label, before anything is computed; [`Error::OutOfMemory`]. A
    /// backward that creates a graph fails with [`Error::Unsupported`].
    pub fn loss(&self, inputs: &Inputs<'_>) -> Result<TokenLoss> {
        let kind = inputs.check()?;
        let counted = inputs.count(self.config.ignore_index, kind == Kind::Half)?;
        let options = self.options(inputs, kind, &counted);
        let loss = ffi::loss::linear_cross_entropy(inputs.head(), &options)?;
        let reduction = self.config.reduction;
        Ok(TokenLoss { loss, weight: counted.weight, tokens: counted.tokens, reduction })
    }

    /// Bytes of one chunk of logits of that dtype: `rows · classes · b`, where `b` is the dtype's
    /// size (on an accelerator 4 more for a half-precision one), and `tokens` are cut into as
    /// few chunks as [`chunk_bytes`](LinearCrossEntropyConfig::chunk_bytes) allows, of equal rows
    /// but for the last.
    pub fn bytes_of_chunk(&self, tokens: u64, classes: u64, kind: Kind, device: Device) -> u64 {
        let row = classes.saturating_mul(bytes_of_logit(kind, device));
        let most = self.most_rows(row);
        let chunks = tokens.div_ceil(most).max(1);
        tokens.div_ceil(chunks) * row
    }

    fn most_rows(&self, row_bytes: u64) -> u64 {
        (self.config.chunk_bytes / row_bytes.max(1)).max(1)
    }

    pub(super) fn options(&self, inputs: &Inputs<'_>, kind: Kind, counted: &Counted) -> Options {
        let classes = inputs.classes().unsigned_abs();
        let rows = self.most_rows(classes * bytes_of_logit(kind, inputs.head().hidden.device()));
        let rows = i64::try_from(rows).unwrap_or(i64::MAX).min(inputs.tokens().max(1));
        let mean = self.config.reduction == Reduction::Mean && counted.weight > 0.0;
        let norm = if mean { 1.0 / counted.weight } else { 1.0 };
        let scales = match kind {
            Kind::Half => Scales::of_half(counted, self.config.z_loss, classes as f64, rows as f64),
            _ => Scales::of_wide(norm),
        };
        Options {
            ignored: self.config.ignore_index,
            smoothing: self.config.label_smoothing,
            z: self.config.z_loss,
            norm,
            scale: scales.gradient,
            rows_scale: scales.rows,
            rows,
            kind,
            by_operators: false,
        }
    }
}

/// On an accelerator the softmax of half-precision logits is computed beside them, in fp32.
fn bytes_of_logit(kind: Kind, device: Device) -> u64 {
    let own = kind.elt_size_in_bytes() as u64;
    if own < 4 && device != Device::Cpu { own + 4 } else { own }
}

/// The mean cross-entropy of `hidden · weightᵀ` and `targets`, with the settings of
/// [`LinearCrossEntropyConfig::default`]. `hidden` is `[.., D]`, `weight` `[V, D]`, `targets`
/// int64 `[..]`.
///
/// # Errors
/// As [`LinearCrossEntropy::loss`].
pub fn linear_cross_entropy(hidden: &Tensor, weight: &Tensor, targets: &Tensor) -> Result<TokenLoss> {
    let plain = LinearCrossEntropy { config: LinearCrossEntropyConfig::default() };
    plain.loss(&Inputs::new(hidden, weight, targets))
}
