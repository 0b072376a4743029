//! How many frames come, against how many were planned for: no traffic is a fact, no telemetry is none.

use compass_shared::detect::{Breach, Edge};
use compass_shared::model::trigger::Measurement;
use compass_shared::time::Moment;

use super::DetectSettings;

/// The load of one query.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadWatch {
    planned_hz: f64,
    reported: Option<Moment>,
    above: Breach,
    below: Breach,
    silent: bool,
    begun: bool,
}

/// What the load calls for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LoadVerdict {
    /// It differs lastingly from what was planned for.
    Shifted(Measurement),
    /// Reports have stopped: the plan is held, somebody should look.
    Unknown,
    /// Reports are back.
    Known,
}

impl LoadWatch {
    /// A watch over a load planned for at this rate.
    pub const fn new(planned_hz: f64, settings: &DetectSettings) -> Self {
        Self {
            planned_hz,
            reported: None,
            above: Breach::new(settings.load_windows),
            below: Breach::new(settings.load_windows),
            silent: false,
            begun: false,
        }
    }

    /// Takes the rate of a reported window.
    pub fn report(
        &mut self,
        now: Moment,
        arrival_hz: f64,
        settings: &DetectSettings,
    ) -> Option<LoadVerdict> {
        if !arrival_hz.is_finite() || arrival_hz < 0.0 {
            return None;
        }
        self.reported = Some(now);
        if std::mem::take(&mut self.silent) {
            return Some(LoadVerdict::Known);
        }
        // A source that has not begun yet has no load to shift from.
        self.begun |= arrival_hz * settings.load_ratio >= self.planned_hz;
        if !self.begun {
            return None;
        }
        let (high, low) = (
            self.planned_hz * settings.load_ratio,
            self.planned_hz / settings.load_ratio,
        );
        let is_above = self.above.above(arrival_hz, high, self.planned_hz) == Some(Edge::Raised);
        let is_below = self.below.below(arrival_hz, low, self.planned_hz) == Some(Edge::Raised);
        if !is_above && !is_below {
            return None;
        }
        let verdict = LoadVerdict::Shifted(Measurement {
            value: arrival_hz,
            bound: self.planned_hz,
            window_ms: u64::from(settings.load_windows) * 1000,
        });
        // From here on the new load is the planned one: the plan follows, and a return is a shift of its own.
        self.planned_hz = arrival_hz;
        self.above.reset();
        self.below.reset();
        Some(verdict)
    }

    /// Looks at the clock.
    pub fn tick(&mut self, now: Moment, settings: &DetectSettings) -> Option<LoadVerdict> {
        let reported = self.reported?;
        if self.silent || now.since(reported) < settings.telemetry_silence {
            return None;
        }
        self.silent = true;
        Some(LoadVerdict::Unknown)
    }
}
