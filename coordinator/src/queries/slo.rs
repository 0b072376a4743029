//! A query's SLOs against what its app measures.

use compass_shared::api::SloStatus;
use compass_shared::model::outcome::{AppReport, OutcomeCounts};
use compass_shared::model::plan::Expectation;
use compass_shared::model::query::{CostSlo, Query};

/// The SLOs of a query, live.
#[derive(Debug, Clone, PartialEq)]
pub struct LiveSlo {
    /// One line per SLO.
    pub status: Vec<SloStatus>,
    /// Share of judged frames that were answered in time.
    pub attainment: Option<f64>,
}

/// Holds the latest reports against the SLOs. Accuracy is the app's own measure where it has one, else what the plan believes; cost is
/// always the plan's.
pub fn live_slo(query: &Query, reports: &[AppReport], expected: Option<&Expectation>) -> LiveSlo {
    let mut status = Vec::new();
    if let Some(slo) = query.slo.latency {
        let bound = compass_shared::time::ms(slo.bound);
        let mut latencies: Vec<f64> = reports
            .iter()
            .flat_map(|report| report.latencies_ms.iter().map(|ms| f64::from(*ms)))
            .collect();
        let value = percentile(&mut latencies, slo.percentile);
        status.push(SloStatus {
            name: format!("p{} latency", slo.percentile),
            target: format!("<= {bound} ms"),
            bound,
            value,
            met: value.map(|value| value <= bound),
            source: "app".to_owned(),
        });
    }
    if let Some(bound) = query.slo.accuracy_min {
        let measured: Vec<f64> = reports
            .iter()
            .flat_map(|report| report.accuracies.iter().map(|value| f64::from(*value)))
            .collect();
        let mean =
            (!measured.is_empty()).then(|| measured.iter().sum::<f64>() / measured.len() as f64);
        let (value, source) = match (mean, expected) {
            (Some(mean), _) => (Some(mean), "app"),
            (None, Some(expected)) => (Some(expected.accuracy.value), "plan"),
            (None, None) => (None, "app"),
        };
        status.push(SloStatus {
            name: "accuracy".to_owned(),
            target: format!(">= {bound}"),
            bound,
            value,
            met: value.map(|value| value >= bound),
            source: source.to_owned(),
        });
    }
    if let Some(cost) = query.slo.cost_max {
        let (bound, unit, per_hour) = match cost {
            CostSlo::PerHour(bound) => (bound, "USD/h", 1.0),
            CostSlo::PerRequest(bound) => (bound, "USD", query.rate_hz() * 3600.0),
        };
        let value = expected.map(|expected| expected.cost_usd_per_h / per_hour);
        status.push(SloStatus {
            name: "cost".to_owned(),
            target: format!("<= {bound} {unit}"),
            bound,
            value,
            met: value.map(|value| value <= bound),
            source: "plan".to_owned(),
        });
    }
    LiveSlo {
        status,
        attainment: attainment(reports),
    }
}

fn attainment(reports: &[AppReport]) -> Option<f64> {
    let mut total = OutcomeCounts::default();
    for report in reports {
        super::add(&mut total, &report.counts);
    }
    // Sums of what apps claim saturate; a saturated one is no figure.
    let judged = [total.answered, total.late, total.expired, total.rejected]
        .into_iter()
        .try_fold(0_u64, u64::checked_add)?;
    (judged > 0).then(|| total.answered as f64 / judged as f64)
}

/// The nearest-rank percentile; none of nothing.
fn percentile(values: &mut [f64], percentile: f64) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let rank = (percentile / 100.0 * values.len() as f64).ceil() as usize;
    values.get(rank.clamp(1, values.len().max(1)) - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_rank() {
        let mut values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(percentile(&mut values, 95.0), Some(95.0));
        assert_eq!(percentile(&mut values, 50.0), Some(50.0));
        assert_eq!(percentile(&mut [7.0], 95.0), Some(7.0));
        assert_eq!(percentile(&mut [], 95.0), None);
    }
}
