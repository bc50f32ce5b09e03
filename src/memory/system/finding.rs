use std::fmt::{self, Display, Formatter};
use std::path::{Path, PathBuf};

use super::{Gpu, SystemReport};
use crate::memory::bytes::readable;
use crate::sys::cgroup::CgroupVersion;
use crate::sys::machine::{Overcommit, PinnedLimit};

const GIB: u64 = 1 << 30;

/// Machines with less RAM than this want swap.
const SMALL: u64 = 32 * GIB;

/// A limit on locked memory below this is small beside a GPU.
const LITTLE_PINNED: u64 = GIB;

/// Something about a machine that whoever trains there should know.
///
/// `Display` says it in one sentence; [`commands`](Finding::commands) are what a person would
/// run. memfit runs none of them.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// A small machine has no swap.
    NoSwap {
        /// Bytes of RAM.
        ram: u64,
        /// Bytes of swap to add.
        suggested: u64,
    },
    /// The kernel promises no more memory than it has.
    OvercommitOff {
        /// The most that it promises to all programs together.
        limit: u64,
        /// What is promised now.
        promised: u64,
    },
    /// Most of the memory is in use, page cache left out.
    NearlyFull {
        /// Which memory.
        pool: Pool,
        /// Bytes in use.
        used: u64,
        /// Bytes that there are.
        total: u64,
    },
    /// The control group has less memory than the machine.
    CgroupLimit {
        /// Its limit, in bytes.
        limit: u64,
        /// The machine's RAM, in bytes.
        ram: u64,
        /// The group's folder.
        folder: PathBuf,
        /// The interface, which names the limit's file.
        version: CgroupVersion,
    },
    /// There is a GPU, and the process may lock little memory.
    LittlePinned {
        /// The limit, in bytes.
        limit: u64,
    },
    /// Much of the memory that looks used is page cache.
    PageCache {
        /// Its bytes.
        bytes: u64,
    },
}

/// A store of memory that can run full.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pool {
    /// The machine's RAM.
    Host,
    /// What the control group may use.
    Cgroup,
}

/// How bad a finding is; the worst is the highest.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Good to know.
    Note,
    /// Training may fail, or crawl, because of it.
    Problem,
}

impl Pool {
    /// Its name in texts and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Cgroup => "cgroup",
        }
    }
}

impl Finding {
    /// All of a machine, the worst first.
    pub(super) fn all(report: &SystemReport) -> Vec<Self> {
        let mut all = Vec::new();
        all.extend(nearly_full(report));
        all.extend(overcommit(report));
        all.extend(no_swap(report));
        all.extend(cgroup_limit(report));
        all.extend(little_pinned(report.pinned_limit, &report.gpus));
        all.extend(page_cache(report));
        all.sort_by_key(|finding| std::cmp::Reverse(finding.severity()));
        all
    }

    /// How bad it is.
    pub fn severity(&self) -> Severity {
        match self {
            Self::NoSwap { .. } | Self::OvercommitOff { .. } | Self::NearlyFull { .. } => Severity::Problem,
            Self::CgroupLimit { .. } | Self::LittlePinned { .. } | Self::PageCache { .. } => Severity::Note,
        }
    }

    /// What a person would type in a shell to change it or to look closer, line by line.
    ///
    /// Read `docs/system.md` first; those that begin with `sudo`, or pipe into it, change the
    /// machine for everybody on it.
    pub fn commands(&self) -> Vec<String> {
        match self {
            Self::NoSwap { suggested, .. } => vec![
                format!("sudo fallocate -l {}G /swapfile", suggested / GIB),
                "sudo chmod 600 /swapfile".to_owned(),
                "sudo mkswap /swapfile".to_owned(),
                "sudo swapon /swapfile".to_owned(),
            ],
            Self::OvercommitOff { .. } => vec!["sudo sysctl vm.overcommit_memory=0".to_owned()],
            Self::NearlyFull { .. } => vec!["ps -eo pid,rss,args --sort=-rss | head".to_owned()],
            Self::CgroupLimit { folder, version, .. } => {
                let (none, file) = match version {
                    CgroupVersion::V1 => ("-1", "memory.limit_in_bytes"),
                    CgroupVersion::V2 => ("max", "memory.max"),
                };
                vec![format!("echo {none} | sudo tee {}", quoted(&folder.join(file)))]
            }
            Self::LittlePinned { .. } => vec![
                "echo \"$USER - memlock unlimited\" | sudo tee /etc/security/limits.d/90-memlock.conf"
                    .to_owned(),
            ],
            Self::PageCache { .. } => vec!["free -h".to_owned()],
        }
    }
}

fn nearly_full(report: &SystemReport) -> Vec<Finding> {
    let host = (Pool::Host, report.ram.used(), report.ram.total);
    let group = report.cgroup.as_ref().and_then(|group| Some((Pool::Cgroup, group.used(), group.limit?)));
    let pools = [Some(host), group].into_iter().flatten();
    let full = pools.filter(|(_, used, total)| u128::from(*used) * 10 >= u128::from(*total) * 9);
    full.map(|(pool, used, total)| Finding::NearlyFull { pool, used, total }).collect()
}

fn overcommit(report: &SystemReport) -> Option<Finding> {
    let commit = report.commit.filter(|commit| commit.mode == Overcommit::Never)?;
    Some(Finding::OvercommitOff { limit: commit.limit, promised: commit.promised })
}

fn no_swap(report: &SystemReport) -> Option<Finding> {
    let ram = report.ram.total;
    // Swap on the machine is of no use to a group that may not use it.
    let forbidden = report.cgroup.as_ref().is_some_and(|group| group.swap_limit == Some(0));
    let suggested = ram.div_ceil(GIB).clamp(2, 8) * GIB;
    (report.swap.total == 0 && ram < SMALL && !forbidden).then_some(Finding::NoSwap { ram, suggested })
}

fn cgroup_limit(report: &SystemReport) -> Option<Finding> {
    let group = report.cgroup.as_ref()?;
    let (limit, ram) = (group.limit?, report.ram.total);
    let (folder, version) = (group.folder.clone(), group.version);
    (limit < ram).then_some(Finding::CgroupLimit { limit, ram, folder, version })
}

fn little_pinned(limit: PinnedLimit, gpus: &[Gpu]) -> Option<Finding> {
    match limit {
        PinnedLimit::Bytes(limit) if limit < LITTLE_PINNED && !gpus.is_empty() => {
            Some(Finding::LittlePinned { limit })
        }
        _ => None,
    }
}

fn page_cache(report: &SystemReport) -> Option<Finding> {
    let ram = &report.ram;
    let much = ram.page_cache >= ram.total / 4 && ram.free < ram.total / 2;
    much.then_some(Finding::PageCache { bytes: ram.page_cache })
}

/// A path as a shell takes it, whatever is in its name.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-@:".contains(c);
    if text.chars().all(plain) { text } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

impl Display for Finding {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&match self {
            Self::NoSwap { ram, suggested } => no_swap_text(*ram, *suggested),
            Self::OvercommitOff { limit, promised } => overcommit_text(*limit, *promised),
            Self::NearlyFull { pool, used, total } => nearly_full_text(*pool, *used, *total),
            Self::CgroupLimit { limit, ram, .. } => cgroup_limit_text(*limit, *ram),
            Self::LittlePinned { limit } => little_pinned_text(*limit),
            Self::PageCache { bytes } => page_cache_text(*bytes),
        })
    }
}

fn no_swap_text(ram: u64, suggested: u64) -> String {
    format!(
        "no swap beside {} of RAM: a short spike gets the process killed; {} of swap, which a \
         container gets from the machine around it, would take what nobody touches",
        readable(ram),
        readable(suggested)
    )
}

fn overcommit_text(limit: u64, promised: u64) -> String {
    format!(
        "overcommit is off: allocations fail once {} are promised to all programs, however much RAM is \
         free; {} are promised now",
        readable(limit),
        readable(promised)
    )
}

fn nearly_full_text(pool: Pool, used: u64, total: u64) -> String {
    let what = match pool {
        Pool::Host => "RAM",
        Pool::Cgroup => "the cgroup",
    };
    let (used, total) = (readable(used), readable(total));
    format!("{what} is nearly full: {used} of {total}, page cache left out; see who holds it")
}

fn cgroup_limit_text(limit: u64, ram: u64) -> String {
    format!(
        "this cgroup (container, job, session) has {} of the machine's {}: the process is killed at its \
         limit, not where RAM ends; raise it where the job was started, or by",
        readable(limit),
        readable(ram)
    )
}

fn little_pinned_text(limit: u64) -> String {
    format!(
        "a program may lock {} into RAM: buffers that are pinned by mlock or for RDMA fail above that \
         (CUDA's own are locked by its driver); to lift it, and log in again",
        readable(limit)
    )
}

fn page_cache_text(bytes: u64) -> String {
    format!(
        "{} only look used: they are page cache, copies of files that give way by themselves; nothing to \
         do, look at the column `available`",
        readable(bytes)
    )
}
