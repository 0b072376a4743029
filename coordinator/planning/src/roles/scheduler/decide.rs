//! Which plan each query gets: when to think again, among what, and whether what comes out is worth a switch.

use std::collections::BTreeMap;
use std::sync::Arc;

use compass_shared::ids::{Commit, Digest, Generation, NodeId, QueryId};
use compass_shared::model::cluster::{Cluster, Resources, Scheduling};
use compass_shared::model::plan::{PlanStatus, QueryPlan};
use compass_shared::model::query::Query;
use compass_shared::model::trigger::{SloKind, Trigger};
use compass_shared::time::Moment;

use super::state::{Draining, QueryState, touches};
use super::{Effect, Persist, Scheduler};
use crate::candidate::{
    Candidate, Candidates, Front, Preference, Reason, assess, enumerate, shape_of,
};
use crate::check;
use crate::explain;
use crate::predict::{Context, usable_bps};
use crate::profile::QueryProfile;
use crate::roles::explorer::Proposal;
use crate::schedule::{Current, Decision, Demand, Problem, Schedule, schedule};
use crate::space::Space;
use crate::targets::standby;

/// The least rate a query is planned for, as a part of what it announced: no traffic releases shares but not the plan.
const IDLE_PART: f64 = 0.1;

/// What the plan in force is worth today.
enum Standing {
    /// There is none.
    None,
    /// It meets its SLOs as far as can be told; what it costs now and needs of links.
    Fine {
        cost_usd_per_h: f64,
        links: BTreeMap<(NodeId, NodeId), f64>,
        safety: f64,
    },
    /// It does not, or cannot run; why.
    Broken(String),
    /// The content has changed and something safer can run.
    Outdone,
}

impl Scheduler {
    pub(super) fn register(
        &mut self,
        now: Moment,
        query: Arc<Query>,
        app: Option<Digest>,
        effects: &mut Vec<Effect>,
    ) {
        let id = query.id.clone();
        let space = match Space::new(&query.pipeline, &self.catalogue) {
            Ok(space) => space,
            Err(error) => {
                effects.push(Effect::Infeasible {
                    query: id,
                    report: error.to_string(),
                });
                return;
            }
        };
        let newest = match self.queries.get_mut(&id) {
            None => Generation(0),
            Some(state)
                if state.query.pipeline == query.pipeline && state.query.entry == query.entry =>
            {
                // The same work under other SLOs: what runs stays until something better is chosen.
                state.rate_hz = query.rate_hz();
                state.query = query;
                state.app = app;
                self.retarget(effects);
                self.reconsider(now, now, &[(id, Trigger::QueryRegistered)], effects);
                return;
            }
            Some(state) => state.newest,
        };
        let mut state = QueryState::new(query, app, space);
        state.newest = newest;
        self.queries.insert(id, state);
        self.retarget(effects);
    }

    pub(super) fn withdraw(&mut self, now: Moment, query: &QueryId, effects: &mut Vec<Effect>) {
        if self.queries.remove(query).is_none() {
            return;
        }
        let mut sends = Vec::new();
        self.retarget(&mut sends);
        self.assignment.plans.remove(query);
        self.assignment.commit = self.commit();
        effects.push(Effect::Persist(Box::new(Persist::Assignment(
            self.assignment.clone(),
        ))));
        effects.append(&mut sends);
        let all = self.everyone(&Trigger::QueryWithdrawn);
        self.reconsider(now, now, &all, effects);
    }

    pub(super) fn propose(&mut self, now: Moment, proposal: Proposal, effects: &mut Vec<Effect>) {
        let Some(state) = self.queries.get_mut(&proposal.query) else {
            return;
        };
        if proposal.certified {
            state.standby = standby(
                &state.query,
                &self.catalogue,
                &proposal.front.profile,
                self.settings.schedule.standby_bytes,
            );
        }
        state.front = Some(proposal.front);
        state.effort = (proposal.trials, proposal.cache_hits);
        state.certified = proposal.certified;
        state.reopened = false;
        if proposal.certified
            && let Some(plan) = &mut state.current
            && plan.status == PlanStatus::Guessed
        {
            plan.status = PlanStatus::Certified;
            self.assignment
                .plans
                .insert(proposal.query.clone(), plan.clone());
            effects.push(Effect::Persist(Box::new(Persist::Assignment(
                self.assignment.clone(),
            ))));
        }
        self.retarget(effects);
        self.reconsider(now, now, &[(proposal.query, proposal.trigger)], effects);
    }

    pub(super) fn cluster_changed(
        &mut self,
        now: Moment,
        cluster: Arc<Cluster>,
        triggers: Vec<Trigger>,
        effects: &mut Vec<Effect>,
    ) {
        for (id, node) in &cluster.nodes {
            if !node.online
                && let Some(state) = self.nodes.get_mut(id)
            {
                // Whatever it said holds no longer; it will say anew when it is back.
                state.known = false;
            }
        }
        self.cluster = Some(cluster);
        self.retarget(effects);
        let Some(last) = triggers.last() else {
            // A mere update repairs nothing that is not broken, but a query without a plan may now have one.
            let waiting = self.waiting();
            self.reconsider(now, now, &waiting, effects);
            return;
        };
        let all: Vec<_> = self
            .queries
            .iter()
            .filter(|(_, s)| s.front.is_some())
            .map(|(id, state)| (id.clone(), pertinent(&triggers, state, last)))
            .collect();
        self.reconsider(now, now, &all, effects);
    }

    pub(super) fn noticed(
        &mut self,
        now: Moment,
        query: &QueryId,
        trigger: Trigger,
        effects: &mut Vec<Effect>,
    ) {
        let Some(state) = self.queries.get_mut(query) else {
            return;
        };
        if let Trigger::LoadShifted(measurement) = &trigger {
            let announced = state.query.rate_hz();
            state.rate_hz = measurement.value.max(announced * IDLE_PART);
        }
        let is_unexplained = match &trigger {
            Trigger::SloViolated { slo, .. } => *slo != SloKind::Cost,
            Trigger::ShareNotAchieved { .. } => true,
            _ => false,
        };
        let before = state.intended().map(|p| p.generation);
        self.reconsider(now, now, &[(query.clone(), trigger.clone())], effects);
        // The model sees nothing wrong with the plan, the app does: the model has to learn.
        let Some(state) = self.queries.get_mut(query) else {
            return;
        };
        if is_unexplained && !state.reopened && state.intended().map(|p| p.generation) == before {
            state.reopened = true;
            effects.push(Effect::Reopen {
                query: query.clone(),
                trigger,
            });
        }
    }

    pub(super) fn rollback(
        &mut self,
        now: Moment,
        query: &QueryId,
        earlier: QueryPlan,
        effects: &mut Vec<Effect>,
    ) {
        let Some(state) = self.queries.get(query) else {
            return;
        };
        let plan = QueryPlan {
            generation: state.newest.next(),
            parent: state.current.as_ref().map(|p| p.generation),
            trigger: Trigger::Reverted(earlier.generation),
            ..earlier
        };
        let Some(violations) = self.violations(&plan) else {
            return;
        };
        if !violations.is_empty() {
            effects.push(Effect::Alarm(refusal(&plan, &violations)));
            return;
        }
        self.begin(now, now, plan, effects);
    }

    /// Queries that are known and have no plan.
    pub(super) fn waiting(&self) -> Vec<(QueryId, Trigger)> {
        self.queries
            .iter()
            .filter(|(_, s)| s.intended().is_none() && s.front.is_some())
            .map(|(id, _)| (id.clone(), Trigger::QueryRegistered))
            .collect()
    }

    /// All queries with the same trigger.
    fn everyone(&self, trigger: &Trigger) -> Vec<(QueryId, Trigger)> {
        self.queries
            .iter()
            .filter(|(_, s)| s.front.is_some())
            .map(|(id, _)| (id.clone(), trigger.clone()))
            .collect()
    }

    /// Improvements whose dwell time is over.
    pub(super) fn release_held_back(&mut self, now: Moment, effects: &mut Vec<Effect>) {
        let due: Vec<(QueryId, Trigger)> = self
            .queries
            .iter()
            .filter_map(|(id, s)| {
                let (trigger, at) = s.held_back.as_ref()?;
                (*at <= now).then(|| (id.clone(), trigger.clone()))
            })
            .collect();
        if due.is_empty() {
            return;
        }
        for (id, _) in &due {
            if let Some(state) = self.queries.get_mut(id) {
                state.held_back = None;
            }
        }
        self.reconsider(now, now, &due, effects);
    }

    /// Thinks again about some queries; the others keep what they have.
    pub(super) fn reconsider(
        &mut self,
        now: Moment,
        noticed: Moment,
        causes: &[(QueryId, Trigger)],
        effects: &mut Vec<Effect>,
    ) {
        let Some(cluster) = self.cluster.clone() else {
            return;
        };
        if causes.is_empty() {
            return;
        }
        let mut problem = Problem {
            nodes: capacities(&cluster),
            links: rates(&cluster, &self.settings),
            demands: Vec::new(),
        };
        let mut options: BTreeMap<QueryId, Candidates> = BTreeMap::new();
        let mut standings: BTreeMap<QueryId, Standing> = BTreeMap::new();
        for (id, state) in &self.queries {
            let is_concerned = causes.iter().any(|(query, _)| query == id);
            let standing = self.standing(state, &cluster);
            let Some(front) = state.front.as_ref().filter(|_| is_concerned) else {
                reserve(&mut problem, state, &standing);
                continue;
            };
            let candidates = self.candidates(now, state, &cluster);
            let standing = distrusted(standing, front, &candidates);
            problem
                .demands
                .push(demand(now, state, front, &standing, &candidates));
            options.insert(id.clone(), candidates);
            standings.insert(id.clone(), standing);
        }
        let mut chosen = schedule(&problem, &self.settings.schedule);
        // A broken plan for which there is nothing better stays, and what it holds is not given to others.
        let stuck = self.keep_broken(&mut problem, &chosen);
        if !stuck.is_empty() {
            chosen = schedule(&problem, &self.settings.schedule);
        }
        // Who has to give way goes first: the others are to find the room.
        for (id, decision) in &chosen.decisions {
            let is_pushed_out = *decision == Decision::Unserved
                && self.queries.get(id).is_some_and(|s| s.intended().is_some());
            if is_pushed_out {
                self.evict(now, id, effects);
            }
        }
        for (id, decision) in chosen.decisions {
            let Some((_, trigger)) = causes.iter().find(|(query, _)| *query == id) else {
                continue;
            };
            let candidates = &options[&id];
            match decision {
                Decision::Keep if stuck.contains(&id) => {
                    self.unserved(&id, trigger, &standings[&id], candidates, effects);
                }
                Decision::Keep => self.keep(now, &id, trigger, candidates),
                Decision::Take(index) => {
                    let candidate = candidates.feasible[index].clone();
                    if matches!(standings[&id], Standing::Broken(_)) {
                        self.alarm_if_again(now, &id, trigger, effects);
                    }
                    self.take(now, noticed, &id, trigger, &candidate, candidates, effects);
                }
                Decision::Unserved => {
                    self.unserved(&id, trigger, &standings[&id], candidates, effects);
                }
            }
        }
    }

    /// Lets queries whose plan is broken but cannot be replaced hold on to what they have; tells which.
    fn keep_broken(&self, problem: &mut Problem, chosen: &Schedule) -> Vec<QueryId> {
        let mut stuck = Vec::new();
        for demand in &mut problem.demands {
            let is_unserved = chosen.decisions.get(&demand.query) == Some(&Decision::Unserved);
            let plan = self.queries.get(&demand.query).and_then(|s| s.intended());
            if let (true, None, Some(plan)) = (is_unserved, &demand.current, plan) {
                let mut nodes = nodes_of(plan);
                // A node that is gone has nothing to hold.
                nodes.retain(|id, _| problem.nodes.contains_key(id));
                demand.current = Some(Current {
                    content: plan.content_hash(),
                    nodes,
                    links: BTreeMap::new(),
                    cost_usd_per_h: plan.expected.cost_usd_per_h,
                });
                demand.may_improve = false;
                stuck.push(demand.query.clone());
            }
        }
        stuck
    }

    /// Takes a query's plan away for one of higher priority.
    fn evict(&mut self, now: Moment, id: &QueryId, effects: &mut Vec<Effect>) {
        let left_at = Commit {
            term: self.term,
            number: self.commits + 1,
        };
        let Some(state) = self.queries.get_mut(id) else {
            return;
        };
        state.warming = None;
        if let Some(plan) = state.current.take() {
            state.draining.push(Draining {
                plan,
                since: now,
                left_at,
            });
        }
        state.said_infeasible = true;
        let mut sends = Vec::new();
        self.retarget(&mut sends);
        self.assignment.plans.remove(id);
        self.assignment.commit = self.commit();
        effects.push(Effect::Persist(Box::new(Persist::Assignment(
            self.assignment.clone(),
        ))));
        effects.push(Effect::Infeasible {
            query: id.clone(),
            report: "a query of higher priority needs what this one had".to_owned(),
        });
        effects.append(&mut sends);
    }

    /// Remembers an improvement that the dwell time holds back.
    fn keep(&mut self, now: Moment, id: &QueryId, trigger: &Trigger, candidates: &Candidates) {
        let gain = self.settings.schedule.switch_gain_min;
        let Some(state) = self.queries.get_mut(id) else {
            return;
        };
        let at = state.may_improve_at(now);
        let (Some(best), Some(plan)) = (candidates.feasible.first(), state.intended()) else {
            return;
        };
        let saves = best.expected.cost_usd_per_h < plan.expected.cost_usd_per_h * (1.0 - gain);
        if at > now && saves {
            // What made it possible is its reason, not what happens to come by while it waits.
            state.held_back.get_or_insert_with(|| (trigger.clone(), at));
        }
    }

    fn unserved(
        &mut self,
        id: &QueryId,
        trigger: &Trigger,
        standing: &Standing,
        candidates: &Candidates,
        effects: &mut Vec<Effect>,
    ) {
        let Some(state) = self.queries.get(id) else {
            return;
        };
        let Some(report) = self.with_context(state, |context| {
            explain::infeasible(context, &state.space, candidates)
        }) else {
            return;
        };
        let was_broken = match standing {
            Standing::Broken(why) => Some(why.clone()),
            Standing::None | Standing::Fine { .. } | Standing::Outdone => None,
        };
        let Some(state) = self.queries.get_mut(id) else {
            return;
        };
        if let Some(why) = was_broken {
            effects.push(Effect::Alarm(format!(
                "query {id}: {trigger}; the plan in force stays although {why}: {report}"
            )));
            if !state.reopened {
                state.reopened = true;
                effects.push(Effect::Reopen {
                    query: id.clone(),
                    trigger: trigger.clone(),
                });
            }
        }
        // While a search goes on its explorer speaks; afterwards it is ours to say.
        if !state.said_infeasible && !matches!(trigger, Trigger::QueryRegistered) {
            state.said_infeasible = true;
            effects.push(Effect::Infeasible {
                query: id.clone(),
                report,
            });
        }
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "everything a decision and its explanation consist of"
    )]
    fn take(
        &mut self,
        now: Moment,
        noticed: Moment,
        id: &QueryId,
        trigger: &Trigger,
        candidate: &Candidate,
        candidates: &Candidates,
        effects: &mut Vec<Effect>,
    ) {
        let Some(state) = self.queries.get(id) else {
            return;
        };
        let intended = state.intended();
        if intended.is_some_and(|p| p.content_hash() == candidate.content) {
            return;
        }
        let is_same_shape = intended.is_some_and(|p| shape_of(&p.operators) == candidate.shape());
        let status = if is_same_shape && state.certified {
            PlanStatus::Certified
        } else {
            PlanStatus::Guessed
        };
        let plan = QueryPlan {
            query: id.clone(),
            generation: state.newest.next(),
            parent: state.current.as_ref().map(|p| p.generation),
            operators: candidate.operators.clone(),
            status,
            trigger: trigger.clone(),
            expected: candidate.expected,
        };
        let Some(violations) = self.violations(&plan) else {
            return;
        };
        if !violations.is_empty() {
            effects.push(Effect::Alarm(refusal(&plan, &violations)));
            return;
        }
        let Some(explanation) = self.with_context(state, |context| {
            explain::explain(
                context,
                &state.space,
                candidates,
                candidate,
                plan.generation,
                trigger,
                state.effort,
            )
        }) else {
            return;
        };
        if let Some(state) = self.queries.get_mut(id) {
            state.explanation = Some(explanation.clone());
        }
        effects.push(Effect::Persist(Box::new(Persist::Plan {
            plan: Box::new(plan.clone()),
            explanation: Box::new(explanation),
        })));
        self.begin(now, noticed, plan, effects);
    }

    /// A second repair for the same cause so soon says that the first did not help.
    fn alarm_if_again(
        &mut self,
        now: Moment,
        id: &QueryId,
        trigger: &Trigger,
        effects: &mut Vec<Effect>,
    ) {
        let within = self.settings.schedule.same_cause_within;
        let Some(state) = self.queries.get_mut(id) else {
            return;
        };
        let cause = trigger.name().to_owned();
        let is_again = state
            .repaired
            .as_ref()
            .is_some_and(|(name, at)| *name == cause && now.since(*at) < within);
        if is_again {
            effects.push(Effect::Alarm(format!(
                "query {id}: second repair for {cause} within {} s ({trigger})",
                within.as_secs()
            )));
        }
        state.repaired = Some((cause, now));
    }

    fn violations(&self, plan: &QueryPlan) -> Option<Vec<check::Violation>> {
        let state = self.queries.get(&plan.query)?;
        let cluster = self.cluster.as_ref()?;
        let context = check::PlanContext {
            query: &state.query,
            catalogue: &self.catalogue,
            cluster,
            newest: state.newest,
            in_force: state.current.as_ref(),
        };
        Some(check::plan(&context, plan))
    }

    fn with_context<T>(
        &self,
        state: &QueryState,
        then: impl FnOnce(&Context<'_>) -> T,
    ) -> Option<T> {
        let cluster = self.cluster.as_ref()?;
        let nothing = QueryProfile::default();
        let context = Context {
            query: &state.query,
            catalogue: &self.catalogue,
            cluster,
            profile: state.front.as_ref().map_or(&nothing, |f| &f.profile),
            settings: &self.settings.predict,
            rate_hz: state.rate_hz,
        };
        Some(then(&context))
    }

    fn candidates(&self, now: Moment, state: &QueryState, cluster: &Cluster) -> Candidates {
        let Some(front) = &state.front else {
            return Candidates::default();
        };
        let context = Context {
            query: &state.query,
            catalogue: &self.catalogue,
            cluster,
            profile: &front.profile,
            settings: &self.settings.predict,
            rate_hz: state.rate_hz,
        };
        let mut all = enumerate(&context, &state.space, front);
        if all.feasible.is_empty() {
            // Nothing is believed: what may be accurate enough is better than nothing, until samples tell.
            let hopeful = Front {
                profile: front.profile.clone(),
                preference: Preference::Safest,
            };
            all.feasible = enumerate(&context, &state.space, &hopeful).feasible;
        }
        all.feasible.retain(|c| {
            state
                .avoid
                .get(&c.shape())
                .is_none_or(|until| *until <= now)
        });
        all
    }

    /// Holds the plan in force (or on its way) against today's fleet.
    fn standing(&self, state: &QueryState, cluster: &Cluster) -> Standing {
        let Some(plan) = state.intended() else {
            return Standing::None;
        };
        for part in &plan.operators {
            let Some(node) = cluster.nodes.get(&part.node) else {
                return Standing::Broken(format!("node {} is not known", part.node));
            };
            if !node.online {
                return Standing::Broken(format!("node {} is lost", part.node));
            }
            if node.scheduling == Scheduling::Draining {
                return Standing::Broken(format!("node {} drains", part.node));
            }
        }
        let unknown = Standing::Fine {
            cost_usd_per_h: plan.expected.cost_usd_per_h,
            links: BTreeMap::new(),
            safety: 0.0,
        };
        let Some(front) = &state.front else {
            return unknown;
        };
        let context = Context {
            query: &state.query,
            catalogue: &self.catalogue,
            cluster,
            profile: &front.profile,
            settings: &self.settings.predict,
            rate_hz: state.rate_hz,
        };
        match assess(&context, &state.space, &plan.operators) {
            None => unknown,
            Some(assessed) => match assessed.broken {
                None => Standing::Fine {
                    cost_usd_per_h: assessed.expected.cost_usd_per_h,
                    links: assessed.links,
                    safety: assessed.safety,
                },
                Some(reason) => Standing::Broken(in_short(&reason)),
            },
        }
    }
}

/// How much safer a candidate must be to replace a plan while the content is new: a knob's step nearer to golden, or this much more
/// accurate.
const SAFETY_GAIN_MIN: f64 = 0.05;

/// While the content is new, a plan is trusted only if nothing markedly safer could run.
fn distrusted(standing: Standing, front: &Front, candidates: &Candidates) -> Standing {
    let Standing::Fine { safety, .. } = &standing else {
        return standing;
    };
    let is_outdone = candidates
        .feasible
        .first()
        .is_some_and(|best| best.safety > safety + SAFETY_GAIN_MIN);
    if front.preference == Preference::Safest && is_outdone {
        return Standing::Outdone;
    }
    standing
}

fn in_short(reason: &Reason) -> String {
    format!("its {} does not hold", reason.name())
}

fn refusal(plan: &QueryPlan, violations: &[check::Violation]) -> String {
    let list: Vec<String> = violations.iter().map(ToString::to_string).collect();
    format!(
        "query {}: generation {} was refused and the last good plan stays: {}",
        plan.query,
        plan.generation,
        list.join("; ")
    )
}

/// Of several triggers the one that concerns a query's plan, else the last.
fn pertinent(triggers: &[Trigger], state: &QueryState, last: &Trigger) -> Trigger {
    let concerns = |trigger: &&Trigger| {
        let Some(plan) = state.intended() else {
            return false;
        };
        let is_on = |node: &NodeId| touches(plan, node) || state.query.entry == *node;
        match trigger {
            Trigger::NodeLost(node) | Trigger::NodeJoined(node) => is_on(node),
            Trigger::LinkDegraded { from, to, .. } | Trigger::LinkRecovered { from, to, .. } => {
                is_on(from) && is_on(to)
            }
            _ => true,
        }
    };
    triggers.iter().find(concerns).unwrap_or(last).clone()
}

fn demand(
    now: Moment,
    state: &QueryState,
    front: &Front,
    standing: &Standing,
    candidates: &Candidates,
) -> Demand {
    let current = match (standing, state.intended()) {
        (
            Standing::Fine {
                cost_usd_per_h,
                links,
                ..
            },
            Some(plan),
        ) => Some(Current {
            content: plan.content_hash(),
            nodes: nodes_of(plan),
            links: links.clone(),
            cost_usd_per_h: *cost_usd_per_h,
        }),
        _ => None,
    };
    Demand {
        query: state.query.id.clone(),
        priority: state.query.priority,
        candidates: candidates.feasible.clone(),
        current,
        may_improve: state.may_improve_at(now) <= now,
        preference: front.preference,
    }
}

/// What a plan holds of each node.
fn nodes_of(plan: &QueryPlan) -> BTreeMap<NodeId, Resources> {
    let mut nodes: BTreeMap<NodeId, Resources> = BTreeMap::new();
    for part in &plan.operators {
        let total = nodes.entry(part.node.clone()).or_default();
        *total = total.plus(&part.share);
    }
    nodes
}

/// Takes what an unconcerned query holds out of what there is.
fn reserve(problem: &mut Problem, state: &QueryState, standing: &Standing) {
    let Some(plan) = state.intended() else {
        return;
    };
    for (id, need) in nodes_of(plan) {
        if let Some(free) = problem.nodes.get_mut(&id) {
            *free = free.minus(&need).unwrap_or_default();
        }
    }
    if let Standing::Fine { links, .. } = standing {
        for (pair, need) in links {
            if let Some(free) = problem.links.get_mut(pair) {
                *free = (*free - need).max(0.0);
            }
        }
    }
}

fn capacities(cluster: &Cluster) -> BTreeMap<NodeId, Resources> {
    cluster
        .nodes
        .iter()
        .filter(|(_, node)| node.online && node.scheduling != Scheduling::Draining)
        .map(|(id, node)| (id.clone(), node.description.capacity))
        .collect()
}

fn rates(cluster: &Cluster, settings: &crate::Settings) -> BTreeMap<(NodeId, NodeId), f64> {
    cluster
        .links
        .iter()
        .map(|(pair, link)| (pair.clone(), usable_bps(link, &settings.predict)))
        .collect()
}
