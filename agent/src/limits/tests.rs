use super::in_force::{AppliedLimits, NotInForce, PromisedLimits, compare, enforcement};
use super::*;
use crate::telemetry::test_tree::Tree;

const V2: &str = "31 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n";
const V1: &str = "31 23 0:26 / /sys/fs/cgroup/cpu rw,nosuid - cgroup cgroup rw,cpu\n";

fn v2_tree(members: &str) -> Tree {
    Tree::new()
        .file("/proc/self/mountinfo", V2)
        .file("/proc/self/cgroup", "0::/agent.service\n")
        .file(
            "/sys/fs/cgroup/agent.service/cgroup.controllers",
            "cpu memory\n",
        )
        .file("/sys/fs/cgroup/agent.service/cgroup.procs", members)
}

fn v1_tree() -> Tree {
    Tree::new()
        .file("/proc/self/mountinfo", V1)
        .file("/proc/self/cgroup", "1:cpu:/\n")
        .file("/sys/fs/cgroup/cpu/cgroup.procs", "1\n")
}

#[test]
fn a_version_2_agent_moves_below_its_group_and_divides_it() {
    let tree = v2_tree(&format!("{}\n", std::process::id()));
    let limiter = CpuLimiter::detect(&tree.root(), "edge-1");
    assert_eq!(limiter.unavailable(), None);
    assert_eq!(limiter.enforcement(), Enforcement::Enforced);
    let own = "/sys/fs/cgroup/agent.service";
    let read = |file: &str| tree.root().read(format!("{own}/{file}")).unwrap();
    assert_eq!(read("compass-agent/cgroup.procs"), "0");
    assert_eq!(read("cgroup.subtree_control"), "+cpu");
    assert_eq!(read("compass-edge-1/cgroup.subtree_control"), "+cpu");

    let mut group = limiter.group("a1b2/..", 0.5).unwrap();
    assert_eq!(read("compass-edge-1/compass-a1b2---/cpu.max"), "5000 10000");
    group.set_cores(0.05).unwrap();
    assert_eq!(read("compass-edge-1/compass-a1b2---/cpu.max"), "1000 20000");
    assert_eq!(group.cores(), 0.05);
    assert_eq!(group.throttling(), None);
    tree.set(
        &format!("{own}/compass-edge-1/compass-a1b2---/cpu.stat"),
        "usage_usec 5\nnr_periods 40\nnr_throttled 30\n",
    );
    assert_eq!(
        group.throttling(),
        Some(group::Throttling {
            periods: 40,
            throttled_periods: 30
        })
    );
}

#[test]
fn a_group_that_others_live_in_is_left_alone() {
    let tree = v2_tree(&format!("{}\n999999\n", std::process::id()));
    let limiter = CpuLimiter::detect(&tree.root(), "edge-1");
    assert!(matches!(
        limiter.unavailable(),
        Some(Unavailable::Shared(_))
    ));
    assert_eq!(limiter.enforcement(), Enforcement::BestEffort);
    assert!(
        !tree
            .root()
            .path("/sys/fs/cgroup/agent.service/compass-agent")
            .exists()
    );
    assert!(limiter.group("a", 0.5).is_err());
}

#[test]
fn a_version_1_group_has_a_quota_of_its_own() {
    let tree = v1_tree();
    let limiter = CpuLimiter::detect(&tree.root(), "edge-1");
    let group = limiter.group("a", 0.25).unwrap();
    let read = |file: &str| {
        tree.root()
            .read(format!(
                "/sys/fs/cgroup/cpu/compass-edge-1/compass-a/{file}"
            ))
            .unwrap()
    };
    assert_eq!(
        (
            read("cpu.cfs_quota_us").as_str(),
            read("cpu.cfs_period_us").as_str()
        ),
        ("2500", "10000")
    );
    group::join(group.folder()).unwrap();
    assert_eq!(read("cgroup.procs"), "0");
}

#[test]
fn without_a_controller_the_limiter_says_why() {
    let limiter = CpuLimiter::detect(&Tree::new().root(), "edge-1");
    assert_eq!(limiter.unavailable(), Some(&Unavailable::NoController));
    assert_eq!(
        limiter.summary(),
        "CPU shares best-effort, paced by the agent (no CPU controller for control groups)"
    );
    assert_eq!(
        CpuLimiter::switched_off().enforcement(),
        Enforcement::BestEffort
    );
}

#[test]
fn field_080_a_limit_that_was_lost_on_the_way_is_noticed_inside_the_operator() {
    let promised = PromisedLimits {
        cpu_cores: Some(0.5),
        memory_bytes: None,
    };
    // In force: the group the worker was put into.
    let tree = Tree::new()
        .file("/proc/self/mountinfo", V2)
        .file("/proc/self/cgroup", "0::/worker\n")
        .file("/sys/fs/cgroup/worker/cpu.max", "5000 10000\n");
    assert_eq!(compare(&promised, &AppliedLimits::read(&tree.root())), []);

    // Lost: a nested group without the quota.
    let bare = Tree::new()
        .file("/proc/self/mountinfo", V2)
        .file("/proc/self/cgroup", "0::/elsewhere\n");
    let broken = compare(&promised, &AppliedLimits::read(&bare.root()));
    assert_eq!(
        broken,
        [NotInForce::Cpu {
            promised_cores: 0.5,
            applied_cores: None
        }]
    );
    assert_eq!(
        broken[0].to_string(),
        "limit not in force: 0.5 cores were promised, none hold"
    );
    assert_eq!(
        enforcement(Enforcement::Enforced, &broken),
        Enforcement::BestEffort
    );
    assert_eq!(
        enforcement(Enforcement::Enforced, &[]),
        Enforcement::Enforced
    );
}

#[test]
fn field_080_a_memory_bound_that_is_looser_than_promised_is_noticed() {
    let promised = PromisedLimits {
        cpu_cores: None,
        memory_bytes: Some(100),
    };
    let applied = |memory_bytes| AppliedLimits {
        cpu_cores: None,
        memory_bytes,
    };
    assert_eq!(compare(&promised, &applied(Some(100))), []);
    assert_eq!(compare(&promised, &applied(Some(101))).len(), 1);
    assert_eq!(compare(&promised, &applied(None)).len(), 1);
    assert_eq!(compare(&PromisedLimits::default(), &applied(None)), []);
}

#[test]
#[ignore = "makes a control group on this host; needs the right to do so"]
fn the_kernel_holds_a_spinning_program_to_its_quota() {
    use std::process::{Command, Stdio};
    let limiter = CpuLimiter::detect(&Root::default(), &format!("test-{}", std::process::id()));
    let group = limiter.group("spin", 0.2).unwrap();
    // The shell joins the group and then spins.
    let mut spin = Command::new("sh")
        .args(["-c", "echo 0 > \"$0/cgroup.procs\" && while :; do :; done"])
        .arg(group.folder())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while group.throttling().unwrap_or_default().throttled_periods < 20
        && std::time::Instant::now() < until
    {
        std::thread::yield_now();
    }
    let throttling = group.throttling().unwrap();
    spin.kill().unwrap();
    spin.wait().unwrap();
    assert!(throttling.throttled_periods >= 20, "{throttling:?}");
    let folder = group.folder().to_owned();
    drop(group);
    assert!(
        !folder.exists(),
        "the group is removed with its last process"
    );
}
