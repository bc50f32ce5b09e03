use std::fmt::Write;

use tch::Device;

use super::{Bytes, Stats, resident, stats, uncounted};
use crate::{ffi, sys};

const WIDTH: usize = 82;

/// The figures of every device as tables, laid out as `torch.cuda.memory_summary` does it, and
/// the process' resident memory.
///
/// Per device: refused requests and retries, live, peak, allocated and freed bytes and blocks;
/// what is held from the system (on the CPU by the C heap, on CUDA by the caching allocator)
/// against what is live, and the fragmentation between them. Figures that this system does not
/// give are left out. For roles and segments, print a [`Timeline`](super::Timeline).
pub fn summary() -> String {
    let devices = std::iter::once(Device::Cpu).chain((0..ffi::device::count()).map(Device::Cuda));
    let mut out = String::new();
    for device in devices {
        if let Ok(stats) = stats(device) {
            table(&mut out, device, &stats);
        }
    }
    if let (Ok(resident), Ok(uncounted)) = (resident(), uncounted()) {
        let (anonymous, uncounted) = (Bytes(resident.anonymous), Bytes(uncounted));
        let _ = writeln!(out, "resident, anonymous {anonymous}, of which uncounted {uncounted}");
    }
    out
}

/// A device as a table's heading has it.
pub(super) fn name(device: Device) -> String {
    match device {
        Device::Cuda(index) => format!("cuda:{index}"),
        other => format!("{other:?}").to_lowercase(),
    }
}

fn table(out: &mut String, device: Device, stats: &Stats) {
    let refused =
        format!("{} memory: {} refused requests, {} retries", name(device), stats.failures, stats.retries);
    rule(out, '=');
    let _ = writeln!(out, "| {refused:<width$} |", width = WIDTH - 4);
    rule(out, '-');
    row(out, "", ["now", "peak", "ever allocated", "ever freed"].map(str::to_owned));
    rule(out, '-');
    let bytes = [stats.current, stats.peak, stats.allocated, stats.freed];
    row(out, "live bytes", bytes.map(|bytes| Bytes(bytes).to_string()));
    let peak = stats.peak_blocks.map_or_else(String::new, |blocks| blocks.to_string());
    let now = stats.allocations.saturating_sub(stats.frees);
    row(out, "live blocks", [now.to_string(), peak, stats.allocations.to_string(), stats.frees.to_string()]);
    held(out, device, stats);
    rule(out, '=');
}

/// What is held from the system, and how much of it nobody uses.
fn held(out: &mut String, device: Device, stats: &Stats) {
    let (label, now, peak, unused) = match device {
        Device::Cpu => match sys::heap::held() {
            Some(heap) => ("held by the C heap", heap.held, None, heap.free),
            None => return,
        },
        _ => ("reserved", stats.reserved, stats.peak_reserved, stats.reserved.saturating_sub(stats.current)),
    };
    rule(out, '-');
    let peak = peak.map_or_else(String::new, |bytes| Bytes(bytes).to_string());
    row(out, label, [Bytes(now).to_string(), peak, String::new(), String::new()]);
    let share = format!("{:.1} % of it", 100.0 * unused as f64 / now.max(1) as f64);
    row(out, "free in it", [Bytes(unused).to_string(), String::new(), share, String::new()]);
    if let Some(inactive) = stats.inactive {
        row(
            out,
            "split, not released",
            [Bytes(inactive).to_string(), String::new(), String::new(), String::new()],
        );
    }
}

fn rule(out: &mut String, of: char) {
    let _ = writeln!(out, "|{}|", of.to_string().repeat(WIDTH - 2));
}

fn row(out: &mut String, label: &str, cells: [String; 4]) {
    let cells: String = cells.iter().map(|cell| format!(" {cell:>14}")).collect();
    let _ = writeln!(out, "| {label:<18}{cells} |");
}
