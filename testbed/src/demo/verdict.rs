//! Whether a run means anything, and whether it went as it should.
//!
//! Start at [`judge`]. Every criterion becomes a [`CheckRecord`], so that the report shows what was asked and what was measured.

use compass_shared::model::outcome::Outcome;

use super::arguments::FaultKind;
use super::collect::names;
use super::pass::{Act, Pass};
use super::record::{CheckRecord, HostRecord, PhaseRecord, ReplanRecord, RunRecord};
use super::report::text::{hourly, milliseconds, percent, seconds};

#[cfg(test)]
mod tests;

/// Above this a relay or a timer was too late for latencies to mean anything.
const LATENESS_MAX_MS: f64 = 10.0;
/// Above this the host had no room for what the demo emulates.
const BUSY_MAX: f64 = 0.9;
/// The relay's count of bytes and the agents' may differ by this part.
const BYTES_DIFFERENCE_MAX: f64 = 0.05;
/// Nodes that sent less than this are not compared: a few packets under way would decide.
const BYTES_COMPARED_MIN: u64 = 200_000;
/// A planned switch must not let frames expire from the first frame of the new plan on, for this long, in ms.
const AFTER_SWITCH_MS: f64 = 3_000.0;
/// Frames captured this long before an event may still be under way when it happens, in ms: the frame deadline.
const UNDER_WAY_MS: f64 = 1_000.0;

/// Why the figures mean nothing; empty when they do.
pub(crate) fn invalid_reasons(host: &HostRecord) -> Vec<String> {
    let mut reasons = Vec::new();
    for (what, lateness) in [
        (
            "the link emulator sent packets on",
            host.relay_lateness_p99_ms,
        ),
        ("the camera captured frames", host.timer_lateness_p99_ms),
    ] {
        if lateness > LATENESS_MAX_MS {
            reasons.push(format!(
                "{what} late by p99 {} (at most {})",
                milliseconds(lateness),
                milliseconds(LATENESS_MAX_MS)
            ));
        }
    }
    if host.busy > BUSY_MAX {
        reasons.push(format!(
            "this host was {} busy (at most {}); the demo itself used {:.2} of {} cores",
            percent(host.busy),
            percent(BUSY_MAX),
            host.own_cores,
            host.cores
        ));
    }
    reasons
}

/// Every criterion, in the order of the story.
pub(crate) fn judge(run: &RunRecord, pass: &Pass, fault: Option<FaultKind>) -> Vec<CheckRecord> {
    let mut checks = Vec::new();
    if let Some(failed) = &pass.failed {
        checks.push(check(
            "the story was played to its end",
            false,
            failed.clone(),
        ));
    }
    checks.push(check(
        "a first plan was found and answered",
        run.first_plan_s.is_some(),
        run.first_plan_s.map_or_else(
            || "never".to_owned(),
            |s| format!("{} after registration", seconds(s * 1e3)),
        ),
    ));
    checks.extend((0..super::collect::PHASES.len()).map(|index| phase(run, index)));
    checks.extend(
        pass.done
            .iter()
            .filter_map(|done| named(run, done.act, done.at_ms)),
    );
    checks.push(conserved(run));
    checks.push(switches(run));
    checks.extend(bytes(run));
    checks.extend(comparison(run));
    if fault == Some(FaultKind::KillCoordinator) {
        checks.push(survived_coordinator(run, pass));
    }
    checks
}

fn check(name: &str, passed: bool, detail: String) -> CheckRecord {
    CheckRecord {
        name: name.to_owned(),
        passed,
        detail,
    }
}

fn phase(run: &RunRecord, index: usize) -> CheckRecord {
    let slo = &run.slo;
    let name = super::collect::PHASES[index];
    let Some(phase) = run.phases.get(index) else {
        return check(
            &format!("{name}: all three SLOs met"),
            false,
            "not reached".to_owned(),
        );
    };
    let PhaseRecord {
        latency_ms,
        slo_attainment,
        accuracy_true,
        cost_per_h,
        ..
    } = phase;
    check(
        &format!("{name}: all three SLOs met in the last ten seconds"),
        phase.met,
        format!(
            "p95 {} (≤ {}), {} in time, F1 {accuracy_true:.3} (≥ {:.2}), {} (≤ {})",
            milliseconds(latency_ms.p95),
            milliseconds(slo.latency_ms),
            percent(*slo_attainment),
            slo.accuracy_min,
            hourly(*cost_per_h),
            hourly(slo.cost_max_usd_per_h),
        ),
    )
}

/// That an event has led to a plan which names it and differs.
fn named(run: &RunRecord, act: Act, at_ms: f64) -> Option<CheckRecord> {
    let wanted = names(act);
    if wanted.is_empty() {
        return None;
    }
    let name = match act {
        Act::CutUplink => "the cut of the uplink led to another plan that names it",
        Act::LightsOut => "the dark led to another plan that names it",
        _ => "the loss of the node led to another plan that names it",
    };
    let found = run
        .replans
        .iter()
        .find(|replan| replan.event_ms == Some(at_ms));
    Some(match found {
        Some(replan) => check(name, !replan.changed.is_empty(), story_of(replan, at_ms)),
        None => check(
            name,
            false,
            format!(
                "no plan after {} names {}",
                seconds(at_ms),
                wanted.join(" or ")
            ),
        ),
    })
}

fn story_of(replan: &ReplanRecord, event_ms: f64) -> String {
    let after = |at: Option<f64>| {
        at.map_or_else(
            || "never".to_owned(),
            |at| format!("+{}", seconds(at - event_ms)),
        )
    };
    format!(
        "plan {}, {}: noticed {}, planned {}, answered {}",
        replan.generation,
        replan.reason,
        after(replan.detected_ms),
        after(replan.planned_ms),
        after(replan.applied_ms),
    )
}

fn conserved(run: &RunRecord) -> CheckRecord {
    let frames = &run.frames;
    let ended = frames.answered + frames.late + frames.skipped + frames.expired + frames.rejected;
    check(
        "every frame ended as exactly one outcome, none was lost",
        frames.lost == 0 && frames.sent == ended && frames.sent > 0,
        format!(
            "{} sent: {} answered, {} late, {} skipped, {} expired, {} rejected, {} lost",
            frames.sent,
            frames.answered,
            frames.late,
            frames.skipped,
            frames.expired,
            frames.rejected,
            frames.lost
        ),
    )
}

/// Frames that a broken link or a lost node lets expire are not the switch's; those captured from the new plan's first frame on are,
/// until the next event.
fn switches(run: &RunRecord) -> CheckRecord {
    let mut expired = Vec::new();
    for replan in &run.replans {
        let by_new = run
            .points
            .iter()
            .find(|point| point.generation == Some(replan.generation));
        let Some(first) = by_new else { continue };
        let events = run.events.iter().map(|event| event.at_ms);
        let next_event = events
            .filter(|at_ms| *at_ms > first.at_ms)
            .fold(f64::INFINITY, f64::min);
        let until = (first.at_ms + AFTER_SWITCH_MS).min(next_event - UNDER_WAY_MS);
        let window = first.at_ms..until;
        let count = run
            .points
            .iter()
            .filter(|point| point.outcome == Outcome::Expired && window.contains(&point.at_ms))
            .count();
        if count > 0 {
            expired.push(format!(
                "{count} after the switch to plan {}",
                replan.generation
            ));
        }
    }
    let detail = if expired.is_empty() {
        format!("none in {} switches", run.replans.len())
    } else {
        expired.join(", ")
    };
    check("no switch let frames expire", expired.is_empty(), detail)
}

fn bytes(run: &RunRecord) -> Option<CheckRecord> {
    let compared: Vec<(&str, f64)> = run
        .nodes
        .iter()
        .filter(|node| node.relay_sent_bytes >= BYTES_COMPARED_MIN)
        .filter_map(|node| {
            let own = node.own_sent_bytes? as f64;
            let counted = node.relay_sent_bytes as f64;
            Some((node.name.as_str(), (own - counted) / counted))
        })
        .collect();
    let words: Vec<String> = compared
        .iter()
        .map(|(name, difference)| format!("{name} {:+.1} %", difference * 100.0))
        .collect();
    let agree = compared
        .iter()
        .all(|(_, difference)| difference.abs() <= BYTES_DIFFERENCE_MAX);
    (!compared.is_empty()).then(|| {
        check(
            "agents say what they sent: within 5 % of what the links counted",
            agree,
            words.join(", "),
        )
    })
}

/// That re-planning was needed: the day's plan, left alone, breaks an SLO in a later phase.
fn comparison(run: &RunRecord) -> Option<CheckRecord> {
    let compared: Vec<(&PhaseRecord, f64, f64)> = run
        .phases
        .iter()
        .filter_map(|phase| Some((phase, phase.static_attainment?, phase.static_accuracy?)))
        .collect();
    let fails = |(_, attainment, accuracy): &(&PhaseRecord, f64, f64)| {
        *attainment < run.slo.latency_percentile / 100.0 || *accuracy < run.slo.accuracy_min
    };
    let words: Vec<String> = compared
        .iter()
        .map(|(phase, attainment, accuracy)| {
            format!(
                "{}: {} in time, F1 {accuracy:.2}",
                phase.name,
                percent(*attainment)
            )
        })
        .collect();
    (!compared.is_empty()).then(|| {
        check(
            "the day's plan left alone breaks an SLO in a later phase",
            compared.iter().skip(1).any(fails),
            words.join("; "),
        )
    })
}

/// That frames flowed while there was no coordinator, and that the query and its plan came back.
fn survived_coordinator(run: &RunRecord, pass: &Pass) -> CheckRecord {
    let name = "frames flow without the coordinator, and the query comes back with it";
    let at = |wanted: Act| {
        let mut done = pass.done.iter();
        done.find(|done| done.act == wanted).map(|done| done.at_ms)
    };
    let (Some(from), Some(to)) = (at(Act::KillCoordinator), at(Act::RestartCoordinator)) else {
        return check(name, false, "it was not killed".to_owned());
    };
    let inside = run
        .points
        .iter()
        .filter(|point| (from..to).contains(&point.at_ms) && point.outcome != Outcome::Skipped);
    let (mut judged, mut answered) = (0, 0);
    for point in inside {
        judged += 1;
        answered += usize::from(point.outcome == Outcome::Answered);
    }
    check(
        name,
        judged > 0 && answered * 10 >= judged * 9 && !run.plans.is_empty(),
        format!(
            "{answered} of {judged} frames answered in time without it; {} plans on record after",
            run.plans.len()
        ),
    )
}
