use std::ops::AddAssign;

use tch::Tensor;

use super::{Inputs, LinearCrossEntropy, LinearCrossEntropyConfig};
use crate::error::Result;
use crate::ffi;
use crate::ffi::loss::Options;

/// Cross-entropy and accuracy of tokens, added up over batches with `+=`.
///
/// ```
/// use memfit::loss::{Evaluation, evaluate_cross_entropy};
/// use memfit::tch::{Device, Kind, Tensor};
///
/// let weight = Tensor::zeros([10, 4], (Kind::Float, Device::Cpu));
/// let mut whole = Evaluation::default();
/// for _ in 0..3 {
///     let hidden = Tensor::randn([5, 4], (Kind::Float, Device::Cpu));
///     whole += evaluate_cross_entropy(&hidden, &weight, &Tensor::from_slice(&[0i64, 1, 2, 3, -100]))?;
/// }
/// assert_eq!((whole.tokens, whole.correct), (12, 3));
/// assert!((whole.perplexity() - 10.0).abs() < 1e-5);
/// # Ok::<(), memfit::Error>(())
/// ```
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evaluation {
    /// Sum of the tokens' cross-entropies times their weights; in double.
    pub sum: f64,
    /// Sum of the weights of the tokens that count; their number without weights.
    pub weight: f64,
    /// Tokens that count.
    pub tokens: u64,
    /// Those of them whose target has the highest logit, the first one where several have it.
    pub correct: u64,
}

impl Evaluation {
    /// Mean cross-entropy, in nats; NaN where no token counts.
    pub fn mean(&self) -> f64 {
        self.sum / self.weight
    }

    /// e to the mean.
    pub fn perplexity(&self) -> f64 {
        self.mean().exp()
    }

    /// Share of correct tokens; NaN where no token counts.
    pub fn accuracy(&self) -> f64 {
        self.correct as f64 / self.tokens as f64
    }
}

impl AddAssign for Evaluation {
    fn add_assign(&mut self, other: Self) {
        self.sum += other.sum;
        self.weight += other.weight;
        self.tokens += other.tokens;
        self.correct += other.correct;
    }
}

impl LinearCrossEntropy {
    /// Cross-entropy and accuracy without a graph, whatever the gradient mode, in the same
    /// chunks. Label smoothing and z-loss belong to training and are left out. Waits for the
    /// device twice.
    ///
    /// # Errors
    /// As [`LinearCrossEntropy::loss`].
    pub fn evaluate(&self, inputs: &Inputs<'_>) -> Result<Evaluation> {
        let kind = inputs.check()?;
        let counted = inputs.count(self.config().ignore_index, false)?;
        let options = Options { smoothing: 0.0, z: 0.0, ..self.options(inputs, kind, &counted) };
        let (sum, correct) = ffi::loss::evaluate(inputs.head(), &options)?;
        Ok(Evaluation { sum, weight: counted.weight, tokens: counted.tokens, correct })
    }
}

/// [`LinearCrossEntropy::evaluate`] with the settings of [`LinearCrossEntropyConfig::default`].
///
/// # Errors
/// As [`LinearCrossEntropy::loss`].
pub fn evaluate_cross_entropy(hidden: &Tensor, weight: &Tensor, targets: &Tensor) -> Result<Evaluation> {
    let plain = LinearCrossEntropy::new(LinearCrossEntropyConfig::default())?;
    plain.evaluate(&Inputs::new(hidden, weight, targets))
}
