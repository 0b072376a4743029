//! The world of the demo and the course of its story: every figure with its reason, none of them tied to a seed.
//!
//! Start at [`Scenario`]. What the query must meet stands in `configs/queries/plant-camera.yaml`, what things cost in
//! `configs/prices.yaml`, what operators can do in `configs/catalogue.yaml`: the files that a user would write.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use compass_coordinator::configs::Configs;
use compass_shared::model::query::{CostSlo, Query};
use compass_shared::spec::documents::parse_query;

use super::footage::Footage;
use super::record::SloRecord;
use crate::relay::topology::LinkSpec;
use crate::relay::{PathShape, Topology};

/// The query as its app registers it.
const QUERY_YAML: &str = include_str!("../../../configs/queries/plant-camera.yaml");

/// The site whose uplink is cut.
pub(crate) const SITE: &str = "plant";
/// The emulated machine of the app.
pub(crate) const CAMERA: &str = "camera";
/// The emulated machine of the coordinator.
pub(crate) const COORDINATOR: &str = "coordinator";

/// A node of the fleet.
#[derive(Debug, Clone)]
pub(crate) struct NodeSpec {
    pub(crate) name: &'static str,
    pub(crate) tier: &'static str,
    pub(crate) site: &'static str,
    /// Speed of its core relative to this host's.
    pub(crate) speed: f64,
    /// Cores and memory that may be granted.
    pub(crate) cpu: &'static str,
    pub(crate) memory: &'static str,
    /// How wrong its wall clock is, in seconds.
    pub(crate) clock_offset_s: i64,
}

/// Lengths of the phases.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Course {
    /// From the first answer to the cut.
    pub(crate) day: Duration,
    /// From the cut to the dark.
    pub(crate) cut: Duration,
    /// From the dark to the end.
    pub(crate) dark: Duration,
}

/// Everything the story is told with.
#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub(crate) nodes: Vec<NodeSpec>,
    /// Rate of the plant's uplink in Mbit/s, before it is cut.
    pub(crate) uplink_mbit_s: f64,
    /// What the cut leaves of it.
    pub(crate) uplink_cut: f64,
    /// Part of packets lost on every path, 0 to 1.
    pub(crate) loss: f64,
    /// Light after lights out, 1 being daylight.
    pub(crate) dark_brightness: f32,
    pub(crate) course: Course,
    /// How much of each phase's end `--prove` looks at; at most [`MEASURED`].
    pub(crate) proved: Duration,
    pub(crate) query: Query,
    pub(crate) slo: SloRecord,
    /// The query as its app registers it.
    pub(crate) query_yaml: &'static str,
    /// What the camera sees, in words.
    pub(crate) source: String,
    /// A real video instead of scenes.
    pub(crate) footage: Option<Footage>,
    /// Files that must stay until the end.
    pub(crate) kept: Option<Arc<tempfile::TempDir>>,
    /// The coordinator's configuration files, by path; what is not among them is built in.
    pub(crate) config_files: &'static [(&'static str, &'static str)],
    /// The networks, by the names of the catalogue.
    pub(crate) artifacts: Vec<(String, ArtifactFile)>,
}

/// A network to be pushed to the coordinator.
#[derive(Debug, Clone)]
pub(crate) enum ArtifactFile {
    /// One of the demo's own; agents fetch it when they need it.
    BuiltIn(&'static [u8]),
    /// One so large that it is on the nodes' disks before, as an installer would put it.
    Installed {
        /// Where it is on this host.
        path: PathBuf,
        /// Its SHA-256.
        digest: String,
    },
}

/// The demo's own networks.
const NETWORKS: [(&str, &[u8]); 3] = [
    (
        "detector-small",
        include_bytes!("../../models/small.onnx").as_slice(),
    ),
    (
        "detector-medium",
        include_bytes!("../../models/medium.onnx").as_slice(),
    ),
    (
        "detector-large",
        include_bytes!("../../models/large.onnx").as_slice(),
    ),
];

/// The figures of a phase are those of its end, so that a re-plan may take its time.
pub(crate) const MEASURED: Duration = Duration::from_secs(10);

impl Scenario {
    /// The demo's world. Clocks are wrong by hours from the start: nothing may depend on them.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let configs = Configs::load(None).context("the built-in configuration")?;
        let query = parse_query(
            "configs/queries/plant-camera.yaml",
            QUERY_YAML,
            &configs.pipelines,
            &configs.catalogue,
        )?;
        let slo = slo_of(&query)?;
        let node = |name, tier, site, speed, clock_offset_s| NodeSpec {
            name,
            tier,
            site,
            speed,
            cpu: "1 core",
            memory: "2 GiB",
            clock_offset_s,
        };
        Ok(Self {
            nodes: vec![
                // Speeds as between a small camera board, an industrial PC, a shared server and a host of one's own.
                node("edge-1", "edge", SITE, 0.15, -7_200),
                node("near-1", "near-edge", SITE, 0.4, 10_800),
                node("metro-1", "near-cloud", "metro", 0.7, 0),
                node("cloud-1", "cloud", "cloud", 1.0, 3_600),
            ],
            // A plant's share of a mobile uplink: enough for pictures made small, with a twentieth of it for none.
            uplink_mbit_s: 4.0,
            uplink_cut: 0.05,
            loss: 0.0,
            // Dark enough that compression hides objects, light enough that large pictures still show them (see the model card).
            dark_brightness: 0.05,
            course: Course {
                day: Duration::from_secs(22),
                cut: Duration::from_secs(24),
                dark: Duration::from_secs(26),
            },
            proved: MEASURED,
            query,
            slo,
            query_yaml: QUERY_YAML,
            source: "rendered scenes".to_owned(),
            footage: None,
            kept: None,
            config_files: &[],
            artifacts: NETWORKS
                .into_iter()
                .map(|(name, bytes)| (name.to_owned(), ArtifactFile::BuiltIn(bytes)))
                .collect(),
        })
    }

    /// The configuration as the coordinator reads it.
    pub(crate) fn configs(&self) -> anyhow::Result<Configs> {
        configs_with(self.config_files)
    }

    /// Frames per second of the camera.
    pub(crate) fn rate_hz(&self) -> f64 {
        self.query.rate_hz()
    }

    /// Sites, nodes and links. Delays are one way: a radio access, a metropolitan network, a long haul.
    pub(crate) fn topology(&self) -> Topology {
        let lossy = |link: LinkSpec| LinkSpec {
            shape: PathShape {
                // Each path crosses two access links.
                loss: 1.0 - (1.0 - self.loss).sqrt(),
                ..link.shape
            },
            ..link
        };
        let mut topology = Topology::new()
            .site(SITE, LinkSpec::mbit_s(self.uplink_mbit_s, 40.0, 8.0))
            .site("metro", LinkSpec::mbit_s(200.0, 200.0, 1.0))
            .site("cloud", LinkSpec::mbit_s(500.0, 500.0, 8.0));
        for node in &self.nodes {
            topology = topology.node(node.name, node.site, lossy(access()));
        }
        topology
            .node(CAMERA, SITE, lossy(access()))
            .node(COORDINATOR, "cloud", lossy(access()))
    }
}

/// A wired link within a site.
fn access() -> LinkSpec {
    LinkSpec::mbit_s(100.0, 100.0, 0.3)
}

/// The built-in configuration with these files in the place of its own.
pub(super) fn configs_with(files: &[(&str, &str)]) -> anyhow::Result<Configs> {
    let folder = tempfile::tempdir()?;
    for (name, text) in files {
        let path = folder.path().join(name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        std::fs::write(path, text)?;
    }
    Configs::load(Some(folder.path())).context("the built-in configuration")
}

pub(super) fn slo_of(query: &Query) -> anyhow::Result<SloRecord> {
    let latency = query.slo.latency.context("the query has a latency SLO")?;
    let Some(CostSlo::PerHour(cost_max_usd_per_h)) = query.slo.cost_max else {
        anyhow::bail!("the query has a cost SLO per hour");
    };
    Ok(SloRecord {
        latency_percentile: latency.percentile,
        latency_ms: latency.bound.as_secs_f64() * 1e3,
        accuracy_min: query
            .slo
            .accuracy_min
            .context("the query has an accuracy SLO")?,
        cost_max_usd_per_h,
    })
}
