//! The operating system: mappings, advice, heap trim, resident figures.
//!
//! Only safe functions leave this room.
#![allow(unsafe_code)]

pub(crate) mod file;
pub(crate) mod heap;
pub(crate) mod resident;
