//! Builds a relay's configuration from sites and nodes, as the planner sees them: a node has an access link to its site, a
//! site an uplink, and a packet consumes every link on its way.

use super::config::{NodeConfig, PathConfig, PipeConfig, RelayConfig};
use super::shape::{PathShape, PipeShape};

/// A link in both directions: a pipe each way, and what the way does beside (delay one way).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LinkSpec {
    /// Away from the node (or out of the site).
    pub up: PipeShape,
    /// Towards the node (or into the site).
    pub down: PipeShape,
    /// Delay, jitter, loss and largest packet of each direction.
    pub shape: PathShape,
}

impl LinkSpec {
    /// A link of unlimited rate without delay.
    pub fn ideal() -> Self {
        Self::default()
    }

    /// A link with these rates (Mbit/s) and this one-way delay.
    pub fn mbit_s(up: f64, down: f64, delay_ms: f64) -> Self {
        Self {
            up: PipeShape::mbit_s(up),
            down: PipeShape::mbit_s(down),
            shape: PathShape::delay(delay_ms),
        }
    }
}

/// Sites with their uplinks and nodes with their access links.
#[derive(Debug, Clone, Default)]
pub struct Topology {
    sites: Vec<(String, LinkSpec)>,
    nodes: Vec<TopologyNode>,
}

#[derive(Debug, Clone)]
struct TopologyNode {
    name: String,
    site: String,
    access: LinkSpec,
}

/// The name of the pipe from a node to its site.
pub fn access_up(node: &str) -> String {
    format!("{node} access up")
}

/// The name of the pipe from a site to its node.
pub fn access_down(node: &str) -> String {
    format!("{node} access down")
}

/// The name of the pipe out of a site.
pub fn uplink_up(site: &str) -> String {
    format!("{site} uplink up")
}

/// The name of the pipe into a site.
pub fn uplink_down(site: &str) -> String {
    format!("{site} uplink down")
}

impl Topology {
    /// No sites, no nodes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a site. Add sites before their nodes; a node of an unknown site has an ideal uplink.
    #[must_use]
    pub fn site(mut self, name: &str, uplink: LinkSpec) -> Self {
        self.sites.push((name.to_owned(), uplink));
        self
    }

    /// Adds a node; the n-th node added gets the addresses `127.1.0.n` and `127.2.0.n`, from 1.
    #[must_use]
    pub fn node(mut self, name: &str, site: &str, access: LinkSpec) -> Self {
        self.nodes.push(TopologyNode {
            name: name.to_owned(),
            site: site.to_owned(),
            access,
        });
        self
    }

    /// The configuration of a relay for these nodes, each with one service whose real address is set later.
    pub fn relay_config(&self, seed: u64) -> anyhow::Result<RelayConfig> {
        let mut config = RelayConfig::new(seed);
        for (index, node) in self.nodes.iter().enumerate() {
            let n = u8::try_from(index + 1).map_err(|_| anyhow::anyhow!("more than 255 nodes"))?;
            config.nodes.push(NodeConfig::new(&node.name, n));
            config.pipes.push(PipeConfig {
                name: access_up(&node.name),
                shape: node.access.up.clone(),
            });
            config.pipes.push(PipeConfig {
                name: access_down(&node.name),
                shape: node.access.down.clone(),
            });
        }
        for (site, uplink) in &self.sites {
            config.pipes.push(PipeConfig {
                name: uplink_up(site),
                shape: uplink.up.clone(),
            });
            config.pipes.push(PipeConfig {
                name: uplink_down(site),
                shape: uplink.down.clone(),
            });
        }
        for from in &self.nodes {
            for to in &self.nodes {
                config.paths.push(self.path(from, to));
            }
        }
        config.check()?;
        Ok(config)
    }

    fn path(&self, from: &TopologyNode, to: &TopologyNode) -> PathConfig {
        let mut path = PathConfig {
            from: from.name.clone(),
            to: to.name.clone(),
            pipes: Vec::new(),
            shape: PathShape::default(),
        };
        if from.name == to.name {
            return path;
        }
        let mut cross = |pipe: String, shape: &PathShape| {
            path.pipes.push(pipe);
            path.shape = joined(&path.shape, shape);
        };
        cross(access_up(&from.name), &from.access.shape);
        if from.site != to.site {
            if let Some(uplink) = self.uplink(&from.site) {
                cross(uplink_up(&from.site), &uplink.shape);
            }
            if let Some(uplink) = self.uplink(&to.site) {
                cross(uplink_down(&to.site), &uplink.shape);
            }
        }
        cross(access_down(&to.name), &to.access.shape);
        path
    }

    fn uplink(&self, site: &str) -> Option<&LinkSpec> {
        self.sites
            .iter()
            .find(|(name, _)| name == site)
            .map(|(_, uplink)| uplink)
    }
}

/// Two stretches one after the other.
fn joined(first: &PathShape, second: &PathShape) -> PathShape {
    PathShape {
        delay_ms: first.delay_ms + second.delay_ms,
        jitter_ms: first.jitter_ms + second.jitter_ms,
        reorder: first.reorder || second.reorder,
        loss: 1.0 - (1.0 - first.loss) * (1.0 - second.loss),
        mtu_bytes: match (first.mtu_bytes, second.mtu_bytes) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        },
        cut: first.cut || second.cut,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_consumes_every_link_on_its_way() {
        let uplink = LinkSpec {
            shape: PathShape {
                loss: 0.5,
                ..PathShape::delay(10.0)
            },
            ..LinkSpec::mbit_s(20.0, 50.0, 10.0)
        };
        let cloud = LinkSpec {
            shape: PathShape {
                loss: 0.5,
                ..PathShape::delay(5.0)
            },
            ..LinkSpec::ideal()
        };
        let config = Topology::new()
            .site("plant", uplink)
            .site("cloud", cloud)
            .node("edge-1", "plant", LinkSpec::mbit_s(100.0, 100.0, 1.0))
            .node("near-1", "plant", LinkSpec::mbit_s(1_000.0, 1_000.0, 0.5))
            .node("cloud-1", "cloud", LinkSpec::ideal())
            .relay_config(7)
            .unwrap();
        let path = |from: &str, to: &str| {
            config
                .paths
                .iter()
                .find(|path| path.from == from && path.to == to)
                .unwrap()
        };
        let out = path("edge-1", "cloud-1");
        assert_eq!(
            out.pipes,
            [
                "edge-1 access up",
                "plant uplink up",
                "cloud uplink down",
                "cloud-1 access down"
            ]
        );
        assert_eq!((out.shape.delay_ms, out.shape.loss), (16.0, 0.75));
        let local = path("near-1", "edge-1");
        assert_eq!(local.pipes, ["near-1 access up", "edge-1 access down"]);
        assert_eq!(local.shape.delay_ms, 1.5);
        assert!(path("edge-1", "edge-1").pipes.is_empty());
    }
}
