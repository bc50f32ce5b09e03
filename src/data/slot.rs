use std::sync::{Mutex, MutexGuard, PoisonError};

use super::buffers::Buffers;
use super::collate::Collate;
use super::feed::{Planned, Planned1};
use crate::error::{Error, Result};
use crate::step::DataPosition;

/// A batch that workers fill together, each a few rows at a time.
pub(super) struct Slot<J, S, C: Collate<S>> {
    pub(super) after: DataPosition,
    /// Per row; a row whose job failed was taken out.
    pub(super) jobs: Vec<Option<(u64, J)>>,
    state: Mutex<State<S, C>>,
}

struct State<S, C: Collate<S>> {
    partial: Option<C::Partial>,
    /// Rows to be handed out, the next one last.
    todo: Vec<usize>,
    /// Workers on it now.
    running: usize,
    /// Bumped where rows are begun anew: what workers bring of before is void.
    round: u64,
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
}

/// What the consumer finds at the front.
pub(super) enum Front<B> {
    Waits,
    /// Memory ran out.
    Starved,
    Done(Done<B>),
}

/// A batch that is complete.
pub(super) struct Done<B> {
    /// Of rows, in their order.
    pub(super) errors: Vec<Error>,
    /// The other rows.
    pub(super) batch: Option<B>,
    /// Why the batch as a whole could not be made.
    pub(super) own: Option<Error>,
}

/// Rows for one worker, which gives each back by `put`, `refuse` or `give_up` and then calls `leave`.
pub(super) struct Share {
    pub(super) rows: Vec<usize>,
    round: u64,
}

impl<J, S, C: Collate<S>> Slot<J, S, C> {
    pub(super) fn new(planned: Planned<J>) -> Self {
        let Planned { jobs, after } = planned;
        let mut errors = Vec::new();
        let jobs: Vec<_> = jobs
            .into_iter()
            .enumerate()
            .map(|(row, Planned1 { place, job })| match job {
                Ok(job) => Some((place, job)),
                Err(error) => {
                    errors.push((row, error));
                    None
                }
            })
            .collect();
        let mut state = State {
            partial: None,
            todo: Vec::new(),
            running: 0,
            round: 0,
            ordered: false,
            present: Vec::with_capacity(jobs.len()),
            errors,
            own: None,
            standing: Standing::Filling,
        };
        state.begin_anew(jobs.len());
        Self { after, jobs, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State<S, C>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Up to `most` rows, or none where all are in and the batch is to be ended.
    pub(super) fn share(&self, most: usize) -> Option<Share> {
        let mut state = self.lock();
        let busy = state.running > 0 && (state.todo.is_empty() || state.ordered);
        if busy || !matches!(state.standing, Standing::Filling) {
            return None;
        }
        let most = if state.ordered { usize::MAX } else { most.max(1) };
        let from = state.todo.len().saturating_sub(most);
        let rows = state.todo.drain(from..).rev().collect();
        state.running += 1;
        Some(Share { rows, round: state.round })
    }

    /// Takes a row's sample.
    pub(super) fn put(
        &self,
        share: &Share,
        row: usize,
        sample: S,
        collate: &C,
        buffers: &Buffers,
    ) -> Result<()> {
        let mut state = self.lock();
        if state.round != share.round {
            return Ok(());
        }
        let put = match &mut state.partial {
            Some(partial) => collate.put(partial, row, sample),
            none => collate.begin(self.jobs.len(), &sample, buffers).and_then(|partial| {
                let partial = none.insert(partial);
                collate.put(partial, row, sample)
            }),
        };
        match put {
            // Whoever came first has decided what fits; that must not be chance.
            Err(error) if !error.is_out_of_memory() && collate.first_decides() && !state.ordered => {
                state.ordered = true;
                state.begin_anew(self.jobs.len());
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
    pub(super) fn refuse(&self, share: &Share, row: usize, error: Error) {
        let mut state = self.lock();
        if state.round == share.round {
            state.errors.push((row, error));
        }
    }

    /// Memory ran out: these rows are for later.
    pub(super) fn give_up(&self, share: &Share, rows: &[usize], error: Error) {
        let mut state = self.lock();
        if state.round == share.round {
            state.todo.extend(rows.iter().rev());
            state.standing = Standing::Starved(error);
        }
    }

    /// A worker has done its share; the last one ends the batch. True where the consumer has
    /// something to see.
    pub(super) fn leave(
        &self,
        share: &Share,
        end: impl FnOnce(&mut C::Partial, &[usize]) -> Result<C::Batch>,
    ) -> bool {
        let mut state = self.lock();
        state.running -= 1;
        if !matches!(state.standing, Standing::Filling) {
            return state.running == 0;
        }
        if state.running > 0 || !state.todo.is_empty() || state.round != share.round {
            return false;
        }
        state.present.sort_unstable();
        let (Some(mut partial), false) = (state.partial.take(), state.present.is_empty()) else {
            state.standing = Standing::Done(None);
            return true;
        };
        // Ending may take long: whoever looks for work meanwhile does not wait for it.
        state.standing = Standing::Ending;
        state.running = 1;
        let present = state.present.clone();
        drop(state);
        let ended = end(&mut partial, &present);
        let mut state = self.lock();
        state.running = 0;
        if matches!(state.standing, Standing::Held) {
            return true;
        }
        state.standing = match ended {
            Ok(batch) => Standing::Done(Some(batch)),
            Err(error) if error.is_out_of_memory() => {
                state.partial = Some(partial);
                Standing::Starved(error)
            }
            Err(error) => {
                state.own = Some(error);
                Standing::Done(None)
            }
        };
        true
    }

    /// What the consumer gets of the batch in front.
    pub(super) fn front(&self) -> Front<C::Batch> {
        let mut state = self.lock();
        match &state.standing {
            Standing::Starved(_) | Standing::Told if state.running == 0 => return Front::Starved,
            Standing::Done(_) => {}
            _ => return Front::Waits,
        }
        let standing = std::mem::replace(&mut state.standing, Standing::Delivered);
        let batch = if let Standing::Done(batch) = standing { batch } else { None };
        let mut errors = std::mem::take(&mut state.errors);
        errors.sort_by_key(|(row, _)| *row);
        let errors = errors.into_iter().map(|(_, error)| error).collect();
        Front::Done(Done { errors, batch, own: state.own.take() })
    }

    /// Whether the batch is there.
    pub(super) fn is_done(&self) -> bool {
        matches!(self.lock().standing, Standing::Done(_))
    }

    /// The starvation's error, once; nobody works on the batch until `feed_again`.
    pub(super) fn tell(&self) -> Option<Error> {
        let mut state = self.lock();
        match std::mem::replace(&mut state.standing, Standing::Told) {
            Standing::Starved(error) => Some(error),
            other => {
                state.standing = other;
                None
            }
        }
    }

    /// Lets workers go on after memory ran out, here or in front of it.
    pub(super) fn feed_again(&self) {
        let mut state = self.lock();
        if matches!(state.standing, Standing::Starved(_) | Standing::Told | Standing::Held) {
            state.standing = Standing::Filling;
        }
    }

    /// Lets go of what it holds, to be made anew later, so that the batch in front has room. False
    /// while a worker still has some of it.
    pub(super) fn hold(&self) -> bool {
        let mut state = self.lock();
        if !matches!(state.standing, Standing::Held) {
            state.begin_anew(self.jobs.len());
            state.standing = Standing::Held;
        }
        state.running == 0
    }
}

impl<S, C: Collate<S>> State<S, C> {
    /// All rows but those that have an error are to be done.
    fn begin_anew(&mut self, rows: usize) {
        let refused: Vec<usize> = self.errors.iter().map(|(row, _)| *row).collect();
        self.partial = None;
        self.present.clear();
        self.own = None;
        self.todo = (0..rows).rev().filter(|row| !refused.contains(row)).collect();
        self.round += 1;
    }
}
