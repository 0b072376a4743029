//! Which node runs a stage: the one that can have it finished first.

use compass_shared::ids::NodeId;
use compass_shared::model::cluster::Resources;
use compass_shared::time::{Moment, ms};
use compass_shared::units::Millicores;

use super::stage::{StageState, Trial};
use super::{Profiler, StageKey};
use crate::predict::{PredictSettings, planned_rate};
use crate::space::{connected, is_allowed, takes_work};

/// Guess of an operator's work per frame before it has ever run, in ms on a core of the host's speed.
const WORK_GUESS_MS: f64 = 10.0;
/// Guess of an output's size before it was seen, as a part of the source frame.
const STAGE_START_MS: f64 = 80.0;

/// Where the inputs of a stage lie: the holder and the bytes to pull from it.
pub(super) struct Source {
    pub(super) operator: Option<usize>,
    pub(super) holder: NodeId,
    pub(super) bytes: f64,
}

/// A node for a stage.
pub(super) struct Place {
    pub(super) node: NodeId,
    pub(super) share: Resources,
    pub(super) expected_ms: f64,
    /// It has a free lease now.
    pub(super) is_free: bool,
}

impl Profiler {
    /// Inputs of an operator; `None` while one of them is not done.
    pub(super) fn sources(&self, trial: &Trial, position: usize) -> Option<Vec<Source>> {
        let query = &trial.request.query;
        let operator = &query.pipeline.operators[position];
        if operator.inputs.is_empty() {
            let frames: usize = trial.request.segments.iter().map(Vec::len).sum();
            return Some(vec![Source {
                operator: None,
                holder: query.entry.clone(),
                bytes: trial.request.frame_bytes * frames as f64,
            }]);
        }
        operator
            .inputs
            .iter()
            .filter_map(|id| query.pipeline.position(id))
            .map(|input| {
                let StageState::Done { node, done } = &self.stages.get(&trial.key(input))?.state
                else {
                    return None;
                };
                let bytes = done.samples.iter().map(|s| s.bytes_out as f64).sum();
                Some(Source {
                    operator: Some(input),
                    holder: node.clone(),
                    bytes,
                })
            })
            .collect()
    }

    /// The node that would have the stage done first, waiting for its lease included; `None` when no node may run it now.
    pub(super) fn place(
        &self,
        now: Moment,
        trial: &Trial,
        position: usize,
        sources: &[Source],
    ) -> Option<Place> {
        let cluster = self.cluster.as_ref()?;
        let query = &trial.request.query;
        let operator = &query.pipeline.operators[position];
        let entry = self.catalogue.0.get(&operator.kind)?;
        let frames: usize = trial.request.segments.iter().map(Vec::len).sum();
        let work_ms = self
            .work_ms
            .get(&operator.kind)
            .copied()
            .unwrap_or(WORK_GUESS_MS);
        let settings = PredictSettings::default();
        let mut best: Option<Place> = None;
        for (id, node) in &cluster.nodes {
            if !takes_work(node)
                || !is_allowed(query, cluster, position, node)
                || !sources.iter().all(|s| connected(cluster, &s.holder, id))
            {
                continue;
            }
            let Some(share) = self.spare(id, node.description.capacity, entry.memory_mib) else {
                continue;
            };
            let speed = node.description.emulated_speed.unwrap_or(1.0).max(1e-3);
            let cores = share.cpu.cores().min(1.0);
            let mut expected_ms = STAGE_START_MS + frames as f64 * work_ms / (speed * cores);
            for source in sources.iter().filter(|s| s.holder != *id) {
                let link = &cluster.links[&(source.holder.clone(), id.clone())];
                expected_ms +=
                    link.rtt_ms * 1.5 + planned_rate(link, &settings).transfer_ms(source.bytes);
            }
            let (running, wait_ms) = self.running_on(now, id);
            let pause_ms = self.pause_ms(now, id);
            let is_free = running < self.settings.stages_per_node && pause_ms == 0.0;
            let wait_ms = wait_ms.max(pause_ms);
            let total = expected_ms + if is_free { 0.0 } else { wait_ms };
            if best.as_ref().is_none_or(|b| total < b.expected_ms) {
                best = Some(Place {
                    node: id.clone(),
                    share,
                    expected_ms: total,
                    is_free,
                });
            }
        }
        best
    }

    /// What a trial may use of a node: a core, or what live instances leave; `None` below the floor.
    fn spare(&self, id: &NodeId, capacity: Resources, memory_mib: u32) -> Option<Resources> {
        let granted = self.granted.get(id).copied().unwrap_or_default();
        let cpu = capacity.cpu.0.saturating_sub(granted.cpu.0).min(1000);
        let memory = capacity.memory_mib.saturating_sub(granted.memory_mib);
        // A node smaller than the floor counts with all it has.
        let floor = self.settings.share_least.0.min(capacity.cpu.0);
        if cpu == 0 || cpu < floor || memory < memory_mib {
            return None;
        }
        Some(Resources {
            cpu: Millicores(cpu),
            memory_mib,
            gpu_percent: 0,
        })
    }

    /// Stages that run on a node, and how long the last of them is expected to take from now, in ms.
    fn running_on(&self, now: Moment, id: &NodeId) -> (u32, f64) {
        let mut count = 0;
        let mut wait_ms: f64 = 0.0;
        for stage in self.stages.values() {
            if let StageState::Running {
                node,
                since,
                expected_ms,
                ..
            } = &stage.state
                && node == id
            {
                count += 1;
                wait_ms = wait_ms.max(expected_ms - ms(now.since(*since))).max(50.0);
            }
        }
        (count, wait_ms)
    }

    /// How long a node that had no room is still left alone, in ms.
    fn pause_ms(&self, now: Moment, id: &NodeId) -> f64 {
        self.busy
            .get(id)
            .map_or(0.0, |busy| ms(busy.until.since(now)))
    }

    /// Stages that run anywhere.
    pub(super) fn running_count(&self) -> usize {
        self.stages
            .values()
            .filter(|s| matches!(s.state, StageState::Running { .. }))
            .count()
    }

    /// The stage a node's answer belongs to.
    pub(super) fn running_key(
        &self,
        node: &NodeId,
        trial: compass_shared::ids::TrialId,
    ) -> Option<StageKey> {
        self.stages
            .iter()
            .find_map(|(key, stage)| match &stage.state {
                StageState::Running {
                    trial: running,
                    node: on,
                    ..
                } if *running == trial && on == node => Some(*key),
                _ => None,
            })
    }
}
