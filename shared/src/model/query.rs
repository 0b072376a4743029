//! Queries: what an app asks for.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::{NodeId, OperatorId, QueryId};
use crate::model::cluster::Tier;
use crate::model::pipeline::Pipeline;
use crate::units::Rate;

/// Where inputs come from and how many.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Workload {
    /// Frames without end at a rate.
    Continuous {
        /// Frames per second.
        rate: Rate,
    },
    /// A number of requests within a time.
    OneShot {
        /// How many.
        requests: u32,
        /// Within what time.
        duration: Duration,
    },
}

/// A latency bound at a percentile.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LatencySlo {
    /// Percentile, 0 to 100 exclusive, e.g. 95.
    pub percentile: f64,
    /// Bound from capture at the app to the result at the app.
    pub bound: Duration,
}

/// A cap on money.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum CostSlo {
    /// Of a continuous query, in USD per hour.
    PerHour(f64),
    /// Of a one-shot query, in USD per request.
    PerRequest(f64),
}

/// What a query must meet; an absent part is no constraint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Slo {
    /// Latency.
    pub latency: Option<LatencySlo>,
    /// Least mean accuracy, 0 to 1.
    pub accuracy_min: Option<f64>,
    /// Most cost.
    pub cost_max: Option<CostSlo>,
}

/// A restriction on placement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Constraint {
    /// An operator may run on these tiers only.
    OperatorTiers {
        /// The operator.
        operator: OperatorId,
        /// The tiers, nearest first.
        tiers: Vec<Tier>,
    },
    /// The output of the named operator (or the source's frames, `None`) must not leave the source's site.
    StayWithinSite {
        /// Whose output; `None` for the frames themselves.
        output_of: Option<OperatorId>,
    },
}

impl fmt::Display for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OperatorTiers { operator, tiers } => {
                let tiers: Vec<_> = tiers.iter().map(|t| t.as_str()).collect();
                write!(f, "operator {operator} only on {}", tiers.join(", "))
            }
            Self::StayWithinSite { output_of: None } => {
                write!(f, "frames stay within the source's site")
            }
            Self::StayWithinSite {
                output_of: Some(operator),
            } => write!(f, "output of {operator} stays within the source's site"),
        }
    }
}

/// How restless a plan may be; holds back improvements, never repairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stability {
    /// Least time between improving re-plans.
    pub min_dwell: Duration,
    /// Most improving re-plans in a minute.
    pub replans_per_minute_max: u32,
}

impl Default for Stability {
    /// Twenty seconds amortise a switch that costs tens of milliseconds; three a minute keeps a log readable.
    fn default() -> Self {
        Self {
            min_dwell: Duration::from_secs(20),
            replans_per_minute_max: 3,
        }
    }
}

/// A standing or one-shot request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Query {
    /// Its name.
    pub id: QueryId,
    /// What to run.
    pub pipeline: Pipeline,
    /// The node nearest to the source: its entry into the data plane.
    pub entry: NodeId,
    /// How much.
    pub workload: Workload,
    /// What it must meet.
    pub slo: Slo,
    /// Where it may run.
    pub constraints: Vec<Constraint>,
    /// Weight among queries when resources are scarce; higher wins. Default 50.
    pub priority: u32,
    /// How restless its plan may be.
    pub stability: Stability,
}

impl Query {
    /// After this long a frame is worthless: answers after it count as expired. Four latency bounds, or 10 s without a latency SLO.
    pub fn frame_deadline(&self) -> Duration {
        self.slo
            .latency
            .map_or(Duration::from_secs(10), |slo| slo.bound * 4)
    }

    /// Frames (or requests) per second.
    pub fn rate_hz(&self) -> f64 {
        match &self.workload {
            Workload::Continuous { rate } => rate.hz(),
            Workload::OneShot { requests, duration } => {
                f64::from(*requests) / duration.as_secs_f64().max(1e-3)
            }
        }
    }
}
