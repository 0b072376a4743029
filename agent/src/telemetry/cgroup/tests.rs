use super::*;
use crate::telemetry::test_tree::Tree;

const V2: &str = "31 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n";
const V1: &str = "\
31 23 0:26 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct
32 23 0:27 / /sys/fs/cgroup/cpuset rw,nosuid - cgroup cgroup rw,cpuset
33 23 0:28 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory
";

fn v2_tree(path: &str) -> Tree {
    Tree::new()
        .file("/proc/self/mountinfo", V2)
        .file("/proc/self/cgroup", &format!("0::{path}\n"))
        .file(&format!("/sys/fs/cgroup{path}/cgroup.procs"), "")
}

fn v1_tree(path: &str) -> Tree {
    let tree = Tree::new().file("/proc/self/mountinfo", V1).file(
        "/proc/self/cgroup",
        &format!("4:memory:{path}\n3:cpuset:{path}\n2:cpu,cpuacct:{path}\n0::/\n"),
    );
    for controller in ["cpu,cpuacct", "cpuset", "memory"] {
        tree.set(
            &format!("/sys/fs/cgroup/{controller}{path}/cgroup.procs"),
            "",
        );
    }
    tree
}

#[test]
fn field_088_the_least_quota_of_all_ancestors_counts() {
    let tree = v2_tree("/grandparent/parent/leaf")
        .file("/sys/fs/cgroup/grandparent/cpu.max", "max 100000\n")
        .file(
            "/sys/fs/cgroup/grandparent/parent/cpu.max",
            "400000 100000\n",
        )
        .file(
            "/sys/fs/cgroup/grandparent/parent/leaf/cpu.max",
            "max 100000\n",
        );
    let limit = Cgroups::locate(&tree.root()).cpu_limit(16);
    assert_eq!((limit.cores, limit.is_limited), (4.0, true));
}

#[test]
fn field_088_a_leaf_without_the_file_is_no_different() {
    let tree = v2_tree("/grandparent/parent/leaf").file(
        "/sys/fs/cgroup/grandparent/parent/cpu.max",
        "400000 100000\n",
    );
    assert_eq!(Cgroups::locate(&tree.root()).cpu_limit(16).cores, 4.0);
}

#[test]
fn usage_is_that_of_the_group_whose_quota_binds() {
    let tree = v2_tree("/pod/container")
        .file("/sys/fs/cgroup/pod/cpu.max", "200000 100000\n")
        .file(
            "/sys/fs/cgroup/pod/cpu.stat",
            "usage_usec 900\nuser_usec 1\n",
        )
        .file("/sys/fs/cgroup/pod/container/cpu.stat", "usage_usec 5\n");
    let groups = Cgroups::locate(&tree.root());
    assert_eq!(groups.cpu_usage_ns(&groups.cpu_limit(16)), Some(900_000));
}

#[test]
fn field_089_minus_one_is_unlimited_and_the_set_of_cpus_counts() {
    let tree = v1_tree("/docker/abc")
        .file(
            "/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us",
            "-1\n",
        )
        .file(
            "/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us",
            "100000\n",
        )
        .file(
            "/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpuacct.usage",
            "4000000000\n",
        )
        .file("/sys/fs/cgroup/cpuset/docker/abc/cpuset.cpus", "0-3\n");
    let groups = Cgroups::locate(&tree.root());
    let limit = groups.cpu_limit(64);
    assert_eq!((limit.cores, limit.is_limited), (4.0, true));
    assert_eq!(groups.cpu_usage_ns(&limit), Some(4_000_000_000));
}

#[test]
fn version_1_quotas_count_over_ancestors_too() {
    let tree = v1_tree("/kube/pod")
        .file(
            "/sys/fs/cgroup/cpu,cpuacct/kube/cpu.cfs_quota_us",
            "150000\n",
        )
        .file(
            "/sys/fs/cgroup/cpu,cpuacct/kube/cpu.cfs_period_us",
            "100000\n",
        )
        .file("/sys/fs/cgroup/cpu,cpuacct/kube/cpuacct.usage", "77\n")
        .file(
            "/sys/fs/cgroup/cpu,cpuacct/kube/pod/cpu.cfs_quota_us",
            "-1\n",
        )
        .file("/sys/fs/cgroup/cpu,cpuacct/kube/pod/cpuacct.usage", "7\n");
    let groups = Cgroups::locate(&tree.root());
    let limit = groups.cpu_limit(8);
    assert_eq!(limit.cores, 1.5);
    assert_eq!(groups.cpu_usage_ns(&limit), Some(77));
}

#[test]
fn the_allowed_cpus_of_the_process_count() {
    let tree = v2_tree("/a").file("/proc/self/status", "Name:\tx\nCpus_allowed_list:\t0-1,4\n");
    assert_eq!(Cgroups::locate(&tree.root()).cpu_limit(8).cores, 3.0);
}

#[test]
fn memory_limits_are_the_least_of_all_ancestors() {
    let tree = v2_tree("/a/b")
        .file("/sys/fs/cgroup/a/memory.max", "2147483648\n")
        .file("/sys/fs/cgroup/a/memory.current", "1073741824\n")
        .file(
            "/sys/fs/cgroup/a/memory.stat",
            "anon 5\ninactive_file 73741824\n",
        )
        .file("/sys/fs/cgroup/a/b/memory.max", "max\n");
    let limit = Cgroups::locate(&tree.root()).memory_limit(64 << 30);
    assert_eq!(
        limit,
        Some(MemoryLimit {
            limit_bytes: 2 << 30,
            used_bytes: Some(1_000_000_000)
        })
    );
}

#[test]
fn version_1_says_unlimited_with_a_number() {
    let tree = v1_tree("/a").file(
        "/sys/fs/cgroup/memory/a/memory.limit_in_bytes",
        "9223372036854771712\n",
    );
    let groups = Cgroups::locate(&tree.root());
    assert_eq!(groups.memory_limit(64 << 30), None);
    tree.set(
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "1073741824\n",
    );
    tree.set("/sys/fs/cgroup/memory/memory.usage_in_bytes", "100\n");
    tree.set(
        "/sys/fs/cgroup/memory/memory.stat",
        "inactive_file 900\ntotal_inactive_file 200\n",
    );
    assert_eq!(
        groups.memory_limit(64 << 30),
        Some(MemoryLimit {
            limit_bytes: 1 << 30,
            used_bytes: Some(0)
        })
    );
}

#[test]
fn in_a_container_the_mount_shows_a_part_of_the_hierarchy() {
    // Version 1 without a namespace: the path names the host's group, of which the mount shows only the container's part.
    let tree = Tree::new()
        .file(
            "/proc/self/mountinfo",
            "31 23 0:26 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n",
        )
        .file("/proc/self/cgroup", "2:cpu:/docker/abc\n")
        .file("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000\n")
        .file("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    assert_eq!(Cgroups::locate(&tree.root()).cpu_limit(8).cores, 0.5);

    // Outside of the namespace's root.
    let tree = Tree::new()
        .file("/proc/self/mountinfo", V2)
        .file("/proc/self/cgroup", "0::/../../other\n")
        .file("/sys/fs/cgroup/cpu.max", "100000 100000\n");
    assert_eq!(Cgroups::locate(&tree.root()).cpu_limit(8).cores, 1.0);
}

#[test]
fn a_host_without_groups_is_unlimited() {
    let groups = Cgroups::locate(&Tree::new().root());
    let limit = groups.cpu_limit(8);
    assert_eq!((limit.cores, limit.is_limited), (8.0, false));
    assert_eq!(groups.cpu_usage_ns(&limit), None);
    assert_eq!(groups.memory_limit(1 << 30), None);
}

#[test]
fn nonsense_in_the_files_is_no_limit() {
    for (quota, period) in [
        ("abc", "100000"),
        ("", ""),
        ("100000", "0"),
        ("0", "100000"),
        ("-5", "100000"),
    ] {
        let tree = v1_tree("/a")
            .file("/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", quota)
            .file("/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", period);
        assert_eq!(
            Cgroups::locate(&tree.root()).cpu_limit(8).cores,
            8.0,
            "{quota}/{period}"
        );
    }
    assert_eq!(cpu_list_len("3-1"), None);
    assert_eq!(cpu_list_len("0-4294967295,0-4294967295"), None);
}
