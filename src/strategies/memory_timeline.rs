//! Records what each step did with memory: who held the bytes, and when.
//!
//! *Cost*: 40 bytes per event, allocated and touched by `build()` outside the counted memory
//! ([`EVENTS`] of them: 5.2 MB); about 0.01 µs per allocation and free, and a look at the storage
//! of each of the model's and the optimizer's tensors per step: 0.4 % of a step of 8 ms on one thread,
//! 0.6 % of a checkpointed one of 11 ms (`cargo bench --bench timeline`).
//!
//! *When it acts*: around everything else. It sets no saved-tensor hook, so libtorch's version
//! checks stay on, and it changes no value.
//!
//! *Limits*: of a window with more events than there is room for the newest are kept. Gradients that
//! are gone before their backward ends count as temporaries. After `Stack::estimate` or
//! `Stack::find_max_batch` the newest window is the one that they tried. Only the CPU's allocator is
//! recorded: on CUDA a timeline shows the host's side.
//!
//! ```
//! use memfit::{Loss, Stack, memory::Role, optim::{AdamW, AdamWConfig}, strategies::MemoryTimeline};
//! use memfit::tch::{nn, nn::Module, Device, Kind, Tensor};
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let model = nn::linear(vs.root(), 64, 64, Default::default());
//! let mut training =
//!     Stack::of(&vs, AdamW::new(&vs, AdamWConfig::default())?).with(MemoryTimeline::new()).build()?;
//! let x = Tensor::ones([8, 64], (Kind::Float, Device::Cpu));
//! # let folder = tempfile::tempdir().unwrap();
//! let _ = training.step_with(|| Ok(Loss::of(model.forward(&x).square().mean(Kind::Float))))?;
//! let timeline = training.strategy::<MemoryTimeline>().map(MemoryTimeline::timeline).unwrap()?;
//! assert_eq!(timeline.peak().roles[Role::Parameters], (64 * 64 + 64) * 4);
//! timeline.save(folder.path().join("step.html"))?;
//! # Ok::<(), memfit::Error>(())
//! ```

mod labels;

use std::collections::VecDeque;

use labels::Labels;

use crate::error::{Error, Result};
use crate::ffi::timeline::now;
use crate::memory::{EVENTS, Marks, Ring, Role, Timeline};
use crate::state::Named;
use crate::step::{
    Backward, Cost, Failure, Mode, ModelSize, NextBackward, NextForward, NextUpdate, Place, Preparation,
    Recovery, Relation, Strategy, UpdatePhase, Verdict,
};

/// Records the memory of the newest windows. See the [module](self).
#[derive(Debug)]
pub struct MemoryTimeline {
    events: usize,
    keep: usize,
    ring: Option<Ring>,
    /// The first event that `build()` has made, until the first window has read on from there.
    built: Option<u64>,
    labels: Labels,
    parameters: Vec<Named>,
    buffers: Vec<Named>,
    windows: VecDeque<Marks>,
}

impl Default for MemoryTimeline {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryTimeline {
    /// Keeps the newest window, with room for [`EVENTS`].
    pub fn new() -> Self {
        Self {
            events: EVENTS,
            keep: 1,
            ring: None,
            built: None,
            labels: Labels::default(),
            parameters: Vec::new(),
            buffers: Vec::new(),
            windows: VecDeque::new(),
        }
    }

    /// Makes room for so many events.
    pub fn capacity(mut self, events: usize) -> Self {
        self.events = events;
        self
    }

    /// Keeps so many windows, as far as the room goes; at least one.
    pub fn keep(mut self, windows: usize) -> Self {
        self.keep = windows.max(1);
        self
    }

    /// The newest window, up to its update, its failure or this moment.
    ///
    /// # Errors
    /// [`Error::CallOrder`] before the first window; [`Error::Config`] where none of its events is
    /// left.
    pub fn timeline(&self) -> Result<Timeline> {
        let newest = self.windows.back().ok_or_else(|| Error::CallOrder {
            call: "MemoryTimeline::timeline",
            state: "before the first window".to_owned(),
            remedy: "train a step first",
        })?;
        newest.timeline()
    }

    /// All windows that are kept, oldest first.
    pub fn timelines(&self) -> impl Iterator<Item = Result<Timeline>> {
        self.windows.iter().map(Marks::timeline)
    }

    fn begin(&mut self) {
        let now = now();
        if let Some(last) = self.windows.back_mut() {
            last.end_at(now);
        }
        let former = if self.windows.len() < self.keep { None } else { self.windows.pop_front() };
        let mut marks = Marks::begin_again(former, now);
        match self.built.take() {
            Some(built) => {
                marks.know_since(built);
                self.labels.state_is(&now, marks.labelled(Role::OptimizerState));
            }
            None => self.labels.state(&mut marks, &now),
        }
        self.labels.model(&mut marks, &now, &self.parameters, &self.buffers);
        self.windows.push_back(marks.until_idle());
    }

    fn label_gradients(&mut self) {
        if let Some(marks) = self.windows.back_mut() {
            self.labels.gradients(marks, &self.parameters);
        }
    }
}

impl Strategy for MemoryTimeline {
    fn name(&self) -> String {
        "MemoryTimeline".to_owned()
    }

    fn identity(&self) -> Option<String> {
        None
    }

    fn place(&self) -> Place {
        Place::Watch
    }

    fn cost(&self, _model: &ModelSize) -> Cost {
        let bytes = (self.events as u64).saturating_mul(40);
        Cost::new("40 B × events, beside the counted memory", Some(bytes), "0.01 µs per allocation and free")
    }

    /// Outside every other one that watches.
    fn relation(&self, _other: &dyn Strategy) -> Relation {
        Relation::Before
    }

    fn prepare(&mut self, preparation: &mut Preparation<'_>) -> Result<()> {
        self.parameters = preparation.parameters.to_vec();
        self.buffers = preparation.buffers.to_vec();
        if self.ring.is_none() {
            self.ring = Some(Ring::open(self.events)?);
            self.built = Some(now().next);
        }
        Ok(())
    }

    fn forward(&mut self, mode: &mut Mode, next: NextForward<'_>) -> Result<()> {
        match mode {
            Mode::Train(micro) if micro.first() => self.begin(),
            Mode::Train(_) => {}
            Mode::Evaluate => {
                if let Some(last) = self.windows.back_mut() {
                    last.end_if_over();
                }
            }
        }
        next(mode)
    }

    fn backward(&mut self, pass: &mut Backward<'_>, next: NextBackward<'_>) -> Result<()> {
        next(pass)?;
        self.label_gradients();
        Ok(())
    }

    fn update(&mut self, phase: &mut UpdatePhase<'_>, next: NextUpdate<'_>) -> Result<Verdict> {
        if let Some(marks) = self.windows.back_mut() {
            self.labels.optimizer(marks, &self.parameters, phase.optimizer);
        }
        let verdict = next(phase);
        if let Some(last) = self.windows.back_mut() {
            last.is_over();
        }
        verdict
    }

    fn recover(&mut self, _failure: &Failure<'_>) -> Recovery {
        self.label_gradients();
        if let Some(last) = self.windows.back_mut() {
            last.is_over();
        }
        Recovery::Window
    }
}
