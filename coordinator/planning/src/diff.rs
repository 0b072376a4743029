//! The steps from one assignment to the next, for dry runs and for deciding whether both copies fit.
//!
//! Start at [`diff`]. Make before break: what is new starts, traffic switches, what is old stops. [`crowded`] names the nodes on which
//! old and new do not fit beside each other; there the old one goes first and the gap is declared.
//!
//! Deliberately absent: carrying the steps out (the scheduler's, as facts come in).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use compass_shared::ids::{Generation, InstanceId, NodeId, OperatorId, QueryId};
use compass_shared::model::cluster::{Cluster, Resources};
use compass_shared::model::plan::{Assignment, NodeTarget, OperatorPlan, QueryPlan};
use compass_shared::units::Millicores;

/// One step.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// An old instance has to go before its successor can come: there will be a gap.
    Break {
        /// The query.
        query: QueryId,
        /// Where there is no room for both.
        node: NodeId,
    },
    /// An instance starts and is warmed.
    Start {
        /// Where.
        node: NodeId,
        /// Which.
        instance: InstanceId,
        /// For whom.
        query: QueryId,
        /// What.
        operator: OperatorId,
    },
    /// An instance goes on with another share.
    Resize {
        /// Where.
        node: NodeId,
        /// Which.
        instance: InstanceId,
        /// Share before.
        from: Resources,
        /// Share after.
        to: Resources,
    },
    /// New frames take the new plan.
    Switch {
        /// The query.
        query: QueryId,
        /// Before.
        from: Option<Generation>,
        /// After; `None` when the query ends.
        to: Option<Generation>,
    },
    /// An instance has answered what it had and stops.
    Stop {
        /// Where.
        node: NodeId,
        /// Which.
        instance: InstanceId,
        /// For whom.
        query: QueryId,
        /// What.
        operator: OperatorId,
    },
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Break { query, node } => {
                write!(
                    f,
                    "! {query}: {node} has no room for both copies, a gap is expected"
                )
            }
            Self::Start {
                node,
                query,
                operator,
                ..
            } => write!(f, "+ {query}: start {operator} on {node}"),
            Self::Resize { node, from, to, .. } => {
                write!(f, "~ share on {node} {} -> {}", from.cpu, to.cpu)
            }
            Self::Switch { query, from, to } => {
                let name = |g: &Option<Generation>| {
                    g.map_or_else(|| "none".to_owned(), |g| format!("generation {g}"))
                };
                write!(f, "> {query}: {} -> {}", name(from), name(to))
            }
            Self::Stop {
                node,
                query,
                operator,
                ..
            } => write!(f, "- {query}: stop {operator} on {node}"),
        }
    }
}

/// The ordered steps that turn one assignment into another: breaks, starts, resizes, switches, stops; each group by query and operator.
pub fn diff(before: &Assignment, after: &Assignment, cluster: &Cluster) -> Vec<Step> {
    let old = instances(before);
    let new = instances(after);
    let mut steps = Vec::new();
    let queries: BTreeSet<&QueryId> = before.plans.keys().chain(after.plans.keys()).collect();
    let both = together(&old, &new);
    let crowded: BTreeSet<&NodeId> = both
        .iter()
        .filter(|(node, need)| {
            cluster
                .nodes
                .get(*node)
                .is_some_and(|n| !n.description.capacity.fits(need))
        })
        .map(|(node, _)| *node)
        .collect();
    for query in &queries {
        let changed = |plan: Option<&QueryPlan>, node: &NodeId| {
            plan.is_some_and(|p| p.operators.iter().any(|o| o.node == *node))
        };
        for node in &crowded {
            if before.plans.get(*query).map(QueryPlan::content_hash)
                != after.plans.get(*query).map(QueryPlan::content_hash)
                && changed(before.plans.get(*query), node)
                && changed(after.plans.get(*query), node)
            {
                steps.push(Step::Break {
                    query: (*query).clone(),
                    node: (*node).clone(),
                });
            }
        }
    }
    let missing = |(key, part): (&Key, &Part), other: &BTreeMap<Key, Part>| {
        (!other.contains_key(key)).then(|| (key.clone(), part.clone()))
    };
    for (key, part) in new.iter().filter_map(|entry| missing(entry, &old)) {
        steps.push(Step::Start {
            node: key.0,
            instance: key.1,
            query: part.query,
            operator: part.operator,
        });
    }
    for (key, part) in &new {
        if let Some(was) = old.get(key)
            && was.share != part.share
        {
            steps.push(Step::Resize {
                node: key.0.clone(),
                instance: key.1,
                from: was.share,
                to: part.share,
            });
        }
    }
    for query in queries {
        let generation = |a: &Assignment| a.plans.get(query).map(|p| p.generation);
        let (from, to) = (generation(before), generation(after));
        if from != to {
            steps.push(Step::Switch {
                query: query.clone(),
                from,
                to,
            });
        }
    }
    for (key, part) in old.iter().filter_map(|entry| missing(entry, &new)) {
        steps.push(Step::Stop {
            node: key.0,
            instance: key.1,
            query: part.query,
            operator: part.operator,
        });
    }
    steps
}

type Key = (NodeId, InstanceId);

#[derive(Debug, Clone)]
struct Part {
    query: QueryId,
    operator: OperatorId,
    share: Resources,
}

fn instances(assignment: &Assignment) -> BTreeMap<Key, Part> {
    let mut found: BTreeMap<Key, Part> = BTreeMap::new();
    for (query, plan) in &assignment.plans {
        for OperatorPlan {
            operator,
            node,
            instance,
            share,
            ..
        } in &plan.operators
        {
            found
                .entry((node.clone(), *instance))
                .and_modify(|part| part.share = part.share.plus(share))
                .or_insert_with(|| Part {
                    query: query.clone(),
                    operator: operator.clone(),
                    share: *share,
                });
        }
    }
    found
}

/// The least need per node while old and new run beside each other: memory and GPU of both; of CPU most of the share of those that get
/// new frames (the old ones before the switch, the new ones after it) and a little for the others.
fn together<'a>(
    old: &'a BTreeMap<Key, Part>,
    new: &'a BTreeMap<Key, Part>,
) -> BTreeMap<&'a NodeId, Resources> {
    let floor = crate::targets::SHARE_FLOOR.0;
    let mut need: BTreeMap<&NodeId, (Resources, u32, u32)> = BTreeMap::new();
    let keys: BTreeSet<&Key> = old.keys().chain(new.keys()).collect();
    for key in keys {
        let share = |side: &BTreeMap<Key, Part>| side.get(key).map(|p| p.share).unwrap_or_default();
        let (a, b) = (share(old), share(new));
        let (total, before, after) = need.entry(&key.0).or_default();
        total.memory_mib += a.memory_mib.max(b.memory_mib);
        total.gpu_percent += a.gpu_percent.max(b.gpu_percent);
        let firm = |cpu: u32| (f64::from(cpu) * crate::targets::FIRM_PART).ceil() as u32;
        *before += match a.cpu.0 {
            0 => b.cpu.0.min(floor),
            cpu => firm(cpu),
        };
        *after += match b.cpu.0 {
            0 => a.cpu.0.min(floor),
            cpu => firm(cpu),
        };
    }
    need.into_iter()
        .map(|(node, (mut total, before, after))| {
            total.cpu = Millicores(before.max(after));
            (node, total)
        })
        .collect()
}

/// Nodes on which the instances of these targets need more than the node has.
pub fn crowded(targets: &BTreeMap<NodeId, NodeTarget>, cluster: &Cluster) -> BTreeSet<NodeId> {
    crate::targets::granted(targets)
        .into_iter()
        .filter(|(id, need)| {
            cluster
                .nodes
                .get(id)
                .is_some_and(|n| !n.description.capacity.fits(need))
        })
        .map(|(id, _)| id)
        .collect()
}
