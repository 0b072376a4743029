//! The coordinator's settings: a strict TOML file, overridden by the command line. Every value has a default, so that it starts with nothing.
//!
//! Durations carry their unit (`"1s"`); an unknown key is an error with its line.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use compass_shared::spec::SpecError;
use compass_shared::spec::quantity::WrittenDuration;
use serde::Deserialize;

/// Where settings lie when no file is named.
pub const DEFAULT_FILE: &str = "/etc/compass/coordinator.toml";
/// Where data lies when no folder is named.
pub const DEFAULT_DATA_DIR: &str = "/var/lib/compass/coordinator";

/// Agents report this often when nothing else is said: fresh enough for a picture, rare enough for a thin uplink.
const REPORT_EVERY: Duration = Duration::from_secs(1);

/// The file.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Written {
    listen: Option<SocketAddr>,
    http: Option<SocketAddr>,
    data_dir: Option<PathBuf>,
    configs_dir: Option<PathBuf>,
    seed: Option<u64>,
    report_every: Option<WrittenDuration>,
    replan: Option<bool>,
    limits: WrittenLimits,
    planning: Option<compass_planning::Settings>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct WrittenLimits {
    nodes: Option<usize>,
    queries: Option<usize>,
    artifact_bytes: Option<u64>,
    artifact_store_bytes: Option<u64>,
    http_connections: Option<usize>,
}

/// All of it, with nothing left open.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where agents and apps connect (QUIC, UDP).
    pub listen: SocketAddr,
    /// Where the API listens (TCP). Loopback unless an administrator says otherwise: it has no TLS of its own.
    pub http: SocketAddr,
    /// The store, the authority, artifacts and the administrator's token.
    pub data_dir: PathBuf,
    /// Catalogue, pipelines and prices; none: the built-in ones.
    pub configs_dir: Option<PathBuf>,
    /// The root of every random choice.
    pub seed: u64,
    /// Agents report this often.
    pub report_every: Duration,
    /// Whether plans follow what happens; without it each query keeps its first one, for comparison.
    pub replan: bool,
    /// Bounds.
    pub limits: Limits,
    /// Of the planner.
    pub planning: compass_planning::Settings,
}

/// Bounds, so that nobody can fill memory or disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Nodes with a session at once.
    pub nodes: usize,
    /// Queries registered at once.
    pub queries: usize,
    /// Size of one artifact.
    pub artifact_bytes: u64,
    /// Size of all artifacts.
    pub artifact_store_bytes: u64,
    /// Connections to the API at once.
    pub http_connections: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            nodes: 2_000,
            queries: 1_000,
            // The largest models of the intended operators are some gigabytes.
            artifact_bytes: 16 << 30,
            artifact_store_bytes: 256 << 30,
            http_connections: 256,
        }
    }
}

/// What the command line says; it wins over the file.
#[derive(Debug, Clone, Default)]
pub struct Overrides {
    /// See [`Settings::listen`].
    pub listen: Option<SocketAddr>,
    /// See [`Settings::http`].
    pub http: Option<SocketAddr>,
    /// See [`Settings::data_dir`].
    pub data_dir: Option<PathBuf>,
    /// See [`Settings::configs_dir`].
    pub configs_dir: Option<PathBuf>,
    /// See [`Settings::seed`].
    pub seed: Option<u64>,
    /// See [`Settings::replan`].
    pub replan: Option<bool>,
}

/// Settings that cannot work.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file is wrong.
    #[error("{0}")]
    File(#[from] SpecError),
    /// Two values contradict each other.
    #[error("{0}")]
    Contradiction(String),
}

impl Settings {
    /// Reads the named file, or the default one if it exists, and applies the command line.
    ///
    /// # Errors
    /// When the file is missing although named, wrong, or contradicts itself.
    pub fn load(file: Option<&Path>, overrides: Overrides) -> Result<Self, SettingsError> {
        let default = Path::new(DEFAULT_FILE);
        let written = match file {
            Some(path) => compass_shared::settings::load(path)?,
            None if default.exists() => compass_shared::settings::load(default)?,
            None => Written::default(),
        };
        Self::resolve(written, overrides)
    }

    /// Settings from a text, for tests and checks; `source` appears in errors.
    ///
    /// # Errors
    /// As [`Settings::load`].
    pub fn parse(source: &str, text: &str, overrides: Overrides) -> Result<Self, SettingsError> {
        Self::resolve(compass_shared::settings::parse(source, text)?, overrides)
    }

    fn resolve(written: Written, overrides: Overrides) -> Result<Self, SettingsError> {
        let planning = written.planning.unwrap_or_default();
        let report_every = written
            .report_every
            .map_or(REPORT_EVERY, |duration| duration.0);
        if report_every.is_zero() || planning.detect.silence < report_every.mul_f64(1.5) {
            return Err(SettingsError::Contradiction(format!(
                "planning.detect.silence ({:?}) must be at least one and a half times report_every ({report_every:?}): else one late report loses a node",
                planning.detect.silence
            )));
        }
        let bounds = Limits::default();
        let limits = Limits {
            nodes: written.limits.nodes.unwrap_or(bounds.nodes),
            queries: written.limits.queries.unwrap_or(bounds.queries),
            artifact_bytes: written
                .limits
                .artifact_bytes
                .unwrap_or(bounds.artifact_bytes),
            artifact_store_bytes: written
                .limits
                .artifact_store_bytes
                .unwrap_or(bounds.artifact_store_bytes),
            http_connections: written
                .limits
                .http_connections
                .unwrap_or(bounds.http_connections)
                .max(1),
        };
        let loopback = |port| SocketAddr::from(([127, 0, 0, 1], port));
        Ok(Self {
            listen: overrides
                .listen
                .or(written.listen)
                .unwrap_or(loopback(7443)),
            http: overrides.http.or(written.http).unwrap_or(loopback(7480)),
            data_dir: overrides
                .data_dir
                .or(written.data_dir)
                .unwrap_or_else(|| PathBuf::from(DEFAULT_DATA_DIR)),
            configs_dir: overrides.configs_dir.or(written.configs_dir),
            seed: overrides.seed.or(written.seed).unwrap_or(0),
            report_every,
            replan: overrides.replan.or(written.replan).unwrap_or(true),
            limits,
            planning,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Settings, SettingsError> {
        Settings::parse("coordinator.toml", text, Overrides::default())
    }

    #[test]
    fn it_starts_with_nothing_and_listens_on_loopback_only() {
        let settings = parse("").unwrap();
        assert!(settings.listen.ip().is_loopback() && settings.http.ip().is_loopback());
    }

    #[test]
    fn field_098_a_mistyped_key_is_an_error_with_its_line() {
        let error = parse("http = \"127.0.0.1:0\"\nreport-every = \"1s\"\n")
            .unwrap_err()
            .to_string();
        assert!(error.contains("coordinator.toml:2"), "{error}");
        assert!(error.contains("report_every"), "{error}");
    }

    #[test]
    fn contradicting_times_are_refused_with_both_numbers() {
        let error = parse("report_every = \"2s\"\n").unwrap_err().to_string();
        assert!(error.contains("2s") && error.contains("2.3s"), "{error}");
        assert!(parse("report_every = \"2\"\n").is_err(), "a unit is needed");
    }

    #[test]
    fn the_command_line_wins() {
        let overrides = Overrides {
            data_dir: Some("/b".into()),
            ..Overrides::default()
        };
        let settings = Settings::parse("x", "data_dir = \"/a\"\nseed = 7\n", overrides).unwrap();
        assert_eq!(settings.data_dir, PathBuf::from("/b"));
        assert_eq!(settings.seed, 7);
    }
}
