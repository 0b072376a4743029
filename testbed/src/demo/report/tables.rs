//! Tables of the report: phases, nodes, trials, checks, host.

use super::super::record::{NodeRecord, PhaseRecord, RunRecord, TrialRecord};
use super::text::{bytes, counted, escape, hourly, milliseconds, percent, seconds};

/// More trials than this are folded away.
const TRIALS_OPEN_MAX: usize = 10;

fn tick(passed: bool) -> &'static str {
    if passed {
        "<span class=\"ok\">✓ yes</span>"
    } else {
        "<span class=\"bad\">✗ no</span>"
    }
}

/// A table in a box of its own that scrolls sideways where the screen is narrow.
fn table(head: &[&str], rows: &[Vec<String>], numeric_from: usize) -> String {
    let cell = |tag: &str, index: usize, text: &str| {
        let class = if index >= numeric_from {
            " class=\"num\""
        } else {
            ""
        };
        format!("<{tag}{class}>{text}</{tag}>")
    };
    let line = |tag: &str, cells: &mut dyn Iterator<Item = &str>| {
        let cells: String = cells
            .enumerate()
            .map(|(index, text)| cell(tag, index, text))
            .collect();
        format!("<tr>{cells}</tr>")
    };
    let body: String = rows
        .iter()
        .map(|row| line("td", &mut row.iter().map(String::as_str)))
        .collect();
    let head = line("th", &mut head.iter().copied());
    format!("<div class=\"scroll\"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>")
}

/// What the last ten seconds of each phase were like.
pub(super) fn phases(run: &RunRecord) -> String {
    let row = |phase: &PhaseRecord| {
        let compared = match (phase.static_attainment, phase.static_accuracy) {
            (None, _) => "not run".to_owned(),
            (Some(attainment), accuracy) => {
                let accuracy = accuracy.map_or_else(String::new, |f1| format!(", F1 {f1:.2}"));
                let misses = attainment < run.slo.latency_percentile / 100.0
                    || phase
                        .static_accuracy
                        .is_some_and(|f1| f1 < run.slo.accuracy_min);
                let mark = if misses {
                    "<span class=\"bad\">✗</span>"
                } else {
                    "<span class=\"ok\">✓</span>"
                };
                format!("{mark} {}{accuracy}", percent(attainment))
            }
        };
        vec![
            format!(
                "{}<small>{} to {}</small>",
                escape(&phase.name),
                seconds(phase.from_ms),
                seconds(phase.to_ms)
            ),
            tick(phase.met).to_owned(),
            format!(
                "{}<small>p50 {}, p99 {}</small>",
                milliseconds(phase.latency_ms.p95),
                milliseconds(phase.latency_ms.p50),
                milliseconds(phase.latency_ms.p99)
            ),
            format!(
                "{:.3}<small>believed {:.3}</small>",
                phase.accuracy_true, phase.accuracy_believed
            ),
            hourly(phase.cost_per_h),
            format!(
                "{}<small>{} with switching</small>",
                percent(phase.slo_attainment),
                percent(phase.whole_attainment)
            ),
            compared,
        ]
    };
    let mut rows = vec![vec![
        "<b>must be</b>".to_owned(),
        String::new(),
        format!(
            "p{:.0} ≤ {}",
            run.slo.latency_percentile,
            milliseconds(run.slo.latency_ms)
        ),
        format!("≥ {:.2}", run.slo.accuracy_min),
        format!("≤ {}", hourly(run.slo.cost_max_usd_per_h)),
        format!("≥ {:.0} %", run.slo.latency_percentile),
        String::new(),
    ]];
    rows.extend(run.phases.iter().map(row));
    table(
        &[
            "Phase",
            "All SLOs met",
            "Latency p95",
            "True F1",
            "Cost",
            "In time",
            "Day's plan left alone",
        ],
        &rows,
        2,
    )
}

/// Bytes, CPU and memory per process.
pub(super) fn nodes(run: &RunRecord) -> String {
    let cpu_most = run.nodes.iter().map(|node| node.cpu_s).fold(1e-9, f64::max);
    let bytes_most = run
        .nodes
        .iter()
        .map(|node| node.relay_sent_bytes)
        .max()
        .unwrap_or(0)
        .max(1) as f64;
    let bar = |part: f64| {
        format!(
            "<span class=\"hbar\" aria-hidden=\"true\"><i style=\"width:{:.1}%\"></i></span>",
            100.0 * part
        )
    };
    let row = |node: &NodeRecord| {
        let kind = [node.tier.as_deref(), node.device.as_deref()];
        let kind: Vec<&str> = kind.into_iter().flatten().collect();
        vec![
            format!(
                "{}<small>{}</small>",
                escape(&node.name),
                escape(&kind.join(", "))
            ),
            format!(
                "{}{:.1} s<small>{:.2} cores</small>",
                bar(node.cpu_s / cpu_most),
                node.cpu_s,
                node.cpu_s / run.host.story_s.max(1e-9)
            ),
            format!("{:.0} MiB", node.rss_mib),
            format!(
                "{}{}",
                bar(node.relay_sent_bytes as f64 / bytes_most),
                bytes(node.relay_sent_bytes as f64)
            ),
            own_bytes(node),
        ]
    };
    let rows: Vec<Vec<String>> = run.nodes.iter().map(row).collect();
    table(
        &[
            "Process",
            "CPU, workers included",
            "Resident memory",
            "Sent, as the links counted",
            "Sent, as it says",
        ],
        &rows,
        1,
    )
}

fn own_bytes(node: &NodeRecord) -> String {
    let Some(own) = node.own_sent_bytes else {
        return "–".to_owned();
    };
    let counted = node.relay_sent_bytes as f64;
    let difference = if counted > 0.0 {
        100.0 * (own as f64 - counted) / counted
    } else {
        0.0
    };
    format!("{}<small>{difference:+.1} %</small>", bytes(own as f64))
}

/// What was profiled, by really running it.
pub(super) fn trials(run: &RunRecord) -> String {
    let samples: u32 = run.trials.iter().map(|trial| trial.samples).sum();
    let cpu_ms: f64 = run.trials.iter().map(|trial| trial.cpu_ms).sum();
    let summary = format!(
        "<p>{} on real frames of the query's own camera: {samples} operator runs, {} of CPU time. {} not needed because the stages before were already measured.</p>",
        counted(run.trials.len(), "trial stage"),
        seconds(cpu_ms),
        counted(
            usize::try_from(run.cache_hits).unwrap_or(usize::MAX),
            "stage run"
        ),
    );
    let row = |trial: &TrialRecord| {
        let per_frame = |ms: f64| milliseconds(ms / f64::from(trial.samples.max(1)));
        vec![
            escape(&trial.node),
            escape(&trial.plan),
            trial.samples.to_string(),
            per_frame(trial.wall_ms),
            per_frame(trial.cpu_ms),
        ]
    };
    let rows: Vec<Vec<String>> = run.trials.iter().map(row).collect();
    let head = [
        "Node",
        "Operator and configuration",
        "Frames",
        "Time a frame",
        "CPU a frame",
    ];
    let table = table(&head, &rows, 2);
    if rows.len() > TRIALS_OPEN_MAX {
        let count = counted(rows.len(), "trial stage");
        format!("{summary}<details><summary>All {count}</summary>{table}</details>")
    } else {
        format!("{summary}{table}")
    }
}

/// Everything that was checked.
pub(super) fn checks(run: &RunRecord) -> String {
    let rows: Vec<Vec<String>> = run
        .checks
        .iter()
        .map(|check| {
            vec![
                tick(check.passed).to_owned(),
                escape(&check.name),
                escape(&check.detail),
            ]
        })
        .collect();
    table(&["So", "What must be so", "Measured"], &rows, 9)
}

/// What happened, in order.
pub(super) fn events(run: &RunRecord) -> String {
    let rows: Vec<Vec<String>> = run
        .events
        .iter()
        .map(|event| vec![seconds(event.at_ms), escape(&event.what)])
        .collect();
    table(&["At", "What was done to the fleet"], &rows, 9)
}

/// The host and whether it was quick enough.
pub(super) fn host(run: &RunRecord) -> String {
    let host = &run.host;
    let validity = if run.valid {
        "<span class=\"ok\">✓ valid</span>".to_owned()
    } else {
        let reasons: Vec<String> = run
            .invalid_reasons
            .iter()
            .map(|reason| escape(reason))
            .collect();
        format!(
            "<span class=\"bad\">✗ not valid</span>: {}",
            reasons.join("; ")
        )
    };
    let entries = [
        ("This run is", validity),
        (
            "Processor",
            format!("{}, {} cores", escape(&host.processor), host.cores),
        ),
        (
            "Host busy during the story",
            format!("{} of all cores (valid up to 90 %)", percent(host.busy)),
        ),
        (
            "The demo itself",
            format!("{:.2} cores on average", host.own_cores),
        ),
        (
            "Packets left the link emulator late by",
            format!(
                "p99 {} (valid up to 10 ms)",
                milliseconds(host.relay_lateness_p99_ms)
            ),
        ),
        (
            "The camera captured late by",
            format!(
                "p99 {} (valid up to 10 ms)",
                milliseconds(host.timer_lateness_p99_ms)
            ),
        ),
        (
            "Length",
            format!(
                "story {}, everything {}",
                seconds(host.story_s * 1e3),
                seconds(host.total_s * 1e3)
            ),
        ),
    ];
    let list: String = entries
        .iter()
        .map(|(name, text)| format!("<dt>{name}</dt><dd>{text}</dd>"))
        .collect();
    format!("<dl>{list}</dl>")
}
