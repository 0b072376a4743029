//! Stages and trials as the pool keeps them.

use compass_shared::ids::{Digest, NodeId, OperatorId, SampleSetId, TrialId};
use compass_shared::model::trial::{StageDone, StageFailure};
use compass_shared::time::Moment;

use super::TrialRequest;

/// What a stage computes: equal keys mean equal outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct StageKey {
    pub(super) set: SampleSetId,
    pub(super) prefix: Digest,
}

/// One stage, shared by all trials that need it.
#[derive(Debug, Clone)]
pub(super) struct Stage {
    pub(super) operator: OperatorId,
    pub(super) attempts: u32,
    /// Since when it has found only nodes without room.
    pub(super) refused_since: Option<Moment>,
    pub(super) state: StageState,
}

/// A node that said it has no room.
#[derive(Debug, Clone, Copy)]
pub(super) struct Busy {
    /// Not asked before this moment.
    pub(super) until: Moment,
    /// How often in a row it has said so.
    pub(super) times: u32,
}

/// How far a stage is.
#[derive(Debug, Clone)]
pub(super) enum StageState {
    /// To be started, not before this moment.
    Waiting { not_before: Moment },
    /// Under way.
    Running {
        trial: TrialId,
        node: NodeId,
        since: Moment,
        /// The other node its inputs come from, if there is exactly one.
        remote: Option<NodeId>,
        expected_ms: f64,
    },
    /// Its outputs lie on the node.
    Done { node: NodeId, done: Box<StageDone> },
    /// It will not work.
    Failed(StageFailure),
}

/// A trial under way.
#[derive(Debug, Clone)]
pub(super) struct Trial {
    pub(super) request: TrialRequest,
    /// Positions of the operators to run, in topological order.
    pub(super) positions: Vec<usize>,
    /// Stages this trial has started itself; the others it found done.
    pub(super) started: Vec<StageKey>,
}

impl Trial {
    pub(super) fn new(request: TrialRequest) -> Self {
        let positions = wanted_positions(&request);
        Self {
            request,
            positions,
            started: Vec::new(),
        }
    }

    pub(super) fn key(&self, position: usize) -> StageKey {
        let pipeline = &self.request.query.pipeline;
        StageKey {
            set: self.request.set,
            prefix: self
                .request
                .configuration
                .prefix(pipeline, &pipeline.operators[position].id),
        }
    }
}

/// The wanted operators and all their ancestors.
fn wanted_positions(request: &TrialRequest) -> Vec<usize> {
    let pipeline = &request.query.pipeline;
    let mut needed: Vec<usize> = Vec::new();
    let mut open: Vec<usize> = request
        .wanted
        .iter()
        .chain(&request.judged)
        .filter_map(|id| pipeline.position(id))
        .collect();
    while let Some(position) = open.pop() {
        if needed.contains(&position) {
            continue;
        }
        needed.push(position);
        let inputs = &pipeline.operators[position].inputs;
        open.extend(inputs.iter().filter_map(|id| pipeline.position(id)));
    }
    needed.sort_unstable();
    needed
}
