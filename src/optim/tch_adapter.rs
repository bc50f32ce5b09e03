//! tch's own optimizers in a stack.
//!
//! *Cost*: what tch's optimizer costs: state made on its first step, temporaries of a
//! parameter's size, and one more pass over the gradients where the window has a factor.
//!
//! *Limits*: its state is out of reach, so it is not saved, not offloaded and not allocated
//! beforehand: a failure in its step is [`Error::Poisoned`]. It has one group, whatever
//! groups its `VarStore` has. Layers that are added to the `VarStore` later are stepped by
//! tch, but unknown to strategies.
//!
//! ```
//! use memfit::optim::{Optimizer, TchOptimizer};
//! use tch::{Device, Kind, nn, nn::OptimizerConfig};
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let w = vs.root().ones("w", &[2]);
//! let inner = nn::RmsProp::default().build(&vs, 0.1)?;
//! let mut optimizer = TchOptimizer::new(inner, &vs, 0.1)?;
//! w.square().sum(Kind::Float).backward();
//! optimizer.step(&memfit::Update::plain())?;
//! assert!(w.double_value(&[0]) < 1.0);
//! # Ok::<(), memfit::Error>(())
//! ```

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::{Tensor, nn};

use super::{Optimizer, ParamGroup, Parameters};
use crate::error::{Error, Result};
use crate::ffi;
use crate::state::StateVisitor;
use crate::step::Update;

/// tch's own optimizer as an [`Optimizer`].
#[derive(Debug)]
pub struct TchOptimizer {
    inner: nn::Optimizer,
    groups: Vec<ParamGroup>,
    /// What `inner` was last told.
    told: (f64, f64),
}

impl TchOptimizer {
    /// Wraps an optimizer over `parameters`, the ones it was built for, and sets its
    /// learning rate: tch does not tell which one it has.
    ///
    /// # Errors
    /// [`Error::Config`] for a bad rate, and where a tensor is registered under two names:
    /// tch would step it twice.
    pub fn new<P: Parameters + ?Sized>(inner: nn::Optimizer, parameters: &P, lr: f64) -> Result<Self> {
        let mut seen = HashSet::new();
        if !inner.trainable_variables().iter().all(|tensor| seen.insert(ffi::tensor::identity(tensor))) {
            let problem = "a tensor is registered under two names and tch would step it twice; use memfit's \
                           own optimizers";
            return Err(Error::config("parameters", problem));
        }
        let groups = vec![ParamGroup::new(parameters.named(), lr, 0.0)?];
        let mut adapter = Self { inner, groups, told: (lr, 0.0) };
        guarded(|| adapter.inner.set_lr(lr))?;
        Ok(adapter)
    }

    /// The wrapped optimizer.
    pub fn get_ref(&self) -> &nn::Optimizer {
        &self.inner
    }

    /// The wrapped optimizer. A learning rate set here is overwritten when the group's
    /// changes.
    pub fn get_mut(&mut self) -> &mut nn::Optimizer {
        &mut self.inner
    }

    /// Gives the wrapped optimizer back.
    pub fn into_inner(self) -> nn::Optimizer {
        self.inner
    }

    fn tell(&mut self) -> Result<()> {
        let Some((lr, weight_decay)) = self.groups.first().map(|group| (group.lr, group.weight_decay)) else {
            return Ok(());
        };
        if lr != self.told.0 {
            guarded(|| self.inner.set_lr(lr))?;
        }
        if weight_decay != self.told.1 {
            guarded(|| self.inner.set_weight_decay(weight_decay))?;
        }
        self.told = (lr, weight_decay);
        Ok(())
    }
}

impl Optimizer for TchOptimizer {
    fn name(&self) -> String {
        "TchOptimizer".to_owned()
    }

    fn groups(&self) -> &[ParamGroup] {
        &self.groups
    }

    fn groups_mut(&mut self) -> &mut [ParamGroup] {
        &mut self.groups
    }

    fn step(&mut self, update: &Update) -> Result<()> {
        self.tell()?;
        let parameters = self.groups.iter().flat_map(ParamGroup::parameters).map(|named| &named.tensor);
        if update.divisor != 1.0 {
            for mut grad in parameters.clone().filter_map(ffi::grad::get) {
                let _ = grad.f_div_scalar_(update.divisor)?;
            }
        }
        // tch also moves a frozen parameter by the gradient that it still holds.
        let frozen: Vec<(&Tensor, Tensor)> = parameters
            .filter(|tensor| !tensor.requires_grad())
            .filter_map(|tensor| ffi::grad::take(tensor).map(|grad| (tensor, grad)))
            .collect();
        let inner = &mut self.inner;
        let stepped = guarded(|| inner.step());
        for (tensor, grad) in &frozen {
            ffi::grad::set(tensor, grad)?;
        }
        ffi::autocast::clear_cache();
        stepped.map_err(|error| Error::Poisoned { source: Box::new(error) })
    }

    fn visit_state(&mut self, _: &mut StateVisitor<'_>) -> Result<()> {
        Ok(())
    }

    fn has_state(&self) -> bool {
        false
    }
}

/// tch's optimizer unwraps what libtorch answers.
fn guarded(body: impl FnOnce()) -> Result<()> {
    catch_unwind(AssertUnwindSafe(body)).map_err(|payload| Error::from_panic(payload, "tch's optimizer"))
}
