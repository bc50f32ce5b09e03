//! Accelerators through libtorch's device-neutral face: figures, streams, events.
//!
//! Without an accelerator every call is a typed error.

use std::os::raw::c_int;

use tch::{Device, Tensor};
use torch_sys::C_tensor;

use super::check;
use crate::error::{Error, Result};

/// `mf_device_stats` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DeviceStats {
    pub(crate) current: i64,
    pub(crate) peak: i64,
    pub(crate) allocated: i64,
    pub(crate) freed: i64,
    pub(crate) reserved: i64,
    pub(crate) allocations: i64,
    pub(crate) frees: i64,
    pub(crate) failures: i64,
    pub(crate) peak_reserved: i64,
    pub(crate) peak_blocks: i64,
    pub(crate) retries: i64,
    pub(crate) inactive: i64,
}

#[repr(C)]
struct RawStream {
    _opaque: [u8; 0],
}

#[repr(C)]
struct RawEvent {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    safe fn mf_device_count() -> c_int;
    fn mf_device_stats_of(device: c_int, out: *mut DeviceStats) -> c_int;
    safe fn mf_device_reset_peak(device: c_int) -> c_int;
    safe fn mf_device_release_caches() -> c_int;
    fn mf_device_memory(device: c_int, free: *mut u64, total: *mut u64) -> c_int;
    fn mf_stream_current(device: c_int, out: *mut *mut RawStream) -> c_int;
    fn mf_stream_new(device: c_int, out: *mut *mut RawStream) -> c_int;
    fn mf_stream_enter(stream: *mut RawStream, former: *mut *mut RawStream) -> c_int;
    fn mf_stream_uses(stream: *mut RawStream, tensor: *const C_tensor) -> c_int;
    fn mf_stream_free(stream: *mut RawStream);
    fn mf_event_record(stream: *mut RawStream, out: *mut *mut RawEvent) -> c_int;
    fn mf_event_block(event: *mut RawEvent, stream: *mut RawStream) -> c_int;
    fn mf_event_free(event: *mut RawEvent);
}

/// Number of accelerators of libtorch's kind; 0 without one.
pub(crate) fn count() -> usize {
    usize::try_from(mf_device_count()).unwrap_or_default()
}

/// The index of an accelerator that is there.
///
/// # Errors
/// [`Error::Unsupported`] for a CPU, for a kind that has no such face in tch, and for a
/// device that this machine does not have.
pub(crate) fn index(device: Device, what: &str) -> Result<c_int> {
    let remedy = match device {
        Device::Cuda(index) if index < count() => return Ok(index as c_int),
        Device::Cuda(_) => "use Device::Cpu, or a libtorch with CUDA on a machine that has the device",
        _ => "use Device::Cuda",
    };
    Err(Error::Unsupported {
        what: what.to_owned(),
        place: format!("on {device:?} here"),
        remedy: remedy.to_owned(),
    })
}

/// What the device's caching allocator counts.
pub(crate) fn stats(device: Device) -> Result<DeviceStats> {
    let index = index(device, "memory statistics")?;
    let mut stats = DeviceStats::default();
    // SAFETY: `stats` is writable for the call.
    check(unsafe { mf_device_stats_of(index, &mut stats) })?;
    Ok(stats)
}

/// Starts the device's peak again from what is live.
pub(crate) fn reset_peak(device: Device) -> Result<()> {
    check(mf_device_reset_peak(index(device, "resetting the peak")?))
}

/// Gives cached blocks back to the device.
pub(crate) fn release_caches(device: Device) -> Result<()> {
    index(device, "releasing device caches")?;
    check(mf_device_release_caches())
}

/// Free and total bytes of the device.
pub(crate) fn memory(device: Device) -> Result<(u64, u64)> {
    let index = index(device, "device memory")?;
    let (mut free, mut total) = (0, 0);
    // SAFETY: both are writable for the call.
    check(unsafe { mf_device_memory(index, &mut free, &mut total) })?;
    Ok((free, total))
}

/// A stream of an accelerator.
#[derive(Debug)]
pub(crate) struct Stream(*mut RawStream);

// SAFETY: a stream handle is a device and an id, plain data; any thread may queue on it.
unsafe impl Send for Stream {}
// SAFETY: as above; libtorch locks what the id leads to.
unsafe impl Sync for Stream {}

impl Stream {
    /// The one that this thread queues on now.
    pub(crate) fn current(device: Device) -> Result<Self> {
        let index = index(device, "a stream")?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: `stream` is writable; on success it holds an owned handle.
        check(unsafe { mf_stream_current(index, &mut stream) })?;
        Ok(Self(stream))
    }

    /// One from the device's pool.
    pub(crate) fn new(device: Device) -> Result<Self> {
        let index = index(device, "a stream")?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: `stream` is writable; on success it holds an owned handle.
        check(unsafe { mf_stream_new(index, &mut stream) })?;
        Ok(Self(stream))
    }

    /// Makes it this thread's current stream until the guard is dropped.
    pub(crate) fn enter(&self) -> Result<StreamGuard> {
        let mut former = std::ptr::null_mut();
        // SAFETY: the stream is alive; `former` is writable and then owned.
        check(unsafe { mf_stream_enter(self.0, &mut former) })?;
        Ok(StreamGuard { former: Self(former), thread: std::marker::PhantomData })
    }

    /// Marks a point behind the work queued so far.
    pub(crate) fn record(&self) -> Result<Event> {
        let mut event = std::ptr::null_mut();
        // SAFETY: the stream is alive; `event` is writable and then owned.
        check(unsafe { mf_event_record(self.0, &mut event) })?;
        Ok(Event(event))
    }

    /// Later work of this stream waits for the event.
    pub(crate) fn wait(&self, event: &Event) -> Result<()> {
        // SAFETY: both handles are alive.
        check(unsafe { mf_event_block(event.0, self.0) })
    }

    /// Keeps a tensor's bytes from being reused before this stream's work so far is done.
    pub(crate) fn uses(&self, tensor: &Tensor) -> Result<()> {
        // SAFETY: the stream is alive, the tensor borrowed for the call.
        check(unsafe { mf_stream_uses(self.0, tensor.as_ptr()) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and freed once.
        unsafe { mf_stream_free(self.0) };
    }
}

/// Puts the former stream back.
#[derive(Debug)]
#[must_use = "the former stream comes back when this is dropped"]
pub(crate) struct StreamGuard {
    former: Stream,
    /// The current stream belongs to a thread.
    thread: std::marker::PhantomData<*const ()>,
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        let mut left = std::ptr::null_mut();
        // SAFETY: the former stream is alive; `left` is writable and then owned.
        if check(unsafe { mf_stream_enter(self.former.0, &mut left) }).is_ok() {
            drop(Stream(left));
        }
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub(crate) struct Event(*mut RawEvent);

// SAFETY: an event handle may be waited for, asked and freed by any one thread.
unsafe impl Send for Event {}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and freed once.
        unsafe { mf_event_free(self.0) };
    }
}
