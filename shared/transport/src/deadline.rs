//! A point in time by which an operation on the network has to be done.

use std::time::Duration;

use tokio::time::Instant;

use crate::error::TransportError;

/// Longest finite deadline; also what [`Deadline::never`] means.
const NEVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// When an operation has to be done, on the monotonic clock.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    at: Instant,
    allowed: Duration,
}

impl Deadline {
    /// `allowed` from now.
    pub fn after(allowed: Duration) -> Self {
        let allowed = allowed.min(NEVER);
        Self {
            at: Instant::now() + allowed,
            allowed,
        }
    }

    /// `seconds` from now.
    pub fn after_s(seconds: u64) -> Self {
        Self::after(Duration::from_secs(seconds))
    }

    /// `milliseconds` from now.
    pub fn after_ms(milliseconds: u64) -> Self {
        Self::after(Duration::from_millis(milliseconds))
    }

    /// No deadline. Only for waiting until the peer begins something (accepting a stream, the next control message):
    /// the session's idle timeout bounds that.
    pub fn never() -> Self {
        Self::after(NEVER)
    }

    /// The sooner of the two.
    pub fn sooner(self, other: Self) -> Self {
        if other.at < self.at { other } else { self }
    }

    /// Time left, zero when passed.
    pub fn left(&self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    /// Whether it has passed.
    pub fn is_passed(&self) -> bool {
        self.left().is_zero()
    }

    /// Runs `operation` until done or until the deadline, which names `what` was being done.
    pub(crate) async fn run<T>(
        self,
        what: &'static str,
        operation: impl Future<Output = T>,
    ) -> Result<T, TransportError> {
        tokio::time::timeout_at(self.at, operation)
            .await
            .map_err(|_| TransportError::Deadline {
                what,
                after: self.allowed,
            })
    }
}

impl From<Duration> for Deadline {
    fn from(allowed: Duration) -> Self {
        Self::after(allowed)
    }
}
