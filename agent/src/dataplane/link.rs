//! What a node knows of the link to one neighbour: round-trip time, rate, whether it has become much worse, whether it is alive.
//!
//! Start at [`LinkEstimator::slice`], called every [`LinkPolicy::slice`], and [`Liveness::step`]. Pure: the hub feeds them what was
//! sent, received and counted.
//!
//! The rate is what was delivered per busy time: time in which some frame had been under way for more than a round trip, so that a
//! link that is idle between frames is judged by its bursts. A link counts as degraded once slow stretches have added up to
//! [`LinkPolicy::slow_evidence`] without one frame at its usual speed in between; a stall of the machine is shorter than that. Whether
//! a degraded or unused link has come back is found by short probe trains.
//!
//! Deliberately absent: which links matter (the planner's business) and re-routing (the core's).

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use compass_shared::model::trigger::Measurement;
use compass_shared::time::{Moment, ms};

#[cfg(test)]
mod tests;

/// Longest wait for the report of a probe train.
const PROBE_PATIENCE: Duration = Duration::from_secs(3);

/// Least rate that is told, in bit/s: less cannot be told from silence, which is [`Liveness`]'s business.
const RATE_MIN: f64 = 1000.0;

/// Smallest probe train: two packets, or there is nothing to time.
const PROBE_BYTES_MIN: u64 = 2400;

/// A link that has delivered nothing for more slices than this is silent.
const SILENT_SLICES: u32 = 2;

/// Longest rest between probe trains on a degraded link, however narrow it is: recovery must be found within a minute.
const PROBE_REST_MAX: Duration = Duration::from_secs(20);

/// Bounds and thresholds of link measurement, each with its reason.
#[derive(Debug, Clone, Copy)]
pub struct LinkPolicy {
    /// Time between evaluations.
    pub slice: Duration,
    /// A stretch is slow below this part of the usual rate: cuts that matter are deeper, noise of bursts is not.
    pub slow_ratio: f64,
    /// Time per frame that is never held against a link: scheduling on a busy host.
    pub slack: Duration,
    /// Slow time after which the link counts as degraded: longer than a stall of a busy host, shorter than a second.
    pub slow_evidence: Duration,
    /// Part of the former rate at which a degraded link counts as recovered.
    pub recover_ratio: f64,
    /// Frames or probe trains at the former rate that prove a recovery.
    pub recover_frames: u32,
    /// Size of a probe train on a link whose rate is unknown.
    pub probe_first_bytes: u64,
    /// Size of a probe train on a degraded or unused link: a tenth of a second at 1.3 Mbit/s.
    pub probe_bytes: u64,
    /// Time between probe trains on a degraded link.
    pub probe_degraded: Duration,
    /// Time between probe trains on an unused one.
    pub probe_idle: Duration,
    /// Probe trains at first contact: the congestion window opens on the first.
    pub probes_first: u32,
    /// Longest time a probe train may take at the rate last known, and the part of that rate all trains may use: probing must
    /// not be what keeps a narrow link from carrying control messages.
    pub probe_takes: Duration,
    /// See `probe_takes`.
    pub probe_budget: f64,
    /// Bytes that may be under way while the capacity is not known.
    pub window_unknown: u64,
    /// A rate is a capacity only if it was measured over this much busy time within [`Self::fresh`]: below, the host's scheduling was
    /// timed, not the link.
    pub credible: Duration,
    /// See `credible`: the time between two reports.
    pub fresh: Duration,
}

impl Default for LinkPolicy {
    fn default() -> Self {
        Self {
            slice: Duration::from_millis(100),
            slow_ratio: 0.3,
            slack: Duration::from_millis(30),
            slow_evidence: Duration::from_millis(300),
            recover_ratio: 0.6,
            recover_frames: 3,
            probe_first_bytes: 32 << 10,
            probe_bytes: 16 << 10,
            probe_degraded: Duration::from_secs(3),
            probe_idle: Duration::from_secs(20),
            probes_first: 3,
            probe_takes: Duration::from_millis(150),
            probe_budget: 0.03,
            window_unknown: 64 << 10,
            credible: Duration::from_millis(20),
            fresh: Duration::from_secs(1),
        }
    }
}

/// Counters of the transport at the end of a slice; they grow from the session's start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes acknowledged by the neighbour.
    pub delivered_bytes: u64,
    /// Packets sent.
    pub sent_packets: u64,
    /// Packets lost.
    pub lost_packets: u64,
    /// Bytes the congestion control lets be under way.
    pub congestion_window_bytes: u64,
    /// Smallest round trip the transport has seen.
    pub rtt_min: Duration,
}

/// A link that changed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LinkChange {
    /// Rate in Mbit/s now, and before.
    Degraded(Measurement),
    /// Rate in Mbit/s now, and before.
    Recovered(Measurement),
}

/// Measures one direction of a link: from this node to a neighbour.
#[derive(Debug)]
pub struct LinkEstimator {
    policy: LinkPolicy,
    under_way: BTreeMap<u64, (Moment, u64)>,
    /// Busy time within this slice, up to a moment.
    busy: Duration,
    accounted: Moment,
    last_received: Moment,
    frames_done: u32,
    fast_seen: bool,
    counters: Counters,
    rtt: RttWindow,
    /// Delivered bytes and busy seconds, both forgetting with a half-life of a second of busy time.
    recent: (f64, f64),
    /// Usual rate in bit/s.
    reference: Option<f64>,
    /// The rate before the link degraded.
    healthy: Option<f64>,
    evidence: Evidence,
    good_in_a_row: u32,
    probe: ProbeState,
    loss: (f64, f64),
    is_saturated: bool,
    /// What was measured within the last [`LinkPolicy::fresh`].
    window: VecDeque<Stretch>,
    /// A probe train ended within this slice.
    skip_slice: bool,
    last_traffic: Moment,
    last_delivered: Moment,
}

/// Busy time with what was delivered in it.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    ended: Moment,
    busy: Duration,
    bytes: u64,
    /// Whether the network set the pace.
    limited: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Evidence {
    busy: Duration,
    bytes: u64,
    since: Option<Moment>,
}

#[derive(Debug, Clone, Copy, Default)]
struct ProbeState {
    sent: u32,
    outstanding: Option<(Moment, u64)>,
    last: Option<Moment>,
    /// Rate of the last train in bit/s, if it was so slow that another one has to confirm it.
    slow_bps: Option<f64>,
}

impl LinkEstimator {
    /// Nothing is known yet.
    pub fn new(policy: LinkPolicy, now: Moment) -> Self {
        Self {
            policy,
            under_way: BTreeMap::new(),
            busy: Duration::ZERO,
            accounted: now,
            last_received: now,
            frames_done: 0,
            fast_seen: false,
            counters: Counters::default(),
            rtt: RttWindow::new(now),
            recent: (0.0, 0.0),
            reference: None,
            healthy: None,
            evidence: Evidence::default(),
            good_in_a_row: 0,
            probe: ProbeState::default(),
            loss: (0.0, 0.0),
            is_saturated: false,
            window: VecDeque::new(),
            skip_slice: false,
            last_traffic: now,
            last_delivered: now,
        }
    }

    /// A connection was made anew: counters start from zero and nothing is under way; what is known of the link stays.
    pub fn reconnected(&mut self, now: Moment) {
        self.under_way.clear();
        self.busy = Duration::ZERO;
        self.accounted = now;
        self.counters = Counters::default();
        self.probe.outstanding = None;
        self.last_traffic = now;
    }

    /// A frame begins to travel.
    pub fn sent(&mut self, now: Moment, id: u64, bytes: u64) {
        self.account(now);
        self.under_way.insert(id, (now, bytes));
        self.last_traffic = now;
    }

    /// A frame has arrived.
    pub fn received(&mut self, now: Moment, id: u64) {
        self.account(now);
        let Some((sent, bytes)) = self.under_way.remove(&id) else {
            return;
        };
        let began = (sent + self.rtt_min()).max(self.last_received);
        let took = now.since(began);
        self.last_received = now;
        self.last_traffic = now;
        self.frames_done += 1;
        if let Some(reference) = self.reference
            && took <= usual_time(bytes, reference) * 2 + self.policy.slack / 3
        {
            self.fast_seen = true;
        }
        if let Some(healthy) = self.healthy {
            let good =
                usual_time(bytes, healthy * self.policy.recover_ratio) + self.policy.slack / 3;
            self.good_in_a_row = if took <= good {
                self.good_in_a_row + 1
            } else {
                0
            };
        }
    }

    /// A frame is no longer of interest (its sending was stopped).
    pub fn gone(&mut self, now: Moment, id: u64) {
        self.account(now);
        self.under_way.remove(&id);
    }

    /// A ping was answered.
    pub fn pong(&mut self, now: Moment, rtt: Duration) {
        self.rtt.observe(now, rtt);
    }

    /// Bytes acknowledged since the last slice.
    pub fn delivered_since(&self, counters: &Counters) -> u64 {
        let before = self.counters.delivered_bytes;
        counters.delivered_bytes.saturating_sub(before)
    }

    /// Usual rate in bit/s; `None` before it is known.
    pub fn reference(&self) -> Option<f64> {
        self.reference
    }

    /// Ends a slice and tells of a change. `beside` counts bytes that this node has delivered meanwhile over other links which may share
    /// the narrow part of the way: what is slow because of them is not a bad link.
    pub fn slice(&mut self, now: Moment, counters: Counters, beside: u64) -> Option<LinkChange> {
        self.account(now);
        let busy = std::mem::take(&mut self.busy);
        let frames = std::mem::take(&mut self.frames_done);
        let fast_seen = std::mem::take(&mut self.fast_seen);
        let before = std::mem::replace(&mut self.counters, counters);
        let delivered = counters
            .delivered_bytes
            .saturating_sub(before.delivered_bytes);
        self.count_loss(&before, &counters);
        if counters.rtt_min > Duration::ZERO {
            self.rtt.observe(now, counters.rtt_min);
        }
        self.is_saturated = busy > self.policy.slice.mul_f64(0.8);
        if busy.is_zero() {
            return None;
        }
        self.learn(delivered, busy);
        let limited = self.is_saturated || self.is_degraded() || self.falls_short();
        self.note(now, busy, delivered, limited);
        let change = self.judge(now, delivered, beside, (busy, frames, fast_seen));
        if change.is_none() && self.evidence.busy.is_zero() {
            self.follow();
        }
        change
    }

    /// A probe train that should be sent now, in bytes. Other links of this node may share their way with this one: `others_bps` is the
    /// rate of the narrowest of them that is degraded, and the train is no longer than that one would bear.
    pub fn wants_probe(&mut self, now: Moment, others_bps: Option<f64>) -> Option<u64> {
        if self.has_probe_out(now) {
            return None;
        }
        self.probe.outstanding = None;
        let idle = now.since(self.last_traffic);
        let waited = self.probe.last.map(|last| now.since(last));
        let gap = |least: Duration| waited.is_none_or(|waited| waited >= least);
        let is_first = self.probe.sent < self.policy.probes_first;
        let degraded = self.healthy.is_some();
        let is_confirming = degraded && self.good_in_a_row > 0 && gap(self.policy.slice * 3);
        let is_unused = idle > self.policy.slice * 5;
        let is_due = degraded && is_unused && gap(self.policy.probe_degraded);
        let is_stale = idle > self.policy.probe_idle && gap(self.policy.probe_idle);
        let bytes = if is_first && gap(self.policy.slice * 2) {
            self.policy.probe_first_bytes
        } else if is_confirming || is_due || is_stale {
            let (bytes, rest) = self.affordable_probe(others_bps);
            if !gap(rest) {
                return None;
            }
            bytes
        } else {
            return None;
        };
        if !self.under_way.is_empty() {
            return None; // Frames tell as much, and come first.
        }
        self.probe.sent = self.probe.sent.saturating_add(1);
        self.probe.last = Some(now);
        self.probe.outstanding = Some((now, bytes));
        Some(bytes)
    }

    /// Whether a probe train is under way; one whose report is lost is given up.
    pub fn has_probe_out(&self, now: Moment) -> bool {
        let sent = self.probe.outstanding.map(|(sent, _)| sent);
        sent.is_some_and(|sent| now.since(sent) < PROBE_PATIENCE)
    }

    /// Size of a probe train within the budget, and the rest that has to follow the last one.
    fn affordable_probe(&self, others_bps: Option<f64>) -> (u64, Duration) {
        let known = [self.rate(), self.probe.slow_bps, others_bps];
        let known = known.into_iter().flatten().filter(|rate| *rate > 0.0);
        let Some(rate) = known.min_by(f64::total_cmp) else {
            return (self.policy.probe_bytes, Duration::ZERO);
        };
        let fits = (rate / 8.0 * self.policy.probe_takes.as_secs_f64()) as u64;
        let bytes = fits.clamp(
            PROBE_BYTES_MIN,
            self.policy.probe_bytes.max(PROBE_BYTES_MIN),
        );
        // One slow train is to be confirmed at once.
        let rest = match self.probe.slow_bps {
            Some(_) => 0.0,
            None => bytes as f64 * 8.0 / (rate * self.policy.probe_budget),
        };
        (
            bytes,
            Duration::from_secs_f64(rest.min(PROBE_REST_MAX.as_secs_f64())),
        )
    }

    /// The neighbour's report of a probe train: time between its first and last part there.
    pub fn probe_report(&mut self, now: Moment, spread: Duration) -> Option<LinkChange> {
        let (sent, bytes) = self.probe.outstanding.take()?;
        self.skip_slice = true;
        // What waited in a buffer there arrived in no time; the round trip bounds the rate from the other side.
        let took = spread
            .max(now.since(sent).saturating_sub(self.rtt_min()))
            .max(Duration::from_micros(100));
        self.note(now, took, bytes, true);
        let rate = bytes as f64 * 8.0 / took.as_secs_f64();
        self.probe.slow_bps = None;
        let Some(reference) = self
            .reference
            .filter(|_| self.probe.sent > self.policy.probes_first)
        else {
            // While the window opens each train is a better lower bound than the one before.
            self.reference = Some(self.reference.map_or(rate, |known| known.max(rate)));
            self.recent = (
                bytes as f64,
                bytes as f64 * 8.0 / self.reference.unwrap_or(rate),
            );
            return None;
        };
        let slack = usual_time(bytes, reference) + self.policy.slack;
        if let Some(healthy) = self.healthy {
            let is_good = rate >= healthy * self.policy.recover_ratio;
            self.good_in_a_row = if is_good { self.good_in_a_row + 1 } else { 0 };
            self.recent = (bytes as f64, took.as_secs_f64());
            return self.recovered(now, 2);
        }
        if rate < reference * self.policy.slow_ratio && took > slack {
            // One slow train may be the machine's fault: two count.
            self.evidence.busy += self.policy.slow_evidence / 2;
            self.evidence.bytes += bytes;
            self.evidence.since.get_or_insert(now);
            self.probe.last = None;
            self.probe.slow_bps = Some(rate);
            if self.evidence.busy >= self.policy.slow_evidence {
                return Some(self.degrade(now, rate));
            }
        } else {
            self.evidence = Evidence::default();
            self.learn(bytes, took);
        }
        None
    }

    /// Bytes that may be under way before the next frame waits.
    pub fn window(&self) -> u64 {
        let Some(rate) = self.rate() else {
            return self.policy.window_unknown;
        };
        let product = (rate / 8.0 * self.rtt_min().as_secs_f64()) as u64;
        if self.healthy.is_some() || self.is_saturated {
            product
        } else {
            product.max(self.policy.window_unknown)
        }
    }

    /// Rate in bit/s as of late; `None` before anything was delivered.
    pub fn rate(&self) -> Option<f64> {
        let (bytes, seconds) = self.recent;
        // Below a millisecond it is the machine that is measured.
        (bytes > 0.0).then(|| bytes * 8.0 / seconds.max(1e-3))
    }

    /// What to report: the rate in bit/s measured within the last second, and whether that is what the link can do, not only what was
    /// asked of it. Zero and `false` when it was not used.
    pub fn measured(&self, now: Moment) -> (f64, bool) {
        let fresh = || {
            let is_fresh = |stretch: &&Stretch| now.since(stretch.ended) <= self.policy.fresh;
            self.window.iter().filter(is_fresh)
        };
        let limited: Duration = fresh().filter(|s| s.limited).map(|s| s.busy).sum();
        let is_capacity = limited >= self.policy.credible;
        let counted = || fresh().filter(|s| s.limited || !is_capacity);
        let bytes: u64 = counted().map(|s| s.bytes).sum();
        let busy: Duration = counted().map(|s| s.busy).sum();
        // Below a millisecond it is the machine that is measured.
        (
            bytes as f64 * 8.0 / busy.as_secs_f64().max(1e-3),
            is_capacity,
        )
    }

    /// Whether less is delivered than the congestion control would have sent.
    fn falls_short(&self) -> bool {
        let rtt = self.rtt_min().as_secs_f64().max(1e-4);
        let offered = self.counters.congestion_window_bytes as f64 * 8.0 / rtt;
        self.rate().is_some_and(|rate| rate < 0.5 * offered)
    }

    fn note(&mut self, now: Moment, busy: Duration, bytes: u64, limited: bool) {
        self.window.push_back(Stretch {
            ended: now,
            busy,
            bytes,
            limited,
        });
        while self
            .window
            .front()
            .is_some_and(|s| now.since(s.ended) > self.policy.fresh)
        {
            self.window.pop_front();
        }
    }

    /// Whether a probe train is out or due soon.
    pub fn is_probing(&self) -> bool {
        self.probe.outstanding.is_some() || self.probe.sent < self.policy.probes_first
    }

    /// Whether the link counts as degraded.
    pub fn is_degraded(&self) -> bool {
        self.healthy.is_some()
    }

    /// Round-trip time without queueing: the least of the last seconds; `None` before the first answer.
    pub fn rtt(&self) -> Option<Duration> {
        self.rtt.least()
    }

    /// The newest round-trip time, queueing included.
    pub fn rtt_newest(&self) -> Option<Duration> {
        self.rtt.newest
    }

    /// Fraction of packets lost, as of late.
    pub fn loss(&self) -> f64 {
        let (lost, sent) = self.loss;
        if sent > 0.0 { lost / sent } else { 0.0 }
    }

    fn rtt_min(&self) -> Duration {
        self.rtt.least().unwrap_or_default()
    }

    /// Adds up busy time: between two events it began when the first frame under way had been so for a round trip.
    fn account(&mut self, now: Moment) {
        let from = std::mem::replace(&mut self.accounted, now);
        let first = self.under_way.values().map(|(sent, _)| *sent).min();
        if let Some(first) = first {
            self.busy += now.since(from.max(first + self.rtt_min()));
        }
    }

    fn count_loss(&mut self, before: &Counters, now: &Counters) {
        let lost = now.lost_packets.saturating_sub(before.lost_packets);
        let sent = now.sent_packets.saturating_sub(before.sent_packets);
        // A half-life of some hundred packets.
        let keep = 0.5_f64.powf(sent as f64 / 200.0);
        self.loss = (
            self.loss.0 * keep + lost as f64,
            self.loss.1 * keep + sent as f64,
        );
    }

    fn learn(&mut self, delivered: u64, busy: Duration) {
        let busy = busy.as_secs_f64();
        let keep = 0.5_f64.powf(busy.max(0.01));
        // A burst is over within milliseconds: each counts for at least a hundredth of a second of memory.
        self.recent = (
            self.recent.0 * keep + delivered as f64,
            self.recent.1 * keep + busy,
        );
    }

    /// The usual rate follows the recent one slowly while nothing is wrong.
    fn follow(&mut self) {
        let Some(rate) = self.rate() else { return };
        let enough = self.recent.0 >= self.policy.probe_first_bytes as f64;
        self.reference = match self.reference {
            None if enough => Some(rate),
            None => None,
            Some(reference) => Some(reference * 0.95 + rate * 0.05),
        };
    }

    fn judge(
        &mut self,
        now: Moment,
        delivered: u64,
        beside: u64,
        (busy, frames, fast_seen): (Duration, u32, bool),
    ) -> Option<LinkChange> {
        let reference = self.reference?;
        if std::mem::take(&mut self.skip_slice) || self.probe.outstanding.is_some() {
            return None; // What is slow behind our own probe train says nothing.
        }
        let allowed = usual_time(delivered + beside, reference * self.policy.slow_ratio)
            + self.policy.slack * frames.max(1);
        if busy > allowed {
            self.evidence.busy += busy;
            self.evidence.bytes += delivered;
            self.evidence.since.get_or_insert(now);
        } else if fast_seen {
            self.evidence = Evidence::default();
        }
        // Nothing as of late is silence, not a slow link: whether the neighbour lives is for [`Liveness`] to tell.
        if delivered > 0 {
            self.last_delivered = now;
        }
        let is_silent = now.since(self.last_delivered) > self.policy.slice * SILENT_SLICES;
        if self.evidence.busy >= self.policy.slow_evidence && !is_silent {
            let rate = self.evidence.bytes as f64 * 8.0 / self.evidence.busy.as_secs_f64();
            return Some(self.degrade(now, rate));
        }
        self.recovered(now, self.policy.recover_frames)
    }

    fn degrade(&mut self, now: Moment, rate: f64) -> LinkChange {
        let rate = rate.max(RATE_MIN);
        self.probe.slow_bps = None;
        let before = self.reference.unwrap_or(rate);
        let window = self
            .evidence
            .since
            .map_or(Duration::ZERO, |since| now.since(since));
        let seconds = self.evidence.busy.as_secs_f64();
        self.recent = (rate / 8.0 * seconds, seconds);
        self.healthy = Some(self.healthy.map_or(before, |healthy| healthy.max(before)));
        self.reference = Some(rate);
        self.evidence = Evidence::default();
        self.good_in_a_row = 0;
        LinkChange::Degraded(measurement(rate, before, window + self.policy.slice))
    }

    fn recovered(&mut self, now: Moment, needed: u32) -> Option<LinkChange> {
        let healthy = self.healthy?;
        if self.good_in_a_row < needed {
            return None;
        }
        let before = self.reference.unwrap_or_default();
        // What was delivered while it was bad is history.
        let rate = self
            .rate()
            .unwrap_or(healthy)
            .max(healthy * self.policy.recover_ratio);
        self.healthy = None;
        self.reference = Some(rate);
        self.recent = (rate / 8.0 * 0.1, 0.1);
        self.evidence = Evidence::default();
        self.good_in_a_row = 0;
        let window = self
            .probe
            .last
            .map_or(self.policy.slice, |last| now.since(last));
        Some(LinkChange::Recovered(measurement(rate, before, window)))
    }
}

/// Time to put bytes on a link of a rate in bit/s.
fn usual_time(bytes: u64, rate: f64) -> Duration {
    compass_shared::time::from_ms(bytes as f64 * 8e3 / rate.max(1.0))
}

fn measurement(rate: f64, before: f64, window: Duration) -> Measurement {
    Measurement {
        value: rate / 1e6,
        bound: before / 1e6,
        window_ms: ms(window) as u64,
    }
}

/// The least round-trip time of the last two buckets of five seconds.
#[derive(Debug)]
struct RttWindow {
    since: Moment,
    current: Option<Duration>,
    previous: Option<Duration>,
    newest: Option<Duration>,
}

impl RttWindow {
    const BUCKET: Duration = Duration::from_secs(5);

    const fn new(now: Moment) -> Self {
        Self {
            since: now,
            current: None,
            previous: None,
            newest: None,
        }
    }

    fn observe(&mut self, now: Moment, rtt: Duration) {
        if now.since(self.since) >= Self::BUCKET {
            self.since = now;
            self.previous = self.current.take();
        }
        self.current = Some(self.current.map_or(rtt, |least| least.min(rtt)));
        self.newest = Some(rtt);
    }

    fn least(&self) -> Option<Duration> {
        match (self.current, self.previous) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }
}

/// Whether a neighbour answers: two pings in a row without a sign of life mean that it does not.
#[derive(Debug)]
pub struct Liveness {
    heard: (Moment, u64),
    ping: Option<Ping>,
    last_ping: Moment,
    number: u64,
}

#[derive(Debug, Clone, Copy)]
struct Ping {
    sent: Moment,
    heard_before: u64,
    unanswered: u32,
}

/// What is to be done about a neighbour's liveness.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LivenessStep {
    /// Nothing.
    Wait,
    /// Send a ping with this number.
    Ping(u64),
    /// Two pings had no answer.
    Unreachable,
}

impl Liveness {
    /// Least time a ping has for its answer.
    const PATIENCE: Duration = Duration::from_millis(300);
    /// Silence of a neighbour that has frames of ours, before it is asked.
    const SILENCE_BUSY: Duration = Duration::from_millis(200);
    /// Time between pings while frames flow, for the round-trip time.
    const EVERY_BUSY: Duration = Duration::from_millis(500);
    /// The same without frames: an idle agent should hardly be seen.
    const EVERY_IDLE: Duration = Duration::from_secs(2);
    const UNANSWERED_MAX: u32 = 2;

    /// It was just heard: a connection was made.
    pub const fn new(now: Moment) -> Self {
        Self {
            heard: (now, 0),
            ping: None,
            // So that the first step pings: the round-trip time is wanted at once.
            last_ping: Moment(0),
            number: 0,
        }
    }

    /// Advances; to be called every slice. `datagrams` counts what was received from the neighbour, `is_busy` tells whether it has
    /// frames of ours.
    pub fn step(
        &mut self,
        now: Moment,
        datagrams: u64,
        is_busy: bool,
        rtt: Option<Duration>,
    ) -> LivenessStep {
        if datagrams != self.heard.1 {
            self.heard = (now, datagrams);
        }
        let patience = Self::PATIENCE.max(rtt.unwrap_or_default() * 2);
        if let Some(ping) = self.ping {
            if self.heard.1 != ping.heard_before {
                self.ping = None;
            } else if now.since(ping.sent) < patience {
                return LivenessStep::Wait;
            } else if ping.unanswered + 1 >= Self::UNANSWERED_MAX {
                self.ping = None;
                return LivenessStep::Unreachable;
            } else {
                return self.send(now, ping.unanswered + 1);
            }
        }
        let silent = now.since(self.heard.0);
        let waited = now.since(self.last_ping);
        let every = if is_busy {
            Self::EVERY_BUSY
        } else {
            Self::EVERY_IDLE
        };
        if waited >= every
            || (is_busy && silent >= Self::SILENCE_BUSY && waited >= Self::SILENCE_BUSY)
        {
            return self.send(now, 0);
        }
        LivenessStep::Wait
    }

    fn send(&mut self, now: Moment, unanswered: u32) -> LivenessStep {
        self.number += 1;
        self.last_ping = now;
        self.ping = Some(Ping {
            sent: now,
            heard_before: self.heard.1,
            unanswered,
        });
        LivenessStep::Ping(self.number)
    }
}
