//! What trials and live work have shown of one query: time and output size per operator, accuracy per configuration.
//!
//! Start at [`QueryProfile`]. Times are kept per *prefix* (an operator's configuration and all its ancestors') and device class, as
//! milliseconds on a full core of that class; a time on another class is a prediction and marked so. Accuracy belongs to a
//! configuration and depends on no placement. Scores are kept by *lag*: how well an answer agrees with the truth of the same frame
//! (lag 0), the next one (lag 1), …; the accuracy under a sampling filter that answers every k-th frame is the mean of the first k
//! (see `compass_shared::evaluate` for the definition of a stream's accuracy).
//!
//! A profile is plain data and survives restarts in the store. Deliberately absent: SLOs, placements, decisions.

use std::collections::BTreeMap;

use compass_shared::ids::{Digest, OperatorId};
use compass_shared::model::cluster::NodeDescription;
use compass_shared::model::pipeline::{Configuration, PipelineConfiguration};
use compass_shared::model::plan::Estimate;
use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, StudentsT};

#[cfg(test)]
mod tests;

/// Neighbouring frames resemble each other: this many count as one independent sample. In 24 stretches of live answers at 10/s the mean
/// of eight in a row varied 3 to 6 times as much as that of eight independent ones (design effect of cluster samples, Kish 1965).
const CORRELATED_SAMPLES: f64 = 4.5;
/// Least degrees of freedom an interval is computed with: below, Student's t says only that two samples say nothing.
const FREEDOM_MIN: f64 = 4.0;
/// Least variance of a score as a part of a coin's: a mean over several objects varies less than a single hit or miss.
const VARIANCE_FLOOR: f64 = 0.05;

/// Count, mean and spread of a quantity; two of them can be merged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Moments {
    /// Samples.
    pub count: u32,
    /// Their mean.
    pub mean: f64,
    /// Sum of squared differences from the mean.
    pub squares: f64,
    /// The largest.
    pub max: f64,
}

impl Moments {
    /// Takes a sample; one that is not finite is ignored.
    pub fn observe(&mut self, value: f64) {
        if !value.is_finite() {
            return;
        }
        self.max = if self.count == 0 {
            value
        } else {
            self.max.max(value)
        };
        self.count = self.count.saturating_add(1);
        let difference = value - self.mean;
        self.mean += difference / f64::from(self.count);
        self.squares += difference * (value - self.mean);
    }

    /// All of these samples.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut moments = Self::default();
        for value in values {
            moments.observe(value);
        }
        moments
    }

    /// These samples and those.
    #[must_use]
    pub fn merged(&self, other: &Self) -> Self {
        if self.count == 0 {
            return *other;
        }
        if other.count == 0 {
            return *self;
        }
        let (a, b) = (f64::from(self.count), f64::from(other.count));
        let difference = other.mean - self.mean;
        Self {
            count: self.count.saturating_add(other.count),
            mean: self.mean + difference * b / (a + b),
            squares: self.squares + other.squares + difference * difference * a * b / (a + b),
            max: self.max.max(other.max),
        }
    }

    /// Standard deviation; 0 for fewer than two samples.
    pub fn deviation(&self) -> f64 {
        if self.count < 2 {
            0.0
        } else {
            (self.squares / f64::from(self.count - 1)).max(0.0).sqrt()
        }
    }

    /// The mean of scores between 0 and 1 with its 95 % interval, neighbouring samples counted as correlated.
    pub fn accuracy(&self) -> Estimate {
        if self.count == 0 {
            return Estimate {
                value: 0.0,
                low: 0.0,
                high: 1.0,
                samples: 0,
            };
        }
        let independent = (f64::from(self.count) / CORRELATED_SAMPLES).max(1.0);
        let value = self.mean.clamp(0.0, 1.0);
        // One more "success" and "failure" keep the interval open when all samples are equal (as Agresti and Coull do).
        let floor = (value * (1.0 - value) + 1.0 / (independent + 4.0)) / (independent + 4.0);
        let deviation = self.deviation();
        let error = (deviation * deviation / independent)
            .max(floor * VARIANCE_FLOOR)
            .sqrt();
        let freedom = (independent - 1.0).max(FREEDOM_MIN);
        let width = error * students_t(freedom);
        Estimate {
            value,
            low: (value - width).max(0.0),
            high: (value + width).min(1.0),
            samples: self.count,
        }
    }
}

/// The two-sided 95 % quantile of Student's t.
fn students_t(freedom: f64) -> f64 {
    StudentsT::new(0.0, 1.0, freedom).map_or(2.0, |t| t.inverse_cdf(0.975))
}

/// Nodes of one class run an operator at the same speed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClassTimes {
    /// Milliseconds per frame on a full core of this class.
    pub full_core_ms: Moments,
    /// Speed of its core relative to the host's, where it is declared.
    pub speed: Option<f64>,
}

/// What one operator does under one prefix.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OperatorRow {
    /// The operator.
    pub operator: OperatorId,
    /// Names its work and that of its ancestors.
    pub prefix: Digest,
    /// Its own configuration.
    pub configuration: Configuration,
    /// Time by device class (see [`class_of`]).
    pub times: BTreeMap<String, ClassTimes>,
    /// Size of an output in bytes.
    pub bytes_out: Moments,
    /// Share of frames that pass, between 0 and 1.
    pub passed: Moments,
    /// Start of a worker with this configuration until it is warm, in ms.
    pub cold_start_ms: Moments,
    /// The sample set and frames that went into it last, so that none counts twice.
    pub sampled: Option<(u64, u32)>,
}

/// What is known of the accuracy of one normalised configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ConfigurationRow {
    /// Every filter wide open.
    pub configuration: PipelineConfiguration,
    /// Scores by lag; empty while nothing was judged.
    pub scores: Vec<Moments>,
    /// Where the scores come from.
    pub truth: Truth,
    /// Set when a trial of it failed: why.
    pub failed: Option<String>,
}

/// What a configuration's scores are worth.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Truth {
    /// None yet.
    #[default]
    Unknown,
    /// Labels from the app.
    Labels,
    /// Agreement with the golden configuration.
    Golden,
    /// Nothing judges this pipeline: every configuration counts as right.
    Unjudged,
}

/// The device class of a node for the purpose of times: emulated speeds are part of it.
pub fn class_of(description: &NodeDescription) -> String {
    match description.emulated_speed {
        Some(speed) => format!("{} x{speed}", description.device_class),
        None => description.device_class.clone(),
    }
}

/// Everything known of one query.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct QueryProfile {
    /// By `operator|prefix`.
    pub operators: BTreeMap<String, OperatorRow>,
    /// By the configuration's text.
    pub configurations: BTreeMap<String, ConfigurationRow>,
    /// Size of a source frame in bytes.
    pub input_bytes: f64,
    /// Grows with each change of content: scores of an earlier one are gone, times stay.
    pub content_epoch: u32,
    /// What live answers showed beyond the prediction, in ms (end to end, may be negative).
    pub latency_bias_ms: f64,
    /// Time of live frames relative to that of samples, by operator: a trial runs its samples back to back with warm caches, a live frame
    /// comes alone.
    pub live_ratio: BTreeMap<OperatorId, f64>,
    /// What the app measured below what samples had promised of the same configuration (0 or negative): samples, or the golden
    /// configuration as the truth, flatter.
    pub accuracy_bias: f64,
}

/// The key of a configuration's row.
pub fn configuration_key(configuration: &PipelineConfiguration) -> String {
    let parts: Vec<_> = configuration
        .0
        .iter()
        .map(|(operator, configuration)| format!("{operator}{{{configuration}}}"))
        .collect();
    parts.join(" ")
}

fn operator_key(operator: &OperatorId, prefix: &Digest) -> String {
    format!("{operator}|{prefix}")
}

impl QueryProfile {
    /// The row of an operator under exactly this prefix.
    pub fn operator(&self, operator: &OperatorId, prefix: &Digest) -> Option<&OperatorRow> {
        self.operators.get(&operator_key(operator, prefix))
    }

    /// Rows of an operator, whatever its prefix, in a fixed order.
    pub fn rows_of<'a>(
        &'a self,
        operator: &'a OperatorId,
    ) -> impl Iterator<Item = &'a OperatorRow> {
        let from = format!("{operator}|");
        self.operators
            .range(from.clone()..)
            .take_while(move |(key, _)| key.starts_with(&from))
            .map(|(_, row)| row)
    }

    /// The row of an operator under a prefix, made when there is none.
    pub fn operator_mut(
        &mut self,
        operator: &OperatorId,
        prefix: Digest,
        configuration: &Configuration,
    ) -> &mut OperatorRow {
        self.operators
            .entry(operator_key(operator, &prefix))
            .or_insert_with(|| OperatorRow {
                operator: operator.clone(),
                prefix,
                configuration: configuration.clone(),
                times: BTreeMap::new(),
                bytes_out: Moments::default(),
                passed: Moments::default(),
                cold_start_ms: Moments::default(),
                sampled: None,
            })
    }

    /// The row of a normalised configuration.
    pub fn configuration(
        &self,
        configuration: &PipelineConfiguration,
    ) -> Option<&ConfigurationRow> {
        self.configurations.get(&configuration_key(configuration))
    }

    /// The row of a normalised configuration, made when there is none.
    pub fn configuration_mut(
        &mut self,
        configuration: &PipelineConfiguration,
    ) -> &mut ConfigurationRow {
        self.configurations
            .entry(configuration_key(configuration))
            .or_insert_with(|| ConfigurationRow {
                configuration: configuration.clone(),
                scores: Vec::new(),
                truth: Truth::Unknown,
                failed: None,
            })
    }

    /// The accuracy to believe of a normalised configuration when every `interval`-th frame is answered; `None` while nothing was judged.
    pub fn accuracy(&self, row: &ConfigurationRow, interval: f64) -> Option<Estimate> {
        let mut estimate = row.accuracy(interval)?;
        if row.truth != Truth::Unjudged {
            for value in [&mut estimate.value, &mut estimate.low, &mut estimate.high] {
                *value = (*value + self.accuracy_bias).clamp(0.0, 1.0);
            }
        }
        Some(estimate)
    }

    /// Forgets every score (the content has changed) and keeps times, sizes and failures.
    pub fn forget_scores(&mut self) {
        self.content_epoch = self.content_epoch.saturating_add(1);
        for row in self.configurations.values_mut() {
            if row.truth != Truth::Unjudged {
                row.scores.clear();
                row.truth = Truth::Unknown;
            }
        }
    }
}

impl ConfigurationRow {
    /// The accuracy when every `interval`-th frame is answered (1 = all); `None` while nothing was judged.
    ///
    /// Lags beyond the longest measured one count as that one, with the interval reaching down to zero: what was not seen is not
    /// claimed.
    pub fn accuracy(&self, interval: f64) -> Option<Estimate> {
        if self.truth == Truth::Unjudged {
            return Some(Estimate::exact(1.0));
        }
        let measured: Vec<Estimate> = self
            .scores
            .iter()
            .take_while(|m| m.count > 0)
            .map(Moments::accuracy)
            .collect();
        let longest = *measured.last()?;
        let interval = interval.max(1.0);
        let lags = interval.ceil() as usize;
        let mut sum = Estimate::exact(0.0);
        for lag in 0..lags {
            let weight = (interval - lag as f64).min(1.0) / interval;
            let score = measured.get(lag).copied().unwrap_or(longest);
            let is_seen = lag < measured.len() || lag < 2 * measured.len();
            sum.value += weight * score.value;
            sum.low += weight * if is_seen { score.low } else { 0.0 };
            sum.high += weight * score.high;
        }
        sum.samples = measured[0].samples;
        Some(sum)
    }
}
