//! What a step will take, told before the first one.

use tch::Device;

use super::max_batch::micro_of;
use super::stand_in::StandIn;
use super::{Stack, never, phases};
use crate::error::{Error, Result};
use crate::memory::{self, Estimate, EstimateError, PeakScope, Phase, Recording, Role, Trial, alike};
use crate::step::{Batch, Loss, RowBytes};

/// The last estimate, and how far off it was.
#[derive(Debug, Default)]
pub(super) struct Estimated {
    peak: Option<u64>,
    error: Option<EstimateError>,
}

impl Estimated {
    /// A step was taken.
    pub(super) fn measured(&mut self, peak: u64) {
        if let Some(predicted) = self.peak.take() {
            let error = EstimateError::new(predicted, peak);
            tracing::info!(predicted, measured = peak, "the estimate, after the first step: {error}");
            self.error = Some(error);
        }
    }
}

impl Stack {
    /// Tells what a step will take whose micro-batches have `rows` rows like those of `batch`:
    /// weights, gradients and states exactly, activations and the peak from forward and backward
    /// passes over the first row, and over the first two where the batch has them, as a fixed
    /// part and a part per row; over more where few do not tell the rest. `docs/memory-model.md` has the model, its limits and its errors.
    ///
    /// The passes run as in training, on top of the first one's gradients too where windows have
    /// several micro-batches. Nothing is updated: under an optimizer that updates in backward,
    /// gradients go as they would, and parameters and state stay. Strategies' state does not
    /// change; buffers and generators are put back, gradients of a skipped step are dropped, as a
    /// window's start would. What the optimizer has yet to allocate, for parameters that were
    /// unfrozen since, is allocated.
    ///
    /// The first step taken afterwards logs how far off the peak was, and
    /// [`Stack::estimate_error`] tells it.
    ///
    /// # Errors
    /// An open window; a poisoned stack; a batch without rows, or whose first rows have weight 0;
    /// `rows` below 1; those of `loss_of`, of libtorch and of the strategies, out of memory for
    /// one row among them: everything is put back then, too.
    ///
    /// ```
    /// use memfit::{Loss, Stack, optim::{AdamW, AdamWConfig}};
    /// use memfit::tch::{nn, nn::Module, Device, Kind, Tensor};
    ///
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let model = nn::linear(vs.root(), 256, 256, Default::default());
    /// let mut training = Stack::of(&vs, AdamW::new(&vs, AdamWConfig::default())?).build()?;
    /// let loss = |x: &Tensor| Ok(Loss::mean(model.forward(x).square().mean(Kind::Float), x.size()[0]));
    /// let batch = Tensor::ones([2, 256], (Kind::Float, Device::Cpu));
    /// let estimate = training.estimate(&batch, 64, loss)?;
    /// assert_eq!(estimate.states(), (256 * 256 + 256) * 16); // weights, two moments, gradients
    /// println!("{estimate}");
    /// let batch = Tensor::ones([64, 256], (Kind::Float, Device::Cpu));
    /// assert!(training.step_with(|| loss(&batch))?.stepped());
    /// println!("{}", training.estimate_error().unwrap());
    /// # Ok::<(), memfit::Error>(())
    /// ```
    pub fn estimate<B: Batch>(
        &mut self,
        batch: &B,
        rows: i64,
        mut loss_of: impl FnMut(&B) -> Result<Loss>,
    ) -> Result<Estimate> {
        const CALL: &str = "Stack::estimate";
        self.check_health()?;
        self.refuse_open(CALL)?;
        if batch.rows() < 1 || rows < 1 {
            return Err(Error::config(CALL, "a batch, and a micro-batch, have at least one row"));
        }
        self.allocate()?;
        let trials = self.trials(batch, rows, &mut loss_of)?;
        let estimate = self.put_together(rows, &trials)?;
        self.estimated = Estimated { peak: Some(estimate.peak), error: None };
        Ok(estimate)
    }

    /// How far off the last estimate's peak was; `None` until a step was taken after it.
    pub fn estimate_error(&self) -> Option<EstimateError> {
        self.estimated.error
    }

    /// Runs as few rows as tell the rest.
    fn trials<B: Batch>(
        &mut self,
        batch: &B,
        rows: i64,
        loss_of: &mut impl FnMut(&B) -> Result<Loss>,
    ) -> Result<Vec<Trial>> {
        let there = batch.rows();
        if self.model.device != Device::Cpu {
            // In their first run libraries take work space, and keep it.
            self.trial(batch, 1, loss_of)?;
        }
        if self.strategies().any(|strategy| strategy.row_bytes() == RowBytes::Threshold) {
            let mut most = rows.min(there);
            loop {
                match self.largest_trials(rows, most, batch, loss_of) {
                    Err(error) if error.is_out_of_memory() && most > 1 => most /= 2,
                    ran => return ran,
                }
            }
        }
        if rows <= there.min(2) {
            return Ok(vec![self.trial(batch, rows, loss_of)?]);
        }
        let mut trials = vec![self.trial(batch, 1, loss_of)?];
        if there >= 2 {
            trials.push(self.trial(batch, 2, loss_of)?);
        }
        // Operators may do with one row what they do with no other number.
        if there >= 3 && !alike(&trials[0], &trials[1]) {
            trials.push(self.trial(batch, 3, loss_of)?);
        }
        let told = matches!(&trials[..], [.., a, b] if alike(a, b));
        let half = there.min(rows / 2);
        if half > 3 && !told {
            // The highest moment of a pass is another one for more rows.
            match self.largest_trials(rows, half, batch, loss_of) {
                Ok(larger) => trials.extend(larger),
                Err(error) if error.is_out_of_memory() => {
                    tracing::debug!(%error, "half of the rows do not fit")
                }
                Err(error) => return Err(error),
            }
        }
        Ok(trials)
    }

    /// Runs as many rows as there are, where few do not tell the rest.
    fn largest_trials<B: Batch>(
        &mut self,
        rows: i64,
        most: i64,
        batch: &B,
        loss_of: &mut impl FnMut(&B) -> Result<Loss>,
    ) -> Result<Vec<Trial>> {
        let from = if most == rows || most == 1 { most } else { most - 1 };
        (from..=most).map(|few| self.trial(batch, few, loss_of)).collect()
    }

    /// Runs one window of so many rows, without its update, and puts everything back.
    fn trial<B: Batch>(
        &mut self,
        batch: &B,
        rows: i64,
        loss_of: &mut impl FnMut(&B) -> Result<Loss>,
    ) -> Result<Trial> {
        let part = batch.take_rows(0..rows)?;
        let recording = self.watch();
        let stand_in = Box::new(StandIn::of(self.optimizer.as_ref())?);
        let before = memory::stats(self.model.device)?.current;
        let (activations, after) = (0, before);
        let trial = Trial { rows, before, activations, after, passes: Vec::new(), timeline: None };
        let optimizer = std::mem::replace(&mut self.optimizer, stand_in);
        let ran = phases::caught("an estimate", || {
            self.begin()?;
            self.passes(trial, recording, || loss_of(&part))
        });
        self.optimizer = optimizer;
        if self.open.is_some() {
            self.back_to_window_start().map_err(|error| self.poison(error))?;
        }
        // Sums that a strategy keeps on tensors of its own.
        self.optimizer.zero_grad();
        ran
    }

    fn passes(
        &mut self,
        mut trial: Trial,
        mut recording: Option<Recording>,
        mut loss_of: impl FnMut() -> Result<Loss>,
    ) -> Result<Trial> {
        let device = self.model.device;
        let live = || memory::stats(device).map(|stats| stats.current);
        let begun = live()?;
        let several = self.has_windows();
        for index in 0..=usize::from(several) {
            let micro = micro_of(index, several, self.position);
            let peak = PeakScope::new(device)?;
            let loss = self.forward(micro, &mut loss_of)?;
            if loss.is_empty() {
                let problem = "the batch's first rows have weight 0: give rows that count";
                return Err(Error::config("Stack::estimate", problem));
            }
            if index == 0 {
                trial.activations = live()? as i64 - begun as i64;
            }
            trial.passes.push((Phase::Forward, peak.peak()));
            let peak = PeakScope::new(device)?;
            let total = self.backward(micro, &loss)?;
            drop(loss);
            trial.passes.push((Phase::Backward, peak.peak()));
            let open = self.open.as_mut().ok_or_else(never)?;
            (open.total, open.done) = (total, open.done + 1);
            if let Some(recording) = &mut recording {
                let own = self.optimizer.groups().iter().flat_map(|group| group.parameters());
                recording.label_gradients(self.model.parameters.iter().chain(own).map(|one| &one.tensor));
            }
        }
        trial.after = live()?;
        trial.timeline = recording.and_then(|recording| recording.finish().ok());
        Ok(trial)
    }

    /// A recording that knows what is there, where there can be one.
    fn watch(&mut self) -> Option<Recording> {
        if self.model.device != Device::Cpu {
            return None;
        }
        let mut recording = Recording::start().ok()?;
        recording.label(Role::Parameters, self.model.parameters.iter().map(|one| &one.tensor));
        recording.label(Role::Buffers, self.model.buffers.iter().map(|one| &one.tensor));
        recording.label(Role::OptimizerState, self.masters().iter().map(|one| &one.tensor));
        for (group, index) in self.places() {
            let state = self.optimizer.state_of(group, index);
            recording.label(Role::OptimizerState, state.into_iter().map(|tensor| &*tensor));
        }
        Some(recording)
    }
}
