//! What a camera pipeline's parts agree on: the input and output layout of the detection networks, detections, and how
//! they are scored against the truth.
//!
//! Start at [`standardise`] (picture to network input) and [`decode_center_head`] (network output to detections); both must
//! stay in step with `testbed/models/train.py`. [`match_f1`] counts hits and misses. [`resize`] is the one resampling all sides use.
//!
//! Deliberately absent: no JPEG, no inference; those belong to operators.

use serde::{Deserialize, Serialize};

mod resample;
#[cfg(test)]
mod tests;

pub use resample::resize;

/// Side of one output cell in input pixels.
pub const CELL_PX: usize = 8;
/// Values per cell besides the class scores: offset x and y, logarithm of width and height.
const BOX_VALUES: usize = 4;
/// `exp` of more than this would be a box wider than any picture.
const LARGEST_LOG_SIZE: f32 = 6.0;

/// One object found in a picture. Coordinates are parts of the picture (0 to 1), `x`, `y` the top left corner.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Detection {
    pub class: u16,
    /// Confidence, 0 to 1.
    pub score: f32,
    pub x: f32,
    pub y: f32,
    pub w: f32,
    pub h: f32,
}

/// One object that is truly in a picture; coordinates as in [`Detection`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TrueObject {
    pub class: u16,
    pub x: f32,
    pub y: f32,
    pub w: f32,
    pub h: f32,
}

/// How cells become detections.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeOptions {
    /// Cells below this confidence are ignored.
    pub min_score: f32,
    /// Of two detections that overlap by more (intersection over union), only the surer stays.
    pub max_overlap: f32,
    /// At most this many detections, the surest first.
    pub max_detections: usize,
}

impl Default for DecodeOptions {
    /// The values the model card's figures were measured with.
    fn default() -> Self {
        Self {
            min_score: 0.4,
            max_overlap: 0.5,
            max_detections: 100,
        }
    }
}

/// A buffer whose length does not fit the shape it is said to have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} has {found} values where its shape needs {expected}")]
pub struct ShapeError {
    pub what: &'static str,
    pub expected: usize,
    pub found: usize,
}

fn expect_length(what: &'static str, shape: &[usize], found: usize) -> Result<(), ShapeError> {
    let expected = shape
        .iter()
        .try_fold(1_usize, |product, side| product.checked_mul(*side))
        .unwrap_or(usize::MAX);
    if expected == found {
        return Ok(());
    }
    Err(ShapeError {
        what,
        expected,
        found,
    })
}

/// Turns an 8-bit RGB picture (row by row, channels together) into a network input: three planes, minus the picture's mean,
/// divided by its standard deviation plus one.
///
/// The gain makes the networks see contrast and not light; what darkness costs them is the noise.
///
/// # Errors
/// If `rgb` is not `width × height × 3` long.
pub fn standardise(rgb: &[u8], width: usize, height: usize) -> Result<Vec<f32>, ShapeError> {
    expect_length("the picture", &[width, height, 3], rgb.len())?;
    let mut counts = [0_u64; 256];
    for value in rgb {
        counts[usize::from(*value)] += 1;
    }
    let number = (rgb.len().max(1)) as f64;
    let weighted = |power: i32| -> f64 {
        counts
            .iter()
            .enumerate()
            .map(|(value, count)| (value as f64).powi(power) * *count as f64)
            .sum::<f64>()
            / number
    };
    let mean = weighted(1);
    let deviation = (weighted(2) - mean * mean).max(0.0).sqrt();
    let mut table = [0_f32; 256];
    for (value, entry) in table.iter_mut().enumerate() {
        *entry = ((value as f64 - mean) / (deviation + 1.0)) as f32;
    }
    let mut planes = Vec::with_capacity(rgb.len());
    for channel in 0..3 {
        planes.extend(
            rgb.iter()
                .skip(channel)
                .step_by(3)
                .map(|value| table[usize::from(*value)]),
        );
    }
    Ok(planes)
}

/// Turns a network's output into detections, the surest first.
///
/// `cells` holds `classes` planes of logits, then four planes of box values (offset of the box's centre from the cell's corner
/// in cells, x and y; natural logarithm of width and height in cells), each `rows × columns`, row by row. A cell counts if its
/// score is a peak among its eight neighbours. Values that are not finite are ignored.
///
/// # Errors
/// If `cells` does not have `(classes + 4) × rows × columns` values.
pub fn decode_center_head(
    cells: &[f32],
    classes: usize,
    rows: usize,
    columns: usize,
    options: &DecodeOptions,
) -> Result<Vec<Detection>, ShapeError> {
    expect_length(
        "the network's output",
        &[classes.saturating_add(BOX_VALUES), rows, columns],
        cells.len(),
    )?;
    let plane = rows * columns;
    let (scores, boxes) = cells.split_at(classes * plane);
    // Comparing logits saves a sigmoid per cell.
    let least = options.min_score.clamp(1e-6, 1.0 - 1e-6);
    let least_logit = (least / (1.0 - least)).ln();
    let mut found = Vec::new();
    for class in 0..classes {
        let logits = &scores[class * plane..(class + 1) * plane];
        for (cell, logit) in logits.iter().enumerate() {
            let (row, column) = (cell / columns, cell % columns);
            if *logit >= least_logit && is_peak(logits, rows, columns, row, column) {
                let score = 1.0 / (1.0 + (-logit).exp());
                found.extend(detection_of_cell(
                    boxes, rows, columns, row, column, class, score,
                ));
            }
        }
    }
    found.sort_by(|a, b| b.score.total_cmp(&a.score));
    let mut kept: Vec<Detection> = Vec::new();
    for candidate in found {
        if kept.len() == options.max_detections {
            break;
        }
        if kept
            .iter()
            .all(|other| overlap(area(&candidate), area(other)) <= options.max_overlap)
        {
            kept.push(candidate);
        }
    }
    Ok(kept)
}

fn is_peak(logits: &[f32], rows: usize, columns: usize, row: usize, column: usize) -> bool {
    let own = logits[row * columns + column];
    let around_rows = row.saturating_sub(1)..(row + 2).min(rows);
    around_rows.into_iter().all(|r| {
        let around = &logits
            [r * columns + column.saturating_sub(1)..r * columns + (column + 2).min(columns)];
        around.iter().all(|other| *other <= own)
    })
}

fn detection_of_cell(
    boxes: &[f32],
    rows: usize,
    columns: usize,
    row: usize,
    column: usize,
    class: usize,
    score: f32,
) -> Option<Detection> {
    let value = |index: usize| boxes[(index * rows + row) * columns + column];
    if !(0..BOX_VALUES).all(|index| value(index).is_finite()) {
        return None;
    }
    let centre_x = (column as f32 + value(0)) / columns as f32;
    let centre_y = (row as f32 + value(1)) / rows as f32;
    let width = value(2).min(LARGEST_LOG_SIZE).exp() / columns as f32;
    let height = value(3).min(LARGEST_LOG_SIZE).exp() / rows as f32;
    let (left, top) = (
        (centre_x - width / 2.0).max(0.0),
        (centre_y - height / 2.0).max(0.0),
    );
    let (right, bottom) = (
        (centre_x + width / 2.0).min(1.0),
        (centre_y + height / 2.0).min(1.0),
    );
    if right <= left || bottom <= top {
        return None;
    }
    Some(Detection {
        class: u16::try_from(class).ok()?,
        score,
        x: left,
        y: top,
        w: right - left,
        h: bottom - top,
    })
}

fn area(detection: &Detection) -> [f32; 4] {
    [detection.x, detection.y, detection.w, detection.h]
}

/// Intersection over union of two boxes (left, top, width, height); 0 where they do not meet.
pub fn overlap(a: [f32; 4], b: [f32; 4]) -> f32 {
    let width = (a[0] + a[2]).min(b[0] + b[2]) - a[0].max(b[0]);
    let height = (a[1] + a[3]).min(b[1] + b[3]) - a[1].max(b[1]);
    if width <= 0.0 || height <= 0.0 {
        return 0.0;
    }
    let shared = width * height;
    shared / (a[2] * a[3] + b[2] * b[3] - shared)
}

/// Hits and misses; add them up over frames before asking for [`Counts::f1`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counts {
    pub true_positives: u32,
    pub false_positives: u32,
    pub false_negatives: u32,
}

impl Counts {
    /// 2·TP / (2·TP + FP + FN); 1 if there was nothing to find and nothing was found.
    pub fn f1(&self) -> f64 {
        let hits = 2.0 * f64::from(self.true_positives);
        let all = hits + f64::from(self.false_positives) + f64::from(self.false_negatives);
        if all == 0.0 { 1.0 } else { hits / all }
    }
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.true_positives += other.true_positives;
        self.false_positives += other.false_positives;
        self.false_negatives += other.false_negatives;
    }
}

impl std::iter::Sum for Counts {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), |mut total, count| {
            total += count;
            total
        })
    }
}

/// Matches detections to the truth: the surest first takes the best free true object of its class with at least `min_overlap`
/// intersection over union.
pub fn match_f1(detections: &[Detection], truth: &[TrueObject], min_overlap: f32) -> Counts {
    let mut by_score: Vec<&Detection> = detections.iter().collect();
    by_score.sort_by(|a, b| b.score.total_cmp(&a.score));
    let mut free: Vec<&TrueObject> = truth.iter().collect();
    let mut counts = Counts::default();
    for detection in by_score {
        let best = free
            .iter()
            .enumerate()
            .filter(|(_, object)| object.class == detection.class)
            .map(|(index, object)| {
                (
                    index,
                    overlap(area(detection), [object.x, object.y, object.w, object.h]),
                )
            })
            .max_by(|a, b| a.1.total_cmp(&b.1))
            .filter(|(_, shared)| *shared >= min_overlap);
        if let Some((index, _)) = best {
            free.swap_remove(index);
            counts.true_positives += 1;
        } else {
            counts.false_positives += 1;
        }
    }
    counts.false_negatives = u32::try_from(free.len()).unwrap_or(u32::MAX);
    counts
}
