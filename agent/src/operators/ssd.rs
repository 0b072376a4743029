//! Finds objects in a picture with an SSD-MobileNet network of the TensorFlow family, as MediaPipe and others ship them.
//!
//! The model file has one input (`[1, 3, S, S]` or `[1, S, S, 3]`, values from −1 to 1) and two outputs: box values `[1, N, 4]` (centre
//! y, centre x, height, width relative to an anchor) and class logits `[1, N, classes]`, of which the first is the background. The
//! picture is stretched to the square. Anchors are those of the network's native side of 300 pixels; at another side the network sees
//! pixels of the same size, so anchors keep their size in pixels.
//!
//! Knobs: `score` (least confidence in percent), `classes` (a word of comma-separated class numbers to report; all without it).
//! Classes are numbered from 0, the background not counted.

use std::path::Path;

use compass_shared::evaluate::encode_detections;
use compass_shared::vision::{Detection, overlap};
use image::RgbImage;
use rten_tensor::prelude::*;

use super::network::Network;
use super::{Input, Knobs, Operator, OperatorError, Produced, only, picture};

#[cfg(test)]
mod tests;

/// The side for which the anchors were laid out.
const NATIVE_SIDE: f32 = 300.0;
/// Pixels per cell of each layer of the feature pyramid.
const STRIDES: [usize; 6] = [16, 32, 64, 128, 256, 512];
/// Anchor sizes of the first and last layer, as parts of the native side; those between are spread evenly.
const SCALES: (f32, f32) = (0.2, 0.95);
/// Box values are scaled by this in training: centres, sizes.
const VARIANCES: (f32, f32) = (10.0, 5.0);
/// `exp` of more than this would be a box wider than any picture.
const LARGEST_LOG_SIZE: f32 = 6.0;
/// Of two boxes of a class that overlap by more (intersection over union), only the surer stays.
const OVERLAP_MAX: f32 = 0.5;
const DETECTIONS_MAX: usize = 100;

pub(super) struct SsdDetector {
    network: Network,
    side: usize,
    /// Whether channels come before rows and columns.
    planar: bool,
    decoder: Decoder,
}

/// Makes detections of the network's outputs.
struct Decoder {
    anchors: Vec<Anchor>,
    score_min: f32,
    /// The classes to report; `None` means all.
    classes: Option<Vec<u16>>,
}

/// A box the network starts from: centre and size as parts of the picture.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Anchor {
    x: f32,
    y: f32,
    w: f32,
    h: f32,
}

impl SsdDetector {
    pub(super) fn load(artifact: Option<&Path>, knobs: &Knobs<'_>) -> Result<Self, OperatorError> {
        let network = Network::load(artifact, 2)?;
        let (side, planar) = match network.input_shape()[..] {
            [_, Some(3), Some(height), Some(width)] if height == width => (width, true),
            [_, Some(height), Some(width), Some(3)] if height == width => (width, false),
            ref other => {
                let shape =
                    format!("its input is {other:?} and not a square picture of stated side");
                return Err(OperatorError::Model(shape));
            }
        };
        let score = knobs.integer("score", 1..=99, 50)?;
        let detector = Self {
            network,
            side,
            planar,
            decoder: Decoder {
                anchors: anchors(side),
                score_min: score as f32 / 100.0,
                classes: knobs.text("classes").map(class_list).transpose()?,
            },
        };
        detector.detect(RgbImage::new(64, 64))?;
        Ok(detector)
    }

    fn detect(&self, picture: RgbImage) -> Result<Vec<Detection>, OperatorError> {
        let side = u32::try_from(self.side).unwrap_or(u32::MAX);
        let square = picture::resized(picture, side, side);
        let shape = if self.planar {
            [1, 3, self.side, self.side]
        } else {
            [1, self.side, self.side, 3]
        };
        let outputs = self
            .network
            .run::<3>(shape, &normalised(square.as_raw(), self.planar))?;
        // Of the two outputs the boxes are the one with four values per anchor.
        let (boxes, logits) = match (outputs[0].size(2), outputs[1].size(2)) {
            (4, classes) if classes != 4 => (&outputs[0], &outputs[1]),
            (classes, 4) if classes != 4 => (&outputs[1], &outputs[0]),
            sizes => {
                let problem =
                    format!("its outputs have {sizes:?} values per anchor, one must have 4");
                return Err(OperatorError::Model(problem));
            }
        };
        let classes = logits.size(2);
        let expected = self.decoder.anchors.len();
        if boxes.size(1) != expected || logits.size(1) != expected || classes < 2 {
            return Err(OperatorError::Model(format!(
                "it gives {} boxes and {} scores where {expected} anchors are laid out",
                boxes.size(1),
                logits.size(1)
            )));
        }
        let decoder = &self.decoder;
        Ok(decoder.decode(&boxes.to_vec(), &logits.to_vec(), classes))
    }
}

impl Decoder {
    /// Boxes above the least score, the surest first, overlapping ones of a class dropped.
    fn decode(&self, boxes: &[f32], logits: &[f32], classes: usize) -> Vec<Detection> {
        let mut found: Vec<Detection> = Vec::new();
        let per_anchor = boxes.chunks_exact(4).zip(logits.chunks_exact(classes));
        for ((values, logits), anchor) in per_anchor.zip(&self.anchors) {
            for (class, logit) in logits.iter().skip(1).enumerate() {
                let score = 1.0 / (1.0 + (-logit).exp());
                let Ok(class) = u16::try_from(class) else {
                    break;
                };
                let wanted = self.classes.as_ref().is_none_or(|all| all.contains(&class));
                if score >= self.score_min && wanted {
                    found.extend(anchor.detection(values, class, score));
                }
            }
        }
        found.sort_by(|a, b| b.score.total_cmp(&a.score));
        let mut kept: Vec<Detection> = Vec::new();
        for candidate in found {
            let same = |other: &&Detection| other.class == candidate.class;
            let free = kept
                .iter()
                .filter(same)
                .all(|other| overlap(area(&candidate), area(other)) <= OVERLAP_MAX);
            if free && kept.len() < DETECTIONS_MAX {
                kept.push(candidate);
            }
        }
        kept
    }
}

impl Anchor {
    /// The box that four values of the network make of it; `None` for values that are not finite or a box outside the picture.
    fn detection(&self, values: &[f32], class: u16, score: f32) -> Option<Detection> {
        let [y, x, h, w] = *values.first_chunk::<4>()?;
        if ![y, x, h, w].iter().all(|v| v.is_finite()) {
            return None;
        }
        let (centre_x, centre_y) = (
            self.x + x / VARIANCES.0 * self.w,
            self.y + y / VARIANCES.0 * self.h,
        );
        let width = (w / VARIANCES.1).min(LARGEST_LOG_SIZE).exp() * self.w;
        let height = (h / VARIANCES.1).min(LARGEST_LOG_SIZE).exp() * self.h;
        let (left, top) = (
            (centre_x - width / 2.0).max(0.0),
            (centre_y - height / 2.0).max(0.0),
        );
        let (right, bottom) = (
            (centre_x + width / 2.0).min(1.0),
            (centre_y + height / 2.0).min(1.0),
        );
        (right > left && bottom > top).then_some(Detection {
            class,
            score,
            x: left,
            y: top,
            w: right - left,
            h: bottom - top,
        })
    }
}

fn area(detection: &Detection) -> [f32; 4] {
    [detection.x, detection.y, detection.w, detection.h]
}

fn class_list(text: &str) -> Result<Vec<u16>, OperatorError> {
    let numbers: Result<_, _> = text.split(',').map(|n| n.trim().parse()).collect();
    numbers.map_err(|_| OperatorError::Knob {
        knob: "classes",
        problem: format!("must be class numbers with commas between, not {text:?}"),
    })
}

/// Pixels as values from −1 to 1, in planes or as they are.
fn normalised(rgb: &[u8], planar: bool) -> Vec<f32> {
    let value = |byte: &u8| f32::from(*byte) / 127.5 - 1.0;
    if !planar {
        return rgb.iter().map(value).collect();
    }
    let plane = |channel: usize| rgb.iter().skip(channel).step_by(3).map(value);
    (0..3).flat_map(plane).collect()
}

/// All anchors for an input of this side, in the order of the network's outputs: layer by layer, row by row, and per cell by shape.
fn anchors(side: usize) -> Vec<Anchor> {
    let last = STRIDES.len() - 1;
    let scale = |layer: usize| {
        let part = layer as f32 / last as f32;
        SCALES.0 + (SCALES.1 - SCALES.0) * part
    };
    let in_pixels_of_native = NATIVE_SIDE / side.max(1) as f32;
    let mut all = Vec::new();
    for (layer, stride) in STRIDES.iter().enumerate() {
        let own = scale(layer);
        let shapes: Vec<(f32, f32)> = if layer == 0 {
            // The lowest layer has fewer and smaller ones.
            vec![(0.1, 1.0), (own, 2.0), (own, 0.5)]
        } else {
            let next = if layer == last { 1.0 } else { scale(layer + 1) };
            let mut shapes: Vec<_> = [1.0, 2.0, 0.5, 3.0, 1.0 / 3.0]
                .map(|ratio| (own, ratio))
                .into();
            shapes.push(((own * next).sqrt(), 1.0));
            shapes
        };
        let cells = side.div_ceil(*stride);
        for row in 0..cells {
            for column in 0..cells {
                all.extend(shapes.iter().map(|(scale, ratio)| Anchor {
                    x: (column as f32 + 0.5) / cells as f32,
                    y: (row as f32 + 0.5) / cells as f32,
                    w: scale * ratio.sqrt() * in_pixels_of_native,
                    h: scale / ratio.sqrt() * in_pixels_of_native,
                }));
            }
        }
    }
    all
}

impl Operator for SsdDetector {
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
