//! The bytes of every message of protocol version 1, pinned: a change that moves them breaks fleets of mixed versions.
//!
//! `UPDATE_GOLDEN=1 cargo test -p compass-shared --test golden` rewrites the file; do that only for messages no release has sent yet.

#![expect(
    clippy::unwrap_used,
    clippy::too_many_lines,
    reason = "samples of every message, written out"
)]

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::time::Duration;

use compass_shared::codec;
use compass_shared::ids::*;
use compass_shared::model::catalogue::{Fault, Runtime, StateKind, Synthetic};
use compass_shared::model::cluster::{NodeDescription, Resources, Tier};
use compass_shared::model::outcome::{AppReport, Outcome, OutcomeCounts};
use compass_shared::model::pipeline::{Configuration, KnobValue};
use compass_shared::model::plan::*;
use compass_shared::model::telemetry::NodeTelemetry;
use compass_shared::model::trial::*;
use compass_shared::model::trigger::{LinkQuantity, Measurement, SloKind, Trigger};
use compass_shared::units::Millicores;
use compass_shared::wire::v1::*;
use serde::Serialize;
use serde::de::DeserializeOwned;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/v1.txt");

/// Encodes messages, checks that they come back as they were, and collects their bytes by name.
#[derive(Default)]
struct Golden(BTreeMap<String, String>);

impl Golden {
    fn add<T: Serialize + DeserializeOwned + PartialEq + Debug>(&mut self, name: &str, message: T) {
        let bytes = codec::encode(&message).unwrap();
        let back: T = codec::decode(&bytes).unwrap();
        assert_eq!(back, message, "{name} does not survive the codec");
        assert!(
            self.0.insert(name.to_owned(), hex::encode(bytes)).is_none(),
            "{name} twice"
        );
    }
}

fn name<T: std::str::FromStr<Err = InvalidName>>(text: &str) -> T {
    text.parse().unwrap()
}

fn query() -> QueryId {
    name("lobby")
}

fn node() -> NodeId {
    name("edge-1")
}

fn digest() -> Digest {
    Digest::of(b"golden")
}

fn share() -> Resources {
    Resources {
        cpu: Millicores(250),
        memory_mib: 64,
        gpu_percent: 0,
    }
}

fn configuration() -> Configuration {
    Configuration(
        [
            (name("model"), KnobValue::Text("small".to_owned())),
            (name("resolution"), KnobValue::Integer(320)),
        ]
        .into(),
    )
}

fn instance(runtime: Runtime, state: StateKind) -> InstanceTarget {
    InstanceTarget {
        instance: InstanceId(0x0123_4567_89ab_cdef),
        kind: name("detector"),
        runtime,
        configuration: configuration(),
        artifact: Some(ArtifactRef {
            name: name("detector-small"),
            digest: digest(),
            bytes: 1000,
        }),
        share: share(),
        state,
    }
}

fn peer() -> Peer {
    Peer {
        node: node(),
        addresses: vec![
            "127.1.0.1:7444".parse().unwrap(),
            "[::1]:7444".parse().unwrap(),
        ],
        fingerprint: digest(),
    }
}

fn measurement() -> Measurement {
    Measurement {
        value: 1.5,
        bound: 30.0,
        window_ms: 1000,
    }
}

fn target() -> NodeTarget {
    let step = RouteStep {
        operator: name("detector"),
        node: node(),
        instance: InstanceId(7),
        inputs: vec![name("prepare")],
        readers: vec![],
    };
    let query = QueryTarget {
        query: query(),
        current: Generation(2),
        routes: vec![Route {
            generation: Generation(2),
            steps: vec![step],
        }],
        entry: node(),
        frame_deadline: Duration::from_millis(1200),
        app_fingerprint: Some(digest()),
    };
    let synthetic = |fault| {
        Runtime::Synthetic(Synthetic {
            cpu_us: 5000,
            spread_percent: 10,
            output_bytes: Some(100),
            fault,
        })
    };
    NodeTarget {
        commit: Commit { term: 1, number: 2 },
        node: node(),
        instances: vec![
            instance(
                Runtime::Onnx {
                    head: "center-detector".to_owned(),
                },
                StateKind::None,
            ),
            instance(Runtime::Native("tracker".to_owned()), StateKind::Snapshot),
            instance(
                Runtime::Process {
                    command: vec!["python3".to_owned(), "op.py".to_owned()],
                },
                StateKind::WarmUp(3),
            ),
            instance(synthetic(None), StateKind::None),
            instance(synthetic(Some(Fault::AbortAt(1))), StateKind::None),
            instance(synthetic(Some(Fault::SpinAt(2))), StateKind::None),
            instance(synthetic(Some(Fault::AllocateAt(3))), StateKind::None),
        ],
        queries: vec![query],
        peers: vec![peer()],
        standby: vec![],
    }
}

fn status(state: InstanceState) -> InstanceStatus {
    InstanceStatus {
        instance: InstanceId(7),
        state,
        pid: Some(42),
        restarts: 1,
    }
}

fn agent_messages(golden: &mut Golden) {
    use AgentToCoordinator as M;
    let description = NodeDescription {
        tier: Tier::NearEdge,
        site: name("plant"),
        device_class: "emulated-0.4".to_owned(),
        emulated_speed: Some(0.4),
        capacity: share(),
        labels: [("rack".to_owned(), "no".to_owned())].into(),
        advertised: peer().addresses,
        fingerprint: digest(),
    };
    let states = vec![
        status(InstanceState::Starting),
        status(InstanceState::Ready),
        status(InstanceState::Draining),
        status(InstanceState::Failed("no model".to_owned())),
    ];
    let commit = Commit { term: 1, number: 2 };
    golden.add(
        "agent.register",
        M::Register(Registration {
            description,
            boot: 3,
            applied: Some(commit),
            instances: states.clone(),
            artifacts: vec![digest()],
        }),
    );
    golden.add("agent.pong", M::Pong(9));
    golden.add(
        "agent.applied",
        M::Applied {
            commit,
            instances: states,
            in_flight: vec![(query(), Generation(1), 4)],
        },
    );
    golden.add(
        "agent.target_refused",
        M::TargetRefused {
            commit,
            reason: "disk full".to_owned(),
        },
    );
    golden.add(
        "agent.captured",
        M::Captured(SamplesCaptured {
            set: SampleSetId(5),
            segments: vec![vec![FrameId(1), FrameId(2)]],
            bytes: 9000,
        }),
    );
    let sample = SampleMeasure {
        frame: FrameId(1),
        wall_ms: 20.5,
        cpu_ms: 3.25,
        bytes_in: 9000,
        bytes_out: 120,
        skipped: false,
        output: Some(vec![1, 2]),
    };
    golden.add(
        "agent.stage_done",
        M::StageDone(StageDone {
            trial: TrialId(6),
            samples: vec![sample],
            cold_start_ms: 80.0,
            transfer: Some((12.0, 9000)),
            achieved_cores: 0.25,
        }),
    );
    let failures = [
        ("deadline", StageFailure::Deadline),
        ("crashed", StageFailure::Crashed("killed".to_owned())),
        ("inputs", StageFailure::InputsUnavailable("gone".to_owned())),
        ("busy", StageFailure::Busy),
        ("artifact", StageFailure::Artifact("corrupt".to_owned())),
        ("cancelled", StageFailure::Cancelled),
        ("unavailable", StageFailure::Unavailable("cut".to_owned())),
    ];
    for (which, failure) in failures {
        golden.add(
            &format!("agent.stage_failed.{which}"),
            M::StageFailed {
                trial: TrialId(6),
                failure,
            },
        );
    }
    let events = [
        (
            "link_degraded",
            AgentEvent::LinkDegraded {
                peer: node(),
                measurement: measurement(),
            },
        ),
        (
            "link_recovered",
            AgentEvent::LinkRecovered {
                peer: node(),
                measurement: measurement(),
            },
        ),
        (
            "peer_unreachable",
            AgentEvent::PeerUnreachable { peer: node() },
        ),
        (
            "queue_aged",
            AgentEvent::QueueAged {
                instance: InstanceId(7),
                measurement: measurement(),
            },
        ),
        (
            "content_drifted",
            AgentEvent::ContentDrifted {
                query: query(),
                descriptor: "luma mean".to_owned(),
                measurement: measurement(),
            },
        ),
        (
            "worker_crashed",
            AgentEvent::WorkerCrashed {
                instance: InstanceId(7),
                reason: "signal 6".to_owned(),
            },
        ),
    ];
    for (which, event) in events {
        golden.add(&format!("agent.event.{which}"), M::Event(event));
    }
    let link = LinkReport {
        peer: node(),
        rtt_ms: Some(4.5),
        delivered_bps: 1_000_000,
        network_limited: true,
        degraded: false,
        loss: 0.01,
        sent_bytes: 10,
        received_bytes: 20,
    };
    let report = InstanceReport {
        instance: InstanceId(7),
        frames: 10,
        service_ms: Some((5.0, 9.0)),
        queue_age_ms: 1.0,
        busy_cores: 0.1,
        granted_cores: 0.25,
        memory_mib: Some(30),
    };
    let content = ContentReport {
        query: query(),
        frames: 10,
        luma_mean: 100.0,
        luma_spread: 30.0,
        chroma: 12.0,
        motion: 2.0,
        arrival_hz: 10.0,
    };
    golden.add(
        "agent.report",
        AgentReport {
            sequence: 1,
            telemetry: NodeTelemetry::default(),
            links: vec![link],
            instances: vec![report],
            content: vec![content],
            applied: Some(commit),
            sent_bytes: 12_000,
            received_bytes: 9000,
        },
    );
    golden.add(
        "agent.request.artifact",
        AgentRequest::Artifact {
            digest: digest(),
            offset: 4096,
        },
    );
    golden.add(
        "agent.response.artifact",
        AgentResponse::Artifact {
            total_bytes: 10_000,
        },
    );
    golden.add(
        "agent.response.refused",
        AgentResponse::Refused {
            reason: "unknown".to_owned(),
        },
    );
}

fn coordinator_to_agent(golden: &mut Golden) {
    use CoordinatorToAgent as M;
    golden.add(
        "to_agent.welcome",
        M::Welcome {
            term: 1,
            report_every: Duration::from_secs(1),
        },
    );
    golden.add(
        "to_agent.refused",
        M::Refused {
            reason: "conflict".to_owned(),
        },
    );
    golden.add("to_agent.ping", M::Ping(1));
    golden.add("to_agent.target", M::Target(target()));
    golden.add("to_agent.peers", M::Peers(vec![peer()]));
    let capture = CaptureSamples {
        query: query(),
        set: SampleSetId(5),
        segments: 3,
        frames_per_segment: 8,
        deadline: Duration::from_secs(2),
    };
    golden.add("to_agent.capture", M::Capture(capture));
    golden.add("to_agent.drop_samples", M::DropSamples(SampleSetId(5)));
    let stage = RunStage {
        trial: TrialId(6),
        query: query(),
        operator: name("detector"),
        instance: instance(
            Runtime::Onnx {
                head: "center-detector".to_owned(),
            },
            StateKind::None,
        ),
        inputs: vec![
            StageInput {
                operator: Some(name("prepare")),
                prefix: digest(),
                holder: node(),
            },
            StageInput {
                operator: None,
                prefix: digest(),
                holder: node(),
            },
        ],
        set: SampleSetId(5),
        segments: vec![vec![FrameId(1)]],
        prefix: digest(),
        return_outputs: true,
        deadline: Duration::from_secs(5),
    };
    golden.add("to_agent.run_stage", M::RunStage(Box::new(stage)));
    golden.add("to_agent.cancel_stage", M::CancelStage(TrialId(6)));
}

fn app_messages(golden: &mut Golden) {
    use AppToCoordinator as M;
    golden.add(
        "app.register",
        M::Register {
            token: "secret".to_owned(),
            query_yaml: "kind: Query".to_owned(),
            request_der: vec![48, 1],
        },
    );
    golden.add("app.attach", M::Attach);
    golden.add("app.withdraw", M::Withdraw);
    let counts = OutcomeCounts {
        sent: 6,
        answered: 1,
        late: 1,
        skipped: 1,
        expired: 1,
        rejected: 1,
    };
    golden.add(
        "app.report",
        M::Report(AppReport {
            generation: Some(Generation(2)),
            window_ms: 1000,
            counts,
            latencies_ms: vec![100.5],
            accuracies: vec![0.75],
        }),
    );
    golden.add(
        "app.labels",
        M::Labels {
            set: SampleSetId(5),
            labels: vec![(FrameId(1), vec![91, 93])],
        },
    );
    golden.add("app.pong", M::Pong(1));
    use CoordinatorToApp as C;
    golden.add(
        "to_app.registered",
        C::Registered {
            query: query(),
            chain_der: vec![vec![48]],
            authority_der: vec![48],
            entry: peer(),
            latency_bound: Some(Duration::from_millis(300)),
            frame_deadline: Duration::from_millis(1200),
        },
    );
    golden.add(
        "to_app.rejected",
        C::Rejected {
            reason: "query.yaml:3:1: …".to_owned(),
        },
    );
    let triggers = [
        Trigger::QueryRegistered,
        Trigger::QueryWithdrawn,
        Trigger::NodeJoined(node()),
        Trigger::NodeLost(node()),
        Trigger::LinkDegraded {
            from: node(),
            to: name("near-1"),
            quantity: LinkQuantity::RoundTrip,
            measurement: measurement(),
        },
        Trigger::LinkRecovered {
            from: node(),
            to: name("near-1"),
            measurement: measurement(),
        },
        Trigger::LoadShifted(measurement()),
        Trigger::SloViolated {
            slo: SloKind::Latency,
            measurement: measurement(),
        },
        Trigger::SloViolated {
            slo: SloKind::Accuracy,
            measurement: measurement(),
        },
        Trigger::SloViolated {
            slo: SloKind::Cost,
            measurement: measurement(),
        },
        Trigger::ContentDrifted {
            descriptor: "luma mean".to_owned(),
            measurement: measurement(),
        },
        Trigger::ShareNotAchieved {
            operator: name("detector"),
            node: node(),
            measurement: measurement(),
        },
        Trigger::PlanNotApplied {
            node: node(),
            reason: "disk full".to_owned(),
        },
        Trigger::PriceChanged { version: 2 },
        Trigger::Reverted(Generation(1)),
        Trigger::SearchImproved,
    ];
    for (index, trigger) in triggers.into_iter().enumerate() {
        let route = AppRoute {
            generation: Generation(2),
            entry: peer(),
            sink: peer(),
        };
        golden.add(
            &format!("to_app.plan_changed.{index:02}.{}", trigger.name()),
            C::PlanChanged {
                route,
                trigger,
                summary: "sampler@edge-1".to_owned(),
            },
        );
    }
    golden.add(
        "to_app.infeasible",
        C::Infeasible {
            report: "nearest is …".to_owned(),
        },
    );
    golden.add(
        "to_app.labels_wanted",
        C::LabelsWanted {
            set: SampleSetId(5),
            frames: vec![FrameId(1)],
        },
    );
    golden.add("to_app.ping", C::Ping(1));
    golden.add("to_app.withdrawn", C::Withdrawn);
}

fn data_plane(golden: &mut Golden) {
    golden.add(
        "hop.header",
        FrameHeader {
            query: query(),
            generation: Generation(2),
            frame: FrameId(300),
            from: None,
            to: Some(name("detector")),
            age_us: 25_000,
            content: "jpeg".to_owned(),
            attempt: 1,
            payload_bytes: 9000,
        },
    );
    let to = Some(name("detector"));
    golden.add(
        "hop.credit",
        HopControl::Credit {
            query: query(),
            frames: 4,
        },
    );
    golden.add(
        "hop.received",
        HopControl::Received {
            query: query(),
            frame: FrameId(1),
            to: to.clone(),
        },
    );
    for outcome in [
        Outcome::Answered,
        Outcome::Late,
        Outcome::Skipped,
        Outcome::Expired,
        Outcome::Rejected,
    ] {
        let message = HopControl::Ended {
            query: query(),
            frame: FrameId(1),
            to: to.clone(),
            outcome,
        };
        golden.add(&format!("hop.ended.{outcome:?}").to_lowercase(), message);
    }
    golden.add("hop.ping", HopControl::Ping(1));
    golden.add("hop.pong", HopControl::Pong(1));
    golden.add(
        "hop.probe",
        HopControl::Probe {
            sequence: 1,
            padding: vec![0; 3],
        },
    );
    golden.add(
        "hop.probe_report",
        HopControl::ProbeReport {
            bytes: 32_000,
            micros: 9000,
        },
    );
    golden.add("hop.requests", HopControl::Requests { query: query() });
    golden.add(
        "hop.retry_after",
        HopControl::RetryAfter {
            query: query(),
            frame: FrameId(7),
            ms: 120,
        },
    );
    golden.add(
        "peer.fetch_stage",
        PeerRequest::FetchStage {
            query: query(),
            set: SampleSetId(5),
            prefix: digest(),
            frames: vec![FrameId(1)],
        },
    );
    golden.add(
        "peer.take_state",
        PeerRequest::TakeState {
            query: query(),
            operator: name("tracker"),
            generation: Generation(1),
        },
    );
    golden.add(
        "peer.stage",
        PeerResponse::Stage {
            frames: vec![
                (FrameId(1), Some(("jpeg".to_owned(), 9000))),
                (FrameId(2), None),
            ],
        },
    );
    golden.add("peer.state", PeerResponse::State { bytes: 500 });
    golden.add(
        "peer.refused",
        PeerResponse::Refused {
            reason: "unknown set".to_owned(),
        },
    );
}

#[test]
fn bytes_of_every_message_are_as_they_were() {
    let mut golden = Golden::default();
    agent_messages(&mut golden);
    coordinator_to_agent(&mut golden);
    app_messages(&mut golden);
    data_plane(&mut golden);
    let now: String = golden
        .0
        .iter()
        .map(|(name, bytes)| format!("{name} {bytes}\n"))
        .collect();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(FILE, &now).unwrap();
    }
    let before = std::fs::read_to_string(FILE).unwrap();
    for (was, is) in before.lines().zip(now.lines()) {
        assert_eq!(was, is, "the bytes of a message have changed");
    }
    assert_eq!(
        before.lines().count(),
        now.lines().count(),
        "a message was added or removed without its golden bytes"
    );
}
