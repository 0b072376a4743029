//! `compass-testbed trace generate|check`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Subcommand;
use compass_shared::seed::Seed;

use super::Trace;
use super::synthesis::Profile;

/// Make or check bandwidth traces.
#[derive(Debug, Subcommand)]
pub enum TraceCommand {
    /// Write a synthetic trace
    Generate {
        /// Kind of link
        #[arg(long, value_enum)]
        profile: Profile,
        /// Length in seconds
        #[arg(long, default_value_t = 300)]
        seconds: u64,
        /// The same seed gives the same trace
        #[arg(long, default_value_t = 7)]
        seed: u64,
        /// The file to write
        #[arg(long, short)]
        output: PathBuf,
    },
    /// Read traces and print what they are
    Check {
        /// Files: CSV with time_s,bandwidth_mbps and, if known, rtt_ms
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
}

impl TraceCommand {
    /// Does it.
    pub fn run(self) -> anyhow::Result<()> {
        match self {
            Self::Generate {
                profile,
                seconds,
                seed,
                output,
            } => {
                let trace = profile.generate(Seed(seed), Duration::from_secs(seconds))?;
                let origin = format!("synthetic, profile {profile:?}, seed {seed}");
                std::fs::write(&output, trace.to_csv(&[&origin]))
                    .with_context(|| format!("cannot write {}", output.display()))?;
                println!("{}: {}", output.display(), describe(&trace));
            }
            Self::Check { files } => {
                for file in files {
                    let trace = Trace::load(&file)?;
                    println!("{}: {}", file.display(), describe(&trace));
                }
            }
        }
        Ok(())
    }
}

fn describe(trace: &Trace) -> String {
    let rates = || trace.steps().iter().map(|step| step.rate_bps);
    let mbps = |rate: u64| rate as f64 / 1e6;
    format!(
        "{} rows, {:.1} s, mean {:.2} Mbit/s, lowest {:.2}, highest {:.2}",
        trace.steps().len(),
        trace.duration().as_secs_f64(),
        trace.mean_bps() / 1e6,
        rates().min().map_or(0.0, mbps),
        rates().max().map_or(0.0, mbps),
    )
}
