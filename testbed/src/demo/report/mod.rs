//! The report of a run: one HTML file with everything in it, no scripts, nothing from outside.
//!
//! Start at [`render`]. Charts over time are in [`chart`], plans as pictures in [`plans`], everything tabular in [`tables`]. Whatever a
//! colour says is also said by a shape, a pattern or a word. It needs a [`RunRecord`] only, so a report can be made again from the JSON
//! of a run (`compass-testbed report`).

mod chart;
mod plans;
mod tables;
pub(super) mod text;

#[cfg(test)]
pub(super) mod fixture;
#[cfg(test)]
mod tests;

use compass_shared::model::outcome::Outcome;

use super::record::{RunRecord, Verdict};
use text::{counted, escape, hourly, percent, seconds, utc};

const STYLE: &str = include_str!("style.css");

/// Patterns that tell outcomes apart without colour; kept in the page once.
const PATTERNS: &str = "<svg class=\"patterns\" aria-hidden=\"true\"><defs><pattern id=\"hatch\" width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\"><path d=\"M0 5L5 0\"/></pattern><pattern id=\"cross\" width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\"><path d=\"M0 5L5 0M0 0L5 5\"/></pattern></defs></svg>";

/// The whole page.
pub fn render(run: &RunRecord) -> String {
    let sections = [
        section(
            "Over time",
            "One dot per answer; curves are over the last two seconds.",
            &timeline(run),
        ),
        section(
            "Phases",
            "Measured by the app over the last ten seconds of each phase, against a truth that only it knows.",
            &card(&tables::phases(run)),
        ),
        section(
            "Plans before and after",
            "What runs where; times count from the moment the fleet was changed.",
            &plans::replans(run),
        ),
        section("What was checked", "", &card(&tables::checks(run))),
        section("What was done", "", &card(&tables::events(run))),
        section(
            "Processes",
            "During the story. Bytes are UDP payload; every packet between nodes crossed the link emulator.",
            &card(&tables::nodes(run)),
        ),
        section("Profiling", "", &card(&tables::trials(run))),
        section("Host and validity", "", &card(&tables::host(run))),
    ];
    let (class, sign, headline) = headline(run);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<title>Compass demo: {}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n{PATTERNS}\n<main>\n<header>\n<p class=\"over\">Compass demo</p>\n<h1 class=\"{class}\"><span class=\"sign\">{sign}</span> {}</h1>\n{}</header>\n{}{}{}{}</main>\n</body>\n</html>\n",
        escape(&headline),
        escape(&headline),
        subtitle(run),
        troubles(run),
        tiles(run),
        sections.concat(),
        footer(run),
    )
}

/// Class, sign and words of the verdict.
fn headline(run: &RunRecord) -> (&'static str, &'static str, String) {
    let headline = run.headline();
    match run.verdict() {
        Verdict::Passed => ("pass", "✓", headline),
        Verdict::Failed => ("fail", "✗", headline),
        Verdict::Invalid => ("invalid", "⚠", headline),
    }
}

fn subtitle(run: &RunRecord) -> String {
    let flags = if run.flags.is_empty() {
        String::new()
    } else {
        format!(" · flags {}", escape(&run.flags.join(" ")))
    };
    format!(
        "<p class=\"soft\">{} at {} frames a second · seed {}{flags} · began {} · times are seconds since then</p>\n",
        escape(&run.source),
        run.rate_hz,
        run.seed,
        utc(run.zero_unix_ms),
    )
}

fn troubles(run: &RunRecord) -> String {
    let list = |title: &str, reasons: &[String]| {
        if reasons.is_empty() {
            return String::new();
        }
        let items: String = reasons
            .iter()
            .map(|reason| format!("<li>{}</li>", escape(reason)))
            .collect();
        format!("<div class=\"trouble\"><b>{title}</b><ul>{items}</ul></div>\n")
    };
    list("Why this run is not valid", &run.invalid_reasons)
        + &list("What went wrong", &run.failures)
}

fn tiles(run: &RunRecord) -> String {
    let recoveries: Vec<f64> = run
        .replans
        .iter()
        .filter_map(|replan| Some(replan.applied_ms? - replan.event_ms?))
        .collect();
    let slowest = recoveries.iter().copied().fold(f64::NAN, f64::max);
    let judged = run.frames.sent.saturating_sub(run.frames.skipped);
    let costs = run.phases.iter().map(|phase| phase.cost_per_h);
    let dearest = costs.fold(f64::NAN, f64::max);
    let tiles = [
        (
            run.first_plan_s
                .map_or_else(|| "none".to_owned(), |s| seconds(s * 1e3)),
            "from registration to the first answer".to_owned(),
        ),
        (
            counted(run.replans.len(), "re-plan"),
            "after the first plan".to_owned(),
        ),
        (
            seconds(slowest),
            "slowest from event to the new plan's first answer".to_owned(),
        ),
        (
            percent(run.frames.answered as f64 / judged.max(1) as f64),
            format!("of {judged} frames in time, switches included"),
        ),
        (
            run.frames.lost.to_string(),
            format!("lost of {} frames", run.frames.sent),
        ),
        (hourly(dearest), "dearest plan".to_owned()),
    ];
    let tiles: String = tiles
        .iter()
        .map(|(figure, name)| {
            format!("<div class=\"tile\"><b>{figure}</b><span>{name}</span></div>")
        })
        .collect();
    format!("<div class=\"tiles\">{tiles}</div>\n")
}

fn section(title: &str, lead: &str, body: &str) -> String {
    let lead = if lead.is_empty() {
        String::new()
    } else {
        format!("<p class=\"soft\">{lead}</p>\n")
    };
    format!("<section>\n<h2>{title}</h2>\n{lead}{body}\n</section>\n")
}

fn card(body: &str) -> String {
    format!("<div class=\"card\">{body}</div>")
}

fn timeline(run: &RunRecord) -> String {
    let percentile = run.slo.latency_percentile;
    let line = |class: &str| format!("<path class=\"{class}\" d=\"M1 6H25\"/>");
    let mut latency = vec![
        ("<path class=\"dot\" d=\"M13 6h0\"/>".to_owned(), "an answer in time".to_owned()),
        (
            "<path class=\"late\" d=\"M10 3l6 6M16 3l-6 6\"/>".to_owned(),
            "an answer too late".to_owned(),
        ),
        (line("curve"), format!("p{percentile:.0} over 2 s")),
        (line("slo"), "SLO".to_owned()),
        (
            "<rect class=\"switch\" x=\"3\" y=\"0\" width=\"20\" height=\"12\"/><path class=\"mark\" d=\"M23 0V12\"/>".to_owned(),
            "event to first answer by the new plan".to_owned(),
        ),
    ];
    let mut accuracy = vec![
        (line("curve"), "mean over 2 s, against the truth".to_owned()),
        (line("believed"), "what the planner believes".to_owned()),
        (line("slo"), "SLO".to_owned()),
    ];
    if !run.static_points.is_empty() {
        let left_alone = (line("static"), "the day's plan left alone".to_owned());
        latency.push(left_alone.clone());
        accuracy.push(left_alone);
    }
    let bars = [
        (Outcome::Answered, "answered in time"),
        (Outcome::Late, "late"),
        (Outcome::Expired, "expired"),
        (Outcome::Rejected, "rejected"),
        (Outcome::Skipped, "skipped (sampling knob)"),
    ];
    let bars = bars.map(|(outcome, name)| {
        let class = chart::class_of(outcome);
        let sample =
            format!("<rect class=\"{class}\" x=\"5\" y=\"1\" width=\"16\" height=\"10\"/>");
        (sample, name.to_owned())
    });
    card(&format!(
        "<h3>Latency</h3>{}{}<h3>True accuracy</h3>{}{}<h3>Frames a second, by outcome</h3>{}{}",
        legend(&latency),
        chart::latency(run),
        legend(&accuracy),
        chart::accuracy(run),
        legend(&bars),
        chart::outcomes(run),
    ))
}

fn legend(entries: &[(String, String)]) -> String {
    let items: String = entries
        .iter()
        .map(|(sample, name)| {
            format!(
                "<li><svg viewBox=\"0 0 26 12\" aria-hidden=\"true\">{sample}</svg>{}</li>",
                escape(name)
            )
        })
        .collect();
    format!("<ul class=\"legend\">{items}</ul>\n")
}

fn footer(run: &RunRecord) -> String {
    let mut command = format!("cargo demo --seed {}", run.seed);
    for flag in &run.flags {
        command += " ";
        command += flag;
    }
    format!(
        "<footer><p>The same film and the same events again: <code>{}</code></p><p>Latency runs from the camera's capture to the answer's arrival at the app, on the app's own clock. F1 counts a box as found at an overlap of one half; a frame left out by the sampling knob is judged with the answer before it. Cost is what the price sheet asks for the CPU granted and the bytes sent. Emulated nodes really compute, and hold each result back to the time a device of their speed would need.</p></footer>\n",
        escape(&command)
    )
}
