//! One query's search: from registration to a front of candidates, and again whenever its content changes.
//!
//! Start at [`Explorer::handle`]. A *campaign* goes: freeze samples at the entry node, ask the app for labels, let the search ask for
//! configurations, have the pool run them, judge their outputs, propose as soon as something is feasible and again when something
//! clearly better is found; then certify what runs on fresh samples. Without labels the golden configuration runs first and stands in
//! for the truth.
//!
//! Deliberately absent: nodes and leases (the pool's), the choice among candidates of several queries and the switch (the
//! scheduler's).

use std::collections::BTreeMap;
use std::sync::Arc;

use compass_shared::ids::{FrameId, Generation, NodeId, QueryId, SampleSetId};
use compass_shared::model::catalogue::{Catalogue, Evaluator};
use compass_shared::model::cluster::Cluster;
use compass_shared::model::pipeline::PipelineConfiguration;
use compass_shared::model::plan::OperatorPlan;
use compass_shared::model::query::Query;
use compass_shared::model::trial::{CaptureSamples, SamplesCaptured};
use compass_shared::model::trigger::Trigger;
use compass_shared::seed::Seed;
use compass_shared::time::Moment;
use serde::{Deserialize, Serialize};

use crate::Settings;
use crate::candidate::{Front, Preference};
use crate::profile::Truth;
use crate::roles::profiler::{TrialOutcome, TrialRequest};
use crate::search::{Feasible, Search, Stop, Told};
use crate::space::{InvalidSpace, Point, Space};

mod campaign;
mod failures;
mod learn;
mod propose;

use campaign::Campaign;
use failures::Again;
use propose::{InForce, Proposed};

#[cfg(test)]
mod tests;

/// What an explorer is told.
#[derive(Debug, Clone)]
pub enum Input {
    /// Begin (also after a restart, with the front the store had).
    Start,
    /// The fleet has changed.
    Cluster(Arc<Cluster>),
    /// The entry node froze samples.
    Captured(SamplesCaptured),
    /// The app's labels for a sample set; frames without a label are left out.
    Labels {
        /// The set.
        set: SampleSetId,
        /// Frame and label, in the evaluator's encoding.
        labels: Vec<(FrameId, Vec<u8>)>,
    },
    /// A trial asked for has ended.
    Trial(Box<TrialOutcome>),
    /// The content changed mode and settled.
    ContentDrifted(Trigger),
    /// Nothing on the front fits any more: search on from what is known.
    Reopen(Trigger),
    /// The plan in force, as decided by the scheduler.
    PlanInForce {
        /// Its generation.
        generation: Generation,
        /// Its operators.
        operators: Vec<OperatorPlan>,
    },
    /// What the app and the nodes measured of the plan in force over a window.
    Observed(Observation),
    /// Time passes.
    Tick,
}

/// Live measurements of the plan in force.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Observation {
    /// The generation they belong to.
    pub generation: Generation,
    /// Accuracies of answered frames, as the app judged them against its own truth.
    pub accuracies: Vec<f64>,
    /// End-to-end latencies in ms.
    pub latencies_ms: Vec<f64>,
    /// Median time in the operator and 95th percentile, in ms, and cores used, per operator of the plan.
    pub service_ms: Vec<(compass_shared::ids::OperatorId, f64, f64)>,
    /// Frames per second that arrived.
    pub arrival_hz: Option<f64>,
}

/// What an explorer wants done.
#[derive(Debug, Clone)]
pub enum Effect {
    /// Freeze samples.
    Capture {
        /// At the entry node.
        node: NodeId,
        /// How many.
        request: CaptureSamples,
    },
    /// Forget a sample set everywhere (all nodes, and the pool).
    DropSamples(SampleSetId),
    /// Ask the app for labels.
    WantLabels {
        /// The set.
        set: SampleSetId,
        /// Its frames.
        frames: Vec<FrameId>,
    },
    /// Run a trial.
    RunTrial(Box<TrialRequest>),
    /// Call off all trials of this query that are under way or waiting.
    CancelTrials(QueryId),
    /// Hand a front to the scheduler (and to the store).
    Propose(Box<Proposal>),
    /// Nothing meets the SLOs.
    Infeasible {
        /// The nearest plan and the cheapest fix, in words.
        report: String,
    },
    /// The campaign is over.
    Finished {
        /// Why.
        stop: Stop,
        /// Trials it took.
        trials: u32,
        /// Trials that gave no result.
        failed: u32,
        /// Stages that cost nothing because their outputs were still there.
        cache_hits: u32,
    },
    /// Call with `Tick` at this moment.
    WakeAt(Moment),
}

/// A front and what it rests on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Proposal {
    /// The query.
    pub query: QueryId,
    /// The candidates' profile.
    pub front: Front,
    /// Why now.
    pub trigger: Trigger,
    /// Trials behind it.
    pub trials: u32,
    /// Stages that cost nothing.
    pub cache_hits: u32,
    /// Whether the configuration in force has passed on samples that did not choose it.
    pub certified: bool,
}

/// The search for one query.
pub struct Explorer {
    query: Arc<Query>,
    catalogue: Arc<Catalogue>,
    settings: Settings,
    space: Space,
    front: Front,
    cluster: Option<Arc<Cluster>>,
    search: Box<dyn Search>,
    /// Position of the operator whose outputs are judged, and how.
    judged: Option<(usize, Evaluator)>,
    /// The coordinator's term; part of sample set ids, so that sets of an earlier term are never mistaken for ours.
    term: u64,
    sets: u64,
    trial_numbers: u64,
    campaign: Option<Campaign>,
    /// Whether the app has answered with labels when it was last asked.
    has_labels: Option<bool>,
    in_force: Option<InForce>,
    proposed: Option<Proposed>,
    /// The configuration that has passed on fresh samples, in the current content.
    certified: Option<Point>,
    /// What the app measured of configurations that broke their accuracy SLO, since the content last changed.
    refuted: Vec<(PipelineConfiguration, f64)>,
    /// The configuration that was last held against fresh samples, whatever came of it: not again in the same content.
    examined: Option<Point>,
    /// Times in a row that a search ended with nothing but doubt and was given more samples.
    doubtful_rounds: u32,
    totals: (u32, u32),
    /// Configurations whose last trial failed by what may pass, and why.
    unavailable: BTreeMap<Point, String>,
    /// When a search that was kept from its trials begins again.
    again: Option<Again>,
}

impl Explorer {
    /// An explorer for a query. `front` is what the store kept of it, if anything; `term` is the coordinator's.
    ///
    /// # Errors
    /// When the query names operators, knobs or values that the catalogue does not have.
    pub fn new(
        query: Arc<Query>,
        catalogue: Arc<Catalogue>,
        settings: Settings,
        seed: Seed,
        term: u64,
        front: Option<Front>,
    ) -> Result<Self, InvalidSpace> {
        let space = Space::new(&query.pipeline, &catalogue)?;
        let seed = seed.child("search").child(query.id.as_str());
        let search = Box::new(Feasible::new(settings.search.clone(), seed));
        let judged = judged_operator(&query, &catalogue);
        let is_new = judged.is_some() && query.slo.accuracy_min.is_some();
        let front = front.unwrap_or_else(|| Front {
            preference: if is_new {
                Preference::Safest
            } else {
                Preference::Cheapest
            },
            ..Front::default()
        });
        let mut explorer = Self {
            query,
            catalogue,
            settings,
            space,
            front,
            cluster: None,
            search,
            judged,
            term,
            sets: 0,
            trial_numbers: 0,
            campaign: None,
            has_labels: None,
            in_force: None,
            proposed: None,
            certified: None,
            examined: None,
            doubtful_rounds: 0,
            refuted: Vec::new(),
            totals: (0, 0),
            unavailable: BTreeMap::new(),
            again: None,
        };
        explorer.replay();
        Ok(explorer)
    }

    /// Takes a fact and answers with what is to be done.
    pub fn handle(&mut self, now: Moment, input: Input) -> Vec<Effect> {
        let mut effects = Vec::new();
        match input {
            Input::Start => self.start(now, &mut effects),
            Input::Cluster(cluster) => {
                self.hasten(now, &cluster, &mut effects);
                self.cluster = Some(cluster);
            }
            Input::Captured(samples) => self.captured(now, samples, &mut effects),
            Input::Labels { set, labels } => self.labels(now, set, labels, &mut effects),
            Input::Trial(outcome) => self.trial(now, *outcome, &mut effects),
            Input::ContentDrifted(trigger) => {
                self.refuted.clear();
                self.front.profile.accuracy_bias = 0.0;
                self.drifted(now, trigger, &mut effects);
            }
            Input::Reopen(trigger) => self.reopen(now, trigger, &mut effects),
            Input::PlanInForce {
                generation,
                operators,
            } => self.plan_in_force(now, generation, operators),
            Input::Observed(observation) => self.observed(&observation, &mut effects),
            Input::Tick => {}
        }
        self.pump(now, &mut effects);
        effects
    }

    /// What is known so far.
    pub const fn front(&self) -> &Front {
        &self.front
    }

    /// What it is doing, for people.
    pub fn phase(&self) -> &'static str {
        match &self.campaign {
            None => "idle",
            Some(campaign) => campaign.phase(),
        }
    }

    /// Replaces the search, for ablations and tests. Before `Start` only.
    pub fn with_search(mut self, search: Box<dyn Search>) -> Self {
        self.search = search;
        self.replay();
        self
    }

    /// Tells the search what a stored front holds, so that nothing is tried twice.
    fn replay(&mut self) {
        for row in self.front.profile.configurations.values() {
            let Some(point) = self.space.point_of(&row.configuration) else {
                continue;
            };
            if row.failed.is_some() {
                self.search.tell(&point, Told::Failed);
            } else if row.truth != Truth::Unknown {
                self.search.tell(&point, Told::Measured);
            }
        }
    }
}

/// The last operator whose kind has an evaluator.
fn judged_operator(query: &Query, catalogue: &Catalogue) -> Option<(usize, Evaluator)> {
    query
        .pipeline
        .operators
        .iter()
        .enumerate()
        .filter_map(|(position, operator)| {
            let evaluator = catalogue.0.get(&operator.kind)?.evaluator?;
            Some((position, evaluator))
        })
        .next_back()
}
