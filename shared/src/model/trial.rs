//! Trials: operators really run on inputs of the query, to learn their time, output size and accuracy.
//!
//! The entry node freezes a set of recent frames (a *sample set*) on request. A *stage* runs one operator in one configuration over
//! such a set on one node; its inputs are the frames themselves or another stage's output, pulled from the node that holds it over the
//! same links that live frames use. Outputs stay cached on the node that made them, by *prefix* (see `PipelineConfiguration::prefix`).

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::{Digest, FrameId, NodeId, OperatorId, QueryId, SampleSetId, TrialId};
use crate::model::plan::InstanceTarget;

/// Asks the entry node to freeze recent frames of a query.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaptureSamples {
    /// The query.
    pub query: QueryId,
    /// Names the set from now on.
    pub set: SampleSetId,
    /// How many contiguous runs of frames.
    pub segments: u32,
    /// Frames per run.
    pub frames_per_segment: u32,
    /// Give up waiting for enough frames after this long and freeze what is there.
    pub deadline: Duration,
}

/// What was frozen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplesCaptured {
    /// The set.
    pub set: SampleSetId,
    /// The runs of frames, oldest first; empty when the query sent nothing.
    pub segments: Vec<Vec<FrameId>>,
    /// Total size in bytes.
    pub bytes: u64,
}

/// Where a stage's inputs lie: the output of `prefix` over `set`, held by `holder`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageInput {
    /// The operator that made it; `None` for the captured frames themselves.
    pub operator: Option<OperatorId>,
    /// Digest of the work that made it; for captured frames the digest of nothing.
    pub prefix: Digest,
    /// The node that holds it.
    pub holder: NodeId,
}

/// Runs one operator over (some frames of) a sample set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunStage {
    /// Names the answer.
    pub trial: TrialId,
    /// The query.
    pub query: QueryId,
    /// The operator.
    pub operator: OperatorId,
    /// What to run; its share is what the trial may use.
    pub instance: InstanceTarget,
    /// Where the inputs are, one per input of the operator (or one for the frames).
    pub inputs: Vec<StageInput>,
    /// The sample set.
    pub set: SampleSetId,
    /// Which frames, in order; a stateful operator is reset between runs of non-consecutive segments.
    pub segments: Vec<Vec<FrameId>>,
    /// Under which digest to cache the outputs.
    pub prefix: Digest,
    /// Whether to send the outputs back (only the judged operator's, which are small).
    pub return_outputs: bool,
    /// Kill it after this long.
    pub deadline: Duration,
}

/// One frame's measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SampleMeasure {
    /// The frame.
    pub frame: FrameId,
    /// Time in the operator as the node would take it (emulated hold included), in ms.
    pub wall_ms: f64,
    /// CPU time really used, in ms.
    pub cpu_ms: f64,
    /// Size of the input in bytes.
    pub bytes_in: u64,
    /// Size of the output in bytes; 0 when the operator dropped the frame on purpose.
    pub bytes_out: u64,
    /// Whether the operator dropped it on purpose (a sampler).
    pub skipped: bool,
    /// The output, when asked for.
    pub output: Option<Vec<u8>>,
}

/// A finished stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageDone {
    /// Names the request.
    pub trial: TrialId,
    /// Per frame that reached the operator, warm-up excluded; frames that an earlier operator left out have none.
    pub samples: Vec<SampleMeasure>,
    /// Time to start the worker and load the model, in ms; 0 when it was warm.
    pub cold_start_ms: f64,
    /// Time to fetch the inputs from their holder, in ms, and how many bytes; `None` when they were local.
    pub transfer: Option<(f64, u64)>,
    /// CPU share really had, in cores of the node.
    pub achieved_cores: f64,
}

/// Why a stage gave no result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum StageFailure {
    /// It passed its deadline and was killed.
    Deadline,
    /// The worker exceeded its memory or died; its last words.
    Crashed(String),
    /// The inputs are gone or their holder does not answer.
    InputsUnavailable(String),
    /// No spare share on this node now.
    Busy,
    /// The model is not what it should be, or the worker cannot use it.
    Artifact(String),
    /// It was cancelled.
    Cancelled,
    /// What it needs could not be had in time (its model was not fetched or loaded, its node gave no answer): it may work later.
    Unavailable(String),
}
