//! How long to wait before the next try to connect.
//!
//! Start at [`Backoff::next_delay`]. Delays double up to a cap, and the jitter is applied after the cap: applied before
//! it, every client of a server that was long away would wait exactly the cap and return in step with all others. A
//! session that ends soon after it began does not reset the delay, so a server that accepts and drops at once is not
//! hammered.

use std::time::Duration;

use rand::Rng;

/// The smallest part of the capped delay that jitter leaves: at the cap draws spread over three quarters of it.
const JITTER_FLOOR: f64 = 0.25;

/// Bounds of a [`Backoff`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackoffSettings {
    /// First delay, before jitter.
    pub base: Duration,
    /// Longest delay.
    pub cap: Duration,
    /// A session that lived at least this long resets the delay.
    pub settled_after: Duration,
}

impl Default for BackoffSettings {
    fn default() -> Self {
        Self {
            base: Duration::from_millis(250),
            cap: Duration::from_secs(30),
            settled_after: Duration::from_secs(60),
        }
    }
}

/// The delays of one reconnecting client.
#[derive(Debug, Clone)]
pub struct Backoff {
    settings: BackoffSettings,
    failures: u32,
    at_least: Duration,
}

impl Backoff {
    /// Starts with the base delay.
    pub fn new(settings: BackoffSettings) -> Self {
        Self {
            settings,
            failures: 0,
            at_least: Duration::ZERO,
        }
    }

    /// The delay before the next try; each call counts as one more failure.
    pub fn next_delay(&mut self, random: &mut impl Rng) -> Duration {
        let doubled = self
            .settings
            .base
            .saturating_mul(1_u32.checked_shl(self.failures).unwrap_or(u32::MAX));
        let capped = doubled.min(self.settings.cap);
        self.failures = self.failures.saturating_add(1);
        let jittered = capped.mul_f64(random.random_range(JITTER_FLOOR..=1.0));
        // A server's wish comes first, and the jitter on top of it keeps its clients apart.
        match std::mem::take(&mut self.at_least) {
            Duration::ZERO => jittered,
            asked => asked.saturating_add(jittered),
        }
    }

    /// The server asked not to be tried before `delay` has passed; holds for the next delay only.
    pub fn server_asked(&mut self, delay: Duration) {
        self.at_least = self.at_least.max(delay);
    }

    /// A session ended after it had `lived`; only a settled one starts the delays anew.
    pub fn session_ended(&mut self, lived: Duration) {
        if lived >= self.settings.settled_after {
            self.failures = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;

    fn at_cap(settings: BackoffSettings) -> Backoff {
        let mut backoff = Backoff::new(settings);
        let mut random = StdRng::seed_from_u64(0);
        for _ in 0..40 {
            backoff.next_delay(&mut random);
        }
        backoff
    }

    /// Field report 38: at the cap, delays still spread over at least half of it.
    #[test]
    fn field_038_jitter_after_the_cap() {
        let settings = BackoffSettings::default();
        let mut backoff = at_cap(settings);
        let mut random = StdRng::seed_from_u64(38);
        let draws: Vec<Duration> = (0..1_000)
            .map(|_| backoff.next_delay(&mut random))
            .collect();
        let least = draws.iter().min().unwrap();
        let most = draws.iter().max().unwrap();
        assert!(*most <= settings.cap);
        assert!(
            *most - *least >= settings.cap / 2,
            "{least:?} to {most:?} of {:?}",
            settings.cap
        );
    }

    /// Field report 38: 500 clients of a server that was away for ten minutes do not return in step.
    #[test]
    fn field_038_no_thundering_return() {
        let settings = BackoffSettings::default();
        let back_at = Duration::from_secs(600);
        let mut bins = [0_u32; 60];
        for client in 0..500 {
            let mut random = StdRng::seed_from_u64(client);
            let mut backoff = Backoff::new(settings);
            let mut now = Duration::ZERO;
            while now < back_at {
                now += backoff.next_delay(&mut random);
            }
            bins[usize::try_from((now - back_at).as_secs()).unwrap()] += 1;
        }
        let mean = 500.0 / f64::from(u32::try_from(settings.cap.as_secs()).unwrap());
        let worst = *bins.iter().max().unwrap();
        assert!(
            f64::from(worst) <= 3.0 * mean,
            "{worst} in one second, mean {mean}"
        );
    }

    #[test]
    fn only_a_settled_session_resets() {
        let settings = BackoffSettings::default();
        let mut backoff = at_cap(settings);
        let mut random = StdRng::seed_from_u64(1);
        backoff.session_ended(settings.settled_after - Duration::from_millis(1));
        assert!(backoff.next_delay(&mut random) > settings.base);
        backoff.session_ended(settings.settled_after);
        assert!(backoff.next_delay(&mut random) <= settings.base);
    }

    #[test]
    fn a_server_can_ask_for_patience_once() {
        let settings = BackoffSettings::default();
        let mut backoff = Backoff::new(settings);
        let mut random = StdRng::seed_from_u64(2);
        backoff.server_asked(Duration::from_secs(90));
        assert!(backoff.next_delay(&mut random) >= Duration::from_secs(90));
        assert!(backoff.next_delay(&mut random) <= settings.cap);
    }
}
