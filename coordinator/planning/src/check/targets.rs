//! Rules of what nodes are told. Written from the wire's point of view: does a node that does exactly this carry out the plans?

use std::collections::{BTreeMap, BTreeSet};

use compass_shared::ids::{Generation, NodeId};
use compass_shared::model::plan::{NodeTarget, OperatorPlan, QueryPlan};

use super::{Findings, QueryStep, Rule, Step};

/// Sums of cpu, memory and GPU; wide enough not to overflow.
fn sums(target: &NodeTarget) -> [u64; 3] {
    let mut sum = [0; 3];
    for instance in &target.instances {
        sum[0] += u64::from(instance.share.cpu.0);
        sum[1] += u64::from(instance.share.memory_mib);
        sum[2] += u64::from(instance.share.gpu_percent);
    }
    sum
}

pub(super) fn node(step: &Step<'_>, id: &NodeId, target: &NodeTarget, findings: &mut Findings) {
    findings.demand(target.node == *id, Rule::NodeKnown, || {
        format!("the target for {id} is made out to {}", target.node)
    });
    let unchanged = step.before.get(id).is_some_and(|b| b == target);
    findings.demand(
        unchanged || target.commit > step.last,
        Rule::CommitGrows,
        || format!("{id}: commit {} after {}", target.commit, step.last),
    );
    let Some(known) = step.cluster.nodes.get(id) else {
        findings.demand(false, Rule::NodeKnown, || id.to_string());
        return;
    };
    let need = sums(target);
    let had = step.before.get(id).map_or([0; 3], sums);
    let capacity = known.description.capacity;
    let has = [
        u64::from(capacity.cpu.0),
        u64::from(capacity.memory_mib),
        u64::from(capacity.gpu_percent),
    ];
    for (index, unit) in ["m cpu", " MiB", " % GPU"].into_iter().enumerate() {
        // A node that has shrunk below what it was granted may be told anything that does not make it worse.
        findings.demand(
            need[index] <= has[index] || need[index] <= had[index],
            Rule::Capacity,
            || format!("{id}: {}{unit} granted, {} there", need[index], has[index]),
        );
    }
    for instance in &target.instances {
        let is_needed = target.queries.iter().any(|q| {
            q.routes.iter().any(|r| {
                r.steps
                    .iter()
                    .any(|s| s.node == *id && s.instance == instance.instance)
            })
        });
        findings.demand(is_needed, Rule::InstanceNeeded, || {
            format!("{id}: {} ({})", instance.instance, instance.kind)
        });
    }
    for query in &target.queries {
        findings.demand(
            query.current == Generation(0) && query.routes.is_empty()
                || query.current == Generation(0)
                || query.routes.iter().any(|r| r.generation == query.current),
            Rule::CurrentRouted,
            || {
                format!(
                    "{id}: {} has no route for generation {}",
                    query.query, query.current
                )
            },
        );
    }
}

pub(super) fn query(step: &Step<'_>, one: &QueryStep<'_>, findings: &mut Findings) {
    let id = &one.query.id;
    let mut nodes: Vec<&NodeId> = vec![&one.query.entry];
    nodes.extend(
        one.plans
            .iter()
            .flat_map(|p| p.operators.iter().map(|o| &o.node)),
    );
    nodes.sort();
    nodes.dedup();
    for node in nodes {
        let told = step
            .targets
            .get(node)
            .and_then(|t| t.queries.iter().find(|q| q.query == *id));
        let Some(told) = told else {
            // Nothing can be told to a node that is gone; whoever replaces it is a plan's business.
            let is_online = step.cluster.nodes.get(node).is_some_and(|n| n.online);
            findings.demand(!is_online, Rule::QueryPresent, || {
                format!("{node} is not told of {id}")
            });
            continue;
        };
        findings.demand(
            told.entry == one.query.entry && told.current == one.current,
            Rule::RouteMatchesPlan,
            || format!("{node} is told another entry or generation of {id}"),
        );
        let generations: Vec<_> = told.routes.iter().map(|r| r.generation).collect();
        let planned: Vec<_> = one.plans.iter().map(|p| p.generation).collect();
        findings.demand(generations == planned, Rule::RouteMatchesPlan, || {
            format!("{node} is told generations {generations:?} of {id}, planned are {planned:?}")
        });
        for (route, plan) in told.routes.iter().zip(&one.plans) {
            let is_same = route.steps.len() == plan.operators.len()
                && route.steps.iter().zip(&plan.operators).all(|(s, o)| {
                    let operator = one
                        .query
                        .pipeline
                        .operators
                        .iter()
                        .find(|p| p.id == s.operator);
                    let readers: Vec<_> = one
                        .query
                        .pipeline
                        .operators
                        .iter()
                        .filter(|p| p.inputs.contains(&s.operator))
                        .map(|p| p.id.clone())
                        .collect();
                    s.operator == o.operator
                        && s.node == o.node
                        && s.instance == o.instance
                        && operator.is_some_and(|p| p.inputs == s.inputs)
                        && s.readers == readers
                });
            findings.demand(is_same, Rule::RouteMatchesPlan, || {
                format!(
                    "{node}: the route of generation {} of {id}",
                    route.generation
                )
            });
        }
    }
    for plan in &one.plans {
        peers(step, one, plan, findings);
    }
}

/// Every operator finds its instance; where new frames go, with the shares all plans grant it added up. On a node where generations of
/// some query overlap, what takes new frames may give up a quarter (a millicore is lost in rounding), the others nearly all.
pub(super) fn instances(step: &Step<'_>, findings: &mut Findings) {
    let mut wanted: BTreeMap<_, u64> = BTreeMap::new();
    let overlapping: BTreeSet<&NodeId> = step
        .queries
        .values()
        .filter(|one| one.plans.len() > 1)
        .flat_map(|one| one.plans.iter().flat_map(|plan| plan.nodes()))
        .collect();
    for one in step.queries.values() {
        for plan in &one.plans {
            for part in &plan.operators {
                let cpu = u64::from(part.share.cpu.0);
                let is_narrowed = overlapping.contains(&part.node);
                let least = match (plan.generation == one.current, is_narrowed) {
                    (true, false) => cpu,
                    (true, true) => (cpu * 3 / 4).saturating_sub(1),
                    (false, _) => 0,
                };
                *wanted.entry((&part.node, part.instance)).or_default() += least;
                configured(step, part, findings);
            }
        }
    }
    for ((node, instance), cpu) in wanted {
        let Some(target) = step.targets.get(node) else {
            continue;
        };
        let found = target.instances.iter().find(|i| i.instance == instance);
        findings.demand(
            found.is_some_and(|i| u64::from(i.share.cpu.0) >= cpu.max(1)),
            Rule::InstancePresent,
            || format!("{node}: {instance} is missing or has less than {cpu}m"),
        );
    }
}

fn configured(step: &Step<'_>, part: &OperatorPlan, findings: &mut Findings) {
    let told = step
        .targets
        .get(&part.node)
        .and_then(|t| t.instances.iter().find(|i| i.instance == part.instance));
    if let Some(told) = told {
        findings.demand(
            told.configuration == part.configuration && told.artifact == part.artifact,
            Rule::InstancePresent,
            || {
                format!(
                    "{}: {} is told another configuration or model",
                    part.node, part.operator
                )
            },
        );
    }
}

/// Nodes between which frames travel know each other's key.
fn peers(step: &Step<'_>, one: &QueryStep<'_>, plan: &QueryPlan, findings: &mut Findings) {
    let place = |id| {
        plan.operators
            .iter()
            .find(|p| p.operator == id)
            .map(|p| &p.node)
    };
    for operator in &one.query.pipeline.operators {
        let Some(to) = place(operator.id.clone()) else {
            continue;
        };
        let mut sources: Vec<&NodeId> = operator
            .inputs
            .iter()
            .filter_map(|i| place(i.clone()))
            .collect();
        if operator.inputs.is_empty() {
            sources.push(&one.query.entry);
        }
        for from in sources.into_iter().filter(|from| *from != to) {
            for (node, other) in [(from, to), (to, from)] {
                let Some(target) = step.targets.get(node) else {
                    continue;
                };
                let key = step
                    .cluster
                    .nodes
                    .get(other)
                    .map(|n| n.description.fingerprint);
                let known = target.peers.iter().find(|p| p.node == *other);
                findings.demand(
                    known.is_some_and(|p| Some(p.fingerprint) == key),
                    Rule::PeersKnown,
                    || format!("{node} does not know {other} by its key"),
                );
            }
        }
    }
}
