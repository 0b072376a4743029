//! A model file on the built-in engine.

use std::path::Path;
use std::sync::Arc;

use rten::{Dimension, Model, RunOptions, ThreadPool};
use rten_tensor::{NdTensor, NdTensorView};

use super::OperatorError;

/// A model with one picture in, on one thread: a share is a part of one core, and a second thread would only wait for the first.
pub(super) struct Network {
    model: Model,
    pool: Arc<ThreadPool>,
}

impl Network {
    /// Loads a model that has one input and so many outputs.
    pub(super) fn load(artifact: Option<&Path>, outputs: usize) -> Result<Self, OperatorError> {
        let path = artifact.ok_or_else(|| OperatorError::Model("none is given".to_owned()))?;
        let bytes = std::fs::read(path)
            .map_err(|e| OperatorError::Model(format!("{}: {e}", path.display())))?;
        if !is_protobuf(&bytes) {
            return Err(OperatorError::Model(
                "the file is not a whole ONNX model".to_owned(),
            ));
        }
        let model = Model::load(bytes).map_err(|e| OperatorError::Model(e.to_string()))?;
        let (has_inputs, has_outputs) = (model.input_ids().len(), model.output_ids().len());
        if (has_inputs, has_outputs) != (1, outputs) {
            return Err(OperatorError::Model(format!(
                "it has {has_inputs} inputs and {has_outputs} outputs instead of 1 and {outputs}"
            )));
        }
        Ok(Self {
            model,
            pool: Arc::new(ThreadPool::with_num_threads(1)),
        })
    }

    /// The sides of its input that the file states; `None` stands for a side that is free.
    pub(super) fn input_shape(&self) -> Vec<Option<usize>> {
        let input = self.model.input_ids().first();
        let info = input.and_then(|id| self.model.node_info(*id));
        let shape = info.and_then(|info| info.shape()).unwrap_or_default();
        let sides = shape.into_iter().map(|side| match side {
            Dimension::Fixed(side) => Some(side),
            Dimension::Symbolic(_) => None,
        });
        sides.collect()
    }

    /// Runs it on an input of this shape; gives all outputs, which must have `N` dimensions.
    pub(super) fn run<const N: usize>(
        &self,
        shape: [usize; 4],
        values: &[f32],
    ) -> Result<Vec<NdTensor<f32, N>>, OperatorError> {
        let input = NdTensorView::from_data(shape, values);
        let options = RunOptions::default().with_thread_pool(Some(Arc::clone(&self.pool)));
        let inputs = self
            .model
            .input_ids()
            .iter()
            .map(|id| (*id, input.view().into()));
        let outputs = self
            .model
            .run(inputs.collect(), self.model.output_ids(), Some(options))
            .map_err(|e| OperatorError::Model(e.to_string()))?;
        let tensors = outputs.into_iter().map(|output| {
            output
                .try_into()
                .map_err(|_| OperatorError::Model(format!("an output has not {N} dimensions")))
        });
        tensors.collect()
    }
}

/// Whether the bytes are a sequence of whole protobuf fields, as an ONNX file is. The engine's reader is not asked before: a field
/// longer than the file sends it backwards, and it reads for ever.
fn is_protobuf(mut rest: &[u8]) -> bool {
    fn varint(rest: &mut &[u8]) -> Option<u64> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = *rest.split_off_first()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }
    fn field(rest: &mut &[u8]) -> Option<()> {
        let tag = varint(rest)?;
        let length = match tag & 7 {
            0 => return varint(rest).map(drop),
            1 => 8,
            2 => varint(rest)?,
            5 => 4,
            _ => return None,
        };
        // Field numbers begin at 1.
        (tag > 7).then_some(())?;
        rest.split_off(..usize::try_from(length).ok()?).map(drop)
    }
    while !rest.is_empty() {
        if field(&mut rest).is_none() {
            return false;
        }
    }
    true
}
