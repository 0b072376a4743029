//! The daemon on every node: telemetry, workers, trials, data plane.

pub mod artifacts;
pub mod dataplane;
pub mod limits;
pub mod operators;
pub mod telemetry;
pub mod trials;
pub mod workers;

/// Runs the program with the given command line (the first argument is the program's name).
pub fn main(arguments: impl IntoIterator<Item = std::ffi::OsString>) -> std::process::ExitCode {
    let mut arguments = arguments.into_iter().skip(1);
    match arguments.next() {
        // Before everything else: a worker is one bare thread.
        Some(first) if first == "worker" => workers::worker_main(arguments),
        _ => std::process::ExitCode::SUCCESS,
    }
}
