//! Clusters of real processes, on the roles that need nothing else: the relay, and small programs in place of others.

#![expect(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::process::Stdio;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use compass_testbed::cluster::{Cluster, ProcessSpec, Program, Snapshot};
use compass_testbed::relay::topology::LinkSpec;
use compass_testbed::relay::{RelayConfig, RelayControl, Topology};

/// Only met when something is broken.
const DEADLINE: Duration = Duration::from_secs(30);

const TESTBED: &str = env!("CARGO_BIN_EXE_compass-testbed");

fn cluster() -> Cluster {
    Cluster::temporary(Program::at(TESTBED)).unwrap()
}

/// A shell script in the place of a role; it lives until its standard input ends.
fn script(name: &str, text: &str) -> ProcessSpec {
    ProcessSpec::program(name, "/bin/sh", ["-c", text]).ready_within(DEADLINE)
}

fn two_nodes() -> RelayConfig {
    let topology =
        Topology::new()
            .node("a", "here", LinkSpec::ideal())
            .node("b", "here", LinkSpec::ideal());
    topology.relay_config(7).unwrap()
}

fn is_alive(pid: &str) -> bool {
    let pid = pid.parse().unwrap();
    Snapshot::take().unwrap().usage(&[pid]).processes > 0
}

fn until(what: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(
            begin.elapsed() < DEADLINE,
            "not within the deadline: {what}"
        );
        std::thread::yield_now();
    }
}

#[test]
fn a_relay_runs_as_a_process_and_comes_back_after_a_crash() {
    let mut cluster = cluster();
    let relay = cluster.start_relay(&two_nodes()).unwrap();
    let before = cluster.process("relay").unwrap().pid();
    assert_eq!(relay.describe().unwrap().nodes.len(), 2);
    cluster.kill("relay").unwrap();
    assert!(relay.counters().is_err(), "it is gone");
    assert_eq!(cluster.ended().unwrap().len(), 1);
    let ready = cluster.restart("relay").unwrap();
    assert_ne!(cluster.process("relay").unwrap().pid(), before);
    let relay =
        compass_testbed::relay::ControlClient::connect(ready.address("control").unwrap()).unwrap();
    assert_eq!(relay.describe().unwrap().nodes.len(), 2);
    assert!(cluster.ended().unwrap().is_empty());
    let log = std::fs::read_to_string(cluster.log_of("relay")).unwrap();
    assert_eq!(log.matches("ready control=").count(), 2, "{log}");
}

#[test]
fn a_process_that_cannot_start_says_why() {
    let mut cluster = cluster();
    let spec = ProcessSpec::role("relay", "relay", ["--config", "nowhere.toml"]);
    let error = format!("{:#}", cluster.start(spec).unwrap_err());
    for expected in [
        "`relay` ended with exit status: 1 before it was ready",
        "cannot read nowhere.toml",
    ] {
        assert!(error.contains(expected), "{expected} not in {error}");
    }
    let mut silent = script("silent", "echo almost >&2; cat");
    silent = silent.ready_within(Duration::from_millis(200));
    let error = format!("{:#}", cluster.start(silent).unwrap_err());
    assert!(
        error.contains("`silent` was not ready within 200ms"),
        "{error}"
    );
    let missing = ProcessSpec::program("missing", "/no/such/program", [""]);
    assert!(
        format!("{:#}", cluster.spawn(missing).unwrap_err()).contains("cannot start `missing`")
    );
    assert!(cluster.kill("nobody").is_err());
}

#[test]
fn a_crash_spares_the_children_and_the_end_of_the_cluster_does_not() {
    let mut cluster = cluster();
    let spec = script(
        "agent",
        "exec 3<&0; cat <&3 & echo ready worker=$!; cat; wait",
    );
    let first = cluster
        .start(spec)
        .unwrap()
        .value("worker")
        .unwrap()
        .to_owned();
    cluster.kill("agent").unwrap();
    let second = cluster
        .restart("agent")
        .unwrap()
        .value("worker")
        .unwrap()
        .to_owned();
    assert!(is_alive(&second));
    let folder = cluster.folder().to_owned();
    assert!(folder.exists());
    drop(cluster);
    until("both workers are gone", || {
        !is_alive(&first) && !is_alive(&second)
    });
    assert!(!folder.exists());
}

#[test]
fn usage_counts_children_orphans_and_earlier_lives() {
    let work = "i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done";
    let mut cluster = cluster();
    let spec = script(
        "agent",
        &format!("sleep 1000 & ({work}); ({work}) & wait $!; echo ready; cat"),
    );
    cluster.start(spec).unwrap();
    let first = cluster.usage().unwrap()["agent"];
    assert!(first.cpu > Duration::ZERO, "{first:?}");
    assert!(
        first.resident_bytes > 100_000 && first.processes >= 2,
        "{first:?}"
    );
    cluster.kill("agent").unwrap();
    let orphan = cluster.usage().unwrap()["agent"];
    assert!(
        orphan.processes >= 1 && orphan.cpu >= first.cpu,
        "the sleeper is left: {orphan:?}"
    );
    cluster.restart("agent").unwrap();
    let second = cluster.usage().unwrap()["agent"];
    assert!(second.cpu > first.cpu, "{first:?}, then {second:?}");
}

#[test]
fn output_can_be_followed_and_a_polite_end_is_waited_for() {
    let mut cluster = cluster();
    let (sender, lines) = mpsc::channel();
    let spec = script(
        "app",
        "exec 3<&0; trap 'echo bye; exit 3' TERM; echo ready $GREETING; cat <&3 & wait",
    )
    .variable("GREETING", "say=hello")
    .lines_to(sender);
    assert_eq!(cluster.start(spec).unwrap().value("say").unwrap(), "hello");
    let status = cluster
        .stop("app", DEADLINE)
        .unwrap()
        .expect("it ends when asked");
    assert_eq!(status.code(), Some(3));
    let next = || lines.recv_timeout(DEADLINE).unwrap();
    assert_eq!(
        (next(), next()),
        ("ready say=hello".to_owned(), "bye".to_owned())
    );

    cluster
        .start(script("stubborn", "trap '' TERM; echo ready; cat"))
        .unwrap();
    assert_eq!(
        cluster
            .stop("stubborn", Duration::from_millis(100))
            .unwrap(),
        None
    );
    until("it was killed", || cluster.ended().unwrap().len() == 2);
}

#[test]
fn a_command_runs_to_its_end() {
    let cluster = cluster();
    let finished = cluster
        .run(&script("greet", "echo hello; echo no >&2; exit 2"))
        .unwrap();
    assert_eq!(finished.status.code(), Some(2));
    assert_eq!(
        (finished.stdout.as_str(), finished.stderr.as_str()),
        ("hello\n", "no\n")
    );
    let endless = script("endless", "sleep 1000").ready_within(Duration::from_millis(100));
    assert!(
        format!("{:#}", cluster.run(&endless).unwrap_err()).contains("did not end within 100ms")
    );
}

#[test]
fn a_role_ends_with_whoever_started_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("relay.toml");
    std::fs::write(&file, two_nodes().to_toml().unwrap()).unwrap();
    let mut command = std::process::Command::new(TESTBED);
    command
        .args(["role", "--exit-with-parent", "relay", "--config"])
        .arg(&file);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    assert!(child.try_wait().unwrap().is_none());
    drop(child.stdin.take());
    assert_eq!(child.wait().unwrap().code(), Some(1));
}

#[test]
fn roles_pass_the_rest_of_the_command_line_on_and_traces_are_made_and_checked() {
    let cluster = cluster();
    let run = |arguments: &[&str]| {
        cluster
            .run(&ProcessSpec::program("testbed", TESTBED, arguments))
            .unwrap()
    };
    let made = run(&[
        "trace",
        "generate",
        "--profile",
        "lte-up",
        "--seconds",
        "60",
        "--output",
        "lte.csv",
    ]);
    assert!(made.status.success(), "{made:?}");
    let checked = run(&["trace", "check", "lte.csv"]);
    assert!(checked.stdout.contains("120 rows, 60.0 s"), "{checked:?}");
    std::fs::write(
        cluster.folder().join("bad.csv"),
        "time_s,bandwidth_mbps\n0,1\n0,2\n",
    )
    .unwrap();
    let refused = run(&["trace", "check", "bad.csv"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        refused
            .stderr
            .contains("bad.csv: line 3: time 0 does not come after 0"),
        "{refused:?}"
    );
    assert_eq!(run(&["role", "pilot"]).status.code(), Some(64));
}
