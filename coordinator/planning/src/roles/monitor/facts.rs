//! What each kind of fact means.

use compass_shared::detect::Edge;
use compass_shared::ids::{InstanceId, NodeId, QueryId};
use compass_shared::model::cluster::{NodeDescription, Scheduling};
use compass_shared::model::outcome::AppReport;
use compass_shared::model::trigger::{LinkQuantity, Measurement, Trigger};
use compass_shared::time::Moment;
use compass_shared::wire::v1::{
    AgentEvent, AgentReport, ContentReport, InstanceReport, LinkReport,
};

use super::watch::NodeWatch;
use super::{Effect, Monitor, News};
use crate::detect::{LinkVerdict, LinkWatch, LivenessVerdict, LoadVerdict};
use crate::roles::explorer::Observation;

/// A transfer tells the capacity of a link only when it is long against the round trip; else setting it up dominates.
const TRANSFER_ROUND_TRIPS_MIN: f64 = 4.0;
/// And only when it is large: a small one fits into the first window of the connection.
const TRANSFER_BYTES_MIN: u64 = 64_000;
/// An operator waits for its share when frames queue for longer than this, in ms.
const QUEUE_MS_MIN: f64 = 100.0;

impl Monitor {
    pub(super) fn node_up(
        &mut self,
        now: Moment,
        node: NodeId,
        description: NodeDescription,
        news: &mut News,
    ) {
        news.changed = true;
        match self.nodes.get_mut(&node) {
            None => {
                self.nodes
                    .insert(node.clone(), NodeWatch::new(now, description));
                news.triggers.push(Trigger::NodeJoined(node));
            }
            Some(watch) => {
                watch.description = description;
                if watch.liveness.heard(now) == Some(LivenessVerdict::Back) {
                    news.triggers.push(Trigger::NodeJoined(node));
                }
            }
        }
    }

    pub(super) fn heard(&mut self, now: Moment, node: &NodeId, news: &mut News) {
        if let Some(watch) = self.nodes.get_mut(node)
            && watch.liveness.heard(now) == Some(LivenessVerdict::Back)
        {
            news.changed = true;
            news.triggers.push(Trigger::NodeJoined(node.clone()));
        }
    }

    pub(super) fn scheduling(&mut self, node: NodeId, scheduling: Scheduling, news: &mut News) {
        let Some(watch) = self.nodes.get_mut(&node) else {
            return;
        };
        let before = std::mem::replace(&mut watch.scheduling, scheduling);
        if before == scheduling {
            return;
        }
        news.changed = true;
        match scheduling {
            Scheduling::Draining => news.triggers.push(Trigger::NodeLost(node)),
            Scheduling::Open => news.triggers.push(Trigger::NodeJoined(node)),
            // It keeps what it has: nothing to do.
            Scheduling::Cordoned => {}
        }
    }

    pub(super) fn report(
        &mut self,
        now: Moment,
        node: &NodeId,
        report: &AgentReport,
        news: &mut News,
    ) {
        if !self.nodes.contains_key(node) {
            return;
        }
        self.heard(now, node, news);
        for link in &report.links {
            self.link_report(now, node, link, news);
        }
        self.instance_reports(node, &report.instances, news);
        for content in &report.content {
            self.content_report(now, node, content, news);
        }
    }

    fn link_report(&mut self, now: Moment, node: &NodeId, link: &LinkReport, news: &mut News) {
        let peer = &link.peer;
        if let Some(watch) = self.nodes.get_mut(node) {
            let before = watch.received.insert(peer.clone(), link.received_bytes);
            let has_grown = before.is_some_and(|b| link.received_bytes > b);
            if has_grown && let Some(sender) = self.nodes.get_mut(peer) {
                sender.liveness.seen(now);
            }
        }
        let pair = (node.clone(), peer.clone());
        let watch = self
            .links
            .entry(pair)
            .or_insert_with(|| LinkWatch::new(now));
        let path = watch.path(now, link.rtt_ms, link.loss, &self.settings);
        let rate = watch.report(
            now,
            link.delivered_bps as f64,
            link.network_limited,
            link.degraded,
            &self.settings,
        );
        for verdict in [path, rate].into_iter().flatten() {
            self.verdict_on(now, news, node, peer, verdict);
        }
    }

    fn instance_reports(&mut self, node: &NodeId, reports: &[InstanceReport], news: &mut News) {
        let settings = self.settings.clone();
        let Some(watch) = self.nodes.get_mut(node) else {
            return;
        };
        watch.instances = reports.iter().map(|r| (r.instance, r.clone())).collect();
        watch
            .starved
            .retain(|id, _| reports.iter().any(|r| r.instance == *id));
        // An emulated device holds results back: its host's busy time says nothing about its share.
        if watch.description.emulated_speed.is_some() {
            return;
        }
        let mut raised: Vec<(InstanceId, Measurement)> = Vec::new();
        for report in reports {
            let breach = watch
                .starved
                .entry(report.instance)
                .or_insert_with(|| compass_shared::detect::Breach::new(settings.share_windows));
            let has_work = report.queue_age_ms > QUEUE_MS_MIN;
            let bound = report.granted_cores * settings.share_ratio;
            // Without work there is nothing to achieve.
            let achieved = if has_work {
                report.busy_cores
            } else {
                f64::MAX
            };
            if breach.below(achieved, bound, report.granted_cores * 0.9) == Some(Edge::Raised) {
                let measurement = Measurement {
                    value: report.busy_cores,
                    bound: report.granted_cores,
                    window_ms: u64::from(settings.share_windows) * 1000,
                };
                raised.push((report.instance, measurement));
            }
        }
        for (instance, measurement) in raised {
            for (id, query) in &self.queries {
                let part = query
                    .plan
                    .iter()
                    .flat_map(|p| &p.operators)
                    .find(|o| o.instance == instance && o.node == *node);
                if let Some(part) = part {
                    news.effects.push(Effect::Noticed {
                        query: id.clone(),
                        trigger: Trigger::ShareNotAchieved {
                            operator: part.operator.clone(),
                            node: node.clone(),
                            measurement,
                        },
                    });
                }
            }
        }
    }

    fn content_report(
        &mut self,
        now: Moment,
        node: &NodeId,
        report: &ContentReport,
        news: &mut News,
    ) {
        let Some(watch) = self.queries.get_mut(&report.query) else {
            return;
        };
        // A report may speak only of queries that enter at its sender.
        if watch.query.entry != *node {
            return;
        }
        watch.arrival_hz = Some(report.arrival_hz);
        let shifted = watch.load.report(now, report.arrival_hz, &self.settings);
        if let Some(LoadVerdict::Shifted(measurement)) = shifted {
            news.effects.push(Effect::Noticed {
                query: report.query.clone(),
                trigger: Trigger::LoadShifted(measurement),
            });
        }
        if let Some(change) = watch.content(now, report)
            && watch.is_news(now, &self.settings)
        {
            news.effects.push(Effect::Noticed {
                query: report.query.clone(),
                trigger: Trigger::ContentDrifted {
                    descriptor: change.descriptor.to_owned(),
                    measurement: Measurement {
                        value: change.now,
                        bound: change.before,
                        window_ms: u64::try_from(change.window.as_millis()).unwrap_or(u64::MAX),
                    },
                },
            });
        }
    }

    pub(super) fn event(&mut self, now: Moment, node: &NodeId, event: AgentEvent, news: &mut News) {
        if !self.nodes.contains_key(node) {
            return;
        }
        self.heard(now, node, news);
        let is_degraded = matches!(event, AgentEvent::LinkDegraded { .. });
        match event {
            AgentEvent::LinkDegraded { peer, measurement }
            | AgentEvent::LinkRecovered { peer, measurement } => {
                let watch = self
                    .links
                    .entry((node.clone(), peer.clone()))
                    .or_insert_with(|| LinkWatch::new(now));
                if let Some(verdict) = watch.event(now, is_degraded, measurement, &self.settings) {
                    self.verdict_on(now, news, node, &peer, verdict);
                }
            }
            AgentEvent::PeerUnreachable { peer } => {
                if let Some(watch) = self.nodes.get_mut(&peer) {
                    watch.liveness.unreachable(now);
                }
            }
            AgentEvent::ContentDrifted {
                query,
                descriptor,
                measurement,
            } => {
                let is_news = self
                    .queries
                    .get_mut(&query)
                    .is_some_and(|w| w.query.entry == *node && w.is_news(now, &self.settings));
                if is_news {
                    news.effects.push(Effect::Noticed {
                        query,
                        trigger: Trigger::ContentDrifted {
                            descriptor,
                            measurement,
                        },
                    });
                }
            }
            AgentEvent::WorkerCrashed { instance, reason } => {
                news.effects.push(Effect::Alarm(format!(
                    "node {node}: worker of instance {instance} died: {reason}"
                )));
            }
            // A symptom: the link, the load or the share behind it raises its own trigger, and the app's figures say if it hurts.
            AgentEvent::QueueAged { .. } => {}
        }
    }

    pub(super) fn transfer(
        &mut self,
        now: Moment,
        from: NodeId,
        to: NodeId,
        bytes: u64,
        ms: f64,
        news: &mut News,
    ) {
        let Some(watch) = self.links.get_mut(&(from.clone(), to.clone())) else {
            return;
        };
        let rtt_ms = watch.link().map_or(0.0, |l| l.rtt_ms);
        let net_ms = ms - rtt_ms;
        // Other trials may share the link: good enough for a first picture, not for calling a known link degraded.
        let is_unknown = watch.link().is_none_or(|l| l.lower_bound);
        if !net_ms.is_finite() || net_ms <= 0.0 {
            return;
        }
        let is_capacity = is_unknown
            && bytes >= TRANSFER_BYTES_MIN
            && net_ms >= TRANSFER_ROUND_TRIPS_MIN * rtt_ms.max(1.0);
        let rate = bytes as f64 * 8e3 / net_ms;
        if let Some(verdict) = watch.rate(now, rate, is_capacity, &self.settings) {
            self.verdict_on(now, news, &from, &to, verdict);
        }
    }

    pub(super) fn app(
        &mut self,
        now: Moment,
        query: &QueryId,
        report: &AppReport,
        news: &mut News,
    ) {
        let Some(watch) = self.queries.get_mut(query) else {
            return;
        };
        let Some(plan) = &watch.plan else {
            return;
        };
        if report.generation.is_some_and(|g| g < plan.generation) {
            return;
        }
        let service_ms = plan
            .operators
            .iter()
            .filter_map(|part| {
                let seen = self.nodes.get(&part.node)?.instances.get(&part.instance)?;
                let (median, p95) = seen.service_ms?;
                Some((part.operator.clone(), median, p95))
            })
            .collect();
        news.effects.push(Effect::Observed {
            query: query.clone(),
            observation: Box::new(Observation {
                generation: plan.generation,
                accuracies: report.accuracies.iter().map(|a| f64::from(*a)).collect(),
                latencies_ms: report.latencies_ms.iter().map(|l| f64::from(*l)).collect(),
                service_ms,
                arrival_hz: watch.arrival_hz,
            }),
        });
        if let Some((slo, measurement)) = watch.slo.report(now, report, &self.settings) {
            news.effects.push(Effect::Noticed {
                query: query.clone(),
                trigger: Trigger::SloViolated { slo, measurement },
            });
        }
    }

    fn verdict_on(
        &mut self,
        now: Moment,
        news: &mut News,
        from: &NodeId,
        to: &NodeId,
        verdict: LinkVerdict,
    ) {
        news.changed = true;
        match verdict {
            LinkVerdict::News => {}
            LinkVerdict::Degraded(quantity, measurement) => {
                news.triggers.push(Trigger::LinkDegraded {
                    from: from.clone(),
                    to: to.clone(),
                    quantity,
                    measurement,
                });
                if quantity == LinkQuantity::RoundTrip {
                    return;
                }
                let part = measurement.value / measurement.bound.max(f64::MIN_POSITIVE);
                let bandwidth = self.links.get(&(from.clone(), to.clone()));
                let bandwidth = bandwidth.and_then(|w| w.link()).map(|l| l.bandwidth);
                if let Some(bandwidth) = bandwidth {
                    self.beside(from, to, |watch| watch.suspect(now, part, bandwidth));
                }
            }
            LinkVerdict::Recovered(measurement) => {
                news.triggers.push(Trigger::LinkRecovered {
                    from: from.clone(),
                    to: to.clone(),
                    measurement,
                });
                // While another link through the same uplink is bad, the suspicion stands.
                let mut others_degraded = false;
                self.beside(from, to, |watch| others_degraded |= watch.is_degraded());
                if !others_degraded {
                    self.beside(from, to, |watch| watch.clear(now));
                }
            }
        }
    }

    /// The other links out of a site through which this one leads out of it: they share its uplink.
    fn beside(&mut self, from: &NodeId, to: &NodeId, mut then: impl FnMut(&mut LinkWatch)) {
        let site = |id: &NodeId| self.nodes.get(id).map(|w| &w.description.site);
        let home = site(from);
        if home.is_none() || site(to) == home {
            return;
        }
        let pairs: Vec<(NodeId, NodeId)> = self
            .links
            .keys()
            .filter(|(a, b)| site(a) == home && site(b) != home && (a, b) != (from, to))
            .cloned()
            .collect();
        for pair in pairs {
            if let Some(watch) = self.links.get_mut(&pair) {
                then(watch);
            }
        }
    }
}
