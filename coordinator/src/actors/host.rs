//! Starts the roles and keeps them: the three core ones, without which the process must not go on, and one explorer per query.
//!
//! Start at [`run`]. It must run on the thread that actors live on (actix's system arbiter).

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use compass_shared::ids::QueryId;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use super::explorer::{ExplorerPerformer, ExplorerRole};
use super::monitor::{MonitorPerformer, MonitorRole};
use super::profiler::{ProfilerPerformer, ProfilerRole};
use super::role::{Parts, Perform, Role, RoleActor, Tell};
use super::scheduler::{SchedulerPerformer, SchedulerRole};
use super::supervisor::{Lifeline, RestartPolicy, Verdict, supervise};
use super::{HostCommand, monitor, start_role};
use crate::compute::ComputePool;
use crate::events::Event;
use crate::plane::Plane;
use crate::store::records::LinksRecord;
use crate::takeover;

/// How often the monitor looks: four times a second at least, so that silence is noticed a fifth of a second late at most.
const PULSE: Duration = Duration::from_millis(200);

/// How often what is known of links is stored, if it has changed.
const REMEMBER: Duration = Duration::from_secs(5);

/// Runs the roles until one that the process cannot do without is given up; says which and why. Dropping this ends all supervision; the actors
/// themselves end with [`super::Roles::retire`].
pub async fn run(plane: Arc<Plane>, commands: mpsc::UnboundedReceiver<HostCommand>) -> String {
    let policy = RestartPolicy::default();
    tokio::select! {
        reason = keep("monitor", plane.clone(), policy, start_monitor) => reason,
        reason = keep("scheduler", plane.clone(), policy, start_scheduler) => reason,
        reason = keep("profiler", plane.clone(), policy, start_profiler) => reason,
        () = remember_links(plane.clone()) => "nobody remembers links any more".to_owned(),
        () = pulse(plane.clone()) => "the monitor's pulse ended".to_owned(),
        () = keep_explorers(plane, commands, policy) => "nobody can register queries any more".to_owned(),
    }
}

/// Starts and ends explorers as asked.
async fn keep_explorers(
    plane: Arc<Plane>,
    mut commands: mpsc::UnboundedReceiver<HostCommand>,
    policy: RestartPolicy,
) {
    let wanted = Rc::new(RefCell::new(BTreeSet::new()));
    // Dropping the set ends the supervision of every explorer.
    let mut kept = JoinSet::new();
    while let Some(command) = commands.recv().await {
        while kept.try_join_next().is_some() {}
        match command {
            HostCommand::Start(query) => {
                if wanted.borrow_mut().insert(query.clone()) {
                    kept.spawn_local(keep_explorer(plane.clone(), query, wanted.clone(), policy));
                }
            }
            HostCommand::Stop(query) => {
                wanted.borrow_mut().remove(&query);
                plane.roles.remove_explorer(&query);
            }
        }
    }
}

/// Keeps a core role alive; returns why it was given up.
async fn keep(
    kind: &'static str,
    plane: Arc<Plane>,
    policy: RestartPolicy,
    start: impl AsyncFn(&Arc<Plane>, Lifeline, usize) -> Result<(), String>,
) -> String {
    let metrics = plane.metrics.clone();
    let verdict = supervise(
        kind,
        "core",
        policy,
        &metrics,
        async |lifeline, restarts| {
            if restarts > 0 {
                let text = format!("{kind} is started again (for the {restarts}. time)");
                plane
                    .events
                    .record(Event::new("alarm", kind, "supervisor", text));
            }
            start(&plane, lifeline, restarts).await
        },
    )
    .await;
    match verdict {
        Verdict::Finished => format!("{kind} ended"),
        Verdict::GivenUp(reason) => {
            plane.health.trouble(kind, reason.clone());
            reason
        }
    }
}

async fn start_monitor(
    plane: &Arc<Plane>,
    lifeline: Lifeline,
    _restarts: usize,
) -> Result<(), String> {
    let core = MonitorRole::build(plane);
    let performer = Arc::new(MonitorPerformer(plane.clone()));
    let pool = &plane.watch_pool;
    let parts = parts(plane, core, "fleet", performer, pool, lifeline);
    let address = start_role(parts);
    plane.roles.monitor.set(address.clone());
    let facts = MonitorRole::facts(plane).map_err(|error| error.to_string())?;
    tell_all(&address, facts);
    Ok(())
}

async fn start_scheduler(
    plane: &Arc<Plane>,
    lifeline: Lifeline,
    restarts: usize,
) -> Result<(), String> {
    let (core, known) = SchedulerRole::build(plane, restarts > 0)
        .await
        .map_err(|error| error.to_string())?;
    let performer = Arc::new(SchedulerPerformer(plane.clone()));
    let pool = &plane.schedule_pool;
    let parts = parts(plane, core, "assignment", performer, pool, lifeline);
    let address = start_role(parts);
    plane.roles.scheduler.set(address.clone());
    let facts = SchedulerRole::facts(plane, &known).map_err(|error| error.to_string())?;
    tell_all(&address, facts);
    Ok(())
}

async fn start_profiler(
    plane: &Arc<Plane>,
    lifeline: Lifeline,
    _restarts: usize,
) -> Result<(), String> {
    let core = ProfilerRole::build(plane);
    let performer = Arc::new(ProfilerPerformer(plane.clone()));
    let pool = &plane.search_pool;
    let parts = parts(plane, core, "trials", performer, pool, lifeline);
    let address = start_role(parts);
    plane.roles.profiler.set(address.clone());
    tell_all(&address, ProfilerRole::facts(plane));
    Ok(())
}

/// Keeps the explorer of one query alive while it is wanted; when it is given up, that query is in trouble and no other.
async fn keep_explorer(
    plane: Arc<Plane>,
    query: QueryId,
    wanted: Rc<RefCell<BTreeSet<QueryId>>>,
    policy: RestartPolicy,
) {
    let metrics = plane.metrics.clone();
    let name = query.to_string();
    let verdict = supervise(
        "explorer",
        &name,
        policy,
        &metrics,
        async |mut lifeline, _| {
            if !wanted.borrow().contains(&query) {
                lifeline.finish();
                return Ok(());
            }
            let core = ExplorerRole::build(&plane, &query)?;
            let performer = Arc::new(ExplorerPerformer {
                plane: plane.clone(),
                query: query.clone(),
            });
            let pool = &plane.search_pool;
            let parts = parts(&plane, core, query.as_str(), performer, pool, lifeline);
            let address = start_role(parts);
            plane.roles.set_explorer(&query, address.clone());
            plane.queries.set_trouble(&query, None);
            tell_all(&address, ExplorerRole::facts(&plane, &query));
            Ok(())
        },
    )
    .await;
    if let Verdict::GivenUp(reason) = verdict {
        let object = format!("query {query}");
        plane
            .events
            .record(Event::new("alarm", object, "supervisor", reason.clone()));
        plane.queries.set_trouble(&query, Some(reason));
        wanted.borrow_mut().remove(&query);
    }
}

fn parts<R: Role>(
    plane: &Plane,
    core: R,
    name: &str,
    performer: Arc<dyn Perform<R::Effect>>,
    compute: &ComputePool,
    lifeline: Lifeline,
) -> Parts<R> {
    Parts {
        core,
        name: name.to_owned(),
        performer,
        compute: compute.clone(),
        clock: plane.clock,
        metrics: plane.metrics.clone(),
        lifeline,
    }
}

fn tell_all<R: Role + Unpin>(address: &actix::Addr<RoleActor<R>>, facts: Vec<R::Input>)
where
    R::Input: Unpin,
{
    for fact in facts {
        address.do_send(Tell(fact));
    }
}

async fn pulse(plane: Arc<Plane>) {
    let mut interval = tokio::time::interval(PULSE);
    interval.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        interval.tick().await;
        plane.roles.monitor.tell(monitor::Input::Pulse);
        takeover::try_end(&plane);
    }
}

/// Keeps what is known of links for the next process.
async fn remember_links(plane: Arc<Plane>) {
    let mut stored = BTreeMap::new();
    loop {
        tokio::time::sleep(REMEMBER).await;
        let cluster = plane.picture.cluster();
        if cluster.links == stored {
            continue;
        }
        let links = cluster.links.iter();
        let record = LinksRecord {
            links: links
                .map(|((from, to), link)| (from.clone(), to.clone(), *link))
                .collect(),
        };
        let transaction = plane.office.begin().put(&record);
        match plane.office.commit(transaction).await {
            Ok(_) => stored = cluster.links.clone(),
            Err(error) => tracing::warn!(%error, "links were not stored"),
        }
    }
}
