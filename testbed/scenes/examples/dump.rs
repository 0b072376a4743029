//! Writes frames of many scenes for training and comparison: `frames.rgb` (8-bit RGB, frame after frame) and `truth.json`.
//!
//! `cargo run -p compass-scenes --example dump -- OUT FIRST_SEED SCENES FRAMES_PER_SCENE [SPACING_S [BRIGHTNESS]]`
//!
//! Without a brightness the frames are clean: the reader applies the light model of `compass_scenes` with draws of its own.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;

use anyhow::{Context, Result};
use compass_scenes::{CLASS_NAMES, NOISE_SIGMA, Scene, SceneSettings};
use serde_json::{Value, json};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize, name: &str| -> Result<u64> {
        let text = arguments
            .get(index)
            .with_context(|| format!("missing argument {name}"))?;
        text.parse()
            .with_context(|| format!("{name} must be a whole number, not '{text}'"))
    };
    let out = PathBuf::from(arguments.first().context("missing argument OUT")?);
    let (first_seed, scenes, per_scene) = (
        number(1, "FIRST_SEED")?,
        number(2, "SCENES")?,
        number(3, "FRAMES_PER_SCENE")?,
    );
    let spacing_s: f64 = match arguments.get(4) {
        Some(text) => text.parse().context("SPACING_S must be a number")?,
        None => 7.0,
    };
    let brightness: Option<f32> = arguments
        .get(5)
        .map(|text| text.parse().context("BRIGHTNESS must be a number"))
        .transpose()?;
    std::fs::create_dir_all(&out).with_context(|| format!("cannot create {}", out.display()))?;
    let mut pixels = BufWriter::new(File::create(out.join("frames.rgb"))?);
    let mut frames: Vec<Value> = Vec::new();
    for seed in first_seed..first_seed + scenes {
        let scene = Scene::new(seed, SceneSettings::default());
        for index in 0..per_scene {
            let time_s = index as f64 * spacing_s;
            let frame = match brightness {
                Some(brightness) => scene.frame(time_s, brightness),
                None => scene.frame_without_noise(time_s),
            };
            pixels.write_all(&frame.rgb)?;
            let boxes: Vec<Value> = frame
                .truth
                .iter()
                .map(|t| json!([t.class, t.x, t.y, t.w, t.h]))
                .collect();
            frames.push(json!({ "seed": seed, "boxes": boxes }));
        }
    }
    pixels.flush()?;
    let settings = SceneSettings::default();
    let truth = json!({
        "width": settings.width, "height": settings.height, "classes": CLASS_NAMES,
        "noise_sigma": NOISE_SIGMA, "frames": frames,
    });
    std::fs::write(out.join("truth.json"), serde_json::to_vec(&truth)?)?;
    Ok(())
}
