//! What there is: tiers, sites, nodes, their capacity and the links between them.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::ids::{Digest, NodeId, SiteId};
use crate::units::{Bandwidth, Millicores};

/// Distance from the source, nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Tier {
    /// On the device that has the camera or microphone, or beside it.
    Edge,
    /// A box in the same building.
    NearEdge,
    /// A point of presence in the region.
    NearCloud,
    /// A data centre.
    Cloud,
}

impl Tier {
    /// All tiers, nearest first.
    pub const ALL: [Self; 4] = [Self::Edge, Self::NearEdge, Self::NearCloud, Self::Cloud];

    /// The name people write.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Edge => "edge",
            Self::NearEdge => "near-edge",
            Self::NearCloud => "near-cloud",
            Self::Cloud => "cloud",
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A vector of one node's resources: what it has, what is granted, or what is left.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// CPU in thousandths of a core.
    pub cpu: Millicores,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// GPU share in percent of one device, summed over devices.
    pub gpu_percent: u32,
}

impl Resources {
    /// Whether a demand fits into this.
    pub const fn fits(&self, demand: &Self) -> bool {
        demand.cpu.0 <= self.cpu.0
            && demand.memory_mib <= self.memory_mib
            && demand.gpu_percent <= self.gpu_percent
    }

    /// The sum, saturating.
    #[must_use]
    pub const fn plus(&self, other: &Self) -> Self {
        Self {
            cpu: Millicores(self.cpu.0.saturating_add(other.cpu.0)),
            memory_mib: self.memory_mib.saturating_add(other.memory_mib),
            gpu_percent: self.gpu_percent.saturating_add(other.gpu_percent),
        }
    }

    /// What is left after taking `other`; `None` when it does not fit.
    pub const fn minus(&self, other: &Self) -> Option<Self> {
        if !self.fits(other) {
            return None;
        }
        Some(Self {
            cpu: Millicores(self.cpu.0 - other.cpu.0),
            memory_mib: self.memory_mib - other.memory_mib,
            gpu_percent: self.gpu_percent - other.gpu_percent,
        })
    }
}

/// What a node says of itself when it registers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeDescription {
    /// Its tier.
    pub tier: Tier,
    /// Its site.
    pub site: SiteId,
    /// Nodes of one device class run an operator at the same speed (open vocabulary).
    pub device_class: String,
    /// Speed of one core relative to the host's: 1 for real hardware, less for an emulated device.
    pub emulated_speed: Option<f64>,
    /// What may be granted to operators.
    pub capacity: Resources,
    /// Labels set by its owner.
    pub labels: BTreeMap<String, String>,
    /// Where other nodes and apps can reach its data plane.
    pub advertised: Vec<SocketAddr>,
    /// Fingerprint of its public key.
    pub fingerprint: Digest,
}

impl NodeDescription {
    /// `emulated ×0.15`, or the device class for real hardware.
    pub fn device_label(&self) -> String {
        match self.emulated_speed {
            Some(speed) => format!("emulated ×{speed}"),
            None => self.device_class.clone(),
        }
    }
}

/// Whether a node takes work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scheduling {
    /// It does.
    #[default]
    Open,
    /// It keeps what it has and takes no more.
    Cordoned,
    /// What it has must move away.
    Draining,
}

/// A node as the planner sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// What it said of itself.
    pub description: NodeDescription,
    /// Whether a session with it is alive.
    pub online: bool,
    /// Whether it takes work.
    pub scheduling: Scheduling,
}

/// A path between two nodes, in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Rate: measured while the sender was network-limited, else the best lower bound known.
    pub bandwidth: Bandwidth,
    /// Whether the rate is only a lower bound (the sender never filled the link).
    pub lower_bound: bool,
    /// Round-trip time in milliseconds, there and back, without queueing.
    pub rtt_ms: f64,
    /// Fraction of packets lost, 0 to 1.
    pub loss: f64,
}

/// Prices, in USD.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PriceSheet {
    /// Grows by one with each change.
    pub version: u64,
    /// Per tier: one core for an hour.
    pub core_hour: BTreeMap<Tier, f64>,
    /// Per tier: one whole GPU for an hour.
    pub gpu_hour: BTreeMap<Tier, f64>,
    /// Per gigabyte (10⁹ bytes) that leaves a site.
    pub egress_gb: f64,
}

/// A snapshot of the fleet for planning.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cluster {
    /// Nodes by id.
    pub nodes: BTreeMap<NodeId, Node>,
    /// Links by (from, to); an absent pair cannot be used.
    pub links: BTreeMap<(NodeId, NodeId), Link>,
    /// What things cost.
    pub prices: PriceSheet,
}
