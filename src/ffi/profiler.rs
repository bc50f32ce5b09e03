//! libtorch's own profiler around a stretch of one thread's work: `shim/profiler.cpp`.

use std::ffi::{CStr, CString};
use std::os::raw::{c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;

use super::check;
use crate::error::{Error, Result};

/// `mf_profiled` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Event {
    /// Index into the names.
    pub(crate) name: u32,
    kind: u32,
    pub(crate) thread: u64,
    /// Nanoseconds.
    pub(crate) start: u64,
    pub(crate) length: u64,
    /// Of memory; negative for a free.
    pub(crate) bytes: i64,
    pub(crate) correlation: u64,
    on_device: u32,
    crosses: u32,
}

/// What an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventKind {
    /// An operator, or a scope that somebody named.
    Operator,
    /// As [`EventKind::Operator`], ended by another thread.
    Crossing,
    /// An allocation or a free on the host.
    Memory,
    /// The same on an accelerator.
    DeviceMemory,
    /// Work of an accelerator.
    DeviceWork,
}

impl Event {
    #[cfg(test)]
    pub(crate) fn new(kind: EventKind, name: u32, start: u64, length: u64) -> Self {
        let number = match kind {
            EventKind::Operator | EventKind::Crossing => 0,
            EventKind::Memory | EventKind::DeviceMemory => 1,
            EventKind::DeviceWork => 2,
        };
        let on_device = u32::from(matches!(kind, EventKind::DeviceMemory | EventKind::DeviceWork));
        let crosses = u32::from(kind == EventKind::Crossing);
        Self { name, kind: number, start, length, on_device, crosses, ..Self::default() }
    }

    pub(crate) fn kind(&self) -> EventKind {
        match (self.kind, self.on_device, self.crosses) {
            (0, _, 0) => EventKind::Operator,
            (0, ..) => EventKind::Crossing,
            (1, 0, _) => EventKind::Memory,
            (1, ..) => EventKind::DeviceMemory,
            _ => EventKind::DeviceWork,
        }
    }
}

/// An opaque `mf_profile`.
#[repr(C)]
struct RawProfile {
    _private: [u8; 0],
}

unsafe extern "C" {
    safe fn mf_profiler_start(shapes: c_int, memory: c_int) -> c_int;
    fn mf_profiler_stop(out: *mut *mut RawProfile) -> c_int;
    fn mf_profile_events(profile: *const RawProfile, count: *mut usize) -> *const Event;
    fn mf_profile_names(profile: *const RawProfile, count: *mut usize) -> *const *const c_char;
    fn mf_profile_trim(profile: *mut RawProfile);
    fn mf_profile_save(profile: *mut RawProfile, path: *const c_char) -> c_int;
    fn mf_profile_drop(profile: *mut RawProfile);
}

/// Starts on this thread.
pub(crate) fn start(shapes: bool, memory: bool) -> Result<()> {
    check(mf_profiler_start(c_int::from(shapes), c_int::from(memory)))
}

/// What a profile has seen.
pub(crate) struct Seen {
    pub(crate) events: Vec<Event>,
    pub(crate) names: Vec<String>,
    pub(crate) trace: Trace,
}

/// Ends what this thread has started.
pub(crate) fn stop() -> Result<Seen> {
    let mut raw = std::ptr::null_mut();
    // SAFETY: `raw` is writable for the call.
    check(unsafe { mf_profiler_stop(&mut raw) })?;
    let trace = Trace(NonNull::new(raw).ok_or_else(|| Error::Torch("no profile was made".to_owned()))?);
    // SAFETY: the lists live until they are trimmed below, which is after their last use.
    let (events, texts) = unsafe { (listed(raw, mf_profile_events), listed(raw, mf_profile_names)) };
    let events = events.to_vec();
    // SAFETY: each text ends with a NUL and lives as long as the list.
    let name = |text: &*const c_char| unsafe { CStr::from_ptr(*text) }.to_string_lossy().into_owned();
    let names = texts.iter().map(name).collect();
    // SAFETY: the profile is alive, and nothing borrowed from its lists is left.
    unsafe { mf_profile_trim(raw) };
    Ok(Seen { events, names, trace })
}

/// # Safety
/// The profile is alive, and its lists are while the slice is used.
unsafe fn listed<'a, T>(
    raw: *const RawProfile,
    read: unsafe extern "C" fn(*const RawProfile, *mut usize) -> *const T,
) -> &'a [T] {
    let mut count = 0;
    // SAFETY: the profile is alive, as the caller has promised; `count` is writable.
    let first = unsafe { read(raw, &mut count) };
    if count == 0 {
        return &[];
    }
    // SAFETY: the list has as many elements, and lives as the caller has promised.
    unsafe { std::slice::from_raw_parts(first, count) }
}

/// The trace of a profile, which Kineto writes once.
#[derive(Debug)]
pub(crate) struct Trace(NonNull<RawProfile>);

// SAFETY: a finished profile refers to no thread; whoever has the `Trace` uses it alone.
unsafe impl Send for Trace {}

impl Trace {
    /// Writes the file. One that cannot be written is no error here: look at it.
    pub(crate) fn save(&mut self, path: &Path) -> Result<()> {
        let path = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| Error::config("path", "has a NUL character"))?;
        // SAFETY: the profile is alive and used by nobody else; the text is borrowed for the call.
        check(unsafe { mf_profile_save(self.0.as_ptr(), path.as_ptr()) })
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        // SAFETY: the profile is alive and dropped once.
        unsafe { mf_profile_drop(self.0.as_ptr()) };
    }
}
