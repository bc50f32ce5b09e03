//! The ways in: a micro-batch from `windows`, one of the caller's own loop, a whole batch;
//! and evaluation.

use std::borrow::Borrow;

use super::window::{Open, Place};
use super::windows::Micro;
use super::{Stack, never, phases, twice};
use crate::error::{Error, Result};
use crate::memory::Phase;
use crate::step::{Batch, GradientUse, InsideStep, Loss, Mode, Recovery, Split, StepOutcome, WindowRule};

impl Stack {
    /// Runs one micro-batch from [`Stack::windows`]: forward by `loss_of`, backward and, where
    /// the window ends, the update.
    ///
    /// # Errors
    /// A micro-batch out of its order; those of `loss_of`, of libtorch and of the strategies.
    /// The type's documentation tells what each failure leaves.
    pub fn step<B>(
        &mut self,
        micro: impl Borrow<Micro<B>>,
        loss_of: impl FnOnce(&B) -> Result<Loss>,
    ) -> Result<StepOutcome> {
        let micro = micro.borrow();
        let done = self.open.as_ref().map_or(0, Open::done);
        if micro.index != done {
            return Err(Error::CallOrder {
                call: "Stack::step",
                state: format!("with micro-batch {} of a window where {done} are done", micro.index),
                remedy: "step each item of windows() once, in order, or end the window with flush() or discard()",
            });
        }
        self.check_rule(micro.rule)?;
        let place = Place { last: Some(micro.last), short: micro.short, of: micro.of };
        let outcome = self.run(place, || loss_of(&micro.batch)).map_err(|failed| self.settle(failed))?;
        if let Some(open) = &mut self.open {
            open.counted = micro.tokens;
        }
        self.took(micro.data);
        Ok(outcome)
    }

    /// Refuses a micro-batch of a window whose length changed after it was looked at.
    fn check_rule(&self, looked_at: WindowRule) -> Result<()> {
        let now = self.open.as_ref().map_or_else(|| self.rule(), |open| open.rule);
        if now == looked_at {
            return Ok(());
        }
        Err(Error::CallOrder {
            call: "Stack::step",
            state: format!(
                "with a micro-batch of a window by {looked_at:?}, where windows are by {now:?} since"
            ),
            remedy: "take each item of windows() after the step of the one before",
        })
    }

    /// Runs one micro-batch of a loop of your own. Where windows have more than one, end the
    /// loop with [`Stack::flush`]. What it consumed of the data is yours to tell, with
    /// [`Stack::consumed`].
    ///
    /// # Errors
    /// As [`Stack::step`].
    pub fn step_with(&mut self, loss_of: impl FnOnce() -> Result<Loss>) -> Result<StepOutcome> {
        let done = self.open.as_ref().map_or(0, Open::done);
        let place = match self.open.as_ref().map_or_else(|| self.rule(), |open| open.rule) {
            WindowRule::Micros(of) => {
                Place { last: (done + 1 >= of).then_some(true), short: false, of: Some(of) }
            }
            WindowRule::Tokens(_) => Place { last: None, short: false, of: None },
        };
        self.run(place, loss_of).map_err(|failed| self.settle(failed))
    }

    /// Trains on a whole batch as one window, split into micro-batches as the strategies say.
    ///
    /// `loss_of` runs once per micro-batch, and again for rows it has seen where a strategy runs
    /// the window again. Where a batch is split, or may be, its losses need a weight:
    /// [`Loss::mean`] or [`Loss::sum`].
    ///
    /// The result equals the whole batch's only where no operator mixes rows or draws random
    /// numbers; a BatchNorm that moves is warned of once.
    ///
    /// # Errors
    /// An open window; an empty batch; [`Error::CallOrder`] for strategies that run a window again
    /// without end; those of [`Stack::step`], with everything as before the call, but after a
    /// failed update gradients stay for a look until the next window begins;
    /// [`Error::Poisoned`] where a later micro-batch fails after the optimizer took an earlier
    /// one's gradients into its state.
    pub fn step_batch<B: Batch>(
        &mut self,
        batch: &B,
        mut loss_of: impl FnMut(&B) -> Result<Loss>,
    ) -> Result<StepOutcome> {
        self.refuse_open("Stack::step_batch")?;
        let rows = batch.rows();
        if rows < 1 {
            return Err(Error::config("Stack::step_batch", "the batch has no rows"));
        }
        let mut retries = 0;
        loop {
            let split = self.split(rows, retries);
            match self.run_split(batch, split, &mut loss_of) {
                Ok(outcome) => {
                    self.took(batch.data_position());
                    return Ok(outcome);
                }
                Err((error, Recovery::Retry)) if retries as i64 > rows.saturating_add(8) => {
                    return Err(self.explained(endless(retries, &error)));
                }
                Err((error, Recovery::Retry)) => tracing::debug!(%error, "running the window again"),
                Err((error, _)) => return Err(self.explained(error)),
            }
            retries += 1;
        }
    }

    /// Ends the open window, with the weight it has; nothing where none is open.
    ///
    /// # Errors
    /// As the update of [`Stack::step`]; [`Error::CallOrder`], and the window stays open, where
    /// its gradients joined the optimizer's state as parts of a longer one.
    pub fn flush(&mut self) -> Result<Option<StepOutcome>> {
        self.check_health()?;
        let Some(open) = &self.open else { return Ok(None) };
        self.finals.check_end(self.optimizer.gradients(), open.done)?;
        let ended = self.finish();
        // `windows` still counts the window that ends here.
        self.clock.broke(0);
        ended.map(Some)
    }

    /// Drops the open window: gradients go, buffers and generators are as at its start.
    ///
    /// # Errors
    /// libtorch's, in putting buffers back; [`Error::Poisoned`] where an optimizer took
    /// gradients of this window into its state already.
    pub fn discard(&mut self) -> Result<()> {
        if self.open.is_some() && self.finals.changed() {
            return Err(self.abandon(Error::CallOrder {
                call: "Stack::discard",
                state: "after gradients of the window joined the optimizer's state".to_owned(),
                remedy: "run such a window to its end",
            }));
        }
        if self.open.is_some() { self.back_to_window_start() } else { Ok(()) }
    }

    /// Runs `body` as evaluation: no gradients, no window, autocast as in training. Grad mode
    /// is restored; a failure puts buffers and generators back.
    ///
    /// # Errors
    /// Those of `body`, its panics included.
    pub fn evaluate<R>(&mut self, body: impl FnOnce() -> Result<R>) -> Result<R> {
        let _phase = Phase::Evaluate.enter_step(self.position.windows);
        self.micro_start.remember(&self.model.buffers)?;
        let mut body = Some(body);
        let mut value = None;
        let ran = phases::caught("evaluation", || {
            let _no_grad = tch::no_grad_guard();
            let _inside = InsideStep::enter();
            phases::forward(&mut self.strategies, &mut Mode::Evaluate, &mut || {
                let body = body.take().ok_or_else(twice)?;
                value = Some(phases::caught("evaluation", body)?);
                Ok(())
            })
        });
        match (ran, value) {
            (Ok(()), Some(value)) => Ok(value),
            (ran, _) => {
                self.micro_start.go_back(&self.model.buffers)?;
                Err(ran.err().unwrap_or_else(never))
            }
        }
    }

    fn split(&mut self, batch: i64, retries: usize) -> Split {
        let asked = self.strategies.iter_mut().find_map(|strategy| strategy.split(batch));
        let rows = asked.unwrap_or(batch).clamp(1, batch);
        Split { batch, rows, micro_batches: ((batch + rows - 1) / rows) as usize, retries }
    }

    fn run_split<B: Batch>(
        &mut self,
        batch: &B,
        split: Split,
        loss_of: &mut impl FnMut(&B) -> Result<Loss>,
    ) -> Result<StepOutcome, (Error, Recovery)> {
        let Split { batch: rows, rows: each, micro_batches: of, .. } = split;
        if rows % each != 0 && self.optimizer.gradients() == GradientUse::EachMicroBatch {
            return Err((self.refuse_uneven(rows, each), Recovery::Window));
        }
        for index in 0..of {
            let start = index as i64 * each;
            let range = start..(start + each).min(rows);
            let here = range.end - range.start;
            let last = index + 1 == of;
            let place = Place { last: Some(last), short: false, of: Some(of) };
            // A batch that copies its rows may run out of memory as well.
            match self.run(place, || loss_of(&batch.take_rows(range)?)) {
                Ok(outcome) if last => return Ok(outcome.with_split(split)),
                Ok(_) => self.warn_of_batch_norm(),
                Err(failed) => return Err(self.settle_split(failed, here, split)),
            }
        }
        Err((never(), Recovery::Window))
    }

    fn refuse_uneven(&self, rows: i64, each: i64) -> Error {
        Error::Incompatible {
            left: self.optimizer.name(),
            right: format!("a batch of {rows} rows in micro-batches of {each}"),
            why: "gradients of unequal weight cannot be added up in optimizer state".to_owned(),
            remedy:
                "take a number of rows that splits evenly, or an optimizer that does not update in backward"
                    .to_owned(),
        }
    }

    fn warn_of_batch_norm(&mut self) {
        if self.warned_of_batch_norm || self.model.buffers.is_empty() {
            return;
        }
        self.warned_of_batch_norm = true;
        if let Some(buffer) = self.window_start.changed(&self.model.buffers) {
            tracing::warn!(
                "batch_norm moved buffer `{buffer}` in a micro-batch: its statistics are those of micro-batches, so the split window differs from the whole batch"
            );
        }
    }
}

/// Each retry may take a row off; a few more are for a second look.
fn endless(retries: usize, error: &Error) -> Error {
    Error::CallOrder {
        call: "Strategy::recover",
        state: format!("with Recovery::Retry after {retries} retries of one batch, the last after: {error}"),
        remedy: "take a smaller split each time, and return Recovery::Window where there is none",
    }
}
