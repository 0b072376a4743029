//! Apps and people at the coordinator: registering, attaching, rights, bad input, and what survives a crash.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use common::{Api, App, Member, node, query_yaml, until, with_coordinator};
use compass_shared::api::{Health, QueryState, QueryView};
use compass_shared::model::outcome::{AppReport, OutcomeCounts};
use compass_shared::wire::v1::{AppToCoordinator, CoordinatorToApp};
use compass_transport::{CloseCode, Closed, PrivateKey, Role};

const YAML: &str = "application/yaml";

async fn query(api: &Api, name: &str) -> QueryView {
    let answer = api.get(&format!("/v1/queries/{name}")).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

#[test]
fn an_app_registers_gets_a_certificate_for_its_query_and_attaches_with_it() {
    with_coordinator(async |rig| {
        let agent = rig.agent("edge-1").await;
        let token = rig.api.api_token("app").await;
        let app = App::register(rig, &token, &query_yaml("lobby", "edge-1"))
            .await
            .unwrap();
        let CoordinatorToApp::Registered {
            query: id,
            entry,
            latency_bound,
            frame_deadline,
            authority_der,
            ..
        } = &app.registered
        else {
            panic!("{:?}", app.registered);
        };
        assert_eq!(id.as_str(), "lobby");
        assert_eq!(entry.node, node("edge-1"));
        assert_eq!(entry.addresses, agent.member.endpoint.local_addresses());
        assert_eq!(latency_bound.unwrap().as_millis(), 400);
        assert_eq!(frame_deadline.as_millis(), 1600);
        assert_eq!(
            authority_der,
            &rig.coordinator.plane.authority.certificate().to_vec()
        );
        let identity = app.identity();
        assert_eq!(*identity.role(), Role::App(id.clone()));
        assert!(query(&rig.api, "lobby").await.app_online);
        app.session.close(CloseCode::DONE, "restart");
        until("the app to be gone", async || {
            (!query(&rig.api, "lobby").await.app_online).then_some(())
        })
        .await;
        let again = App::attach(rig, identity).await.unwrap();
        assert!(query(&rig.api, "lobby").await.app_online);
        drop(again);
    });
}

#[test]
fn what_an_app_measures_is_shown_against_its_slos() {
    with_coordinator(async |rig| {
        let _agent = rig.agent("edge-1").await;
        let token = rig.api.api_token("app").await;
        let mut app = App::register(rig, &token, &query_yaml("lobby", "edge-1"))
            .await
            .unwrap();
        let report = AppReport {
            generation: None,
            window_ms: 1000,
            counts: OutcomeCounts {
                sent: 20,
                answered: 18,
                late: 2,
                ..OutcomeCounts::default()
            },
            latencies_ms: (1..=20)
                .map(|n| n as f32 * 25.0)
                .chain([f32::NAN])
                .collect(),
            accuracies: vec![0.75, 0.25, 7.0],
        };
        app.tell(&AppToCoordinator::Report(report)).await;
        let view = until("the report", async || {
            let view = query(&rig.api, "lobby").await;
            view.slo_status[0].value.is_some().then_some(view)
        })
        .await;
        let latency = &view.slo_status[0];
        assert_eq!(latency.name, "p95 latency");
        assert_eq!((latency.value, latency.met), (Some(475.0), Some(false)));
        let accuracy = &view.slo_status[1];
        assert_eq!((accuracy.value, accuracy.met), (Some(0.5), Some(true)));
        assert_eq!(accuracy.source, "app");
        assert_eq!(view.slo_status[2].value, None, "there is no plan yet");
        assert_eq!(view.state, QueryState::Searching);
    });
}

#[test]
fn refusals_say_what_is_wrong_and_the_way_out() {
    with_coordinator(async |rig| {
        let _agent = rig.agent("edge-1").await;
        let token = rig.api.api_token("app").await;
        let viewer = rig.api.api_token("viewer").await;
        let good = query_yaml("lobby", "edge-1");
        let refused = async |token: &str, yaml: &str| {
            App::register(rig, token, yaml).await.map(drop).unwrap_err()
        };
        let cases = [
            ("forged", "ck1.00", good.clone(), "not known"),
            ("viewer", viewer.as_str(), good.clone(), "role app"),
            (
                "a command",
                &token,
                good.replace("spec:\n", "spec:\n  command: [rm, -rf, /]\n"),
                "unknown key \"command\"",
            ),
            (
                "an operator's command",
                &token,
                good.replace(
                    "  pipeline: live-video\n",
                    "  operators:\n    - {name: a, kind: sampler, command: [sh]}\n",
                ),
                "command",
            ),
            (
                "a missing unit",
                &token,
                good.replace("400ms", "400"),
                "request:8",
            ),
            (
                "an unknown entry node",
                &token,
                query_yaml("lobby", "egde-1"),
                "did you mean \"edge-1\"?",
            ),
            (
                "an unknown pipeline",
                &token,
                good.replace("live-video", "live-vidoe"),
                "did you mean \"live-video\"?",
            ),
            (
                "a name that cannot stand in a certificate",
                &token,
                query_yaml("lobby-", "edge-1"),
                "lobby-",
            ),
            ("nothing", &token, String::new(), "empty"),
        ];
        for (what, token, yaml, expected) in cases {
            let reason = refused(token, &yaml).await;
            assert!(reason.contains(expected), "{what}: {reason}");
        }
        let listed: Vec<QueryView> = rig.api.get("/v1/queries").await.json();
        assert!(listed.is_empty(), "nothing that was refused is kept");
        App::register(rig, &token, &good).await.unwrap();
    });
}

#[test]
fn a_query_has_one_app_and_one_content() {
    with_coordinator(async |rig| {
        let _agent = rig.agent("edge-1").await;
        let token = rig.api.api_token("app").await;
        let yaml = query_yaml("lobby", "edge-1");
        let first = App::register(rig, &token, &yaml).await.unwrap();
        let second = App::register(rig, &token, &yaml).await.map(drop);
        assert!(second.unwrap_err().contains("already has an app"));
        let old = first.identity();
        first.session.close(CloseCode::DONE, "crash");
        until("the app to be gone", async || {
            (!query(&rig.api, "lobby").await.app_online).then_some(())
        })
        .await;
        let other = yaml.replace("400ms", "500ms");
        let other = App::register(rig, &token, &other).await.map(drop);
        assert!(other.unwrap_err().contains("another query is registered"));
        // A restarted app has lost its key: it registers the same query and gets a new certificate; the old one is out.
        let again = App::register(rig, &token, &yaml).await.unwrap();
        again.session.close(CloseCode::DONE, "done");
        let stale = App::attach(rig, old).await.map(drop);
        assert!(stale.unwrap_err().contains("another app"));
    });
}

#[test]
fn a_withdrawn_query_is_gone_and_its_app_is_told() {
    with_coordinator(async |rig| {
        let _agent = rig.agent("edge-1").await;
        let token = rig.api.api_token("app").await;
        let mut app = App::register(rig, &token, &query_yaml("lobby", "edge-1"))
            .await
            .unwrap();
        assert_eq!(rig.api.delete("/v1/queries/lobby").await.status, 204);
        app.hear(|message| matches!(message, CoordinatorToApp::Withdrawn).then_some(()))
            .await;
        let closed = app.session.closed().await;
        assert!(
            matches!(&closed, Closed::ByPeer { code, .. } if *code == CloseCode::DONE),
            "{closed}"
        );
        let answer = rig.api.get("/v1/queries/lobby").await;
        assert_eq!(answer.status, 404);
        assert!(answer.error().contains("stopped"), "{answer:?}");
        // The name is free again.
        let mut app = App::register(rig, &token, &query_yaml("lobby", "edge-1"))
            .await
            .unwrap();
        app.tell(&AppToCoordinator::Withdraw).await;
        app.hear(|message| matches!(message, CoordinatorToApp::Withdrawn).then_some(()))
            .await;
    });
}

#[test]
fn every_path_but_healthz_wants_a_token_and_each_act_its_role() {
    with_coordinator(async |rig| {
        let nobody = rig.api.with_token("");
        let health = nobody.get("/healthz").await;
        assert_eq!(health.status, 200);
        let health: Health = health.json();
        assert!(health.ok, "{health:?}");
        for path in ["/metrics", "/v1/nodes", "/v1/openapi.json", "/v1/nonsense"] {
            let answer = nobody.get(path).await;
            assert_eq!(answer.status, 401, "{path}");
            assert!(answer.error().contains("token"), "{path}");
        }
        let viewer = rig.api.with_token(&rig.api.api_token("viewer").await);
        let operator = rig.api.with_token(&rig.api.api_token("operator").await);
        assert_eq!(viewer.get("/v1/nodes").await.status, 200);
        assert_eq!(viewer.get("/v1/tokens").await.status, 403);
        let yaml = query_yaml("lobby", "edge-1");
        assert_eq!(viewer.post("/v1/queries", YAML, &yaml).await.status, 403);
        let join = r#"{"purpose":{"join":"edge-9"},"ttl_s":60,"uses":1}"#;
        let role = r#"{"purpose":{"api":"admin"},"ttl_s":60,"uses":null}"#;
        let post = async |api: &Api, body| api.post("/v1/tokens", "application/json", body).await;
        assert_eq!(post(&viewer, join).await.status, 403);
        assert_eq!(post(&operator, join).await.status, 201);
        assert_eq!(
            post(&operator, role).await.status,
            403,
            "no one rises by himself"
        );
        assert_eq!(viewer.get("/v1/nonsense").await.status, 404);
        assert_eq!(viewer.delete("/v1/links").await.status, 405);
    });
}

/// Field report 96: bodies that grow when they are read, and bodies without end.
#[test]
fn field_096_hostile_bodies_are_refused_and_the_coordinator_stays_up() {
    with_coordinator(async |rig| {
        let mut aliases = String::from("a0: &a0 [x, x]\n");
        for level in 1..=11 {
            let many = vec![format!("*a{}", level - 1); 9].join(", ");
            aliases.push_str(&format!("a{level}: &a{level} [{many}]\n"));
        }
        let cases = [
            aliases,
            "[".repeat(5_000),
            "{a: ".repeat(5_000),
            "x: y\n".repeat(400_000),
            "\u{0}\u{1}\u{2}".to_owned(),
        ];
        for body in cases {
            for path in ["/v1/queries", "/v1/queries/plan"] {
                let answer = rig.api.post(path, YAML, &body).await;
                assert!(matches!(answer.status, 413 | 422), "{answer:?}");
                assert!(!answer.error().is_empty());
            }
        }
        for body in ["{", r#"{"purpose":{"api":"root"},"ttl_s":1}"#, "[]"] {
            let answer = rig.api.post("/v1/tokens", "application/json", body).await;
            assert_eq!(answer.status, 422, "{answer:?}");
        }
        assert_eq!(rig.api.get("/healthz").await.status, 200);
    });
}

/// A client that writes its whole request before it reads: whoever hangs up on it takes the answer away.
async fn post_then_read(api: &Api, path: &str, body: Vec<u8>) -> std::io::Result<String> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(api.address).await?;
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\ncontent-type: {YAML}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        api.token,
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(&body).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

#[test]
fn a_body_that_is_too_large_gets_its_413_whatever_its_sender_is_doing() {
    with_coordinator(async |rig| {
        for megabytes in [2, 8, 32] {
            let body = vec![b'#'; megabytes << 20];
            let answer = post_then_read(&rig.api, "/v1/queries", body).await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
            assert!(answer.contains("more than 1048576 bytes"), "{answer}");
        }
        // Neither is one that fits any worse for it.
        let answer = post_then_read(&rig.api, "/v1/queries", b"kind: Query".to_vec()).await;
        assert!(answer.unwrap().starts_with("HTTP/1.1 422 "));
    });
}

#[test]
fn a_dry_run_changes_nothing_and_says_what_is_missing() {
    with_coordinator(async |rig| {
        let _agent = rig.agent("edge-1").await;
        let yaml = query_yaml("lobby", "edge-1");
        let answer = rig.api.post("/v1/queries/plan", YAML, &yaml).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let run: compass_shared::api::DryRun = answer.json();
        assert!(run.plan.is_none() && !run.changed);
        assert!(run.report.contains("register it"), "{}", run.report);
        let listed: Vec<QueryView> = rig.api.get("/v1/queries").await.json();
        assert!(listed.is_empty());
    });
}

/// The real program on a data folder of its own.
struct Process {
    child: Child,
    api: Api,
    quic: std::net::SocketAddr,
}

fn start(folder: &std::path::Path) -> Process {
    let mut child = Command::new(env!("CARGO_BIN_EXE_compass-coordinator"))
        .args([
            "--listen",
            "127.0.0.1:0",
            "--http",
            "127.0.0.1:0",
            "--data-dir",
        ])
        .arg(folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let value = |key: &str| {
        let mut words = line.split_whitespace();
        let found = words.find_map(|word| word.strip_prefix(key));
        found
            .unwrap_or_else(|| panic!("{key} in {line:?}"))
            .to_owned()
    };
    let token = std::fs::read_to_string(value("admin_token_file=")).unwrap();
    Process {
        child,
        api: Api {
            address: value("http=").parse().unwrap(),
            token: token.trim().to_owned(),
        },
        quic: value("quic=").parse().unwrap(),
    }
}

#[tokio::test]
async fn acknowledged_queries_and_nodes_survive_kill_9_and_the_term_grows() {
    let folder = tempfile::tempdir().unwrap();
    let mut process = start(folder.path());
    let token = process.api.join_token("edge-1").await;
    let key = PrivateKey::generate();
    let member = Member::join(process.quic, &token, "edge-1", &key)
        .await
        .unwrap();
    let identity = member.identity();
    let agent = member.connect().await.unwrap();
    let mut acknowledged = Vec::new();
    let mut term = 0;
    for round in 0..3 {
        let health: Health = process.api.get("/healthz").await.json();
        assert!(health.term > term);
        term = health.term;
        for n in 0..4 {
            let name = format!("q-{round}-{n}");
            let yaml = query_yaml(&name, "edge-1");
            let answer = process.api.post("/v1/queries", YAML, &yaml).await;
            assert_eq!(answer.status, 201, "{answer:?}");
            acknowledged.push(name);
        }
        process.child.kill().unwrap();
        process.child.wait().unwrap();
        process = start(folder.path());
        let listed: Vec<QueryView> = process.api.get("/v1/queries").await.json();
        let names: Vec<_> = listed.iter().map(|view| view.id.to_string()).collect();
        assert_eq!(names, acknowledged);
    }
    drop(agent);
    // The node is still a member: it needs no token to come back.
    let back = Member::with_identity(process.quic, "edge-1", identity);
    back.connect().await.unwrap();
    // SIGTERM ends it cleanly.
    let pid = process.child.id().to_string();
    let status = Command::new("kill").args(["-TERM", &pid]).status().unwrap();
    assert!(status.success());
    let status = tokio::task::spawn_blocking(move || process.child.wait().unwrap())
        .await
        .unwrap();
    assert!(status.success(), "{status:?}");
}

#[test]
fn the_api_document_names_every_path_and_every_path_is_served() {
    with_coordinator(async |rig| {
        let document: serde_json::Value = rig.api.get("/v1/openapi.json").await.json();
        let paths = document["paths"].as_object().unwrap();
        assert!(paths.len() >= 19, "{}", paths.len());
        for (path, item) in paths {
            let path = path
                .replace("{id}", "x")
                .replace("{name}", "x")
                .replace("{generation}", "1");
            for method in item.as_object().unwrap().keys() {
                let answer = match method.as_str() {
                    "get" => rig.api.get(&path).await,
                    "delete" => rig.api.delete(&path).await,
                    "put" => rig.api.put(&path, "application/json", vec![]).await,
                    "post" => rig.api.post(&path, "application/json", "").await,
                    other => panic!("{other} {path}"),
                };
                assert_ne!(answer.status, 405, "{method} {path}");
                assert!(
                    answer.status != 404 || !answer.error().contains("there is no /"),
                    "{method} {path}: {answer:?}"
                );
            }
        }
    });
}
