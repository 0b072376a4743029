//! Charts over the time of the story, as SVG.
//!
//! Each chart is drawn twice, for wide and for narrow screens, because text in a scaled drawing would scale too; the style sheet shows
//! one. What a colour says, a shape, a pattern or a word says too.

use compass_shared::model::outcome::Outcome;

use super::super::record::{PhaseRecord, Point, RunRecord, mean_accuracy, quantile};
use super::text::{escape, milliseconds, seconds};

/// Curves are over windows of this length, in ms: twenty frames, enough for a 95th percentile to be one of them.
const WINDOW_MS: f64 = 2_000.0;
/// One point of a curve this often, in ms.
const STEP_MS: f64 = 500.0;

/// A size to draw for.
#[derive(Debug, Clone, Copy)]
struct Size {
    class: &'static str,
    width: f64,
    height: f64,
    x_tick_s: f64,
}

const SIZES: [Size; 2] = [
    Size {
        class: "wide",
        width: 1000.0,
        height: 250.0,
        x_tick_s: 5.0,
    },
    Size {
        class: "narrow",
        width: 360.0,
        height: 230.0,
        x_tick_s: 20.0,
    },
];

const LEFT: f64 = 46.0;
const RIGHT: f64 = 10.0;
const TOP: f64 = 38.0;
const BOTTOM: f64 = 26.0;

/// The area of a chart and what it shows.
struct Plot<'a> {
    run: &'a RunRecord,
    size: Size,
    from_ms: f64,
    to_ms: f64,
    y_max: f64,
    svg: String,
}

/// Latency of every result with the percentile of the SLO over time.
pub(super) fn latency(run: &RunRecord) -> String {
    let latencies: Vec<f64> = run
        .points
        .iter()
        .filter_map(|point| point.latency_ms)
        .collect();
    let most = quantile(&latencies, 0.99).clamp(run.slo.latency_ms * 1.3, run.slo.latency_ms * 4.0);
    let step = nice_step(most / 4.0);
    let y_max = (most / step).ceil() * step;
    let title = "Latency of each answer over time, in milliseconds";
    both_sizes(run, y_max, title, |plot| {
        plot.y_axis(step, |value| format!("{value:.0}"), "ms");
        let part = run.slo.latency_percentile / 100.0;
        let tail = |points: &[&Point]| {
            let latencies: Vec<f64> = points.iter().filter_map(|point| point.latency_ms).collect();
            (!latencies.is_empty()).then(|| quantile(&latencies, part))
        };
        let per_frame = |point: &Point| point.latency_ms;
        plot.dots(&run.points, Outcome::Answered, "dot", per_frame);
        plot.crosses(&run.points, per_frame);
        plot.curve(&run.static_points, "static", tail);
        plot.curve(&run.points, "curve", tail);
        let name = format!(
            "SLO p{:.0} ≤ {}",
            run.slo.latency_percentile,
            milliseconds(run.slo.latency_ms)
        );
        plot.bound(run.slo.latency_ms, &name);
    })
}

/// True accuracy over time, with what the planner believes.
pub(super) fn accuracy(run: &RunRecord) -> String {
    let title = "True accuracy (F1) over time";
    both_sizes(run, 1.0, title, |plot| {
        plot.y_axis(0.25, |value| format!("{value:.2}"), "F1");
        let mean = |points: &[&Point]| mean_accuracy(points.iter().copied());
        plot.dots(&run.points, Outcome::Answered, "dot faint", |point| {
            point.accuracy
        });
        plot.curve(&run.static_points, "static", mean);
        plot.believed();
        plot.curve(&run.points, "curve", mean);
        plot.bound(
            run.slo.accuracy_min,
            &format!("SLO mean ≥ {:.2}", run.slo.accuracy_min),
        );
    })
}

/// Frames by outcome, one bar a second.
pub(super) fn outcomes(run: &RunRecord) -> String {
    let y_max = run.rate_hz.max(1.0).ceil() + 1.0;
    let title = "Frames by outcome in each second";
    both_sizes(run, y_max, title, |plot| {
        plot.y_axis(
            nice_step(y_max / 3.0),
            |value| format!("{value:.0}"),
            "frames",
        );
        plot.bars();
    })
}

fn both_sizes(run: &RunRecord, y_max: f64, title: &str, draw: impl Fn(&mut Plot)) -> String {
    let from_ms = run.points.first().map_or(0.0, |point| point.at_ms);
    let phases_end = run
        .phases
        .iter()
        .map(|phase| phase.to_ms)
        .fold(0.0, f64::max);
    let to_ms = run
        .points
        .last()
        .map_or(1e3, |point| point.at_ms)
        .max(phases_end);
    let mut both = String::new();
    for size in SIZES {
        let mut plot = Plot {
            run,
            size,
            from_ms,
            to_ms: to_ms.max(from_ms + 1e3),
            y_max,
            svg: String::new(),
        };
        plot.bands();
        plot.x_axis();
        draw(&mut plot);
        plot.marks();
        let Size {
            class,
            width,
            height,
            ..
        } = size;
        both += &format!(
            "<svg class=\"chart {class}\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{0}\"><title>{0}</title>{1}</svg>\n",
            escape(title),
            plot.svg
        );
    }
    both
}

impl Plot<'_> {
    fn x(&self, ms: f64) -> f64 {
        let part = (ms - self.from_ms) / (self.to_ms - self.from_ms);
        LEFT + part.clamp(0.0, 1.0) * (self.size.width - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        let part = (value / self.y_max).clamp(0.0, 1.0);
        self.floor() - part * (self.floor() - TOP)
    }

    fn floor(&self) -> f64 {
        self.size.height - BOTTOM
    }

    fn is_narrow(&self) -> bool {
        self.size.class == "narrow"
    }

    /// The phases behind everything else, named above.
    fn bands(&mut self) {
        for (index, phase) in self.run.phases.iter().enumerate() {
            let (from, to) = (self.x(phase.from_ms), self.x(phase.to_ms));
            let (middle, height) = (f64::midpoint(from, to), self.floor() - TOP);
            let class = index % 2;
            self.svg += &format!(
                "<rect class=\"band{class}\" x=\"{from:.1}\" y=\"{TOP}\" width=\"{:.1}\" height=\"{height}\"/>",
                to - from
            );
            let name = if self.is_narrow() {
                short_name(phase)
            } else {
                phase.name.as_str()
            };
            self.svg += &format!(
                "<text class=\"phase\" x=\"{middle:.1}\" y=\"12\" text-anchor=\"middle\">{}</text>",
                escape(name)
            );
        }
    }

    fn x_axis(&mut self) {
        let floor = self.floor();
        let tick_ms = self.size.x_tick_s * 1e3;
        let mut at = (self.from_ms / tick_ms).ceil() * tick_ms;
        while at <= self.to_ms {
            let x = self.x(at);
            self.svg += &format!(
                "<path class=\"tick\" d=\"M{x:.1} {floor}v4\"/><text class=\"axis\" x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{:.0} s</text>",
                floor + 16.0,
                at / 1e3
            );
            at += tick_ms;
        }
    }

    fn y_axis(&mut self, step: f64, label: impl Fn(f64) -> String, unit: &str) {
        let right = self.size.width - RIGHT;
        let mut value = 0.0;
        while value <= self.y_max + step * 1e-6 {
            let y = self.y(value);
            self.svg += &format!(
                "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{right}\"/><text class=\"axis\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                y + 3.5,
                label(value)
            );
            value += step;
        }
        self.svg += &format!(
            "<text class=\"axis\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{unit}</text>",
            LEFT - 6.0,
            TOP - 8.0
        );
    }

    fn bound(&mut self, value: f64, name: &str) {
        let (y, right) = (self.y(value), self.size.width - RIGHT);
        self.svg += &format!(
            "<path class=\"slo\" d=\"M{LEFT} {y:.1}H{right}\"/><text class=\"slo\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            LEFT + 4.0,
            y - 5.0,
            escape(name)
        );
    }

    /// One dot per frame of this outcome.
    fn dots(
        &mut self,
        points: &[Point],
        outcome: Outcome,
        class: &str,
        value: impl Fn(&Point) -> Option<f64>,
    ) {
        let mut path = String::new();
        for point in points.iter().filter(|point| point.outcome == outcome) {
            if let Some(value) = value(point) {
                path += &format!("M{:.1} {:.1}h0", self.x(point.at_ms), self.y(value));
            }
        }
        self.svg += &format!("<path class=\"{class}\" d=\"{path}\"/>");
    }

    /// A cross per late answer; one beyond the chart stands at its upper edge.
    fn crosses(&mut self, points: &[Point], value: impl Fn(&Point) -> Option<f64>) {
        let mut path = String::new();
        for point in points.iter().filter(|point| point.outcome == Outcome::Late) {
            if let Some(value) = value(point) {
                let (x, y) = (self.x(point.at_ms), self.y(value));
                path += &format!(
                    "M{:.1} {:.1}l5 5M{:.1} {:.1}l-5 5",
                    x - 2.5,
                    y - 2.5,
                    x + 2.5,
                    y - 2.5
                );
            }
        }
        self.svg += &format!("<path class=\"late\" d=\"{path}\"/>");
    }

    /// A figure over sliding windows; where a window has none, the line breaks.
    fn curve(&mut self, points: &[Point], class: &str, figure: impl Fn(&[&Point]) -> Option<f64>) {
        let mut path = String::new();
        let mut pen_down = false;
        let mut at = self.from_ms + WINDOW_MS;
        while at <= self.to_ms {
            let inside: Vec<&Point> = points
                .iter()
                .filter(|point| (at - WINDOW_MS..at).contains(&point.at_ms))
                .collect();
            match figure(&inside) {
                Some(value) => {
                    let command = if pen_down { 'L' } else { 'M' };
                    path += &format!("{command}{:.1} {:.1}", self.x(at), self.y(value));
                    pen_down = true;
                }
                None => pen_down = false,
            }
            at += STEP_MS;
        }
        if !path.is_empty() {
            self.svg += &format!("<path class=\"{class}\" d=\"{path}\"/>");
        }
    }

    /// What the planner expects of each plan while it answers.
    fn believed(&mut self) {
        let applied: Vec<(f64, f64)> = self
            .run
            .plans
            .iter()
            .filter_map(|plan| Some((plan.applied_ms?, plan.expected_accuracy)))
            .collect();
        let mut path = String::new();
        for (index, (from, value)) in applied.iter().enumerate() {
            let to = applied.get(index + 1).map_or(self.to_ms, |(next, _)| *next);
            path += &format!(
                "M{:.1} {:.1}H{:.1}",
                self.x(*from),
                self.y(*value),
                self.x(to)
            );
        }
        self.svg += &format!("<path class=\"believed\" d=\"{path}\"/>");
    }

    /// Re-plans: from the event to the first answer by the new plan.
    fn marks(&mut self) {
        for replan in &self.run.replans {
            let Some(applied) = replan.applied_ms.or(replan.planned_ms) else {
                continue;
            };
            let from = replan.event_ms.or(replan.detected_ms).unwrap_or(applied);
            let (x0, x1, floor) = (self.x(from), self.x(applied), self.floor());
            let words = if self.is_narrow() {
                format!("▼ plan {}", replan.generation)
            } else if replan.event_ms.is_some() {
                format!(
                    "▼ plan {} answers after {}",
                    replan.generation,
                    seconds(applied - from)
                )
            } else {
                format!("▼ plan {}", replan.generation)
            };
            let is_right = x1 > self.size.width * 0.75;
            let (anchor, x_text) = if is_right {
                ("end", x1 + 4.0)
            } else {
                ("start", x1 - 4.0)
            };
            self.svg += &format!(
                "<rect class=\"switch\" x=\"{x0:.1}\" y=\"{TOP}\" width=\"{:.1}\" height=\"{:.1}\"/><path class=\"mark\" d=\"M{x1:.1} {TOP}V{floor}\"/><text class=\"mark\" x=\"{x_text:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{}</text>",
                (x1 - x0).max(0.5),
                floor - TOP,
                TOP - 6.0,
                escape(&words)
            );
        }
    }

    /// Stacked from below: answered, late, expired, rejected, then skipped as outlines.
    fn bars(&mut self) {
        let order = [
            Outcome::Answered,
            Outcome::Late,
            Outcome::Expired,
            Outcome::Rejected,
            Outcome::Skipped,
        ];
        let mut at = (self.from_ms / 1e3).floor() * 1e3;
        while at < self.to_ms {
            let inside = self
                .run
                .points
                .iter()
                .filter(|point| (at..at + 1e3).contains(&point.at_ms));
            let outcomes: Vec<Outcome> = inside.map(|point| point.outcome).collect();
            let (x0, x1) = (self.x(at) + 0.6, self.x(at + 1e3) - 0.6);
            let mut base = 0.0;
            for outcome in order {
                let count = outcomes.iter().filter(|known| **known == outcome).count() as f64;
                if count > 0.0 {
                    let (y0, y1) = (self.y(base), self.y(base + count));
                    self.svg += &format!(
                        "<rect class=\"{}\" x=\"{x0:.1}\" y=\"{y1:.1}\" width=\"{:.1}\" height=\"{:.1}\"/>",
                        class_of(outcome),
                        (x1 - x0).max(0.3),
                        y0 - y1
                    );
                }
                base += count;
            }
            at += 1e3;
        }
    }
}

/// The class of an outcome's bars, used by the legend too.
pub(super) fn class_of(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Answered => "o-answered",
        Outcome::Late => "o-late",
        Outcome::Skipped => "o-skipped",
        Outcome::Expired => "o-expired",
        Outcome::Rejected => "o-rejected",
    }
}

/// The first two words of a phase's name.
fn short_name(phase: &PhaseRecord) -> &str {
    let mut spaces = phase.name.match_indices(' ').map(|(index, _)| index);
    spaces
        .nth(1)
        .map_or(phase.name.as_str(), |end| &phase.name[..end])
}

/// The next larger of 1, 2, 5 times a power of ten.
fn nice_step(rough: f64) -> f64 {
    let power = 10_f64.powf(rough.max(1e-9).log10().floor());
    let digit = rough / power;
    let nice = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .find(|nice| *nice >= digit - 1e-9)
        .unwrap_or(10.0);
    nice * power
}
