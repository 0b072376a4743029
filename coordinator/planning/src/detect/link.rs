//! A link's capacity, kept apart from the rate somebody happened to use.
//!
//! A delivered rate is a measurement of capacity only while the sender was network-limited. Otherwise it is a lower bound: it can raise
//! the estimate, never lower it. Verdicts compare with what was last planned with, so a slow decline is noticed as soon as it has
//! become as large as a sudden one, and a value that hovers raises nothing new.
//!
//! Sudden changes are the agent's to tell: it sees every packet, waits out stalls and tests by itself whether a bad link has recovered.
//! Its events count at once. Its periodic reports are smoothed, and have to agree several times before they call a link degraded; while
//! the agent holds it degraded they never call it recovered.

use compass_shared::model::cluster::Link;
use compass_shared::model::trigger::{LinkQuantity, Measurement};
use compass_shared::time::Moment;
use compass_shared::units::Bandwidth;

use super::DetectSettings;

/// What is known of one direction of a link.
#[derive(Debug, Clone, PartialEq)]
pub struct LinkWatch {
    link: Link,
    planned: Link,
    changed: Moment,
    degraded: bool,
    /// What the agent says of it, and how many reports in a row have said otherwise since.
    agent_says_degraded: bool,
    contradictions: u32,
    /// Reports in a row by which it is degraded.
    low_reports: u32,
    /// What it was before a neighbouring link out of the same site degraded, while nothing was measured on it since.
    unsuspected: Option<Link>,
}

/// What a measurement means.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LinkVerdict {
    /// The picture has changed; nothing that calls for a plan by itself.
    News,
    /// It got worse.
    Degraded(LinkQuantity, Measurement),
    /// It is better again.
    Recovered(Measurement),
}

/// Part of a new capacity measurement that counts at once: windows of an idle link differ by half.
const FRESH_PART: f64 = 0.3;
/// Reports in a row that make a verdict without an event.
const REPORTS_AGREE: u32 = 3;
/// Reports that contradict the agent's last event before they are believed: one may have been under way with it, the next says that an
/// event was lost.
const CONTRADICTIONS_MAX: u32 = 2;
/// Longer round trips than planned by less than this many milliseconds are jitter.
const RTT_JITTER_MS: f64 = 20.0;

impl LinkWatch {
    /// A link of which nothing was measured yet.
    pub const fn new(now: Moment) -> Self {
        let link = Link {
            bandwidth: Bandwidth(0),
            lower_bound: true,
            rtt_ms: 0.0,
            loss: 0.0,
        };
        Self {
            link,
            planned: link,
            changed: now,
            degraded: false,
            agent_says_degraded: false,
            contradictions: 0,
            low_reports: 0,
            unsuspected: None,
        }
    }

    /// A link as it was known before: planned with until it is measured again.
    pub const fn remembered(now: Moment, link: Link) -> Self {
        Self {
            link,
            planned: link,
            ..Self::new(now)
        }
    }

    /// The current picture; `None` until the other end has answered.
    pub fn link(&self) -> Option<&Link> {
        (self.link.rtt_ms > 0.0).then_some(&self.link)
    }

    /// Takes a periodic report.
    pub fn report(
        &mut self,
        now: Moment,
        delivered_bps: f64,
        network_limited: bool,
        agent_says_degraded: bool,
        settings: &DetectSettings,
    ) -> Option<LinkVerdict> {
        if agent_says_degraded != self.agent_says_degraded {
            self.contradictions += 1;
            if self.contradictions < CONTRADICTIONS_MAX {
                return None;
            }
            self.agent_says_degraded = agent_says_degraded;
        }
        self.contradictions = 0;
        self.rate(now, delivered_bps, network_limited, settings)
    }

    /// Takes a delivered rate.
    pub fn rate(
        &mut self,
        now: Moment,
        delivered_bps: f64,
        network_limited: bool,
        settings: &DetectSettings,
    ) -> Option<LinkVerdict> {
        if !delivered_bps.is_finite() || delivered_bps < 0.0 {
            return None;
        }
        let known = self.link.bandwidth.0 as f64;
        if network_limited {
            if delivered_bps == 0.0 {
                // Nothing delivered is silence, not a capacity of zero: liveness deals with it.
                return None;
            }
            let was_guess = self.link.lower_bound || self.unsuspected.take().is_some();
            let fresh = if was_guess {
                delivered_bps
            } else {
                FRESH_PART * delivered_bps + (1.0 - FRESH_PART) * known
            };
            self.link.bandwidth = Bandwidth(fresh as u64);
            self.link.lower_bound = false;
        } else if delivered_bps > known {
            // A capacity once measured stays one: more than it got through, so it is at least that.
            self.link.bandwidth = Bandwidth(delivered_bps as u64);
        } else {
            return None;
        }
        self.judge_rate(now, settings, REPORTS_AGREE)
    }

    /// Takes a breach or recovery an agent has seen (Mbit/s): it counts as it is.
    pub fn event(
        &mut self,
        now: Moment,
        is_degraded: bool,
        measurement: Measurement,
        settings: &DetectSettings,
    ) -> Option<LinkVerdict> {
        if !measurement.value.is_finite() || measurement.value <= 0.0 {
            return None;
        }
        if self.planned.bandwidth.0 == 0 && measurement.bound.is_finite() {
            // Never reported before: what the agent had planned with is what we had.
            self.planned.bandwidth = Bandwidth::from_mbit_s(measurement.bound);
        }
        self.link.bandwidth = Bandwidth::from_mbit_s(measurement.value);
        self.link.lower_bound = false;
        self.unsuspected = None;
        self.agent_says_degraded = is_degraded;
        self.contradictions = 0;
        self.judge_rate(now, settings, 1)
    }

    /// Whether the agent holds it degraded.
    pub const fn is_degraded(&self) -> bool {
        self.agent_says_degraded
    }

    /// Another link out of the same site has degraded to `part` of its rate, now `bandwidth`. They most likely share the uplink, so this
    /// one is planned with in the same proportion until something is measured on it; nothing is raised for it.
    pub fn suspect(&mut self, now: Moment, part: f64, bandwidth: Bandwidth) {
        if self.degraded || self.unsuspected.is_some() || !(0.0..1.0).contains(&part) {
            return;
        }
        self.unsuspected = Some(self.link);
        self.link.bandwidth = if self.link.lower_bound {
            bandwidth
        } else {
            Bandwidth((self.link.bandwidth.0 as f64 * part) as u64)
        };
        self.link.lower_bound = false;
        self.take_as_planned(now);
    }

    /// A link out of the same site has recovered: the suspicion falls with it.
    pub const fn clear(&mut self, now: Moment) {
        if let Some(before) = self.unsuspected.take() {
            self.link.bandwidth = before.bandwidth;
            self.link.lower_bound = before.lower_bound;
            self.take_as_planned(now);
        }
    }

    /// Takes a round trip and a loss.
    pub fn path(
        &mut self,
        now: Moment,
        rtt_ms: Option<f64>,
        loss: f64,
        settings: &DetectSettings,
    ) -> Option<LinkVerdict> {
        if (0.0..=1.0).contains(&loss) {
            self.link.loss = 0.5 * self.link.loss + 0.5 * loss;
        }
        let rtt_ms = rtt_ms.filter(|r| r.is_finite() && *r >= 0.0)?;
        let is_first = self.link.rtt_ms == 0.0;
        self.link.rtt_ms = rtt_ms;
        if is_first {
            self.take_as_planned(now);
            return Some(LinkVerdict::News);
        }
        let planned = self.planned.rtt_ms;
        let bound = planned * settings.rtt_degraded_ratio;
        if rtt_ms > bound && rtt_ms > planned + RTT_JITTER_MS {
            let verdict = LinkVerdict::Degraded(
                LinkQuantity::RoundTrip,
                self.measurement(now, rtt_ms, planned),
            );
            self.take_as_planned(now);
            self.degraded = true;
            return Some(verdict);
        }
        if rtt_ms * settings.rtt_degraded_ratio < planned && rtt_ms + RTT_JITTER_MS < planned {
            self.take_as_planned(now);
            return Some(LinkVerdict::News);
        }
        None
    }

    fn judge_rate(
        &mut self,
        now: Moment,
        settings: &DetectSettings,
        needed: u32,
    ) -> Option<LinkVerdict> {
        let (value, planned) = (
            self.link.bandwidth.0 as f64,
            self.planned.bandwidth.0 as f64,
        );
        if planned == 0.0 {
            self.take_as_planned(now);
            return Some(LinkVerdict::News);
        }
        let measurement = self.measurement(now, value / 1e6, planned / 1e6);
        let is_low = value < planned * settings.link_degraded_ratio && !self.link.lower_bound;
        self.low_reports = if is_low { self.low_reports + 1 } else { 0 };
        let has_risen = value > planned * settings.link_recovered_ratio;
        let verdict = if is_low && self.low_reports >= needed {
            self.degraded = true;
            LinkVerdict::Degraded(LinkQuantity::Rate, measurement)
        } else if self.degraded && !self.agent_says_degraded && has_risen {
            self.degraded = false;
            LinkVerdict::Recovered(measurement)
        } else if (value - planned).abs() > planned * settings.link_news_ratio
            || self.link.lower_bound != self.planned.lower_bound
        {
            if value < planned || self.agent_says_degraded {
                // Small steps down must not add up unnoticed: what was planned with stays the reference.
                return Some(LinkVerdict::News);
            }
            LinkVerdict::News
        } else {
            return None;
        };
        self.take_as_planned(now);
        Some(verdict)
    }

    const fn take_as_planned(&mut self, now: Moment) {
        self.planned = self.link;
        self.changed = now;
        self.low_reports = 0;
    }

    fn measurement(&self, now: Moment, value: f64, bound: f64) -> Measurement {
        Measurement {
            value,
            bound,
            window_ms: u64::try_from(now.since(self.changed).as_millis()).unwrap_or(u64::MAX),
        }
    }
}
