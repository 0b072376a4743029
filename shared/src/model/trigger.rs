//! Why a plan changed: a closed list, each with its measurement.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{Generation, NodeId, OperatorId};

/// Stands for the latency of a frame that was never answered, in ms: longer than any bound, and a number JSON knows. A percentile between
/// such a frame and an answered one is a part of it.
pub const NEVER_MS: f64 = 1e9;

/// What was measured against which bound over which window.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// The value.
    pub value: f64,
    /// The bound it broke.
    pub bound: f64,
    /// Window in milliseconds.
    pub window_ms: u64,
}

/// Which SLO was broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum SloKind {
    /// Latency at the percentile, in ms.
    Latency,
    /// Accuracy, 0 to 1.
    Accuracy,
    /// Cost.
    Cost,
}

/// What of a link was measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LinkQuantity {
    /// Delivered rate, in Mbit/s.
    #[default]
    Rate,
    /// Round-trip time, in ms.
    RoundTrip,
}

/// What calls for a new plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Trigger {
    /// A query arrived.
    QueryRegistered,
    /// A query left (frees resources for others).
    QueryWithdrawn,
    /// A node joined or came back.
    NodeJoined(NodeId),
    /// A node is gone, drains or was cordoned.
    NodeLost(NodeId),
    /// A link got worse.
    LinkDegraded {
        /// Sender.
        from: NodeId,
        /// Receiver.
        to: NodeId,
        /// By what; records of the first version do not name it.
        #[serde(default)]
        quantity: LinkQuantity,
        /// What was seen, in the quantity's unit.
        measurement: Measurement,
    },
    /// A link is better again; its rate in Mbit/s.
    LinkRecovered {
        /// Sender.
        from: NodeId,
        /// Receiver.
        to: NodeId,
        /// What was seen.
        measurement: Measurement,
    },
    /// The load differs from what was planned; in frames per second.
    LoadShifted(Measurement),
    /// An SLO is broken as the app measures it.
    SloViolated {
        /// Which one.
        slo: SloKind,
        /// What was seen.
        measurement: Measurement,
    },
    /// The content changed mode and settled; the measurement is the descriptor that moved most.
    ContentDrifted {
        /// Name of the descriptor, e.g. `luma mean`.
        descriptor: String,
        /// What was seen.
        measurement: Measurement,
    },
    /// An operator does not get its share; achieved and granted cores.
    ShareNotAchieved {
        /// The operator.
        operator: OperatorId,
        /// Where.
        node: NodeId,
        /// What was seen.
        measurement: Measurement,
    },
    /// A node could not carry out its target.
    PlanNotApplied {
        /// The node.
        node: NodeId,
        /// Its words.
        reason: String,
    },
    /// Prices changed.
    PriceChanged {
        /// The new sheet's version.
        version: u64,
    },
    /// Fresh samples refuted the plan, or a person asked: back to an earlier generation's content.
    Reverted(Generation),
    /// The search found something better after the query already had a plan.
    SearchImproved,
}

impl Trigger {
    /// A short stable name, e.g. `link-degraded`.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::QueryRegistered => "query-registered",
            Self::QueryWithdrawn => "query-withdrawn",
            Self::NodeJoined(_) => "node-joined",
            Self::NodeLost(_) => "node-lost",
            Self::LinkDegraded { .. } => "link-degraded",
            Self::LinkRecovered { .. } => "link-recovered",
            Self::LoadShifted(_) => "load-shifted",
            Self::SloViolated { .. } => "slo-violated",
            Self::ContentDrifted { .. } => "content-drifted",
            Self::ShareNotAchieved { .. } => "share-not-achieved",
            Self::PlanNotApplied { .. } => "plan-not-applied",
            Self::PriceChanged { .. } => "price-changed",
            Self::Reverted(_) => "reverted",
            Self::SearchImproved => "search-improved",
        }
    }

    /// Whether the re-plan repairs something broken; repairs are never held back by dwell times and rate bounds.
    pub const fn is_repair(&self) -> bool {
        matches!(
            self,
            Self::NodeLost(_)
                | Self::LinkDegraded { .. }
                | Self::SloViolated { .. }
                | Self::ContentDrifted { .. }
                | Self::ShareNotAchieved { .. }
                | Self::PlanNotApplied { .. }
                | Self::Reverted(_)
                | Self::QueryRegistered
        )
    }
}

impl fmt::Display for Trigger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::QueryRegistered => write!(f, "query registered"),
            Self::QueryWithdrawn => write!(f, "query withdrawn"),
            Self::NodeJoined(node) => write!(f, "node {node} joined"),
            Self::NodeLost(node) => write!(f, "node {node} lost"),
            Self::LinkDegraded {
                from,
                to,
                quantity,
                measurement: m,
            } => match quantity {
                LinkQuantity::Rate => write!(
                    f,
                    "link {from}->{to} degraded: {:.2} of {:.2} Mbit/s",
                    m.value, m.bound
                ),
                LinkQuantity::RoundTrip => write!(
                    f,
                    "link {from}->{to} degraded: round trip {:.0} ms, was {:.0} ms",
                    m.value, m.bound
                ),
            },
            Self::LinkRecovered {
                from,
                to,
                measurement: m,
            } => write!(
                f,
                "link {from}->{to} recovered: {:.2} Mbit/s, was {:.2}",
                m.value, m.bound
            ),
            Self::LoadShifted(m) => {
                write!(f, "load {:.1}/s, planned for {:.1}/s", m.value, m.bound)
            }
            Self::SloViolated {
                slo,
                measurement: m,
            } => {
                let (value, bound) = (m.value, m.bound);
                match slo {
                    SloKind::Latency if value >= NEVER_MS / 1e3 => {
                        write!(
                            f,
                            "latency without end breaks its SLO {bound:.0} ms: frames are not answered"
                        )
                    }
                    SloKind::Latency => {
                        write!(f, "latency {value:.0} ms breaks its SLO {bound:.0} ms")
                    }
                    SloKind::Accuracy => {
                        write!(f, "accuracy {value:.3} breaks its SLO {bound:.3}")
                    }
                    SloKind::Cost => {
                        write!(f, "cost {value:.4} USD/h breaks its SLO {bound:.4} USD/h")
                    }
                }
            }
            Self::ContentDrifted {
                descriptor,
                measurement: m,
            } => write!(
                f,
                "content drifted: {descriptor} {:.1}, was {:.1}",
                m.value, m.bound
            ),
            Self::ShareNotAchieved {
                operator,
                node,
                measurement: m,
            } => {
                write!(
                    f,
                    "operator {operator} on {node} gets {:.2} of {:.2} cores",
                    m.value, m.bound
                )
            }
            Self::PlanNotApplied { node, reason } => {
                write!(f, "node {node} did not apply the plan: {reason}")
            }
            Self::PriceChanged { version } => write!(f, "price sheet v{version}"),
            Self::Reverted(generation) => {
                write!(f, "reverted to the content of generation {generation}")
            }
            Self::SearchImproved => write!(f, "the search found a better plan"),
        }
    }
}
