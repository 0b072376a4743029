//! The demo's story in virtual time: register, plan, the uplink drops, the lights go out, a node dies.

use compass_shared::model::trigger::Trigger;
use compass_shared::time::Moment;

use super::fixture;
use super::fleet::Fleet;

fn seconds(moment: Moment) -> f64 {
    moment.0 as f64 / 1e6
}

/// Whether the plan in force truly meets its SLOs.
fn is_compliant(fleet: &Fleet) -> bool {
    let plan = fleet.in_force();
    let (latency, accuracy) = fleet.truth_of(plan);
    latency <= 300.0 && accuracy >= 0.75 && plan.expected.cost_usd_per_h <= 0.12
}

fn describe(fleet: &Fleet) -> String {
    let mut text = String::new();
    for change in &fleet.changes {
        text.push_str(&format!(
            "{:.2} s (noticed {:.2}): {} [{}] latency {:.0} acc {:.2} cost {:.4}\n",
            seconds(change.switched),
            seconds(change.noticed),
            change.summary,
            change.trigger,
            change.plan.expected.latency_ms.value,
            change.plan.expected.accuracy.value,
            change.plan.expected.cost_usd_per_h,
        ));
    }
    let (latency, accuracy) = fleet.truth_of(fleet.in_force());
    text.push_str(&format!(
        "now {:.1} s: latency {latency:.0} accuracy {accuracy:.2}\nalarms {:?}\ninfeasible {:?}\ntriggers {:?}\ntrials {} hits {} finished {:?}",
        seconds(fleet.now),
        fleet.alarms,
        fleet.infeasible,
        fleet.triggers.iter().map(|(m, t)| format!("{:.1} {t}", seconds(*m))).collect::<Vec<_>>(),
        fleet.trials,
        fleet.cache_hits(),
        fleet.finished,
    ));
    text
}

fn tell(seed: u64, has_labels: bool) -> Fleet {
    let mut fleet = Fleet::new(fixture::query(), seed);
    fleet.has_labels = has_labels;
    fleet.run_until(60.0);
    fleet
}

#[test]
fn a_registered_query_soon_has_a_plan_that_holds() {
    let fleet = tell(1, true);
    let text = describe(&fleet);
    assert!(!fleet.changes.is_empty(), "{text}");
    let first = seconds(fleet.changes[0].switched) - 2.5;
    assert!(first < 8.0, "first plan after {first} s\n{text}");
    assert!(is_compliant(&fleet), "{text}");
    assert!(fleet.alarms.is_empty(), "{text}");
    assert!(fleet.infeasible.is_empty(), "{text}");
    assert!(fleet.certified > 0, "{text}");
    assert!(fleet.cache_hits() > 0, "{text}");
}

#[test]
fn the_uplink_drops_and_the_detector_moves_within_a_second_and_a_half() {
    let mut fleet = tell(1, true);
    let before = fleet.in_force().clone();
    let count = fleet.changes.len();
    fleet.set_uplink(0.05);
    fleet.run_until(70.0);
    let text = describe(&fleet);
    assert!(fleet.changes.len() > count, "{text}");
    let change = &fleet.changes[count];
    assert!(
        matches!(change.trigger, Trigger::LinkDegraded { .. }),
        "{text}"
    );
    assert!(seconds(change.switched) - 60.0 < 1.5, "{text}");
    assert_ne!(change.plan.content_hash(), before.content_hash());
    assert!(is_compliant(&fleet), "{text}");
    fleet.set_uplink(1.0);
    fleet.run_until(100.0);
    let text = describe(&fleet);
    assert!(is_compliant(&fleet), "{text}");
    assert!(
        fleet.in_force().expected.cost_usd_per_h <= before.expected.cost_usd_per_h * 1.1,
        "{text}"
    );
}

#[test]
fn the_lights_go_out_and_accuracy_comes_back() {
    for has_labels in [true, false] {
        let mut fleet = tell(2, has_labels);
        assert!(is_compliant(&fleet), "{}", describe(&fleet));
        let count = fleet.changes.len();
        fleet.set_light(0.0);
        assert!(
            !is_compliant(&fleet),
            "the cheap plan fails in the dark\n{}",
            describe(&fleet)
        );
        // Without labels the golden configuration stands in for the truth, and flatters in the dark: the app's own figures correct that.
        fleet.run_until(if has_labels { 90.0 } else { 130.0 });
        let text = describe(&fleet);
        let change = &fleet.changes[count];
        assert!(
            matches!(change.trigger, Trigger::ContentDrifted { .. }),
            "{text}"
        );
        assert!(fleet.changes.len() <= count + 5, "{text}");
        assert!(seconds(change.switched) - 60.0 < 2.5, "{text}");
        assert!(is_compliant(&fleet), "labels {has_labels}\n{text}");
    }
}

#[test]
fn link_then_dark_then_both_mend() {
    let mut fleet = tell(3, true);
    fleet.set_uplink(0.05);
    fleet.run_until(80.0);
    assert!(is_compliant(&fleet), "{}", describe(&fleet));
    fleet.set_light(0.0);
    fleet.run_until(110.0);
    assert!(is_compliant(&fleet), "{}", describe(&fleet));
    fleet.set_uplink(1.0);
    fleet.set_light(1.0);
    fleet.run_until(150.0);
    assert!(is_compliant(&fleet), "{}", describe(&fleet));
}

#[test]
fn a_dead_node_is_noticed_and_replaced_and_comes_back_without_a_flap() {
    let mut fleet = tell(4, true);
    let victim = fleet
        .in_force()
        .operators
        .iter()
        .map(|o| o.node.clone())
        .find(|n| n.as_str() != "edge-1")
        .expect("something runs beside the edge");
    fleet.kill(victim.as_str());
    fleet.run_until(66.0);
    let text = describe(&fleet);
    let lost = fleet
        .triggers
        .iter()
        .find(|(_, t)| matches!(t, Trigger::NodeLost(_)))
        .unwrap_or_else(|| panic!("not noticed\n{text}"));
    assert!(seconds(lost.0) - 60.0 <= 2.5, "{text}");
    assert!(!fleet.in_force().nodes().contains(&victim), "{text}");
    assert!(is_compliant(&fleet), "{text}");
    let count = fleet.changes.len();
    fleet.join(victim.as_str());
    fleet.run_until(120.0);
    let text = describe(&fleet);
    assert!(fleet.changes.len() <= count + 2, "{text}");
    assert!(is_compliant(&fleet), "{text}");
}

#[test]
fn a_node_that_was_only_not_heard_takes_its_part_again() {
    let mut fleet = tell(4, true);
    fleet.mute("edge-1", true);
    fleet.run_until(80.0);
    let text = describe(&fleet);
    let is_lost = |(_, t): &(_, Trigger)| matches!(t, Trigger::NodeLost(_));
    assert!(fleet.triggers.iter().any(is_lost), "{text}");
    fleet.mute("edge-1", false);
    fleet.set_uplink(0.05);
    fleet.run_until(92.0);
    let text = describe(&fleet);
    assert!(is_compliant(&fleet), "{text}");
}

#[test]
fn field_062_at_constant_load_plans_rest() {
    let mut fleet = tell(5, true);
    fleet.run_until(70.0);
    let count = fleet.changes.len();
    fleet.run_until(670.0);
    let text = describe(&fleet);
    assert!(fleet.changes.len() <= count + 2, "{text}");
    assert!(is_compliant(&fleet), "{text}");
}

#[test]
fn the_same_seed_tells_the_same_story() {
    let plans = |seed| {
        let fleet = tell(seed, true);
        fleet
            .changes
            .iter()
            .map(|c| (c.switched, c.plan.content_hash()))
            .collect::<Vec<_>>()
    };
    assert_eq!(plans(6), plans(6));
}

#[test]
fn field_049_an_impossible_slo_ends_with_the_nearest_plan_and_the_cheapest_fix() {
    let mut query = fixture::query();
    query.slo.latency.as_mut().unwrap().bound = std::time::Duration::from_millis(15);
    let mut fleet = Fleet::new(query, 7);
    fleet.run_until(130.0);
    assert!(fleet.changes.is_empty());
    let report = fleet.infeasible.first().expect("it is said");
    assert!(report.starts_with("INFEASIBLE p95<=15 ms"), "{report}");
    assert!(
        report.contains("nearest:") && report.contains("Cheapest fix:"),
        "{report}"
    );
}
