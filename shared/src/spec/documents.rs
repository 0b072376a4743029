//! The document types and their conversion to the model.
//!
//! Start at [`QueryDocument::resolve`]. A query names operators by catalogue name only; there is no key for a command, a path or an endpoint.

use std::collections::BTreeMap;

use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize};
use serde_saphyr::Spanned;

use super::quantity::{
    Fraction, WrittenCost, WrittenCpu, WrittenDuration, WrittenHourly, WrittenLatency,
    WrittenMemory, WrittenPerGigabyte, WrittenRate,
};
use super::{SpecError, did_you_mean, load};
use crate::ids::{
    ArtifactName, Digest, KnobName, NodeId, OperatorId, OperatorKind, PipelineName, QueryId,
};
use crate::model::catalogue::{
    ArtifactChoice, Catalogue, CatalogueEntry, Evaluator, Runtime, StateKind, Synthetic,
};
use crate::model::cluster::{PriceSheet, Tier};
use crate::model::pipeline::{Knob, KnobValue, Operator, Pipeline};
use crate::model::query::{Constraint, LatencySlo, Query, Slo, Stability, Workload};

/// The only version so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ApiVersion {
    /// `compass/v1`
    #[serde(rename = "compass/v1")]
    V1,
}

macro_rules! kinds {
    ($($name:ident = $text:literal;)*) => {$(
        #[doc = concat!("`kind: ", $text, "`")]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
        pub enum $name {
            #[doc = concat!("`", $text, "`")]
            #[serde(rename = $text)]
            It,
        }
    )*};
}

kinds! {
    QueryKind = "Query";
    PipelineKind = "Pipeline";
    CatalogueKind = "Catalogue";
    PricesKind = "Prices";
}

/// `metadata: {name: …}`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metadata<N> {
    /// The object's name.
    pub name: N,
}

// ---- query ----

/// `kind: Query`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct QueryDocument {
    /// `compass/v1`
    pub api_version: ApiVersion,
    /// `Query`
    pub kind: QueryKind,
    /// Its name.
    pub metadata: Metadata<QueryId>,
    /// The rest.
    pub spec: QuerySpec,
}

/// What a query asks for.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct QuerySpec {
    /// A pipeline's name; or `operators` instead.
    pub pipeline: Option<Spanned<PipelineName>>,
    /// Inline operators.
    pub operators: Option<Spanned<Vec<OperatorSpec>>>,
    /// Where inputs come from.
    pub source: SourceSpec,
    /// What it must meet.
    pub slo: SloSpec,
    /// Where it may run.
    #[serde(default)]
    pub constraints: Vec<Spanned<ConstraintSpec>>,
    /// Weight among queries, 1 to 100; 50 when absent.
    pub priority: Option<Spanned<u32>>,
    /// How restless its plan may be.
    pub stability: Option<StabilitySpec>,
}

/// `source: {node: …, rate: 10/s}` or `{node: …, requests: 1, duration: 10s}`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceSpec {
    /// The node nearest to the source.
    pub node: Spanned<NodeId>,
    /// Of a continuous query.
    pub rate: Option<WrittenRate>,
    /// Of a one-shot query.
    pub requests: Option<u32>,
    /// Of a one-shot query.
    pub duration: Option<WrittenDuration>,
}

/// `slo: {latency: {p95: 300ms}, accuracy: {min: 0.80}, cost: {max: 0.40 USD/h}}`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SloSpec {
    /// Exactly one percentile.
    pub latency: Option<Spanned<LatencySpec>>,
    /// Least mean accuracy.
    pub accuracy: Option<AccuracySpec>,
    /// Most cost.
    pub cost: Option<CostSpec>,
}

/// The percentile is the key.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LatencySpec {
    /// Median.
    pub p50: Option<WrittenLatency>,
    /// 90th percentile.
    pub p90: Option<WrittenLatency>,
    /// 95th percentile.
    pub p95: Option<WrittenLatency>,
    /// 99th percentile.
    pub p99: Option<WrittenLatency>,
}

/// `{min: 0.80}`
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AccuracySpec {
    /// 0 to 1.
    pub min: Fraction,
}

/// `{max: 0.40 USD/h}`
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostSpec {
    /// Per hour or per request.
    pub max: WrittenCost,
}

/// `{operator: detector, tiers: [edge]}` or `{data: frames, stayWithin: site}`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ConstraintSpec {
    /// An operator's id.
    pub operator: Option<OperatorId>,
    /// Where it may run.
    pub tiers: Option<Vec<TierName>>,
    /// `frames`, or the operator whose output is meant.
    pub data: Option<String>,
    /// `site`
    pub stay_within: Option<Boundary>,
}

/// `stayWithin: site`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Boundary {
    /// The source's site.
    Site,
}

/// A tier as written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TierName {
    /// `edge`
    Edge,
    /// `near-edge`
    NearEdge,
    /// `near-cloud`
    NearCloud,
    /// `cloud`
    Cloud,
}

impl From<TierName> for Tier {
    fn from(name: TierName) -> Self {
        match name {
            TierName::Edge => Self::Edge,
            TierName::NearEdge => Self::NearEdge,
            TierName::NearCloud => Self::NearCloud,
            TierName::Cloud => Self::Cloud,
        }
    }
}

impl std::str::FromStr for TierName {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "edge" => Ok(Self::Edge),
            "near-edge" => Ok(Self::NearEdge),
            "near-cloud" => Ok(Self::NearCloud),
            "cloud" => Ok(Self::Cloud),
            other => Err(format!(
                "unknown tier {other:?}: tiers are edge, near-edge, near-cloud, cloud"
            )),
        }
    }
}

/// `{minDwell: 20s, maxReplansPerMinute: 3}`
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct StabilitySpec {
    /// Least time between improving re-plans.
    pub min_dwell: Option<WrittenDuration>,
    /// Most improving re-plans in a minute.
    pub max_replans_per_minute: Option<u32>,
}

/// Reads a query and resolves it against the pipelines and the catalogue.
///
/// # Errors
/// Anything that deviates, at its line.
pub fn parse_query(
    source: &str,
    text: &str,
    pipelines: &BTreeMap<PipelineName, Pipeline>,
    catalogue: &Catalogue,
) -> Result<Query, SpecError> {
    load::<QueryDocument>(source, text)?.resolve(source, text, pipelines, catalogue)
}

fn place<T>(spanned: &Spanned<T>) -> (u64, u64) {
    (spanned.referenced.line(), spanned.referenced.column())
}

impl QueryDocument {
    /// Turns the document into a query.
    ///
    /// # Errors
    /// Names that do not exist, contradictory or missing parts, at their line.
    pub fn resolve(
        self,
        source: &str,
        text: &str,
        pipelines: &BTreeMap<PipelineName, Pipeline>,
        catalogue: &Catalogue,
    ) -> Result<Query, SpecError> {
        let at = |place, message: String| SpecError::at(source, text, place, message);
        let spec = self.spec;
        let pipeline = match (&spec.pipeline, spec.operators) {
            (Some(name), None) => pipelines.get(&name.value).cloned().ok_or_else(|| {
                let known = pipelines.keys().map(PipelineName::as_str);
                let error = at(
                    place(name),
                    format!("unknown pipeline {:?}", name.value.as_str()),
                );
                match did_you_mean(name.value.as_str(), known.clone()) {
                    Some(near) => error.with_hint(format!("did you mean {near:?}?")),
                    None => {
                        error.with_hint(format!("known: {}", known.collect::<Vec<_>>().join(", ")))
                    }
                }
            })?,
            (None, Some(operators)) => {
                let here = place(&operators);
                let name = PipelineName::new(self.metadata.name.as_str())
                    .expect("names of all kinds follow the same rules");
                build_pipeline(name, operators.value, catalogue, here, &at)?
            }
            (Some(name), Some(_)) => {
                return Err(at(
                    place(name),
                    "both pipeline and operators are given".to_owned(),
                )
                .with_hint("keep one of them"));
            }
            (None, None) => {
                return Err(SpecError::whole(
                    source,
                    "neither pipeline nor operators is given".to_owned(),
                )
                .with_hint("add `pipeline: NAME` under spec"));
            }
        };
        let workload = match (spec.source.rate, spec.source.requests, spec.source.duration) {
            (Some(rate), None, None) => Workload::Continuous { rate: rate.0 },
            (None, Some(requests), Some(duration)) if requests > 0 => Workload::OneShot {
                requests,
                duration: duration.0,
            },
            _ => {
                return Err(at(
                    place(&spec.source.node),
                    "source needs either a rate, or requests (at least 1) and a duration"
                        .to_owned(),
                )
                .with_hint("write `rate: 10/s`, or `requests: 1` and `duration: 10s`"));
            }
        };
        let latency = spec
            .slo
            .latency
            .map(|written| latency_slo(&written, &at))
            .transpose()?;
        let slo = Slo {
            latency,
            accuracy_min: spec.slo.accuracy.map(|a| a.min.0),
            cost_max: spec.slo.cost.map(|c| c.max.0),
        };
        let constraints = spec
            .constraints
            .into_iter()
            .map(|written| constraint(written, &pipeline, &at))
            .collect::<Result<_, _>>()?;
        let priority = match spec.priority {
            Some(written) if !(1..=100).contains(&written.value) => {
                return Err(at(
                    place(&written),
                    format!("priority {} is not between 1 and 100", written.value),
                ));
            }
            other => other.map_or(50, |p| p.value),
        };
        let default = Stability::default();
        let stability = spec.stability.map_or(default, |s| Stability {
            min_dwell: s.min_dwell.map_or(default.min_dwell, |d| d.0),
            replans_per_minute_max: s
                .max_replans_per_minute
                .unwrap_or(default.replans_per_minute_max),
        });
        Ok(Query {
            id: self.metadata.name,
            pipeline,
            entry: spec.source.node.value,
            workload,
            slo,
            constraints,
            priority,
            stability,
        })
    }
}

fn latency_slo(
    written: &Spanned<LatencySpec>,
    at: &dyn Fn((u64, u64), String) -> SpecError,
) -> Result<LatencySlo, SpecError> {
    let spec = &written.value;
    let given: Vec<_> = [
        (50.0, spec.p50),
        (90.0, spec.p90),
        (95.0, spec.p95),
        (99.0, spec.p99),
    ]
    .into_iter()
    .filter_map(|(percentile, bound)| {
        Some(LatencySlo {
            percentile,
            bound: bound?.0,
        })
    })
    .collect();
    match given.as_slice() {
        [one] => Ok(*one),
        _ => Err(at(
            place(written),
            format!(
                "latency needs exactly one percentile, here are {}",
                given.len()
            ),
        )
        .with_hint("write for example `latency: {p95: 300ms}`")),
    }
}

fn constraint(
    written: Spanned<ConstraintSpec>,
    pipeline: &Pipeline,
    at: &dyn Fn((u64, u64), String) -> SpecError,
) -> Result<Constraint, SpecError> {
    let here = place(&written);
    let known = |id: &OperatorId| {
        if pipeline.operator(id).is_some() {
            return Ok(());
        }
        let names: Vec<_> = pipeline.operators.iter().map(|o| o.id.as_str()).collect();
        Err(at(
            here,
            format!("pipeline {} has no operator {id}", pipeline.name),
        )
        .with_hint(format!("its operators are {}", names.join(", "))))
    };
    match written.value {
        ConstraintSpec {
            operator: Some(operator),
            tiers: Some(tiers),
            data: None,
            stay_within: None,
        } if !tiers.is_empty() => {
            known(&operator)?;
            let mut tiers: Vec<Tier> = tiers.into_iter().map(Tier::from).collect();
            tiers.sort();
            tiers.dedup();
            Ok(Constraint::OperatorTiers { operator, tiers })
        }
        ConstraintSpec {
            operator: None,
            tiers: None,
            data: Some(data),
            stay_within: Some(Boundary::Site),
        } => {
            if data == "frames" {
                return Ok(Constraint::StayWithinSite { output_of: None });
            }
            let operator = OperatorId::new(data).map_err(|e| at(here, e.to_string()))?;
            known(&operator)?;
            Ok(Constraint::StayWithinSite {
                output_of: Some(operator),
            })
        }
        _ => Err(at(here, "this is no constraint".to_owned()).with_hint(
            "write `{operator: NAME, tiers: [edge]}` or `{data: frames, stayWithin: site}`",
        )),
    }
}

// ---- pipeline ----

/// `kind: Pipeline`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct PipelineDocument {
    /// `compass/v1`
    pub api_version: ApiVersion,
    /// `Pipeline`
    pub kind: PipelineKind,
    /// Its name.
    pub metadata: Metadata<PipelineName>,
    /// Its operators.
    pub spec: PipelineSpec,
}

/// `spec: {operators: […]}`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PipelineSpec {
    /// In any order.
    pub operators: Spanned<Vec<OperatorSpec>>,
}

/// One operator: `{name: …, kind: …, inputs: […], knobs: {…}}`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OperatorSpec {
    /// Unique within the pipeline.
    pub name: OperatorId,
    /// A catalogue name.
    pub kind: Spanned<OperatorKind>,
    /// What it reads; nothing for the one that reads the source.
    #[serde(default)]
    pub inputs: Vec<OperatorId>,
    /// Values allowed here; a knob not named keeps all values of the catalogue.
    #[serde(default)]
    pub knobs: BTreeMap<KnobName, Spanned<Vec<WrittenValue>>>,
}

/// A knob's value: a whole number or a word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenValue(pub KnobValue);

impl<'de> Deserialize<'de> for WrittenValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor).map(WrittenValue)
    }
}

struct ValueVisitor;

impl Visitor<'_> for ValueVisitor {
    type Value = KnobValue;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a whole number or a word")
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<KnobValue, E> {
        Ok(KnobValue::Integer(value))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<KnobValue, E> {
        i64::try_from(value)
            .map(KnobValue::Integer)
            .map_err(|_| E::custom(format!("{value} is too large")))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<KnobValue, E> {
        Ok(KnobValue::Text(value.to_owned()))
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<KnobValue, E> {
        Err(E::custom(format!(
            "{value} reads as a truth value: put it in quotes to mean the word"
        )))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<KnobValue, E> {
        Err(E::custom(format!(
            "{value} is not whole: scale the knob to whole numbers, or put it in quotes to mean the word"
        )))
    }
}

/// Reads a pipeline and resolves it against the catalogue.
///
/// # Errors
/// Anything that deviates, at its line.
pub fn parse_pipeline(
    source: &str,
    text: &str,
    catalogue: &Catalogue,
) -> Result<Pipeline, SpecError> {
    let document: PipelineDocument = load(source, text)?;
    let here = place(&document.spec.operators);
    build_pipeline(
        document.metadata.name,
        document.spec.operators.value,
        catalogue,
        here,
        &|place, message| SpecError::at(source, text, place, message),
    )
}

fn build_pipeline(
    name: PipelineName,
    operators: Vec<OperatorSpec>,
    catalogue: &Catalogue,
    here: (u64, u64),
    at: &dyn Fn((u64, u64), String) -> SpecError,
) -> Result<Pipeline, SpecError> {
    let operators = operators
        .into_iter()
        .map(|written| resolve_operator(written, catalogue, at))
        .collect::<Result<_, _>>()?;
    Pipeline::new(name, operators).map_err(|error| at(here, error.to_string()))
}

fn resolve_operator(
    written: OperatorSpec,
    catalogue: &Catalogue,
    at: &dyn Fn((u64, u64), String) -> SpecError,
) -> Result<Operator, SpecError> {
    let kind = written.kind.value.clone();
    let Some(entry) = catalogue.0.get(&kind) else {
        let known = catalogue.0.keys().map(OperatorKind::as_str);
        let hint = match did_you_mean(kind.as_str(), known.clone()) {
            Some(near) => format!("did you mean {near:?}?"),
            None => format!("the catalogue has {}", known.collect::<Vec<_>>().join(", ")),
        };
        return Err(at(
            place(&written.kind),
            format!("unknown operator {:?}", kind.as_str()),
        )
        .with_hint(hint));
    };
    for (name, values) in &written.knobs {
        if !entry.knobs.iter().any(|k| k.name == *name) {
            let known: Vec<_> = entry.knobs.iter().map(|k| k.name.as_str()).collect();
            return Err(
                at(place(values), format!("operator {kind} has no knob {name}"))
                    .with_hint(format!("its knobs are {}", known.join(", "))),
            );
        }
    }
    let knobs = entry
        .knobs
        .iter()
        .map(|knob| match written.knobs.get(&knob.name) {
            None => Ok(knob.clone()),
            Some(values) => restrict(knob, values, &entry.kind, at),
        });
    Ok(Operator {
        id: written.name,
        kind,
        knobs: knobs.collect::<Result<_, _>>()?,
        inputs: written.inputs,
    })
}

/// The catalogue's values that the author allows, in the catalogue's order.
fn restrict(
    knob: &Knob,
    wanted: &Spanned<Vec<WrittenValue>>,
    kind: &OperatorKind,
    at: &dyn Fn((u64, u64), String) -> SpecError,
) -> Result<Knob, SpecError> {
    if wanted.value.is_empty() {
        return Err(at(
            place(wanted),
            format!("knob {} has no values", knob.name),
        ));
    }
    if let Some(WrittenValue(stranger)) = wanted.value.iter().find(|w| !knob.values.contains(&w.0))
    {
        let known: Vec<_> = knob.values.iter().map(ToString::to_string).collect();
        return Err(at(
            place(wanted),
            format!("knob {} of operator {kind} cannot be {stranger}", knob.name),
        )
        .with_hint(format!("values are {}", known.join(", "))));
    }
    let values = knob
        .values
        .iter()
        .filter(|v| wanted.value.iter().any(|w| w.0 == **v))
        .cloned()
        .collect();
    Ok(Knob {
        values,
        ..knob.clone()
    })
}

// ---- catalogue ----

/// `kind: Catalogue`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct CatalogueDocument {
    /// `compass/v1`
    pub api_version: ApiVersion,
    /// `Catalogue`
    pub kind: CatalogueKind,
    /// Its name, for people.
    pub metadata: Metadata<String>,
    /// Operator kinds by name.
    pub spec: BTreeMap<OperatorKind, EntrySpec>,
}

/// One operator kind.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EntrySpec {
    /// How it runs.
    pub runtime: RuntimeSpec,
    /// Its knobs, by name; values from the cheapest to the most expensive (golden) one.
    #[serde(default)]
    pub knobs: BTreeMap<KnobName, Spanned<KnobSpec>>,
    /// Whether equal inputs give equal outputs; true when absent.
    pub deterministic: Option<bool>,
    /// What it remembers; nothing when absent.
    pub state: Option<StateSpec>,
    /// How its output is judged.
    pub evaluator: Option<EvaluatorSpec>,
    /// Memory an instance needs.
    pub memory: WrittenMemory,
    /// Model files.
    #[serde(default)]
    pub artifacts: Vec<ArtifactSpec>,
}

/// `{values: […], ordinal: true}`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnobSpec {
    /// Cheapest first, golden last.
    pub values: Vec<WrittenValue>,
    /// Whether a predictor may use the order; true when absent.
    pub ordinal: Option<bool>,
}

/// `{native: sampler}`, `{onnx: center-detector}`, `{process: [python3, op.py]}`, `{synthetic: {…}}`
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RuntimeSpec {
    /// Name of the implementation.
    Native(String),
    /// Name of the pre- and post-processing.
    Onnx(String),
    /// Program and arguments.
    Process(Vec<String>),
    /// Emulation.
    Synthetic(SyntheticSpec),
}

/// `{cpu: 5ms, spread: 20, outputBytes: 1000}`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct SyntheticSpec {
    /// CPU time per frame.
    pub cpu: WrittenDuration,
    /// Relative spread in percent.
    #[serde(default)]
    pub spread: u8,
    /// Size of the output; the input is passed on when absent.
    pub output_bytes: Option<u32>,
}

/// `none`, `snapshot` or `{warmUp: n}`
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum StateSpec {
    /// Nothing.
    None,
    /// Can be taken out.
    Snapshot,
    /// Needs frames before it is right.
    WarmUp(u32),
}

/// `detection-f1` or `exact-match`
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EvaluatorSpec {
    /// F1 at IoU 0.5.
    DetectionF1,
    /// Equal bytes.
    ExactMatch,
}

/// `{name: …, when: {model: small}, sha256: …, bytes: …}`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArtifactSpec {
    /// The artifact's name.
    pub name: ArtifactName,
    /// Knob values that select it; always when absent.
    #[serde(default)]
    pub when: BTreeMap<KnobName, WrittenValue>,
    /// Its content.
    pub sha256: Digest,
    /// Its size.
    pub bytes: u64,
}

/// Reads a catalogue.
///
/// # Errors
/// Anything that deviates, at its line.
pub fn parse_catalogue(source: &str, text: &str) -> Result<Catalogue, SpecError> {
    let document: CatalogueDocument = load(source, text)?;
    let entries = document.spec.into_iter().map(|(kind, written)| {
        let entry =
            resolve_entry(kind.clone(), written).map_err(|(place, message)| match place {
                Some(place) => SpecError::at(source, text, place, message),
                None => SpecError::whole(source, message),
            })?;
        Ok((kind, entry))
    });
    entries.collect::<Result<_, _>>().map(Catalogue)
}

type PlacedMessage = (Option<(u64, u64)>, String);

fn resolve_entry(kind: OperatorKind, written: EntrySpec) -> Result<CatalogueEntry, PlacedMessage> {
    let runtime = match written.runtime {
        RuntimeSpec::Native(name) => Runtime::Native(name),
        RuntimeSpec::Onnx(head) => Runtime::Onnx { head },
        RuntimeSpec::Process(command) if command.is_empty() => {
            return Err((None, format!("operator {kind} has an empty command")));
        }
        RuntimeSpec::Process(command) => Runtime::Process { command },
        RuntimeSpec::Synthetic(s) => Runtime::Synthetic(Synthetic {
            cpu_us: s.cpu.0.as_micros() as u64,
            spread_percent: s.spread,
            output_bytes: s.output_bytes,
            fault: None,
        }),
    };
    let mut knobs = Vec::new();
    for (name, knob) in written.knobs {
        let place = place(&knob);
        let values: Vec<_> = knob.value.values.into_iter().map(|v| v.0).collect();
        let distinct: std::collections::BTreeSet<_> = values.iter().collect();
        if values.is_empty() || distinct.len() < values.len() {
            return Err((
                Some(place),
                format!(
                    "knob {name} of operator {kind} needs at least one value and no value twice"
                ),
            ));
        }
        knobs.push(Knob {
            name,
            values,
            ordinal: knob.value.ordinal.unwrap_or(true),
        });
    }
    let artifacts = written
        .artifacts
        .into_iter()
        .map(|a| ArtifactChoice {
            when: a.when.into_iter().map(|(k, v)| (k, v.0)).collect(),
            name: a.name,
            digest: a.sha256,
            bytes: a.bytes,
        })
        .collect();
    Ok(CatalogueEntry {
        kind,
        runtime,
        knobs,
        deterministic: written.deterministic.unwrap_or(true),
        state: match written.state {
            None | Some(StateSpec::None) => StateKind::None,
            Some(StateSpec::Snapshot) => StateKind::Snapshot,
            Some(StateSpec::WarmUp(n)) => StateKind::WarmUp(n),
        },
        evaluator: written.evaluator.map(|e| match e {
            EvaluatorSpec::DetectionF1 => Evaluator::DetectionF1,
            EvaluatorSpec::ExactMatch => Evaluator::ExactMatch,
        }),
        memory_mib: written.memory.0,
        artifacts,
    })
}

// ---- prices ----

/// `kind: Prices`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct PricesDocument {
    /// `compass/v1`
    pub api_version: ApiVersion,
    /// `Prices`
    pub kind: PricesKind,
    /// Its name, for people.
    pub metadata: Metadata<String>,
    /// The prices.
    pub spec: PricesSpec,
}

/// Prices per tier.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct PricesSpec {
    /// One core for an hour, per tier.
    pub core: BTreeMap<TierName, WrittenHourly>,
    /// One GPU for an hour, per tier.
    #[serde(default)]
    pub gpu: BTreeMap<TierName, WrittenHourly>,
    /// Data that leaves a site.
    pub egress: WrittenPerGigabyte,
}

/// Reads a price sheet; its version is 1 until the coordinator stores a newer one.
///
/// # Errors
/// Anything that deviates, at its line.
pub fn parse_prices(source: &str, text: &str) -> Result<PriceSheet, SpecError> {
    let spec = load::<PricesDocument>(source, text)?.spec;
    let hourly = |prices: BTreeMap<TierName, WrittenHourly>| {
        prices
            .into_iter()
            .map(|(tier, price)| (Tier::from(tier), price.0))
            .collect()
    };
    let core_hour: BTreeMap<Tier, f64> = hourly(spec.core);
    if let Some(missing) = Tier::ALL.iter().find(|tier| !core_hour.contains_key(tier)) {
        return Err(SpecError::whole(
            source,
            format!("no core price for tier {missing}"),
        ));
    }
    Ok(PriceSheet {
        version: 1,
        core_hour,
        gpu_hour: hourly(spec.gpu),
        egress_gb: spec.egress.0,
    })
}

/// Capacity as written in settings: `{cpu: 2 cores, memory: 512 MiB}`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CapacitySpec {
    /// CPU.
    pub cpu: WrittenCpu,
    /// Memory.
    pub memory: WrittenMemory,
}
