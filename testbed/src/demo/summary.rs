//! The last word on standard output: verdict, phases, re-plans, where the report is.

use std::path::Path;

use comfy_table::Table;
use comfy_table::presets::NOTHING;

use super::record::{RunRecord, Verdict};
use super::report::text::{hourly, milliseconds, percent, seconds};

/// The summary of a run.
pub(crate) fn text(run: &RunRecord, report: &Path) -> String {
    let mut parts = vec![phases(run), replans(run)];
    let frames = &run.frames;
    parts.push(format!(
        "FRAMES  {} sent: {} answered, {} late, {} skipped, {} expired, {} rejected, {} lost\nHOST    {:.2} cores used on average, host {} busy, story {}, everything {}",
        frames.sent,
        frames.answered,
        frames.late,
        frames.skipped,
        frames.expired,
        frames.rejected,
        frames.lost,
        run.host.own_cores,
        percent(run.host.busy),
        seconds(run.host.story_s * 1e3),
        seconds(run.host.total_s * 1e3),
    ));
    let sign = match run.verdict() {
        Verdict::Passed => "PASSED ",
        Verdict::Failed => "FAILED ",
        Verdict::Invalid => "NOT VALID ",
    };
    let mut verdict = sign.to_owned();
    verdict += match run.verdict() {
        Verdict::Passed => run.headline(),
        Verdict::Failed => run.failures.join("\n       "),
        Verdict::Invalid => run.invalid_reasons.join("\n          "),
    }
    .as_str();
    parts.push(verdict);
    parts.push(format!("report: {}", report.display()));
    parts.retain(|part| !part.is_empty());
    format!("\n{}", parts.join("\n\n"))
}

pub(super) fn table(head: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(head.to_vec());
    table.add_rows(rows);
    let lines = table.to_string();
    let lines: Vec<&str> = lines.lines().map(str::trim_end).collect();
    lines.join("\n")
}

fn phases(run: &RunRecord) -> String {
    if run.phases.is_empty() {
        return String::new();
    }
    let rows = run
        .phases
        .iter()
        .map(|phase| {
            let fixed = match (phase.static_attainment, phase.static_accuracy) {
                (Some(attainment), Some(accuracy)) => {
                    format!("{} in time, F1 {accuracy:.2}", percent(attainment))
                }
                _ => "–".to_owned(),
            };
            vec![
                phase.name.clone(),
                if phase.met { "✓ met" } else { "✗ broken" }.to_owned(),
                milliseconds(phase.latency_ms.p95),
                percent(phase.slo_attainment),
                format!("{:.3}", phase.accuracy_true),
                hourly(phase.cost_per_h),
                fixed,
            ]
        })
        .collect();
    let f1 = format!("F1 ≥ {:.2}", run.slo.accuracy_min);
    let p95 = format!(
        "P{:.0} ≤ {}",
        run.slo.latency_percentile,
        milliseconds(run.slo.latency_ms)
    );
    let cost = format!("COST ≤ {}", hourly(run.slo.cost_max_usd_per_h));
    let head = [
        "PHASE",
        "SLOS",
        &p95,
        "IN TIME",
        &f1,
        &cost,
        "DAY'S PLAN LEFT ALONE",
    ];
    table(&head, rows)
}

fn replans(run: &RunRecord) -> String {
    if run.replans.is_empty() {
        return String::new();
    }
    let rows = run
        .replans
        .iter()
        .map(|replan| {
            let after = |at: Option<f64>| match (at, replan.event_ms.or(replan.detected_ms)) {
                (Some(at), Some(from)) => format!("+{}", seconds(at - from)),
                _ => "–".to_owned(),
            };
            vec![
                format!("plan {}", replan.generation),
                replan.trigger.clone(),
                after(replan.detected_ms),
                after(replan.planned_ms),
                after(replan.applied_ms),
                replan.changed.join(", "),
            ]
        })
        .collect();
    let head = [
        "RE-PLAN", "TRIGGER", "NOTICED", "PLANNED", "ANSWERS", "CHANGED",
    ];
    table(&head, rows)
}
