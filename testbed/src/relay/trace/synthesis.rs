//! Synthetic bandwidth traces with the statistics of mobile links, from a seed.
//!
//! A link is in one of a few conditions (good, poor, outage), stays there for an exponentially distributed time, and within
//! a condition the logarithm of its rate is a first-order autoregressive process around the condition's median. The
//! round-trip time grows as the rate falls below the profile's typical one. Means and quantiles of each profile follow
//! published measurements of such links (see [`Profile`]); the test of this module holds them there.

use std::f64::consts::TAU;
use std::time::Duration;

use compass_shared::seed::Seed;
use rand::Rng;
use rand::rngs::StdRng;

use super::{Step, Trace, TraceError};

/// A kind of link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Profile {
    /// A 3G uplink in a car: mean 0.8 Mbit/s, a twentieth of the time nothing.
    UmtsUp,
    /// An LTE uplink at walking pace: mean 6 Mbit/s, a twentieth of the time below 1.
    LteUp,
    /// A sub-6 GHz 5G downlink in a car: median 10 Mbit/s, bursts above 30, gaps.
    NrDown,
    /// A busy office's WiFi uplink: mean 12 Mbit/s, short stalls.
    WifiUp,
    /// A low-orbit satellite uplink: mean 18 Mbit/s, round trips of 60 ms, a change every 15 s.
    SatelliteUp,
}

/// What a link is like for a while.
struct Condition {
    median_mbps: f64,
    /// Standard deviation of the rate's logarithm.
    sigma: f64,
    mean_dwell_s: f64,
    /// How often this condition follows another, against the others.
    weight: f64,
}

struct Model {
    step_s: f64,
    /// Correlation of the rate's logarithm from one step to the next.
    memory: f64,
    typical_mbps: f64,
    rtt_ms: f64,
    conditions: Vec<Condition>,
}

fn condition(median_mbps: f64, sigma: f64, mean_dwell_s: f64, weight: f64) -> Condition {
    Condition {
        median_mbps,
        sigma,
        mean_dwell_s,
        weight,
    }
}

fn outage(mean_dwell_s: f64, weight: f64) -> Condition {
    condition(0.0, 0.0, mean_dwell_s, weight)
}

impl Profile {
    fn model(self) -> Model {
        match self {
            Self::UmtsUp => Model {
                step_s: 0.5,
                memory: 0.8,
                typical_mbps: 0.8,
                rtt_ms: 120.0,
                conditions: vec![
                    condition(0.85, 0.32, 20.0, 6.0),
                    condition(0.3, 0.5, 6.0, 3.0),
                    outage(2.5, 3.0),
                ],
            },
            Self::LteUp => Model {
                step_s: 0.5,
                memory: 0.85,
                typical_mbps: 6.0,
                rtt_ms: 50.0,
                conditions: vec![
                    condition(6.4, 0.4, 20.0, 6.0),
                    condition(1.6, 0.5, 7.0, 3.0),
                    outage(0.8, 1.0),
                ],
            },
            Self::NrDown => Model {
                step_s: 1.0,
                memory: 0.8,
                typical_mbps: 10.0,
                rtt_ms: 40.0,
                conditions: vec![
                    condition(10.0, 0.45, 25.0, 5.0),
                    condition(27.0, 0.25, 15.0, 2.0),
                    outage(6.0, 3.0),
                ],
            },
            Self::WifiUp => Model {
                step_s: 1.0,
                memory: 0.6,
                typical_mbps: 10.0,
                rtt_ms: 8.0,
                conditions: vec![
                    condition(11.0, 0.5, 30.0, 6.0),
                    condition(4.5, 0.5, 6.0, 4.0),
                    outage(1.2, 1.0),
                ],
            },
            Self::SatelliteUp => Model {
                step_s: 1.0,
                memory: 0.5,
                typical_mbps: 18.0,
                rtt_ms: 60.0,
                conditions: vec![
                    condition(20.0, 0.3, 15.0, 5.0),
                    condition(13.0, 0.4, 15.0, 3.0),
                    condition(4.0, 0.6, 6.0, 2.0),
                ],
            },
        }
    }

    /// A trace of this kind and length (at least two steps).
    pub fn generate(self, seed: Seed, length: Duration) -> Result<Trace, TraceError> {
        let model = self.model();
        let steps = (length.as_secs_f64() / model.step_s).ceil() as usize;
        if steps > super::ROWS_MAX {
            return Err(TraceError::Whole("the trace would be too long"));
        }
        let mut walk = Walk::new(&model, seed.child("trace"));
        Trace::from_steps((0..steps).map(|index| walk.step(index)).collect())
    }
}

struct Walk<'a> {
    model: &'a Model,
    conditions: StdRng,
    rates: StdRng,
    current: usize,
    until_s: f64,
    /// Deviation of the rate's logarithm, in standard deviations.
    deviation: f64,
}

impl<'a> Walk<'a> {
    fn new(model: &'a Model, seed: Seed) -> Self {
        let mut rates = seed.child("rates").rng();
        let deviation = standard_normal(&mut rates);
        Self {
            model,
            conditions: seed.child("conditions").rng(),
            rates,
            current: 0,
            until_s: 0.0,
            deviation,
        }
    }

    fn step(&mut self, index: usize) -> Step {
        let time_s = index as f64 * self.model.step_s;
        while time_s >= self.until_s {
            self.change_condition();
        }
        let memory = self.model.memory;
        self.deviation = memory * self.deviation
            + (1.0 - memory * memory).sqrt() * standard_normal(&mut self.rates);
        let condition = &self.model.conditions[self.current];
        let mbps = condition.median_mbps * (condition.sigma * self.deviation).exp();
        // A tenth of the typical rate is where a queue is as long as it gets.
        let scarcity =
            (self.model.typical_mbps / mbps.max(self.model.typical_mbps / 10.0)).max(1.0);
        let rtt_ms = self.model.rtt_ms * scarcity.sqrt();
        Step {
            start: Duration::from_millis((time_s * 1e3).round() as u64),
            // Three decimals of Mbit/s and one of ms are what measurements have, and keep files small.
            rate_bps: (mbps * 1e3).round() as u64 * 1_000,
            rtt: Some(Duration::from_micros((rtt_ms * 10.0).round() as u64 * 100)),
        }
    }

    /// Another condition than the current one, by weight, for an exponentially distributed time.
    fn change_condition(&mut self) {
        let others = |walk: &Self| {
            let current = walk.current;
            walk.model
                .conditions
                .iter()
                .enumerate()
                .filter(move |(index, _)| *index != current)
        };
        let total: f64 = others(self).map(|(_, condition)| condition.weight).sum();
        let mut rest = self.conditions.random_range(0.0..total);
        let mut chosen = self.current;
        for (index, condition) in others(self) {
            chosen = index;
            if rest < condition.weight {
                break;
            }
            rest -= condition.weight;
        }
        self.current = chosen;
        let uniform: f64 = self.conditions.random_range(f64::EPSILON..1.0);
        self.until_s += -self.model.conditions[chosen].mean_dwell_s * uniform.ln();
    }
}

/// Box–Muller; one of the two values is enough here.
fn standard_normal(rng: &mut StdRng) -> f64 {
    let radius = (-2.0 * rng.random_range(f64::EPSILON..1.0_f64).ln()).sqrt();
    radius * (TAU * rng.random::<f64>()).cos()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOURS: Duration = Duration::from_secs(4 * 3_600);

    fn rates_mbps(profile: Profile, seed: u64) -> Vec<f64> {
        let trace = profile.generate(Seed(seed), HOURS).unwrap();
        trace
            .steps()
            .iter()
            .map(|step| step.rate_bps as f64 / 1e6)
            .collect()
    }

    fn quantile(sorted: &[f64], part: f64) -> f64 {
        sorted[((sorted.len() - 1) as f64 * part) as usize]
    }

    #[test]
    fn the_statistics_are_those_of_measured_links() {
        // Mean, 5th, 50th and 95th percentile in Mbit/s, from measurements of single drives and rooms: a model of the kind
        // of link need not meet them closely.
        for (profile, mean, p05, p50, p95) in [
            (Profile::UmtsUp, 0.77, 0.0, 0.79, 1.44),
            (Profile::LteUp, 5.92, 0.89, 5.62, 11.54),
            (Profile::NrDown, 13.92, 0.0, 9.86, 33.45),
            (Profile::WifiUp, 11.62, 3.6, 10.0, 24.9),
            (Profile::SatelliteUp, 18.52, 4.56, 18.37, 34.37),
        ] {
            let mut rates = rates_mbps(profile, 7);
            let measured_mean = rates.iter().sum::<f64>() / rates.len() as f64;
            rates.sort_by(f64::total_cmp);
            for (name, measured, expected) in [
                ("mean", measured_mean, mean),
                ("p05", quantile(&rates, 0.05), p05),
                ("p50", quantile(&rates, 0.5), p50),
                ("p95", quantile(&rates, 0.95), p95),
            ] {
                let allowed = 0.25 * expected + 0.1 * mean;
                assert!(
                    (measured - expected).abs() <= allowed,
                    "{profile:?} {name}: {measured:.2}, not {expected}"
                );
            }
        }
    }

    #[test]
    fn rates_have_a_memory_and_round_trips_grow_when_they_fall() {
        let trace = Profile::LteUp.generate(Seed(7), HOURS).unwrap();
        let rates: Vec<f64> = trace
            .steps()
            .iter()
            .map(|step| step.rate_bps as f64)
            .collect();
        let mean = rates.iter().sum::<f64>() / rates.len() as f64;
        let product = |lag: usize| -> f64 {
            rates
                .iter()
                .zip(&rates[lag..])
                .map(|(a, b)| (a - mean) * (b - mean))
                .sum()
        };
        assert!(product(1) / product(0) > 0.7);
        assert!(
            product(600) / product(0) < 0.2,
            "after five minutes it is forgotten"
        );
        let rtt_of = |step: &Step| step.rtt.unwrap();
        let worst = trace
            .steps()
            .iter()
            .min_by_key(|step| step.rate_bps)
            .map(rtt_of)
            .unwrap();
        let best = trace
            .steps()
            .iter()
            .max_by_key(|step| step.rate_bps)
            .map(rtt_of)
            .unwrap();
        assert!(worst > best * 2);
    }

    #[test]
    fn a_seed_repeats_and_another_differs_and_the_file_is_the_trace() {
        let trace = |seed| {
            Profile::WifiUp
                .generate(Seed(seed), Duration::from_secs(120))
                .unwrap()
        };
        assert_eq!(trace(1), trace(1));
        assert_ne!(trace(1), trace(2));
        assert_eq!(Trace::parse(&trace(1).to_csv(&["wifi"])).unwrap(), trace(1));
        assert!(
            Profile::WifiUp
                .generate(Seed(1), Duration::from_secs(1))
                .is_err(),
            "one row is no trace"
        );
    }
}
