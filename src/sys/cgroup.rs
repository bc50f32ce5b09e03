//! The control group that the process is in, and those around it.

use std::path::{Component, Path, PathBuf};

use super::machine::Machine;

/// The memory rules of the control group (container, job, session) that binds the process.
///
/// Groups lie in each other and each may have a limit; this is the one with the least room
/// left. Without any limit it is the innermost.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup {
    /// The interface.
    pub version: CgroupVersion,
    /// The group's folder.
    pub folder: PathBuf,
    /// Bytes at which the kernel kills in the group; `None` without a limit.
    pub limit: Option<u64>,
    /// Bytes that count against the limit, page cache included.
    pub usage: u64,
    /// Page cache in [`usage`](Self::usage), which the kernel drops before it kills.
    pub page_cache: u64,
    /// Bytes from which on the group is slowed down (`memory.high`), the lowest of all groups.
    pub slowed_at: Option<u64>,
    /// Bytes of swap that the group may use, the lowest of all groups; `None` without a limit.
    pub swap_limit: Option<u64>,
}

impl Cgroup {
    /// Bytes that count against the limit and that the kernel cannot drop.
    pub fn used(&self) -> u64 {
        self.usage.saturating_sub(self.page_cache)
    }
}

/// The two interfaces of Linux to control groups.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CgroupVersion {
    /// One hierarchy per resource.
    V1,
    /// One hierarchy for all.
    V2,
}

/// Above it a limit of version 1 means none.
const NO_LIMIT: u64 = 1 << 62;

/// The groups that bind a process.
#[derive(Clone, Debug)]
pub(crate) struct Groups {
    machine: Machine,
    version: CgroupVersion,
    /// Their folders, the innermost first.
    folders: Vec<PathBuf>,
}

impl Groups {
    /// Those of this process, where memory has any.
    pub(crate) fn of(machine: &Machine) -> Option<Self> {
        let mine = machine.text("/proc/self/cgroup")?;
        let mounts = machine.text("/proc/self/mountinfo")?;
        let (version, mount, inside) = locate(&mine, &mounts)?;
        let folders = inside.ancestors().map(|inner| match inner.as_os_str().is_empty() {
            true => mount.clone(),
            false => mount.join(inner),
        });
        Some(Self { machine: machine.clone(), version, folders: folders.collect() })
    }

    /// The binding one now.
    pub(crate) fn read(&self) -> Option<Cgroup> {
        let levels: Vec<Level> = self.levels();
        let lowest = |of: fn(&Level) -> Option<u64>| levels.iter().filter_map(of).min();
        let (slowed_at, swap_limit) = (lowest(|level| level.slowed_at), lowest(|level| level.swap_limit));
        let room = |level: &&Level| level.limit.map(|limit| (limit.saturating_sub(level.used()), limit));
        let bound = levels.iter().filter(|level| level.limit.is_some()).min_by_key(room);
        let level = bound.or(levels.first())?;
        Some(Cgroup {
            version: self.version,
            folder: level.folder.clone(),
            limit: level.limit,
            usage: level.usage,
            page_cache: level.page_cache,
            slowed_at,
            swap_limit,
        })
    }

    fn levels(&self) -> Vec<Level> {
        let mut levels = Vec::new();
        for folder in &self.folders {
            // Groups of version 1 could be told to leave those in them alone.
            let apart = self.version == CgroupVersion::V1
                && !levels.is_empty()
                && self.text(folder, "memory.use_hierarchy").is_some_and(|text| text.trim() == "0");
            if apart {
                break;
            }
            levels.extend(self.level(folder));
        }
        levels
    }

    /// A group's figures. They are read one after the other, so its page cache may be told larger than all of it
    /// was a moment before.
    fn level(&self, folder: &Path) -> Option<Level> {
        let mut level = self.figures(folder)?;
        level.page_cache = level.page_cache.min(level.usage);
        Some(level)
    }

    fn figures(&self, folder: &Path) -> Option<Level> {
        let number = |name: &str| self.text(folder, name).and_then(|text| text.trim().parse().ok());
        let stat = self.text(folder, "memory.stat").unwrap_or_default();
        let sum = |names: [&str; 2]| names.iter().filter_map(|name| counted(&stat, name)).sum();
        let folder = folder.to_owned();
        match self.version {
            CgroupVersion::V2 => Some(Level {
                usage: number("memory.current")?,
                limit: number("memory.max"),
                page_cache: sum(["inactive_file", "active_file"]),
                slowed_at: number("memory.high"),
                swap_limit: number("memory.swap.max"),
                folder,
            }),
            CgroupVersion::V1 => {
                // Two files each: the second one knows of groups that a container cannot see.
                let least = |file: &str, line: &str| -> Option<u64> {
                    let both = [number(file), counted(&stat, line)];
                    both.into_iter().flatten().filter(|bytes| *bytes < NO_LIMIT).min()
                };
                let limit = least("memory.limit_in_bytes", "hierarchical_memory_limit");
                let with_swap = least("memory.memsw.limit_in_bytes", "hierarchical_memsw_limit");
                Some(Level {
                    usage: number("memory.usage_in_bytes")?,
                    limit,
                    page_cache: sum(["total_inactive_file", "total_active_file"]),
                    slowed_at: None,
                    swap_limit: with_swap.and_then(|bytes| Some(bytes.saturating_sub(limit?))),
                    folder,
                })
            }
        }
    }

    fn text(&self, folder: &Path, name: &str) -> Option<String> {
        self.machine.text(folder.join(name))
    }
}

/// One group.
struct Level {
    folder: PathBuf,
    limit: Option<u64>,
    usage: u64,
    page_cache: u64,
    slowed_at: Option<u64>,
    swap_limit: Option<u64>,
}

impl Level {
    fn used(&self) -> u64 {
        self.usage.saturating_sub(self.page_cache)
    }
}

/// A line of `memory.stat`.
fn counted(stat: &str, name: &str) -> Option<u64> {
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok();
    stat.lines().find_map(value)
}

/// Where the memory groups are mounted, and the process' own folder in there.
fn locate(cgroup: &str, mountinfo: &str) -> Option<(CgroupVersion, PathBuf, PathBuf)> {
    let mut lines = cgroup.lines().filter_map(parts);
    let first = lines.find(|[_, controllers, _]| controllers.split(',').any(|name| name == "memory"));
    let mut lines = cgroup.lines().filter_map(parts);
    let second = lines.find(|[id, controllers, _]| *id == "0" && controllers.is_empty());
    let (version, path) = match (first, second) {
        (Some([.., path]), _) => (CgroupVersion::V1, path),
        (None, Some([.., path])) => (CgroupVersion::V2, path),
        (None, None) => return None,
    };
    let (root, mount) = mountinfo.lines().find_map(|line| mounted(line, version))?;
    // What lies outside of the mount cannot be read, nor what is told by a way up.
    let inside = Path::new(path).strip_prefix(&root).unwrap_or(Path::new(""));
    let plain = inside.components().all(|part| matches!(part, Component::Normal(_)));
    Some((version, mount, if plain { inside.to_owned() } else { PathBuf::new() }))
}

/// Number, controllers and path of a line of `/proc/self/cgroup`.
fn parts(line: &str) -> Option<[&str; 3]> {
    let mut parts = line.splitn(3, ':');
    Some([parts.next()?, parts.next()?, parts.next()?])
}

/// Root and mount point of a line of `mountinfo`, if it mounts memory groups.
fn mounted(line: &str, version: CgroupVersion) -> Option<(PathBuf, PathBuf)> {
    let (place, kind) = line.split_once(" - ")?;
    let mut place = place.split(' ').skip(3);
    let (root, point) = (place.next()?, place.next()?);
    let mut kind = kind.split(' ');
    let (system, options) = (kind.next()?, kind.nth(1).unwrap_or_default());
    let fits = match version {
        CgroupVersion::V1 => system == "cgroup" && options.split(',').any(|name| name == "memory"),
        CgroupVersion::V2 => system == "cgroup2",
    };
    fits.then(|| (unescaped(root), unescaped(point)))
}

/// The kernel writes blanks, line ends and backslashes of a path as three octal digits.
fn unescaped(path: &str) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let code = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        let code = code.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code.filter(|_| first == b'\\') {
            Some(byte) => {
                bytes.push(byte);
                rest = after.get(3..).unwrap_or_default();
            }
            None => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    PathBuf::from(std::ffi::OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests;
