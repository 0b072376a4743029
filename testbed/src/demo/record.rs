//! What a run of the demo measured: the JSON it writes and everything the report draws.
//!
//! Times are milliseconds since the story's clock started, measured on the app's monotonic clock unless stated otherwise.

use std::collections::BTreeMap;

use compass_shared::model::outcome::Outcome;
use serde::{Deserialize, Serialize};

/// A whole run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunRecord {
    /// Seed of scenes, relays and planner.
    pub seed: u64,
    /// `scenes` or the name of the video.
    pub source: String,
    /// Flags that made this run special, e.g. `--static`, `--loss 2%`.
    pub flags: Vec<String>,
    /// Milliseconds since the Unix epoch, by this host's clock, at which the story's clock was zero.
    pub zero_unix_ms: f64,
    /// Frames the camera captures per second.
    pub rate_hz: f64,
    /// Whether the host was quick enough for the figures to mean anything.
    pub valid: bool,
    /// Why not.
    pub invalid_reasons: Vec<String>,
    /// Whether the story went as it should.
    pub passed: bool,
    /// What went wrong.
    pub failures: Vec<String>,
    /// Everything that was checked, in the order of the story.
    pub checks: Vec<CheckRecord>,
    /// The SLOs.
    pub slo: SloRecord,
    /// From registration to the first result of the first plan, in seconds.
    pub first_plan_s: Option<f64>,
    /// Every trial stage, in order.
    pub trials: Vec<TrialRecord>,
    /// Stage runs that the prefix cache made unnecessary.
    pub cache_hits: u64,
    /// Frames by outcome over the whole story.
    pub frames: FrameCounts,
    /// Day, uplink cut, dark.
    pub phases: Vec<PhaseRecord>,
    /// Every change of plan after the first.
    pub replans: Vec<ReplanRecord>,
    /// Every plan in force, in order.
    pub plans: Vec<PlanRecord>,
    /// What was done to the fleet, and when.
    pub events: Vec<EventRecord>,
    /// One per frame that ended.
    pub points: Vec<Point>,
    /// The plan that was in force by day, left alone through the same events, in a pass of its own; each of its phases is moved in time to begin where the
    /// story's phase of that name begins. Empty when there was no such pass.
    pub static_points: Vec<Point>,
    /// Per process.
    pub nodes: Vec<NodeRecord>,
    /// Figures of the host.
    pub host: HostRecord,
}

/// Something that must be so at the end.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CheckRecord {
    /// What is asked, in words.
    pub name: String,
    /// Whether it is so.
    pub passed: bool,
    /// The figures.
    pub detail: String,
}

/// What the query must meet.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct SloRecord {
    /// Percentile of the latency bound.
    pub latency_percentile: f64,
    /// Latency bound in ms.
    pub latency_ms: f64,
    /// Least accuracy.
    pub accuracy_min: f64,
    /// Most cost in USD per hour.
    pub cost_max_usd_per_h: f64,
}

/// One stage of a trial.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TrialRecord {
    /// Where it ran.
    pub node: String,
    /// What ran: operator and configuration.
    pub plan: String,
    /// Frames measured.
    pub samples: u32,
    /// Time in the operator summed over the frames, in ms of the node.
    pub wall_ms: f64,
    /// CPU time really used, in ms.
    pub cpu_ms: f64,
}

/// Frames by outcome; `sent` is the sum of the others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrameCounts {
    /// Handed over by the app.
    pub sent: u64,
    /// In time.
    pub answered: u64,
    /// Too late.
    pub late: u64,
    /// Left out by a knob.
    pub skipped: u64,
    /// Past its deadline.
    pub expired: u64,
    /// No room.
    pub rejected: u64,
    /// Sent and not accounted for: a bug whenever it is not 0.
    pub lost: u64,
}

/// The median and two tails, in ms.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Quantiles {
    /// Median.
    pub p50: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
}

/// The last ten seconds of a phase (and the whole phase where stated).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PhaseRecord {
    /// Its name.
    pub name: String,
    /// Start and end of the phase in ms.
    pub from_ms: f64,
    /// See `from_ms`.
    pub to_ms: f64,
    /// Share of frames answered in time, of those not skipped, in the last ten seconds.
    pub slo_attainment: f64,
    /// The same over the whole phase, switching included.
    pub whole_attainment: f64,
    /// Latency of results in the last ten seconds.
    pub latency_ms: Quantiles,
    /// Mean F1 against the truth, which only the app has; a skipped frame is judged with the answer before it.
    pub accuracy_true: f64,
    /// What the planner expects of the plan in force.
    pub accuracy_believed: f64,
    /// What the plan in force costs, in USD per hour.
    pub cost_per_h: f64,
    /// Attainment of all three SLOs' frames by the day's plan left alone, from the static replay; `None` when it was not run.
    pub static_attainment: Option<f64>,
    /// F1 of the day's plan left alone.
    pub static_accuracy: Option<f64>,
    /// Whether the last ten seconds met every SLO.
    pub met: bool,
}

/// A change of plan.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ReplanRecord {
    /// The new plan.
    pub generation: u64,
    /// Its trigger's name.
    pub trigger: String,
    /// The trigger in words, with its measurement.
    pub reason: String,
    /// When the thing that called for it was done to the fleet; `None` when nothing was.
    pub event_ms: Option<f64>,
    /// When the coordinator raised the trigger.
    pub detected_ms: Option<f64>,
    /// When the plan was committed.
    pub planned_ms: Option<f64>,
    /// When the first result computed wholly by it arrived at the app.
    pub applied_ms: Option<f64>,
    /// What differs from the plan before: `detector: cloud-1 -> near-1`, `prepare.resolution: 320 -> 160`.
    pub changed: Vec<String>,
}

/// A plan.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PlanRecord {
    /// Its generation.
    pub generation: u64,
    /// One line.
    pub summary: String,
    /// `guessed`, `certified` or `reverted`.
    pub status: String,
    /// Its trigger.
    pub trigger: String,
    /// When its first result arrived.
    pub applied_ms: Option<f64>,
    /// Operator, node, configuration and CPU share, in the pipeline's order.
    pub operators: Vec<PlanOperator>,
    /// Expected latency at the SLO's percentile, in ms.
    pub expected_latency_ms: f64,
    /// Expected accuracy.
    pub expected_accuracy: f64,
    /// USD per hour.
    pub cost_per_h: f64,
}

/// One operator of a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanOperator {
    /// Its id.
    pub operator: String,
    /// Where it runs.
    pub node: String,
    /// Knobs.
    pub configuration: BTreeMap<String, String>,
    /// CPU in thousandths of a core.
    pub cpu_millicores: u32,
}

/// Something done to the fleet.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EventRecord {
    /// When, in ms.
    pub at_ms: f64,
    /// What, in words.
    pub what: String,
}

/// One frame.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Point {
    /// Number given by the app.
    pub frame: u64,
    /// When it was captured.
    pub at_ms: f64,
    /// From capture to result; `None` without one.
    pub latency_ms: Option<f64>,
    /// How it ended.
    pub outcome: Outcome,
    /// The plan that answered it.
    pub generation: Option<u64>,
    /// F1 of the newest answer there is at this frame (its own, or the one held over skipped frames) against its truth.
    pub accuracy: Option<f64>,
}

/// A process of the fleet.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NodeRecord {
    /// `edge-1`, `coordinator`, `relay`, `app`.
    pub name: String,
    /// Its tier, for nodes.
    pub tier: Option<String>,
    /// `emulated ×0.15`
    pub device: Option<String>,
    /// CPU seconds used during the story, workers included.
    pub cpu_s: f64,
    /// Resident memory of the process without workers at the end, in MiB.
    pub rss_mib: f64,
    /// UDP payload bytes its relay saw from it, during the story.
    pub relay_sent_bytes: u64,
    /// UDP payload bytes it says it sent, during the story.
    pub own_sent_bytes: Option<u64>,
}

/// The host and the run's validity.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct HostRecord {
    /// Cores.
    pub cores: u32,
    /// Model name of the processor.
    pub processor: String,
    /// Share of all cores busy during the story, 0 to 1, everything on the host included.
    pub busy: f64,
    /// Cores used on average by the demo itself.
    pub own_cores: f64,
    /// Length of the story in seconds.
    pub story_s: f64,
    /// From start to end of the command in seconds.
    pub total_s: f64,
    /// 99th percentile of how late a relay sent a packet on, in ms.
    pub relay_lateness_p99_ms: f64,
    /// 99th percentile of how late the app captured a frame, in ms.
    pub timer_lateness_p99_ms: f64,
}

/// The quantiles of some latencies; zeros when there are none.
pub fn quantiles(values: &[f64]) -> Quantiles {
    Quantiles {
        p50: quantile(values, 0.5),
        p95: quantile(values, 0.95),
        p99: quantile(values, 0.99),
    }
}

/// The value below which a share `part` of the values lie, by nearest rank; 0 when there are none.
pub fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

/// Mean accuracy of the frames that were scored; `None` without any.
pub fn mean_accuracy<'a>(points: impl Iterator<Item = &'a Point>) -> Option<f64> {
    let scored: Vec<f64> = points.filter_map(|point| point.accuracy).collect();
    (!scored.is_empty()).then(|| scored.iter().sum::<f64>() / scored.len() as f64)
}

/// What is to be thought of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Everything was as it should be.
    Passed,
    /// Something was not.
    Failed,
    /// The host was too slow for the figures to mean anything.
    Invalid,
}

impl RunRecord {
    /// What is to be thought of it.
    pub fn verdict(&self) -> Verdict {
        match (self.valid, self.passed) {
            (false, _) => Verdict::Invalid,
            (true, false) => Verdict::Failed,
            (true, true) => Verdict::Passed,
        }
    }

    /// The same in a line.
    pub fn headline(&self) -> String {
        let more = |reasons: &[String]| match reasons {
            [] => "no reason was recorded".to_owned(),
            [only] => only.clone(),
            [first, rest @ ..] => format!("{first} (and {} more)", rest.len()),
        };
        match self.verdict() {
            Verdict::Invalid => format!("Not valid: {}", more(&self.invalid_reasons)),
            Verdict::Failed => format!("Failed: {}", more(&self.failures)),
            Verdict::Passed => {
                let recoveries = self
                    .replans
                    .iter()
                    .filter_map(|replan| Some(replan.applied_ms? - replan.event_ms?));
                let slowest = recoveries.fold(f64::NAN, f64::max) / 1e3;
                let phases = self.phases.len();
                let mut line = format!("Every SLO met in all {phases} phases");
                if slowest.is_finite() {
                    line +=
                        &format!("; a new plan answered within {slowest:.1}\u{a0}s of each event");
                }
                line
            }
        }
    }
}
