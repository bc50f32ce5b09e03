//! The update that ends a window.

use tch::{Device, Kind, Tensor};

use super::window::Open;
use super::{Stack, never, phases};
use crate::error::{Error, Result};
use crate::ffi;
use crate::memory::Phase;
use crate::optim::{Optimizer, gradients};
use crate::step::{Closing, Measure, Numbers, SkipReason, StepOutcome, Update, UpdatePhase, Verdict};

impl Stack {
    /// The update. After an error the window is gone and, unless it is poisoned, nothing
    /// moved and buffers and generators are as at the window's start.
    pub(super) fn finish(&mut self) -> Result<StepOutcome> {
        let _phase = Phase::Update.enter_step(self.position.windows);
        let open = self.open.take().ok_or_else(never)?;
        self.clock.advance(0);
        let mut moved = self.finals.changed();
        match phases::caught("update", || self.update(&open, &mut moved)) {
            Ok(ended) => {
                // What the next window is may depend on what this one came to.
                self.rule();
                Ok(self.count(&open, ended))
            }
            Err(error) => {
                self.clock.broke(0);
                self.consumed = open.consumed_before;
                match error {
                    Error::Poisoned { source } => Err(self.poison(*source)),
                    error if moved => Err(self.poison(error)),
                    error => match self.window_start.go_back(&self.model.buffers) {
                        Ok(()) => Err(error),
                        Err(error) => Err(self.poison(error)),
                    },
                }
            }
        }
    }

    fn update(&mut self, open: &Open, moved: &mut bool) -> Result<Ended> {
        // Allocated now: nothing may fail once a parameter has moved.
        let loss = mean_loss(open, self.model.device)?;
        let numbers = self.agreed(open)?;
        let mut phase = UpdatePhase {
            // What was agreed upon counts, not what was measured here.
            update: Update { divisor: numbers.weight * numbers.scale, position: self.position },
            numbers,
            optimizer: self.optimizer.as_mut(),
            parameters: &self.model.parameters,
            buffers: &self.model.buffers,
        };
        let mut lr = Vec::new();
        let early = *moved;
        let mut stepped_at_all = false;
        let verdict = phases::update(&mut self.strategies, &mut phase, &mut |phase| {
            if phase.numbers.tokens == 0.0 {
                return Ok(Verdict::Skipped(SkipReason::NoTokens));
            }
            lr = phase.optimizer.groups().iter().map(|group| group.lr).collect();
            self.finals.check_update(phase)?;
            divide(phase)?;
            // Until the optimizer says otherwise: it may panic half-way.
            *moved = true;
            let stepped = phase.optimizer.step(&phase.update);
            *moved = early || !matches!(&stepped, Err(error) if !matches!(error, Error::Poisoned { .. }));
            stepped_at_all = true;
            stepped.map(|()| Verdict::Stepped)
        })?;
        if early && !stepped_at_all {
            return Err(skipped_too_late());
        }
        let tokens = numbers.tokens;
        Ok(Ended { verdict, loss, grad_norm: numbers.squared_norm.map(f64::sqrt), lr, tokens })
    }

    /// The window's final gradients and numbers, as the strategies want and see them.
    fn agreed(&mut self, open: &Open) -> Result<Numbers> {
        let optimizer = self.optimizer.as_mut();
        for strategy in &mut self.strategies {
            strategy
                .close(&mut Closing { optimizer: &mut *optimizer, parameters: &self.model.parameters })?;
        }
        let weight = if open.tokens == 0.0 { 1.0 } else { open.tokens / open.first_weight };
        let mut numbers =
            Numbers { tokens: open.tokens, weight, scale: open.scale, squared_norm: None, non_finite: None };
        let wanted =
            self.strategies.iter().map(|strategy| strategy.measures()).max().unwrap_or(Measure::Nothing);
        measure(wanted, optimizer, weight * open.scale, &mut numbers)?;
        for strategy in &mut self.strategies {
            strategy.agree(&mut numbers)?;
        }
        Ok(numbers)
    }

    fn count(&mut self, open: &Open, ended: Ended) -> StepOutcome {
        self.position.windows += 1;
        self.position.micro_batches += open.done as u64;
        let Ended { verdict, loss, grad_norm, lr, tokens } = ended;
        if let Verdict::Skipped(reason) = verdict {
            return StepOutcome::Skipped { reason, split: None };
        }
        self.position.steps += 1;
        self.zero_grad();
        let scale = (open.scale != 1.0).then_some(open.scale);
        let peak = open.peak.peak();
        self.estimated.measured(peak);
        StepOutcome::Stepped { loss, grad_norm, lr, scale, tokens, peak, split: None }
    }
}

/// What an update came to.
struct Ended {
    verdict: Verdict,
    loss: Tensor,
    grad_norm: Option<f64>,
    lr: Vec<f64>,
    tokens: f64,
}

/// A strategy skipped an update of which parameters had moved already.
fn skipped_too_late() -> Error {
    Error::CallOrder {
        call: "Strategy::update",
        state: "and did not call next, after parameters moved in backward".to_owned(),
        remedy: "declare measures() in a strategy that skips, or use an optimizer that does not update in backward",
    }
}

/// The window's weighted mean loss, on the device; of nothing it is not a number.
fn mean_loss(open: &Open, device: Device) -> Result<Tensor> {
    let Some(total) = &open.total else {
        return Ok(Tensor::f_full([0i64; 0], f64::NAN, (Kind::Float, device))?);
    };
    if open.tokens == 1.0 { Ok(total.shallow_clone()) } else { Ok(total.f_div_scalar(open.tokens)?) }
}

fn measure(
    wanted: Measure,
    optimizer: &mut dyn Optimizer,
    divisor: f64,
    numbers: &mut Numbers,
) -> Result<()> {
    if wanted == Measure::Nothing {
        return Ok(());
    }
    let measured = ffi::multi::measure(&gradients(optimizer), 1.0 / divisor)?;
    numbers.non_finite = Some(measured.non_finite);
    if wanted == Measure::Norm {
        numbers.squared_norm = Some(measured.squared_norm);
    }
    Ok(())
}

/// Divides the gradients where the optimizer does not.
fn divide(phase: &mut UpdatePhase<'_>) -> Result<()> {
    if !phase.optimizer.folds_divisor() && phase.update.divisor != 1.0 {
        for mut grad in gradients(phase.optimizer) {
            let _ = grad.f_div_scalar_(phase.update.divisor)?;
        }
        phase.update.divisor = 1.0;
    }
    Ok(())
}
