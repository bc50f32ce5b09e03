//! Keeps a window alive when one of its later micro-batches fails in backward.
//!
//! *Cost*: one gradient set more, from the second micro-batch of a window to its end, and one
//! copy of it per micro-batch.
//!
//! *When it acts*: before each backward but the first it copies the gradients; after a failure
//! it puts them back, and only that micro-batch is lost.
//!
//! *Limits*: not with gradients that are added up elsewhere (`MasterWeights`,
//! `GradAccumulator::fp32`).
//!
//! ```
//! use memfit::{Loss, Stack, optim::{Sgd, SgdConfig}, strategies::{GradAccumulator, Rollback}};
//! use memfit::tch::{nn, Device, Kind, Tensor};
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let w = vs.root().zeros("w", &[2]);
//! let mut training = Stack::of(&vs, Sgd::new(&vs, SgdConfig::default().lr(0.1))?)
//!     .with(GradAccumulator::every(2))
//!     .with(Rollback::micro_batch())
//!     .build()?;
//! let _ = training.step_with(|| Ok(Loss::mean(w.sum(Kind::Float), 1)))?;
//! # memfit::Result::Ok(())
//! ```

use tch::Tensor;

use crate::error::Result;
use crate::ffi;
use crate::step::{Backward, Conflict, Cost, Failure, ModelSize, NextBackward, Place, Recovery, Strategy};

/// Puts gradients back after a failed micro-batch. See the [module](self).
#[derive(Debug)]
pub struct Rollback {
    copies: Vec<Option<Tensor>>,
}

impl Rollback {
    /// Loses one micro-batch instead of the window.
    pub fn micro_batch() -> Self {
        Self { copies: Vec::new() }
    }
}

impl Strategy for Rollback {
    fn name(&self) -> String {
        "Rollback::micro_batch()".to_owned()
    }

    fn place(&self) -> Place {
        Place::Recovery
    }

    fn cost(&self, model: &ModelSize) -> Cost {
        Cost::new(
            "bytes of parameters",
            Some(model.parameter_bytes),
            "one copy of the gradients per micro-batch",
        )
    }

    fn conflict(&self, other: &dyn Strategy) -> Option<Conflict> {
        let elsewhere = other.place() == Place::Master || other.name().ends_with(".fp32()");
        elsewhere.then(|| {
            Conflict::new(
                "gradients that are added up elsewhere cannot be put back",
                "leave Rollback out: a failed window then starts again",
            )
        })
    }

    fn backward(&mut self, pass: &mut Backward<'_>, next: NextBackward<'_>) -> Result<()> {
        self.copies.clear();
        if !pass.micro.first() {
            let copy =
                |tensor: &Tensor| ffi::grad::get(tensor).map(|grad| ffi::tensor::copy_of(&grad)).transpose();
            self.copies = pass.parameters.iter().map(|one| copy(&one.tensor)).collect::<Result<_>>()?;
        }
        next(pass)?;
        self.copies.clear();
        Ok(())
    }

    fn recover(&mut self, failure: &Failure<'_>) -> Recovery {
        if !failure.in_backward || self.copies.is_empty() {
            return Recovery::Window;
        }
        for (copy, parameter) in std::mem::take(&mut self.copies).iter().zip(failure.parameters) {
            let put_back = match copy {
                Some(copy) => ffi::grad::set(&parameter.tensor, copy),
                None => {
                    ffi::grad::take(&parameter.tensor);
                    Ok(())
                }
            };
            if put_back.is_err() {
                return Recovery::Window;
            }
        }
        Recovery::MicroBatch
    }
}
