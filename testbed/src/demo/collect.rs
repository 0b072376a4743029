//! From what the passes saw to the record of the run.
//!
//! Start at [`phases`]. Figures only; what they mean for the verdict is decided in [`super::verdict`].

use std::collections::BTreeMap;

use compass_shared::api::{PlanView, TrialView};
use compass_shared::model::outcome::Outcome;

use super::measure::{Reading, processor};
use super::pass::{Act, Done, Pass, complete};
use super::record::{
    EventRecord, FrameCounts, HostRecord, NodeRecord, PhaseRecord, PlanOperator, PlanRecord, Point,
    Quantiles, ReplanRecord, TrialRecord, mean_accuracy, quantile, quantiles,
};
use super::scenario::{CAMERA, COORDINATOR, MEASURED, Scenario};

#[cfg(test)]
mod tests;

/// Names of the phases, in order.
pub(crate) const PHASES: [&str; 3] = ["day, good uplink", "uplink cut to 1/20", "lights out"];

/// A phase's beginning and end, in ms of the app's clock.
pub(crate) type Span = (f64, f64);

/// The phases of a pass; those it did not reach are missing.
pub(crate) fn spans(pass: &Pass) -> Vec<Span> {
    let Some(first) = pass.first_answer_ms else {
        return Vec::new();
    };
    let is_phase = |done: &&Done| matches!(done.act, Act::CutUplink | Act::LightsOut);
    let mut starts = vec![first];
    starts.extend(pass.done.iter().filter(is_phase).map(|done| done.at_ms));
    let last = pass.points.last().map_or(first, |point| point.at_ms);
    let end = if pass.ended_ms > 0.0 {
        pass.ended_ms
    } else {
        last
    };
    let ends = starts.iter().skip(1).copied().chain([end]);
    starts.iter().copied().zip(ends).collect()
}

fn within(points: &[Point], (from, to): Span) -> Vec<&Point> {
    points
        .iter()
        .filter(|point| (from..to).contains(&point.at_ms))
        .collect()
}

/// The part of a phase whose figures count.
fn measured((from, to): Span) -> Span {
    let length = MEASURED.as_secs_f64() * 1e3;
    (from.max(to - length), to)
}

/// Share of frames answered in time, of those not skipped; 0 when there were none to judge.
fn attainment(points: &[&Point]) -> f64 {
    let judged = points
        .iter()
        .filter(|point| point.outcome != Outcome::Skipped);
    let answered = points
        .iter()
        .filter(|point| point.outcome == Outcome::Answered);
    answered.count() as f64 / judged.count().max(1) as f64
}

/// The latency at a part of all judged frames, those without a result counting as endless.
pub(crate) fn latency_of_all(points: &[&Point], part: f64) -> f64 {
    let judged = points
        .iter()
        .filter(|point| point.outcome != Outcome::Skipped);
    let latencies: Vec<f64> = judged
        .map(|point| point.latency_ms.unwrap_or(f64::INFINITY))
        .collect();
    if latencies.is_empty() {
        f64::INFINITY
    } else {
        quantile(&latencies, part)
    }
}

/// Figures of every phase, with those of the day's plan left alone where there was such a pass.
pub(crate) fn phases(
    scenario: &Scenario,
    pass: &Pass,
    plans: &[PlanRecord],
    left_alone: Option<&Pass>,
) -> Vec<PhaseRecord> {
    let alone: Vec<Span> = left_alone.map(spans).unwrap_or_default();
    spans(pass)
        .into_iter()
        .zip(PHASES)
        .enumerate()
        .map(|(index, (span, name))| {
            let counted = within(&pass.points, measured(span));
            let results: Vec<f64> = counted.iter().filter_map(|p| p.latency_ms).collect();
            let in_force = in_force(plans, span.1);
            let accuracy_true = mean_accuracy(counted.iter().copied()).unwrap_or(0.0);
            let cost_per_h = in_force.map_or(0.0, |plan| plan.cost_per_h);
            let slo = &scenario.slo;
            let part = slo.latency_percentile / 100.0;
            let fixed = left_alone.zip(alone.get(index)).map(|(pass, span)| {
                let points = within(&pass.points, measured(*span));
                let accuracy = mean_accuracy(points.iter().copied());
                (attainment(&points), accuracy.unwrap_or(0.0))
            });
            PhaseRecord {
                name: name.to_owned(),
                from_ms: span.0,
                to_ms: span.1,
                slo_attainment: attainment(&counted),
                whole_attainment: attainment(&within(&pass.points, span)),
                latency_ms: if results.is_empty() {
                    Quantiles::default()
                } else {
                    quantiles(&results)
                },
                accuracy_true,
                accuracy_believed: in_force.map_or(0.0, |plan| plan.expected_accuracy),
                cost_per_h,
                static_attainment: fixed.map(|(attainment, _)| attainment),
                static_accuracy: fixed.map(|(_, accuracy)| accuracy),
                met: latency_of_all(&counted, part) <= slo.latency_ms
                    && accuracy_true >= slo.accuracy_min
                    && cost_per_h <= slo.cost_max_usd_per_h,
            }
        })
        .collect()
}

/// The plan that answers at this time.
fn in_force(plans: &[PlanRecord], at_ms: f64) -> Option<&PlanRecord> {
    let mut newest_first = plans.iter().rev();
    newest_first
        .find(|plan| plan.applied_ms.is_some_and(|applied| applied <= at_ms))
        .or_else(|| plans.first())
}

/// A plan as the record keeps it, without the time at which it answered.
pub(crate) fn plan_record(view: &PlanView) -> PlanRecord {
    let plan = &view.plan;
    PlanRecord {
        generation: plan.generation.0,
        summary: plan.summary(),
        status: format!("{:?}", plan.status).to_lowercase(),
        trigger: plan.trigger.name().to_owned(),
        applied_ms: None,
        operators: plan
            .operators
            .iter()
            .map(|operator| PlanOperator {
                operator: operator.operator.to_string(),
                node: operator.node.to_string(),
                configuration: operator
                    .configuration
                    .0
                    .iter()
                    .map(|(name, value)| (name.to_string(), value.to_string()))
                    .collect::<BTreeMap<_, _>>(),
                cpu_millicores: operator.share.cpu.0,
            })
            .collect(),
        expected_latency_ms: plan.expected.latency_ms.value,
        expected_accuracy: plan.expected.accuracy.value,
        cost_per_h: plan.expected.cost_usd_per_h,
    }
}

/// Every plan that was in force, with the arrival of its first answer.
pub(crate) fn plans(pass: &Pass) -> Vec<PlanRecord> {
    pass.plans
        .iter()
        .map(|view| PlanRecord {
            applied_ms: first_arrival(&pass.points, view.plan.generation.0),
            ..plan_record(view)
        })
        .collect()
}

/// When the first result computed wholly by a generation arrived.
fn first_arrival(points: &[Point], generation: u64) -> Option<f64> {
    points
        .iter()
        .filter(|point| point.generation == Some(generation))
        .filter_map(|point| Some(point.at_ms + point.latency_ms?))
        .min_by(f64::total_cmp)
}

/// The triggers that name what was done.
pub(crate) fn names(act: Act) -> &'static [&'static str] {
    match act {
        Act::CutUplink => &["link-degraded"],
        Act::LightsOut => &["content-drifted"],
        Act::KillAgent => &["node-lost"],
        Act::KillCoordinator | Act::RestartCoordinator => &[],
    }
}

/// Every change of plan after the first. Each thing that was done is given to the first later plan whose trigger names it.
pub(crate) fn replans(pass: &Pass, plans: &[PlanRecord]) -> Vec<ReplanRecord> {
    let at = |unix_ms: u64| unix_ms as f64 - pass.zero_unix_ms;
    let mut open: Vec<&Done> = pass.done.iter().collect();
    let mut replans = Vec::new();
    for (index, view) in pass.plans.iter().enumerate().skip(1) {
        let trigger = view.plan.trigger.name();
        let detected = at(view.detected_unix_ms);
        let cause = open
            .iter()
            .position(|done| names(done.act).contains(&trigger) && done.at_ms <= detected);
        replans.push(ReplanRecord {
            generation: view.plan.generation.0,
            trigger: trigger.to_owned(),
            reason: view.plan.trigger.to_string(),
            event_ms: cause.map(|cause| open.remove(cause).at_ms),
            detected_ms: Some(detected),
            planned_ms: Some(at(view.committed_unix_ms)),
            applied_ms: plans.get(index).and_then(|plan| plan.applied_ms),
            changed: difference(&plans[index - 1], &plans[index]),
        });
    }
    replans
}

/// What differs from one plan to the next, in words.
fn difference(before: &PlanRecord, after: &PlanRecord) -> Vec<String> {
    let mut changed = Vec::new();
    for new in &after.operators {
        let name = &new.operator;
        let Some(old) = before.operators.iter().find(|old| old.operator == *name) else {
            changed.push(format!("{name}: new, on {}", new.node));
            continue;
        };
        if old.node != new.node {
            changed.push(format!("{name}: {} → {}", old.node, new.node));
        }
        for (knob, value) in &new.configuration {
            let was = old.configuration.get(knob).map_or("unset", String::as_str);
            if was != value {
                changed.push(format!("{name}.{knob}: {was} → {value}"));
            }
        }
        if old.cpu_millicores != new.cpu_millicores {
            let cores = |millicores: u32| f64::from(millicores) / 1e3;
            changed.push(format!(
                "{name}: {:.2} → {:.2} core of {}",
                cores(old.cpu_millicores),
                cores(new.cpu_millicores),
                new.node
            ));
        }
    }
    changed
}

/// The other pass's frames, each phase moved to begin where this pass's does, and cut to its length.
pub(crate) fn aligned(pass: &Pass, left_alone: &Pass) -> Vec<Point> {
    let mut points = Vec::new();
    for (here, there) in spans(pass).into_iter().zip(spans(left_alone)) {
        let moved = within(&left_alone.points, there)
            .into_iter()
            .map(|point| Point {
                at_ms: point.at_ms - there.0 + here.0,
                ..*point
            });
        points.extend(moved.filter(|point| point.at_ms < here.1));
    }
    points
}

pub(crate) fn trials(pass: &Pass) -> Vec<TrialRecord> {
    let stages = pass.trials.trials.iter();
    let record = |stage: &TrialView| {
        let configuration = stage.configuration.to_string();
        let plan = if configuration.is_empty() {
            stage.operator.to_string()
        } else {
            format!("{} {configuration}", stage.operator)
        };
        TrialRecord {
            node: stage.node.to_string(),
            plan: match &stage.failure {
                Some(failure) => format!("{plan} (failed: {failure})"),
                None => plan,
            },
            samples: stage.samples,
            wall_ms: stage.wall_ms,
            cpu_ms: stage.cpu_ms,
        }
    };
    stages.map(record).collect()
}

pub(crate) fn events(pass: &Pass) -> Vec<EventRecord> {
    let record = |done: &Done| EventRecord {
        at_ms: done.at_ms,
        what: done.what.clone(),
    };
    pass.done.iter().map(record).collect()
}

/// Frames as the app counts them; what it never heard of again is lost.
pub(crate) fn frames(pass: &Pass) -> FrameCounts {
    let counts = pass.counts.unwrap_or_default();
    FrameCounts {
        sent: counts.sent,
        answered: counts.answered,
        late: counts.late,
        skipped: counts.skipped,
        expired: counts.expired,
        rejected: counts.rejected,
        lost: counts.sent.saturating_sub(counts.ended()),
    }
}

/// What every process used. CPU during the story; bytes from registration to the last frame, when all counters stand still.
pub(crate) fn nodes(scenario: &Scenario, pass: &Pass, app: &str) -> Vec<NodeRecord> {
    let Ok([quiet, first, last, after]) = complete(pass) else {
        return Vec::new();
    };
    let process = |name: &str, process: &str, machine: &str| NodeRecord {
        name: name.to_owned(),
        tier: None,
        device: None,
        cpu_s: last.cpu_s(process, first),
        rss_mib: last.resident_mib(process),
        relay_sent_bytes: after.relay_sent_bytes(machine, quiet),
        own_sent_bytes: None,
    };
    let mut nodes: Vec<NodeRecord> = scenario
        .nodes
        .iter()
        .map(|node| NodeRecord {
            tier: Some(node.tier.to_owned()),
            device: Some(format!("emulated ×{}", node.speed)),
            own_sent_bytes: after.own_sent_bytes(node.name, quiet),
            ..process(node.name, node.name, node.name)
        })
        .collect();
    nodes.push(process("app", app, CAMERA));
    nodes.push(process("coordinator", COORDINATOR, COORDINATOR));
    nodes.push(process("relay", "relay", "relay"));
    nodes
}

pub(crate) fn host(pass: &Pass, total_s: f64) -> HostRecord {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut host = HostRecord {
        cores: u32::try_from(cores).unwrap_or(u32::MAX),
        processor: processor(),
        total_s,
        timer_lateness_p99_ms: pass.timer_lateness_p99_ms,
        ..HostRecord::default()
    };
    if let Ok([_, first, last, _]) = complete(pass) {
        let lateness = |reading: &Reading| reading.lateness.clone();
        host.busy = last.host_busy(first);
        host.own_cores = last.own_cores(first);
        host.story_s = last.since(first).as_secs_f64();
        host.relay_lateness_p99_ms = lateness(last).since(&first.lateness).p99_ms();
    }
    host
}
