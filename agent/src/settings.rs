//! The agent's settings: `agent.toml`, overridden by options.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::Args;
use compass_shared::ids::SiteId;
use compass_shared::model::cluster::Tier;
use compass_shared::spec::documents::{CapacitySpec, TierName};
use compass_shared::spec::quantity::{WrittenCpu, WrittenMemory};
use serde::Deserialize;

/// Where daemons keep their data unless told otherwise.
const DATA_DEFAULT: &str = "/var/lib/compass/agent";
/// Where daemons look for settings.
const FILE_DEFAULT: &str = "/etc/compass/agent.toml";
/// The agent's port unless told otherwise.
const LISTEN_DEFAULT: &str = "0.0.0.0:7444";

/// `agent.toml`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct SettingsFile {
    data: Option<PathBuf>,
    listen: Option<SocketAddr>,
    #[serde(default)]
    advertise: Vec<SocketAddr>,
    tier: Option<TierName>,
    site: Option<SiteId>,
    capacity: Option<CapacitySpec>,
    emulate_speed: Option<f64>,
    artifacts_mib: Option<u64>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    nvml_library: Option<PathBuf>,
}

/// Options of `run` (and of `join` and `check` where they matter there); each overrides the settings file.
#[derive(Debug, Clone, Default, Args)]
pub struct Options {
    /// Settings (TOML); /etc/compass/agent.toml when that exists
    #[arg(long)]
    settings: Option<PathBuf>,
    /// Folder for identity, target and artifacts
    #[arg(long)]
    data: Option<PathBuf>,
    /// UDP address to listen on and to send from
    #[arg(long)]
    listen: Option<SocketAddr>,
    /// Address at which other nodes reach this one; repeat it for several
    #[arg(long)]
    advertise: Vec<SocketAddr>,
    /// edge, near-edge, near-cloud or cloud
    #[arg(long)]
    tier: Option<TierName>,
    /// The site: nodes that share an uplink
    #[arg(long)]
    site: Option<SiteId>,
    /// CPU that may be granted to operators, e.g. "4 cores"; all of the host's when absent
    #[arg(long)]
    cpu: Option<WrittenCpu>,
    /// Memory that may be granted to operators, e.g. "2 GiB"; three quarters of the host's when absent
    #[arg(long)]
    memory: Option<WrittenMemory>,
    /// Pretend to be a device whose core has this speed relative to the host's (0.01 to 1)
    #[arg(long)]
    emulate_speed: Option<f64>,
    /// Set the wall clock wrong by this many seconds (for tests)
    #[arg(long, allow_hyphen_values = true, default_value_t = 0, hide = true)]
    clock_offset_s: i64,
}

/// What the agent runs with.
#[derive(Debug, Clone)]
pub struct AgentSettings {
    /// Folder for identity, target and artifacts.
    pub data: PathBuf,
    /// Address of its one UDP socket.
    pub listen: SocketAddr,
    /// Where others reach it; what it listens on when empty.
    pub advertise: Vec<SocketAddr>,
    /// Its tier.
    pub tier: Tier,
    /// Its site.
    pub site: SiteId,
    /// CPU that may be granted.
    pub cpu: Option<WrittenCpu>,
    /// Memory that may be granted.
    pub memory: Option<WrittenMemory>,
    /// Speed of an emulated device.
    pub emulate_speed: Option<f64>,
    /// Size of the artifact cache in bytes.
    pub artifacts_bytes: u64,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Path of NVIDIA's management library where it is not in the usual places.
    pub nvml_library: Option<PathBuf>,
    /// How wrong the wall clock is read, in seconds.
    pub clock_offset_s: i64,
}

/// Why the settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file has a mistake.
    #[error(transparent)]
    File(#[from] compass_shared::spec::SpecError),
    /// The current folder cannot be told.
    #[error("the data folder cannot be located: {0}")]
    Folder(#[from] std::io::Error),
    /// The speed makes no sense.
    #[error("an emulated speed lies between 0.01 and 1, not {0}")]
    Speed(f64),
}

impl Options {
    /// The data folder alone, for commands that need nothing else.
    pub fn data(&self) -> Result<PathBuf, SettingsError> {
        Ok(self.clone().resolve()?.data)
    }

    /// Merges options, settings file and defaults.
    ///
    /// # Errors
    /// See [`SettingsError`].
    pub fn resolve(self) -> Result<AgentSettings, SettingsError> {
        let file: SettingsFile = match &self.settings {
            Some(path) => compass_shared::settings::load(path)?,
            None if Path::new(FILE_DEFAULT).exists() => {
                compass_shared::settings::load(Path::new(FILE_DEFAULT))?
            }
            None => SettingsFile::default(),
        };
        let emulate_speed = self.emulate_speed.or(file.emulate_speed);
        if let Some(speed) = emulate_speed.filter(|speed| !(0.01..=1.0).contains(speed)) {
            return Err(SettingsError::Speed(speed));
        }
        let listen = self
            .listen
            .or(file.listen)
            .unwrap_or_else(|| LISTEN_DEFAULT.parse().expect("a constant address"));
        Ok(AgentSettings {
            // Absolute: workers have working directories of their own.
            data: std::path::absolute(
                self.data
                    .or(file.data)
                    .unwrap_or_else(|| PathBuf::from(DATA_DEFAULT)),
            )?,
            listen,
            advertise: if self.advertise.is_empty() {
                file.advertise
            } else {
                self.advertise
            },
            tier: self.tier.or(file.tier).map_or(Tier::Edge, Tier::from),
            site: self
                .site
                .or(file.site)
                .unwrap_or_else(|| SiteId::new("default").expect("a constant name")),
            cpu: self.cpu.or(file.capacity.map(|c| c.cpu)),
            memory: self.memory.or(file.capacity.map(|c| c.memory)),
            emulate_speed,
            artifacts_bytes: file.artifacts_mib.unwrap_or(4096) << 20,
            labels: file.labels,
            nvml_library: file.nvml_library,
            clock_offset_s: self.clock_offset_s,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_override_the_file_and_mistakes_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.toml");
        std::fs::write(
            &path,
            "tier = \"cloud\"\nsite = \"no\"\ncapacity = {cpu = \"2 cores\", memory = \"1 GiB\"}\n",
        )
        .unwrap();
        let options = Options {
            settings: Some(path.clone()),
            tier: Some(TierName::NearEdge),
            ..Options::default()
        };
        let settings = options.resolve().unwrap();
        assert_eq!(settings.tier, Tier::NearEdge);
        assert_eq!(settings.site.as_str(), "no");
        assert_eq!(settings.memory.unwrap().0, 1024);

        std::fs::write(&path, "teir = \"cloud\"\n").unwrap();
        let error = Options {
            settings: Some(path),
            ..Options::default()
        }
        .resolve()
        .unwrap_err()
        .to_string();
        assert!(error.contains("did you mean \"tier\""), "{error}");
        assert!(
            Options {
                emulate_speed: Some(3.0),
                ..Options::default()
            }
            .resolve()
            .is_err()
        );
    }
}
