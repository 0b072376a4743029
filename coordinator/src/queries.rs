//! What is live about each registered query: its app's session, what the app measures, and where its planning stands.
//!
//! Start at [`Queries::app_arrived`] and [`Queries::report`]. The durable part is in the store (`QueryRecord`); what is here is rebuilt after a restart by
//! apps that come back and by the planning roles.
//!
//! Deliberately absent: decisions; QUIC (a seat only holds the session to close it).

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use compass_shared::ids::{Digest, Generation, QueryId, SampleSetId};
use compass_shared::model::outcome::{AppReport, OutcomeCounts};
use compass_shared::model::plan::QueryPlan;
use compass_shared::time::Moment;
use compass_shared::wire::v1::CoordinatorToApp;
use compass_transport::Session;
use tokio::sync::mpsc;

use crate::clock::Clock;
use crate::metrics::{Kind, Metrics};

mod slo;
#[cfg(test)]
mod tests;

pub use slo::{LiveSlo, live_slo};

/// Messages that may wait for one app.
pub const OUTBOX_MAX: usize = 64;
/// Reports kept per query: a minute of windows of a second.
const REPORTS_MAX: usize = 60;
/// Figures taken from one report, as its type says.
const FIGURES_MAX: usize = 256;
/// Live figures are over this long.
pub const LIVE_WINDOW: Duration = Duration::from_secs(10);
/// Sample sets remembered per query; an explorer has one or two at a time.
const SETS_MAX: usize = 16;

/// An app's live session.
#[derive(Debug)]
pub struct AppSeat {
    /// Tells this session from the query's other ones; grows.
    pub epoch: u64,
    /// The key it proved or registered.
    pub key: Digest,
    /// Where from.
    pub address: SocketAddr,
    /// Its session.
    pub session: Arc<dyn Session>,
    outbox: mpsc::Sender<CoordinatorToApp>,
}

/// What a newly seated app's session needs. It does not hold the seat: the queue ends when the seat is taken away.
#[derive(Debug)]
pub struct Arrival {
    /// Tells this session from the query's other ones.
    pub epoch: u64,
    /// Messages for the app, in order.
    pub outgoing: mpsc::Receiver<CoordinatorToApp>,
    /// The session it replaces, to be closed.
    pub before: Option<Arc<AppSeat>>,
}

/// A query's plan in force, as far as this process knows.
#[derive(Debug, Clone, PartialEq)]
pub struct InForce {
    /// The plan.
    pub plan: QueryPlan,
    /// What the app was last told about it.
    pub told: Option<CoordinatorToApp>,
}

#[derive(Debug, Default)]
struct Live {
    app: Option<Arc<AppSeat>>,
    reports: VecDeque<(Moment, AppReport)>,
    counts: OutcomeCounts,
    in_force: Option<InForce>,
    infeasible: Option<String>,
    sets: VecDeque<SampleSetId>,
    trouble: Option<String>,
}

/// A look at what is live about a query.
#[derive(Debug, Clone, Default)]
pub struct LiveView {
    /// Whether its app is connected.
    pub app_online: bool,
    /// Where its app comes from.
    pub app_address: Option<SocketAddr>,
    /// Outcomes since its first plan in this process's life.
    pub counts: OutcomeCounts,
    /// Reports within [`LIVE_WINDOW`], oldest first.
    pub reports: Vec<AppReport>,
    /// The plan in force.
    pub in_force: Option<InForce>,
    /// Why there is no plan that meets the SLOs.
    pub infeasible: Option<String>,
    /// Why it is not planned at all, e.g. its explorer was given up.
    pub trouble: Option<String>,
}

/// All of them.
#[derive(Debug)]
pub struct Queries {
    live: Mutex<BTreeMap<QueryId, Live>>,
    next_epoch: AtomicU64,
    clock: Clock,
    metrics: Arc<Metrics>,
}

impl Queries {
    /// None yet.
    pub fn new(clock: Clock, metrics: Arc<Metrics>) -> Self {
        Self {
            live: Mutex::default(),
            next_epoch: AtomicU64::new(1),
            clock,
            metrics,
        }
    }

    /// A query is registered (or was found in the store), perhaps with a plan in force.
    pub fn open(&self, query: &QueryId, plan: Option<QueryPlan>) {
        let mut live = self.lock();
        let entry = live.entry(query.clone()).or_default();
        if entry.in_force.is_none() {
            entry.in_force = plan.map(|plan| InForce { plan, told: None });
        }
    }

    /// A query is gone; gives its app's seat, to be told and closed.
    pub fn close(&self, query: &QueryId) -> Option<Arc<AppSeat>> {
        let closed = self.lock().remove(query).and_then(|live| live.app);
        self.count_sessions();
        closed
    }

    /// An app took its query up; none when there is no such query.
    pub fn app_arrived(
        &self,
        query: &QueryId,
        key: Digest,
        session: Arc<dyn Session>,
    ) -> Option<Arrival> {
        let (outbox, outgoing) = mpsc::channel(OUTBOX_MAX);
        let seat = Arc::new(AppSeat {
            epoch: self.next_epoch.fetch_add(1, Ordering::Relaxed),
            key,
            address: session.remote_address(),
            session,
            outbox,
        });
        let before = {
            let mut live = self.lock();
            live.get_mut(query)?.app.replace(seat.clone())
        };
        self.count_sessions();
        Some(Arrival {
            epoch: seat.epoch,
            outgoing,
            before,
        })
    }

    /// An app's session has ended.
    pub fn app_left(&self, query: &QueryId, epoch: u64) {
        {
            let mut live = self.lock();
            if let Some(entry) = live.get_mut(query)
                && entry.app.as_ref().is_some_and(|app| app.epoch == epoch)
            {
                entry.app = None;
            }
        }
        self.count_sessions();
    }

    /// A query's app, if it is connected.
    pub fn app(&self, query: &QueryId) -> Option<Arc<AppSeat>> {
        self.lock().get(query)?.app.clone()
    }

    /// Queues a message to a query's app; tells whether it went into the queue.
    pub fn send(&self, query: &QueryId, message: CoordinatorToApp) -> bool {
        self.app(query)
            .is_some_and(|app| app.outbox.try_send(message).is_ok())
    }

    /// A plan is in force; its app is told so, now or when it comes back.
    pub fn plan_changed(&self, plan: QueryPlan, told: CoordinatorToApp) {
        let query = plan.query.clone();
        {
            let mut live = self.lock();
            let Some(entry) = live.get_mut(&query) else {
                return;
            };
            entry.infeasible = None;
            entry.in_force = Some(InForce {
                plan,
                told: Some(told.clone()),
            });
        }
        self.send(&query, told);
    }

    /// There is no plan that meets the SLOs; the app is told so.
    pub fn infeasible(&self, query: &QueryId, report: String) {
        {
            let mut live = self.lock();
            let Some(entry) = live.get_mut(query) else {
                return;
            };
            entry.infeasible = Some(report.clone());
        }
        self.send(query, CoordinatorToApp::Infeasible { report });
    }

    /// The query is not planned (any more); why.
    pub fn set_trouble(&self, query: &QueryId, trouble: Option<String>) {
        if let Some(entry) = self.lock().get_mut(query) {
            entry.trouble = trouble;
        }
    }

    /// Takes in what an app measured; figures that cannot be are dropped.
    pub fn report(&self, query: &QueryId, report: &mut AppReport) {
        report.latencies_ms.truncate(FIGURES_MAX);
        report
            .latencies_ms
            .retain(|ms| ms.is_finite() && *ms >= 0.0);
        report.accuracies.truncate(FIGURES_MAX);
        report
            .accuracies
            .retain(|accuracy| (0.0..=1.0).contains(accuracy));
        let now = self.clock.now();
        let mut live = self.lock();
        let Some(entry) = live.get_mut(query) else {
            return;
        };
        if entry.in_force.is_some() {
            add(&mut entry.counts, &report.counts);
        }
        if entry.reports.len() == REPORTS_MAX {
            entry.reports.pop_front();
        }
        entry.reports.push_back((now, report.clone()));
    }

    /// An explorer begins a sample set.
    pub fn begin_set(&self, query: &QueryId, set: SampleSetId) {
        if let Some(entry) = self.lock().get_mut(query) {
            if entry.sets.len() == SETS_MAX {
                entry.sets.pop_front();
            }
            entry.sets.push_back(set);
        }
    }

    /// The query a sample set belongs to.
    pub fn query_of_set(&self, set: SampleSetId) -> Option<QueryId> {
        let live = self.lock();
        let mut entries = live.iter();
        entries
            .find(|(_, entry)| entry.sets.contains(&set))
            .map(|(query, _)| query.clone())
    }

    /// What is live about a query.
    pub fn view(&self, query: &QueryId) -> LiveView {
        let now = self.clock.now();
        let live = self.lock();
        let Some(entry) = live.get(query) else {
            return LiveView::default();
        };
        let recent = entry
            .reports
            .iter()
            .filter(|(at, _)| now.since(*at) <= LIVE_WINDOW);
        LiveView {
            app_online: entry.app.is_some(),
            app_address: entry.app.as_ref().map(|app| app.address),
            counts: entry.counts,
            reports: recent.map(|(_, report)| report.clone()).collect(),
            in_force: entry.in_force.clone(),
            infeasible: entry.infeasible.clone(),
            trouble: entry.trouble.clone(),
        }
    }

    /// The plan in force of each query.
    pub fn plans(&self) -> Vec<QueryPlan> {
        let live = self.lock();
        let plans = live.values().filter_map(|entry| entry.in_force.as_ref());
        plans.map(|in_force| in_force.plan.clone()).collect()
    }

    /// All queries.
    pub fn names(&self) -> Vec<QueryId> {
        self.lock().keys().cloned().collect()
    }

    /// Whether there are queries and each has a plan.
    pub fn all_have_plans(&self) -> bool {
        let live = self.lock();
        !live.is_empty() && live.values().all(|entry| entry.in_force.is_some())
    }

    /// The generation in force.
    pub fn generation(&self, query: &QueryId) -> Option<Generation> {
        let live = self.lock();
        let in_force = live.get(query)?.in_force.as_ref()?;
        Some(in_force.plan.generation)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<QueryId, Live>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count_sessions(&self) {
        let apps = self
            .lock()
            .values()
            .filter(|live| live.app.is_some())
            .count();
        self.metrics
            .sessions
            .get_or_create(&Kind { kind: "app" })
            .set(i64::try_from(apps).unwrap_or(i64::MAX));
    }
}

/// Adds counts; an app that counts nonsense cannot make the sum overflow.
fn add(sum: &mut OutcomeCounts, more: &OutcomeCounts) {
    let fields = [
        (&mut sum.sent, more.sent),
        (&mut sum.answered, more.answered),
        (&mut sum.late, more.late),
        (&mut sum.skipped, more.skipped),
        (&mut sum.expired, more.expired),
        (&mut sum.rejected, more.rejected),
    ];
    for (total, more) in fields {
        *total = total.saturating_add(more);
    }
}
