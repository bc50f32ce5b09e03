use tch::Device;

use super::{Bytes, Stats, resident, stats, uncounted};
use crate::ffi;

/// A small table of the figures: one line per device and one for the process.
///
/// Bytes are in MB (10⁶). Figures that this system does not give are left out.
pub fn summary() -> String {
    let devices = std::iter::once(Device::Cpu).chain((0..ffi::device::count()).map(Device::Cuda));
    let mut table =
        row(["device", "live", "peak", "allocated in all", "blocks", "refused"].map(str::to_owned));
    for device in devices {
        if let Ok(stats) = stats(device) {
            table.push_str(&line(device, &stats));
        }
    }
    if let (Ok(resident), Ok(uncounted)) = (resident(), uncounted()) {
        let (anonymous, uncounted) = (Bytes(resident.anonymous), Bytes(uncounted));
        table.push_str(&format!("resident, anonymous {anonymous}, of which uncounted {uncounted}\n"));
    }
    table
}

fn line(device: Device, stats: &Stats) -> String {
    let name = match device {
        Device::Cuda(index) => format!("cuda:{index}"),
        other => format!("{other:?}").to_lowercase(),
    };
    row([
        name,
        Bytes(stats.current).to_string(),
        Bytes(stats.peak).to_string(),
        Bytes(stats.allocated).to_string(),
        stats.allocations.to_string(),
        stats.failures.to_string(),
    ])
}

fn row(cells: [String; 6]) -> String {
    let [device, rest @ ..] = cells;
    let rest: String = rest.iter().map(|cell| format!("{cell:>17}")).collect();
    format!("{device:<8}{rest}\n")
}
