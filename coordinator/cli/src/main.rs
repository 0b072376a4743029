//! `compass`: see the library of this package.

fn main() -> std::process::ExitCode {
    compass_cli::main(std::env::args_os())
}
