//! Cheap descriptors of a frame's content, by which a change of mode (night falls, a crowd comes) is noticed.
//!
//! Start at [`describe`]. Works on a coarse grid of pixels, so that its cost does not depend on the picture's size.

use super::{Input, picture};
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

/// Describes a picture (`rgb8 WxH` in microseconds, `jpeg` in milliseconds); `None` when the payload is not a picture or does not
/// have the size it states.
pub fn describe(payload: &Payload) -> Option<Descriptors> {
    if let Some((width, height)) = picture::rgb8_size(&payload.content) {
        let needed = (width as usize)
            .checked_mul(height as usize)?
            .checked_mul(3)?;
        if payload.bytes.len() != needed {
            return None;
        }
        return describe_rgb(&payload.bytes, width as usize, height as usize);
    }
    let input = Input {
        content: &payload.content,
        bytes: &payload.bytes,
    };
    let picture = picture::read(&input).ok()?;
    describe_rgb(
        picture.as_raw(),
        picture.width() as usize,
        picture.height() as usize,
    )
}

fn describe_rgb(pixels: &[u8], width: usize, height: usize) -> Option<Descriptors> {
    let (columns, rows) = (GRID.0.min(width), GRID.1.min(height));
    if columns == 0 || rows == 0 {
        return None;
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use image::RgbImage;

    fn payload(picture: &RgbImage) -> Payload {
        Payload {
            content: format!("rgb8 {}x{}", picture.width(), picture.height()),
            bytes: picture.as_raw().clone().into(),
        }
    }

    #[test]
    fn light_contrast_colour_and_motion_are_told_apart() {
        let grey = describe(&payload(&RgbImage::from_pixel(
            64,
            48,
            image::Rgb([100; 3]),
        )))
        .unwrap();
        assert_eq!(
            (grey.luma_mean.round(), grey.luma_spread, grey.chroma),
            (100.0, 0.0, 0.0)
        );
        let half = RgbImage::from_fn(64, 48, |x, _| image::Rgb([if x < 32 { 0 } else { 200 }; 3]));
        let half = describe(&payload(&half)).unwrap();
        assert_eq!(
            (half.luma_mean.round(), half.luma_spread.round()),
            (100.0, 100.0)
        );
        assert_eq!(
            (half.motion_since(&grey).round(), grey.motion_since(&grey)),
            (100.0, 0.0)
        );
        let red = describe(&payload(&RgbImage::from_pixel(
            64,
            48,
            image::Rgb([200, 0, 0]),
        )))
        .unwrap();
        assert_eq!(red.chroma, 200.0);
    }

    #[test]
    fn jpeg_is_described_like_its_pixels_and_other_things_are_not() {
        let picture = RgbImage::from_fn(64, 48, |x, y| image::Rgb([x as u8, y as u8, 50]));
        let raw = describe(&payload(&picture)).unwrap();
        let jpeg = describe(&Payload {
            content: "jpeg".to_owned(),
            bytes: picture::jpeg(&picture, 95).unwrap().into(),
        })
        .unwrap();
        assert!((raw.luma_mean - jpeg.luma_mean).abs() < 3.0);
        for (content, bytes) in [
            ("rgb8 64x48", &b"short"[..]),
            ("rgb8 0x0", b""),
            ("tracks", b"[]"),
            ("jpeg", b"x"),
        ] {
            let bytes = bytes::Bytes::copy_from_slice(bytes);
            assert_eq!(
                describe(&Payload {
                    content: content.to_owned(),
                    bytes
                }),
                None
            );
        }
    }
}
