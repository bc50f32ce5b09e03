use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

use crate::ffi::timeline::set_role;

/// What bytes are for.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Weights that the stack trains, frozen ones too.
    Parameters,
    /// Tensors of the model that change without a gradient.
    Buffers,
    /// Gradients of parameters.
    Gradients,
    /// Made in forward, or in a recompute, and alive at its end: what backward waits for.
    Activations,
    /// Moments and master weights.
    OptimizerState,
    /// Made and freed within one phase.
    Temporaries,
    /// Copies on the host of what an accelerator works on.
    HostCopies,
    /// Batches, the driver's copies of buffers, whatever else the program holds.
    Other,
}

impl Role {
    /// All, in the order of tables and charts.
    pub const ALL: [Self; 8] = [
        Self::Parameters,
        Self::Buffers,
        Self::Gradients,
        Self::Activations,
        Self::OptimizerState,
        Self::Temporaries,
        Self::HostCopies,
        Self::Other,
    ];

    /// As tables, charts and files have it.
    pub fn name(self) -> &'static str {
        [
            "parameters",
            "buffers",
            "gradients",
            "activations",
            "optimizer state",
            "temporaries",
            "host copies",
            "other",
        ][self as usize]
    }

    /// What this thread allocates has this role until the guard is dropped, whatever its
    /// phase. For code that knows better than [`Timeline`](super::Timeline)'s rules. A block that
    /// outlives its window is other memory in the next one.
    pub fn scope(self) -> InRole {
        InRole { former: set_role(self as u8 + 1), not_send: PhantomData }
    }

    /// The role that a word says, if one was said.
    pub(crate) fn of(word: u64) -> Option<Self> {
        let said = (word >> 6) & 0xf;
        said.checked_sub(1).and_then(|index| Self::ALL.get(index as usize)).copied()
    }
}

/// Ends a role's scope when dropped, also by a panic.
#[derive(Debug)]
#[must_use = "the role's scope ends when this is dropped"]
pub struct InRole {
    former: u8,
    not_send: PhantomData<*mut ()>,
}

impl Drop for InRole {
    fn drop(&mut self) {
        set_role(self.former);
    }
}

/// Bytes by role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoleBytes([u64; 8]);

impl RoleBytes {
    /// The sum.
    pub fn total(&self) -> u64 {
        self.0.iter().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes))
    }

    /// Each role with its bytes.
    pub fn iter(&self) -> impl Iterator<Item = (Role, u64)> + '_ {
        Role::ALL.into_iter().zip(self.0)
    }
}

impl Index<Role> for RoleBytes {
    type Output = u64;

    fn index(&self, role: Role) -> &u64 {
        &self.0[role as usize]
    }
}

impl IndexMut<Role> for RoleBytes {
    fn index_mut(&mut self, role: Role) -> &mut u64 {
        &mut self.0[role as usize]
    }
}
