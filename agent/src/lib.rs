//! The daemon on every node: telemetry, workers, trials, data plane.
//!
//! Start at `cli` (how it is put together), then [`session`] (what it hears and says) and [`node`] (how a target is carried out).
//! [`reconcile`] and the data plane's core decide without I/O; [`workers`] run every operator in a process of its own.

pub mod artifacts;
mod cli;
pub mod dataplane;
pub mod limits;
pub mod node;
pub mod operators;
pub mod reconcile;
pub mod session;
pub mod settings;
pub mod store;
pub mod telemetry;
pub mod trials;
pub mod workers;

use std::ffi::OsString;
use std::process::ExitCode;

/// Runs the program with the given command line (the first argument is the program's name).
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    cli::main(arguments, &[])
}

/// Runs the program within another executable that becomes it with the `leading` arguments.
pub fn main_within(arguments: impl IntoIterator<Item = OsString>, leading: &[&str]) -> ExitCode {
    cli::main(arguments, leading)
}
