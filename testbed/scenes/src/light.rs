//! Light and sensor noise: `round(pixel × brightness + noise)`, clamped to 8 bits.
//!
//! Gaussian draws are taken from a table at a random offset per row: a draw per channel and pixel would cost more than all
//! the rest of the rendering.

use crate::Frame;
use crate::random::{Draws, NOISE};

/// Fixed-point fraction bits of the noise table and of the brightness look-up.
const FRACTION_BITS: u32 = 6;
const TABLE_LENGTH: usize = 1 << 16;

/// Gaussian values in fixed point.
#[derive(Debug, Clone)]
pub(crate) struct NoiseTable {
    values: Vec<i16>,
}

impl NoiseTable {
    pub(crate) fn new(seed: u64, sigma: f32) -> Self {
        let mut draws = Draws::new(seed, &[NOISE]);
        let scale = sigma * (1 << FRACTION_BITS) as f32;
        let mut values = Vec::with_capacity(TABLE_LENGTH);
        while values.len() < TABLE_LENGTH {
            // Box and Muller's transform gives two independent draws.
            let radius = (-2.0 * (1.0 - draws.unit()).max(1e-7).ln()).sqrt();
            let (sine, cosine) = (std::f32::consts::TAU * draws.unit()).sin_cos();
            values.push((radius * cosine * scale).round() as i16);
            values.push((radius * sine * scale).round() as i16);
        }
        Self { values }
    }
}

/// Applies the light in place. A brightness that is not finite counts as 0.
pub(crate) fn apply(frame: &mut Frame, brightness: f32, table: &NoiseTable, noise_seed: u64) {
    let brightness = if brightness.is_finite() {
        brightness.clamp(0.0, 4.0)
    } else {
        0.0
    };
    let half = 1_i32 << (FRACTION_BITS - 1);
    let mut lit = [0_i32; 256];
    for (value, entry) in lit.iter_mut().enumerate() {
        *entry = (value as f32 * brightness * (1 << FRACTION_BITS) as f32).round() as i32 + half;
    }
    let mut draws = Draws::new(noise_seed, &[]);
    // A row may be longer than the table, so it is lit in pieces that fit, each with its own offset.
    for piece in frame
        .rgb
        .chunks_mut((frame.width as usize * 3).clamp(1, TABLE_LENGTH / 2))
    {
        let offset = draws.below((TABLE_LENGTH - piece.len()) as u64) as usize;
        let noise = &table.values[offset..offset + piece.len()];
        for (pixel, draw) in piece.iter_mut().zip(noise) {
            let value = (lit[usize::from(*pixel)] + i32::from(*draw)) >> FRACTION_BITS;
            *pixel = value.clamp(0, 255) as u8;
        }
    }
}
