//! The update that ends a window.

use super::window::Open;
use super::{Health, Stack, never, phases};
use crate::error::{Error, Result};
use crate::ffi;
use crate::optim::{Optimizer, gradients};
use crate::step::{Closing, Measure, Numbers, StepOutcome, Update, UpdatePhase, Verdict};

impl Stack {
    /// The update. After an error the window is gone and, unless it is poisoned, nothing
    /// moved and buffers and generators are as at the window's start.
    pub(super) fn finish(&mut self) -> Result<StepOutcome> {
        let open = self.open.take().ok_or_else(never)?;
        self.clock.advance(0);
        match phases::caught("update", || self.update(&open)) {
            Ok((verdict, grad_norm, lr)) => self.count(open, verdict, grad_norm, lr),
            Err(error) => {
                if matches!(error, Error::Poisoned { .. }) {
                    self.health = Health::Poisoned;
                } else {
                    self.window_start.go_back(&self.model.buffers)?;
                }
                self.clock.broke(0);
                Err(error)
            }
        }
    }

    fn update(&mut self, open: &Open) -> Result<(Verdict, Option<f64>, Vec<f64>)> {
        let optimizer = self.optimizer.as_mut();
        let strategies = &mut self.strategies;
        let parameters = &self.model.parameters;
        for strategy in strategies.iter_mut() {
            strategy.close(&mut Closing { optimizer: &mut *optimizer, parameters })?;
        }
        let weight = open.tokens / open.first_weight;
        let divisor = weight * open.scale;
        let mut numbers =
            Numbers { tokens: open.tokens, weight, scale: open.scale, squared_norm: None, non_finite: None };
        let wanted = strategies.iter().map(|strategy| strategy.measures()).max().unwrap_or(Measure::Nothing);
        measure(wanted, optimizer, divisor, &mut numbers)?;
        for strategy in strategies.iter_mut() {
            strategy.agree(&mut numbers)?;
        }
        let mut phase = UpdatePhase {
            update: Update { divisor, position: self.position },
            numbers,
            optimizer,
            parameters,
            buffers: &self.model.buffers,
        };
        let mut lr = Vec::new();
        let verdict = phases::update(strategies, &mut phase, &mut |phase| {
            lr = phase.optimizer.groups().iter().map(|group| group.lr).collect();
            move_parameters(phase)
        })?;
        Ok((verdict, numbers.squared_norm.map(f64::sqrt), lr))
    }

    fn count(
        &mut self,
        open: Open,
        verdict: Verdict,
        grad_norm: Option<f64>,
        lr: Vec<f64>,
    ) -> Result<StepOutcome> {
        self.position.windows += 1;
        self.position.micro_batches += open.done as u64;
        if let Verdict::Skipped(reason) = verdict {
            return Ok(StepOutcome::Skipped { reason });
        }
        self.position.steps += 1;
        self.zero_grad();
        let total = open.total.ok_or_else(never)?;
        let loss = if open.tokens == 1.0 { total } else { total.f_div_scalar(open.tokens)? };
        let scale = (open.scale != 1.0).then_some(open.scale);
        let (tokens, peak) = (open.tokens, open.peak.peak());
        Ok(StepOutcome::Stepped { loss, grad_norm, lr, scale, tokens, peak })
    }
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
    let want = if wanted == Measure::Norm { ffi::multi::Want::Norm } else { ffi::multi::Want::Finite };
    let measured = ffi::multi::measure(&gradients(optimizer), 1.0 / divisor, want)?;
    numbers.non_finite = Some(measured.non_finite);
    if wanted == Measure::Norm {
        numbers.squared_norm = Some(measured.squared_norm);
    }
    Ok(())
}

fn move_parameters(phase: &mut UpdatePhase<'_>) -> Result<Verdict> {
    if !phase.optimizer.folds_divisor() && phase.update.divisor != 1.0 {
        for mut grad in gradients(phase.optimizer) {
            let _ = grad.f_div_scalar_(phase.update.divisor)?;
        }
        phase.update.divisor = 1.0;
    }
    phase.optimizer.step(&phase.update)?;
    Ok(Verdict::Stepped)
}
