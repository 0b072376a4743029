//! Benchmarks that are run by hand: what one hop costs beside bare QUIC ([`hop`]), what an idle agent costs ([`agent`]).
//!
//! Start at [`BenchCommand`]. Figures depend on the machine and on what else it does, so each run says how busy the machine was, compares
//! with something measured in the same run, and judges nothing: the aims are printed beside the figures.

mod agent;
mod awake;
mod bare;
mod chain;
mod hop;
mod worker;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};
use serde::Serialize;

use crate::demo::record::quantile;

/// What can be measured.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Latency that one hop between two nodes adds, as a ratio to bare quinn in the same run
    Hop(HopArguments),
    /// Memory and CPU of an agent that has joined and does nothing
    Agent(AgentArguments),
}

/// See [`BenchCommand::Hop`].
#[derive(Debug, Args)]
pub struct HopArguments {
    /// Write the figures as JSON into this file beside the table, or without a name to standard output in its place
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    /// How long to measure the hops; the hand-over to workers takes a quarter more
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,
    /// Rest before each exchange, hop or bare, so that none competes with what the one before set off
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(..=1000))]
    pause_ms: u64,
    /// Do not keep idle cores awake: waking one, above all a virtual one, then takes part in each figure
    #[arg(long)]
    let_cores_sleep: bool,
}

/// See [`BenchCommand::Agent`].
#[derive(Debug, Args)]
pub struct AgentArguments {
    /// Write the figures as JSON into this file beside the table, or without a name to standard output in its place
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    /// How long to watch the agent
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(2..=3600))]
    seconds: u64,
    /// The agent's program; `compass-agent` beside this one when there is one, else this one in that role
    #[arg(long)]
    program: Option<PathBuf>,
}

impl BenchCommand {
    /// Measures and prints.
    pub(crate) fn run(self) -> anyhow::Result<()> {
        match self {
            Self::Hop(arguments) => hop::run(&arguments),
            Self::Agent(arguments) => agent::run(&arguments),
        }
    }
}

/// Under which circumstances something was measured.
#[derive(Debug, Clone, Serialize)]
struct Circumstances {
    /// `debug` or `release`
    build: &'static str,
    cores: usize,
    /// Processes that wanted to run over the last minute, at the end.
    load_1min: Option<f64>,
}

impl Circumstances {
    fn now() -> Self {
        let load = std::fs::read_to_string("/proc/loadavg").ok();
        Self {
            build: if cfg!(debug_assertions) {
                "debug"
            } else {
                "release"
            },
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            load_1min: load.and_then(|text| text.split_whitespace().next()?.parse().ok()),
        }
    }
}

impl std::fmt::Display for Circumstances {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} build, {} cores", self.build, self.cores)?;
        match self.load_1min {
            Some(load) => write!(f, ", load {load:.1}"),
            None => Ok(()),
        }
    }
}

/// Times in microseconds, summed up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Times {
    p50_us: f64,
    p99_us: f64,
    samples: usize,
}

impl Times {
    /// # Errors
    /// When nothing was measured.
    fn of(times: &[Duration]) -> anyhow::Result<Self> {
        anyhow::ensure!(!times.is_empty(), "nothing was measured");
        let micros: Vec<f64> = times.iter().map(|time| time.as_secs_f64() * 1e6).collect();
        Ok(Self {
            p50_us: quantile(&micros, 0.5),
            p99_us: quantile(&micros, 0.99),
            samples: micros.len(),
        })
    }
}

/// Gives the figures out as asked: the table that `print` makes of them, JSON, or both.
fn show<F: Serialize>(
    json: Option<&Path>,
    figures: &F,
    print: impl FnOnce(&F),
) -> anyhow::Result<()> {
    let is_stdout = json.is_some_and(|path| path.as_os_str() == "-");
    if !is_stdout {
        print(figures);
    }
    let Some(path) = json else { return Ok(()) };
    let mut text = serde_json::to_string_pretty(figures)?;
    text.push('\n');
    if is_stdout {
        return Ok(std::io::stdout().write_all(text.as_bytes())?);
    }
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// A runtime like that of an agent: one thread beside the one that starts it.
fn node_runtime(name: &str) -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name(name)
        .enable_all()
        .build()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(subcommand)]
        what: BenchCommand,
    }

    fn parse(line: &str) -> Result<BenchCommand, clap::Error> {
        let words = std::iter::once("bench").chain(line.split_whitespace());
        Line::try_parse_from(words).map(|line| line.what)
    }

    #[test]
    fn what_can_be_typed() {
        let Ok(BenchCommand::Hop(hop)) = parse("hop --json hop.json --seconds 5") else {
            panic!("that is a bench of hops");
        };
        assert_eq!((hop.seconds, hop.pause_ms), (5, 2));
        assert_eq!(hop.json, Some("hop.json".into()));
        let Ok(BenchCommand::Hop(hop)) = parse("hop --json") else {
            panic!("JSON needs no file");
        };
        assert_eq!(hop.json, Some("-".into()));
        let Ok(BenchCommand::Agent(agent)) = parse("agent") else {
            panic!("that is a bench of an agent");
        };
        assert_eq!((agent.seconds, agent.json), (60, None));
        for wrong in [
            "hop --seconds 0",
            "agent --seconds 1",
            "hop -s",
            "",
            "lunch",
        ] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn times_are_summed_up_by_nearest_rank() {
        let times: Vec<Duration> = (1..=200).rev().map(Duration::from_micros).collect();
        let expected = Times {
            p50_us: 100.0,
            p99_us: 198.0,
            samples: 200,
        };
        let found = Times::of(&times).unwrap();
        assert!((found.p50_us - expected.p50_us).abs() < 1e-6);
        assert!((found.p99_us - expected.p99_us).abs() < 1e-6);
        assert_eq!(found.samples, 200);
        assert!(Times::of(&[]).is_err());
    }
}
