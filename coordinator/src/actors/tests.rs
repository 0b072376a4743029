use std::sync::Arc;
use std::time::Duration;

use compass_shared::api::Role as ApiRole;
use compass_shared::ids::{Digest, NodeId, SiteId};
use compass_shared::model::cluster::{NodeDescription, Resources, Tier};
use compass_shared::units::Millicores;
use compass_shared::wire::v1::Registration;
use compass_transport::WallClock;
use tokio::time::Instant;

use super::*;
use crate::plane::Plane;
use crate::settings::{Overrides, Settings};
use crate::store::records::NodeRecord;
use crate::testing::NoSession;
use crate::tokens::Bearer;

struct Rig {
    plane: Arc<Plane>,
    host: tokio::task::JoinHandle<String>,
    _folder: tempfile::TempDir,
}

async fn rig() -> Rig {
    let folder = tempfile::tempdir().unwrap();
    let overrides = Overrides {
        data_dir: Some(folder.path().to_owned()),
        ..Overrides::default()
    };
    let settings = Settings::parse("test", "", overrides).unwrap();
    let (plane, commands) = crate::run::build(settings, WallClock::system())
        .await
        .unwrap();
    let host = actix::spawn(host::run(plane.clone(), commands));
    let rig = Rig {
        plane,
        host,
        _folder: folder,
    };
    until("the roles", || {
        let roles = &rig.plane.roles;
        roles.monitor.is_alive() && roles.scheduler.is_alive() && roles.profiler.is_alive()
    })
    .await;
    rig
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "waiting for {what}"
        );
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

/// A node with a seat and a record, as far as the roles can tell.
async fn seat(plane: &Plane, name: &str) {
    let description = NodeDescription {
        tier: Tier::Edge,
        site: SiteId::new("plant").unwrap(),
        device_class: "test".to_owned(),
        emulated_speed: None,
        capacity: Resources {
            cpu: Millicores(1000),
            memory_mib: 1024,
            gpu_percent: 0,
        },
        labels: BTreeMap::new(),
        advertised: vec![],
        fingerprint: Digest::of(name.as_bytes()),
    };
    let record = NodeRecord {
        id: node(name),
        fingerprint: description.fingerprint,
        joined_unix_ms: 0,
        joined_with: "test".to_owned(),
        scheduling: Default::default(),
        description: Some(description.clone()),
        boot: 1,
    };
    let transaction = plane.office.begin().put(&record);
    plane.office.commit(transaction).await.unwrap();
    let registration = Registration {
        description: description.clone(),
        boot: 1,
        applied: None,
        instances: vec![],
        artifacts: vec![],
    };
    plane.fleet.take_seat(
        node(name),
        record.fingerprint,
        registration,
        NoSession::new(),
    );
    let fact = compass_planning::roles::monitor::Input::NodeUp {
        node: node(name),
        description,
    };
    plane.roles.monitor.tell(fact.into());
}

async fn register(plane: &Plane, name: &str) -> QueryId {
    let yaml = format!(
        "apiVersion: compass/v1\nkind: Query\nmetadata: {{name: {name}}}\nspec:\n  pipeline: live-video\n  source: {{node: edge-1, rate: 10/s}}\n  slo:\n    latency: {{p95: 400ms}}\n"
    );
    let bearer = Bearer {
        token_id: "test".to_owned(),
        role: ApiRole::App,
    };
    let registered = plane.register_query(&yaml, None, &bearer).await.unwrap();
    registered.record.query.id
}

/// Field report 46: a panic in a planning role: a new one, with the whole picture, within a second.
#[actix::test]
async fn field_046_a_crashed_monitor_comes_back_and_knows_the_fleet() {
    let rig = rig().await;
    let plane = &rig.plane;
    seat(plane, "edge-1").await;
    let knows = |plane: &Plane| plane.picture.cluster().nodes.contains_key(&node("edge-1"));
    until("the node in the picture", || knows(plane)).await;
    plane
        .picture
        .set_cluster(crate::plane::Picture::new(plane.configs.prices.clone()).cluster());
    plane.roles.monitor.crash();
    until("the crash", || !plane.roles.monitor.is_alive()).await;
    until("the new monitor's picture", || knows(plane)).await;
    let alarms = plane.events.newest(100);
    assert!(
        alarms
            .iter()
            .any(|line| line.kind == "alarm" && line.object == "monitor"),
        "{alarms:?}"
    );
    assert!(plane.health.troubles().is_empty(), "it is well again");
}

#[actix::test]
async fn a_crashed_scheduler_comes_back_in_a_new_term() {
    let rig = rig().await;
    let plane = &rig.plane;
    let before = plane.office.term();
    plane.roles.scheduler.crash();
    until("a new term", || plane.office.term() > before).await;
    until("the scheduler", || plane.roles.scheduler.is_alive()).await;
    assert!(plane.roles.monitor.is_alive() && plane.roles.profiler.is_alive());
}

#[actix::test]
async fn one_explorers_crash_touches_no_other_query() {
    let rig = rig().await;
    let plane = &rig.plane;
    seat(plane, "edge-1").await;
    let (first, second) = (register(plane, "a").await, register(plane, "b").await);
    until("two explorers", || {
        plane.roles.has_explorer(&first) && plane.roles.has_explorer(&second)
    })
    .await;
    plane.roles.crash_explorer(&first);
    until("the crash", || !plane.roles.has_explorer(&first)).await;
    assert!(plane.roles.has_explorer(&second));
    until("it to come back", || plane.roles.has_explorer(&first)).await;
    let text = plane.metrics.text();
    assert!(
        text.contains("actor_restarts_total{kind=\"explorer\"} 1"),
        "{text}"
    );
}

#[actix::test]
async fn an_explorer_that_keeps_crashing_leaves_its_query_in_trouble_and_the_rest_alone() {
    let rig = rig().await;
    let plane = &rig.plane;
    seat(plane, "edge-1").await;
    let (bad, good) = (register(plane, "bad").await, register(plane, "good").await);
    until("two explorers", || {
        plane.roles.has_explorer(&bad) && plane.roles.has_explorer(&good)
    })
    .await;
    // From here on only virtual time passes while it is started again and again.
    tokio::time::pause();
    while plane.queries.view(&bad).trouble.is_none() {
        if plane.roles.has_explorer(&bad) {
            plane.roles.crash_explorer(&bad);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let trouble = plane.queries.view(&bad).trouble.unwrap();
    assert!(trouble.contains("explorer bad"), "{trouble}");
    assert!(plane.queries.view(&good).trouble.is_none());
    assert!(plane.roles.has_explorer(&good));
    assert!(
        plane.health.troubles().is_empty(),
        "the process is not in trouble"
    );
    assert!(!rig.host.is_finished());
}

#[actix::test]
async fn a_core_role_that_keeps_crashing_ends_the_process_loudly() {
    let rig = rig().await;
    let plane = &rig.plane;
    tokio::time::pause();
    while !rig.host.is_finished() {
        if plane.roles.profiler.is_alive() {
            plane.roles.profiler.crash();
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let reason = rig.host.await.unwrap();
    assert!(reason.contains("profiler"), "{reason}");
    assert_eq!(plane.health.troubles().len(), 1, "health is red");
}
