//! Plans: what runs where, how configured, with how much; and what a single node has to do for it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::{
    ArtifactName, Commit, Digest, Generation, InstanceId, NodeId, OperatorId, OperatorKind, QueryId,
};
use crate::model::catalogue::{Runtime, StateKind};
use crate::model::cluster::Resources;
use crate::model::pipeline::{Configuration, PipelineConfiguration};
use crate::model::trigger::Trigger;

/// One operator's part of a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OperatorPlan {
    /// The operator.
    pub operator: OperatorId,
    /// One value per knob.
    pub configuration: Configuration,
    /// Where it runs.
    pub node: NodeId,
    /// What it is granted.
    pub share: Resources,
    /// The instance that serves it.
    pub instance: InstanceId,
    /// The model file it needs.
    pub artifact: Option<ArtifactRef>,
}

/// A model file by name and content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArtifactRef {
    /// For people.
    pub name: ArtifactName,
    /// Its SHA-256.
    pub digest: Digest,
    /// Its size in bytes.
    pub bytes: u64,
}

/// How far a plan is to be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PlanStatus {
    /// From history or prediction; runs provisionally.
    Guessed,
    /// Fresh samples passed.
    Certified,
    /// Fresh samples failed; it was replaced.
    Reverted,
}

/// A value with its confidence interval and the number of samples behind it (0 = predicted).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// Best guess.
    pub value: f64,
    /// Lower end of the 95 % interval.
    pub low: f64,
    /// Upper end of the 95 % interval.
    pub high: f64,
    /// Samples it rests on.
    pub samples: u32,
}

impl Estimate {
    /// A value known without error.
    pub const fn exact(value: f64) -> Self {
        Self {
            value,
            low: value,
            high: value,
            samples: 0,
        }
    }
}

/// What a plan is expected to achieve.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Expectation {
    /// Latency at the SLO's percentile (95 when it names none), in ms.
    pub latency_ms: Estimate,
    /// Accuracy, 0 to 1.
    pub accuracy: Estimate,
    /// USD per hour.
    pub cost_usd_per_h: f64,
}

/// A plan of one query; immutable.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QueryPlan {
    /// The query.
    pub query: QueryId,
    /// Its version.
    pub generation: Generation,
    /// The generation it replaced.
    pub parent: Option<Generation>,
    /// One entry per operator, in the pipeline's order.
    pub operators: Vec<OperatorPlan>,
    /// How far it is to be trusted.
    pub status: PlanStatus,
    /// Why it was made.
    pub trigger: Trigger,
    /// What it should achieve.
    pub expected: Expectation,
}

impl QueryPlan {
    /// Hash of placement, configuration and shares: equal for plans that do the same, whatever their generation.
    pub fn content_hash(&self) -> Digest {
        let mut text = String::new();
        for part in &self.operators {
            text.push_str(&format!(
                "{}|{}|{}|{:?}\n",
                part.operator, part.configuration, part.node, part.share
            ));
        }
        Digest::of(text.as_bytes())
    }

    /// The configuration of the whole pipeline.
    pub fn configuration(&self) -> PipelineConfiguration {
        PipelineConfiguration(
            self.operators
                .iter()
                .map(|o| (o.operator.clone(), o.configuration.clone()))
                .collect(),
        )
    }

    /// The nodes that take part.
    pub fn nodes(&self) -> BTreeSet<&NodeId> {
        self.operators.iter().map(|o| &o.node).collect()
    }

    /// One line for people: `sampler{rate=5}@edge-1 prepare{…}@edge-1 …`.
    pub fn summary(&self) -> String {
        let part = |o: &OperatorPlan| {
            if o.configuration.0.is_empty() {
                format!("{}@{}", o.operator, o.node)
            } else {
                format!("{}{{{}}}@{}", o.operator, o.configuration, o.node)
            }
        };
        self.operators
            .iter()
            .map(part)
            .collect::<Vec<_>>()
            .join(" ")
    }
}

/// The instance id for an operator's work on a node: the hash of kind, artifact, configuration and node.
pub fn instance_id(
    kind: &OperatorKind,
    artifact: Option<&Digest>,
    configuration: &Configuration,
    node: &NodeId,
) -> InstanceId {
    let text = format!(
        "{kind}|{}|{configuration}|{node}",
        artifact.map_or_else(String::new, Digest::to_string)
    );
    let digest = Digest::of(text.as_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&digest.as_bytes()[..8]);
    InstanceId(u64::from_be_bytes(first))
}

/// Query → plan for the whole fleet; changed only by the Scheduler.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Assignment {
    /// Its version.
    pub commit: Commit,
    /// The current plan of each query that has one.
    pub plans: BTreeMap<QueryId, QueryPlan>,
}

/// An instance a node has to run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InstanceTarget {
    /// Its id.
    pub instance: InstanceId,
    /// For people and logs.
    pub kind: OperatorKind,
    /// How it runs.
    pub runtime: Runtime,
    /// One value per knob.
    pub configuration: Configuration,
    /// The model file.
    pub artifact: Option<ArtifactRef>,
    /// What it is granted; the sum over the operators it serves.
    pub share: Resources,
    /// What it remembers.
    pub state: StateKind,
}

/// One step of a route: which operator runs where and who reads its output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RouteStep {
    /// The operator.
    pub operator: OperatorId,
    /// The node that runs it.
    pub node: NodeId,
    /// The instance that runs it.
    pub instance: InstanceId,
    /// Operators whose outputs it waits for.
    pub inputs: Vec<OperatorId>,
    /// Operators that read its output; empty for the last one, whose output is the result.
    pub readers: Vec<OperatorId>,
}

/// How the frames of one generation of one query travel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Route {
    /// The generation.
    pub generation: Generation,
    /// In topological order.
    pub steps: Vec<RouteStep>,
}

/// What a node has to know of one query that touches it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QueryTarget {
    /// The query.
    pub query: QueryId,
    /// The generation that the entry node gives to new frames.
    pub current: Generation,
    /// All generations that may still be in flight, the current one among them.
    pub routes: Vec<Route>,
    /// The entry node.
    pub entry: NodeId,
    /// A frame older than this is dropped as expired.
    pub frame_deadline: Duration,
    /// Fingerprint of the app's key, which may open data connections for this query.
    pub app_fingerprint: Option<Digest>,
}

/// A neighbour on the data plane.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Peer {
    /// Its id.
    pub node: NodeId,
    /// Where to dial it.
    pub addresses: Vec<SocketAddr>,
    /// Its key: this is the trust, also while the coordinator is away.
    pub fingerprint: Digest,
}

/// Everything one node has to do, as of one commit; a node applies only what is newer than what it has.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeTarget {
    /// The commit.
    pub commit: Commit,
    /// The node.
    pub node: NodeId,
    /// What to run, by id.
    pub instances: Vec<InstanceTarget>,
    /// Queries whose frames pass here.
    pub queries: Vec<QueryTarget>,
    /// Nodes it may send frames to or receive frames from.
    pub peers: Vec<Peer>,
    /// Models to have at hand for plans that may be needed while the coordinator is hard to reach: fetched when nothing that is to run
    /// waits for one, and kept while there is room.
    pub standby: Vec<ArtifactRef>,
}
