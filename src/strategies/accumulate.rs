//! Gradient accumulation: one update for several micro-batches.
//!
//! *Cost*: no bytes beyond the one gradient set that training has anyway; with
//! [`GradAccumulator::fp32`], 4 bytes per half-precision parameter. Activations fall to those
//! of one micro-batch. No synchronisation.
//!
//! *When it acts*: it says where a window ends, and how `step_batch` splits a batch. Windows that
//! grow count updates that were taken; a window's length is fixed when it begins.
//!
//! *Limits*: operators that mix rows (BatchNorm) or draw random numbers (dropout) see
//! micro-batches, so there the split differs from the whole batch. In `step_batch` the effective
//! batch is the one that the caller gives: windows that grow only split it finer there. With them,
//! take each item of `windows()` after the step of the one before: a window that was looked at
//! earlier than the update before it may have the wrong length, and is refused then.
//!
//! ```
//! use memfit::{Loss, Stack, optim::{Sgd, SgdConfig}, strategies::GradAccumulator};
//! use memfit::tch::{nn, nn::Module, Device, Kind, Tensor};
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let model = nn::linear(vs.root(), 4, 1, Default::default());
//! let mut training = Stack::of(&vs, Sgd::new(&vs, SgdConfig::default().lr(0.1))?)
//!     .with(GradAccumulator::every(4))
//!     .build()?;
//! let batch = Tensor::randn([32, 4], (Kind::Float, Device::Cpu));
//! let outcome = training.step_batch(&batch, |rows| {
//!     Ok(Loss::mean(model.forward(rows).square().mean(Kind::Float), rows.size()[0]))
//! })?;
//! assert!(outcome.stepped());
//! # Ok::<(), memfit::Error>(())
//! ```

use tch::{Kind, Tensor};

use super::growth::Growth;
use crate::error::{Error, Result};
use crate::ffi;
use crate::state::{Named, StateVisitor};
use crate::step::{
    Backward, Closing, Conflict, Cost, Exactness, Gradients, KeptGradients, ModelSize, NextBackward,
    NextUpdate, Place, Preparation, Strategy, UpdatePhase, Verdict, WindowRule,
};

/// Accumulates gradients over a window of micro-batches. See the [module](self).
#[derive(Debug)]
pub struct GradAccumulator {
    windows: Growth,
    sum: Sum,
}

/// In which dtype gradients are added up.
#[derive(Debug)]
enum Sum {
    /// In the parameter's own, by libtorch.
    Own,
    /// In fp32, for parameters of half precision, in the order of the model's parameters.
    Single(Vec<Option<Accumulated>>),
}

/// The fp32 sum of one parameter's gradients.
#[derive(Debug)]
struct Accumulated {
    name: String,
    sum: Tensor,
    /// Whether a micro-batch of this window had a gradient for it.
    touched: bool,
}

impl GradAccumulator {
    /// A window of `micro_batches`; a whole batch is split into as many.
    pub fn every(micro_batches: usize) -> Self {
        Self { windows: Growth::none(WindowRule::Micros(micro_batches)), sum: Sum::Own }
    }

    /// A window that ends with the micro-batch that brings it to `tokens` (counted by the
    /// batch, or in `step_with` by the loss). `step_batch` does not split a batch under it.
    pub fn tokens(tokens: u64) -> Self {
        Self { windows: Growth::none(WindowRule::Tokens(tokens)), sum: Sum::Own }
    }

    /// Windows that grow: their length (micro-batches, or tokens) doubles in equal stretches, so
    /// that it is `to` from update `steps` on. `every(1).growing(8, 300)` takes 1 micro-batch per
    /// update, 2 from update 100 on, 4 from update 200 on, 8 from update 300 on. Counted are
    /// updates that were taken; a resumed run goes on where it was.
    pub fn growing(mut self, to: u64, steps: u64) -> Self {
        self.windows.doubling(to, steps);
        self
    }

    /// Windows of so many micro-batches (or tokens) from update `step` on, counted from 0 over
    /// updates that were taken; more than before. Call it once for each change, in order.
    pub fn at_step(mut self, step: u64, length: u64) -> Self {
        self.windows.at_step(step, length);
        self
    }

    /// Adds up in fp32 where parameters are bf16 or f16; the window's gradient is rounded
    /// once. Costs 4 bytes per such parameter.
    pub fn fp32(mut self) -> Self {
        self.sum = Sum::Single(Vec::new());
        self
    }

    /// Elements that are added up in fp32.
    fn summed(&self) -> u64 {
        match &self.sum {
            Sum::Own => 0,
            Sum::Single(sums) => sums.iter().flatten().map(|one| one.sum.numel() as u64).sum(),
        }
    }
}

impl Strategy for GradAccumulator {
    fn name(&self) -> String {
        let window = match self.windows.first() {
            WindowRule::Micros(micros) => format!("every({micros})"),
            WindowRule::Tokens(tokens) => format!("tokens({tokens})"),
        };
        let sum = if matches!(self.sum, Sum::Own) { "" } else { ".fp32()" };
        format!("GradAccumulator::{window}{}{sum}", self.windows.described())
    }

    fn place(&self) -> Place {
        Place::Window
    }

    fn exactness(&self) -> Exactness {
        match self.sum {
            Sum::Own => Exactness::Bitwise,
            // The fused update divides in fp32 before it rounds.
            Sum::Single(_) => Exactness::SummationOrder,
        }
    }

    fn cost(&self, _model: &ModelSize) -> Cost {
        let time = "one forward and backward per micro-batch, one update per window";
        match &self.sum {
            Sum::Own => Cost::new("0 B; activations of one micro-batch", Some(0), time),
            Sum::Single(_) => Cost::new("4 B × half-precision parameters", Some(4 * self.summed()), time),
        }
    }

    fn conflict(&self, other: &dyn Strategy) -> Option<Conflict> {
        if matches!(self.sum, Sum::Own) {
            return None;
        }
        match other.place() {
            Place::Master => Some(Conflict::new(
                "master weights already add gradients up in fp32",
                "leave .fp32() out of the accumulator",
            )),
            Place::Recovery => Some(Conflict::new(
                "gradients that are added up elsewhere cannot be put back",
                "leave one of them out: without Rollback a failed window starts again",
            )),
            _ => None,
        }
    }

    fn prepare(&mut self, preparation: &mut Preparation<'_>) -> Result<()> {
        self.windows.check()?;
        if let Sum::Single(sums) = &mut self.sum {
            refuse_offloaded(preparation.parameters)?;
            let sum = |Named { name, tensor }: &Named| -> Result<Option<Accumulated>> {
                let half = matches!(tensor.kind(), Kind::BFloat16 | Kind::Half) && tensor.requires_grad();
                let zeros = || tensor.f_detach()?.f_to_kind(Kind::Float)?.f_zero_();
                let made = || Ok(Accumulated { name: name.clone(), sum: zeros()?, touched: false });
                half.then(made).transpose()
            };
            *sums = preparation.parameters.iter().map(sum).collect::<Result<_>>()?;
        }
        Ok(())
    }

    fn window(&self) -> Option<WindowRule> {
        Some(self.windows.now())
    }

    fn longest_window(&self) -> Option<WindowRule> {
        Some(self.windows.longest())
    }

    fn split(&mut self, rows: i64) -> Option<i64> {
        match self.windows.now() {
            WindowRule::Micros(micros) => {
                let micros = i64::try_from(micros).unwrap_or(i64::MAX).max(1);
                Some((rows / micros + i64::from(rows % micros != 0)).max(1))
            }
            WindowRule::Tokens(_) => None,
        }
    }

    fn gradients(&self) -> Gradients {
        match self.sum {
            Sum::Own => Gradients::InPlace,
            Sum::Single(_) => Gradients::AfterClose,
        }
    }

    fn kept_gradients(&self, _model: &ModelSize) -> KeptGradients {
        let elements = self.summed();
        KeptGradients { own: 4 * elements, taken: 2 * elements, ..KeptGradients::default() }
    }

    fn backward(&mut self, pass: &mut Backward<'_>, next: NextBackward<'_>) -> Result<()> {
        let Sum::Single(sums) = &mut self.sum else { return next(pass) };
        if pass.micro.first() {
            for one in sums.iter_mut().flatten() {
                let _ = one.sum.f_zero_()?;
                one.touched = false;
            }
        }
        next(pass)?;
        let (mut into, mut grads) = (Vec::new(), Vec::new());
        for (one, parameter) in sums.iter_mut().zip(pass.parameters) {
            let Some(one) = one else { continue };
            if let Some(grad) = ffi::grad::take(&parameter.tensor) {
                one.touched = true;
                into.push(one.sum.shallow_clone());
                grads.push(grad);
            }
        }
        ffi::multi::add_to(&into, &grads)
    }

    fn close(&mut self, window: &mut Closing<'_>) -> Result<()> {
        let Sum::Single(sums) = &self.sum else { return Ok(()) };
        for (one, parameter) in sums.iter().zip(window.parameters) {
            if let Some(Accumulated { sum, touched: true, .. }) = one {
                ffi::grad::set(&parameter.tensor, &sum.f_to_kind(parameter.tensor.kind())?)?;
            }
        }
        Ok(())
    }

    fn update(&mut self, phase: &mut UpdatePhase<'_>, next: NextUpdate<'_>) -> Result<Verdict> {
        let verdict = next(phase)?;
        if verdict == Verdict::Stepped {
            self.windows.stepped();
        }
        Ok(verdict)
    }

    /// How far windows have grown, and the sums of an open one.
    fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        self.windows.visit_state(visitor)?;
        let Sum::Single(sums) = &mut self.sum else { return Ok(()) };
        if !visitor.in_window() {
            return Ok(());
        }
        visitor
            .nested("sums", |visitor| sums.iter_mut().flatten().try_for_each(|one| one.visit_state(visitor)))
    }
}

impl Accumulated {
    fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        let mut sum = self.touched.then(|| self.sum.shallow_clone());
        visitor.optional(&self.name, &mut sum, &self.sum)?;
        if visitor.loads() {
            self.touched = sum.is_some();
            match sum {
                Some(sum) => self.sum.f_copy_(&sum).map(drop)?,
                None => self.sum.f_zero_().map(drop)?,
            }
        }
        Ok(())
    }
}

/// Sums are made from weights whose bytes are here.
fn refuse_offloaded(parameters: &[Named]) -> Result<()> {
    let half = |one: &&Named| one.tensor.kind() != Kind::Float && crate::offload::is_offloaded(&one.tensor);
    match parameters.iter().find(half) {
        None => Ok(()),
        Some(parameter) => Err(Error::Incompatible {
            left: "GradAccumulator::….fp32()".to_owned(),
            right: format!("CpuOffload::parameters, which holds `{}`", parameter.name),
            why: "fp32 sums of half-precision gradients stay in memory, twice what the weights free"
                .to_owned(),
            remedy: "leave .fp32() out, or offload the optimizer's state instead".to_owned(),
        }),
    }
}
