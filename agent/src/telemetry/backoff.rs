//! When to ask for a metric again after it had no answer.
//!
//! Asking a driver for what it does not support floods kernel logs on some hosts, so an unsupported metric is asked for once an hour;
//! one that fails otherwise is asked for less and less often, up to once a minute.

use std::time::Duration;

use compass_shared::time::Moment;

/// "Not supported" seldom changes before a driver is replaced.
pub(super) const UNSUPPORTED_RETRY: Duration = Duration::from_secs(3600);
/// First wait after another error: one sample is left out.
const ERROR_RETRY_FIRST: Duration = Duration::from_secs(2);
/// Longest wait after another error.
const ERROR_RETRY_MAX: Duration = Duration::from_secs(60);

/// The gate of one metric of one device.
#[derive(Debug, Clone, Default)]
pub(super) struct Backoff {
    closed_until: Option<Moment>,
    failures: u32,
}

impl Backoff {
    /// Whether the metric may be asked for.
    pub(super) fn is_open(&self, now: Moment) -> bool {
        self.closed_until.is_none_or(|until| now >= until)
    }

    /// A value came back.
    pub(super) fn on_value(&mut self) {
        *self = Self::default();
    }

    /// The device does not have the metric.
    pub(super) fn on_unsupported(&mut self, now: Moment) {
        self.closed_until = Some(now + UNSUPPORTED_RETRY);
        self.failures = 0;
    }

    /// The question failed.
    pub(super) fn on_error(&mut self, now: Moment) {
        let wait = ERROR_RETRY_FIRST
            .saturating_mul(1 << self.failures.min(8))
            .min(ERROR_RETRY_MAX);
        self.closed_until = Some(now + wait);
        self.failures = self.failures.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often in this many seconds a metric is asked for that always ends the same way.
    fn asked(seconds: u64, outcome: fn(&mut Backoff, Moment)) -> usize {
        let mut backoff = Backoff::default();
        (0..seconds)
            .map(|second| Moment(second * 1_000_000))
            .filter(|&now| {
                let is_open = backoff.is_open(now);
                if is_open {
                    outcome(&mut backoff, now);
                }
                is_open
            })
            .count()
    }

    #[test]
    fn unsupported_is_asked_hourly_errors_once_a_minute_and_values_always() {
        assert_eq!(asked(7201, Backoff::on_unsupported), 3);
        assert_eq!(asked(600, |backoff, _| backoff.on_value()), 600);
        let errors = asked(600, Backoff::on_error);
        assert!((10..=16).contains(&errors), "{errors}");
    }
}
