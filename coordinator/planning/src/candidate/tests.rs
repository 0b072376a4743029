use super::*;
use crate::predict::PredictSettings;
use crate::tests::fixture;
use compass_shared::model::cluster::Cluster;
use compass_shared::model::query::Query;
use compass_shared::units::Bandwidth;

fn all(query: &Query, cluster: &Cluster, front: &Front) -> Candidates {
    let catalogue = fixture::catalogue();
    let settings = PredictSettings::default();
    let context = Context {
        query,
        catalogue: &catalogue,
        cluster,
        profile: &front.profile,
        settings: &settings,
        rate_hz: 10.0,
    };
    let space = Space::new(&query.pipeline, &catalogue).unwrap();
    enumerate(&context, &space, front)
}

fn front(light: f64) -> Front {
    Front {
        profile: fixture::profile(&fixture::all_configurations(), light),
        preference: Preference::Cheapest,
    }
}

#[test]
fn candidates_meet_every_slo_and_come_cheapest_first() {
    let query = fixture::query();
    let found = all(&query, &fixture::cluster(), &front(1.0));
    assert!(!found.feasible.is_empty());
    for candidate in &found.feasible {
        let e = &candidate.expected;
        assert!(
            e.latency_ms.value <= 300.0 && reaches(e.accuracy, 0.75) && e.cost_usd_per_h <= 0.12
        );
        assert_eq!(candidate.content, content_of(&candidate.operators));
    }
    assert!(
        found
            .feasible
            .windows(2)
            .all(|w| w[0].expected.cost_usd_per_h <= w[1].expected.cost_usd_per_h)
    );
    assert!(found.feasible.len() <= CANDIDATES_MAX);
    assert!(found.rejected_by.contains_key("accuracy"));
}

#[test]
fn a_slow_uplink_moves_the_detector_inwards_without_a_trial() {
    let query = fixture::query();
    let front = front(1.0);
    let good = all(&query, &fixture::cluster(), &front);
    let mut cluster = fixture::cluster();
    for ((from, to), link) in &mut cluster.links {
        let home = |n: &NodeId| ["edge-1", "near-1"].contains(&n.as_str());
        if home(from) != home(to) {
            link.bandwidth = Bandwidth::from_mbit_s(1.0 / 3.0);
        }
    }
    let slow = all(&query, &cluster, &front);
    let detector = |c: &Candidates| c.feasible[0].operators[2].node.clone();
    assert_ne!(detector(&good).as_str(), "near-1");
    assert!(
        ["near-1", "edge-1"].contains(&detector(&slow).as_str()),
        "{}",
        slow.feasible[0].summary()
    );
}

#[test]
fn trimmed_shares_keep_the_bound_and_nothing_smaller_does() {
    let query = fixture::query();
    let catalogue = fixture::catalogue();
    let settings = PredictSettings::default();
    let front = front(1.0);
    let cluster = fixture::cluster();
    let context = Context {
        query: &query,
        catalogue: &catalogue,
        cluster: &cluster,
        profile: &front.profile,
        settings: &settings,
        rate_hz: 10.0,
    };
    let space = Space::new(&query.pipeline, &catalogue).unwrap();
    for candidate in enumerate(&context, &space, &front).feasible.iter().take(10) {
        let assessed = assess(&context, &space, &candidate.operators).unwrap();
        assert_eq!(assessed.broken, None);
        assert!(
            (assessed.expected.latency_ms.value - candidate.expected.latency_ms.value).abs() < 1e-6
        );
        assert!(
            (assessed.expected.cost_usd_per_h - candidate.expected.cost_usd_per_h).abs() < 1e-9
        );
    }
}

#[test]
fn in_the_dark_small_models_are_rejected_for_accuracy() {
    let query = fixture::query();
    let day = all(&query, &fixture::cluster(), &front(1.0));
    let night = all(&query, &fixture::cluster(), &front(0.0));
    let model = |c: &Candidates| {
        c.feasible[0].operators[2]
            .configuration
            .text("model")
            .unwrap()
            .to_owned()
    };
    assert!(!night.feasible.is_empty());
    assert_eq!(model(&night), "l");
    assert_ne!(model(&day), "l");
}

#[test]
fn with_unknown_accuracy_the_most_cautious_that_meets_the_rest_comes_first() {
    let query = fixture::query();
    let mut front = front(1.0);
    let cheapest = all(&query, &fixture::cluster(), &front);
    front.profile.forget_scores();
    assert!(
        all(&query, &fixture::cluster(), &front).feasible.is_empty(),
        "nothing is known to be accurate"
    );
    front.preference = Preference::Safest;
    let safe = all(&query, &fixture::cluster(), &front);
    assert!(safe.feasible[0].caution > cheapest.feasible[0].caution);
    assert!(safe.feasible[0].expected.latency_ms.value <= 300.0);
    assert!(safe.feasible[0].expected.cost_usd_per_h <= 0.12);
}

#[test]
fn field_049_an_impossible_bound_names_the_nearest_and_what_binds() {
    let mut query = fixture::query();
    query.slo.latency.as_mut().unwrap().bound = std::time::Duration::from_millis(5);
    let found = all(&query, &fixture::cluster(), &front(1.0));
    assert!(found.feasible.is_empty());
    let nearest = found.nearest.unwrap();
    assert_eq!(nearest.reason.name(), "latency");
    let everything_else = found
        .rejected
        .iter()
        .filter(|r| r.reason.name() == "latency");
    assert!(everything_else.count() == 1);
}
