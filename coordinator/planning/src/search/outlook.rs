//! How promising a configuration is that nobody has run.
//!
//! Accuracy, times and sizes are guessed by surrogates from what was run; latency and cost are then composed for every placement as if
//! it had been. The score is per second of trial:
//!
//! - nothing feasible known: Pr[accuracy ≥ A] · Pr[latency ≤ L] · Pr[cost ≤ K], with a small term that ranks the hopeless by how far
//!   off they are, so that a search without hope still moves towards what it can get;
//! - else: Σ over scenarios of weight · Pr(feasible) · relative saving (1 where nothing is feasible yet), plus what a more cautious
//!   configuration is worth as a refuge when the content changes.
//!
//! Scenarios are today's fleet, the same with degraded links out of the source's site, and the site alone: so a plan is at hand when
//! a link degrades, without a trial.

use compass_shared::ids::NodeId;
use compass_shared::model::cluster::Cluster;
use compass_shared::time::ms;
use compass_shared::units::Millicores;
use statrs::distribution::{ContinuousCDF, Normal};

use super::{SearchSettings, View, scenarios};
use crate::candidate::{answer_interval, enumerate, prefixes};
use crate::predict::{Context, Fleet, Known, Model, Prepared, cost_cap_usd_per_h};
use crate::profile::{ClassTimes, Moments, OperatorRow, Truth};
use crate::space::{Placement, Point, placements};
use crate::surrogate::{Guess, Ridge};

/// How far one knob may move an accuracy.
const ACCURACY_PRIOR: f64 = 0.3;
/// How far one knob may move the logarithm of a time or size: a factor of about 8.
const LOG_PRIOR: f64 = 2.0;
/// Weight of each scenario: today's, degraded links, the site alone.
const SCENARIO_WEIGHTS: [f64; 3] = [1.0, 0.5, 0.25];
/// What reaching golden is worth as a refuge, against a saving of the whole cost.
const REFUGE_WEIGHT: f64 = 0.15;
/// Seconds a stage takes besides its work: start of a worker, messages.
const STAGE_OVERHEAD_S: f64 = 0.15;
/// What tells two hopeless configurations apart.
const HOPELESS: f64 = 1e-6;

/// Surrogates and scenarios of one step.
pub(super) struct Outlook<'a> {
    view: View<'a>,
    settings: &'a SearchSettings,
    accuracy: Option<Ridge>,
    times: Vec<Option<Ridge>>,
    sizes: Vec<Option<Ridge>>,
    scenarios: Vec<Scenario>,
    caution: f64,
    /// What holding answers costs, by the interval between them.
    held: Vec<(f64, f64)>,
    normal: Normal,
}

struct Scenario {
    cluster: Cluster,
    placements: Vec<Placement>,
    nodes: std::collections::BTreeSet<NodeId>,
    incumbent: Option<f64>,
    weight: f64,
}

impl Scenario {
    fn new(context: &Context<'_>, cluster: Cluster, incumbent: Option<f64>, weight: f64) -> Self {
        let placements = placements(context.query, &cluster);
        Self {
            nodes: placements.iter().flat_map(|p| p.0.clone()).collect(),
            placements,
            cluster,
            incumbent,
            weight,
        }
    }
}

/// The best of the points scored.
pub(super) struct Ranked {
    pub(super) best: Vec<(Point, f64)>,
    pub(super) has_incumbent: bool,
    /// Something feasible is known and nothing scored is likely to improve on it enough.
    pub(super) worthless: bool,
}

impl<'a> Outlook<'a> {
    pub(super) fn new(view: &View<'a>, settings: &'a SearchSettings) -> Self {
        let context = &view.context;
        let found = enumerate(context, view.space, view.front);
        let incumbent = found.feasible.first().map(|c| c.expected.cost_usd_per_h);
        let caution = (found.feasible.iter().map(|c| c.caution)).fold(0.0, f64::max);
        let nominal = context.cluster.clone();
        let mut scenarios = vec![Scenario::new(
            context,
            nominal,
            incumbent,
            SCENARIO_WEIGHTS[0],
        )];
        if incumbent.is_some() {
            for (cluster, weight) in [
                (
                    scenarios::degraded(context, settings.degraded_part),
                    SCENARIO_WEIGHTS[1],
                ),
                (scenarios::site_only(context), SCENARIO_WEIGHTS[2]),
            ] {
                let imagined = Context {
                    cluster: &cluster,
                    ..*context
                };
                let incumbent = enumerate(&imagined, view.space, view.front)
                    .feasible
                    .first()
                    .map(|c| c.expected.cost_usd_per_h);
                scenarios.push(Scenario::new(context, cluster, incumbent, weight));
            }
        }
        let positions = 0..context.query.pipeline.operators.len();
        Self {
            view: *view,
            settings,
            accuracy: accuracy_surrogate(view),
            times: positions
                .clone()
                .map(|p| log_surrogate(view, p, reference_ms))
                .collect(),
            sizes: positions
                .map(|p| log_surrogate(view, p, |row| Some(row.bytes_out.mean)))
                .collect(),
            scenarios,
            caution,
            held: (view.space.with_filters(&view.space.golden()).iter())
                .map(|point| answer_interval(context, &view.space.configuration(point)))
                .map(|interval| (interval, held_part(context, interval)))
                .collect(),
            normal: Normal::new(0.0, 1.0).expect("0 and 1 are a mean and a deviation"),
        }
    }

    /// The best `count` of some points.
    pub(super) fn rank(&self, points: Vec<Point>, count: usize) -> Ranked {
        let has_incumbent = self.scenarios[0].incumbent.is_some();
        let mut scored: Vec<(Point, f64, f64)> = points
            .into_iter()
            .map(|point| {
                let (worth, seconds) = self.worth(&point);
                (point, worth / seconds, worth)
            })
            .collect();
        scored.sort_by(|a, b| b.1.total_cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        let best_worth = scored.iter().map(|s| s.2).fold(0.0, f64::max);
        Ranked {
            worthless: has_incumbent && best_worth < self.settings.gain_min,
            has_incumbent,
            best: scored
                .into_iter()
                .take(count)
                .map(|(point, score, _)| (point, score))
                .collect(),
        }
    }

    /// What trying a point is worth, and the seconds it takes.
    fn worth(&self, point: &Point) -> (f64, f64) {
        let rows = self.rows(point);
        let known: Vec<Known<'_>> = rows
            .iter()
            .map(|(row, doubt)| Known::guessed(row, *doubt))
            .collect();
        let accuracy = self.guess_accuracy(point);
        let (open, accurate) = self.filter_choice(point, accuracy);
        let seconds = self.seconds(&rows);
        let mut worth = 0.0;
        for (index, scenario) in self.scenarios.iter().enumerate() {
            let (hope, cost, gap) = self.best_placement(scenario, &open, &known);
            let Some(incumbent) = scenario.incumbent else {
                // Nothing known there yet: to have anything at all is worth everything, a fallback its weight.
                worth += scenario.weight * (accurate * hope + HOPELESS / (1.0 + gap));
                continue;
            };
            let saving = (1.0 - cost / incumbent.max(1e-12)).max(0.0);
            worth += scenario.weight * accurate * hope * saving;
            if index == 0 {
                let refuge = (self.view.space.caution(point) - self.caution).max(0.0);
                worth += REFUGE_WEIGHT * hope * refuge;
            }
        }
        (worth, seconds)
    }

    /// The placement with the best product of hope and cheapness: its probability of meeting latency and cost, its cost, and how far
    /// the least bad one is off.
    fn best_placement(
        &self,
        scenario: &Scenario,
        point: &Point,
        known: &[Known<'_>],
    ) -> (f64, f64, f64) {
        let context = Context {
            cluster: &scenario.cluster,
            ..self.view.context
        };
        let configuration = self.view.space.configuration(point);
        let mut best = (0.0, f64::INFINITY, f64::INFINITY);
        let mut best_score = -1.0;
        let Ok(fleet) = Fleet::new(&context, &scenario.nodes) else {
            return best;
        };
        let prepared = Prepared::new(&fleet, &configuration, known);
        for placement in &scenario.placements {
            let Some(positions) = fleet.positions(placement) else {
                continue;
            };
            let Ok(model) = prepared.model(&positions) else {
                continue;
            };
            let (hope, cost, gap) = self.hope(&context, &model);
            let saving = scenario
                .incumbent
                .map_or(1.0, |c| (1.0 - cost / c.max(1e-12)).max(1e-3));
            let score = hope * saving;
            let least_gap = best.2.min(gap);
            if score > best_score {
                best_score = score;
                best = (hope, cost, least_gap);
            } else {
                best.2 = least_gap;
            }
        }
        best
    }

    /// Probability that a placement meets latency and cost with full cores, its cost with shares that just keep up (half as much again
    /// for latency), and how far it is off.
    fn hope(&self, context: &Context<'_>, model: &Model<'_>) -> (f64, f64, f64) {
        let operators = context.query.pipeline.operators.len();
        let full = vec![Millicores(1000); operators];
        let mut hope = 1.0;
        let mut gap: f64 = 0.0;
        if let Some((_, part)) = model.overloaded_hop() {
            hope *= (-4.0 * (part - 1.0)).exp() * 0.5;
            gap += part - 1.0;
        }
        let mut shares = Vec::with_capacity(operators);
        for position in 0..operators {
            let busy = model.utilisation(position, Millicores(1000));
            let limit = context.settings.utilisation_max;
            if busy > limit {
                hope *= (-4.0 * (busy / limit - 1.0)).exp() * 0.5;
                gap += busy / limit - 1.0;
            }
            let least = (busy / limit * 1500.0).clamp(50.0, 1000.0);
            shares.push(Millicores(least as u32));
        }
        if let Some(slo) = context.query.slo.latency {
            let value = model.latency(&full).at_percentile;
            let bound = ms(slo.bound) / (1.0 + context.settings.latency_margin);
            let deviation = ((value.high - value.value) / 1.96).max(0.05 * value.value);
            hope *= self.normal.cdf((bound - value.value) / deviation.max(1e-9));
            gap += (value.value / bound - 1.0).max(0.0);
        }
        let cost = model.cost_usd_per_h(&shares);
        if let Some(cap) = cost_cap_usd_per_h(context.query)
            && cost > cap
        {
            hope *= (-4.0 * (cost / cap.max(1e-12) - 1.0)).exp() * 0.5;
            gap += cost / cap.max(1e-12) - 1.0;
        }
        (hope, cost, if gap.is_finite() { gap } else { 1e6 })
    }

    /// The filter setting to judge a point with: the most frames left out while the accuracy is still nearly as likely to hold; and
    /// how likely that is.
    fn filter_choice(&self, point: &Point, accuracy: Option<Guess>) -> (Point, f64) {
        let floor = self.view.context.query.slo.accuracy_min;
        let (Some(floor), Some(guess)) = (floor, accuracy) else {
            let cheapest = self.view.space.with_filters(point);
            let open = cheapest.first().cloned().unwrap_or_else(|| point.clone());
            return (open, 1.0);
        };
        let likely = |open: &Point| {
            let configuration = self.view.space.configuration(open);
            let interval = answer_interval(&self.view.context, &configuration);
            let known = self.held.iter().find(|(i, _)| *i == interval);
            let held = known.map_or(1.0, |(_, part)| *part);
            self.normal
                .cdf((guess.mean * held - floor) / guess.deviation.max(1e-6))
        };
        let best = likely(point);
        self.view
            .space
            .with_filters(point)
            .into_iter()
            .map(|open| {
                let p = likely(&open);
                (open, p)
            })
            .find(|(_, p)| *p >= 0.8 * best)
            .unwrap_or_else(|| (point.clone(), best))
    }

    fn guess_accuracy(&self, point: &Point) -> Option<Guess> {
        let features = self.view.space.features(point, None);
        self.accuracy.as_ref().map(|model| model.guess(&features))
    }

    /// A row per operator: the measured one, else one made up from the surrogates, with the doubt of its time.
    fn rows(&self, point: &Point) -> Vec<(OperatorRow, f64)> {
        let space = self.view.space;
        let configuration = space.configuration(point);
        let prefixes = prefixes(space, &configuration);
        let pipeline = space.pipeline();
        pipeline
            .operators
            .iter()
            .enumerate()
            .map(|(position, operator)| {
                let measured = self
                    .view
                    .context
                    .profile
                    .operator(&operator.id, &prefixes[position])
                    .filter(|row| !row.times.is_empty());
                if let Some(row) = measured {
                    return (row.clone(), 0.0);
                }
                let features = space.features(point, Some(&space.ancestry(position)));
                let guess = |model: &Option<Ridge>, default: f64| {
                    model.as_ref().map_or(
                        Guess {
                            mean: default.ln(),
                            deviation: LOG_PRIOR,
                        },
                        |m| m.guess(&features),
                    )
                };
                let time = guess(&self.times[position], 10.0);
                let size = guess(&self.sizes[position], 10_000.0);
                let like = self
                    .view
                    .context
                    .profile
                    .rows_of(&operator.id)
                    .next()
                    .cloned();
                let row = made_up(like, operator.id.clone(), prefixes[position], time, size);
                // A log deviation of 1 is a factor of e; as a relative deviation that is all that can be said.
                (row, time.deviation.min(1.5))
            })
            .collect()
    }

    /// How long a trial of these rows takes: stages that have no measurement yet, on a full core of the host's speed.
    fn seconds(&self, rows: &[(OperatorRow, f64)]) -> f64 {
        let frames = f64::from(self.view.frames.max(1));
        rows.iter()
            .filter(|(_, doubt)| *doubt > 0.0)
            .map(|(row, _)| {
                let per_frame = reference_ms(row).unwrap_or(10.0) / 1e3;
                STAGE_OVERHEAD_S + frames * per_frame
            })
            .sum::<f64>()
            .max(STAGE_OVERHEAD_S)
    }
}

/// Mean accuracy with answers held over an interval, relative to answering every frame, as seen so far.
fn held_part(context: &Context<'_>, interval: f64) -> f64 {
    let parts: Vec<f64> = context
        .profile
        .configurations
        .values()
        .filter_map(|row| {
            let all = row.accuracy(1.0)?.value;
            let held = row.accuracy(interval)?.value;
            (all > 0.0).then_some(held / all)
        })
        .collect();
    if parts.is_empty() {
        // Nothing seen: an answer loses a tenth of its worth with each doubling of the interval.
        return 0.9_f64.powf(interval.max(1.0).log2());
    }
    parts.iter().sum::<f64>() / parts.len() as f64
}

/// Milliseconds on a core of the host's speed, from the class with the most samples.
fn reference_ms(row: &OperatorRow) -> Option<f64> {
    row.times
        .values()
        .filter(|t| t.full_core_ms.count > 0)
        .max_by_key(|t| t.full_core_ms.count)
        .map(|t| t.full_core_ms.mean * t.speed.unwrap_or(1.0))
}

fn made_up(
    like: Option<OperatorRow>,
    operator: compass_shared::ids::OperatorId,
    prefix: compass_shared::ids::Digest,
    time: Guess,
    size: Guess,
) -> OperatorRow {
    let one = |mean: f64| Moments {
        count: 1,
        mean,
        squares: 0.0,
        max: mean,
    };
    let mut row = like.unwrap_or_else(|| OperatorRow {
        operator,
        prefix,
        configuration: compass_shared::model::pipeline::Configuration::default(),
        times: std::collections::BTreeMap::new(),
        bytes_out: Moments::default(),
        passed: Moments::default(),
        cold_start_ms: Moments::default(),
        sampled: None,
    });
    let reference = time.mean.exp();
    row.times = row
        .times
        .iter()
        .map(|(class, seen)| {
            let times = ClassTimes {
                full_core_ms: one(reference / seen.speed.unwrap_or(1.0)),
                speed: seen.speed,
            };
            (class.clone(), times)
        })
        .collect();
    if row.times.is_empty() {
        row.times.insert(
            "nothing".to_owned(),
            ClassTimes {
                full_core_ms: one(reference),
                speed: Some(1.0),
            },
        );
    }
    row.prefix = prefix;
    row.bytes_out = one(size.mean.exp());
    row
}

fn accuracy_surrogate(view: &View<'_>) -> Option<Ridge> {
    let observations: Vec<(Vec<f64>, f64)> = view
        .context
        .profile
        .configurations
        .values()
        .filter(|row| row.truth != Truth::Unjudged)
        .filter_map(|row| {
            let point = view.space.point_of(&row.configuration)?;
            let accuracy = view.context.profile.accuracy(row, 1.0)?;
            Some((view.space.features(&point, None), accuracy.value))
        })
        .collect();
    Ridge::fit(&observations, ACCURACY_PRIOR)
}

fn log_surrogate(
    view: &View<'_>,
    position: usize,
    value: impl Fn(&OperatorRow) -> Option<f64>,
) -> Option<Ridge> {
    let space = view.space;
    let operator = &space.pipeline().operators[position].id;
    let ancestry = space.ancestry(position);
    let mut observations = Vec::new();
    for row in view.context.profile.configurations.values() {
        let Some(point) = space.point_of(&row.configuration) else {
            continue;
        };
        let prefix = row.configuration.prefix(space.pipeline(), operator);
        let seen = view.context.profile.operator(operator, &prefix);
        if let Some(value) = seen.and_then(&value)
            && value > 0.0
        {
            observations.push((space.features(&point, Some(&ancestry)), value.ln()));
        }
    }
    Ridge::fit(&observations, LOG_PRIOR)
}
