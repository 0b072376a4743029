//! What built-in operators compute. They run in workers; see `workers`.
//!
//! Start at [`build`], which makes an [`Operator`] of a worker's start message, then read one of the operators. The data that passes
//! between them is named by its *content*: pictures are `rgb8 WxH` or `jpeg`; `detections` and `tracks` are the JSON lists of
//! `compass_shared::evaluate`; an `answer` is the JSON object of [`responder`].
//!
//! Deliberately absent: processes, limits, time. [`describe()`] is the exception to "run in workers": it is cheap and reads the frames
//! that enter this node.

use std::collections::BTreeMap;
use std::time::Duration;

use compass_shared::model::catalogue::Runtime;
use rustix::time::{ClockId, clock_gettime};

use crate::workers::protocol::{Knob, Start};

mod describe;
mod detector;
mod in_process;
mod memory;
mod network;
mod picture;
mod prepare;
mod responder;
mod sampler;
mod ssd;
mod synthetic;
mod tracker;

pub use describe::{Descriptors, describe};
pub use in_process::InProcess;

/// One operator in one configuration.
pub(crate) trait Operator {
    /// Whether it looks at payloads; if not, their bytes are empty.
    fn wants_payload(&self) -> bool {
        true
    }

    /// Processes one frame of a query.
    fn process(
        &mut self,
        query: &str,
        frame: u64,
        inputs: &[Input<'_>],
    ) -> Result<Produced, OperatorError>;

    /// What it remembers of a query.
    fn snapshot(&mut self, _query: &str) -> Result<Vec<u8>, OperatorError> {
        Err(OperatorError::Stateless)
    }

    /// Takes over what another instance remembered of a query.
    fn restore(&mut self, _query: &str, _state: &[u8]) -> Result<(), OperatorError> {
        Err(OperatorError::Stateless)
    }

    /// Forgets a query.
    fn reset(&mut self, _query: &str) {}
}

/// One input of a frame.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Input<'a> {
    pub(crate) content: &'a str,
    pub(crate) bytes: &'a [u8],
}

/// What came out.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Produced {
    Payload {
        content: String,
        bytes: Vec<u8>,
    },
    /// This input, unchanged.
    Forward(usize),
    /// Nothing, on purpose.
    Skipped,
}

/// Why an operator cannot do what it was asked; it lives on in every case.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum OperatorError {
    #[error("no built-in operator is called {0}")]
    Unknown(String),
    #[error("knob {knob} {problem}")]
    Knob { knob: &'static str, problem: String },
    #[error("the model cannot be used: {0}")]
    Model(String),
    #[error("it has one input, and {0} came")]
    Inputs(usize),
    #[error("it reads {expected}, and {found:?} came")]
    Content {
        expected: &'static str,
        found: String,
    },
    #[error("the picture cannot be read: {0}")]
    Picture(String),
    #[error("the input cannot be read: {0}")]
    Unreadable(String),
    #[error("it keeps no state")]
    Stateless,
    #[error("the state cannot be read: {0}")]
    State(String),
}

/// Makes the operator a worker is to be.
pub(crate) fn build(start: &Start) -> Result<Box<dyn Operator>, OperatorError> {
    let knobs = Knobs(&start.configuration);
    let artifact = start.artifact.as_deref();
    Ok(match &start.runtime {
        Some(Runtime::Native(name)) => match name.as_str() {
            "sampler" => Box::new(sampler::Sampler::new(&knobs)?),
            "prepare" => Box::new(prepare::Prepare::new(&knobs)?),
            "tracker" => Box::new(tracker::Tracker::default()),
            "responder" => Box::new(responder::Responder::new(&knobs)),
            _ => return Err(OperatorError::Unknown(name.clone())),
        },
        Some(Runtime::Onnx { head }) => match head.as_str() {
            "center-detector" => Box::new(detector::CenterDetector::load(artifact)?),
            "ssd-detector" => Box::new(ssd::SsdDetector::load(artifact, &knobs)?),
            _ => return Err(OperatorError::Unknown(head.clone())),
        },
        Some(Runtime::Synthetic(model)) => {
            Box::new(synthetic::SyntheticOperator::new(model, &start.kind))
        }
        Some(Runtime::Process { .. }) | None => {
            return Err(OperatorError::Unknown(start.kind.clone()));
        }
    })
}

/// The values of an operator's knobs.
struct Knobs<'a>(&'a BTreeMap<String, Knob>);

impl Knobs<'_> {
    /// A number within bounds; `default` when the knob is not there.
    fn integer(
        &self,
        knob: &'static str,
        bounds: std::ops::RangeInclusive<i64>,
        default: i64,
    ) -> Result<i64, OperatorError> {
        let problem = match self.0.get(knob) {
            None => return Ok(default),
            Some(Knob::Integer(value)) if bounds.contains(value) => return Ok(*value),
            Some(Knob::Integer(value)) => {
                format!(
                    "must be {} to {}, not {value}",
                    bounds.start(),
                    bounds.end()
                )
            }
            Some(Knob::Text(word)) => format!("must be a number, not {word:?}"),
        };
        Err(OperatorError::Knob { knob, problem })
    }

    fn text(&self, knob: &str) -> Option<&str> {
        match self.0.get(knob) {
            Some(Knob::Text(word)) => Some(word),
            _ => None,
        }
    }
}

/// The only input of an operator that has one.
fn only<'a>(inputs: &[Input<'a>]) -> Result<Input<'a>, OperatorError> {
    match inputs {
        [input] => Ok(*input),
        _ => Err(OperatorError::Inputs(inputs.len())),
    }
}

/// A CPU clock's reading.
pub(crate) fn cpu_time(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}
