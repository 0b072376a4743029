//! How late packets left, against the moment the model says they should have: the relay's own error.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Buckets per doubling: a quantile is off by less than 1/16.
const BUCKETS_PER_DOUBLING: u64 = 16;

/// A histogram of lateness in microseconds; buckets grow with the value, so it stays small for ever.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lateness {
    /// Packets per bucket; trailing empty buckets are absent.
    buckets: Vec<u64>,
    /// The largest lateness seen, in microseconds.
    pub max_us: u64,
}

impl Lateness {
    /// Adds one packet.
    pub fn record(&mut self, late: Duration) {
        let micros = u64::try_from(late.as_micros()).unwrap_or(u64::MAX);
        let index = bucket_of(micros);
        if self.buckets.len() <= index {
            self.buckets.resize(index + 1, 0);
        }
        self.buckets[index] += 1;
        self.max_us = self.max_us.max(micros);
    }

    /// Number of packets.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The lateness that this part (0 to 1) of packets did not exceed, rounded up to its bucket's end; nothing without packets.
    pub fn quantile(&self, part: f64) -> Option<Duration> {
        let count = self.count();
        if count == 0 {
            return None;
        }
        let rank = ((part.clamp(0.0, 1.0) * count as f64).ceil() as u64).max(1);
        let mut seen = 0;
        for (index, packets) in self.buckets.iter().enumerate() {
            seen += packets;
            if seen >= rank {
                return Some(Duration::from_micros(bucket_end(index).min(self.max_us)));
            }
        }
        Some(Duration::from_micros(self.max_us))
    }

    /// The 99th percentile in milliseconds; zero without packets.
    pub fn p99_ms(&self) -> f64 {
        self.quantile(0.99)
            .map_or(0.0, |late| late.as_secs_f64() * 1e3)
    }

    /// The median in milliseconds; zero without packets.
    pub fn p50_ms(&self) -> f64 {
        self.quantile(0.50)
            .map_or(0.0, |late| late.as_secs_f64() * 1e3)
    }

    /// What was added after `earlier`, an older state of this histogram (the maximum stays that of the whole).
    pub fn since(&self, earlier: &Self) -> Self {
        let before = |index: usize| earlier.buckets.get(index).copied().unwrap_or(0);
        let buckets = self
            .buckets
            .iter()
            .enumerate()
            .map(|(index, now)| now.saturating_sub(before(index)))
            .collect();
        Self {
            buckets,
            max_us: self.max_us,
        }
    }
}

/// The first `BUCKETS_PER_DOUBLING` buckets are one microsecond wide, then each doubling is split evenly.
fn bucket_of(micros: u64) -> usize {
    if micros < BUCKETS_PER_DOUBLING {
        return micros as usize;
    }
    let shift = micros.ilog2() - BUCKETS_PER_DOUBLING.ilog2();
    (u64::from(shift) * BUCKETS_PER_DOUBLING + (micros >> shift)) as usize
}

/// The largest value of a bucket.
fn bucket_end(index: usize) -> u64 {
    let index = index as u64;
    if index < BUCKETS_PER_DOUBLING {
        return index;
    }
    let shift = index / BUCKETS_PER_DOUBLING - 1;
    let mantissa = u128::from(index - shift * BUCKETS_PER_DOUBLING + 1);
    u64::try_from((mantissa << shift) - 1).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn quantiles_are_never_below_the_truth_and_close_to_it() {
        let mut lateness = Lateness::default();
        for micros in 1..=10_000 {
            lateness.record(Duration::from_micros(micros));
        }
        let p99 = lateness.quantile(0.99).unwrap();
        assert!(
            p99 >= Duration::from_micros(9_900) && p99 <= Duration::from_micros(9_900 * 17 / 16)
        );
        assert_eq!(lateness.quantile(1.0), Some(Duration::from_micros(10_000)));
        assert_eq!(lateness.count(), 10_000);
        assert_eq!(Lateness::default().quantile(0.5), None);
    }

    #[test]
    fn a_later_state_minus_an_earlier_one_is_what_came_between() {
        let mut lateness = Lateness::default();
        lateness.record(Duration::from_secs(1));
        let earlier = lateness.clone();
        lateness.record(Duration::from_micros(5));
        let between = lateness.since(&earlier);
        assert_eq!(
            (between.count(), between.quantile(0.99)),
            (1, Some(Duration::from_micros(5)))
        );
    }

    proptest! {
        #[test]
        fn every_value_lies_in_its_bucket(micros: u64) {
            let index = bucket_of(micros);
            prop_assert!(micros <= bucket_end(index));
            prop_assert!(index == 0 || micros > bucket_end(index - 1));
        }
    }
}
