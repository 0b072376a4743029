//! Quantities whose unit is part of the type. Parsing of written units (`300ms`, `18 Mbit/s`, `0.40 USD/h`) lives with the specs.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A data rate in bits per second.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Bandwidth(pub u64);

impl Bandwidth {
    /// From megabits per second.
    pub fn from_mbit_s(mbit_s: f64) -> Self {
        Self((mbit_s * 1e6).max(0.0) as u64)
    }

    /// In megabits per second.
    pub fn mbit_s(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// Milliseconds to put this many bytes on a link of this rate; infinite for a rate of zero.
    pub fn transfer_ms(self, bytes: f64) -> f64 {
        if self.0 == 0 {
            f64::INFINITY
        } else {
            bytes * 8e3 / self.0 as f64
        }
    }
}

impl fmt::Display for Bandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mbit_s = self.mbit_s();
        if mbit_s >= 10.0 {
            f.pad(&format!("{mbit_s:.0} Mbit/s"))
        } else if mbit_s >= 0.1 {
            f.pad(&format!("{mbit_s:.1} Mbit/s"))
        } else {
            f.pad(&format!("{:.0} kbit/s", mbit_s * 1e3))
        }
    }
}

/// CPU capacity in thousandths of one core of the node (an emulated node's core is slower than its host's).
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Millicores(pub u32);

impl Millicores {
    /// As a number of cores.
    pub fn cores(self) -> f64 {
        f64::from(self.0) / 1e3
    }
}

impl fmt::Display for Millicores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}m", self.0))
    }
}

/// A number of frames (or requests) per second, in thousandths, so that it can be compared and hashed.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Rate(pub u32);

impl Rate {
    /// From events per second.
    pub fn per_second(events: f64) -> Self {
        Self((events * 1e3).clamp(0.0, f64::from(u32::MAX)) as u32)
    }

    /// In events per second.
    pub fn hz(self) -> f64 {
        f64::from(self.0) / 1e3
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}/s", self.hz()))
    }
}
