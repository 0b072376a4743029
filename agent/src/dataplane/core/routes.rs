//! Routes as a node knows them: a view of its target for looking things up.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use compass_shared::ids::{Generation, InstanceId, NodeId, OperatorId, QueryId};
use compass_shared::model::catalogue::StateKind;
use compass_shared::model::plan::{NodeTarget, QueryTarget, Route, RouteStep};

/// What a node's target says about queries and their ways.
#[derive(Debug, Clone)]
pub struct Routes {
    me: NodeId,
    queries: BTreeMap<QueryId, QueryTarget>,
    instances: BTreeSet<InstanceId>,
    stateful: BTreeSet<InstanceId>,
}

impl Routes {
    /// Knows no query.
    pub fn empty(me: NodeId) -> Self {
        Self {
            me,
            queries: BTreeMap::new(),
            instances: BTreeSet::new(),
            stateful: BTreeSet::new(),
        }
    }

    /// The routes of a target.
    pub fn new(target: &NodeTarget) -> Self {
        Self {
            me: target.node.clone(),
            queries: target
                .queries
                .iter()
                .map(|query| (query.query.clone(), query.clone()))
                .collect(),
            instances: target.instances.iter().map(|i| i.instance).collect(),
            stateful: target
                .instances
                .iter()
                .filter(|i| i.state == StateKind::Snapshot)
                .map(|i| i.instance)
                .collect(),
        }
    }

    /// This node.
    pub fn me(&self) -> &NodeId {
        &self.me
    }

    /// All queries, by name.
    pub fn queries(&self) -> impl Iterator<Item = &QueryTarget> {
        self.queries.values()
    }

    /// One query.
    pub fn query(&self, query: &QueryId) -> Option<&QueryTarget> {
        self.queries.get(query)
    }

    /// After this long a frame of the query is worthless.
    pub fn deadline(&self, query: &QueryId) -> Option<Duration> {
        self.queries.get(query).map(|q| q.frame_deadline)
    }

    /// The route that new frames take; `None` before there is a plan.
    pub fn current(&self, query: &QueryId) -> Option<&Route> {
        let target = self.queries.get(query)?;
        target
            .routes
            .iter()
            .find(|r| r.generation == target.current)
    }

    /// The route of one generation.
    pub fn route(&self, query: &QueryId, generation: Generation) -> Option<&Route> {
        self.queries
            .get(query)?
            .routes
            .iter()
            .find(|r| r.generation == generation)
    }

    /// The step of an operator on the route of a generation. A generation older than all that are listed has been retired, and what
    /// is left of it follows the current one; a newer one is not known yet.
    pub fn step(
        &self,
        query: &QueryId,
        generation: Generation,
        operator: &OperatorId,
    ) -> Option<&RouteStep> {
        let route = match self.route(query, generation) {
            Some(route) => route,
            None if self.is_retired(query, generation) => self.current(query)?,
            None => return None,
        };
        route.steps.iter().find(|s| s.operator == *operator)
    }

    /// Whether frames of this generation wait for a target that has not arrived yet.
    pub fn is_unknown(&self, query: &QueryId, generation: Generation) -> bool {
        self.route(query, generation).is_none() && !self.is_retired(query, generation)
    }

    fn is_retired(&self, query: &QueryId, generation: Generation) -> bool {
        self.current(query)
            .is_some_and(|current| generation < current.generation)
    }

    /// The step that reads the source.
    pub fn first(route: &Route) -> Option<&RouteStep> {
        route.steps.iter().find(|s| s.inputs.is_empty())
    }

    /// Where the state of an operator is that a generation runs in `instance`: the newest older generation that ran it elsewhere.
    pub fn left(
        &self,
        query: &QueryId,
        generation: Generation,
        operator: &OperatorId,
        instance: InstanceId,
    ) -> Option<(Generation, &RouteStep)> {
        let older = self.queries.get(query)?.routes.iter();
        let left = older
            .filter(|route| route.generation < generation)
            .max_by_key(|route| route.generation)?;
        let step = left.steps.iter().find(|s| s.operator == *operator)?;
        (step.instance != instance).then_some((left.generation, step))
    }

    /// Instances that run here.
    pub fn instances(&self) -> impl Iterator<Item = InstanceId> {
        self.instances.iter().copied()
    }

    /// Whether the instance runs here.
    pub fn has_instance(&self, instance: InstanceId) -> bool {
        self.instances.contains(&instance)
    }

    /// Whether the instance keeps a state that can be moved.
    pub fn is_stateful(&self, instance: InstanceId) -> bool {
        self.stateful.contains(&instance)
    }

    /// How long a frame may wait for each instance here before that is worth reporting: a quarter of the shortest frame deadline, which
    /// is the latency bound of a query that has one.
    pub fn queue_bounds(&self) -> BTreeMap<InstanceId, Duration> {
        let mut bounds = BTreeMap::new();
        for query in self.queries.values() {
            let steps = query.routes.iter().flat_map(|route| &route.steps);
            for step in steps.filter(|step| step.node == self.me) {
                let own = query.frame_deadline / 4;
                let bound = bounds.entry(step.instance).or_insert(own);
                *bound = own.min(*bound);
            }
        }
        bounds
    }

    /// Nodes that a node exchanges frames with, over all routes.
    pub fn neighbours(&self) -> BTreeSet<NodeId> {
        let mut found = BTreeSet::new();
        for query in self.queries.values() {
            for route in &query.routes {
                let place = |operator: &OperatorId| {
                    route
                        .steps
                        .iter()
                        .find(|s| s.operator == *operator)
                        .map(|s| s.node.clone())
                };
                for step in &route.steps {
                    let mut ends: Vec<NodeId> = step.inputs.iter().filter_map(place).collect();
                    if step.inputs.is_empty() {
                        ends.push(query.entry.clone());
                    }
                    for other in ends {
                        if step.node == self.me && other != self.me {
                            found.insert(other);
                        } else if other == self.me && step.node != self.me {
                            found.insert(step.node.clone());
                        }
                    }
                }
            }
        }
        found
    }
}
