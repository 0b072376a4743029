//! Plans as pictures: who runs what where, before and after each re-plan.
//!
//! A row per operator, a column per node from the edge to the cloud; a line follows the frames. What a re-plan changed is filled, set bold and
//! named in words.

use super::super::record::{PlanOperator, PlanRecord, ReplanRecord, RunRecord};
use super::text::{escape, hourly, milliseconds, seconds};

const WIDTH: f64 = 440.0;
const LABELS: f64 = 208.0;
const HEAD: f64 = 40.0;
const ROW: f64 = 42.0;

/// Nodes in the order of their tiers, with their tier.
fn columns(run: &RunRecord) -> Vec<(&str, &str)> {
    let mut nodes: Vec<(&str, &str)> = run
        .nodes
        .iter()
        .filter_map(|node| Some((node.name.as_str(), node.tier.as_deref()?)))
        .collect();
    let rank = |tier: &str| {
        ["edge", "near-edge", "near-cloud", "cloud"]
            .iter()
            .position(|known| *known == tier)
    };
    nodes.sort_by(|a, b| (rank(a.1), a.0).cmp(&(rank(b.1), b.0)));
    for operator in run.plans.iter().flat_map(|plan| &plan.operators) {
        if !nodes.iter().any(|(name, _)| *name == operator.node) {
            nodes.push((&operator.node, ""));
        }
    }
    nodes
}

/// One section per re-plan.
pub(super) fn replans(run: &RunRecord) -> String {
    if run.replans.is_empty() {
        return "<p>The plan never changed.</p>".to_owned();
    }
    run.replans
        .iter()
        .map(|replan| section(run, replan))
        .collect()
}

fn section(run: &RunRecord, replan: &ReplanRecord) -> String {
    let after = run
        .plans
        .iter()
        .position(|plan| plan.generation == replan.generation);
    let before = after.and_then(|index| index.checked_sub(1));
    let plan = |index: Option<usize>| index.and_then(|index| run.plans.get(index));
    let (before, after) = (plan(before), plan(after));
    let from = before.map_or_else(|| "…".to_owned(), |plan| plan.generation.to_string());
    let changed: String = replan
        .changed
        .iter()
        .map(|change| format!("<li>{}</li>", escape(change)))
        .collect();
    let pictures: String = [("before", before, after), ("after", after, before)]
        .into_iter()
        .filter_map(|(word, plan, other)| Some(figure(run, word, plan?, other)))
        .collect();
    format!(
        "<article class=\"replan\"><h3>Plan {from} → {}: {}</h3><p class=\"reason\">{}</p>{}<div class=\"pair\">{pictures}</div><h4>What changed</h4><ul class=\"changed\">{changed}</ul></article>\n",
        replan.generation,
        escape(&replan.trigger.replace('-', " ")),
        escape(&replan.reason),
        steps(replan),
    )
}

/// The measured times, as a bar in proportion and as words.
fn steps(replan: &ReplanRecord) -> String {
    let start = replan.event_ms.or(replan.detected_ms);
    let Some(start) = start else {
        return String::new();
    };
    let named = [
        ("noticed", replan.detected_ms),
        ("planned", replan.planned_ms),
        ("first answer by the new plan", replan.applied_ms),
    ];
    let mut before = start;
    let (mut bar, mut words) = (String::new(), String::new());
    let origin = if replan.event_ms.is_some() {
        "event"
    } else {
        "noticed"
    };
    words += &format!("<li><b>{}</b> {origin}</li>", seconds(start));
    for (index, (name, at)) in named.into_iter().enumerate() {
        let Some(at) = at.filter(|_| !(index == 0 && replan.event_ms.is_none())) else {
            continue;
        };
        let share = (at - before).max(0.0);
        bar += &format!(
            "<i class=\"s{index}\" style=\"flex-grow:{:.0}\"></i>",
            share.max(1.0)
        );
        words += &format!(
            "<li><i class=\"key s{index}\"></i><b>+{}</b> {name}</li>",
            seconds(at - start)
        );
        before = at;
    }
    format!("<div class=\"bar\" aria-hidden=\"true\">{bar}</div><ol class=\"steps\">{words}</ol>")
}

fn figure(run: &RunRecord, word: &str, plan: &PlanRecord, other: Option<&PlanRecord>) -> String {
    format!(
        "<figure><figcaption><b>{word}</b> · plan {} · {}</figcaption>{}<p class=\"expects\">expects {} · F1 {:.2} · {}</p></figure>",
        plan.generation,
        escape(&plan.status),
        picture(run, plan, other),
        milliseconds(plan.expected_latency_ms),
        plan.expected_accuracy,
        hourly(plan.cost_per_h),
    )
}

/// The picture of one plan; what differs from `other` is marked.
pub(super) fn picture(run: &RunRecord, plan: &PlanRecord, other: Option<&PlanRecord>) -> String {
    let columns = columns(run);
    let step = (WIDTH - LABELS) / columns.len().max(1) as f64;
    let x_of = |node: &str| {
        let index = columns.iter().position(|(name, _)| *name == node);
        LABELS + step * (index.unwrap_or(0) as f64 + 0.5)
    };
    let height = HEAD + ROW * plan.operators.len() as f64 + 4.0;
    let mut svg = format!(
        "<svg class=\"plan\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{}\">",
        escape(&plan.summary)
    );
    for (name, tier) in &columns {
        let x = x_of(name);
        svg += &format!(
            "<text class=\"node\" x=\"{x:.1}\" y=\"13\" text-anchor=\"middle\">{}</text><text class=\"tier\" x=\"{x:.1}\" y=\"26\" text-anchor=\"middle\">{}</text><path class=\"lane\" d=\"M{x:.1} {HEAD}V{height}\"/>",
            escape(name),
            escape(tier)
        );
    }
    let at = |index: usize| HEAD + ROW * (index as f64 + 0.5);
    let mut line = String::new();
    for (index, operator) in plan.operators.iter().enumerate() {
        let command = if index == 0 { 'M' } else { 'L' };
        line += &format!("{command}{:.1} {:.1}", x_of(&operator.node), at(index));
    }
    let mut rows = String::new();
    for (index, operator) in plan.operators.iter().enumerate() {
        let change = change_of(operator, other);
        rows += &row(operator, change, x_of(&operator.node), at(index));
        if change.is_some() {
            svg += &format!(
                "<rect class=\"changed\" x=\"0\" y=\"{:.1}\" width=\"{WIDTH}\" height=\"{:.1}\" rx=\"5\"/>",
                at(index) - ROW / 2.0 + 2.0,
                ROW - 4.0
            );
        }
    }
    svg += &format!("<path class=\"flow\" d=\"{line}\"/>{rows}</svg>");
    svg
}

fn row(operator: &PlanOperator, change: Option<&str>, x: f64, y: f64) -> String {
    let weight = if change.is_some() { " new" } else { "" };
    let shape = if change.is_some() {
        format!(
            "<rect class=\"stop new\" x=\"{:.1}\" y=\"{:.1}\" width=\"16\" height=\"16\" rx=\"3\"/>",
            x - 8.0,
            y - 8.0
        )
    } else {
        format!("<circle class=\"stop\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"7\"/>")
    };
    let word = change.map_or_else(String::new, |change| format!(" ({change})"));
    format!(
        "{shape}<text class=\"op{weight}\" x=\"6\" y=\"{:.1}\">{}{word}</text><text class=\"knobs{weight}\" x=\"6\" y=\"{:.1}\">{}</text>",
        y - 3.0,
        escape(&operator.operator),
        y + 11.0,
        escape(&settings(operator)),
    )
}

/// `resolution 224, quality 80 · 0.25 core`
fn settings(operator: &PlanOperator) -> String {
    let knobs: Vec<String> = operator
        .configuration
        .iter()
        .map(|(name, value)| format!("{name} {value}"))
        .collect();
    let cores = format!("{:.2} core", f64::from(operator.cpu_millicores) / 1e3);
    if knobs.is_empty() {
        cores
    } else {
        format!("{} · {cores}", knobs.join(", "))
    }
}

/// How an operator differs from the same one in another plan, in a word.
fn change_of(operator: &PlanOperator, other: Option<&PlanRecord>) -> Option<&'static str> {
    let other = other?
        .operators
        .iter()
        .find(|known| known.operator == operator.operator)?;
    let moved = other.node != operator.node;
    let set = other.configuration != operator.configuration;
    match (moved, set) {
        (true, true) => Some("moved, set"),
        (true, false) => Some("moved"),
        (false, true) => Some("set"),
        (false, false) => None,
    }
}
