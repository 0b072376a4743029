//! The least shares with which a placement still meets its SLOs.
//!
//! To spend latency where it buys most, shares should go with the square root of work over price: that minimises Σ price · share while
//! Σ work / share stays what it is. From such a start (once with prices, once with all cores alike, for crowded nodes) and from full
//! cores, each operator's share is then lowered to the least level of a grid at which latency (margin included) and utilisation still
//! hold, the dearest cores first or the cheapest first. The cheapest result that fits its nodes is taken. Since latency falls with
//! share, levels are found by bisection. No trial is needed: latency against share is modelled.

use std::collections::BTreeMap;

use compass_shared::ids::NodeId;
use compass_shared::model::cluster::Resources;
use compass_shared::model::plan::Estimate;
use compass_shared::model::trigger::SloKind;
use compass_shared::time::ms;
use compass_shared::units::Millicores;

use crate::predict::{Context, Latency, Model, cost_cap_usd_per_h};
use crate::space::Placement;

use super::{Reason, stays_below};

/// Shares that are granted, in thousandths of a core, ascending. Coarse on purpose: finer steps are noise to an operator and make
/// plans differ in nothing but digits.
pub const SHARE_LEVELS: [u32; 14] = [
    50, 75, 100, 150, 200, 250, 300, 350, 400, 500, 600, 700, 850, 1000,
];

/// Shares that meet the SLOs, and what they achieve.
#[derive(Debug, Clone, PartialEq)]
pub struct Trimmed {
    /// One per operator.
    pub shares: Vec<Millicores>,
    /// The latency with them.
    pub latency: Latency,
    /// The cost with them.
    pub cost_usd_per_h: f64,
}

/// The largest level within what each operator can use of its node.
pub(super) fn full_shares(model: &Model<'_>) -> Vec<Millicores> {
    model
        .full_shares()
        .into_iter()
        .map(|most| {
            let level = SHARE_LEVELS.iter().rev().find(|l| **l <= most.0);
            Millicores(level.copied().unwrap_or(SHARE_LEVELS[0]))
        })
        .collect()
}

/// The least share of each operator that keeps it from overload; a lower bound on what trimming can reach.
pub(super) fn least_shares(context: &Context<'_>, model: &Model<'_>) -> Vec<Millicores> {
    let operators = context.query.pipeline.operators.len();
    (0..operators)
        .map(|position| {
            let level = SHARE_LEVELS.iter().find(|l| {
                model.utilisation(position, Millicores(**l)) <= context.settings.utilisation_max
            });
            Millicores(level.copied().unwrap_or(SHARE_LEVELS[13]))
        })
        .collect()
}

/// Lowers shares as far as the SLOs allow.
///
/// # Errors
/// Why no shares do: a latency bound, a node that has too little, or the cost cap.
pub fn trim(
    context: &Context<'_>,
    model: &Model<'_>,
    placement: &Placement,
) -> Result<Trimmed, Reason> {
    let full = full_shares(model);
    let prices: Vec<f64> = (0..full.len()).map(|i| model.core_price(i)).collect();
    let mut dear_first: Vec<usize> = (0..full.len()).collect();
    dear_first.sort_by(|a, b| prices[*b].total_cmp(&prices[*a]).then(a.cmp(b)));
    let cheap_first: Vec<usize> = dear_first.iter().rev().copied().collect();
    let alike = vec![1.0; full.len()];
    let starts = [
        (full.clone(), &dear_first),
        (full.clone(), &cheap_first),
        (balanced(context, model, &full, &prices), &dear_first),
        (balanced(context, model, &full, &alike), &dear_first),
    ];
    let mut best: Option<Trimmed> = None;
    let mut refused = None;
    for (start, order) in starts {
        let shares = lower(context, model, &start, order);
        if let Err(reason) = fits(context, placement, &shares) {
            refused = Some(reason);
            continue;
        }
        let cost_usd_per_h = model.cost_usd_per_h(&shares);
        if best
            .as_ref()
            .is_none_or(|b| cost_usd_per_h < b.cost_usd_per_h)
        {
            best = Some(Trimmed {
                latency: model.latency(&shares),
                shares,
                cost_usd_per_h,
            });
        }
    }
    let Some(best) = best else {
        return Err(refused.expect("an order that gave no shares was refused"));
    };
    if let Some(slo) = context.query.slo.latency
        && !stays_below(context, best.latency.at_percentile, ms(slo.bound))
    {
        return Err(Reason::Slo {
            slo: SloKind::Latency,
            value: best.latency.at_percentile,
            bound: ms(slo.bound),
        });
    }
    if let Some(bound) = cost_cap_usd_per_h(context.query)
        && best.cost_usd_per_h > bound
    {
        return Err(Reason::Slo {
            slo: SloKind::Cost,
            value: Estimate::exact(best.cost_usd_per_h),
            bound,
        });
    }
    Ok(best)
}

/// Shares in proportion to the square root of work over price, as small as the latency bound allows; rounded up to levels.
fn balanced(
    context: &Context<'_>,
    model: &Model<'_>,
    full: &[Millicores],
    prices: &[f64],
) -> Vec<Millicores> {
    let Some(slo) = context.query.slo.latency else {
        return full.to_vec();
    };
    let weights: Vec<f64> = (0..full.len())
        .map(|i| (model.work_ms(i) / prices[i].max(1e-6)).max(0.0).sqrt())
        .collect();
    let most = weights.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    let at = |scale: f64| -> Vec<Millicores> {
        full.iter()
            .zip(&weights)
            .map(|(full, weight)| {
                let wanted = 1000.0 * scale * weight / most;
                let level = SHARE_LEVELS.iter().find(|l| f64::from(**l) >= wanted);
                Millicores(level.copied().unwrap_or(SHARE_LEVELS[13]).min(full.0))
            })
            .collect()
    };
    let holds = |scale: f64| {
        let latency = model.latency(&at(scale)).at_percentile;
        stays_below(context, latency, ms(slo.bound))
    };
    // The heaviest operator has a full core at 1; lighter ones reach theirs far above.
    let (mut low, mut high) = (0.01, 100.0);
    if !holds(high) {
        return full.to_vec();
    }
    for _ in 0..12 {
        let middle = f64::sqrt(low * high);
        if holds(middle) {
            high = middle;
        } else {
            low = middle;
        }
    }
    at(high)
}

fn lower(
    context: &Context<'_>,
    model: &Model<'_>,
    full: &[Millicores],
    order: &[usize],
) -> Vec<Millicores> {
    let mut shares = full.to_vec();
    for operator in order {
        let levels: Vec<u32> = SHARE_LEVELS
            .iter()
            .copied()
            .filter(|l| *l <= full[*operator].0)
            .collect();
        let holds = |level: u32| {
            let mut tried = shares.clone();
            tried[*operator] = Millicores(level);
            let busy = model.utilisation(*operator, Millicores(level));
            busy <= context.settings.utilisation_max
                && context.query.slo.latency.is_none_or(|slo| {
                    stays_below(context, model.latency(&tried).at_percentile, ms(slo.bound))
                })
        };
        let least = levels.partition_point(|level| !holds(*level));
        if let Some(level) = levels.get(least) {
            shares[*operator] = Millicores(*level);
        }
    }
    shares
}

fn fits(context: &Context<'_>, placement: &Placement, shares: &[Millicores]) -> Result<(), Reason> {
    let mut needed: BTreeMap<&NodeId, Resources> = BTreeMap::new();
    for (position, operator) in context.query.pipeline.operators.iter().enumerate() {
        let memory_mib = context
            .catalogue
            .0
            .get(&operator.kind)
            .map_or(0, |e| e.memory_mib);
        let total = needed.entry(&placement.0[position]).or_default();
        *total = total.plus(&Resources {
            cpu: shares[position],
            memory_mib,
            gpu_percent: 0,
        });
    }
    for (id, needed) in needed {
        let capacity = context
            .cluster
            .nodes
            .get(id)
            .map(|n| n.description.capacity)
            .unwrap_or_default();
        if !capacity.fits(&needed) {
            return Err(Reason::Capacity {
                node: id.clone(),
                needed,
                capacity,
            });
        }
    }
    Ok(())
}
