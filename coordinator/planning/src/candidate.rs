//! The plans worth considering for one query on today's fleet.
//!
//! Start at [`enumerate`]: every profiled configuration (with every setting of its filters) on every placement, predicted, held
//! against the SLOs, and given the least shares that still meet them ([`trim()`]). A [`Front`] is what an explorer proposes: the profile
//! from which candidates are made anew whenever the fleet changes, in milliseconds and without a trial.
//!
//! Deliberately absent: other queries (see [`crate::schedule`]), configurations nobody ran (see [`crate::search`]).

use std::collections::BTreeMap;

use compass_shared::ids::{Digest, NodeId};
use compass_shared::model::cluster::Resources;
use compass_shared::model::pipeline::PipelineConfiguration;
use compass_shared::model::plan::{ArtifactRef, Estimate, Expectation, OperatorPlan, instance_id};
use compass_shared::model::trigger::SloKind;
use compass_shared::time::ms;
use compass_shared::units::Millicores;
use serde::{Deserialize, Serialize};

use crate::predict::{Context, Fleet, Known, Latency, Model, Prepared, cost_cap_usd_per_h, known};
use crate::profile::{ConfigurationRow, QueryProfile, Truth};
use crate::space::{Placement, Point, Space, is_filter, pass_fraction, placements};

mod trim;
pub use trim::{SHARE_LEVELS, Trimmed, trim};

#[cfg(test)]
mod tests;

/// Candidates handed to the scheduler at most; the cheapest, and the best of each placement.
pub const CANDIDATES_MAX: usize = 64;
/// Combinations whose shares are trimmed, in order of the least they could cost.
const TRIMMED_MAX: usize = 128;
/// A plan must meet a bound with this probability, as far as samples tell; what is deployed is then certified by fresh samples.
pub const CONFIDENCE: f64 = 0.9;
/// The standard normal quantile of [`CONFIDENCE`].
const CONFIDENCE_QUANTILE: f64 = 1.2816;

/// What an explorer proposes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Front {
    /// What is known.
    pub profile: QueryProfile,
    /// What to prefer among what is feasible.
    pub preference: Preference,
}

/// What to prefer among feasible candidates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Preference {
    /// The cheapest that meets every SLO as measured.
    #[default]
    Cheapest,
    /// The cheapest that may well meet every SLO: what is worth more samples.
    Likely,
    /// The content has changed: of what meets latency and cost, what is most accurate as far as samples tell, else what is nearest to
    /// golden. Samples are few at first, and the cheapest of many that seem good enough is the one they flatter most.
    Safest,
}

/// A profiled placement, configuration and share.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// One entry per operator, in the pipeline's order.
    pub operators: Vec<OperatorPlan>,
    /// What it should achieve.
    pub expected: Expectation,
    /// Bits per second it needs from one node to another.
    pub links: BTreeMap<(NodeId, NodeId), f64>,
    /// Resources it needs per node.
    pub nodes: BTreeMap<NodeId, Resources>,
    /// How near to golden, 0 to 1.
    pub caution: f64,
    /// What counts under [`Preference::Safest`]; see [`safety`].
    pub safety: f64,
    /// Whether all its times were measured on the classes it uses.
    pub measured: bool,
    /// Hash of placement, configuration and shares.
    pub content: Digest,
}

impl Candidate {
    /// Hash of configuration and placement without shares: two candidates with the same one differ in size only.
    pub fn shape(&self) -> Digest {
        shape_of(&self.operators)
    }

    /// One line for people.
    pub fn summary(&self) -> String {
        let parts: Vec<_> = self
            .operators
            .iter()
            .map(|o| {
                if o.configuration.0.is_empty() {
                    format!("{}@{}", o.operator, o.node)
                } else {
                    format!("{}{{{}}}@{}", o.operator, o.configuration, o.node)
                }
            })
            .collect();
        parts.join(" ")
    }
}

/// See [`Candidate::shape`].
pub fn shape_of(operators: &[OperatorPlan]) -> Digest {
    let mut text = String::new();
    for o in operators {
        text.push_str(&format!("{}|{}|{}\n", o.operator, o.configuration, o.node));
    }
    Digest::of(text.as_bytes())
}

/// See [`Candidate::content`]; equal to the content hash of a plan made of these operators.
pub fn content_of(operators: &[OperatorPlan]) -> Digest {
    let mut text = String::new();
    for o in operators {
        text.push_str(&format!(
            "{}|{}|{}|{:?}\n",
            o.operator, o.configuration, o.node, o.share
        ));
    }
    Digest::of(text.as_bytes())
}

/// Why a combination of configuration and placement is no candidate.
#[derive(Debug, Clone, PartialEq)]
pub enum Reason {
    /// An SLO would be broken: the value to expect and the bound.
    Slo {
        /// Which.
        slo: SloKind,
        /// What to expect.
        value: Estimate,
        /// The bound.
        bound: f64,
    },
    /// An operator cannot keep up even with a full core: how busy it would be.
    Overload {
        /// Position of the operator.
        operator: usize,
        /// Busy part of a full core.
        busy: f64,
    },
    /// A link cannot carry the data: what it needs and what there is, in bit/s.
    Link {
        /// Sender.
        from: NodeId,
        /// Receiver.
        to: NodeId,
        /// Needed.
        needed_bps: f64,
        /// Usable.
        usable_bps: f64,
    },
    /// A node has too little.
    Capacity {
        /// The node.
        node: NodeId,
        /// What the plan needs of it.
        needed: Resources,
        /// What it has.
        capacity: Resources,
    },
}

impl Reason {
    /// A short stable name.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Slo {
                slo: SloKind::Latency,
                ..
            } => "latency",
            Self::Slo {
                slo: SloKind::Accuracy,
                ..
            } => "accuracy",
            Self::Slo {
                slo: SloKind::Cost, ..
            } => "cost",
            Self::Overload { .. } => "overload",
            Self::Link { .. } => "link",
            Self::Capacity { .. } => "capacity",
        }
    }

    /// How far from feasible, relative to the bound; 0 is feasible.
    pub fn gap(&self) -> f64 {
        match self {
            Self::Slo { slo, value, bound } => match slo {
                SloKind::Accuracy => (bound - value.value) / bound.max(1e-9),
                SloKind::Latency | SloKind::Cost => (value.value - bound) / bound.max(1e-9),
            }
            .max(1e-6),
            Self::Overload { busy, .. } => busy.max(1.0),
            Self::Link {
                needed_bps,
                usable_bps,
                ..
            } => (needed_bps / usable_bps.max(1.0)).max(1.0),
            Self::Capacity { .. } => 1.0,
        }
    }
}

/// A combination that is no candidate.
#[derive(Debug, Clone, PartialEq)]
pub struct Rejected {
    /// Its configuration.
    pub configuration: PipelineConfiguration,
    /// Its placement.
    pub placement: Placement,
    /// Why.
    pub reason: Reason,
    /// What to expect with full cores: latency in ms, accuracy, USD per hour at least.
    pub expected: Expectation,
}

/// All there is to choose from.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Candidates {
    /// Best first (by the front's preference).
    pub feasible: Vec<Candidate>,
    /// Combinations looked at.
    pub considered: usize,
    /// Of the profiled configurations: how many combinations each reason ruled out.
    pub rejected_by: BTreeMap<&'static str, usize>,
    /// Per reason the one that would cost least.
    pub rejected: Vec<Rejected>,
    /// The infeasible one closest to feasible.
    pub nearest: Option<Rejected>,
}

impl Candidates {
    /// Counts a combination as ruled out, and keeps it where it tells more than what is kept. Most do not, so what is kept is made only
    /// then.
    fn reject(&mut self, reason: &Reason, cost: f64, make: impl Fn() -> Rejected) {
        let name = reason.name();
        *self.rejected_by.entry(name).or_default() += 1;
        let is_nearer = self
            .nearest
            .as_ref()
            .is_none_or(|n| reason.gap() < n.reason.gap());
        if is_nearer {
            self.nearest = Some(make());
        }
        match self.rejected.iter_mut().find(|r| r.reason.name() == name) {
            None => self.rejected.push(make()),
            Some(kept) if cost < kept.expected.cost_usd_per_h => *kept = make(),
            Some(_) => {}
        }
    }
}

/// A combination that passed every test with full cores.
struct Survivor {
    point: Point,
    placement: usize,
    accuracy: Estimate,
    caution: f64,
    safety: f64,
    cost_least: f64,
}

/// Everything feasible for the query on the fleet of the context, trimmed.
pub fn enumerate(context: &Context<'_>, space: &Space, front: &Front) -> Candidates {
    let placements = placements(context.query, context.cluster);
    let used: std::collections::BTreeSet<&NodeId> = placements.iter().flat_map(|p| &p.0).collect();
    let Ok(fleet) = Fleet::new(context, used) else {
        return Candidates::default();
    };
    let positions: Vec<Vec<usize>> = placements
        .iter()
        .filter_map(|p| fleet.positions(p))
        .collect();
    let mut survey = Survey {
        context,
        space,
        preference: front.preference,
        fleet: &fleet,
        placements: &placements,
        positions: &positions,
        all: Candidates::default(),
        survivors: Vec::new(),
    };
    let mut inaccurate = Vec::new();
    for row in context.profile.configurations.values() {
        let Some(point) = space.point_of(&row.configuration) else {
            continue;
        };
        if row.failed.is_some() {
            continue;
        }
        for setting in space.with_filters(&point) {
            let judged = Setting::new(context, space, front, row, setting);
            match judged.accuracy_gap {
                Some(_) => inaccurate.push((row, judged)),
                None => survey.look(row, &judged),
            }
        }
    }
    // Of what is not accurate enough only the nearest is looked at closely: it explains the rest.
    inaccurate.sort_by(|(_, a), (_, b)| {
        let gap = |s: &Setting| s.accuracy_gap.unwrap_or(0.0);
        gap(a)
            .total_cmp(&gap(b))
            .then_with(|| a.point.cmp(&b.point))
    });
    for (index, (row, setting)) in inaccurate.iter().enumerate() {
        if index < INACCURATE_LOOKED_AT {
            survey.look(row, setting);
        } else {
            survey.all.considered += placements.len();
            *survey.all.rejected_by.entry("accuracy").or_default() += placements.len();
        }
    }
    let Survey {
        mut all,
        mut survivors,
        ..
    } = survey;
    sort(&mut survivors, front.preference);
    let mut per_placement = vec![false; placements.len()];
    let mut taken = 0;
    for survivor in &survivors {
        let is_first = !std::mem::replace(&mut per_placement[survivor.placement], true);
        if taken >= TRIMMED_MAX && !is_first {
            continue;
        }
        taken += 1;
        finish(
            &fleet,
            context,
            space,
            survivor,
            (&placements, &positions),
            &mut all,
        );
    }
    order(&mut all.feasible, front.preference);
    thin(&mut all.feasible);
    all
}

/// Configurations that are not accurate enough but are held against latency and cost all the same.
const INACCURATE_LOOKED_AT: usize = 3;

/// A configuration with a setting of its filters.
struct Setting {
    point: Point,
    configuration: PipelineConfiguration,
    caution: f64,
    /// `None` where it is unknown and the front says to go by caution.
    accuracy: Option<Estimate>,
    /// How far below the floor, relative; `None` when it is not.
    accuracy_gap: Option<f64>,
}

impl Setting {
    fn new(
        context: &Context<'_>,
        space: &Space,
        front: &Front,
        row: &ConfigurationRow,
        point: Point,
    ) -> Self {
        let configuration = space.configuration(&point);
        let caution = space.caution(&point);
        let accuracy = accuracy(context, front, row, &configuration);
        let accuracy_gap = accuracy_refusal(context, front.preference, accuracy).map(|r| r.gap());
        Self {
            point,
            configuration,
            caution,
            accuracy,
            accuracy_gap,
        }
    }
}

struct Survey<'a> {
    context: &'a Context<'a>,
    space: &'a Space,
    preference: Preference,
    fleet: &'a Fleet<'a>,
    placements: &'a [Placement],
    positions: &'a [Vec<usize>],
    all: Candidates,
    survivors: Vec<Survivor>,
}

impl Survey<'_> {
    /// Predicts a configuration with full cores on every placement.
    fn look(&mut self, row: &ConfigurationRow, setting: &Setting) {
        let context = self.context;
        // Rows of operators are kept by the prefix of the normalised configuration.
        let prefixes = prefixes(self.space, &row.configuration);
        let Ok(known) = known(context, &row.configuration, &prefixes) else {
            return;
        };
        let prepared = Prepared::new(self.fleet, &setting.configuration, &known);
        for (index, positions) in self.positions.iter().enumerate() {
            self.all.considered += 1;
            let Ok(model) = prepared.model(positions) else {
                continue;
            };
            let full = trim::full_shares(&model);
            let latency = model.latency(&full);
            let cost_least = model.cost_usd_per_h(&trim::least_shares(context, &model));
            let expected = Expectation {
                latency_ms: latency.at_percentile,
                accuracy: setting
                    .accuracy
                    .unwrap_or(unknown_accuracy(setting.caution)),
                cost_usd_per_h: cost_least,
            };
            let inaccurate = accuracy_refusal(context, self.preference, setting.accuracy);
            let worst = refusal(context, &model, &latency, inaccurate, cost_least, &full);
            match worst {
                Some(reason) => self.all.reject(&reason, cost_least, || Rejected {
                    configuration: setting.configuration.clone(),
                    placement: self.placements[index].clone(),
                    reason: reason.clone(),
                    expected,
                }),
                None => self.survivors.push(Survivor {
                    point: setting.point.clone(),
                    placement: index,
                    accuracy: expected.accuracy,
                    caution: setting.caution,
                    safety: safety(context, setting.accuracy, setting.caution),
                    cost_least,
                }),
            }
        }
    }
}

/// The accuracy to hold against the floor; `None` where it is unknown and the front says to go by caution.
fn accuracy(
    context: &Context<'_>,
    front: &Front,
    row: &ConfigurationRow,
    configuration: &PipelineConfiguration,
) -> Option<Estimate> {
    match context
        .profile
        .accuracy(row, answer_interval(context, configuration))
    {
        Some(estimate) => Some(estimate),
        None if front.preference == Preference::Safest => None,
        // Nothing known is not taken for anything.
        None => Some(unknown_accuracy(0.0)),
    }
}

const fn unknown_accuracy(caution: f64) -> Estimate {
    Estimate {
        value: caution,
        low: 0.0,
        high: 1.0,
        samples: 0,
    }
}

/// Every how many frames one is answered, by the filters' knobs.
pub fn answer_interval(context: &Context<'_>, configuration: &PipelineConfiguration) -> f64 {
    let mut passed = 1.0;
    for operator in &context.query.pipeline.operators {
        let entry = context.catalogue.0.get(&operator.kind);
        if entry.is_some_and(is_filter)
            && let Some(own) = configuration.of(&operator.id)
            && let Some(part) = pass_fraction(own, context.rate_hz)
        {
            passed *= part;
        }
    }
    1.0 / passed.max(1e-3)
}

/// The prefix of each operator under a normalised configuration.
pub fn prefixes(space: &Space, configuration: &PipelineConfiguration) -> Vec<Digest> {
    let pipeline = space.pipeline();
    pipeline
        .operators
        .iter()
        .map(|o| configuration.prefix(pipeline, &o.id))
        .collect()
}

/// Whether an accuracy is believed to reach a floor.
pub fn reaches(accuracy: Estimate, floor: f64) -> bool {
    let error = (accuracy.high - accuracy.low) / (2.0 * 1.96);
    accuracy.value - CONFIDENCE_QUANTILE * error >= floor
}

/// Whether a latency is believed to stay below a bound, margin included.
pub fn stays_below(context: &Context<'_>, latency: Estimate, bound_ms: f64) -> bool {
    let error = (latency.high - latency.value) / 1.96;
    let with_margin = latency.value * (1.0 + context.settings.latency_margin);
    with_margin <= bound_ms && latency.value + CONFIDENCE_QUANTILE * error <= bound_ms
}

/// While the content is new only what surely falls short is refused for its accuracy.
fn accuracy_refusal(
    context: &Context<'_>,
    preference: Preference,
    accuracy: Option<Estimate>,
) -> Option<Reason> {
    let (value, bound) = (accuracy?, context.query.slo.accuracy_min?);
    let is_accepted = match preference {
        Preference::Cheapest => reaches(value, bound),
        Preference::Likely => value.value >= bound,
        Preference::Safest => value.high >= bound,
    };
    (!is_accepted).then_some(Reason::Slo {
        slo: SloKind::Accuracy,
        value,
        bound,
    })
}

/// A number that orders configurations while the content is new: first those that samples show above the floor, by their accuracy;
/// then those of which nothing is known, by how near to golden they are; then those below the floor.
pub fn safety(context: &Context<'_>, accuracy: Option<Estimate>, caution: f64) -> f64 {
    match (accuracy, context.query.slo.accuracy_min) {
        (Some(accuracy), Some(floor)) if accuracy.value >= floor => 2.0 + accuracy.value,
        (Some(accuracy), Some(_)) => accuracy.value,
        (Some(_), None) | (None, _) => 1.0 + caution,
    }
}

/// Of all that rules a combination out, what is farthest off.
fn refusal(
    context: &Context<'_>,
    model: &Model<'_>,
    latency: &Latency,
    inaccurate: Option<Reason>,
    cost_least: f64,
    full: &[Millicores],
) -> Option<Reason> {
    let link = model.overloaded_hop().map(|(hop, part)| Reason::Link {
        from: hop.from.clone(),
        to: hop.to.clone(),
        needed_bps: hop.demand_bps(),
        usable_bps: hop.demand_bps() / part,
    });
    let overload = full
        .iter()
        .enumerate()
        .map(|(operator, share)| (operator, model.utilisation(operator, *share)))
        .filter(|(_, busy)| *busy > context.settings.utilisation_max)
        .max_by(|a, b| a.1.total_cmp(&b.1))
        .map(|(operator, busy)| Reason::Overload { operator, busy });
    let late = context.query.slo.latency.and_then(|slo| {
        let value = latency.at_percentile;
        (!stays_below(context, value, ms(slo.bound))).then(|| Reason::Slo {
            slo: SloKind::Latency,
            value,
            bound: ms(slo.bound),
        })
    });
    [
        inaccurate,
        link,
        overload,
        late,
        cost_refusal(context, cost_least),
    ]
    .into_iter()
    .flatten()
    .max_by(|a, b| a.gap().total_cmp(&b.gap()))
}

fn cost_refusal(context: &Context<'_>, cost: f64) -> Option<Reason> {
    let bound = cost_cap_usd_per_h(context.query)?;
    (cost > bound).then(|| Reason::Slo {
        slo: SloKind::Cost,
        value: Estimate::exact(cost),
        bound,
    })
}

fn sort(survivors: &mut [Survivor], preference: Preference) {
    survivors.sort_by(|a, b| {
        let by_safety = match preference {
            Preference::Cheapest | Preference::Likely => std::cmp::Ordering::Equal,
            Preference::Safest => b.safety.total_cmp(&a.safety),
        };
        by_safety
            .then(a.cost_least.total_cmp(&b.cost_least))
            .then_with(|| a.point.cmp(&b.point))
            .then(a.placement.cmp(&b.placement))
    });
}

/// Trims a survivor's shares and files it as feasible or rejected.
fn finish(
    fleet: &Fleet<'_>,
    context: &Context<'_>,
    space: &Space,
    survivor: &Survivor,
    (placements, positions): (&[Placement], &[Vec<usize>]),
    all: &mut Candidates,
) {
    let configuration = space.configuration(&survivor.point);
    let prefixes = prefixes(
        space,
        &space.configuration(&space.normalised(&survivor.point)),
    );
    let placement = &placements[survivor.placement];
    let Ok(known) = known(context, &configuration, &prefixes) else {
        return;
    };
    let prepared = Prepared::new(fleet, &configuration, &known);
    let Ok(model) = prepared.model(&positions[survivor.placement]) else {
        return;
    };
    match trim(context, &model, placement) {
        Ok(trimmed) => all.feasible.push(build(
            context,
            &configuration,
            placement,
            &model,
            &trimmed,
            survivor,
        )),
        Err(reason) => {
            let full = trim::full_shares(&model);
            all.reject(&reason, survivor.cost_least, || Rejected {
                configuration: configuration.clone(),
                placement: placement.clone(),
                reason: reason.clone(),
                expected: Expectation {
                    latency_ms: model.latency(&full).at_percentile,
                    accuracy: survivor.accuracy,
                    cost_usd_per_h: survivor.cost_least,
                },
            });
        }
    }
}

fn build(
    context: &Context<'_>,
    configuration: &PipelineConfiguration,
    placement: &Placement,
    model: &Model<'_>,
    trimmed: &Trimmed,
    survivor: &Survivor,
) -> Candidate {
    let mut operators = Vec::with_capacity(placement.0.len());
    let mut nodes: BTreeMap<NodeId, Resources> = BTreeMap::new();
    for (position, operator) in context.query.pipeline.operators.iter().enumerate() {
        let own = configuration.of(&operator.id).cloned().unwrap_or_default();
        let entry = context.catalogue.0.get(&operator.kind);
        let artifact = entry.and_then(|e| e.artifact(&own)).map(|a| ArtifactRef {
            name: a.name.clone(),
            digest: a.digest,
            bytes: a.bytes,
        });
        let node = placement.0[position].clone();
        let share = Resources {
            cpu: trimmed.shares[position],
            memory_mib: entry.map_or(0, |e| e.memory_mib),
            gpu_percent: 0,
        };
        let total = nodes.entry(node.clone()).or_default();
        *total = total.plus(&share);
        operators.push(OperatorPlan {
            operator: operator.id.clone(),
            instance: instance_id(
                &operator.kind,
                artifact.as_ref().map(|a| &a.digest),
                &own,
                &node,
            ),
            configuration: own,
            node,
            share,
            artifact,
        });
    }
    let links = demands(model);
    Candidate {
        content: content_of(&operators),
        operators,
        expected: Expectation {
            latency_ms: trimmed.latency.at_percentile,
            accuracy: survivor.accuracy,
            cost_usd_per_h: trimmed.cost_usd_per_h,
        },
        links,
        nodes,
        caution: survivor.caution,
        safety: survivor.safety,
        measured: trimmed.latency.measured,
    }
}

fn demands(model: &Model<'_>) -> BTreeMap<(NodeId, NodeId), f64> {
    let mut links: BTreeMap<(NodeId, NodeId), f64> = BTreeMap::new();
    for hop in model.hops() {
        *links.entry((hop.from.clone(), hop.to.clone())).or_default() += hop.demand_bps();
    }
    links
}

fn order(feasible: &mut [Candidate], preference: Preference) {
    feasible.sort_by(|a, b| {
        let by_safety = match preference {
            Preference::Cheapest | Preference::Likely => std::cmp::Ordering::Equal,
            Preference::Safest => b.safety.total_cmp(&a.safety),
        };
        by_safety
            .then(
                a.expected
                    .cost_usd_per_h
                    .total_cmp(&b.expected.cost_usd_per_h),
            )
            .then(
                a.expected
                    .latency_ms
                    .value
                    .total_cmp(&b.expected.latency_ms.value),
            )
            .then(a.content.cmp(&b.content))
    });
}

/// Keeps the best of each set of nodes, then the best of the rest, in order.
fn thin(feasible: &mut Vec<Candidate>) {
    if feasible.len() <= CANDIDATES_MAX {
        return;
    }
    let mut seen: Vec<Vec<NodeId>> = Vec::new();
    let mut is_kept = vec![false; feasible.len()];
    for (index, candidate) in feasible.iter().enumerate() {
        let nodes: Vec<NodeId> = candidate.nodes.keys().cloned().collect();
        if !seen.contains(&nodes) && seen.len() < CANDIDATES_MAX {
            seen.push(nodes);
            is_kept[index] = true;
        }
    }
    let mut room = CANDIDATES_MAX - seen.len();
    for kept in &mut is_kept {
        if !*kept && room > 0 {
            *kept = true;
            room -= 1;
        }
    }
    let mut kept = is_kept.into_iter();
    feasible.retain(|_| kept.next().unwrap_or(false));
}

/// A plan in force held against today's fleet.
#[derive(Debug, Clone, PartialEq)]
pub struct Assessed {
    /// What to expect of it now.
    pub expected: Expectation,
    /// The first SLO or limit it breaks, if any.
    pub broken: Option<Reason>,
    /// Bits per second it needs from one node to another.
    pub links: BTreeMap<(NodeId, NodeId), f64>,
    /// See [`safety`].
    pub safety: f64,
}

/// The prediction for given operators on today's fleet; `None` when it cannot be predicted any more.
pub fn assess(
    context: &Context<'_>,
    space: &Space,
    operators: &[OperatorPlan],
) -> Option<Assessed> {
    let configuration = PipelineConfiguration(
        operators
            .iter()
            .map(|o| (o.operator.clone(), o.configuration.clone()))
            .collect(),
    );
    let point = space.point_of(&configuration)?;
    let normalised = space.configuration(&space.normalised(&point));
    let prefixes = prefixes(space, &normalised);
    let known: Vec<Known<'_>> = known(context, &configuration, &prefixes).ok()?;
    let placement = Placement(operators.iter().map(|o| o.node.clone()).collect());
    let model = Model::new(context, &configuration, &known, &placement).ok()?;
    let shares: Vec<Millicores> = operators.iter().map(|o| o.share.cpu).collect();
    let latency = model.latency(&shares);
    let cost = model.cost_usd_per_h(&shares);
    let row = context.profile.configuration(&normalised);
    let judged = row.filter(|r| r.truth != Truth::Unknown);
    let accuracy = judged.and_then(|r| {
        context
            .profile
            .accuracy(r, answer_interval(context, &configuration))
    });
    let expected = Expectation {
        latency_ms: latency.at_percentile,
        accuracy: accuracy.unwrap_or(unknown_accuracy(space.caution(&point))),
        cost_usd_per_h: cost,
    };
    Some(Assessed {
        expected,
        broken: broken(context, &model, &latency, accuracy, cost, &shares),
        links: demands(&model),
        safety: safety(context, accuracy, space.caution(&point)),
    })
}

/// Like [`refusal`], but for a plan in force: without safety margins, so that it is not dropped for what it was chosen with.
fn broken(
    context: &Context<'_>,
    model: &Model<'_>,
    latency: &Latency,
    accuracy: Option<Estimate>,
    cost: f64,
    shares: &[Millicores],
) -> Option<Reason> {
    if let (Some(value), Some(bound)) = (accuracy, context.query.slo.accuracy_min)
        && value.value < bound
    {
        return Some(Reason::Slo {
            slo: SloKind::Accuracy,
            value,
            bound,
        });
    }
    if let Some((hop, part)) = model.overloaded_hop() {
        return Some(Reason::Link {
            from: hop.from.clone(),
            to: hop.to.clone(),
            needed_bps: hop.demand_bps(),
            usable_bps: hop.demand_bps() / part,
        });
    }
    for (operator, share) in shares.iter().enumerate() {
        let busy = model.utilisation(operator, *share);
        if busy > 0.95 {
            return Some(Reason::Overload { operator, busy });
        }
    }
    if let Some(slo) = context.query.slo.latency
        && latency.at_percentile.value > ms(slo.bound)
    {
        return Some(Reason::Slo {
            slo: SloKind::Latency,
            value: latency.at_percentile,
            bound: ms(slo.bound),
        });
    }
    cost_refusal(context, cost)
}
