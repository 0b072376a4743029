//! A seeded low-discrepancy start, then whatever is likeliest to help per second of trial.
//!
//! Order: the golden configuration if it stands in for the truth; configurations that were good before the content changed; a few
//! points of a low-discrepancy sequence (Roberts's generalisation of the golden ratio); then by score (see [`super::outlook`]):
//! until something feasible is known, the probability of meeting every SLO; after that, what it can be expected to save, today and
//! should the links out of the site degrade.

use std::collections::{BTreeSet, VecDeque};

use compass_shared::seed::Seed;
use rand::Rng;

use super::outlook::Outlook;
use super::{Ask, Next, Search, SearchSettings, Stop, Told, View, Why};
use crate::space::{Point, Space};

/// The search in use.
#[derive(Debug, Clone)]
pub struct Feasible {
    settings: SearchSettings,
    seed: Seed,
    golden: bool,
    warm: VecDeque<Point>,
    starts: u32,
    asked: BTreeSet<Point>,
    told: BTreeSet<Point>,
    failed: BTreeSet<Point>,
    /// Trials of earlier campaigns, which do not count against this one's budget.
    spent: usize,
}

/// Numbers of the sequence looked at before giving up on finding a start point that was not asked yet.
const SEQUENCE_MAX: u32 = 64;

impl Feasible {
    /// A search that has asked nothing yet.
    pub const fn new(settings: SearchSettings, seed: Seed) -> Self {
        Self {
            settings,
            seed,
            golden: false,
            warm: VecDeque::new(),
            starts: 0,
            asked: BTreeSet::new(),
            told: BTreeSet::new(),
            failed: BTreeSet::new(),
            spent: 0,
        }
    }

    fn take(&mut self, asks: &mut Vec<Ask>, point: Point, why: Why, score: f64) {
        if !self.failed.contains(&point) && self.asked.insert(point.clone()) {
            asks.push(Ask { point, why, score });
        }
    }

    /// The n-th point of the low-discrepancy sequence; the first lies a little above the middle, where feasible plans are likely.
    fn sequence(&self, space: &Space, n: u32) -> Point {
        let golden = space.golden();
        let open: Vec<usize> = (0..space.dimensions().len())
            .filter(|i| !space.dimensions()[*i].filter)
            .collect();
        let steps = sequence_steps(open.len());
        let mut rng = self.seed.child("start").rng();
        let mut point = golden;
        for (dimension, step) in open.iter().zip(steps) {
            let shift = 0.55 + 0.1 * rng.random::<f64>();
            let position = (shift + f64::from(n) * step).fract();
            let count = space.dimensions()[*dimension].values.len();
            point.0[*dimension] = ((position * count as f64) as usize).min(count - 1);
        }
        point
    }
}

/// Steps per dimension of Roberts's sequence: powers of 1/x with x the positive root of x^(d+1) = x + 1.
fn sequence_steps(dimensions: usize) -> Vec<f64> {
    let mut root = 2.0_f64;
    for _ in 0..50 {
        root = (1.0 + root).powf(1.0 / (dimensions as f64 + 1.0));
    }
    (1..=dimensions)
        .map(|i| root.powi(-i32::try_from(i).unwrap_or(1)).fract())
        .collect()
}

impl Search for Feasible {
    fn ask(&mut self, view: &View<'_>, count: usize) -> Next {
        let budget = self.spent + self.settings.trials_max as usize;
        if self.told.len() >= budget {
            return Next::Done(Stop::Budget);
        }
        let room = budget.saturating_sub(self.asked.len());
        let count = count.min(room);
        let mut asks = Vec::new();
        if self.golden && asks.len() < count {
            self.golden = false;
            self.take(&mut asks, view.space.golden(), Why::Golden, 0.0);
        }
        while asks.len() < count
            && let Some(point) = self.warm.pop_front()
        {
            self.take(&mut asks, point, Why::Warm, 0.0);
        }
        // Once enough is known, by whatever means, the sequence has nothing to add.
        let is_new = self.told.len() < self.settings.start_points as usize;
        while is_new && asks.len() < count && self.starts < self.settings.start_points {
            let fresh = (self.starts..SEQUENCE_MAX)
                .map(|n| self.sequence(view.space, n))
                .find(|p| !self.asked.contains(p) && !self.failed.contains(p));
            self.starts += 1;
            if let Some(point) = fresh {
                self.take(&mut asks, point, Why::Start, 0.0);
            }
        }
        let enough = self.told.len() >= (self.settings.start_points as usize).min(2);
        if asks.len() >= count || !enough {
            if asks.is_empty() && self.asked.len() == self.told.len() && !enough {
                // A space of one or two points: nothing else to ask for.
                return self.rest(view, count);
            }
            return Next::Try(asks);
        }
        let left: Vec<Point> = view
            .space
            .points()
            .into_iter()
            .filter(|p| !self.asked.contains(p) && !self.failed.contains(p))
            .collect();
        if left.is_empty() {
            return if !asks.is_empty() || self.asked.len() > self.told.len() {
                Next::Try(asks)
            } else {
                Next::Done(Stop::Exhausted)
            };
        }
        let stride = left
            .len()
            .div_ceil(self.settings.scored_points_max.max(1) as usize);
        let sampled: Vec<Point> = left.into_iter().step_by(stride.max(1)).collect();
        let outlook = Outlook::new(view, &self.settings);
        let ranked = outlook.rank(sampled, count - asks.len());
        if ranked.worthless && asks.is_empty() {
            return if self.asked.len() > self.told.len() {
                Next::Try(asks)
            } else {
                Next::Done(Stop::Converged)
            };
        }
        if !ranked.worthless {
            for (point, score) in ranked.best {
                let why = if ranked.has_incumbent {
                    Why::Improvement
                } else {
                    Why::Feasibility
                };
                self.take(&mut asks, point, why, score);
            }
        }
        Next::Try(asks)
    }

    fn tell(&mut self, point: &Point, told: Told) {
        match told {
            Told::Measured => {
                self.told.insert(point.clone());
            }
            Told::Failed => {
                self.told.insert(point.clone());
                self.failed.insert(point.clone());
            }
            Told::Again => {
                self.asked.remove(point);
                self.told.remove(point);
                self.failed.remove(point);
                return;
            }
            Told::Cancelled => {
                self.asked.remove(point);
                return;
            }
        }
        // A replayed log tells what was never asked in this life.
        self.asked.insert(point.clone());
    }

    fn reopen(&mut self, warm: Vec<Point>) {
        self.asked.clear();
        self.told.clear();
        self.spent = 0;
        self.starts = if warm.is_empty() {
            0
        } else {
            self.settings.start_points.saturating_sub(1)
        };
        self.warm = warm.into();
    }

    fn renew_budget(&mut self) {
        self.spent = self.told.len();
    }

    fn repeat(&mut self, points: Vec<Point>) {
        for point in &points {
            self.asked.remove(point);
        }
        self.warm.extend(points);
    }

    fn require_golden(&mut self) {
        self.golden = true;
    }

    fn tried(&self) -> u32 {
        u32::try_from(self.told.len()).unwrap_or(u32::MAX)
    }
}

impl Feasible {
    /// Whatever is left of a tiny space, in order.
    fn rest(&mut self, view: &View<'_>, count: usize) -> Next {
        let mut asks = Vec::new();
        for point in view.space.points() {
            if asks.len() < count {
                self.take(&mut asks, point, Why::Start, 0.0);
            }
        }
        if asks.is_empty() {
            Next::Done(Stop::Exhausted)
        } else {
            Next::Try(asks)
        }
    }
}
