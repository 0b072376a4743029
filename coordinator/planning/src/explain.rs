//! Why this plan and no other, as data for the store and as text for people.
//!
//! Start at [`Explanation`] and [`render`]. Deliberately absent: any choice.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use compass_shared::ids::{Generation, QueryId};
use compass_shared::model::plan::Expectation;
use compass_shared::model::trigger::Trigger;
use serde::{Deserialize, Serialize};

mod build;
pub use build::{explain, infeasible, nearest_and_fix};

#[cfg(test)]
mod tests;

/// Why a query has the plan it has.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// The query.
    pub query: QueryId,
    /// The plan.
    pub generation: Generation,
    /// What called for it.
    pub trigger: Trigger,
    /// The plan in one line.
    pub chosen: String,
    /// What to expect of it.
    pub expected: Expectation,
    /// Its place among the feasible ones, from 1.
    pub rank: usize,
    /// Combinations of configuration and placement that are feasible.
    pub feasible: usize,
    /// Combinations looked at (profiled configurations on today's placements).
    pub considered: usize,
    /// Configurations there are in all.
    pub space: u64,
    /// How many combinations each reason ruled out.
    pub ruled_out: BTreeMap<String, usize>,
    /// The most telling ones that were not chosen.
    pub rejected: Vec<RejectedPlan>,
    /// What the decision rests on, one fact a line.
    pub inputs: Vec<String>,
    /// Trials behind it.
    pub trials: u32,
    /// Stages that cost nothing because their outputs were still there.
    pub cache_hits: u32,
}

/// A plan that was not chosen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RejectedPlan {
    /// In one line.
    pub plan: String,
    /// Why, with the numbers.
    pub reason: String,
    /// What would have to be different for it to be feasible, where that can be said.
    pub flips_if: Option<String>,
    /// What to expect of it.
    pub expected: Expectation,
}

/// The explanation as people read it; `rejected` limits how many that were not chosen.
pub fn render(explanation: &Explanation, rejected: usize) -> String {
    let mut text = String::new();
    let e = explanation;
    let expected = &e.expected;
    let _ = writeln!(
        text,
        "chosen    #{} of {} feasible (of {} looked at, {} configurations in all): {}",
        e.rank, e.feasible, e.considered, e.space, e.chosen
    );
    let _ = writeln!(
        text,
        "expected  latency {:.0} ms [{:.0},{:.0}] · accuracy {:.2} [{:.2},{:.2}] (n={}) · cost {:.4} USD/h",
        expected.latency_ms.value,
        expected.latency_ms.low,
        expected.latency_ms.high,
        expected.accuracy.value,
        expected.accuracy.low,
        expected.accuracy.high,
        expected.accuracy.samples,
        expected.cost_usd_per_h
    );
    for plan in e.rejected.iter().take(rejected) {
        let _ = write!(text, "rejected  {}   {}", plan.plan, plan.reason);
        if let Some(flips_if) = &plan.flips_if {
            let _ = write!(text, "; feasible if {flips_if}");
        }
        text.push('\n');
    }
    let _ = writeln!(text, "inputs    {}", e.inputs.join(" · "));
    let _ = writeln!(
        text,
        "trigger   {}   {} trials, {} cache hits",
        e.trigger, e.trials, e.cache_hits
    );
    text
}
