//! What the coordinator counts about itself, in the OpenMetrics text format.
//!
//! Labels come from closed lists only (roles, triggers, outcomes, actor kinds), never from names of nodes or queries, so that the number
//! of series is bounded.

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

/// The type of the text: what a scraper must be told.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// One label from a closed list.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Kind {
    /// Its value.
    pub kind: &'static str,
}

/// A counter per kind.
pub type Counters = Family<Kind, Counter>;

/// All of them.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Live sessions by role of the peer.
    pub sessions: Family<Kind, Gauge>,
    /// Sessions that were refused, by reason.
    pub sessions_refused: Counters,
    /// Reports of agents that arrived.
    pub reports: Counter,
    /// Reports overwritten by a newer one before anybody looked at them, and reports that were damaged or stale.
    pub reports_dropped: Counters,
    /// Facts that did not fit into a role's inbox, by role.
    pub inbox_dropped: Counters,
    /// New plans in force, by trigger.
    pub replans: Counters,
    /// Plans that the checker refused.
    pub plans_refused: Counter,
    /// Trial stages by outcome.
    pub trials: Counters,
    /// Trial stages that need not run because their outputs were known.
    pub cache_hits: Counter,
    /// Actors that were started again, by kind.
    pub restarts: Counters,
    /// Actors that were given up, by kind.
    pub given_up: Counters,
    /// Audit lines that did not fit into the queue to the store.
    pub events_dropped: Counter,
    /// Transactions carried out.
    pub store_transactions: Counter,
    /// Time to make a group of transactions durable.
    pub store_commit: Histogram,
    /// Time of one call of a planning role, by role.
    pub planning: Family<Kind, Histogram, fn() -> Histogram>,
    /// API answers by status class.
    pub http: Counters,
    /// Nodes that joined, renewed or were refused.
    pub joins: Counters,
    /// Artifact bytes sent to agents.
    pub artifact_bytes: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All at zero.
    pub fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("compass_coordinator"),
            sessions: Family::default(),
            sessions_refused: Family::default(),
            reports: Counter::default(),
            reports_dropped: Family::default(),
            inbox_dropped: Family::default(),
            replans: Family::default(),
            plans_refused: Counter::default(),
            trials: Family::default(),
            cache_hits: Counter::default(),
            restarts: Family::default(),
            given_up: Family::default(),
            events_dropped: Counter::default(),
            store_transactions: Counter::default(),
            // A group costs one flush of the disk: 0.2 ms to a second.
            store_commit: Histogram::new(exponential_buckets(0.000_25, 2.0, 13)),
            planning: Family::new_with_constructor(|| {
                Histogram::new(exponential_buckets(0.000_1, 2.5, 12))
            }),
            http: Family::default(),
            joins: Family::default(),
            artifact_bytes: Counter::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let r = &mut self.registry;
        r.register(
            "sessions",
            "Live sessions by role of the peer",
            self.sessions.clone(),
        );
        r.register(
            "sessions_refused",
            "Sessions refused by reason",
            self.sessions_refused.clone(),
        );
        r.register("reports", "Reports of agents", self.reports.clone());
        r.register(
            "reports_dropped",
            "Reports nobody looked at",
            self.reports_dropped.clone(),
        );
        r.register(
            "inbox_dropped",
            "Facts that did not fit into a role's inbox",
            self.inbox_dropped.clone(),
        );
        r.register(
            "replans",
            "Plans put in force by trigger",
            self.replans.clone(),
        );
        r.register(
            "plans_refused",
            "Plans refused by the checker",
            self.plans_refused.clone(),
        );
        r.register("trials", "Trial stages by outcome", self.trials.clone());
        r.register(
            "trial_cache_hits",
            "Trial stages answered from the cache",
            self.cache_hits.clone(),
        );
        r.register(
            "actor_restarts",
            "Actors started again",
            self.restarts.clone(),
        );
        r.register("actors_given_up", "Actors given up", self.given_up.clone());
        r.register(
            "events_dropped",
            "Audit lines not stored",
            self.events_dropped.clone(),
        );
        r.register(
            "store_transactions",
            "Transactions carried out",
            self.store_transactions.clone(),
        );
        r.register_with_unit(
            "store_commit",
            "Time to make a group of transactions durable",
            Unit::Seconds,
            self.store_commit.clone(),
        );
        r.register_with_unit(
            "planning",
            "Time of one call of a planning role",
            Unit::Seconds,
            self.planning.clone(),
        );
        r.register(
            "http_answers",
            "API answers by status class",
            self.http.clone(),
        );
        r.register("joins", "Joins and renewals by outcome", self.joins.clone());
        r.register_with_unit(
            "artifact_sent",
            "Artifact bytes sent to agents",
            Unit::Bytes,
            self.artifact_bytes.clone(),
        );
    }

    /// The exposition text.
    pub fn text(&self) -> String {
        let mut out = String::new();
        text::encode(&mut out, &self.registry).expect("writing to a string cannot fail");
        out
    }
}

/// Counts one of a kind.
pub fn count(counters: &Counters, kind: &'static str) {
    counters.get_or_create(&Kind { kind }).inc();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_open_metrics_with_our_prefix() {
        let metrics = Metrics::new();
        count(&metrics.replans, "link-degraded");
        metrics.store_commit.observe(0.003);
        let text = metrics.text();
        assert!(
            text.contains("compass_coordinator_replans_total{kind=\"link-degraded\"} 1\n"),
            "{text}"
        );
        assert!(
            text.contains("compass_coordinator_store_commit_seconds_count 1\n"),
            "{text}"
        );
        assert!(text.ends_with("# EOF\n"));
    }
}
