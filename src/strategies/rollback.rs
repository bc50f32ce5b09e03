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
//! # Ok::<(), memfit::Error>(())
//! ```

use tch::Tensor;

use crate::error::Result;
use crate::ffi;
use crate::state::Named;
use crate::step::{
    Backward, Conflict, Cost, Failure, Gradients, KeptGradients, ModelSize, NextBackward, Place, Recovery,
    Strategy,
};

/// Puts gradients back after a failed micro-batch. See the [module](self).
#[derive(Debug)]
pub struct Rollback {
    kept: Kept,
}

/// What it has of the gradients before a backward.
#[derive(Debug)]
enum Kept {
    /// The first micro-batch: there is nothing to go back to but the window's start.
    Nothing,
    /// The gradients themselves: backward has not begun.
    Untouched,
    /// Their copies, in the order of the parameters.
    Copies(Vec<Option<Tensor>>),
}

impl Rollback {
    /// Loses one micro-batch instead of the window.
    pub fn micro_batch() -> Self {
        Self { kept: Kept::Nothing }
    }
}

impl Strategy for Rollback {
    fn name(&self) -> String {
        "Rollback::micro_batch()".to_owned()
    }

    fn identity(&self) -> Option<String> {
        None
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

    fn kept_gradients(&self, model: &ModelSize) -> KeptGradients {
        KeptGradients { copies: model.parameter_bytes, ..KeptGradients::default() }
    }

    fn gradients(&self) -> Gradients {
        Gradients::AfterClose
    }

    fn conflict(&self, other: &dyn Strategy) -> Option<Conflict> {
        let elsewhere = other.place() == Place::Master;
        elsewhere.then(|| {
            Conflict::new(
                "gradients that are added up elsewhere cannot be put back",
                "leave Rollback out: a failed window then starts again",
            )
        })
    }

    fn backward(&mut self, pass: &mut Backward<'_>, next: NextBackward<'_>) -> Result<()> {
        self.kept = Kept::Nothing;
        if !pass.micro.first() {
            self.kept = Kept::Untouched;
            let copy =
                |tensor: &Tensor| ffi::grad::get(tensor).map(|grad| ffi::tensor::copy_of(&grad)).transpose();
            let copies = pass.parameters.iter().map(|one| copy(&one.tensor));
            self.kept = Kept::Copies(copies.collect::<Result<_>>()?);
        }
        next(pass)?;
        self.kept = Kept::Nothing;
        Ok(())
    }

    fn window_dropped(&mut self) {
        self.kept = Kept::Nothing;
    }

    fn recover(&mut self, failure: &Failure<'_>) -> Recovery {
        if !failure.in_backward {
            return Recovery::Window;
        }
        match std::mem::replace(&mut self.kept, Kept::Nothing) {
            Kept::Nothing => Recovery::Window,
            Kept::Untouched => Recovery::MicroBatch,
            Kept::Copies(copies) => put_back(&copies, failure.parameters),
        }
    }
}

fn put_back(copies: &[Option<Tensor>], parameters: &[Named]) -> Recovery {
    for (copy, parameter) in copies.iter().zip(parameters) {
        ffi::grad::take(&parameter.tensor);
        if let Some(copy) = copy
            && ffi::grad::set(&parameter.tensor, copy).is_err()
        {
            return Recovery::Window;
        }
    }
    Recovery::MicroBatch
}
