//! Pipelines: acyclic graphs of operators with knobs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{Digest, KnobName, OperatorId, OperatorKind, PipelineName};

/// One value of a knob. Numbers are whole by design: a resolution, a rate, a quality, a count of tokens.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum KnobValue {
    /// A whole number.
    Integer(i64),
    /// A word, such as a model variant.
    Text(String),
}

impl fmt::Display for KnobValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integer(value) => value.fmt(f),
            Self::Text(value) => f.pad(value),
        }
    }
}

/// One degree of freedom of an operator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Knob {
    /// Its name, unique within the operator.
    pub name: KnobName,
    /// Its values; for an ordinal knob from the cheapest to the most expensive, and in every case the last one is the golden value.
    pub values: Vec<KnobValue>,
    /// Whether the values have an order a predictor may use.
    pub ordinal: bool,
}

/// One operator of a pipeline: a catalogue entry and the knobs left open by the author.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operator {
    /// Unique within the pipeline.
    pub id: OperatorId,
    /// Names an entry of the catalogue.
    pub kind: OperatorKind,
    /// Knobs with the values allowed here: a subset of the catalogue's, in the catalogue's order.
    pub knobs: Vec<Knob>,
    /// Ids of the operators whose output it reads; empty for the one that reads the source.
    pub inputs: Vec<OperatorId>,
}

/// An acyclic graph of operators, listed so that inputs come first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pipeline {
    /// Its name.
    pub name: PipelineName,
    /// In topological order; the first one reads the source, the last one's output is the result.
    pub operators: Vec<Operator>,
}

/// Why a set of operators is not a pipeline.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPipeline {
    /// No operator at all.
    #[error("pipeline {0} has no operators")]
    Empty(PipelineName),
    /// Two operators share an id.
    #[error("operator {0} is defined twice")]
    Duplicate(OperatorId),
    /// An input names an operator that is not there.
    #[error("operator {operator} reads from {input}, which does not exist")]
    UnknownInput {
        /// The reader.
        operator: OperatorId,
        /// What it wants to read.
        input: OperatorId,
    },
    /// The graph has a cycle.
    #[error("the operators form a cycle: {}", .0.iter().map(OperatorId::as_str).collect::<Vec<_>>().join(" -> "))]
    Cycle(Vec<OperatorId>),
    /// A knob without values.
    #[error("knob {knob} of operator {operator} has no values")]
    NoValues {
        /// Its operator.
        operator: OperatorId,
        /// The knob.
        knob: KnobName,
    },
    /// More than one operator reads the source.
    #[error("exactly one operator reads the source, here {} do: {}", .0.len(), .0.iter().map(OperatorId::as_str).collect::<Vec<_>>().join(", "))]
    Sources(Vec<OperatorId>),
    /// More than one operator's output is read by nobody.
    #[error("exactly one operator gives the result, here {} do: {}", .0.len(), .0.iter().map(OperatorId::as_str).collect::<Vec<_>>().join(", "))]
    Sinks(Vec<OperatorId>),
}

impl Pipeline {
    /// Orders the operators topologically (ties by the order written) and checks the graph.
    ///
    /// # Errors
    /// See [`InvalidPipeline`].
    pub fn new(name: PipelineName, operators: Vec<Operator>) -> Result<Self, InvalidPipeline> {
        if operators.is_empty() {
            return Err(InvalidPipeline::Empty(name));
        }
        let mut ids = BTreeSet::new();
        for operator in &operators {
            if !ids.insert(operator.id.clone()) {
                return Err(InvalidPipeline::Duplicate(operator.id.clone()));
            }
            if let Some(knob) = operator.knobs.iter().find(|k| k.values.is_empty()) {
                return Err(InvalidPipeline::NoValues {
                    operator: operator.id.clone(),
                    knob: knob.name.clone(),
                });
            }
        }
        for operator in &operators {
            if let Some(input) = operator.inputs.iter().find(|i| !ids.contains(*i)) {
                return Err(InvalidPipeline::UnknownInput {
                    operator: operator.id.clone(),
                    input: input.clone(),
                });
            }
        }
        let operators = topological(operators)?;
        let sources: Vec<_> = operators
            .iter()
            .filter(|o| o.inputs.is_empty())
            .map(|o| o.id.clone())
            .collect();
        if sources.len() != 1 {
            return Err(InvalidPipeline::Sources(sources));
        }
        let read: BTreeSet<_> = operators.iter().flat_map(|o| o.inputs.iter()).collect();
        let sinks: Vec<_> = operators
            .iter()
            .filter(|o| !read.contains(&o.id))
            .map(|o| o.id.clone())
            .collect();
        if sinks.len() != 1 {
            return Err(InvalidPipeline::Sinks(sinks));
        }
        Ok(Self { name, operators })
    }

    /// The operator with this id.
    pub fn operator(&self, id: &OperatorId) -> Option<&Operator> {
        self.operators.iter().find(|o| o.id == *id)
    }

    /// Position of the operator in topological order.
    pub fn position(&self, id: &OperatorId) -> Option<usize> {
        self.operators.iter().position(|o| o.id == *id)
    }

    /// Operators that read the output of `id`, in order; empty for the last one.
    pub fn readers<'a>(&'a self, id: &'a OperatorId) -> impl Iterator<Item = &'a Operator> {
        self.operators.iter().filter(move |o| o.inputs.contains(id))
    }

    /// The most expensive configuration: the last value of every knob.
    pub fn golden(&self) -> PipelineConfiguration {
        PipelineConfiguration(
            self.operators
                .iter()
                .map(|o| {
                    let values = o
                        .knobs
                        .iter()
                        .filter_map(|k| Some((k.name.clone(), k.values.last()?.clone())));
                    (o.id.clone(), Configuration(values.collect()))
                })
                .collect(),
        )
    }
}

/// Kahn's algorithm, taking the first ready operator as written each time.
fn topological(mut waiting: Vec<Operator>) -> Result<Vec<Operator>, InvalidPipeline> {
    let mut ordered: Vec<Operator> = Vec::with_capacity(waiting.len());
    while !waiting.is_empty() {
        let ready = waiting.iter().position(|o| {
            o.inputs
                .iter()
                .all(|i| ordered.iter().any(|done| done.id == *i))
        });
        match ready {
            Some(index) => ordered.push(waiting.remove(index)),
            None => return Err(InvalidPipeline::Cycle(a_cycle(&waiting))),
        }
    }
    Ok(ordered)
}

/// Follows inputs backwards among operators that are all blocked until one repeats.
fn a_cycle(blocked: &[Operator]) -> Vec<OperatorId> {
    let mut path: Vec<OperatorId> = vec![blocked[0].id.clone()];
    loop {
        let last = &path[path.len() - 1];
        let next = blocked
            .iter()
            .find(|o| o.id == *last)
            .and_then(|o| {
                o.inputs
                    .iter()
                    .find(|i| blocked.iter().any(|b| b.id == **i))
            })
            .expect("a blocked operator waits for another blocked one")
            .clone();
        if let Some(start) = path.iter().position(|id| *id == next) {
            let mut cycle = path.split_off(start);
            cycle.push(next);
            cycle.reverse();
            return cycle;
        }
        path.push(next);
    }
}

/// One value per knob of one operator.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Configuration(pub BTreeMap<KnobName, KnobValue>);

impl Configuration {
    /// The value of a knob when it is a number.
    pub fn integer(&self, knob: &str) -> Option<i64> {
        self.0
            .iter()
            .find(|(name, _)| name.as_str() == knob)
            .and_then(|(_, value)| match value {
                KnobValue::Integer(value) => Some(*value),
                KnobValue::Text(_) => None,
            })
    }

    /// The value of a knob when it is a word.
    pub fn text(&self, knob: &str) -> Option<&str> {
        self.0
            .iter()
            .find(|(name, _)| name.as_str() == knob)
            .and_then(|(_, value)| match value {
                KnobValue::Text(value) => Some(value.as_str()),
                KnobValue::Integer(_) => None,
            })
    }
}

impl fmt::Display for Configuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<_> = self
            .0
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        f.pad(&parts.join(" "))
    }
}

/// One configuration per operator of a pipeline.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PipelineConfiguration(pub BTreeMap<OperatorId, Configuration>);

impl PipelineConfiguration {
    /// The configuration of one operator; `None` when the operator is unknown.
    pub fn of(&self, operator: &OperatorId) -> Option<&Configuration> {
        self.0.get(operator)
    }

    /// Names the work of an operator and all its ancestors under this configuration: equal digests mean equal outputs for equal inputs.
    pub fn prefix(&self, pipeline: &Pipeline, operator: &OperatorId) -> Digest {
        let mut text = String::new();
        if let Some(found) = pipeline.operator(operator) {
            for input in &found.inputs {
                text.push_str(&self.prefix(pipeline, input).to_string());
            }
            text.push_str(&format!(
                "|{}|{}",
                found.kind,
                self.0.get(operator).cloned().unwrap_or_default()
            ));
        }
        Digest::of(text.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operator(id: &str, inputs: &[&str]) -> Operator {
        Operator {
            id: OperatorId::new(id).unwrap(),
            kind: OperatorKind::new("k").unwrap(),
            knobs: vec![],
            inputs: inputs
                .iter()
                .map(|i| OperatorId::new(*i).unwrap())
                .collect(),
        }
    }

    fn pipeline(operators: Vec<Operator>) -> Result<Pipeline, InvalidPipeline> {
        Pipeline::new(PipelineName::new("p").unwrap(), operators)
    }

    #[test]
    fn operators_are_ordered_by_their_inputs() {
        let p = pipeline(vec![
            operator("c", &["b"]),
            operator("a", &[]),
            operator("b", &["a"]),
        ])
        .unwrap();
        let ids: Vec<_> = p.operators.iter().map(|o| o.id.as_str()).collect();
        assert_eq!(ids, ["a", "b", "c"]);
    }

    #[test]
    fn a_cycle_is_named() {
        let error = pipeline(vec![
            operator("s", &[]),
            operator("a", &["b"]),
            operator("b", &["a"]),
        ])
        .unwrap_err();
        assert_eq!(error.to_string(), "the operators form a cycle: a -> b -> a");
    }

    #[test]
    fn two_sinks_unknown_inputs_and_duplicates_are_refused() {
        let two = pipeline(vec![
            operator("a", &[]),
            operator("b", &["a"]),
            operator("c", &["a"]),
        ]);
        assert!(matches!(two, Err(InvalidPipeline::Sinks(s)) if s.len() == 2));
        assert!(matches!(
            pipeline(vec![operator("a", &["x"])]),
            Err(InvalidPipeline::UnknownInput { .. })
        ));
        assert!(matches!(
            pipeline(vec![operator("a", &[]), operator("a", &[])]),
            Err(InvalidPipeline::Duplicate(_))
        ));
    }

    #[test]
    fn a_prefix_depends_on_ancestors_only() {
        let p = pipeline(vec![operator("a", &[]), operator("b", &["a"])]).unwrap();
        let id = |s: &str| OperatorId::new(s).unwrap();
        let set = |op: &str, v: i64| {
            let mut all = p.golden();
            all.0.insert(
                id(op),
                Configuration([(KnobName::new("k").unwrap(), KnobValue::Integer(v))].into()),
            );
            all
        };
        assert_eq!(
            set("b", 1).prefix(&p, &id("a")),
            set("b", 2).prefix(&p, &id("a"))
        );
        assert_ne!(
            set("a", 1).prefix(&p, &id("b")),
            set("a", 2).prefix(&p, &id("b"))
        );
    }
}
