//! What a trial's stages and live measurements teach.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use compass_shared::evaluate::judge;
use compass_shared::ids::FrameId;
use compass_shared::model::cluster::NodeDescription;
use compass_shared::model::trial::SampleMeasure;
use compass_shared::model::trigger::Measurement;

use super::campaign::Purpose;
use super::{Effect, Explorer, Observation};
use crate::candidate::{answer_interval, reaches};
use crate::predict::Context;
use crate::profile::{ClassTimes, Moments, Truth, class_of};
use crate::roles::profiler::StageResult;
use crate::search::Told;
use crate::space::{Point, is_filter};

/// How many samples a window's median and 95th percentile of live work stand for.
const LIVE_SAMPLES: u32 = 8;
/// Live frames that seem to take more than this many times as long as samples were slowed down by something else.
const LIVE_RATIO_MAX: f64 = 1.5;
/// Part of a window's ratio that counts at once.
const LIVE_RATIO_PART: f64 = 0.2;
/// Latencies kept of the plan in force.
pub(super) const LATENCIES_KEPT: usize = 200;

impl Explorer {
    /// Takes in a finished trial.
    pub(super) fn learn(&mut self, point: &Point, stages: &[StageResult]) -> Told {
        let configuration = self.space.configuration(point);
        let Some(set) = self.campaign.as_ref().map(|c| c.set) else {
            return Told::Cancelled;
        };
        let judged = self
            .judged
            .map(|(position, _)| self.query.pipeline.operators[position].id.clone());
        let mut outputs: Option<BTreeMap<FrameId, Vec<u8>>> = None;
        for stage in stages {
            let samples = &stage.done.samples;
            if judged.as_ref() == Some(&stage.operator) {
                let returned = samples
                    .iter()
                    .filter(|s| !s.skipped)
                    .filter_map(|s| Some((s.frame, s.output.clone()?)));
                outputs = Some(returned.collect());
            }
            self.learn_stage(&configuration, set.0, stage);
        }
        let row = self.front.profile.configuration_mut(&configuration);
        row.failed = None;
        if judged.is_none() {
            row.truth = Truth::Unjudged;
            return Told::Measured;
        }
        let Some(outputs) = outputs.filter(|o| !o.is_empty()) else {
            row.failed = Some("it gave no output to judge".to_owned());
            return Told::Failed;
        };
        if let Some(campaign) = &mut self.campaign {
            campaign
                .before
                .entry(point.clone())
                .or_insert_with(|| row.scores.clone());
            campaign.outputs.insert(point.clone(), outputs);
        }
        self.take_golden_for_truth();
        self.judge(point)
    }

    fn learn_stage(
        &mut self,
        configuration: &compass_shared::model::pipeline::PipelineConfiguration,
        set: u64,
        stage: &StageResult,
    ) {
        let pipeline = &self.query.pipeline;
        let Some(operator) = pipeline.operator(&stage.operator) else {
            return;
        };
        let filter = self.catalogue.0.get(&operator.kind).is_some_and(is_filter);
        let prefix = configuration.prefix(pipeline, &operator.id);
        let own = configuration.of(&operator.id).cloned().unwrap_or_default();
        let node = self
            .cluster
            .as_ref()
            .and_then(|c| c.nodes.get(&stage.node))
            .map(|n| n.description.clone());
        let row = self.front.profile.operator_mut(&operator.id, prefix, &own);
        let samples = &stage.done.samples;
        let count = u32::try_from(samples.len()).unwrap_or(u32::MAX);
        // The same stage serves several trials; it is learnt from once.
        if row.sampled == Some((set, count)) {
            return;
        }
        row.sampled = Some((set, count));
        if let Some(node) = &node {
            let times = Moments::of(
                samples
                    .iter()
                    .map(|s| full_core_ms(s, node, stage.done.achieved_cores)),
            );
            let class = row.times.entry(class_of(node)).or_insert(ClassTimes {
                full_core_ms: Moments::default(),
                speed: node.emulated_speed,
            });
            class.full_core_ms = class.full_core_ms.merged(&times);
        }
        let sizes = samples
            .iter()
            .filter(|s| !s.skipped)
            .map(|s| s.bytes_out as f64);
        row.bytes_out = row.bytes_out.merged(&Moments::of(sizes));
        if !filter {
            let passed = samples.iter().map(|s| if s.skipped { 0.0 } else { 1.0 });
            row.passed = row.passed.merged(&Moments::of(passed));
        }
        if stage.done.cold_start_ms > 0.0 {
            row.cold_start_ms.observe(stage.done.cold_start_ms);
        }
    }

    /// Judges every configuration run so far, as when the truth has come or has changed.
    pub(super) fn judge_all(&mut self) {
        let points: Vec<Point> = self
            .campaign
            .iter()
            .flat_map(|c| c.outputs.keys().cloned())
            .collect();
        for point in points {
            self.judge(&point);
        }
    }

    fn judge(&mut self, point: &Point) -> Told {
        let (Some((_, evaluator)), Some(campaign)) = (self.judged, &mut self.campaign) else {
            return Told::Measured;
        };
        let (Some((truth, labels)), Some(outputs)) = (&campaign.truth, campaign.outputs.get(point))
        else {
            return Told::Measured;
        };
        let configuration = self.space.configuration(point);
        let row = self.front.profile.configuration_mut(&configuration);
        let mut scores: Vec<Moments> = Vec::new();
        for segment in &campaign.segments {
            for (index, frame) in segment.iter().enumerate() {
                let Some(output) = outputs.get(frame) else {
                    continue;
                };
                // The answer to this frame against the truth of this and each later frame of the run.
                for (lag, later) in segment[index..].iter().enumerate() {
                    let Some(label) = labels.get(later) else {
                        continue;
                    };
                    match judge(evaluator, output, label) {
                        Ok(score) => {
                            if scores.len() <= lag {
                                scores.resize(lag + 1, Moments::default());
                            }
                            scores[lag].observe(score);
                        }
                        Err(error) => {
                            row.failed = Some(format!("its output cannot be judged: {error}"));
                            return Told::Failed;
                        }
                    }
                }
            }
        }
        row.truth = *truth;
        let before = campaign.before.get(point).cloned().unwrap_or_default();
        row.scores = merged(&before, &scores);
        campaign.fresh.insert(point.clone(), scores);
        Told::Measured
    }

    /// Whether fresh scores alone confirm (`true`) or refute (`false`) the accuracy of the configuration in force; `None` while they do
    /// neither.
    pub(super) fn verdict(&self, scores: &[Moments]) -> Option<(bool, Measurement)> {
        let floor = self.query.slo.accuracy_min?;
        let in_force = self.in_force.as_ref()?;
        let cluster = self.cluster.as_ref()?;
        let context = Context {
            query: &self.query,
            catalogue: &self.catalogue,
            cluster,
            profile: &self.front.profile,
            settings: &self.settings.predict,
            rate_hz: self.query.rate_hz(),
        };
        let row = crate::profile::ConfigurationRow {
            configuration: self.space.configuration(&in_force.point),
            scores: scores.to_vec(),
            truth: Truth::Labels,
            failed: None,
        };
        let accuracy = row.accuracy(answer_interval(&context, &in_force.configuration))?;
        let measurement = Measurement {
            value: accuracy.value,
            bound: floor,
            window_ms: 0,
        };
        if reaches(accuracy, floor) {
            return Some((true, measurement));
        }
        // Mirrored: believed to fail with the same confidence.
        let mirrored = compass_shared::model::plan::Estimate {
            value: 1.0 - accuracy.value,
            low: 1.0 - accuracy.high,
            high: 1.0 - accuracy.low,
            samples: accuracy.samples,
        };
        reaches(mirrored, 1.0 - floor).then_some((false, measurement))
    }

    /// Takes in what runs live.
    pub(super) fn observed(&mut self, observation: &Observation, effects: &mut Vec<Effect>) {
        let Some(in_force) = &mut self.in_force else {
            return;
        };
        if in_force.generation != observation.generation {
            return;
        }
        in_force.latencies_ms.extend(&observation.latencies_ms);
        let surplus = in_force.latencies_ms.len().saturating_sub(LATENCIES_KEPT);
        in_force.latencies_ms.drain(..surplus);
        let in_force = in_force.clone();
        let normalised = self.space.configuration(&in_force.point);
        let mut learnt = false;
        for (operator, median, p95) in &observation.service_ms {
            let part = in_force.operators.iter().find(|o| o.operator == *operator);
            let (Some(part), Some(cluster)) = (part, &self.cluster) else {
                continue;
            };
            let Some(node) = cluster.nodes.get(&part.node) else {
                continue;
            };
            let cores = part.share.cpu.cores().clamp(1e-3, 1.0);
            let deviation = (p95 - median).max(0.0) / 1.645 * cores;
            let times = Moments {
                count: LIVE_SAMPLES,
                mean: median * cores,
                squares: deviation * deviation * f64::from(LIVE_SAMPLES - 1),
                max: p95 * cores,
            };
            if !times.mean.is_finite() || times.mean <= 0.0 || !times.squares.is_finite() {
                continue;
            }
            let prefix = normalised.prefix(&self.query.pipeline, operator);
            let own = normalised.of(operator).cloned().unwrap_or_default();
            let row = self.front.profile.operator_mut(operator, prefix, &own);
            if row.bytes_out.count == 0 {
                // Never run in a trial under this prefix: its size is not known, so the row would mislead.
                continue;
            }
            // Trials measure better; live work fills in classes where none ran, and tells how alike trials and live work are.
            match row.times.entry(class_of(&node.description)) {
                Entry::Vacant(entry) => {
                    learnt = true;
                    entry.insert(ClassTimes {
                        full_core_ms: times,
                        speed: node.description.emulated_speed,
                    });
                }
                Entry::Occupied(entry) => {
                    let sampled = entry.get().full_core_ms.mean;
                    if sampled > 0.0 {
                        let seen = (times.mean / sampled).clamp(1.0, LIVE_RATIO_MAX);
                        let ratios = &mut self.front.profile.live_ratio;
                        let ratio = ratios.entry(operator.clone()).or_insert(seen);
                        *ratio += LIVE_RATIO_PART * (seen - *ratio);
                    }
                }
            }
        }
        let is_searching = self
            .campaign
            .as_ref()
            .is_some_and(|c| c.purpose == Purpose::Search);
        if learnt && !is_searching && self.proposed.is_some() {
            self.propose(
                compass_shared::model::trigger::Trigger::SearchImproved,
                effects,
            );
        }
    }
}

/// What a sample says of the operator's time on a full core of the node's class.
///
/// An emulated device holds results back until its slower core would have had them; what counts is the CPU time really used, which
/// other load on the host does not stretch. On a real device it is the time taken, times the share had.
fn full_core_ms(sample: &SampleMeasure, node: &NodeDescription, achieved_cores: f64) -> f64 {
    match node.emulated_speed {
        Some(speed) if speed > 0.0 && sample.cpu_ms > 0.0 => sample.cpu_ms / speed,
        _ => {
            let cores = if achieved_cores > 0.0 {
                achieved_cores.min(1.0)
            } else {
                1.0
            };
            sample.wall_ms * cores
        }
    }
}

pub(super) fn merged(before: &[Moments], scores: &[Moments]) -> Vec<Moments> {
    let len = before.len().max(scores.len());
    let at = |list: &[Moments], lag: usize| list.get(lag).copied().unwrap_or_default();
    (0..len)
        .map(|lag| at(before, lag).merged(&at(scores, lag)))
        .collect()
}
