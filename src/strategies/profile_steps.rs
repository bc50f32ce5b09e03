//! Profiles a few steps of a run by libtorch's own profiler: what each operator took in time and
//! in memory.
//!
//! *Cost*: per operator with one allocation and one free about 0.7 µs while it records, 15 µs at
//! the end of the last step, and 6 kB of the C heap, not counted, until the stack is dropped
//! (`cargo test --test memory_profiler -- --ignored --nocapture`). Nothing before and after.
//!
//! *When it acts*: around everything else, from the first forward of step `wait` to the end of the
//! update of step `wait + active - 1`, counted from `build()` and from 0. What the driver does
//! after that update (gradients are dropped) is not in it; evaluation between these steps is. It
//! changes no value.
//!
//! *Limits*: a step that fails ends the recording, and the next window begins it anew. Of the
//! thread that trains and of the threads of its backwards everything is seen, of others nothing;
//! a stack that changes threads meanwhile loses the profile. One profile is recorded at a time
//! in a process: a step that should begin another one is an error.
//!
//! ```
//! use memfit::{Loss, Stack, optim::{AdamW, AdamWConfig}, strategies::ProfileSteps};
//! use memfit::tch::{nn, nn::Module, Device, Kind, Tensor};
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let model = nn::linear(vs.root(), 64, 64, Default::default());
//! let mut training =
//!     Stack::of(&vs, AdamW::new(&vs, AdamWConfig::default())?).with(ProfileSteps::new(1, 2)).build()?;
//! let x = Tensor::ones([8, 64], (Kind::Float, Device::Cpu));
//! for _ in 0..3 {
//!     let _ = training.step_with(|| Ok(Loss::of(model.forward(&x).square().mean(Kind::Float))))?;
//! }
//! let profile = training.strategy::<ProfileSteps>().map(ProfileSteps::profile).unwrap()?;
//! assert_eq!(profile.operator("aten::linear").map(|linear| linear.calls), Some(2));
//! println!("{profile}");
//! # Ok::<(), memfit::Error>(())
//! ```

use std::any::Any;

use super::MemoryTimeline;
use crate::error::{Error, Result};
use crate::memory::{Profile, Profiler, ProfilerSession};
use crate::step::{
    Backward, Conflict, Cost, Failure, Mode, ModelSize, NextBackward, NextForward, NextUpdate, Place,
    Preparation, Recovery, Relation, Strategy, UpdatePhase, Verdict,
};

/// Profiles steps `wait..wait + active` once. See the [module](self).
#[derive(Debug)]
pub struct ProfileSteps {
    wait: u64,
    active: u64,
    profiler: Profiler,
    /// Windows that came to their end.
    ended: u64,
    /// Whether a window has begun and not ended.
    open: bool,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Waiting,
    /// So many windows are in it.
    Recording(ProfilerSession, u64),
    Done(Profile),
    Lost(Error),
}

impl ProfileSteps {
    /// Profiles the `active` steps that follow the first `wait` ones; at least one.
    pub fn new(wait: u64, active: u64) -> Self {
        let profiler = Profiler::new();
        Self { wait, active, profiler, ended: 0, open: false, stage: Stage::Waiting }
    }

    /// Records what this one says.
    pub fn profiler(mut self, profiler: Profiler) -> Self {
        self.profiler = profiler;
        self
    }

    /// The profile.
    ///
    /// # Errors
    /// [`Error::CallOrder`] before the last of its steps, and where it could not be ended.
    pub fn profile(&self) -> Result<&Profile> {
        let state = match &self.stage {
            Stage::Done(profile) => return Ok(profile),
            Stage::Lost(error) => format!("after the profile was lost: {error}"),
            _ => format!("after {} steps of {}", self.ended, self.wait.saturating_add(self.active)),
        };
        let remedy = "train on; keep a stack that is profiled on one thread";
        Err(Error::CallOrder { call: "ProfileSteps::profile", state, remedy })
    }

    fn begin(&mut self) -> Result<()> {
        if self.open {
            // One that was discarded has left a part of itself in the recording.
            self.abandon();
        }
        self.open = true;
        if matches!(self.stage, Stage::Waiting) && self.ended >= self.wait {
            self.stage = Stage::Recording(ProfilerSession::start(self.profiler)?, 0);
        }
        Ok(())
    }

    fn abandon(&mut self) {
        if matches!(self.stage, Stage::Recording(..)) {
            self.stage = Stage::Waiting;
        }
    }

    /// Runs a phase. Meanwhile the recording is not in `self`, so that an error or a panic ends
    /// it.
    fn during<T>(&mut self, phase: impl FnOnce() -> Result<T>) -> Result<T> {
        if !matches!(self.stage, Stage::Recording(..)) {
            return phase();
        }
        let recording = std::mem::replace(&mut self.stage, Stage::Waiting);
        let value = phase()?;
        self.stage = recording;
        Ok(value)
    }

    fn end(&mut self) {
        self.open = false;
        self.ended += 1;
        self.stage = match std::mem::replace(&mut self.stage, Stage::Waiting) {
            Stage::Recording(session, windows) if windows + 1 < self.active => {
                Stage::Recording(session, windows + 1)
            }
            // Parameters have moved: nothing may fail any more.
            Stage::Recording(session, _) => session.stop().map_or_else(Stage::Lost, Stage::Done),
            other => other,
        };
    }
}

impl Strategy for ProfileSteps {
    fn name(&self) -> String {
        format!("ProfileSteps::new({}, {})", self.wait, self.active)
    }

    fn identity(&self) -> Option<String> {
        None
    }

    fn place(&self) -> Place {
        Place::Watch
    }

    fn cost(&self, _model: &ModelSize) -> Cost {
        Cost::new(
            "6 kB × operators of the steps it profiles, beside the counted memory",
            None,
            "0.7 µs per operator of these steps, 15 µs at their end",
        )
    }

    /// Outside every other one that watches but the timeline.
    fn relation(&self, other: &dyn Strategy) -> Relation {
        if (other as &dyn Any).is::<MemoryTimeline>() { Relation::Unknown } else { Relation::Before }
    }

    fn conflict(&self, other: &dyn Strategy) -> Option<Conflict> {
        (other as &dyn Any).is::<Self>().then(|| {
            Conflict::new(
                "libtorch has one profiler",
                "keep one, with as many steps as both; a Profiler of your own records other stretches",
            )
        })
    }

    fn prepare(&mut self, _preparation: &mut Preparation<'_>) -> Result<()> {
        if self.active == 0 {
            return Err(Error::config("ProfileSteps::new", "`active` must be at least 1 step"));
        }
        Ok(())
    }

    fn forward(&mut self, mode: &mut Mode, next: NextForward<'_>) -> Result<()> {
        match mode {
            Mode::Train(micro) if micro.first() => self.begin()?,
            Mode::Train(_) => {}
            Mode::Evaluate => return next(mode),
        }
        self.during(|| next(mode))
    }

    fn backward(&mut self, pass: &mut Backward<'_>, next: NextBackward<'_>) -> Result<()> {
        self.during(|| next(pass))
    }

    fn update(&mut self, phase: &mut UpdatePhase<'_>, next: NextUpdate<'_>) -> Result<Verdict> {
        let verdict = self.during(|| next(phase))?;
        self.end();
        Ok(verdict)
    }

    fn recover(&mut self, _failure: &Failure<'_>) -> Recovery {
        self.window_dropped();
        Recovery::Window
    }

    /// Also one that was only tried: nobody would end the recording.
    fn window_dropped(&mut self) {
        self.open = false;
        self.abandon();
    }
}
