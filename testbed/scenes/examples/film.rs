//! Writes a film as motion JPEG, for trying the system by hand: `film FILE [SECONDS [SEED [BRIGHTNESS]]]`, ten frames a second.

use std::io::Write;

use compass_scenes::{Scene, SceneSettings};

/// Frames per second.
const RATE_HZ: f64 = 10.0;
/// As cameras with hardware encoders send it.
const QUALITY: u8 = 92;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(file) = arguments.first() else {
        return Err("usage: film FILE [SECONDS [SEED [BRIGHTNESS]]]".into());
    };
    let seconds: f64 = arguments.get(1).map_or(Ok(20.0), |text| text.parse())?;
    let seed: u64 = arguments.get(2).map_or(Ok(1), |text| text.parse())?;
    let brightness: f32 = arguments.get(3).map_or(Ok(1.0), |text| text.parse())?;
    let scene = Scene::new(seed, SceneSettings::default());
    let mut film = std::io::BufWriter::new(std::fs::File::create(file)?);
    for index in 0..(seconds * RATE_HZ).round() as u32 {
        let frame = scene.frame(f64::from(index) / RATE_HZ, brightness);
        let mut jpeg = Vec::new();
        image::codecs::jpeg::JpegEncoder::new_with_quality(&mut jpeg, QUALITY).encode(
            &frame.rgb,
            frame.width,
            frame.height,
            image::ExtendedColorType::Rgb8,
        )?;
        film.write_all(&jpeg)?;
    }
    film.flush()?;
    Ok(())
}
