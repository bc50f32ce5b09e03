use tch::{Kind, Tensor};

use crate::error::{Error, Result};

/// The loss of one micro-batch, with its weight.
///
/// The weight is the number of rows or tokens the loss speaks for. With it, a window of
/// unequal micro-batches gives the gradient of the joined batch: backward runs on the mean
/// times n/n₀ (n₀: the window's first weight above 0), and the update divides once by Σn/n₀.
///
/// A weight of 0 says that nothing in the micro-batch counts: all its labels are ignored, say.
/// Its loss, 0/0 as it may be, is not looked at, its graph is dropped without a backward, and
/// the window is as if it had not been there, but for what its forward did to buffers and
/// generators. A window of nothing else is
/// [`SkipReason::NoTokens`](crate::SkipReason::NoTokens).
#[derive(Debug)]
pub struct Loss {
    tensor: Tensor,
    weight: Weight,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Weight {
    Mean(f64),
    Sum(f64),
    Whole,
}

impl Loss {
    /// A mean over `n` rows or tokens, 0 or more; `tensor` has one element.
    pub fn mean(tensor: Tensor, n: impl num_traits::ToPrimitive) -> Self {
        Self { tensor, weight: Weight::Mean(n.to_f64().unwrap_or(f64::NAN)) }
    }

    /// A sum over `n` rows or tokens, 0 or more; `tensor` has one element.
    ///
    /// In fp16 a sum has less room than a mean under the same loss scale.
    pub fn sum(tensor: Tensor, n: impl num_traits::ToPrimitive) -> Self {
        Self { tensor, weight: Weight::Sum(n.to_f64().unwrap_or(f64::NAN)) }
    }

    /// A loss without a weight: only where the window is this one micro-batch.
    pub fn of(tensor: Tensor) -> Self {
        Self { tensor, weight: Weight::Whole }
    }

    /// The loss, still attached to its graph.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Rows or tokens; `None` for [`Loss::of`].
    pub fn weight(&self) -> Option<f64> {
        match self.weight {
            Weight::Mean(n) | Weight::Sum(n) => Some(n),
            Weight::Whole => None,
        }
    }

    /// Whether nothing in it counts.
    pub(crate) fn is_empty(&self) -> bool {
        self.weight() == Some(0.0)
    }

    /// What backward starts with, where the window's first weight is `first`.
    pub(crate) fn seed(&self, first: f64) -> f64 {
        match self.weight {
            Weight::Mean(n) => n / first,
            Weight::Sum(_) => 1.0 / first,
            Weight::Whole => 1.0,
        }
    }

    /// The sum over the micro-batch's rows or tokens: detached, 0-d, no synchronisation.
    pub(crate) fn total(&self) -> Result<Tensor> {
        let mut total = self.tensor.f_detach()?;
        if total.dim() != 0 {
            total = total.f_view([0i64; 0])?;
        }
        match self.weight {
            Weight::Mean(n) if n != 1.0 => Ok(total.f_to_kind(wide(&total))?.f_mul_scalar(n)?),
            _ => Ok(total.f_to_kind(wide(&total))?),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.tensor.numel() != 1 {
            let problem = format!("a loss has one element, this one has shape {:?}", self.tensor.size());
            return Err(Error::config("Loss", problem));
        }
        match self.weight() {
            Some(n) if !n.is_finite() || n < 0.0 => Err(Error::config(
                "Loss",
                format!("the weight must be a number of rows or tokens, 0 or more, not {n}"),
            )),
            _ => Ok(()),
        }
    }
}

fn wide(tensor: &Tensor) -> Kind {
    if tensor.kind() == Kind::Double { Kind::Double } else { Kind::Float }
}
