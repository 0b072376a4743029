//! Accounts for every frame: it ends exactly once, as answered, late, skipped, expired or rejected.
//!
//! Pure: time is an argument. Start at [`Ledger::sent`] and [`Ledger::result`].

use std::collections::BTreeMap;
use std::time::Duration;

use compass_shared::ids::{FrameId, Generation};
use compass_shared::model::outcome::{AppReport, Outcome, OutcomeCounts};
use compass_shared::time::{Moment, ms};

/// Latencies kept per report window.
const SAMPLES_MAX: usize = 256;

/// A frame on its way.
#[derive(Debug, Clone, Copy)]
struct Open {
    sent: Moment,
    /// Whether it counts: frames sent before the first plan serve profiling only.
    counted: bool,
}

/// What has become of all frames so far.
#[derive(Debug)]
pub struct Ledger {
    bound: Option<Duration>,
    deadline: Duration,
    open: BTreeMap<FrameId, Open>,
    total: OutcomeCounts,
    window: OutcomeCounts,
    window_began: Moment,
    latencies_ms: Vec<f32>,
    accuracies: Vec<f32>,
    generation: Option<Generation>,
}

impl Ledger {
    /// An empty ledger: answers after `bound` are late, after `deadline` the frame has expired.
    pub fn new(now: Moment, bound: Option<Duration>, deadline: Duration) -> Self {
        Self {
            bound,
            deadline,
            open: BTreeMap::new(),
            total: OutcomeCounts::default(),
            window: OutcomeCounts::default(),
            window_began: now,
            latencies_ms: Vec::new(),
            accuracies: Vec::new(),
            generation: None,
        }
    }

    /// A frame was captured at `captured` and handed over.
    pub fn sent(&mut self, captured: Moment, frame: FrameId, counted: bool) {
        self.open.insert(
            frame,
            Open {
                sent: captured,
                counted,
            },
        );
        if counted {
            self.total.sent += 1;
            self.window.sent += 1;
        }
    }

    /// A result arrived. `None` when the frame has ended before (a duplicate) or comes after its deadline, which [`Self::sweep`] finds.
    pub fn result(
        &mut self,
        now: Moment,
        frame: FrameId,
        generation: Generation,
    ) -> Option<(Duration, Outcome)> {
        let open = self.open.get(&frame)?;
        let latency = now.since(open.sent);
        if latency > self.deadline {
            // The next sweep ends it, and tells the app.
            return None;
        }
        let outcome = if self.bound.is_some_and(|bound| latency > bound) {
            Outcome::Late
        } else {
            Outcome::Answered
        };
        if open.counted && self.latencies_ms.len() < SAMPLES_MAX {
            self.latencies_ms.push(ms(latency) as f32);
        }
        self.generation = self.generation.max(Some(generation));
        self.end(frame, outcome);
        Some((latency, outcome))
    }

    /// The fleet says how the frame ended. Whether that was news.
    pub fn ended(&mut self, frame: FrameId, outcome: Outcome) -> bool {
        // Whether an answer is in time is decided by its arrival here, not by the fleet's word that it was given.
        !matches!(outcome, Outcome::Answered | Outcome::Late) && self.end(frame, outcome)
    }

    /// Ends every frame whose deadline has passed; returns them.
    pub fn sweep(&mut self, now: Moment) -> Vec<FrameId> {
        let passed: Vec<_> = self
            .open
            .iter()
            .filter(|(_, open)| now.since(open.sent) > self.deadline)
            .map(|(frame, _)| *frame)
            .collect();
        for frame in &passed {
            self.end(*frame, Outcome::Expired);
        }
        passed
    }

    /// When the frame was captured, while it is on its way.
    pub fn captured(&self, frame: FrameId) -> Option<Moment> {
        self.open.get(&frame).map(|open| open.sent)
    }

    /// The app measured an answer against its own truth.
    pub fn accuracy(&mut self, value: f64) {
        if self.accuracies.len() < SAMPLES_MAX {
            self.accuracies.push(value as f32);
        }
    }

    /// Counts since the start.
    pub const fn total(&self) -> &OutcomeCounts {
        &self.total
    }

    /// Frames that count and are still on their way.
    pub fn in_flight(&self) -> u64 {
        self.open.values().filter(|open| open.counted).count() as u64
    }

    /// What was measured since the last call.
    pub fn take_report(&mut self, now: Moment) -> AppReport {
        let window_ms = now.since(self.window_began).as_millis() as u64;
        self.window_began = now;
        AppReport {
            generation: self.generation,
            window_ms,
            counts: std::mem::take(&mut self.window),
            latencies_ms: std::mem::take(&mut self.latencies_ms),
            accuracies: std::mem::take(&mut self.accuracies),
        }
    }

    fn end(&mut self, frame: FrameId, outcome: Outcome) -> bool {
        let Some(open) = self.open.remove(&frame) else {
            return false;
        };
        if open.counted {
            self.total.add(outcome);
            self.window.add(outcome);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ledger() -> Ledger {
        Ledger::new(
            Moment(0),
            Some(Duration::from_millis(300)),
            Duration::from_millis(1200),
        )
    }

    fn at(ms: u64) -> Moment {
        Moment(ms * 1000)
    }

    #[test]
    fn in_time_late_and_expired_are_told_apart() {
        let mut ledger = ledger();
        for n in 1..=3 {
            ledger.sent(at(0), FrameId(n), true);
        }
        assert_eq!(
            ledger.result(at(300), FrameId(1), Generation(1)),
            Some((Duration::from_millis(300), Outcome::Answered))
        );
        assert_eq!(
            ledger.result(at(301), FrameId(2), Generation(1)).unwrap().1,
            Outcome::Late
        );
        assert_eq!(
            ledger.result(at(302), FrameId(2), Generation(1)),
            None,
            "a duplicate"
        );
        assert_eq!(ledger.sweep(at(1200)), []);
        assert_eq!(ledger.sweep(at(1201)), [FrameId(3)]);
        assert_eq!(
            ledger.result(at(1202), FrameId(3), Generation(2)),
            None,
            "after its deadline"
        );
        let total = ledger.total();
        assert_eq!(
            (total.sent, total.answered, total.late, total.expired),
            (3, 1, 1, 1)
        );
        assert_eq!(total.attainment(), Some(1.0 / 3.0));
    }

    #[test]
    fn a_result_past_the_deadline_leaves_the_frame_to_the_sweep_so_that_the_app_hears_of_its_end() {
        let mut ledger = ledger();
        ledger.sent(at(0), FrameId(1), true);
        assert_eq!(
            ledger.result(at(1250), FrameId(1), Generation(1)),
            None,
            "too late to count as a result"
        );
        assert_eq!(ledger.sweep(at(1300)), [FrameId(1)]);
        assert_eq!(ledger.total().expired, 1);
    }

    #[test]
    fn frames_before_the_first_plan_do_not_count() {
        let mut ledger = ledger();
        ledger.sent(at(0), FrameId(1), false);
        assert!(ledger.ended(FrameId(1), Outcome::Rejected));
        assert_eq!(*ledger.total(), OutcomeCounts::default());
    }

    proptest! {
        /// Whatever arrives in whatever order, every counted frame ends exactly once.
        #[test]
        fn frames_are_conserved(events in proptest::collection::vec((0..4u8, 0..20u64, 0..3000u64), 1..200)) {
            let mut ledger = ledger();
            let mut now = 0;
            let mut next = 0;
            for (kind, frame, step) in events {
                now += step / 10;
                match kind {
                    0 => { ledger.sent(at(now), FrameId(next), true); next += 1; }
                    1 => { ledger.result(at(now), FrameId(frame), Generation(1)); }
                    2 => { ledger.ended(FrameId(frame), Outcome::Skipped); }
                    _ => { ledger.sweep(at(now)); }
                }
                prop_assert_eq!(ledger.total().sent, ledger.total().ended() + ledger.in_flight());
            }
            ledger.sweep(at(now + 1201));
            prop_assert_eq!(ledger.total().sent, ledger.total().ended());
        }
    }
}
