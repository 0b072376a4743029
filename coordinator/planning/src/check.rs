//! The independent checker: is this plan, and is this step of a switch, allowed?
//!
//! Start at [`plan`] (one query's plan, before it is decided) and [`step`] (what every node is about to be told). Both run before
//! anything is dispatched, in release builds too. **No code is shared with the planner**: sums, routes and rules are written here a
//! second time, from the domain model alone, so that one mistake does not hide another. Each rule has a name; a violation names the
//! rule and the object.
//!
//! Deliberately absent: predictions of latency and accuracy (they are estimates, not rules), any repair.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use compass_shared::ids::{Commit, Generation, NodeId, QueryId};
use compass_shared::model::catalogue::Catalogue;
use compass_shared::model::cluster::{Cluster, Scheduling};
use compass_shared::model::plan::{NodeTarget, QueryPlan};
use compass_shared::model::query::{Constraint, CostSlo, Query};

mod targets;

#[cfg(test)]
mod tests;

/// What is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rule {
    /// Every operator of the pipeline occurs once, in order, and no other.
    OperatorsComplete,
    /// Every knob has one of the values the query leaves open.
    ConfigurationAllowed,
    /// The artifact is the one the catalogue names for the configuration.
    ArtifactFits,
    /// An instance's id is the hash of what it is.
    InstanceId,
    /// Nodes are known.
    NodeKnown,
    /// Nodes are online and open (a cordoned node keeps what it has).
    NodeTakesWork,
    /// Operators run on the tiers the query allows.
    TierAllowed,
    /// Data stays within the site where the query says so.
    StaysWithinSite,
    /// Nodes that pass data on have a link.
    LinkUsable,
    /// A share is more than nothing.
    SharePositive,
    /// Memory granted is what the kind needs.
    MemoryGranted,
    /// What is expected keeps the cost cap.
    CostCap,
    /// What is expected is made of finite numbers.
    ExpectationFinite,
    /// The plan alone does not exceed a node.
    PlanFitsNode,
    /// A generation is newer than all before it.
    GenerationGrows,
    /// A commit is newer than all before it.
    CommitGrows,
    /// What a node grants does not exceed what it has (nor grow where it already does).
    Capacity,
    /// Routes say what the plans say.
    RouteMatchesPlan,
    /// The generation given to new frames has a route.
    CurrentRouted,
    /// Every operator routed to a node has its instance there, with at least its share.
    InstancePresent,
    /// Every instance on a node serves some route.
    InstanceNeeded,
    /// Neighbours know each other, with the right key.
    PeersKnown,
    /// The entry node and every node of a route know the query.
    QueryPresent,
}

impl Rule {
    /// A short stable name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OperatorsComplete => "operators-complete",
            Self::ConfigurationAllowed => "configuration-allowed",
            Self::ArtifactFits => "artifact-fits",
            Self::InstanceId => "instance-id",
            Self::NodeKnown => "node-known",
            Self::NodeTakesWork => "node-takes-work",
            Self::TierAllowed => "tier-allowed",
            Self::StaysWithinSite => "stays-within-site",
            Self::LinkUsable => "link-usable",
            Self::SharePositive => "share-positive",
            Self::MemoryGranted => "memory-granted",
            Self::CostCap => "cost-cap",
            Self::ExpectationFinite => "expectation-finite",
            Self::PlanFitsNode => "plan-fits-node",
            Self::GenerationGrows => "generation-grows",
            Self::CommitGrows => "commit-grows",
            Self::Capacity => "capacity",
            Self::RouteMatchesPlan => "route-matches-plan",
            Self::CurrentRouted => "current-routed",
            Self::InstancePresent => "instance-present",
            Self::InstanceNeeded => "instance-needed",
            Self::PeersKnown => "peers-known",
            Self::QueryPresent => "query-present",
        }
    }
}

/// A broken rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Which rule.
    pub rule: Rule,
    /// By what.
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.rule.name(), self.detail)
    }
}

/// Collects violations.
#[derive(Debug, Default)]
struct Findings(Vec<Violation>);

impl Findings {
    fn demand(&mut self, holds: bool, rule: Rule, detail: impl FnOnce() -> String) {
        if !holds {
            self.0.push(Violation {
                rule,
                detail: detail(),
            });
        }
    }
}

/// What a plan is held against.
#[derive(Debug, Clone, Copy)]
pub struct PlanContext<'a> {
    /// The query.
    pub query: &'a Query,
    /// Operator kinds.
    pub catalogue: &'a Catalogue,
    /// Today's fleet.
    pub cluster: &'a Cluster,
    /// The newest generation the query ever had.
    pub newest: Generation,
    /// The plan in force: what it has on a cordoned node may stay there.
    pub in_force: Option<&'a QueryPlan>,
}

/// Holds a new plan against every rule that concerns it alone.
pub fn plan(context: &PlanContext<'_>, plan: &QueryPlan) -> Vec<Violation> {
    let mut findings = Findings::default();
    let query = context.query;
    findings.demand(plan.query == query.id, Rule::OperatorsComplete, || {
        format!("the plan is for {}, not for {}", plan.query, query.id)
    });
    let expected: Vec<_> = query.pipeline.operators.iter().map(|o| &o.id).collect();
    let planned: Vec<_> = plan.operators.iter().map(|o| &o.operator).collect();
    findings.demand(expected == planned, Rule::OperatorsComplete, || {
        format!(
            "{} operators planned, {} in the pipeline, or another order",
            planned.len(),
            expected.len()
        )
    });
    findings.demand(
        plan.generation > context.newest,
        Rule::GenerationGrows,
        || format!("generation {} after {}", plan.generation, context.newest),
    );
    for index in 0..plan.operators.len() {
        operator(context, plan, index, &mut findings);
    }
    placement_rules(context, plan, &mut findings);
    expectation(context, plan, &mut findings);
    findings.0
}

/// Rules of one operator's part.
fn operator(context: &PlanContext<'_>, plan: &QueryPlan, index: usize, findings: &mut Findings) {
    let part = &plan.operators[index];
    let Some(operator) = context
        .query
        .pipeline
        .operators
        .iter()
        .find(|o| o.id == part.operator)
    else {
        return;
    };
    let open: BTreeSet<_> = operator.knobs.iter().map(|k| &k.name).collect();
    let set: BTreeSet<_> = part.configuration.0.keys().collect();
    findings.demand(open == set, Rule::ConfigurationAllowed, || {
        format!(
            "{} sets other knobs than the query leaves open",
            operator.id
        )
    });
    for knob in &operator.knobs {
        if let Some(value) = part.configuration.0.get(&knob.name) {
            findings.demand(
                knob.values.contains(value),
                Rule::ConfigurationAllowed,
                || format!("{}: {}={value}", operator.id, knob.name),
            );
        }
    }
    let Some(entry) = context.catalogue.0.get(&operator.kind) else {
        findings.demand(false, Rule::ConfigurationAllowed, || {
            format!("kind {} is not in the catalogue", operator.kind)
        });
        return;
    };
    let wanted = entry
        .artifacts
        .iter()
        .find(|a| {
            a.when
                .iter()
                .all(|(knob, value)| part.configuration.0.get(knob) == Some(value))
        })
        .map(|a| (a.digest, a.bytes));
    let planned = part.artifact.as_ref().map(|a| (a.digest, a.bytes));
    findings.demand(wanted == planned, Rule::ArtifactFits, || {
        format!(
            "{}{{{}}} has another model",
            operator.id, part.configuration
        )
    });
    let id = compass_shared::model::plan::instance_id(
        &operator.kind,
        planned.as_ref().map(|(digest, _)| digest),
        &part.configuration,
        &part.node,
    );
    findings.demand(id == part.instance, Rule::InstanceId, || {
        format!("{} is {} and should be {id}", operator.id, part.instance)
    });
    findings.demand(
        part.share.cpu.0 > 0 || part.share.gpu_percent > 0,
        Rule::SharePositive,
        || format!("{} is granted nothing", operator.id),
    );
    findings.demand(
        part.share.memory_mib >= entry.memory_mib,
        Rule::MemoryGranted,
        || {
            format!(
                "{} is granted {} MiB and needs {}",
                operator.id, part.share.memory_mib, entry.memory_mib
            )
        },
    );
}

/// Rules of where operators are.
fn placement_rules(context: &PlanContext<'_>, plan: &QueryPlan, findings: &mut Findings) {
    let query = context.query;
    let cluster = context.cluster;
    let mut need: BTreeMap<&NodeId, [u64; 3]> = BTreeMap::new();
    for part in &plan.operators {
        let sum = need.entry(&part.node).or_default();
        sum[0] += u64::from(part.share.cpu.0);
        sum[1] += u64::from(part.share.memory_mib);
        sum[2] += u64::from(part.share.gpu_percent);
        let Some(node) = cluster.nodes.get(&part.node) else {
            findings.demand(false, Rule::NodeKnown, || part.node.to_string());
            continue;
        };
        let stays = context.in_force.is_some_and(|p| {
            p.operators
                .iter()
                .any(|o| o.node == part.node && o.operator == part.operator)
        });
        let takes_work = node.online
            && match node.scheduling {
                Scheduling::Open => true,
                Scheduling::Cordoned => stays,
                Scheduling::Draining => false,
            };
        findings.demand(takes_work, Rule::NodeTakesWork, || {
            format!("{} for {}", part.node, part.operator)
        });
        for constraint in &query.constraints {
            if let Constraint::OperatorTiers { operator, tiers } = constraint
                && *operator == part.operator
            {
                findings.demand(
                    tiers.contains(&node.description.tier),
                    Rule::TierAllowed,
                    || {
                        format!(
                            "{} on {} ({})",
                            part.operator, part.node, node.description.tier
                        )
                    },
                );
            }
        }
    }
    for (id, sum) in need {
        if let Some(node) = cluster.nodes.get(id) {
            let capacity = &node.description.capacity;
            let fits = sum[0] <= u64::from(capacity.cpu.0)
                && sum[1] <= u64::from(capacity.memory_mib)
                && sum[2] <= u64::from(capacity.gpu_percent);
            findings.demand(fits, Rule::PlanFitsNode, || {
                format!(
                    "{id} would need {}m, {} MiB, {} % GPU",
                    sum[0], sum[1], sum[2]
                )
            });
        }
    }
    transfers(context, plan, findings);
}

/// Rules of data between nodes.
fn transfers(context: &PlanContext<'_>, plan: &QueryPlan, findings: &mut Findings) {
    let query = context.query;
    let cluster = context.cluster;
    let site = |id: &NodeId| cluster.nodes.get(id).map(|n| n.description.site.clone());
    let home = site(&query.entry);
    let place = |id| {
        plan.operators
            .iter()
            .find(|p| p.operator == id)
            .map(|p| p.node.clone())
    };
    // (whose output, from, to); the app's frames are nobody's output, and the result returns to the app beside the entry node.
    let mut moves = Vec::new();
    for operator in &query.pipeline.operators {
        let Some(to) = place(operator.id.clone()) else {
            continue;
        };
        if operator.inputs.is_empty() {
            moves.push((None, query.entry.clone(), to.clone()));
        }
        for input in &operator.inputs {
            if let Some(from) = place(input.clone()) {
                moves.push((Some(input.clone()), from, to.clone()));
            }
        }
    }
    for (output_of, from, to) in &moves {
        findings.demand(
            from == to || cluster.links.contains_key(&(from.clone(), to.clone())),
            Rule::LinkUsable,
            || format!("{from}->{to}"),
        );
        let must_stay = query.constraints.iter().any(|constraint| {
            matches!(constraint, Constraint::StayWithinSite { output_of: restricted } if restricted == output_of)
        });
        findings.demand(
            !must_stay || site(to) == home,
            Rule::StaysWithinSite,
            || {
                let what = output_of
                    .as_ref()
                    .map_or_else(|| "frames".to_owned(), |o| format!("output of {o}"));
                format!("{what} would go to {to}")
            },
        );
    }
}

fn expectation(context: &PlanContext<'_>, plan: &QueryPlan, findings: &mut Findings) {
    let e = &plan.expected;
    let numbers = [
        e.latency_ms.value,
        e.latency_ms.low,
        e.latency_ms.high,
        e.accuracy.value,
        e.accuracy.low,
        e.accuracy.high,
        e.cost_usd_per_h,
    ];
    findings.demand(
        numbers.iter().all(|n| n.is_finite() && *n >= 0.0),
        Rule::ExpectationFinite,
        || format!("{numbers:?}"),
    );
    let cap = match context.query.slo.cost_max {
        None => return,
        Some(CostSlo::PerHour(cap)) => cap,
        Some(CostSlo::PerRequest(cap)) => cap * context.query.rate_hz() * 3600.0,
    };
    // A cap met to the last digit is met.
    findings.demand(
        e.cost_usd_per_h <= cap * (1.0 + 1e-9),
        Rule::CostCap,
        || format!("{} > {cap} USD/h", e.cost_usd_per_h),
    );
}

/// One query in a step.
#[derive(Debug, Clone)]
pub struct QueryStep<'a> {
    /// The query.
    pub query: &'a Query,
    /// The generation for new frames; 0 while there is no plan.
    pub current: Generation,
    /// Plans that are routed.
    pub plans: Vec<&'a QueryPlan>,
}

/// What the fleet is about to be told.
#[derive(Debug, Clone)]
pub struct Step<'a> {
    /// Today's fleet.
    pub cluster: &'a Cluster,
    /// All queries.
    pub queries: BTreeMap<QueryId, QueryStep<'a>>,
    /// What each node is told.
    pub targets: &'a BTreeMap<NodeId, NodeTarget>,
    /// What each node was told last.
    pub before: &'a BTreeMap<NodeId, NodeTarget>,
    /// The last commit used.
    pub last: Commit,
}

/// Holds a step against every rule that concerns the fleet.
pub fn step(step: &Step<'_>) -> Vec<Violation> {
    let mut findings = Findings::default();
    for (id, target) in step.targets {
        targets::node(step, id, target, &mut findings);
    }
    for one in step.queries.values() {
        targets::query(step, one, &mut findings);
    }
    targets::instances(step, &mut findings);
    findings.0
}
