//! One micro-batch of a window: forward and backward.

use tch::Tensor;

use super::finals::{Event, gradient_use};
use super::{Stack, never, phases, twice};
use crate::error::{Error, Result};
use crate::ffi;
use crate::memory::{PeakScope, Phase};
use crate::step::{
    Backward, DataPosition, GradientUse, InsideStep, Loss, MicroBatch, Mode, StepOutcome, Update, WindowRule,
};

/// A window that has begun.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) rule: WindowRule,
    pub(super) done: usize,
    /// Tokens of its batches, as `Windows` counts them.
    pub(super) counted: u64,
    /// n₀, from the first micro-batch whose weight is not 0; 0 before it.
    pub(super) first_weight: f64,
    /// Σn.
    pub(super) tokens: f64,
    /// What strategies multiply the loss by, all through the window.
    pub(super) scale: f64,
    /// Σ of the micro-batches' summed losses, on the device.
    pub(super) total: Option<Tensor>,
    /// How far the data was consumed when it began.
    pub(super) consumed_before: Option<DataPosition>,
    pub(super) peak: PeakScope,
}

/// Where in its window a micro-batch is, as far as the caller knows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) last: Option<bool>,
    pub(super) short: bool,
    pub(super) of: Option<usize>,
}

/// A failed micro-batch.
pub(super) struct Failed {
    pub(super) error: Error,
    pub(super) in_backward: bool,
}

impl Open {
    pub(super) fn new(rule: WindowRule, consumed_before: Option<DataPosition>, peak: PeakScope) -> Self {
        Self {
            rule,
            done: 0,
            counted: 0,
            first_weight: 0.0,
            tokens: 0.0,
            scale: 1.0,
            total: None,
            consumed_before,
            peak,
        }
    }

    pub(super) fn done(&self) -> usize {
        self.done
    }
}

impl Stack {
    /// One micro-batch. After an error the graph is gone and nothing else is put back yet,
    /// unless it came from the update.
    pub(super) fn run(
        &mut self,
        place: Place,
        loss_of: impl FnOnce() -> Result<Loss>,
    ) -> Result<StepOutcome, Failed> {
        let before = |error| Failed { error, in_backward: false };
        self.check_health().map_err(before)?;
        if self.open.is_none() {
            self.begin().map_err(before)?;
        } else {
            self.micro_start.remember(&self.model.buffers).map_err(before)?;
        }
        let index = self.open.as_ref().map_or(0, Open::done);
        let micro =
            MicroBatch { index, last: place.last, short: place.short, of: place.of, position: self.position };
        let loss = self.forward(micro, loss_of).map_err(before)?;
        self.check_fits(micro, &loss).map_err(before)?;
        let total = self.backward(micro, &loss).map_err(|error| Failed { error, in_backward: true })?;
        drop(loss);
        let Some(open) = &mut self.open else { return Err(before(never())) };
        open.done += 1;
        open.total = total;
        let full = matches!(open.rule, WindowRule::Tokens(tokens) if open.tokens >= tokens as f64);
        self.clock.advance(open.done);
        if place.last == Some(true) || (place.last.is_none() && full) {
            return self.finish().map_err(before);
        }
        Ok(StepOutcome::Accumulating { done: open.done, of: place.of })
    }

    pub(super) fn begin(&mut self) -> Result<()> {
        self.zero_grad();
        self.window_start.remember(&self.model.buffers)?;
        let peak = PeakScope::new(self.model.device)?;
        let rule = self.rule();
        let wanted = gradient_use(self.optimizer.as_ref(), &self.strategies);
        if wanted.changes_in_backward() {
            // Not in a hook: parameters look frozen while an offload allocates.
            self.optimizer.allocate()?;
        }
        if wanted != GradientUse::AtUpdate {
            self.finals.begin(self.optimizer.as_ref())?;
        }
        self.open = Some(Open::new(rule, self.consumed, peak));
        Ok(())
    }

    pub(super) fn forward(
        &mut self,
        micro: MicroBatch,
        loss_of: impl FnOnce() -> Result<Loss>,
    ) -> Result<Loss> {
        let _phase = Phase::Forward.enter_step(micro.position.windows);
        let mut loss_of = Some(loss_of);
        let mut loss = None;
        phases::caught("forward", || {
            let _inside = InsideStep::enter();
            phases::forward(&mut self.strategies, &mut Mode::Train(micro), &mut || {
                let loss_of = loss_of.take().ok_or_else(twice)?;
                loss = Some(phases::caught("forward", loss_of)?);
                Ok(())
            })
        })?;
        let loss = loss.ok_or_else(never)?;
        loss.check()?;
        if !loss.is_empty() && !loss.tensor().requires_grad() {
            let problem = "it has no graph: is every parameter frozen, or grad mode off?";
            return Err(Error::config("Loss", problem));
        }
        let alone = micro.first() && (micro.last == Some(true));
        if loss.weight().is_none() && !alone {
            let problem = "Loss::of has no weight: in a window of several micro-batches use Loss::mean(t, n)";
            return Err(Error::config("Loss", problem));
        }
        Ok(loss)
    }

    /// Refuses, before anything joins the optimizer's state, a micro-batch that it cannot add up.
    fn check_fits(&self, micro: MicroBatch, loss: &Loss) -> Result<()> {
        if gradient_use(self.optimizer.as_ref(), &self.strategies) != GradientUse::EachMicroBatch {
            return Ok(());
        }
        let weight = loss.weight().unwrap_or(1.0);
        let first = self.open.as_ref().filter(|_| !micro.first()).map_or(weight, |open| open.first_weight);
        let share = if loss.is_empty() { 0.0 } else { weight / first };
        self.finals.check_micro(micro, share)
    }

    /// Backward of one micro-batch; returns the window's total of losses so far. Where nothing
    /// in it counts, strategies have their phase with nothing in it.
    pub(super) fn backward(&mut self, micro: MicroBatch, loss: &Loss) -> Result<Option<Tensor>> {
        let _phase = Phase::Backward.enter_step(micro.position.windows);
        let open = self.open.as_mut().ok_or_else(never)?;
        let weight = loss.weight().unwrap_or(1.0);
        let empty = loss.is_empty();
        let first = if open.first_weight == 0.0 { weight } else { open.first_weight };
        let seed = if empty { 1.0 } else { loss.seed(first) };
        let wanted = gradient_use(self.optimizer.as_ref(), &self.strategies);
        let told = told(wanted, micro, (open.tokens + weight) / first).filter(|_| !empty);
        let mut pass = Backward { loss: loss.tensor(), seed, micro, parameters: &self.model.parameters };
        let mut scale = open.scale;
        let total = phases::caught("backward", || {
            let _inside = InsideStep::enter();
            let total = match &open.total {
                total if empty => total.as_ref().map(Tensor::shallow_clone),
                None => Some(loss.total()?),
                Some(total) => Some(total.f_add(&loss.total()?)?),
            };
            phases::backward(&mut self.strategies, &mut pass, &mut |pass| {
                scale = pass.seed / seed;
                let backward = || match empty {
                    true => Ok(()),
                    false => ffi::grad::backward(pass.loss, pass.seed, ffi::grad::Graph::Free),
                };
                let Some(weight) = told else { return backward() };
                let update = Update { divisor: weight * scale, position: micro.position };
                self.finals.during(&mut self.optimizer, Event { micro, update }, backward)
            })?;
            Ok(total)
        })?;
        if !micro.first() && scale != open.scale {
            let state = format!("with a loss scale of {scale} in a window begun with {}", open.scale);
            let remedy = "change a loss scale between windows only";
            return Err(Error::CallOrder { call: "Strategy::backward", state, remedy });
        }
        open.scale = scale;
        open.first_weight = first;
        open.tokens += weight;
        Ok(total)
    }

    pub(super) fn rule(&self) -> WindowRule {
        let rule = self.strategies.iter().find_map(|strategy| strategy.window());
        let rule = rule.unwrap_or(WindowRule::Micros(1));
        self.clock.set_rule(rule);
        self.clock.set_whole(self.optimizer.gradients() == GradientUse::EachMicroBatch);
        rule
    }

    pub(super) fn zero_grad(&mut self) {
        ffi::grad::drop_all(self.model.parameters.iter().map(|parameter| &parameter.tensor));
    }
}

/// What gradients of this backward are divided by, where the optimizer hears of them.
fn told(wanted: GradientUse, micro: MicroBatch, weight: f64) -> Option<f64> {
    match (wanted, micro.of) {
        (GradientUse::AtUpdate, _) => None,
        (GradientUse::EachMicroBatch, Some(of)) if of > 1 => Some(of as f64),
        _ => (micro.last == Some(true)).then_some(weight),
    }
}
