//! What the counting allocator did, event by event: `shim/timeline.cpp`.

use std::os::raw::c_int;

use tch::Tensor;
use torch_sys::C_tensor;

/// One event, as `mf_memory_event` lays it out.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Event {
    pub(crate) block: u64,
    pub(crate) bytes: u64,
    pub(crate) live: u64,
    pub(crate) nanoseconds: u64,
    pub(crate) word: u64,
}

/// A moment of the ring.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Now {
    pub(crate) next: u64,
    pub(crate) oldest: u64,
    pub(crate) live: u64,
    pub(crate) nanoseconds: u64,
    pub(crate) word: u64,
}

/// A block of the counting allocator; number 0 where it is none of its.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) number: u64,
    pub(crate) bytes: u64,
}

unsafe extern "C" {
    safe fn mf_timeline_open(capacity: usize) -> c_int;
    safe fn mf_timeline_close();
    safe fn mf_timeline_on() -> c_int;
    fn mf_timeline_read_now(out: *mut Now);
    fn mf_timeline_read(from: u64, out: *mut Event, count: usize) -> usize;
    safe fn mf_phase_get() -> u64;
    safe fn mf_phase_set(mask: u64, value: u64) -> u64;
    safe fn mf_role_set(role: c_int) -> c_int;
    safe fn mf_census_open();
    safe fn mf_census_close();
    fn mf_census_read(out: *mut Event, count: usize) -> usize;
    fn mf_blocks_of(tensors: *const *const C_tensor, count: usize, gradients: c_int, out: *mut Block);
}

/// Opens the ring; whether there was memory for it.
pub(crate) fn open(capacity: usize) -> bool {
    mf_timeline_open(capacity.max(1)) == 0
}

/// Frees the ring.
pub(crate) fn close() {
    mf_timeline_close();
}

/// Whether anybody watches: a ring or a census.
pub(crate) fn is_on() -> bool {
    mf_timeline_on() != 0
}

/// The ring now.
pub(crate) fn now() -> Now {
    let mut now = Now::default();
    // SAFETY: `now` is writable for the call.
    unsafe { mf_timeline_read_now(&mut now) };
    now
}

/// Events from number `from` up to `end`, as far as the ring still has them, and the number of
/// the first one.
pub(crate) fn read(from: u64, end: u64) -> (u64, Vec<Event>) {
    loop {
        let first = from.max(now().oldest);
        let wanted = end.saturating_sub(first) as usize;
        if wanted == 0 {
            return (first, Vec::new());
        }
        let mut events = vec![Event::default(); wanted];
        // SAFETY: the list has room for `wanted` events.
        let got = unsafe { mf_timeline_read(first, events.as_mut_ptr(), wanted) };
        events.truncate(got);
        // Another thread may have pushed the first one out meanwhile.
        if got > 0 {
            return (first, events);
        }
    }
}

/// The process-wide phase word.
pub(crate) fn phase() -> u64 {
    mf_phase_get()
}

/// Sets bits of the process-wide phase word; returns the former word.
pub(crate) fn set_phase(mask: u64, value: u64) -> u64 {
    mf_phase_set(mask, value)
}

/// Sets this thread's role; returns the former one.
pub(crate) fn set_role(role: u8) -> u8 {
    mf_role_set(c_int::from(role)) as u8
}

/// Keeps a list of the blocks made while one of these lives.
#[derive(Debug)]
pub(crate) struct Census(());

impl Census {
    pub(crate) fn open() -> Self {
        mf_census_open();
        Self(())
    }

    /// The blocks that are listed and alive, newest first.
    pub(crate) fn read(&self) -> Vec<Event> {
        let mut blocks = Vec::new();
        loop {
            let room = blocks.len();
            // SAFETY: the list has room for as many as said.
            let found = unsafe { mf_census_read(blocks.as_mut_ptr(), room) };
            if found <= room {
                blocks.truncate(found);
                return blocks;
            }
            // Another thread may add some before the next call.
            blocks.resize(found + 64, Event::default());
        }
    }
}

impl Drop for Census {
    fn drop(&mut self) {
        mf_census_close();
    }
}

/// The blocks of tensors, or of their gradients.
pub(crate) fn blocks_of<'a>(tensors: impl IntoIterator<Item = &'a Tensor>, gradients: bool) -> Vec<Block> {
    let handles: Vec<_> = tensors.into_iter().map(Tensor::as_ptr).collect();
    let mut blocks = vec![Block::default(); handles.len()];
    // SAFETY: the handles are borrowed for the call; both lists have as many entries as said.
    unsafe { mf_blocks_of(handles.as_ptr(), handles.len(), c_int::from(gradients), blocks.as_mut_ptr()) };
    blocks
}
