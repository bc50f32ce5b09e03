//! What the system says that the process keeps in memory.

use crate::error::{Error, Result};

/// Resident bytes of this process, by kind, as `/proc/self/status` tells them.
///
/// Linux counts pages apart and adds them up late, so the figures are not exact. Before 6.2 each thread keeps up to
/// 64 pages to itself. From 6.2 to 6.15 each processor keeps up to `max(32, 2 × processors)` pages that are not in
/// what is told: off by up to 1 MiB on 8 processors, by up to 128 MiB on 128.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resident {
    /// Heap, stacks and anonymous mappings: what tensors, oneDNN and the C heap hold.
    pub anonymous: u64,
    /// Pages of files, programs and libraries included: the system can drop them.
    pub file: u64,
    /// Shared memory.
    pub shared: u64,
}

/// Reads the figures.
#[cfg(target_os = "linux")]
pub(crate) fn read() -> Result<Resident> {
    let path = std::path::Path::new("/proc/self/status");
    let text = std::fs::read_to_string(path).map_err(|source| Error::Io {
        action: "reading",
        path: path.to_owned(),
        source,
    })?;
    parse(&text).ok_or_else(|| unsupported("by this kernel"))
}

/// Reads the figures.
#[cfg(not(target_os = "linux"))]
pub(crate) fn read() -> Result<Resident> {
    Err(unsupported("outside Linux"))
}

fn unsupported(place: &str) -> Error {
    Error::Unsupported {
        what: "reading resident memory".to_owned(),
        place: place.to_owned(),
        remedy: "use memory::stats, which counts libtorch's own bytes everywhere".to_owned(),
    }
}

#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
fn parse(status: &str) -> Option<Resident> {
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        let kilobytes: u64 = line.trim_end_matches("kB").trim().parse().ok()?;
        kilobytes.checked_mul(1024)
    };
    Some(Resident { anonymous: field("RssAnon:")?, file: field("RssFile:")?, shared: field("RssShmem:")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_is_read_in_kibibytes() {
        let text = "VmRSS:\t  60 kB\nRssAnon:\t      10 kB\nRssFile:\t      20 kB\nRssShmem:\t      30 kB\n";
        let read = parse(text).map(|r| (r.anonymous, r.file, r.shared));
        assert_eq!(read, Some((10 * 1024, 20 * 1024, 30 * 1024)));
        assert_eq!(parse("VmRSS: 3 kB"), None);
    }
}
