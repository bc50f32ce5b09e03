//! The counting CPU allocator.

use std::os::raw::c_int;

use crate::error::{Error, Result};

/// `mf_cpu_stats` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CpuStats {
    pub(crate) current: u64,
    pub(crate) peak: u64,
    pub(crate) allocated: u64,
    pub(crate) freed: u64,
    pub(crate) allocations: u64,
    pub(crate) frees: u64,
    pub(crate) failures: u64,
    pub(crate) limit: u64,
}

unsafe extern "C" {
    safe fn mf_cpu_counted() -> c_int;
    fn mf_cpu_read(out: *mut CpuStats);
    safe fn mf_cpu_reset_peak();
    safe fn mf_cpu_set_limit(bytes: u64);
    safe fn mf_cpu_fail_at(n: u64);
    safe fn mf_watermark_open() -> c_int;
    fn mf_watermark_peak(mark: c_int) -> u64;
    fn mf_watermark_close(mark: c_int);
}

/// Whether libtorch's CPU allocator is the counting one.
pub(crate) fn counted() -> bool {
    mf_cpu_counted() != 0
}

/// The counters now.
pub(crate) fn stats() -> CpuStats {
    let mut stats = CpuStats::default();
    // SAFETY: `stats` is writable for the call.
    unsafe { mf_cpu_read(&mut stats) };
    stats
}

/// The process-wide peak starts again from what is live.
pub(crate) fn reset_peak() {
    mf_cpu_reset_peak();
}

/// Sets the hard limit; `None` is none.
pub(crate) fn set_limit(bytes: Option<u64>) {
    mf_cpu_set_limit(bytes.unwrap_or(u64::MAX));
}

/// Refuses the `n`-th request from now, once; 0 calls it off.
pub(crate) fn fail_at(n: u64) {
    mf_cpu_fail_at(n);
}

/// The highest live bytes since it was opened, those live then included.
#[derive(Debug)]
pub(crate) struct Watermark(c_int);

impl Watermark {
    /// Opens one.
    pub(crate) fn open() -> Result<Self> {
        match mf_watermark_open() {
            mark if mark >= 0 => Ok(Self(mark)),
            _ => Err(Error::CallOrder {
                call: "PeakScope::new",
                state: "while 64 scopes are open".to_owned(),
                remedy: "drop one first",
            }),
        }
    }

    /// Its value now.
    pub(crate) fn peak(&self) -> u64 {
        // SAFETY: the mark is open: it came from `mf_watermark_open` and closes on drop.
        unsafe { mf_watermark_peak(self.0) }
    }
}

impl Drop for Watermark {
    fn drop(&mut self) {
        // SAFETY: the mark is open and is closed once.
        unsafe { mf_watermark_close(self.0) };
    }
}
