//! What the demo's camera sees, with the truth beside it: rendered before the clock starts, so that rendering costs the story nothing.

use std::ops::Range;
use std::sync::Arc;

use anyhow::Context;
use compass_scenes::{Scene, SceneSettings, TruthBox};
use compass_shared::evaluate::encode_detections;
use compass_shared::vision::Detection;

use super::footage;
use super::protocol::FilmConfig;

/// Quality of the camera's own JPEG: high, as cameras with hardware encoders send it.
const CAMERA_QUALITY: u8 = 92;

/// Seed of the yard's background. Chosen: of four that were looked at, the one where the dark parted small pictures from large ones most
/// (F1 at brightness 0.05 and JPEG quality 90, three draws of traffic: medium at 224×168 0.47 to 0.73, large at 320×240 0.77 to 0.82).
const PLACE: u64 = 7;
/// What passes is drawn anew after this many seconds. A single draw stays for as long as a phase lasts and may be all easy or all hard to
/// see; several in a row make films more alike.
const TRAFFIC_S: f64 = 4.0;
/// Fast enough that two answers a second are too few.
const SPEED: f32 = 1.5;
/// Seeds of one film's traffic.
const TRAFFIC_SEEDS: u64 = 1000;

/// One frame as the camera delivers it.
#[derive(Debug, Clone)]
pub(crate) struct Shot {
    /// JPEG.
    pub(crate) jpeg: Arc<[u8]>,
    /// The true boxes in the encoding of labels.
    pub(crate) truth: Arc<[u8]>,
}

/// Both halves of the film.
#[derive(Debug)]
pub(crate) struct Film {
    pub(crate) day: Vec<Shot>,
    pub(crate) dark: Vec<Shot>,
}

impl Film {
    /// Renders scenes, or reads the video.
    pub(crate) fn render(config: &FilmConfig, rate_hz: f64) -> anyhow::Result<Self> {
        let whole = |seconds: f64| 0..frames(seconds, rate_hz);
        match &config.footage {
            Some(footage) => footage::film(footage, config, rate_hz, whole(config.dark_s)),
            None => Self::of_scenes(
                config,
                rate_hz,
                &[whole(config.day_s)],
                whole(config.dark_s),
            ),
        }
    }

    /// These frames of the film as the app would show them one after the other, without the rest of it.
    pub(super) fn cut_out(
        config: &FilmConfig,
        rate_hz: f64,
        day: &[Range<usize>],
        dark: Range<usize>,
    ) -> anyhow::Result<Self> {
        let Some(footage) = &config.footage else {
            return Self::of_scenes(config, rate_hz, day, dark);
        };
        let film = footage::film(footage, config, rate_hz, dark)?;
        let shown = day.iter().cloned().flatten();
        Ok(Self {
            day: shown
                .map(|index| film.day[index % film.day.len()].clone())
                .collect(),
            dark: film.dark,
        })
    }

    fn of_scenes(
        config: &FilmConfig,
        rate_hz: f64,
        day: &[Range<usize>],
        dark: Range<usize>,
    ) -> anyhow::Result<Self> {
        let day_frames = frames(config.day_s, rate_hz);
        let dark_frames = frames(config.dark_s, rate_hz);
        let settings = SceneSettings {
            place: Some(PLACE),
            speed: SPEED,
            ..SceneSettings::default()
        };
        let length_s = (day_frames + dark_frames) as f64 / rate_hz;
        let scenes: Vec<Scene> = (0..=(length_s / TRAFFIC_S) as u64)
            .map(|number| {
                let seed = config.seed.wrapping_mul(TRAFFIC_SEEDS).wrapping_add(number);
                Scene::new(seed, settings.clone())
            })
            .collect();
        let moment = |index: usize| index as f64 / rate_hz;
        let day_jobs = day.iter().cloned().flatten();
        let mut jobs: Vec<(f64, f32)> = day_jobs.map(|index| (moment(index), 1.0)).collect();
        let day_length = jobs.len();
        jobs.extend(dark.map(|index| (moment(day_frames + index), config.dark_brightness)));
        let mut shots = on_all_cores(&jobs, |(time_s, light)| {
            shoot(&scenes[(time_s / TRAFFIC_S) as usize], *time_s, *light)
        })?;
        let dark = shots.split_off(day_length);
        Ok(Self { day: shots, dark })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.day
            .iter()
            .chain(&self.dark)
            .map(|shot| shot.jpeg.len())
            .sum()
    }
}

/// Frames in so many seconds.
pub(super) fn frames(seconds: f64, rate_hz: f64) -> usize {
    (seconds * rate_hz).ceil() as usize
}

/// Does this with every job, on all cores; the results are in the order of the jobs.
pub(super) fn on_all_cores<J: Sync, R: Send>(
    jobs: &[J],
    work: impl Fn(&J) -> anyhow::Result<R> + Sync,
) -> anyhow::Result<Vec<R>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut results = Vec::with_capacity(jobs.len());
    std::thread::scope(|scope| {
        let parts: Vec<_> = jobs
            .chunks(jobs.len().div_ceil(threads).max(1))
            .map(|part| {
                let work = &work;
                scope.spawn(move || part.iter().map(work).collect::<anyhow::Result<Vec<_>>>())
            })
            .collect();
        for part in parts {
            results.extend(
                part.join()
                    .map_err(|_| anyhow::anyhow!("rendering panicked"))??,
            );
        }
        anyhow::Ok(())
    })?;
    Ok(results)
}

fn shoot(scene: &Scene, time_s: f64, brightness: f32) -> anyhow::Result<Shot> {
    let frame = scene.frame(time_s, brightness);
    let jpeg = encode(&frame.rgb, frame.width, frame.height)?;
    let boxes: Vec<Detection> = frame.truth.iter().map(as_detection).collect();
    Ok(Shot {
        jpeg: jpeg.into(),
        truth: encode_detections(&boxes).into(),
    })
}

/// The camera's own JPEG of rows of red, green and blue bytes.
pub(super) fn encode(rgb: &[u8], width: u32, height: u32) -> anyhow::Result<Vec<u8>> {
    let mut jpeg = Vec::new();
    image::codecs::jpeg::JpegEncoder::new_with_quality(&mut jpeg, CAMERA_QUALITY)
        .encode(rgb, width, height, image::ExtendedColorType::Rgb8)
        .context("cannot encode a frame")?;
    Ok(jpeg)
}

fn as_detection(truth: &TruthBox) -> Detection {
    Detection {
        class: truth.class,
        score: 1.0,
        x: truth.x,
        y: truth.y,
        w: truth.w,
        h: truth.h,
    }
}
