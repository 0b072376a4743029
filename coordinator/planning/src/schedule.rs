//! Which query gets which candidate, under the capacity of every node and link.
//!
//! Start at [`schedule`]: one door, from a snapshot of demands to a choice. Phases, each with its post-condition:
//!
//! 1. *keep*: plans in force stay, higher priority first;
//! 2. *serve*: queries without a plan, by priority, then the smallest first (first fit, which for unit benefits serves at least half
//!    of what is possible); one that fits nowhere may push out queries of strictly lower priority;
//! 3. *improve*: a kept query moves to a cheaper candidate that fits, if it saves enough and its dwell time allows;
//!
//! and 2 and 3 again until nothing changes, so that scheduling a schedule changes nothing. Ties are broken by query id; the order of the
//! input does not matter.
//!
//! Deliberately absent: predictions (candidates carry theirs), the steps of a switch.

use std::collections::BTreeMap;
use std::time::Duration;

use compass_shared::ids::{Digest, NodeId, QueryId};
use compass_shared::model::cluster::Resources;
use serde::{Deserialize, Serialize};

use crate::candidate::{Candidate, Preference};

#[cfg(test)]
mod tests;

/// Constants of choosing and switching plans.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ScheduleSettings {
    /// A cheaper candidate replaces a plan in force only if it saves at least this part of its cost: a switch is not free.
    pub switch_gain_min: f64,
    /// New instances must be ready within this time, else the switch is called off.
    pub warm_deadline: Duration,
    /// A second repair for the same cause within this time is an alarm.
    pub same_cause_within: Duration,
    /// A plan that a node could not carry out is not chosen again for this long.
    pub avoid_failed_for: Duration,
    /// Models of a query that the nodes of its site fetch ahead, in bytes: a site that is cut off cannot fetch what it then needs.
    pub standby_bytes: u64,
    /// Added to a query's frame deadline before an old plan counts as drained although its entry node has not said so.
    pub drain_slack: Duration,
}

impl Default for ScheduleSettings {
    fn default() -> Self {
        Self {
            switch_gain_min: 0.1,
            warm_deadline: Duration::from_secs(30),
            same_cause_within: Duration::from_secs(20),
            avoid_failed_for: Duration::from_secs(60),
            standby_bytes: 64 << 20,
            drain_slack: Duration::from_millis(500),
        }
    }
}

/// What a query wants.
#[derive(Debug, Clone, PartialEq)]
pub struct Demand {
    /// The query.
    pub query: QueryId,
    /// Higher wins.
    pub priority: u32,
    /// What it could run, most wanted first.
    pub candidates: Vec<Candidate>,
    /// What it runs now, if that may stay.
    pub current: Option<Current>,
    /// Whether it may move although what it has may stay (its dwell time is over).
    pub may_improve: bool,
    /// What its candidates are ordered by; where that is not the cost, cheaper is not better.
    pub preference: Preference,
}

/// A plan in force that may stay.
#[derive(Debug, Clone, PartialEq)]
pub struct Current {
    /// Hash of its content.
    pub content: Digest,
    /// What it holds of each node.
    pub nodes: BTreeMap<NodeId, Resources>,
    /// What it needs of each link, in bit/s.
    pub links: BTreeMap<(NodeId, NodeId), f64>,
    /// What it costs at today's prices.
    pub cost_usd_per_h: f64,
}

/// Demands and what there is for them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Problem {
    /// What each node may give.
    pub nodes: BTreeMap<NodeId, Resources>,
    /// What each link may carry, in bit/s.
    pub links: BTreeMap<(NodeId, NodeId), f64>,
    /// In any order.
    pub demands: Vec<Demand>,
}

/// What became of one demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// It keeps what it has.
    Keep,
    /// It gets the candidate with this index.
    Take(usize),
    /// Nothing fits.
    Unserved,
}

/// The choice.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Schedule {
    /// By query.
    pub decisions: BTreeMap<QueryId, Decision>,
}

/// Resources per node.
type Needs = BTreeMap<NodeId, Resources>;
/// Bits per second per link.
type Flows = BTreeMap<(NodeId, NodeId), f64>;

/// What is left of nodes and links.
#[derive(Debug, Clone)]
struct Free {
    nodes: BTreeMap<NodeId, Resources>,
    links: BTreeMap<(NodeId, NodeId), f64>,
}

impl Free {
    fn fits(&self, nodes: &Needs, links: &Flows) -> bool {
        nodes
            .iter()
            .all(|(id, need)| self.nodes.get(id).is_some_and(|free| free.fits(need)))
            && links
                .iter()
                .all(|(pair, need)| self.links.get(pair).is_some_and(|free| need <= free))
    }

    fn take(&mut self, nodes: &Needs, links: &Flows) {
        for (id, need) in nodes {
            if let Some(free) = self.nodes.get_mut(id) {
                *free = free.minus(need).expect("what is taken was found to fit");
            }
        }
        for (pair, need) in links {
            if let Some(free) = self.links.get_mut(pair) {
                *free -= need;
            }
        }
    }

    fn give_back(&mut self, nodes: &Needs, links: &Flows) {
        for (id, need) in nodes {
            if let Some(free) = self.nodes.get_mut(id) {
                *free = free.plus(need);
            }
        }
        for (pair, need) in links {
            if let Some(free) = self.links.get_mut(pair) {
                *free += need;
            }
        }
    }

    /// The largest part of anything that is left which a candidate would take; above 1 it does not fit.
    fn dominant(&self, candidate: &Candidate) -> f64 {
        let part = |need: u32, free: u32| {
            if need == 0 {
                0.0
            } else {
                f64::from(need) / f64::from(free).max(1e-9)
            }
        };
        let mut most: f64 = 0.0;
        for (id, need) in &candidate.nodes {
            let free = self.nodes.get(id).copied().unwrap_or_default();
            most = most
                .max(part(need.cpu.0, free.cpu.0))
                .max(part(need.memory_mib, free.memory_mib))
                .max(part(need.gpu_percent, free.gpu_percent));
        }
        for (pair, need) in &candidate.links {
            let free = self.links.get(pair).copied().unwrap_or(0.0);
            most = most.max(need / free.max(1e-9));
        }
        most
    }
}

/// What a demand holds while the schedule is being made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    Nothing,
    Current,
    Candidate(usize),
}

struct Work<'a> {
    demands: Vec<&'a Demand>,
    held: Vec<Held>,
    free: Free,
}

/// Rounds of serving and improving at most. Each round serves one more query or lowers the total cost; the bound only guards against
/// rounding.
const ROUNDS_MAX: usize = 64;

/// Chooses.
pub fn schedule(problem: &Problem, settings: &ScheduleSettings) -> Schedule {
    let mut demands: Vec<&Demand> = problem.demands.iter().collect();
    demands.sort_by(|a, b| (b.priority.cmp(&a.priority)).then_with(|| a.query.cmp(&b.query)));
    let mut work = Work {
        held: vec![Held::Nothing; demands.len()],
        demands,
        free: Free {
            nodes: problem.nodes.clone(),
            links: problem.links.clone(),
        },
    };
    work.keep();
    for _ in 0..ROUNDS_MAX {
        let served = work.serve();
        let improved = work.improve(settings);
        if !served && !improved {
            break;
        }
    }
    let decisions = work
        .demands
        .iter()
        .zip(&work.held)
        .map(|(demand, held)| {
            let decision = match held {
                Held::Nothing => Decision::Unserved,
                Held::Current => Decision::Keep,
                Held::Candidate(index) => Decision::Take(*index),
            };
            (demand.query.clone(), decision)
        })
        .collect();
    let schedule = Schedule { decisions };
    debug_assert!(is_within_capacity(problem, &schedule));
    schedule
}

impl Work<'_> {
    fn uses(&self, index: usize) -> Option<(&Needs, &Flows)> {
        let demand = self.demands[index];
        match self.held[index] {
            Held::Nothing => None,
            Held::Current => demand.current.as_ref().map(|c| (&c.nodes, &c.links)),
            Held::Candidate(chosen) => {
                let candidate = &demand.candidates[chosen];
                Some((&candidate.nodes, &candidate.links))
            }
        }
    }

    fn cost(&self, index: usize) -> f64 {
        let demand = self.demands[index];
        match self.held[index] {
            Held::Nothing => f64::INFINITY,
            Held::Current => demand
                .current
                .as_ref()
                .map_or(f64::INFINITY, |c| c.cost_usd_per_h),
            Held::Candidate(chosen) => demand.candidates[chosen].expected.cost_usd_per_h,
        }
    }

    fn hold(&mut self, index: usize, held: Held) {
        let mut free = self.free.clone();
        if let Some((nodes, links)) = self.uses(index) {
            free.give_back(nodes, links);
        }
        self.held[index] = held;
        if let Some((nodes, links)) = self.uses(index) {
            free.take(nodes, links);
        }
        self.free = free;
    }

    fn keep(&mut self) {
        for index in 0..self.demands.len() {
            if let Some(current) = &self.demands[index].current
                && self.free.fits(&current.nodes, &current.links)
            {
                self.hold(index, Held::Current);
            }
        }
    }

    /// Serves queries that have nothing; tells whether one got something.
    fn serve(&mut self) -> bool {
        let mut waiting: Vec<usize> = (0..self.demands.len())
            .filter(|i| self.held[*i] == Held::Nothing)
            .collect();
        let size = |i: &usize| {
            self.demands[*i]
                .candidates
                .iter()
                .map(|c| self.free.dominant(c))
                .fold(f64::INFINITY, f64::min)
        };
        let sizes: BTreeMap<usize, f64> = waiting.iter().map(|i| (*i, size(i))).collect();
        waiting.sort_by(|a, b| {
            let (x, y) = (self.demands[*a], self.demands[*b]);
            (y.priority.cmp(&x.priority))
                .then(sizes[a].total_cmp(&sizes[b]))
                .then_with(|| x.query.cmp(&y.query))
        });
        let mut served = false;
        for index in waiting {
            let fit = self.demands[index]
                .candidates
                .iter()
                .position(|c| self.free.fits(&c.nodes, &c.links));
            if let Some(chosen) = fit {
                self.hold(index, Held::Candidate(chosen));
                served = true;
            } else if self.push_out(index) {
                served = true;
            }
        }
        served
    }

    /// Makes room for a query by taking from those of strictly lower priority, lowest first, as few as will do.
    fn push_out(&mut self, index: usize) -> bool {
        let demand = self.demands[index];
        let mut lower: Vec<usize> = (0..self.demands.len())
            .filter(|i| {
                self.demands[*i].priority < demand.priority && self.held[*i] != Held::Nothing
            })
            .collect();
        lower.sort_by(|a, b| {
            let (x, y) = (self.demands[*a], self.demands[*b]);
            (x.priority.cmp(&y.priority)).then_with(|| x.query.cmp(&y.query))
        });
        for (chosen, candidate) in demand.candidates.iter().enumerate() {
            let mut free = self.free.clone();
            let mut pushed = Vec::new();
            for victim in &lower {
                if free.fits(&candidate.nodes, &candidate.links) {
                    break;
                }
                if let Some((nodes, links)) = self.uses(*victim)
                    && nodes.keys().any(|n| candidate.nodes.contains_key(n))
                {
                    free.give_back(nodes, links);
                    pushed.push(*victim);
                }
            }
            if !pushed.is_empty() && free.fits(&candidate.nodes, &candidate.links) {
                for victim in pushed {
                    self.hold(victim, Held::Nothing);
                }
                self.hold(index, Held::Candidate(chosen));
                return true;
            }
        }
        false
    }

    /// Moves kept queries to cheaper candidates; tells whether one moved.
    fn improve(&mut self, settings: &ScheduleSettings) -> bool {
        let mut improved = false;
        for index in 0..self.demands.len() {
            let demand = self.demands[index];
            let gain = match self.held[index] {
                _ if demand.preference == Preference::Safest => continue,
                Held::Nothing => continue,
                Held::Current if !demand.may_improve => continue,
                Held::Current => settings.switch_gain_min,
                // Not in force yet: any saving counts.
                Held::Candidate(_) => 1e-9,
            };
            let bound = self.cost(index) * (1.0 - gain);
            let mut free = self.free.clone();
            if let Some((nodes, links)) = self.uses(index) {
                free.give_back(nodes, links);
            }
            let better = demand
                .candidates
                .iter()
                .enumerate()
                .filter(|(_, c)| c.expected.cost_usd_per_h < bound)
                .filter(|(_, c)| free.fits(&c.nodes, &c.links))
                .min_by(|a, b| {
                    let cost = |c: &Candidate| c.expected.cost_usd_per_h;
                    cost(a.1).total_cmp(&cost(b.1)).then(a.0.cmp(&b.0))
                })
                .map(|(chosen, _)| chosen);
            if let Some(chosen) = better {
                self.hold(index, Held::Candidate(chosen));
                improved = true;
            }
        }
        improved
    }
}

/// Post-condition: what is chosen fits together.
fn is_within_capacity(problem: &Problem, schedule: &Schedule) -> bool {
    let mut free = Free {
        nodes: problem.nodes.clone(),
        links: problem.links.clone(),
    };
    for demand in &problem.demands {
        let uses = match schedule.decisions.get(&demand.query) {
            Some(Decision::Keep) => demand.current.as_ref().map(|c| (&c.nodes, &c.links)),
            Some(Decision::Take(index)) => {
                let candidate = &demand.candidates[*index];
                Some((&candidate.nodes, &candidate.links))
            }
            _ => None,
        };
        let Some((nodes, links)) = uses else { continue };
        // Rounding of sums of floats is no breach.
        let slack: BTreeMap<_, _> = links
            .iter()
            .map(|(k, v)| (k.clone(), v * (1.0 - 1e-9) - 1e-3))
            .collect();
        if !free.fits(nodes, &slack) {
            return false;
        }
        free.take(nodes, links);
    }
    true
}
