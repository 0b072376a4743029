//! Agents at the coordinator, over real QUIC: joining, identities, liveness, floods, artifacts.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::time::Duration;

use common::{Agent, Api, Member, Rig, node, patience, until, with_coordinator};
use compass_coordinator::store::records::{AssignmentRecord, LinksRecord};
use compass_shared::api::{ArtifactView, EventView, LinkView, NodeView, QueryView};
use compass_shared::ids::{Commit, Digest, Generation};
use compass_shared::model::catalogue::Catalogue;
use compass_shared::model::cluster::{Link, Resources, Scheduling};
use compass_shared::model::plan::{
    ArtifactRef, Assignment, Estimate, Expectation, NodeTarget, OperatorPlan, PlanStatus,
    QueryPlan, instance_id,
};
use compass_shared::model::query::Query;
use compass_shared::model::telemetry::{NodeTelemetry, Reading, Source};
use compass_shared::model::trigger::Trigger;
use compass_shared::units::{Bandwidth, Millicores};
use compass_shared::wire::v1::{
    AgentRequest, AgentResponse, AgentToCoordinator, CoordinatorToAgent, InstanceState,
    InstanceStatus, LinkReport,
};
use compass_transport::join::{JoinError, renew};
use compass_transport::{CloseCode, Closed, JoinRefusal, JoinToken, PrivateKey};

async fn nodes(api: &Api) -> Vec<NodeView> {
    api.get("/v1/nodes").await.json()
}

async fn events(api: &Api) -> Vec<EventView> {
    api.get("/v1/events?after=0").await.json()
}

async fn is_online(api: &Api, name: &str) -> bool {
    nodes(api)
        .await
        .iter()
        .any(|view| view.id == node(name) && view.online)
}

#[test]
fn a_node_joins_with_a_token_reports_and_is_missed_when_it_goes() {
    with_coordinator(async |rig| {
        let mut agent = rig.agent("edge-1").await;
        let mut telemetry = NodeTelemetry::default();
        telemetry.host.cpu_busy_percent = Reading::new(12.5, Source::Sysinfo);
        telemetry.host.cores = Reading::new(4, Source::Sysinfo);
        agent.report(telemetry).await;
        let view = until("a report", async || {
            let views = nodes(&rig.api).await;
            views.into_iter().find(|view| view.telemetry.is_some())
        })
        .await;
        assert!(view.online);
        assert_eq!(view.id, node("edge-1"));
        assert_eq!(
            view.telemetry.unwrap().host.cpu_busy_percent.value,
            Some(12.5)
        );
        agent.session.close(CloseCode::DONE, "bye");
        until("it to be missed", async || {
            (!is_online(&rig.api, "edge-1").await).then_some(())
        })
        .await;
        let said = events(&rig.api).await;
        assert!(
            said.iter()
                .any(|event| event.message.contains("joined from"))
        );
        assert!(
            said.iter()
                .any(|event| event.message.contains("session ended"))
        );
    });
}

#[test]
fn used_expired_revoked_forged_and_misdirected_tokens_are_each_told_apart() {
    with_coordinator(async |rig| {
        let refused = async |token: &str, name: &str, key: &PrivateKey| match Member::join(
            rig.quic(),
            token,
            name,
            key,
        )
        .await
        {
            Err(JoinError::Refused(refusal)) => refusal,
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("{name} was let in"),
        };
        let (first, second) = (PrivateKey::generate(), PrivateKey::generate());
        let token = rig.api.join_token("edge-1").await;
        Member::join(rig.quic(), &token, "edge-1", &first)
            .await
            .unwrap();
        // The same key may repeat its request: its answer may have been lost.
        Member::join(rig.quic(), &token, "edge-1", &first)
            .await
            .unwrap();
        assert_eq!(
            refused(&token, "edge-1", &second).await,
            JoinRefusal::OtherKey {
                node: node("edge-1")
            }
        );
        assert_eq!(
            refused(&token, "edge-2", &second).await,
            JoinRefusal::OtherNode {
                expected: node("edge-1")
            }
        );
        let fingerprint = rig.coordinator.plane.authority.fingerprint();
        let forged = JoinToken::mint(fingerprint).reveal().to_string();
        assert_eq!(
            refused(&forged, "edge-3", &second).await,
            JoinRefusal::UnknownToken
        );
        let revoked = rig.api.join_token("edge-4").await;
        let listed: Vec<compass_shared::api::TokenView> = rig.api.get("/v1/tokens").await.json();
        for view in listed.iter().filter(|view| view.uses_left == Some(1)) {
            let answer = rig.api.delete(&format!("/v1/tokens/{}", view.id)).await;
            assert_eq!(answer.status, 204, "{answer:?}");
        }
        assert_eq!(
            refused(&revoked, "edge-4", &second).await,
            JoinRefusal::RevokedToken
        );
        assert!(
            nodes(&rig.api).await.is_empty(),
            "nobody who was refused is listed"
        );
    });
}

#[test]
fn an_expired_token_is_refused() {
    with_coordinator(async |rig| {
        let body = r#"{"purpose":{"join":"edge-1"},"ttl_s":1,"uses":1}"#;
        let answer = rig.api.post("/v1/tokens", "application/json", body).await;
        let created: compass_shared::api::TokenCreated = answer.json();
        until("the token to expire", async || {
            let now = rig.coordinator.plane.authority.clock().now_unix_s() * 1000;
            (now >= created.view.expires_unix_ms).then_some(())
        })
        .await;
        let key = PrivateKey::generate();
        let refused = Member::join(rig.quic(), &created.token, "edge-1", &key).await;
        assert!(
            matches!(refused, Err(JoinError::Refused(JoinRefusal::ExpiredToken))),
            "it has expired"
        );
    });
}

#[test]
fn a_certificate_is_renewed_for_the_registered_key_until_the_node_is_removed() {
    with_coordinator(async |rig| {
        let member = rig.joined("edge-1").await;
        let renewed = renew(&member.endpoint, &[rig.quic()], patience())
            .await
            .unwrap();
        assert_eq!(
            renewed.key().fingerprint(),
            member.identity().key().fingerprint()
        );
        assert_eq!(rig.api.delete("/v1/nodes/edge-1").await.status, 204);
        let refused = renew(&member.endpoint, &[rig.quic()], patience()).await;
        assert!(matches!(
            refused,
            Err(JoinError::Refused(JoinRefusal::NotAMember { .. }))
        ));
        let reason = member.connect().await.map(drop).unwrap_err();
        assert!(reason.contains("not a member"), "{reason}");
    });
}

#[test]
fn of_two_live_sessions_with_one_identity_the_newcomer_is_refused_with_both_addresses() {
    with_coordinator(async |rig| {
        let first = rig.agent("edge-1").await;
        let here = first.member.endpoint.local_addresses()[0];
        let clone = Member::with_identity(rig.quic(), "edge-1", first.member.identity());
        let there = clone.endpoint.local_addresses()[0];
        let reason = clone.connect().await.map(drop).unwrap_err();
        assert!(
            reason.contains(&here.to_string()) && reason.contains(&there.to_string()),
            "{reason}"
        );
        assert!(first.session.closed_reason().is_none());
        assert!(is_online(&rig.api, "edge-1").await);
        let alarms = events(&rig.api).await;
        assert!(
            alarms
                .iter()
                .any(|event| event.kind == "alarm" && event.message.contains("same identity"))
        );
    });
}

#[test]
fn a_silent_session_gives_way_to_its_nodes_new_one() {
    // The old agent lives on a runtime of its own, which is stopped dead: no farewell reaches the coordinator.
    let (give, take) = std::sync::mpsc::channel();
    let (die, dies) = tokio::sync::oneshot::channel::<()>();
    let (address_in, address_out) = tokio::sync::oneshot::channel();
    let old = std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let (quic, token): (std::net::SocketAddr, String) = address_out.await.unwrap();
            let key = PrivateKey::generate();
            let member = Member::join(quic, &token, "edge-1", &key).await.unwrap();
            let agent = member.connect().await.unwrap();
            give.send(agent.member.identity()).unwrap();
            let _ = dies.await;
            std::mem::forget(agent);
        });
        runtime.shutdown_background();
    });
    with_coordinator(async |rig| {
        let token = rig.api.join_token("edge-1").await;
        address_in.send((rig.quic(), token)).unwrap();
        let identity = tokio::task::spawn_blocking(move || take.recv().unwrap())
            .await
            .unwrap();
        die.send(()).unwrap();
        let mut restarted = Member::with_identity(rig.quic(), "edge-1", identity);
        restarted.boot = 2;
        let new = restarted.connect().await.unwrap();
        assert!(is_online(&rig.api, "edge-1").await);
        let seat = rig.coordinator.plane.fleet.seat(&node("edge-1")).unwrap();
        assert_eq!(seat.registration.boot, 2);
        drop(new);
    });
    old.join().unwrap();
}

#[test]
fn a_target_reaches_its_node_now_or_when_it_comes_and_only_the_newest_counts() {
    // The scheduler at work sends this node a target or two of its own, numbered from 1.
    const OWN: u64 = 100;
    with_coordinator(async |rig| {
        let plane = rig.coordinator.plane.clone();
        let target = |number| NodeTarget {
            commit: Commit {
                term: 1,
                number: OWN + number,
            },
            node: node("edge-1"),
            instances: vec![],
            queries: vec![],
            peers: vec![],
            standby: vec![],
        };
        let is_target = |message| match message {
            CoordinatorToAgent::Target(target) if target.commit.number > OWN => {
                Some(target.commit.number - OWN)
            }
            _ => None,
        };
        plane
            .dispatch
            .send(&plane.fleet, &node("edge-1"), target(1));
        plane
            .dispatch
            .send(&plane.fleet, &node("edge-1"), target(2));
        let mut agent = rig.agent("edge-1").await;
        assert_eq!(agent.hear(is_target).await, 2, "it was away for the first");
        plane
            .dispatch
            .send(&plane.fleet, &node("edge-1"), target(3));
        assert_eq!(agent.hear(is_target).await, 3);
        let identity = agent.member.identity();
        agent.session.close(CloseCode::DONE, "restart");
        until("it to be gone", async || {
            plane.fleet.seat(&node("edge-1")).is_none().then_some(())
        })
        .await;
        let mut back = Member::with_identity(rig.quic(), "edge-1", identity);
        back.applied = Some(Commit {
            term: 1,
            number: OWN + 3,
        });
        let mut back = back.connect().await.unwrap();
        plane
            .dispatch
            .send(&plane.fleet, &node("edge-1"), target(4));
        assert_eq!(
            back.hear(is_target).await,
            4,
            "what it has already applied is not sent again"
        );
    });
}

#[test]
fn nodes_are_introduced_to_each_other() {
    with_coordinator(async |rig| {
        let mut first = rig.agent("edge-1").await;
        let second = rig.agent("near-1").await;
        let peers = first
            .hear(|message| match message {
                CoordinatorToAgent::Peers(peers) if !peers.is_empty() => Some(peers),
                _ => None,
            })
            .await;
        assert_eq!(peers.len(), 1);
        assert_eq!(peers[0].node, node("near-1"));
        assert_eq!(
            peers[0].fingerprint,
            second.member.identity().key().fingerprint()
        );
        assert_eq!(peers[0].addresses, second.member.endpoint.local_addresses());
    });
}

/// Field report 46: agents that report far too often make nobody look dead, themselves included.
#[test]
fn field_046_a_flood_of_reports_loses_no_node() {
    const AGENTS: usize = 12;
    const REPORTS: usize = 150;
    with_coordinator(async |rig| {
        let quiet = rig.agent("quiet").await;
        let mut floods = tokio::task::JoinSet::new();
        for n in 0..AGENTS {
            let mut agent: Agent = rig.agent(&format!("loud-{n}")).await;
            floods.spawn(async move {
                for _ in 0..REPORTS {
                    agent.report(NodeTelemetry::default()).await;
                }
                agent
            });
        }
        let mut agents = Vec::new();
        while let Some(agent) = floods.join_next().await {
            agents.push(agent.unwrap());
        }
        until("every node to be online", async || {
            let online = nodes(&rig.api).await;
            let online = online.iter().filter(|view| view.online).count();
            (online == AGENTS + 1).then_some(())
        })
        .await;
        let said = events(&rig.api).await;
        let lost = said
            .iter()
            .find(|event| event.message.contains("lost") || event.message.contains("ended"));
        assert!(lost.is_none(), "{lost:?}");
        let expected = format!("compass_coordinator_reports_total {}", AGENTS * REPORTS);
        until("every report to be counted", async || {
            let metrics = rig.api.get("/metrics").await.body;
            metrics.contains(&expected).then_some(())
        })
        .await;
        drop((quiet, agents));
    });
}

#[test]
fn damaged_reports_and_wrong_first_messages_disturb_nobody_else() {
    with_coordinator(async |rig| {
        let mut good = rig.agent("edge-1").await;
        let mut stream = good.session.open_uni(patience()).await.unwrap();
        let garbage = bytes::Bytes::from_static(b"\xff\xff\xff\xff\x01\x00\x01garbage");
        stream.write_bytes(garbage, patience()).await.unwrap();
        let _ = stream.finish();
        good.report(NodeTelemetry::default()).await;
        until("the good report", async || {
            let views = nodes(&rig.api).await;
            views.into_iter().find(|view| view.telemetry.is_some())
        })
        .await;
        let hasty = rig.joined("near-1").await;
        let session = hasty.session().await;
        let (mut send, _receive) = session.take_control().unwrap();
        send.write_frame(&AgentToCoordinator::Pong(1), patience())
            .await
            .unwrap();
        let closed = session.closed().await;
        assert!(
            matches!(&closed, Closed::ByPeer { code, .. } if *code == CloseCode::BAD_MESSAGE),
            "{closed}"
        );
        assert!(is_online(&rig.api, "edge-1").await);
    });
}

#[test]
fn a_drained_node_stays_drained_over_a_restart_of_the_coordinator() {
    let folder = tempfile::tempdir().unwrap();
    let system = common::system();
    system.block_on(async {
        let rig = Rig::start(folder.path(), "").await;
        let agent = rig.agent("edge-1").await;
        let body = br#"{"scheduling":"Draining","reason":"new camera"}"#.to_vec();
        let answer = rig
            .api
            .put("/v1/nodes/edge-1/scheduling", "application/json", body)
            .await;
        assert_eq!(answer.status, 200, "{answer:?}");
        drop(agent);
        rig.coordinator.shut_down().await;
    });
    system.block_on(async {
        let rig = Rig::start(folder.path(), "").await;
        let view: NodeView = rig.api.get("/v1/nodes/edge-1").await.json();
        assert_eq!(view.scheduling, Scheduling::Draining);
        assert!(!view.online);
        let said = events(&rig.api).await;
        assert!(
            said.iter()
                .any(|event| event.message.contains("new camera"))
        );
        rig.coordinator.shut_down().await;
    });
}

async fn fetch(agent: &Agent, digest: Digest, offset: u64) -> Result<(u64, Vec<u8>), String> {
    let (mut send, mut receive) = agent.session.open_bi(patience()).await.unwrap();
    let request = AgentRequest::Artifact { digest, offset };
    send.write_frame(&request, patience()).await.unwrap();
    send.finish().unwrap();
    match receive.read_frame(1 << 20, patience()).await.unwrap() {
        AgentResponse::Artifact { total_bytes } => {
            let bytes = receive.read_to_end(64 << 20, patience()).await.unwrap();
            Ok((total_bytes, bytes.to_vec()))
        }
        AgentResponse::Refused { reason } => Err(reason),
    }
}

#[test]
fn a_pushed_artifact_is_fetched_whole_or_from_where_it_broke_off() {
    with_coordinator(async |rig| {
        let agent = rig.agent("edge-1").await;
        let model: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
        let answer = rig
            .api
            .put(
                "/v1/artifacts/detector-s",
                "application/octet-stream",
                model.clone(),
            )
            .await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let view: ArtifactView = answer.json();
        assert_eq!(view.digest, Digest::of(&model));
        let (total, whole) = fetch(&agent, view.digest, 0).await.unwrap();
        assert_eq!((total, whole.len()), (3_000_000, 3_000_000));
        assert!(whole == model);
        let (total, rest) = fetch(&agent, view.digest, 2_500_000).await.unwrap();
        assert_eq!(total, 3_000_000);
        assert!(rest == model[2_500_000..]);
        let unknown = fetch(&agent, Digest::of(b"other"), 0).await.unwrap_err();
        assert!(unknown.contains("is not here"), "{unknown}");
        let listed: Vec<ArtifactView> = rig.api.get("/v1/artifacts").await.json();
        assert_eq!(listed, [view]);
    });
}

#[test]
fn an_agent_that_stops_answering_is_asked_and_then_missed() {
    common::with_settings(
        "report_every = \"100ms\"\n[planning.detect]\nsilence = {secs = 0, nanos = 500000000}\n",
        async |rig| {
            let agent = rig.agent("edge-1").await;
            // It sends no reports, but answers pings.
            tokio::time::sleep(Duration::from_millis(10)).await;
            let seat = rig.coordinator.plane.fleet.seat(&node("edge-1")).unwrap();
            let first = seat.heard();
            until("a pong", async || (seat.heard() > first).then_some(())).await;
            agent
                .answers
                .store(false, std::sync::atomic::Ordering::Relaxed);
        },
    );
}

/// A plan of the golden configuration with its first two operators on one node and the rest on another.
fn plan_over(query: &Query, catalogue: &Catalogue, near: &str, far: &str) -> QueryPlan {
    let golden = query.pipeline.golden();
    let operators = query.pipeline.operators.iter().enumerate();
    let operators = operators.map(|(position, operator)| {
        let entry = &catalogue.0[&operator.kind];
        let configuration = golden.of(&operator.id).unwrap().clone();
        let place = node(if position < 2 { near } else { far });
        let artifact = entry.artifact(&configuration).map(|choice| ArtifactRef {
            name: choice.name.clone(),
            digest: choice.digest,
            bytes: choice.bytes,
        });
        let digest = artifact.as_ref().map(|artifact| &artifact.digest);
        OperatorPlan {
            operator: operator.id.clone(),
            instance: instance_id(&operator.kind, digest, &configuration, &place),
            configuration,
            node: place,
            share: Resources {
                cpu: Millicores(100),
                memory_mib: entry.memory_mib,
                gpu_percent: 0,
            },
            artifact,
        }
    });
    QueryPlan {
        query: query.id.clone(),
        generation: Generation(4),
        parent: Some(Generation(3)),
        operators: operators.collect(),
        status: PlanStatus::Certified,
        trigger: Trigger::QueryRegistered,
        expected: Expectation {
            latency_ms: Estimate::exact(100.0),
            accuracy: Estimate::exact(0.9),
            cost_usd_per_h: 0.01,
        },
    }
}

/// Field report 91: names that YAML of one version or another takes for a truth value, a number, a time or nothing stay the text that
/// was written: in lists, in a plan, and over a restart in what was saved. What cannot be a name is refused with its line.
#[test]
fn field_091_names_appear_unchanged_in_list_plan_and_saved_state() {
    const NAMES: [&str; 6] = ["on", "1.10", "012", "true", "0x1f", "1e3"];
    let folder = tempfile::tempdir().unwrap();
    let system = common::system();
    let sorted = || {
        let mut names = NAMES.to_vec();
        names.sort_unstable();
        names
    };
    let check = async |rig: &Rig| {
        let views = nodes(&rig.api).await;
        let mut ids: Vec<&str> = views.iter().map(|view| view.id.as_str()).collect();
        ids.sort_unstable();
        assert_eq!(ids, sorted());
        assert!(views.iter().all(|view| view.site == "no"), "{views:?}");
        for name in NAMES {
            let view: NodeView = rig.api.get(&format!("/v1/nodes/{name}")).await.json();
            assert_eq!(view.id.as_str(), name);
        }
        // Queries named like nodes, each entering at the node of its name; all in one plan with a node of another.
        let listed: Vec<QueryView> = rig.api.get("/v1/queries").await.json();
        assert_eq!(listed.len(), NAMES.len());
        for view in listed {
            assert_eq!(view.id.as_str(), view.entry.as_str());
        }
    };
    let plan = system.block_on(async {
        let rig = Rig::start(folder.path(), "").await;
        let mut agents = Vec::new();
        for name in NAMES {
            let mut member = rig.joined(name).await;
            member.site = "no";
            agents.push(member.connect().await.unwrap());
            // As a person would write it, without quotes.
            let yaml = common::query_yaml(name, name);
            let answer = rig.api.post("/v1/queries", "application/yaml", &yaml).await;
            assert_eq!(answer.status, 201, "{name}: {answer:?}");
        }
        for name in ["12:30", "~"] {
            let yaml = common::query_yaml("lobby", name);
            let answer = rig.api.post("/v1/queries", "application/yaml", &yaml).await;
            assert_eq!(answer.status, 422, "{answer:?}");
            assert!(answer.error().contains("request:6:"), "{answer:?}");
        }
        check(&rig).await;
        let plane = &rig.coordinator.plane;
        let query = plane.parse_query(&common::query_yaml("on", "on")).unwrap();
        let plan = plan_over(&query, &plane.configs.catalogue, "on", "1.10");
        let assignment = Assignment {
            commit: Commit { term: 1, number: 9 },
            plans: [(query.id.clone(), plan.clone())].into(),
        };
        let record = AssignmentRecord::new(assignment);
        let transaction = plane.office.begin().put(&record);
        plane.office.commit(transaction).await.unwrap();
        drop(agents);
        rig.coordinator.shut_down().await;
        plan
    });
    system.block_on(async {
        let rig = Rig::start(folder.path(), "").await;
        check(&rig).await;
        let view: QueryView = rig.api.get("/v1/queries/on").await.json();
        let saved = view.plan.unwrap().plan;
        let places = |plan: &QueryPlan| -> Vec<String> {
            let operators = plan.operators.iter();
            operators.map(|part| part.node.to_string()).collect()
        };
        assert_eq!(places(&saved), places(&plan));
        assert!(places(&saved).contains(&"1.10".to_owned()));
        rig.coordinator.shut_down().await;
    });
}

/// Field report 41: after a restart the coordinator decides once, when every node has said what it runs, and decides to change nothing.
#[test]
fn field_041_plans_in_force_are_adopted_when_all_their_nodes_are_back() {
    let folder = tempfile::tempdir().unwrap();
    let system = common::system();
    let (edge, near, plan, address) = system.block_on(async {
        let rig = Rig::start(folder.path(), "").await;
        let (edge, near) = (rig.agent("edge-1").await, rig.agent("near-1").await);
        let yaml = common::query_yaml("lobby", "edge-1");
        let answer = rig.api.post("/v1/queries", "application/yaml", &yaml).await;
        assert_eq!(answer.status, 201, "{answer:?}");
        let plane = &rig.coordinator.plane;
        let query = plane.parse_query(&yaml).unwrap();
        let plan = plan_over(&query, &plane.configs.catalogue, "edge-1", "near-1");
        let assignment = Assignment {
            commit: Commit { term: 1, number: 9 },
            plans: [(query.id.clone(), plan.clone())].into(),
        };
        let record = AssignmentRecord::new(assignment);
        let transaction = plane.office.begin().put(&record);
        plane.office.commit(transaction).await.unwrap();
        let members = (edge.member.identity(), near.member.identity());
        let quic = rig.quic();
        drop((edge, near));
        rig.coordinator.shut_down().await;
        (members.0, members.1, plan, quic)
    });
    system.block_on(async {
        let rig = Rig::start(folder.path(), "").await;
        assert_ne!(rig.quic(), address, "another socket, the same store");
        let back = async |name: &str, identity| {
            let mut member = Member::with_identity(rig.quic(), name, identity);
            member.applied = Some(Commit { term: 1, number: 9 });
            let here = plan.operators.iter().filter(|part| part.node == node(name));
            member.instances = here
                .map(|part| InstanceStatus {
                    instance: part.instance,
                    state: InstanceState::Ready,
                    pid: Some(7),
                    restarts: 0,
                })
                .collect();
            member.connect().await.unwrap()
        };
        let mut edge = back("edge-1", edge).await;
        until("the first node to be seen", async || {
            is_online(&rig.api, "edge-1").await.then_some(())
        })
        .await;
        assert!(
            !rig.coordinator.plane.takeover.is_over(),
            "half a fleet is no picture"
        );
        let mut near = back("near-1", near).await;
        for (agent, name) in [(&mut edge, "edge-1"), (&mut near, "near-1")] {
            let target = agent
                .hear(|message| match message {
                    CoordinatorToAgent::Target(target) => Some(target),
                    _ => None,
                })
                .await;
            assert!(target.commit > Commit { term: 1, number: 9 });
            let mut told: Vec<_> = target.instances.iter().map(|one| one.instance).collect();
            let mut ran: Vec<_> = agent
                .member
                .instances
                .iter()
                .map(|one| one.instance)
                .collect();
            told.sort();
            ran.sort();
            assert_eq!(told, ran, "{name} goes on with what it runs");
            assert_eq!(target.queries[0].current, Generation(4));
        }
        assert!(rig.coordinator.plane.takeover.is_over());
        let view: QueryView = rig.api.get("/v1/queries/lobby").await.json();
        assert_eq!(view.plan.unwrap().plan.generation, Generation(4));
        let said = events(&rig.api).await;
        let decided = said
            .iter()
            .find(|event| event.message.contains("in force because"));
        assert!(decided.is_none(), "{decided:?}");
        assert!(
            said.iter()
                .any(|event| event.message.contains("taken over, 1 with a plan"))
        );
        rig.coordinator.shut_down().await;
    });
}

/// What the planner takes a link for, as the API shows it.
async fn link(api: &Api, from: &str, to: &str) -> Option<LinkView> {
    let views: Vec<LinkView> = api.get("/v1/links").await.json();
    let mut views = views.into_iter();
    views.find(|view| view.from == node(from) && view.to == node(to))
}

/// A link that was bad when the coordinator went is measured again after its start and counts for what it is, whether its agent has
/// lived on or has started anew: both introduced to its neighbour, and neither holding the link degraded.
#[test]
fn a_link_remembered_as_degraded_recovers_by_what_its_agent_measures() {
    for boot in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let system = common::system();
        let (edge, near) = system.block_on(async {
            let rig = Rig::start(folder.path(), "").await;
            let (edge, near) = (rig.agent("edge-1").await, rig.agent("near-1").await);
            let bad = Link {
                bandwidth: Bandwidth::from_mbit_s(0.5),
                lower_bound: false,
                rtt_ms: 20.0,
                loss: 0.0,
            };
            let record = LinksRecord {
                links: vec![(node("edge-1"), node("near-1"), bad)],
            };
            let office = &rig.coordinator.plane.office;
            office.commit(office.begin().put(&record)).await.unwrap();
            let members = (edge.member.identity(), near.member.identity());
            drop((edge, near));
            rig.coordinator.shut_down().await;
            members
        });
        system.block_on(async {
            let rig = Rig::start(folder.path(), "").await;
            let mut edge = Member::with_identity(rig.quic(), "edge-1", edge);
            edge.boot = boot;
            let mut edge = edge.connect().await.unwrap();
            let near = Member::with_identity(rig.quic(), "near-1", near);
            let near = near.connect().await.unwrap();
            let peers = edge
                .hear(|message| match message {
                    CoordinatorToAgent::Peers(peers) if !peers.is_empty() => Some(peers),
                    _ => None,
                })
                .await;
            assert_eq!(peers[0].node, node("near-1"));
            let before = until("the remembered link", async || {
                link(&rig.api, "edge-1", "near-1").await
            })
            .await;
            assert!(before.bandwidth_mbit_s < 1.0, "{before:?}");
            // What a probe train on an unused link says, once each twenty seconds of an agent's life.
            let measured = LinkReport {
                peer: node("near-1"),
                rtt_ms: Some(20.0),
                delivered_bps: 10_000_000,
                network_limited: true,
                degraded: false,
                loss: 0.0,
                sent_bytes: 0,
                received_bytes: 0,
            };
            until("the link to count as it is", async || {
                edge.report_links(vec![measured.clone()]).await;
                link(&rig.api, "edge-1", "near-1")
                    .await
                    .filter(|link| link.bandwidth_mbit_s > 8.0)
            })
            .await;
            drop(near);
            rig.coordinator.shut_down().await;
        });
    }
}
