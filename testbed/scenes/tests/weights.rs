//! The committed detectors: they are the files the card describes, and they make the demo's story true.

mod support;

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use compass_scenes::{Scene, SceneSettings};
use compass_shared::vision::DecodeOptions;
use sha2::{Digest, Sha256};
use support::{Network, counts, models_folder, resized, through_jpeg};

/// Held-out seeds that neither training nor the card's tables use.
const SEEDS: std::ops::Range<u64> = 5_000..5_024;
/// The demo's dark phase.
const DARK: f32 = 0.06;

/// A detector plan: model, resolution, JPEG quality.
type Plan = (&'static str, (u32, u32), u8);

/// Accuracy as a stream's is defined: the mean over frames.
fn f1(plan: Plan, brightness: f32) -> Result<f64> {
    let (model, (width, height), quality) = plan;
    let network = Network::load(&models_folder().join(format!("{model}.onnx")))?;
    let mut sum = 0.0;
    for seed in SEEDS {
        let frame = Scene::new(seed, SceneSettings::default()).frame(3.0, brightness);
        let (seen, _) = through_jpeg(&resized(&frame, width, height)?, quality)?;
        let found = network.detect(&seen, &DecodeOptions::default())?;
        sum += counts(&found, &frame).f1();
    }
    Ok(sum / SEEDS.count() as f64)
}

#[test]
fn files_are_the_ones_the_card_names_and_small() -> Result<()> {
    let sums = std::fs::read_to_string(models_folder().join("SHA256SUMS"))?;
    let card = std::fs::read_to_string(models_folder().join("README.md"))?;
    let mut by_name = BTreeMap::new();
    for line in sums.lines() {
        let (sum, name) = line
            .split_once("  ")
            .context("a line is a sum and a name")?;
        by_name.insert(name, sum);
    }
    let names: Vec<_> = by_name.keys().copied().collect();
    assert_eq!(names, ["large.onnx", "medium.onnx", "small.onnx"]);
    let mut bytes = 0;
    for (name, sum) in by_name {
        let content = std::fs::read(models_folder().join(name))?;
        bytes += content.len();
        assert_eq!(hex::encode(Sha256::digest(&content)), sum, "{name}");
        assert!(
            card.contains(sum),
            "the card names another {name}: run testbed/models/card.py"
        );
    }
    assert!(bytes < 3_000_000, "{bytes} bytes");
    Ok(())
}

#[test]
fn in_daylight_the_largest_network_beats_the_smallest_by_fifteen_points() -> Result<()> {
    let small = f1(("small", (320, 240), 75), 1.0)?;
    let large = f1(("large", (320, 240), 75), 1.0)?;
    assert!(large - small >= 0.15, "small {small:.3}, large {large:.3}");
    Ok(())
}

#[test]
fn in_the_dark_the_cheap_daylight_plan_fails_and_a_larger_one_holds() -> Result<()> {
    let accuracy = 0.75;
    let cheap = ("medium", (224, 168), 75);
    let strong = ("large", (320, 240), 90);
    let day = f1(cheap, 1.0)?;
    assert!(
        day >= accuracy + 0.03,
        "the cheap plan meets the SLO in daylight: {day:.3}"
    );
    let dark = f1(cheap, DARK)?;
    assert!(
        dark <= accuracy - 0.05,
        "the cheap plan fails in the dark: {dark:.3}"
    );
    let held = f1(strong, DARK)?;
    assert!(
        held >= accuracy + 0.05,
        "the strong plan holds in the dark: {held:.3}"
    );
    Ok(())
}
