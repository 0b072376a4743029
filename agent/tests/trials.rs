//! Trials with real workers: stages over frozen frames, cached, cancelled, bounded.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use compass_agent::artifacts::{ArtifactCache, ArtifactSink, ArtifactSource};
use compass_agent::trials::{SampleStore, StageFetch, StageOutputs, Trials};
use compass_agent::workers::Workers;
use compass_shared::ids::{
    ArtifactName, Digest, FrameId, NodeId, OperatorId, QueryId, SampleSetId, TrialId,
};
use compass_shared::model::catalogue::{Fault, Runtime, StateKind};
use compass_shared::model::cluster::Resources;
use compass_shared::model::pipeline::KnobValue;
use compass_shared::model::plan::{ArtifactRef, InstanceTarget};
use compass_shared::model::trial::{CaptureSamples, RunStage, StageFailure, StageInput};
use compass_shared::units::Millicores;
use support::{PATIENCE, native, payload, query, settings, synthetic, target};

const SET: SampleSetId = SampleSetId(1);

/// A node with trials, and nobody around.
struct Node {
    trials: Trials,
    workers: Arc<Workers>,
    samples: Arc<SampleStore>,
    _folder: tempfile::TempDir,
}

impl Node {
    fn new(name: &str, emulated_speed: Option<f64>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let workers = Arc::new(Workers::new(settings(folder.path(), emulated_speed)));
        let artifacts = ArtifactCache::new(folder.path().join("artifacts"), 1 << 20).unwrap();
        let samples = Arc::new(SampleStore::new(64 << 20));
        let capacity = Resources {
            cpu: Millicores(2000),
            memory_mib: 256,
            gpu_percent: 0,
        };
        Self {
            trials: Trials::new(
                node_id(name),
                capacity,
                workers.clone(),
                Arc::new(artifacts),
                samples.clone(),
            ),
            workers,
            samples,
            _folder: folder,
        }
    }

    async fn capture(
        &self,
        content: &str,
        segments: u32,
        frames_per_segment: u32,
        bytes: usize,
    ) -> Vec<Vec<FrameId>> {
        for frame in 0..u64::from(segments * frames_per_segment) {
            let input = payload(content, vec![frame as u8; bytes]);
            self.samples.offer(&query(), FrameId(frame), &input);
        }
        let request = CaptureSamples {
            query: query(),
            set: SET,
            segments,
            frames_per_segment,
            deadline: PATIENCE,
        };
        self.samples.capture(request).await.segments
    }

    async fn run(
        &self,
        stage: RunStage,
    ) -> Result<compass_shared::model::trial::StageDone, StageFailure> {
        self.trials.run(stage, &Nobody, &Nobody).await
    }
}

fn node_id(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

fn frames_of() -> Digest {
    Digest::of(&[])
}

fn input(prefix: Digest, holder: &str) -> StageInput {
    StageInput {
        operator: None,
        prefix,
        holder: node_id(holder),
    }
}

fn stage(
    trial: u64,
    instance: InstanceTarget,
    inputs: Vec<StageInput>,
    segments: &[Vec<FrameId>],
) -> RunStage {
    RunStage {
        trial: TrialId(trial),
        query: query(),
        operator: OperatorId::new("op").unwrap(),
        prefix: Digest::of(format!("{} {}", instance.kind, instance.instance).as_bytes()),
        instance,
        inputs,
        set: SET,
        segments: segments.to_vec(),
        return_outputs: true,
        deadline: PATIENCE,
    }
}

struct Nobody;

#[async_trait]
impl StageFetch for Nobody {
    async fn fetch(
        &self,
        holder: &NodeId,
        _: &QueryId,
        _: SampleSetId,
        _: Digest,
        _: &[FrameId],
    ) -> Result<StageOutputs, String> {
        Err(format!("{holder} does not answer"))
    }
}

#[async_trait]
impl ArtifactSource for Nobody {
    async fn fetch(
        &self,
        _: Digest,
        _: u64,
        sink: &mut (dyn ArtifactSink + Send),
    ) -> Result<(), String> {
        sink.write(b"not a model").map_err(|e| e.to_string())
    }
}

/// Another node's trials, as if over a link.
struct Neighbour<'a>(&'a Trials, AtomicUsize);

#[async_trait]
impl StageFetch for Neighbour<'_> {
    async fn fetch(
        &self,
        _: &NodeId,
        query: &QueryId,
        set: SampleSetId,
        prefix: Digest,
        frames: &[FrameId],
    ) -> Result<StageOutputs, String> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.serve(query, set, prefix, frames)
    }
}

#[tokio::test]
async fn stages_run_one_after_another_on_cached_outputs_and_over_nodes() {
    let edge = Node::new("edge", None);
    let cloud = Node::new("cloud", Some(0.5));
    let segments = edge.capture("rgb8 64x48", 2, 4, 64 * 48 * 3).await;
    let sampler = native(1, "sampler", &[("rate", KnobValue::Integer(5))]);
    let first = stage(1, sampler, vec![input(frames_of(), "edge")], &segments);
    let sampled = edge.run(first.clone()).await.unwrap();
    assert_eq!(sampled.transfer, None);
    assert!(sampled.cold_start_ms > 0.0);
    let kept: Vec<bool> = sampled.samples.iter().map(|s| !s.skipped).collect();
    assert_eq!(kept, [true, false, true, false, true, false, true, false]);

    let prepare = native(2, "prepare", &[("resolution", KnobValue::Integer(32))]);
    let second = stage(2, prepare, vec![input(first.prefix, "edge")], &segments);
    let neighbour = Neighbour(&edge.trials, AtomicUsize::new(0));
    let prepared = cloud
        .trials
        .run(second.clone(), &neighbour, &Nobody)
        .await
        .unwrap();
    let (_, bytes) = prepared.transfer.unwrap();
    assert_eq!(bytes, 4 * 64 * 48 * 3, "only the kept frames travel");
    let reached: Vec<u64> = prepared.samples.iter().map(|s| s.frame.0).collect();
    assert_eq!(reached, [0, 2, 4, 6]);
    for sample in &prepared.samples {
        assert!(!sample.skipped);
        let output = sample.output.as_ref().unwrap();
        assert_eq!(
            (output.len() as u64, &output[..2]),
            (sample.bytes_out, &[0xff, 0xd8][..])
        );
        assert_eq!(sample.bytes_in, 64 * 48 * 3);
        assert!(
            sample.wall_ms >= 2.0 * sample.cpu_ms * 0.999,
            "held as the emulated device would: {sample:?}"
        );
    }
    assert!(prepared.achieved_cores > 0.0 && prepared.achieved_cores <= 1.001);

    let again = RunStage {
        trial: TrialId(3),
        ..second
    };
    let again = cloud.trials.run(again, &neighbour, &Nobody).await.unwrap();
    assert_eq!(
        (again.cold_start_ms, again.transfer),
        (0.0, None),
        "worker and inputs were still there"
    );
    assert_eq!(neighbour.1.load(Ordering::Relaxed), 1);

    edge.trials.drop_set(SET);
    assert!(
        edge.trials
            .serve(&query(), SET, first.prefix, &segments[0])
            .is_err()
    );
    let gone = edge
        .run(RunStage {
            trial: TrialId(4),
            ..first
        })
        .await;
    assert!(
        matches!(gone, Err(StageFailure::InputsUnavailable(_))),
        "{gone:?}"
    );
}

#[tokio::test]
async fn a_stateful_operator_starts_anew_with_each_run_of_frames() {
    let node = Node::new("n", None);
    let boxes = br#"[{"class":1,"score":0.9,"x":0.5,"y":0.5,"w":0.1,"h":0.1}]"#;
    for frame in [0, 1, 2, 3, 10, 11] {
        node.samples
            .offer(&query(), FrameId(frame), &payload("detections", &boxes[..]));
    }
    let capture = CaptureSamples {
        query: query(),
        set: SET,
        segments: 3,
        frames_per_segment: 2,
        deadline: PATIENCE,
    };
    let segments = node.samples.capture(capture).await.segments;
    let mut tracker = native(1, "tracker", &[]);
    tracker.state = StateKind::Snapshot;
    let done = node
        .run(stage(1, tracker, vec![input(frames_of(), "n")], &segments))
        .await
        .unwrap();
    let ids: Vec<u64> = done
        .samples
        .iter()
        .map(|sample| {
            let tracks: serde_json::Value =
                serde_json::from_slice(sample.output.as_ref().unwrap()).unwrap();
            tracks[0]["id"].as_u64().unwrap()
        })
        .collect();
    assert_eq!(ids, [0; 6]);
    assert_eq!(
        done.samples.len(),
        6,
        "the warm-up is not among the samples"
    );
}

#[tokio::test]
async fn a_stage_that_goes_wrong_says_how_and_leaves_the_node_free() {
    let node = Node::new("n", None);
    let segments = node.capture("bytes", 1, 3, 10).await;
    let from = |prefix| vec![input(prefix, "n")];

    let aborting = synthetic(1, 0, Some(Fault::AbortAt(3)));
    let crashed = node
        .run(stage(1, aborting, from(frames_of()), &segments))
        .await;
    assert_eq!(
        crashed,
        Err(StageFailure::Crashed(
            "the worker crashed: ended by signal 6: aborting as told".to_owned()
        ))
    );

    let spinning = synthetic(2, 0, Some(Fault::SpinAt(2)));
    let mut late = stage(2, spinning, from(frames_of()), &segments);
    late.deadline = Duration::from_millis(700);
    assert_eq!(node.run(late).await, Err(StageFailure::Deadline));

    let picture = native(3, "prepare", &[]);
    let unreadable = node
        .run(stage(3, picture, from(frames_of()), &segments))
        .await;
    assert!(
        matches!(&unreadable, Err(StageFailure::Crashed(why)) if why.contains("frame 2: it reads a picture")),
        "{unreadable:?}"
    );

    let mut detector = target(
        4,
        Runtime::Onnx {
            head: "center-detector".to_owned(),
        },
    );
    detector.artifact = Some(ArtifactRef {
        name: ArtifactName::new("model").unwrap(),
        digest: Digest::of(b"not a model"),
        bytes: 11,
    });
    let corrupt = node
        .run(stage(4, detector.clone(), from(frames_of()), &segments))
        .await;
    assert!(
        matches!(&corrupt, Err(StageFailure::Artifact(why)) if why.contains("model cannot be used")),
        "{corrupt:?}"
    );
    detector.artifact.as_mut().unwrap().digest = Digest::of(b"another");
    let forged = node
        .run(stage(5, detector, from(frames_of()), &segments))
        .await;
    assert!(
        matches!(&forged, Err(StageFailure::Artifact(why)) if why.contains("is corrupt")),
        "{forged:?}"
    );

    let elsewhere = stage(
        6,
        synthetic(6, 0, None),
        vec![input(frames_of(), "m")],
        &[vec![FrameId(77)]],
    );
    assert_eq!(
        node.run(elsewhere).await,
        Err(StageFailure::InputsUnavailable(
            "m does not answer".to_owned()
        ))
    );

    node.run(stage(
        7,
        synthetic(7, 0, None),
        from(frames_of()),
        &segments,
    ))
    .await
    .unwrap();
}

/// A source that gives a model piece by piece: part of it in each attempt, then it breaks off or stands still.
struct Slow {
    model: &'static [u8],
    piece: usize,
    hangs: bool,
}

#[async_trait]
impl ArtifactSource for Slow {
    async fn fetch(
        &self,
        _: Digest,
        offset: u64,
        sink: &mut (dyn ArtifactSink + Send),
    ) -> Result<(), String> {
        let rest = &self.model[offset as usize..];
        let piece = &rest[..self.piece.min(rest.len())];
        sink.write(piece).map_err(|e| e.to_string())?;
        if piece.len() == rest.len() {
            return Ok(());
        }
        if self.hangs {
            std::future::pending::<()>().await;
        }
        Err("the session was lost".to_owned())
    }
}

#[tokio::test]
async fn a_model_that_does_not_come_in_time_is_unavailable_and_goes_on_where_it_stopped() {
    const MODEL: &[u8] = b"no model that anything can load";
    let node = Node::new("n", None);
    let segments = node.capture("bytes", 1, 3, 10).await;
    let mut detector = target(
        1,
        Runtime::Onnx {
            head: "center-detector".to_owned(),
        },
    );
    detector.artifact = Some(ArtifactRef {
        name: ArtifactName::new("model").unwrap(),
        digest: Digest::of(MODEL),
        bytes: MODEL.len() as u64,
    });
    let run = async |trial, hangs| {
        let mut one = stage(
            trial,
            detector.clone(),
            vec![input(frames_of(), "n")],
            &segments,
        );
        if hangs {
            one.deadline = Duration::from_millis(300);
        }
        let piece = MODEL.len() / 3 + 1;
        let slow = Slow {
            model: MODEL,
            piece,
            hangs,
        };
        node.trials.run(one, &Nobody, &slow).await
    };
    let broken = run(1, false).await;
    assert!(
        matches!(&broken, Err(StageFailure::Unavailable(why)) if why.contains("the session was lost")),
        "{broken:?}"
    );
    let hung = run(2, true).await;
    assert!(
        matches!(&hung, Err(StageFailure::Unavailable(why)) if why.contains("model model was not fetched within 0.3 s")),
        "{hung:?}"
    );
    // The last third is there now, and what it makes whole can be judged.
    let whole = run(3, false).await;
    assert!(
        matches!(&whole, Err(StageFailure::Artifact(why)) if why.contains("model cannot be used")),
        "{whole:?}"
    );
}

#[tokio::test]
async fn trials_take_only_what_live_work_leaves_and_can_be_cancelled() {
    let node = Node::new("n", None);
    let segments = node.capture("bytes", 1, 3, 10).await;
    let spinning = |trial| {
        let instance = synthetic(trial, 0, Some(Fault::SpinAt(1)));
        stage(trial, instance, vec![input(frames_of(), "n")], &segments)
    };
    let live = node
        .workers
        .start(
            &synthetic(9, 0, None),
            None,
            compass_agent::workers::Purpose::Live,
        )
        .await
        .unwrap();
    // One core is live, one is spare: the first trial fits, the second does not.
    let observe = async {
        tokio::task::yield_now().await;
        let second = node.run(spinning(2)).await;
        node.trials.cancel(TrialId(1));
        second
    };
    let (first, second) = tokio::join!(node.run(spinning(1)), observe);
    assert_eq!(
        (first, second),
        (Err(StageFailure::Cancelled), Err(StageFailure::Busy))
    );
    node.trials.cancel(TrialId(1));
    let third = stage(
        3,
        synthetic(3, 0, None),
        vec![input(frames_of(), "n")],
        &segments,
    );
    node.run(third).await.unwrap();
    live.stop().await;
}
