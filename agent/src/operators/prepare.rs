//! Crops, shrinks and compresses a picture for a detector.
//!
//! Knobs: `resolution` (width in pixels; the aspect is kept), `quality` (of the JPEG, 1 to 100), `crop` (a word
//! `left,top,width,height` in percent of the picture). A picture is never enlarged.

use image::RgbImage;
use image::imageops;

use super::{Input, Knobs, Operator, OperatorError, Produced, only, picture};

/// Sides are multiples of this: detectors work in cells of so many pixels.
pub(super) const SIDE_STEP: u32 = compass_shared::vision::CELL_PX as u32;

pub(super) struct Prepare {
    /// `None` keeps the size.
    width: Option<u32>,
    quality: u8,
    crop: Option<Crop>,
}

/// In percent of the picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Crop {
    left: u32,
    top: u32,
    width: u32,
    height: u32,
}

impl Crop {
    fn parse(text: &str) -> Option<Self> {
        let numbers: Vec<u32> = text
            .split(',')
            .map(|n| n.trim().parse().ok())
            .collect::<Option<_>>()?;
        let [left, top, width, height] = numbers[..] else {
            return None;
        };
        let fits = |start: u32, size: u32| {
            size > 0 && start.checked_add(size).is_some_and(|end| end <= 100)
        };
        (fits(left, width) && fits(top, height)).then_some(Self {
            left,
            top,
            width,
            height,
        })
    }

    fn of(self, picture: &RgbImage) -> RgbImage {
        let (width, height) = picture.dimensions();
        let part = |side: u32, percent: u32| (u64::from(side) * u64::from(percent) / 100) as u32;
        imageops::crop_imm(
            picture,
            part(width, self.left),
            part(height, self.top),
            part(width, self.width).max(1),
            part(height, self.height).max(1),
        )
        .to_image()
    }
}

impl Prepare {
    pub(super) fn new(knobs: &Knobs<'_>) -> Result<Self, OperatorError> {
        let width = knobs.integer("resolution", 16..=7680, 0)?;
        let quality = knobs.integer("quality", 1..=100, 80)?;
        let crop = match knobs.text("crop") {
            None | Some("none") => None,
            Some(text) => Some(Crop::parse(text).ok_or_else(|| OperatorError::Knob {
                knob: "crop",
                problem: format!("must be left,top,width,height in percent, not {text:?}"),
            })?),
        };
        Ok(Self {
            width: u32::try_from(width).ok().filter(|w| *w > 0),
            quality: u8::try_from(quality).unwrap_or(80),
            crop,
        })
    }
}

impl Operator for Prepare {
    fn process(
        &mut self,
        _query: &str,
        _frame: u64,
        inputs: &[Input<'_>],
    ) -> Result<Produced, OperatorError> {
        let mut picture = picture::read(&only(inputs)?)?;
        if let Some(crop) = self.crop {
            picture = crop.of(&picture);
        }
        let (width, height) = target_size(picture.dimensions(), self.width);
        let small = picture::resized(picture, width, height);
        Ok(Produced::Payload {
            content: "jpeg".to_owned(),
            bytes: picture::jpeg(&small, self.quality)?,
        })
    }
}

/// The size with the wanted width and about the same aspect, in multiples of [`SIDE_STEP`], not above the present size.
fn target_size((width, height): (u32, u32), wanted: Option<u32>) -> (u32, u32) {
    let wanted = wanted.unwrap_or(width).min(width);
    let exact = f64::from(wanted) * f64::from(height) / f64::from(width.max(1));
    let to_step = |side: f64| {
        let steps = (side / f64::from(SIDE_STEP)).round().max(1.0);
        steps as u32 * SIDE_STEP
    };
    (to_step(f64::from(wanted)), to_step(exact))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workers::protocol::Knob;
    use std::collections::BTreeMap;

    fn prepare(knobs: &[(&str, Knob)]) -> Result<Prepare, OperatorError> {
        let map: BTreeMap<String, Knob> = knobs
            .iter()
            .map(|(n, v)| ((*n).to_owned(), v.clone()))
            .collect();
        Prepare::new(&Knobs(&map))
    }

    fn size_after(operator: &mut Prepare, width: u32, height: u32) -> (u32, u32) {
        let pixels = vec![7; (width * height * 3) as usize];
        let content = format!("rgb8 {width}x{height}");
        let input = Input {
            content: &content,
            bytes: &pixels,
        };
        let Produced::Payload { content, bytes } = operator.process("q", 0, &[input]).unwrap()
        else {
            panic!("a picture comes out");
        };
        picture::read(&Input {
            content: &content,
            bytes: &bytes,
        })
        .unwrap()
        .dimensions()
    }

    #[test]
    fn pictures_shrink_to_the_resolution_and_never_grow() {
        let mut small = prepare(&[
            ("resolution", Knob::Integer(320)),
            ("quality", Knob::Integer(60)),
        ])
        .unwrap();
        assert_eq!(size_after(&mut small, 640, 480), (320, 240));
        assert_eq!(size_after(&mut small, 640, 360), (320, 184));
        assert_eq!(size_after(&mut small, 160, 120), (160, 120));
        let mut cropped = prepare(&[("crop", Knob::Text("25,50,50,50".to_owned()))]).unwrap();
        assert_eq!(size_after(&mut cropped, 640, 480), (320, 240));
    }

    #[test]
    fn knobs_out_of_bounds_are_refused_by_name() {
        for (name, value) in [
            ("resolution", Knob::Integer(1)),
            ("quality", Knob::Integer(101)),
            ("quality", Knob::Text("good".to_owned())),
            ("crop", Knob::Text("50,50,60,10".to_owned())),
            ("crop", Knob::Text("1,2,3".to_owned())),
        ] {
            let error = prepare(&[(name, value)]).err().unwrap().to_string();
            assert!(error.starts_with(&format!("knob {name} ")), "{error}");
        }
    }
}
