//! The fleet of real processes: relay, coordinator, agents; started as a person would, by tokens and joining.
//!
//! Start at [`Fleet::start`]. Every agent begins with an empty folder and its own loopback address, advertises the relay's address, and so
//! has every packet of it cross the emulated links.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use compass_shared::api::{
    ArtifactView, CreateToken, Health, NodeView, Role, TokenCreated, TokenPurpose,
};
use compass_shared::ids::NodeId;

use super::api::Api;
use super::protocol::{AppConfig, Command, FilmConfig};
use super::scenario::{ArtifactFile, CAMERA, COORDINATOR, NodeSpec, SITE, Scenario};
use super::view::View;
use crate::cluster::{Cluster, ProcessSpec, Program};
use crate::relay::topology::{uplink_down, uplink_up};
use crate::relay::{ControlClient, RelayControl};

/// Longest queue of the narrowed uplink: a router that manages its queue drops what would wait longer.
const QUEUE_MS_MAX: f64 = 500.0;

/// Longer than any demo.
const TOKEN_TTL_S: u64 = 3600;
/// An agent is there within a second or two; only met when something is broken.
const ONLINE_DEADLINE: Duration = Duration::from_secs(60);
/// How often it is looked whether they are.
const ONLINE_POLL: Duration = Duration::from_millis(100);
/// A coordinator that is asked to end says goodbye to its sessions first.
const STOP_DEADLINE: Duration = Duration::from_secs(10);

/// Folder of the coordinator's configuration files, within its own.
const CONFIGS: &str = "configs";

/// A running fleet.
pub(crate) struct Fleet {
    pub(crate) cluster: Cluster,
    pub(crate) relay: ControlClient,
    pub(crate) api: Api,
    /// Where the coordinator is dialled: at the relay.
    coordinator: SocketAddr,
    /// Where it really listens, so that it comes back there.
    listens: (SocketAddr, SocketAddr),
    authority: String,
    seed: u64,
    /// Whether the coordinator has configuration files.
    has_configs: bool,
    /// Networks on the nodes' disks from the start, by digest.
    installed: Vec<(String, PathBuf)>,
    /// Whether the coordinator, when it is started again, leaves first plans alone.
    pub(crate) keep_first_plans: bool,
}

impl Fleet {
    /// Starts everything and waits until all agents are online.
    pub(crate) fn start(
        scenario: &Scenario,
        seed: u64,
        keep_first_plans: bool,
        keep: Option<&Path>,
        view: &mut dyn View,
    ) -> anyhow::Result<Self> {
        let program = Program::this()?;
        let mut cluster = match keep {
            Some(folder) => Cluster::kept(program, folder)?,
            None => Cluster::temporary(program)?,
        };
        view.step("starting the link emulator and the coordinator");
        let relay = cluster.start_relay(&scenario.topology().relay_config(seed)?)?;
        let ip = own_address(&relay, COORDINATOR)?;
        let any_port = (
            SocketAddr::new(ip, 0),
            SocketAddr::from(([127, 0, 0, 1], 0)),
        );
        let folder = cluster.folder_of(COORDINATOR)?;
        for (name, text) in scenario.config_files {
            let path = folder.join(CONFIGS).join(name);
            if let Some(parent) = path.parent() {
                std::fs::create_dir_all(parent)?;
            }
            std::fs::write(path, text)?;
        }
        let has_configs = !scenario.config_files.is_empty();
        let spec = coordinator_spec(any_port, seed, keep_first_plans, has_configs);
        let ready = cluster.start(spec)?;
        let listens = (ready.address("quic")?, ready.address("http")?);
        relay.set_target(COORDINATOR, listens.0)?;
        let token_file = cluster
            .folder_of(COORDINATOR)?
            .join(ready.value("admin_token_file")?);
        let token = std::fs::read_to_string(&token_file)
            .with_context(|| format!("cannot read {}", token_file.display()))?;
        let api = Api::new(listens.1, token.trim());
        let health: Health = api.get("/healthz")?;
        let fleet = Self {
            coordinator: relay.advertised(COORDINATOR)?,
            cluster,
            relay,
            api,
            listens,
            authority: health.authority.to_string(),
            seed,
            has_configs,
            installed: scenario
                .artifacts
                .iter()
                .filter_map(|(_, file)| match file {
                    ArtifactFile::Installed { path, digest } => {
                        Some((digest.clone(), path.clone()))
                    }
                    ArtifactFile::BuiltIn(_) => None,
                })
                .collect(),
            keep_first_plans,
        };
        view.done("link emulator and coordinator run");
        for (name, file) in &scenario.artifacts {
            let bytes = match file {
                ArtifactFile::BuiltIn(bytes) => Cow::Borrowed(*bytes),
                ArtifactFile::Installed { path, .. } => std::fs::read(path)
                    .with_context(|| format!("cannot read {}", path.display()))?
                    .into(),
            };
            let path = format!("/v1/artifacts/{name}");
            let _view: ArtifactView = fleet.api.put_bytes(&path, &bytes)?;
        }
        let number = scenario.artifacts.len();
        view.done(&format!(
            "{number} detection networks pushed to the coordinator"
        ));
        Ok(fleet)
    }

    /// Joins every agent with a token of its own, starts them, and waits until the coordinator sees them all.
    pub(crate) fn add_nodes(
        &mut self,
        nodes: &[NodeSpec],
        view: &mut dyn View,
    ) -> anyhow::Result<()> {
        view.step(&format!("{} agents join with a token each", nodes.len()));
        self.join_all(nodes)?;
        for node in nodes {
            self.install(node)?;
            self.cluster.spawn(self.agent_spec(node)?)?;
        }
        for node in nodes {
            let ready = self.cluster.ready(node.name)?;
            self.relay
                .set_target(node.name, ready.address("address")?)?;
        }
        let names: Vec<&str> = nodes.iter().map(|node| node.name).collect();
        view.done(&format!("agents joined and started: {}", names.join(", ")));
        view.step("waiting until the coordinator sees every agent");
        self.await_online(&names)?;
        view.done("every agent is connected");
        Ok(())
    }

    /// All at once: each takes its first readings for some seconds.
    fn join_all(&self, nodes: &[NodeSpec]) -> anyhow::Result<()> {
        let joins: Vec<ProcessSpec> = nodes
            .iter()
            .map(|node| self.join_spec(node))
            .collect::<anyhow::Result<_>>()?;
        let runner = self.cluster.runner();
        let runner = &runner;
        std::thread::scope(|scope| {
            let running: Vec<_> = joins
                .iter()
                .map(|spec| scope.spawn(move || runner.run(spec)))
                .collect();
            for (node, join) in nodes.iter().zip(running) {
                let finished = join
                    .join()
                    .map_err(|_| anyhow::anyhow!("waiting for {} panicked", node.name))??;
                ensure!(
                    finished.status.success(),
                    "{} could not join: {}{}",
                    node.name,
                    finished.stdout,
                    finished.stderr
                );
            }
            Ok(())
        })
    }

    /// Puts the large networks where the agent keeps what it has fetched. A link does: the agent reads it, and at most removes it.
    fn install(&self, node: &NodeSpec) -> anyhow::Result<()> {
        let folder = Path::new(&self.data_of(node.name)?).join("artifacts");
        for (digest, path) in &self.installed {
            std::fs::create_dir_all(&folder)?;
            std::os::unix::fs::symlink(path, folder.join(digest))
                .with_context(|| format!("cannot install {}", path.display()))?;
        }
        Ok(())
    }

    fn join_spec(&self, node: &NodeSpec) -> anyhow::Result<ProcessSpec> {
        let id = NodeId::new(node.name)?;
        let token = self.token(TokenPurpose::Join(id), Some(1))?;
        let file = self.cluster.folder_of(node.name)?.join("join.token");
        std::fs::write(&file, token)?;
        let ip = own_address(&self.relay, node.name)?;
        let arguments = [
            "join".to_owned(),
            self.coordinator.to_string(),
            "--token-file".to_owned(),
            file.display().to_string(),
            "--data".to_owned(),
            self.data_of(node.name)?,
            "--listen".to_owned(),
            SocketAddr::new(ip, 0).to_string(),
            format!("--clock-offset-s={}", node.clock_offset_s),
        ];
        Ok(ProcessSpec::role(
            &format!("{} join", node.name),
            "agent",
            arguments,
        ))
    }

    fn agent_spec(&self, node: &NodeSpec) -> anyhow::Result<ProcessSpec> {
        let ip = own_address(&self.relay, node.name)?;
        let arguments = [
            ("--data", self.data_of(node.name)?),
            ("--listen", SocketAddr::new(ip, 0).to_string()),
            ("--advertise", self.relay.advertised(node.name)?.to_string()),
            ("--tier", node.tier.to_owned()),
            ("--site", node.site.to_owned()),
            ("--emulate-speed", node.speed.to_string()),
            ("--cpu", node.cpu.to_owned()),
            ("--memory", node.memory.to_owned()),
        ];
        let mut all = vec!["run".to_owned()];
        for (option, value) in arguments {
            all.extend([option.to_owned(), value]);
        }
        all.push(format!("--clock-offset-s={}", node.clock_offset_s));
        Ok(ProcessSpec::role(node.name, "agent", all))
    }

    fn data_of(&self, name: &str) -> anyhow::Result<String> {
        let folder = self.cluster.folder_of(name)?.join("data");
        Ok(folder.display().to_string())
    }

    pub(crate) fn await_online(&self, names: &[&str]) -> anyhow::Result<()> {
        let give_up = Instant::now() + ONLINE_DEADLINE;
        loop {
            let nodes: Vec<NodeView> = self.api.get("/v1/nodes")?;
            let is_online = |name: &str| {
                nodes
                    .iter()
                    .any(|node| node.id.as_str() == name && node.online)
            };
            let missing: Vec<&str> = names
                .iter()
                .copied()
                .filter(|name| !is_online(name))
                .collect();
            if missing.is_empty() {
                return Ok(());
            }
            if Instant::now() > give_up {
                bail!(
                    "not online within {ONLINE_DEADLINE:?}: {}",
                    missing.join(", ")
                );
            }
            std::thread::sleep(ONLINE_POLL);
        }
    }

    fn token(&self, purpose: TokenPurpose, uses: Option<u32>) -> anyhow::Result<String> {
        let request = CreateToken {
            purpose,
            ttl_s: TOKEN_TTL_S,
            uses,
        };
        let created: TokenCreated = self.api.post("/v1/tokens", &request)?;
        Ok(created.token)
    }

    /// Starts an app process; it renders its film and then waits to be told to register. Its lines go to `lines`.
    pub(crate) fn start_app(
        &mut self,
        name: &str,
        query_yaml: &str,
        film: FilmConfig,
        rate_hz: f64,
        lines: std::sync::mpsc::Sender<String>,
    ) -> anyhow::Result<()> {
        let folder = self.cluster.folder_of(name)?;
        let token_file = folder.join("app.token");
        std::fs::write(&token_file, self.token(TokenPurpose::Api(Role::App), None)?)?;
        let query_file = folder.join("query.yaml");
        std::fs::write(&query_file, query_yaml)?;
        let config = AppConfig {
            coordinator: self.coordinator,
            local: SocketAddr::new(own_address(&self.relay, CAMERA)?, 0),
            authority: self.authority.clone(),
            token_file,
            query_file,
            film,
            rate_hz,
        };
        let file = folder.join("app.json");
        std::fs::write(&file, serde_json::to_vec_pretty(&config)?)?;
        let arguments = ["--config".to_owned(), file.display().to_string()];
        let spec = ProcessSpec::role(name, "app", arguments);
        self.cluster.spawn(spec.commanded().lines_to(lines))
    }

    /// Tells an app what to do.
    pub(crate) fn command(&mut self, app: &str, command: Command) -> anyhow::Result<()> {
        self.cluster.tell(app, &serde_json::to_string(&command)?)
    }

    /// Leaves this part of the rate of the site's uplink, both ways. The router before it has the memory it had, so
    /// that what waits there waits longer, but never for more than [`QUEUE_MS_MAX`].
    pub(crate) fn scale_uplink(&self, part: f64) -> anyhow::Result<()> {
        for pipe in [uplink_up(SITE), uplink_down(SITE)] {
            let mut shape = self.relay.pipe(&pipe)?;
            shape.rate_bps = shape.rate_bps.map(|rate| (rate as f64 * part) as u64);
            shape.queue_ms = (shape.queue_ms / part).min(QUEUE_MS_MAX);
            self.relay.set_pipe(&pipe, shape)?;
        }
        Ok(())
    }

    /// Ends the coordinator as a crash would.
    pub(crate) fn kill_coordinator(&self) -> anyhow::Result<()> {
        self.cluster.kill(COORDINATOR)
    }

    /// Starts the coordinator again on its store and its addresses.
    pub(crate) fn restart_coordinator(&mut self) -> anyhow::Result<()> {
        // An end by itself is better than a kill, but either will do.
        let _status = self.cluster.stop(COORDINATOR, STOP_DEADLINE)?;
        let spec = coordinator_spec(
            self.listens,
            self.seed,
            self.keep_first_plans,
            self.has_configs,
        );
        self.cluster.respawn_as(COORDINATOR, spec)?;
        self.cluster.ready(COORDINATOR)?;
        Ok(())
    }
}

fn coordinator_spec(
    (quic, http): (SocketAddr, SocketAddr),
    seed: u64,
    keep_first_plans: bool,
    has_configs: bool,
) -> ProcessSpec {
    let mut arguments = vec![
        "--listen".to_owned(),
        quic.to_string(),
        "--http".to_owned(),
        http.to_string(),
        "--data-dir".to_owned(),
        "data".to_owned(),
        "--seed".to_owned(),
        seed.to_string(),
    ];
    if has_configs {
        arguments.extend(["--configs".to_owned(), CONFIGS.to_owned()]);
    }
    if keep_first_plans {
        arguments.push("--static".to_owned());
    }
    ProcessSpec::role(COORDINATOR, "coordinator", arguments)
}

/// The loopback address that a machine sends from.
fn own_address(relay: &ControlClient, machine: &str) -> anyhow::Result<IpAddr> {
    let description = relay.describe()?;
    let node = description.nodes.iter().find(|node| node.name == machine);
    let node = node.with_context(|| format!("the link emulator does not know {machine}"))?;
    Ok(IpAddr::V4(node.address))
}
