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
    /// Rows up to here were handed out.
    next: usize,
    /// Rows to be handed out again.
    again: Vec<usize>,
    /// Workers on it now.
    running: usize,
    present: Vec<usize>,
    errors: Vec<(usize, Error)>,
    standing: Standing<C::Batch>,
}

enum Standing<B> {
    Filling,
    /// Memory ran out; nobody works on it until the consumer asks.
    Starved(Error),
    /// The starvation was told; the next look at it tries again.
    Told,
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
    /// Errors of rows, in their order, and the batch of the others.
    Done(Vec<Error>, Option<B>),
}

/// What a worker is to do.
pub(super) enum Share {
    Nothing,
    Rows(Vec<usize>),
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
        let state = State {
            partial: None,
            next: 0,
            again: Vec::new(),
            running: 0,
            present: Vec::with_capacity(jobs.len()),
            errors,
            standing: Standing::Filling,
        };
        Self { after, jobs, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State<S, C>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Up to `most` rows for one worker, which gives each back by `put` or `give_up` and then
    /// calls `leave`.
    pub(super) fn share(&self, most: usize) -> Share {
        let mut state = self.lock();
        if !matches!(state.standing, Standing::Filling) {
            return Share::Nothing;
        }
        let mut rows = Vec::new();
        while rows.len() < most.max(1) {
            let row = match state.again.pop() {
                Some(row) => row,
                None if state.next < self.jobs.len() => {
                    state.next += 1;
                    state.next - 1
                }
                None => break,
            };
            if self.jobs[row].is_some() {
                rows.push(row);
            }
        }
        // Where all rows are in, what is left is to end it.
        if rows.is_empty() && state.running > 0 {
            return Share::Nothing;
        }
        state.running += 1;
        Share::Rows(rows)
    }

    /// Takes a row's sample.
    pub(super) fn put(&self, row: usize, sample: S, collate: &C, buffers: &Buffers) -> Result<()> {
        let mut state = self.lock();
        let partial = match &mut state.partial {
            Some(partial) => partial,
            none => none.insert(collate.begin(self.jobs.len(), &sample, buffers)?),
        };
        collate.put(partial, row, sample)?;
        state.present.push(row);
        Ok(())
    }

    /// A row has an error instead of a sample.
    pub(super) fn refuse(&self, row: usize, error: Error) {
        self.lock().errors.push((row, error));
    }

    /// Memory ran out: these rows are for later.
    pub(super) fn give_up(&self, rows: &[usize], error: Error) {
        let mut state = self.lock();
        state.again.extend_from_slice(rows);
        state.standing = Standing::Starved(error);
    }

    /// A worker has done its share; the last one ends the batch. True where the consumer has
    /// something to see.
    pub(super) fn leave(&self, end: impl FnOnce(&mut C::Partial, &[usize]) -> Result<C::Batch>) -> bool {
        let mut state = self.lock();
        state.running -= 1;
        if matches!(state.standing, Standing::Starved(_)) {
            return state.running == 0;
        }
        let all = state.next == self.jobs.len() && state.again.is_empty() && state.running == 0;
        if !all || !matches!(state.standing, Standing::Filling) {
            return false;
        }
        state.present.sort_unstable();
        let (Some(mut partial), false) = (state.partial.take(), state.present.is_empty()) else {
            state.standing = Standing::Done(None);
            return true;
        };
        // Ending may take long: whoever looks for work meanwhile does not wait for it.
        state.standing = Standing::Ending;
        let present = std::mem::take(&mut state.present);
        drop(state);
        let ended = end(&mut partial, &present);
        let mut state = self.lock();
        state.standing = match ended {
            Ok(batch) => Standing::Done(Some(batch)),
            Err(error) if error.is_out_of_memory() => {
                state.partial = Some(partial);
                state.present = present;
                Standing::Starved(error)
            }
            Err(error) => {
                state.errors.push((self.jobs.len(), error));
                Standing::Done(None)
            }
        };
        true
    }

    /// What the consumer gets of the batch in front.
    pub(super) fn front(&self) -> Front<C::Batch> {
        let mut state = self.lock();
        match &state.standing {
            Standing::Starved(_) if state.running == 0 => return Front::Starved,
            Standing::Done(_) => {}
            _ => return Front::Waits,
        }
        let standing = std::mem::replace(&mut state.standing, Standing::Delivered);
        let batch = if let Standing::Done(batch) = standing { batch } else { None };
        let mut errors = std::mem::take(&mut state.errors);
        errors.sort_by_key(|(row, _)| *row);
        Front::Done(errors.into_iter().map(|(_, error)| error).collect(), batch)
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

    /// Lets workers try again after memory ran out.
    pub(super) fn feed_again(&self) {
        let mut state = self.lock();
        if matches!(state.standing, Standing::Starved(_) | Standing::Told) {
            state.standing = Standing::Filling;
        }
    }
}
