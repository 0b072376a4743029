//! Trials on this node: frozen frames, stages run over them, outputs kept for the next stage.
//!
//! Start at [`Trials::run`]. The coordinator decides what to try; this module runs it in workers of their own, in the share that live
//! instances leave, within bounds of time and memory. [`SampleStore`] holds frames, `cache` what was computed from them, `pool` keeps
//! a few workers warm between stages.
//!
//! Deliberately absent: what to try, how good an output is, how bytes travel between nodes ([`StageFetch`]).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use compass_shared::ids::{Digest, FrameId, NodeId, QueryId, SampleSetId, TrialId};
use compass_shared::model::catalogue::StateKind;
use compass_shared::model::cluster::Resources;
use compass_shared::model::trial::{RunStage, SampleMeasure, StageDone, StageFailure, StageInput};
use compass_shared::time::ms;
use tokio::sync::oneshot;
use tokio::time::error::Elapsed;

use crate::artifacts::{ArtifactCache, ArtifactError, ArtifactSource};
use crate::workers::{Instance, Output, Payload, ProcessError, WorkerError, Workers};

mod cache;
mod pool;
mod samples;

use cache::StageCache;
use pool::Pool;
pub use samples::SampleStore;

/// Bytes of stage outputs kept; the least recently used go first. Outputs are mostly JPEG or smaller, so this is many stages.
const CACHE_BYTES_MAX: u64 = 128 * 1024 * 1024;

/// A stage that had this part of its time for its work and was not done is too slow; with less it may only have begun too late.
const WORK_PART_MIN: f64 = 0.75;

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

/// Runs stages.
#[derive(Debug)]
pub struct Trials {
    node: NodeId,
    capacity: Resources,
    workers: Arc<Workers>,
    artifacts: Arc<ArtifactCache>,
    samples: Arc<SampleStore>,
    cache: Mutex<StageCache>,
    pool: Arc<Pool>,
    running: Mutex<BTreeMap<TrialId, Running>>,
}

/// A stage being run.
#[derive(Debug)]
struct Running {
    share: Resources,
    /// Dropped or sent to: the stage ends.
    cancel: Option<oneshot::Sender<()>>,
}

/// What a stage works on: the frames with one payload per input; `None` where one of them was skipped.
struct Gathered {
    frames: BTreeMap<FrameId, Option<Vec<Payload>>>,
    transfer: Option<(f64, u64)>,
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
            cache: Mutex::new(StageCache::new(CACHE_BYTES_MAX)),
            pool: Arc::default(),
            running: Mutex::default(),
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
        let (_admitted, cancelled) = self.admit(&stage)?;
        // What is cut off here drops its worker, which kills it.
        tokio::select! {
            biased;
            _ = cancelled => Err(StageFailure::Cancelled),
            done = self.run_admitted(&stage, peers, artifacts) => done,
        }
    }

    /// Takes the stage's share out of what is spare, until the returned value is dropped.
    fn admit(
        &self,
        stage: &RunStage,
    ) -> Result<(Admitted<'_>, oneshot::Receiver<()>), StageFailure> {
        let live = self.workers.granted_live();
        let mut running = lock(&self.running);
        let share = stage.instance.share;
        let wanted = running
            .values()
            .fold(live.plus(&share), |sum, other| sum.plus(&other.share));
        if !self.capacity.fits(&wanted) || running.contains_key(&stage.trial) {
            return Err(StageFailure::Busy);
        }
        // Idle workers kept warm must not stand in the way of work.
        let memory_left = self.capacity.memory_mib - wanted.memory_mib;
        self.pool
            .shrink_to(memory_left.saturating_add(share.memory_mib));
        let (cancel, cancelled) = oneshot::channel();
        let cancel = Some(cancel);
        running.insert(stage.trial, Running { share, cancel });
        let admitted = Admitted {
            trials: self,
            trial: stage.trial,
        };
        Ok((admitted, cancelled))
    }

    async fn run_admitted(
        &self,
        stage: &RunStage,
        peers: &dyn StageFetch,
        artifacts: &dyn ArtifactSource,
    ) -> Result<StageDone, StageFailure> {
        // Only work that had its time and is not done has failed for good; what kept it from its time may be over the next time.
        let time = Time::of(stage);
        let late = |_| {
            let why = format!("they did not come within {} s", time.whole.as_secs_f64());
            StageFailure::InputsUnavailable(why)
        };
        let gathered = self.gather(stage, peers);
        let gathered = time.within(gathered).await.map_err(late)??;
        let artifact = match &stage.instance.artifact {
            None => None,
            Some(wanted) => {
                let ensured = self
                    .artifacts
                    .ensure(wanted.digest, wanted.bytes, artifacts);
                let ensured = time.within(ensured).await.map_err(|_| {
                    let (name, limit) = (&wanted.name, time.whole.as_secs_f64());
                    let why = format!("model {name} was not fetched within {limit} s");
                    StageFailure::Unavailable(why)
                })?;
                Some(ensured.map_err(|error| artifact_failure(&error))?)
            }
        };
        let prepared = self.prepared(stage, artifact.as_deref(), &gathered, &time);
        let (worker, cold_start_ms, left) = prepared.await?;
        let run = StageRun {
            stage,
            worker: &worker,
            frames: &gathered.frames,
        };
        let measured = time.within(run.measure()).await;
        let (samples, outputs) = measured.map_err(|_| time.is_up(left))??;
        self.pool.give_back(worker);
        let (cpu_ms, wall_ms) = samples.iter().fold((0.0, 0.0), |(cpu, wall), sample| {
            (cpu + sample.cpu_ms, wall + sample.wall_ms)
        });
        let speed = self.workers.emulated_speed().unwrap_or(1.0);
        lock(&self.cache).insert(&stage.query, stage.set, stage.prefix, outputs);
        Ok(StageDone {
            trial: stage.trial,
            samples,
            cold_start_ms,
            transfer: gathered.transfer,
            achieved_cores: if wall_ms > 0.0 {
                cpu_ms / speed / wall_ms
            } else {
                0.0
            },
        })
    }

    /// A worker that has its model and is warm, how long that took in ms, and what was left then of the stage's time.
    async fn prepared(
        &self,
        stage: &RunStage,
        artifact: Option<&std::path::Path>,
        gathered: &Gathered,
        time: &Time,
    ) -> Result<(Arc<Instance>, f64, Duration), StageFailure> {
        if let Some(warm) = self.pool.take(&stage.instance) {
            return Ok((warm, 0.0, time.left()));
        }
        let begun = Instant::now();
        let started = Pool::start(&self.workers, &stage.instance, artifact);
        let started = time.within(started).await.map_err(|_| {
            let limit = time.whole.as_secs_f64();
            StageFailure::Unavailable(format!("its worker was not ready within {limit} s"))
        })?;
        let worker = started.map_err(|error| start_failure(error, artifact.is_some()))?;
        let cold_start_ms = ms(begun.elapsed());
        let left = time.left();
        let run = StageRun {
            stage,
            worker: &worker,
            frames: &gathered.frames,
        };
        let warm = time.within(run.warm_up()).await;
        warm.map_err(|_| time.is_up(left))??;
        Ok((worker, cold_start_ms, left))
    }

    /// Brings together the inputs of all frames, from here or from their holders.
    async fn gather(
        &self,
        stage: &RunStage,
        peers: &dyn StageFetch,
    ) -> Result<Gathered, StageFailure> {
        let frames: Vec<FrameId> = stage.segments.iter().flatten().copied().collect();
        let mut all: BTreeMap<FrameId, Option<Vec<Payload>>> = frames
            .iter()
            .map(|frame| (*frame, Some(Vec::new())))
            .collect();
        let (mut fetched_bytes, mut fetch_ms, mut fetched) = (0, 0.0, false);
        for input in &stage.inputs {
            let outputs = match self.local(stage, input, &frames) {
                Some(outputs) => outputs,
                None => {
                    let begun = Instant::now();
                    let outputs = self.fetch(stage, input, &frames, peers).await?;
                    fetch_ms += ms(begun.elapsed());
                    fetched_bytes += total_bytes(&outputs);
                    fetched = true;
                    outputs
                }
            };
            for (frame, output) in outputs {
                if let Some(slot) = all.get_mut(&frame) {
                    *slot = slot.take().zip(output).map(|(mut inputs, one)| {
                        inputs.push(one);
                        inputs
                    });
                }
            }
        }
        Ok(Gathered {
            frames: all,
            transfer: fetched.then_some((fetch_ms, fetched_bytes)),
        })
    }

    fn local(
        &self,
        stage: &RunStage,
        input: &StageInput,
        frames: &[FrameId],
    ) -> Option<StageOutputs> {
        self.lookup(&stage.query, stage.set, input.prefix, frames)
            .ok()
    }

    async fn fetch(
        &self,
        stage: &RunStage,
        input: &StageInput,
        frames: &[FrameId],
        peers: &dyn StageFetch,
    ) -> Result<StageOutputs, StageFailure> {
        let unavailable = StageFailure::InputsUnavailable;
        if input.holder == self.node {
            let set = stage.set;
            return Err(unavailable(format!(
                "sample set {set} is no longer held here"
            )));
        }
        let outputs = peers
            .fetch(&input.holder, &stage.query, stage.set, input.prefix, frames)
            .await
            .map_err(unavailable)?;
        if !outputs.iter().map(|(frame, _)| frame).eq(frames) {
            let holder = &input.holder;
            return Err(unavailable(format!(
                "{holder} gave other frames than asked for"
            )));
        }
        // The next configuration of this operator wants the same inputs.
        lock(&self.cache).insert(&stage.query, stage.set, input.prefix, outputs.clone());
        Ok(outputs)
    }

    fn lookup(
        &self,
        query: &QueryId,
        set: SampleSetId,
        prefix: Digest,
        frames: &[FrameId],
    ) -> Result<StageOutputs, String> {
        if prefix == Digest::of(&[])
            && let Some(captured) = self.samples.captured(query, set, frames)
        {
            return Ok(captured);
        }
        lock(&self.cache)
            .get(query, set, prefix, frames)
            .ok_or_else(|| format!("{} of sample set {set} is not held here", prefix.short()))
    }

    /// Ends a stage; its `run` returns [`StageFailure::Cancelled`].
    pub fn cancel(&self, trial: TrialId) {
        if let Some(running) = lock(&self.running).get_mut(&trial) {
            running.cancel = None;
        }
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
        self.lookup(query, set, prefix, frames)
    }

    /// Forgets a sample set and all that was computed from it.
    pub fn drop_set(&self, set: SampleSetId) {
        self.samples.drop_set(set);
        lock(&self.cache).drop_set(set);
    }
}

/// The share of a running stage.
struct Admitted<'a> {
    trials: &'a Trials,
    trial: TrialId,
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        lock(&self.trials.running).remove(&self.trial);
    }
}

/// The time a stage has.
#[derive(Debug, Clone, Copy)]
struct Time {
    whole: Duration,
    until: tokio::time::Instant,
}

impl Time {
    fn of(stage: &RunStage) -> Self {
        Self {
            whole: stage.deadline,
            until: tokio::time::Instant::now() + stage.deadline,
        }
    }

    async fn within<T>(&self, work: impl Future<Output = T>) -> Result<T, Elapsed> {
        tokio::time::timeout_at(self.until, work).await
    }

    fn left(&self) -> Duration {
        self.until
            .saturating_duration_since(tokio::time::Instant::now())
    }

    /// Why work was cut off for which so much of the time was left when inputs and model were there.
    fn is_up(&self, left: Duration) -> StageFailure {
        if left >= self.whole.mul_f64(WORK_PART_MIN) {
            return StageFailure::Deadline;
        }
        StageFailure::Unavailable(format!(
            "inputs and model came late: {:.1} of {} s were left for the work",
            left.as_secs_f64(),
            self.whole.as_secs_f64()
        ))
    }
}

/// Whether a model may be had later.
fn artifact_failure(error: &ArtifactError) -> StageFailure {
    match error {
        ArtifactError::Fetch { .. } | ArtifactError::Disk(_) => {
            StageFailure::Unavailable(error.to_string())
        }
        ArtifactError::Corrupt { .. } | ArtifactError::TooLarge { .. } => {
            StageFailure::Artifact(error.to_string())
        }
    }
}

fn start_failure(error: WorkerError, has_artifact: bool) -> StageFailure {
    match error {
        WorkerError::Refused(reason) if has_artifact => StageFailure::Artifact(reason),
        WorkerError::TooSlow(_) => StageFailure::Unavailable(error.to_string()),
        other => StageFailure::Crashed(other.to_string()),
    }
}

/// One stage on its worker, inputs at hand.
struct StageRun<'a> {
    stage: &'a RunStage,
    worker: &'a Instance,
    frames: &'a BTreeMap<FrameId, Option<Vec<Payload>>>,
}

impl StageRun<'_> {
    /// Runs the first frame once without measuring: caches fill, memory is taken.
    async fn warm_up(&self) -> Result<(), StageFailure> {
        let first = self.stage.segments.iter().flatten().find_map(|frame| {
            let inputs = self.frames.get(frame)?.clone()?;
            Some((*frame, inputs))
        });
        if let Some((frame, inputs)) = first {
            // That it cannot be read is found again, and told, when it is measured.
            let _unread = self.process(frame, inputs).await?;
        }
        Ok(())
    }

    /// Runs all frames and gives their measures and outputs.
    ///
    /// A frame that an earlier operator left out has no measure: it never reaches this one. Neither has a frame that the operator cannot
    /// read (a camera's broken picture), as it would have no result live; only when no frame can be read the stage has failed.
    async fn measure(&self) -> Result<(Vec<SampleMeasure>, StageOutputs), StageFailure> {
        let (mut samples, mut outputs) = (Vec::new(), Vec::new());
        let (mut refused, mut last): (Option<String>, Option<FrameId>) = (None, None);
        for segment in &self.stage.segments {
            for frame in segment {
                if segment.first() == Some(frame) && last.map(FrameId::next) != Some(*frame) {
                    self.reset().await?;
                }
                last = Some(*frame);
                let Some(inputs) = self.frames.get(frame).cloned().flatten() else {
                    outputs.push((*frame, None));
                    continue;
                };
                let bytes_in = inputs.iter().map(|input| input.bytes.len() as u64).sum();
                match self.process(*frame, inputs).await? {
                    Ok((mut sample, output)) => {
                        sample.bytes_in = bytes_in;
                        samples.push(sample);
                        outputs.push((*frame, output));
                    }
                    Err(reason) => {
                        outputs.push((*frame, None));
                        refused = Some(reason);
                    }
                }
            }
        }
        match refused {
            Some(reason) if samples.is_empty() => Err(StageFailure::Crashed(reason)),
            _ => Ok((samples, outputs)),
        }
    }

    async fn reset(&self) -> Result<(), StageFailure> {
        if self.stage.instance.state == StateKind::None {
            return Ok(());
        }
        match self.worker.reset(&self.stage.query).await {
            Ok(()) => Ok(()),
            Err(error) => Err(StageFailure::Crashed(error.to_string())),
        }
    }

    /// One frame; the inner error is the operator's refusal of this frame.
    async fn process(
        &self,
        frame: FrameId,
        inputs: Vec<Payload>,
    ) -> Result<Result<(SampleMeasure, Option<Payload>), String>, StageFailure> {
        // The stage's own deadline ends all of it from outside.
        let limit = Duration::from_secs(3600);
        let done = self
            .worker
            .process(&self.stage.query, frame, inputs, limit)
            .await;
        let done = match done {
            Ok(done) => done,
            Err(ProcessError::BadInput(reason)) => {
                return Ok(Err(format!("frame {frame}: {reason}")));
            }
            Err(ProcessError::Expired) => return Err(StageFailure::Deadline),
            Err(error) => return Err(StageFailure::Crashed(error.to_string())),
        };
        let mut sample = SampleMeasure {
            frame,
            wall_ms: ms(done.wall),
            cpu_ms: ms(done.cpu),
            bytes_in: 0,
            bytes_out: 0,
            skipped: true,
            output: None,
        };
        let output = match done.output {
            Output::Skipped => None,
            Output::Payload(payload) => {
                sample.skipped = false;
                sample.bytes_out = payload.bytes.len() as u64;
                sample.output = self.stage.return_outputs.then(|| payload.bytes.to_vec());
                Some(payload)
            }
        };
        Ok(Ok((sample, output)))
    }
}

fn total_bytes(outputs: &StageOutputs) -> u64 {
    let sizes = outputs.iter().flat_map(|(_, output)| output);
    sizes.map(|payload| payload.bytes.len() as u64).sum()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these mutexes guard is whole after every statement, so a panic elsewhere does not spoil it.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
