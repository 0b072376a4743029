//! What each node has to do for the plans in force, those being warmed and those draining.
//!
//! Start at [`node_targets`]. A node's target holds the instances it runs (the shares of all queries an instance serves added up; of
//! several generations of one query the larger), the routes of every generation that may still be in flight, and the keys of its
//! neighbours. The content depends on the plans alone, in a fixed order, so that equal plans give equal targets.
//!
//! Deliberately absent: when to move from one step to the next, and whether a target is allowed (see [`crate::check`]).

use std::collections::{BTreeMap, BTreeSet};

use compass_shared::ids::{Commit, Digest, Generation, InstanceId, NodeId, QueryId};
use compass_shared::model::catalogue::Catalogue;
use compass_shared::model::cluster::{Cluster, Resources};
use compass_shared::model::plan::{
    InstanceTarget, NodeTarget, Peer, QueryPlan, QueryTarget, Route, RouteStep,
};
use compass_shared::model::query::Query;

#[cfg(test)]
mod tests;

/// One query as the fleet has to carry it out now.
#[derive(Debug, Clone)]
pub struct LiveQuery<'a> {
    /// The query.
    pub query: &'a Query,
    /// Fingerprint of the app's key.
    pub app: Option<Digest>,
    /// The generation new frames get; 0 while there is no plan.
    pub current: Generation,
    /// Every plan that may have frames in flight or must be warm, oldest first.
    pub plans: Vec<&'a QueryPlan>,
}

/// How the frames of a plan travel.
pub fn route(query: &Query, plan: &QueryPlan) -> Route {
    let pipeline = &query.pipeline;
    let steps = plan
        .operators
        .iter()
        .map(|part| RouteStep {
            operator: part.operator.clone(),
            node: part.node.clone(),
            instance: part.instance,
            inputs: pipeline
                .operator(&part.operator)
                .map(|o| o.inputs.clone())
                .unwrap_or_default(),
            readers: pipeline
                .readers(&part.operator)
                .map(|o| o.id.clone())
                .collect(),
        })
        .collect();
    Route {
        generation: plan.generation,
        steps,
    }
}

/// What a node has of each instance.
type Shares = BTreeMap<NodeId, BTreeMap<InstanceId, (InstanceTarget, Resources)>>;

/// The target of every node that has something to do.
pub fn node_targets(
    live: &[LiveQuery<'_>],
    catalogue: &Catalogue,
    cluster: &Cluster,
    commit: Commit,
) -> BTreeMap<NodeId, NodeTarget> {
    let mut shares: Shares = BTreeMap::new();
    let mut queries: BTreeMap<NodeId, BTreeMap<QueryId, QueryTarget>> = BTreeMap::new();
    let mut neighbours: BTreeMap<NodeId, BTreeSet<NodeId>> = BTreeMap::new();
    for one in live {
        for (node, instances) in instances_of(one, catalogue) {
            let on_node = shares.entry(node).or_default();
            for (id, (target, share)) in instances {
                on_node
                    .entry(id)
                    .and_modify(|(_, total)| *total = total.plus(&share))
                    .or_insert((target, share));
            }
        }
        let target = query_target(one);
        let mut nodes: BTreeSet<&NodeId> = one.plans.iter().flat_map(|p| p.nodes()).collect();
        nodes.insert(&one.query.entry);
        for node in nodes {
            queries
                .entry(node.clone())
                .or_default()
                .insert(one.query.id.clone(), target.clone());
        }
        for plan in &one.plans {
            for (a, b) in hops(one.query, plan) {
                neighbours.entry(a.clone()).or_default().insert(b.clone());
                neighbours.entry(b).or_default().insert(a);
            }
        }
    }
    let nodes: BTreeSet<NodeId> = shares.keys().chain(queries.keys()).cloned().collect();
    nodes
        .into_iter()
        .map(|node| {
            let instances = shares
                .remove(&node)
                .unwrap_or_default()
                .into_values()
                .map(|(mut target, share)| {
                    target.share = share;
                    target
                })
                .collect();
            let peers = neighbours
                .remove(&node)
                .unwrap_or_default()
                .iter()
                .filter_map(|id| peer(cluster, id))
                .collect();
            let target = NodeTarget {
                commit,
                node: node.clone(),
                instances,
                queries: queries
                    .remove(&node)
                    .unwrap_or_default()
                    .into_values()
                    .collect(),
                peers,
            };
            (node, target)
        })
        .collect()
}

/// Instances one query needs per node: operators that share an instance add up, generations do not (the larger counts).
fn instances_of(one: &LiveQuery<'_>, catalogue: &Catalogue) -> Shares {
    let mut all: Shares = BTreeMap::new();
    for plan in &one.plans {
        let mut of_plan: Shares = BTreeMap::new();
        for part in &plan.operators {
            let Some(operator) = one.query.pipeline.operator(&part.operator) else {
                continue;
            };
            let Some(entry) = catalogue.0.get(&operator.kind) else {
                continue;
            };
            let target = InstanceTarget {
                instance: part.instance,
                kind: operator.kind.clone(),
                runtime: entry.runtime.clone(),
                configuration: part.configuration.clone(),
                artifact: part.artifact.clone(),
                share: Resources::default(),
                state: entry.state,
            };
            of_plan
                .entry(part.node.clone())
                .or_default()
                .entry(part.instance)
                .and_modify(|(_, total)| *total = total.plus(&part.share))
                .or_insert((target, part.share));
        }
        for (node, instances) in of_plan {
            let on_node = all.entry(node).or_default();
            for (id, (target, share)) in instances {
                on_node
                    .entry(id)
                    .and_modify(|(_, most)| *most = larger(most, &share))
                    .or_insert((target, share));
            }
        }
    }
    all
}

fn larger(a: &Resources, b: &Resources) -> Resources {
    Resources {
        cpu: a.cpu.max(b.cpu),
        memory_mib: a.memory_mib.max(b.memory_mib),
        gpu_percent: a.gpu_percent.max(b.gpu_percent),
    }
}

fn query_target(one: &LiveQuery<'_>) -> QueryTarget {
    QueryTarget {
        query: one.query.id.clone(),
        current: one.current,
        routes: one.plans.iter().map(|p| route(one.query, p)).collect(),
        entry: one.query.entry.clone(),
        frame_deadline: one.query.frame_deadline(),
        app_fingerprint: one.app,
    }
}

/// Pairs of different nodes between which a plan's frames travel, the way from the entry node included.
pub fn hops(query: &Query, plan: &QueryPlan) -> BTreeSet<(NodeId, NodeId)> {
    let node_of: BTreeMap<_, _> = plan
        .operators
        .iter()
        .map(|p| (&p.operator, &p.node))
        .collect();
    let mut pairs = BTreeSet::new();
    for part in &plan.operators {
        let Some(operator) = query.pipeline.operator(&part.operator) else {
            continue;
        };
        if operator.inputs.is_empty() {
            pairs.insert((query.entry.clone(), part.node.clone()));
        }
        for input in &operator.inputs {
            if let Some(from) = node_of.get(input) {
                pairs.insert(((*from).clone(), part.node.clone()));
            }
        }
    }
    pairs.retain(|(from, to)| from != to);
    pairs
}

/// A node as its neighbours need to know it.
pub fn peer(cluster: &Cluster, id: &NodeId) -> Option<Peer> {
    let description = &cluster.nodes.get(id)?.description;
    Some(Peer {
        node: id.clone(),
        addresses: description.advertised.clone(),
        fingerprint: description.fingerprint,
    })
}

/// What the instances of some targets hold per node.
pub fn granted(targets: &BTreeMap<NodeId, NodeTarget>) -> BTreeMap<NodeId, Resources> {
    targets
        .iter()
        .map(|(node, target)| {
            let total = target
                .instances
                .iter()
                .fold(Resources::default(), |sum, i| sum.plus(&i.share));
            (node.clone(), total)
        })
        .collect()
}
