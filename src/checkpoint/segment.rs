use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tch::Tensor;

use super::quiet;
use super::shared::Shared;
use super::tensors::{Tensors, list};
use crate::error::{Error, Result};
use crate::ffi::recompute::{self, Forward, GradMode, Options};
use crate::ffi::{Arguments, Closure};
use crate::memory;
use crate::saved::Link;
use crate::step::InsideStep;

/// When a recompute ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EarlyStop {
    /// With the last tensor that backward needs: what follows it in the segment is not
    /// computed again.
    #[default]
    On,
    /// With the segment: for a segment under about 100 µs, or to see all of it run.
    Off,
}

/// Whether a recompute's values are compared with forward's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Check {
    /// Number, shape, dtype and device of the saved tensors.
    #[default]
    Metadata,
    /// And a checksum of their bytes.
    Values,
}

/// A stretch of the forward pass that is computed again in backward: its settings and its
/// counter. Clones share the counter.
#[derive(Clone, Debug)]
pub struct Segment {
    name: Arc<CString>,
    check: Check,
    early_stop: EarlyStop,
    recomputes: Arc<AtomicU64>,
}

impl Segment {
    /// A segment whose errors call it by this name.
    pub fn named(name: impl Into<String>) -> Self {
        let name = CString::new(name.into().replace('\0', " ")).unwrap_or_default();
        Self {
            name: Arc::new(name),
            check: Check::default(),
            early_stop: EarlyStop::default(),
            recomputes: Arc::default(),
        }
    }

    /// The same segment under another name.
    pub(super) fn renamed(self, name: impl Into<String>) -> Self {
        Self { name: Self::named(name).name, ..self }
    }

    /// Compares the bytes of every saved tensor between forward and recompute, by a checksum
    /// computed on the tensor's device: 8 bytes and one pass over each tensor, both times, and
    /// on an accelerator one wait per saved tensor.
    pub fn checked(mut self) -> Self {
        self.check = Check::Values;
        self
    }

    /// Sets when a recompute ends.
    pub fn early_stop(mut self, early_stop: EarlyStop) -> Self {
        self.early_stop = early_stop;
        self
    }

    /// The name.
    pub fn name(&self) -> &str {
        self.name.to_str().unwrap_or_default()
    }

    /// How many recomputes have run.
    pub fn recomputes(&self) -> u64 {
        self.recomputes.load(Ordering::Relaxed)
    }

    /// Runs `f` as a segment over `inputs`; see [`checkpoint`](super::checkpoint).
    ///
    /// # Errors
    /// A panic in `f`, or a device whose generator cannot be captured.
    pub fn run<M, I, O, F>(&self, module: &Shared<M>, inputs: &I, f: F) -> Result<O>
    where
        M: Send + 'static,
        I: Tensors + Send + 'static,
        O: Tensors,
        F: Fn(&M, &I) -> O + Clone + Send + 'static,
    {
        self.try_run(module, inputs, move |module, inputs| Ok(f(module, inputs)))
    }

    /// As [`Segment::run`], for an `f` that may fail.
    ///
    /// # Errors
    /// Those of `f`, and of [`Segment::run`].
    pub fn try_run<M, I, O, F>(&self, module: &Shared<M>, inputs: &I, f: F) -> Result<O>
    where
        M: Send + 'static,
        I: Tensors + Send + 'static,
        O: Tensors,
        F: Fn(&M, &I) -> Result<O> + Clone + Send + 'static,
    {
        self.run_through(None, module, inputs, f)
    }

    /// Runs with a link that sees the inputs alone.
    pub(super) fn run_through<M, I, O, F>(
        &self,
        link: Option<&Link>,
        module: &Shared<M>,
        inputs: &I,
        f: F,
    ) -> Result<O>
    where
        M: Send + 'static,
        I: Tensors + Send + 'static,
        O: Tensors,
        F: Fn(&M, &I) -> Result<O> + Clone + Send + 'static,
    {
        let _segment = memory::segment(self.name());
        let held = module.lock()?;
        if !recompute::wanted() {
            return caught(|| f(&held, inputs), IN_FORWARD);
        }
        quiet::install();
        let forward = {
            let _seen = link.map(Link::push);
            self.begin(module.clone(), inputs, f.clone())?
        };
        let outputs = caught(|| f(&held, inputs), IN_FORWARD)?;
        let saved = list(&outputs);
        forward.end(&saved.iter().collect::<Vec<_>>())?;
        Ok(outputs)
    }

    fn begin<M, I, O, F>(&self, module: Shared<M>, inputs: &I, f: F) -> Result<Forward>
    where
        M: Send + 'static,
        I: Tensors + Send + 'static,
        F: Fn(&M, &I) -> Result<O> + Send + 'static,
    {
        let mut handles = Vec::new();
        let skeleton = inputs.map_tensors(&mut |tensor| {
            handles.push(tensor.shallow_clone());
            Tensor::new()
        });
        let recomputes = self.recomputes.clone();
        let name = self.name.clone();
        let closure = Closure::new(move |args: &mut Arguments<'_>| {
            let _phase = memory::recompute(name.to_str().unwrap_or_default());
            let mut tensors = args.inputs().into_iter();
            let inputs = skeleton.map_tensors(&mut |_| tensors.next().unwrap_or_default());
            let held = module.lock()?;
            recomputes.fetch_add(1, Ordering::Relaxed);
            recomputed(|| f(&held, &inputs).map(drop))
        });
        let options = Options {
            segment: &self.name,
            checked: self.check == Check::Values,
            early_stop: self.early_stop == EarlyStop::On,
        };
        Forward::begin(&handles.iter().collect::<Vec<_>>(), closure, &options)
    }
}

const IN_FORWARD: &str = "a checkpointed segment";
const IN_RECOMPUTE: &str = "the recompute of a segment";

/// Runs a segment, its panics caught. One that leaves an outer recompute passes on.
pub(super) fn caught<R>(f: impl FnOnce() -> Result<R>, place: &'static str) -> Result<R> {
    let _inside = InsideStep::enter();
    let _mode = GradMode::hold();
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(outcome) => outcome,
        Err(payload) if recompute::leaving() => resume_unwind(payload),
        Err(payload) => Err(Error::from_panic(payload, place)),
    }
}

/// Runs a recompute. Leaving early is what C++ asked for; it also reports what it found.
fn recomputed(f: impl FnOnce() -> Result<()>) -> Result<()> {
    let _inside = InsideStep::enter();
    let outcome = catch_unwind(AssertUnwindSafe(f));
    if recompute::leaving() {
        return Ok(());
    }
    outcome.unwrap_or_else(|payload| Err(Error::from_panic(payload, IN_RECOMPUTE)))
}
