//! How fast samples for trials may go to another node: they take what live frames leave.
//!
//! Start at [`Pace::may_send`]. A transfer that fills a link makes every frame through it wait behind a full queue, also frames of other
//! connections and other nodes. So a transfer stops while packets wait longer than [`QUEUE_MAX`] on the way, whoever fills the queue, as
//! LEDBAT (RFC 6817) does, and what it has under way grows only while they hardly wait. On an idle link that is the whole of it.

use std::time::Duration;

use compass_transport::SessionStats;

/// Longest time a packet may wait on the way before a transfer makes room.
const QUEUE_MAX: Duration = Duration::from_millis(40);
/// Least and most that a transfer has under way, in bytes: a sample or two, and a bandwidth-delay product of a wide link.
const UNDER_WAY: (u64, u64) = (16 << 10, 4 << 20);
/// What is under way grows by this part of what arrives, so by a quarter per round trip: the smoothed round trip lags behind the queue.
const GROWTH_DIVISOR: u64 = 4;

/// One transfer over a session.
#[derive(Debug)]
pub(super) struct Pace {
    budget: u64,
    sent: u64,
    delivered_before: u64,
    /// What was delivered when the budget last grew.
    delivered: u64,
}

impl Pace {
    /// A transfer that begins now.
    pub(super) const fn new(stats: &SessionStats) -> Self {
        Self {
            budget: UNDER_WAY.0,
            sent: 0,
            delivered_before: stats.delivered_bytes,
            delivered: 0,
        }
    }

    /// Whether the next part may be written.
    pub(super) fn may_send(&mut self, stats: &SessionStats) -> bool {
        let waits = stats.rtt.saturating_sub(stats.rtt_min);
        if waits > QUEUE_MAX {
            self.budget = UNDER_WAY.0;
            return false;
        }
        let delivered = stats.delivered_bytes.saturating_sub(self.delivered_before);
        let fresh = delivered - std::mem::replace(&mut self.delivered, delivered);
        if waits < QUEUE_MAX / 2 {
            self.budget = (self.budget + fresh / GROWTH_DIVISOR).min(UNDER_WAY.1);
        }
        self.sent.saturating_sub(delivered) <= self.budget
    }

    /// A part was written.
    pub(super) const fn sent(&mut self, bytes: u64) {
        self.sent += bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Transfers a megabyte in parts of 16 kB in virtual time over a path of this rate; gives the seconds it takes and the longest wait.
    fn transfer(rate_bps: f64, others_wait: Duration) -> (f64, Duration) {
        const PART: u64 = 16 << 10;
        let rtt_min = Duration::from_millis(30);
        let (mut now_s, mut queued, mut left) = (0.0, 0.0_f64, 1_u64 << 20);
        let mut acknowledged = std::collections::VecDeque::new();
        let mut stats = SessionStats {
            rtt_min,
            ..SessionStats::default()
        };
        let mut pace = Pace::new(&stats);
        let mut longest = Duration::ZERO;
        while left > 0 {
            let waits = Duration::from_secs_f64(queued * 8.0 / rate_bps);
            stats.rtt = rtt_min + waits + others_wait;
            longest = longest.max(waits);
            while acknowledged.front().is_some_and(|(at, _)| *at <= now_s) {
                stats.delivered_bytes += acknowledged.pop_front().map_or(0, |(_, bytes)| bytes);
            }
            if pace.may_send(&stats) {
                pace.sent(PART);
                queued += PART as f64;
                left -= PART;
                let arrives = now_s + queued * 8.0 / rate_bps + rtt_min.as_secs_f64();
                acknowledged.push_back((arrives, PART));
            }
            now_s += 0.005;
            queued = (queued - rate_bps / 8.0 * 0.005).max(0.0);
            if now_s > 60.0 {
                break;
            }
        }
        (now_s, longest)
    }

    #[test]
    fn a_transfer_fills_an_idle_link_and_its_queue_stays_short() {
        let (took_s, longest) = transfer(4e6, Duration::ZERO);
        let least_s = 8.0 * f64::from(1 << 20) / 4e6;
        assert!(took_s < least_s * 1.3, "{took_s} s, at least {least_s}");
        assert!(longest <= QUEUE_MAX * 3, "{longest:?}");
        assert!(transfer(500e6, Duration::ZERO).0 < 1.0);
    }

    #[test]
    fn a_transfer_stands_back_while_others_fill_the_queue() {
        let (took_s, _) = transfer(4e6, Duration::from_millis(60));
        assert!(took_s > 60.0);
    }
}
