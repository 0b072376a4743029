//! Protocol version 1.
//!
//! | who | stream | messages |
//! |---|---|---|
//! | agent → coordinator | the control stream (first bidirectional one, after the hello) | [`AgentToCoordinator`] |
//! | coordinator → agent | the same | [`CoordinatorToAgent`] |
//! | agent → coordinator | a unidirectional stream each, low priority | [`AgentReport`] |
//! | agent → coordinator | a bidirectional stream each | [`AgentRequest`], then [`AgentResponse`], then raw bytes for an artifact |
//! | app ↔ coordinator | the control stream | [`AppToCoordinator`], [`CoordinatorToApp`] |
//! | node → node, app → node, node → app | a unidirectional stream per frame | [`FrameHeader`], then `payload_bytes` raw bytes |
//! | data connection, both ways | the control stream | [`HopControl`] |
//! | node → node | a bidirectional stream each | [`PeerRequest`], then [`PeerResponse`], then raw bytes |

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::{
    Commit, Digest, FrameId, Generation, InstanceId, NodeId, OperatorId, QueryId, SampleSetId,
    TrialId,
};
use crate::model::cluster::NodeDescription;
use crate::model::outcome::{AppReport, Outcome};
use crate::model::plan::{NodeTarget, Peer};
use crate::model::telemetry::NodeTelemetry;
use crate::model::trial::{CaptureSamples, RunStage, SamplesCaptured, StageDone, StageFailure};
use crate::model::trigger::{Measurement, Trigger};

// ---- agent and coordinator ----

/// What an agent says when it connects, before anything else.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Registration {
    /// What it is.
    pub description: NodeDescription,
    /// Grows with each start of the agent on this data folder: tells a restart from a clone.
    pub boot: u64,
    /// Newest commit it has applied, if any.
    pub applied: Option<Commit>,
    /// Instances that run now.
    pub instances: Vec<InstanceStatus>,
    /// Artifacts it holds.
    pub artifacts: Vec<Digest>,
}

/// The state of one instance on a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceStatus {
    /// The instance.
    pub instance: InstanceId,
    /// How it is.
    pub state: InstanceState,
    /// Process id of its worker, for people.
    pub pid: Option<u32>,
    /// How often it was restarted after a crash.
    pub restarts: u32,
}

/// How an instance is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum InstanceState {
    /// Its artifact is being fetched or its worker is loading.
    Starting,
    /// It is warm and takes frames.
    Ready,
    /// It takes no new frames and finishes those it has.
    Draining,
    /// It keeps failing; why.
    Failed(String),
}

/// A neighbour link as an agent sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinkReport {
    /// The neighbour.
    pub peer: NodeId,
    /// Smoothed round-trip time in ms; `None` before the first answer.
    pub rtt_ms: Option<f64>,
    /// Delivered rate in bit/s over the window.
    pub delivered_bps: u64,
    /// Whether the rate was measured within the window and is what the link could carry: only then is it a capacity, else a lower bound.
    pub network_limited: bool,
    /// Whether the agent counts the link as degraded, as its last event said; it tests by itself whether the link has recovered.
    pub degraded: bool,
    /// Fraction of packets lost, 0 to 1.
    pub loss: f64,
    /// UDP bytes sent to and received from this neighbour since the session began.
    pub sent_bytes: u64,
    /// See `sent_bytes`.
    pub received_bytes: u64,
}

/// What an agent measured of one instance over the window.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InstanceReport {
    /// The instance.
    pub instance: InstanceId,
    /// Frames finished within the window.
    pub frames: u32,
    /// Median and 95th percentile of time in the operator, queue excluded, in ms.
    pub service_ms: Option<(f64, f64)>,
    /// Age of the oldest waiting frame in ms.
    pub queue_age_ms: f64,
    /// CPU cores used on average.
    pub busy_cores: f64,
    /// Cores granted.
    pub granted_cores: f64,
    /// Resident memory of the worker in MiB.
    pub memory_mib: Option<u32>,
}

/// Content descriptors of a query's recent frames, computed on its entry node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ContentReport {
    /// The query.
    pub query: QueryId,
    /// Frames described.
    pub frames: u32,
    /// Mean and standard deviation of luma, 0 to 255.
    pub luma_mean: f64,
    /// See `luma_mean`.
    pub luma_spread: f64,
    /// Mean distance from grey, 0 to 255.
    pub chroma: f64,
    /// Mean absolute difference between neighbouring frames, 0 to 255.
    pub motion: f64,
    /// Frames that arrived from the app per second.
    pub arrival_hz: f64,
}

/// The periodic report (1 Hz); only the newest counts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AgentReport {
    /// Grows by one with each report of this session.
    pub sequence: u64,
    /// Host and device readings.
    pub telemetry: NodeTelemetry,
    /// Links to neighbours.
    pub links: Vec<LinkReport>,
    /// Live instances.
    pub instances: Vec<InstanceReport>,
    /// Queries that enter here.
    pub content: Vec<ContentReport>,
    /// Newest commit applied.
    pub applied: Option<Commit>,
    /// UDP payload bytes that the node's socket has sent and received since it started, whoever they were for.
    pub sent_bytes: u64,
    /// See `sent_bytes`.
    pub received_bytes: u64,
}

/// A breach seen by an agent's 100 ms evaluation; sent at once, ahead of everything.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum AgentEvent {
    /// The rate to a neighbour fell while the sender was network-limited; Mbit/s against the planned rate.
    LinkDegraded {
        /// The neighbour.
        peer: NodeId,
        /// Rate seen, rate before.
        measurement: Measurement,
    },
    /// The rate to a neighbour is back (found by probe trains).
    LinkRecovered {
        /// The neighbour.
        peer: NodeId,
        /// Rate seen, rate before.
        measurement: Measurement,
    },
    /// A neighbour does not answer two pings of 300 ms.
    PeerUnreachable {
        /// The neighbour.
        peer: NodeId,
    },
    /// The oldest frame of an operator waits too long; ms against the bound.
    QueueAged {
        /// The instance.
        instance: InstanceId,
        /// Age seen, bound.
        measurement: Measurement,
    },
    /// Content changed mode and settled on an entry node.
    ContentDrifted {
        /// The query.
        query: QueryId,
        /// Which descriptor moved most.
        descriptor: String,
        /// Level now, level before.
        measurement: Measurement,
    },
    /// A worker died and is being restarted.
    WorkerCrashed {
        /// The instance.
        instance: InstanceId,
        /// Its last words.
        reason: String,
    },
}

/// On the control stream, agent to coordinator.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum AgentToCoordinator {
    /// First message.
    Register(Registration),
    /// Answer to a ping.
    Pong(u64),
    /// A breach.
    Event(AgentEvent),
    /// How far a target is carried out; repeated whenever an instance changes state.
    Applied {
        /// The target.
        commit: Commit,
        /// Every instance of it.
        instances: Vec<InstanceStatus>,
        /// In-flight frames per generation of queries that enter here, so that an old generation is known to have drained.
        in_flight: Vec<(QueryId, Generation, u32)>,
    },
    /// A target was refused whole; why.
    TargetRefused {
        /// The target.
        commit: Commit,
        /// Why.
        reason: String,
    },
    /// Answer to [`CoordinatorToAgent::Capture`].
    Captured(SamplesCaptured),
    /// Answer to [`CoordinatorToAgent::RunStage`].
    StageDone(StageDone),
    /// Answer to [`CoordinatorToAgent::RunStage`].
    StageFailed {
        /// The request.
        trial: TrialId,
        /// Why.
        failure: StageFailure,
    },
}

/// On the control stream, coordinator to agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum CoordinatorToAgent {
    /// Answer to a registration.
    Welcome {
        /// The coordinator's term.
        term: u64,
        /// Send reports this often.
        report_every: Duration,
    },
    /// The registration is refused; the session ends.
    Refused {
        /// Why and what to do.
        reason: String,
    },
    /// Answer with a pong.
    Ping(u64),
    /// What the node has to do now.
    Target(NodeTarget),
    /// Neighbours to measure links to and to accept trial inputs from, beyond those of the target.
    Peers(Vec<Peer>),
    /// Freeze samples.
    Capture(CaptureSamples),
    /// Forget a sample set and everything computed from it.
    DropSamples(SampleSetId),
    /// Run a stage.
    RunStage(Box<RunStage>),
    /// Stop a stage.
    CancelStage(TrialId),
}

/// On a bidirectional stream of its own, agent to coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum AgentRequest {
    /// The bytes of an artifact from an offset on.
    Artifact {
        /// Which.
        digest: Digest,
        /// First byte wanted.
        offset: u64,
    },
}

/// Answer on the same stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum AgentResponse {
    /// The artifact's total size; its bytes from the offset on follow raw.
    Artifact {
        /// Total size in bytes.
        total_bytes: u64,
    },
    /// It cannot be done.
    Refused {
        /// Why.
        reason: String,
    },
}

// ---- app and coordinator ----

/// On the control stream, app to coordinator.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum AppToCoordinator {
    /// First message of an app: registers a query, or takes up the same query again.
    Register {
        /// A bearer token of role app (or higher).
        token: String,
        /// The query as people write it (YAML); errors point at its lines.
        query_yaml: String,
        /// Signing request for the app's key (DER).
        request_der: Vec<u8>,
    },
    /// First message of an app that already holds its certificate.
    Attach,
    /// The query ends.
    Withdraw,
    /// What the app measured.
    Report(AppReport),
    /// Answer to [`CoordinatorToApp::LabelsWanted`]: truth for those frames the app has it for, in the evaluator's encoding.
    Labels {
        /// The sample set.
        set: SampleSetId,
        /// Frame and label.
        labels: Vec<(FrameId, Vec<u8>)>,
    },
    /// Answer to a ping.
    Pong(u64),
}

/// Where an app sends frames and hears results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AppRoute {
    /// The plan's generation.
    pub generation: Generation,
    /// Where frames enter.
    pub entry: Peer,
    /// Where results come from: the app opens a data connection to it too.
    pub sink: Peer,
}

/// On the control stream, coordinator to app.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum CoordinatorToApp {
    /// The query is stored (durably) and its entry node is known; frames may be sent for profiling although there is no plan yet.
    Registered {
        /// The query's name.
        query: QueryId,
        /// The app's certificate chain, leaf first (DER); empty on attach.
        chain_der: Vec<Vec<u8>>,
        /// The authority's certificate (DER), to verify agents with.
        authority_der: Vec<u8>,
        /// Where frames enter.
        entry: Peer,
        /// A result later than this is late; `None` without a latency SLO.
        latency_bound: Option<Duration>,
        /// After this long a frame is worthless.
        frame_deadline: Duration,
    },
    /// Registration, attachment or the whole query failed.
    Rejected {
        /// Why, where and what to do.
        reason: String,
    },
    /// A new plan is in force.
    PlanChanged {
        /// Where to send and listen.
        route: AppRoute,
        /// Why.
        trigger: Trigger,
        /// One line.
        summary: String,
    },
    /// There is no plan that meets the SLOs; the nearest and the cheapest fix, in words.
    Infeasible {
        /// In words.
        report: String,
    },
    /// Truth for these frames is welcome.
    LabelsWanted {
        /// The sample set.
        set: SampleSetId,
        /// The frames.
        frames: Vec<FrameId>,
    },
    /// Answer with a pong.
    Ping(u64),
    /// The query was withdrawn.
    Withdrawn,
}

// ---- data plane ----

/// Leads a frame on its way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FrameHeader {
    /// The query.
    pub query: QueryId,
    /// The plan that carries it; the entry node sets it, 0 before.
    pub generation: Generation,
    /// The frame. An app never uses a number again for its query, not in a later life either: receivers know duplicates by it.
    pub frame: FrameId,
    /// The operator that made the payload; `None` for the app's own input.
    pub from: Option<OperatorId>,
    /// The operator that is to read it; `None` when it is the result.
    pub to: Option<OperatorId>,
    /// Age in microseconds when it was sent on: the sum of times on each node by that node's own clock, plus estimated link times.
    pub age_us: u64,
    /// How the payload is to be read (open vocabulary): `rgb8 640x480`, `jpeg`, `detections`, `tracks`, `bytes`.
    pub content: String,
    /// Attempt number; grows when a sender re-sends it after a failure.
    pub attempt: u16,
    /// Size of the payload that follows.
    pub payload_bytes: u32,
}

/// On the control stream of a data connection, either way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum HopControl {
    /// This many more frames of the query may be sent.
    Credit {
        /// The query.
        query: QueryId,
        /// How many.
        frames: u32,
    },
    /// The frame arrived (credit accounting and rate measurement); the sender still owns it.
    Received {
        /// The query.
        query: QueryId,
        /// The frame.
        frame: FrameId,
        /// The reader it was for; `None` for a result.
        to: Option<OperatorId>,
    },
    /// The frame has ended downstream; the sender may forget it.
    Ended {
        /// The query.
        query: QueryId,
        /// The frame.
        frame: FrameId,
        /// The reader it was for; `None` for a result.
        to: Option<OperatorId>,
        /// How.
        outcome: Outcome,
    },
    /// Liveness and RTT probe.
    Ping(u64),
    /// Its answer.
    Pong(u64),
    /// Filler for bandwidth probe trains; its length is what counts.
    Probe {
        /// Number within the train.
        sequence: u32,
        /// Padding.
        padding: Vec<u8>,
    },
    /// Bytes and time over which a probe train arrived, in microseconds.
    ProbeReport {
        /// Bytes.
        bytes: u64,
        /// Microseconds between first and last.
        micros: u64,
    },
    /// App to entry: this query's frames are requests, not a live source. One for which there is no room is refused, and none that was let
    /// in is given up for it.
    Requests {
        /// The query.
        query: QueryId,
    },
    /// Entry to app, before the end of a request that was refused: there may be room after this long.
    RetryAfter {
        /// The query.
        query: QueryId,
        /// The request.
        frame: FrameId,
        /// In ms.
        ms: u32,
    },
}

/// On a bidirectional stream of its own, node to node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum PeerRequest {
    /// Cached outputs of a trial stage (or captured frames).
    FetchStage {
        /// The query.
        query: QueryId,
        /// The sample set.
        set: SampleSetId,
        /// Digest of the work.
        prefix: Digest,
        /// Which frames.
        frames: Vec<FrameId>,
    },
    /// The state of an operator that moves to the asking node.
    TakeState {
        /// The query.
        query: QueryId,
        /// The operator.
        operator: OperatorId,
        /// The generation that is being left.
        generation: Generation,
    },
}

/// Answer on the same stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum PeerResponse {
    /// Per frame: content type and size (`None` when that frame was skipped); payloads follow raw in the same order.
    Stage {
        /// In the order asked.
        frames: Vec<(FrameId, Option<(String, u32)>)>,
    },
    /// The state's size; its bytes follow raw.
    State {
        /// In bytes.
        bytes: u32,
    },
    /// It cannot be done.
    Refused {
        /// Why.
        reason: String,
    },
}
