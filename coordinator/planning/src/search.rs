//! What to try next: ask for configurations, tell how they went.
//!
//! Start at [`Search`]; [`Feasible`] is the implementation in use, `Feasible::new`. What was learnt lives in the profile; a search keeps
//! only what it has asked for and how far it has come, so that telling it a trial log again brings it to the same state.
//!
//! Deliberately absent: placements and shares (composed by prediction, they cost no trial), running anything.

use serde::{Deserialize, Serialize};

use crate::candidate::Front;
use crate::predict::Context;
use crate::space::{Point, Space};

mod feasible;
mod outlook;
pub(crate) mod scenarios;
pub use feasible::Feasible;

#[cfg(test)]
mod tests;

/// Constants of the search.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SearchSettings {
    /// Configurations from the low-discrepancy start before the model decides: two to fit a line, one to check it.
    pub start_points: u32,
    /// Trials of one campaign at most.
    pub trials_max: u32,
    /// Configurations scored per step at most; larger spaces are thinned.
    pub scored_points_max: u32,
    /// The search ends when the best it can hope for improves the cost by less than this part.
    pub gain_min: f64,
    /// Links out of the source's site are also planned at this part of their rate, so that a plan is ready when one degrades.
    pub degraded_part: f64,
}

impl Default for SearchSettings {
    fn default() -> Self {
        Self {
            start_points: 3,
            trials_max: 40,
            scored_points_max: 300,
            gain_min: 0.02,
            degraded_part: 0.05,
        }
    }
}

/// What a step of a search is based on.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// Query, fleet, profile.
    pub context: Context<'a>,
    /// The space.
    pub space: &'a Space,
    /// What has been learnt.
    pub front: &'a Front,
    /// Frames in a trial, for its cost.
    pub frames: u32,
}

/// Why a configuration is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// One of the first, spread over the space.
    Start,
    /// The golden configuration, which stands in for the truth.
    Golden,
    /// It was good before the content changed.
    Warm,
    /// Likely to meet the SLOs per second of trial.
    Feasibility,
    /// Likely to be cheaper, or to be needed when a link degrades.
    Improvement,
}

/// A configuration to try.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    /// A normalised point.
    pub point: Point,
    /// Why.
    pub why: Why,
    /// The score it was chosen by; 0 for the first ones.
    pub score: f64,
}

/// Why a search has nothing more to try.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stop {
    /// Nothing that was tried gave a result.
    Failing,
    /// Every configuration was tried.
    Exhausted,
    /// Nothing that is left is likely to be worth its trial.
    Converged,
    /// The budget of trials is spent.
    Budget,
}

/// What to do next.
#[derive(Debug, Clone, PartialEq)]
pub enum Next {
    /// Try these, best first; empty when the ones under way must finish first.
    Try(Vec<Ask>),
    /// Nothing more.
    Done(Stop),
}

/// How a trial of a configuration went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    /// It was measured; the profile has the numbers.
    Measured,
    /// It failed or gave no number: not to be tried again, unless told so.
    Failed,
    /// What it failed by may be over: as if it had never been asked.
    Again,
    /// It was called off and may be tried again.
    Cancelled,
}

/// Chooses configurations to try.
pub trait Search: Send {
    /// Up to `count` configurations, none asked before.
    fn ask(&mut self, view: &View<'_>, count: usize) -> Next;
    /// Takes note of how an asked one went.
    fn tell(&mut self, point: &Point, told: Told);
    /// Starts anew after a change of content, with these first.
    fn reopen(&mut self, warm: Vec<Point>);
    /// Asks for the golden configuration before anything else: it stands in for the truth.
    fn require_golden(&mut self);
    /// Grants another campaign's trials without forgetting what was tried.
    fn renew_budget(&mut self);
    /// Asks for these once more, on other samples.
    fn repeat(&mut self, points: Vec<Point>);
    /// Distinct configurations told as measured or failed since the search began or was reopened.
    fn tried(&self) -> u32;
}
