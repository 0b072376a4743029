//! Targets on their way to nodes: the newest per node, kept until the node has applied it.
//!
//! Start at [`Dispatch::send`]. A node that is away gets its target when it comes back; one that has applied it, or a newer one, does not get
//! it again. Also known here: which plan waits for which nodes, so that "applied everywhere" has a time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use compass_shared::ids::{Commit, Generation, NodeId, QueryId};
use compass_shared::model::plan::{NodeTarget, QueryPlan};

use crate::fleet::{Fleet, Seat};

#[derive(Debug, Default)]
struct Inner {
    targets: BTreeMap<NodeId, Arc<NodeTarget>>,
    newest: Commit,
    waiting: BTreeMap<QueryId, Waiting>,
}

/// A plan in force that some of its nodes have not applied yet.
#[derive(Debug)]
struct Waiting {
    generation: Generation,
    commit: Commit,
    nodes: BTreeSet<NodeId>,
}

/// See the module's head.
#[derive(Debug, Default)]
pub struct Dispatch {
    inner: Mutex<Inner>,
}

impl Dispatch {
    /// Sends a node its target, now or when it comes back.
    pub fn send(&self, fleet: &Fleet, node: &NodeId, target: NodeTarget) {
        let target = Arc::new(target);
        {
            let mut inner = self.lock();
            inner.newest = inner.newest.max(target.commit);
            inner.targets.insert(node.clone(), target.clone());
        }
        if let Some(seat) = fleet.seat(node) {
            seat.set_target(target);
        }
    }

    /// A node has come: gives it the target it missed, if there is one.
    pub fn node_arrived(&self, seat: &Seat) {
        let missed = self.lock().targets.get(&seat.node).cloned();
        if let Some(target) = missed
            && Some(target.commit) > seat.applied().0
        {
            seat.set_target(target);
        }
    }

    /// A node has left the fleet for good.
    pub fn forget(&self, node: &NodeId) {
        self.lock().targets.remove(node);
    }

    /// A plan is in force: its nodes are to apply what was sent last.
    pub fn expect(&self, plan: &QueryPlan) {
        let mut inner = self.lock();
        let waiting = Waiting {
            generation: plan.generation,
            commit: inner.newest,
            nodes: plan.nodes().into_iter().cloned().collect(),
        };
        inner.waiting.insert(plan.query.clone(), waiting);
    }

    /// A query is gone.
    pub fn withdraw(&self, query: &QueryId) {
        self.lock().waiting.remove(query);
    }

    /// A node has applied a target; gives the plans that are thereby in force everywhere.
    pub fn applied(&self, node: &NodeId, commit: Commit) -> Vec<(QueryId, Generation)> {
        let mut inner = self.lock();
        let mut complete = Vec::new();
        inner.waiting.retain(|query, waiting| {
            if commit >= waiting.commit {
                waiting.nodes.remove(node);
            }
            if waiting.nodes.is_empty() {
                complete.push((query.clone(), waiting.generation));
            }
            !waiting.nodes.is_empty()
        });
        complete
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
