//! Resampling of 8-bit RGB pictures with a triangle filter that widens as the picture shrinks, so that no pixel is skipped and
//! noise is averaged. The same filter as Pillow's `BILINEAR` and the image crate's `Triangle`, in fixed point: preparing a frame
//! must not cost more than a small network's inference.

use super::{ShapeError, expect_length};

/// Fraction bits of the weights; 255 × 2¹⁴ × the taps' sum of one fits an `i32`.
const FRACTION_BITS: u32 = 14;

/// The source positions that make up one target position.
struct Taps {
    first: usize,
    weights: Vec<i32>,
}

/// Returns the picture at another size.
///
/// # Errors
/// If `rgb` is not `width × height × 3` long, or is empty while the target is not.
pub fn resize(
    rgb: &[u8],
    (width, height): (usize, usize),
    (new_width, new_height): (usize, usize),
) -> Result<Vec<u8>, ShapeError> {
    expect_length("the picture to resize", &[width, height, 3], rgb.len())?;
    if (width, height) == (new_width, new_height) {
        return Ok(rgb.to_vec());
    }
    if new_width == 0 || new_height == 0 {
        return Ok(Vec::new());
    }
    if rgb.is_empty() {
        return Err(ShapeError {
            what: "the picture to resize",
            expected: 3,
            found: 0,
        });
    }
    let columns = taps(width, new_width);
    let rows = taps(height, new_height);
    let mut resized = Vec::with_capacity(new_width * new_height * 3);
    let mut sums = vec![0_i32; width * 3];
    for row in &rows {
        add_rows(&mut sums, rgb, width * 3, row);
        for column in &columns {
            resized.extend_from_slice(&mix(&sums, column));
        }
    }
    Ok(resized)
}

fn taps(from: usize, to: usize) -> Vec<Taps> {
    let scale = from as f64 / to as f64;
    let reach = scale.max(1.0);
    (0..to)
        .map(|target| {
            let centre = (target as f64 + 0.5) * scale;
            let first = ((centre - reach - 0.5).ceil().max(0.0) as usize).min(from - 1);
            let end = ((centre + reach - 0.5).floor() as usize + 1).clamp(first + 1, from);
            let raw: Vec<f64> = (first..end)
                .map(|source| (1.0 - ((source as f64 + 0.5 - centre) / reach).abs()).max(0.0))
                .collect();
            let sum: f64 = raw.iter().sum();
            let one = f64::from(1 << FRACTION_BITS);
            let mut weights: Vec<i32> = raw
                .iter()
                .map(|weight| (weight / sum * one).round() as i32)
                .collect();
            // Rounding must not change the brightness of an even surface.
            let middle = weights.len() / 2;
            weights[middle] += (1 << FRACTION_BITS) - weights.iter().sum::<i32>();
            Taps { first, weights }
        })
        .collect()
}

/// Weighted sum of source rows, back in 8 bits with 6 more as fraction.
fn add_rows(sums: &mut [i32], rgb: &[u8], row_length: usize, row: &Taps) {
    sums.fill(1 << 7);
    for (index, weight) in row.weights.iter().enumerate() {
        let start = (row.first + index) * row_length;
        for (sum, value) in sums.iter_mut().zip(&rgb[start..start + row_length]) {
            *sum += i32::from(*value) * weight;
        }
    }
    for sum in sums {
        *sum >>= 8;
    }
}

fn mix(sums: &[i32], column: &Taps) -> [u8; 3] {
    let mut totals = [1_i32 << (FRACTION_BITS + 5); 3];
    let sources = sums[column.first * 3..].chunks_exact(3);
    for (source, weight) in sources.zip(&column.weights) {
        totals[0] += source[0] * weight;
        totals[1] += source[1] * weight;
        totals[2] += source[2] * weight;
    }
    totals.map(|total| (total >> (FRACTION_BITS + 6)).clamp(0, 255) as u8)
}
