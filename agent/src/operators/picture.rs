//! Pictures: read from a payload, resized, written as JPEG.

use std::io::Cursor;

use compass_shared::vision::resize;
use image::codecs::jpeg::JpegEncoder;
use image::{ImageFormat, ImageReader, RgbImage};

use super::{Input, OperatorError};

/// A picture with more pixels than this is refused before memory is taken for it: 8K.
const PIXELS_MAX: u64 = 7680 * 4320;

fn unreadable(reason: impl ToString) -> OperatorError {
    OperatorError::Picture(reason.to_string())
}

/// Width and height stated by a content of `rgb8 WxH`.
pub(super) fn rgb8_size(content: &str) -> Option<(u32, u32)> {
    let (width, height) = content.strip_prefix("rgb8 ")?.split_once('x')?;
    Some((width.parse().ok()?, height.parse().ok()?))
}

/// The picture in a payload of content `rgb8 WxH` or `jpeg`.
pub(super) fn read(input: &Input<'_>) -> Result<RgbImage, OperatorError> {
    if input.content == "jpeg" {
        return read_jpeg(input.bytes);
    }
    let (width, height) = rgb8_size(input.content).ok_or_else(|| OperatorError::Content {
        expected: "a picture (`jpeg` or `rgb8 WxH`)",
        found: input.content.to_owned(),
    })?;
    if u64::from(width) * u64::from(height) > PIXELS_MAX {
        return Err(unreadable(format!("{width}x{height} pixels are too many")));
    }
    let (needed, found) = (width as usize * height as usize * 3, input.bytes.len());
    if width == 0 || height == 0 || needed != found {
        return Err(unreadable(format!(
            "{width}x{height} pixels need {needed} bytes, and {found} came"
        )));
    }
    RgbImage::from_raw(width, height, input.bytes.to_vec())
        .ok_or_else(|| unreadable("its size is wrong"))
}

fn read_jpeg(bytes: &[u8]) -> Result<RgbImage, OperatorError> {
    // The header first: what it claims must be bearable before memory is taken.
    let (width, height) = ImageReader::with_format(Cursor::new(bytes), ImageFormat::Jpeg)
        .into_dimensions()
        .map_err(unreadable)?;
    if u64::from(width) * u64::from(height) > PIXELS_MAX {
        return Err(unreadable(format!("{width}x{height} pixels are too many")));
    }
    // This function and not a decoder's methods: it is compiled in the library, at the library's optimisation level.
    Ok(
        image::load_from_memory_with_format(bytes, ImageFormat::Jpeg)
            .map_err(unreadable)?
            .into_rgb8(),
    )
}

/// The picture in another size.
pub(super) fn resized(picture: RgbImage, width: u32, height: u32) -> RgbImage {
    let (old_width, old_height) = picture.dimensions();
    if (old_width, old_height) == (width, height) {
        return picture;
    }
    let size = |w: u32, h: u32| (w as usize, h as usize);
    resize(
        picture.as_raw(),
        size(old_width, old_height),
        size(width, height),
    )
    .ok()
    .and_then(|pixels| RgbImage::from_raw(width, height, pixels))
    .expect("a picture has the size it states and is not empty")
}

/// The picture as JPEG.
pub(super) fn jpeg(picture: &RgbImage, quality: u8) -> Result<Vec<u8>, OperatorError> {
    let mut bytes = Vec::with_capacity(picture.as_raw().len() / 8);
    JpegEncoder::new_with_quality(&mut bytes, quality)
        .encode_image(picture)
        .map_err(unreadable)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input<'a>(content: &'a str, bytes: &'a [u8]) -> Input<'a> {
        Input { content, bytes }
    }

    #[test]
    fn a_picture_survives_jpeg() {
        let picture = RgbImage::from_fn(40, 24, |x, y| image::Rgb([x as u8 * 6, y as u8 * 10, 90]));
        let bytes = jpeg(&picture, 95).unwrap();
        let read_back = read(&input("jpeg", &bytes)).unwrap();
        let raw = read(&input("rgb8 40x24", picture.as_raw())).unwrap();
        assert_eq!((read_back.dimensions(), &raw), ((40, 24), &picture));
        let worst = read_back
            .as_raw()
            .iter()
            .zip(picture.as_raw())
            .map(|(a, b)| a.abs_diff(*b))
            .max();
        assert!(worst.unwrap() < 40, "{worst:?}");
    }

    #[test]
    fn bad_pictures_are_refused_with_the_reason() {
        let good = jpeg(&RgbImage::new(16, 16), 80).unwrap();
        let cases: [(&str, &[u8], &str); 6] = [
            ("detections", b"[]", "`jpeg` or `rgb8 WxH`"),
            ("jpeg", b"", "cannot be read"),
            ("jpeg", b"no picture at all", "cannot be read"),
            ("jpeg", &good[..good.len() / 4], "cannot be read"),
            ("rgb8 4x4", &[0; 47], "need 48 bytes, and 47 came"),
            ("rgb8 4294967295x4294967295", &[0; 12], "too many"),
        ];
        for (content, bytes, reason) in cases {
            let error = read(&input(content, bytes)).unwrap_err().to_string();
            assert!(error.contains(reason), "{content}: {error}");
        }
    }

    #[test]
    fn a_header_that_claims_a_giant_takes_no_memory() {
        let mut bytes = jpeg(&RgbImage::new(16, 16), 80).unwrap();
        let start_of_frame = bytes.windows(2).position(|w| w == [0xff, 0xc0]).unwrap();
        bytes[start_of_frame + 5..start_of_frame + 9].fill(0xff);
        let error = read(&input("jpeg", &bytes)).unwrap_err().to_string();
        assert!(error.contains("too many"), "{error}");
    }
}
