use std::collections::BTreeMap;

use compass_shared::ids::SiteId;
use compass_shared::model::cluster::{NodeDescription, Resources, Tier};
use compass_shared::model::telemetry::{DeviceTelemetry, NodeTelemetry, Reading, Source};

use super::*;
use crate::testing::NoSession;

fn fleet() -> Fleet {
    Fleet::new(Clock::begin(), Arc::new(Metrics::new()))
}

fn id(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

fn registration(site: &str, tier: Tier) -> Registration {
    Registration {
        description: NodeDescription {
            tier,
            site: SiteId::new(site).unwrap(),
            device_class: "test".to_owned(),
            emulated_speed: None,
            capacity: Resources::default(),
            labels: BTreeMap::new(),
            advertised: vec![],
            fingerprint: Digest::of(b"claimed"),
        },
        boot: 1,
        applied: None,
        instances: vec![],
        artifacts: vec![],
    }
}

fn seat(fleet: &Fleet, name: &str, site: &str, tier: Tier) -> (Arc<Seat>, Outgoing) {
    let key = Digest::of(name.as_bytes());
    let (seat, outgoing, _) =
        fleet.take_seat(id(name), key, registration(site, tier), NoSession::new());
    (seat, outgoing)
}

fn report(sequence: u64) -> AgentReport {
    AgentReport {
        sequence,
        telemetry: NodeTelemetry::default(),
        links: vec![],
        instances: vec![],
        content: vec![],
        applied: None,
        sent_bytes: 0,
        received_bytes: 0,
    }
}

#[tokio::test]
async fn of_reports_only_the_newest_unread_one_is_seen() {
    let fleet = fleet();
    let (edge, _outgoing) = seat(&fleet, "edge-1", "plant", Tier::Edge);
    fleet.take_heard();
    for sequence in [1, 3, 2] {
        fleet.report(&edge, report(sequence));
    }
    let heard = fleet.take_heard();
    assert_eq!(heard.len(), 1);
    assert_eq!(heard[0].report.as_ref().unwrap().sequence, 3);
    assert!(fleet.take_heard().is_empty());
    let text = fleet.metrics.text();
    assert!(
        text.contains("reports_dropped_total{kind=\"superseded\"} 1"),
        "{text}"
    );
    assert!(
        text.contains("reports_dropped_total{kind=\"stale\"} 1"),
        "{text}"
    );
    edge.stamp(fleet.clock.now());
    let heard = fleet.take_heard();
    assert!(heard[0].report.is_none(), "a pong says only that it lives");
}

/// Field report 7: sentinels do not get past the door.
#[tokio::test]
async fn field_007_impossible_figures_are_dropped_on_arrival() {
    let fleet = fleet();
    let (edge, _outgoing) = seat(&fleet, "edge-1", "plant", Tier::Edge);
    let mut blank = report(1);
    blank.telemetry.host.cpu_busy_percent = Reading::new(f64::NAN, Source::Sysinfo);
    blank.telemetry.devices = vec![DeviceTelemetry {
        busy_percent: Reading::new(9.2e18, Source::Nvml),
        power_mw: Reading::new(15_000, Source::Nvml),
        ..DeviceTelemetry::default()
    }];
    let link = |rtt_ms, loss| LinkReport {
        peer: id("near-1"),
        rtt_ms,
        delivered_bps: 1,
        network_limited: false,
        degraded: false,
        loss,
        sent_bytes: 0,
        received_bytes: 0,
    };
    blank.links = vec![
        link(Some(f64::INFINITY), 0.0),
        link(None, 7.0),
        link(Some(3.0), 0.0),
    ];
    fleet.report(&edge, blank);
    let kept = edge.report().unwrap();
    assert_eq!(kept.telemetry.host.cpu_busy_percent.value, None);
    assert_eq!(kept.telemetry.devices[0].busy_percent.value, None);
    assert_eq!(kept.telemetry.devices[0].power_mw.value, Some(15_000));
    assert_eq!(kept.telemetry.dropped_values, 2);
    assert_eq!(kept.links.len(), 1);
}

#[tokio::test]
async fn neighbours_of_the_same_site_come_first() {
    let fleet = fleet();
    let (_edge, outgoing) = seat(&fleet, "edge-1", "plant", Tier::Edge);
    let _others = [
        seat(&fleet, "cloud-1", "region", Tier::Cloud),
        seat(&fleet, "metro-1", "region", Tier::NearCloud),
        seat(&fleet, "near-1", "plant", Tier::NearEdge),
    ];
    fleet.introduce();
    let peers = outgoing.peers.borrow().clone();
    let names: Vec<_> = peers.iter().map(|peer| peer.node.as_str()).collect();
    assert_eq!(names, ["near-1", "metro-1", "cloud-1"]);
    assert_eq!(
        peers[0].fingerprint,
        Digest::of(b"near-1"),
        "the key it proved, not the one it claims"
    );
}

#[tokio::test]
async fn a_list_of_neighbours_stays_bounded_and_a_pair_is_always_in_it() {
    let fleet = fleet();
    let (_edge, outgoing) = seat(&fleet, "edge-1", "plant", Tier::Edge);
    let mut others = Vec::new();
    for n in 0..PEERS_MAX + 10 {
        others.push(seat(&fleet, &format!("n-{n:03}"), "plant", Tier::Edge));
    }
    let (far, _far_outgoing) = seat(&fleet, "zz-far", "other", Tier::Cloud);
    fleet.introduce();
    let has_far = || {
        let peers = outgoing.peers.borrow();
        assert_eq!(peers.len(), PEERS_MAX);
        peers.iter().any(|peer| peer.node == far.node)
    };
    assert!(!has_far());
    fleet.pair(&id("edge-1"), &far.node);
    assert!(has_far());
}

#[tokio::test]
async fn a_replaced_session_does_not_take_the_new_ones_seat_away() {
    let fleet = fleet();
    let (old, _old_outgoing) = seat(&fleet, "edge-1", "plant", Tier::Edge);
    let (new, _new_outgoing) = seat(&fleet, "edge-1", "plant", Tier::Edge);
    assert!(!fleet.leave(&old.node, old.epoch));
    assert_eq!(fleet.seat(&old.node).unwrap().epoch, new.epoch);
    assert!(fleet.leave(&new.node, new.epoch));
    assert!(fleet.is_empty());
}

#[tokio::test]
async fn a_node_that_takes_no_messages_is_stuck_not_a_burden() {
    let fleet = fleet();
    let (edge, outgoing) = seat(&fleet, "edge-1", "plant", Tier::Edge);
    for _ in 0..OUTBOX_MAX {
        edge.send(CoordinatorToAgent::Ping(1)).unwrap();
    }
    assert_eq!(
        edge.send(CoordinatorToAgent::Ping(1)),
        Err(Undeliverable::Stuck)
    );
    drop(outgoing);
    assert_eq!(
        edge.send(CoordinatorToAgent::Ping(1)),
        Err(Undeliverable::Offline)
    );
    assert_eq!(
        fleet.send(&id("nobody"), CoordinatorToAgent::Ping(1)),
        Err(Undeliverable::Offline)
    );
}
