//! The built agent against a stand-in for the coordinator: joining, registering, carrying out targets, and going on without it.

#![allow(clippy::unwrap_used, reason = "test code")]

mod app;
mod coordinator;

use std::path::Path;
use std::process::Stdio;

use compass_shared::ids::{
    Commit, Digest, Generation, InstanceId, NodeId, OperatorId, OperatorKind, QueryId,
};
use compass_shared::model::catalogue::{Fault, Runtime, StateKind, Synthetic};
use compass_shared::model::cluster::{Resources, Tier};
use compass_shared::model::outcome::Outcome;
use compass_shared::model::pipeline::Configuration;
use compass_shared::model::plan::{InstanceTarget, NodeTarget, QueryTarget, Route, RouteStep};
use compass_shared::units::Millicores;
use compass_shared::wire::v1::{
    AgentEvent, AgentReport, AgentToCoordinator, CoordinatorToAgent, InstanceState, InstanceStatus,
};
use compass_transport::Deadline;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};

use app::App;
use coordinator::{Coordinator, PATIENCE};

/// A `compass-agent` with a folder of its own.
fn agent(command: &str, folder: &Path) -> Command {
    let mut agent = Command::new(env!("CARGO_BIN_EXE_compass-agent"));
    agent.arg(command);
    agent.arg("--data").arg(folder);
    agent.args(["--listen", "127.0.0.1:0", "--tier", "near-edge"]);
    agent.args(["--cpu", "1 cores", "--memory", "256 MiB"]);
    // An emulated node's shares are paced by itself: nothing of the host's control groups is touched.
    agent.args(["--emulate-speed", "1"]);
    agent.stdin(Stdio::piped()).stdout(Stdio::piped());
    agent.kill_on_drop(true);
    agent
}

/// Joins as `near-1`, with the token on standard input; gives what was printed.
async fn join(coordinator: &Coordinator, folder: &Path) -> String {
    let address = coordinator.address().await.to_string();
    let mut command = agent("join", folder);
    command.args([&address, "--token-file", "-", "--node", "near-1"]);
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin
        .write_all(coordinator.token().as_bytes())
        .await
        .unwrap();
    drop(stdin);
    let joined = async { tokio::join!(coordinator.let_join(), child.wait_with_output()).1 };
    let output = tokio::time::timeout(PATIENCE, joined)
        .await
        .unwrap()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Runs the agent and waits for its line.
async fn run(folder: &Path) -> (Child, String) {
    let mut child = agent("run", folder).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
    (child, line.unwrap().unwrap().unwrap())
}

fn target(number: u64, instances: &[u64]) -> NodeTarget {
    let instance = |id: &u64| InstanceTarget {
        instance: InstanceId(*id),
        kind: OperatorKind::new("burner").unwrap(),
        runtime: Runtime::Synthetic(Synthetic {
            cpu_us: 100,
            spread_percent: 0,
            output_bytes: None,
            fault: None,
        }),
        configuration: Configuration::default(),
        artifact: None,
        share: Resources {
            cpu: Millicores(100),
            memory_mib: 32,
            gpu_percent: 0,
        },
        state: StateKind::None,
    };
    NodeTarget {
        commit: Commit { term: 1, number },
        node: NodeId::new("near-1").unwrap(),
        instances: instances.iter().map(instance).collect(),
        queries: vec![],
        peers: vec![],
        standby: vec![],
    }
}

fn is_ready(message: &AgentToCoordinator, number: u64) -> bool {
    matches!(message, AgentToCoordinator::Applied { commit, instances, .. }
        if commit.number == number && all_ready(instances))
}

fn all_ready(instances: &[InstanceStatus]) -> bool {
    instances.iter().all(|i| i.state == InstanceState::Ready)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_joins_registers_and_survives_the_coordinators_absence() {
    let coordinator = Coordinator::start();
    let folder = tempfile::tempdir().unwrap();
    let said = join(&coordinator, folder.path()).await;
    assert!(said.contains("[ok]   transport"), "{said}");
    assert!(said.contains("node near-1, tier near-edge"), "{said}");

    let (_child, line) = run(folder.path()).await;
    assert!(
        line.starts_with("ready node=near-1 address=127.0.0.1:"),
        "{line}"
    );
    let (registration, mut seat) = coordinator.registration().await;
    assert_eq!(seat.node.as_str(), "near-1");
    assert_eq!(registration.description.tier, Tier::NearEdge);
    assert_eq!(registration.description.capacity.memory_mib, 256);
    assert_eq!((registration.boot, registration.applied), (1, None));

    seat.say(CoordinatorToAgent::Target(target(5, &[1, 2])))
        .await;
    let applied = seat.hear_until(|message| is_ready(message, 5)).await;
    let AgentToCoordinator::Applied { instances, .. } = applied else {
        unreachable!()
    };
    assert_eq!(instances.len(), 2);

    // An older target changes nothing; a ping is answered.
    seat.say(CoordinatorToAgent::Target(target(4, &[]))).await;
    seat.say(CoordinatorToAgent::Ping(77)).await;
    seat.hear_until(|message| *message == AgentToCoordinator::Pong(77))
        .await;
    let mut stream = seat
        .session
        .accept_uni(Deadline::after(PATIENCE))
        .await
        .unwrap();
    let report: AgentReport = stream
        .read_frame(1 << 20, Deadline::after(PATIENCE))
        .await
        .unwrap();
    assert_eq!(report.applied.unwrap().number, 5);

    // The coordinator restarts: the same processes still run, and the new session begins with them.
    drop(seat);
    drop(stream);
    coordinator.restart().await;
    let (again, mut seat) = coordinator.registration().await;
    assert_eq!((again.boot, again.applied.unwrap().number), (1, 5));
    let pids = |statuses: &[InstanceStatus]| -> Vec<_> {
        statuses
            .iter()
            .map(|s| (s.instance, s.pid, s.restarts))
            .collect()
    };
    assert_eq!(pids(&again.instances), pids(&instances));
    seat.say(CoordinatorToAgent::Target(target(6, &[2]))).await;
    let applied = seat.hear_until(|message| is_ready(message, 6)).await;
    let AgentToCoordinator::Applied {
        instances: fewer, ..
    } = applied
    else {
        unreachable!()
    };
    assert_eq!(pids(&fewer), pids(&instances)[1..]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_starts_alone_runs_its_last_target() {
    let coordinator = Coordinator::start();
    let folder = tempfile::tempdir().unwrap();
    join(&coordinator, folder.path()).await;
    let (mut child, _) = run(folder.path()).await;
    let (_, mut seat) = coordinator.registration().await;
    seat.say(CoordinatorToAgent::Target(target(9, &[1]))).await;
    seat.hear_until(|message| is_ready(message, 9)).await;

    child.kill().await.unwrap();
    drop(seat);
    let (_child, _) = run(folder.path()).await;
    // Nobody gives it a target in this life.
    let (registration, mut seat) = coordinator.registration().await;
    assert_eq!(registration.boot, 2);
    assert_eq!(registration.applied.unwrap().number, 9);
    if !all_ready(&registration.instances) {
        seat.hear_until(|message| is_ready(message, 9)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_target_is_set_aside_and_one_folder_has_one_agent() {
    let coordinator = Coordinator::start();
    let folder = tempfile::tempdir().unwrap();
    join(&coordinator, folder.path()).await;
    std::fs::write(folder.path().join("target.json"), "{\"version\":1,").unwrap();
    let (mut child, _) = run(folder.path()).await;
    let (registration, mut seat) = coordinator.registration().await;
    assert_eq!(registration.applied, None);
    assert!(folder.path().join("target.json.damaged-1").exists());

    for command in ["run", "join"] {
        let mut second = agent(command, folder.path());
        if command == "join" {
            second.args(["127.0.0.1:1", "--token", &coordinator.token()]);
        }
        let output = second.output().await.unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        let first = format!("in use by another agent (process {})", child.id().unwrap());
        assert!(said.contains(&first), "{said}");
    }

    // The first one is undisturbed, and what it is given now is kept.
    seat.say(CoordinatorToAgent::Target(target(3, &[1]))).await;
    seat.hear_until(|message| is_ready(message, 3)).await;
    child.kill().await.unwrap();
    drop(seat);
    let (_child, _) = run(folder.path()).await;
    let (registration, _seat) = coordinator.registration().await;
    assert_eq!(registration.applied.unwrap().number, 3);
}

/// A query of one synthetic operator, which misbehaves if told to: its instance and its part of a target.
fn one_operator(name: &str, id: u64, fault: Option<Fault>, app: Digest) -> NodeTarget {
    let mut target = target(1, &[id]);
    target.instances[0].runtime = Runtime::Synthetic(Synthetic {
        cpu_us: 100,
        spread_percent: 0,
        output_bytes: None,
        fault,
    });
    let step = RouteStep {
        operator: OperatorId::new("burner").unwrap(),
        node: target.node.clone(),
        instance: InstanceId(id),
        inputs: vec![],
        readers: vec![],
    };
    let route = Route {
        generation: Generation(1),
        steps: vec![step],
    };
    target.queries.push(QueryTarget {
        query: QueryId::new(name).unwrap(),
        current: route.generation,
        routes: vec![route],
        entry: target.node.clone(),
        frame_deadline: PATIENCE,
        app_fingerprint: Some(app),
    });
    target
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_that_abort_spin_or_eat_memory_move_neither_the_agent_nor_each_other() {
    let coordinator = Coordinator::start();
    let folder = tempfile::tempdir().unwrap();
    join(&coordinator, folder.path()).await;
    let (_child, line) = run(folder.path()).await;
    let address = line.rsplit('=').next().unwrap().parse().unwrap();
    let (registration, mut seat) = coordinator.registration().await;

    let wanted = [
        ("good", 1, None),
        ("aborts", 2, Some(Fault::AbortAt(1))),
        ("spins", 3, Some(Fault::SpinAt(1))),
        ("eats", 4, Some(Fault::AllocateAt(1))),
    ];
    let mut all = target(1, &[]);
    let mut endpoints = Vec::new();
    for (name, id, fault) in wanted {
        let query = QueryId::new(name).unwrap();
        let (endpoint, key) = coordinator.app(&query);
        let one = one_operator(name, id, fault, key);
        all.instances.extend(one.instances);
        all.queries.extend(one.queries);
        endpoints.push((query, endpoint));
    }
    seat.say(CoordinatorToAgent::Target(all)).await;
    let AgentToCoordinator::Applied { instances, .. } =
        seat.hear_until(|message| is_ready(message, 1)).await
    else {
        unreachable!()
    };
    let pid = instances[0].pid.unwrap();
    let mut apps = Vec::new();
    for (query, endpoint) in endpoints {
        let key = registration.description.fingerprint;
        let node = seat.node.clone();
        apps.push(App::connect(endpoint, query, node, address, key).await);
    }
    for bad in &apps[1..] {
        bad.send(1).await;
    }

    // Meanwhile everything else goes on: frames are answered by the same process, pings and reports come.
    let mut crashed = std::collections::BTreeSet::new();
    for number in 1..=50 {
        apps[0].send(number).await;
        assert_eq!(apps[0].end_of(number).await, Outcome::Answered);
        seat.say(CoordinatorToAgent::Ping(number)).await;
        loop {
            match seat.hear().await {
                AgentToCoordinator::Pong(answer) if answer == number => break,
                AgentToCoordinator::Event(AgentEvent::WorkerCrashed { instance, .. }) => {
                    crashed.insert(instance.0);
                }
                _ => {}
            }
        }
    }
    let mut sequence = 0;
    for _ in 0..5 {
        let deadline = Deadline::after(PATIENCE);
        let mut stream = seat.session.accept_uni(deadline).await.unwrap();
        let report: AgentReport = stream.read_frame(1 << 20, deadline).await.unwrap();
        assert!(report.sequence > sequence, "{} reports", report.sequence);
        sequence = report.sequence;
    }
    while crashed.len() < 3 {
        if let AgentToCoordinator::Event(AgentEvent::WorkerCrashed { instance, .. }) =
            seat.hear().await
        {
            crashed.insert(instance.0);
        }
    }
    assert_eq!(crashed, [2, 3, 4].into());
    apps[0].send(51).await;
    assert_eq!(apps[0].end_of(51).await, Outcome::Answered);
    let AgentToCoordinator::Applied { instances, .. } =
        seat.hear_until(|message| is_ready(message, 1)).await
    else {
        unreachable!()
    };
    assert_eq!((instances[0].pid, instances[0].restarts), (Some(pid), 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_work_is_said_with_the_next_step() {
    let folder = tempfile::tempdir().unwrap();
    let output = agent("run", folder.path()).output().await.unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains("has not joined a fleet; run: compass-agent join"),
        "{said}"
    );

    let mut command = agent("join", folder.path());
    command.args(["127.0.0.1:1", "--token", "nonsense", "--node", "near-1"]);
    let output = command.output().await.unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("that is no join token"), "{said}");

    let output = agent("sprint", folder.path()).output().await.unwrap();
    assert_eq!(output.status.code(), Some(64));
}
