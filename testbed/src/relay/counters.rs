//! Counts of what happened to packets. Everything offered is delivered, dropped for one cause, or still under way.

use std::collections::BTreeMap;
use std::ops::{AddAssign, Sub, SubAssign};

use serde::{Deserialize, Serialize};

/// A number of packets and of their bytes of UDP payload.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Count {
    /// Datagrams.
    pub packets: u64,
    /// Bytes of UDP payload.
    pub bytes: u64,
}

impl Count {
    /// One packet of this size.
    pub fn one(bytes: usize) -> Self {
        Self {
            packets: 1,
            bytes: bytes as u64,
        }
    }
}

impl AddAssign for Count {
    fn add_assign(&mut self, other: Self) {
        self.packets += other.packets;
        self.bytes += other.bytes;
    }
}

impl SubAssign for Count {
    fn sub_assign(&mut self, other: Self) {
        *self = *self - other;
    }
}

impl Sub for Count {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self {
            packets: self.packets.saturating_sub(other.packets),
            bytes: self.bytes.saturating_sub(other.bytes),
        }
    }
}

impl std::iter::Sum for Count {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), |mut sum, count| {
            sum += count;
            sum
        })
    }
}

/// Why a packet went no further.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DropCause {
    /// The direction is cut.
    Cut,
    /// Larger than the path's bound.
    Mtu,
    /// Seeded random loss.
    Loss,
    /// The queue of a pipe was full.
    Queue,
    /// The relay held too much: the run is not to be trusted.
    Overload,
    /// The destination's real address is not known yet.
    NoTarget,
    /// The flow was forgotten while the packet was under way.
    NoMapping,
    /// The kernel refused to send it.
    SendFailed,
}

/// One direction between two nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkCounters {
    /// What came in.
    pub offered: Count,
    /// What came out.
    pub delivered: Count,
    /// What did not, by cause.
    pub dropped: BTreeMap<DropCause, Count>,
}

impl LinkCounters {
    /// All drops together.
    pub fn dropped_total(&self) -> Count {
        self.dropped.values().copied().sum()
    }

    /// What is still in a queue or a delay line.
    pub fn under_way(&self) -> Count {
        self.offered - self.delivered - self.dropped_total()
    }

    /// Drops for one cause.
    pub fn dropped_for(&self, cause: DropCause) -> Count {
        self.dropped.get(&cause).copied().unwrap_or_default()
    }

    pub(super) fn drop_packet(&mut self, cause: DropCause, bytes: usize) {
        *self.dropped.entry(cause).or_default() += Count::one(bytes);
    }
}

/// One pipe.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PipeCounters {
    /// What came out of it.
    pub passed: Count,
    /// What its queue had no room for.
    pub dropped: Count,
    /// What is in it now.
    pub backlog_bytes: u64,
}

/// Everything a relay has counted since its start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RelayCounters {
    /// By source and destination, in that order.
    pub links: Vec<NamedLinkCounters>,
    /// By name.
    pub pipes: BTreeMap<String, PipeCounters>,
    /// Packets from an address that is no node's.
    pub unknown_source: Count,
    /// Packets between two nodes that have no path.
    pub no_path: Count,
    /// Packets that came to a flow's socket from someone else than its destination.
    pub stray: Count,
    /// Packets of new flows beyond the bound on flows.
    pub flow_limit: Count,
    /// Flows (source address, destination) known now.
    pub flows_open: u64,
    /// Flows forgotten after silence or on request.
    pub flows_forgotten: u64,
    /// Datagrams that the kernel dropped before the relay could read them: the run is not to be trusted.
    pub kernel_dropped_packets: u64,
}

/// The counters of one direction, with its name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedLinkCounters {
    /// Source node.
    pub from: String,
    /// Destination node.
    pub to: String,
    /// What was counted.
    pub counters: LinkCounters,
}

impl RelayCounters {
    /// The counters of one direction, if there is such a path.
    pub fn link(&self, from: &str, to: &str) -> Option<&LinkCounters> {
        self.links
            .iter()
            .find(|link| link.from == from && link.to == to)
            .map(|link| &link.counters)
    }

    /// What a node has sent into the emulated network, over all its paths.
    pub fn sent_by(&self, node: &str) -> Count {
        self.links
            .iter()
            .filter(|link| link.from == node)
            .map(|link| link.counters.offered)
            .sum()
    }

    /// What has been delivered to a node, over all its paths.
    pub fn delivered_to(&self, node: &str) -> Count {
        self.links
            .iter()
            .filter(|link| link.to == node)
            .map(|link| link.counters.delivered)
            .sum()
    }

    /// Packets lost through the emulator's own fault; a run with any is not to be trusted.
    pub fn own_faults(&self) -> u64 {
        let of_links: u64 = self
            .links
            .iter()
            .flat_map(|link| {
                [DropCause::Overload, DropCause::SendFailed]
                    .map(|cause| link.counters.dropped_for(cause).packets)
            })
            .sum();
        of_links + self.kernel_dropped_packets + self.flow_limit.packets
    }
}
