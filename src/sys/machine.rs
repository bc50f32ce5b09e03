//! What the system says of the machine's memory, as texts below `/proc` and `/sys`.

use std::io;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The machine's memory, in bytes.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ram {
    /// What is there.
    pub total: u64,
    /// What programs can still get without swapping, by the kernel's own estimate; the page
    /// cache that it would drop for them is in it.
    pub available: u64,
    /// What nobody uses for anything.
    pub free: u64,
    /// Pages of files that were read or written: dropped when a program wants the memory.
    pub page_cache: u64,
}

impl Ram {
    /// Bytes that are not available.
    pub fn used(&self) -> u64 {
        self.total.saturating_sub(self.available)
    }
}

/// Swap space, in bytes.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swap {
    /// What is there; 0 without swap.
    pub total: u64,
    /// What is in use.
    pub used: u64,
}

/// Whether the kernel promises more memory than it has (`vm.overcommit_memory`).
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overcommit {
    /// 0, the usual one: only a request that is plainly too large is refused.
    Heuristic,
    /// 1: nothing is refused.
    Always,
    /// 2: promises of all programs together stay below [`Commit::limit`].
    Never,
}

/// Memory that is promised to programs, touched or not, in bytes.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Commit {
    /// The rule.
    pub mode: Overcommit,
    /// The most that may be promised; it binds under [`Overcommit::Never`] alone.
    pub limit: u64,
    /// What is promised now.
    pub promised: u64,
}

/// How much memory the process may lock into RAM (`ulimit -l`).
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinnedLimit {
    /// So many bytes.
    Bytes(u64),
    /// No limit.
    Unlimited,
    /// The system does not say.
    Unknown,
}

/// When the kernel backs memory with huge pages of its own accord.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePages {
    /// Wherever they fit.
    Always,
    /// Where a program asks for them.
    OnRequest,
    /// Nowhere.
    Never,
}

/// A machine, by the root of its file system.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    root: PathBuf,
}

impl Machine {
    /// The one that this process runs on.
    pub(crate) fn here() -> Self {
        Self::below("/")
    }

    /// One whose `/proc` and `/sys` lie below a folder.
    pub(crate) fn below(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Where a path of the machine lies.
    pub(crate) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// A file's text, where there is one to read.
    pub(crate) fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        std::fs::read_to_string(self.path(path)).ok()
    }

    /// Memory, swap and promises.
    pub(crate) fn memory(&self) -> Result<(Ram, Swap, Option<Commit>)> {
        let path = self.path("/proc/meminfo");
        let text = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(unsupported("outside Linux"));
            }
            Err(source) => return Err(Error::Io { action: "reading", path, source }),
            Ok(text) => text,
        };
        let (ram, swap) = meminfo(&text).ok_or_else(|| unsupported("by this kernel"))?;
        let mode = self.text("/proc/sys/vm/overcommit_memory");
        let commit = mode.and_then(|mode| commit(&text, &mode));
        Ok((ram, swap, commit))
    }

    /// The process' limit on locked memory.
    pub(crate) fn pinned_limit(&self) -> PinnedLimit {
        let text = self.text("/proc/self/limits");
        text.and_then(|text| locked(&text)).unwrap_or(PinnedLimit::Unknown)
    }

    /// The kernel's way with huge pages.
    pub(crate) fn huge_pages(&self) -> Option<HugePages> {
        huge_pages(&self.text("/sys/kernel/mm/transparent_hugepage/enabled")?)
    }

    /// The version of NVIDIA's kernel module.
    pub(crate) fn driver(&self) -> Option<String> {
        driver(&self.text("/proc/driver/nvidia/version")?)
    }
}

fn unsupported(place: &str) -> Error {
    Error::Unsupported {
        what: "reading the machine's memory".to_owned(),
        place: place.to_owned(),
        remedy: "use memory::stats, which counts libtorch's own bytes everywhere".to_owned(),
    }
}

/// A field of `/proc/meminfo`, which is in kibibytes.
fn field(meminfo: &str, name: &str) -> Option<u64> {
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(':').map(str::to_owned);
    let value = meminfo.lines().find_map(value)?;
    let kibibytes: u64 = value.trim_end_matches("kB").trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

fn meminfo(text: &str) -> Option<(Ram, Swap)> {
    let field = |name| field(text, name);
    // Shared memory is counted as cache too, but only swap could take it.
    let cache = field("Buffers")?.saturating_add(field("Cached")?);
    let page_cache = cache.saturating_sub(field("Shmem").unwrap_or_default());
    let ram = Ram {
        total: field("MemTotal")?,
        available: field("MemAvailable")?,
        free: field("MemFree")?,
        page_cache,
    };
    let total = field("SwapTotal").unwrap_or_default();
    let swap = Swap { total, used: total.saturating_sub(field("SwapFree").unwrap_or_default()) };
    Some((ram, swap))
}

fn commit(meminfo: &str, mode: &str) -> Option<Commit> {
    let mode = match mode.trim() {
        "0" => Overcommit::Heuristic,
        "1" => Overcommit::Always,
        "2" => Overcommit::Never,
        _ => return None,
    };
    Some(Commit { mode, limit: field(meminfo, "CommitLimit")?, promised: field(meminfo, "Committed_AS")? })
}

/// The soft limit in `/proc/self/limits`: the one that is enforced.
fn locked(limits: &str) -> Option<PinnedLimit> {
    let rest = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    match rest.split_whitespace().next()? {
        "unlimited" => Some(PinnedLimit::Unlimited),
        bytes => bytes.parse().ok().map(PinnedLimit::Bytes),
    }
}

/// The word in brackets is the one that holds.
fn huge_pages(enabled: &str) -> Option<HugePages> {
    let (_, rest) = enabled.split_once('[')?;
    match rest.split_once(']')?.0 {
        "always" => Some(HugePages::Always),
        "madvise" => Some(HugePages::OnRequest),
        "never" => Some(HugePages::Never),
        _ => None,
    }
}

/// The first word of the module's line that is made of numbers and dots.
fn driver(version: &str) -> Option<String> {
    let line = version.lines().find(|line| line.starts_with("NVRM version:"))?;
    let number = |word: &&str| {
        word.contains('.')
            && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
    };
    line.split_whitespace().find(number).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:        8000000 kB\nMemFree:          500000 kB\n\
        MemAvailable:    3000000 kB\nBuffers:          100000 kB\nCached:          2900000 kB\n\
        SwapCached:           77 kB\nSwapTotal:       2000000 kB\nSwapFree:        1500000 kB\n\
        Shmem:            200000 kB\nCommitLimit:     6000000 kB\nCommitted_AS:    5500000 kB\n";

    #[test]
    fn meminfo_is_read_in_kibibytes() {
        let (ram, swap) = meminfo(MEMINFO).unwrap();
        let kib = |bytes: u64| bytes * 1024;
        assert_eq!((ram.total, ram.free, ram.available), (kib(8_000_000), kib(500_000), kib(3_000_000)));
        assert_eq!(ram.page_cache, kib(100_000 + 2_900_000 - 200_000), "shared memory is no file's");
        assert_eq!(ram.used(), kib(5_000_000));
        assert_eq!((swap.total, swap.used), (kib(2_000_000), kib(500_000)));
    }

    #[test]
    fn a_machine_without_swap_has_none() {
        let text = MEMINFO.replace("SwapTotal:       2000000", "SwapTotal: 0");
        let (_, swap) = meminfo(&text.replace("SwapFree:        1500000", "SwapFree: 0")).unwrap();
        assert_eq!((swap.total, swap.used), (0, 0));
    }

    #[test]
    fn texts_that_are_not_meminfo_are_refused() {
        for text in ["", "MemTotal: many kB", "MemTotal: 99999999999999999999 kB", "MemTotal: 1 kB\n"] {
            assert_eq!(meminfo(text), None, "{text}");
        }
        let huge = MEMINFO.replace("8000000", &u64::MAX.to_string());
        assert_eq!(meminfo(&huge), None, "more kibibytes than bytes can be counted");
    }

    #[test]
    fn overcommit_comes_with_its_limit() {
        let never = commit(MEMINFO, "2\n").unwrap();
        assert_eq!(never.mode, Overcommit::Never);
        assert_eq!((never.limit, never.promised), (6_000_000 * 1024, 5_500_000 * 1024));
        assert_eq!(commit(MEMINFO, "0").unwrap().mode, Overcommit::Heuristic);
        assert_eq!(commit(MEMINFO, "1").unwrap().mode, Overcommit::Always);
        assert_eq!(commit(MEMINFO, "3"), None);
    }

    #[test]
    fn the_limit_on_locked_memory_is_the_soft_one() {
        let text = |soft: &str| {
            format!(
                "Limit                     Soft Limit           Hard Limit           Units     \n\
                 Max processes             96365                96365                processes \n\
                 Max locked memory         {soft}              unlimited            bytes     \n"
            )
        };
        assert_eq!(locked(&text("8388608")), Some(PinnedLimit::Bytes(8 << 20)));
        assert_eq!(locked(&text("unlimited")), Some(PinnedLimit::Unlimited));
        assert_eq!(locked("Max processes 1 1 processes"), None);
    }

    #[test]
    fn the_mode_of_huge_pages_stands_in_brackets() {
        assert_eq!(huge_pages("[always] madvise never\n"), Some(HugePages::Always));
        assert_eq!(huge_pages("always [madvise] never\n"), Some(HugePages::OnRequest));
        assert_eq!(huge_pages("always madvise [never]\n"), Some(HugePages::Never));
        assert_eq!(huge_pages("always madvise never\n"), None);
    }

    #[test]
    fn the_driver_s_version_is_found_in_both_modules_texts() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n\
            GCC version:  gcc version 12.3.0\n";
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build  (builder@host)\n";
        assert_eq!(driver(closed).as_deref(), Some("535.129.03"));
        assert_eq!(driver(open).as_deref(), Some("560.35.03"));
        assert_eq!(driver("GCC version:  gcc version 12.3.0\n"), None);
    }
}
