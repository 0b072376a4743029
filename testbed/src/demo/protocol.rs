//! What the demo and its app process say to each other: JSON, one message a line, on the app's standard streams.

use compass_shared::model::outcome::{Outcome, OutcomeCounts};
use serde::{Deserialize, Serialize};

use std::net::SocketAddr;
use std::path::PathBuf;

use super::footage::Footage;

/// How to start the app process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct AppConfig {
    /// The coordinator's address as the app reaches it.
    pub(crate) coordinator: SocketAddr,
    /// The address the app sends from.
    pub(crate) local: SocketAddr,
    /// Fingerprint of the fleet's authority.
    pub(crate) authority: String,
    /// File with a bearer token of role app.
    pub(crate) token_file: PathBuf,
    /// File with the query.
    pub(crate) query_file: PathBuf,
    /// What to show.
    pub(crate) film: FilmConfig,
    /// Frames per second.
    pub(crate) rate_hz: f64,
}

/// What the camera sees.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct FilmConfig {
    /// Scenes of this seed.
    pub(crate) seed: u64,
    /// Seconds of film in daylight; repeated when the story lasts longer.
    pub(crate) day_s: f64,
    /// Seconds of film in the dark.
    pub(crate) dark_s: f64,
    /// Light in the dark, 1 being daylight.
    pub(crate) dark_brightness: f32,
    /// A real video to show instead of scenes.
    pub(crate) footage: Option<Footage>,
}

/// The demo tells the app.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Command {
    /// Register the query and begin to capture.
    Register,
    /// From the next frame on it is dark.
    LightsOut,
    /// Stop capturing, wait for the frames under way, say goodbye and end.
    Finish,
}

/// The app tells the demo. Times are milliseconds on the app's monotonic clock since it began to capture.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "say")]
pub(crate) enum Said {
    /// The film is rendered; how many frames.
    Rendered {
        /// Frames.
        frames: usize,
        /// Bytes of JPEG.
        bytes: usize,
    },
    /// The query is registered and frames flow.
    Registered {
        /// Milliseconds since the Unix epoch at which the app's clock was zero, for reading logs side by side on this host only.
        zero_unix_ms: f64,
    },
    /// A plan came into force.
    Plan {
        /// When the app heard of it.
        at_ms: f64,
        /// Its generation.
        generation: u64,
        /// Its trigger in words.
        trigger: String,
        /// One line.
        summary: String,
    },
    /// A frame that counts has ended and, where possible, been scored.
    Frame {
        /// Its number.
        frame: u64,
        /// When it was captured.
        at_ms: f64,
        /// From capture to result.
        latency_ms: Option<f64>,
        /// How it ended.
        outcome: Outcome,
        /// Of the plan that answered it.
        generation: Option<u64>,
        /// See [`super::record::Point::accuracy`].
        accuracy: Option<f64>,
    },
    /// The light went out with the frame captured now.
    Dark {
        /// When.
        at_ms: f64,
    },
    /// No plan meets the SLOs.
    Infeasible {
        /// In words.
        report: String,
    },
    /// A connection was lost or is back.
    Connection {
        /// When.
        at_ms: f64,
        /// In words.
        what: String,
    },
    /// The last message.
    Goodbye {
        /// All frames since the first plan.
        counts: OutcomeCounts,
        /// 99th percentile of how late a frame was captured, in ms.
        timer_lateness_p99_ms: f64,
    },
    /// The app cannot go on.
    Failed {
        /// Why.
        reason: String,
    },
}
