//! Which batches are in the making, and what is to be done next.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::data::collate::Collate;
use crate::data::slot::{Share, Slot};
use crate::error::Error;

pub(super) struct Work<J, S, C: Collate<S>> {
    /// In the order in which they are given.
    pub(super) building: VecDeque<Arc<Slot<J, S, C>>>,
    /// Of before a seek, where a worker still makes the batch: they count as long as it does.
    abandoned: Vec<Arc<Slot<J, S, C>>>,
    /// A worker plans the next batch.
    pub(super) feeding: bool,
    /// The epoch has no more batches to plan; no epoch is begun at first.
    pub(super) ended: bool,
    /// Bumped where the position is set anew: plans of before are void.
    pub(super) generation: u64,
    /// The consumer knows that the batch in front did not fit.
    pub(super) told: bool,
    /// Nothing else is made until the batch in front is.
    tight: bool,
    /// What ended the epoch before its end.
    pub(super) failed: Option<Error>,
    /// Batches that may be ready or in the making.
    prefetch: usize,
    /// Rows that a worker takes at once.
    share: usize,
}

/// One thing to do.
pub(super) enum Task<J, S, C: Collate<S>> {
    Fill(Arc<Slot<J, S, C>>, Share),
    /// For this generation.
    Plan(u64),
}

impl<J, S, C: Collate<S>> Work<J, S, C> {
    pub(super) fn new(prefetch: usize, share: usize) -> Self {
        Self {
            building: VecDeque::new(),
            abandoned: Vec::new(),
            feeding: false,
            ended: true,
            generation: 0,
            told: false,
            tight: false,
            failed: None,
            prefetch,
            share,
        }
    }

    /// Lets go of all batches; nothing is planned until `ended` is taken back.
    pub(super) fn abandon(&mut self) {
        self.generation += 1;
        for slot in self.building.drain(..) {
            if slot.abandon() {
                self.abandoned.push(slot);
            }
        }
        self.ended = true;
        (self.told, self.tight) = (false, false);
        self.failed = None;
    }

    /// The batch in front is given; those behind it go on.
    pub(super) fn give_front(&mut self) {
        self.building.pop_front();
        self.tight = false;
        self.building.iter().for_each(|slot| slot.feed_again());
    }

    pub(super) fn task(&mut self) -> Option<Task<J, S, C>> {
        let most = if self.tight { 1 } else { usize::MAX };
        for slot in self.building.iter().take(most) {
            if let Some(share) = slot.share(self.share) {
                return Some(Task::Fill(slot.clone(), share));
            }
        }
        self.abandoned.retain(|slot| !slot.is_left());
        let full = self.tight || self.building.len() + self.abandoned.len() >= self.prefetch;
        if self.feeding || self.ended || full {
            return None;
        }
        self.feeding = true;
        Some(Task::Plan(self.generation))
    }

    /// Lets the batch in front try again, once those behind it hold nothing: what was made ahead is
    /// no reason for it not to fit. False while a worker still has some of it.
    pub(super) fn make_room(&mut self) -> bool {
        self.tight = true;
        // Each of them is asked, also where one is busy.
        let busy = self.building.iter().skip(1).filter(|slot| !slot.hold()).count();
        self.abandoned.retain(|slot| !slot.is_left());
        let free = busy + self.abandoned.len() == 0;
        if free {
            self.building.front().inspect(|slot| slot.feed_again());
        }
        free
    }
}
