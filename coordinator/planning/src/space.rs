//! The space of plans of one query: configurations (one value per knob) and placements (one node per operator).
//!
//! Start at [`Space::new`] and [`placements`]. A *filter* is an operator that passes frames on unchanged or leaves them out (the
//! sampler). Its knobs change how often the rest runs, not what it computes, so trials run with filters wide open and the effect
//! of a filter's knobs is computed (see [`crate::profile`]): a *normalised* point has every filter knob at its last value.
//!
//! Placements go outwards only: an operator never runs on a tier nearer to the source than its inputs (results return to the app from
//! wherever the last operator runs). Deliberately absent: shares, times, any score.

use std::collections::BTreeMap;

use compass_shared::ids::{KnobName, NodeId, OperatorId, OperatorKind, SiteId};
use compass_shared::model::catalogue::{Catalogue, CatalogueEntry, Runtime};
use compass_shared::model::cluster::{Cluster, Node, Scheduling, Tier};
use compass_shared::model::pipeline::{
    Configuration, KnobValue, Operator, Pipeline, PipelineConfiguration,
};
use compass_shared::model::query::{Constraint, Query};

#[cfg(test)]
mod tests;

/// Points a search scores at most; larger spaces are thinned by a fixed stride.
pub const POINTS_MAX: u64 = 50_000;
/// Nodes of one tier, site and device class that are considered: the nearest, and one to fall back on.
const NODES_PER_GROUP: usize = 2;
/// Nodes considered for one query.
const NODES_MAX: usize = 24;
/// Placements considered for one query; the depth-first order visits near nodes first.
const PLACEMENTS_MAX: usize = 4096;

/// Keeps a knob at its cheapest from making everything else count for nothing.
const CAUTION_OFFSET: f64 = 0.1;

/// Why a query has no space.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSpace {
    /// An operator names no entry of the catalogue.
    #[error("operator {operator} is of kind {kind}, which is not in the catalogue")]
    UnknownKind {
        /// The operator.
        operator: OperatorId,
        /// What it names.
        kind: OperatorKind,
    },
    /// A knob or a value the catalogue's entry does not have.
    #[error("operator {operator}: {knob}={value} is not offered by the catalogue")]
    UnknownValue {
        /// The operator.
        operator: OperatorId,
        /// The knob.
        knob: KnobName,
        /// The value.
        value: String,
    },
}

/// One knob as a dimension of the space.
#[derive(Debug, Clone, PartialEq)]
pub struct Dimension {
    /// Position of its operator in the pipeline.
    pub operator: usize,
    /// Its name.
    pub knob: KnobName,
    /// Its values, cheapest first; the last one is golden.
    pub values: Vec<KnobValue>,
    /// Whether the values have an order.
    pub ordinal: bool,
    /// Whether it belongs to a filter.
    pub filter: bool,
}

/// One value per dimension, by index.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Point(pub Vec<usize>);

/// All configurations of a query's pipeline.
#[derive(Debug, Clone, PartialEq)]
pub struct Space {
    pipeline: Pipeline,
    dimensions: Vec<Dimension>,
}

/// Whether an operator only decides which frames pass.
pub fn is_filter(entry: &CatalogueEntry) -> bool {
    matches!(&entry.runtime, Runtime::Native(name) if name == "sampler")
}

/// Share of frames a filter lets pass by its `rate` knob (frames per second) when `rate_hz` arrive; `None` when it has no such knob.
pub fn pass_fraction(configuration: &Configuration, rate_hz: f64) -> Option<f64> {
    let rate = configuration.integer("rate")?;
    if rate <= 0 || rate_hz <= 0.0 {
        return Some(1.0);
    }
    Some((rate as f64 / rate_hz).min(1.0))
}

impl Space {
    /// The space of a query.
    ///
    /// # Errors
    /// When an operator, knob or value is not in the catalogue.
    pub fn new(pipeline: &Pipeline, catalogue: &Catalogue) -> Result<Self, InvalidSpace> {
        let mut dimensions = Vec::new();
        for (position, operator) in pipeline.operators.iter().enumerate() {
            let entry =
                catalogue
                    .0
                    .get(&operator.kind)
                    .ok_or_else(|| InvalidSpace::UnknownKind {
                        operator: operator.id.clone(),
                        kind: operator.kind.clone(),
                    })?;
            for knob in &operator.knobs {
                let offered = entry.knobs.iter().find(|k| k.name == knob.name);
                let missing = knob
                    .values
                    .iter()
                    .find(|v| !offered.is_some_and(|k| k.values.contains(v)));
                if let Some(value) = missing {
                    return Err(InvalidSpace::UnknownValue {
                        operator: operator.id.clone(),
                        knob: knob.name.clone(),
                        value: value.to_string(),
                    });
                }
                dimensions.push(Dimension {
                    operator: position,
                    knob: knob.name.clone(),
                    values: knob.values.clone(),
                    ordinal: knob.ordinal,
                    filter: is_filter(entry),
                });
            }
        }
        Ok(Self {
            pipeline: pipeline.clone(),
            dimensions,
        })
    }

    /// The pipeline.
    pub const fn pipeline(&self) -> &Pipeline {
        &self.pipeline
    }

    /// The knobs, in the pipeline's order.
    pub fn dimensions(&self) -> &[Dimension] {
        &self.dimensions
    }

    /// Number of normalised points, saturating.
    pub fn len(&self) -> u64 {
        self.open_dimensions()
            .fold(1_u64, |n, (_, d)| n.saturating_mul(d.values.len() as u64))
    }

    /// Never: a pipeline without knobs has one configuration.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of all configurations, filters included, saturating.
    pub fn configurations_len(&self) -> u64 {
        self.dimensions
            .iter()
            .fold(1_u64, |n, d| n.saturating_mul(d.values.len() as u64))
    }

    fn open_dimensions(&self) -> impl Iterator<Item = (usize, &Dimension)> {
        self.dimensions
            .iter()
            .enumerate()
            .filter(|(_, d)| !d.filter)
    }

    /// The golden point: the last value of every knob.
    pub fn golden(&self) -> Point {
        Point(self.dimensions.iter().map(|d| d.values.len() - 1).collect())
    }

    /// The normalised point with this number, `number < self.len()`.
    pub fn point(&self, mut number: u64) -> Point {
        let mut point = self.golden();
        for (index, dimension) in self.open_dimensions() {
            let count = dimension.values.len() as u64;
            point.0[index] = (number % count) as usize;
            number /= count;
        }
        point
    }

    /// All normalised points, or an evenly strided part of a space beyond [`POINTS_MAX`]; the golden point is always among them.
    pub fn points(&self) -> Vec<Point> {
        let len = self.len();
        let stride = len.div_ceil(POINTS_MAX).max(1);
        // A stride that shares a factor with a knob's count would never visit some of its values.
        let stride = if stride == 1 {
            1
        } else {
            (stride..).find(|s| self.is_coprime(*s)).unwrap_or(stride)
        };
        let mut points: Vec<_> = (0..len)
            .step_by(usize::try_from(stride).unwrap_or(usize::MAX))
            .map(|n| self.point(n))
            .collect();
        let golden = self.golden();
        if points.last() != Some(&golden) {
            points.push(golden);
        }
        points
    }

    fn is_coprime(&self, stride: u64) -> bool {
        self.open_dimensions()
            .all(|(_, d)| gcd(stride, d.values.len() as u64) == 1)
    }

    /// This point with every filter knob wide open.
    #[must_use]
    pub fn normalised(&self, point: &Point) -> Point {
        let golden = self.golden();
        let values = self
            .dimensions
            .iter()
            .enumerate()
            .map(|(i, d)| if d.filter { golden.0[i] } else { point.0[i] });
        Point(values.collect())
    }

    /// All points that differ from a normalised one in filter knobs only, itself among them, in a fixed order.
    pub fn with_filters(&self, point: &Point) -> Vec<Point> {
        let mut points = vec![point.clone()];
        for (index, dimension) in self.dimensions.iter().enumerate() {
            if !dimension.filter {
                continue;
            }
            points = points
                .into_iter()
                .flat_map(|p| {
                    (0..dimension.values.len()).map(move |value| {
                        let mut p = p.clone();
                        p.0[index] = value;
                        p
                    })
                })
                .collect();
        }
        points
    }

    /// The configuration a point stands for.
    pub fn configuration(&self, point: &Point) -> PipelineConfiguration {
        let mut all: BTreeMap<OperatorId, Configuration> = self
            .pipeline
            .operators
            .iter()
            .map(|o| (o.id.clone(), Configuration::default()))
            .collect();
        for (index, dimension) in self.dimensions.iter().enumerate() {
            let operator = &self.pipeline.operators[dimension.operator].id;
            if let Some(configuration) = all.get_mut(operator) {
                configuration.0.insert(
                    dimension.knob.clone(),
                    dimension.values[point.0[index]].clone(),
                );
            }
        }
        PipelineConfiguration(all)
    }

    /// The point of a configuration; `None` when it has a value outside of the space.
    pub fn point_of(&self, configuration: &PipelineConfiguration) -> Option<Point> {
        let values = self.dimensions.iter().map(|d| {
            let operator = &self.pipeline.operators[d.operator].id;
            let value = configuration.of(operator)?.0.get(&d.knob)?;
            d.values.iter().position(|v| v == value)
        });
        values.collect::<Option<Vec<_>>>().map(Point)
    }

    /// A point as numbers for a predictor: each ordinal knob scaled to 0…1 (by the logarithm where its values are positive numbers),
    /// each other one as one number per value but the first. `only` restricts it to knobs of these operators.
    pub fn features(&self, point: &Point, only: Option<&[usize]>) -> Vec<f64> {
        let mut features = Vec::new();
        for (index, dimension) in self.open_dimensions() {
            if only.is_some_and(|only| !only.contains(&dimension.operator)) {
                continue;
            }
            let value = point.0[index];
            if dimension.ordinal {
                features.push(scaled(&dimension.values, value));
            } else {
                features.extend(
                    (1..dimension.values.len()).map(|v| if v == value { 1.0 } else { 0.0 }),
                );
            }
        }
        features
    }

    /// How close to golden a point is, 0 to 1: the geometric mean of the positions of its knobs, filters included. What to fall back on
    /// when nothing is known of the accuracy; geometric, because one knob at its cheapest spoils what all others do.
    pub fn caution(&self, point: &Point) -> f64 {
        let logs: Vec<f64> = self
            .dimensions
            .iter()
            .zip(&point.0)
            .filter(|(d, _)| d.values.len() > 1)
            .map(|(d, value)| {
                let last = d.values.len() - 1;
                let position = match d.ordinal {
                    true => *value as f64 / last as f64,
                    // Without an order all that is known is which one is golden.
                    false if *value == last => 1.0,
                    false => 0.5,
                };
                ((position + CAUTION_OFFSET) / (1.0 + CAUTION_OFFSET)).ln()
            })
            .collect();
        if logs.is_empty() {
            return 1.0;
        }
        (logs.iter().sum::<f64>() / logs.len() as f64).exp()
    }

    /// Positions of an operator and all its ancestors.
    pub fn ancestry(&self, operator: usize) -> Vec<usize> {
        let mut found = vec![operator];
        let mut index = 0;
        while index < found.len() {
            for input in &self.pipeline.operators[found[index]].inputs {
                if let Some(position) = self.pipeline.position(input)
                    && !found.contains(&position)
                {
                    found.push(position);
                }
            }
            index += 1;
        }
        found.sort_unstable();
        found
    }
}

const fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn scaled(values: &[KnobValue], index: usize) -> f64 {
    let last = values.len() - 1;
    if last == 0 {
        return 0.0;
    }
    let number = |value: &KnobValue| match value {
        KnobValue::Integer(n) if *n > 0 => Some((*n as f64).ln()),
        _ => None,
    };
    let (first, own, end) = (
        number(&values[0]),
        number(&values[index]),
        number(&values[last]),
    );
    match (first, own, end) {
        (Some(first), Some(own), Some(end)) if (end - first).abs() > 1e-12 => {
            (own - first) / (end - first)
        }
        _ => index as f64 / last as f64,
    }
}

/// One node per operator, in the pipeline's order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Placement(pub Vec<NodeId>);

/// Whether a node may be given new work.
pub fn takes_work(node: &Node) -> bool {
    node.online && node.scheduling == Scheduling::Open
}

/// Whether the query's constraints allow an operator on a node. `position` is the operator's in the pipeline.
pub fn is_allowed(query: &Query, cluster: &Cluster, position: usize, node: &Node) -> bool {
    let operator = &query.pipeline.operators[position];
    query.constraints.iter().all(|constraint| match constraint {
        Constraint::OperatorTiers {
            operator: restricted,
            tiers,
        } => *restricted != operator.id || tiers.contains(&node.description.tier),
        Constraint::StayWithinSite { output_of } => {
            let reads = match output_of {
                None => operator.inputs.is_empty(),
                Some(id) => operator.inputs.contains(id),
            };
            !reads || Some(&node.description.site) == source_site(query, cluster)
        }
    })
}

fn source_site<'a>(query: &Query, cluster: &'a Cluster) -> Option<&'a SiteId> {
    cluster.nodes.get(&query.entry).map(|n| &n.description.site)
}

/// Whether data can go from one node to another.
pub fn connected(cluster: &Cluster, from: &NodeId, to: &NodeId) -> bool {
    from == to || cluster.links.contains_key(&(from.clone(), to.clone()))
}

/// Nodes worth considering for a query: the entry node, then per tier, site and device class the nearest few.
pub fn considered_nodes(query: &Query, cluster: &Cluster) -> Vec<NodeId> {
    // Round trip and id of each node, by what makes nodes alike.
    type Alike<'a> = (Tier, &'a SiteId, &'a str);
    let mut groups: BTreeMap<Alike<'_>, Vec<(f64, &NodeId)>> = BTreeMap::new();
    for (id, node) in &cluster.nodes {
        if !takes_work(node) || !connected(cluster, &query.entry, id) {
            continue;
        }
        let rtt = cluster
            .links
            .get(&(query.entry.clone(), id.clone()))
            .map_or(0.0, |l| l.rtt_ms);
        let description = &node.description;
        groups
            .entry((
                description.tier,
                &description.site,
                description.device_class.as_str(),
            ))
            .or_default()
            .push((rtt, id));
    }
    let mut chosen: Vec<(Tier, f64, &NodeId)> = Vec::new();
    for ((tier, _, _), mut nodes) in groups {
        // The entry node is at distance 0 and so always the first of its group.
        nodes.sort_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.cmp(b.1)));
        chosen.extend(
            nodes
                .into_iter()
                .take(NODES_PER_GROUP)
                .map(|(rtt, id)| (tier, rtt, id)),
        );
    }
    chosen.sort_by(|a, b| a.1.total_cmp(&b.1).then_with(|| a.2.cmp(b.2)));
    chosen.truncate(NODES_MAX);
    chosen.sort_by(|a, b| {
        (a.0.cmp(&b.0))
            .then_with(|| a.1.total_cmp(&b.1))
            .then_with(|| a.2.cmp(b.2))
    });
    chosen.into_iter().map(|(_, _, id)| id.clone()).collect()
}

/// All placements a query's constraints and today's fleet allow, nearest first.
pub fn placements(query: &Query, cluster: &Cluster) -> Vec<Placement> {
    let nodes = considered_nodes(query, cluster);
    let mut found = Vec::new();
    let mut partial = Vec::with_capacity(query.pipeline.operators.len());
    extend(query, cluster, &nodes, &mut partial, &mut found);
    found
}

fn extend(
    query: &Query,
    cluster: &Cluster,
    nodes: &[NodeId],
    partial: &mut Vec<NodeId>,
    found: &mut Vec<Placement>,
) {
    if found.len() >= PLACEMENTS_MAX {
        return;
    }
    let Some(operator) = query.pipeline.operators.get(partial.len()) else {
        if partial
            .last()
            .is_some_and(|sink| connected(cluster, sink, &query.entry))
        {
            found.push(Placement(partial.clone()));
        }
        return;
    };
    for id in nodes {
        let node = &cluster.nodes[id];
        if is_allowed(query, cluster, partial.len(), node)
            && is_outward(query, cluster, operator, id, partial)
        {
            partial.push(id.clone());
            extend(query, cluster, nodes, partial, found);
            partial.pop();
        }
    }
}

/// Whether every input can reach the node and none of them runs farther out.
fn is_outward(
    query: &Query,
    cluster: &Cluster,
    operator: &Operator,
    to: &NodeId,
    partial: &[NodeId],
) -> bool {
    let tier = |id: &NodeId| cluster.nodes[id].description.tier;
    let mut sources: Vec<&NodeId> = operator
        .inputs
        .iter()
        .filter_map(|i| query.pipeline.position(i))
        .filter_map(|p| partial.get(p))
        .collect();
    if operator.inputs.is_empty() {
        sources.push(&query.entry);
    }
    sources
        .into_iter()
        .all(|from| connected(cluster, from, to) && (from == to || tier(to) >= tier(from)))
}
