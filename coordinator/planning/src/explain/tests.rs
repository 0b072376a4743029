use super::*;
use crate::candidate::{Front, Preference, enumerate};
use crate::predict::{Context, PredictSettings};
use crate::space::Space;
use crate::tests::fixture;
use compass_shared::model::cluster::Cluster;
use compass_shared::model::query::Query;

fn with<T>(
    query: &Query,
    cluster: &Cluster,
    light: f64,
    then: impl FnOnce(&Context<'_>, &Space, &crate::candidate::Candidates) -> T,
) -> T {
    let catalogue = fixture::catalogue();
    let settings = PredictSettings::default();
    let front = Front {
        profile: fixture::profile(&fixture::all_configurations(), light),
        preference: Preference::Cheapest,
    };
    let context = Context {
        query,
        catalogue: &catalogue,
        cluster,
        profile: &front.profile,
        settings: &settings,
        rate_hz: 10.0,
    };
    let space = Space::new(&query.pipeline, &catalogue).unwrap();
    let found = enumerate(&context, &space, &front);
    then(&context, &space, &found)
}

#[test]
fn a_choice_says_what_was_chosen_what_was_not_and_what_would_change_that() {
    let query = fixture::query();
    let mut cluster = fixture::cluster();
    for ((from, to), link) in &mut cluster.links {
        if from.as_str() == "edge-1" && to.as_str() == "cloud-1" {
            link.bandwidth = compass_shared::units::Bandwidth::from_mbit_s(0.5);
        }
    }
    let explanation = with(&query, &cluster, 1.0, |context, space, found| {
        explain(
            context,
            space,
            found,
            &found.feasible[0],
            Generation(42),
            &Trigger::QueryRegistered,
            (7, 41),
        )
    });
    assert_eq!(explanation.rank, 1);
    assert_eq!(explanation.space, 144);
    assert!(explanation.feasible > 0 && explanation.considered > explanation.feasible);
    let text = render(&explanation, 10);
    assert!(text.starts_with("chosen    #1 of "), "{text}");
    for word in [
        "rejected  ",
        "feasible if ",
        "inputs    load 10.0/s",
        "price sheet v1",
        "7 trials, 41 cache hits",
        "trigger   query registered",
    ] {
        assert!(text.contains(word), "{word}: {text}");
    }
    let read: Explanation =
        serde_json::from_str(&serde_json::to_string(&explanation).unwrap()).unwrap();
    assert_eq!(read.chosen, explanation.chosen);
    assert!(render(&explanation, 1).matches("rejected").count() == 1);
}

#[test]
fn a_bandwidth_that_would_help_is_named() {
    let query = fixture::query();
    let mut cluster = fixture::cluster();
    for ((from, to), link) in &mut cluster.links {
        if from.as_str() == "edge-1" && to.as_str() != "near-1" {
            link.bandwidth = compass_shared::units::Bandwidth::from_mbit_s(0.05);
        }
    }
    let explanation = with(&query, &cluster, 1.0, |context, space, found| {
        explain(
            context,
            space,
            found,
            &found.feasible[0],
            Generation(1),
            &Trigger::QueryRegistered,
            (1, 0),
        )
    });
    let helped: Vec<_> = explanation
        .rejected
        .iter()
        .filter_map(|r| r.flips_if.clone())
        .collect();
    assert!(
        helped
            .iter()
            .any(|h| h.contains("bandwidth") && h.contains("bit/s")),
        "{helped:?}"
    );
}

#[test]
fn an_infeasible_query_is_told_its_nearest_plan_and_the_cheapest_fix() {
    let mut query = fixture::query();
    query.slo.accuracy_min = Some(0.99);
    let report = with(&query, &fixture::cluster(), 0.0, infeasible);
    assert!(
        report.starts_with("INFEASIBLE p95<=300 ms accuracy>=0.99 cost<=0.1200 USD/h: nearest: "),
        "{report}"
    );
    assert!(
        report.contains("Cheapest fix: an accuracy floor of 0."),
        "{report}"
    );
    query.slo.accuracy_min = None;
    query.slo.cost_max = Some(compass_shared::model::query::CostSlo::PerHour(0.0001));
    let report = with(&query, &fixture::cluster(), 1.0, infeasible);
    assert!(report.contains("the cap were 0.0"), "{report}");
}
