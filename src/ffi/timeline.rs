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
    pub(crate) ticks: u64,
    pub(crate) word: u64,
}

/// A moment of the ring.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Now {
    pub(crate) next: u64,
    pub(crate) oldest: u64,
    pub(crate) live: u64,
    pub(crate) ticks: u64,
    pub(crate) word: u64,
    /// Followed blocks that were freed so far.
    pub(crate) gone: u64,
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
    safe fn mf_timeline_scale() -> f64;
    fn mf_timeline_read_now(out: *mut Now);
    fn mf_timeline_read(from: u64, out: *mut Event, count: usize) -> usize;
    safe fn mf_phase_get() -> u64;
    safe fn mf_phase_set(mask: u64, value: u64) -> u64;
    safe fn mf_role_set(role: c_int) -> c_int;
    safe fn mf_census_open();
    safe fn mf_census_close();
    fn mf_census_read(out: *mut Event, count: usize) -> usize;
    fn mf_blocks_of(tensors: *const *const C_tensor, count: usize, gradients: c_int, out: *mut Block);
    fn mf_blocks_follow(
        tensors: *const *const C_tensor,
        count: usize,
        all: c_int,
        known: *mut RawFollowed,
    ) -> c_int;
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

/// Nanoseconds of a tick.
pub(crate) fn scale() -> f64 {
    mf_timeline_scale()
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
    let mut finder = Finder::default();
    finder.find(tensors, gradients);
    finder.blocks
}

/// Finds blocks of many tensors, in lists that it keeps.
#[derive(Debug, Default)]
pub(crate) struct Finder {
    handles: Handles,
    blocks: Vec<Block>,
}

impl Finder {
    /// The blocks of tensors, or of their gradients.
    pub(crate) fn find<'a>(
        &mut self,
        tensors: impl IntoIterator<Item = &'a Tensor>,
        gradients: bool,
    ) -> &[Block] {
        let blocks = &mut self.blocks;
        self.handles.lend(tensors, |handles| {
            blocks.resize(handles.len(), Block::default());
            let (count, gradients) = (handles.len(), c_int::from(gradients));
            // SAFETY: the handles are borrowed for the call; both lists have as many entries.
            unsafe { mf_blocks_of(handles.as_ptr(), count, gradients, blocks.as_mut_ptr()) };
        });
        &self.blocks
    }
}

/// `mf_followed` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct RawFollowed {
    storage: u64,
    block: Block,
}

/// The blocks of tensors that are asked for again and again: looked up only where they may be
/// others than before.
#[derive(Debug, Default)]
pub(crate) struct Followed {
    handles: Handles,
    known: Vec<RawFollowed>,
    /// How many had gone when all were looked up.
    gone: u64,
}

impl Followed {
    /// Begins to go through the tensors; `now` is the ring's.
    pub(crate) fn pass(&mut self, now: &Now) -> Pass<'_> {
        let all = self.gone != now.gone;
        self.gone = now.gone;
        Pass { followed: self, at: 0, all, another: false }
    }

    /// Each tensor's storage, by its address (0: none), and block.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u64, Block)> + '_ {
        self.known.iter().map(|one| (one.storage, one.block))
    }
}

/// One time through the tensors.
#[must_use = "end() forgets what was not met again"]
pub(crate) struct Pass<'a> {
    followed: &'a mut Followed,
    at: usize,
    all: bool,
    another: bool,
}

impl Pass<'_> {
    /// The next ones.
    pub(crate) fn follow<'a>(&mut self, tensors: impl IntoIterator<Item = &'a Tensor>) {
        let Followed { handles, known, .. } = &mut *self.followed;
        let (at, all) = (self.at, c_int::from(self.all));
        let (count, another) = handles.lend(tensors, |handles| {
            if known.len() < at + handles.len() {
                known.resize(at + handles.len(), RawFollowed::default());
            }
            // SAFETY: the handles are borrowed for the call; the list has as many entries from
            // `at` on.
            let another =
                unsafe { mf_blocks_follow(handles.as_ptr(), handles.len(), all, known.as_mut_ptr().add(at)) };
            (handles.len(), another != 0)
        });
        self.at += count;
        self.another |= another;
    }

    /// Whether a block is another one than the last time, or a tensor was added or left out.
    pub(crate) fn end(self) -> bool {
        let fewer = self.followed.known.len() > self.at;
        self.followed.known.truncate(self.at);
        self.another || fewer
    }
}

/// A list of handles, empty but while it is lent.
#[derive(Debug, Default)]
struct Handles(Vec<*const C_tensor>);

// SAFETY: the list holds no handle but while `lend` runs.
unsafe impl Send for Handles {}

impl Handles {
    fn lend<'a, R>(
        &mut self,
        tensors: impl IntoIterator<Item = &'a Tensor>,
        body: impl FnOnce(&[*const C_tensor]) -> R,
    ) -> R {
        self.0.clear();
        self.0.extend(tensors.into_iter().map(Tensor::as_ptr));
        let result = body(&self.0);
        self.0.clear();
        result
    }
}
