use std::path::PathBuf;

use memfit::data::Loaded;
use memfit::optim::{InBackward, Optimizer};
use memfit::strategies::{
    AmpScaler, Budget, Cosine, GradAccumulator, GradClip, MemoryTimeline, MicroBatcher,
};
use memfit::tch::{Device, nn};
use memfit::{Batch, CpuOffload, Loss, Result, Stack, StackBuilder, StepOutcome};

use super::{Choice, Config, Gpt, Recompute, Rows, With};

/// The dtype of the arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amp {
    Off,
    Bf16,
    Fp16,
}

/// When a parameter is updated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    AfterBackward,
    /// As soon as its gradient is final, without a bound on the gradients' norm.
    InBackward,
}

/// How a batch is split into micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    Whole,
    /// Into so many.
    Into(usize),
    /// Into as few as fit, found by running out of memory.
    AsFits,
}

/// Whether a run can tell where its bytes went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    Off,
    /// The newest step's allocations, each with its role.
    Timeline,
}

/// Which strategies to stack.
#[derive(Clone, Debug)]
pub struct Plan {
    pub amp: Amp,
    pub recompute: Recompute,
    pub split: Split,
    /// Where activations go, if they leave memory.
    pub activations: Option<PathBuf>,
    pub optimizer: Choice,
    pub when: When,
    /// Where the optimizer's state lives, if not in memory.
    pub state: Option<PathBuf>,
    /// Where the blocks' weights live, if not in memory.
    pub weights: Option<PathBuf>,
    pub lr: f64,
    pub watch: Watch,
}

impl Plan {
    /// No strategy at all.
    pub fn plain(lr: f64) -> Self {
        Self {
            amp: Amp::Off,
            recompute: Recompute::Never,
            split: Split::Whole,
            activations: None,
            optimizer: Choice::AdamW,
            when: When::AfterBackward,
            state: None,
            weights: None,
            lr,
            watch: Watch::Off,
        }
    }

    /// The strategies' names, as in `bf16 + checkpoint`.
    pub fn name(&self) -> String {
        let mut parts = Vec::new();
        match self.amp {
            Amp::Off => {}
            Amp::Bf16 => parts.push("bf16".to_owned()),
            Amp::Fp16 => parts.push("fp16".to_owned()),
        }
        match self.recompute {
            Recompute::Never => {}
            Recompute::Every(1) => parts.push("checkpoint".to_owned()),
            Recompute::Every(n) => parts.push(format!("checkpoint 1 of {n}")),
        }
        if self.optimizer != Choice::AdamW {
            parts.push(self.optimizer.name().to_owned());
        }
        if self.when == When::InBackward {
            parts.push("update in backward".to_owned());
        }
        match self.split {
            Split::Whole => {}
            Split::Into(micro_batches) => parts.push(format!("accumulate {micro_batches}")),
            Split::AsFits => parts.push("micro-batches as they fit".to_owned()),
        }
        if self.activations.is_some() {
            parts.push("activations on disk".to_owned());
        }
        if self.state.is_some() {
            parts.push("optimizer on disk".to_owned());
        }
        if self.weights.is_some() {
            parts.push("weights on disk".to_owned());
        }
        if parts.is_empty() { "no strategy".to_owned() } else { parts.join(" + ") }
    }

    /// A fresh model with this stack around it.
    ///
    /// # Errors
    /// What cannot be stacked; a folder that cannot be written to.
    pub fn start(&self, config: &Config) -> Result<Training> {
        self.start_with(config, |stack| stack)
    }

    /// As [`Plan::start`], for a run of so many steps that never exceeds `budget` bytes.
    ///
    /// # Errors
    /// As [`Plan::start`], and a budget that the model alone exceeds.
    pub fn start_run(&self, config: &Config, budget: u64, steps: u64) -> Result<Training> {
        self.start_with(config, |stack| {
            let schedule = Cosine::new(steps).warm_up(steps / 10);
            let stack = stack.with(schedule).with(Budget::bytes(budget));
            match self.when {
                When::AfterBackward => stack.with(GradClip::norm(1.0)),
                // No gradient waits for the norm of all.
                When::InBackward => stack,
            }
        })
    }

    fn start_with(
        &self,
        config: &Config,
        more: impl FnOnce(StackBuilder) -> StackBuilder,
    ) -> Result<Training> {
        let vs = nn::VarStore::new(Device::Cpu);
        let model = match &self.weights {
            Some(folder) => Gpt::with_weights_in(&vs.root(), config, self.recompute, folder)?,
            None => Gpt::new(&vs.root(), config, self.recompute),
        };
        let mut stack = self.optimizer.make(&vs, self.lr, Stacked { plan: self, vs: &vs })?;
        match self.amp {
            Amp::Off => {}
            Amp::Bf16 => stack = stack.with(AmpScaler::bf16()),
            Amp::Fp16 => stack = stack.with(AmpScaler::fp16()),
        }
        match self.split {
            Split::Whole => {}
            Split::Into(micro_batches) => stack = stack.with(GradAccumulator::every(micro_batches)),
            Split::AsFits => stack = stack.with(MicroBatcher::new()),
        }
        if self.watch == Watch::Timeline {
            stack = stack.with(MemoryTimeline::new());
        }
        if let Some(folder) = &self.activations {
            stack = stack.with(CpuOffload::activations().disk(folder));
        }
        Ok(Training { vs, model, stack: more(stack).build()? })
    }
}

/// A stack over the optimizer, its state where the plan wants it.
struct Stacked<'a> {
    plan: &'a Plan,
    vs: &'a nn::VarStore,
}

impl With for Stacked<'_> {
    type Out = StackBuilder;

    fn with<O: Optimizer + 'static>(self, optimizer: O) -> Result<StackBuilder> {
        let Self { plan, vs } = self;
        match (&plan.state, &plan.weights) {
            (Some(folder), _) => plan.stack(vs, CpuOffload::optimizer(optimizer).disk(folder)?),
            // The update brings weights that are away in, one at a time.
            (None, Some(_)) => plan.stack(vs, CpuOffload::optimizer(optimizer).resident()?),
            (None, None) => plan.stack(vs, optimizer),
        }
    }
}

impl Plan {
    fn stack<O: Optimizer + 'static>(&self, vs: &nn::VarStore, optimizer: O) -> Result<StackBuilder> {
        Ok(match self.when {
            When::AfterBackward => Stack::of(vs, optimizer),
            When::InBackward => Stack::of(vs, InBackward::new(optimizer)?),
        })
    }
}

/// A model in training.
pub struct Training {
    pub vs: nn::VarStore,
    pub model: Gpt,
    pub stack: Stack,
}

impl Training {
    /// One update from a whole batch, which the stack splits as it needs.
    ///
    /// # Errors
    /// Out of memory, a full disk: the model is as before.
    pub fn step(&mut self, batch: &Rows) -> Result<StepOutcome> {
        self.step_of(batch, |rows| rows)
    }

    /// The same, of what a loader gives: the stack then knows how far the text is consumed.
    ///
    /// # Errors
    /// As [`Training::step`].
    pub fn step_loaded(&mut self, batch: &Loaded<Rows>) -> Result<StepOutcome> {
        self.step_of(batch, |loaded| &loaded.batch)
    }

    fn step_of<B: Batch>(&mut self, batch: &B, rows: fn(&B) -> &Rows) -> Result<StepOutcome> {
        let model = &self.model;
        let loss = |rows: &Rows| Loss::mean(model.loss(rows, true), rows.0.numel());
        self.stack.step_batch(batch, |micro| Ok(loss(rows(micro))))
    }

    /// Mean loss over rows that were not trained on, four at a time.
    ///
    /// # Errors
    /// Out of memory.
    pub fn validate(&mut self, (bytes, next): &Rows) -> Result<f64> {
        let model = &self.model;
        self.stack.evaluate(|| {
            let parts = bytes.f_split(4, 0)?.into_iter().zip(next.f_split(4, 0)?);
            let losses =
                parts.map(|part| model.loss(&part, false).double_value(&[]) * part.0.size()[0] as f64);
            Ok(losses.sum::<f64>() / bytes.size()[0] as f64)
        })
    }
}
