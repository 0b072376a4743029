//! The static picture behind the objects: a wall and a floor with value noise, joints, stains and look-alikes.

use crate::SceneSettings;
use crate::draw::{self, Style};
use crate::random::{BACKGROUND, DISTRACTOR, Draws, mix};

/// Octaves of value noise: cell size in pixels and amplitude in 8-bit units.
const OCTAVES: [(f32, f32); 3] = [(90.0, 16.0), (23.0, 9.0), (5.0, 6.0)];

pub(crate) fn render(seed: u64, settings: &SceneSettings) -> Vec<u8> {
    let (width, height) = (settings.width, settings.height);
    let mut draws = Draws::new(seed, &[BACKGROUND]);
    let horizon = height as f32 * draws.between(0.16, 0.3);
    let base = draws.between(70.0, 165.0);
    let wall = tinted(&mut draws, base);
    let floor_level = (base + draws.between(-45.0, 45.0)).clamp(60.0, 180.0);
    let floor = tinted(&mut draws, floor_level);
    let joint_px = draws.between(28.0, 75.0);
    let joint_depth = draws.between(4.0, 20.0);
    let slope = draws.between(-0.6, 0.6);
    let noise_seed = draws.next();
    let mut rgb = vec![0_u8; (width * height * 3) as usize];
    for y in 0..height {
        let below = y as f32 >= horizon;
        let colour = if below { floor } else { wall };
        // Farther floor is a little darker.
        let shade = if below {
            12.0 * (y as f32 - horizon) / height as f32 - 6.0
        } else {
            0.0
        };
        for x in 0..width {
            let mut level = shade;
            for (octave, (cell, amplitude)) in OCTAVES.iter().enumerate() {
                level += amplitude
                    * value_noise(
                        noise_seed.wrapping_add(octave as u64),
                        x as f32 / cell,
                        y as f32 / cell,
                    );
            }
            let across = if below {
                x as f32 + slope * (y as f32 - horizon)
            } else {
                x as f32
            };
            let row_px = if below {
                joint_px * (0.35 + (y as f32 - horizon) / height as f32)
            } else {
                joint_px * 0.5
            };
            if across.rem_euclid(joint_px) < 1.6 || (y as f32 - horizon).rem_euclid(row_px) < 1.6 {
                level -= joint_depth;
            }
            let at = ((y * width + x) * 3) as usize;
            for channel in 0..3 {
                rgb[at + channel] = (colour[channel] + level).clamp(0.0, 255.0) as u8;
            }
        }
    }
    stains(&mut rgb, seed, width, height);
    distractors(&mut rgb, seed, settings, horizon);
    rgb
}

fn tinted(draws: &mut Draws, level: f32) -> [f32; 3] {
    [
        level + draws.between(-22.0, 22.0),
        level + draws.between(-16.0, 16.0),
        level + draws.between(-22.0, 22.0),
    ]
}

/// Smooth value noise in −1 to 1.
fn value_noise(seed: u64, x: f32, y: f32) -> f32 {
    let (cell_x, cell_y) = (x.floor(), y.floor());
    let smooth = |t: f32| t * t * (3.0 - 2.0 * t);
    let (tx, ty) = (smooth(x - cell_x), smooth(y - cell_y));
    let corner = |dx: f32, dy: f32| {
        let cell = (((cell_y + dy) as u64) << 32) | (cell_x + dx) as u64;
        (mix(seed, &[cell]) >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    };
    let top = corner(0.0, 0.0) * (1.0 - tx) + corner(1.0, 0.0) * tx;
    let bottom = corner(0.0, 1.0) * (1.0 - tx) + corner(1.0, 1.0) * tx;
    top * (1.0 - ty) + bottom * ty
}

/// Flat patches and lines: shadows, painted markings, puddles.
fn stains(rgb: &mut [u8], seed: u64, width: u32, height: u32) {
    let mut draws = Draws::new(seed, &[BACKGROUND, 1]);
    for _ in 0..10 {
        let w = draws.between(6.0, 130.0);
        let h = draws.between(4.0, 46.0);
        let x = draws.between(-20.0, width as f32);
        let y = draws.between(-10.0, height as f32);
        let change = draws.between(-34.0, 34.0);
        let round = draws.unit() < 0.5;
        draw::patch(rgb, width, height, [x, y, w, h], |u, v| {
            let inside = !round || (2.0 * u - 1.0).powi(2) + (2.0 * v - 1.0).powi(2) < 1.0;
            inside.then_some(draw::Ink::Add(change))
        });
    }
}

/// Static things that look like objects at a glance.
fn distractors(rgb: &mut [u8], seed: u64, settings: &SceneSettings, horizon: f32) {
    let (width, height) = (settings.width as f32, settings.height as f32);
    for index in 0..settings.distractors {
        let mut draws = Draws::new(seed, &[DISTRACTOR, u64::from(index)]);
        let base = draws.between(horizon + 8.0, height * 0.98);
        let scale =
            crate::objects::scale_at(base / height) * height / 480.0 * draws.between(0.75, 1.3);
        let style = Style::draw(&mut draws);
        let kind = draws.below(6);
        let (w, h) = match kind {
            0 => (54.0 * scale, 74.0 * scale),
            1 => (84.0 * scale, 58.0 * scale),
            2 => (18.0 * scale, 118.0 * scale),
            4 => (70.0 * scale, 46.0 * scale),
            5 => (46.0 * scale, 92.0 * scale),
            _ => (140.0 * scale, 62.0 * scale),
        };
        let x = draws.between(-0.5 * w, width - 0.5 * w);
        draw::patch(
            rgb,
            settings.width,
            settings.height,
            [x, base - h, w, h],
            |u, v| draw::distractor(kind, &style, u, v).map(draw::Ink::Set),
        );
    }
}
