//! What a relay is started with: nodes, pipes, paths; written by hand as TOML or built in code ([`super::Topology`]).

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};

use super::shape::{PathShape, PipeShape};

/// NAT mappings of a patient router; tests of NAT time-outs lower it.
const FLOW_IDLE_S_DEFAULT: f64 = 600.0;

/// The address from which the n-th emulated node sends and on which it listens.
pub fn node_address(n: u8) -> Ipv4Addr {
    Ipv4Addr::new(127, 1, 0, n)
}

/// The address under which the relay stands for the n-th emulated node.
pub fn relay_address(n: u8) -> Ipv4Addr {
    Ipv4Addr::new(127, 2, 0, n)
}

/// A relay's whole configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RelayConfig {
    /// Root of all randomness.
    pub seed: u64,
    /// A flow is forgotten after this much silence in both directions, in seconds.
    #[serde(default = "flow_idle_s_default")]
    pub flow_idle_s: f64,
    /// Where `role relay` takes commands; must be loopback.
    #[serde(default = "control_default")]
    pub control: SocketAddr,
    /// Pairs of nodes without a path of their own get this one, without pipes; absent means that nothing passes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_paths: Option<PathShape>,
    /// The emulated nodes.
    #[serde(rename = "node")]
    pub nodes: Vec<NodeConfig>,
    /// The shared bottlenecks.
    #[serde(rename = "pipe", default)]
    pub pipes: Vec<PipeConfig>,
    /// The directions between nodes.
    #[serde(rename = "path", default)]
    pub paths: Vec<PathConfig>,
}

/// One emulated node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeConfig {
    /// Its name.
    pub name: String,
    /// The loopback address it sends from, its alone.
    pub address: Ipv4Addr,
    /// The address of the relay that stands for it.
    pub relay: Ipv4Addr,
    /// What of it others can reach.
    #[serde(rename = "service", default)]
    pub services: Vec<ServiceConfig>,
}

/// A UDP port of a node that others dial through the relay.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceConfig {
    /// Its name, for a node with several.
    #[serde(default = "service_name_default")]
    pub name: String,
    /// The relay's port for it; 0 takes a free one.
    #[serde(default)]
    pub port: u16,
    /// The node's real address; may be set later. Until then packets are dropped and counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<SocketAddr>,
}

/// A named bottleneck.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PipeConfig {
    /// Its name.
    pub name: String,
    /// Its rate and queue.
    #[serde(default)]
    pub shape: PipeShape,
}

/// One direction between two nodes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PathConfig {
    /// Source node.
    pub from: String,
    /// Destination node.
    pub to: String,
    /// The pipes a packet crosses, in order.
    #[serde(default)]
    pub pipes: Vec<String>,
    /// Delay, loss and the rest.
    #[serde(default)]
    pub shape: PathShape,
}

impl NodeConfig {
    /// The n-th node (1 to 254) with one service whose real address is set later.
    pub fn new(name: &str, n: u8) -> Self {
        Self {
            name: name.to_owned(),
            address: node_address(n),
            relay: relay_address(n),
            services: vec![ServiceConfig::default()],
        }
    }
}

impl Default for ServiceConfig {
    fn default() -> Self {
        Self {
            name: service_name_default(),
            port: 0,
            target: None,
        }
    }
}

impl RelayConfig {
    /// A relay without nodes, pipes and paths.
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            flow_idle_s: FLOW_IDLE_S_DEFAULT,
            control: control_default(),
            other_paths: None,
            nodes: Vec::new(),
            pipes: Vec::new(),
            paths: Vec::new(),
        }
    }

    /// Reads and checks a TOML file.
    pub fn load(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("relay configuration {}", path.display()))
    }

    /// Reads and checks TOML text.
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        let config: Self = toml::from_str(text)?;
        config.check()?;
        Ok(config)
    }

    /// This configuration as TOML.
    pub fn to_toml(&self) -> anyhow::Result<String> {
        Ok(toml::to_string(self)?)
    }

    /// Refuses what cannot work: names used twice or not at all, addresses that are not loopback, impossible shapes.
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(
            self.control.ip().is_loopback(),
            "control {} is not a loopback address",
            self.control
        );
        ensure!(
            self.flow_idle_s.is_finite() && (0.001..=1e9).contains(&self.flow_idle_s),
            "flow_idle_s {} is not a number of seconds above 0.001",
            self.flow_idle_s
        );
        if let Some(shape) = &self.other_paths {
            shape.check().context("other_paths")?;
        }
        self.check_nodes()?;
        all_different("pipe", self.pipes.iter().map(|pipe| pipe.name.as_str()))?;
        let mut pairs = BTreeSet::new();
        for path in &self.paths {
            let PathConfig { from, to, .. } = path;
            self.check_path(path)
                .with_context(|| format!("path {from} → {to}"))?;
            ensure!(
                pairs.insert((from, to)),
                "path {from} → {to} is there twice"
            );
        }
        Ok(())
    }

    fn check_nodes(&self) -> anyhow::Result<()> {
        ensure!(
            !self.nodes.is_empty(),
            "a relay without nodes has nothing to do"
        );
        all_different("node", self.nodes.iter().map(|node| node.name.as_str()))?;
        let mut addresses = BTreeSet::new();
        for node in &self.nodes {
            let name = &node.name;
            for address in [node.address, node.relay] {
                ensure!(
                    address.is_loopback(),
                    "node {name}: {address} is not a loopback address"
                );
                ensure!(addresses.insert(address), "node {name}: {address} is taken");
            }
            all_different(
                "service",
                node.services.iter().map(|service| service.name.as_str()),
            )
            .with_context(|| format!("node {name}"))?;
            for target in node.services.iter().filter_map(|service| service.target) {
                check_target(node.address, target).with_context(|| format!("node {name}"))?;
            }
        }
        Ok(())
    }

    fn check_path(&self, path: &PathConfig) -> anyhow::Result<()> {
        for end in [&path.from, &path.to] {
            ensure!(
                self.nodes.iter().any(|node| node.name == *end),
                "there is no node `{end}`"
            );
        }
        for name in &path.pipes {
            ensure!(
                self.pipes.iter().any(|pipe| pipe.name == *name),
                "there is no pipe `{name}`"
            );
        }
        path.shape.check()
    }
}

/// A node's real address must be the one it sends from, else its answers would come from a stranger.
pub(super) fn check_target(node: Ipv4Addr, target: SocketAddr) -> anyhow::Result<()> {
    ensure!(
        target.ip() == IpAddr::V4(node),
        "target {target} is not at the node's address {node}"
    );
    ensure!(target.port() != 0, "target {target} has no port");
    Ok(())
}

fn all_different<'a>(kind: &str, names: impl Iterator<Item = &'a str>) -> anyhow::Result<()> {
    let mut seen = BTreeSet::new();
    for name in names {
        if name.is_empty() {
            bail!("a {kind} has no name");
        }
        ensure!(seen.insert(name), "{kind} `{name}` is there twice");
    }
    Ok(())
}

fn flow_idle_s_default() -> f64 {
    FLOW_IDLE_S_DEFAULT
}

fn control_default() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 0))
}

fn service_name_default() -> String {
    "main".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
        seed = 7
        flow_idle_s = 20
        [[node]]
        name = "edge-1"
        address = "127.1.0.1"
        relay = "127.2.0.1"
        [[node.service]]
        target = "127.1.0.1:4000"
        [[node]]
        name = "cloud-1"
        address = "127.1.0.2"
        relay = "127.2.0.2"
        [[pipe]]
        name = "plant uplink"
        shape = { rate_bps = 20_000_000, queue_ms = 80 }
        [[path]]
        from = "edge-1"
        to = "cloud-1"
        pipes = ["plant uplink"]
        shape = { delay_ms = 20, jitter_ms = 2, loss = 0.01, mtu_bytes = 1452 }
    "#;

    #[test]
    fn a_configuration_survives_writing_and_reading() {
        let config = RelayConfig::parse(GOOD).unwrap();
        assert_eq!(
            config.pipes[0].shape,
            PipeShape::mbit_s(20.0).with_queue_ms(80.0)
        );
        assert_eq!(
            RelayConfig::parse(&config.to_toml().unwrap()).unwrap(),
            config
        );
    }

    #[test]
    fn what_cannot_work_is_refused_by_name() {
        for (from, to, expected) in [
            ("seed = 7", "seed = 7\nspeed = 1", "unknown field `speed`"),
            ("delay_ms = 20", "delay = 20", "unknown field `delay`"),
            (
                "\"cloud-1\"\n        pipes",
                "\"cloud-9\"\n        pipes",
                "there is no node `cloud-9`",
            ),
            (
                "[\"plant uplink\"]",
                "[\"uplink\"]",
                "there is no pipe `uplink`",
            ),
            ("loss = 0.01", "loss = 2", "loss 2 is not between 0 and 1"),
            (
                "delay_ms = 20",
                "delay_ms = nan",
                "delay_ms NaN is not between",
            ),
            (
                "127.1.0.2",
                "10.0.0.2",
                "10.0.0.2 is not a loopback address",
            ),
            ("127.1.0.2", "127.2.0.1", "127.2.0.1 is taken"),
            (
                "127.1.0.1:4000",
                "127.0.0.1:4000",
                "is not at the node's address 127.1.0.1",
            ),
            (
                "name = \"cloud-1\"",
                "name = \"edge-1\"",
                "node `edge-1` is there twice",
            ),
        ] {
            let text = GOOD.replacen(from, to, 1);
            assert_ne!(text, GOOD, "{from}");
            let error = format!("{:#}", RelayConfig::parse(&text).unwrap_err());
            assert!(error.contains(expected), "{expected} not in {error}");
        }
    }
}
