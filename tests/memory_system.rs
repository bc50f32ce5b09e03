//! The report on this machine against the system's own figures.

use std::process::Command;

use memfit::Error;
use memfit::memory::{self, CgroupVersion, Finding, PinnedLimit, Severity};

/// The report, where there can be one.
fn report() -> Option<memory::SystemReport> {
    match memory::system_report() {
        Err(Error::Unsupported { .. }) if !cfg!(target_os = "linux") => None,
        other => Some(other.unwrap()),
    }
}

/// RAM and swap as the system call tells them.
#[cfg(target_os = "linux")]
fn sysinfo() -> (u64, u64, u64) {
    // SAFETY: all zeroes is a value of this plain struct.
    let mut info: libc::sysinfo = unsafe { std::mem::zeroed() };
    // SAFETY: `info` is writable for the call.
    assert_eq!(unsafe { libc::sysinfo(&mut info) }, 0);
    let unit = u64::from(info.mem_unit);
    let bytes = |units| units * unit;
    (bytes(info.totalram), bytes(info.totalswap), bytes(info.freeswap))
}

/// Whether a file has another one mounted over it.
#[cfg(target_os = "linux")]
fn is_mounted(file: &str) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    mounts.lines().any(|line| line.split(' ').nth(1) == Some(file))
}

#[test]
#[cfg(target_os = "linux")]
fn totals_are_those_of_the_system_call() {
    let (_, _, before) = sysinfo();
    let report = report().unwrap();
    let (ram, swap, after) = sysinfo();
    if is_mounted("/proc/meminfo") {
        eprintln!("skipped: another file lies over /proc/meminfo and tells what this container may have");
    } else {
        assert_eq!((report.ram.total, report.swap.total), (ram, swap));
        let (least, most) = (swap - before.max(after), swap - before.min(after));
        let near = least.saturating_sub(64 << 20)..=most + (64 << 20);
        assert!(near.contains(&report.swap.used), "{:?}, {near:?}", report.swap);
    }
    assert!(report.ram.free <= report.ram.total && report.ram.available <= report.ram.total);
    assert!(report.ram.page_cache + report.ram.free <= report.ram.total);
}

#[test]
#[cfg(target_os = "linux")]
fn the_pinned_limit_is_the_one_that_is_enforced() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is writable for the call.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) }, 0);
    let expected = match limit.rlim_cur {
        libc::RLIM_INFINITY => PinnedLimit::Unlimited,
        bytes => PinnedLimit::Bytes(bytes),
    };
    assert_eq!(report().unwrap().pinned_limit, expected);
}

#[test]
#[cfg(target_os = "linux")]
fn the_cgroup_is_one_that_this_process_is_in() {
    let Some(group) = report().unwrap().cgroup else {
        eprintln!("skipped: this process is in no group of memory");
        return;
    };
    let processes = |folder: &std::path::Path| std::fs::read_to_string(folder.join("cgroup.procs"));
    let mine = std::process::id().to_string();
    let mut folders = vec![group.folder.clone()];
    let own = loop {
        let folder = folders.pop().unwrap_or_else(|| panic!("this process is not in {group:?}"));
        if processes(&folder).is_ok_and(|all| all.lines().any(|id| id == mine)) {
            break folder;
        }
        let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
        folders.extend(entries.map(|entry| entry.path()).filter(|path| path.is_dir()));
    };
    let usage = ["memory.current", "memory.usage_in_bytes"];
    if group.limit.is_none() && usage.iter().any(|file| own.join(file).exists()) {
        assert_eq!(group.folder, own, "without a limit it is the innermost");
    }
    let file = match group.version {
        CgroupVersion::V1 => "memory.limit_in_bytes",
        _ => "memory.max",
    };
    let text = std::fs::read_to_string(group.folder.join(file)).unwrap_or_default();
    if let (Some(limit), Ok(told)) = (group.limit, text.trim().parse::<u64>()) {
        assert!(limit <= told, "{group:?}");
    }
    assert!(group.page_cache <= group.usage && group.used() <= group.usage);
}

#[test]
fn accelerators_are_those_of_tch() {
    let Some(report) = report() else { return };
    assert_eq!(report.gpus.len(), memfit::tch::Cuda::device_count().max(0) as usize);
    assert!(report.gpus.iter().all(|gpu| gpu.free <= gpu.total && gpu.total > 0));
}

#[test]
fn the_text_names_each_figure_and_each_finding() {
    let Some(report) = report() else { return };
    let text = report.to_string();
    for label in ["RAM", "swap", "cgroup", "overcommit", "pinned", "huge pages", "GPU"] {
        assert!(text.lines().any(|line| line.trim_start().starts_with(label)), "{label}:\n{text}");
    }
    for finding in &report.findings {
        assert!(text.contains(&finding.to_string()), "{finding}");
        assert!(finding.commands().iter().all(|command| text.contains(command)), "{finding}");
    }
    let severities: Vec<Severity> = report.findings.iter().map(Finding::severity).collect();
    assert!(severities.is_sorted_by(|a, b| a >= b), "{severities:?}");
    println!("{text}");
}

/// `sh -n` reads commands without running them.
#[test]
fn commands_are_what_a_shell_can_read() {
    let all = [
        Finding::NoSwap { ram: 8 << 30, suggested: 8 << 30 },
        Finding::OvercommitOff { limit: 1, promised: 1 },
        Finding::NearlyFull { pool: memory::Pool::Host, used: 9, total: 10 },
        Finding::CgroupLimit {
            limit: 1,
            ram: 2,
            folder: "/sys/fs/cgroup/a 'b' $(c) `d`".into(),
            version: CgroupVersion::V1,
        },
        Finding::LittlePinned { limit: 1 },
        Finding::PageCache { bytes: 1 },
    ];
    for finding in all {
        assert!(!finding.commands().is_empty(), "{finding}");
        for command in finding.commands() {
            let read = Command::new("sh").args(["-n", "-c", &command]).status();
            assert!(read.is_ok_and(|status| status.success()), "{command}");
        }
    }
}
