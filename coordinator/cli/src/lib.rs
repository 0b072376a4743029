//! `compass`: the command line for people and scripts.
//!
//! Start at [`arguments`] (what can be typed) and [`commands`] (what it does). Data goes to standard output, progress and questions to
//! standard error. Exit codes: 0 ok, 1 error, 64 usage; `query plan --detailed-exitcode`: 0 no change, 2 change, 3 infeasible.

mod arguments;
mod commands;
mod context;
mod http;
mod output;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;

/// Runs the program with the given command line (the first argument is the program's name).
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let arguments = match arguments::Arguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(error) => {
            let is_question = !error.use_stderr();
            // Nothing is left to do when the terminal is gone.
            let _ = error.print();
            return if is_question {
                ExitCode::SUCCESS
            } else {
                ExitCode::from(64)
            };
        }
    };
    match commands::run(arguments) {
        Ok(code) => code,
        Err(error) if output::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
