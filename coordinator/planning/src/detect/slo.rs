//! What an app measures, held against its SLOs, window by window.
//!
//! Latency breaks its SLO when several windows in a row do. Accuracy goes up and down with what passes by, and neighbouring frames look
//! alike: it breaks its SLO when its mean is below the floor with confidence, however few seconds that takes, or over the longest window.

use std::collections::VecDeque;

use compass_shared::detect::{Breach, Edge, percentile};
use compass_shared::model::outcome::AppReport;
use compass_shared::model::query::Slo;
use compass_shared::model::trigger::{Measurement, NEVER_MS, SloKind};
use compass_shared::time::{Moment, ms};

use super::DetectSettings;

/// Windows of latencies kept: a percentile over a few seconds is steadier than over one.
const LATENCY_WINDOWS: usize = 3;
/// Windows of accuracies kept at most; over all of them the mean counts as it is.
const ACCURACY_WINDOWS: usize = 10;
/// With fewer there is no spread to speak of.
const ACCURACY_WINDOWS_MIN: usize = 3;
/// Neighbouring windows show the same things: this many count as one independent sample.
const CORRELATED_WINDOWS: f64 = 2.0;
/// Least variance between windows: a scene is easy or hard for seconds on end, and three windows of one scene show none.
const VARIANCE_MIN: f64 = 0.01;
/// The standard normal quantile of 95 %.
const CONFIDENCE_QUANTILE: f64 = 1.645;

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
            accuracy: Breach::new(1),
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
        push(&mut self.latencies, latencies, LATENCY_WINDOWS);
        let accuracies: Vec<f64> = report.accuracies.iter().map(|a| f64::from(*a)).collect();
        if !accuracies.is_empty() {
            push(&mut self.accuracies, accuracies, ACCURACY_WINDOWS);
        }
        let measurement = |value, bound, windows: usize| Measurement {
            value,
            bound,
            window_ms: report.window_ms * windows as u64,
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
                let windows = self.latencies.len();
                return Some((SloKind::Latency, measurement(value, bound, windows)));
            }
        }
        if let Some(bound) = self.slo.accuracy_min
            && let Some((value, doubt)) = self.accuracy()
        {
            let is_believed = value + doubt < bound;
            let clear = bound * (1.0 + settings.slo_clear_part);
            let judged = if is_believed { value } else { value.max(bound) };
            let edge = self.accuracy.below(judged, bound, clear);
            if self.is_due(now, edge, self.accuracy.is_raised(), settings) {
                let windows = self.accuracies.len();
                return Some((SloKind::Accuracy, measurement(value, bound, windows)));
            }
        }
        None
    }

    /// The mean over the windows kept, and how much more it may be in truth; `None` while there are too few.
    fn accuracy(&self) -> Option<(f64, f64)> {
        let means: Vec<f64> = self
            .accuracies
            .iter()
            .map(|window| window.iter().sum::<f64>() / window.len() as f64)
            .collect();
        if means.len() < ACCURACY_WINDOWS_MIN {
            return None;
        }
        let count = means.len() as f64;
        let mean = means.iter().sum::<f64>() / count;
        if means.len() == ACCURACY_WINDOWS {
            return Some((mean, 0.0));
        }
        let variance = means.iter().map(|m| (m - mean).powi(2)).sum::<f64>() / (count - 1.0);
        let independent = (count / CORRELATED_WINDOWS).max(1.0);
        Some((
            mean,
            CONFIDENCE_QUANTILE * (variance.max(VARIANCE_MIN) / independent).sqrt(),
        ))
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

fn push(windows: &mut VecDeque<Vec<f64>>, window: Vec<f64>, most: usize) {
    windows.push_back(window);
    if windows.len() > most {
        windows.pop_front();
    }
}
