//! What the coordinator's HTTP API says and hears, typed once for the server, the command line and the testbed.
//!
//! | path | method | body → answer |
//! |---|---|---|
//! | `/healthz` | GET | → [`Health`], no token needed |
//! | `/v1/nodes`, `/v1/nodes/{id}` | GET | → `Vec<`[`NodeView`]`>`, [`NodeView`] |
//! | `/v1/nodes/{id}/scheduling` | PUT | [`SetScheduling`] → [`NodeView`] |
//! | `/v1/links` | GET | → `Vec<`[`LinkView`]`>` |
//! | `/v1/queries` | GET, POST | → `Vec<`[`QueryView`]`>`; YAML → [`QueryView`] |
//! | `/v1/queries/plan` | POST | YAML → [`DryRun`], changes nothing |
//! | `/v1/queries/{id}` | GET, DELETE | → [`QueryView`] |
//! | `/v1/queries/{id}/plans` | GET | → `Vec<`[`PlanView`]`>`, oldest first |
//! | `/v1/queries/{id}/plans/{generation}/explain` | GET | → [`Explanation`] |
//! | `/v1/events?after=N` | GET | → `Vec<`[`EventView`]`>` |
//! | `/v1/trials?query=ID` | GET | → [`Trials`] |
//! | `/v1/tokens`, `/v1/tokens/{id}` | GET, POST; DELETE | → `Vec<`[`TokenView`]`>`; [`CreateToken`] → [`TokenCreated`] |
//! | `/v1/artifacts`, `/v1/artifacts/{name}` | GET; PUT (raw bytes) | → `Vec<`[`ArtifactView`]`>`; → [`ArtifactView`] |
//! | `/v1/catalogue`, `/v1/pipelines` | GET | → the model's types |
//!
//! Every error is an [`ErrorBody`]. Times are milliseconds since the Unix epoch by the coordinator's clock.

use serde::{Deserialize, Serialize};

use crate::ids::{
    ArtifactName, Commit, Digest, Generation, NodeId, OperatorId, PipelineName, QueryId,
};
use crate::model::cluster::{Resources, Scheduling, Tier};
use crate::model::outcome::OutcomeCounts;
use crate::model::pipeline::Configuration;
use crate::model::plan::{Expectation, QueryPlan};
use crate::model::query::Slo;
use crate::model::telemetry::NodeTelemetry;
use crate::wire::v1::InstanceReport;

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// What happened and why.
    pub error: String,
    /// To which object, e.g. `query lobby-agent`.
    pub object: Option<String>,
    /// The way out.
    pub hint: Option<String>,
}

/// Whether the coordinator works.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// False when a core actor is gone for good.
    pub ok: bool,
    /// Its term.
    pub term: u64,
    /// Fingerprint of the fleet's authority: apps and newcomers check it.
    pub authority: Digest,
    /// Actors that are not well, in words.
    pub troubles: Vec<String>,
}

/// A node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeView {
    /// Its id.
    pub id: NodeId,
    /// Its tier.
    pub tier: Tier,
    /// Its site.
    pub site: String,
    /// `emulated ×0.15` or its device class.
    pub device: String,
    /// Whether a session with it is alive.
    pub online: bool,
    /// Whether it takes work.
    pub scheduling: Scheduling,
    /// What may be granted.
    pub capacity: Resources,
    /// What the current assignment grants.
    pub granted: Resources,
    /// Where its session comes from.
    pub address: Option<String>,
    /// When that session began.
    pub since_unix_ms: Option<u64>,
    /// Newest commit it has applied.
    pub applied: Option<Commit>,
    /// Its newest readings.
    pub telemetry: Option<NodeTelemetry>,
    /// Its live instances.
    pub instances: Vec<InstanceReport>,
    /// UDP payload bytes it says its socket has sent and received since it started, whoever they were for.
    pub sent_bytes: u64,
    /// See `sent_bytes`.
    pub received_bytes: u64,
}

/// Opens, cordons or drains a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetScheduling {
    /// What it shall be.
    pub scheduling: Scheduling,
    /// Kept in the audit log.
    pub reason: Option<String>,
}

/// A path between two nodes in one direction, as the planner sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinkView {
    /// Sender.
    pub from: NodeId,
    /// Receiver.
    pub to: NodeId,
    /// In Mbit/s.
    pub bandwidth_mbit_s: f64,
    /// Whether that is only a lower bound.
    pub lower_bound: bool,
    /// In ms.
    pub rtt_ms: f64,
    /// 0 to 1.
    pub loss: f64,
}

/// Where a query stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum QueryState {
    /// No plan yet; profiling.
    Searching,
    /// A plan is in force.
    Running,
    /// No plan meets the SLOs; the report says what is nearest.
    Infeasible,
    /// Its plan cannot run now (say, its entry node is gone).
    Waiting,
}

/// One SLO, live.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SloStatus {
    /// `p95 latency`, `accuracy`, `cost`
    pub name: String,
    /// `<= 300 ms`
    pub target: String,
    /// The bound as a number: ms, 0 to 1, USD/h.
    pub bound: f64,
    /// Over the last windows; `None` before anything was measured.
    pub value: Option<f64>,
    /// Whether it is met; `None` before anything was measured.
    pub met: Option<bool>,
    /// Where the value comes from: `app`, `plan`.
    pub source: String,
}

/// A query.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QueryView {
    /// Its id.
    pub id: QueryId,
    /// Its pipeline.
    pub pipeline: PipelineName,
    /// Where frames enter.
    pub entry: NodeId,
    /// Where it stands.
    pub state: QueryState,
    /// What it must meet.
    pub slo: Slo,
    /// The same, live.
    pub slo_status: Vec<SloStatus>,
    /// Whether its app is connected.
    pub app_online: bool,
    /// Frames as its app counts them, since the first plan.
    pub counts: OutcomeCounts,
    /// The plan in force.
    pub plan: Option<PlanView>,
    /// Why there is none, or what the search says.
    pub report: Option<String>,
    /// When it was registered.
    pub registered_unix_ms: u64,
}

/// A plan with its history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanView {
    /// The plan.
    pub plan: QueryPlan,
    /// When its trigger was raised.
    pub detected_unix_ms: u64,
    /// When it was committed.
    pub committed_unix_ms: u64,
    /// When all nodes had applied it; `None` when that has not happened.
    pub applied_unix_ms: Option<u64>,
    /// Whether it is the one in force.
    pub current: bool,
}

/// What a query would get.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DryRun {
    /// The plan; `None` when there is none.
    pub plan: Option<QueryPlan>,
    /// Whether it differs from the plan in force.
    pub changed: bool,
    /// In words: what was found or what is nearest.
    pub report: String,
}

/// Why a plan is as it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// The query.
    pub query: QueryId,
    /// The plan.
    pub generation: Generation,
    /// Lines for people: chosen, rejected with flip condition, inputs.
    pub lines: Vec<String>,
    /// Candidates considered, best first.
    pub candidates: Vec<CandidateView>,
}

/// A candidate plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CandidateView {
    /// One line.
    pub summary: String,
    /// What it should achieve.
    pub expected: Expectation,
    /// Whether it meets the SLOs.
    pub feasible: bool,
    /// Why it was not chosen.
    pub rejected: Option<String>,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventView {
    /// Grows by one.
    pub sequence: u64,
    /// When.
    pub unix_ms: u64,
    /// `trigger`, `plan`, `node`, `query`, `token`, `alarm`
    pub kind: String,
    /// E.g. `query lobby-agent`.
    pub object: String,
    /// In words.
    pub message: String,
}

/// Stage runs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Trials {
    /// In order.
    pub trials: Vec<TrialView>,
    /// Stage runs that the prefix cache made unnecessary.
    pub cache_hits: u64,
}

/// One stage run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrialView {
    /// When it ended.
    pub unix_ms: u64,
    /// For which query.
    pub query: QueryId,
    /// Where.
    pub node: NodeId,
    /// What.
    pub operator: OperatorId,
    /// How configured.
    pub configuration: Configuration,
    /// Frames measured.
    pub samples: u32,
    /// Summed over the frames, in ms.
    pub wall_ms: f64,
    /// Summed over the frames, in ms.
    pub cpu_ms: f64,
    /// Starting and loading, in ms.
    pub cold_start_ms: f64,
    /// Why it gave nothing.
    pub failure: Option<String>,
}

/// What a token is for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TokenPurpose {
    /// Lets the named node join.
    Join(NodeId),
    /// Lets a program use the API or register queries.
    Api(Role),
}

/// What a bearer may do; each role includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Look.
    Viewer,
    /// Register and withdraw queries.
    App,
    /// Drain nodes, push artifacts, roll back.
    Operator,
    /// Everything, tokens and the catalogue included.
    Admin,
}

impl Role {
    /// The word people write.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::App => "app",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

/// Asks for a token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateToken {
    /// What for.
    pub purpose: TokenPurpose,
    /// Seconds until it expires.
    pub ttl_s: u64,
    /// How often it may be used; only for joining.
    pub uses: Option<u32>,
}

/// A new token; its text is shown this once.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenCreated {
    /// The secret.
    pub token: String,
    /// The rest.
    pub view: TokenView,
}

impl std::fmt::Debug for TokenCreated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TokenCreated")
            .field("view", &self.view)
            .finish_non_exhaustive()
    }
}

/// A token without its secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenView {
    /// Names it.
    pub id: String,
    /// What for.
    pub purpose: TokenPurpose,
    /// When it expires.
    pub expires_unix_ms: u64,
    /// Uses left; `None` = any number.
    pub uses_left: Option<u32>,
    /// Whether it was revoked.
    pub revoked: bool,
}

/// An artifact the coordinator holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArtifactView {
    /// Its name.
    pub name: ArtifactName,
    /// Its SHA-256.
    pub digest: Digest,
    /// Its size.
    pub bytes: u64,
}
