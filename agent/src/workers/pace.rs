//! Arithmetic of service times: how long a device would have taken, what was measured in a window, how long to pause after a crash.
//!
//! Pure: time is an argument.

use std::time::{Duration, Instant};

use compass_shared::model::cluster::Resources;
use compass_shared::model::telemetry::Enforcement;

/// The least share that holding is computed for, in cores: below, a frame would be held practically for ever.
const CORES_MIN: f64 = 0.01;

/// How fast an instance may work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Pace {
    /// Speed of the node's core relative to the host's.
    pub(crate) speed: f64,
    /// Cores of the node that one thread can use of the share.
    cores: f64,
    /// Whether results are held; false when the kernel enforces the share.
    held: bool,
}

impl Pace {
    /// The pace of an instance with this share; no CPU share stated means a whole core.
    pub(crate) fn new(
        emulated_speed: Option<f64>,
        share: &Resources,
        kernel_enforced: bool,
    ) -> Self {
        let cores = match share.cpu.cores() {
            0.0 => 1.0,
            cores => cores.clamp(CORES_MIN, 1.0),
        };
        Self {
            speed: emulated_speed.unwrap_or(1.0).clamp(CORES_MIN, 1.0),
            cores,
            held: emulated_speed.is_some() || !kernel_enforced,
        }
    }

    /// How the share holds.
    pub(crate) fn enforcement(&self) -> Enforcement {
        if self.held {
            Enforcement::BestEffort
        } else {
            Enforcement::Enforced
        }
    }

    /// When a device of this pace would be done with work begun at `begun` that took this much of the host's CPU time and really
    /// ended at `ended`.
    pub(crate) fn done_at(&self, begun: Instant, ended: Instant, cpu: Duration) -> Instant {
        if !self.held {
            return ended;
        }
        let device = Duration::try_from_secs_f64(cpu.as_secs_f64() / (self.speed * self.cores))
            .unwrap_or(Duration::MAX);
        begun.checked_add(device).map_or(ended, |at| at.max(ended))
    }
}

/// Measurements of one instance since the last report.
#[derive(Debug)]
pub(crate) struct Window {
    since: Instant,
    frames: u32,
    service_ms: Vec<f64>,
    cpu: Duration,
    wall: Duration,
}

/// Service times kept per window for percentiles; far more than an instance serves in a second.
const SERVICE_TIMES_MAX: usize = 4096;

/// A window, summed up.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Summary {
    pub(crate) frames: u32,
    /// Median and 95th percentile.
    pub(crate) service_ms: Option<(f64, f64)>,
    /// Cores of the node used on average over the window.
    pub(crate) busy_cores: f64,
}

impl Window {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            since: now,
            frames: 0,
            service_ms: Vec::new(),
            cpu: Duration::ZERO,
            wall: Duration::ZERO,
        }
    }

    pub(crate) fn add(&mut self, wall: Duration, cpu: Duration) {
        self.frames += 1;
        self.cpu += cpu;
        self.wall += wall;
        if self.service_ms.len() < SERVICE_TIMES_MAX {
            self.service_ms.push(wall.as_secs_f64() * 1e3);
        }
    }

    /// Cores of the node that were had while there was work; `None` before any.
    pub(crate) fn achieved_cores(&self, pace: &Pace) -> Option<f64> {
        (!self.wall.is_zero())
            .then(|| self.cpu.as_secs_f64() / pace.speed / self.wall.as_secs_f64())
    }

    /// Sums up and starts again.
    pub(crate) fn take(&mut self, now: Instant, pace: &Pace) -> Summary {
        let mut sorted = std::mem::take(&mut self.service_ms);
        sorted.sort_by(f64::total_cmp);
        let at = |part: f64| {
            let index = (part * sorted.len() as f64).ceil() as usize;
            sorted.get(index.saturating_sub(1)).copied()
        };
        let elapsed = now.saturating_duration_since(self.since).as_secs_f64();
        let summary = Summary {
            frames: self.frames,
            service_ms: at(0.5).zip(at(0.95)),
            busy_cores: if elapsed > 0.0 {
                self.cpu.as_secs_f64() / pace.speed / elapsed
            } else {
                0.0
            },
        };
        *self = Self::new(now);
        summary
    }
}

/// Pauses between restarts.
#[derive(Debug, Default)]
pub(crate) struct Restarts {
    consecutive: u32,
}

/// The first pause; doubles with each crash in a row.
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// Also a worker that always fails is tried again this often.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// Running this long ends a row of crashes.
const HEALTHY_AFTER: Duration = Duration::from_secs(30);
/// From this many crashes in a row on the instance counts as failed.
const FAILED_FROM: u32 = 5;

impl Restarts {
    /// Notes a crash after this much time alive (`None`: it did not even start); gives the pause and whether the instance counts as
    /// failed from now on.
    pub(crate) fn crashed(&mut self, alive: Option<Duration>) -> (Duration, bool) {
        if alive.is_some_and(|alive| alive >= HEALTHY_AFTER) {
            self.consecutive = 0;
        }
        self.consecutive = self.consecutive.saturating_add(1);
        let doublings = (self.consecutive - 1).min(16);
        let pause = PAUSE_MIN.saturating_mul(1 << doublings).min(PAUSE_MAX);
        (pause, self.consecutive >= FAILED_FROM)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use compass_shared::units::Millicores;

    fn share(millicores: u32) -> Resources {
        Resources {
            cpu: Millicores(millicores),
            ..Resources::default()
        }
    }

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn an_emulated_device_takes_cpu_time_over_speed_and_share() {
        let begun = Instant::now();
        let done = |speed, millicores| {
            Pace::new(speed, &share(millicores), false).done_at(begun, begun + 11 * MS, 10 * MS)
                - begun
        };
        assert_eq!(done(Some(0.25), 1000), 40 * MS);
        assert_eq!(done(Some(0.25), 500), 80 * MS);
        // One thread cannot use more than a core.
        assert_eq!(done(Some(0.25), 4000), 40 * MS);
        // A real device without a kernel quota: admission holds it to its share.
        assert_eq!(done(None, 500), 20 * MS);
        // Never before it really ended.
        assert_eq!(done(None, 1000), 11 * MS);
        let enforced = Pace::new(None, &share(500), true);
        assert_eq!(
            enforced.done_at(begun, begun + 3 * MS, 10 * MS),
            begun + 3 * MS
        );
    }

    #[test]
    fn odd_speeds_and_shares_do_not_hold_for_ever() {
        let begun = Instant::now();
        for speed in [f64::MIN_POSITIVE, 0.0, -1.0] {
            let pace = Pace::new(Some(speed), &share(1), false);
            assert!(pace.done_at(begun, begun, 10 * MS) <= begun + Duration::from_secs(100));
        }
    }

    #[test]
    fn a_window_sums_up_and_starts_again() {
        let start = Instant::now();
        let pace = Pace::new(Some(0.5), &share(1000), false);
        let mut window = Window::new(start);
        assert_eq!(window.achieved_cores(&pace), None);
        for wall in 1..=20 {
            window.add(wall * MS, MS);
        }
        let achieved = window.achieved_cores(&pace).unwrap();
        assert!((achieved - 40.0 / 210.0).abs() < 1e-9);
        let summary = window.take(start + 1000 * MS, &pace);
        assert_eq!(
            (summary.frames, summary.service_ms),
            (20, Some((10.0, 19.0)))
        );
        assert!((summary.busy_cores - 0.04).abs() < 1e-9);
        assert_eq!(window.take(start + 2000 * MS, &pace).service_ms, None);
    }

    #[test]
    fn pauses_double_up_to_a_bound_and_health_ends_the_row() {
        let mut restarts = Restarts::default();
        let pauses: Vec<_> = (0..9).map(|_| restarts.crashed(None)).collect();
        let ms: Vec<_> = pauses.iter().map(|p| p.0.as_millis()).collect();
        assert_eq!(ms, [100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
        assert_eq!(pauses.iter().position(|p| p.1), Some(4));
        assert_eq!(
            restarts.crashed(Some(Duration::from_secs(31))),
            (PAUSE_MIN, false)
        );
    }
}
