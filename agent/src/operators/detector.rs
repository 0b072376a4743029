//! Finds objects in a picture with one of our own networks; the layout of its input and output is `compass_shared::vision`'s.

use std::path::Path;

use compass_shared::evaluate::encode_detections;
use compass_shared::vision::{CELL_PX, DecodeOptions, Detection, decode_center_head, standardise};
use image::RgbImage;
use rten_tensor::prelude::*;

use super::network::Network;
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
            network: Network::load(artifact, 1)?,
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
        let outputs = self.network.run::<4>([1, 3, height, width], &input)?;
        let output = &outputs[0];
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
