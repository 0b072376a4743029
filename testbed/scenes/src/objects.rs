//! Who is where at a given time: lanes, the objects that cross on them, and their boxes.
//!
//! A lane is divided into slots of equal length in time; slot `k` may send one object across. Everything about that object
//! follows from (seed, lane, slot), so no state is carried from frame to frame.

use crate::draw::Style;
use crate::random::{Draws, LANE, SLOT};
use crate::{CLASS_NAMES, SceneSettings, TruthBox};

/// Scale of the farthest lane; the nearest has scale 1.
const FAR_SCALE: f32 = 0.25;
/// Base line of the farthest and nearest lane, as a part of the frame's height.
const FAR_LINE: f32 = 0.34;
const NEAR_LINE: f32 = 0.98;
/// Width and height at scale 1 in a frame of 480 lines, by class.
const SIZES: [(f32, f32); CLASS_NAMES.len()] =
    [(50.0, 118.0), (140.0, 70.0), (86.0, 72.0), (52.0, 72.0)];
/// Part of the slots that send an object.
const OCCUPIED: f32 = 0.85;

/// The scale of things that stand on this line (a part of the frame's height).
pub(crate) fn scale_at(line: f32) -> f32 {
    let nearness = ((line - FAR_LINE) / (NEAR_LINE - FAR_LINE)).clamp(0.0, 1.0);
    FAR_SCALE.powf(1.0 - nearness)
}

/// A path across the picture.
#[derive(Debug, Clone)]
pub(crate) struct Lane {
    index: u64,
    /// Base line in pixels.
    base: f32,
    /// Pixels per unit of `SIZES`.
    scale: f32,
    /// Pixels per second at the lane's pace; negative: to the left.
    velocity: f32,
    /// Seconds from one slot to the next.
    slot_s: f32,
}

/// An object at one moment.
#[derive(Debug, Clone)]
pub(crate) struct Placed {
    pub(crate) id: u64,
    pub(crate) class: u16,
    /// Left, top, width, height in pixels; may reach outside the frame.
    pub(crate) area: [f32; 4],
    pub(crate) style: Style,
    /// Gait or wheel phase in radians.
    pub(crate) phase: f32,
    pub(crate) faces_left: bool,
}

impl Placed {
    /// The part inside the frame as a normalised box; `None` if too little is inside.
    pub(crate) fn truth(&self, width: f32, height: f32) -> Option<TruthBox> {
        let [x, y, w, h] = self.area;
        let (left, top) = (x.max(0.0), y.max(0.0));
        let (right, bottom) = ((x + w).min(width), (y + h).min(height));
        let inside = (right - left).max(0.0) * (bottom - top).max(0.0);
        if inside < crate::MIN_VISIBLE_PART * w * h {
            return None;
        }
        Some(TruthBox {
            class: self.class,
            id: self.id,
            x: left / width,
            y: top / height,
            w: (right - left) / width,
            h: (bottom - top) / height,
        })
    }
}

pub(crate) fn lanes(seed: u64, settings: &SceneSettings) -> Vec<Lane> {
    let (width, height) = (settings.width as f32, settings.height as f32);
    let speed = if settings.speed.is_finite() {
        settings.speed.clamp(0.05, 20.0)
    } else {
        1.0
    };
    (0..settings.lanes.min(60))
        .map(|index| {
            let mut draws = Draws::new(seed, &[LANE, u64::from(index)]);
            let nearness = index as f32 / (settings.lanes.max(2) - 1) as f32;
            let line = FAR_LINE + (NEAR_LINE - FAR_LINE) * nearness + draws.between(-0.02, 0.02);
            let scale = scale_at(line) * height / 480.0;
            let pace = draws.between(38.0, 80.0) * scale * speed;
            let direction = if draws.unit() < 0.5 { -1.0 } else { 1.0 };
            Lane {
                index: u64::from(index),
                base: (line * height).min(height - 1.0),
                scale,
                velocity: direction * pace,
                // About one object per lane at a time, with room for two of the widest.
                slot_s: ((width + 160.0 * scale) / pace * draws.between(0.7, 1.05)).max(0.1),
            }
        })
        .collect()
}

/// The objects of this moment, far to near.
pub(crate) fn placed_at(
    seed: u64,
    lanes: &[Lane],
    settings: &SceneSettings,
    time_s: f64,
) -> Vec<Placed> {
    let mut placed = Vec::new();
    for lane in lanes {
        let now = (time_s / f64::from(lane.slot_s)).floor() as i64;
        // The slowest object needs less than four slots to cross; slots before time 0 fill the first frames.
        for slot in now - 4..=now {
            placed.extend(object_of_slot(seed, lane, settings, slot, time_s));
        }
    }
    placed.sort_by(|a, b| {
        (a.area[1] + a.area[3])
            .total_cmp(&(b.area[1] + b.area[3]))
            .then(a.id.cmp(&b.id))
    });
    placed
}

fn object_of_slot(
    seed: u64,
    lane: &Lane,
    settings: &SceneSettings,
    slot: i64,
    time_s: f64,
) -> Option<Placed> {
    let slot_key = slot.cast_unsigned();
    let mut draws = Draws::new(seed, &[SLOT, lane.index, slot_key]);
    if draws.unit() > OCCUPIED {
        return None;
    }
    let class = draws.below(CLASS_NAMES.len() as u64) as u16;
    let size = lane.scale * draws.between(0.85, 1.2);
    let stretch = draws.between(0.92, 1.08);
    let (w, h) = SIZES[usize::from(class)];
    let (w, h) = (w * size * stretch, h * size / stretch);
    let start_s = f64::from(lane.slot_s) * (slot as f64 + f64::from(draws.unit()) * 0.6);
    let pace = lane.velocity * draws.between(0.8, 1.25);
    let weave = draws.between(0.0, 0.25);
    let weave_rate = draws.between(0.5, 1.6);
    let base = lane.base + draws.between(-5.0, 5.0) * lane.scale;
    let style = Style::draw(&mut draws);
    let age = (time_s - start_s) as f32;
    if age < 0.0 {
        return None;
    }
    // Objects do not glide: the pace swells and ebbs, never backwards (|weave · rate| < pace / scale).
    let travelled = pace.abs() * age + 40.0 * lane.scale * weave * (weave_rate * age).sin();
    let width = settings.width as f32;
    let x = if pace > 0.0 {
        travelled - w
    } else {
        width - travelled
    };
    if x > width || x + w < 0.0 {
        return None;
    }
    Some(Placed {
        id: (lane.index << 48) | (slot_key & 0xFFFF_FFFF_FFFF),
        class,
        area: [x, base - h, w, h],
        style,
        phase: travelled / (h * 0.16).max(1.0),
        faces_left: pace < 0.0,
    })
}
