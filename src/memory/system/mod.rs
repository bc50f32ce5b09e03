//! What this machine gives, and what stands in the way of training on it.

mod finding;
#[cfg(test)]
mod tests;

use std::fmt::{self, Display, Formatter};

use tch::Device;

pub use finding::{Finding, Pool, Severity};

use super::bytes::readable;
use super::summary::name;
use crate::error::Result;
use crate::ffi;
use crate::sys::cgroup::{Cgroup, CgroupVersion, Groups};
use crate::sys::machine::{Commit, HugePages, Machine, Overcommit, PinnedLimit, Ram, Swap};

/// What this machine gives, and what is wrong with it for training.
///
/// `Display` writes it for a reader who has never looked at such figures; `docs/system.md`
/// explains each line.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq)]
pub struct SystemReport {
    /// The machine's memory.
    pub ram: Ram,
    /// Its swap space.
    pub swap: Swap,
    /// The control group that binds this process; `None` where there is none.
    pub cgroup: Option<Cgroup>,
    /// What the kernel has promised to programs; `None` where it does not say.
    pub commit: Option<Commit>,
    /// How much memory this process may lock into RAM.
    pub pinned_limit: PinnedLimit,
    /// The kernel's way with huge pages; `None` where it has none.
    pub huge_pages: Option<HugePages>,
    /// The accelerators that libtorch sees.
    pub gpus: Vec<Gpu>,
    /// The version of NVIDIA's kernel module, where there is one.
    pub driver: Option<String>,
    /// What to know before training here, the worst first.
    pub findings: Vec<Finding>,
}

/// An accelerator.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its name in tch.
    pub device: Device,
    /// Bytes of its memory that nobody has taken.
    pub free: u64,
    /// Bytes of its memory.
    pub total: u64,
}

/// Reads what this machine gives and what is wrong with it for training.
///
/// *Cost*: some files of `/proc` and `/sys`. It changes nothing and starts no command. On a
/// machine with a GPU libtorch makes its context there, if it has none yet.
///
/// ```
/// use memfit::memory::{self, Severity};
///
/// let report = memory::system_report()?;
/// println!("{report}");
/// for finding in &report.findings {
///     if finding.severity() == Severity::Problem {
///         eprintln!("{finding}:\n  {}", finding.commands().join("\n  "));
///     }
/// }
/// assert!(report.ram.available <= report.ram.total);
/// # Ok::<(), memfit::Error>(())
/// ```
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) outside Linux, [`Error::Io`](crate::Error::Io)
/// where `/proc/meminfo` cannot be read.
pub fn system_report() -> Result<SystemReport> {
    let devices = (0..ffi::device::count()).map(Device::Cuda);
    let gpu = |device| {
        let (free, total) = super::device_memory(device).ok()?;
        Some(Gpu { device, free, total })
    };
    SystemReport::of(&Machine::here(), devices.filter_map(gpu).collect())
}

impl SystemReport {
    fn of(machine: &Machine, gpus: Vec<Gpu>) -> Result<Self> {
        let (ram, swap, commit) = machine.memory()?;
        let mut report = Self {
            ram,
            swap,
            cgroup: Groups::of(machine).and_then(|groups| groups.read()),
            commit,
            pinned_limit: machine.pinned_limit(),
            huge_pages: machine.huge_pages(),
            gpus,
            driver: machine.driver(),
            findings: Vec::new(),
        };
        report.findings = Finding::all(&report);
        Ok(report)
    }
}

impl Display for SystemReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let ram = &self.ram;
        writeln!(f, "the memory of this machine")?;
        let (available, free) = (readable(ram.available), readable(ram.free));
        line(f, "RAM", format!("{}, {available} available to programs", readable(ram.total)))?;
        let cache = readable(ram.page_cache);
        line(f, "", format!("{free} unused, {cache} page cache that gives way when memory is wanted"))?;
        line(f, "swap", swap(&self.swap))?;
        line(f, "cgroup", self.cgroup.as_ref().map_or_else(|| "none".to_owned(), cgroup))?;
        line(f, "overcommit", self.commit.as_ref().map_or_else(unknown, commit))?;
        line(f, "pinned", pinned(self.pinned_limit))?;
        line(f, "huge pages", self.huge_pages.map_or_else(unknown, huge_pages))?;
        for gpu in &self.gpus {
            let text =
                format!("{}, {} free of {}", name(gpu.device), readable(gpu.free), readable(gpu.total));
            line(f, "GPU", text)?;
        }
        if self.gpus.is_empty() {
            line(f, "GPU", "none that this libtorch sees".to_owned())?;
        }
        if let Some(driver) = &self.driver {
            line(f, "driver", format!("NVIDIA {driver}"))?;
        }
        if self.findings.is_empty() {
            return writeln!(f, "nothing here stands in the way of training");
        }
        for finding in &self.findings {
            let severity = match finding.severity() {
                Severity::Problem => "problem",
                Severity::Note => "note",
            };
            writeln!(f, "{severity}: {finding}")?;
            for command in finding.commands() {
                writeln!(f, "    $ {command}")?;
            }
        }
        Ok(())
    }
}

fn line(f: &mut Formatter<'_>, label: &str, text: String) -> fmt::Result {
    writeln!(f, "  {label:<11} {text}")
}

fn unknown() -> String {
    "unknown".to_owned()
}

fn swap(swap: &Swap) -> String {
    match swap.total {
        0 => "none".to_owned(),
        total => format!("{}, {} in use", readable(total), readable(swap.used)),
    }
}

fn cgroup(group: &Cgroup) -> String {
    let limit =
        group.limit.map_or_else(|| "no limit".to_owned(), |limit| format!("limit {}", readable(limit)));
    let mut text =
        format!("{limit}, {} in use and {} page cache", readable(group.used()), readable(group.page_cache));
    if let Some(bytes) = group.slowed_at {
        text.push_str(&format!(", slowed down from {} on", readable(bytes)));
    }
    match group.swap_limit {
        Some(0) => text.push_str(", no swap allowed"),
        Some(bytes) => text.push_str(&format!(", {} of swap allowed", readable(bytes))),
        None => {}
    }
    let version = match group.version {
        CgroupVersion::V1 => "v1",
        CgroupVersion::V2 => "v2",
    };
    format!("{text} ({version}, {})", group.folder.display())
}

fn commit(commit: &Commit) -> String {
    let (promised, limit) = (readable(commit.promised), readable(commit.limit));
    match commit.mode {
        Overcommit::Heuristic => format!("on (mode 0), {promised} promised to programs"),
        Overcommit::Always => format!("on (mode 1), {promised} promised to programs"),
        Overcommit::Never => format!("off (mode 2), {promised} of {limit} promised to programs"),
    }
}

fn pinned(limit: PinnedLimit) -> String {
    match limit {
        PinnedLimit::Bytes(bytes) => format!("at most {} (ulimit -l)", readable(bytes)),
        PinnedLimit::Unlimited => "no limit".to_owned(),
        PinnedLimit::Unknown => unknown(),
    }
}

fn huge_pages(pages: HugePages) -> String {
    match pages {
        HugePages::Always => "wherever they fit",
        HugePages::OnRequest => "where a program asks for them",
        HugePages::Never => "off",
    }
    .to_owned()
}
