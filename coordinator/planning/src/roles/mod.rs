//! The decisions of the control plane as four state machines without input or output of their own.
//!
//! ```text
//!  RegisterQuery ─> explorer ──RunTrial──> profiler ──RunStage──> agents
//!                      ^  └──Propose──┐        └──Outcome──> explorer
//!     drift, reopen    │              v
//!  monitor ──Trigger───┴────────> scheduler ──SendTarget──> agents,  PlanChanged ──> app
//! ```
//!
//! Each takes `handle(now, Input)` and answers with effects as data; whoever drives it (an actor, the simulator, a test) performs
//! them. A role that wants to be called at some moment says so with `WakeAt`; calling it with `Tick` earlier or more often does no harm.

pub mod explorer;
pub mod monitor;
pub mod profiler;
pub mod scheduler;
