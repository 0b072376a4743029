//! `compass query` and `compass plan`

use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use compass_shared::api::{DryRun, Explanation, PlanView, QueryState, QueryView, SloStatus};
use compass_shared::model::plan::{PlanStatus, QueryPlan};
use serde_json::json;

use super::{by_prefix, confirm, read_text};
use crate::arguments::Global;
use crate::http::Api;
use crate::output::{Shown, age, print_text, table};

fn all(api: &Api) -> anyhow::Result<Vec<QueryView>> {
    api.get("/v1/queries")
}

fn name(api: &Api, wanted: &str) -> anyhow::Result<String> {
    let queries = all(api)?;
    by_prefix(
        "query",
        wanted,
        queries.iter().map(|query| query.id.as_str()),
    )
    .map(str::to_owned)
}

const fn state(state: QueryState) -> &'static str {
    match state {
        QueryState::Searching => "searching",
        QueryState::Running => "running",
        QueryState::Infeasible => "infeasible",
        QueryState::Waiting => "waiting",
    }
}

const fn trust(status: PlanStatus) -> &'static str {
    match status {
        PlanStatus::Guessed => "guessed",
        PlanStatus::Certified => "certified",
        PlanStatus::Reverted => "reverted",
    }
}

pub(crate) fn list(global: &Global, api: &Api) -> anyhow::Result<()> {
    let queries = all(api)?;
    let row = |query: &QueryView| {
        let attainment = query
            .counts
            .attainment()
            .map_or_else(|| "-".to_owned(), |a| format!("{:.1} %", a * 100.0));
        vec![
            query.id.to_string(),
            state(query.state).to_owned(),
            query
                .plan
                .as_ref()
                .map_or_else(|| "-".to_owned(), |p| p.plan.generation.to_string()),
            attainment,
            if query.app_online {
                "connected"
            } else {
                "away"
            }
            .to_owned(),
            query.pipeline.to_string(),
            query.entry.to_string(),
            age(query.registered_unix_ms),
            query
                .plan
                .as_ref()
                .map_or_else(|| "-".to_owned(), |p| p.plan.summary()),
        ]
    };
    let names = queries.iter().map(|query| query.id.to_string()).collect();
    let rows = queries.iter().map(row).collect();
    let header = vec![
        "name",
        "state",
        "generation",
        "in time",
        "app",
        "pipeline",
        "entry",
        "age",
        "plan",
    ];
    Shown {
        header,
        narrow: 8,
        names,
        rows,
        data: queries,
    }
    .print(global)
}

pub(crate) fn status(global: &Global, api: &Api, wanted: &str) -> anyhow::Result<()> {
    let query: QueryView = api.get(&format!("/v1/queries/{}", name(api, wanted)?))?;
    let mut text = format!(
        "query {}  {}, registered {} ago, app {}\n\n",
        query.id,
        state(query.state),
        age(query.registered_unix_ms),
        if query.app_online {
            "connected"
        } else {
            "away"
        }
    );
    let slo = |s: &SloStatus| {
        let value = s.value.map_or_else(
            || "-".to_owned(),
            |v| {
                if s.bound >= 10.0 {
                    format!("{v:.0}")
                } else {
                    format!("{v:.3}")
                }
            },
        );
        let verdict = match s.met {
            Some(true) => "ok",
            Some(false) => "FAIL",
            None => "-",
        };
        vec![
            s.name.clone(),
            s.target.clone(),
            value,
            verdict.to_owned(),
            s.source.clone(),
        ]
    };
    text.push_str(&table(
        &["slo", "target", "now", "verdict", "source"],
        &query.slo_status.iter().map(slo).collect::<Vec<_>>(),
    ));
    let c = query.counts;
    let _ = writeln!(
        text,
        "\nframes  {} sent: {} answered, {} late, {} skipped, {} expired, {} rejected",
        c.sent, c.answered, c.late, c.skipped, c.expired, c.rejected
    );
    if let Some(view) = &query.plan {
        text.push('\n');
        text.push_str(&plan_text(view));
    }
    if let Some(report) = &query.report {
        let _ = writeln!(text, "\n{report}");
    }
    let id = query.id.to_string();
    print_text(global, &query, &id, &text)
}

pub(crate) fn register(global: &Global, api: &Api, file: &Path) -> anyhow::Result<()> {
    let query: QueryView = api
        .post_yaml("/v1/queries", &read_text(file)?)
        .with_context(|| format!("{} was not registered", file.display()))?;
    let id = query.id.to_string();
    let text = format!(
        "query {id} registered ({}); frames enter at node {}\nfollow it with: compass query status {id} --watch\n",
        state(query.state),
        query.entry
    );
    print_text(global, &query, &id, &text)
}

pub(crate) fn plan(
    global: &Global,
    api: &Api,
    file: &Path,
    detailed_exitcode: bool,
) -> anyhow::Result<ExitCode> {
    let answer: DryRun = api.post_yaml("/v1/queries/plan", &read_text(file)?)?;
    let mut text = format!("{}\n", answer.report);
    if let Some(plan) = &answer.plan {
        text.push('\n');
        text.push_str(&operators(plan));
        text.push_str(&expectation(plan));
    }
    print_text(global, &answer, "plan", &text)?;
    Ok(match (&answer.plan, answer.changed) {
        _ if !detailed_exitcode => ExitCode::SUCCESS,
        (None, _) => ExitCode::from(3),
        (Some(_), true) => ExitCode::from(2),
        (Some(_), false) => ExitCode::SUCCESS,
    })
}

pub(crate) fn stop(global: &Global, api: &Api, wanted: &str) -> anyhow::Result<()> {
    let id = name(api, wanted)?;
    confirm(
        global,
        &format!("Withdraw query {id}? Its app gets no more results."),
    )?;
    api.delete(&format!("/v1/queries/{id}"))?;
    print_text(
        global,
        &json!({ "stopped": id }),
        &id,
        &format!("query {id} withdrawn\n"),
    )
}

fn plans(api: &Api, id: &str) -> anyhow::Result<Vec<PlanView>> {
    api.get(&format!("/v1/queries/{id}/plans"))
}

fn pick(api: &Api, id: &str, generation: Option<u64>) -> anyhow::Result<PlanView> {
    let mut plans = plans(api, id)?;
    let found = match generation {
        Some(wanted) => plans
            .iter()
            .position(|view| view.plan.generation.0 == wanted),
        None => plans.iter().rposition(|view| view.current),
    };
    match (found, generation) {
        (Some(index), _) => Ok(plans.swap_remove(index)),
        (None, Some(wanted)) => Err(anyhow::anyhow!(
            "query {id} has no generation {wanted}; list them with: compass plan list {id}"
        )),
        (None, None) => Err(anyhow::anyhow!(
            "query {id} has no plan in force; see: compass query status {id}"
        )),
    }
}

pub(crate) fn show_plan(
    global: &Global,
    api: &Api,
    wanted: &str,
    generation: Option<u64>,
) -> anyhow::Result<()> {
    let view = pick(api, &name(api, wanted)?, generation)?;
    let id = view.plan.generation.to_string();
    print_text(global, &view, &id, &plan_text(&view))
}

pub(crate) fn list_plans(global: &Global, api: &Api, wanted: &str) -> anyhow::Result<()> {
    let plans = plans(api, &name(api, wanted)?)?;
    let row = |view: &PlanView| {
        vec![
            view.plan.generation.to_string(),
            if view.current { "*" } else { "" }.to_owned(),
            trust(view.plan.status).to_owned(),
            age(view.committed_unix_ms),
            view.plan.trigger.to_string(),
            view.plan.summary(),
        ]
    };
    let names = plans
        .iter()
        .map(|view| view.plan.generation.to_string())
        .collect();
    let rows = plans.iter().map(row).collect();
    Shown {
        header: vec!["generation", "current", "status", "age", "trigger", "plan"],
        narrow: 5,
        names,
        rows,
        data: plans,
    }
    .print(global)
}

pub(crate) fn explain(
    global: &Global,
    api: &Api,
    wanted: &str,
    generation: Option<u64>,
    rejected: usize,
) -> anyhow::Result<()> {
    let id = name(api, wanted)?;
    let generation = match generation {
        Some(generation) => generation,
        None => pick(api, &id, None)?.plan.generation.0,
    };
    let explanation: Explanation =
        api.get(&format!("/v1/queries/{id}/plans/{generation}/explain"))?;
    let mut text: String = explanation
        .lines
        .iter()
        .map(|line| format!("{line}\n"))
        .collect();
    let turned_down = explanation
        .candidates
        .iter()
        .filter_map(|candidate| Some((candidate, candidate.rejected.as_ref()?)));
    for (candidate, why) in turned_down.take(rejected) {
        let _ = writeln!(text, "rejected  {}\n          {why}", candidate.summary);
    }
    print_text(global, &explanation, &generation.to_string(), &text)
}

fn plan_text(view: &PlanView) -> String {
    let plan = &view.plan;
    let mut text = format!(
        "plan {}  {}, committed {} ago, because {}\n",
        plan.generation,
        trust(plan.status),
        age(view.committed_unix_ms),
        plan.trigger
    );
    text.push_str(&operators(plan));
    text.push_str(&expectation(plan));
    text
}

fn operators(plan: &QueryPlan) -> String {
    let rows: Vec<_> = plan
        .operators
        .iter()
        .map(|part| {
            vec![
                part.operator.to_string(),
                part.node.to_string(),
                part.configuration.to_string(),
                part.share.cpu.to_string(),
                part.instance.to_string(),
            ]
        })
        .collect();
    table(
        &["operator", "node", "configuration", "cpu", "instance"],
        &rows,
    )
}

fn expectation(plan: &QueryPlan) -> String {
    let (l, a) = (&plan.expected.latency_ms, &plan.expected.accuracy);
    format!(
        "expected  latency {:.0} ms [{:.0},{:.0}]  accuracy {:.2} [{:.2},{:.2}] (n={})  cost {:.4} USD/h\n",
        l.value, l.low, l.high, a.value, a.low, a.high, a.samples, plan.expected.cost_usd_per_h
    )
}
