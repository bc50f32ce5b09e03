use std::collections::VecDeque;

use super::Loaded;
use crate::error::{Error, Result};
use crate::step::DataPosition;

/// What is given next, in order: the errors of a batch, then the batch, which may be on its way to a
/// device already.
pub(super) struct Stage<B> {
    items: VecDeque<Staged<B>>,
    /// Where batches go to a device.
    mover: Option<Box<dyn Mover<B>>>,
}

enum Staged<B> {
    /// With the position to go on from, where it is the last of its batch.
    Error(Error, Option<DataPosition>),
    /// Not on its way anywhere.
    Here(Loaded<B>),
    Sent(Sent<B>),
}

/// Brings batches to a device.
pub(super) trait Mover<B>: Send {
    /// Queues a copy of the batch, which is used no more once this has returned.
    ///
    /// # Errors
    /// Out of the device's memory: the batch is as before.
    fn send(&self, loaded: &Loaded<B>) -> Result<Sent<B>>;
}

/// A batch that may still be on its way.
pub(super) struct Sent<B> {
    loaded: Loaded<B>,
    land: Box<Land<B>>,
}

type Land<B> = dyn Fn(&B) -> Result<()> + Send;

impl<B> Sent<B> {
    /// After `land`, what the thread that called it queues finds the batch arrived.
    pub(super) fn new(loaded: Loaded<B>, land: impl Fn(&B) -> Result<()> + Send + 'static) -> Self {
        Self { loaded, land: Box::new(land) }
    }
}

/// What is given, and the position from which on to go after it; `None` where that is the one before.
pub(super) type Given<B> = (Result<Loaded<B>>, Option<DataPosition>);

impl<B> Stage<B> {
    pub(super) fn new(mover: Option<Box<dyn Mover<B>>>) -> Self {
        Self { items: VecDeque::new(), mover }
    }

    /// Drops what is there, arrived or not.
    pub(super) fn clear(&mut self) {
        self.items.clear();
    }

    /// Whether a batch that is ready is to be sent ahead.
    pub(super) fn has_room_ahead(&self) -> bool {
        self.mover.is_some() && self.items.is_empty()
    }

    pub(super) fn push_error(&mut self, error: Error) {
        self.items.push_back(Staged::Error(error, None));
    }

    pub(super) fn push_batch(&mut self, loaded: Loaded<B>) {
        self.items.push_back(Staged::Here(loaded));
    }

    /// Nothing more of a batch comes; the data goes on from `after`.
    pub(super) fn end_batch(&mut self, after: DataPosition) {
        if let Some(Staged::Error(_, position)) = self.items.back_mut() {
            *position = Some(after);
        }
    }

    /// Sends the batch in front, where one is there and it is to go to a device.
    ///
    /// # Errors
    /// The mover's; the batch is still in front.
    pub(super) fn send(&mut self) -> Result<()> {
        let (Some(mover), Some(front)) = (&self.mover, self.items.front_mut()) else { return Ok(()) };
        if let Staged::Here(loaded) = front {
            *front = Staged::Sent(mover.send(loaded)?);
        }
        Ok(())
    }

    fn land(&self) -> Result<()> {
        match self.items.front() {
            Some(Staged::Sent(sent)) => (sent.land)(&sent.loaded.batch),
            _ => Ok(()),
        }
    }

    /// Gives what is in front. A batch that could not be moved stays, for the next call.
    pub(super) fn give(&mut self) -> Option<Given<B>> {
        if let Err(error) = self.send().and_then(|()| self.land()) {
            return Some((Err(error), None));
        }
        let loaded = match self.items.pop_front()? {
            Staged::Error(error, after) => return Some((Err(error), after)),
            Staged::Here(loaded) | Staged::Sent(Sent { loaded, .. }) => loaded,
        };
        let after = Some(loaded.position);
        Some((Ok(loaded), after))
    }
}

#[cfg(test)]
mod tests;
