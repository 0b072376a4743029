//! `compass-agent`: see the library of this package.

fn main() -> std::process::ExitCode {
    compass_agent::main(std::env::args_os())
}
