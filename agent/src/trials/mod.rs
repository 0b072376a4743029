//! Trials on this node: frozen frames, stages run over them, outputs kept for the next stage.
//!
//! Start at [`Trials::run`]. The coordinator decides what to try; this module runs it in workers of their own, in spare share,
//! within bounds of time and memory.

use std::sync::Arc;

use async_trait::async_trait;
use compass_shared::ids::{Digest, FrameId, NodeId, QueryId, SampleSetId, TrialId};
use compass_shared::model::cluster::Resources;
use compass_shared::model::trial::{
    CaptureSamples, RunStage, SamplesCaptured, StageDone, StageFailure,
};

use crate::artifacts::{ArtifactCache, ArtifactSource};
use crate::workers::{Payload, Workers};

/// Per frame its output; `None` when an operator skipped it on purpose.
pub type StageOutputs = Vec<(FrameId, Option<Payload>)>;

/// Asks another node for stage outputs or captured frames (`PeerRequest::FetchStage`).
#[async_trait]
pub trait StageFetch: Send + Sync {
    /// Outputs for these frames, in the order asked.
    ///
    /// # Errors
    /// Why the holder does not give them, in words.
    async fn fetch(
        &self,
        holder: &NodeId,
        query: &QueryId,
        set: SampleSetId,
        prefix: Digest,
        frames: &[FrameId],
    ) -> Result<StageOutputs, String>;
}

/// Recent frames of the queries that enter here, and the sets frozen from them.
#[derive(Debug)]
pub struct SampleStore {
    max_bytes: u64,
}

impl SampleStore {
    /// Keeps at most this many bytes of recent frames, and as many again of frozen sets.
    pub fn new(max_bytes: u64) -> Self {
        Self { max_bytes }
    }

    /// Notes a frame that enters here; the oldest go when room is needed.
    pub fn offer(&self, query: &QueryId, frame: FrameId, payload: &Payload) {
        let _ = (self.max_bytes, query, frame, payload);
    }

    /// Freezes runs of frames that entered recently or enter until the deadline.
    pub async fn capture(&self, request: CaptureSamples) -> SamplesCaptured {
        SamplesCaptured {
            set: request.set,
            segments: Vec::new(),
            bytes: 0,
        }
    }

    /// Forgets a query that no longer enters here (its frozen sets stay until dropped).
    pub fn forget(&self, query: &QueryId) {
        let _ = query;
    }
}

/// Runs stages.
pub struct Trials {
    node: NodeId,
    capacity: Resources,
    workers: Arc<Workers>,
    artifacts: Arc<ArtifactCache>,
    samples: Arc<SampleStore>,
}

impl Trials {
    /// `capacity` is what the node may grant in all; trials use what live instances leave.
    pub fn new(
        node: NodeId,
        capacity: Resources,
        workers: Arc<Workers>,
        artifacts: Arc<ArtifactCache>,
        samples: Arc<SampleStore>,
    ) -> Self {
        Self {
            node,
            capacity,
            workers,
            artifacts,
            samples,
        }
    }

    /// Runs one stage.
    ///
    /// # Errors
    /// See [`StageFailure`].
    pub async fn run(
        &self,
        stage: RunStage,
        peers: &dyn StageFetch,
        artifacts: &dyn ArtifactSource,
    ) -> Result<StageDone, StageFailure> {
        let _ = (
            stage,
            peers,
            artifacts,
            &self.node,
            self.capacity,
            &self.workers,
            &self.artifacts,
            &self.samples,
        );
        Err(StageFailure::Busy)
    }

    /// Ends a stage; its `run` returns [`StageFailure::Cancelled`].
    pub fn cancel(&self, trial: TrialId) {
        let _ = trial;
    }

    /// Captured frames or cached outputs, for another node that runs the next stage.
    ///
    /// # Errors
    /// Why they cannot be given, in words.
    pub fn serve(
        &self,
        query: &QueryId,
        set: SampleSetId,
        prefix: Digest,
        frames: &[FrameId],
    ) -> Result<StageOutputs, String> {
        let _ = (query, set, prefix, frames);
        Err("nothing is cached here".to_owned())
    }

    /// Forgets a sample set and all that was computed from it.
    pub fn drop_set(&self, set: SampleSetId) {
        let _ = set;
    }
}
