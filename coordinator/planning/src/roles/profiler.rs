//! Runs trials: turns a configuration into stages, leases nodes to them, and remembers who holds which output.
//!
//! Start at [`Profiler::handle`]. A trial is the stages of one configuration in topological order. Each stage goes to the node that can
//! finish it first (queue, transfer of inputs, speed), within the query's constraints; a node runs one stage at a time, so that a
//! measurement is not disturbed by another, and never more than spare share allows. Outputs stay on the node that made them, by
//! sample set and prefix: a stage whose output and measurement are still there is not run again (a *cache hit*), not even for another
//! trial under way.
//!
//! Deliberately absent: what to try, how to judge outputs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use compass_shared::ids::{
    FrameId, NodeId, OperatorId, OperatorKind, QueryId, SampleSetId, TrialId,
};
use compass_shared::model::catalogue::Catalogue;
use compass_shared::model::cluster::{Cluster, Resources};
use compass_shared::model::pipeline::PipelineConfiguration;
use compass_shared::model::query::Query;
use compass_shared::model::trial::{RunStage, StageDone, StageFailure};
use compass_shared::time::Moment;
use compass_shared::units::Millicores;
use serde::{Deserialize, Serialize};

mod place;
mod pump;
mod stage;

use stage::{Busy, Stage, StageKey, StageState, Trial};

#[cfg(test)]
mod tests;

/// Constants of sampling and trials.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrialSettings {
    /// Runs of frames in the first, quick sample set.
    pub quick_segments: u32,
    /// Runs of frames in a set that certifies.
    pub segments: u32,
    /// Frames per run: 0.8 s at 10/s, long enough to hold an answer over several frames.
    pub frames_per_segment: u32,
    /// Wait this long for frames.
    pub capture_deadline: Duration,
    /// Wait this long for labels before the golden configuration stands in for the truth.
    pub labels_deadline: Duration,
    /// Trials of one query under way at once.
    pub trials_at_once: u32,
    /// Stages on one node at once.
    pub stages_per_node: u32,
    /// Stages in the whole fleet at once.
    pub stages_at_once: u32,
    /// A stage is killed after this long.
    pub stage_deadline: Duration,
    /// Least spare share of a node that is worth a stage.
    pub share_least: Millicores,
    /// A stage that failed for a passing reason is tried this many times in all.
    pub attempts: u32,
    /// A campaign ends after this long.
    pub campaign_deadline: Duration,
}

impl Default for TrialSettings {
    fn default() -> Self {
        Self {
            quick_segments: 1,
            segments: 3,
            frames_per_segment: 8,
            capture_deadline: Duration::from_secs(4),
            labels_deadline: Duration::from_millis(1500),
            trials_at_once: 3,
            stages_per_node: 1,
            stages_at_once: 16,
            stage_deadline: Duration::from_secs(20),
            share_least: Millicores(200),
            attempts: 2,
            campaign_deadline: Duration::from_secs(120),
        }
    }
}

/// A configuration to run over samples.
#[derive(Debug, Clone)]
pub struct TrialRequest {
    /// The query.
    pub query: Arc<Query>,
    /// The explorer's own number for it.
    pub number: u64,
    /// Every filter wide open.
    pub configuration: PipelineConfiguration,
    /// The samples.
    pub set: SampleSetId,
    /// Which frames of it.
    pub segments: Vec<Vec<FrameId>>,
    /// Bytes per captured frame, for choosing nodes.
    pub frame_bytes: f64,
    /// Operators whose measurements are wanted; their ancestors run too.
    pub wanted: Vec<OperatorId>,
    /// The operator whose outputs are to come back, if any.
    pub judged: Option<OperatorId>,
}

/// One stage of a finished trial.
#[derive(Debug, Clone, PartialEq)]
pub struct StageResult {
    /// The operator.
    pub operator: OperatorId,
    /// Where it ran.
    pub node: NodeId,
    /// What was measured.
    pub done: StageDone,
    /// Whether an earlier trial had already run it.
    pub cached: bool,
}

/// How a trial ended.
#[derive(Debug, Clone, PartialEq)]
pub struct TrialOutcome {
    /// The query.
    pub query: QueryId,
    /// The explorer's number.
    pub number: u64,
    /// The sample set.
    pub set: SampleSetId,
    /// What was run.
    pub configuration: PipelineConfiguration,
    /// Its stages in topological order, or the operator that failed and why.
    pub result: Result<Vec<StageResult>, (OperatorId, StageFailure)>,
}

/// For reports: one stage that was really run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageRecord {
    /// The query.
    pub query: QueryId,
    /// The operator.
    pub operator: OperatorId,
    /// Where.
    pub node: NodeId,
    /// The operator's configuration, in words.
    pub configuration: String,
    /// Frames.
    pub samples: u32,
    /// Sum over frames, in ms.
    pub wall_ms: f64,
    /// Sum over frames, in ms.
    pub cpu_ms: f64,
}

/// What the pool is told.
#[derive(Debug, Clone)]
pub enum Input {
    /// The fleet, and what live plans hold of each node (see `Scheduler::granted`).
    Cluster {
        /// The fleet.
        cluster: Arc<Cluster>,
        /// Granted to live instances.
        granted: BTreeMap<NodeId, Resources>,
    },
    /// Run a trial.
    Trial(Box<TrialRequest>),
    /// Call off a query's trials.
    Cancel(QueryId),
    /// Forget a sample set and all that was computed from it.
    DropSet(SampleSetId),
    /// A stage is done.
    StageDone {
        /// By whom.
        node: NodeId,
        /// What.
        done: StageDone,
    },
    /// A stage gave no result.
    StageFailed {
        /// By whom.
        node: NodeId,
        /// Which.
        trial: TrialId,
        /// Why.
        failure: StageFailure,
    },
    /// Time passes.
    Tick,
}

/// What the pool wants done.
#[derive(Debug, Clone)]
pub enum Effect {
    /// Run a stage on a node.
    RunStage {
        /// Where.
        node: NodeId,
        /// What.
        stage: Box<RunStage>,
    },
    /// Stop a stage.
    CancelStage {
        /// Where.
        node: NodeId,
        /// Which.
        trial: TrialId,
    },
    /// Nodes that pull inputs from each other for trials: each must accept the other as a peer before the stage runs.
    Pair {
        /// The one that pulls.
        reader: NodeId,
        /// The one that holds.
        holder: NodeId,
    },
    /// Tell the query's explorer.
    Outcome(Box<TrialOutcome>),
    /// A stage was run (for reports).
    Ran(StageRecord),
    /// A transfer of trial inputs was timed: a measurement of a link for the monitor.
    Transfer {
        /// Sender.
        from: NodeId,
        /// Receiver.
        to: NodeId,
        /// Bytes.
        bytes: u64,
        /// Milliseconds.
        ms: f64,
    },
    /// Call with `Tick` at this moment.
    WakeAt(Moment),
}

/// The pool of trials.
pub struct Profiler {
    catalogue: Arc<Catalogue>,
    settings: TrialSettings,
    cluster: Option<Arc<Cluster>>,
    granted: BTreeMap<NodeId, Resources>,
    next_trial: TrialId,
    cache_hits: u64,
    trials: Vec<Trial>,
    stages: BTreeMap<StageKey, Stage>,
    /// Milliseconds per frame on a core of the host's speed, by operator kind: a rough guess of how long a stage will take.
    work_ms: BTreeMap<OperatorKind, f64>,
    /// Nodes that had no room for a stage, and when they are asked again.
    busy: BTreeMap<NodeId, Busy>,
}

impl Profiler {
    /// A pool; `first_trial` must exceed every number used before (for instance `TrialId(term << 32)`).
    pub fn new(catalogue: Arc<Catalogue>, settings: TrialSettings, first_trial: TrialId) -> Self {
        Self {
            catalogue,
            settings,
            cluster: None,
            granted: BTreeMap::new(),
            next_trial: first_trial,
            cache_hits: 0,
            trials: Vec::new(),
            stages: BTreeMap::new(),
            work_ms: BTreeMap::new(),
            busy: BTreeMap::new(),
        }
    }

    /// Takes a fact and answers with what is to be done.
    pub fn handle(&mut self, now: Moment, input: Input) -> Vec<Effect> {
        let mut effects = Vec::new();
        match input {
            Input::Cluster { cluster, granted } => {
                self.cluster = Some(cluster);
                self.granted = granted;
                self.fail_lost(now);
            }
            Input::Trial(request) => self.trials.push(Trial::new(*request)),
            Input::Cancel(query) => self.cancel(&query, &mut effects),
            Input::DropSet(set) => self.stages.retain(|key, stage| {
                key.set != set || matches!(stage.state, StageState::Running { .. })
            }),
            Input::StageDone { node, done } => self.done(now, &node, done, &mut effects),
            Input::StageFailed {
                node,
                trial,
                failure,
            } => self.failed(now, &node, trial, failure, &mut effects),
            Input::Tick => {}
        }
        self.expire(now, &mut effects);
        self.pump(now, &mut effects);
        self.wake(now, &mut effects);
        effects
    }

    /// Stages that were not run because their output was still there.
    pub const fn cache_hits(&self) -> u64 {
        self.cache_hits
    }

    /// Stages that run now, with their nodes.
    pub fn running(&self) -> impl Iterator<Item = (&NodeId, TrialId)> {
        self.stages.values().filter_map(|stage| match &stage.state {
            StageState::Running { node, trial, .. } => Some((node, *trial)),
            _ => None,
        })
    }
}
