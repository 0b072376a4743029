//! Finds objects in a picture with a neural network; the layout of its input and output is `compass_shared::vision`'s.

use std::path::Path;
use std::sync::Arc;

use compass_shared::evaluate::encode_detections;
use compass_shared::vision::{CELL_PX, DecodeOptions, Detection, decode_center_head, standardise};
use image::RgbImage;
use rten::{Model, RunOptions, ThreadPool};
use rten_tensor::prelude::*;
use rten_tensor::{NdTensor, NdTensorView};

use super::prepare::SIDE_STEP;
use super::{Input, Operator, OperatorError, Produced, only, picture};

/// Planes of box values beside the class scores in a center head's output.
const BOX_PLANES: usize = 4;

/// The head `center-detector`: class scores and a box per cell of [`CELL_PX`] pixels.
pub(super) struct CenterDetector {
    network: Network,
    options: DecodeOptions,
}

impl CenterDetector {
    /// Loads the model and runs it once, so that a model which cannot work is refused now and the first frame is as fast as the
    /// others.
    pub(super) fn load(artifact: Option<&Path>) -> Result<Self, OperatorError> {
        let detector = Self {
            network: Network::load(artifact)?,
            options: DecodeOptions::default(),
        };
        let side = 16 * SIDE_STEP;
        detector.detect(RgbImage::new(side, side))?;
        Ok(detector)
    }

    fn detect(&self, picture: RgbImage) -> Result<Vec<Detection>, OperatorError> {
        // Coordinates are parts of the picture, so a slight change of its size does not move a box.
        let to_step = |side: u32| (side.next_multiple_of(SIDE_STEP)).max(SIDE_STEP);
        let (width, height) = picture.dimensions();
        let picture = picture::resized(picture, to_step(width), to_step(height));
        let (width, height) = (picture.width() as usize, picture.height() as usize);
        let wrong = |e: compass_shared::vision::ShapeError| OperatorError::Model(e.to_string());
        let input = standardise(picture.as_raw(), width, height).map_err(wrong)?;
        let output = self.network.run(&input, width, height)?;
        let [_, planes, rows, columns] = output.shape();
        if planes <= BOX_PLANES || rows * CELL_PX != height || columns * CELL_PX != width {
            return Err(OperatorError::Model(format!(
                "its output of {planes} planes of {columns}x{rows} cells does not suit a picture of {width}x{height} pixels"
            )));
        }
        let classes = planes - BOX_PLANES;
        decode_center_head(&output.to_vec(), classes, rows, columns, &self.options).map_err(wrong)
    }
}

impl Operator for CenterDetector {
    fn process(
        &mut self,
        _query: &str,
        _frame: u64,
        inputs: &[Input<'_>],
    ) -> Result<Produced, OperatorError> {
        let detections = self.detect(picture::read(&only(inputs)?)?)?;
        Ok(Produced::Payload {
            content: "detections".to_owned(),
            bytes: encode_detections(&detections),
        })
    }
}

/// A model with one picture in and one tensor out, on one thread: a share is a part of one core, and a second thread would only
/// wait for the first.
struct Network {
    model: Model,
    pool: Arc<ThreadPool>,
}

impl Network {
    fn load(artifact: Option<&Path>) -> Result<Self, OperatorError> {
        let path = artifact.ok_or_else(|| OperatorError::Model("none is given".to_owned()))?;
        let bytes = std::fs::read(path)
            .map_err(|e| OperatorError::Model(format!("{}: {e}", path.display())))?;
        if !is_protobuf(&bytes) {
            return Err(OperatorError::Model(
                "the file is not a whole ONNX model".to_owned(),
            ));
        }
        let model = Model::load(bytes).map_err(|e| OperatorError::Model(e.to_string()))?;
        let (inputs, outputs) = (model.input_ids().len(), model.output_ids().len());
        if (inputs, outputs) != (1, 1) {
            return Err(OperatorError::Model(format!(
                "it has {inputs} inputs and {outputs} outputs instead of one each"
            )));
        }
        Ok(Self {
            model,
            pool: Arc::new(ThreadPool::with_num_threads(1)),
        })
    }

    fn run(
        &self,
        planes: &[f32],
        width: usize,
        height: usize,
    ) -> Result<NdTensor<f32, 4>, OperatorError> {
        let input = NdTensorView::from_data([1, 3, height, width], planes);
        let options = RunOptions::default().with_thread_pool(Some(Arc::clone(&self.pool)));
        self.model
            .run_one(input.into(), Some(options))
            .map_err(|e| OperatorError::Model(e.to_string()))?
            .try_into()
            .map_err(|_| OperatorError::Model("its output has not four dimensions".to_owned()))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_or_corrupt_model_is_refused_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.onnx");
        let refused = |artifact| CenterDetector::load(artifact).err().unwrap().to_string();
        assert_eq!(refused(None), "the model cannot be used: none is given");
        assert!(refused(Some(&path)).contains("No such file"));
        // The last one: a field of almost 2^64 bytes, which the engine's own reader takes for a step back.
        let endless = b"\x08\x08\x12\xf4\xff\xff\xff\xff\xff\xff\xff\xff\x01";
        for corrupt in [&b""[..], b"not a model", &[0; 100], &[0xff; 1000], endless] {
            std::fs::write(&path, corrupt).unwrap();
            assert!(refused(Some(&path)).starts_with("the model cannot be used"));
        }
    }
}
