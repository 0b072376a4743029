//! Time as an argument: the core never reads a clock, it is told.

use std::ops::{Add, Sub};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A point on one process's monotonic clock, in microseconds since an arbitrary start; never compared between machines.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Moment(pub u64);

impl Moment {
    /// The moment this long after the clock's start.
    pub const fn from_duration(since_start: Duration) -> Self {
        Self(since_start.as_micros() as u64)
    }

    /// The time since an earlier moment; zero when `earlier` is in fact later.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Moment {
    type Output = Self;
    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration.as_micros() as u64))
    }
}

impl Sub<Duration> for Moment {
    type Output = Self;
    fn sub(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(duration.as_micros() as u64))
    }
}

/// Milliseconds of a duration, for figures and formulas.
pub fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// The duration of this many milliseconds; not a number or negative gives zero, too much saturates.
pub fn from_ms(ms: f64) -> Duration {
    Duration::try_from_secs_f64((ms / 1e3).max(0.0)).unwrap_or(Duration::MAX)
}
