//! What a link looks like, as people write it: numbers with their unit in the name, checked before use.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

use super::pipe::PipeModel;
use super::rate::RateSchedule;
use super::trace::Trace;

/// A delay above this is a wrong unit.
const DELAY_MS_MAX: f64 = 60_000.0;

/// The queue of an access router that is neither bufferbloated nor starved.
const QUEUE_MS_DEFAULT: f64 = 100.0;

/// A bottleneck that several paths may share: a rate and the queue before it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PipeShape {
    /// Bits of UDP payload per second; absent means unlimited, zero holds everything back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_bps: Option<u64>,
    /// A packet that would wait longer than this is dropped (tail drop). At a rate of zero, the last positive rate counts.
    #[serde(default = "queue_ms_default")]
    pub queue_ms: f64,
    /// Replays a trace instead of a constant rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<TraceFile>,
}

/// A trace to replay for ever from the moment it is set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TraceFile {
    /// CSV as described in [`super::trace`]; relative to the relay's working folder.
    pub file: PathBuf,
    /// Multiplies every bandwidth of the trace.
    #[serde(default = "one")]
    pub scale: f64,
}

/// What one direction between two nodes does to a packet beside the pipes it crosses.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PathShape {
    /// One-way delay.
    pub delay_ms: f64,
    /// The delay varies evenly by up to this much either way (never below zero).
    pub jitter_ms: f64,
    /// Whether jitter may change the order of packets; without it a packet waits for the one before.
    pub reorder: bool,
    /// The part of packets lost, 0 to 1, independently of each other.
    pub loss: f64,
    /// A larger UDP payload is dropped, in bytes; absent means no bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu_bytes: Option<usize>,
    /// Nothing passes in this direction, what is under way included.
    pub cut: bool,
}

impl Default for PathShape {
    fn default() -> Self {
        Self {
            delay_ms: 0.0,
            jitter_ms: 0.0,
            reorder: false,
            loss: 0.0,
            mtu_bytes: None,
            cut: false,
        }
    }
}

impl PathShape {
    /// A path with a one-way delay and nothing else.
    pub fn delay(delay_ms: f64) -> Self {
        Self {
            delay_ms,
            ..Self::default()
        }
    }

    /// Refuses what cannot be meant.
    pub fn check(&self) -> anyhow::Result<()> {
        for (name, value) in [("delay_ms", self.delay_ms), ("jitter_ms", self.jitter_ms)] {
            ensure!(
                (0.0..=DELAY_MS_MAX).contains(&value),
                "{name} {value} is not between 0 and {DELAY_MS_MAX}"
            );
        }
        ensure!(
            (0.0..=1.0).contains(&self.loss),
            "loss {} is not between 0 and 1",
            self.loss
        );
        ensure!(self.mtu_bytes != Some(0), "mtu_bytes must be positive");
        Ok(())
    }
}

impl Default for PipeShape {
    fn default() -> Self {
        Self {
            rate_bps: None,
            queue_ms: QUEUE_MS_DEFAULT,
            trace: None,
        }
    }
}

impl PipeShape {
    /// A constant rate in Mbit/s with the default queue.
    pub fn mbit_s(rate_mbit_s: f64) -> Self {
        Self {
            rate_bps: Some((rate_mbit_s * 1e6).round() as u64),
            ..Self::default()
        }
    }

    /// The same pipe with another queue bound.
    pub fn with_queue_ms(self, queue_ms: f64) -> Self {
        Self { queue_ms, ..self }
    }

    /// Checks the numbers, reads the trace if there is one.
    pub(super) fn resolve(&self) -> anyhow::Result<ResolvedPipe> {
        ensure!(
            (0.0..=DELAY_MS_MAX).contains(&self.queue_ms),
            "queue_ms {} is not between 0 and {DELAY_MS_MAX}",
            self.queue_ms
        );
        ensure!(
            self.rate_bps.is_none() || self.trace.is_none(),
            "rate_bps and trace exclude each other"
        );
        let trace = self
            .trace
            .as_ref()
            .map(|trace| load_scaled(&trace.file, trace.scale))
            .transpose()?;
        Ok(ResolvedPipe {
            shape: self.clone(),
            trace,
        })
    }
}

/// A checked pipe shape with its trace in memory.
#[derive(Debug, Clone)]
pub(super) struct ResolvedPipe {
    pub(super) shape: PipeShape,
    trace: Option<Arc<Trace>>,
}

impl ResolvedPipe {
    /// The model from `now` on; a trace begins then.
    pub(super) fn model(&self, now: Duration) -> PipeModel {
        let schedule = match (&self.trace, self.shape.rate_bps) {
            (Some(trace), _) => RateSchedule::Trace {
                trace: Arc::clone(trace),
                anchor: now,
            },
            (None, Some(rate)) => RateSchedule::Constant(rate),
            (None, None) => RateSchedule::Unlimited,
        };
        PipeModel {
            schedule,
            queue: Duration::from_secs_f64(self.shape.queue_ms / 1e3),
        }
    }
}

fn load_scaled(file: &Path, scale: f64) -> anyhow::Result<Arc<Trace>> {
    let trace = Trace::load(file)?;
    let scaled = trace
        .scaled(scale)
        .with_context(|| format!("trace {} × {scale}", file.display()))?;
    Ok(Arc::new(scaled))
}

fn queue_ms_default() -> f64 {
    QUEUE_MS_DEFAULT
}

fn one() -> f64 {
    1.0
}
