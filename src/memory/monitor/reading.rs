use std::time::Duration;

use tch::Device;

use crate::memory::Resident;
use crate::memory::system::Pool;

/// What a [`Monitor`](super::Monitor) saw at one moment. Bytes throughout; what the system does
/// not tell is `None`.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    /// Since the monitor's first reading.
    pub time: Duration,
    /// Since the beginning of 1970.
    pub unix: Duration,
    /// What libtorch's allocators count, the CPU's first.
    pub devices: Vec<DeviceReading>,
    /// What this process keeps in memory.
    pub resident: Option<Resident>,
    /// The machine's RAM.
    pub ram_total: Option<u64>,
    /// RAM that programs can still get.
    pub ram_available: Option<u64>,
    /// Swap that is in use.
    pub swap_used: Option<u64>,
    /// The control group that binds this process.
    pub cgroup: Option<CgroupReading>,
    /// Warnings that began with this reading.
    pub warnings: Vec<Warning>,
}

/// What a device's allocator counted at one moment, in bytes.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceReading {
    /// The device.
    pub device: Device,
    /// Live bytes.
    pub live: u64,
    /// Highest live bytes since the process started or
    /// [`reset_peak`](crate::memory::reset_peak).
    pub peak: u64,
    /// Bytes held from the device.
    pub reserved: u64,
}

/// The control group at one moment, in bytes.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CgroupReading {
    /// What counts against the limit, page cache included.
    pub usage: u64,
    /// Page cache in it.
    pub page_cache: u64,
    /// The limit, if there is one.
    pub limit: Option<u64>,
}

/// Memory that is nearly full.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Warning {
    /// Which memory.
    pub pool: Pool,
    /// Bytes in use, page cache left out.
    pub used: u64,
    /// Bytes that there are.
    pub total: u64,
    /// When, since the monitor's first reading.
    pub time: Duration,
}

/// What a [`Monitor`](super::Monitor) saw in all: the highest of each figure, in bytes.
#[non_exhaustive]
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MonitorSummary {
    /// How many readings.
    pub readings: u64,
    /// From the first to the last of them.
    pub time: Duration,
    /// The highest of each device; `peak` is the counter's, so nothing falls between readings.
    pub devices: Vec<DeviceReading>,
    /// Highest resident bytes of this process, anonymous ones.
    pub resident: Option<u64>,
    /// Least RAM that was available.
    pub ram_available: Option<u64>,
    /// Highest swap in use.
    pub swap_used: Option<u64>,
    /// Highest usage of the control group, page cache left out.
    pub cgroup_used: Option<u64>,
    /// Warnings, the newest [`WARNINGS`](super::WARNINGS) of them.
    pub warnings: Vec<Warning>,
}

impl CgroupReading {
    /// Bytes that count against the limit and that the kernel cannot drop.
    pub fn used(&self) -> u64 {
        self.usage.saturating_sub(self.page_cache)
    }
}

impl MonitorSummary {
    /// Takes one more moment in.
    pub(super) fn add(&mut self, reading: &Reading) {
        self.readings += 1;
        self.time = reading.time;
        for now in &reading.devices {
            match self.devices.iter_mut().find(|known| known.device == now.device) {
                Some(known) => {
                    known.live = known.live.max(now.live);
                    known.peak = known.peak.max(now.peak);
                    known.reserved = known.reserved.max(now.reserved);
                }
                None => self.devices.push(*now),
            }
        }
        // `None` is less than any figure.
        self.resident = self.resident.max(reading.resident.map(|resident| resident.anonymous));
        self.swap_used = self.swap_used.max(reading.swap_used);
        self.cgroup_used = self.cgroup_used.max(reading.cgroup.as_ref().map(CgroupReading::used));
        self.ram_available = match (self.ram_available, reading.ram_available) {
            (Some(least), Some(now)) => Some(least.min(now)),
            (least, now) => least.or(now),
        };
        self.warnings.extend(&reading.warnings);
        let surplus = self.warnings.len().saturating_sub(super::WARNINGS);
        self.warnings.drain(..surplus);
    }
}
