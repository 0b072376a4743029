//! What each node has to do for the plans in force, those being warmed and those draining.
//!
//! Start at [`node_targets`]. A node's target holds the instances it runs (the shares of all queries an instance serves added up; of
//! several generations of one query the larger), the routes of every generation that may still be in flight, and the keys of its
//! neighbours. While two generations overlap and a node has not enough CPU for both, the other one, which only loads a model or finishes the
//! frames it has, makes do with what the one that gets new frames leaves, but for a floor ([`SHARE_FLOOR`], [`FIRM_PART`]). The content depends on the plans alone, in a fixed order, so that equal plans give equal targets.
//!
//! Deliberately absent: when to move from one step to the next, and whether a target is allowed (see [`crate::check`]).

use std::collections::{BTreeMap, BTreeSet};

use compass_shared::ids::{Commit, Digest, Generation, InstanceId, NodeId, QueryId, SiteId};
use compass_shared::model::catalogue::Catalogue;
use compass_shared::model::cluster::{Cluster, Node, Resources};
use compass_shared::model::plan::{
    ArtifactRef, InstanceTarget, NodeTarget, Peer, QueryPlan, QueryTarget, Route, RouteStep,
};
use compass_shared::model::query::Query;
use compass_shared::units::Millicores;

use crate::profile::QueryProfile;
use crate::space::{is_allowed, takes_work};

#[cfg(test)]
pub(crate) mod tests;

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
    /// Models that plans for it may need, for the nodes of its site; see [`standby`].
    pub standby: &'a [Standby],
}

/// A model that a plan of a query may need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standby {
    /// Position of the operator that would run it.
    pub position: usize,
    /// The model.
    pub artifact: ArtifactRef,
}

/// Models of the configurations that were found to work, smallest first, as far as they fit into `bytes_max`.
pub fn standby(
    query: &Query,
    catalogue: &Catalogue,
    profile: &QueryProfile,
    bytes_max: u64,
) -> Vec<Standby> {
    let mut found = BTreeMap::new();
    for (position, operator) in query.pipeline.operators.iter().enumerate() {
        let Some(entry) = catalogue.0.get(&operator.kind) else {
            continue;
        };
        let worked = profile.configurations.values();
        for row in worked.filter(|row| row.failed.is_none() && !row.scores.is_empty()) {
            let own = row.configuration.of(&operator.id);
            if let Some(choice) = own.and_then(|own| entry.artifact(own)) {
                let artifact = ArtifactRef {
                    name: choice.name.clone(),
                    digest: choice.digest,
                    bytes: choice.bytes,
                };
                found.insert(
                    (choice.bytes, position, choice.digest),
                    Standby { position, artifact },
                );
            }
        }
    }
    let mut left = bytes_max;
    let fits = |one: &Standby| {
        let rest = left.checked_sub(one.artifact.bytes);
        left = rest.unwrap_or(0);
        rest.is_some()
    };
    found.into_values().take_while(fits).collect()
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

/// CPU an instance keeps at least while it is warmed or drains on a crowded node: a model loads in seconds, not minutes.
pub const SHARE_FLOOR: Millicores = Millicores(100);
/// Part of its share that the generation with the new frames keeps at least while another one is warmed or drains beside it.
pub const FIRM_PART: f64 = 0.75;

/// What an instance gets: for new frames, and in all.
#[derive(Debug, Clone, Copy, Default)]
struct Grant {
    firm: Resources,
    wanted: Resources,
}

/// What a node has of each instance.
type Shares = BTreeMap<NodeId, BTreeMap<InstanceId, (InstanceTarget, Grant)>>;

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
            for (id, (target, grant)) in instances {
                on_node
                    .entry(id)
                    .and_modify(|(_, total)| {
                        total.firm = total.firm.plus(&grant.firm);
                        total.wanted = total.wanted.plus(&grant.wanted);
                    })
                    .or_insert((target, grant));
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
    let mut standby = standby_of(live, cluster);
    let nodes: BTreeSet<NodeId> = shares
        .keys()
        .chain(queries.keys())
        .chain(standby.keys())
        .cloned()
        .collect();
    nodes
        .into_iter()
        .map(|node| {
            let capacity = cluster.nodes.get(&node).map(|n| n.description.capacity.cpu);
            let mut instances: Vec<(InstanceTarget, Grant)> = shares
                .remove(&node)
                .unwrap_or_default()
                .into_values()
                .collect();
            squeeze(&mut instances, capacity.unwrap_or_default());
            let instances = instances.into_iter().map(|(target, _)| target).collect();
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
                standby: standby
                    .remove(&node)
                    .unwrap_or_default()
                    .into_values()
                    .collect(),
            };
            (node, target)
        })
        .collect()
}

/// What each node of a query's site should have at hand, smallest first.
fn standby_of(
    live: &[LiveQuery<'_>],
    cluster: &Cluster,
) -> BTreeMap<NodeId, BTreeMap<(u64, Digest), ArtifactRef>> {
    let mut sites: BTreeMap<&SiteId, Vec<(&NodeId, &Node)>> = BTreeMap::new();
    for (id, node) in cluster.nodes.iter().filter(|(_, node)| takes_work(node)) {
        let members = sites.entry(&node.description.site).or_default();
        members.push((id, node));
    }
    let mut wanted: BTreeMap<NodeId, BTreeMap<(u64, Digest), ArtifactRef>> = BTreeMap::new();
    for one in live.iter().filter(|one| !one.standby.is_empty()) {
        let home = cluster.nodes.get(&one.query.entry);
        let members = home.and_then(|entry| sites.get(&entry.description.site));
        for (id, node) in members.into_iter().flatten() {
            for Standby { position, artifact } in one.standby {
                if is_allowed(one.query, cluster, *position, node) {
                    wanted
                        .entry((*id).clone())
                        .or_default()
                        .insert((artifact.bytes, artifact.digest), artifact.clone());
                }
            }
        }
    }
    wanted
}

/// Grants each instance what it wants. Where the node has not enough CPU for all of that: to the generation with the new frames its
/// share, to the others the rest, but no less than a floor, for which the first gives up a part of its share. Where even that does not
/// fit, everything is granted as wanted: the scheduler then takes the old away first.
fn squeeze(instances: &mut [(InstanceTarget, Grant)], capacity: Millicores) {
    let capacity = u64::from(capacity.0);
    let sum = |of: &dyn Fn(&Grant) -> u32| -> u64 {
        instances
            .iter()
            .map(|(_, grant)| u64::from(of(grant)))
            .sum()
    };
    let firm_of = |g: &Grant| g.firm.cpu.0;
    let floor_of = |g: &Grant| {
        let soft = g.wanted.cpu.0.saturating_sub(g.firm.cpu.0);
        if g.firm.cpu.0 > 0 {
            0
        } else {
            soft.min(SHARE_FLOOR.0)
        }
    };
    let wanted = sum(&|g| g.wanted.cpu.0);
    let (firm, floors) = (sum(&firm_of), sum(&floor_of));
    let least = (firm as f64 * FIRM_PART).ceil() as u64 + floors;
    // What takes new frames must fit by itself: only an overlap is squeezed.
    let is_tight = wanted > capacity && firm <= capacity && least <= capacity;
    // Of what is there, first the floors, then the firm shares, then the rest, each in proportion.
    let for_firm = firm.min(capacity.saturating_sub(floors));
    let for_rest = capacity.saturating_sub(floors + for_firm);
    let rest = wanted.saturating_sub(firm + floors);
    for (target, grant) in instances {
        target.share = grant.wanted;
        if !is_tight {
            continue;
        }
        let part = |amount: u32, given: u64, of: u64| {
            let part = u64::from(amount) * given / of.max(1);
            u32::try_from(part).unwrap_or(amount)
        };
        let extra = grant.wanted.cpu.0 - firm_of(grant) - floor_of(grant);
        target.share.cpu = Millicores(
            floor_of(grant) + part(firm_of(grant), for_firm, firm) + part(extra, for_rest, rest),
        );
    }
}

/// Instances one query needs per node: operators that share an instance add up, generations do not (the larger counts).
fn instances_of(one: &LiveQuery<'_>, catalogue: &Catalogue) -> Shares {
    let mut all: Shares = BTreeMap::new();
    for plan in &one.plans {
        let takes_new_frames = plan.generation == one.current;
        for (node, instances) in instances_of_plan(one, plan, catalogue) {
            let on_node = all.entry(node).or_default();
            for (id, (target, share)) in instances {
                let (_, grant) = on_node.entry(id).or_insert((target, Grant::default()));
                grant.wanted = larger(&grant.wanted, &share);
                if takes_new_frames {
                    grant.firm = larger(&grant.firm, &share);
                }
            }
        }
    }
    all
}

type PlanShares = BTreeMap<NodeId, BTreeMap<InstanceId, (InstanceTarget, Resources)>>;

fn instances_of_plan(one: &LiveQuery<'_>, plan: &QueryPlan, catalogue: &Catalogue) -> PlanShares {
    let mut of_plan: PlanShares = BTreeMap::new();
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
    of_plan
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
