//! The steps of a switch: warm, switch, drain; what nodes are told in each, and what is done when one does not go through.

use std::collections::BTreeMap;
use std::time::Duration;

use compass_shared::ids::{Commit, NodeId, QueryId};
use compass_shared::model::cluster::Cluster;
use compass_shared::model::plan::{NodeTarget, QueryPlan};
use compass_shared::model::trigger::Trigger;
use compass_shared::time::Moment;
use compass_shared::wire::v1::{AppRoute, InstanceState, InstanceStatus};

use super::state::{Draining, QueryState, Warming, touches};
use super::{Effect, Persist, PlanChange, Scheduler};
use crate::candidate::shape_of;
use crate::targets::{LiveQuery, node_targets, peer};
use crate::{check, diff};

/// Start of a worker and loading of a model, where nothing was measured: what a declared gap is said to last.
const GAP_GUESS: Duration = Duration::from_secs(2);

/// How far the instances of a warming plan are.
enum Readiness {
    NotYet,
    Ready,
    Failed(NodeId, String),
}

impl Scheduler {
    /// Puts a decided plan on its way: warms it beside the old one, or, where both do not fit, in its place.
    pub(super) fn begin(
        &mut self,
        now: Moment,
        noticed: Moment,
        plan: QueryPlan,
        effects: &mut Vec<Effect>,
    ) {
        let id = plan.query.clone();
        let Some(state) = self.queries.get_mut(&id) else {
            return;
        };
        state.newest = plan.generation;
        let backup = (
            state.current.clone(),
            state.warming.take(),
            state.draining.clone(),
        );
        state.warming = Some(Warming {
            plan,
            since: now,
            noticed,
            gap: false,
        });
        let Some(cluster) = self.cluster.clone() else {
            return;
        };
        // What is only draining goes first when room is short, then the old copy itself.
        if self.is_crowded(&id, &cluster)
            && let Some(state) = self.queries.get_mut(&id)
        {
            state.draining.clear();
            if self.is_crowded(&id, &cluster)
                && let Some(state) = self.queries.get_mut(&id)
            {
                let had_plan = state.current.take().is_some();
                if let Some(warming) = &mut state.warming {
                    warming.gap = had_plan;
                }
            }
        }
        let mut sends = Vec::new();
        if !self.retarget(&mut sends) {
            // The step was refused: everything stays as it was.
            let others_move = self.others_move(&id);
            if let Some(state) = self.queries.get_mut(&id) {
                let plan = state.warming.take().map(|warming| warming.plan);
                (state.current, state.warming, state.draining) = backup;
                if others_move && let Some(plan) = plan {
                    // What another query is about to leave is in the way: to be thought of again when it has.
                    state.held_back = Some((plan.trigger, now));
                    return;
                }
            }
            effects.append(&mut sends);
            return;
        }
        effects.append(&mut sends);
        self.advance(now, effects);
    }

    /// Whether another query is between two plans.
    fn others_move(&self, id: &QueryId) -> bool {
        let is_moving = |(other, state): (&QueryId, &QueryState)| {
            other != id && (state.warming.is_some() || !state.draining.is_empty())
        };
        self.queries.iter().any(is_moving)
    }

    /// Whether a node of the plan on its way has no room for all that is live.
    fn is_crowded(&self, id: &QueryId, cluster: &Cluster) -> bool {
        let Some(warming) = self.queries.get(id).and_then(|s| s.warming.as_ref()) else {
            return false;
        };
        diff::crowded(&self.desired(), cluster)
            .iter()
            .any(|node| touches(&warming.plan, node))
    }

    /// Moves every query on as far as reports allow.
    pub(super) fn advance(&mut self, now: Moment, effects: &mut Vec<Effect>) {
        let ids: Vec<QueryId> = self.queries.keys().cloned().collect();
        for id in &ids {
            match self.readiness(id) {
                Readiness::Ready => {
                    if !self.switch(now, id, effects) {
                        self.watch_deadline(now, id, effects);
                    }
                }
                Readiness::Failed(node, reason) => {
                    self.call_off(now, id, &node, &reason, effects);
                }
                Readiness::NotYet => self.watch_deadline(now, id, effects),
            }
            self.drain(now, id, effects);
        }
        self.release_held_back(now, effects);
    }

    fn readiness(&self, id: &QueryId) -> Readiness {
        let Some(warming) = self.queries.get(id).and_then(|s| s.warming.as_ref()) else {
            return Readiness::NotYet;
        };
        for part in &warming.plan.operators {
            let (Some(node), Some(target)) =
                (self.nodes.get(&part.node), self.targets.get(&part.node))
            else {
                return Readiness::NotYet;
            };
            match node.instances.get(&part.instance) {
                Some(InstanceState::Failed(reason)) if node.has_applied(target.commit) => {
                    return Readiness::Failed(part.node.clone(), reason.clone());
                }
                Some(InstanceState::Ready) if node.has_applied(target.commit) => {}
                _ => return Readiness::NotYet,
            }
        }
        Readiness::Ready
    }

    fn watch_deadline(&mut self, now: Moment, id: &QueryId, effects: &mut Vec<Effect>) {
        let Some(warming) = self.queries.get(id).and_then(|s| s.warming.as_ref()) else {
            return;
        };
        if now.since(warming.since) < self.settings.schedule.warm_deadline {
            return;
        }
        let waiting = warming.plan.operators.iter().find(|part| {
            let node = self.nodes.get(&part.node);
            !node.is_some_and(|n| {
                matches!(n.instances.get(&part.instance), Some(InstanceState::Ready))
            })
        });
        let node = waiting.map_or_else(
            || warming.plan.operators[0].node.clone(),
            |part| part.node.clone(),
        );
        let reason = format!(
            "{} was not ready within {} s",
            waiting.map_or_else(|| "the plan".to_owned(), |part| part.operator.to_string()),
            self.settings.schedule.warm_deadline.as_secs()
        );
        self.call_off(now, id, &node, &reason, effects);
    }

    /// New frames take the new plan; the old one drains. False when that has to wait: what another query is about to leave is in the way.
    fn switch(&mut self, now: Moment, id: &QueryId, effects: &mut Vec<Effect>) -> bool {
        let left_at = Commit {
            term: self.term,
            number: self.commits + 1,
        };
        let others_move = self.others_move(id);
        let Some(state) = self.queries.get_mut(id) else {
            return true;
        };
        let Some(warming) = state.warming.take() else {
            return true;
        };
        let backup = (state.current.clone(), state.draining.clone());
        if let Some(old) = state.current.replace(warming.plan.clone()) {
            state.draining.push(Draining {
                plan: old,
                since: now,
                left_at,
            });
        }
        let mut sends = Vec::new();
        if let Some(cluster) = self.cluster.clone()
            && diff::crowded(&self.desired(), &cluster)
                .iter()
                .any(|node| touches(&warming.plan, node))
            && let Some(state) = self.queries.get_mut(id)
        {
            // No room to let the old one finish: the few frames it has are given up.
            state.draining.clear();
        }
        if !self.retarget(&mut sends) {
            if let Some(state) = self.queries.get_mut(id) {
                (state.current, state.draining) = backup;
                state.warming = Some(warming);
            }
            if others_move {
                return false;
            }
            // Not to be tried again at every report.
            effects.append(&mut sends);
            let node = self.queries[id].query.entry.clone();
            self.call_off(
                now,
                id,
                &node,
                "the switch was refused by the checker",
                effects,
            );
            return true;
        }
        if let Some(state) = self.queries.get_mut(id) {
            state.note_switch(now);
            state.said_infeasible = false;
            let at = state.may_improve_at(now);
            if let Some((_, moment)) = &mut state.held_back {
                *moment = at;
            }
        }
        self.assignment.commit = self.commit();
        self.assignment
            .plans
            .insert(id.clone(), warming.plan.clone());
        effects.push(Effect::Persist(Box::new(Persist::Assignment(
            self.assignment.clone(),
        ))));
        self.tell_app(now, &warming, effects);
        effects.append(&mut sends);
        true
    }

    fn tell_app(&self, now: Moment, warming: &Warming, effects: &mut Vec<Effect>) {
        let plan = &warming.plan;
        let Some(state) = self.queries.get(&plan.query) else {
            return;
        };
        let (Some(cluster), Some(sink)) = (&self.cluster, plan.operators.last()) else {
            return;
        };
        let (Some(entry), Some(sink)) =
            (peer(cluster, &state.query.entry), peer(cluster, &sink.node))
        else {
            return;
        };
        effects.push(Effect::PlanChanged(Box::new(PlanChange {
            query: plan.query.clone(),
            route: AppRoute {
                generation: plan.generation,
                entry,
                sink,
            },
            trigger: plan.trigger.clone(),
            summary: plan.summary(),
            plan: plan.clone(),
            noticed: warming.noticed,
            planned: warming.since,
            switched: now,
            gap: warming.gap.then_some(GAP_GUESS),
        })));
    }

    /// Forgets left plans that have nothing in flight any more.
    fn drain(&mut self, now: Moment, id: &QueryId, effects: &mut Vec<Effect>) {
        let Some(state) = self.queries.get_mut(id) else {
            return;
        };
        if state.draining.is_empty() {
            return;
        }
        let patience = state.query.frame_deadline() + self.settings.schedule.drain_slack;
        let entry = self.nodes.get(&state.query.entry);
        let before = state.draining.len();
        state.draining.retain(|draining| {
            let is_empty = entry.is_some_and(|node| {
                let key = (id.clone(), draining.plan.generation);
                node.has_applied(draining.left_at)
                    && node.in_flight.get(&key).copied().unwrap_or(0) == 0
            });
            !is_empty && now.since(draining.since) < patience
        });
        if state.draining.len() != before {
            self.retarget(effects);
            // There is room that was not there before.
            let waiting = self.waiting();
            self.reconsider(now, now, &waiting, effects);
        }
    }

    /// A plan that cannot be brought into force is dropped, and not chosen again for a while.
    pub(super) fn call_off(
        &mut self,
        now: Moment,
        id: &QueryId,
        node: &NodeId,
        reason: &str,
        effects: &mut Vec<Effect>,
    ) {
        let until = now + self.settings.schedule.avoid_failed_for;
        let Some(state) = self.queries.get_mut(id) else {
            return;
        };
        let Some(warming) = state.warming.take() else {
            return;
        };
        state.avoid.insert(shape_of(&warming.plan.operators), until);
        effects.push(Effect::Alarm(format!(
            "query {id}: generation {} was called off: {node}: {reason}",
            warming.plan.generation
        )));
        self.retarget(effects);
        let trigger = Trigger::PlanNotApplied {
            node: node.clone(),
            reason: reason.to_owned(),
        };
        self.reconsider(now, now, &[(id.clone(), trigger)], effects);
    }

    pub(super) fn refused(
        &mut self,
        now: Moment,
        node: &NodeId,
        commit: Commit,
        reason: &str,
        effects: &mut Vec<Effect>,
    ) {
        effects.push(Effect::Alarm(format!(
            "node {node} refused commit {commit}: {reason}"
        )));
        if self.targets.get(node).is_none_or(|t| t.commit != commit) {
            return;
        }
        let concerned: Vec<QueryId> = self
            .queries
            .iter()
            .filter(|(_, s)| s.warming.as_ref().is_some_and(|w| touches(&w.plan, node)))
            .map(|(id, _)| id.clone())
            .collect();
        for id in concerned {
            self.call_off(now, &id, node, reason, effects);
        }
    }

    pub(super) fn node_up(
        &mut self,
        node: NodeId,
        applied: Option<Commit>,
        instances: Vec<InstanceStatus>,
        effects: &mut Vec<Effect>,
    ) {
        if let Some(applied) = applied
            && applied > self.commit()
        {
            // A restored snapshot: the fleet is ahead of us. A new term makes everything we say newer than what it has.
            self.term = applied.term + 1;
            self.commits = 0;
            effects.push(Effect::Persist(Box::new(Persist::Term(self.term))));
        }
        let told = self.targets.get(&node);
        let is_up_to_date = told.is_some_and(|t| Some(t.commit) == applied);
        let must_hear = !is_up_to_date && (applied.is_some() || !instances.is_empty());
        let state = self.nodes.entry(node.clone()).or_default();
        state.adopt(applied, instances);
        state.must_hear = must_hear;
        if !is_up_to_date {
            // Whatever it was told before this session did not arrive.
            self.targets.remove(&node);
        }
        self.retarget(effects);
    }

    /// What every node has to do as things stand, numbered with the next commit.
    fn desired(&self) -> BTreeMap<NodeId, NodeTarget> {
        let Some(cluster) = &self.cluster else {
            return BTreeMap::new();
        };
        let live: Vec<LiveQuery<'_>> = self
            .queries
            .values()
            .map(|state| LiveQuery {
                query: &state.query,
                app: state.app,
                current: state.current_generation(),
                plans: state.live_plans(),
                standby: &state.standby,
            })
            .collect();
        let commit = Commit {
            term: self.term,
            number: self.commits + 1,
        };
        node_targets(&live, &self.catalogue, cluster, commit)
    }

    /// Tells every node what has changed for it, after the checker has agreed; tells whether it has.
    pub(super) fn retarget(&mut self, effects: &mut Vec<Effect>) -> bool {
        let Some(cluster) = self.cluster.clone() else {
            return true;
        };
        let mut desired = self.desired();
        let commit = Commit {
            term: self.term,
            number: self.commits + 1,
        };
        let told = self.targets.keys();
        let stale = self
            .nodes
            .iter()
            .filter(|(_, n)| n.must_hear)
            .map(|(id, _)| id);
        for node in told.chain(stale) {
            // A node that is not needed any more is told so.
            desired.entry(node.clone()).or_insert_with(|| NodeTarget {
                commit,
                node: node.clone(),
                instances: Vec::new(),
                queries: Vec::new(),
                peers: Vec::new(),
                standby: Vec::new(),
            });
        }
        desired.retain(|node, target| {
            self.nodes.get(node).is_some_and(|n| {
                n.known && (n.must_hear || self.targets.contains_key(node) || !is_empty(target))
            }) && cluster.nodes.contains_key(node)
        });
        for (node, target) in &mut desired {
            if let Some(before) = self.targets.get(node)
                && is_same_work(before, target)
            {
                target.commit = before.commit;
            }
        }
        let violations = check::step(&check::Step {
            cluster: &cluster,
            queries: self.steps(),
            targets: &desired,
            before: &self.targets,
            last: self.commit(),
        });
        if !violations.is_empty() {
            let list: Vec<String> = violations.iter().map(ToString::to_string).collect();
            effects.push(Effect::Alarm(format!(
                "a step was refused and the last one stays: {}",
                list.join("; ")
            )));
            return false;
        }
        if desired.values().any(|t| t.commit == commit) {
            self.commits += 1;
        }
        for (node, target) in &desired {
            if target.commit == commit {
                if let Some(state) = self.nodes.get_mut(node) {
                    state.must_hear = false;
                }
                effects.push(Effect::SendTarget {
                    node: node.clone(),
                    target: Box::new(target.clone()),
                });
            }
        }
        self.targets = desired;
        true
    }

    /// What the checker holds the targets against: queries whose nodes have all connected or are gone. The others wait for a node that
    /// is there but has not said yet what it runs; nothing is told of them.
    fn steps(&self) -> BTreeMap<QueryId, check::QueryStep<'_>> {
        let is_settled = |node: &NodeId| {
            let is_online = self
                .cluster
                .as_ref()
                .and_then(|c| c.nodes.get(node))
                .is_some_and(|n| n.online);
            !is_online || self.nodes.get(node).is_some_and(|n| n.known)
        };
        self.queries
            .iter()
            .filter(|(_, state)| {
                is_settled(&state.query.entry)
                    && state
                        .live_plans()
                        .iter()
                        .all(|p| p.operators.iter().all(|o| is_settled(&o.node)))
            })
            .map(|(id, state)| {
                let step = check::QueryStep {
                    query: &state.query,
                    current: state.current_generation(),
                    plans: state.live_plans(),
                };
                (id.clone(), step)
            })
            .collect()
    }

    /// The moment of the next deadline.
    pub(super) fn wake(&self, effects: &mut Vec<Effect>) {
        let mut at: Option<Moment> = None;
        let mut sooner = |moment: Moment| at = Some(at.map_or(moment, |a| a.min(moment)));
        for state in self.queries.values() {
            if let Some(warming) = &state.warming {
                sooner(warming.since + self.settings.schedule.warm_deadline);
            }
            for draining in &state.draining {
                let patience = state.query.frame_deadline() + self.settings.schedule.drain_slack;
                sooner(draining.since + patience);
            }
            if let Some((_, moment)) = &state.held_back {
                sooner(*moment);
            }
        }
        effects.extend(at.map(Effect::WakeAt));
    }
}

fn is_empty(target: &NodeTarget) -> bool {
    target.instances.is_empty() && target.queries.is_empty() && target.standby.is_empty()
}

/// Whether two targets ask for the same, whatever their commit.
fn is_same_work(a: &NodeTarget, b: &NodeTarget) -> bool {
    a.instances == b.instances
        && a.queries == b.queries
        && a.peers == b.peers
        && a.standby == b.standby
}
