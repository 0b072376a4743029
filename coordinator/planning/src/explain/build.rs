//! Puts an explanation together from the candidates a choice was made among.

use compass_shared::ids::Generation;
use compass_shared::model::cluster::Cluster;
use compass_shared::model::plan::Expectation;
use compass_shared::model::trigger::{SloKind, Trigger};
use compass_shared::units::Bandwidth;

use super::{Explanation, RejectedPlan};
use crate::candidate::{Candidate, Candidates, Reason, Rejected, prefixes};
use crate::predict::{Context, Model, known, rate_needed};
use crate::space::{Placement, Space};

/// Largest factor by which a link is imagined faster when looking for what would make a plan feasible.
const IMAGINED_FACTOR_MAX: f64 = 1024.0;

/// Explains a choice. `chosen` is the candidate that became the plan.
pub fn explain(
    context: &Context<'_>,
    space: &Space,
    candidates: &Candidates,
    chosen: &Candidate,
    generation: Generation,
    trigger: &Trigger,
    effort: (u32, u32),
) -> Explanation {
    let rank = candidates
        .feasible
        .iter()
        .position(|c| c.content == chosen.content)
        .map_or(1, |i| i + 1);
    let mut rejected: Vec<RejectedPlan> = candidates
        .rejected
        .iter()
        .map(|r| describe(context, space, r))
        .collect();
    if let Some(second) = candidates
        .feasible
        .iter()
        .find(|c| c.shape() != chosen.shape())
    {
        rejected.push(RejectedPlan {
            plan: second.summary(),
            reason: format!(
                "feasible, but {:.4} USD/h against {:.4}",
                second.expected.cost_usd_per_h, chosen.expected.cost_usd_per_h
            ),
            flips_if: None,
            expected: second.expected,
        });
    }
    Explanation {
        query: context.query.id.clone(),
        generation,
        trigger: trigger.clone(),
        chosen: chosen.summary(),
        expected: chosen.expected,
        rank,
        feasible: candidates.feasible.len(),
        considered: candidates.considered,
        space: space.configurations_len(),
        ruled_out: candidates
            .rejected_by
            .iter()
            .map(|(name, count)| ((*name).to_owned(), *count))
            .collect(),
        rejected,
        inputs: inputs(context, chosen),
        trials: effort.0,
        cache_hits: effort.1,
    }
}

fn inputs(context: &Context<'_>, chosen: &Candidate) -> Vec<String> {
    let mut facts = vec![format!("load {:.1}/s", context.rate_hz)];
    for (from, to) in chosen.links.keys() {
        if let Some(link) = context.cluster.links.get(&(from.clone(), to.clone())) {
            let kind = if link.lower_bound {
                "at least"
            } else {
                "measured"
            };
            facts.push(format!(
                "link {from}->{to} {kind} {}, rtt {:.0} ms",
                link.bandwidth, link.rtt_ms
            ));
        }
    }
    for (node, needed) in &chosen.nodes {
        if let Some(known) = context.cluster.nodes.get(node) {
            let description = &known.description;
            facts.push(format!(
                "{node} ({}) {} of {}",
                description.device_label(),
                needed.cpu,
                description.capacity.cpu
            ));
        }
    }
    facts.push(if chosen.measured {
        "times measured on these device classes".to_owned()
    } else {
        "some times carried over from another device class".to_owned()
    });
    facts.push(format!("price sheet v{}", context.cluster.prices.version));
    facts
}

fn summary(context: &Context<'_>, rejected: &Rejected) -> String {
    let parts: Vec<_> = context
        .query
        .pipeline
        .operators
        .iter()
        .zip(&rejected.placement.0)
        .map(|(o, node)| {
            let own = rejected.configuration.of(&o.id);
            match own.filter(|c| !c.0.is_empty()) {
                Some(own) => format!("{}{{{own}}}@{node}", o.id),
                None => format!("{}@{node}", o.id),
            }
        })
        .collect();
    parts.join(" ")
}

fn describe(context: &Context<'_>, space: &Space, rejected: &Rejected) -> RejectedPlan {
    RejectedPlan {
        plan: summary(context, rejected),
        reason: in_words(context, &rejected.reason),
        flips_if: flips_if(context, space, rejected),
        expected: rejected.expected,
    }
}

fn in_words(context: &Context<'_>, reason: &Reason) -> String {
    match reason {
        Reason::Slo {
            slo: SloKind::Latency,
            value,
            bound,
        } => format!(
            "p{:.0} {:.0} ms > {bound:.0} ms",
            crate::predict::percentile_of(context.query),
            value.value
        ),
        Reason::Slo {
            slo: SloKind::Accuracy,
            value,
            bound,
        } => format!(
            "accuracy {:.2} [{:.2},{:.2}] against {bound:.2}",
            value.value, value.low, value.high
        ),
        Reason::Slo {
            slo: SloKind::Cost,
            value,
            bound,
        } => format!("{:.4} USD/h > {bound:.4}", value.value),
        Reason::Overload { operator, busy } => format!(
            "{} would be busy {:.0} % of a core",
            context.query.pipeline.operators[*operator].id,
            busy * 100.0
        ),
        Reason::Link {
            from,
            to,
            needed_bps,
            usable_bps,
        } => format!(
            "link {from}->{to} would need {} of {}",
            Bandwidth(*needed_bps as u64),
            Bandwidth(*usable_bps as u64)
        ),
        Reason::Capacity {
            node,
            needed,
            capacity,
        } => format!(
            "{node} has {} and {} MiB, it needs {} and {} MiB",
            capacity.cpu, capacity.memory_mib, needed.cpu, needed.memory_mib
        ),
    }
}

/// What would have to be different, where one thing alone would do.
fn flips_if(context: &Context<'_>, space: &Space, rejected: &Rejected) -> Option<String> {
    match &rejected.reason {
        Reason::Link {
            from,
            to,
            needed_bps,
            ..
        } => Some(format!(
            "bandwidth {from}->{to} >= {}",
            rate_needed(*needed_bps, context.settings)
        )),
        Reason::Slo {
            slo: SloKind::Latency,
            bound,
            ..
        } => bandwidth_that_helps(context, space, rejected, *bound),
        Reason::Slo {
            slo: SloKind::Accuracy,
            value,
            bound,
        } if value.high >= *bound => {
            Some("more samples confirm it (its interval reaches the floor)".to_owned())
        }
        Reason::Slo {
            slo: SloKind::Cost,
            value,
            ..
        } => Some(format!("the cap were {:.4} USD/h", value.value)),
        Reason::Capacity { node, needed, .. } => Some(format!(
            "{node} had {} and {} MiB",
            needed.cpu, needed.memory_mib
        )),
        Reason::Slo { .. } | Reason::Overload { .. } => None,
    }
}

/// The rate the slowest link of a placement would need for its latency to hold.
fn bandwidth_that_helps(
    context: &Context<'_>,
    space: &Space,
    rejected: &Rejected,
    bound_ms: f64,
) -> Option<String> {
    let slowest = slowest_link(context.cluster, context, &rejected.placement)?;
    let rate = crate::predict::planned_rate(context.cluster.links.get(&slowest)?, context.settings);
    let holds = |factor: f64| {
        let mut cluster = context.cluster.clone();
        let link = cluster.links.get_mut(&slowest)?;
        link.bandwidth = Bandwidth((rate.0 as f64 * factor) as u64);
        link.lower_bound = false;
        let imagined = Context {
            cluster: &cluster,
            ..*context
        };
        let latency = full_latency(
            &imagined,
            space,
            &rejected.configuration,
            &rejected.placement,
        )?;
        Some(crate::candidate::stays_below(&imagined, latency, bound_ms))
    };
    if !holds(IMAGINED_FACTOR_MAX)? {
        return None;
    }
    let (mut low, mut high) = (1.0, IMAGINED_FACTOR_MAX);
    for _ in 0..20 {
        let middle = f64::sqrt(low * high);
        if holds(middle)? {
            high = middle;
        } else {
            low = middle;
        }
    }
    Some(format!(
        "bandwidth {}->{} >= {}",
        slowest.0,
        slowest.1,
        Bandwidth((rate.0 as f64 * high) as u64)
    ))
}

type Pair = (compass_shared::ids::NodeId, compass_shared::ids::NodeId);

fn slowest_link(cluster: &Cluster, context: &Context<'_>, placement: &Placement) -> Option<Pair> {
    let mut pairs: Vec<Pair> = Vec::new();
    for (position, operator) in context.query.pipeline.operators.iter().enumerate() {
        let to = &placement.0[position];
        if operator.inputs.is_empty() {
            pairs.push((context.query.entry.clone(), to.clone()));
        }
        for input in &operator.inputs {
            let source = context.query.pipeline.position(input)?;
            pairs.push((placement.0[source].clone(), to.clone()));
        }
    }
    pairs
        .into_iter()
        .filter(|(from, to)| from != to)
        .filter_map(|pair| {
            let rate = crate::predict::planned_rate(cluster.links.get(&pair)?, context.settings);
            Some((rate, pair))
        })
        .min()
        .map(|(_, pair)| pair)
}

fn full_latency(
    context: &Context<'_>,
    space: &Space,
    configuration: &compass_shared::model::pipeline::PipelineConfiguration,
    placement: &Placement,
) -> Option<compass_shared::model::plan::Estimate> {
    let point = space.point_of(configuration)?;
    let normalised = space.configuration(&space.normalised(&point));
    let known = known(context, configuration, &prefixes(space, &normalised)).ok()?;
    let model = Model::new(context, configuration, &known, placement).ok()?;
    let full = vec![compass_shared::units::Millicores(1000); placement.0.len()];
    Some(model.latency(&full).at_percentile)
}

/// The nearest infeasible plan and what would be the cheapest fix, in words.
pub fn nearest_and_fix(
    context: &Context<'_>,
    space: &Space,
    candidates: &Candidates,
) -> Option<String> {
    let nearest = candidates.nearest.as_ref()?;
    let Expectation {
        latency_ms,
        accuracy,
        cost_usd_per_h,
    } = nearest.expected;
    let mut text = format!(
        "nearest: {} – {} (latency {:.0} ms, accuracy {:.2}, {:.4} USD/h)",
        summary(context, nearest),
        in_words(context, &nearest.reason),
        latency_ms.value,
        accuracy.value,
        cost_usd_per_h
    );
    let fix = match (&nearest.reason, flips_if(context, space, nearest)) {
        (_, Some(condition)) => Some(condition),
        (Reason::Slo { slo, value, .. }, None) => Some(match slo {
            SloKind::Latency => format!("a latency bound of {:.0} ms", value.high.max(value.value)),
            SloKind::Accuracy => format!("an accuracy floor of {:.2}", value.value),
            SloKind::Cost => format!("a cost cap of {:.4} USD/h", value.value),
        }),
        (Reason::Overload { .. }, None) => Some("a lower rate or a faster device".to_owned()),
        _ => None,
    };
    if let Some(fix) = fix {
        text.push_str(". Cheapest fix: ");
        text.push_str(&fix);
    }
    Some(text)
}

/// The report for a query without a plan.
pub fn infeasible(context: &Context<'_>, space: &Space, candidates: &Candidates) -> String {
    let slo = &context.query.slo;
    let mut wanted = Vec::new();
    if let Some(latency) = slo.latency {
        wanted.push(format!(
            "p{:.0}<={:.0} ms",
            latency.percentile,
            compass_shared::time::ms(latency.bound)
        ));
    }
    if let Some(accuracy) = slo.accuracy_min {
        wanted.push(format!("accuracy>={accuracy:.2}"));
    }
    if let Some(cap) = crate::predict::cost_cap_usd_per_h(context.query) {
        wanted.push(format!("cost<={cap:.4} USD/h"));
    }
    let nearest = nearest_and_fix(context, space, candidates)
        .unwrap_or_else(|| "no configuration could be measured".to_owned());
    format!("INFEASIBLE {}: {nearest}", wanted.join(" "))
}
