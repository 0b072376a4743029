//! What the scheduler knows of a query and of a node.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use compass_shared::ids::{Commit, Digest, Generation, InstanceId, NodeId, QueryId};
use compass_shared::model::plan::QueryPlan;
use compass_shared::model::query::Query;
use compass_shared::model::trigger::Trigger;
use compass_shared::time::Moment;
use compass_shared::wire::v1::{InstanceState, InstanceStatus};

use super::Restored;
use crate::candidate::Front;
use crate::explain::Explanation;
use crate::space::Space;
use crate::targets::Standby;

/// A plan on its way into force.
#[derive(Debug, Clone)]
pub(super) struct Warming {
    pub(super) plan: QueryPlan,
    pub(super) since: Moment,
    pub(super) noticed: Moment,
    /// The old plan went first because both did not fit: since then nobody answers.
    pub(super) gap: bool,
}

/// A plan that has been left and still has frames in flight.
#[derive(Debug, Clone)]
pub(super) struct Draining {
    pub(super) plan: QueryPlan,
    pub(super) since: Moment,
    /// The entry node has stopped giving frames to it as of this commit.
    pub(super) left_at: Commit,
}

/// One query.
#[derive(Debug, Clone)]
pub(super) struct QueryState {
    pub(super) query: Arc<Query>,
    pub(super) space: Space,
    pub(super) app: Option<Digest>,
    pub(super) front: Option<Front>,
    pub(super) effort: (u32, u32),
    pub(super) certified: bool,
    /// Models its plans may need.
    pub(super) standby: Vec<Standby>,
    pub(super) current: Option<QueryPlan>,
    pub(super) warming: Option<Warming>,
    pub(super) draining: Vec<Draining>,
    pub(super) newest: Generation,
    pub(super) explanation: Option<Explanation>,
    /// Frames per second to plan for: as measured, else as announced.
    pub(super) rate_hz: f64,
    /// When plans came into force, newest last; no more than the rate bound looks back on.
    pub(super) switches: VecDeque<Moment>,
    /// Shapes (placement and configuration) not to be chosen again before a moment.
    pub(super) avoid: BTreeMap<Digest, Moment>,
    /// The last repair: its cause and when.
    pub(super) repaired: Option<(String, Moment)>,
    /// An improvement held back by the dwell time: its trigger and when it may happen.
    pub(super) held_back: Option<(Trigger, Moment)>,
    /// The search was asked to go on; not again before it has proposed.
    pub(super) reopened: bool,
    /// The app was told that there is no plan; not again before there was one.
    pub(super) said_infeasible: bool,
}

impl QueryState {
    pub(super) fn new(query: Arc<Query>, app: Option<Digest>, space: Space) -> Self {
        Self {
            rate_hz: query.rate_hz(),
            query,
            space,
            app,
            front: None,
            effort: (0, 0),
            certified: false,
            standby: Vec::new(),
            current: None,
            warming: None,
            draining: Vec::new(),
            newest: Generation(0),
            explanation: None,
            switches: VecDeque::new(),
            avoid: BTreeMap::new(),
            repaired: None,
            held_back: None,
            reopened: false,
            said_infeasible: false,
        }
    }

    pub(super) fn restored(restored: Restored, plan: Option<QueryPlan>, space: Space) -> Self {
        let mut state = Self::new(restored.query, restored.app, space);
        state.front = restored.front;
        state.newest = restored
            .newest
            .max(plan.as_ref().map_or(Generation(0), |p| p.generation));
        state.current = plan;
        state
    }

    /// The generation new frames get.
    pub(super) fn current_generation(&self) -> Generation {
        if let Some(warming) = &self.warming
            && warming.gap
        {
            return warming.plan.generation;
        }
        self.current
            .as_ref()
            .map_or(Generation(0), |p| p.generation)
    }

    /// Every plan that nodes must know, oldest first.
    pub(super) fn live_plans(&self) -> Vec<&QueryPlan> {
        let mut plans: Vec<&QueryPlan> = self.draining.iter().map(|d| &d.plan).collect();
        plans.extend(&self.current);
        plans.extend(self.warming.as_ref().map(|w| &w.plan));
        plans
    }

    /// The plan that is or will be in force.
    pub(super) fn intended(&self) -> Option<&QueryPlan> {
        self.warming
            .as_ref()
            .map(|w| &w.plan)
            .or(self.current.as_ref())
    }

    /// When an improvement may happen: at once, or when dwell time and rate bound allow.
    pub(super) fn may_improve_at(&self, now: Moment) -> Moment {
        let stability = self.query.stability;
        let mut at = now;
        if let Some(last) = self.switches.back() {
            at = at.max(*last + stability.min_dwell);
        }
        if let Some(warming) = &self.warming {
            // A plan on its way is not exchanged for a slightly better one: it would never arrive.
            at = at.max(warming.since + stability.min_dwell);
        }
        let most = stability.replans_per_minute_max as usize;
        if most > 0
            && let Some(index) = self.switches.len().checked_sub(most)
        {
            at = at.max(self.switches[index] + Duration::from_secs(60));
        }
        at
    }

    pub(super) fn note_switch(&mut self, now: Moment) {
        self.switches.push_back(now);
        let most = self.query.stability.replans_per_minute_max.max(1) as usize;
        while self.switches.len() > most {
            self.switches.pop_front();
        }
    }

    pub(super) fn phase(&self) -> String {
        if let Some(warming) = &self.warming {
            return format!("warming generation {}", warming.plan.generation);
        }
        if let Some(draining) = self.draining.first() {
            return format!("draining generation {}", draining.plan.generation);
        }
        match self.current {
            Some(_) => "steady".to_owned(),
            None => "no plan".to_owned(),
        }
    }
}

/// One node as it reports.
#[derive(Debug, Clone, Default)]
pub(super) struct NodeState {
    /// It has connected and said what it runs.
    pub(super) known: bool,
    /// It has not been told since it connected, and what it has may differ from what it should have.
    pub(super) must_hear: bool,
    pub(super) applied: Option<Commit>,
    pub(super) instances: BTreeMap<InstanceId, InstanceState>,
    pub(super) in_flight: BTreeMap<(QueryId, Generation), u32>,
}

impl NodeState {
    pub(super) fn adopt(&mut self, applied: Option<Commit>, instances: Vec<InstanceStatus>) {
        self.known = true;
        self.applied = applied;
        self.instances = by_id(instances);
        self.in_flight.clear();
    }

    pub(super) fn report(
        &mut self,
        commit: Commit,
        instances: Vec<InstanceStatus>,
        in_flight: Vec<(QueryId, Generation, u32)>,
    ) {
        if self.applied.is_some_and(|applied| applied > commit) {
            return;
        }
        self.applied = Some(commit);
        self.instances = by_id(instances);
        self.in_flight = in_flight
            .into_iter()
            .map(|(query, generation, frames)| ((query, generation), frames))
            .collect();
    }

    pub(super) fn has_applied(&self, commit: Commit) -> bool {
        self.applied.is_some_and(|applied| applied >= commit)
    }
}

fn by_id(instances: Vec<InstanceStatus>) -> BTreeMap<InstanceId, InstanceState> {
    instances
        .into_iter()
        .map(|status| (status.instance, status.state))
        .collect()
}

/// Whether a plan runs on a node.
pub(super) fn touches(plan: &QueryPlan, node: &NodeId) -> bool {
    plan.operators.iter().any(|o| o.node == *node)
}
