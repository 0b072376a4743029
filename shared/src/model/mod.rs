//! The domain model: what is planned, on what, for whom, and what was measured.
//!
//! Start at [`query::Query`] (what an app asks for), [`plan::QueryPlan`] (what it gets) and [`cluster::Cluster`] (what there is).
//! Everything here is data; decisions live in `compass-planning`, execution in the agents.

pub mod capacity;
pub mod catalogue;
pub mod cluster;
pub mod outcome;
pub mod pipeline;
pub mod plan;
pub mod query;
pub mod telemetry;
pub mod trial;
pub mod trigger;
