//! The pure planning core: what to try, what was learnt, which plan each query gets, and how the fleet moves from one plan to the next.
//!
//! Start at [`roles`]: four state machines (`handle(now, Input) -> Vec<Effect>`) that the coordinator's actors wrap. Under them:
//!
//! | module | answers |
//! |---|---|
//! | [`space`] | which configurations and placements there are |
//! | [`profile`] | what trials and live work have shown of a query |
//! | [`surrogate`] | what to expect of a configuration nobody ran |
//! | [`predict`] | latency and cost of a configuration on a placement with given shares |
//! | [`candidate`] | the plans worth considering on today's fleet, with the least shares that still meet the SLOs |
//! | [`search`] | what to try next (ask, tell) |
//! | [`schedule`] | which query gets which candidate |
//! | [`diff`] | the steps from one assignment to the next |
//! | [`targets`] | what each node has to do for the plans in force |
//! | [`check`] | whether all of that is allowed (shares no code with the planner) |
//! | [`detect`] | when measured behaviour calls for a re-plan |
//! | [`explain`] | why this plan and no other |
//!
//! This crate depends on no asynchronous runtime, reads no clock, draws no entropy of its own and iterates no unordered map; a test
//! over the dependency tree and property tests keep it so.

pub mod candidate;
pub mod check;
pub mod detect;
pub mod diff;
pub mod explain;
pub mod predict;
pub mod profile;
pub mod roles;
pub mod schedule;
pub mod search;
pub mod space;
pub mod surrogate;
pub mod targets;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

/// Every constant of the planner by name; one set for all applications.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Of the latency and cost model.
    pub predict: predict::PredictSettings,
    /// Of the search.
    pub search: search::SearchSettings,
    /// Of sampling and trials.
    pub trial: roles::profiler::TrialSettings,
    /// Of choosing and switching plans.
    pub schedule: schedule::ScheduleSettings,
    /// Of detection.
    pub detect: detect::DetectSettings,
}
