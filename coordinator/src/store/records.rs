//! The records and their keys. Each is JSON in an envelope with its version, so that it can be read by people and by later builds.
//!
//! A record's version grows when its meaning changes; a field that is added with `#[serde(default)]` needs no new version. Numbers in
//! keys are padded so that keys sort as the numbers do.

use compass_planning::candidate::Front;
use compass_planning::explain::Explanation;
use compass_shared::api::Role;
use compass_shared::ids::{ArtifactName, Digest, Generation, NodeId, QueryId};
use compass_shared::model::cluster::{Link, NodeDescription, Scheduling};
use compass_shared::model::plan::{Assignment, Expectation, QueryPlan};
use compass_shared::model::query::Query;
use compass_shared::model::trigger::Trigger;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Revision, Store, StoreError, Stored};

/// Something kept in the store.
pub trait Record: Serialize + DeserializeOwned {
    /// The newest version this build writes and reads.
    const VERSION: u32 = 1;
    /// Its kind: what its keys begin with.
    const PREFIX: &'static str;
    /// Where it is kept.
    fn key(&self) -> String;
}

#[derive(Serialize)]
struct EnvelopeOut<'a, R> {
    version: u32,
    body: &'a R,
}

#[derive(Deserialize)]
struct EnvelopeHead {
    version: u32,
}

#[derive(Deserialize)]
struct EnvelopeIn<R> {
    body: R,
}

/// A record as it is written.
pub fn encode<R: Record>(record: &R) -> Vec<u8> {
    let envelope = EnvelopeOut {
        version: R::VERSION,
        body: record,
    };
    serde_json::to_vec(&envelope).expect("records have text keys and no custom serializers")
}

/// Reads a record.
///
/// # Errors
/// [`StoreError::TooNew`] or [`StoreError::Damaged`].
pub fn decode<R: Record>(key: &str, stored: &Stored) -> Result<R, StoreError> {
    let damaged = |error: serde_json::Error| StoreError::Damaged {
        key: key.to_owned(),
        reason: error.to_string(),
    };
    let head: EnvelopeHead = serde_json::from_slice(&stored.json).map_err(damaged)?;
    if head.version > R::VERSION {
        return Err(StoreError::TooNew {
            key: key.to_owned(),
            found: head.version,
            known: R::VERSION,
        });
    }
    let envelope: EnvelopeIn<R> = serde_json::from_slice(&stored.json).map_err(damaged)?;
    Ok(envelope.body)
}

/// The record under a key, with its revision.
///
/// # Errors
/// When it cannot be read.
pub fn get<R: Record>(store: &dyn Store, key: &str) -> Result<Option<(R, Revision)>, StoreError> {
    store
        .get(key)?
        .map(|stored| Ok((decode(key, &stored)?, stored.revision)))
        .transpose()
}

/// All records of a kind, in the order of their keys.
///
/// # Errors
/// When one of them cannot be read: a coordinator that would start with half its state must not start.
pub fn scan<R: Record>(store: &dyn Store) -> Result<Vec<R>, StoreError> {
    scan_below(store, R::PREFIX)
}

/// All records of a kind whose keys begin with `prefix`.
///
/// # Errors
/// As [`scan`].
pub fn scan_below<R: Record>(store: &dyn Store, prefix: &str) -> Result<Vec<R>, StoreError> {
    const PAGE: usize = 256;
    let mut records = Vec::new();
    let mut after: Option<String> = None;
    loop {
        let page = store.scan(prefix, after.as_deref(), PAGE)?;
        let is_last = page.len() < PAGE;
        for (key, stored) in &page {
            records.push(decode(key, stored)?);
        }
        match page.into_iter().last() {
            Some((key, _)) if !is_last => after = Some(key),
            _ => return Ok(records),
        }
    }
}

/// How a query stands.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum QueryState {
    /// It is planned and served.
    #[default]
    Active,
    /// Its app or a person ended it.
    Stopped {
        /// Who and why.
        reason: String,
    },
}

/// A registered query.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QueryRecord {
    /// What was asked for, fully resolved.
    pub query: Query,
    /// As it was written.
    pub yaml: String,
    /// How it stands.
    pub state: QueryState,
    /// Wall time, for people.
    pub registered_unix_ms: u64,
    /// Who registered it.
    pub registered_by: String,
    /// The key of its app; none when it was registered over HTTP and no app has come yet.
    pub app_fingerprint: Option<Digest>,
}

impl QueryRecord {
    /// The key of a query's record.
    pub fn key_of(query: &QueryId) -> String {
        format!("{}{query}", Self::PREFIX)
    }
}

impl Record for QueryRecord {
    const PREFIX: &'static str = "query/";
    fn key(&self) -> String {
        Self::key_of(&self.query.id)
    }
}

/// A plan that was decided, and why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanRecord {
    /// The plan.
    pub plan: QueryPlan,
    /// Why it and no other.
    pub explanation: Explanation,
    /// Wall time at which its trigger was raised.
    pub detected_unix_ms: u64,
    /// Wall time at which it was put in force (decided, before it is).
    pub committed_unix_ms: u64,
    /// Wall time at which every node had applied it, once that has happened.
    pub applied_unix_ms: Option<u64>,
}

impl PlanRecord {
    /// A plan just decided.
    pub fn new(mut plan: QueryPlan, mut explanation: Explanation, now_unix_ms: u64) -> Self {
        make_finite(&mut plan.expected);
        make_finite_trigger(&mut plan.trigger);
        make_finite(&mut explanation.expected);
        make_finite_trigger(&mut explanation.trigger);
        for rejected in &mut explanation.rejected {
            make_finite(&mut rejected.expected);
        }
        Self {
            plan,
            explanation,
            detected_unix_ms: now_unix_ms,
            committed_unix_ms: now_unix_ms,
            applied_unix_ms: None,
        }
    }

    /// The newest generation ever decided for a query; 0 when none was.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn newest(store: &dyn Store, query: &QueryId) -> Result<Generation, StoreError> {
        let prefix = Self::prefix_of(query);
        let last = store.scan_back(&prefix, 1)?;
        let number = last
            .first()
            .and_then(|(key, _)| key[prefix.len()..].parse().ok());
        Ok(Generation(number.unwrap_or(0)))
    }

    /// What the keys of a query's plans begin with.
    pub fn prefix_of(query: &QueryId) -> String {
        // A query's name cannot contain a slash, so no other query's plans share this prefix.
        format!("{}{query}/", Self::PREFIX)
    }

    /// The key of one plan.
    pub fn key_of(query: &QueryId, generation: Generation) -> String {
        format!("{}{:020}", Self::prefix_of(query), generation.0)
    }
}

impl Record for PlanRecord {
    const PREFIX: &'static str = "plan/";
    fn key(&self) -> String {
        Self::key_of(&self.plan.query, self.plan.generation)
    }
}

/// JSON has no infinity: it would be written as null and not read back. The largest number says the same.
fn make_finite(expected: &mut Expectation) {
    for estimate in [&mut expected.latency_ms, &mut expected.accuracy] {
        for figure in [&mut estimate.value, &mut estimate.low, &mut estimate.high] {
            *figure = finite(*figure);
        }
    }
    expected.cost_usd_per_h = finite(expected.cost_usd_per_h);
}

fn make_finite_trigger(trigger: &mut Trigger) {
    if let Trigger::LinkDegraded { measurement, .. }
    | Trigger::LinkRecovered { measurement, .. }
    | Trigger::LoadShifted(measurement)
    | Trigger::SloViolated { measurement, .. }
    | Trigger::ContentDrifted { measurement, .. }
    | Trigger::ShareNotAchieved { measurement, .. } = trigger
    {
        measurement.value = finite(measurement.value);
        measurement.bound = finite(measurement.bound);
    }
}

fn finite(figure: f64) -> f64 {
    if figure.is_nan() {
        f64::MAX
    } else {
        figure.clamp(f64::MIN, f64::MAX)
    }
}

/// The plans in force.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct AssignmentRecord {
    /// As the scheduler wrote it.
    pub assignment: Assignment,
}

impl AssignmentRecord {
    /// There is one.
    pub const KEY: &'static str = "assignment/current";

    /// Fit to be stored.
    pub fn new(mut assignment: Assignment) -> Self {
        for plan in assignment.plans.values_mut() {
            make_finite(&mut plan.expected);
            make_finite_trigger(&mut plan.trigger);
        }
        Self { assignment }
    }
}

impl Record for AssignmentRecord {
    const PREFIX: &'static str = "assignment/";
    fn key(&self) -> String {
        Self::KEY.to_owned()
    }
}

/// What the search of a query has learnt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FrontRecord {
    /// The query.
    pub query: QueryId,
    /// Its profile and what to prefer.
    pub front: Front,
}

impl FrontRecord {
    /// The key of a query's front.
    pub fn key_of(query: &QueryId) -> String {
        format!("{}{query}", Self::PREFIX)
    }
}

impl Record for FrontRecord {
    const PREFIX: &'static str = "front/";
    fn key(&self) -> String {
        Self::key_of(&self.query)
    }
}

/// Links between nodes as they were planned with last: what a measurement has found should not be lost with the process, because an idle
/// link says little about what it could carry.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LinksRecord {
    /// Sender, receiver, link.
    pub links: Vec<(NodeId, NodeId, Link)>,
}

impl LinksRecord {
    /// There is one.
    pub const KEY: &'static str = "links/known";
}

impl Record for LinksRecord {
    const PREFIX: &'static str = "links/";
    fn key(&self) -> String {
        Self::KEY.to_owned()
    }
}

/// A node that has joined.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// Its name.
    pub id: NodeId,
    /// Its key: what a certificate or a renewal must prove.
    pub fingerprint: Digest,
    /// Wall time, for people.
    pub joined_unix_ms: u64,
    /// The token it joined with, for the audit.
    pub joined_with: String,
    /// Whether it takes work.
    pub scheduling: Scheduling,
    /// What it last said of itself.
    pub description: Option<NodeDescription>,
    /// Its newest boot counter.
    pub boot: u64,
}

impl NodeRecord {
    /// The key of a node's record.
    pub fn key_of(node: &NodeId) -> String {
        format!("{}{node}", Self::PREFIX)
    }
}

impl Record for NodeRecord {
    const PREFIX: &'static str = "node/";
    fn key(&self) -> String {
        Self::key_of(&self.id)
    }
}

/// What a token is good for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum TokenPurpose {
    /// Joining nodes to the fleet.
    Join {
        /// The only name it may join, if fixed.
        node: Option<NodeId>,
        /// How many keys it may register in all.
        uses_max: u32,
        /// The keys it has registered, and as which node.
        used_by: Vec<(Digest, NodeId)>,
    },
    /// Speaking to the API.
    Api {
        /// With which rights.
        role: Role,
    },
}

/// A token, without its secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenRecord {
    /// The part of the token that may be shown and logged.
    pub id: String,
    /// Digest of the whole token.
    pub digest: Digest,
    /// What it is good for.
    pub purpose: TokenPurpose,
    /// For people.
    pub note: String,
    /// Wall time.
    pub created_unix_ms: u64,
    /// Wall time after which it is refused; none: it stays good.
    pub expires_unix_ms: Option<u64>,
    /// Whether a person has taken it back.
    pub revoked: bool,
}

impl TokenRecord {
    /// The key of a token's record.
    pub fn key_of(id: &str) -> String {
        format!("{}{id}", Self::PREFIX)
    }
}

impl Record for TokenRecord {
    const PREFIX: &'static str = "token/";
    fn key(&self) -> String {
        Self::key_of(&self.id)
    }
}

/// A pushed artifact; its bytes lie beside the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArtifactRecord {
    /// Its content.
    pub digest: Digest,
    /// For people.
    pub name: ArtifactName,
    /// Its size.
    pub bytes: u64,
    /// Wall time, for people.
    pub pushed_unix_ms: u64,
}

impl ArtifactRecord {
    /// The key of an artifact's record.
    pub fn key_of(digest: &Digest) -> String {
        format!("{}{digest}", Self::PREFIX)
    }
}

impl Record for ArtifactRecord {
    const PREFIX: &'static str = "artifact/";
    fn key(&self) -> String {
        Self::key_of(&self.digest)
    }
}

/// One line of the audit log: a decision or a person's act.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventRecord {
    /// Grows by one.
    pub sequence: u64,
    /// Wall time, for people.
    pub unix_ms: u64,
    /// What happened, as a short stable word, e.g. `plan-changed`.
    pub kind: String,
    /// To what, e.g. `query lobby-agent`.
    pub object: String,
    /// Who did it, e.g. `scheduler` or `token ak-3f…`.
    pub actor: String,
    /// In words.
    pub text: String,
    /// Why, for decisions of the planner.
    pub trigger: Option<Trigger>,
    /// The plan it led to.
    pub generation: Option<Generation>,
}

impl EventRecord {
    /// The key of an event.
    pub fn key_of(sequence: u64) -> String {
        format!("{}{sequence:020}", Self::PREFIX)
    }
}

impl Record for EventRecord {
    const PREFIX: &'static str = "event/";
    fn key(&self) -> String {
        Self::key_of(self.sequence)
    }
}
