//! The fused loss: `shim/linear_cross_entropy.cpp`.

use std::os::raw::c_int;
use std::ptr::{null, null_mut};

use tch::{Kind, Tensor};
use torch_sys::C_tensor;

use super::check;
use crate::error::{Error, Result};

#[repr(C)]
struct RawHead {
    hidden: *const C_tensor,
    weight: *const C_tensor,
    bias: *const C_tensor,
    labels: *const C_tensor,
    token_weights: *const C_tensor,
}

#[repr(C)]
#[derive(Default)]
struct RawCounted {
    weight: f64,
    tokens: i64,
    bad_at: i64,
    bad_label: i64,
    bad_weight: f64,
    most_token: f64,
    most_hidden: f64,
    most_weight: f64,
}

#[repr(C)]
struct RawOptions {
    ignored: i64,
    smoothing: f64,
    z: f64,
    norm: f64,
    scale: f64,
    rows_scale: f64,
    rows: i64,
    dtype: c_int,
    by_operators: c_int,
}

unsafe extern "C" {
    fn mf_count_tokens(head: *const RawHead, ignored: i64, sizes: c_int, out: *mut RawCounted) -> c_int;
    fn mf_linear_cross_entropy(
        head: *const RawHead,
        options: *const RawOptions,
        loss: *mut *mut C_tensor,
    ) -> c_int;
    fn mf_evaluate_cross_entropy(
        head: *const RawHead,
        options: *const RawOptions,
        sum: *mut f64,
        correct: *mut i64,
    ) -> c_int;
}

#[unsafe(no_mangle)]
extern "C" fn mf_park_second_order() -> u64 {
    Error::Unsupported {
        what: "a second derivative".to_owned(),
        place: "through linear_cross_entropy".to_owned(),
        remedy: "use linear and cross_entropy where backward creates a graph".to_owned(),
    }
    .park()
}

/// The tensors of a fused loss, of shapes and dtypes that fit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head<'a> {
    pub(crate) hidden: &'a Tensor,
    pub(crate) weight: &'a Tensor,
    pub(crate) bias: Option<&'a Tensor>,
    pub(crate) labels: &'a Tensor,
    pub(crate) token_weights: Option<&'a Tensor>,
}

impl Head<'_> {
    fn raw(&self) -> RawHead {
        let handle = |tensor: Option<&Tensor>| tensor.map_or(null(), Tensor::as_ptr);
        RawHead {
            hidden: self.hidden.as_ptr(),
            weight: self.weight.as_ptr(),
            bias: handle(self.bias),
            labels: self.labels.as_ptr(),
            token_weights: handle(self.token_weights),
        }
    }
}

/// How a fused loss is computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) ignored: i64,
    pub(crate) smoothing: f64,
    pub(crate) z: f64,
    /// What the sum over tokens is multiplied by.
    pub(crate) norm: f64,
    /// What logits' gradients are multiplied by at first; backward makes `norm` of it.
    pub(crate) scale: f64,
    /// What hidden is multiplied by for the weight's gradient; backward undoes it.
    pub(crate) rows_scale: f64,
    /// Rows of one chunk, at least 1.
    pub(crate) rows: i64,
    /// The dtype of the matrix products.
    pub(crate) kind: Kind,
    /// libtorch's operators on the CPU too, as on an accelerator.
    pub(crate) by_operators: bool,
}

impl Options {
    fn raw(&self) -> RawOptions {
        RawOptions {
            ignored: self.ignored,
            smoothing: self.smoothing,
            z: self.z,
            norm: self.norm,
            scale: self.scale,
            rows_scale: self.rows_scale,
            rows: self.rows,
            dtype: number(self.kind),
            by_operators: c_int::from(self.by_operators),
        }
    }
}

/// libtorch's number of a dtype that products can have.
fn number(kind: Kind) -> c_int {
    match kind {
        Kind::Half => 5,
        Kind::Double => 7,
        Kind::BFloat16 => 15,
        _ => 6,
    }
}

/// The tokens that count, and the first that cannot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Counted {
    pub(crate) weight: f64,
    pub(crate) tokens: u64,
    /// The largest weight of a token that counts; 1 without weights.
    pub(crate) most_token: f64,
    /// The largest magnitudes of hidden and weight, where they were asked for, else 0.
    pub(crate) most_hidden: f64,
    pub(crate) most_weight: f64,
    pub(crate) bad: Option<Bad>,
}

/// A token whose label is no class or whose weight is not 0 or more.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Bad {
    pub(crate) at: i64,
    pub(crate) label: i64,
    pub(crate) weight: f64,
}

/// Counts and checks before anything is computed; looks at magnitudes where `sizes` asks for it.
pub(crate) fn count(head: &Head<'_>, ignored: i64, sizes: bool) -> Result<Counted> {
    let mut raw = RawCounted::default();
    // SAFETY: the handles are borrowed for the call, `raw` is writable.
    check(unsafe { mf_count_tokens(&head.raw(), ignored, c_int::from(sizes), &mut raw) })?;
    let bad = Bad { at: raw.bad_at, label: raw.bad_label, weight: raw.bad_weight };
    Ok(Counted {
        weight: raw.weight,
        tokens: raw.tokens.unsigned_abs(),
        most_token: raw.most_token,
        most_hidden: raw.most_hidden,
        most_weight: raw.most_weight,
        bad: (raw.bad_at >= 0).then_some(bad),
    })
}

/// The loss, 0-d, with its node where a gradient is wanted.
pub(crate) fn linear_cross_entropy(head: &Head<'_>, options: &Options) -> Result<Tensor> {
    let mut loss = null_mut();
    // SAFETY: the handles are borrowed for the call, `loss` is writable.
    check(unsafe { mf_linear_cross_entropy(&head.raw(), &options.raw(), &mut loss) })?;
    // SAFETY: on success the handle is owned by us alone.
    Ok(unsafe { Tensor::from_ptr(loss) })
}

/// The sum of the losses, and how many labels have the highest logit.
pub(crate) fn evaluate(head: &Head<'_>, options: &Options) -> Result<(f64, u64)> {
    let (mut sum, mut correct) = (0.0, 0);
    // SAFETY: the handles are borrowed for the call, both results are writable.
    check(unsafe { mf_evaluate_cross_entropy(&head.raw(), &options.raw(), &mut sum, &mut correct) })?;
    Ok((sum, correct.unsigned_abs()))
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    /// What runs on accelerators, on the CPU.
    #[test]
    fn operators_and_rows_agree() -> Result<()> {
        let leaf = |size: &[i64], kind| {
            let numbers = Tensor::arange(size.iter().product::<i64>(), (Kind::Double, Device::Cpu));
            ((numbers * 1.7 + size[0]).sin() * 2.0).view(size).to_kind(kind)
        };
        let kinds = [
            (Kind::Double, 1e-12, (0.1, 1.0)),
            (Kind::Float, 1e-5, (0.1, 1.0)),
            (Kind::BFloat16, 2e-2, (0.1, 1.0)),
            (Kind::Half, 3e-3, (64.0, 0.0625)),
        ];
        for (kind, tolerance, (scale, rows_scale)) in kinds {
            let (hidden, weight) = (leaf(&[21, 8], kind), leaf(&[37, 8], kind));
            let (bias, weights) = (leaf(&[37], kind), leaf(&[21], kind).abs());
            let labels = (Tensor::arange(21, (Kind::Int64, Device::Cpu)) * 5).remainder(37);
            let _ = labels.get(4).fill_(-100);
            let _ = weights.get(5).fill_(0.0);
            let leaves = [&hidden, &weight, &bias].map(|t| t.set_requires_grad(true));
            let [h, w, b] = &leaves;
            let head =
                Head { hidden: h, weight: w, bias: Some(b), labels: &labels, token_weights: Some(&weights) };
            let mut options = Options {
                ignored: -100,
                smoothing: 0.1,
                z: 0.01,
                norm: 0.1,
                scale,
                rows_scale,
                rows: 5,
                kind,
                by_operators: false,
            };
            let mut both = Vec::new();
            for by_operators in [false, true] {
                options.by_operators = by_operators;
                let loss = linear_cross_entropy(&head, &options)?;
                let (sum, correct) = evaluate(&head, &options)?;
                let mut all = Tensor::f_run_backward(&[&loss], &[h, w, b], false, false)?;
                all.push(loss.detach());
                all.push(Tensor::from_slice(&[sum, correct as f64]));
                both.push(all);
            }
            for (rows, operators) in both[0].iter().zip(&both[1]) {
                let error = (rows - operators).abs().max().double_value(&[]);
                assert!(error <= tolerance * rows.abs().max().double_value(&[]), "{kind:?} {error}");
            }
        }
        Ok(())
    }
}
