//! `demo --video`: the story on a user's own video, told like the one of `--real`.
//!
//! Start at [`scenario`]. The first [`FRAMES_MAX`] pictures are read once, made as small as a camera sends them and kept as motion JPEG until
//! the end, because what an address gives cannot be read twice. The fetched person detector looks at them, or where it is not there the
//! demo's own networks do; what the largest network finds counts as the truth.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, ensure};
use compass_client::source::{self, Picture, SIDE_PX_MAX};
use image::imageops::FilterType;
use image::{ImageFormat, ImageReader, RgbImage};
use sha2::{Digest, Sha256};

use super::film::encode;
use super::footage::{FRAMES_MAX, Footage};
use super::golden;
use super::networks::Networks;
use super::real;
use super::scenario::{MEASURED, Scenario};
use super::view::View;
use crate::fetch::Fetched;

#[cfg(test)]
mod tests;

/// Wider pictures are made smaller, as a surveillance camera would send them: the fleet's nodes are slow ones.
const WIDTH_PX_MAX: u32 = 768;

/// With something to be seen in fewer frames than this part there is nothing to lose sight of.
const SEEN_MIN: f64 = 0.1;

/// The scenario of `--video`.
pub(super) fn scenario(video: &str, view: &mut dyn View) -> anyhow::Result<Scenario> {
    // A video that cannot be used is told first.
    let shown = format!("the video {}", shown(video));
    view.step(&format!("{shown} is read"));
    let rate_hz = Scenario::new()?.rate_hz();
    let pictures = read(video, rate_hz).with_context(|| format!("cannot show {shown}"))?;
    view.done(&format!("{shown}: {} pictures", pictures.len()));
    let (mut scenario, fetched) = match Fetched::find_detector() {
        Ok(fetched) => (real::world(&fetched)?, Some(fetched)),
        Err(why) => {
            view.done(&format!("note: {why:#}"));
            (Scenario::new()?, None)
        }
    };
    let detector = if fetched.is_some() {
        "the fetched person detector"
    } else {
        "the demo's own networks, which know rendered scenes only,"
    };
    view.done(&format!("{detector} will look at it"));
    let folder = tempfile::tempdir()?;
    let video = folder.path().join("video.mjpeg");
    let sha256 = keep(&pictures, &video)?;
    let kept = fetched.as_ref().map_or(folder.path(), Fetched::folder);
    let truth = golden::truth_file(
        &golden::Golden {
            pipeline: &scenario.query.pipeline,
            catalogue: &scenario.configs()?.catalogue,
            networks: &Networks::new(&scenario.artifacts)?,
            rate_hz,
        },
        kept,
        &sha256,
        || Ok(pictures),
        view,
    )?;
    view.done("the truth is what the largest network finds in it");
    let (seen, all) = golden::seen(&truth)?;
    ensure!(
        seen as f64 >= all as f64 * SEEN_MIN,
        "the largest of {detector} sees something in {seen} of {all} pictures of {shown}: too little to tell how well others see"
    );
    scenario.source = shown;
    scenario.footage = Some(Footage { video, truth });
    scenario.kept = Some(Arc::new(folder));
    Ok(scenario)
}

/// What a report may call the video: no folders, no password of an address.
pub(super) fn shown(video: &str) -> String {
    match video.split_once("://") {
        Some((scheme, rest)) => {
            let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
            let host = rest[..end].rsplit('@').next().unwrap_or_default();
            format!("{scheme}://{host}")
        }
        None => {
            let name = Path::new(video).file_name();
            name.map_or_else(
                || video.to_owned(),
                |name| name.to_string_lossy().into_owned(),
            )
        }
    }
}

/// The first pictures, `rate_hz` a second, as JPEG.
fn read(video: &str, rate_hz: f64) -> anyhow::Result<Vec<Arc<[u8]>>> {
    let mut source = source::open(video, rate_hz)?;
    let mut pictures: Vec<Arc<[u8]>> = Vec::new();
    // Files with a rate of their own have pictures left out or shown twice.
    while pictures.len() < FRAMES_MAX
        && let Some(picture) = source.next_picture()?
    {
        let until = picture.at.as_secs_f64() + 0.5 / rate_hz;
        if pictures.len() as f64 / rate_hz > until {
            continue;
        }
        let number = pictures.len();
        let jpeg: Arc<[u8]> = as_camera(picture)
            .with_context(|| format!("picture {number} cannot be used"))?
            .into();
        while pictures.len() < FRAMES_MAX && pictures.len() as f64 / rate_hz <= until {
            pictures.push(Arc::clone(&jpeg));
        }
    }
    let least_s = MEASURED.as_secs_f64();
    let length_s = pictures.len() as f64 / rate_hz;
    ensure!(
        length_s >= least_s,
        "it is {length_s:.1} s long; the story needs at least {least_s:.0} s (and repeats what is shorter than itself)"
    );
    Ok(pictures)
}

/// The picture as a camera would send it: JPEG, not larger than need be.
fn as_camera(picture: Picture) -> anyhow::Result<Vec<u8>> {
    let rgb = if picture.content == "jpeg" {
        let jpeg = std::io::Cursor::new(&picture.bytes);
        let mut reader = ImageReader::with_format(jpeg, ImageFormat::Jpeg);
        let mut limits = image::Limits::default();
        limits.max_image_width = Some(SIDE_PX_MAX);
        limits.max_image_height = Some(SIDE_PX_MAX);
        reader.limits(limits);
        let rgb = reader.decode()?.into_rgb8();
        if rgb.width() <= WIDTH_PX_MAX {
            return Ok(picture.bytes);
        }
        rgb
    } else {
        let sides = picture.content.strip_prefix("rgb8 ");
        let (width, height) = sides
            .and_then(|sides| sides.split_once('x'))
            .context("it is neither JPEG nor rows of pixels")?;
        RgbImage::from_raw(width.parse()?, height.parse()?, picture.bytes)
            .context("it has not the size it states")?
    };
    let (width, height) = rgb.dimensions();
    if width <= WIDTH_PX_MAX {
        return encode(rgb.as_raw(), width, height);
    }
    let height = u64::from(height) * u64::from(WIDTH_PX_MAX) / u64::from(width);
    let height = u32::try_from(height)?.max(1);
    let small = image::imageops::resize(&rgb, WIDTH_PX_MAX, height, FilterType::Triangle);
    encode(small.as_raw(), WIDTH_PX_MAX, height)
}

/// Writes the pictures one after the other; gives the file's SHA-256.
fn keep(pictures: &[Arc<[u8]>], path: &Path) -> anyhow::Result<String> {
    let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
    let mut digest = Sha256::new();
    for picture in pictures {
        file.write_all(picture)?;
        digest.update(picture);
    }
    file.flush()?;
    Ok(hex::encode(digest.finalize()))
}
