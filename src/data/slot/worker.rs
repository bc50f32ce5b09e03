//! What workers take of a batch, and bring to it.

use std::sync::atomic::Ordering;

use super::{Slot, Standing, dropped};
use crate::data::buffers::Buffers;
use crate::data::caught::caught;
use crate::data::collate::Collate;
use crate::error::{Error, Result};

/// Rows for one worker, which gives each back by `put`, `refuse` or `give_up` and then calls `leave`.
pub(crate) struct Share {
    pub(crate) rows: Vec<usize>,
    round: u64,
}

impl<J, S, C: Collate<S>> Slot<J, S, C> {
    /// Up to `most` rows, or none where all are in and the batch is to be ended.
    pub(crate) fn share(&self, most: usize) -> Option<Share> {
        let mut state = self.lock();
        let busy = state.running > 0 && (state.todo.is_empty() || state.ordered);
        if busy || !matches!(state.standing, Standing::Filling) {
            return None;
        }
        let most = if state.ordered { usize::MAX } else { most.max(1) };
        let from = state.todo.len().saturating_sub(most);
        let rows = state.todo.drain(from..).rev().collect();
        state.running += 1;
        Some(Share { rows, round: self.round.load(Ordering::Acquire) })
    }

    /// Whether a share is still to be worked on: its rows may have been begun anew since.
    pub(crate) fn wants(&self, share: &Share) -> bool {
        self.round.load(Ordering::Acquire) == share.round
    }

    /// Takes a row's sample.
    pub(crate) fn put(
        &self,
        share: &Share,
        row: usize,
        sample: S,
        collate: &C,
        buffers: &Buffers,
    ) -> Result<()> {
        let mut state = self.lock();
        if !self.wants(share) {
            return Ok(());
        }
        let first = state.partial.is_none();
        let put = caught("collating a batch", || match &mut state.partial {
            Some(partial) => collate.put(partial, row, sample),
            none => {
                let partial = collate.begin(self.jobs.len(), &sample, buffers)?;
                collate.put(none.insert(partial), row, sample)
            }
        });
        if first && put.is_err() {
            // One that is not in the batch does not decide what fits it.
            let _ = dropped(state.partial.take());
        }
        match put {
            // Whoever came first has decided what fits; that must not be chance.
            Err(error) if !error.is_out_of_memory() && collate.first_decides() && !state.ordered => {
                state.ordered = true;
                self.begin_anew(&mut state);
                Ok(())
            }
            Err(error) => Err(error),
            Ok(()) => {
                state.present.push(row);
                Ok(())
            }
        }
    }

    /// A row has an error instead of a sample.
    pub(crate) fn refuse(&self, share: &Share, row: usize, error: Error) {
        let mut state = self.lock();
        if self.wants(share) {
            state.errors.push((row, error));
        }
    }

    /// Memory ran out: these rows are for later.
    pub(crate) fn give_up(&self, share: &Share, rows: &[usize], error: Error) {
        let mut state = self.lock();
        if self.wants(share) {
            state.todo.extend(rows.iter().rev());
            state.standing = Standing::Starved(error);
        }
    }

    /// A worker has done its share; the last one ends the batch. True where the consumer has
    /// something to see.
    pub(crate) fn leave(
        &self,
        share: &Share,
        end: impl FnOnce(&mut C::Partial, &[usize]) -> Result<C::Batch>,
    ) -> bool {
        let mut state = self.lock();
        state.running -= 1;
        if !matches!(state.standing, Standing::Filling) {
            return state.running == 0;
        }
        if state.running > 0 || !state.todo.is_empty() || !self.wants(share) {
            return false;
        }
        state.present.sort_unstable();
        let Some(mut partial) = state.partial.take() else {
            state.standing = Standing::Done(None);
            return true;
        };
        // Ending may take long: whoever looks for work meanwhile does not wait for it.
        state.standing = Standing::Ending;
        state.running += 1;
        state.ending = true;
        let present = state.present.clone();
        drop(state);
        let ended = end(&mut partial, &present);
        let mut state = self.lock();
        state.running -= 1;
        state.ending = false;
        if !self.wants(share) {
            // Under the lock: whoever sees that nobody is on it finds that it holds nothing.
            let _ = dropped((ended, partial));
            return state.running == 0;
        }
        state.standing = match ended {
            Err(error) if error.is_out_of_memory() => {
                state.partial = Some(partial);
                Standing::Starved(error)
            }
            ended => {
                // Before the batch can be seen: whoever is given it finds nothing else of it alive.
                state.own = dropped(partial).err();
                Standing::Done(ended.map_err(|error| state.own = Some(error)).ok())
            }
        };
        true
    }
}
