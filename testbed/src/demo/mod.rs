//! The demo: a fleet of real processes, a live video app, and a story in three phases.
//!
//! Start at [`story::run`]. Its world is a [`scenario`], its processes a [`fleet`]; one app's way through the events is a [`pass`], seen on a
//! terminal as a [`view`]. What a run measures is a [`record`], made by [`collect`], judged by [`verdict`] and drawn as one HTML file by
//! [`report`]. The app is a process of its own ([`app`]) that renders its film first ([`film`]) and talks to the story over its standard
//! streams ([`protocol`]). With `--real` the same story is told of a real video ([`footage`]) and detector ([`real`]), with the largest
//! network's word for the truth ([`golden`]), with `--video` of a user's own ([`video`]). With `--prove` nothing is played: [`prove`] shows that there are plans to be found.

mod api;
pub mod app;
mod arguments;
mod board;
mod collect;
mod film;
mod fleet;
mod footage;
mod golden;
mod measure;
mod networks;
mod pass;
mod protocol;
mod prove;
mod real;
pub mod record;
pub mod report;
mod scenario;
mod story;
mod summary;
mod verdict;
mod video;
mod view;

pub use arguments::DemoArguments;

impl DemoArguments {
    /// Runs the demo.
    pub(crate) fn run(&self) -> std::process::ExitCode {
        if self.prove {
            prove::run(self)
        } else {
            story::run(self)
        }
    }
}

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
