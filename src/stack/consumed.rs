//! How far the data is consumed.

use super::Stack;
use crate::error::Result;
use crate::state::StateVisitor;
use crate::step::DataPosition;

impl Stack {
    /// The position of the data after the last micro-batch that returned: what
    /// [`Loader::seek`](crate::data::Loader::seek) wants of a run that goes on. It counts what training consumed, not
    /// what was read ahead, and is part of the stack's state: snapshots have it. A loop over
    /// [`Stack::windows`] that was left early goes back to it likewise.
    ///
    /// [`Stack::step`] and [`Stack::step_batch`] take it from batches that know theirs
    /// ([`Batch::data_position`](crate::Batch::data_position)), once they return `Ok`, a skipped step too. Where a window is dropped,
    /// by [`Stack::discard`] or a failure, it is again that of the window's start. `None` where
    /// no batch knew its position, and after a state was loaded that has none.
    pub fn data_position(&self) -> Option<DataPosition> {
        self.consumed
    }

    /// Tells, in a loop of your own around [`Stack::step_with`], how far the data is consumed,
    /// once the step has returned `Ok`.
    pub fn consumed(&mut self, position: DataPosition) {
        self.consumed = Some(position);
    }

    /// A batch, or a micro-batch of it that `windows` gave, has returned.
    pub(super) fn took(&mut self, position: Option<DataPosition>) {
        self.consumed = position.or(self.consumed);
    }
}

/// Visits a position that may be absent; loading puts it, or its absence, in place.
pub(super) fn visit(visitor: &mut StateVisitor<'_>, position: &mut Option<DataPosition>) -> Result<()> {
    let mut there = visitor.exists("known", position.is_some())?.then(|| position.unwrap_or_default());
    if let Some(position) = &mut there {
        position.visit_state(visitor)?;
    }
    if visitor.loads() {
        *position = there;
    }
    Ok(())
}
