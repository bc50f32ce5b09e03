use std::path::Path;

use super::*;
use crate::Error;

/// A machine made of its files; those of an unremarkable large one come first.
fn report(files: &[(&str, &str)], gpus: Vec<Gpu>) -> Result<SystemReport> {
    let root = tempfile::tempdir().unwrap();
    let plain = [
        ("proc/meminfo", LARGE),
        ("proc/sys/vm/overcommit_memory", "0\n"),
        ("proc/self/limits", "Max locked memory         8388608              8388608              bytes\n"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
    ];
    for (path, text) in plain.iter().chain(files) {
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    SystemReport::of(&Machine::below(root.path()), gpus)
}

fn findings(files: &[(&str, &str)]) -> Vec<Finding> {
    report(files, Vec::new()).unwrap().findings
}

const LARGE: &str = "MemTotal: 134217728 kB\nMemFree: 120000000 kB\nMemAvailable: 130000000 kB\n\
    Buffers: 1000 kB\nCached: 2000000 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\nShmem: 0 kB\n\
    CommitLimit: 67108864 kB\nCommitted_AS: 5000000 kB\n";

/// 8 GB, three quarters of them page cache.
const SMALL: &str = "MemTotal: 8000000 kB\nMemFree: 500000 kB\nMemAvailable: 6600000 kB\n\
    Buffers: 0 kB\nCached: 6000000 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\nShmem: 0 kB\n\
    CommitLimit: 4000000 kB\nCommitted_AS: 1000000 kB\n";

const GPU: Gpu = Gpu { device: Device::Cuda(0), free: 70_000_000_000, total: 80_000_000_000 };

#[test]
fn a_large_machine_has_no_findings() {
    let report = report(&[], Vec::new()).unwrap();
    assert_eq!(report.findings, []);
    assert!(report.to_string().contains("nothing here stands in the way of training"), "{report}");
}

#[test]
fn a_small_machine_without_swap_is_told_how_to_add_it() {
    let all = findings(&[("proc/meminfo", SMALL)]);
    let (ram, suggested) = (8_000_000 * 1024, 8 << 30);
    assert!(all.contains(&Finding::NoSwap { ram, suggested }), "{all:?}");
    let commands = all[0].commands();
    assert_eq!(commands[0], "sudo fallocate -l 8G /swapfile", "7.6 GiB, rounded up");
    assert!(commands.iter().any(|line| line == "sudo swapon /swapfile"));
    let swap = SMALL.replace("SwapTotal: 0", "SwapTotal: 1000000");
    assert!(
        !findings(&[("proc/meminfo", &swap)]).iter().any(|found| matches!(found, Finding::NoSwap { .. }))
    );
}

#[test]
fn page_cache_is_a_note_and_not_used_memory() {
    let all = findings(&[("proc/meminfo", SMALL)]);
    let bytes = 6_000_000 * 1024;
    assert_eq!(all.last(), Some(&Finding::PageCache { bytes }), "notes come last");
    assert!(!all.iter().any(|found| matches!(found, Finding::NearlyFull { .. })), "6.6 of 8 are available");
    assert_eq!(all[1].severity(), Severity::Note);
}

#[test]
fn memory_without_page_cache_to_give_back_is_nearly_full() {
    let text =
        |available: u64| LARGE.replace("MemAvailable: 130000000", &format!("MemAvailable: {available}"));
    let full = findings(&[("proc/meminfo", &text(13_421_772))]);
    let (used, total) = ((134_217_728 - 13_421_772) * 1024, 134_217_728 * 1024);
    assert_eq!(full, [Finding::NearlyFull { pool: Pool::Host, used, total }]);
    assert_eq!(findings(&[("proc/meminfo", &text(13_421_774))]), [], "a bit more than a tenth");
}

#[test]
fn overcommit_that_is_off_comes_with_what_is_promised() {
    let all = findings(&[("proc/sys/vm/overcommit_memory", "2\n")]);
    let (limit, promised) = (67_108_864 * 1024, 5_000_000 * 1024);
    assert_eq!(all, [Finding::OvercommitOff { limit, promised }]);
    assert_eq!(all[0].commands(), ["sudo sysctl vm.overcommit_memory=0"]);
    assert_eq!(findings(&[("proc/sys/vm/overcommit_memory", "1\n")]), []);
}

#[test]
fn a_small_pinned_limit_matters_beside_a_gpu_alone() {
    let with = |limits: &str| report(&[("proc/self/limits", limits)], vec![GPU]).unwrap().findings;
    assert_eq!(with("Max locked memory 65536 65536 bytes\n"), [Finding::LittlePinned { limit: 65_536 }]);
    assert_eq!(with("Max locked memory unlimited unlimited bytes\n"), []);
    assert_eq!(with("Max locked memory 2147483648 unlimited bytes\n"), []);
    assert_eq!(findings(&[("proc/self/limits", "Max locked memory 65536 65536 bytes\n")]), []);
}

const MOUNT: (&str, &str) = ("proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");

#[test]
fn a_cgroup_with_less_than_the_machine_is_told_of() {
    let files = [
        MOUNT,
        ("proc/self/cgroup", "0::/job $(reboot)'s\n"),
        ("sys/fs/cgroup/job $(reboot)'s/memory.max", "4000000000\n"),
        ("sys/fs/cgroup/job $(reboot)'s/memory.current", "3900000000\n"),
        ("sys/fs/cgroup/job $(reboot)'s/memory.stat", "inactive_file 2000000000\n"),
    ];
    let all = findings(&files);
    let [Finding::CgroupLimit { limit, ram, folder, .. }] = &all[..] else { panic!("{all:?}") };
    assert_eq!((*limit, *ram), (4_000_000_000, 134_217_728 * 1024));
    assert_eq!(folder, Path::new("/sys/fs/cgroup/job $(reboot)'s"));
    let expected = r"echo max | sudo tee '/sys/fs/cgroup/job $(reboot)'\''s/memory.max'";
    assert_eq!(all[0].commands(), [expected], "what is in a name is never run");
}

#[test]
fn a_cgroup_that_is_nearly_full_is_a_problem() {
    let files = [
        MOUNT,
        ("proc/self/cgroup", "0::/job\n"),
        ("sys/fs/cgroup/job/memory.max", "4000000000\n"),
        ("sys/fs/cgroup/job/memory.current", "3900000000\n"),
        ("sys/fs/cgroup/job/memory.stat", "inactive_file 200000000\n"),
    ];
    let (used, total) = (3_700_000_000, 4_000_000_000);
    assert_eq!(findings(&files)[0], Finding::NearlyFull { pool: Pool::Cgroup, used, total });
}

#[test]
fn swap_is_not_suggested_to_a_group_that_may_not_use_it() {
    let files = [
        MOUNT,
        ("proc/meminfo", SMALL),
        ("proc/self/cgroup", "0::/job\n"),
        ("sys/fs/cgroup/job/memory.max", "max\n"),
        ("sys/fs/cgroup/job/memory.current", "39\n"),
        ("sys/fs/cgroup/job/memory.swap.max", "0\n"),
    ];
    let report = report(&files, Vec::new()).unwrap();
    assert!(!report.findings.iter().any(|found| matches!(found, Finding::NoSwap { .. })));
    assert!(report.to_string().contains("no swap allowed"), "{report}");
}

#[test]
fn a_system_without_these_files_is_not_supported() {
    let root = tempfile::tempdir().unwrap();
    let outcome = SystemReport::of(&Machine::below(root.path()), Vec::new());
    assert!(matches!(outcome, Err(Error::Unsupported { .. })), "{outcome:?}");
    let strange = report(&[("proc/meminfo", "nothing that is known\n")], Vec::new());
    assert!(matches!(strange, Err(Error::Unsupported { .. })), "{strange:?}");
}

#[test]
fn a_meminfo_that_cannot_be_read_is_an_error_of_its_file() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(root.path().join("proc/meminfo")).unwrap();
    let outcome = SystemReport::of(&Machine::below(root.path()), Vec::new());
    assert!(matches!(&outcome, Err(Error::Io { path, .. }) if path.ends_with("proc/meminfo")), "{outcome:?}");
}

#[test]
fn what_a_system_does_not_tell_is_left_open() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(root.path().join("proc")).unwrap();
    std::fs::write(root.path().join("proc/meminfo"), LARGE).unwrap();
    let report = SystemReport::of(&Machine::below(root.path()), Vec::new()).unwrap();
    assert_eq!((report.cgroup, report.commit, report.huge_pages, report.driver), (None, None, None, None));
    assert_eq!(report.pinned_limit, PinnedLimit::Unknown);
}

#[test]
fn the_text_has_every_figure_in_words() {
    let files = [
        ("proc/meminfo", SMALL),
        ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu\n"),
    ];
    let text = report(&files, vec![GPU]).unwrap().to_string();
    for part in [
        "8.2 GB, 6.8 GB available to programs",
        "512.0 MB unused, 6.1 GB page cache",
        "swap        none",
        "on (mode 0), 1.0 GB promised",
        "at most 8.4 MB (ulimit -l)",
        "cuda:0, 70.0 GB free of 80.0 GB",
        "NVIDIA 535.129.03",
        "problem: no swap",
        "    $ sudo mkswap /swapfile",
        "note: 6.1 GB only look used",
    ] {
        assert!(text.contains(part), "{part} is missing:\n{text}");
    }
    assert!(text.lines().all(|line| line.len() < 250), "{text}");
}
