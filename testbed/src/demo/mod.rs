//! The demo: a fleet of real processes, a live video app, and a story in three phases.
//!
//! Start at [`record`]: what a run measures. The app is a process of its own ([`app`]) that renders its film first ([`film`]) and talks to
//! the story over its standard streams ([`protocol`]).

pub mod app;
mod film;
mod protocol;
pub mod record;
