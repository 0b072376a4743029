//! The search of one query as an actor.

use std::sync::Arc;

use async_trait::async_trait;
pub use compass_planning::roles::explorer::Input;
use compass_planning::roles::explorer::{Effect, Explorer};
use compass_planning::roles::{profiler, scheduler};
use compass_shared::ids::QueryId;
use compass_shared::model::trial::SamplesCaptured;
use compass_shared::time::Moment;
use compass_shared::wire::v1::{CoordinatorToAgent, CoordinatorToApp};

use super::role::{Perform, Role, Weight};
use crate::events::Event;
use crate::plane::Plane;
use crate::store::get;
use crate::store::records::{FrontRecord, QueryRecord};

/// The core.
pub struct ExplorerRole(Explorer);

impl ExplorerRole {
    /// An explorer with what the store kept of its query.
    ///
    /// # Errors
    /// Why it cannot search, in words.
    pub fn build(plane: &Plane, query: &QueryId) -> Result<Self, String> {
        let words = |error: crate::store::StoreError| error.to_string();
        let store = plane.office.store();
        let (record, _) = get::<QueryRecord>(store, &QueryRecord::key_of(query))
            .map_err(words)?
            .ok_or("the query is not in the store")?;
        let front = match get::<FrontRecord>(store, &FrontRecord::key_of(query)) {
            Ok(found) => found.map(|(record, _)| record.front),
            Err(error) => {
                // What was learnt can be learnt again; the query goes on.
                tracing::error!(%query, %error, "the stored front is not usable: searching from nothing");
                None
            }
        };
        let seed = compass_shared::seed::Seed(plane.settings.seed).child(query.as_str());
        let core = Explorer::new(
            Arc::new(record.query),
            plane.configs.catalogue.clone(),
            plane.settings.planning.clone(),
            seed,
            plane.office.term(),
            front,
        )
        .map_err(|error| error.to_string())?;
        Ok(Self(core))
    }

    /// The fleet and the plan in force as they are now, and the word to begin.
    pub fn facts(plane: &Plane, query: &QueryId) -> Vec<Input> {
        let mut facts = vec![Input::Cluster(plane.picture.cluster())];
        if let Some(in_force) = plane.queries.view(query).in_force {
            facts.push(Input::PlanInForce {
                generation: in_force.plan.generation,
                operators: in_force.plan.operators,
            });
        }
        facts.push(Input::Start);
        facts
    }
}

impl Role for ExplorerRole {
    const KIND: &'static str = "explorer";
    type Input = Input;
    type Effect = Effect;

    fn handle(&mut self, now: Moment, input: Input) -> Vec<Effect> {
        self.0.handle(now, input)
    }

    fn tick() -> Input {
        Input::Tick
    }

    fn wake_at(effect: &Effect) -> Option<Moment> {
        match effect {
            Effect::WakeAt(moment) => Some(*moment),
            _ => None,
        }
    }

    fn weight(input: &Input) -> Weight {
        match input {
            Input::Observed(_) => Weight::Bulk,
            _ => Weight::Essential,
        }
    }

    fn supersedes(newer: &Input, waiting: &Input) -> bool {
        matches!(
            (newer, waiting),
            (Input::Cluster(_), Input::Cluster(_)) | (Input::Tick, Input::Tick)
        )
    }
}

/// Carries out what one query's explorer wants.
pub struct ExplorerPerformer {
    /// The rest of the coordinator.
    pub plane: Arc<Plane>,
    /// Its query.
    pub query: QueryId,
}

#[async_trait]
impl Perform<Effect> for ExplorerPerformer {
    async fn perform(&self, effect: Effect) -> Result<(), String> {
        let (plane, query) = (&self.plane, &self.query);
        match effect {
            Effect::Capture { node, request } => {
                let set = request.set;
                plane.queries.begin_set(query, set);
                if let Err(error) = plane
                    .fleet
                    .send(&node, CoordinatorToAgent::Capture(request))
                {
                    tracing::info!(%query, %node, %error, "no samples captured");
                    let nothing = SamplesCaptured {
                        set,
                        segments: Vec::new(),
                        bytes: 0,
                    };
                    plane.roles.tell_explorer(query, Input::Captured(nothing));
                }
            }
            Effect::DropSamples(set) => {
                for seat in plane.fleet.seats() {
                    let _ = seat.send(CoordinatorToAgent::DropSamples(set));
                }
                plane.roles.profiler.tell(profiler::Input::DropSet(set));
            }
            Effect::WantLabels { set, frames } => {
                plane
                    .queries
                    .send(query, CoordinatorToApp::LabelsWanted { set, frames });
            }
            Effect::RunTrial(request) => {
                plane.roles.profiler.tell(profiler::Input::Trial(request));
            }
            Effect::CancelTrials(query) => {
                plane.roles.profiler.tell(profiler::Input::Cancel(query));
            }
            Effect::Propose(proposal) => {
                let record = FrontRecord {
                    query: query.clone(),
                    front: proposal.front.clone(),
                };
                let transaction = plane.office.begin().put(&record);
                plane
                    .office
                    .commit(transaction)
                    .await
                    .map_err(|error| error.to_string())?;
                if !plane.is_frozen() {
                    let fact = scheduler::Input::Propose(proposal);
                    plane.roles.scheduler.tell(fact.into());
                }
            }
            Effect::Infeasible { report } => {
                plane.events.record(Event::new(
                    "query",
                    format!("query {query}"),
                    "explorer",
                    format!("infeasible: {report}"),
                ));
                plane.queries.infeasible(query, report);
            }
            Effect::Finished {
                stop,
                trials,
                failed,
                cache_hits,
            } => {
                plane.events.record(Event::new(
                    "query",
                    format!("query {query}"),
                    "explorer",
                    format!(
                        "search ended ({stop:?}) after {trials} trials, {failed} without a result, {cache_hits} cache hits"
                    ),
                ));
            }
            Effect::WakeAt(_) => {}
        }
        Ok(())
    }
}
