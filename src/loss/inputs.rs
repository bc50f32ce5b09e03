use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::ffi;
use crate::ffi::loss::{Bad, Counted, Head};

/// The tensors of one call: hidden states, the last layer, the targets.
#[derive(Clone, Copy, Debug)]
#[must_use = "inputs do nothing until they are given to a loss"]
pub struct Inputs<'a> {
    head: Head<'a>,
}

impl<'a> Inputs<'a> {
    /// `hidden` is `[.., D]`; `weight` is `[V, D]`, as that of `nn::Linear`; `targets` is int64
    /// of `hidden`'s shape without its last dimension, each one a class or the ignored label.
    pub fn new(hidden: &'a Tensor, weight: &'a Tensor, targets: &'a Tensor) -> Self {
        Self { head: Head { hidden, weight, bias: None, labels: targets, token_weights: None } }
    }

    /// Adds a bias, `[V]`, to the logits.
    pub fn bias(mut self, bias: &'a Tensor) -> Self {
        self.head.bias = Some(bias);
        self
    }

    /// Weighs each token's loss: a floating-point tensor of the targets' shape, 0 or more,
    /// without a gradient. A mean is then over the sum of the weights.
    pub fn token_weights(mut self, weights: &'a Tensor) -> Self {
        self.head.token_weights = Some(weights);
        self
    }

    pub(super) fn head(&self) -> &Head<'a> {
        &self.head
    }

    /// Number of tokens.
    pub(super) fn tokens(&self) -> i64 {
        self.head.labels.numel() as i64
    }

    /// Number of classes.
    pub(super) fn classes(&self) -> i64 {
        self.head.weight.size().first().copied().unwrap_or_default()
    }

    /// Checks shapes, dtypes and devices; returns the dtype of the matrix products.
    pub(super) fn check(&self) -> Result<Kind> {
        let Head { hidden, weight, bias, labels, token_weights } = self.head;
        let [classes, width] = weight.size()[..] else {
            return refuse("weight", format!("it is [V, D], as that of nn::Linear, not {:?}", weight.size()));
        };
        let shape = hidden.size();
        let Some((&last, leading)) = shape.split_last() else {
            return refuse("hidden", "it is [.., D], not 0-d".to_owned());
        };
        if last != width || width == 0 || classes == 0 {
            let problem =
                format!("its last dimension is {last}, a weight of [{classes}, {width}] has no such");
            return refuse("hidden", problem);
        }
        shaped("targets", labels, leading)?;
        if labels.kind() != Kind::Int64 {
            return refuse("targets", format!("they are Int64, not {:?}", labels.kind()));
        }
        if let Some(bias) = bias {
            shaped("bias", bias, &[classes])?;
        }
        if let Some(weights) = token_weights {
            shaped("token_weights", weights, leading)?;
            if !weights.is_floating_point() || weights.requires_grad() {
                let problem = "they are floating-point numbers that need no gradient; detach them";
                return refuse("token_weights", problem.to_owned());
            }
        }
        self.same_device()?;
        self.kind()
    }

    fn same_device(&self) -> Result<()> {
        let device = self.head.hidden.device();
        let others = [
            ("weight", Some(self.head.weight)),
            ("targets", Some(self.head.labels)),
            ("bias", self.head.bias),
            ("token_weights", self.head.token_weights),
        ];
        for (name, tensor) in others {
            let Some(other) = tensor.map(Tensor::device).filter(|other| *other != device) else { continue };
            return refuse(name, format!("on {other:?} while hidden is on {device:?}; move it there"));
        }
        Ok(())
    }

    /// The dtype of the products: autocast's for all but fp64, else the one that all have.
    fn kind(&self) -> Result<Kind> {
        let casts_to = match ffi::autocast::current(self.head.hidden.device()) {
            Ok(state) => state.casts_to(),
            // A device that has no autocast here.
            Err(_) => None,
        };
        let cast = |tensor: &Tensor| match (tensor.kind(), casts_to) {
            (Kind::Float | Kind::BFloat16 | Kind::Half, Some(kind)) => kind,
            (kind, _) => kind,
        };
        let kind = cast(self.head.hidden);
        if !matches!(kind, Kind::Float | Kind::Double | Kind::BFloat16 | Kind::Half) {
            return refuse("hidden", format!("of dtype {kind:?}; use Float, Double, BFloat16 or Half"));
        }
        for (name, tensor) in [("weight", Some(self.head.weight)), ("bias", self.head.bias)] {
            let Some(other) = tensor.map(cast).filter(|other| *other != kind) else { continue };
            return refuse(name, format!("of dtype {other:?} while hidden is {kind:?}; cast one of them"));
        }
        Ok(kind)
    }

    /// Counts the tokens that count and refuses targets and weights out of range; looks at
    /// magnitudes where `sizes` asks for it.
    pub(super) fn count(&self, ignored: i64, sizes: bool) -> Result<Counted> {
        let counted = ffi::loss::count(&self.head, ignored, sizes)?;
        let Some(Bad { at, label, weight }) = counted.bad else { return Ok(counted) };
        let classes = self.classes();
        if (0..classes).contains(&label) {
            let problem = format!("weight {weight} at token {at} is not a finite number of 0 or more");
            return refuse("token_weights", problem);
        }
        let problem = format!(
            "target {label} at token {at} is neither a class of 0..{classes} nor the ignored {ignored}"
        );
        refuse("targets", problem)
    }
}

fn shaped(name: &'static str, tensor: &Tensor, shape: &[i64]) -> Result<()> {
    if tensor.size() == shape {
        return Ok(());
    }
    refuse(name, format!("of shape {:?}, they have to be {shape:?}", tensor.size()))
}

fn refuse<T>(setting: &'static str, problem: String) -> Result<T> {
    Err(Error::config(setting, problem))
}
