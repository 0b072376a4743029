use std::collections::BTreeMap;
use std::time::Duration;

use super::documents::{parse_catalogue, parse_pipeline, parse_prices, parse_query};
use super::{SPEC_BYTES_MAX, SpecError, load};
use crate::ids::{NodeId, PipelineName};
use crate::model::catalogue::Catalogue;
use crate::model::pipeline::{KnobValue, Pipeline};
use crate::model::query::{Constraint, CostSlo, Query, Workload};

const CATALOGUE: &str = "
apiVersion: compass/v1
kind: Catalogue
metadata: {name: test}
spec:
  sampler:
    runtime: {native: sampler}
    memory: 16 MiB
    knobs:
      rate: {values: [2, 5, 10]}
  detector:
    runtime: {onnx: center-detector}
    memory: 64 MiB
    evaluator: detection-f1
    knobs:
      model: {values: [small, large]}
    artifacts:
      - {name: det-s, when: {model: small}, sha256: aa00000000000000000000000000000000000000000000000000000000000000, bytes: 10}
";

const PIPELINE: &str = "
apiVersion: compass/v1
kind: Pipeline
metadata: {name: live-video}
spec:
  operators:
    - {name: detector, kind: detector, inputs: [sampler]}
    - {name: sampler, kind: sampler, knobs: {rate: [10, 5]}}
";

const QUERY: &str = "
apiVersion: compass/v1
kind: Query
metadata: {name: lobby}
spec:
  pipeline: live-video
  source: {node: orin-3, rate: 10/s}
  slo:
    latency: {p95: 300ms}
    accuracy: {min: 0.80}
    cost: {max: 0.40 USD/h}
  constraints:
    - {operator: detector, tiers: [near-edge, edge]}
    - {data: frames, stayWithin: site}
";

fn catalogue() -> Catalogue {
    parse_catalogue("catalogue.yaml", CATALOGUE).unwrap()
}

fn pipelines() -> BTreeMap<PipelineName, Pipeline> {
    let pipeline = parse_pipeline("pipeline.yaml", PIPELINE, &catalogue()).unwrap();
    [(pipeline.name.clone(), pipeline)].into()
}

fn query(text: &str) -> Result<Query, SpecError> {
    parse_query("query.yaml", text, &pipelines(), &catalogue())
}

#[test]
fn a_query_is_read_with_its_pipeline() {
    let query = query(QUERY).unwrap();
    assert_eq!(query.slo.cost_max, Some(CostSlo::PerHour(0.40)));
    assert_eq!(query.slo.latency.unwrap().bound, Duration::from_millis(300));
    assert_eq!(query.constraints.len(), 2);
    assert!(matches!(
        &query.constraints[1],
        Constraint::StayWithinSite { output_of: None }
    ));
    assert!(matches!(query.workload, Workload::Continuous { .. }));
    let sampler = &query.pipeline.operators[0];
    assert_eq!(
        sampler.knobs[0].values,
        [KnobValue::Integer(5), KnobValue::Integer(10)],
        "subset, in the catalogue's order"
    );
}

#[test]
fn names_are_text_whatever_they_look_like() {
    for name in ["no", "on", "1.10", "012", "true", "12", "0x1F", "1e3"] {
        let query = query(&QUERY.replace("orin-3", name)).unwrap();
        assert_eq!(query.entry, NodeId::new(name).unwrap());
    }
    for name in ["12:30", "~"] {
        let error = query(&QUERY.replace("orin-3", name)).unwrap_err();
        assert!(
            error.message.contains("letters, digits") || error.message.contains("null"),
            "{error}"
        );
    }
}

#[test]
fn field_092_duplicate_keys_are_refused_everywhere() {
    let twice = query(&QUERY.replace("  slo:\n", "  slo: {}\n  slo:\n")).unwrap_err();
    assert!(
        twice.message.contains("\"slo\" is written twice"),
        "{twice}"
    );
    assert!(twice.hint.unwrap().contains("line 8"));
    let in_map =
        parse_catalogue("c", &CATALOGUE.replace("  detector:\n", "  sampler:\n")).unwrap_err();
    assert!(
        in_map.message.contains("\"sampler\" is written twice"),
        "{in_map}"
    );
    let deep = query(&QUERY.replace("{p95: 300ms}", "{p95: 300ms, p95: 200ms}")).unwrap_err();
    assert_eq!(deep.place.unwrap().0, 9, "{deep}");
}

#[test]
fn field_096_bombs_are_refused() {
    let mut bomb = String::from("a0: &a0 [x,x,x,x,x,x,x,x,x]\n");
    for level in 1..=11 {
        let item = format!("*a{}", level - 1);
        bomb.push_str(&format!(
            "a{level}: &a{level} [{}]\n",
            vec![item; 9].join(",")
        ));
    }
    assert!(load::<BTreeMap<String, serde_json::Value>>("bomb", &bomb).is_err());
    assert!(load::<serde_json::Value>("brackets", &"[".repeat(5000)).is_err());
    assert!(
        query(&"x".repeat(SPEC_BYTES_MAX + 1))
            .unwrap_err()
            .message
            .contains("too much")
    );
}

#[test]
fn field_098_unknown_keys_are_refused_with_a_suggestion() {
    let error = query(&QUERY.replace("latency:", "latancy:")).unwrap_err();
    assert_eq!(error.message, "unknown key \"latancy\"");
    assert_eq!(error.hint.as_deref(), Some("did you mean \"latency\"?"));
    assert_eq!(error.place, Some((9, 5)));
    let shown = error.to_string();
    assert!(shown.starts_with("query.yaml:9:5: "), "{shown}");
    assert!(shown.contains("9 |     latancy: {p95: 300ms}"), "{shown}");
    assert!(query(&QUERY.replace("  slo:\n", "slo:\n")).is_err());
    for nothing in ["", "\n\n", "# only\n# comments\n", "---\n"] {
        assert!(query(nothing).unwrap_err().message.contains("empty"));
    }
}

#[test]
fn field_099_times_that_became_numbers_are_explained() {
    let error = query(&QUERY.replace("300ms", "1350")).unwrap_err();
    assert!(error.message.contains("no unit"), "{error}");
    let sexagesimal = query(&QUERY.replace("300ms", "22:30")).unwrap_err();
    assert!(sexagesimal.message.contains("22:30"), "{sexagesimal}");
    let hardware_address = query(&QUERY.replace("lobby", "52:54:00:44:49:56")).unwrap_err();
    assert!(
        hardware_address.message.contains("52:54:00:44:49:56"),
        "it stays text: {hardware_address}"
    );
    assert_eq!(
        query(&QUERY.replace("lobby", "52.54.00.44"))
            .unwrap()
            .id
            .as_str(),
        "52.54.00.44"
    );
}

#[test]
fn a_query_cannot_carry_a_command() {
    let inline = QUERY.replace(
        "pipeline: live-video",
        "operators: [{name: d, kind: detector, command: [sh]}]",
    );
    let error = query(&inline).unwrap_err();
    assert!(error.message.contains("unknown key \"command\""), "{error}");
}

#[test]
fn values_that_make_no_sense_are_refused_at_their_line() {
    for (from, to, words) in [
        ("0.80", ".nan", "between 0 and 1"),
        ("0.80", "1.5", "between 0 and 1"),
        ("300ms", "300", "no unit"),
        ("0.40 USD/h", "0.40", "no unit"),
        (
            "{p95: 300ms}",
            "{p95: 300ms, p99: 1s}",
            "exactly one percentile",
        ),
        (
            "rate: 10/s",
            "requests: 0, duration: 1s",
            "requests (at least 1)",
        ),
        (
            "pipeline: live-video",
            "pipeline: live-vidoe",
            "unknown pipeline",
        ),
        (
            "operator: detector",
            "operator: tracker",
            "no operator tracker",
        ),
        ("stayWithin: site", "stayWithin: town", "town"),
        ("kind: Query", "kind: Pipeline", "Pipeline"),
        ("compass/v1", "compass/v2", "compass/v2"),
    ] {
        let error = query(&QUERY.replace(from, to)).unwrap_err();
        assert!(error.to_string().contains(words), "{to}: {error}");
        assert!(error.place.is_some(), "{to}: {error}");
    }
}

#[test]
fn pipelines_with_cycles_unknown_operators_or_values_are_refused() {
    for (from, to, words) in [
        (
            "{name: sampler, kind: sampler, knobs: {rate: [10, 5]}}",
            "{name: sampler, kind: sampler, inputs: [detector]}",
            "cycle",
        ),
        (
            "kind: detector",
            "kind: detecter",
            "did you mean \"detector\"",
        ),
        ("[10, 5]", "[7]", "cannot be 7"),
        ("[10, 5]", "[]", "no values"),
        ("knobs: {rate", "knobs: {speed", "no knob speed"),
        ("[10, 5]", "[true]", "quotes"),
        ("[10, 5]", "[1.5]", "not whole"),
    ] {
        let error =
            parse_pipeline("p.yaml", &PIPELINE.replace(from, to), &catalogue()).unwrap_err();
        assert!(error.to_string().contains(words), "{to}: {error}");
    }
}

#[test]
fn prices_need_every_tier() {
    let text = "apiVersion: compass/v1\nkind: Prices\nmetadata: {name: p}\nspec:\n  core: {edge: 0.01 USD/h, cloud: 0.05 USD/h}\n  egress: 0.09 USD/GB\n";
    assert!(
        parse_prices("p.yaml", text)
            .unwrap_err()
            .message
            .contains("near-edge")
    );
}
