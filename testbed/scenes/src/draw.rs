//! Shapes: what colour, if any, an object has at a point of its box (`u` to the right, `v` down, both 0 to 1).

use crate::objects::Placed;
use crate::random::Draws;

type Colour = [f32; 3];

const RUBBER: Colour = [28.0, 28.0, 30.0];

/// Colours and texture of one object. Colours are drawn alike for all classes, so that colour does not give the class away.
#[derive(Debug, Clone)]
pub(crate) struct Style {
    main: Colour,
    second: Colour,
    trim: Colour,
    /// Number of stripes, checks or bands.
    repeats: f32,
}

impl Style {
    pub(crate) fn draw(draws: &mut Draws) -> Self {
        let bright = draws.unit() < 0.5;
        let (low, high) = if bright {
            (120.0, 245.0)
        } else {
            (15.0, 120.0)
        };
        let main = draws.colour(low, high);
        // The second colour differs clearly in lightness, so that textures exist for a grey camera too.
        let second = if bright {
            draws.colour(10.0, 90.0)
        } else {
            draws.colour(150.0, 250.0)
        };
        Self {
            main,
            second,
            trim: draws.colour(20.0, 235.0),
            repeats: draws.between(2.6, 4.4).round(),
        }
    }
}

impl Style {
    fn textured(&self, main: bool) -> Option<Colour> {
        Some(if main { self.main } else { self.second })
    }
}

/// What to do with a pixel of a patch.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Ink {
    Set(Colour),
    Add(f32),
}

/// Calls `ink` for every pixel centre inside the area (left, top, width, height; clipped to the picture).
pub(crate) fn patch(
    rgb: &mut [u8],
    width: u32,
    height: u32,
    area: [f32; 4],
    ink: impl Fn(f32, f32) -> Option<Ink>,
) {
    for_each_pixel(width, height, area, |index, u, v| {
        let Some(ink) = ink(u, v) else { return };
        for (channel, value) in rgb[index * 3..index * 3 + 3].iter_mut().enumerate() {
            *value = match ink {
                Ink::Set(colour) => colour[channel],
                Ink::Add(change) => f32::from(*value) + change,
            }
            .clamp(0.0, 255.0) as u8;
        }
    });
}

/// Paints one object, marks its pixels in `owner`, and returns how many pixels it would have if nothing clipped it.
pub(crate) fn object(
    rgb: &mut [u8],
    owner: &mut [u8],
    width: u32,
    height: u32,
    placed: &Placed,
    mark: u8,
) -> u32 {
    let mut painted = 0_u32;
    for_each_pixel(width, height, placed.area, |index, u, v| {
        let u = if placed.faces_left { 1.0 - u } else { u };
        let aspect = placed.area[2] / placed.area[3];
        if let Some(colour) = class_colour(placed.class, &placed.style, placed.phase, aspect, u, v)
        {
            for channel in 0..3 {
                rgb[index * 3 + channel] = colour[channel].clamp(0.0, 255.0) as u8;
            }
            owner[index] = mark;
            painted += 1;
        }
    });
    painted
}

fn for_each_pixel(width: u32, height: u32, area: [f32; 4], mut visit: impl FnMut(usize, f32, f32)) {
    let [x, y, w, h] = area;
    if w < 1.0 || h < 1.0 {
        return;
    }
    let first = |start: f32| (start - 0.5).ceil().max(0.0) as u32;
    let end = |start: f32, size: f32, limit: u32| {
        ((start + size - 0.5).ceil().max(0.0) as u32).min(limit)
    };
    for row in first(y)..end(y, h, height) {
        let v = (row as f32 + 0.5 - y) / h;
        for column in first(x)..end(x, w, width) {
            let u = (column as f32 + 0.5 - x) / w;
            visit((row * width + column) as usize, u, v);
        }
    }
}

fn class_colour(
    class: u16,
    style: &Style,
    phase: f32,
    aspect: f32,
    u: f32,
    v: f32,
) -> Option<Colour> {
    match class {
        0 => person(style, phase, aspect, u, v),
        1 => car(style, aspect, u, v),
        2 => cart(style, aspect, u, v),
        _ => drum(style, u, v),
    }
}

/// True inside the circle at (`cu`, `cv`) with this radius as a part of the height.
fn in_circle(u: f32, v: f32, aspect: f32, cu: f32, cv: f32, radius: f32) -> bool {
    ((u - cu) * aspect).powi(2) + (v - cv).powi(2) < radius * radius
}

fn even(value: f32) -> bool {
    (value.floor() as i32).rem_euclid(2) == 0
}

fn shaded(colour: Colour, factor: f32) -> Colour {
    colour.map(|channel| channel * factor)
}

/// Head, upright-striped vest, swinging legs.
fn person(style: &Style, phase: f32, aspect: f32, u: f32, v: f32) -> Option<Colour> {
    if in_circle(u, v, aspect, 0.5, 0.105, 0.105) {
        return Some(shaded(style.trim, if v < 0.07 { 0.55 } else { 1.0 }));
    }
    if (0.2..0.6).contains(&v) {
        let half = 0.5 - 0.16 * ((v - 0.2) / 0.4);
        if (u - 0.5).abs() > half {
            return None;
        }
        let stripe = even((u - 0.02) * (style.repeats + 1.0));
        return Some(if stripe { style.main } else { style.second });
    }
    if v >= 0.6 {
        let reach = (v - 0.6) / 0.4;
        let swing = 0.26 * phase.sin() * reach;
        let left = (u - (0.36 - swing * 0.6)).abs() < 0.14;
        let right = (u - (0.64 + swing * 0.6)).abs() < 0.14;
        return (left || right).then(|| shaded(style.second, 0.8));
    }
    None
}

/// Cabin with windows over a long plain body, two wheels.
fn car(style: &Style, aspect: f32, u: f32, v: f32) -> Option<Colour> {
    for centre in [0.2, 0.79] {
        if in_circle(u, v, aspect, centre, 0.82, 0.18) {
            return Some(if in_circle(u, v, aspect, centre, 0.82, 0.08) {
                style.trim
            } else {
                RUBBER
            });
        }
    }
    if (0.42..0.84).contains(&v) {
        let light = v < 0.56 && u > 0.95;
        return Some(if light {
            style.second
        } else {
            shaded(style.main, 1.05 - 0.3 * (v - 0.42))
        });
    }
    if v < 0.42 {
        let lean = 0.42 - v;
        let (from, to) = (0.16 + 0.25 * lean, 0.76 - 0.4 * lean);
        if u < from || u > to {
            return None;
        }
        let glass = v > 0.08
            && v < 0.36
            && (u - from) > 0.05
            && (to - u) > 0.05
            && (u - 0.45).abs() > 0.025;
        return Some(if glass { style.second } else { style.main });
    }
    None
}

/// Chequered load on a frame with a push bar and two small wheels.
fn cart(style: &Style, aspect: f32, u: f32, v: f32) -> Option<Colour> {
    for centre in [0.3, 0.84] {
        if in_circle(u, v, aspect, centre, 0.88, 0.12) {
            return Some(RUBBER);
        }
    }
    if (0.74..0.82).contains(&v) && u > 0.14 {
        return Some(style.trim);
    }
    if v < 0.78 && (u - 0.02 - 0.16 * v).abs() < 0.045 {
        return Some(style.trim);
    }
    if (0.14..0.74).contains(&v) && u > 0.18 {
        let check = even((u - 0.18) / 0.82 * style.repeats)
            == even((v - 0.14) / 0.6 * (style.repeats - 1.0));
        return Some(if check { style.main } else { style.second });
    }
    None
}

/// Upright cylinder with level bands.
fn drum(style: &Style, u: f32, v: f32) -> Option<Colour> {
    let across = 2.0 * u - 1.0;
    let rim = 0.1 * (1.0 - across * across).max(0.0).sqrt();
    if v < 0.1 - rim || v > 0.9 + rim {
        return None;
    }
    if v < 0.1 + rim {
        return Some(shaded(style.trim, 0.9));
    }
    let round = 1.08 - 0.5 * across * across;
    let band = even((v - rim) * style.repeats * 1.6);
    Some(shaded(if band { style.main } else { style.second }, round))
}

/// Look-alikes: a tank without bands, a crate, a post, a container without wheels, a chequered board without wheels or bar, a
/// figure-like board without head or legs.
pub(crate) fn distractor(kind: u64, style: &Style, u: f32, v: f32) -> Option<Colour> {
    match kind {
        0 => {
            let across = 2.0 * u - 1.0;
            let rim = 0.1 * (1.0 - across * across).max(0.0).sqrt();
            if v < 0.1 - rim || v > 0.9 + rim {
                return None;
            }
            let lid = v < 0.1 + rim;
            let round = 1.08 - 0.5 * across * across;
            Some(if lid {
                shaded(style.trim, 0.9)
            } else {
                shaded(style.main, round)
            })
        }
        1 => {
            let edge = u.min(1.0 - u) < 0.07 || v.min(1.0 - v) < 0.1;
            let brace = (u - v).abs() < 0.06 || (u + v - 1.0).abs() < 0.06;
            Some(if edge || brace {
                style.second
            } else {
                style.main
            })
        }
        2 => style.textured(even(v * style.repeats)),
        4 => style.textured(even(u * style.repeats) == even(v * (style.repeats - 1.0))),
        5 => {
            let inside = (u - 0.5).abs() <= 0.5 - 0.2 * v;
            let stripe = v < 0.6 && even(u * (style.repeats + 1.0));
            inside.then_some(if stripe { style.main } else { style.second })
        }
        _ => {
            let rib = even(u * 2.0 * style.repeats + 0.5);
            let door = v > 0.2 && u > 0.8;
            Some(if door {
                style.second
            } else {
                shaded(style.main, if rib { 1.0 } else { 0.82 })
            })
        }
    }
}
