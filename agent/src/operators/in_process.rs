//! A built-in operator without a worker around it: for ground truth, and for tests of models.

use std::path::Path;

use compass_shared::model::catalogue::Runtime;
use compass_shared::model::pipeline::Configuration;

use super::{Input, Operator, OperatorError, Produced, build};
use crate::workers::protocol::{PROTOCOL, Start, knobs};

/// An operator of one input that runs where it is called. Nothing limits its time or memory, and it emulates no slower machine.
pub struct InProcess {
    operator: Box<dyn Operator>,
    frame: u64,
}

impl std::fmt::Debug for InProcess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InProcess")
            .field("frame", &self.frame)
            .finish_non_exhaustive()
    }
}

impl InProcess {
    /// Loads the operator.
    ///
    /// # Errors
    /// In words: a runtime that is not built in, a knob out of bounds, a model that cannot be used.
    pub fn new(
        runtime: &Runtime,
        configuration: &Configuration,
        artifact: Option<&Path>,
    ) -> Result<Self, String> {
        let start = Start {
            protocol: PROTOCOL,
            kind: "in-process".to_owned(),
            configuration: knobs(configuration),
            artifact: artifact.map(Path::to_owned),
            runtime: Some(runtime.clone()),
        };
        match build(&start) {
            Ok(operator) => Ok(Self { operator, frame: 0 }),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Processes the next frame; gives content and bytes of what comes out, or nothing where the operator leaves the frame out.
    ///
    /// # Errors
    /// In words: an input that cannot be read, a model that does not run.
    pub fn process(
        &mut self,
        content: &str,
        bytes: &[u8],
    ) -> Result<Option<(String, Vec<u8>)>, String> {
        self.frame += 1;
        let input = Input { content, bytes };
        let produced = self.operator.process("in-process", self.frame, &[input]);
        match produced.map_err(|error: OperatorError| error.to_string())? {
            Produced::Payload { content, bytes } => Ok(Some((content, bytes))),
            Produced::Forward(_) => Ok(Some((content.to_owned(), bytes.to_vec()))),
            Produced::Skipped => Ok(None),
        }
    }
}
