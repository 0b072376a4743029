//! What every part of the coordinator shares: the durable office, the live registries, and the way to the planning roles.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use compass_shared::api::TrialView;
use compass_shared::ids::{Generation, NodeId, QueryId, TrialId};
use compass_shared::model::cluster::{Cluster, PriceSheet, Resources};
use compass_shared::model::pipeline::Configuration;
use compass_shared::model::trial::{RunStage, StageDone, StageFailure};
use compass_transport::CertificateAuthority;

use crate::actors::Roles;
use crate::artifacts::Artifacts;
use crate::clock::Clock;
use crate::compute::ComputePool;
use crate::configs::Configs;
use crate::dispatch::Dispatch;
use crate::events::Events;
use crate::fleet::Fleet;
use crate::metrics::{Metrics, count};
use crate::queries::Queries;
use crate::settings::Settings;
use crate::store::records::PlanRecord;
use crate::store::{Office, StoreError, get};
use crate::takeover::Takeover;
use crate::tokens::Tokens;

/// How often a note on a plan is tried again: only the scheduler and the nodes' sessions write there.
const NOTE_TRIES: usize = 8;
/// Stage runs kept for reports.
const TRIALS_MAX: usize = 5_000;

/// See the module's head.
pub struct Plane {
    /// As set.
    pub settings: Settings,
    /// Time since the process began.
    pub clock: Clock,
    /// The store and the term.
    pub office: Arc<Office>,
    /// The audit log.
    pub events: Arc<Events>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Who may do what.
    pub tokens: Tokens,
    /// Connected nodes.
    pub fleet: Arc<Fleet>,
    /// What is live about queries.
    pub queries: Arc<Queries>,
    /// Model files.
    pub artifacts: Arc<Artifacts>,
    /// Catalogue, pipelines, prices.
    pub configs: Configs,
    /// Issues certificates.
    pub authority: Arc<CertificateAuthority>,
    /// The planning roles.
    pub roles: Roles,
    /// Targets on their way.
    pub dispatch: Dispatch,
    /// The first seconds in office.
    pub takeover: Takeover,
    /// Where explorers and the profiler think.
    pub search_pool: ComputePool,
    /// Where the scheduler thinks: apart from the searches, so that a repair never waits for one.
    pub schedule_pool: ComputePool,
    /// Where the monitor thinks: apart from the scheduler, so that nothing is noticed late because a plan is being chosen.
    pub watch_pool: ComputePool,
    /// The newest picture of the fleet.
    pub picture: Picture,
    /// Stage runs.
    pub trials: TrialLog,
    /// What is not well.
    pub health: Health,
}

impl Plane {
    /// Whether plans are to stay as they are: without re-planning, once every query has a plan.
    pub fn is_frozen(&self) -> bool {
        !self.settings.replan && self.queries.all_have_plans()
    }

    /// Notes something on a plan's record; nothing when there is no such plan.
    ///
    /// # Errors
    /// When the store fails, or others change the same record all the time.
    pub async fn note_on_plan(
        &self,
        query: &QueryId,
        generation: Generation,
        note: impl Fn(&mut PlanRecord),
    ) -> Result<(), StoreError> {
        let key = PlanRecord::key_of(query, generation);
        let mut tries = 0;
        loop {
            let Some((mut record, revision)) = get::<PlanRecord>(self.office.store(), &key)? else {
                return Ok(());
            };
            note(&mut record);
            let transaction = self.office.begin();
            let transaction = transaction.expecting(&key, Some(revision)).put(&record);
            match self.office.commit(transaction).await {
                Err(StoreError::Conflict { .. }) if tries < NOTE_TRIES => tries += 1,
                result => return result.map(drop),
            }
        }
    }
}

/// The newest picture of the fleet, as the monitor draws it and the scheduler fills it.
#[derive(Debug)]
pub struct Picture {
    inner: RwLock<(Arc<Cluster>, BTreeMap<NodeId, Resources>)>,
}

impl Picture {
    /// An empty fleet.
    pub fn new(prices: PriceSheet) -> Self {
        let cluster = Cluster {
            nodes: BTreeMap::new(),
            links: BTreeMap::new(),
            prices,
        };
        Self {
            inner: RwLock::new((Arc::new(cluster), BTreeMap::new())),
        }
    }

    /// The fleet.
    pub fn cluster(&self) -> Arc<Cluster> {
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        inner.0.clone()
    }

    /// What live plans hold of each node.
    pub fn granted(&self) -> BTreeMap<NodeId, Resources> {
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        inner.1.clone()
    }

    /// The monitor has drawn a new one.
    pub fn set_cluster(&self, cluster: Arc<Cluster>) {
        self.inner.write().unwrap_or_else(PoisonError::into_inner).0 = cluster;
    }

    /// The scheduler has granted differently.
    pub fn set_granted(&self, granted: BTreeMap<NodeId, Resources>) {
        self.inner.write().unwrap_or_else(PoisonError::into_inner).1 = granted;
    }
}

/// A stage that is under way.
#[derive(Debug, Clone)]
struct Running {
    query: QueryId,
    node: NodeId,
    operator: compass_shared::ids::OperatorId,
    configuration: Configuration,
}

#[derive(Debug, Default)]
struct TrialLogInner {
    running: BTreeMap<TrialId, Running>,
    ended: VecDeque<TrialView>,
    cache_hits: u64,
    newest: TrialId,
}

/// Stage runs, for reports.
#[derive(Debug, Default)]
pub struct TrialLog {
    inner: Mutex<TrialLogInner>,
}

impl TrialLog {
    /// A stage is sent to a node.
    pub fn begin(&self, node: &NodeId, stage: &RunStage) {
        let mut inner = self.lock();
        inner.newest = inner.newest.max(stage.trial);
        if inner.running.len() >= TRIALS_MAX {
            // Stages whose end was never heard of: the oldest goes.
            inner.running.pop_first();
        }
        inner.running.insert(
            stage.trial,
            Running {
                query: stage.query.clone(),
                node: node.clone(),
                operator: stage.operator.clone(),
                configuration: stage.instance.configuration.clone(),
            },
        );
    }

    /// A stage is done.
    pub fn done(&self, done: &StageDone, metrics: &Metrics) {
        count(&metrics.trials, "done");
        let samples = u32::try_from(done.samples.len()).unwrap_or(u32::MAX);
        let wall_ms = done.samples.iter().map(|sample| sample.wall_ms).sum();
        let cpu_ms = done.samples.iter().map(|sample| sample.cpu_ms).sum();
        self.end(done.trial, |running| TrialView {
            unix_ms: crate::events::now_unix_ms(),
            query: running.query,
            node: running.node,
            operator: running.operator,
            configuration: running.configuration,
            samples,
            wall_ms,
            cpu_ms,
            cold_start_ms: done.cold_start_ms,
            failure: None,
        });
    }

    /// A stage gave no result.
    pub fn failed(&self, trial: TrialId, failure: &StageFailure, metrics: &Metrics) {
        count(&metrics.trials, failure_kind(failure));
        self.end(trial, |running| TrialView {
            unix_ms: crate::events::now_unix_ms(),
            query: running.query,
            node: running.node,
            operator: running.operator,
            configuration: running.configuration,
            samples: 0,
            wall_ms: 0.0,
            cpu_ms: 0.0,
            cold_start_ms: 0.0,
            failure: Some(format!("{failure:?}")),
        });
    }

    /// A stage need not run.
    pub fn cache_hit(&self, metrics: &Metrics) {
        metrics.cache_hits.inc();
        self.lock().cache_hits += 1;
    }

    /// Ended stages (of one query), oldest first, and cache hits.
    pub fn list(&self, query: Option<&QueryId>) -> (Vec<TrialView>, u64) {
        let inner = self.lock();
        let ended = inner.ended.iter();
        let wanted = ended.filter(|trial| query.is_none_or(|query| trial.query == *query));
        (wanted.cloned().collect(), inner.cache_hits)
    }

    /// The node that a stage under way was sent to: only it may answer.
    pub fn node_of(&self, trial: TrialId) -> Option<NodeId> {
        self.lock()
            .running
            .get(&trial)
            .map(|running| running.node.clone())
    }

    /// The highest number used so far.
    pub fn newest(&self) -> TrialId {
        self.lock().newest
    }

    fn end(&self, trial: TrialId, view: impl FnOnce(Running) -> TrialView) {
        let mut inner = self.lock();
        let Some(running) = inner.running.remove(&trial) else {
            return;
        };
        if inner.ended.len() == TRIALS_MAX {
            inner.ended.pop_front();
        }
        inner.ended.push_back(view(running));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, TrialLogInner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const fn failure_kind(failure: &StageFailure) -> &'static str {
    match failure {
        StageFailure::Deadline => "deadline",
        StageFailure::Crashed(_) => "crashed",
        StageFailure::InputsUnavailable(_) => "inputs-unavailable",
        StageFailure::Busy => "busy",
        StageFailure::Artifact(_) => "artifact",
        StageFailure::Cancelled => "cancelled",
        StageFailure::Unavailable(_) => "unavailable",
    }
}

/// What is not well, by its name, in words; empty when all is.
#[derive(Debug, Default)]
pub struct Health {
    troubles: Mutex<BTreeMap<String, String>>,
}

impl Health {
    /// Something is not well.
    pub fn trouble(&self, name: &str, text: String) {
        let mut troubles = self.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        troubles.insert(name.to_owned(), text);
    }

    /// It is well again.
    pub fn clear(&self, name: &str) {
        let mut troubles = self.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        troubles.remove(name);
    }

    /// All that is not well.
    pub fn troubles(&self) -> Vec<String> {
        let troubles = self.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        troubles.values().cloned().collect()
    }
}
