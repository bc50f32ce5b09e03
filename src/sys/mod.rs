//! The operating system: mappings, advice, heap trim, resident figures, the machine's memory.
//!
//! Only safe functions leave this room.
#![allow(unsafe_code)]

pub(crate) mod cgroup;
pub(crate) mod file;
pub(crate) mod heap;
pub(crate) mod machine;
pub(crate) mod mapping;
pub(crate) mod resident;
