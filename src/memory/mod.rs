//! Memory, counted: live and peak bytes per device, peaks of scopes, a hard limit.
//!
//! Every byte that libtorch asks of its CPU allocator is counted, exactly and from before
//! `main` on, so that two equal runs give the same peak to the byte. On CUDA the figures
//! are those of libtorch's caching allocator.
//!
//! *Cost*: 64 bytes and four atomic operations per allocation on the CPU; nothing per
//! tensor operation. Reading figures does not wait for a device.
//!
//! *Limits*: what oneDNN, MKL and the C heap take is not libtorch's and not counted;
//! [`uncounted`] tells how much the process holds beside. `docs/memory-model.md` has the gap
//! for a convolution, a matmul and bf16.
//!
//! ```
//! use memfit::memory;
//! use tch::{Device, Kind, Tensor};
//!
//! let (sum, peak) = memory::peak_of(Device::Cpu, || {
//!     let a = Tensor::ones([256, 256], (Kind::Float, Device::Cpu));
//!     (&a + &a).sum(Kind::Float)
//! })?;
//! assert!(peak >= 2 * 256 * 256 * 4);
//! println!("{sum:?} {}\n{}", memory::Bytes(peak), memory::summary());
//! # Ok::<(), memfit::Error>(())
//! ```

mod advice;
mod bytes;
mod chart;
mod estimate;
mod export;
mod extrapolate;
mod failure;
mod leaks;
mod limit;
mod monitor;
mod peak;
mod phase;
mod profiler;
mod recording;
mod replay;
mod role;
mod summary;
mod system;
mod tables;
mod timeline;

pub use advice::{Advice, Help, Where};
pub use bytes::{Bytes, parse_bytes};
pub use chart::ResidentChart;
pub use estimate::{Activations, Estimate, EstimateError, Held, Home};
pub use extrapolate::How;
pub(crate) use extrapolate::{Foreseen, Trial, alike, along, foresee};
pub(crate) use failure::out_of_memory;
pub(crate) use leaks::listed as listed_sites;
pub use leaks::{LeakScope, Site};
pub use limit::{FailAt, Limit};
pub use monitor::{
    CgroupReading, DeviceReading, Monitor, MonitorConfig, MonitorSummary, Reading, WARNINGS, Warning,
};
pub use peak::{PeakScope, peak_of};
pub(crate) use phase::recompute;
pub use phase::{InPhase, InSegment, Phase, segment};
pub(crate) use profiler::Session as ProfilerSession;
pub use profiler::{Figures, Operator, Profile, Profiler, Profiling, SortBy};
pub use recording::{EVENTS, Recording};
pub(crate) use recording::{Marks, Ring};
pub use role::{InRole, Role, RoleBytes};
pub use summary::summary;
pub use system::{Finding, Gpu, Pool, Severity, SystemReport, system_report};
pub use timeline::{Block, Holder, Moment, Peak, Refusal, Span, Timeline};

pub use crate::sys::cgroup::{Cgroup, CgroupVersion};
pub use crate::sys::machine::{Commit, HugePages, Overcommit, PinnedLimit, Ram, Swap};
pub use crate::sys::resident::Resident;

use tch::Device;

use crate::error::{Error, Result};
use crate::{ffi, sys};

/// What a device's allocator has counted.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Live bytes.
    pub current: u64,
    /// Highest live bytes since the process started or [`reset_peak`].
    pub peak: u64,
    /// Bytes ever allocated.
    pub allocated: u64,
    /// Bytes ever freed.
    pub freed: u64,
    /// Blocks ever allocated.
    pub allocations: u64,
    /// Blocks ever freed.
    pub frees: u64,
    /// Requests that failed.
    pub failures: u64,
    /// Bytes held from the device, caches included; on the CPU the live bytes.
    pub reserved: u64,
    /// Requests that succeeded after caches were given back; 0 on the CPU, which has none.
    pub retries: u64,
    /// Highest number of live blocks, where the device counts it.
    pub peak_blocks: Option<u64>,
    /// Highest `reserved`, where the device counts it.
    pub peak_reserved: Option<u64>,
    /// Bytes of split blocks that hold device memory and nobody uses, where it has such.
    pub inactive: Option<u64>,
}

/// The figures of a device.
///
/// # Errors
/// [`Error::Unsupported`] for a device that is not there or that libtorch does not count.
pub fn stats(device: Device) -> Result<Stats> {
    if device != Device::Cpu {
        let raw = ffi::device::stats(device)?;
        return Ok(Stats {
            current: raw.current.unsigned_abs(),
            peak: peak::device_peak(device)?,
            allocated: raw.allocated.unsigned_abs(),
            freed: raw.freed.unsigned_abs(),
            allocations: raw.allocations.unsigned_abs(),
            frees: raw.frees.unsigned_abs(),
            failures: raw.failures.unsigned_abs(),
            reserved: raw.reserved.unsigned_abs(),
            retries: raw.retries.unsigned_abs(),
            peak_blocks: Some(raw.peak_blocks.unsigned_abs()),
            peak_reserved: Some(raw.peak_reserved.unsigned_abs()),
            inactive: Some(raw.inactive.unsigned_abs()),
        });
    }
    counted()?;
    let raw = ffi::memory::stats();
    Ok(Stats {
        current: raw.current,
        peak: raw.peak,
        allocated: raw.allocated,
        freed: raw.freed,
        allocations: raw.allocations,
        frees: raw.frees,
        failures: raw.failures,
        reserved: raw.current,
        retries: 0,
        peak_blocks: None,
        peak_reserved: None,
        inactive: None,
    })
}

/// Starts the peak of [`stats`] again from what is live. Open scopes keep theirs.
///
/// # Errors
/// As [`stats`].
pub fn reset_peak(device: Device) -> Result<()> {
    match device {
        Device::Cpu => {
            counted()?;
            ffi::memory::reset_peak();
        }
        other => peak::reset_device_peak(other)?,
    }
    Ok(())
}

/// The hard limit that holds on the CPU now, in bytes; see [`Limit`].
pub fn limit() -> Option<u64> {
    Some(ffi::memory::stats().limit).filter(|bytes| *bytes != u64::MAX)
}

/// Free and total bytes of an accelerator.
///
/// # Errors
/// [`Error::Unsupported`] for the CPU and for a device that is not there.
pub fn device_memory(device: Device) -> Result<(u64, u64)> {
    ffi::device::memory(device)
}

/// Gives memory that is held but not in use back to the system: the C heap's free pages
/// and, for an accelerator, its cached blocks.
///
/// # Errors
/// [`Error::Unsupported`] for a device that is not there.
pub fn release_caches(device: Device) -> Result<()> {
    if device != Device::Cpu {
        ffi::device::release_caches(device)?;
    }
    sys::heap::trim();
    Ok(())
}

/// What the system says that this process keeps in memory; [`Resident`] tells how exact that is.
///
/// # Errors
/// [`Error::Unsupported`] outside Linux.
pub fn resident() -> Result<Resident> {
    sys::resident::read()
}

/// Resident anonymous bytes beyond those that libtorch's CPU allocator counts as live: the
/// program itself, the C heap's free pages, oneDNN and MKL. 0 where counted bytes have not
/// been touched yet and are more.
///
/// # Errors
/// As [`resident`].
pub fn uncounted() -> Result<u64> {
    counted()?;
    Ok(resident()?.anonymous.saturating_sub(ffi::memory::stats().current))
}

/// An error where the CPU allocator is not the counting one.
fn counted() -> Result<()> {
    if ffi::memory::counted() {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: "counting CPU memory".to_owned(),
        place: "beside the CPU allocator that this program has set".to_owned(),
        remedy: "set that allocator before memfit is loaded, so that memfit wraps it".to_owned(),
    })
}
