//! The demo's world with a real video and a real detector in it: the same fleet, links and events, another query.
//!
//! Start at [`scenario`]. What the query must meet and what its operators can do stands in `configs/real`.

use std::time::Duration;

use compass_coordinator::configs::Configs;
use compass_shared::model::catalogue::{ArtifactChoice, Catalogue};
use compass_shared::spec::documents::parse_query;

use super::footage::{self, Footage};
use super::golden::{self, Golden};
use super::networks::Networks;
use super::scenario::{ArtifactFile, Course, Scenario, configs_with, slo_of};
use super::view::View;
use crate::fetch::Fetched;

/// The query as its app registers it.
const QUERY_YAML: &str = include_str!("../../../configs/real/queries/yard.yaml");

/// The coordinator's configuration files.
const CONFIG_FILES: &[(&str, &str)] = &[
    (
        "catalogue.yaml",
        include_str!("../../../configs/real/catalogue.yaml"),
    ),
    (
        "pipelines/live-video.yaml",
        include_str!("../../../configs/real/pipelines/live-video.yaml"),
    ),
];

/// Light after lights out, 1 being daylight: what is enough by day no longer is (see `configs/real/queries/yard.yaml`).
const DARK_BRIGHTNESS: f32 = 0.18;

/// The network takes ten times what the demo's own take, so the site is better equipped: a camera board that decodes quickly, a box that is a
/// server.
const SPEEDS: [(&str, f64); 3] = [("edge-1", 0.3), ("near-1", 1.0), ("metro-1", 1.0)];

/// A real picture of 320 × 240 has 14 kB: five a second fit well into the whole uplink and not at all into a twentieth of it.
const UPLINK_MBIT_S: f64 = 6.0;

/// Trials take longer than with the demo's own networks, so the phases do.
const COURSE: Course = Course {
    day: Duration::from_secs(24),
    cut: Duration::from_secs(26),
    dark: Duration::from_secs(46),
};

/// All configurations together take seconds for a picture: longer parts would take `--prove` a quarter of an hour.
const PROVED: Duration = Duration::from_secs(4);

/// The scenario of `--real`; has the largest network look at the video first if nobody has done that before.
pub(super) fn scenario(view: &mut dyn View) -> anyhow::Result<Scenario> {
    let fetched = Fetched::find()?;
    let world = world(&fetched)?;
    let (video, sha256) = fetched.video();
    let rate_hz = world.rate_hz();
    let truth = golden::truth_file(
        &Golden {
            pipeline: &world.query.pipeline,
            catalogue: &world.configs()?.catalogue,
            networks: &Networks::new(&world.artifacts)?,
            rate_hz,
        },
        fetched.folder(),
        sha256,
        || footage::read(&video, rate_hz),
        view,
    )?;
    view.done("the truth is what the largest network finds in the real video");
    Ok(Scenario {
        source: "a real video of pedestrians".to_owned(),
        footage: Some(Footage { video, truth }),
        ..world
    })
}

/// The same without the video.
pub(super) fn world(fetched: &Fetched) -> anyhow::Result<Scenario> {
    let configs = configs()?;
    let query = parse_query(
        "configs/real/queries/yard.yaml",
        QUERY_YAML,
        &configs.pipelines,
        &configs.catalogue,
    )?;
    let mut scenario = Scenario::new()?;
    for node in &mut scenario.nodes {
        if let Some((_, speed)) = SPEEDS.iter().find(|(name, _)| *name == node.name) {
            node.speed = *speed;
        }
    }
    Ok(Scenario {
        course: COURSE,
        proved: PROVED,
        uplink_mbit_s: UPLINK_MBIT_S,
        dark_brightness: DARK_BRIGHTNESS,
        slo: slo_of(&query)?,
        query,
        query_yaml: QUERY_YAML,
        config_files: CONFIG_FILES,
        artifacts: artifacts(fetched, &configs.catalogue)?,
        ..scenario
    })
}

/// The fetched networks by the catalogue's names.
pub(super) fn artifacts(
    fetched: &Fetched,
    catalogue: &Catalogue,
) -> anyhow::Result<Vec<(String, ArtifactFile)>> {
    let choices = catalogue.0.values().flat_map(|entry| &entry.artifacts);
    let file = |choice: &ArtifactChoice| {
        let digest = choice.digest.to_string();
        let path = fetched.model(&digest)?;
        let file = ArtifactFile::Installed { path, digest };
        Ok((choice.name.to_string(), file))
    };
    choices.map(file).collect()
}

/// The configuration as the coordinator will read it.
pub(super) fn configs() -> anyhow::Result<Configs> {
    configs_with(CONFIG_FILES)
}
