//! The monitor as an actor: reads what was heard of nodes at the moment it runs, and passes on what it noticed.

use std::sync::Arc;

use async_trait::async_trait;
use compass_planning::roles::monitor::{Effect, Input as CoreInput, Monitor};
use compass_planning::roles::{explorer, profiler, scheduler};
use compass_shared::model::cluster::Scheduling;
use compass_shared::model::trigger::Trigger;
use compass_shared::time::Moment;

use super::role::{Perform, Role, Weight};
use super::scheduler::node_up;
use crate::events::Event;
use crate::fleet::Fleet;
use crate::plane::Plane;
use crate::store::records::{LinksRecord, NodeRecord, QueryRecord, QueryState};
use crate::store::{StoreError, get, scan};
use crate::takeover;

/// What the monitor's actor is told.
#[derive(Debug)]
pub enum Input {
    /// A fact for the core.
    Core(CoreInput),
    /// Look at what was heard of the nodes, and at the time.
    Pulse,
}

impl From<CoreInput> for Input {
    fn from(input: CoreInput) -> Self {
        Self::Core(input)
    }
}

/// The core and where it looks.
pub struct MonitorRole {
    core: Monitor,
    fleet: Arc<Fleet>,
}

impl MonitorRole {
    /// A monitor that knows nothing yet; see [`MonitorRole::facts`].
    pub fn build(plane: &Plane) -> Self {
        let core = Monitor::new(
            plane.settings.planning.detect.clone(),
            plane.configs.prices.clone(),
        );
        Self {
            core,
            fleet: plane.fleet.clone(),
        }
    }

    /// The fleet and the queries as they are now. To be taken once the actor can be told of changes, so that none falls in between.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn facts(plane: &Plane) -> Result<Vec<Input>, StoreError> {
        let mut facts = remembered_links(plane)?;
        for record in scan::<NodeRecord>(plane.office.store())? {
            if record.scheduling != Scheduling::Open {
                facts.push(CoreInput::Scheduling {
                    node: record.id,
                    scheduling: record.scheduling,
                });
            }
        }
        for seat in plane.fleet.seats() {
            facts.push(CoreInput::NodeUp {
                node: seat.node.clone(),
                description: seat.registration.description.clone(),
            });
        }
        for record in scan::<QueryRecord>(plane.office.store())? {
            if record.state == QueryState::Active {
                facts.push(CoreInput::QueryUp(Arc::new(record.query)));
            }
        }
        for plan in plane.queries.plans() {
            facts.push(CoreInput::PlanInForce(Box::new(plan)));
        }
        Ok(facts.into_iter().map(Input::Core).collect())
    }
}

/// Links as they were known last: before this process, or before this actor.
fn remembered_links(plane: &Plane) -> Result<Vec<CoreInput>, StoreError> {
    let drawn = plane.picture.cluster();
    let links: Vec<_> = if drawn.links.is_empty() {
        match get::<LinksRecord>(plane.office.store(), LinksRecord::KEY) {
            Ok(found) => found.map(|(record, _)| record.links).unwrap_or_default(),
            Err(error @ StoreError::Failed(_)) => return Err(error),
            Err(error) => {
                // They can be measured again.
                tracing::error!(%error, "the stored links are not usable");
                Vec::new()
            }
        }
    } else {
        let links = drawn.links.iter();
        links
            .map(|((from, to), link)| (from.clone(), to.clone(), *link))
            .collect()
    };
    let facts = links.into_iter();
    Ok(facts
        .map(|(from, to, link)| CoreInput::Remembered { from, to, link })
        .collect())
}

impl Role for MonitorRole {
    const KIND: &'static str = "monitor";
    type Input = Input;
    type Effect = Effect;

    fn handle(&mut self, now: Moment, input: Input) -> Vec<Effect> {
        let Input::Core(input) = input else {
            let mut effects = Vec::new();
            for heard in self.fleet.take_heard() {
                let fact = match heard.report {
                    Some(report) => CoreInput::Report {
                        node: heard.node,
                        report: Box::new((*report).clone()),
                    },
                    None => CoreInput::Heard(heard.node),
                };
                effects.extend(self.core.handle(now, fact));
            }
            effects.extend(self.core.handle(now, CoreInput::Tick));
            return effects;
        };
        self.core.handle(now, input)
    }

    fn tick() -> Input {
        Input::Pulse
    }

    fn wake_at(_: &Effect) -> Option<Moment> {
        None
    }

    fn weight(input: &Input) -> Weight {
        match input {
            Input::Core(
                CoreInput::App { .. } | CoreInput::Transfer { .. } | CoreInput::Event { .. },
            ) => Weight::Bulk,
            _ => Weight::Essential,
        }
    }

    fn supersedes(newer: &Input, waiting: &Input) -> bool {
        matches!((newer, waiting), (Input::Pulse, Input::Pulse))
    }
}

/// Passes on what the monitor noticed.
pub struct MonitorPerformer(pub Arc<Plane>);

#[async_trait]
impl Perform<Effect> for MonitorPerformer {
    async fn perform(&self, effect: Effect) -> Result<(), String> {
        let plane = &self.0;
        match effect {
            Effect::Cluster { cluster, triggers } => {
                plane.picture.set_cluster(cluster.clone());
                for trigger in &triggers {
                    record(plane, object_of(trigger), trigger);
                }
                plane.roles.profiler.tell(profiler::Input::Cluster {
                    cluster: cluster.clone(),
                    granted: plane.picture.granted(),
                });
                plane
                    .roles
                    .tell_explorers(&explorer::Input::Cluster(cluster.clone()));
                if !plane.takeover.is_over() {
                    takeover::try_end(plane);
                } else if !plane.is_frozen() {
                    tell_of_returns(plane, &triggers);
                    let fact = scheduler::Input::Cluster { cluster, triggers };
                    plane.roles.scheduler.tell(fact.into());
                }
            }
            Effect::Noticed { query, trigger } => {
                record(plane, format!("query {query}"), &trigger);
                if !plane.takeover.is_over() {
                    if matches!(trigger, Trigger::SloViolated { .. }) {
                        plane.takeover.plan_is_broken();
                    }
                    return Ok(());
                }
                if plane.is_frozen() {
                    return Ok(());
                }
                if matches!(trigger, Trigger::ContentDrifted { .. }) {
                    let fact = explorer::Input::ContentDrifted(trigger.clone());
                    plane.roles.tell_explorer(&query, fact);
                }
                plane
                    .roles
                    .scheduler
                    .tell(scheduler::Input::Noticed { query, trigger }.into());
            }
            Effect::Observed { query, observation } => {
                let fact = explorer::Input::Observed(*observation);
                plane.roles.tell_explorer(&query, fact);
            }
            Effect::Alarm(text) => {
                plane
                    .events
                    .record(Event::new("alarm", "fleet", "monitor", text));
            }
        }
        Ok(())
    }
}

/// What a trigger of the fleet is about.
fn object_of(trigger: &Trigger) -> String {
    match trigger {
        Trigger::NodeJoined(node)
        | Trigger::NodeLost(node)
        | Trigger::ShareNotAchieved { node, .. }
        | Trigger::PlanNotApplied { node, .. } => format!("node {node}"),
        Trigger::LinkDegraded { from, to, .. } | Trigger::LinkRecovered { from, to, .. } => {
            format!("link {from}->{to}")
        }
        _ => "fleet".to_owned(),
    }
}

/// A node counts as lost when nothing is heard of it, though its session may live on: when it is heard of again, no arrival tells the
/// scheduler what it has.
fn tell_of_returns(plane: &Plane, triggers: &[Trigger]) {
    for trigger in triggers {
        if let Trigger::NodeJoined(node) = trigger
            && let Some(seat) = plane.fleet.seat(node)
        {
            plane.roles.scheduler.tell(node_up(&seat).into());
        }
    }
}

fn record(plane: &Plane, object: String, trigger: &Trigger) {
    let event = Event::new("trigger", object, "monitor", trigger.to_string());
    plane.events.record(event.because(trigger.clone()));
}
