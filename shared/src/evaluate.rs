//! Accuracy: how an output compares with the truth, one definition for profiling, apps and reports.
//!
//! Start at [`judge`] (one output against one truth) and [`HeldAnswer`] (a stream in which not every frame is answered).
//!
//! **Accuracy of a stream** is the mean over its frames of the score of *the newest answer there is at that frame*: its own answer,
//! or, for a frame that a sampler left out, the last answer before it, held. Frames before the first answer are not scored. A low
//! sampling rate therefore costs accuracy as fast as the scene moves, and a plan cannot look accurate by answering seldom.
//!
//! Truth is what labels say where an app has them, else what the golden configuration says. Deliberately absent: where the truth
//! comes from, confidence intervals.

use serde::{Deserialize, Serialize};

use crate::model::catalogue::Evaluator;
use crate::vision::{Detection, TrueObject, match_f1};

#[cfg(test)]
mod tests;

/// Boxes must overlap by this much (intersection over union) to be the same object: the usual bound of detection challenges.
pub const MATCH_OVERLAP_MIN: f32 = 0.5;

/// Boxes one output or label may list; more is an error, so that matching stays bounded.
pub const BOXES_MAX: usize = 4096;

/// An output or label that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// Not a list of boxes.
    #[error("not a list of boxes")]
    Boxes(#[source] serde_json::Error),
    /// Too many boxes.
    #[error("{0} boxes, at most {BOXES_MAX} are read")]
    TooMany(usize),
    /// A coordinate or score that is no number.
    #[error("box {0} has a value that is not a finite number")]
    NotFinite(usize),
}

/// A box as it is written: detections, tracks (which have an `id` besides) and labels (which have no score).
#[derive(Serialize, Deserialize)]
struct WrittenBox {
    class: u16,
    #[serde(default = "sure")]
    score: f32,
    x: f32,
    y: f32,
    w: f32,
    h: f32,
}

const fn sure() -> f32 {
    1.0
}

/// Writes detections the way outputs and labels carry them: a JSON list of `{class, score, x, y, w, h}`, coordinates as parts of
/// the picture.
pub fn encode_detections(detections: &[Detection]) -> Vec<u8> {
    let written: Vec<_> = detections
        .iter()
        .map(|d| WrittenBox {
            class: d.class,
            score: d.score,
            x: d.x,
            y: d.y,
            w: d.w,
            h: d.h,
        })
        .collect();
    serde_json::to_vec(&written).expect("numbers and plain structs always encode")
}

/// Reads detections, tracks or labels; further members of a box (such as a track's `id`) are skipped, a missing score is 1.
///
/// # Errors
/// See [`Unreadable`].
pub fn decode_detections(bytes: &[u8]) -> Result<Vec<Detection>, Unreadable> {
    let written: Vec<WrittenBox> = serde_json::from_slice(bytes).map_err(Unreadable::Boxes)?;
    if written.len() > BOXES_MAX {
        return Err(Unreadable::TooMany(written.len()));
    }
    let bad = |b: &WrittenBox| ![b.score, b.x, b.y, b.w, b.h].iter().all(|v| v.is_finite());
    if let Some(index) = written.iter().position(bad) {
        return Err(Unreadable::NotFinite(index));
    }
    Ok(written
        .into_iter()
        .map(|b| Detection {
            class: b.class,
            score: b.score,
            x: b.x,
            y: b.y,
            w: b.w,
            h: b.h,
        })
        .collect())
}

/// How well one output agrees with the truth for its frame, 0 to 1.
///
/// # Errors
/// When the evaluator cannot read one of the two.
pub fn judge(evaluator: Evaluator, output: &[u8], truth: &[u8]) -> Result<f64, Unreadable> {
    match evaluator {
        Evaluator::ExactMatch => Ok(if output == truth { 1.0 } else { 0.0 }),
        Evaluator::DetectionF1 => {
            let truth: Vec<_> = decode_detections(truth)?
                .into_iter()
                .map(|d| TrueObject {
                    class: d.class,
                    x: d.x,
                    y: d.y,
                    w: d.w,
                    h: d.h,
                })
                .collect();
            let found = decode_detections(output)?;
            Ok(match_f1(&found, &truth, MATCH_OVERLAP_MIN).f1())
        }
    }
}

/// Scores the frames of a stream in order, holding the last answer over frames without one.
#[derive(Debug, Clone)]
pub struct HeldAnswer {
    evaluator: Evaluator,
    last: Option<Vec<u8>>,
}

impl HeldAnswer {
    /// Nothing answered yet.
    pub const fn new(evaluator: Evaluator) -> Self {
        Self {
            evaluator,
            last: None,
        }
    }

    /// Scores the next frame: by its own answer if it has one, else by the last one; `None` before the first answer.
    ///
    /// # Errors
    /// When the answer in force or the truth cannot be read.
    pub fn score(
        &mut self,
        truth: &[u8],
        answer: Option<&[u8]>,
    ) -> Result<Option<f64>, Unreadable> {
        if let Some(answer) = answer {
            self.last = Some(answer.to_vec());
        }
        match &self.last {
            None => Ok(None),
            Some(last) => judge(self.evaluator, last, truth).map(Some),
        }
    }
}
