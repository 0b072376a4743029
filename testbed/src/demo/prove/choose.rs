//! Which plans meet all SLOs, and which of them is the cheapest.
//!
//! Start at [`survey`]. It goes through every configuration on every placement. Shares begin at the least with which operators keep up, and
//! milliseconds are bought where they cost least, until the latency bound is met; a plan counts when the simulation of [`super::compose`]
//! agrees. So what is counted is compliant, and a plan that is not counted may still be so with shares that this rule does not find.

use compass_planning::candidate::SHARE_LEVELS;

use super::super::film::on_all_cores;
use super::super::record::{SloRecord, quantile};
use super::compose::{Ground, HOP_MS, Layout, WIRE, WORKER_MS};
use super::observe::Candidate;

/// An operator's share, and a pipe, may be busy this part of the time: beyond it waiting grows without end in a film longer than ours.
const BUSY_MAX: f64 = 0.9;
/// Estimates err on the safe side; those within this factor of the bound are simulated.
const ESTIMATE_SLACK: f64 = 1.15;

/// Film sizes as composition needs them.
#[derive(Debug, Clone)]
pub(super) struct Input {
    /// Bytes of each frame of the camera.
    pub(super) bytes: Vec<f64>,
    /// Frames that are not judged.
    pub(super) lead_in: usize,
}

/// What a plan achieves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Figures {
    /// At the SLO's percentile; infinite when it does not keep up.
    pub(super) latency_ms: f64,
    /// `None` when nobody looked because it does not keep up anyway.
    pub(super) accuracy: Option<f64>,
    pub(super) cost_usd_per_h: f64,
}

impl Figures {
    /// By how much the worst missed SLO is missed, as a part of its bound; 0 when all are met.
    pub(super) fn shortfall(&self, slo: &SloRecord) -> f64 {
        let accuracy = self.accuracy.unwrap_or(0.0);
        let parts = [
            self.latency_ms / slo.latency_ms - 1.0,
            1.0 - accuracy / slo.accuracy_min,
            self.cost_usd_per_h / slo.cost_max_usd_per_h - 1.0,
        ];
        parts.into_iter().fold(0.0, f64::max)
    }
}

/// A configuration on a placement with shares.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    /// Which of the candidates.
    pub(super) candidate: usize,
    pub(super) layout: Layout,
    pub(super) figures: Figures,
}

/// What came of all plans.
#[derive(Debug, Clone, Default)]
pub(super) struct Tally {
    /// Configurations times placements.
    pub(super) plans: u64,
    pub(super) compliant: u64,
    pub(super) cheapest: Option<Plan>,
    /// The highest accuracy of a compliant plan.
    pub(super) best_accuracy: Option<f64>,
    /// The plan that misses by least, of those that are not compliant.
    pub(super) nearest: Option<Plan>,
}

/// Goes through all plans.
pub(super) fn survey(
    ground: &Ground,
    candidates: &[Candidate],
    input: &Input,
    slo: &SloRecord,
) -> anyhow::Result<Tally> {
    let jobs: Vec<usize> = (0..candidates.len()).collect();
    // Neighbours resemble each other in cost of the search, so that every other one makes even parts.
    let (even, odd): (Vec<usize>, Vec<usize>) = jobs.iter().partition(|job| *job % 2 == 0);
    let jobs: Vec<usize> = even.into_iter().chain(odd).collect();
    let tallies = on_all_cores(&jobs, |index| {
        let search = Search::new(ground, &candidates[*index], input, slo);
        Ok(search.all_placements(*index))
    })?;
    Ok(tallies.into_iter().fold(Tally::default(), |mut all, one| {
        all.plans += one.plans;
        all.compliant += one.compliant;
        let best = all.best_accuracy.into_iter().chain(one.best_accuracy);
        all.best_accuracy = best.reduce(f64::max);
        let cost = |plan: &Plan| plan.figures.cost_usd_per_h;
        all.cheapest = lesser(all.cheapest, one.cheapest, cost);
        all.nearest = lesser(all.nearest, one.nearest, |p| p.figures.shortfall(slo));
        all
    }))
}

fn lesser(a: Option<Plan>, b: Option<Plan>, by: impl Fn(&Plan) -> f64) -> Option<Plan> {
    match (a, b) {
        (Some(a), Some(b)) => Some(if by(&b) < by(&a) { b } else { a }),
        (a, b) => a.or(b),
    }
}

/// What a plan achieves by simulation.
pub(super) fn figures(
    ground: &Ground,
    candidate: &Candidate,
    input: &Input,
    slo: &SloRecord,
    layout: &Layout,
) -> Figures {
    let search = Search::new(ground, candidate, input, slo);
    let keeps_up = search.pipes_keep_up(&layout.nodes)
        && (0..layout.nodes.len()).all(|operator| {
            search.busy(operator, layout.nodes[operator], layout.shares[operator]) <= 1.0
        });
    search.figures(layout, keeps_up)
}

/// The least that a configuration asks of any fleet: whether the fastest node keeps up with each operator and is quick enough in sum.
pub(super) fn is_hopeless(ground: &Ground, candidate: &Candidate, slo: &SloRecord) -> bool {
    let fastest = ground.places.iter().map(|place| place.speed);
    let fastest = fastest.fold(0.0, f64::max);
    let times = candidate.cpu_ms.iter().map(|times| mean(times) / fastest);
    let kept = part_kept(candidate);
    let busy = times.clone().enumerate().map(|(operator, ms)| {
        let passed = if operator < candidate.filters {
            1.0
        } else {
            kept
        };
        ms * ground.rate_hz * passed / 1e3
    });
    busy.fold(0.0, f64::max) > BUSY_MAX || times.sum::<f64>() > slo.latency_ms
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

fn part_kept(candidate: &Candidate) -> f64 {
    let kept = candidate.kept.iter().filter(|kept| **kept).count();
    kept as f64 / candidate.kept.len().max(1) as f64
}

/// One configuration, and all that does not depend on the placement.
struct Search<'a> {
    ground: &'a Ground,
    candidate: &'a Candidate,
    input: &'a Input,
    slo: &'a SloRecord,
    /// Per operator, in ms on one core of this host: mean and at the SLO's percentile.
    work: Vec<[f64; 2]>,
    /// Frames per second that reach each operator.
    rates_hz: Vec<f64>,
    /// Bytes from the camera and of each operator's output: per ms on average, and of a frame at the SLO's percentile.
    bytes: Vec<[f64; 2]>,
}

impl<'a> Search<'a> {
    fn new(
        ground: &'a Ground,
        candidate: &'a Candidate,
        input: &'a Input,
        slo: &'a SloRecord,
    ) -> Self {
        let part = slo.latency_percentile / 100.0;
        let length_ms = input.bytes.len() as f64 * 1e3 / ground.rate_hz;
        let kept_hz = ground.rate_hz * part_kept(candidate);
        let outputs = [None]
            .into_iter()
            .chain((0..candidate.bytes.len()).map(Some));
        Self {
            ground,
            candidate,
            input,
            slo,
            work: candidate
                .cpu_ms
                .iter()
                .map(|times| [mean(times), quantile(times, part)])
                .collect(),
            rates_hz: (0..candidate.cpu_ms.len())
                .map(|operator| {
                    if operator < candidate.filters {
                        ground.rate_hz
                    } else {
                        kept_hz
                    }
                })
                .collect(),
            bytes: outputs
                .map(|of| {
                    let sizes: Vec<f64> = candidate.travelling(&input.bytes, of).collect();
                    let total = sizes.iter().sum::<f64>();
                    [total * WIRE / length_ms, quantile(&sizes, part) * WIRE]
                })
                .collect(),
        }
    }

    fn all_placements(&self, candidate: usize) -> Tally {
        let (nodes, operators) = (self.ground.places.len(), self.work.len());
        let mut tally = Tally::default();
        let mut placement = vec![0; operators];
        loop {
            tally.plans += 1;
            if self.candidate.accuracy.is_some() {
                self.try_placement(candidate, &placement, &mut tally);
            }
            // The next number in the base of the fleet's size.
            let Some(digit) = placement.iter().rposition(|node| node + 1 < nodes) else {
                break;
            };
            placement[digit] += 1;
            placement[digit + 1..].fill(0);
        }
        if let Some(cheapest) = &mut tally.cheapest {
            self.lower(cheapest);
        }
        tally
    }

    fn try_placement(&self, candidate: usize, nodes: &[usize], tally: &mut Tally) {
        let Some(mut bargain) = Bargain::new(self, nodes) else {
            return;
        };
        let plan = |bargain: &Bargain<'_>, figures: Figures| Plan {
            candidate,
            layout: bargain.layout(),
            figures,
        };
        let mut nearest = plan(&bargain, bargain.estimate(self));
        while bargain.latency_ms() > self.slo.latency_ms && bargain.raise() {
            let next = bargain.estimate(self);
            if next.shortfall(self.slo) < nearest.figures.shortfall(self.slo) {
                nearest = plan(&bargain, next);
            }
        }
        let estimate = bargain.estimate(self);
        let hopeful = Figures {
            latency_ms: estimate.latency_ms / ESTIMATE_SLACK,
            ..estimate
        };
        if hopeful.shortfall(self.slo) == 0.0 {
            let mut figures = self.figures(&bargain.layout(), true);
            while figures.latency_ms > self.slo.latency_ms && bargain.raise() {
                figures = self.figures(&bargain.layout(), true);
            }
            nearest = plan(&bargain, figures);
            if figures.shortfall(self.slo) == 0.0 {
                tally.compliant += 1;
                tally.best_accuracy = figures.accuracy;
                tally.cheapest = lesser(tally.cheapest.take(), Some(nearest), |plan| {
                    plan.figures.cost_usd_per_h
                });
                return;
            }
        }
        tally.nearest = lesser(tally.nearest.take(), Some(nearest), |plan| {
            plan.figures.shortfall(self.slo)
        });
    }

    /// Takes back what the bargain bought too much of.
    fn lower(&self, plan: &mut Plan) {
        let price = |node: usize| self.ground.places[node].core_price;
        let mut order: Vec<usize> = (0..plan.layout.nodes.len()).collect();
        order.sort_by(|a, b| price(plan.layout.nodes[*b]).total_cmp(&price(plan.layout.nodes[*a])));
        for operator in order {
            loop {
                let mut layout = plan.layout.clone();
                let share = layout.shares[operator];
                let Some(less) = SHARE_LEVELS.iter().rev().find(|level| **level < share) else {
                    break;
                };
                layout.shares[operator] = *less;
                if self.busy(operator, layout.nodes[operator], *less) > BUSY_MAX {
                    break;
                }
                let figures = self.figures(&layout, true);
                if figures.shortfall(self.slo) > 0.0 {
                    break;
                }
                plan.layout = layout;
                plan.figures = figures;
            }
        }
    }

    fn busy(&self, operator: usize, node: usize, share: u32) -> f64 {
        let cores = self.ground.places[node].speed * f64::from(share) / 1e3;
        self.rates_hz[operator] * self.work[operator][0] / 1e3 / cores
    }

    fn pipes_keep_up(&self, nodes: &[usize]) -> bool {
        let mut demand = vec![0.0; self.ground.pipes];
        self.ground.hops(nodes).into_iter().all(|(way, of)| {
            let [per_ms, _] = self.bytes[of.map_or(0, |of| of + 1)];
            way.pipes.iter().all(|(pipe, rate)| {
                demand[*pipe] += per_ms;
                demand[*pipe] <= BUSY_MAX * rate
            })
        })
    }

    fn figures(&self, layout: &Layout, keeps_up: bool) -> Figures {
        let Input { bytes, lead_in } = self.input;
        let latency_ms = if keeps_up {
            let (ground, part) = (self.ground, self.slo.latency_percentile / 100.0);
            quantile(
                &ground.latencies_ms(self.candidate, bytes, *lead_in, layout),
                part,
            )
        } else {
            f64::INFINITY
        };
        Figures {
            latency_ms,
            accuracy: self.candidate.accuracy,
            cost_usd_per_h: self.ground.cost_per_h(self.candidate, bytes, layout),
        }
    }
}

/// Shares being bought for one placement.
struct Bargain<'a> {
    ground: &'a Ground,
    nodes: &'a [usize],
    /// Per operator: ms on a full core of its node, at the SLO's percentile.
    work_ms: Vec<f64>,
    /// Per operator: position in [`SHARE_LEVELS`].
    levels: Vec<usize>,
    /// Thousandths of a core that are left on each node.
    left: Vec<u32>,
    /// All that shares do not change, in ms and in USD/h.
    fixed_ms: f64,
    fixed_cost: f64,
}

impl<'a> Bargain<'a> {
    /// The least shares; `None` if they do not fit the nodes, or a link does not keep up.
    fn new(search: &'a Search<'_>, nodes: &'a [usize]) -> Option<Self> {
        let ground = search.ground;
        if !search.pipes_keep_up(nodes) {
            return None;
        }
        let mut levels = Vec::with_capacity(nodes.len());
        let mut left: Vec<u32> = ground.places.iter().map(|place| place.millicores).collect();
        for (operator, node) in nodes.iter().enumerate() {
            let enough = |share: &u32| search.busy(operator, *node, *share) <= BUSY_MAX;
            let level = SHARE_LEVELS.iter().position(enough)?;
            left[*node] = left[*node].checked_sub(SHARE_LEVELS[level])?;
            levels.push(level);
        }
        let hops = ground.hops(nodes).into_iter().map(|(way, of)| {
            let [_, frame] = search.bytes[of.map_or(0, |of| of + 1)];
            let slowest = way.pipes.iter().map(|(_, rate)| frame / rate);
            slowest.fold(0.0, f64::max) + way.delay_ms + HOP_MS
        });
        let work = nodes.iter().zip(&search.work);
        Some(Self {
            ground,
            nodes,
            work_ms: work
                .map(|(node, [_, high])| high / ground.places[*node].speed)
                .collect(),
            levels,
            left,
            fixed_ms: hops.sum::<f64>() + WORKER_MS * nodes.len() as f64,
            fixed_cost: ground.egress_per_h(search.candidate, &search.input.bytes, nodes),
        })
    }

    fn latency_ms(&self) -> f64 {
        let operators = self.work_ms.iter().zip(&self.levels);
        let operators = operators.map(|(work, level)| work * 1e3 / f64::from(SHARE_LEVELS[*level]));
        self.fixed_ms + operators.sum::<f64>()
    }

    fn cost(&self) -> f64 {
        let shares = self.nodes.iter().zip(&self.levels);
        let cores = shares.map(|(node, level)| {
            f64::from(SHARE_LEVELS[*level]) / 1e3 * self.ground.places[*node].core_price
        });
        self.fixed_cost + cores.sum::<f64>()
    }

    fn estimate(&self, search: &Search<'_>) -> Figures {
        Figures {
            latency_ms: self.latency_ms(),
            accuracy: search.candidate.accuracy,
            cost_usd_per_h: self.cost(),
        }
    }

    /// Raises one share by a level, where a millisecond costs least; false when nothing can be raised.
    fn raise(&mut self) -> bool {
        let offer = |operator: usize| {
            let node = self.nodes[operator];
            let level = self.levels[operator];
            let [now, next] = [SHARE_LEVELS[level], *SHARE_LEVELS.get(level + 1)?];
            let more = next - now;
            let saved = self.work_ms[operator] * (1e3 / f64::from(now) - 1e3 / f64::from(next));
            let price = self.ground.places[node].core_price.max(1e-9) * f64::from(more);
            (more <= self.left[node]).then_some((saved / price, operator, more))
        };
        let offers = (0..self.nodes.len()).filter_map(offer);
        let Some((_, operator, more)) = offers.max_by(|a, b| a.0.total_cmp(&b.0)) else {
            return false;
        };
        self.levels[operator] += 1;
        self.left[self.nodes[operator]] -= more;
        true
    }

    fn layout(&self) -> Layout {
        Layout {
            nodes: self.nodes.to_vec(),
            shares: self.levels.iter().map(|l| SHARE_LEVELS[*l]).collect(),
        }
    }
}
