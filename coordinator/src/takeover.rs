//! The first seconds in office: plans in force are left alone until their nodes have come back and said what they run.
//!
//! Start at [`try_end`]. A coordinator that starts on a store knows plans, but no node yet: they come back one by one, and each alone would
//! look like a fleet that has lost all others. So the scheduler hears of the fleet only when every node of a plan in force is there, or has
//! had its time; then it is told everything at once, and adopts what runs. Searches begin at the same moment. Meanwhile nothing is wrong: the
//! nodes carry on with their last targets by themselves.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use compass_planning::roles::scheduler;
use compass_shared::ids::NodeId;
use compass_shared::model::cluster::Cluster;
use compass_shared::model::plan::QueryPlan;
use compass_shared::model::trigger::Trigger;
use compass_shared::time::Moment;

use crate::actors::scheduler::node_up;
use crate::events::Event;
use crate::plane::Plane;

/// Nodes have this long: more than the longest pause between two of their tries to connect.
const PATIENCE: Duration = Duration::from_secs(40);
/// They have only this long once an app measures that its plan does not do its work: then a node is more likely gone than late.
const PATIENCE_WHEN_BROKEN: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct Waiting {
    nodes: BTreeSet<NodeId>,
    began: Moment,
    is_broken: bool,
}

/// See the module's head.
#[derive(Debug, Default)]
pub struct Takeover {
    waiting: Mutex<Option<Waiting>>,
}

impl Takeover {
    /// Waits for the nodes of these plans.
    pub fn begin(&self, plans: &[QueryPlan], now: Moment) {
        let nodes = plans.iter().flat_map(QueryPlan::nodes).cloned().collect();
        *self.lock() = Some(Waiting {
            nodes,
            began: now,
            is_broken: false,
        });
    }

    /// Whether the scheduler may hear of the fleet.
    pub fn is_over(&self) -> bool {
        self.lock().is_none()
    }

    /// An app measures that its plan does not do its work.
    pub fn plan_is_broken(&self) {
        if let Some(waiting) = &mut *self.lock() {
            waiting.is_broken = true;
        }
    }

    /// Ends it if every awaited node is online, or the time is up: gives those that are missing then. Gives nothing before, and nothing when
    /// it is over already.
    fn end_if_due(&self, cluster: &Cluster, now: Moment) -> Option<Vec<NodeId>> {
        let mut lock = self.lock();
        let waiting = lock.as_ref()?;
        let is_here = |node: &NodeId| cluster.nodes.get(node).is_some_and(|found| found.online);
        let missing: Vec<NodeId> = waiting
            .nodes
            .iter()
            .filter(|n| !is_here(n))
            .cloned()
            .collect();
        let patience = if waiting.is_broken {
            PATIENCE_WHEN_BROKEN
        } else {
            PATIENCE
        };
        if !missing.is_empty() && now.since(waiting.began) < patience {
            return None;
        }
        *lock = None;
        Some(missing)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the takeover if it is due: tells the scheduler who is there and how the fleet looks, and lets searches begin.
pub fn try_end(plane: &Plane) {
    let now = plane.clock.now();
    let Some(missing) = plane.takeover.end_if_due(&plane.picture.cluster(), now) else {
        return;
    };
    let plans = plane.queries.plans().len();
    let queries = plane.queries.names();
    if !queries.is_empty() {
        let names: Vec<_> = missing.iter().map(NodeId::as_str).collect();
        let text = match names.as_slice() {
            [] => format!(
                "{} queries taken over, {plans} with a plan in force",
                queries.len()
            ),
            names => format!(
                "{} queries taken over, {plans} with a plan in force; nodes that did not come back: {}",
                queries.len(),
                names.join(", ")
            ),
        };
        plane
            .events
            .record(Event::new("plan", "assignment", "coordinator", text));
    }
    for seat in plane.fleet.seats() {
        plane.roles.scheduler.tell(node_up(&seat).into());
    }
    // Read only now: a picture drawn since is told by whoever drew it.
    let fact = scheduler::Input::Cluster {
        cluster: plane.picture.cluster(),
        triggers: missing.into_iter().map(Trigger::NodeLost).collect(),
    };
    plane.roles.scheduler.tell(fact.into());
    for query in &queries {
        plane.roles.start_explorer(query);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use compass_shared::ids::{Digest, Generation, OperatorId, QueryId, SiteId};
    use compass_shared::model::cluster::{
        Node, NodeDescription, PriceSheet, Resources, Scheduling, Tier,
    };
    use compass_shared::model::pipeline::Configuration;
    use compass_shared::model::plan::{Estimate, Expectation, OperatorPlan, PlanStatus};

    use super::*;

    fn node(name: &str) -> NodeId {
        NodeId::new(name).unwrap()
    }

    fn plan(nodes: &[&str]) -> QueryPlan {
        let operators = nodes.iter().map(|name| OperatorPlan {
            operator: OperatorId::new("o").unwrap(),
            configuration: Configuration::default(),
            node: node(name),
            share: Resources::default(),
            instance: compass_shared::ids::InstanceId(1),
            artifact: None,
        });
        QueryPlan {
            query: QueryId::new("q").unwrap(),
            generation: Generation(1),
            parent: None,
            operators: operators.collect(),
            status: PlanStatus::Guessed,
            trigger: Trigger::QueryRegistered,
            expected: Expectation {
                latency_ms: Estimate::exact(1.0),
                accuracy: Estimate::exact(1.0),
                cost_usd_per_h: 0.0,
            },
        }
    }

    fn cluster(nodes: &[(&str, bool)]) -> Cluster {
        let nodes = nodes.iter().map(|(name, online)| {
            let description = NodeDescription {
                tier: Tier::Edge,
                site: SiteId::new("s").unwrap(),
                device_class: "test".to_owned(),
                emulated_speed: None,
                capacity: Resources::default(),
                labels: BTreeMap::new(),
                advertised: vec![],
                fingerprint: Digest::of(b""),
            };
            let node_now = Node {
                description,
                online: *online,
                scheduling: Scheduling::Open,
            };
            (node(name), node_now)
        });
        Cluster {
            nodes: nodes.collect(),
            links: BTreeMap::new(),
            prices: PriceSheet {
                version: 1,
                core_hour: BTreeMap::new(),
                gpu_hour: BTreeMap::new(),
                egress_gb: 0.0,
            },
        }
    }

    fn at(seconds: u64) -> Moment {
        Moment::from_duration(Duration::from_secs(seconds))
    }

    #[test]
    fn it_ends_once_when_every_node_of_a_plan_is_back() {
        let takeover = Takeover::default();
        assert!(takeover.is_over(), "there was none");
        takeover.begin(&[plan(&["a", "b"])], at(0));
        let half = cluster(&[("a", true), ("b", false), ("c", true)]);
        assert_eq!(takeover.end_if_due(&half, at(1)), None);
        assert!(!takeover.is_over());
        let whole = cluster(&[("a", true), ("b", true)]);
        assert_eq!(takeover.end_if_due(&whole, at(2)), Some(vec![]));
        assert!(takeover.is_over());
        assert_eq!(takeover.end_if_due(&whole, at(3)), None);
    }

    #[test]
    fn without_plans_there_is_nothing_to_wait_for() {
        let takeover = Takeover::default();
        takeover.begin(&[], at(0));
        assert_eq!(takeover.end_if_due(&cluster(&[]), at(0)), Some(vec![]));
    }

    #[test]
    fn a_node_that_stays_away_is_named_after_its_time() {
        let takeover = Takeover::default();
        takeover.begin(&[plan(&["a", "b"])], at(0));
        let half = cluster(&[("a", true)]);
        assert_eq!(takeover.end_if_due(&half, at(39)), None);
        assert_eq!(takeover.end_if_due(&half, at(40)), Some(vec![node("b")]));
    }

    #[test]
    fn a_broken_slo_shortens_the_wait() {
        let takeover = Takeover::default();
        takeover.begin(&[plan(&["a"])], at(0));
        takeover.plan_is_broken();
        assert_eq!(takeover.end_if_due(&cluster(&[]), at(9)), None);
        assert_eq!(
            takeover.end_if_due(&cluster(&[]), at(10)),
            Some(vec![node("a")])
        );
    }
}
