//! The demo as a whole: starts the fleet, plays the story, compares with the day's plan left alone, judges, writes.
//!
//! Start at [`run`].

use std::process::ExitCode;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::Context;
use compass_shared::ids::QueryId;
use compass_shared::model::pipeline::KnobValue;

use super::arguments::DemoArguments;
use super::fleet::Fleet;
use super::pass::{Pass, Player};
use super::protocol::FilmConfig;
use super::record::{PlanRecord, RunRecord, Verdict};
use super::scenario::{Course, Scenario};
use super::view::{View, for_this_terminal};
use super::{collect, report, summary, verdict};

/// Exit code for a run that means nothing.
const INVALID: u8 = 3;

/// The comparison is shorter: a plan that is left alone has nothing to settle.
const COMPARISON: Course = Course {
    day: Duration::from_secs(8),
    cut: Duration::from_secs(12),
    dark: Duration::from_secs(12),
};
/// Film rendered beyond the story, in seconds: the first plan comes later on a slow host. A film that ends begins anew.
const FILM_SLACK_S: f64 = 45.0;

/// Runs the demo; says on standard output what came of it.
pub(crate) fn run(arguments: &DemoArguments) -> ExitCode {
    let mut view = for_this_terminal(arguments.headless);
    let scenario = match arguments.scenario(view.as_mut()) {
        Ok(scenario) => scenario,
        Err(error) => {
            view.end();
            eprintln!("error: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    let told = tell(arguments, &scenario, view.as_mut());
    view.end();
    let run = match told {
        Ok(run) => run,
        Err(error) => {
            eprintln!("error: {error:#}");
            if arguments.keep.is_none() {
                eprintln!("the logs of every process stay when the demo is run with --keep FOLDER");
            }
            return ExitCode::FAILURE;
        }
    };
    if let Err(error) = write(arguments, &run) {
        eprintln!("error: {error:#}");
        return ExitCode::FAILURE;
    }
    println!("{}", summary::text(&run, &arguments.report));
    match run.verdict() {
        Verdict::Passed => ExitCode::SUCCESS,
        Verdict::Failed => ExitCode::FAILURE,
        Verdict::Invalid => ExitCode::from(INVALID),
    }
}

fn write(arguments: &DemoArguments, run: &RunRecord) -> anyhow::Result<()> {
    let report = &arguments.report;
    std::fs::write(report, report::render(run))
        .with_context(|| format!("cannot write {}", report.display()))?;
    if let Some(json) = &arguments.json {
        std::fs::write(json, serde_json::to_vec(run)?)
            .with_context(|| format!("cannot write {}", json.display()))?;
    }
    Ok(())
}

fn tell(
    arguments: &DemoArguments,
    scenario: &Scenario,
    view: &mut dyn View,
) -> anyhow::Result<RunRecord> {
    let started = Instant::now();
    let mut fleet = Fleet::start(
        scenario,
        arguments.seed,
        arguments.keep_first_plan,
        arguments.keep.as_deref(),
        view,
    )?;
    // The app renders while the agents join.
    let course = scenario.course;
    let (lines, said) = mpsc::channel();
    let film = film_config(scenario, arguments.seed, course);
    fleet.start_app("app", scenario.query_yaml, film, scenario.rate_hz(), lines)?;
    fleet.add_nodes(&scenario.nodes, view)?;
    let player = Player {
        fleet: &mut fleet,
        scenario,
        view,
        app: "app",
        query: scenario.query.id.clone(),
        lines: said,
        course,
        fault: arguments.fault,
        title: "",
    };
    let pass = player.play()?;
    let plans = collect::plans(&pass);
    let compares = !arguments.keep_first_plan
        && !arguments.no_comparison
        && arguments.fault.is_none()
        && pass.failed.is_none();
    let left_alone = match plan_of_the_day(&pass, &plans) {
        Some(plan) if compares => Some(compare(&mut fleet, scenario, arguments.seed, plan, view)?),
        _ => None,
    };
    let total_s = started.elapsed().as_secs_f64();
    Ok(record(
        arguments,
        scenario,
        &pass,
        left_alone.as_ref(),
        total_s,
    ))
}

/// What the app shows.
pub(super) fn film_config(scenario: &Scenario, seed: u64, course: Course) -> FilmConfig {
    FilmConfig {
        seed,
        day_s: (course.day + course.cut).as_secs_f64() + FILM_SLACK_S,
        dark_s: course.dark.as_secs_f64() + 5.0,
        dark_brightness: scenario.dark_brightness,
        footage: scenario.footage.clone(),
    }
}

/// The plan that was in force when the first event came: the best that was found for the conditions until then.
fn plan_of_the_day<'a>(pass: &Pass, plans: &'a [PlanRecord]) -> Option<&'a PlanRecord> {
    let first_event = pass.done.iter().map(|done| done.at_ms);
    let first_event = first_event.fold(f64::INFINITY, f64::min);
    let answered_before = |plan: &&PlanRecord| plan.applied_ms.is_some_and(|at| at < first_event);
    plans.iter().rfind(answered_before)
}

/// Plays the same events again with the day's plan pinned: its configuration and places are all that the query allows, and the
/// coordinator leaves first plans alone.
fn compare(
    fleet: &mut Fleet,
    scenario: &Scenario,
    seed: u64,
    plan: &PlanRecord,
    view: &mut dyn View,
) -> anyhow::Result<Pass> {
    view.step("the day's plan is left alone through the same events");
    fleet.scale_uplink(1.0 / scenario.uplink_cut)?;
    fleet.keep_first_plans = true;
    let (lines, said) = mpsc::channel();
    let query_yaml = pinned_query(scenario, plan)?;
    let film = film_config(scenario, seed, COMPARISON);
    fleet.start_app("app-2", &query_yaml, film, scenario.rate_hz(), lines)?;
    fleet.restart_coordinator()?;
    let names: Vec<&str> = scenario.nodes.iter().map(|node| node.name).collect();
    fleet.await_online(&names)?;
    let player = Player {
        fleet,
        scenario,
        view,
        app: "app-2",
        query: QueryId::new(PINNED)?,
        lines: said,
        course: COMPARISON,
        fault: None,
        title: "day's plan left alone: ",
    };
    player.play()
}

/// Name of the pinned query.
const PINNED: &str = "plant-camera-pinned";

/// The query with one value per knob and one tier per operator: those of a plan.
fn pinned_query(scenario: &Scenario, plan: &PlanRecord) -> anyhow::Result<String> {
    let mut operators = Vec::new();
    let mut constraints = Vec::new();
    for part in &plan.operators {
        let known = scenario.query.pipeline.operators.iter();
        let mut named = known.filter(|operator| operator.id.as_str() == part.operator);
        let operator = named.next().context("the plan has the query's operators")?;
        let inputs: Vec<&str> = operator.inputs.iter().map(|id| id.as_str()).collect();
        operators.push(serde_json::json!({
            "name": part.operator,
            "kind": operator.kind.as_str(),
            "inputs": inputs,
            "knobs": operator.knobs.iter().filter_map(|knob| {
                let value = part.configuration.get(knob.name.as_str())?;
                let value = knob.values.iter().find(|known| known.to_string() == *value)?;
                let value = match value {
                    KnobValue::Integer(number) => serde_json::json!(number),
                    KnobValue::Text(word) => serde_json::json!(word),
                };
                Some((knob.name.to_string(), serde_json::json!([value])))
            }).collect::<serde_json::Map<_, _>>(),
        }));
        let mut nodes = scenario.nodes.iter();
        let node = nodes.find(|node| node.name == part.node);
        let tier = node.context("the plan has the fleet's nodes")?.tier;
        constraints.push(serde_json::json!({"operator": part.operator, "tiers": [tier]}));
    }
    let slo = &scenario.slo;
    // JSON is YAML.
    let query = serde_json::json!({
        "apiVersion": "compass/v1",
        "kind": "Query",
        "metadata": {"name": PINNED},
        "spec": {
            "operators": operators,
            "source": {"node": scenario.query.entry.as_str(), "rate": format!("{}/s", scenario.rate_hz())},
            // What it would be refused for is what the comparison is to show.
            "slo": {"latency": {(format!("p{:.0}", slo.latency_percentile)): format!("{}ms", slo.latency_ms)}},
            "constraints": constraints,
        },
    });
    Ok(serde_json::to_string_pretty(&query)?)
}

fn record(
    arguments: &DemoArguments,
    scenario: &Scenario,
    pass: &Pass,
    left_alone: Option<&Pass>,
    total_s: f64,
) -> RunRecord {
    let plans = collect::plans(pass);
    let host = collect::host(pass, total_s);
    let invalid_reasons = verdict::invalid_reasons(&host);
    let mut run = RunRecord {
        seed: arguments.seed,
        source: scenario.source.clone(),
        flags: arguments.flags(),
        zero_unix_ms: pass.zero_unix_ms,
        rate_hz: scenario.rate_hz(),
        valid: invalid_reasons.is_empty(),
        invalid_reasons,
        passed: false,
        failures: Vec::new(),
        checks: Vec::new(),
        slo: scenario.slo,
        first_plan_s: pass.first_answer_ms.map(|ms| ms / 1e3),
        trials: collect::trials(pass),
        cache_hits: pass.trials.cache_hits,
        frames: collect::frames(pass),
        phases: collect::phases(scenario, pass, &plans, left_alone),
        replans: collect::replans(pass, &plans),
        plans,
        events: collect::events(pass),
        points: pass.points.clone(),
        static_points: left_alone.map_or_else(Vec::new, |other| collect::aligned(pass, other)),
        nodes: collect::nodes(scenario, pass, "app"),
        host,
    };
    run.checks = verdict::judge(&run, pass, arguments.fault.map(|fault| fault.kind));
    let failed = run.checks.iter().filter(|check| !check.passed);
    run.failures = failed
        .map(|check| format!("not so: {} ({})", check.name, check.detail))
        .collect();
    run.passed = run.failures.is_empty();
    run
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use compass_coordinator::configs::Configs;
    use compass_shared::spec::documents::parse_query;

    use super::super::record::PlanOperator;
    use super::*;

    #[test]
    fn a_pinned_query_allows_its_plan_only() {
        let scenario = Scenario::new().unwrap();
        let pipeline = &scenario.query.pipeline;
        let operators = pipeline.operators.iter().map(|operator| PlanOperator {
            operator: operator.id.to_string(),
            node: "near-1".to_owned(),
            configuration: operator
                .knobs
                .iter()
                .map(|knob| (knob.name.to_string(), knob.values[0].to_string()))
                .collect::<BTreeMap<_, _>>(),
            cpu_millicores: 100,
        });
        let plan = PlanRecord {
            generation: 1,
            summary: String::new(),
            status: String::new(),
            trigger: String::new(),
            applied_ms: None,
            operators: operators.collect(),
            expected_latency_ms: 0.0,
            expected_accuracy: 0.0,
            cost_per_h: 0.0,
        };
        let yaml = pinned_query(&scenario, &plan).unwrap();
        let configs = Configs::load(None).unwrap();
        let query = parse_query("pinned", &yaml, &configs.pipelines, &configs.catalogue).unwrap();
        assert_eq!(query.slo.latency, scenario.query.slo.latency);
        assert!(query.slo.accuracy_min.is_none() && query.slo.cost_max.is_none());
        assert_eq!(query.constraints.len(), query.pipeline.operators.len());
        let knobs = query.pipeline.operators.iter().flat_map(|o| &o.knobs);
        assert!(knobs.into_iter().all(|knob| knob.values.len() == 1));
    }
}
