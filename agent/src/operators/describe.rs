//! Cheap descriptors of a frame's content, by which a change of mode (night falls, a crowd comes) is noticed.
//!
//! Start at [`describe`]. Works on a coarse grid of pixels, so that its cost does not depend on the picture's size.

use crate::workers::Payload;

/// Columns and rows of the grid of pixels looked at.
const GRID: (usize, usize) = (48, 36);

/// What a frame looks like.
#[derive(Debug, Clone, PartialEq)]
pub struct Descriptors {
    /// Mean luma, 0 to 255.
    pub luma_mean: f64,
    /// Standard deviation of luma.
    pub luma_spread: f64,
    /// Mean distance from grey, 0 to 255.
    pub chroma: f64,
    luma: Vec<u8>,
}

impl Descriptors {
    /// Mean absolute difference of luma to an earlier frame, 0 to 255.
    pub fn motion_since(&self, earlier: &Self) -> f64 {
        if self.luma.len() != earlier.luma.len() || self.luma.is_empty() {
            return 0.0;
        }
        let sum: u64 = self
            .luma
            .iter()
            .zip(&earlier.luma)
            .map(|(a, b)| u64::from(a.abs_diff(*b)))
            .sum();
        sum as f64 / self.luma.len() as f64
    }
}

/// Describes a picture; `None` when the payload is not a picture or does not have the size it states.
pub fn describe(payload: &Payload) -> Option<Descriptors> {
    let (width, height) = rgb8_size(&payload.content)?;
    if payload.bytes.len() != width * height * 3 || payload.bytes.is_empty() {
        return None;
    }
    describe_rgb(&payload.bytes, width, height)
}

fn describe_rgb(pixels: &[u8], width: usize, height: usize) -> Option<Descriptors> {
    let (columns, rows) = (GRID.0.min(width), GRID.1.min(height));
    let mut luma = Vec::with_capacity(columns * rows);
    let mut chroma = 0_u64;
    for row in 0..rows {
        let y = (2 * row + 1) * height / (2 * rows);
        for column in 0..columns {
            let x = (2 * column + 1) * width / (2 * columns);
            let start = (y * width + x) * 3;
            let [r, g, b] = *pixels.get(start..start + 3)?.first_chunk::<3>()?;
            // Rec. 601 weights in 1/256.
            let value = (77 * u32::from(r) + 150 * u32::from(g) + 29 * u32::from(b)) >> 8;
            luma.push(value as u8);
            chroma += u64::from(r.max(g).max(b) - r.min(g).min(b));
        }
    }
    let number = luma.len() as f64;
    let mean = luma.iter().map(|v| f64::from(*v)).sum::<f64>() / number;
    let variance = luma
        .iter()
        .map(|v| (f64::from(*v) - mean).powi(2))
        .sum::<f64>()
        / number;
    Some(Descriptors {
        luma_mean: mean,
        luma_spread: variance.sqrt(),
        chroma: chroma as f64 / number,
        luma,
    })
}

/// Width and height stated by a content of `rgb8 WxH`.
fn rgb8_size(content: &str) -> Option<(usize, usize)> {
    let (width, height) = content.strip_prefix("rgb8 ")?.split_once('x')?;
    let (width, height): (usize, usize) = (width.parse().ok()?, height.parse().ok()?);
    width.checked_mul(height)?.checked_mul(3)?;
    Some((width, height))
}
