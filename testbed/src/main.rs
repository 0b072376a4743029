//! `compass-testbed`: see the library of this package.

fn main() -> std::process::ExitCode {
    compass_testbed::main(std::env::args_os())
}
