//! Watches: keeps the picture of the fleet, and raises triggers when measured behaviour calls for a new plan.
//!
//! Start at [`Monitor::handle`]. Bulk facts (reports) only refresh the picture; breaches seen by agents (events) are raised at once.
//! The thresholds are [`crate::detect::DetectSettings`].
//!
//! Deliberately absent: what to do about it.

use std::sync::Arc;

use compass_shared::ids::{Generation, NodeId, QueryId};
use compass_shared::model::cluster::{Cluster, NodeDescription, PriceSheet, Scheduling};
use compass_shared::model::outcome::AppReport;
use compass_shared::model::plan::QueryPlan;
use compass_shared::model::query::Query;
use compass_shared::model::trigger::Trigger;
use compass_shared::time::Moment;
use compass_shared::wire::v1::{AgentEvent, AgentReport};

use crate::detect::DetectSettings;
use crate::roles::explorer::Observation;

/// What the monitor is told.
#[derive(Debug, Clone)]
pub enum Input {
    /// A node's session is up; what it said of itself.
    NodeUp {
        /// The node.
        node: NodeId,
        /// Its description.
        description: NodeDescription,
    },
    /// A node's session has ended.
    NodeDown(NodeId),
    /// Something was heard of a node (a pong): stamped in the session's task.
    Heard(NodeId),
    /// A person drained, cordoned or opened a node.
    Scheduling {
        /// The node.
        node: NodeId,
        /// What it is now.
        scheduling: Scheduling,
    },
    /// Periodic report.
    Report {
        /// Of whom.
        node: NodeId,
        /// What.
        report: Box<AgentReport>,
    },
    /// A breach seen by an agent.
    Event {
        /// By whom.
        node: NodeId,
        /// What.
        event: AgentEvent,
    },
    /// A trial's inputs were pulled over a link.
    Transfer {
        /// Sender.
        from: NodeId,
        /// Receiver.
        to: NodeId,
        /// Bytes.
        bytes: u64,
        /// Milliseconds.
        ms: f64,
    },
    /// A query is watched from now on.
    QueryUp(Arc<Query>),
    /// A query is gone.
    QueryDown(QueryId),
    /// A plan is in force.
    PlanInForce(Box<QueryPlan>),
    /// What an app measured.
    App {
        /// Its query.
        query: QueryId,
        /// What.
        report: AppReport,
    },
    /// New prices.
    Prices(PriceSheet),
    /// Time passes; at least four times a second.
    Tick,
}

/// What the monitor says.
#[derive(Debug, Clone)]
pub enum Effect {
    /// The fleet has changed enough to matter: for the scheduler, the pool and every explorer.
    Cluster {
        /// The fleet.
        cluster: Arc<Cluster>,
        /// What was noticed, oldest first.
        triggers: Vec<Trigger>,
    },
    /// Something about one query: for the scheduler, and for its explorer when the content drifted.
    Noticed {
        /// The query.
        query: QueryId,
        /// What.
        trigger: Trigger,
    },
    /// Live measurements: for the query's explorer.
    Observed {
        /// The query.
        query: QueryId,
        /// What.
        observation: Box<Observation>,
    },
    /// Something a person must know.
    Alarm(String),
}

/// The monitor.
pub struct Monitor {
    settings: DetectSettings,
    cluster: Cluster,
    newest: Option<Generation>,
}

impl Monitor {
    /// A monitor of an empty fleet.
    pub fn new(settings: DetectSettings, prices: PriceSheet) -> Self {
        Self {
            settings,
            cluster: Cluster {
                nodes: std::collections::BTreeMap::new(),
                links: std::collections::BTreeMap::new(),
                prices,
            },
            newest: None,
        }
    }

    /// Takes a fact and answers with what is to be told.
    pub fn handle(&mut self, now: Moment, input: Input) -> Vec<Effect> {
        let _ = (now, input, &self.settings, self.newest);
        Vec::new()
    }

    /// The picture of the fleet.
    pub const fn cluster(&self) -> &Cluster {
        &self.cluster
    }
}
