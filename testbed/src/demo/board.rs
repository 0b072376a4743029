//! The live board as lines of text: nodes, the plan in force, SLOs, frames, last events.

use std::collections::VecDeque;

use compass_shared::api::NodeView;

use super::record::{FrameCounts, PlanRecord, Point, SloRecord, mean_accuracy, quantile};
use super::report::text::{hourly, milliseconds, seconds};

/// SLOs are judged over the last frames of this long, in ms.
const RECENT_MS: f64 = 5_000.0;
/// Events kept in view.
const EVENTS: usize = 5;
/// Seconds in the little chart.
const SPARK_S: usize = 60;
const SPARKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// How things stand.
#[derive(Debug, Clone, Default)]
pub(crate) struct Picture {
    /// Name of the phase, or what is awaited.
    pub(crate) phase: String,
    /// The app's clock in ms.
    pub(crate) now_ms: f64,
    /// Until the phase ends, in ms.
    pub(crate) left_ms: Option<f64>,
    pub(crate) nodes: Vec<NodeView>,
    pub(crate) plan: Option<PlanRecord>,
    pub(crate) slo: Option<SloRecord>,
    /// The last minute's frames.
    pub(crate) points: Vec<Point>,
    pub(crate) frames: FrameCounts,
    pub(crate) trials: usize,
}

/// Recent figures against the SLOs.
struct Figures {
    latency_ms: f64,
    accuracy: Option<f64>,
    cost: Option<f64>,
}

impl Picture {
    fn figures(&self, slo: &SloRecord) -> Option<Figures> {
        let recent: Vec<&Point> = self
            .points
            .iter()
            .filter(|point| point.at_ms > self.now_ms - RECENT_MS)
            .collect();
        let latencies: Vec<f64> = recent.iter().filter_map(|point| point.latency_ms).collect();
        if latencies.is_empty() {
            return None;
        }
        Some(Figures {
            latency_ms: quantile(&latencies, slo.latency_percentile / 100.0),
            accuracy: mean_accuracy(recent.iter().copied()),
            cost: self.plan.as_ref().map(|plan| plan.cost_per_h),
        })
    }

    /// Everything in one line, where there is no terminal.
    pub(crate) fn line(&self) -> String {
        let plan = self.plan.as_ref();
        let plan = plan.map_or_else(
            || {
                format!(
                    "no plan yet, {} trial stages run on {} nodes",
                    self.trials,
                    self.nodes.len()
                )
            },
            |plan| format!("plan {}", plan.generation),
        );
        let figures = self.slo.as_ref().and_then(|slo| self.figures(slo));
        let figures = figures.map_or_else(String::new, |figures| {
            let accuracy = figures
                .accuracy
                .map_or_else(|| "–".to_owned(), |f1| format!("{f1:.2}"));
            format!(", p95 {}, F1 {accuracy}", milliseconds(figures.latency_ms))
        });
        format!("{}: {plan}{figures}, {}", self.phase, self.counts())
    }

    fn counts(&self) -> String {
        let frames = &self.frames;
        let mut text = format!("{} frames ended, {} in time", frames.sent, frames.answered);
        for (count, name) in [
            (frames.late, "late"),
            (frames.skipped, "skipped"),
            (frames.expired, "expired"),
            (frames.rejected, "rejected"),
        ] {
            if count > 0 {
                text += &format!(", {count} {name}");
            }
        }
        text
    }
}

/// Makes the lines, and remembers the last events.
pub(crate) struct Board {
    is_coloured: bool,
    events: VecDeque<String>,
}

impl Board {
    pub(crate) fn new(is_coloured: bool) -> Self {
        Self {
            is_coloured,
            events: VecDeque::new(),
        }
    }

    fn paint(&self, code: &str, text: &str) -> String {
        if self.is_coloured {
            format!("\u{1b}[{code}m{text}\u{1b}[0m")
        } else {
            text.to_owned()
        }
    }

    fn head(&self, text: &str) -> String {
        self.paint("2", text)
    }

    pub(crate) fn done(&self, now_s: f64, what: &str) -> String {
        format!(
            "{} {what} {}",
            self.paint("32", "✓"),
            self.head(&format!("({now_s:.1} s)"))
        )
    }

    pub(crate) fn event(&self, at_ms: f64, what: &str) -> String {
        format!("{} {what}", self.head(&format!("{:>6.1} s", at_ms / 1e3)))
    }

    pub(crate) fn remember(&mut self, at_ms: f64, what: &str) {
        let line = self.event(at_ms, what);
        self.events.push_back(line);
        while self.events.len() > EVENTS {
            self.events.pop_front();
        }
    }

    pub(crate) fn lines(&self, picture: &Picture) -> Vec<String> {
        let left = picture.left_ms.map_or_else(String::new, |left| {
            format!(" · {} left", seconds(left.max(0.0).round()))
        });
        let mut lines = vec![
            String::new(),
            format!(
                "{}  {}",
                self.paint("1", &picture.phase),
                self.head(&format!("at {:.0} s{left}", picture.now_ms / 1e3))
            ),
            String::new(),
        ];
        lines.extend(self.nodes(picture));
        lines.push(String::new());
        lines.extend(self.plan(picture));
        lines.push(String::new());
        lines.extend(self.slos(picture));
        lines.push(String::new());
        lines.extend(self.events.iter().cloned());
        lines
    }

    fn nodes(&self, picture: &Picture) -> Vec<String> {
        let mut lines = vec![self.head(&format!(
            "{:<10} {:<11} {:<15} {:<9} {}",
            "NODE", "TIER", "DEVICE", "CPU", "RUNS"
        ))];
        for node in &picture.nodes {
            let runs: Vec<&str> = picture
                .plan
                .iter()
                .flat_map(|plan| &plan.operators)
                .filter(|operator| operator.node == node.id.as_str())
                .map(|operator| operator.operator.as_str())
                .collect();
            let runs = if !node.online {
                self.paint("31", "✗ not connected")
            } else if runs.is_empty() {
                self.head("–")
            } else {
                runs.join(" → ")
            };
            let used: f64 = node
                .instances
                .iter()
                .map(|instance| instance.busy_cores)
                .sum();
            let cpu = format!("{used:.2}/{:.2}", node.granted.cpu.cores());
            lines.push(format!(
                "{:<10} {:<11} {:<15} {cpu:<9} {runs}",
                node.id.as_str(),
                node.tier.as_str(),
                node.device
            ));
        }
        lines
    }

    fn plan(&self, picture: &Picture) -> Vec<String> {
        let Some(plan) = &picture.plan else {
            let text = format!(
                "no plan yet: {} trial stages run so far, on real frames of this camera",
                picture.trials
            );
            return vec![text];
        };
        let knobs: Vec<String> = plan
            .operators
            .iter()
            .filter(|operator| !operator.configuration.is_empty())
            .map(|operator| {
                let knobs: Vec<String> = operator
                    .configuration
                    .iter()
                    .map(|(name, value)| format!("{name} {value}"))
                    .collect();
                format!("{}: {}", operator.operator, knobs.join(", "))
            })
            .collect();
        vec![format!(
            "{} {}  {}",
            self.paint("1", &format!("plan {}", plan.generation)),
            self.head(&format!("({})", plan.trigger)),
            knobs.join(" · ")
        )]
    }

    fn slos(&self, picture: &Picture) -> Vec<String> {
        let Some(slo) = &picture.slo else {
            return Vec::new();
        };
        let Some(figures) = picture.figures(slo) else {
            return vec!["no answers yet".to_owned()];
        };
        let mark = |met: bool| {
            if met {
                self.paint("32", "✓")
            } else {
                self.paint("31;1", "✗")
            }
        };
        let accuracy = figures.accuracy.unwrap_or(f64::NAN);
        let cost = figures.cost.unwrap_or(f64::NAN);
        let line = |name: &str, met: bool, value: String, bound: String, rest: String| {
            format!("{} {name:<13} {value:>13}  {bound:<15} {rest}", mark(met))
        };
        vec![
            line(
                &format!("p{:.0} latency", slo.latency_percentile),
                figures.latency_ms <= slo.latency_ms,
                milliseconds(figures.latency_ms),
                format!("≤ {}", milliseconds(slo.latency_ms)),
                spark(picture, slo.latency_ms * 1.5, |points| {
                    let all: Vec<f64> =
                        points.iter().filter_map(|point| point.latency_ms).collect();
                    (!all.is_empty()).then(|| quantile(&all, slo.latency_percentile / 100.0))
                }),
            ),
            line(
                "true F1",
                accuracy >= slo.accuracy_min,
                format!("{accuracy:.3}"),
                format!("≥ {:.2}", slo.accuracy_min),
                spark(picture, 1.0, |points| mean_accuracy(points.iter().copied())),
            ),
            line(
                "cost",
                cost <= slo.cost_max_usd_per_h,
                hourly(cost),
                format!("≤ {}", hourly(slo.cost_max_usd_per_h)),
                String::new(),
            ),
            picture.counts(),
        ]
    }
}

/// One character a second over the last minute; gaps where nothing was measured.
fn spark(picture: &Picture, most: f64, figure: impl Fn(&[&Point]) -> Option<f64>) -> String {
    let last = (picture.now_ms / 1e3).floor();
    (0..SPARK_S)
        .map(|index| {
            let from = (last - (SPARK_S - index) as f64) * 1e3;
            let inside: Vec<&Point> = picture
                .points
                .iter()
                .filter(|point| (from..from + 1e3).contains(&point.at_ms))
                .collect();
            figure(&inside).map_or(' ', |value| {
                let level = (value / most * SPARKS.len() as f64).clamp(0.0, 7.0);
                SPARKS[level as usize]
            })
        })
        .collect()
}
