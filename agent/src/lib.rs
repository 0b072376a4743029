//! The daemon on every node: telemetry, workers, trials, data plane.

pub mod artifacts;
pub mod limits;
pub mod operators;
pub mod telemetry;
pub mod trials;
pub mod workers;

/// Runs the program with the given command line (the first argument is the program's name).
pub fn main(_arguments: impl IntoIterator<Item = std::ffi::OsString>) -> std::process::ExitCode {
    std::process::ExitCode::SUCCESS
}
