//! The sole writer of the assignment: chooses plans, has them checked, and moves the fleet from one to the next.
//!
//! Start at [`Scheduler::handle`]. A change of plan goes in steps, each a new commit sent to the nodes it touches:
//!
//! ```text
//!            warm                    switch                          drain
//! plan g   ──current──────────────────┐
//! plan g+1 ──instances start─ready────┴─current; app told────────────────────────
//!                                       g answers what it has ─ empty or deadline ─ g's instances stop
//! ```
//!
//! Where both copies do not fit on a node, the old one goes first and the gap is declared. Each step is verified by [`crate::check`]
//! before anything is sent; a refused step leaves the last good one in place and raises an alarm.
//!
//! Repairs (a broken SLO, a lost node) happen at once; improvements wait for the query's dwell time and rate bound.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use compass_shared::ids::{Commit, Digest, Generation, NodeId, QueryId};
use compass_shared::model::catalogue::Catalogue;
use compass_shared::model::cluster::{Cluster, Resources};
use compass_shared::model::plan::{Assignment, NodeTarget, QueryPlan};
use compass_shared::model::query::Query;
use compass_shared::model::trigger::Trigger;
use compass_shared::time::Moment;
use compass_shared::wire::v1::{AppRoute, InstanceStatus};
use serde::{Deserialize, Serialize};

use crate::Settings;
use crate::candidate::Front;
use crate::explain::Explanation;
use crate::roles::explorer::Proposal;
use crate::space::Space;

mod decide;
mod state;
mod switch;

use state::{NodeState, QueryState};

#[cfg(test)]
mod tests;

/// What the scheduler is told.
#[derive(Debug, Clone)]
pub enum Input {
    /// A query is stored durably; its entry node is told so that frames may come.
    Register {
        /// The query.
        query: Arc<Query>,
        /// Fingerprint of the app's key.
        app: Option<Digest>,
    },
    /// The app took up its query again with another key.
    Attach {
        /// The query.
        query: QueryId,
        /// Fingerprint of the app's key.
        app: Option<Digest>,
    },
    /// A query ends.
    Withdraw(QueryId),
    /// An explorer proposes.
    Propose(Box<Proposal>),
    /// The fleet has changed; with what was noticed.
    Cluster {
        /// The fleet.
        cluster: Arc<Cluster>,
        /// What was noticed, oldest first; empty for a mere update.
        triggers: Vec<Trigger>,
    },
    /// Something was noticed about one query.
    Noticed {
        /// The query.
        query: QueryId,
        /// What.
        trigger: Trigger,
    },
    /// A node connected (again) and said what it runs.
    NodeUp {
        /// The node.
        node: NodeId,
        /// Newest commit it has applied.
        applied: Option<Commit>,
        /// What it runs.
        instances: Vec<InstanceStatus>,
    },
    /// A node says how far its target is carried out.
    Applied {
        /// The node.
        node: NodeId,
        /// The target.
        commit: Commit,
        /// Every instance of it.
        instances: Vec<InstanceStatus>,
        /// Frames in flight per generation of queries that enter there.
        in_flight: Vec<(QueryId, Generation, u32)>,
    },
    /// A node refused its target whole.
    TargetRefused {
        /// The node.
        node: NodeId,
        /// The target.
        commit: Commit,
        /// Why.
        reason: String,
    },
    /// A person wants the content of an earlier generation back.
    Rollback {
        /// The query.
        query: QueryId,
        /// The earlier plan, from the store.
        plan: Box<QueryPlan>,
    },
    /// Time passes.
    Tick,
}

/// What the scheduler wants done, in order.
#[derive(Debug, Clone)]
pub enum Effect {
    /// Write this durably before performing what follows.
    Persist(Box<Persist>),
    /// Send a node its target (kept until the node has acknowledged it; only the newest counts).
    SendTarget {
        /// The node.
        node: NodeId,
        /// What it has to do.
        target: Box<NodeTarget>,
    },
    /// Tell the app and the monitor.
    PlanChanged(Box<PlanChange>),
    /// Tell the app that there is no plan.
    Infeasible {
        /// The query.
        query: QueryId,
        /// The nearest plan and the cheapest fix, in words.
        report: String,
    },
    /// The query's front holds nothing that fits: its explorer must search on.
    Reopen {
        /// The query.
        query: QueryId,
        /// Why.
        trigger: Trigger,
    },
    /// Something a person must know.
    Alarm(String),
    /// Call with `Tick` at this moment.
    WakeAt(Moment),
}

/// What has to be durable.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Persist {
    /// A plan was decided (history; it is not in force yet).
    Plan {
        /// The plan.
        plan: Box<QueryPlan>,
        /// Why it and no other.
        explanation: Box<Explanation>,
    },
    /// The plans in force have changed.
    Assignment(Assignment),
    /// The term has changed: agents had seen a newer one than ours.
    Term(u64),
}

/// A new plan in force.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanChange {
    /// The query.
    pub query: QueryId,
    /// For the app.
    pub route: AppRoute,
    /// Why.
    pub trigger: Trigger,
    /// One line.
    pub summary: String,
    /// The plan.
    pub plan: QueryPlan,
    /// When the trigger was taken up, the plan decided, and the switch ordered.
    pub noticed: Moment,
    /// See `noticed`.
    pub planned: Moment,
    /// See `noticed`.
    pub switched: Moment,
    /// The expected gap in service where both copies did not fit.
    pub gap: Option<Duration>,
}

/// What the store kept of a query.
#[derive(Debug, Clone)]
pub struct Restored {
    /// The query.
    pub query: Arc<Query>,
    /// Fingerprint of the app's key.
    pub app: Option<Digest>,
    /// The last front proposed.
    pub front: Option<Front>,
    /// The newest generation ever decided, in force or not.
    pub newest: Generation,
}

/// The scheduler.
pub struct Scheduler {
    catalogue: Arc<Catalogue>,
    settings: Settings,
    term: u64,
    commits: u64,
    queries: BTreeMap<QueryId, QueryState>,
    nodes: BTreeMap<NodeId, NodeState>,
    cluster: Option<Arc<Cluster>>,
    /// What each node was told last (or would have been, had it been there).
    targets: BTreeMap<NodeId, NodeTarget>,
    assignment: Assignment,
}

impl Scheduler {
    /// A scheduler on an empty store.
    pub fn new(catalogue: Arc<Catalogue>, settings: Settings, term: u64) -> Self {
        Self::restore(catalogue, settings, term, Assignment::default(), Vec::new())
    }

    /// A scheduler that takes office on a store: the plans in force are adopted as they are, and nothing is sent to a node before it
    /// has said what it runs. `term` must exceed the stored assignment's.
    pub fn restore(
        catalogue: Arc<Catalogue>,
        settings: Settings,
        term: u64,
        assignment: Assignment,
        queries: Vec<Restored>,
    ) -> Self {
        let queries = queries
            .into_iter()
            .filter_map(|restored| {
                let id = restored.query.id.clone();
                let plan = assignment.plans.get(&id).cloned();
                let space = Space::new(&restored.query.pipeline, &catalogue).ok()?;
                Some((id, QueryState::restored(restored, plan, space)))
            })
            .collect();
        Self {
            catalogue,
            settings,
            term: term.max(assignment.commit.term + u64::from(assignment.commit.term >= term)),
            commits: 0,
            queries,
            nodes: BTreeMap::new(),
            cluster: None,
            targets: BTreeMap::new(),
            assignment,
        }
    }

    /// Takes a fact and answers with what is to be done.
    pub fn handle(&mut self, now: Moment, input: Input) -> Vec<Effect> {
        let mut effects = Vec::new();
        match input {
            Input::Register { query, app } => self.register(now, query, app, &mut effects),
            Input::Attach { query, app } => {
                if let Some(state) = self.queries.get_mut(&query) {
                    state.app = app;
                    self.retarget(&mut effects);
                }
            }
            Input::Withdraw(query) => self.withdraw(now, &query, &mut effects),
            Input::Propose(proposal) => self.propose(now, *proposal, &mut effects),
            Input::Cluster { cluster, triggers } => {
                self.cluster_changed(now, cluster, triggers, &mut effects);
            }
            Input::Noticed { query, trigger } => {
                self.noticed(now, &query, trigger, &mut effects);
            }
            Input::NodeUp {
                node,
                applied,
                instances,
            } => self.node_up(node, applied, instances, &mut effects),
            Input::Applied {
                node,
                commit,
                instances,
                in_flight,
            } => {
                let state = self.nodes.entry(node).or_default();
                state.report(commit, instances, in_flight);
                self.advance(now, &mut effects);
            }
            Input::TargetRefused {
                node,
                commit,
                reason,
            } => self.refused(now, &node, commit, &reason, &mut effects),
            Input::Rollback { query, plan } => self.rollback(now, &query, *plan, &mut effects),
            Input::Tick => self.advance(now, &mut effects),
        }
        self.wake(&mut effects);
        effects
    }

    /// The plans in force.
    pub const fn assignment(&self) -> &Assignment {
        &self.assignment
    }

    /// What live instances hold of each node, those of a switch under way included.
    pub fn granted(&self) -> BTreeMap<NodeId, Resources> {
        crate::targets::granted(&self.targets)
    }

    /// Why the query has the plan it has.
    pub fn explanation(&self, query: &QueryId) -> Option<&Explanation> {
        self.queries.get(query)?.explanation.as_ref()
    }

    /// The newest commit given out.
    pub const fn commit(&self) -> Commit {
        Commit {
            term: self.term,
            number: self.commits,
        }
    }

    /// What a query's switch is at, for people: `no plan`, `steady`, `warming generation 4`, `draining generation 3`.
    pub fn phase(&self, query: &QueryId) -> Option<String> {
        self.queries.get(query).map(QueryState::phase)
    }

    /// What a node was told last.
    pub fn target(&self, node: &NodeId) -> Option<&NodeTarget> {
        self.targets.get(node)
    }
}
