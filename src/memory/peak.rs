use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::Device;

use crate::error::Result;
use crate::ffi;

/// Remembers the highest live bytes of a device since it was made, what was live then
/// included.
///
/// Up to 64 may be open at once on the CPU, in any overlap. On CUDA each change of scopes
/// starts the device's own peak again, so that libtorch's figure is the peak since then.
///
/// ```
/// use memfit::memory::PeakScope;
/// use tch::{Device, Kind, Tensor};
///
/// let scope = PeakScope::new(Device::Cpu)?;
/// let before = scope.peak();
/// drop(Tensor::zeros([1024], (Kind::Float, Device::Cpu)));
/// assert!(scope.peak() >= before + 4096);
/// # Ok::<(), memfit::Error>(())
/// ```
#[derive(Debug)]
pub struct PeakScope {
    mark: Mark,
}

#[derive(Debug)]
enum Mark {
    Cpu(ffi::memory::Watermark),
    Device { device: Device, id: u64 },
}

impl PeakScope {
    /// Starts watching.
    ///
    /// # Errors
    /// 64 scopes are open already; a device that is not there.
    pub fn new(device: Device) -> Result<Self> {
        let mark = match device {
            Device::Cpu => {
                super::counted()?;
                Mark::Cpu(ffi::memory::Watermark::open()?)
            }
            device => Mark::Device { device, id: open_mark(device)? },
        };
        Ok(Self { mark })
    }

    /// The highest live bytes so far.
    pub fn peak(&self) -> u64 {
        match &self.mark {
            Mark::Cpu(mark) => mark.peak(),
            Mark::Device { device, id } => {
                // The device answered when the scope was made; what was folded stays true.
                let _ = fold(*device);
                marks().open.get(id).map_or(0, |(_, peak)| *peak)
            }
        }
    }
}

impl Drop for PeakScope {
    fn drop(&mut self) {
        if let Mark::Device { id, .. } = self.mark {
            marks().open.remove(&id);
        }
    }
}

/// Runs a closure and tells the highest live bytes of the device meanwhile.
///
/// # Errors
/// As [`PeakScope::new`]; the closure has not run then.
pub fn peak_of<R>(device: Device, body: impl FnOnce() -> R) -> Result<(R, u64)> {
    let scope = PeakScope::new(device)?;
    let value = body();
    Ok((value, scope.peak()))
}

/// The device's peak since the process started or its last reset. It only reads: a monitor's
/// thread asks while others allocate, and a peak between reading and resetting would be lost.
pub(super) fn device_peak(device: Device) -> Result<u64> {
    let marks = marks();
    let since = ffi::device::stats(device)?.peak.unsigned_abs();
    let before = marks.whole.iter().find(|(of, _)| *of == device);
    Ok(before.map_or(since, |(_, peak)| since.max(*peak)))
}

/// Starts the device's peak again; open scopes keep theirs.
pub(super) fn reset_device_peak(device: Device) -> Result<()> {
    fold(device)?;
    marks().whole.retain(|(of, _)| *of != device);
    fold(device)
}

/// A device has one peak of its own, which all scopes share by folding it into theirs.
struct DeviceMarks {
    next: u64,
    open: BTreeMap<u64, (Device, u64)>,
    whole: Vec<(Device, u64)>,
}

static MARKS: Mutex<DeviceMarks> =
    Mutex::new(DeviceMarks { next: 0, open: BTreeMap::new(), whole: Vec::new() });

fn marks() -> MutexGuard<'static, DeviceMarks> {
    MARKS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open_mark(device: Device) -> Result<u64> {
    fold(device)?;
    let live = ffi::device::stats(device)?.current.unsigned_abs();
    let mut marks = marks();
    let id = marks.next;
    marks.next += 1;
    marks.open.insert(id, (device, live));
    Ok(id)
}

/// Raises every mark on the device to its peak since the last fold, and starts that again.
fn fold(device: Device) -> Result<()> {
    let mut marks = marks();
    let peak = ffi::device::stats(device)?.peak.unsigned_abs();
    ffi::device::reset_peak(device)?;
    for (_, mark) in marks.open.values_mut().filter(|(of, _)| *of == device) {
        *mark = peak.max(*mark);
    }
    match marks.whole.iter_mut().find(|(of, _)| *of == device) {
        Some((_, mark)) => *mark = peak.max(*mark),
        None => marks.whole.push((device, peak)),
    }
    Ok(())
}
