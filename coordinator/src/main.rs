//! `compass-coordinator`: see the library of this package.

fn main() -> std::process::ExitCode {
    compass_coordinator::main(std::env::args_os())
}
