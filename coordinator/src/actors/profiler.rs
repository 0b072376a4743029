//! The pool of trials as an actor.

use std::sync::Arc;

use async_trait::async_trait;
pub use compass_planning::roles::profiler::Input;
use compass_planning::roles::profiler::{Effect, Profiler};
use compass_planning::roles::{explorer, monitor};
use compass_shared::ids::TrialId;
use compass_shared::model::trial::StageFailure;
use compass_shared::time::Moment;
use compass_shared::wire::v1::CoordinatorToAgent;

use super::role::{Perform, Role};
use crate::plane::Plane;

/// Trial numbers of one term: more than any term can run.
const TRIALS_PER_TERM_BITS: u32 = 32;

/// The core, and what it had counted when last asked.
pub struct ProfilerRole {
    core: Profiler,
    plane: Arc<Plane>,
    cache_hits: u64,
}

impl ProfilerRole {
    /// A pool whose numbers exceed every earlier one's.
    pub fn build(plane: &Arc<Plane>) -> Self {
        let of_term = TrialId(plane.office.term() << TRIALS_PER_TERM_BITS);
        let first = of_term.max(plane.trials.newest().next());
        let core = Profiler::new(
            plane.configs.catalogue.clone(),
            plane.settings.planning.trial.clone(),
            first,
        );
        Self {
            core,
            plane: plane.clone(),
            cache_hits: 0,
        }
    }

    /// The fleet as it is now.
    pub fn facts(plane: &Plane) -> Vec<Input> {
        vec![Input::Cluster {
            cluster: plane.picture.cluster(),
            granted: plane.picture.granted(),
        }]
    }
}

impl Role for ProfilerRole {
    const KIND: &'static str = "profiler";
    type Input = Input;
    type Effect = Effect;

    fn handle(&mut self, now: Moment, input: Input) -> Vec<Effect> {
        let effects = self.core.handle(now, input);
        for _ in self.cache_hits..self.core.cache_hits() {
            self.plane.trials.cache_hit(&self.plane.metrics);
        }
        self.cache_hits = self.core.cache_hits();
        effects
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

    fn supersedes(newer: &Input, waiting: &Input) -> bool {
        matches!(
            (newer, waiting),
            (Input::Cluster { .. }, Input::Cluster { .. }) | (Input::Tick, Input::Tick)
        )
    }
}

/// Sends stages to nodes and outcomes to explorers.
pub struct ProfilerPerformer(pub Arc<Plane>);

#[async_trait]
impl Perform<Effect> for ProfilerPerformer {
    async fn perform(&self, effect: Effect) -> Result<(), String> {
        let plane = &self.0;
        match effect {
            Effect::RunStage { node, stage } => {
                plane.trials.begin(&node, &stage);
                let trial = stage.trial;
                tracing::debug!(%trial, %node, operator = %stage.operator, query = %stage.query, "stage sent");
                let message = CoordinatorToAgent::RunStage(stage);
                if let Err(error) = plane.fleet.send(&node, message) {
                    let failure = StageFailure::Unavailable(format!("{node}: {error}"));
                    plane.trials.failed(trial, &failure, &plane.metrics);
                    plane.roles.profiler.tell(Input::StageFailed {
                        node,
                        trial,
                        failure,
                    });
                }
            }
            Effect::CancelStage { node, trial } => {
                let _ = plane
                    .fleet
                    .send(&node, CoordinatorToAgent::CancelStage(trial));
            }
            Effect::Pair { reader, holder } => {
                plane.fleet.pair(&reader, &holder);
                plane.fleet.pair(&holder, &reader);
            }
            Effect::Outcome(outcome) => {
                let query = outcome.query.clone();
                plane
                    .roles
                    .tell_explorer(&query, explorer::Input::Trial(outcome));
            }
            Effect::Ran(_) => {
                // The log of stage runs is kept where their answers arrive: it also knows the failed ones.
            }
            Effect::Transfer {
                from,
                to,
                bytes,
                ms,
            } => {
                let fact = monitor::Input::Transfer {
                    from,
                    to,
                    bytes,
                    ms,
                };
                plane.roles.monitor.tell(fact.into());
            }
            Effect::WakeAt(_) => {}
        }
        Ok(())
    }
}
