//! The search for the largest micro-batch, with a whole training put back after each try.

use super::Stack;
use crate::error::{Error, Result};
use crate::step::{Loss, MicroBatch, Position, WindowRule};
use crate::strategies::{Found, Search};

impl Stack {
    /// Finds the largest micro-batch, or the longest sequence, that trains within memory: each
    /// size runs forward and backward without an update, and once more on top of the first
    /// one's gradients where windows have several micro-batches, or where a strategy splits
    /// batches into some.
    ///
    /// Parameters, optimizer and strategies' state do not change; buffers and generators are
    /// put back, gradients of a skipped step are dropped, as a window's start would. The batches that a
    /// [`Loader`](crate::data::Loader) will make ahead are not in it: they take room of their own.
    ///
    /// # Errors
    /// An open window; an optimizer that takes gradients into its state in backward; those of
    /// [`find_max_batch`](crate::find_max_batch), of `loss_of` and of the strategies.
    pub fn find_max_batch(
        &mut self,
        search: impl Into<Search>,
        mut loss_of: impl FnMut(i64) -> Result<Loss>,
    ) -> Result<Found> {
        const CALL: &str = "Stack::find_max_batch";
        self.check_health()?;
        self.refuse_open(CALL)?;
        if self.optimizer.gradients().changes_in_backward() {
            return Err(Error::Unsupported {
                what: CALL.to_owned(),
                place: format!("with {}", self.optimizer.name()),
                remedy: "search with the optimizer it wraps: that one needs all gradients at once, so what \
                         fits there fits here"
                    .to_owned(),
            });
        }
        let search = search.into().on(self.model.device);
        search.run(|size| {
            self.begin()?;
            let ran = self.try_out(size, &mut loss_of);
            self.back_to_window_start().map_err(|error| self.poison(error))?;
            ran
        })
    }

    /// Whether windows have, will have or may be split into several micro-batches.
    pub(super) fn has_windows(&self) -> bool {
        if self.strategies().any(|strategy| strategy.retries()) {
            return true;
        }
        let longest = self.strategies().find_map(|strategy| strategy.longest_window());
        longest.is_some_and(|rule| rule != WindowRule::Micros(1))
    }

    fn try_out(&mut self, size: i64, loss_of: &mut impl FnMut(i64) -> Result<Loss>) -> Result<()> {
        let several = self.has_windows();
        for index in 0..=usize::from(several) {
            let micro = micro_of(index, several, self.position);
            let loss = self.forward(micro, || loss_of(size))?;
            let total = self.backward(micro, &loss)?;
            if let Some(open) = &mut self.open {
                open.total = total;
                open.done += 1;
            }
        }
        Ok(())
    }
}

/// A micro-batch of a window that is only tried: of one, or of two where windows have several.
pub(super) fn micro_of(index: usize, several: bool, position: Position) -> MicroBatch {
    let of = 1 + usize::from(several);
    MicroBatch { index, last: Some(index + 1 == of), short: false, of: Some(of), position }
}
