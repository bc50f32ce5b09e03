//! A batch in the making: what workers bring, and what the consumer finds.

mod consumer;
mod worker;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) use self::consumer::Front;
pub(crate) use self::worker::Share;
use super::caught::caught;
use super::collate::Collate;
use super::feed::{Planned, PlannedSample};
use crate::error::{Error, Result};
use crate::step::DataPosition;

/// A batch that workers fill together, each a few rows at a time.
pub(crate) struct Slot<J, S, C: Collate<S>> {
    pub(crate) after: DataPosition,
    /// Per row; a row whose job failed was taken out.
    pub(crate) jobs: Vec<Option<(u64, J)>>,
    /// Bumped, under the lock, where rows are begun anew: what workers bring of before is void.
    round: AtomicU64,
    state: Mutex<State<S, C>>,
}

struct State<S, C: Collate<S>> {
    partial: Option<C::Partial>,
    /// Rows to be handed out, the next one last.
    todo: Vec<usize>,
    /// Workers on it now.
    running: usize,
    /// One of them makes the batch, of what it took out of here.
    ending: bool,
    /// One worker takes all rows in their order, so that the first one decides the shape.
    ordered: bool,
    present: Vec<usize>,
    errors: Vec<(usize, Error)>,
    /// The batch's own error.
    own: Option<Error>,
    standing: Standing<C::Batch>,
}

enum Standing<B> {
    Filling,
    /// Memory ran out; nobody works on it until the consumer asks.
    Starved(Error),
    /// The starvation was told; the next look at it tries again.
    Told,
    /// It holds nothing, so that the batch in front of it has room.
    Held,
    Ending,
    /// `None` where no row is left.
    Done(Option<B>),
    Delivered,
    /// Nobody wants it any more.
    Abandoned,
}

impl<J, S, C: Collate<S>> Slot<J, S, C> {
    pub(crate) fn new(planned: Planned<J>) -> Self {
        let Planned { jobs, after } = planned;
        let mut errors = Vec::new();
        let jobs: Vec<_> = jobs
            .into_iter()
            .enumerate()
            .map(|(row, PlannedSample { place, job })| match job {
                Ok(job) => Some((place, job)),
                Err(error) => {
                    errors.push((row, error));
                    None
                }
            })
            .collect();
        let state = State {
            partial: None,
            todo: Vec::new(),
            running: 0,
            ending: false,
            ordered: false,
            present: Vec::with_capacity(jobs.len()),
            errors,
            own: None,
            standing: Standing::Filling,
        };
        let slot = Self { after, jobs, round: AtomicU64::new(0), state: Mutex::new(state) };
        slot.begin_anew(&mut slot.lock());
        slot
    }

    fn lock(&self) -> MutexGuard<'_, State<S, C>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All rows but those that have an error are to be done.
    fn begin_anew(&self, state: &mut State<S, C>) {
        let refused: Vec<usize> = state.errors.iter().map(|(row, _)| *row).collect();
        let former = state.partial.take();
        state.present.clear();
        state.own = None;
        state.todo = (0..self.jobs.len()).rev().filter(|row| !refused.contains(row)).collect();
        self.round.fetch_add(1, Ordering::AcqRel);
        let _ = dropped(former);
    }
}

/// Drops what a user's code made. A worker that panicked would leave the consumer waiting.
fn dropped<T>(values: T) -> Result<()> {
    caught("dropping what a batch was made of", || {
        drop(values);
        Ok(())
    })
}

#[cfg(test)]
mod tests;
