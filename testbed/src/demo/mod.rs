//! The demo: a fleet of real processes, a live video app, and a story in three phases.
//!
//! Start at [`record`]: what a run measures. The app is a process of its own ([`app`]) that renders its film first ([`film`]) and talks to
//! the story over its standard streams ([`protocol`]). [`report`] draws a run as one HTML file.

pub mod app;
mod film;
mod protocol;
pub mod record;
pub mod report;

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;

/// Makes a report again.
#[derive(Debug, Args)]
pub struct ReportArguments {
    /// What `demo --json` wrote
    run: PathBuf,
    /// Where the report goes; beside the run with the ending .html when absent
    #[arg(long, short)]
    output: Option<PathBuf>,
}

impl ReportArguments {
    /// Reads the run, writes the report.
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let name = self.run.display();
        let text = std::fs::read(&self.run).with_context(|| format!("cannot read {name}"))?;
        let run: record::RunRecord =
            serde_json::from_slice(&text).with_context(|| format!("{name} is no demo run"))?;
        let output = self
            .output
            .unwrap_or_else(|| self.run.with_extension("html"));
        std::fs::write(&output, report::render(&run))
            .with_context(|| format!("cannot write {}", output.display()))?;
        println!("{}", output.display());
        Ok(())
    }
}
