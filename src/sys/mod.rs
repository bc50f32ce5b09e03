//! The operating system: resident figures, heap trim.
//!
//! Only safe functions leave this room.
#![allow(unsafe_code)]

pub(crate) mod heap;
pub(crate) mod resident;
