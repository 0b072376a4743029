//! Trials that give no result: what that means for a configuration, what is said of it, and when it is tried again.
//!
//! A configuration that broke its worker, was too slow or has a bad model has failed for good, with its reason. One whose trial was only
//! kept from running (a model not fetched, a node without an answer) counts as failed for the search under way, so that the others get
//! their turn, and is tried again by a later one: soon at first, then ever more seldom, and sooner when a node comes back.

use std::collections::BTreeMap;
use std::time::Duration;

use compass_shared::ids::OperatorId;
use compass_shared::model::cluster::Cluster;
use compass_shared::model::trial::StageFailure;
use compass_shared::model::trigger::Trigger;
use compass_shared::time::Moment;

use super::campaign::Purpose;
use super::{Effect, Explorer};
use crate::search::Told;
use crate::space::Point;

/// A search whose first trials all failed ends after this many of them: more of the same teaches nothing.
const FAILING_AFTER: u32 = 8;
/// Least and longest pause before a search that was kept from its trials begins again.
const PAUSE: (Duration, Duration) = (Duration::from_secs(15), Duration::from_secs(300));
/// Reasons that are told at most, those of most configurations first.
const REASONS_TOLD: usize = 3;

/// A search that is to begin again.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Again {
    at: Moment,
    /// The pause before it.
    pause: Duration,
    trigger: Trigger,
}

impl Explorer {
    /// Takes note of a trial of a search that gave no result.
    pub(super) fn note_failure(
        &mut self,
        point: &Point,
        operator: &OperatorId,
        failure: &StageFailure,
    ) {
        let (is_lasting, reason) = in_words(operator, failure);
        if is_lasting {
            let configuration = self.space.configuration(point);
            self.front.profile.configuration_mut(&configuration).failed = Some(reason);
        } else {
            self.unavailable.insert(point.clone(), reason);
        }
    }

    /// Whether the search under way only fails.
    pub(super) fn is_failing(&self) -> bool {
        let campaign = self.campaign.as_ref();
        campaign.is_some_and(|c| c.trials == 0 && c.failed >= FAILING_AFTER)
    }

    /// What could not be tried may be tried from now on.
    pub(super) fn try_unavailable_again(&mut self) {
        for point in std::mem::take(&mut self.unavailable).into_keys() {
            self.search.tell(&point, Told::Again);
        }
    }

    /// Decides when a search that ends is to begin again: when some of its trials were kept from running, or none gave a result.
    pub(super) fn plan_again(&mut self, now: Moment, effects: &mut Vec<Effect>) {
        let Some(campaign) = &self.campaign else {
            return;
        };
        let is_barren =
            campaign.trials == 0 && (campaign.failed > 0 || !campaign.pending.is_empty());
        if self.unavailable.is_empty() && !is_barren {
            self.again = None;
            return;
        }
        let before = self.again.as_ref().map(|again| again.pause);
        let pause = before.map_or(PAUSE.0, |before| (before * 2).min(PAUSE.1));
        self.again = Some(Again {
            at: now + pause,
            pause,
            trigger: campaign.trigger.clone(),
        });
        self.wake_again(now, effects);
    }

    /// Asks to be woken for the search that is to begin again.
    pub(super) fn wake_again(&self, now: Moment, effects: &mut Vec<Effect>) {
        effects.extend(
            self.again
                .as_ref()
                .map(|again| Effect::WakeAt(again.at.max(now))),
        );
    }

    /// Begins the search that is due, if nothing else is going on.
    pub(super) fn begin_again(&mut self, now: Moment, effects: &mut Vec<Effect>) {
        if self.campaign.is_some() {
            return;
        }
        let due = self.again.as_ref().filter(|again| now >= again.at);
        if let Some(trigger) = due.map(|again| again.trigger.clone()) {
            self.try_unavailable_again();
            self.search.renew_budget();
            self.begin(now, trigger, Purpose::Search, effects);
        }
    }

    /// The fleet is about to be another one: a node that comes back may bring what was missing.
    pub(super) fn hasten(&mut self, now: Moment, next: &Cluster, effects: &mut Vec<Effect>) {
        let Some(again) = &mut self.again else {
            return;
        };
        let was_online = |id| {
            let before = self.cluster.as_ref().and_then(|c| c.nodes.get(id));
            before.is_some_and(|node| node.online)
        };
        if next
            .nodes
            .iter()
            .any(|(id, node)| node.online && !was_online(id))
        {
            again.at = again.at.min(now + PAUSE.0);
            effects.push(Effect::WakeAt(again.at));
        }
    }

    /// A report of a search that found nothing, with what kept trials from giving results.
    pub(super) fn with_failures(&self, now: Moment, report: String) -> String {
        let rows = self.front.profile.configurations.values();
        let lasting = rows.filter_map(|row| row.failed.as_deref());
        let passing = self.unavailable.values().map(String::as_str);
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for reason in lasting.chain(passing) {
            *counts.entry(reason).or_default() += 1;
        }
        let mut counts: Vec<_> = counts.into_iter().collect();
        counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        let mut lines = vec![report];
        for (reason, count) in counts.iter().take(REASONS_TOLD) {
            lines.push(format!(
                "{count} of the configurations tried gave no result: {reason}"
            ));
        }
        if counts.len() > REASONS_TOLD {
            let others: usize = counts[REASONS_TOLD..].iter().map(|(_, count)| count).sum();
            lines.push(format!("{others} others failed by other reasons"));
        }
        let waiting = self.campaign.as_ref().map_or(0, |c| c.pending.len());
        if counts.is_empty() && waiting > 0 {
            lines.push(format!(
                "{waiting} trials found no node with room for them in time: `compass node list` shows what nodes have left"
            ));
        }
        if let Some(again) = &self.again {
            let pause = again.at.since(now).as_secs();
            lines.push(format!("the search begins again in {pause} s"));
        }
        lines.join("\n")
    }
}

/// Whether a configuration has failed for good, and the reason with what can be done about it.
fn in_words(operator: &OperatorId, failure: &StageFailure) -> (bool, String) {
    let (is_lasting, what, remedy) = match failure {
        StageFailure::Deadline => (
            true,
            "it took longer than a trial may".to_owned(),
            "`planning.trial.stage_deadline` says how long that is",
        ),
        StageFailure::Crashed(words) => (
            true,
            format!("its worker failed: {words}"),
            "the log of the node says more",
        ),
        StageFailure::Artifact(words) => (
            true,
            format!("its model cannot be used: {words}"),
            "push a good one with `compass artifact push` and name it in the catalogue",
        ),
        StageFailure::InputsUnavailable(words) => (
            false,
            format!("its inputs could not be had: {words}"),
            "see `compass link list` for the links between its nodes",
        ),
        StageFailure::Unavailable(words) => (
            false,
            format!("not to be had now: {words}"),
            "`compass artifact list` shows whether the model is there, `compass node list` whether the nodes are",
        ),
        StageFailure::Busy => (
            false,
            "no node had room for it".to_owned(),
            "`compass node list` shows what nodes have left",
        ),
        StageFailure::Cancelled => (
            false,
            "it was called off".to_owned(),
            "it will be tried again",
        ),
    };
    (is_lasting, format!("{operator}: {what} ({remedy})"))
}
