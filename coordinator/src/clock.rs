//! The one monotonic clock of the process: what the planning roles are told as "now".

use compass_shared::time::Moment;
use tokio::time::Instant;

/// Time since the process began. Follows tokio's clock, so that tests can pause it.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    start: Instant,
}

impl Clock {
    /// Begins now.
    pub fn begin() -> Self {
        Self {
            start: Instant::now(),
        }
    }

    /// Now.
    pub fn now(&self) -> Moment {
        Moment::from_duration(self.start.elapsed())
    }

    /// The instant of a moment, for timers.
    pub fn instant(&self, moment: Moment) -> Instant {
        self.start + moment.since(Moment(0))
    }

    /// The wall time of a past moment, in milliseconds since 1970, for people.
    pub fn unix_ms(&self, moment: Moment) -> u64 {
        let ago = self.now().since(moment);
        let ago = u64::try_from(ago.as_millis()).unwrap_or(u64::MAX);
        crate::events::now_unix_ms().saturating_sub(ago)
    }
}
