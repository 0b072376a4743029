//! Which query gets which candidate, under the capacity of every node and link.
//!
//! Start at [`schedule`].

use serde::{Deserialize, Serialize};

/// Constants of choosing and switching plans.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ScheduleSettings {
    /// A cheaper candidate replaces a plan in force only if it saves at least this part of its cost: a switch is not free.
    pub switch_gain_min: f64,
    /// New instances must be ready within this time, else the switch is called off.
    pub warm_deadline: std::time::Duration,
    /// A second repair for the same cause within this time is an alarm.
    pub same_cause_within: std::time::Duration,
    /// A plan that a node could not carry out is not chosen again for this long.
    pub avoid_failed_for: std::time::Duration,
}

impl Default for ScheduleSettings {
    fn default() -> Self {
        Self {
            switch_gain_min: 0.1,
            warm_deadline: std::time::Duration::from_secs(30),
            same_cause_within: std::time::Duration::from_secs(20),
            avoid_failed_for: std::time::Duration::from_secs(60),
        }
    }
}
