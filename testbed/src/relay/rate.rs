//! How much a pipe can carry at each moment: nothing to wait for, a constant rate, or a trace replayed for ever.
//!
//! Work is counted in bit·nanoseconds per second (bits × 10⁹), so that `rate × nanoseconds` is exact in integers and no
//! rounding can let a pipe exceed its rate.

use std::sync::Arc;
use std::time::Duration;

use super::trace::Trace;

/// Work of one bit, in the unit of this module.
const WORK_PER_BIT: u128 = 1_000_000_000;

/// Bits × 10⁹: what a rate of 1 bit/s does in one nanosecond is 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Work(pub u128);

impl Work {
    /// The work of carrying this many bytes.
    pub fn of_bytes(bytes: usize) -> Self {
        Self(bytes as u128 * 8 * WORK_PER_BIT)
    }

    /// What is left of this work when `done` has been done.
    pub fn minus(self, done: Self) -> Self {
        Self(self.0.saturating_sub(done.0))
    }

    /// The time this work takes at a constant rate (rounded up), or nothing at a rate of zero.
    pub fn time_at(self, bits_per_second: u64) -> Option<Duration> {
        (bits_per_second > 0).then(|| from_nanos(self.0.div_ceil(u128::from(bits_per_second))))
    }
}

/// The rate of a pipe over time; times are since the start of the emulation.
#[derive(Debug, Clone)]
pub enum RateSchedule {
    /// Everything passes at once.
    Unlimited,
    /// Bits per second; zero holds everything back.
    Constant(u64),
    /// A trace whose first sample holds at `anchor` and which begins again when it ends.
    Trace {
        /// The samples.
        trace: Arc<Trace>,
        /// When the trace begins.
        anchor: Duration,
    },
}

impl RateSchedule {
    /// Bits per second at `at`; nothing for an unlimited pipe.
    pub fn rate_at(&self, at: Duration) -> Option<u64> {
        match self {
            Self::Unlimited => None,
            Self::Constant(rate) => Some(*rate),
            Self::Trace { trace, anchor } => {
                Some(trace.step_at(position(trace, *anchor, at)).rate_bps)
            }
        }
    }

    /// The one-way delay that the trace adds at `at`: half its round-trip time.
    pub fn delay_at(&self, at: Duration) -> Duration {
        match self {
            Self::Trace { trace, anchor } => trace
                .step_at(position(trace, *anchor, at))
                .rtt
                .map_or(Duration::ZERO, |rtt| rtt / 2),
            Self::Unlimited | Self::Constant(_) => Duration::ZERO,
        }
    }

    /// The work done between two moments by a pipe that is never idle; everything for an unlimited one.
    pub fn work_between(&self, from: Duration, to: Duration) -> Work {
        match self {
            Self::Unlimited => Work(u128::MAX),
            Self::Constant(rate) => Work(u128::from(*rate) * to.saturating_sub(from).as_nanos()),
            Self::Trace { trace, anchor } => {
                let done_until = |at: Duration| trace.work_until(at.saturating_sub(*anchor));
                Work(done_until(to).saturating_sub(done_until(from)))
            }
        }
    }

    /// The first moment at which work begun at `start` is complete, or nothing when that never happens.
    pub fn finish(&self, start: Duration, work: Work) -> Option<Duration> {
        match self {
            Self::Unlimited => Some(start),
            Self::Constant(rate) => work.time_at(*rate).map(|time| start + time),
            Self::Trace { trace, anchor } => {
                let since_anchor = start.saturating_sub(*anchor);
                Some(*anchor + trace.time_of_work(trace.work_until(since_anchor) + work.0))
            }
        }
    }
}

fn position(trace: &Trace, anchor: Duration, at: Duration) -> Duration {
    from_nanos(at.saturating_sub(anchor).as_nanos() % trace.duration().as_nanos())
}

/// A duration of this many nanoseconds; saturates after 584 years.
pub fn from_nanos(nanos: u128) -> Duration {
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn trace_schedule(anchor_ms: u64) -> RateSchedule {
        let trace =
            Trace::parse("time_s,bandwidth_mbps,rtt_ms\n0,8,20\n1,0,20\n2,4,100\n3,16,20\n")
                .unwrap();
        RateSchedule::Trace {
            trace: Arc::new(trace),
            anchor: Duration::from_millis(anchor_ms),
        }
    }

    #[test]
    fn a_trace_sets_rate_and_delay_and_begins_again() {
        let schedule = trace_schedule(500);
        let at = |ms| Duration::from_millis(ms);
        assert_eq!(schedule.rate_at(at(0)), Some(8_000_000));
        assert_eq!(schedule.rate_at(at(1_499)), Some(8_000_000));
        assert_eq!(schedule.rate_at(at(1_500)), Some(0));
        assert_eq!(schedule.rate_at(at(2_600)), Some(4_000_000));
        assert_eq!(schedule.delay_at(at(2_600)), at(50));
        assert_eq!(
            schedule.rate_at(at(4_500)),
            Some(8_000_000),
            "a loop takes four seconds"
        );
    }

    #[test]
    fn work_waits_out_an_outage_in_the_trace() {
        let schedule = trace_schedule(0);
        // 1 500 000 bytes are 12 Mbit: 8 in the first second, none in the second, 4 in the third.
        let finish = schedule
            .finish(Duration::ZERO, Work::of_bytes(1_500_000))
            .unwrap();
        assert_eq!(finish, Duration::from_secs(3));
        // A whole loop carries 28 Mbit.
        let finish = schedule
            .finish(Duration::ZERO, Work::of_bytes(28_000_000 / 8 * 10))
            .unwrap();
        assert_eq!(finish, Duration::from_secs(40));
    }

    #[test]
    fn a_rate_of_zero_never_finishes() {
        assert_eq!(
            RateSchedule::Constant(0).finish(Duration::ZERO, Work::of_bytes(1)),
            None
        );
    }

    proptest! {
        #[test]
        fn finish_is_the_first_moment_with_enough_work(start_ms in 0_u64..20_000, bytes in 1_usize..3_000_000, rate in 1_u64..100_000_000) {
            let start = Duration::from_millis(start_ms);
            for schedule in [RateSchedule::Constant(rate), trace_schedule(0), trace_schedule(3)] {
                let start = start + Duration::from_millis(3);
                let finish = schedule.finish(start, Work::of_bytes(bytes)).unwrap();
                prop_assert!(schedule.work_between(start, finish) >= Work::of_bytes(bytes));
                let before = finish - Duration::from_nanos(1);
                prop_assert!(schedule.work_between(start, before) < Work::of_bytes(bytes));
            }
        }
    }
}
