//! Measures the detectors on held-out scenes by the demo's own path, and what an inference costs.
//!
//! `cargo run -p compass-scenes --example evaluate -- OUT.json [SCENES]`
//!
//! Scenes have the seeds 1, 2, … (training uses seeds from 1 000 000 on). `testbed/models/card.py` turns the result into the
//! tables of the model card.

#[path = "../tests/support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use compass_scenes::{Scene, SceneSettings};
use compass_shared::vision::{Counts, DecodeOptions, Detection, standardise};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use support::{Network, counts, models_folder, resized, through_jpeg};

const MODELS: [&str; 3] = ["small", "medium", "large"];
const RESOLUTIONS: [(u32, u32); 4] = [(160, 120), (224, 168), (320, 240), (448, 336)];
const LIGHTS: [f32; 6] = [1.0, 0.3, 0.12, 0.08, 0.06, 0.05];
const QUALITIES: [u8; 4] = [90, 75, 50, 30];
/// Inferences per cost figure; the median is kept.
const COST_RUNS: usize = 21;

/// Sums over scenes.
#[derive(Default)]
struct Total {
    counts: Counts,
    /// Accuracy of a stream is the mean over its frames; the pooled F1 varies less.
    f1_sum: f64,
    jpeg_bytes: u64,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let out = arguments.first().context("missing argument OUT.json")?;
    let scenes: u64 = arguments
        .get(1)
        .map_or(Ok(60), |text| text.parse())
        .context("SCENES must be a whole number")?;
    let networks = MODELS
        .iter()
        .map(|name| Network::load(&models_folder().join(format!("{name}.onnx"))))
        .collect::<Result<Vec<_>>>()?;
    let mut totals: BTreeMap<(usize, usize, usize, usize), Total> = BTreeMap::new();
    for seed in 1..=scenes {
        let scene = Scene::new(seed, SceneSettings::default());
        for (light, brightness) in LIGHTS.iter().enumerate() {
            let frame = scene.frame(0.0, *brightness);
            for (resolution, (width, height)) in RESOLUTIONS.iter().enumerate() {
                let small = resized(&frame, *width, *height)?;
                for (quality, level) in QUALITIES.iter().enumerate() {
                    let (seen, bytes) = through_jpeg(&small, *level)?;
                    for (model, network) in networks.iter().enumerate() {
                        let found = network.detect(&seen, &DecodeOptions::default())?;
                        let entry = totals
                            .entry((model, resolution, light, quality))
                            .or_default();
                        let counts = counts(&found, &frame);
                        entry.counts += counts;
                        entry.f1_sum += counts.f1();
                        entry.jpeg_bytes += bytes as u64;
                    }
                }
            }
        }
    }
    let rows: Vec<Value> = totals
        .iter()
        .map(|((model, resolution, light, quality), total)| {
            let (width, height) = RESOLUTIONS[*resolution];
            json!({
                "model": MODELS[*model], "width": width, "height": height,
                "brightness": (f64::from(LIGHTS[*light]) * 1000.0).round() / 1000.0, "quality": QUALITIES[*quality],
                "f1": rounded(total.counts.f1()), "f1_frame_mean": rounded(total.f1_sum / scenes.max(1) as f64),
                "tp": total.counts.true_positives, "fp": total.counts.false_positives, "fn": total.counts.false_negatives,
                "jpeg_bytes": total.jpeg_bytes / scenes.max(1),
            })
        })
        .collect();
    let costs = costs(&networks)?;
    let scene = Scene::new(1, SceneSettings::default());
    let scene_ms = median_cpu_ms(|| {
        std::hint::black_box(Scene::new(1, SceneSettings::default()));
        Ok(())
    })?;
    let frame_ms = median_cpu_ms(|| {
        std::hint::black_box(scene.frame(1.0, 0.5));
        Ok(())
    })?;
    let holding: Vec<Value> = [10.0, 5.0, 2.0, 1.0]
        .iter()
        .map(|rate| json!({ "frames_per_second": rate, "f1_frame_mean": rounded(held_ceiling(scenes, *rate)) }))
        .collect();
    let text = format!(
        "{{\n\"scenes\": {scenes},\n\"first_seed\": 1,\n\"min_score\": {},\n\"scene_ms\": {scene_ms},\n\"frame_ms\": {frame_ms},\n\"rows\": [\n{}\n],\n\"holding\": [\n{}\n],\n\"cost\": [\n{}\n]\n}}\n",
        DecodeOptions::default().min_score,
        one_a_line(&rows),
        one_a_line(&holding),
        one_a_line(&costs),
    );
    std::fs::write(out, text).with_context(|| format!("cannot write {out}"))
}

/// What a perfect detector reaches on 10 frames a second when it sees only so many of them and its boxes are held meanwhile.
fn held_ceiling(scenes: u64, frames_per_second: f64) -> f64 {
    let per_answer = (10.0 / frames_per_second).round() as u32;
    let mut sum = 0.0;
    for seed in 1..=scenes {
        let scene = Scene::new(seed, SceneSettings::default());
        let held: Vec<Detection> = scene
            .truth(5.0)
            .iter()
            .map(|t| Detection {
                class: t.class,
                score: 1.0,
                x: t.x,
                y: t.y,
                w: t.w,
                h: t.h,
            })
            .collect();
        for age in 0..per_answer {
            let frame = scene.frame_without_noise(5.0 + f64::from(age) * 0.1);
            sum += counts(&held, &frame).f1() / f64::from(per_answer);
        }
    }
    sum / scenes.max(1) as f64
}

fn rounded(value: f64) -> f64 {
    (value * 10_000.0).round() / 10_000.0
}

/// JSON values one a line, so that a new measurement reads well as a difference.
fn one_a_line(values: &[Value]) -> String {
    values
        .iter()
        .map(Value::to_string)
        .collect::<Vec<_>>()
        .join(",\n")
}

/// Median CPU milliseconds of one inference, and of preparing one frame.
fn costs(networks: &[Network]) -> Result<Vec<Value>> {
    let frame = Scene::new(1, SceneSettings::default()).frame(0.0, 1.0);
    let mut costs = Vec::new();
    for (width, height) in RESOLUTIONS {
        let small = resized(&frame, width, height)?;
        let planes = standardise(small.as_raw(), width as usize, height as usize)?;
        let resize_ms = median_cpu_ms(|| resized(&frame, width, height).map(drop))?;
        let jpeg_ms = median_cpu_ms(|| through_jpeg(&small, 75).map(drop))?;
        for (name, network) in MODELS.iter().zip(networks) {
            let inference_ms = median_cpu_ms(|| {
                network
                    .cells(&planes, width as usize, height as usize)
                    .map(drop)
            })?;
            let whole_ms =
                median_cpu_ms(|| network.detect(&small, &DecodeOptions::default()).map(drop))?;
            costs.push(json!({
                "model": name, "width": width, "height": height, "inference_ms": inference_ms, "detect_ms": whole_ms,
                "resize_ms": resize_ms, "jpeg_both_ways_ms": jpeg_ms,
            }));
        }
    }
    Ok(costs)
}

fn median_cpu_ms(mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    run()?;
    let mut taken = Vec::with_capacity(COST_RUNS);
    for _ in 0..COST_RUNS {
        let before = cpu_time();
        run()?;
        taken.push((cpu_time() - before).as_secs_f64() * 1e3);
    }
    taken.sort_by(f64::total_cmp);
    Ok((taken[COST_RUNS / 2] * 100.0).round() / 100.0)
}

/// CPU time this process has used so far.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}
