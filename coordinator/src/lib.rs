//! The control plane: actors over the planning core, QUIC gateway, durable store, HTTP API.
//!
//! ```text
//!  agents, apps ══QUIC══> gateway ──facts──> actors (monitor, scheduler, profiler, explorers) ──effects──> store, dispatch, sessions
//!                            │                  ^                                                             │
//!                            └─ fleet, queries ─┘ (latest values)                                             v
//!  people ──HTTP──> api ──> control ──────────────────────────────────────────────────────────────> store (acknowledged = durable)
//! ```
//!
//! Start at [`main`] for the process, [`run::Coordinator`] for its parts, [`plane::Plane`] for what they share. Decisions are not made here: they are
//! `compass-planning`'s; this crate carries facts to it and effects from it.

pub mod actors;
pub mod api;
pub mod artifacts;
pub mod clock;
mod command_line;
pub mod compute;
pub mod configs;
pub mod control;
pub mod dispatch;
pub mod events;
pub mod fleet;
pub mod gateway;
pub mod metrics;
pub mod plane;
pub mod queries;
pub mod run;
pub mod settings;
pub mod store;
pub mod takeover;
#[cfg(test)]
mod testing;
pub mod tokens;

pub use command_line::main;
