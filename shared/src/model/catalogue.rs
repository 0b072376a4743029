//! The catalogue: what an operator kind is and how it runs. Written by administrators; a query only names entries of it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ids::{ArtifactName, Digest, KnobName, OperatorKind};
use crate::model::pipeline::{Configuration, Knob, KnobValue};

/// How an operator kind is executed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Runtime {
    /// Built into the agent; the name selects the implementation.
    Native(String),
    /// A model file on the built-in engine; `head` names the built-in pre- and post-processing.
    Onnx {
        /// Built-in pre- and post-processing, e.g. `center-detector`.
        head: String,
    },
    /// A long-lived child that speaks length-prefixed frames on its standard streams.
    Process {
        /// Program and arguments.
        command: Vec<String>,
    },
    /// A seeded model of time and accuracy, for emulation and tests.
    Synthetic(Synthetic),
}

/// What a synthetic operator does: burns the stated CPU time and passes its input on (shortened or padded to a size).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Synthetic {
    /// CPU time per frame in microseconds.
    pub cpu_us: u64,
    /// Relative spread of it, in percent.
    pub spread_percent: u8,
    /// Size of its output in bytes; `None` passes the input on.
    pub output_bytes: Option<u32>,
    /// Fails in the stated way, to test isolation.
    pub fault: Option<Fault>,
}

/// Ways in which a synthetic operator misbehaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fault {
    /// Aborts on the n-th frame.
    AbortAt(u64),
    /// Never returns from the n-th frame, burning CPU.
    SpinAt(u64),
    /// Allocates without end on the n-th frame.
    AllocateAt(u64),
}

/// What an operator remembers between frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StateKind {
    /// Nothing.
    None,
    /// It needs this many frames before its output is right.
    WarmUp(u32),
    /// Its state can be taken out and put into another instance.
    Snapshot,
}

/// How two outputs of an operator are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Evaluator {
    /// F1 of boxes matched at an intersection over union of 0.5.
    DetectionF1,
    /// Equal bytes.
    ExactMatch,
}

/// A model file the kind needs when a knob has a value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArtifactChoice {
    /// The knobs that select it; empty means always.
    pub when: BTreeMap<KnobName, KnobValue>,
    /// The artifact's name.
    pub name: ArtifactName,
    /// Its content, once pushed.
    pub digest: Digest,
    /// Its size in bytes.
    pub bytes: u64,
}

/// One operator kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CatalogueEntry {
    /// Its name.
    pub kind: OperatorKind,
    /// How it runs.
    pub runtime: Runtime,
    /// Every knob with all its values.
    pub knobs: Vec<Knob>,
    /// Whether equal inputs and configuration give equal outputs (its outputs may then be cached).
    pub deterministic: bool,
    /// What it remembers.
    pub state: StateKind,
    /// How its output is judged; `None` when it is not judged.
    pub evaluator: Option<Evaluator>,
    /// Memory an instance needs, in MiB.
    pub memory_mib: u32,
    /// Model files.
    pub artifacts: Vec<ArtifactChoice>,
}

impl CatalogueEntry {
    /// The artifact an instance with this configuration needs, if any: the first whose conditions all hold.
    pub fn artifact(&self, configuration: &Configuration) -> Option<&ArtifactChoice> {
        self.artifacts.iter().find(|a| {
            a.when
                .iter()
                .all(|(knob, value)| configuration.0.get(knob) == Some(value))
        })
    }
}

/// All operator kinds by name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Catalogue(pub BTreeMap<OperatorKind, CatalogueEntry>);
