//! Autocast: its dtype, on the CPU too, as a guard.

use std::marker::PhantomData;
use std::os::raw::c_int;

use tch::{Device, Kind};

use super::check;
use crate::error::{Error, Result};

/// `mf_autocast` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct RawAutocast {
    enabled: c_int,
    dtype: c_int,
    cache_enabled: c_int,
}

unsafe extern "C" {
    fn mf_autocast_get(device: c_int, out: *mut RawAutocast) -> c_int;
    fn mf_autocast_enter(device: c_int, state: *const RawAutocast, former: *mut RawAutocast) -> c_int;
    fn mf_autocast_leave(device: c_int, former: *const RawAutocast);
    safe fn mf_autocast_clear();
}

/// This thread's autocast for one sort of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AutocastState {
    device: Device,
    raw: RawAutocast,
}

impl AutocastState {
    /// What operators cast to; `None` where they do not.
    pub(crate) fn casts_to(&self) -> Option<Kind> {
        self.dtype().filter(|_| self.raw.enabled != 0)
    }

    /// Whether operators cast.
    #[cfg(test)]
    pub(crate) fn enabled(&self) -> bool {
        self.raw.enabled != 0
    }

    /// Whether casts of leaves are kept for the scope.
    #[cfg(test)]
    pub(crate) fn cache_enabled(&self) -> bool {
        self.raw.cache_enabled != 0
    }

    /// What they cast to.
    pub(crate) fn dtype(&self) -> Option<Kind> {
        match self.raw.dtype {
            BFLOAT16 => Some(Kind::BFloat16),
            HALF => Some(Kind::Half),
            _ => None,
        }
    }
}

const HALF: c_int = 5;
const BFLOAT16: c_int = 15;

/// This thread's autocast for the device's sort.
pub(crate) fn current(device: Device) -> Result<AutocastState> {
    let mut raw = RawAutocast::default();
    // SAFETY: `raw` is writable for the call.
    check(unsafe { mf_autocast_get(number(device)?, &mut raw) })?;
    Ok(AutocastState { device, raw })
}

/// Switches autocast to a dtype, or off, until the guard is dropped.
pub(crate) fn enter(device: Device, dtype: Option<Kind>) -> Result<AutocastGuard> {
    let mut state = current(device)?;
    state.raw.enabled = c_int::from(dtype.is_some());
    state.raw.dtype = match dtype {
        None => state.raw.dtype,
        Some(Kind::BFloat16) => BFLOAT16,
        Some(Kind::Half) => HALF,
        Some(other) => {
            let problem = format!("autocast computes in BFloat16 or Half, not {other:?}");
            return Err(Error::config("dtype", problem));
        }
    };
    enter_state(&state)
}

/// Sets a state captured by [`current`] until the guard is dropped.
///
/// Casts are kept only where gradients are recorded: one made without would serve later
/// operators that need its graph.
pub(crate) fn enter_state(state: &AutocastState) -> Result<AutocastGuard> {
    let mut former = RawAutocast::default();
    // SAFETY: the state is readable and `former` writable for the call.
    check(unsafe { mf_autocast_enter(number(state.device)?, &state.raw, &mut former) })?;
    let former = AutocastState { device: state.device, raw: former };
    Ok(AutocastGuard { former, thread: PhantomData })
}

/// Forgets all kept casts: after weights changed in place.
pub(crate) fn clear_cache() {
    mf_autocast_clear();
}

/// Puts the former state back and, leaving the outermost scope, forgets all kept casts.
#[derive(Debug)]
#[must_use = "autocast ends when this is dropped"]
pub(crate) struct AutocastGuard {
    former: AutocastState,
    /// The state belongs to a thread.
    thread: PhantomData<*const ()>,
}

impl Drop for AutocastGuard {
    fn drop(&mut self) {
        if let Ok(device) = number(self.former.device) {
            // SAFETY: the state is readable for the call; the guard closes the scope it opened.
            unsafe { mf_autocast_leave(device, &self.former.raw) };
        }
    }
}

fn number(device: Device) -> Result<c_int> {
    match device {
        Device::Cpu => Ok(-1),
        Device::Cuda(index) => Ok(index as c_int),
        other => Err(Error::Unsupported {
            what: "autocast".to_owned(),
            place: format!("on {other:?}"),
            remedy: "train on Device::Cpu or Device::Cuda".to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use tch::{Tensor, no_grad};

    use super::*;

    const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

    fn bf16() -> Result<AutocastGuard> {
        enter(Device::Cpu, Some(Kind::BFloat16))
    }

    fn ones(size: [i64; 2]) -> Tensor {
        Tensor::ones(size, CPU)
    }

    #[test]
    fn the_guard_sets_dtype_and_puts_the_former_state_back_on_a_panic_too() -> Result<()> {
        let before = current(Device::Cpu)?;
        assert!(!before.enabled());
        let panicked = std::panic::catch_unwind(|| {
            let guard = bf16();
            assert!(guard.is_ok());
            assert_eq!(ones([2, 2]).matmul(&ones([2, 2])).kind(), Kind::BFloat16);
            let inner = enter(Device::Cpu, None);
            assert_eq!(ones([2, 2]).matmul(&ones([2, 2])).kind(), Kind::Float);
            drop(inner);
            assert_eq!(current(Device::Cpu).map(|now| now.enabled()).ok(), Some(true));
            std::panic::resume_unwind(Box::new("unwound"));
        });
        assert!(panicked.is_err());
        assert_eq!(current(Device::Cpu)?, before);
        assert_eq!(ones([2, 2]).matmul(&ones([2, 2])).kind(), Kind::Float);
        Ok(())
    }

    /// Case 3, the state's part of it.
    #[test]
    fn a_captured_state_casts_the_same_outside_its_scope() -> Result<()> {
        let guard = bf16()?;
        let captured = current(Device::Cpu)?;
        drop(guard);
        assert_eq!(captured.dtype(), Some(Kind::BFloat16));
        let _guard = enter_state(&captured)?;
        assert_eq!(ones([2, 2]).matmul(&ones([2, 2])).kind(), Kind::BFloat16);
        Ok(())
    }

    /// Case 1.
    #[test]
    fn a_forward_without_gradients_does_not_cut_the_next_ones_graph() -> Result<()> {
        let (w, x) = (Tensor::rand([8, 8], CPU).set_requires_grad(true), Tensor::rand([4, 8], CPU));
        let gradient = |with_cache: bool| -> Result<Tensor> {
            let _guard = bf16()?;
            let mut state = current(Device::Cpu)?;
            state.raw.cache_enabled = c_int::from(with_cache);
            let _guard = enter_state(&state)?;
            let _ = no_grad(|| x.matmul(&w));
            let y = x.matmul(&w);
            assert!(y.requires_grad());
            let mut grads = Tensor::f_run_backward(&[y.sum(Kind::Float)], &[&w], false, false)?;
            grads.pop().ok_or_else(|| Error::Torch("no gradient".to_owned()))
        };
        assert_eq!(gradient(true)?, gradient(false)?);
        let nested = no_grad(bf16)?;
        assert!(!current(Device::Cpu)?.cache_enabled());
        drop(nested);
        assert!(current(Device::Cpu)?.cache_enabled());
        Ok(())
    }

    /// Case 5.
    #[test]
    fn a_weight_that_an_optimizer_moved_is_cast_again() -> Result<()> {
        use crate::optim::{Optimizer, Sgd, SgdConfig};
        let w = ones([4, 4]).set_requires_grad(true);
        let mut sgd = Sgd::new(&vec![w.shallow_clone()], SgdConfig::default().lr(1.0))?;
        let _guard = bf16()?;
        let forward = || ones([1, 4]).matmul(&w).double_value(&[0, 0]);
        assert_eq!(forward(), 4.0);
        (-w.sum(Kind::Float)).f_backward()?;
        sgd.step(&crate::Update::plain())?;
        assert_eq!(forward(), 8.0);
        no_grad(|| w.shallow_clone().f_mul_(&Tensor::from(0.5f32)).map(drop))?;
        clear_cache();
        assert_eq!(forward(), 4.0);
        Ok(())
    }

    #[test]
    fn other_dtypes_and_devices_are_typed_errors() {
        assert!(matches!(enter(Device::Cpu, Some(Kind::Int64)), Err(Error::Config { .. })));
        assert!(matches!(enter(Device::Mps, None), Err(Error::Unsupported { .. })));
    }
}
