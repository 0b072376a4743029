//! Detector primitives: levels, changes, breaches and modes of measured series.
//!
//! Start at [`Ewma`] (level), [`PageHinkley`] (change of level), [`Breach`] (a bound broken several times in a row, with hysteresis)
//! and [`ModeWatch`] (a scene that changed and came to rest). Agents and the planner use the same code, so that what an agent raises
//! the planner can re-derive.
//!
//! Values that are not finite are ignored: a missing measurement is not a measurement of zero. Deliberately absent: thresholds of any
//! particular signal (they belong to the one who watches it), clocks (time is an argument) and decisions.

use std::time::Duration;

use crate::time::Moment;

#[cfg(test)]
mod tests;

/// A level that forgets: an exponentially weighted mean over irregular samples.
#[derive(Debug, Clone, PartialEq)]
pub struct Ewma {
    half_life: Duration,
    level: Option<(Moment, f64)>,
}

impl Ewma {
    /// A mean in which a sample loses half its weight within `half_life`.
    pub const fn new(half_life: Duration) -> Self {
        Self {
            half_life,
            level: None,
        }
    }

    /// Takes a sample and gives the level after it; `None` until a finite sample came.
    ///
    /// Samples of the same moment are averaged as if a thousandth of the half-life lay between them, so none is lost.
    pub fn observe(&mut self, now: Moment, value: f64) -> Option<f64> {
        if !value.is_finite() {
            return self.value();
        }
        let level = match self.level {
            None => value,
            Some((at, level)) => {
                let half_life = self.half_life.as_secs_f64().max(1e-9);
                let elapsed = now.since(at).as_secs_f64().max(half_life * 1e-3);
                let keep = 0.5_f64.powf(elapsed / half_life);
                keep * level + (1.0 - keep) * value
            }
        };
        self.level = Some((now, level));
        Some(level)
    }

    /// The level; `None` before the first sample.
    pub fn value(&self) -> Option<f64> {
        self.level.map(|(_, level)| level)
    }

    /// Forgets everything and starts from a known level.
    pub const fn restart(&mut self, now: Moment, level: f64) {
        self.level = Some((now, level));
    }
}

/// Which way a level moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// It rose.
    Up,
    /// It fell.
    Down,
}

/// The Page–Hinkley test (Page 1954, "Continuous inspection schemes"): has the mean of a series moved, in either direction?
///
/// It sums deviations from the running mean, less a tolerance per sample, and signals when the sum has come further from its extreme
/// than the threshold. After a signal it starts anew, so a lasting change is reported once.
#[derive(Debug, Clone, PartialEq)]
pub struct PageHinkley {
    tolerance: f64,
    threshold: f64,
    samples_min: u32,
    samples: u32,
    mean: f64,
    up: f64,
    up_lowest: f64,
    down: f64,
    down_highest: f64,
}

impl PageHinkley {
    /// `tolerance` is the deviation per sample that is taken for noise, `threshold` the sum of deviations beyond it that is a change
    /// (both in the unit of the series); nothing is reported before `samples_min` samples.
    pub const fn new(tolerance: f64, threshold: f64, samples_min: u32) -> Self {
        Self {
            tolerance,
            threshold,
            samples_min,
            samples: 0,
            mean: 0.0,
            up: 0.0,
            up_lowest: 0.0,
            down: 0.0,
            down_highest: 0.0,
        }
    }

    /// Takes a sample; tells when the level has moved since the last signal.
    pub fn observe(&mut self, value: f64) -> Option<Change> {
        if !value.is_finite() {
            return None;
        }
        self.samples = self.samples.saturating_add(1);
        self.mean += (value - self.mean) / f64::from(self.samples);
        let deviation = value - self.mean;
        self.up += deviation - self.tolerance;
        self.up_lowest = self.up_lowest.min(self.up);
        self.down += deviation + self.tolerance;
        self.down_highest = self.down_highest.max(self.down);
        if self.samples < self.samples_min {
            return None;
        }
        let change = if self.up - self.up_lowest > self.threshold {
            Change::Up
        } else if self.down_highest - self.down > self.threshold {
            Change::Down
        } else {
            return None;
        };
        *self = Self::new(self.tolerance, self.threshold, self.samples_min);
        Some(change)
    }
}

/// Counts breaches of a bound: raised after several in a row, cleared only well inside the bound.
///
/// ```text
/// value  ─ bound ───────────╭─╮──────────╭╮────────
///        ─ clear level ─────│ │──────────││────────
///                       ▁▁▁▁╯ ╰▁▁▁▁▁▁▁▁▁▁╯╰▁▁▁▁▁▁▁▁
///        Raised at the n-th sample above the bound; a single spike counts nothing; between the two lines the state stays as it is.
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Breach {
    needed: u32,
    in_a_row: u32,
    raised: bool,
}

/// What a sample did to a [`Breach`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Edge {
    /// The bound has now been broken often enough in a row.
    Raised,
    /// It had been raised, and the value has come back inside the clear level.
    Cleared,
}

impl Breach {
    /// Raised after `needed` samples in a row outside the bound (at least one).
    pub const fn new(needed: u32) -> Self {
        Self {
            needed: if needed == 0 { 1 } else { needed },
            in_a_row: 0,
            raised: false,
        }
    }

    /// Takes a sample that must not exceed `bound`; it counts as recovered at or below `clear`.
    pub fn above(&mut self, value: f64, bound: f64, clear: f64) -> Option<Edge> {
        self.step(value > bound, value <= clear, value.is_finite())
    }

    /// Takes a sample that must not fall below `bound`; it counts as recovered at or above `clear`.
    pub fn below(&mut self, value: f64, bound: f64, clear: f64) -> Option<Edge> {
        self.step(value < bound, value >= clear, value.is_finite())
    }

    fn step(&mut self, is_outside: bool, is_clear: bool, is_known: bool) -> Option<Edge> {
        if !is_known {
            return None;
        }
        if is_outside {
            self.in_a_row = self.in_a_row.saturating_add(1);
            if !self.raised && self.in_a_row >= self.needed {
                self.raised = true;
                return Some(Edge::Raised);
            }
            return None;
        }
        self.in_a_row = 0;
        if self.raised && is_clear {
            self.raised = false;
            return Some(Edge::Cleared);
        }
        None
    }

    /// Whether it is raised now.
    pub const fn is_raised(&self) -> bool {
        self.raised
    }

    /// Starts anew, as after a new plan.
    pub const fn reset(&mut self) {
        self.in_a_row = 0;
        self.raised = false;
    }
}

/// One watched descriptor of a [`ModeWatch`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Descriptor {
    /// For people, e.g. `luma mean`.
    pub name: &'static str,
    /// A difference of this much between two modes matters (in the descriptor's unit).
    pub matters: f64,
}

/// How long a [`ModeWatch`] waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settling {
    /// The descriptors must have stayed near each other this long for a mode to count as settled.
    pub rest: Duration,
    /// A scene that never rests is given a mode after this long, so that endless motion is noticed too.
    pub patience: Duration,
}

impl Default for Settling {
    /// 0.6 s outlasts a camera's flip to infrared and a flash; 5 s is far longer than any exposure control needs.
    fn default() -> Self {
        Self {
            rest: Duration::from_millis(600),
            patience: Duration::from_secs(5),
        }
    }
}

/// A mode change that has settled.
#[derive(Debug, Clone, PartialEq)]
pub struct ModeChange {
    /// The descriptor that moved most, relative to what matters.
    pub descriptor: &'static str,
    /// Its level now.
    pub now: f64,
    /// Its level in the mode before.
    pub before: f64,
    /// Time from the first sample outside of the old mode to now.
    pub window: Duration,
}

/// Watches descriptors of a scene and reports each change of mode once, after it has settled.
///
/// | state | leaves it when | to |
/// |---|---|---|
/// | in a mode | a descriptor differs from the mode by what matters | moving |
/// | moving | all descriptors are back within the mode | in the old mode, nothing reported |
/// | moving | all have rested outside for `rest` (or `patience` has passed) | in the new mode, reported |
///
/// Slow drift (dusk) is followed without report only within what matters of where the mode began: the mode's level is not dragged
/// along, so a slow change is reported once it has become as large as a sudden one.
#[derive(Debug, Clone, PartialEq)]
pub struct ModeWatch {
    descriptors: Vec<Descriptor>,
    settling: Settling,
    mode: Option<Vec<f64>>,
    moving: Option<Moving>,
}

#[derive(Debug, Clone, PartialEq)]
struct Moving {
    since: Moment,
    rest_since: Moment,
    rest_at: Vec<f64>,
    level: Vec<f64>,
    samples: u32,
}

impl ModeWatch {
    /// A watch over these descriptors, in a fixed order.
    pub const fn new(descriptors: Vec<Descriptor>, settling: Settling) -> Self {
        Self {
            descriptors,
            settling,
            mode: None,
            moving: None,
        }
    }

    /// Takes one value per descriptor. A sample with a missing, extra or non-finite value is ignored. The first one sets the mode.
    pub fn observe(&mut self, now: Moment, values: &[f64]) -> Option<ModeChange> {
        if values.len() != self.descriptors.len() || values.iter().any(|v| !v.is_finite()) {
            return None;
        }
        let Some(mode) = &self.mode else {
            self.mode = Some(values.to_vec());
            return None;
        };
        if self.distance(mode, values) < 1.0 {
            self.moving = None;
            return None;
        }
        let restarted = match &self.moving {
            None => true,
            // Half of what matters: two points of one resting scene, each within a quarter of its middle.
            Some(moving) => self.distance(&moving.rest_at, values) >= 0.5,
        };
        let since = self.moving.as_ref().map_or(now, |m| m.since);
        let moving = match self.moving.take() {
            Some(mut moving) if !restarted => {
                moving.samples += 1;
                let n = f64::from(moving.samples);
                for (level, value) in moving.level.iter_mut().zip(values) {
                    *level += (value - *level) / n;
                }
                moving
            }
            _ => Moving {
                since,
                rest_since: now,
                rest_at: values.to_vec(),
                level: values.to_vec(),
                samples: 1,
            },
        };
        let rested = now.since(moving.rest_since) >= self.settling.rest && moving.samples >= 2;
        let impatient = now.since(moving.since) >= self.settling.patience;
        if !rested && !impatient {
            self.moving = Some(moving);
            return None;
        }
        let before = std::mem::replace(self.mode.as_mut()?, moving.level);
        let after = self.mode.as_ref()?;
        let most = (0..self.descriptors.len()).max_by(|a, b| {
            let moved = |i: usize| (after[i] - before[i]).abs() / self.descriptors[i].matters;
            moved(*a).total_cmp(&moved(*b)).then(b.cmp(a))
        })?;
        Some(ModeChange {
            descriptor: self.descriptors[most].name,
            now: after[most],
            before: before[most],
            window: now.since(moving.since),
        })
    }

    /// The level of each descriptor in the current mode; `None` before the first sample.
    pub fn mode(&self) -> Option<&[f64]> {
        self.mode.as_deref()
    }

    /// The largest difference, in units of what matters.
    fn distance(&self, a: &[f64], b: &[f64]) -> f64 {
        self.descriptors
            .iter()
            .zip(a.iter().zip(b))
            .map(|(d, (a, b))| (a - b).abs() / d.matters.max(f64::MIN_POSITIVE))
            .fold(0.0, f64::max)
    }
}

/// The value at a percentile (0 to 100) of some samples, interpolated; `None` without a finite sample.
pub fn percentile(samples: &[f64], percentile: f64) -> Option<f64> {
    let mut finite: Vec<f64> = samples.iter().copied().filter(|v| v.is_finite()).collect();
    finite.sort_by(f64::total_cmp);
    let last = finite.len().checked_sub(1)?;
    let position = (percentile / 100.0).clamp(0.0, 1.0) * last as f64;
    let below = position.floor() as usize;
    let above = (below + 1).min(last);
    let part = position - below as f64;
    Some(finite[below] * (1.0 - part) + finite[above] * part)
}
