//! What the consumer finds of a batch, and has it do.

use super::{Slot, Standing};
use crate::data::collate::Collate;
use crate::data::deliver::Done;
use crate::error::Error;

/// What the consumer finds at the front.
pub(crate) enum Front<B> {
    InTheMaking,
    /// Memory ran out.
    Starved,
    Done(Done<B>),
}

impl<J, S, C: Collate<S>> Slot<J, S, C> {
    /// What the consumer gets of the batch in front.
    pub(crate) fn front(&self) -> Front<C::Batch> {
        let mut state = self.lock();
        match &state.standing {
            Standing::Starved(_) | Standing::Told if state.running == 0 => return Front::Starved,
            Standing::Done(_) => {}
            _ => return Front::InTheMaking,
        }
        let standing = std::mem::replace(&mut state.standing, Standing::Delivered);
        let batch = if let Standing::Done(batch) = standing { batch } else { None };
        let mut errors = std::mem::take(&mut state.errors);
        errors.sort_by_key(|(row, _)| *row);
        let errors = errors.into_iter().map(|(_, error)| error).collect();
        Front::Done(Done { errors, batch, own: state.own.take() })
    }

    /// Whether the batch is there.
    pub(crate) fn is_done(&self) -> bool {
        matches!(self.lock().standing, Standing::Done(_))
    }

    /// The starvation's error, once; nobody works on the batch until `feed_again`.
    pub(crate) fn tell(&self) -> Option<Error> {
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
    pub(crate) fn feed_again(&self) {
        let mut state = self.lock();
        if matches!(state.standing, Standing::Starved(_) | Standing::Told | Standing::Held) {
            state.standing = Standing::Filling;
        }
    }

    /// Lets go of what it holds, to be made anew later, so that the batch in front has room. False
    /// while a worker still has some of it.
    pub(crate) fn hold(&self) -> bool {
        let mut state = self.lock();
        if !matches!(state.standing, Standing::Held) {
            self.begin_anew(&mut state);
            state.standing = Standing::Held;
        }
        state.running == 0
    }

    /// Lets go of what it holds, for good; workers leave it at their next row. True where one makes
    /// the batch of it just now, which is alive until the slot `is_left`.
    pub(crate) fn abandon(&self) -> bool {
        let mut state = self.lock();
        self.begin_anew(&mut state);
        state.standing = Standing::Abandoned;
        state.ending
    }

    /// Whether no worker makes the batch of it.
    pub(crate) fn is_left(&self) -> bool {
        !self.lock().ending
    }
}
