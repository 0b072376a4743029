//! When something is worth proposing, and what is said when nothing is.

use compass_shared::detect::percentile;
use compass_shared::ids::Generation;
use compass_shared::model::cluster::Cluster;
use compass_shared::model::pipeline::PipelineConfiguration;
use compass_shared::model::plan::OperatorPlan;
use compass_shared::model::trigger::{SloKind, Trigger};
use compass_shared::time::{Moment, ms};

use super::{Effect, Explorer, Proposal};
use crate::candidate::{
    Candidate, Candidates, Front, Preference, Reason, answer_interval, assess, enumerate,
};
use crate::explain;
use crate::predict::{Context, percentile_of};
use crate::search::scenarios;
use crate::space::Point;

/// Answers needed before a prediction is corrected by them.
const BIAS_ANSWERS_MIN: usize = 20;
/// A prediction is corrected by at most this part of the latency bound: what is beyond has another cause than the model.
const BIAS_PART_MAX: f64 = 0.3;

/// While something safe runs in new content, this many configurations are measured before one of them is preferred to it.
const SAFER_TRIALS_MIN: u32 = 3;

/// The plan in force.
#[derive(Debug, Clone)]
pub(super) struct InForce {
    pub(super) generation: Generation,
    pub(super) operators: Vec<OperatorPlan>,
    pub(super) configuration: PipelineConfiguration,
    /// Normalised.
    pub(super) point: Point,
    pub(super) latencies_ms: Vec<f64>,
}

/// The best of what was proposed last.
#[derive(Debug, Clone)]
pub(super) struct Proposed {
    pub(super) point: Option<Point>,
}

impl Explorer {
    pub(super) fn plan_in_force(
        &mut self,
        now: Moment,
        generation: Generation,
        operators: Vec<OperatorPlan>,
    ) {
        let _ = now;
        let configuration = configuration_of(&operators);
        let Some(point) = self.space.point_of(&configuration) else {
            return;
        };
        self.in_force = Some(InForce {
            generation,
            configuration,
            point: self.space.normalised(&point),
            operators,
            latencies_ms: Vec::new(),
        });
    }

    /// What is feasible on today's fleet as far as is known.
    pub(super) fn candidates(&self) -> Candidates {
        self.candidates_of(&self.front)
    }

    /// The same under another preference.
    pub(super) fn candidates_under(&self, preference: Preference) -> Candidates {
        self.candidates_of(&Front {
            profile: self.front.profile.clone(),
            preference,
        })
    }

    /// Whether something might well be markedly cheaper than the cheapest that is believed, if it were sampled more.
    pub(super) fn has_hopes(&self) -> bool {
        let least = |preference| {
            let found = self.candidates_under(preference).feasible;
            found.first().map(|c| c.expected.cost_usd_per_h)
        };
        match (least(Preference::Likely), least(Preference::Cheapest)) {
            (Some(likely), Some(believed)) => {
                likely < believed * (1.0 - self.settings.schedule.switch_gain_min)
            }
            (Some(_), None) => true,
            (None, _) => false,
        }
    }

    /// What would be best on the fleet as it may become (links out of the source's site degraded, the site alone), of what was measured.
    pub(super) fn fallbacks(&self) -> Vec<Candidate> {
        let Some(cluster) = &self.cluster else {
            return Vec::new();
        };
        let front = Front {
            profile: self.front.profile.clone(),
            preference: Preference::Likely,
        };
        let context = self.context(cluster, &front);
        scenarios::imagined(&context, self.settings.search.degraded_part)
            .iter()
            .filter_map(|cluster| {
                let found = enumerate(&self.context(cluster, &front), &self.space, &front);
                found.feasible.into_iter().next()
            })
            .collect()
    }

    fn candidates_of(&self, front: &Front) -> Candidates {
        let Some(cluster) = &self.cluster else {
            return Candidates::default();
        };
        enumerate(&self.context(cluster, front), &self.space, front)
    }

    /// The configuration of the most cautious candidate, whatever its accuracy.
    pub(super) fn safest_candidates(&self) -> Option<Point> {
        let mut front = self.front.clone();
        front.profile.forget_scores();
        front.preference = Preference::Safest;
        let best = self.candidates_of(&front).feasible.into_iter().next()?;
        let point = self.space.point_of(&configuration_of(&best.operators))?;
        Some(self.space.normalised(&point))
    }

    /// Proposes when there is something new worth it.
    pub(super) fn consider(&mut self, now: Moment, effects: &mut Vec<Effect>) {
        let _ = now;
        let Some(campaign) = &self.campaign else {
            return;
        };
        if campaign.truth.is_none() {
            return;
        }
        self.take_accuracy_bias();
        let Some(campaign) = &self.campaign else {
            return;
        };
        let is_new = self.front.preference == Preference::Safest;
        let answers_change = !matches!(campaign.trigger, Trigger::QueryRegistered);
        let trigger = if !campaign.has_proposed || (is_new && answers_change) {
            campaign.trigger.clone()
        } else {
            Trigger::SearchImproved
        };
        if is_new && !self.is_wanting(campaign.trials) {
            return;
        }
        let best = self.candidates().feasible.into_iter().next();
        if best.is_none() && self.proposed.is_none() {
            return;
        }
        self.note_proposed(best.as_ref());
        self.propose(trigger, effects);
        if let Some(campaign) = &mut self.campaign {
            campaign.has_proposed = true;
        }
    }

    /// Whether a plan is wanted before the campaign has ended, while the content is new: nothing runs yet, or what runs is not known to
    /// be accurate enough and a few others have been measured.
    fn is_wanting(&self, trials: u32) -> bool {
        let Some(in_force) = &self.in_force else {
            return true;
        };
        trials >= SAFER_TRIALS_MIN && !self.is_sure_of(in_force)
    }

    /// Whether samples show a plan's configuration above the accuracy floor.
    fn is_sure_of(&self, in_force: &InForce) -> bool {
        let (Some(floor), Some(cluster)) = (self.query.slo.accuracy_min, &self.cluster) else {
            return true;
        };
        let context = self.context(cluster, &self.front);
        let normalised = self.space.configuration(&in_force.point);
        let row = self.front.profile.configuration(&normalised);
        let interval = answer_interval(&context, &in_force.configuration);
        row.and_then(|row| self.front.profile.accuracy(row, interval))
            .is_some_and(|accuracy| accuracy.samples > 0 && accuracy.value >= floor)
    }

    /// What predictions with a front are made from.
    fn context<'a>(&'a self, cluster: &'a Cluster, front: &'a Front) -> Context<'a> {
        Context {
            query: &self.query,
            catalogue: &self.catalogue,
            cluster,
            profile: &front.profile,
            settings: &self.settings.predict,
            rate_hz: self.query.rate_hz(),
        }
    }

    fn note_proposed(&mut self, best: Option<&Candidate>) {
        self.proposed = best.map(|candidate| Proposed {
            point: self
                .space
                .point_of(&configuration_of(&candidate.operators))
                .map(|p| self.space.normalised(&p)),
        });
    }

    /// Hands the front over as it is.
    pub(super) fn propose(&mut self, trigger: Trigger, effects: &mut Vec<Effect>) {
        let (trials, cache_hits) = self
            .campaign
            .as_ref()
            .map_or(self.totals, |c| (c.trials, c.cache_hits));
        self.totals = (trials, cache_hits);
        let certified = self
            .in_force
            .as_ref()
            .is_some_and(|f| self.certified.as_ref() == Some(&f.point));
        effects.push(Effect::Propose(Box::new(Proposal {
            query: self.query.id.clone(),
            front: self.front.clone(),
            trigger,
            trials,
            cache_hits,
            certified,
        })));
    }

    /// Configurations that fall short of nothing but the accuracy floor, and that only because their samples cannot tell.
    pub(super) fn doubtful(&self) -> Vec<Point> {
        let Candidates {
            rejected, nearest, ..
        } = self.candidates();
        let mut points = Vec::new();
        for rejected in nearest.into_iter().chain(rejected) {
            let Reason::Slo {
                slo: SloKind::Accuracy,
                value,
                bound,
            } = rejected.reason
            else {
                continue;
            };
            let point = self.space.point_of(&rejected.configuration);
            let point = point.map(|p| self.space.normalised(&p));
            if value.high >= bound
                && value.samples > 0
                && let Some(point) = point.filter(|p| !points.contains(p))
            {
                points.push(point);
            }
        }
        points
    }

    /// What to tell the app when a search has ended with nothing feasible.
    pub(super) fn infeasible_report(&self) -> Option<String> {
        let cluster = self.cluster.as_ref()?;
        let candidates = self.candidates();
        if !candidates.feasible.is_empty() {
            return None;
        }
        let context = self.context(cluster, &self.front);
        Some(explain::infeasible(&context, &self.space, &candidates))
    }

    /// Where fresh samples still promise what the app has refuted, everything is believed to be less accurate by the difference.
    fn take_accuracy_bias(&mut self) {
        let Some(cluster) = self.cluster.clone() else {
            return;
        };
        let context = self.context(&cluster, &self.front);
        let mut bias: f64 = 0.0;
        for (configuration, live) in &self.refuted {
            let Some(point) = self.space.point_of(configuration) else {
                continue;
            };
            let normalised = self.space.configuration(&self.space.normalised(&point));
            let promised = self
                .front
                .profile
                .configuration(&normalised)
                .and_then(|row| row.accuracy(answer_interval(&context, configuration)));
            if let Some(promised) = promised {
                bias = bias.min(live - promised.value);
            }
        }
        self.front.profile.accuracy_bias = bias;
    }

    /// Corrects the model by what the app sees of the plan in force; tells whether that changed anything.
    pub(super) fn take_bias(&mut self) -> bool {
        let (Some(in_force), Some(cluster), Some(slo)) =
            (&self.in_force, &self.cluster, self.query.slo.latency)
        else {
            return false;
        };
        if in_force.latencies_ms.len() < BIAS_ANSWERS_MIN {
            return false;
        }
        let context = self.context(cluster, &self.front);
        let seen = percentile(&in_force.latencies_ms, percentile_of(&self.query));
        let assessed = assess(&context, &self.space, &in_force.operators);
        let (Some(seen), Some(assessed)) = (seen, assessed) else {
            return false;
        };
        let most = ms(slo.bound) * BIAS_PART_MAX;
        let before = self.front.profile.latency_bias_ms;
        let after = (before + seen - assessed.expected.latency_ms.value).clamp(-most, most);
        self.front.profile.latency_bias_ms = after;
        (after - before).abs() > 1.0
    }
}

pub(super) fn configuration_of(operators: &[OperatorPlan]) -> PipelineConfiguration {
    PipelineConfiguration(
        operators
            .iter()
            .map(|o| (o.operator.clone(), o.configuration.clone()))
            .collect(),
    )
}
