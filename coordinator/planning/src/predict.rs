//! Latency and cost of a configuration on a placement with given shares, composed from what each operator and link was seen to do.
//!
//! Start at [`Model::new`], then [`Model::latency`] per choice of shares. Latency is the sum along the slowest path through the
//! pipeline of
//!
//! ```text
//! app -> entry   hop overhead
//! per operator   full-core time of the node's class / min(share, 1) + hand-over + queueing
//! per hop        bytes · 8 / bandwidth + round trip / 2 + hop overhead + expected re-sends + queueing on the link, behind control traffic too
//! sink -> app    hop back to the entry's place + hop overhead
//! ```
//!
//! Each part has a mean and a variance; the percentile comes from their sum taken as normal. Queueing is Kingman's approximation for
//! one server. A part that was measured on another device class, or on none (a surrogate's guess), widens the interval and is named.
//! More share never makes a prediction slower; a plan that meets its SLO only without load is not feasible, since utilisation is bounded.
//!
//! Deliberately absent: which shares to choose (see [`crate::candidate`]), accuracy.

use compass_shared::ids::{Digest, NodeId, OperatorId};
use compass_shared::model::catalogue::Catalogue;
use compass_shared::model::cluster::{Cluster, Link, NodeDescription};
use compass_shared::model::pipeline::PipelineConfiguration;
use compass_shared::model::plan::Estimate;
use compass_shared::model::query::{CostSlo, Query};
use compass_shared::units::{Bandwidth, Millicores};
use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, Normal};

use crate::profile::{Moments, OperatorRow, QueryProfile, class_of};
use crate::space::{Placement, is_filter, pass_fraction};

#[cfg(test)]
mod tests;

/// Constants of the latency and cost model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PredictSettings {
    /// Added per hop between nodes, in ms: encryption, framing, two wake-ups.
    pub hop_overhead_ms: f64,
    /// Added per operator, in ms: hand-over to its worker and back.
    pub worker_overhead_ms: f64,
    /// Between the app and its entry node, each way, in ms.
    pub app_hop_ms: f64,
    /// An operator's share is busy at most this part of the time: beyond it waiting grows without bound.
    pub utilisation_max: f64,
    /// A link is used to at most this part of its rate, control traffic included.
    pub link_utilisation_max: f64,
    /// What telemetry, trials' results, labels and probes are taken to send over any link. Much less on most, but what leads out of a
    /// site shares its uplink: measured while a site searched for a plan, 5 to 12 kB/s.
    pub control_rate: Bandwidth,
    /// It comes in bursts of this many bytes, and a frame waits behind one: a probe train or a report of a trial.
    pub control_burst_bytes: f64,
    /// A plan must meet its latency bound with this part of it to spare.
    pub latency_margin: f64,
    /// Relative deviation of a time carried over between emulated classes, whose speeds are declared.
    pub emulated_class_deviation: f64,
    /// Relative deviation of a time carried over between classes of unknown relative speed.
    pub unknown_class_deviation: f64,
    /// What a link that was never filled is taken to carry, if its lower bound says less.
    pub assumed_bandwidth: Bandwidth,
    /// Squared coefficient of variation of the gaps between frames at an operator.
    pub arrival_variation: f64,
}

impl Default for PredictSettings {
    fn default() -> Self {
        Self {
            hop_overhead_ms: 1.5,
            worker_overhead_ms: 0.5,
            app_hop_ms: 1.5,
            utilisation_max: 0.7,
            link_utilisation_max: 0.8,
            control_rate: Bandwidth(80_000),
            control_burst_bytes: 4_000.0,
            latency_margin: 0.25,
            emulated_class_deviation: 0.1,
            unknown_class_deviation: 0.5,
            assumed_bandwidth: Bandwidth(50_000_000),
            arrival_variation: 0.2,
        }
    }
}

/// What predictions are made from.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    /// The query.
    pub query: &'a Query,
    /// Operator kinds.
    pub catalogue: &'a Catalogue,
    /// Today's fleet.
    pub cluster: &'a Cluster,
    /// What is known of the query.
    pub profile: &'a QueryProfile,
    /// Constants.
    pub settings: &'a PredictSettings,
    /// Frames per second that arrive (as measured, else as announced).
    pub rate_hz: f64,
}

/// Why there is no prediction.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unpredictable {
    /// Nothing is known of the operator's time.
    #[error("operator {0} was never run")]
    NotMeasured(OperatorId),
    /// The placement names a node the fleet does not have.
    #[error("node {0} is not known")]
    NoNode(NodeId),
    /// Two operators that talk have no link between their nodes.
    #[error("there is no link {0}->{1}")]
    NoLink(NodeId, NodeId),
}

/// Time of one operator on the full core of one node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// Mean in ms.
    pub mean_ms: f64,
    /// Standard deviation between frames, in ms.
    pub deviation_ms: f64,
    /// Standard deviation of the mean itself, relative: 0 where it was measured on this class.
    pub doubt: f64,
    /// Whether it was measured under this prefix and on this class.
    pub measured: bool,
}

/// An operator's work under one configuration, before a node is chosen: which row tells of it and how well.
#[derive(Debug, Clone, Copy)]
pub struct Known<'a> {
    row: &'a OperatorRow,
    /// Relative deviation of the row's times as a statement about this configuration; 0 where it was run itself.
    doubt: f64,
}

impl<'a> Known<'a> {
    /// A row of another configuration, or a made-up one, with the relative deviation its times have.
    pub const fn guessed(row: &'a OperatorRow, doubt: f64) -> Self {
        Self { row, doubt }
    }

    /// The row of this very configuration.
    pub const fn measured(row: &'a OperatorRow) -> Self {
        Self { row, doubt: 0.0 }
    }
}

/// Relative deviation of a time seen under another prefix (other inputs, same own configuration).
const OTHER_PREFIX_DEVIATION: f64 = 0.2;

/// Looks up what is known of each operator of a configuration.
///
/// # Errors
/// When an operator was never run in its own configuration.
pub fn known<'a>(
    context: &Context<'a>,
    configuration: &PipelineConfiguration,
    prefixes: &[Digest],
) -> Result<Vec<Known<'a>>, Unpredictable> {
    let pipeline = &context.query.pipeline;
    let find = |(position, prefix): (usize, &Digest)| {
        let operator = &pipeline.operators[position];
        if let Some(row) = context.profile.operator(&operator.id, prefix)
            && !row.times.is_empty()
        {
            return Ok(Known::measured(row));
        }
        let own = configuration.of(&operator.id);
        let filter = context
            .catalogue
            .0
            .get(&operator.kind)
            .is_some_and(is_filter);
        let row = context
            .profile
            .operators
            .range(format!("{}|", operator.id)..)
            .map(|(_, row)| row)
            .take_while(|row| row.operator == operator.id)
            .filter(|row| !row.times.is_empty())
            .filter(|row| filter || Some(&row.configuration) == own)
            // The best sampled, then the first by key.
            .max_by_key(|row| {
                let samples = row
                    .times
                    .values()
                    .map(|t| t.full_core_ms.count)
                    .sum::<u32>();
                (samples, std::cmp::Reverse(row.prefix))
            });
        // A filter takes the same time whatever its rate.
        let doubt = if filter { 0.0 } else { OTHER_PREFIX_DEVIATION };
        row.map(|row| Known::guessed(row, doubt))
            .ok_or_else(|| Unpredictable::NotMeasured(operator.id.clone()))
    };
    prefixes.iter().enumerate().map(find).collect()
}

impl Known<'_> {
    /// The work on a node's class, carried over from the best known class where it was not measured there.
    pub fn on(&self, node: &NodeDescription, settings: &PredictSettings) -> Option<Work> {
        let class = class_of(node);
        if let Some(times) = self.row.times.get(&class)
            && times.full_core_ms.count > 0
        {
            return Some(work(
                &times.full_core_ms,
                1.0,
                self.doubt,
                self.doubt == 0.0,
            ));
        }
        let (_, times) = self
            .row
            .times
            .iter()
            .filter(|(_, t)| t.full_core_ms.count > 0)
            .max_by_key(|(class, t)| {
                (
                    t.speed.is_some() == node.emulated_speed.is_some(),
                    t.full_core_ms.count,
                    std::cmp::Reverse(class.as_str()),
                )
            })?;
        let (ratio, class_doubt) = match (times.speed, node.emulated_speed) {
            (Some(there), Some(here)) if here > 0.0 => {
                (there / here, settings.emulated_class_deviation)
            }
            (Some(there), None) => (there, settings.unknown_class_deviation),
            (None, Some(here)) if here > 0.0 => (1.0 / here, settings.unknown_class_deviation),
            _ => (1.0, settings.unknown_class_deviation),
        };
        let doubt = self.doubt.hypot(class_doubt);
        Some(work(&times.full_core_ms, ratio, doubt, false))
    }
}

fn work(times: &Moments, ratio: f64, doubt: f64, measured: bool) -> Work {
    let samples = f64::from(times.count.max(1));
    let mean_ms = times.mean * ratio;
    // Few samples leave the mean itself in doubt.
    let sampling = times.deviation() / (times.mean.max(1e-9) * samples.sqrt());
    Work {
        mean_ms,
        deviation_ms: times.deviation() * ratio,
        doubt: doubt.hypot(sampling),
        measured,
    }
}

/// Data that leaves one node for another under a plan.
#[derive(Debug, Clone, Copy)]
pub struct Hop<'a> {
    /// Position of the operator whose output travels; `None` for the app's frames.
    pub output_of: Option<usize>,
    /// Sender.
    pub from: &'a NodeId,
    /// Receiver.
    pub to: &'a NodeId,
    /// The path.
    pub link: &'a Link,
    /// Bytes per frame.
    pub bytes: f64,
    /// Frames per second.
    pub rate_hz: f64,
    mean_ms: f64,
    variance: f64,
}

impl Hop<'_> {
    /// Bits per second it needs.
    pub fn demand_bps(&self) -> f64 {
        self.bytes * 8.0 * self.rate_hz
    }
}

/// The nodes some placements use, looked up once for all predictions among them.
pub struct Fleet<'a> {
    context: Context<'a>,
    ids: Vec<&'a NodeId>,
    descriptions: Vec<&'a NodeDescription>,
    /// From each to each, row by row; `None` where there is no link.
    links: Vec<Option<&'a Link>>,
    entry: usize,
    quantile: f64,
}

impl<'a> Fleet<'a> {
    /// Looks up these nodes, and the query's entry node.
    ///
    /// # Errors
    /// When one of them is not known.
    pub fn new<'n>(
        context: &Context<'a>,
        nodes: impl IntoIterator<Item = &'n NodeId>,
    ) -> Result<Self, Unpredictable> {
        let mut wanted: Vec<&NodeId> = nodes.into_iter().collect();
        wanted.push(&context.query.entry);
        wanted.sort();
        wanted.dedup();
        let mut ids = Vec::with_capacity(wanted.len());
        let mut descriptions = Vec::with_capacity(wanted.len());
        for id in wanted {
            let (id, node) = context
                .cluster
                .nodes
                .get_key_value(id)
                .ok_or_else(|| Unpredictable::NoNode(id.clone()))?;
            ids.push(id);
            descriptions.push(&node.description);
        }
        let mut links = vec![None; ids.len() * ids.len()];
        for (from, from_id) in ids.iter().enumerate() {
            for (to, to_id) in ids.iter().enumerate() {
                if from != to {
                    let pair = ((*from_id).clone(), (*to_id).clone());
                    links[from * ids.len() + to] = context.cluster.links.get(&pair);
                }
            }
        }
        let entry = ids
            .iter()
            .position(|id| **id == context.query.entry)
            .expect("the entry node was looked up");
        Ok(Self {
            context: *context,
            ids,
            descriptions,
            links,
            entry,
            quantile: standard_normal_quantile(percentile_of(context.query) / 100.0),
        })
    }

    /// A placement as positions among these nodes; `None` when it uses another one.
    pub fn positions(&self, placement: &Placement) -> Option<Vec<usize>> {
        placement
            .0
            .iter()
            .map(|id| self.ids.binary_search(&id).ok())
            .collect()
    }

    fn link(&self, from: usize, to: usize) -> Result<&'a Link, Unpredictable> {
        self.links[from * self.ids.len() + to]
            .ok_or_else(|| Unpredictable::NoLink(self.ids[from].clone(), self.ids[to].clone()))
    }
}

/// A configuration on a fleet: everything that does not depend on the placement.
pub struct Prepared<'f, 'a> {
    fleet: &'f Fleet<'a>,
    /// Per operator and node.
    work: Vec<Option<Work>>,
    /// Frames per second that reach each operator.
    rates: Vec<f64>,
    /// Size of each operator's output.
    bytes: Vec<f64>,
    /// Positions of each operator's inputs.
    inputs: Vec<Vec<usize>>,
    result_hz: f64,
}

impl<'f, 'a> Prepared<'f, 'a> {
    /// Prepares a configuration; `known` comes from [`known`] for the same one.
    pub fn new(
        fleet: &'f Fleet<'a>,
        configuration: &PipelineConfiguration,
        known: &[Known<'_>],
    ) -> Self {
        let context = &fleet.context;
        let operators = &context.query.pipeline.operators;
        let mut rates: Vec<f64> = Vec::with_capacity(operators.len());
        let mut passed: Vec<f64> = Vec::with_capacity(operators.len());
        let mut inputs = Vec::with_capacity(operators.len());
        let mut work = Vec::with_capacity(operators.len() * fleet.ids.len());
        for (position, operator) in operators.iter().enumerate() {
            let sources: Vec<usize> = operator
                .inputs
                .iter()
                .filter_map(|id| context.query.pipeline.position(id))
                .collect();
            let rate = sources
                .iter()
                .map(|source| rates[*source] * passed[*source])
                .fold(context.rate_hz, f64::min);
            rates.push(rate);
            passed.push(passed_part(context, configuration, known, position));
            inputs.push(sources);
            let operator = &operators[position].id;
            let live = context.profile.live_ratio.get(operator).copied();
            work.extend(fleet.descriptions.iter().map(|node| {
                let work = known[position].on(node, context.settings)?;
                Some(Work {
                    mean_ms: work.mean_ms * live.unwrap_or(1.0),
                    ..work
                })
            }));
        }
        let last = operators.len() - 1;
        Self {
            fleet,
            work,
            result_hz: rates[last] * passed[last],
            bytes: (0..operators.len())
                .map(|position| output_bytes(context, known, position))
                .collect(),
            rates,
            inputs,
        }
    }

    /// The model of a placement, given as positions (see [`Fleet::positions`]).
    ///
    /// # Errors
    /// When a link is missing or an operator's time is not known.
    pub fn model(&self, placement: &[usize]) -> Result<Model<'a>, Unpredictable> {
        let fleet = self.fleet;
        let context = &fleet.context;
        let operators = &context.query.pipeline.operators;
        let mut model = Model {
            context: *context,
            stages: Vec::with_capacity(operators.len()),
            inputs: Vec::with_capacity(operators.len()),
            hops: Vec::with_capacity(4),
            first_hop: None,
            last_hop: None,
            egress_usd_per_h: 0.0,
            quantile: fleet.quantile,
            result_hz: self.result_hz,
        };
        for (position, operator) in operators.iter().enumerate() {
            let node = placement[position];
            let work = self.work[position * fleet.ids.len() + node]
                .ok_or_else(|| Unpredictable::NotMeasured(operator.id.clone()))?;
            let rate_hz = self.rates[position];
            let first_input = model.inputs.len();
            for source in &self.inputs[position] {
                let bytes = self.bytes[*source];
                let hop = self.hop(
                    &mut model,
                    Some(*source),
                    (placement[*source], node),
                    bytes,
                    rate_hz,
                )?;
                model.inputs.push((*source, hop));
            }
            if operator.inputs.is_empty() {
                let bytes = context.profile.input_bytes;
                model.first_hop =
                    self.hop(&mut model, None, (fleet.entry, node), bytes, rate_hz)?;
            }
            let description = fleet.descriptions[node];
            let prices = &context.cluster.prices.core_hour;
            model.stages.push(Stage {
                work,
                rate_hz,
                inputs: first_input..model.inputs.len(),
                core_price: prices.get(&description.tier).copied().unwrap_or(0.0),
                capacity: description.capacity.cpu,
            });
        }
        let last = operators.len() - 1;
        model.last_hop = self.hop(
            &mut model,
            Some(last),
            (placement[last], fleet.entry),
            self.bytes[last],
            self.result_hz,
        )?;
        Ok(model)
    }

    /// Adds the hop between two nodes and gives its index; `None` on one node.
    fn hop(
        &self,
        model: &mut Model<'a>,
        output_of: Option<usize>,
        (from, to): (usize, usize),
        bytes: f64,
        rate_hz: f64,
    ) -> Result<Option<usize>, Unpredictable> {
        if from == to {
            return Ok(None);
        }
        let fleet = self.fleet;
        let link = fleet.link(from, to)?;
        let (mean_ms, variance) = hop_time(link, bytes, rate_hz, fleet.context.settings);
        if fleet.descriptions[from].site != fleet.descriptions[to].site {
            let gigabytes_per_h = bytes * rate_hz * 3600.0 / 1e9;
            model.egress_usd_per_h += gigabytes_per_h * fleet.context.cluster.prices.egress_gb;
        }
        model.hops.push(Hop {
            output_of,
            from: fleet.ids[from],
            to: fleet.ids[to],
            link,
            bytes,
            rate_hz,
            mean_ms,
            variance,
        });
        Ok(Some(model.hops.len() - 1))
    }
}

/// Part of the frames that reach an operator which it passes on.
fn passed_part(
    context: &Context<'_>,
    configuration: &PipelineConfiguration,
    known: &[Known<'_>],
    position: usize,
) -> f64 {
    let operator = &context.query.pipeline.operators[position];
    let entry = context.catalogue.0.get(&operator.kind);
    if entry.is_some_and(is_filter) {
        let own = configuration.of(&operator.id);
        return own
            .and_then(|c| pass_fraction(c, context.rate_hz))
            .unwrap_or(1.0);
    }
    let passed = &known[position].row.passed;
    if passed.count == 0 {
        1.0
    } else {
        passed.mean.clamp(0.0, 1.0)
    }
}

struct Stage {
    work: Work,
    rate_hz: f64,
    /// Which of the model's inputs are its.
    inputs: std::ops::Range<usize>,
    core_price: f64,
    capacity: Millicores,
}

/// The latency model of one configuration on one placement; shares are still open.
pub struct Model<'a> {
    context: Context<'a>,
    stages: Vec<Stage>,
    /// Source operator and hop, if they are on different nodes.
    inputs: Vec<(usize, Option<usize>)>,
    hops: Vec<Hop<'a>>,
    first_hop: Option<usize>,
    last_hop: Option<usize>,
    egress_usd_per_h: f64,
    quantile: f64,
    result_hz: f64,
}

/// A predicted latency and what it consists of.
#[derive(Debug, Clone, PartialEq)]
pub struct Latency {
    /// At the SLO's percentile, in ms.
    pub at_percentile: Estimate,
    /// Mean, in ms.
    pub mean_ms: f64,
    /// Mean time in operators on the slowest path, in ms.
    pub operators_ms: f64,
    /// Mean time on links on the slowest path, in ms.
    pub links_ms: f64,
    /// Whether every operator's time was measured on its node's class.
    pub measured: bool,
}

impl<'a> Model<'a> {
    /// The model of one configuration on one placement; for many of them prepare a [`Fleet`] once.
    ///
    /// # Errors
    /// When a node or link is missing or an operator's time is not known.
    pub fn new(
        context: &Context<'a>,
        configuration: &PipelineConfiguration,
        known: &[Known<'_>],
        placement: &Placement,
    ) -> Result<Self, Unpredictable> {
        let fleet = Fleet::new(context, &placement.0)?;
        let positions = fleet
            .positions(placement)
            .expect("every node of the placement was looked up");
        Prepared::new(&fleet, configuration, known).model(&positions)
    }

    /// The most each operator can use of its node: a core, or the node if it has less.
    pub fn full_shares(&self) -> Vec<Millicores> {
        self.stages
            .iter()
            .map(|stage| Millicores(stage.capacity.0.min(1000)))
            .collect()
    }

    /// Time of an operator at a share: mean, variance and relative doubt. More share never gives more.
    fn service(&self, position: usize, share: Millicores) -> (f64, f64, f64) {
        let stage = &self.stages[position];
        let cores = share.cores().clamp(1e-3, 1.0);
        let (mean, deviation) = (stage.work.mean_ms / cores, stage.work.deviation_ms / cores);
        let busy = (stage.rate_hz * mean / 1e3).min(0.999);
        let variation = if mean > 0.0 {
            (deviation / mean).powi(2)
        } else {
            0.0
        };
        // Kingman (1961): waiting at one server from utilisation and the two variations.
        let waiting =
            busy / (1.0 - busy) * mean * (self.context.settings.arrival_variation + variation)
                / 2.0;
        (
            mean + waiting + self.context.settings.worker_overhead_ms,
            deviation * deviation + waiting * waiting,
            stage.work.doubt * mean,
        )
    }

    /// The latency with these shares, one per operator.
    pub fn latency(&self, shares: &[Millicores]) -> Latency {
        #[derive(Clone, Copy, Default)]
        struct Reached {
            mean: f64,
            variance: f64,
            doubt: f64,
            operators: f64,
            links: f64,
        }
        let settings = self.context.settings;
        let hop = |from: Reached, index: Option<usize>| {
            let Some(hop) = index.map(|i| &self.hops[i]) else {
                return from;
            };
            Reached {
                mean: from.mean + hop.mean_ms,
                variance: from.variance + hop.variance,
                links: from.links + hop.mean_ms,
                ..from
            }
        };
        let app = Reached {
            mean: settings.app_hop_ms,
            links: settings.app_hop_ms,
            ..Reached::default()
        };
        let mut reached: Vec<Reached> = Vec::with_capacity(self.stages.len());
        for (position, stage) in self.stages.iter().enumerate() {
            let start = if stage.inputs.is_empty() {
                hop(app, self.first_hop)
            } else {
                self.inputs[stage.inputs.clone()]
                    .iter()
                    .map(|(source, index)| hop(reached[*source], *index))
                    .max_by(|a, b| a.mean.total_cmp(&b.mean))
                    .unwrap_or(app)
            };
            let (mean, variance, doubt) = self.service(position, shares[position]);
            reached.push(Reached {
                mean: start.mean + mean,
                variance: start.variance + variance,
                doubt: start.doubt.hypot(doubt),
                operators: start.operators + mean,
                links: start.links,
            });
        }
        let sink = reached.last().copied().unwrap_or(app);
        let mut end = hop(sink, self.last_hop);
        end.mean += settings.app_hop_ms;
        end.links += settings.app_hop_ms;
        let value =
            (end.mean + self.quantile * end.variance.sqrt() + self.context.profile.latency_bias_ms)
                .max(0.0);
        let width = 1.96 * end.doubt;
        let samples = self.stages.iter().filter(|s| s.work.measured).count();
        let measured = samples == self.stages.len();
        Latency {
            at_percentile: Estimate {
                value,
                low: (value - width).max(0.0),
                high: value + width,
                samples: u32::from(measured),
            },
            mean_ms: end.mean,
            operators_ms: end.operators,
            links_ms: end.links,
            measured,
        }
    }

    /// The part of the time an operator's share is busy.
    pub fn utilisation(&self, position: usize, share: Millicores) -> f64 {
        let stage = &self.stages[position];
        stage.rate_hz * stage.work.mean_ms / 1e3 / share.cores().clamp(1e-3, 1.0)
    }

    /// Mean time of an operator on a full core, in ms.
    pub fn work_ms(&self, position: usize) -> f64 {
        self.stages[position].work.mean_ms
    }

    /// Price of a core for an hour where an operator runs.
    pub fn core_price(&self, position: usize) -> f64 {
        self.stages[position].core_price
    }

    /// USD per hour with these shares: granted cores and bytes that leave a site.
    pub fn cost_usd_per_h(&self, shares: &[Millicores]) -> f64 {
        let cores: f64 = self
            .stages
            .iter()
            .zip(shares)
            .map(|(stage, share)| share.cores() * stage.core_price)
            .sum();
        cores + self.egress_usd_per_h
    }

    /// Data between nodes.
    pub fn hops(&self) -> &[Hop<'a>] {
        &self.hops
    }

    /// A hop that needs more than its link may carry, with the part of the usable rate it needs; the worst one.
    pub fn overloaded_hop(&self) -> Option<(&Hop<'a>, f64)> {
        self.hops
            .iter()
            .map(|hop| {
                let usable = usable_bps(hop.link, self.context.settings);
                (hop, hop.demand_bps() / usable.max(1.0))
            })
            .filter(|(_, part)| *part > 1.0)
            .max_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Frames per second that give a result.
    pub const fn result_hz(&self) -> f64 {
        self.result_hz
    }
}

fn output_bytes(context: &Context<'_>, known: &[Known<'_>], position: usize) -> f64 {
    let row = known[position].row;
    let operator = &context.query.pipeline.operators[position];
    let filter = context
        .catalogue
        .0
        .get(&operator.kind)
        .is_some_and(is_filter);
    // A filter passes its input on, whatever was seen under another configuration.
    if filter && operator.inputs.is_empty() {
        return context.profile.input_bytes;
    }
    row.bytes_out.mean
}

/// The rate a link is planned with: its measured capacity; where only a lower bound is known, at least the assumed one.
pub fn planned_rate(link: &Link, settings: &PredictSettings) -> Bandwidth {
    if link.lower_bound {
        link.bandwidth.max(settings.assumed_bandwidth)
    } else {
        link.bandwidth
    }
}

/// Bits per second of a link that plans may use: control traffic has its part first.
pub fn usable_bps(link: &Link, settings: &PredictSettings) -> f64 {
    let rate = planned_rate(link, settings).0 as f64;
    (rate * settings.link_utilisation_max - settings.control_rate.0 as f64).max(0.0)
}

/// The rate a link must have for plans to use this much of it: the inverse of [`usable_bps`].
pub fn rate_needed(needed_bps: f64, settings: &PredictSettings) -> Bandwidth {
    let needed = needed_bps + settings.control_rate.0 as f64;
    Bandwidth((needed / settings.link_utilisation_max) as u64)
}

/// Bytes of payload in a packet on paths with the smallest usual MTU.
const PACKET_BYTES: f64 = 1200.0;
/// A lost packet is sent again after about this many round trips: a little more than one where later packets are acknowledged, nearly
/// three where it was among the last of a frame and only a timer tells (RFC 9002, probe timeout).
const RESEND_ROUND_TRIPS: f64 = 2.0;

/// Mean and variance of a frame's time on a link, in ms.
///
/// Waiting is that of one server with two kinds of customers (Pollaczek–Khinchine; the plan's own frames by Kingman's form, for they
/// come at an even pace): work in the system is found by every frame, also by one that comes alone.
fn hop_time(link: &Link, bytes: f64, rate_hz: f64, settings: &PredictSettings) -> (f64, f64) {
    let rate = planned_rate(link, settings);
    let (transfer, burst) = (
        rate.transfer_ms(bytes),
        rate.transfer_ms(settings.control_burst_bytes),
    );
    if !transfer.is_finite() {
        return (f64::INFINITY, 0.0);
    }
    let control = settings.control_rate.0 as f64 / rate.0 as f64;
    let busy = rate_hz * transfer / 1e3;
    let free = (1.0 - busy - control).max(1e-3);
    let waiting = (busy * transfer * settings.arrival_variation + control * burst) / (2.0 * free);
    let packets = (bytes / PACKET_BYTES).ceil().max(1.0);
    let hit = 1.0 - (1.0 - link.loss.clamp(0.0, 0.99)).powf(packets);
    let resend = RESEND_ROUND_TRIPS * link.rtt_ms;
    (
        transfer + waiting + link.rtt_ms / 2.0 + settings.hop_overhead_ms + hit * resend,
        waiting * waiting + hit * (1.0 - hit) * resend * resend,
    )
}

/// The percentile a query's latency is judged at.
pub fn percentile_of(query: &Query) -> f64 {
    query.slo.latency.map_or(95.0, |slo| slo.percentile)
}

fn standard_normal_quantile(part: f64) -> f64 {
    Normal::new(0.0, 1.0).map_or(1.645, |normal| normal.inverse_cdf(part.clamp(0.5, 0.9999)))
}

/// A query's cost cap in USD per hour; a cap per request is turned into one at the rate of requests.
pub fn cost_cap_usd_per_h(query: &Query) -> Option<f64> {
    match query.slo.cost_max? {
        CostSlo::PerHour(usd) => Some(usd),
        CostSlo::PerRequest(usd) => Some(usd * query.rate_hz() * 3600.0),
    }
}
