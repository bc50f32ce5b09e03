//! fp32 master weights and fp32 gradient sums for a model whose weights are bf16 or f16.
//!
//! *Cost*: 4 bytes per half-precision parameter for the weights, always, and 4 for the
//! gradient sums, from the first micro-batch of a window to its update (in place of 2 for
//! gradients of half precision, one parameter at a time). One pass over the weights per update.
//!
//! *When it acts*: after each backward it moves gradients into the fp32 sums; the optimizer
//! updates the fp32 weights; then they are rounded into the model's.
//!
//! *Limits*: the model computes with rounded weights. Weights that are loaded into the `Stack`
//! reach the fp32 ones; those that are loaded into a `VarStore` only before `build()`. Source: Micikevicius et al., *Mixed
//! Precision Training*, 2018, section 3.1.
//!
//! ```
//! use memfit::{Loss, Stack, optim::{Sgd, SgdConfig}, strategies::MasterWeights};
//! use memfit::tch::{nn, Device, Kind, Tensor};
//!
//! let mut vs = nn::VarStore::new(Device::Cpu);
//! let w = vs.root().ones("w", &[1]);
//! vs.bfloat16();
//! let mut training = Stack::of(&vs, Sgd::new(&vs, SgdConfig::default().lr(0.001))?)
//!     .with(MasterWeights::fp32())
//!     .build()?;
//! for _ in 0..100 {
//!     let _ = training.step_with(|| Ok(Loss::of(w.sum(Kind::Float))))?;
//! }
//! assert!((w.double_value(&[0]) - 0.9).abs() < 0.004); // bf16 alone would still be at 1
//! # Ok::<(), memfit::Error>(())
//! ```

use std::collections::HashSet;

use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::ffi;
use crate::state::{Named, StateVisitor};
use crate::step::{
    Backward, Cost, Exactness, Failure, Gradients, KeptGradients, Mode, ModelSize, NextBackward, NextForward,
    NextUpdate, Place, Preparation, Recovery, Strategy, UpdatePhase, Verdict,
};

/// Trains a half-precision model through fp32 weights. See the [module](self).
#[derive(Debug, Default)]
pub struct MasterWeights {
    pairs: Vec<Pair>,
}

#[derive(Debug)]
struct Pair {
    /// The model's weight.
    weight: Named,
    /// The one that the optimizer moves; its gradient is the window's sum.
    master: Tensor,
}

impl MasterWeights {
    /// fp32 weights and gradient sums.
    pub fn fp32() -> Self {
        Self::default()
    }

    fn drop_sums(&self) {
        for pair in &self.pairs {
            ffi::grad::take(&pair.master);
        }
    }

    fn collect(&self) -> Result<()> {
        for pair in &self.pairs {
            let Some(grad) = ffi::grad::take(&pair.weight.tensor) else { continue };
            match ffi::grad::get(&pair.master) {
                Some(sum) => ffi::multi::add_to(&[sum], &[grad])?,
                None => ffi::grad::set(&pair.master, &grad.f_to_kind(Kind::Float)?)?,
            }
        }
        Ok(())
    }
}

impl Strategy for MasterWeights {
    fn name(&self) -> String {
        "MasterWeights::fp32()".to_owned()
    }

    fn place(&self) -> Place {
        Place::Master
    }

    fn exactness(&self) -> Exactness {
        Exactness::Bitwise
    }

    fn cost(&self, _model: &ModelSize) -> Cost {
        let elements: usize = self.pairs.iter().map(|pair| pair.master.numel()).sum();
        let formula = "4 B × half-precision parameters, 4 B more while a window is open";
        Cost::new(formula, Some(8 * elements as u64), "one pass over weights per update")
    }

    fn kept_gradients(&self, _model: &ModelSize) -> KeptGradients {
        let trained = self.pairs.iter().filter(|pair| pair.weight.tensor.requires_grad());
        let elements: u64 = trained.map(|pair| pair.master.numel() as u64).sum();
        KeptGradients { own: 4 * elements, taken: 2 * elements, ..KeptGradients::default() }
    }

    fn gradients(&self) -> Gradients {
        Gradients::AfterClose
    }

    fn forward(&mut self, mode: &mut Mode, next: NextForward<'_>) -> Result<()> {
        if matches!(mode, Mode::Train(micro) if micro.first()) {
            self.drop_sums();
        }
        next(mode)
    }

    fn prepare(&mut self, preparation: &mut Preparation<'_>) -> Result<()> {
        for group in preparation.optimizer.groups_mut() {
            for index in 0..group.parameters().len() {
                let weight = group.parameters()[index].clone();
                if !matches!(weight.tensor.kind(), Kind::BFloat16 | Kind::Half) {
                    continue;
                }
                if crate::offload::is_offloaded(&weight.tensor) {
                    return Err(Error::Incompatible {
                        left: self.name(),
                        right: format!("CpuOffload::parameters, which holds `{}`", weight.name),
                        why: "the rounded weights are written where their bytes are away".to_owned(),
                        remedy: "offload the optimizer's state instead, with CpuOffload::optimizer"
                            .to_owned(),
                    });
                }
                let trained = weight.tensor.requires_grad();
                let master =
                    weight.tensor.f_detach()?.f_to_kind(Kind::Float)?.f_set_requires_grad(trained)?;
                group.replace(index, &master);
                self.pairs.push(Pair { weight, master });
            }
        }
        Ok(())
    }

    fn backward(&mut self, pass: &mut Backward<'_>, next: NextBackward<'_>) -> Result<()> {
        if pass.micro.first() {
            for pair in &self.pairs {
                // A weight unfrozen since the last window.
                let _ = pair.master.f_set_requires_grad(pair.weight.tensor.requires_grad())?;
            }
        }
        next(pass)?;
        self.collect()
    }

    fn recover(&mut self, failure: &Failure<'_>) -> Recovery {
        if failure.in_backward {
            self.drop_sums();
        }
        Recovery::Window
    }

    fn window_dropped(&mut self) {
        self.drop_sums();
    }

    fn update(&mut self, phase: &mut UpdatePhase<'_>, next: NextUpdate<'_>) -> Result<Verdict> {
        let verdict = next(phase)?;
        if verdict == Verdict::Stepped {
            for pair in &self.pairs {
                ffi::multi::cast_into(&pair.weight.tensor, &pair.master)?;
            }
            self.drop_sums();
        }
        Ok(verdict)
    }

    fn weights_loaded(&self, loaded: &[Named]) -> Result<()> {
        let loaded: HashSet<usize> = loaded.iter().map(|one| ffi::tensor::identity(&one.tensor)).collect();
        let pairs = self.pairs.iter();
        pairs
            .filter(|pair| loaded.contains(&ffi::tensor::identity(&pair.weight.tensor)))
            .try_for_each(|pair| ffi::multi::cast_into(&pair.master, &pair.weight.tensor))
    }

    fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        self.pairs.iter_mut().try_for_each(|pair| visitor.tensor(&pair.weight.name, &mut pair.master))?;
        if !visitor.in_window() {
            return Ok(());
        }
        visitor.nested("sums", |visitor| {
            self.pairs.iter().try_for_each(|Pair { weight, master }| {
                let mut sum = ffi::grad::get(master);
                visitor.optional(&weight.name, &mut sum, master)?;
                if visitor.loads() {
                    ffi::grad::take(master);
                    sum.map_or(Ok(()), |sum| ffi::grad::set(master, &sum))?;
                }
                Ok(())
            })
        })
    }
}
