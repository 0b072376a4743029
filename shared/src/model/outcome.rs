//! How frames end, and what an app measures of it.

use serde::{Deserialize, Serialize};

use crate::ids::Generation;

/// Each frame ends as exactly one of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Outcome {
    /// The result came in time.
    Answered,
    /// The result came, but after the latency bound.
    Late,
    /// A knob (the sampling rate) left it out on purpose.
    Skipped,
    /// It passed its deadline somewhere and was dropped.
    Expired,
    /// There was no room for it.
    Rejected,
}

impl Outcome {
    /// Whether it counts as a miss in attainment; skipped frames count neither way.
    pub const fn is_miss(self) -> bool {
        matches!(self, Self::Late | Self::Expired | Self::Rejected)
    }
}

/// Counts of frames by outcome.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutcomeCounts {
    /// Frames the app handed over.
    pub sent: u64,
    /// See [`Outcome::Answered`].
    pub answered: u64,
    /// See [`Outcome::Late`].
    pub late: u64,
    /// See [`Outcome::Skipped`].
    pub skipped: u64,
    /// See [`Outcome::Expired`].
    pub expired: u64,
    /// See [`Outcome::Rejected`].
    pub rejected: u64,
}

impl OutcomeCounts {
    /// Counts one outcome.
    pub const fn add(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Answered => self.answered += 1,
            Outcome::Late => self.late += 1,
            Outcome::Skipped => self.skipped += 1,
            Outcome::Expired => self.expired += 1,
            Outcome::Rejected => self.rejected += 1,
        }
    }

    /// Frames that have ended.
    pub const fn ended(&self) -> u64 {
        self.answered + self.late + self.skipped + self.expired + self.rejected
    }

    /// Share of frames, of those not skipped, that were answered in time; `None` before any ended.
    pub fn attainment(&self) -> Option<f64> {
        let judged = self.ended() - self.skipped;
        (judged > 0).then(|| self.answered as f64 / judged as f64)
    }
}

/// What an app measured over a window (1 s by default); sent to the coordinator.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AppReport {
    /// Newest generation seen in a result.
    pub generation: Option<Generation>,
    /// Length of the window in milliseconds.
    pub window_ms: u64,
    /// Outcomes within the window.
    pub counts: OutcomeCounts,
    /// Latencies of the results within the window, in ms, in order of arrival; at most 256.
    pub latencies_ms: Vec<f32>,
    /// Accuracies the app measured against its own truth within the window, where it has any; at most 256.
    pub accuracies: Vec<f32>,
}
