//! A real video as the demo's film: read through an ffmpeg child before the clock starts, shown again and again, darkened by scaling the
//! brightness of its pixels.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, ensure};
use compass_client::source;
use serde::{Deserialize, Serialize};

use super::film::{Film, Shot, encode, frames, on_all_cores};
use super::protocol::FilmConfig;

/// So many frames are shown, again and again: enough to see no repetition within a phase, few enough for the largest network to look at
/// all of them within a minute.
pub(crate) const FRAMES_MAX: usize = 400;

/// Where the film comes from.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Footage {
    /// Anything ffmpeg reads.
    pub(crate) video: PathBuf,
    /// A JSON list with the true boxes of each frame, in the encoding of labels.
    pub(crate) truth: PathBuf,
}

/// The frames that are shown, as JPEG.
pub(crate) fn read(video: &Path, rate_hz: f64) -> anyhow::Result<Vec<Arc<[u8]>>> {
    let mut source = source::open(&video.display().to_string(), rate_hz)?;
    let mut pictures = Vec::new();
    while pictures.len() < FRAMES_MAX
        && let Some(picture) = source.next_picture()?
    {
        ensure!(
            picture.content == "jpeg",
            "{} gives no JPEG",
            source.describe()
        );
        pictures.push(picture.bytes.into());
    }
    ensure!(!pictures.is_empty(), "{} has no frame", video.display());
    Ok(pictures)
}

/// The film of a video, of its dark part these frames only.
pub(super) fn film(
    footage: &Footage,
    config: &FilmConfig,
    rate_hz: f64,
    dark: Range<usize>,
) -> anyhow::Result<Film> {
    let pictures = read(&footage.video, rate_hz)?;
    let name = footage.truth.display();
    let text =
        std::fs::read_to_string(&footage.truth).with_context(|| format!("cannot read {name}"))?;
    let truth: Vec<serde_json::Value> =
        serde_json::from_str(&text).with_context(|| format!("{name} is no list of labels"))?;
    ensure!(
        truth.len() == pictures.len(),
        "{name} is of {} frames, the video has {}; remove it to have it made again",
        truth.len(),
        pictures.len()
    );
    let day: Vec<Shot> = pictures
        .into_iter()
        .zip(truth)
        .map(|(jpeg, truth)| Shot {
            jpeg,
            truth: truth.to_string().into_bytes().into(),
        })
        .collect();
    // The dark goes on about where the day ends, and holds no picture twice.
    let begin = frames(config.day_s, rate_hz);
    let length = frames(config.dark_s, rate_hz).min(day.len());
    let dark = dark.start..dark.end.min(dark.start + length);
    let dark: Vec<&Shot> = dark
        .map(|index| &day[(begin + index % length) % day.len()])
        .collect();
    let dark = on_all_cores(&dark, |shot| {
        Ok(Shot {
            jpeg: darkened(&shot.jpeg, config.dark_brightness)?.into(),
            truth: Arc::clone(&shot.truth),
        })
    })?;
    Ok(Film { day, dark })
}

/// The picture in another light, as the same camera would send it.
pub(crate) fn darkened(jpeg: &[u8], brightness: f32) -> anyhow::Result<Vec<u8>> {
    let picture = image::load_from_memory_with_format(jpeg, image::ImageFormat::Jpeg)?;
    let mut picture = picture.into_rgb8();
    let scaled: Vec<u8> = (0..=255_u8)
        .map(|value| (f32::from(value) * brightness).round() as u8)
        .collect();
    for value in picture.iter_mut() {
        *value = scaled[usize::from(*value)];
    }
    encode(picture.as_raw(), picture.width(), picture.height())
}
