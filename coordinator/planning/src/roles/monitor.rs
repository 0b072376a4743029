//! Watches: keeps the picture of the fleet, and raises triggers when measured behaviour calls for a new plan.
//!
//! Start at [`Monitor::handle`]. Bulk facts (reports) only refresh the picture; breaches seen by agents (events) are raised at once.
//! The thresholds are [`crate::detect::DetectSettings`].
//!
//! Deliberately absent: what to do about it.

use std::collections::BTreeMap;
use std::sync::Arc;

use compass_shared::ids::{NodeId, QueryId};
use compass_shared::model::cluster::{
    Cluster, Link, Node, NodeDescription, PriceSheet, Scheduling,
};
use compass_shared::model::outcome::AppReport;
use compass_shared::model::plan::QueryPlan;
use compass_shared::model::query::Query;
use compass_shared::model::trigger::Trigger;
use compass_shared::time::Moment;
use compass_shared::wire::v1::{AgentEvent, AgentReport};

use crate::detect::{DetectSettings, LinkWatch, LivenessVerdict, LoadVerdict};
use crate::roles::explorer::Observation;

mod facts;
mod watch;

use watch::{NodeWatch, QueryWatch};

#[cfg(test)]
mod tests;

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
    /// What was known of a link before this monitor began; measurements of its own are not overwritten.
    Remembered {
        /// Sender.
        from: NodeId,
        /// Receiver.
        to: NodeId,
        /// As it was planned with.
        link: Link,
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
    nodes: BTreeMap<NodeId, NodeWatch>,
    links: BTreeMap<(NodeId, NodeId), LinkWatch>,
    queries: BTreeMap<QueryId, QueryWatch>,
    cluster: Cluster,
}

/// What one handled fact amounts to.
#[derive(Default)]
struct News {
    triggers: Vec<Trigger>,
    changed: bool,
    effects: Vec<Effect>,
}

impl Monitor {
    /// A monitor of an empty fleet.
    pub fn new(settings: DetectSettings, prices: PriceSheet) -> Self {
        Self {
            settings,
            nodes: BTreeMap::new(),
            links: BTreeMap::new(),
            queries: BTreeMap::new(),
            cluster: Cluster {
                nodes: BTreeMap::new(),
                links: BTreeMap::new(),
                prices,
            },
        }
    }

    /// Takes a fact and answers with what is to be told.
    pub fn handle(&mut self, now: Moment, input: Input) -> Vec<Effect> {
        let mut news = News::default();
        match input {
            Input::NodeUp { node, description } => self.node_up(now, node, description, &mut news),
            Input::NodeDown(node) => {
                if let Some(watch) = self.nodes.get_mut(&node) {
                    watch.liveness.down();
                }
            }
            Input::Heard(node) => self.heard(now, &node, &mut news),
            Input::Scheduling { node, scheduling } => {
                self.scheduling(node, scheduling, &mut news);
            }
            Input::Report { node, report } => self.report(now, &node, &report, &mut news),
            Input::Event { node, event } => self.event(now, &node, event, &mut news),
            Input::Transfer {
                from,
                to,
                bytes,
                ms,
            } => self.transfer(now, from, to, bytes, ms, &mut news),
            Input::Remembered { from, to, link } => {
                self.links
                    .entry((from, to))
                    .or_insert_with(|| LinkWatch::remembered(now, link));
            }
            Input::QueryUp(query) => {
                let watch = QueryWatch::new(query, &self.settings);
                self.queries.insert(watch.query.id.clone(), watch);
            }
            Input::QueryDown(query) => {
                self.queries.remove(&query);
            }
            Input::PlanInForce(plan) => {
                if let Some(watch) = self.queries.get_mut(&plan.query) {
                    watch.switched(now, *plan, &self.settings);
                }
            }
            Input::App { query, report } => self.app(now, &query, &report, &mut news),
            Input::Prices(prices) => {
                news.triggers.push(Trigger::PriceChanged {
                    version: prices.version,
                });
                self.cluster.prices = prices;
                news.changed = true;
            }
            Input::Tick => {}
        }
        self.look(now, &mut news);
        self.tell(news)
    }

    /// The picture of the fleet.
    pub const fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Looks at the clock.
    fn look(&mut self, now: Moment, news: &mut News) {
        for (id, watch) in &mut self.nodes {
            if watch.liveness.tick(now, &self.settings) == Some(LivenessVerdict::Lost) {
                news.triggers.push(Trigger::NodeLost(id.clone()));
                news.changed = true;
            }
        }
        for (id, watch) in &mut self.queries {
            if watch.load.tick(now, &self.settings) == Some(LoadVerdict::Unknown) {
                news.effects.push(Effect::Alarm(format!(
                    "query {id}: its entry node reports nothing; the plan is held"
                )));
            }
        }
    }

    /// Brings the picture up to date and says what has to be said.
    fn tell(&mut self, news: News) -> Vec<Effect> {
        let News {
            triggers,
            changed,
            mut effects,
        } = news;
        if !changed && triggers.is_empty() {
            return effects;
        }
        self.cluster.nodes = self
            .nodes
            .iter()
            .map(|(id, watch)| {
                let node = Node {
                    description: watch.description.clone(),
                    online: !watch.liveness.is_lost(),
                    scheduling: watch.scheduling,
                };
                (id.clone(), node)
            })
            .collect();
        self.cluster.links = self
            .links
            .iter()
            .filter_map(|(pair, watch)| Some((pair.clone(), *watch.link()?)))
            .collect();
        effects.insert(
            0,
            Effect::Cluster {
                cluster: Arc::new(self.cluster.clone()),
                triggers,
            },
        );
        effects
    }
}
