//! A live video app: registers a query, streams a video to the fleet and prints what comes back.
//!
//! ```text
//! live-video --coordinator 127.0.0.1:7443 --authority SHA256 --token-file app.token --query lobby.yaml lobby.y4m
//! ```
//!
//! The video is a file, a folder of pictures, a camera (`/dev/video0`) or a URL; without ffmpeg only `.y4m`, `.mjpeg` and folders open.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use compass_client::{App, Event, Settings, source};
use compass_transport::ServerTrust;
use tokio::time::{Instant, MissedTickBehavior};

/// Streams a video through the fleet.
#[derive(Debug, Parser)]
struct Arguments {
    /// Where the coordinator listens for QUIC
    #[arg(long, default_value = "127.0.0.1:7443")]
    coordinator: String,
    /// Fingerprint of the fleet's authority, as the coordinator prints it
    #[arg(long, env = "COMPASS_AUTHORITY")]
    authority: String,
    /// File with a bearer token of role app (`compass token create --role app`)
    #[arg(long)]
    token_file: PathBuf,
    /// The query (YAML)
    #[arg(long)]
    query: PathBuf,
    /// Pictures per second, for sources that do not carry their rate
    #[arg(long, default_value_t = 10.0)]
    rate: f64,
    /// Begin again at the end of the video
    #[arg(long = "loop")]
    again: bool,
    /// The video
    video: String,
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let read = |path: &PathBuf| {
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
    };
    let coordinator: Vec<SocketAddr> = tokio::net::lookup_host(&arguments.coordinator)
        .await
        .with_context(|| format!("cannot resolve {}", arguments.coordinator))?
        .collect();
    let is_v4 = coordinator.first().is_none_or(SocketAddr::is_ipv4);
    let local = if is_v4 { "0.0.0.0:0" } else { "[::]:0" };
    let settings = Settings {
        coordinator,
        local: local.parse()?,
        server_trust: ServerTrust::AuthorityFingerprint(
            arguments
                .authority
                .parse()
                .context("--authority must be 64 hexadecimal digits")?,
        ),
        token: read(&arguments.token_file)?.trim().to_owned(),
        query_yaml: read(&arguments.query)?,
    };
    let mut video = source::open(&arguments.video, arguments.rate)?;
    let mut app = App::register(settings).await?;
    eprintln!(
        "query {} registered; streaming {}",
        app.query(),
        video.describe()
    );
    stream(&mut app, &mut video, &arguments).await?;
    // What is under way may still come back.
    let give_up = Instant::now() + Duration::from_secs(10);
    while app.in_flight() > 0 {
        match tokio::time::timeout_at(give_up, app.next_event()).await {
            Ok(Some(event)) => hear(event, &mut Summary::default()),
            Ok(None) | Err(_) => break,
        }
    }
    let c = app.counts();
    eprintln!(
        "{} frames: {} answered, {} late, {} skipped, {} expired, {} rejected",
        c.sent, c.answered, c.late, c.skipped, c.expired, c.rejected
    );
    Ok(())
}

async fn stream(
    app: &mut App,
    video: &mut Box<dyn source::Source>,
    arguments: &Arguments,
) -> anyhow::Result<()> {
    let mut began = Instant::now();
    let mut summary = Summary::default();
    let mut every_second = tokio::time::interval(Duration::from_secs(1));
    every_second.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut next = video.next_picture()?;
    loop {
        let Some(picture) = &next else {
            if !arguments.again {
                return Ok(());
            }
            *video = source::open(&arguments.video, arguments.rate)?;
            began = Instant::now();
            next = video.next_picture()?;
            anyhow::ensure!(next.is_some(), "{} holds no picture", arguments.video);
            continue;
        };
        tokio::select! {
            () = tokio::time::sleep_until(began + picture.at) => {
                if let Some(picture) = next.take() {
                    app.send(&picture.content, picture.bytes);
                }
                next = video.next_picture()?;
            }
            event = app.next_event() => match event {
                Some(Event::Closed(reason)) => anyhow::bail!("the query ended: {reason}"),
                Some(event) => hear(event, &mut summary),
                None => return Ok(()),
            },
            _ = every_second.tick() => summary.print(),
        }
    }
}

/// Results since the last line.
#[derive(Default)]
struct Summary {
    latencies_ms: Vec<f64>,
    missed: BTreeMap<String, u32>,
    last: String,
}

impl Summary {
    fn print(&mut self) {
        if self.latencies_ms.is_empty() && self.missed.is_empty() {
            return;
        }
        self.latencies_ms.sort_by(f64::total_cmp);
        let middle = self
            .latencies_ms
            .get(self.latencies_ms.len() / 2)
            .map_or_else(|| "-".to_owned(), |ms| format!("{ms:.0} ms"));
        let missed: Vec<_> = self
            .missed
            .iter()
            .map(|(outcome, n)| format!("{n} {outcome}"))
            .collect();
        println!(
            "{} results, median {middle}; {}  {}",
            self.latencies_ms.len(),
            missed.join(", "),
            self.last
        );
        *self = Self::default();
    }
}

fn hear(event: Event, summary: &mut Summary) {
    match event {
        Event::Result(answer) => {
            summary
                .latencies_ms
                .push(answer.latency.as_secs_f64() * 1e3);
            summary.last = String::from_utf8_lossy(&answer.payload)
                .chars()
                .take(120)
                .collect();
        }
        Event::Ended { outcome, .. } => {
            *summary
                .missed
                .entry(format!("{outcome:?}").to_lowercase())
                .or_default() += 1
        }
        Event::PlanChanged {
            generation,
            trigger,
            summary,
        } => println!("plan {generation} ({trigger}): {summary}"),
        Event::Infeasible(report) => println!("infeasible: {report}"),
        Event::Connection(what) => eprintln!("{what}"),
        Event::LabelsWanted { .. } | Event::Refused { .. } | Event::Closed(_) => {}
    }
}
