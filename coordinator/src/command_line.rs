//! The process: arguments, logs, signals, exit code.

use std::ffi::OsString;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::configs::Configs;
use crate::run::Coordinator;
use crate::settings::{Overrides, Settings};

/// Exit code for a command line that is wrong, as `sysexits.h` has it.
const USAGE: u8 = 64;

/// The control plane of a Compass fleet.
#[derive(Debug, Parser)]
#[command(name = "compass-coordinator", version)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    options: Options,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve (the default).
    Run,
    /// Read settings, catalogue, pipelines and prices, and say what is wrong with them.
    Check,
}

#[derive(Debug, Args)]
struct Options {
    /// Settings file [default: /etc/compass/coordinator.toml, if there is one].
    #[arg(long, value_name = "FILE", global = true)]
    config: Option<PathBuf>,
    /// Where agents and apps connect (QUIC over UDP); port 0 lets the system choose.
    #[arg(long, value_name = "ADDRESS", global = true)]
    listen: Option<SocketAddr>,
    /// Where the HTTP API listens; port 0 lets the system choose.
    #[arg(long, value_name = "ADDRESS", global = true)]
    http: Option<SocketAddr>,
    /// Folder for the store, the authority and artifacts.
    #[arg(long, value_name = "FOLDER", global = true)]
    data_dir: Option<PathBuf>,
    /// Folder with catalogue.yaml, prices.yaml and pipelines/ [default: built in].
    #[arg(long, value_name = "FOLDER", global = true)]
    configs: Option<PathBuf>,
    /// Root of every random choice.
    #[arg(long, global = true)]
    seed: Option<u64>,
    /// Keep each query's first plan whatever happens, for comparison.
    #[arg(long = "static", global = true)]
    keep_first_plans: bool,
}

/// Runs the program with the given command line (the first argument is the program's name).
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let arguments = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(error) => {
            let is_asked_for = !error.use_stderr();
            // Fails only when there is nobody to read it.
            let _ = error.print();
            return if is_asked_for {
                ExitCode::SUCCESS
            } else {
                ExitCode::from(USAGE)
            };
        }
    };
    let filter = EnvFilter::try_from_env("COMPASS_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    // Fails when a test or an embedding program has set one up already, which is as good.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .try_init();
    let settings = match load(&arguments.options) {
        Ok(settings) => settings,
        Err(error) => return fail(&error),
    };
    match arguments.command {
        Some(Command::Check) => match Configs::load(settings.configs_dir.as_deref()) {
            Ok(configs) => {
                say(&format!(
                    "ok: {} operator kinds, {} pipelines, price sheet v{}",
                    configs.catalogue.0.len(),
                    configs.pipelines.len(),
                    configs.prices.version
                ));
                ExitCode::SUCCESS
            }
            Err(error) => fail(&error.into()),
        },
        Some(Command::Run) | None => serve(settings),
    }
}

fn load(options: &Options) -> anyhow::Result<Settings> {
    let overrides = Overrides {
        listen: options.listen,
        http: options.http,
        data_dir: options.data_dir.clone(),
        configs_dir: options.configs.clone(),
        seed: options.seed,
        replan: options.keep_first_plans.then_some(false),
    };
    Ok(Settings::load(options.config.as_deref(), overrides)?)
}

fn serve(settings: Settings) -> ExitCode {
    let system = actix::System::with_tokio_rt(|| {
        tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .thread_name("coordinator")
            .build()
            .expect("the system gives threads for the runtime")
    });
    match system.block_on(until_stopped(settings)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

async fn until_stopped(settings: Settings) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut coordinator = Coordinator::start(settings).await?;
    say(&coordinator.ready_line());
    let failure = tokio::select! {
        _ = terminate.recv() => None,
        _ = interrupt.recv() => None,
        reason = coordinator.failed() => Some(reason),
    };
    tracing::info!(failure, "shutting down");
    coordinator.shut_down().await;
    match failure {
        Some(reason) => Err(anyhow::anyhow!("the coordinator cannot go on: {reason}")),
        None => Ok(()),
    }
}

/// One line on standard output, at once: others wait for it.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // Fails only when there is nobody to read it.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

fn fail(error: &anyhow::Error) -> ExitCode {
    let mut out = std::io::stderr().lock();
    let _ = writeln!(out, "error: {error:#}");
    ExitCode::FAILURE
}
