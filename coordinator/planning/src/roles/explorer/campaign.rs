//! A campaign from the frozen samples to its end.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use compass_shared::ids::{Digest, FrameId, OperatorId, SampleSetId};
use compass_shared::model::trial::{CaptureSamples, SamplesCaptured, StageFailure};
use compass_shared::model::trigger::{SloKind, Trigger};
use compass_shared::time::Moment;

use super::learn::merged;
use super::propose::configuration_of;
use super::{Effect, Explorer};
use crate::candidate::{Candidate, Front, Preference};
use crate::predict::Context;
use crate::profile::{Moments, Truth};
use crate::roles::profiler::{TrialOutcome, TrialRequest};
use crate::search::{Next, Stop, Told, View};
use crate::space::Point;

/// A source that sends nothing is asked again after this long.
const CAPTURE_PAUSE: Duration = Duration::from_secs(1);
/// An entry node's answer may be this much later than the deadline it was given.
const CAPTURE_SLACK: Duration = Duration::from_secs(2);
/// Rounds of fresh samples after which a plan that is neither confirmed nor refuted counts by its mean.
const CERTIFY_ROUNDS_MAX: u32 = 3;
/// Times that a search goes on with fresh samples because those it had could not tell.
const DOUBTFUL_ROUNDS_MAX: u32 = 3;
/// Cheap configurations beside the one in force that a certifying campaign measures again; and the best for when links out of the site
/// degrade or fail.
const CERTIFY_OTHERS: usize = 2;

/// What a campaign is for.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Purpose {
    /// Find plans.
    Search,
    /// Hold the configuration in force against samples that did not choose it.
    Certify { point: Point, round: u32 },
}

/// How far it is.
#[derive(Debug, Clone, PartialEq)]
enum Stage {
    /// The entry node was asked for samples.
    Capturing { until: Moment },
    /// It had none; it is asked again.
    Pausing { until: Moment },
    /// Trials run.
    Running,
}

/// One campaign.
#[derive(Debug, Clone)]
pub(super) struct Campaign {
    pub(super) trigger: Trigger,
    pub(super) purpose: Purpose,
    pub(super) since: Moment,
    stage: Stage,
    pub(super) set: SampleSetId,
    pub(super) segments: Vec<Vec<FrameId>>,
    /// While labels may still come.
    labels_until: Option<Moment>,
    pub(super) truth: Option<(Truth, BTreeMap<FrameId, Vec<u8>>)>,
    pub(super) outputs: BTreeMap<Point, BTreeMap<FrameId, Vec<u8>>>,
    /// Scores a configuration had before this campaign.
    pub(super) before: BTreeMap<Point, Vec<Moments>>,
    /// Scores from this campaign's samples alone.
    pub(super) fresh: BTreeMap<Point, Vec<Moments>>,
    /// Scores of the configuration that is to be certified, from the rounds before.
    earlier_rounds: Vec<Moments>,
    pub(super) pending: BTreeMap<u64, Point>,
    /// Points a certifying campaign has still to run.
    queue: VecDeque<Point>,
    pub(super) trials: u32,
    /// Trials that gave no result.
    pub(super) failed: u32,
    pub(super) cache_hits: u32,
    pub(super) has_proposed: bool,
}

impl Campaign {
    pub(super) fn phase(&self) -> &'static str {
        match (&self.stage, &self.purpose) {
            (Stage::Capturing { .. } | Stage::Pausing { .. }, _) => "waiting for frames",
            (Stage::Running, Purpose::Search) => "searching",
            (Stage::Running, Purpose::Certify { .. }) => "certifying",
        }
    }
}

impl Explorer {
    pub(super) fn start(&mut self, now: Moment, effects: &mut Vec<Effect>) {
        let is_known = self
            .front
            .profile
            .configurations
            .values()
            .any(|row| row.truth != Truth::Unknown);
        if self.campaign.is_none() && !is_known {
            self.begin(now, Trigger::QueryRegistered, Purpose::Search, effects);
        }
    }

    /// Begins a campaign with a fresh sample set.
    pub(super) fn begin(
        &mut self,
        now: Moment,
        trigger: Trigger,
        purpose: Purpose,
        effects: &mut Vec<Effect>,
    ) {
        self.end_campaign(effects);
        if purpose == Purpose::Search {
            self.try_unavailable_again();
        }
        let mut campaign = Campaign {
            trigger,
            purpose,
            since: now,
            stage: Stage::Pausing { until: now },
            set: SampleSetId(0),
            segments: Vec::new(),
            labels_until: None,
            truth: None,
            outputs: BTreeMap::new(),
            before: BTreeMap::new(),
            fresh: BTreeMap::new(),
            earlier_rounds: Vec::new(),
            pending: BTreeMap::new(),
            queue: VecDeque::new(),
            trials: 0,
            failed: 0,
            cache_hits: 0,
            has_proposed: false,
        };
        self.capture(now, &mut campaign, effects);
        self.campaign = Some(campaign);
    }

    /// Calls off what runs and forgets its samples.
    pub(super) fn end_campaign(&mut self, effects: &mut Vec<Effect>) {
        let Some(campaign) = self.campaign.take() else {
            return;
        };
        for point in campaign.pending.values() {
            self.search.tell(point, Told::Cancelled);
        }
        if !campaign.pending.is_empty() {
            effects.push(Effect::CancelTrials(self.query.id.clone()));
        }
        effects.push(Effect::DropSamples(campaign.set));
    }

    fn capture(&mut self, now: Moment, campaign: &mut Campaign, effects: &mut Vec<Effect>) {
        let trial = self.settings.trial.clone();
        campaign.set = self.next_set();
        let segments = match campaign.purpose {
            // A first plan is wanted at once; once something runs, there is time to look at more.
            Purpose::Search if self.in_force.is_none() => trial.quick_segments,
            Purpose::Search | Purpose::Certify { .. } => trial.segments,
        };
        let until = now + trial.capture_deadline + CAPTURE_SLACK;
        campaign.stage = Stage::Capturing { until };
        effects.push(Effect::Capture {
            node: self.query.entry.clone(),
            request: CaptureSamples {
                query: self.query.id.clone(),
                set: campaign.set,
                segments,
                frames_per_segment: trial.frames_per_segment,
                deadline: trial.capture_deadline,
            },
        });
        effects.push(Effect::WakeAt(until));
    }

    /// Set ids are hashes of term, query and number: unique in the fleet without anybody handing them out.
    fn next_set(&mut self) -> SampleSetId {
        self.sets += 1;
        let text = format!("{}|{}|{}", self.term, self.query.id, self.sets);
        let digest = Digest::of(text.as_bytes());
        let mut first = [0; 8];
        first.copy_from_slice(&digest.as_bytes()[..8]);
        SampleSetId(u64::from_be_bytes(first))
    }

    pub(super) fn captured(
        &mut self,
        now: Moment,
        samples: SamplesCaptured,
        effects: &mut Vec<Effect>,
    ) {
        let Some(mut campaign) = self.campaign.take() else {
            return;
        };
        let is_ours =
            campaign.set == samples.set && matches!(campaign.stage, Stage::Capturing { .. });
        if !is_ours {
            self.campaign = Some(campaign);
            return;
        }
        let segments: Vec<_> = samples
            .segments
            .into_iter()
            .filter(|s| !s.is_empty())
            .collect();
        let frames: Vec<FrameId> = segments.iter().flatten().copied().collect();
        if frames.is_empty() {
            let until = now + CAPTURE_PAUSE;
            campaign.stage = Stage::Pausing { until };
            effects.push(Effect::WakeAt(until));
            self.campaign = Some(campaign);
            return;
        }
        self.front.profile.input_bytes = samples.bytes as f64 / frames.len() as f64;
        campaign.segments = segments;
        campaign.stage = Stage::Running;
        effects.push(Effect::WakeAt(
            campaign.since + self.settings.trial.campaign_deadline,
        ));
        if self.judged.is_none() {
            campaign.truth = Some((Truth::Unjudged, BTreeMap::new()));
        } else {
            effects.push(Effect::WantLabels {
                set: campaign.set,
                frames,
            });
            let until = now + self.settings.trial.labels_deadline;
            campaign.labels_until = Some(until);
            effects.push(Effect::WakeAt(until));
        }
        self.campaign = Some(campaign);
        if self.has_labels == Some(false) {
            // It had none before: do not wait for them. If they come all the same, they count.
            self.go_without_labels();
        }
        self.fill_certify_queue();
    }

    pub(super) fn labels(
        &mut self,
        now: Moment,
        set: SampleSetId,
        labels: Vec<(FrameId, Vec<u8>)>,
        effects: &mut Vec<Effect>,
    ) {
        let Some(campaign) = self.campaign.as_mut().filter(|c| c.set == set) else {
            return;
        };
        let Some((_, evaluator)) = self.judged else {
            return;
        };
        // A label that cannot be read is none.
        let readable: BTreeMap<FrameId, Vec<u8>> = labels
            .into_iter()
            .filter(|(_, label)| compass_shared::evaluate::judge(evaluator, label, label).is_ok())
            .collect();
        if readable.is_empty() {
            self.go_without_labels();
            return;
        }
        campaign.labels_until = None;
        campaign.truth = Some((Truth::Labels, readable));
        self.has_labels = Some(true);
        self.judge_all();
        self.consider(now, effects);
    }

    fn go_without_labels(&mut self) {
        let Some(campaign) = &mut self.campaign else {
            return;
        };
        if campaign.truth.is_some() {
            return;
        }
        campaign.labels_until = None;
        self.has_labels = Some(false);
        let golden = self.space.golden();
        if campaign.outputs.contains_key(&golden) {
            self.take_golden_for_truth();
        } else if campaign.purpose == Purpose::Search {
            self.search.require_golden();
        } else if !campaign.queue.contains(&golden) {
            campaign.queue.push_front(golden);
        }
    }

    pub(super) fn take_golden_for_truth(&mut self) {
        let golden = self.space.golden();
        if let Some(campaign) = &mut self.campaign
            && campaign.truth.is_none()
            && campaign.labels_until.is_none()
            && let Some(outputs) = campaign.outputs.get(&golden)
        {
            campaign.truth = Some((Truth::Golden, outputs.clone()));
            self.judge_all();
        }
    }

    /// What a certifying campaign runs: the configuration in force, and the best others.
    fn fill_certify_queue(&mut self) {
        let Some(Campaign {
            purpose: Purpose::Certify { point, .. },
            ..
        }) = &self.campaign
        else {
            return;
        };
        let mut points = vec![point.clone()];
        let cheapest = self.candidates_under(Preference::Likely).feasible;
        let mut cheap = 0;
        let mut add = |candidate: &Candidate| {
            let other = self.space.point_of(&configuration_of(&candidate.operators));
            let other = other.map(|point| self.space.normalised(&point));
            let is_new = other.as_ref().is_some_and(|p| !points.contains(p));
            points.extend(other.filter(|_| is_new));
            is_new
        };
        for candidate in &cheapest {
            cheap += usize::from(add(candidate));
            if cheap == CERTIFY_OTHERS {
                break;
            }
        }
        for candidate in self.fallbacks() {
            add(&candidate);
        }
        if let Some(campaign) = &mut self.campaign {
            for point in points {
                if !campaign.queue.contains(&point) {
                    campaign.queue.push_back(point);
                }
            }
        }
    }

    /// Keeps the campaign going.
    pub(super) fn pump(&mut self, now: Moment, effects: &mut Vec<Effect>) {
        let Some(mut campaign) = self.campaign.take() else {
            self.begin_certifying(now, effects);
            self.begin_again(now, effects);
            return;
        };
        match campaign.stage {
            Stage::Capturing { until } | Stage::Pausing { until } if now >= until => {
                effects.push(Effect::DropSamples(campaign.set));
                self.capture(now, &mut campaign, effects);
                self.campaign = Some(campaign);
                return;
            }
            Stage::Running => {}
            _ => {
                self.campaign = Some(campaign);
                return;
            }
        }
        let labels_overdue = campaign.labels_until.is_some_and(|until| now >= until);
        let is_over = now.since(campaign.since) >= self.settings.trial.campaign_deadline;
        self.campaign = Some(campaign);
        if is_over {
            self.finish(now, Stop::Budget, effects);
            return;
        }
        if labels_overdue {
            self.go_without_labels();
            self.consider(now, effects);
        }
        if self.cluster.is_some() {
            self.fill(now, effects);
        }
    }

    /// Asks for configurations while there is room.
    fn fill(&mut self, now: Moment, effects: &mut Vec<Effect>) {
        let Some(campaign) = &mut self.campaign else {
            return;
        };
        let room =
            (self.settings.trial.trials_at_once as usize).saturating_sub(campaign.pending.len());
        if room == 0 {
            return;
        }
        let is_settled = campaign.truth.is_some();
        let awaits_labels = campaign.labels_until.is_some();
        let is_idle = campaign.pending.is_empty();
        match &campaign.purpose {
            Purpose::Certify { .. } => {
                let count = room.min(campaign.queue.len());
                let points: Vec<Point> = campaign.queue.drain(..count).collect();
                let is_done = points.is_empty() && is_idle && is_settled;
                for point in points {
                    self.run(point, effects);
                }
                if is_done {
                    self.conclude_certifying(now, effects);
                }
            }
            Purpose::Search => match self.ask(room) {
                Next::Try(asks) => {
                    for ask in asks {
                        self.run(ask.point, effects);
                    }
                }
                // Without a truth by now there will be none: nobody sends labels, and the golden configuration has failed.
                Next::Done(stop) if is_idle && (is_settled || !awaits_labels) => {
                    self.finish(now, stop, effects);
                }
                Next::Done(_) => {}
            },
        }
    }

    fn ask(&mut self, room: usize) -> Next {
        let Some(cluster) = self.cluster.clone() else {
            return Next::Try(Vec::new());
        };
        let frames = self
            .campaign
            .iter()
            .flat_map(|c| &c.segments)
            .map(Vec::len)
            .sum::<usize>();
        // What is worth a trial does not depend on what is preferred until it has ended.
        let front = Front {
            profile: self.front.profile.clone(),
            preference: Preference::Likely,
        };
        let view = View {
            context: Context {
                query: &self.query,
                catalogue: &self.catalogue,
                cluster: &cluster,
                profile: &front.profile,
                settings: &self.settings.predict,
                rate_hz: self.query.rate_hz(),
            },
            space: &self.space,
            front: &front,
            frames: u32::try_from(frames).unwrap_or(u32::MAX),
        };
        self.search.ask(&view, room)
    }

    fn run(&mut self, point: Point, effects: &mut Vec<Effect>) {
        let configuration = self.space.configuration(&point);
        let wanted = self.wanted(&configuration);
        let judged = self
            .judged
            .map(|(position, _)| self.query.pipeline.operators[position].id.clone());
        let Some(campaign) = &mut self.campaign else {
            return;
        };
        self.trial_numbers += 1;
        campaign.pending.insert(self.trial_numbers, point);
        effects.push(Effect::RunTrial(Box::new(TrialRequest {
            query: Arc::clone(&self.query),
            number: self.trial_numbers,
            configuration,
            set: campaign.set,
            segments: campaign.segments.clone(),
            frame_bytes: self.front.profile.input_bytes,
            wanted,
            judged,
        })));
    }

    /// Operators that have to run: those the judged output comes from, and of the others those never run in this configuration of
    /// theirs (what comes after the judged operator takes the same time whatever came before it, near enough).
    fn wanted(
        &self,
        configuration: &compass_shared::model::pipeline::PipelineConfiguration,
    ) -> Vec<OperatorId> {
        let pipeline = &self.query.pipeline;
        let needed = self
            .judged
            .map(|(position, _)| self.space.ancestry(position));
        pipeline
            .operators
            .iter()
            .enumerate()
            .filter(|(position, operator)| {
                let is_judged = needed.as_ref().is_none_or(|n| n.contains(position));
                let is_known = self.front.profile.rows_of(&operator.id).any(|row| {
                    !row.times.is_empty()
                        && Some(&row.configuration) == configuration.of(&operator.id)
                });
                is_judged || !is_known
            })
            .map(|(_, operator)| operator.id.clone())
            .collect()
    }

    pub(super) fn trial(&mut self, now: Moment, outcome: TrialOutcome, effects: &mut Vec<Effect>) {
        let Some(campaign) = self.campaign.as_mut().filter(|c| c.set == outcome.set) else {
            return;
        };
        let Some(point) = campaign.pending.remove(&outcome.number) else {
            return;
        };
        let is_search = campaign.purpose == Purpose::Search;
        let told = match outcome.result {
            Ok(stages) => {
                campaign.trials += 1;
                let hits = stages.iter().filter(|s| s.cached).count();
                campaign.cache_hits += u32::try_from(hits).unwrap_or(u32::MAX);
                self.learn(&point, &stages)
            }
            Err((_, StageFailure::Cancelled)) => Told::Cancelled,
            Err((operator, failure)) => {
                campaign.failed += 1;
                if is_search {
                    self.note_failure(&point, &operator, &failure);
                }
                Told::Failed
            }
        };
        if is_search {
            self.search.tell(&point, told);
            if self.is_failing() {
                self.finish(now, Stop::Failing, effects);
                return;
            }
        }
        self.consider(now, effects);
    }

    /// The content is another one: accuracies are void, something cautious runs until they are known again.
    pub(super) fn drifted(&mut self, now: Moment, trigger: Trigger, effects: &mut Vec<Effect>) {
        self.end_campaign(effects);
        let warm = self.warm_points();
        self.front.profile.forget_scores();
        if self.judged.is_some() && self.query.slo.accuracy_min.is_some() {
            self.front.preference = Preference::Safest;
        }
        self.certified = None;
        self.examined = None;
        self.doubtful_rounds = 0;
        self.proposed = None;
        self.search.reopen(warm);
        self.propose(trigger.clone(), effects);
        self.begin(now, trigger, Purpose::Search, effects);
    }

    /// The scheduler found nothing among what is known, or the model and the app disagree.
    pub(super) fn reopen(&mut self, now: Moment, trigger: Trigger, effects: &mut Vec<Effect>) {
        if let Trigger::SloViolated {
            slo: SloKind::Accuracy,
            measurement,
        } = &trigger
        {
            // Perhaps the content has changed unnoticed; perhaps samples flatter. Fresh ones tell which, see `take_accuracy_bias`.
            if let Some(in_force) = &self.in_force {
                self.refuted
                    .push((in_force.configuration.clone(), measurement.value));
            }
            let is_looking = self.front.preference == Preference::Safest
                && (self.campaign.as_ref()).is_some_and(|c| c.purpose == Purpose::Search);
            if is_looking {
                // It is being looked into already.
                self.consider(now, effects);
            } else {
                self.drifted(now, trigger, effects);
            }
            return;
        }
        if matches!(trigger, Trigger::SloViolated { .. }) && self.take_bias() {
            self.propose(trigger.clone(), effects);
        }
        if let Some(campaign) = &mut self.campaign
            && campaign.purpose == Purpose::Search
        {
            campaign.trigger = trigger;
            campaign.has_proposed = false;
            return;
        }
        self.search.renew_budget();
        self.doubtful_rounds = 0;
        self.begin(now, trigger, Purpose::Search, effects);
    }

    /// Where to look first after a change of content: what is most cautious, what runs, what ran best.
    fn warm_points(&self) -> Vec<Point> {
        let mut points: Vec<Point> = Vec::new();
        let mut add = |point: Option<Point>| {
            if let Some(point) = point
                && !points.contains(&point)
            {
                points.push(point);
            }
        };
        let feasible = self.safest_candidates();
        add(feasible);
        add(self.in_force.as_ref().map(|f| f.point.clone()));
        add(self.proposed.as_ref().and_then(|p| p.point.clone()));
        points
    }

    /// Ends a searching campaign.
    pub(super) fn finish(&mut self, now: Moment, stop: Stop, effects: &mut Vec<Effect>) {
        let Some(campaign) = &self.campaign else {
            return;
        };
        let (trials, failed) = (campaign.trials, campaign.failed);
        let cache_hits = campaign.cache_hits;
        let trigger = campaign.trigger.clone();
        let has_proposed = campaign.has_proposed;
        if campaign.purpose == Purpose::Search {
            self.plan_again(now, effects);
            let report = self.infeasible_report().map(|r| self.with_failures(now, r));
            if report.is_some() && self.settle(now, &trigger, effects) {
                return;
            }
            // The last word either way: the scheduler keeps the front for the day it fits.
            self.propose(
                if has_proposed {
                    Trigger::SearchImproved
                } else {
                    trigger
                },
                effects,
            );
            if let Some(report) = report {
                effects.push(Effect::Infeasible { report });
            }
        }
        self.end_campaign(effects);
        effects.push(Effect::Finished {
            stop,
            trials,
            failed,
            cache_hits,
        });
        self.begin_certifying(now, effects);
    }

    /// Where a search has found nothing feasible but there is something of which the samples cannot tell, it goes on with fresh ones.
    fn settle(&mut self, now: Moment, trigger: &Trigger, effects: &mut Vec<Effect>) -> bool {
        let doubtful = self.doubtful();
        if doubtful.is_empty() || self.doubtful_rounds >= DOUBTFUL_ROUNDS_MAX {
            return false;
        }
        self.doubtful_rounds += 1;
        self.search.renew_budget();
        self.search.repeat(doubtful);
        self.begin(now, trigger.clone(), Purpose::Search, effects);
        true
    }

    /// Begins to certify what runs, if it has not passed yet.
    fn begin_certifying(&mut self, now: Moment, effects: &mut Vec<Effect>) {
        let Some(in_force) = &self.in_force else {
            return;
        };
        if self.judged.is_none()
            || self.query.slo.accuracy_min.is_none()
            || self.examined.as_ref() == Some(&in_force.point)
        {
            return;
        }
        let purpose = Purpose::Certify {
            point: in_force.point.clone(),
            round: 1,
        };
        self.begin(now, Trigger::SearchImproved, purpose, effects);
    }

    fn conclude_certifying(&mut self, now: Moment, effects: &mut Vec<Effect>) {
        let Some(campaign) = &self.campaign else {
            return;
        };
        let Campaign {
            purpose: Purpose::Certify { point, round },
            fresh,
            trials,
            failed,
            cache_hits,
            ..
        } = campaign
        else {
            return;
        };
        let (point, round) = (point.clone(), *round);
        let scores = fresh.get(&point).cloned().unwrap_or_default();
        let scores = merged(&campaign.earlier_rounds, &scores);
        let verdict = self.verdict(&scores);
        let effort = (*trials, *failed, *cache_hits);
        self.end_campaign(effects);
        let is_in_force = self.in_force.as_ref().is_some_and(|f| f.point == point);
        match verdict {
            Some((true, _)) => {
                self.examined = Some(point.clone());
                self.certified = Some(point.clone());
                self.front.preference = Preference::Cheapest;
                self.propose(Trigger::SearchImproved, effects);
                if round < CERTIFY_ROUNDS_MAX && self.has_hopes() {
                    let purpose = Purpose::Certify {
                        point,
                        round: round + 1,
                    };
                    self.begin(now, Trigger::SearchImproved, purpose, effects);
                    return;
                }
            }
            Some((false, measurement)) if is_in_force => {
                // What was merged into the profile already says so; the scheduler draws the conclusion.
                self.examined = Some(point);
                self.propose(
                    Trigger::SloViolated {
                        slo: SloKind::Accuracy,
                        measurement,
                    },
                    effects,
                );
                self.search.renew_budget();
                self.begin(now, Trigger::SearchImproved, Purpose::Search, effects);
                return;
            }
            _ if round < CERTIFY_ROUNDS_MAX => {
                let purpose = Purpose::Certify {
                    point,
                    round: round + 1,
                };
                self.begin(now, Trigger::SearchImproved, purpose, effects);
                if let Some(campaign) = &mut self.campaign {
                    campaign.earlier_rounds = scores;
                }
                return;
            }
            // Neither confirmed nor refuted after all rounds: it counts by what it is worth so far.
            _ => {
                self.examined = Some(point);
                self.front.preference = Preference::Cheapest;
            }
        }
        effects.push(Effect::Finished {
            stop: Stop::Converged,
            trials: effort.0,
            failed: effort.1,
            cache_hits: effort.2,
        });
        self.wake_again(now, effects);
    }
}
