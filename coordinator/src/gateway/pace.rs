//! How fast one session may tell facts: a peer above it is read more slowly, and QUIC's flow control slows it down in turn.

use std::time::Duration;

use tokio::time::Instant;

/// A bucket of messages that refills at a steady rate.
#[derive(Debug)]
pub(super) struct Pace {
    per_second: f64,
    burst: f64,
    left: f64,
    at: Instant,
}

impl Pace {
    /// `burst` messages at once, `per_second` in the long run.
    pub(super) fn new(burst: u32, per_second: u32) -> Self {
        Self {
            per_second: f64::from(per_second),
            burst: f64::from(burst),
            left: f64::from(burst),
            at: Instant::now(),
        }
    }

    /// Waits until one more message may be taken.
    pub(super) async fn take(&mut self) {
        let now = Instant::now();
        let refill = now.duration_since(self.at).as_secs_f64() * self.per_second;
        self.left = (self.left + refill).min(self.burst);
        self.at = now;
        self.left -= 1.0;
        if self.left < 0.0 {
            let pause = Duration::from_secs_f64(-self.left / self.per_second);
            tokio::time::sleep(pause).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_burst_passes_and_a_flood_is_slowed_to_the_rate() {
        let begun = Instant::now();
        let mut pace = Pace::new(10, 100);
        for _ in 0..10 {
            pace.take().await;
        }
        assert_eq!(begun.elapsed(), Duration::ZERO);
        for _ in 0..1000 {
            pace.take().await;
        }
        let seconds = begun.elapsed().as_secs_f64();
        assert!((9.9..10.6).contains(&seconds), "{seconds}");
    }
}
