//! Seeded scenes with ground truth: moving objects over textured backgrounds under controlled light.
//!
//! Start at [`Scene::frame`]: a scene is a pure function of its seed, a time and a light level, so any frame of an endless
//! video can be rendered on its own, in any order, and twice the same. Four classes of object ([`CLASS_NAMES`]) cross the
//! picture on lanes; the farther the lane, the smaller the object. Backgrounds carry static distractors that resemble the
//! classes (tanks without bands, crates without wheels, bare posts) and never count as objects.
//!
//! Light follows one model everywhere (training, tests, demo): `round(pixel × brightness + noise)`, Gaussian noise with a
//! standard deviation of [`NOISE_SIGMA`] in 8-bit units, independent per channel.
//!
//! Deliberately absent: no encoding, no files, no clock; the examples `dump` and `evaluate` do those.

mod background;
mod draw;
mod light;
mod objects;
mod random;

#[cfg(test)]
mod tests;

use light::NoiseTable;
use objects::{Lane, Placed};

/// Frame width in pixels unless the settings say otherwise.
pub const DEFAULT_WIDTH: u32 = 640;
/// Frame height in pixels unless the settings say otherwise.
pub const DEFAULT_HEIGHT: u32 = 480;
/// Standard deviation of the sensor noise, in 8-bit units.
pub const NOISE_SIGMA: f32 = 3.0;
/// Class names; a [`TruthBox::class`] and a detector's class index point into it.
pub const CLASS_NAMES: [&str; 4] = ["person", "car", "cart", "drum"];
/// An object counts as visible, and enters the truth, from this part of its pixels on.
pub const MIN_VISIBLE_PART: f32 = 0.4;

/// What a scene looks like apart from its seed.
#[derive(Debug, Clone, PartialEq)]
pub struct SceneSettings {
    /// Frame width in pixels, at least 64.
    pub width: u32,
    /// Frame height in pixels, at least 64.
    pub height: u32,
    /// Number of lanes that carry objects; each shows about one object at a time.
    pub lanes: u32,
    /// Number of static look-alikes painted into the background.
    pub distractors: u32,
    /// Factor on the speed of all objects (1.0: a near object crosses in about ten seconds).
    pub speed: f32,
    /// Seed of the background, when several scenes are to play in one place; the scene's own otherwise.
    pub place: Option<u64>,
}

impl Default for SceneSettings {
    fn default() -> Self {
        Self {
            width: DEFAULT_WIDTH,
            height: DEFAULT_HEIGHT,
            lanes: 9,
            distractors: 20,
            speed: 1.0,
            place: None,
        }
    }
}

/// One object that is visible in a frame. Coordinates are parts of the frame (0 to 1), `x`, `y` the top left corner.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TruthBox {
    /// Index into [`CLASS_NAMES`].
    pub class: u16,
    /// The same object keeps its id from entering to leaving.
    pub id: u64,
    pub x: f32,
    pub y: f32,
    pub w: f32,
    pub h: f32,
}

/// A rendered picture (8-bit RGB, row by row) and what is truly in it.
#[derive(Debug, Clone, PartialEq)]
pub struct Frame {
    pub width: u32,
    pub height: u32,
    pub rgb: Vec<u8>,
    pub truth: Vec<TruthBox>,
}

/// A scene: background, lanes and noise, prepared once; frames are cheap.
#[derive(Debug, Clone)]
pub struct Scene {
    seed: u64,
    settings: SceneSettings,
    background: Vec<u8>,
    lanes: Vec<Lane>,
    noise: NoiseTable,
}

impl Scene {
    /// Prepares the scene of this seed; equal seeds and settings give equal frames.
    ///
    /// Sizes below 64 pixels are raised to 64.
    pub fn new(seed: u64, settings: SceneSettings) -> Self {
        let settings = SceneSettings {
            width: settings.width.max(64),
            height: settings.height.max(64),
            ..settings
        };
        Self {
            seed,
            background: background::render(settings.place.unwrap_or(seed), &settings),
            lanes: objects::lanes(seed, &settings),
            noise: NoiseTable::new(seed, NOISE_SIGMA),
            settings,
        }
    }

    /// The settings in force.
    pub fn settings(&self) -> &SceneSettings {
        &self.settings
    }

    /// Renders the frame at `time_s` seconds (from 0 on) under this light; 1.0 is daylight, 0.1 is nearly dark.
    pub fn frame(&self, time_s: f64, brightness: f32) -> Frame {
        let mut frame = self.frame_without_noise(time_s);
        let noise_seed = random::mix(self.seed, &[random::NOISE, time_s.to_bits()]);
        light::apply(&mut frame, brightness, &self.noise, noise_seed);
        frame
    }

    /// Renders the frame in daylight and without sensor noise (training applies light and noise itself).
    pub fn frame_without_noise(&self, time_s: f64) -> Frame {
        let placed = objects::placed_at(self.seed, &self.lanes, &self.settings, time_s.max(0.0));
        let mut rgb = self.background.clone();
        let truth = self.paint(&mut rgb, &placed);
        Frame {
            width: self.settings.width,
            height: self.settings.height,
            rgb,
            truth,
        }
    }

    /// Truth of the frame at `time_s`, without keeping the picture.
    pub fn truth(&self, time_s: f64) -> Vec<TruthBox> {
        self.frame_without_noise(time_s).truth
    }

    /// Paints far to near and counts, per object, how many of its pixels nobody nearer covered.
    fn paint(&self, rgb: &mut [u8], placed: &[Placed]) -> Vec<TruthBox> {
        let (width, height) = (self.settings.width, self.settings.height);
        let mut owner = vec![0_u8; (width * height) as usize];
        let mut total = vec![0_u32; placed.len()];
        for (index, object) in placed.iter().enumerate() {
            let mark = u8::try_from(index + 1).unwrap_or(u8::MAX);
            total[index] = draw::object(rgb, &mut owner, width, height, object, mark);
        }
        let mut visible = vec![0_u32; placed.len() + 1];
        for mark in owner {
            if let Some(count) = visible.get_mut(usize::from(mark)) {
                *count += 1;
            }
        }
        placed
            .iter()
            .enumerate()
            .filter(|(index, _)| {
                let whole = total[*index].max(1) as f32;
                visible[index + 1] as f32 / whole >= MIN_VISIBLE_PART
            })
            .filter_map(|(_, object)| object.truth(width as f32, height as f32))
            .collect()
    }
}
