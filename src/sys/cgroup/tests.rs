use super::*;

/// A machine made of files.
fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Machine) {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let machine = Machine::below(root.path());
    (root, machine)
}

fn read(files: &[(&str, &str)]) -> Option<Cgroup> {
    let (_root, machine) = machine(files);
    Groups::of(&machine)?.read()
}

const ONE: &str = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
const OLD: &str = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
    35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
    41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";

#[test]
fn version_two_has_its_limit_usage_and_page_cache() {
    let group = read(&[
        ("proc/self/cgroup", "0::/user.slice/run.scope\n"),
        ("proc/self/mountinfo", ONE),
        ("sys/fs/cgroup/user.slice/run.scope/memory.max", "8000\n"),
        ("sys/fs/cgroup/user.slice/run.scope/memory.current", "7000\n"),
        ("sys/fs/cgroup/user.slice/run.scope/memory.high", "max\n"),
        ("sys/fs/cgroup/user.slice/run.scope/memory.swap.max", "0\n"),
        (
            "sys/fs/cgroup/user.slice/run.scope/memory.stat",
            "anon 1\nfile 9\ninactive_file 500\nactive_file 250\n",
        ),
    ]);
    let group = group.unwrap();
    assert_eq!((group.version, group.limit, group.usage), (CgroupVersion::V2, Some(8000), 7000));
    assert_eq!((group.page_cache, group.used()), (750, 6250));
    assert_eq!((group.slowed_at, group.swap_limit), (None, Some(0)));
    assert_eq!(group.folder, Path::new("/sys/fs/cgroup/user.slice/run.scope"));
}

#[test]
fn no_limit_is_none_in_both_versions() {
    let two = [
        ("proc/self/cgroup", "0::/job\n"),
        ("proc/self/mountinfo", ONE),
        ("sys/fs/cgroup/job/memory.max", "max\n"),
        ("sys/fs/cgroup/job/memory.current", "7000\n"),
    ];
    let group = read(&two).unwrap();
    assert_eq!((group.limit, group.usage), (None, 7000));
    let one = [
        ("proc/self/cgroup", "4:memory:/job\n0::/\n"),
        ("proc/self/mountinfo", OLD),
        ("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n"),
        ("sys/fs/cgroup/memory/job/memory.memsw.limit_in_bytes", "9223372036854771712\n"),
        ("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "7000\n"),
    ];
    let group = read(&one).unwrap();
    assert_eq!((group.version, group.limit, group.swap_limit), (CgroupVersion::V1, None, None));
}

#[test]
fn the_group_with_the_least_room_binds_wherever_it_is() {
    let files = |outer_usage: &'static str, inner_usage: &'static str| {
        read(&[
            ("proc/self/cgroup", "0::/outer/inner/leaf\n"),
            ("proc/self/mountinfo", ONE),
            ("sys/fs/cgroup/outer/memory.max", "10000"),
            ("sys/fs/cgroup/outer/memory.current", outer_usage),
            ("sys/fs/cgroup/outer/memory.high", "9500"),
            ("sys/fs/cgroup/outer/memory.swap.max", "max"),
            ("sys/fs/cgroup/outer/inner/memory.max", "6000"),
            ("sys/fs/cgroup/outer/inner/memory.current", inner_usage),
            ("sys/fs/cgroup/outer/inner/memory.high", "max"),
            ("sys/fs/cgroup/outer/inner/memory.swap.max", "40"),
            ("sys/fs/cgroup/outer/inner/leaf/memory.max", "max"),
            ("sys/fs/cgroup/outer/inner/leaf/memory.current", "5"),
        ])
        .unwrap()
    };
    let inner = files("5000", "4000");
    assert_eq!((inner.limit, inner.usage), (Some(6000), 4000), "2,000 left against 5,000");
    assert_eq!(inner.folder, Path::new("/sys/fs/cgroup/outer/inner"));
    assert_eq!((inner.slowed_at, inner.swap_limit), (Some(9500), Some(40)));
    let outer = files("9000", "4000");
    assert_eq!((outer.limit, outer.usage), (Some(10_000), 9000), "1,000 left against 2,000");
}

/// It was read later than the whole, and grew in between.
#[test]
fn page_cache_is_never_more_than_all() {
    let two = [
        ("proc/self/cgroup", "0::/job\n"),
        ("proc/self/mountinfo", ONE),
        ("sys/fs/cgroup/job/memory.current", "1000"),
        ("sys/fs/cgroup/job/memory.stat", "inactive_file 900\nactive_file 300\n"),
    ];
    let one = [
        ("proc/self/cgroup", "4:memory:/job\n"),
        ("proc/self/mountinfo", OLD),
        ("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "1000"),
        ("sys/fs/cgroup/memory/job/memory.stat", "total_inactive_file 900\ntotal_active_file 300\n"),
    ];
    for files in [two, one] {
        let group = read(&files).unwrap();
        assert_eq!((group.usage, group.page_cache, group.used()), (1000, 1000, 0), "{files:?}");
    }
}

#[test]
fn page_cache_is_room() {
    let group = read(&[
        ("proc/self/cgroup", "0::/outer/inner\n"),
        ("proc/self/mountinfo", ONE),
        ("sys/fs/cgroup/outer/memory.max", "1000"),
        ("sys/fs/cgroup/outer/memory.current", "990"),
        ("sys/fs/cgroup/outer/memory.stat", "inactive_file 600\nactive_file 100\n"),
        ("sys/fs/cgroup/outer/inner/memory.max", "900"),
        ("sys/fs/cgroup/outer/inner/memory.current", "700"),
    ]);
    assert_eq!(group.unwrap().limit, Some(900), "200 left against 710");
}

#[test]
fn a_container_of_version_one_is_found_below_its_own_mount() {
    let mounts = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
    let files = [
        ("proc/self/cgroup", "9:cpuset,memory:/docker/abc\n1:name=systemd:/docker/abc\n"),
        ("proc/self/mountinfo", mounts),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "4000"),
        ("sys/fs/cgroup/memory/memory.memsw.limit_in_bytes", "4500"),
        ("sys/fs/cgroup/memory/memory.usage_in_bytes", "3000"),
        (
            "sys/fs/cgroup/memory/memory.stat",
            "inactive_file 1\ntotal_inactive_file 300\ntotal_active_file 200\n\
             hierarchical_memory_limit 3500\nhierarchical_memsw_limit 9223372036854771712\n",
        ),
    ];
    let group = read(&files).unwrap();
    assert_eq!(group.folder, Path::new("/sys/fs/cgroup/memory"));
    assert_eq!((group.limit, group.usage), (Some(3500), 3000), "an outer group is stricter");
    assert_eq!((group.page_cache, group.swap_limit), (500, Some(1000)));
}

#[test]
fn groups_of_version_one_that_are_apart_do_not_bind() {
    let files = |joined: &'static str| {
        read(&[
            ("proc/self/cgroup", "4:memory:/outer/inner\n"),
            ("proc/self/mountinfo", OLD),
            ("sys/fs/cgroup/memory/outer/memory.limit_in_bytes", "1000"),
            ("sys/fs/cgroup/memory/outer/memory.usage_in_bytes", "900"),
            ("sys/fs/cgroup/memory/outer/memory.use_hierarchy", joined),
            ("sys/fs/cgroup/memory/outer/inner/memory.limit_in_bytes", "2000"),
            ("sys/fs/cgroup/memory/outer/inner/memory.usage_in_bytes", "100"),
        ])
        .unwrap()
        .limit
    };
    assert_eq!(files("1"), Some(1000));
    assert_eq!(files("0"), Some(2000));
}

#[test]
fn a_namespace_of_its_own_shows_the_group_as_the_root() {
    let files = [
        ("proc/self/cgroup", "0::/\n"),
        ("proc/self/mountinfo", ONE),
        ("sys/fs/cgroup/memory.max", "4096"),
        ("sys/fs/cgroup/memory.current", "96"),
    ];
    assert_eq!(read(&files).unwrap().limit, Some(4096));
    let other = [("sys/fs/other/memory.max", "1"), ("sys/fs/other/memory.current", "0")];
    let outside = [("proc/self/cgroup", "0::/../other\n"), files[1], files[2], files[3], other[0], other[1]];
    assert_eq!(read(&outside).unwrap().limit, Some(4096), "what lies outside is not looked for");
}

#[test]
fn blanks_in_a_mount_s_path_are_found() {
    let files = [
        ("proc/self/cgroup", "0::/a job\n"),
        ("proc/self/mountinfo", "31 23 0:28 / /sys/fs/c\\040group rw - cgroup2 cgroup2 rw\n"),
        ("sys/fs/c group/a job/memory.max", "4096"),
        ("sys/fs/c group/a job/memory.current", "96"),
    ];
    assert_eq!(read(&files).unwrap().limit, Some(4096));
}

#[test]
fn without_groups_there_is_none() {
    assert_eq!(read(&[]), None);
    assert_eq!(read(&[("proc/self/cgroup", "0::/\n"), ("proc/self/mountinfo", "")]), None);
    let root = [("proc/self/cgroup", "0::/\n"), ("proc/self/mountinfo", ONE)];
    assert_eq!(read(&root), None, "the machine's own root group has no memory files");
}
