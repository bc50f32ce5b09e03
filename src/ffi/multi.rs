//! Many tensors in one pass: measure, clamp, widen, cast.

use std::borrow::Borrow;
use std::os::raw::c_int;

use tch::Tensor;
use torch_sys::C_tensor;

use super::check;
use crate::error::Result;

#[repr(C)]
#[derive(Default)]
struct RawMeasured {
    squared_norm: f64,
    non_finite: c_int,
}

unsafe extern "C" {
    fn mf_measure(tensors: *const *const C_tensor, count: usize, factor: f64, out: *mut RawMeasured)
    -> c_int;
    fn mf_add_to(sums: *const *const C_tensor, tensors: *const *const C_tensor, count: usize) -> c_int;
    fn mf_cast_into(to: *const C_tensor, from: *const C_tensor) -> c_int;
}

/// What one pass over gradients finds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Measured {
    /// Σ(gradient × factor)².
    pub(crate) squared_norm: f64,
    /// Whether a gradient × factor is infinite or not a number, in fp32 (fp64 for fp64).
    pub(crate) non_finite: bool,
}

/// Measures gradients × factor in one pass and with one readback. Without any: 0, finite.
pub(crate) fn measure<T: Borrow<Tensor>>(grads: &[T], factor: f64) -> Result<Measured> {
    let grads = handles(grads);
    let mut raw = RawMeasured::default();
    // SAFETY: the handles are borrowed for the call, `raw` is writable.
    check(unsafe { mf_measure(grads.as_ptr(), grads.len(), factor, &mut raw) })?;
    Ok(Measured { squared_norm: raw.squared_norm, non_finite: raw.non_finite != 0 })
}

/// Adds each tensor to its sum, in the sum's dtype. Pairs beyond the shorter list are left.
pub(crate) fn add_to<S: Borrow<Tensor>, T: Borrow<Tensor>>(sums: &[S], tensors: &[T]) -> Result<()> {
    let count = sums.len().min(tensors.len());
    let (sums, tensors) = (handles(sums), handles(tensors));
    // SAFETY: both lists have `count` handles, borrowed for the call.
    check(unsafe { mf_add_to(sums.as_ptr(), tensors.as_ptr(), count) })
}

/// Copies into a tensor of the same shape, casting, below autograd; its version is bumped.
pub(crate) fn cast_into(to: &Tensor, from: &Tensor) -> Result<()> {
    // SAFETY: both handles are borrowed for the call.
    check(unsafe { mf_cast_into(to.as_ptr(), from.as_ptr()) })
}

fn handles<T: Borrow<Tensor>>(tensors: &[T]) -> Vec<*const C_tensor> {
    tensors.iter().map(|tensor| tensor.borrow().as_ptr()).collect()
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::ffi::tensor::version;

    const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half];

    fn of(values: &[f64], kind: Kind) -> Tensor {
        Tensor::from_slice(values).to_kind(kind)
    }

    #[test]
    fn the_norm_of_three_and_four_is_five_in_every_dtype() -> Result<()> {
        for kind in KINDS {
            let found = measure(&[of(&[3.0], kind), of(&[4.0], kind)], 1.0)?;
            assert_eq!(found, Measured { squared_norm: 25.0, non_finite: false }, "{kind:?}");
            let unscaled = measure(&[of(&[3.0 * 1024.0, 4.0 * 1024.0], kind)], 1.0 / 1024.0)?;
            assert_eq!(unscaled.squared_norm, 25.0);
        }
        assert_eq!(measure::<Tensor>(&[], 3.0)?, Measured::default());
        assert_eq!(measure(&[Tensor::zeros([0, 3], (Kind::Float, Device::Cpu))], 1.0)?, Measured::default());
        Ok(())
    }

    /// Case 12.
    #[test]
    fn four_half_gradients_of_forty_thousand_have_norm_eighty_thousand() -> Result<()> {
        let grads: Vec<Tensor> = (0..4).map(|_| of(&[4e4], Kind::Half)).collect();
        let found = measure(&grads, 1.0)?;
        assert_eq!(found.squared_norm.sqrt(), 8e4);
        assert!(!found.non_finite);
        Ok(())
    }

    /// Case 7.
    #[test]
    fn a_gradient_is_not_finite_where_unscaling_makes_it_so() -> Result<()> {
        for kind in [Kind::Float, Kind::BFloat16] {
            let grads = [of(&[1.0, 1e10], kind)];
            assert!(!measure(&grads, 1.0)?.non_finite);
            assert!(measure(&grads, 1e30)?.non_finite);
        }
        for bad in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
            for kind in KINDS {
                for place in [0, 15, 16, 40] {
                    let mut values = vec![1.0; 41];
                    values[place] = bad;
                    assert!(measure(&[of(&values, kind)], 0.5)?.non_finite, "{bad} {kind:?} {place}");
                }
            }
        }
        // Squares beyond fp32 and beyond fp64 are no overflow.
        assert!(!measure(&[of(&[1e30], Kind::Float)], 1.0)?.non_finite);
        assert!(!measure(&[of(&[1e300], Kind::Double)], 1.0)?.non_finite);
        Ok(())
    }

    #[test]
    fn the_sum_is_right_and_repeatable_on_any_strides() -> Result<()> {
        let base = Tensor::rand([700, 300], (Kind::Float, Device::Cpu)) - 0.5;
        let exact = base.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[]);
        let threads = tch::get_num_threads();
        tch::set_num_threads(1);
        let one = measure(&[&base], 1.0)?.squared_norm;
        tch::set_num_threads(threads.max(2));
        let many = measure(&[&base], 1.0)?.squared_norm;
        tch::set_num_threads(threads);
        assert_eq!(one.to_bits(), many.to_bits());
        assert!((one / exact - 1.0).abs() < 1e-12);
        assert_eq!(measure(&[base.tr()], 1.0)?.squared_norm.to_bits(), one.to_bits());
        let part = base.narrow(1, 3, 200);
        let exact = part.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[]);
        assert!((measure(&[&part], 1.0)?.squared_norm / exact - 1.0).abs() < 1e-12);
        let spread = Tensor::from(2f32).expand([70_000], false);
        assert_eq!(measure(&[&spread], 1.0)?.squared_norm, 280_000.0);
        Ok(())
    }

    #[test]
    fn narrow_gradients_add_up_in_fp32() -> Result<()> {
        for kind in [Kind::BFloat16, Kind::Half, Kind::Float] {
            let sums = [Tensor::full([33, 40], 256.0, (Kind::Float, Device::Cpu))];
            let grads = [Tensor::full([33, 40], 0.5, (kind, Device::Cpu))];
            (0..4).try_for_each(|_| add_to(&sums, &grads))?;
            assert_eq!(sums[0], Tensor::full([33, 40], 258.0, (Kind::Float, Device::Cpu)), "{kind:?}");
            add_to(&[sums[0].tr()], &[grads[0].tr().contiguous()])?;
            assert_eq!(sums[0].double_value(&[32, 39]), 258.5);
        }
        let wrong = add_to(&[of(&[1.0], Kind::Float)], &[of(&[1.0, 2.0], Kind::Half)]);
        assert!(wrong.is_err());
        Ok(())
    }

    #[test]
    fn casting_into_a_weight_bumps_it_and_makes_no_graph() -> Result<()> {
        let weight = of(&[0.0, 0.0], Kind::BFloat16).set_requires_grad(true);
        let before = version(&weight);
        cast_into(&weight, &of(&[1.5, 257.0], Kind::Float))?;
        assert_eq!(Vec::<f64>::try_from(weight.detach().to_kind(Kind::Double))?, [1.5, 256.0]);
        assert_eq!(version(&weight), before + 1);
        assert!(weight.is_leaf() && weight.requires_grad());
        Ok(())
    }
}
