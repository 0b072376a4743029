//! When measured behaviour calls for a new plan: every threshold by name, and the small watchers the monitor is made of.
//!
//! Start at [`DetectSettings`]. [`Liveness`] tells lost nodes from slow ones, [`LinkWatch`] keeps a link's capacity apart from the rate
//! somebody happened to use, [`SloWatch`] holds what an app measures against its SLOs, [`LoadWatch`] tells no traffic from no
//! telemetry. Each is fed facts with their moment and gives at most one verdict per fact.
//!
//! Deliberately absent: what to do about it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

mod link;
mod liveness;
mod load;
mod slo;

pub use link::{LinkVerdict, LinkWatch};
pub use liveness::{Liveness, LivenessVerdict};
pub use load::{LoadVerdict, LoadWatch};
pub use slo::SloWatch;

#[cfg(test)]
mod tests;

/// Thresholds of detection.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DetectSettings {
    /// A node of which nothing was heard for this long is lost.
    pub silence: Duration,
    /// The same when a neighbour confirms that it does not answer either, or its session has ended. More than the second between two
    /// reports: behind a narrow link a neighbour is unreachable for others and well for us.
    pub silence_confirmed: Duration,
    /// The same when neighbours still receive data from it: it works, only its way to the coordinator does not.
    pub silence_seen_by_peers: Duration,
    /// A link has degraded when its capacity falls below this part of what was planned with.
    pub link_degraded_ratio: f64,
    /// A link has recovered when its capacity rises above this multiple of what was planned with since it degraded.
    pub link_recovered_ratio: f64,
    /// A smaller change of a link than this part is no news.
    pub link_news_ratio: f64,
    /// A round trip longer than this multiple of what was planned with, and by more than 20 ms, is a degraded link.
    pub rtt_degraded_ratio: f64,
    /// Windows in a row that must break an SLO.
    pub slo_windows: u32,
    /// Answers a window needs to be judged.
    pub slo_answers_min: u32,
    /// An SLO counts as met again only this far inside its bound.
    pub slo_clear_part: f64,
    /// After a switch nothing is judged for this long: frames of both plans are under way.
    pub settle_after_switch: Duration,
    /// A broken SLO is raised again after this long if it stays broken.
    pub slo_again_after: Duration,
    /// Load outside of planned ÷ this … planned × this has shifted. A third: sampling noise of a window stays well inside.
    pub load_ratio: f64,
    /// Windows in a row outside of it.
    pub load_windows: u32,
    /// An operator that gets less than this part of its share while it has work does not achieve it.
    pub share_ratio: f64,
    /// Reports in a row in which it does not.
    pub share_windows: u32,
    /// One report of the same drift from several places counts once within this time.
    pub drift_once_within: Duration,
    /// A report may be this late before the load counts as unknown.
    pub telemetry_silence: Duration,
}

impl Default for DetectSettings {
    fn default() -> Self {
        Self {
            silence: Duration::from_millis(2300),
            silence_confirmed: Duration::from_millis(1900),
            silence_seen_by_peers: Duration::from_secs(15),
            link_degraded_ratio: 0.6,
            link_recovered_ratio: 1.5,
            link_news_ratio: 0.15,
            rtt_degraded_ratio: 2.0,
            slo_windows: 3,
            slo_answers_min: 2,
            slo_clear_part: 0.05,
            settle_after_switch: Duration::from_secs(3),
            slo_again_after: Duration::from_secs(15),
            load_ratio: 1.33,
            load_windows: 5,
            share_ratio: 0.7,
            share_windows: 3,
            drift_once_within: Duration::from_secs(8),
            telemetry_silence: Duration::from_secs(5),
        }
    }
}
