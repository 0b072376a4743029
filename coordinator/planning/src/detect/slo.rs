//! What an app measures, held against its SLOs, window by window.

use std::collections::VecDeque;

use compass_shared::detect::{Breach, Edge, percentile};
use compass_shared::model::outcome::AppReport;
use compass_shared::model::query::Slo;
use compass_shared::model::trigger::{Measurement, NEVER_MS, SloKind};
use compass_shared::time::{Moment, ms};

use super::DetectSettings;

/// Windows kept: a percentile over a few seconds is steadier than over one.
const WINDOWS_KEPT: usize = 3;

/// The SLOs of one query.
#[derive(Debug, Clone, PartialEq)]
pub struct SloWatch {
    slo: Slo,
    ignore_until: Moment,
    latencies: VecDeque<Vec<f64>>,
    accuracies: VecDeque<Vec<f64>>,
    latency: Breach,
    accuracy: Breach,
    raised: Option<Moment>,
}

impl SloWatch {
    /// A watch over these SLOs.
    pub const fn new(slo: Slo, settings: &DetectSettings) -> Self {
        Self {
            slo,
            ignore_until: Moment(0),
            latencies: VecDeque::new(),
            accuracies: VecDeque::new(),
            latency: Breach::new(settings.slo_windows),
            accuracy: Breach::new(settings.slo_windows),
            raised: None,
        }
    }

    /// A new plan is in force: what was seen belongs to the old one, and for a while both answer.
    pub fn switched(&mut self, now: Moment, settings: &DetectSettings) {
        self.ignore_until = now + settings.settle_after_switch;
        self.latencies.clear();
        self.accuracies.clear();
        self.latency.reset();
        self.accuracy.reset();
        self.raised = None;
    }

    /// Takes a window's report.
    pub fn report(
        &mut self,
        now: Moment,
        report: &AppReport,
        settings: &DetectSettings,
    ) -> Option<(SloKind, Measurement)> {
        if now < self.ignore_until {
            return None;
        }
        let mut latencies: Vec<f64> = report.latencies_ms.iter().map(|l| f64::from(*l)).collect();
        // A frame that never came back took longer than any bound.
        let gone = report.counts.expired + report.counts.rejected;
        latencies.extend((0..gone.min(256)).map(|_| NEVER_MS));
        push(&mut self.latencies, latencies);
        push(
            &mut self.accuracies,
            report.accuracies.iter().map(|a| f64::from(*a)).collect(),
        );
        let window_ms = report.window_ms * WINDOWS_KEPT as u64;
        let measurement = |value, bound| Measurement {
            value,
            bound,
            window_ms,
        };
        let enough = |samples: &[f64]| samples.len() >= settings.slo_answers_min as usize;

        let latencies: Vec<f64> = self.latencies.iter().flatten().copied().collect();
        if let Some(slo) = self.slo.latency
            && enough(&latencies)
            && let Some(value) = percentile(&latencies, slo.percentile)
        {
            let bound = ms(slo.bound);
            let clear = bound * (1.0 - settings.slo_clear_part);
            let edge = self.latency.above(value, bound, clear);
            if self.is_due(now, edge, self.latency.is_raised(), settings) {
                return Some((SloKind::Latency, measurement(value, bound)));
            }
        }
        let accuracies: Vec<f64> = self.accuracies.iter().flatten().copied().collect();
        if let Some(bound) = self.slo.accuracy_min
            && enough(&accuracies)
        {
            let value = accuracies.iter().sum::<f64>() / accuracies.len() as f64;
            let clear = bound * (1.0 + settings.slo_clear_part);
            let edge = self.accuracy.below(value, bound, clear);
            if self.is_due(now, edge, self.accuracy.is_raised(), settings) {
                return Some((SloKind::Accuracy, measurement(value, bound)));
            }
        }
        None
    }

    fn is_due(
        &mut self,
        now: Moment,
        edge: Option<Edge>,
        is_raised: bool,
        settings: &DetectSettings,
    ) -> bool {
        let is_again = is_raised
            && self
                .raised
                .is_some_and(|at| now.since(at) >= settings.slo_again_after);
        let is_due = edge == Some(Edge::Raised) || is_again;
        if is_due {
            self.raised = Some(now);
        }
        is_due
    }
}

fn push(windows: &mut VecDeque<Vec<f64>>, window: Vec<f64>) {
    windows.push_back(window);
    if windows.len() > WINDOWS_KEPT {
        windows.pop_front();
    }
}
