use super::*;
use crate::tests::fixture;
use compass_shared::ids::{Generation, InstanceId};
use compass_shared::model::telemetry::NodeTelemetry;
use compass_shared::model::trigger::Measurement;
use compass_shared::wire::v1::{ContentReport, LinkReport};
use std::time::Duration;

struct World {
    monitor: Monitor,
    now: Moment,
    triggers: Vec<Trigger>,
    noticed: Vec<Trigger>,
    alarms: Vec<String>,
    clusters: usize,
}

impl World {
    fn new() -> Self {
        let mut world = Self {
            monitor: Monitor::new(DetectSettings::default(), fixture::prices()),
            now: Moment(0),
            triggers: Vec::new(),
            noticed: Vec::new(),
            alarms: Vec::new(),
            clusters: 0,
        };
        for name in ["edge-1", "near-1", "metro-1", "cloud-1"] {
            world.handle(Input::NodeUp {
                node: fixture::node_id(name),
                description: fixture::description(name),
            });
        }
        world.handle(Input::QueryUp(Arc::new(fixture::query())));
        world
    }

    fn handle(&mut self, input: Input) {
        for effect in self.monitor.handle(self.now, input) {
            match effect {
                Effect::Cluster { triggers, .. } => {
                    self.clusters += 1;
                    self.triggers.extend(triggers);
                }
                Effect::Noticed { trigger, .. } => self.noticed.push(trigger),
                Effect::Alarm(text) => self.alarms.push(text),
                Effect::Observed { .. } => {}
            }
        }
    }

    fn wait(&mut self, ms: u64) {
        self.now = self.now + Duration::from_millis(ms);
        self.handle(Input::Tick);
    }

    fn report(&mut self, node: &str, links: Vec<LinkReport>, content: Vec<ContentReport>) {
        let report = AgentReport {
            sequence: 1,
            telemetry: NodeTelemetry::default(),
            links,
            instances: vec![],
            content,
            applied: None,
            sent_bytes: 0,
            received_bytes: 0,
        };
        self.handle(Input::Report {
            node: fixture::node_id(node),
            report: Box::new(report),
        });
    }

    /// Every node reports, but for some; links as they are when all is well.
    fn everyone_reports(&mut self, but: &[&str]) {
        let names = ["edge-1", "near-1", "metro-1", "cloud-1"];
        for name in names.iter().filter(|n| !but.contains(n)) {
            let links = names
                .iter()
                .filter(|peer| *peer != name)
                .map(|peer| link(peer, 5.0, true))
                .collect();
            self.report(name, links, vec![]);
        }
    }
}

fn link(peer: &str, mbit_s: f64, network_limited: bool) -> LinkReport {
    LinkReport {
        peer: fixture::node_id(peer),
        rtt_ms: Some(20.0),
        delivered_bps: (mbit_s * 1e6) as u64,
        network_limited,
        degraded: false,
        loss: 0.0,
        sent_bytes: 0,
        received_bytes: 0,
    }
}

fn degraded(peer: &str, value: f64) -> AgentEvent {
    AgentEvent::LinkDegraded {
        peer: fixture::node_id(peer),
        measurement: Measurement {
            value,
            bound: 5.0,
            window_ms: 400,
        },
    }
}

fn event(world: &mut World, node: &str, event: AgentEvent) {
    world.handle(Input::Event {
        node: fixture::node_id(node),
        event,
    });
}

#[test]
fn nodes_join_are_lost_and_come_back_each_said_once() {
    let mut world = World::new();
    assert_eq!(world.triggers.len(), 4);
    assert_eq!(world.monitor.cluster().nodes.len(), 4);
    for _ in 0..30 {
        world.everyone_reports(&["cloud-1"]);
        world.wait(100);
    }
    assert_eq!(
        world.triggers[4..],
        [Trigger::NodeLost(fixture::node_id("cloud-1"))]
    );
    assert!(!world.monitor.cluster().nodes[&fixture::node_id("cloud-1")].online);
    world.everyone_reports(&[]);
    assert_eq!(
        world.triggers[5..],
        [Trigger::NodeJoined(fixture::node_id("cloud-1"))]
    );
    assert!(world.monitor.cluster().nodes[&fixture::node_id("cloud-1")].online);
}

#[test]
fn field_007_links_appear_when_the_other_end_has_answered_and_nonsense_is_left_out() {
    let mut world = World::new();
    let mut silent = link("near-1", 5.0, true);
    silent.rtt_ms = None;
    let mut absurd = link("cloud-1", 5.0, true);
    absurd.rtt_ms = Some(f64::NAN);
    absurd.loss = 7.0;
    world.report(
        "edge-1",
        vec![silent, absurd, link("metro-1", 5.0, true)],
        vec![],
    );
    let links = &world.monitor.cluster().links;
    assert_eq!(links.len(), 1);
    let link = links[&(fixture::node_id("edge-1"), fixture::node_id("metro-1"))];
    assert!((link.bandwidth.mbit_s() - 5.0).abs() < 1e-9);
}

#[test]
fn a_degraded_uplink_is_raised_once_and_its_neighbours_are_planned_with_in_proportion() {
    let mut world = World::new();
    world.everyone_reports(&[]);
    let before = world.triggers.len();
    event(&mut world, "edge-1", degraded("cloud-1", 0.25));
    assert_eq!(world.triggers.len(), before + 1);
    assert_eq!(world.triggers[before].name(), "link-degraded");
    let rate = |world: &World, from: &str, to: &str| {
        world.monitor.cluster().links[&(fixture::node_id(from), fixture::node_id(to))]
            .bandwidth
            .mbit_s()
    };
    assert!((rate(&world, "edge-1", "metro-1") - 0.25).abs() < 1e-6);
    assert!((rate(&world, "near-1", "cloud-1") - 0.25).abs() < 1e-6);
    assert!(
        (rate(&world, "edge-1", "near-1") - 5.0).abs() < 1e-6,
        "within the site"
    );
    assert!(
        (rate(&world, "metro-1", "cloud-1") - 5.0).abs() < 1e-6,
        "another site's"
    );
    event(
        &mut world,
        "edge-1",
        AgentEvent::LinkRecovered {
            peer: fixture::node_id("cloud-1"),
            measurement: Measurement {
                value: 5.0,
                bound: 0.25,
                window_ms: 300,
            },
        },
    );
    assert_eq!(world.triggers.last().unwrap().name(), "link-recovered");
    assert!((rate(&world, "near-1", "metro-1") - 5.0).abs() < 1e-6);
}

#[test]
fn field_066_one_drift_seen_in_several_places_is_said_once() {
    let mut world = World::new();
    let drift = |query: &str| AgentEvent::ContentDrifted {
        query: fixture::query_id(query),
        descriptor: "luma mean".to_owned(),
        measurement: Measurement {
            value: 10.0,
            bound: 120.0,
            window_ms: 700,
        },
    };
    let content = |luma: f64| ContentReport {
        query: fixture::query_id("gate-camera"),
        frames: 10,
        luma_mean: luma,
        luma_spread: 20.0,
        chroma: 20.0,
        motion: 3.0,
        arrival_hz: 10.0,
    };
    for _ in 0..5 {
        world.report("edge-1", vec![], vec![content(120.0)]);
        world.wait(1000);
    }
    event(&mut world, "edge-1", drift("gate-camera"));
    event(&mut world, "near-1", drift("gate-camera"));
    event(&mut world, "edge-1", drift("unknown"));
    for _ in 0..5 {
        world.report("edge-1", vec![], vec![content(10.0)]);
        world.wait(1000);
    }
    assert_eq!(world.noticed.len(), 1, "{:?}", world.noticed);
    assert_eq!(world.noticed[0].name(), "content-drifted");
}

#[test]
fn content_seen_only_in_reports_is_noticed_too() {
    let mut world = World::new();
    for s in 0..10 {
        let report = ContentReport {
            query: fixture::query_id("gate-camera"),
            frames: 10,
            luma_mean: if s < 5 { 120.0 } else { 10.0 },
            luma_spread: 20.0,
            chroma: 20.0,
            motion: 3.0,
            arrival_hz: 10.0,
        };
        world.report("near-1", vec![], vec![report.clone()]);
        assert!(
            world.noticed.is_empty() || s > 5,
            "a report of another node's query counts for nothing"
        );
        world.report("edge-1", vec![], vec![report]);
        world.wait(1000);
    }
    assert_eq!(world.noticed.len(), 1);
}

#[test]
fn an_app_is_heard_for_the_plan_in_force_only() {
    let mut world = World::new();
    let report = |generation: u64| AppReport {
        generation: Some(Generation(generation)),
        window_ms: 1000,
        counts: compass_shared::model::outcome::OutcomeCounts::default(),
        latencies_ms: vec![900.0; 10],
        accuracies: vec![],
    };
    let app = |world: &mut World, generation| {
        world.handle(Input::App {
            query: fixture::query_id("gate-camera"),
            report: report(generation),
        });
        world.wait(1000);
    };
    for _ in 0..10 {
        app(&mut world, 1);
    }
    assert!(world.noticed.is_empty(), "there is no plan yet");
    let mut plan = crate::targets::tests::plan(
        2,
        ["edge-1", "edge-1", "cloud-1", "cloud-1", "cloud-1"],
        300,
    );
    plan.operators[0].instance = InstanceId(1);
    world.handle(Input::PlanInForce(Box::new(plan)));
    for _ in 0..10 {
        app(&mut world, 1);
    }
    assert!(world.noticed.is_empty(), "answers of the plan before");
    for _ in 0..10 {
        app(&mut world, 2);
    }
    assert_eq!(world.noticed.len(), 1);
    assert_eq!(world.noticed[0].name(), "slo-violated");
}

#[test]
fn people_drain_and_open_nodes_and_change_prices() {
    let mut world = World::new();
    let node = fixture::node_id("metro-1");
    let set = |world: &mut World, scheduling| {
        world.handle(Input::Scheduling {
            node: fixture::node_id("metro-1"),
            scheduling,
        });
    };
    let before = world.triggers.len();
    set(&mut world, Scheduling::Cordoned);
    assert_eq!(world.triggers.len(), before);
    assert_eq!(
        world.monitor.cluster().nodes[&node].scheduling,
        Scheduling::Cordoned
    );
    set(&mut world, Scheduling::Draining);
    set(&mut world, Scheduling::Draining);
    assert_eq!(world.triggers[before..], [Trigger::NodeLost(node.clone())]);
    set(&mut world, Scheduling::Open);
    assert_eq!(world.triggers.last().unwrap(), &Trigger::NodeJoined(node));
    let mut prices = fixture::prices();
    prices.version = 2;
    world.handle(Input::Prices(prices));
    assert_eq!(
        world.triggers.last().unwrap(),
        &Trigger::PriceChanged { version: 2 }
    );
}

#[test]
fn strangers_are_not_listened_to_and_crashes_are_alarms() {
    let mut world = World::new();
    let clusters = world.clusters;
    world.report("ghost", vec![link("edge-1", 5.0, true)], vec![]);
    event(&mut world, "ghost", degraded("edge-1", 0.1));
    assert_eq!(world.clusters, clusters);
    event(
        &mut world,
        "near-1",
        AgentEvent::WorkerCrashed {
            instance: InstanceId(7),
            reason: "signal 6".to_owned(),
        },
    );
    assert!(world.alarms[0].contains("signal 6"));
}

#[test]
fn a_timed_transfer_is_a_first_picture_of_a_link_and_no_alarm() {
    let mut world = World::new();
    world.report("edge-1", vec![link("cloud-1", 0.0, false)], vec![]);
    let transfer = |world: &mut World, bytes: u64, ms: f64| {
        world.handle(Input::Transfer {
            from: fixture::node_id("edge-1"),
            to: fixture::node_id("cloud-1"),
            bytes,
            ms,
        });
    };
    let pair = (fixture::node_id("edge-1"), fixture::node_id("cloud-1"));
    let before = world.triggers.len();
    transfer(&mut world, 1_000_000, 2020.0);
    let seen = world.monitor.cluster().links[&pair];
    assert!(!seen.lower_bound && (seen.bandwidth.mbit_s() - 4.0).abs() < 1e-6);
    transfer(&mut world, 1_000_000, 20_020.0);
    assert!((world.monitor.cluster().links[&pair].bandwidth.mbit_s() - 4.0).abs() < 1e-6);
    transfer(&mut world, 1000, f64::NAN);
    assert_eq!(world.triggers.len(), before);
}
