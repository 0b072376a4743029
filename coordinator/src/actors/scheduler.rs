//! The scheduler as an actor: the only writer of the assignment.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use async_trait::async_trait;
use compass_planning::roles::scheduler::{
    Effect as CoreEffect, Input as CoreInput, Persist, PlanChange, Restored, Scheduler,
};
use compass_planning::roles::{explorer, monitor, profiler};
use compass_shared::ids::{NodeId, QueryId};
use compass_shared::model::cluster::Resources;
use compass_shared::time::Moment;
use compass_shared::wire::v1::CoordinatorToApp;

use super::role::{Perform, Role};
use crate::events::{Event, now_unix_ms};
use crate::fleet::Seat;
use crate::metrics::count;
use crate::plane::Plane;
use crate::store::records::{AssignmentRecord, FrontRecord, PlanRecord, QueryRecord, QueryState};
use crate::store::{StoreError, get, scan};

/// What the scheduler is told of a node with a session: how far it is, and what it runs.
pub fn node_up(seat: &Seat) -> CoreInput {
    let (applied, instances) = seat.applied();
    CoreInput::NodeUp {
        node: seat.node.clone(),
        applied,
        instances,
    }
}

/// What the scheduler's actor is told.
#[derive(Debug)]
pub struct Input(CoreInput);

impl From<CoreInput> for Input {
    fn from(input: CoreInput) -> Self {
        Self(input)
    }
}

/// What is to be done.
#[derive(Debug)]
pub enum Effect {
    /// As the core says.
    Core(CoreEffect),
    /// What live plans hold of each node has changed.
    Granted(BTreeMap<NodeId, Resources>),
}

/// The core, and what it had granted when last asked.
pub struct SchedulerRole {
    core: Scheduler,
    granted: BTreeMap<NodeId, Resources>,
}

/// Queries a scheduler was restored with.
pub type Known = BTreeSet<QueryId>;

impl SchedulerRole {
    /// A scheduler that takes office: in a new term, with the plans the store has in force.
    ///
    /// # Errors
    /// When the store cannot be read or the term cannot be made durable.
    pub async fn build(plane: &Plane, is_restart: bool) -> Result<(Self, Known), StoreError> {
        let store = plane.office.store();
        let assignment = get::<AssignmentRecord>(store, AssignmentRecord::KEY)?
            .map(|(record, _)| record.assignment)
            .unwrap_or_default();
        // The first scheduler of a process works in the term the process took office in, later ones each in a new one.
        let beyond = match is_restart {
            true => plane.office.term(),
            false => assignment.commit.term,
        };
        let term = plane.office.begin_term_beyond(beyond).await?;
        let mut queries = Vec::new();
        let mut known = Known::new();
        for record in scan::<QueryRecord>(store)? {
            if record.state != QueryState::Active {
                continue;
            }
            known.insert(record.query.id.clone());
            let key = FrontRecord::key_of(&record.query.id);
            let front = get::<FrontRecord>(store, &key).ok().flatten();
            queries.push(Restored {
                newest: PlanRecord::newest(store, &record.query.id)?,
                query: Arc::new(record.query),
                app: record.app_fingerprint,
                front: front.map(|(record, _)| record.front),
            });
        }
        let core = Scheduler::restore(
            plane.configs.catalogue.clone(),
            plane.settings.planning.clone(),
            term,
            assignment,
            queries,
        );
        let granted = core.granted();
        plane.picture.set_granted(granted.clone());
        Ok((Self { core, granted }, known))
    }

    /// What has come since it was restored, and who is connected. To be taken once the actor can be told of changes.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn facts(plane: &Plane, known: &Known) -> Result<Vec<Input>, StoreError> {
        let mut facts = Vec::new();
        for record in scan::<QueryRecord>(plane.office.store())? {
            if record.state == QueryState::Active && !known.contains(&record.query.id) {
                facts.push(CoreInput::Register {
                    query: Arc::new(record.query),
                    app: record.app_fingerprint,
                });
            }
        }
        // During a takeover it is told at the end: half a fleet is no picture.
        if plane.takeover.is_over() {
            facts.extend(plane.fleet.seats().iter().map(|seat| node_up(seat)));
            facts.push(CoreInput::Cluster {
                cluster: plane.picture.cluster(),
                triggers: Vec::new(),
            });
        }
        Ok(facts.into_iter().map(Input).collect())
    }
}

impl Role for SchedulerRole {
    const KIND: &'static str = "scheduler";
    type Input = Input;
    type Effect = Effect;

    fn handle(&mut self, now: Moment, input: Input) -> Vec<Effect> {
        let effects = self.core.handle(now, input.0);
        let mut effects: Vec<_> = effects.into_iter().map(Effect::Core).collect();
        let granted = self.core.granted();
        if granted != self.granted {
            self.granted = granted.clone();
            effects.push(Effect::Granted(granted));
        }
        effects
    }

    fn tick() -> Input {
        Input(CoreInput::Tick)
    }

    fn wake_at(effect: &Effect) -> Option<Moment> {
        match effect {
            Effect::Core(CoreEffect::WakeAt(moment)) => Some(*moment),
            _ => None,
        }
    }

    fn supersedes(newer: &Input, waiting: &Input) -> bool {
        match (&newer.0, &waiting.0) {
            // An update with triggers says more than a later picture.
            (CoreInput::Cluster { .. }, CoreInput::Cluster { triggers, .. }) => triggers.is_empty(),
            (CoreInput::Tick, CoreInput::Tick) => true,
            _ => false,
        }
    }
}

/// Carries out what the scheduler decided, in order: durable first, then sent.
pub struct SchedulerPerformer(pub Arc<Plane>);

#[async_trait]
impl Perform<Effect> for SchedulerPerformer {
    async fn perform(&self, effect: Effect) -> Result<(), String> {
        let plane = &self.0;
        match effect {
            Effect::Granted(granted) => {
                plane.picture.set_granted(granted.clone());
                plane.roles.profiler.tell(profiler::Input::Cluster {
                    cluster: plane.picture.cluster(),
                    granted,
                });
            }
            Effect::Core(CoreEffect::Persist(persist)) => {
                self.persist(*persist)
                    .await
                    .map_err(|error| error.to_string())?;
            }
            Effect::Core(CoreEffect::SendTarget { node, target }) => {
                tracing::debug!(%node, commit = %target.commit, instances = target.instances.len(), "target sent");
                plane.dispatch.send(&plane.fleet, &node, *target);
            }
            Effect::Core(CoreEffect::PlanChanged(change)) => {
                self.plan_changed(*change)
                    .await
                    .map_err(|error| error.to_string())?;
            }
            Effect::Core(CoreEffect::Infeasible { query, report }) => {
                plane.events.record(Event::new(
                    "query",
                    format!("query {query}"),
                    "scheduler",
                    format!("infeasible: {report}"),
                ));
                plane.queries.infeasible(&query, report);
            }
            Effect::Core(CoreEffect::Reopen { query, trigger }) => {
                let event = Event::new(
                    "query",
                    format!("query {query}"),
                    "scheduler",
                    format!("search reopened: {trigger}"),
                );
                plane.events.record(event.because(trigger.clone()));
                let fact = explorer::Input::Reopen(trigger);
                plane.roles.tell_explorer(&query, fact);
            }
            Effect::Core(CoreEffect::Alarm(text)) => {
                plane
                    .events
                    .record(Event::new("alarm", "assignment", "scheduler", text));
            }
            Effect::Core(CoreEffect::WakeAt(_)) => {}
        }
        Ok(())
    }
}

impl SchedulerPerformer {
    async fn persist(&self, persist: Persist) -> Result<(), StoreError> {
        let office = &self.0.office;
        match persist {
            Persist::Plan { plan, explanation } => {
                let now = now_unix_ms();
                let record = PlanRecord::new(*plan, *explanation, now);
                office.commit(office.begin().put(&record)).await?;
            }
            Persist::Assignment(assignment) => {
                let record = AssignmentRecord::new(assignment);
                office.commit(office.begin().put(&record)).await?;
            }
            Persist::Term(term) => {
                // The term asked for is the lowest that will do.
                office.begin_term_beyond(term.saturating_sub(1)).await?;
            }
        }
        Ok(())
    }

    async fn plan_changed(&self, change: PlanChange) -> Result<(), StoreError> {
        let plane = &self.0;
        let PlanChange {
            query,
            route,
            trigger,
            summary,
            plan,
            noticed,
            planned,
            switched,
            gap,
        } = change;
        count(&plane.metrics.replans, trigger.name());
        let gap_text = gap.map_or_else(String::new, |gap| format!("; expected gap {gap:?}"));
        let text = format!(
            "generation {} in force because {trigger}: {summary} (decided {:.0} ms and switched {:.0} ms after it was noticed{gap_text})",
            plan.generation,
            compass_shared::time::ms(planned.since(noticed)),
            compass_shared::time::ms(switched.since(noticed)),
        );
        let event = Event::new("plan", format!("query {query}"), "scheduler", text)
            .because(trigger.clone())
            .with_generation(plan.generation);
        plane.events.record(event);
        plane.dispatch.expect(&plan);
        plane.queries.plan_changed(
            plan.clone(),
            CoordinatorToApp::PlanChanged {
                route,
                trigger,
                summary,
            },
        );
        plane
            .roles
            .monitor
            .tell(monitor::Input::PlanInForce(Box::new(plan.clone())).into());
        let fact = explorer::Input::PlanInForce {
            generation: plan.generation,
            operators: plan.operators.clone(),
        };
        plane.roles.tell_explorer(&query, fact);
        let detected = plane.clock.unix_ms(noticed);
        let committed = plane.clock.unix_ms(switched);
        plane
            .note_on_plan(&query, plan.generation, |record| {
                record.detected_unix_ms = detected;
                record.committed_unix_ms = committed;
            })
            .await?;
        Ok(())
    }
}
