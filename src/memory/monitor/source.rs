use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tch::Device;

use super::reading::{CgroupReading, DeviceReading, Reading};
use crate::ffi;
use crate::memory::{Resident, resident, stats};
use crate::sys::cgroup::Groups;
use crate::sys::machine::Machine;

/// Where figures come from: the system, or a test.
pub(super) trait Source: Send {
    /// The figures now, without warnings.
    fn read(&mut self) -> Reading;
}

/// This process on this machine.
#[derive(Debug)]
pub(super) struct Here {
    /// Of the first reading, whose time is 0: a file of several runs shows where each began.
    start: Option<Instant>,
    machine: Machine,
    groups: Option<Groups>,
    devices: Vec<Device>,
}

impl Here {
    pub(super) fn new() -> Self {
        let machine = Machine::here();
        let accelerators = (0..ffi::device::count()).map(Device::Cuda);
        let devices = std::iter::once(Device::Cpu).chain(accelerators).collect();
        Self { start: None, groups: Groups::of(&machine), machine, devices }
    }
}

impl Source for Here {
    fn read(&mut self) -> Reading {
        let memory = self.machine.memory().ok();
        let group = self.groups.as_ref().and_then(Groups::read);
        let now = Instant::now();
        Reading {
            time: now.duration_since(*self.start.get_or_insert(now)),
            unix: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO),
            devices: self.devices.iter().filter_map(|device| counted(*device)).collect(),
            resident: own(),
            ram_total: memory.map(|(ram, ..)| ram.total),
            ram_available: memory.map(|(ram, ..)| ram.available),
            swap_used: memory.map(|(_, swap, _)| swap.used),
            cgroup: group.map(|group| CgroupReading {
                usage: group.usage,
                page_cache: group.page_cache,
                limit: group.limit,
            }),
            warnings: Vec::new(),
        }
    }
}

/// A device whose allocator nobody has used yet has no figures, and gets none.
fn counted(device: Device) -> Option<DeviceReading> {
    let stats = stats(device).ok()?;
    Some(DeviceReading { device, live: stats.current, peak: stats.peak, reserved: stats.reserved })
}

fn own() -> Option<Resident> {
    resident().ok()
}
