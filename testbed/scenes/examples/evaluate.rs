//! Measures the detectors on held-out scenes by the demo's own path, and what an inference costs.
//!
//! `cargo run -p compass-scenes --example evaluate -- OUT.json [SCENES]`
//!
//! Scenes have the seeds 1, 2, … (training uses seeds from 1 000 000 on). `testbed/models/card.py` turns the result into the
//! tables of the model card.

#[path = "../tests/support/mod.rs"]
mod support;

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use compass_scenes::{Scene, SceneSettings};
use compass_shared::vision::{Counts, DecodeOptions, standardise};
use serde_json::{Value, json};
use support::{Network, counts, cpu_time, models_folder, resized, through_jpeg};

const MODELS: [&str; 3] = ["small", "medium", "large"];
const RESOLUTIONS: [(u32, u32); 4] = [(160, 120), (224, 168), (320, 240), (448, 336)];
const LIGHTS: [f32; 6] = [1.0, 0.3, 0.16, 0.12, 0.09, 0.06];
const QUALITIES: [u8; 4] = [90, 75, 50, 30];
/// Inferences per cost figure; the median is kept.
const COST_RUNS: usize = 21;

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
    let mut totals: BTreeMap<(usize, usize, usize, usize), (Counts, usize)> = BTreeMap::new();
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
                        entry.0 += counts(&found, &frame);
                        entry.1 += bytes;
                    }
                }
            }
        }
    }
    let rows: Vec<Value> = totals
        .iter()
        .map(|((model, resolution, light, quality), (counts, bytes))| {
            let (width, height) = RESOLUTIONS[*resolution];
            json!({
                "model": MODELS[*model], "width": width, "height": height,
                "brightness": (f64::from(LIGHTS[*light]) * 1000.0).round() / 1000.0, "quality": QUALITIES[*quality],
                "f1": (counts.f1() * 10_000.0).round() / 10_000.0,
                "tp": counts.true_positives, "fp": counts.false_positives, "fn": counts.false_negatives,
                "jpeg_bytes": *bytes as u64 / scenes.max(1),
            })
        })
        .collect();
    let report = json!({
        "scenes": scenes, "first_seed": 1, "min_score": DecodeOptions::default().min_score,
        "rows": rows, "cost": costs(&networks)?,
    });
    std::fs::write(out, serde_json::to_string_pretty(&report)? + "\n")
        .with_context(|| format!("cannot write {out}"))
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
