//! The command line of `compass-testbed demo`.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use compass_shared::spec::quantity::WrittenDuration;

use super::real;
use super::scenario::Scenario;
use super::video;
use super::view::View;

/// A fleet of real processes, a live video app, and a story in three phases: day, uplink cut to a twentieth, lights out.
///
/// Ends with 0 when every phase met every SLO, with 1 when something went wrong, with 3 when this host was too slow for the figures to mean
/// anything; the reasons are printed and stand in the report.
#[derive(Debug, Clone, Args)]
pub struct DemoArguments {
    /// A real pedestrian video and person detector instead of rendered scenes and the demo's own networks; needs `compass-testbed fetch` before
    #[arg(long)]
    pub real: bool,
    /// Your own video instead: a file (any that ffmpeg reads), a folder of pictures, a camera (/dev/video0) or an address (rtsp://, http:// …);
    /// at least 10 s, of which the first 40 are shown. The person detector of `compass-testbed fetch` looks at it where that is there, else the
    /// demo's own networks, which know rendered scenes only; what the largest network finds counts as the truth
    #[arg(long, value_name = "FILE|URL", conflicts_with = "real")]
    pub video: Option<String>,
    /// Plain lines instead of the live view
    #[arg(long)]
    pub headless: bool,
    /// Write what was measured (JSON)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Where the report goes (HTML)
    #[arg(long, value_name = "FILE", default_value = "compass-demo.html")]
    pub report: PathBuf,
    /// Of scenes, links and planner: the same seed shows the same film
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Keep logs and data of every process in this folder
    #[arg(long, value_name = "FOLDER")]
    pub keep: Option<PathBuf>,
    /// Leave the first plan alone whatever happens: shows what re-planning is good for, and fails
    #[arg(long = "static")]
    pub keep_first_plan: bool,
    /// Do not compare with the day's plan left alone after the story
    #[arg(long)]
    pub no_comparison: bool,
    /// Play nothing: look at every configuration on every placement instead, and show that each phase has a plan that meets all SLOs
    #[arg(long, conflicts_with_all = ["keep", "keep_first_plan", "no_comparison", "fault", "loss", "right_clocks"])]
    pub prove: bool,
    /// Kill a process in the story: kill-agent@T or kill-coordinator@T, T seconds after the first answer
    #[arg(long, value_name = "FAULT@T")]
    pub fault: Option<Fault>,
    /// Lose this part of all packets, e.g. 2%
    #[arg(long, value_name = "PERCENT")]
    pub loss: Option<Percent>,
    /// Let all clocks be right (by default the agents' are wrong by hours)
    #[arg(long)]
    pub right_clocks: bool,
    /// Length of the day
    #[arg(long, value_name = "DURATION", hide = true)]
    pub day: Option<WrittenDuration>,
    /// Length of the phase with the uplink cut
    #[arg(long, value_name = "DURATION", hide = true)]
    pub cut: Option<WrittenDuration>,
    /// Length of the phase in the dark
    #[arg(long, value_name = "DURATION", hide = true)]
    pub dark: Option<WrittenDuration>,
}

/// What is killed, and when.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fault {
    /// What.
    pub kind: FaultKind,
    /// After the first answer.
    pub at: Duration,
}

/// What is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// The agent that runs the detector (or, where that is the camera's own node, the cloud's).
    KillAgent,
    /// The coordinator; it is started again.
    KillCoordinator,
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is not kill-agent@T or kill-coordinator@T with T in seconds, for example kill-agent@8"
            )
        };
        let (kind, at) = text.split_once('@').ok_or_else(wrong)?;
        let kind = match kind {
            "kill-agent" => FaultKind::KillAgent,
            "kill-coordinator" => FaultKind::KillCoordinator,
            _ => return Err(wrong()),
        };
        let seconds: f64 = at.trim_end_matches('s').parse().map_err(|_| wrong())?;
        if !(0.0..=600.0).contains(&seconds) {
            return Err(wrong());
        }
        Ok(Self {
            kind,
            at: Duration::from_secs_f64(seconds),
        })
    }
}

/// A part of the whole.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Percent(
    /// 0 to 1.
    pub f64,
);

impl FromStr for Percent {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text
            .strip_suffix('%')
            .ok_or_else(|| format!("{text:?} has no unit: write for example 2%"))?;
        let percent: f64 = number
            .trim()
            .parse()
            .map_err(|_| format!("{text:?} is not a percentage such as 2%"))?;
        if (0.0..=50.0).contains(&percent) {
            Ok(Self(percent / 100.0))
        } else {
            Err(format!("{text:?} is not between 0% and 50%"))
        }
    }
}

impl DemoArguments {
    /// The demo's world with what the command line changes of it.
    pub(crate) fn scenario(&self, view: &mut dyn View) -> anyhow::Result<Scenario> {
        let mut scenario = match &self.video {
            Some(video) => video::scenario(video, view)?,
            None if self.real => real::scenario(view)?,
            None => Scenario::new()?,
        };
        if let Some(Percent(loss)) = self.loss {
            scenario.loss = loss;
        }
        if self.right_clocks {
            for node in &mut scenario.nodes {
                node.clock_offset_s = 0;
            }
        }
        let course = &mut scenario.course;
        for (asked, length) in [
            (&self.day, &mut course.day),
            (&self.cut, &mut course.cut),
            (&self.dark, &mut course.dark),
        ] {
            if let Some(asked) = asked {
                *length = asked.0;
            }
        }
        Ok(scenario)
    }

    /// The flags that make the story another one, as typed.
    pub(crate) fn flags(&self) -> Vec<String> {
        let mut flags = Vec::new();
        if self.real {
            flags.push("--real".to_owned());
        }
        if let Some(video) = &self.video {
            flags.push(format!("--video {}", video::shown(video)));
        }
        if self.keep_first_plan {
            flags.push("--static".to_owned());
        }
        if let Some(Fault { kind, at }) = self.fault {
            let kind = match kind {
                FaultKind::KillAgent => "kill-agent",
                FaultKind::KillCoordinator => "kill-coordinator",
            };
            flags.push(format!("--fault {kind}@{}", at.as_secs_f64()));
        }
        if let Some(Percent(loss)) = self.loss {
            flags.push(format!("--loss {}%", loss * 100.0));
        }
        if self.right_clocks {
            flags.push("--right-clocks".to_owned());
        }
        for (name, length) in [("day", &self.day), ("cut", &self.cut), ("dark", &self.dark)] {
            if let Some(length) = length {
                flags.push(format!("--{name} {}s", length.0.as_secs_f64()));
            }
        }
        flags
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        demo: DemoArguments,
    }

    #[test]
    fn what_plays_nothing_takes_nothing_that_changes_the_play() {
        let parse = |arguments: &[&str]| {
            let line = ["demo"].iter().chain(arguments);
            Line::try_parse_from(line).map(|line| line.demo)
        };
        assert!(parse(&["--prove", "--real", "--json", "x"]).unwrap().prove);
        for other in ["--static", "--loss=2%", "--fault=kill-agent@8", "--keep=x"] {
            assert!(parse(&["--prove", other]).is_err(), "{other}");
        }
        let own = parse(&["--video", "a b.mp4"]).unwrap();
        assert_eq!(own.flags(), ["--video a b.mp4"]);
        assert!(parse(&["--video", "a.mp4", "--real"]).is_err());
        // A name that looks like an option must be written as a value.
        assert!(parse(&["--video", "-a.mp4"]).is_err());
        assert!(parse(&["--video=-a.mp4"]).is_ok());
    }

    #[test]
    fn faults_and_percentages_are_read_strictly() {
        let fault: Fault = "kill-agent@8".parse().unwrap();
        assert_eq!(fault.kind, FaultKind::KillAgent);
        assert_eq!(fault.at, Duration::from_secs(8));
        for wrong in [
            "kill-agent",
            "kill-agent@",
            "kill-agent@NaN",
            "kill@3",
            "kill-coordinator@-1",
        ] {
            let error = wrong.parse::<Fault>().unwrap_err();
            assert!(error.contains("for example"), "{error}");
        }
        assert_eq!("2%".parse::<Percent>().unwrap(), Percent(0.02));
        assert!("2".parse::<Percent>().unwrap_err().contains("no unit"));
        assert!("80%".parse::<Percent>().is_err());
    }
}
