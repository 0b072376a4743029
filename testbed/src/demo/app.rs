//! The demo's app: a live video app that happens to know the truth. Runs as a process of its own; see [`super::protocol`].

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use compass_client::{Answer, App, Event, Settings};
use compass_shared::evaluate::HeldAnswer;
use compass_shared::ids::FrameId;
use compass_shared::model::catalogue::Evaluator;
use compass_shared::model::outcome::Outcome;
use compass_transport::ServerTrust;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::film::{Film, Shot};
use super::protocol::{AppConfig, Command, Said};
use super::record::quantile;

/// Frames whose truth is remembered: as long as any frame can be under way or in a sample set.
const REMEMBERED: usize = 1200;

/// Waiting for the last frames after [`Command::Finish`].
const GOODBYE: Duration = Duration::from_secs(15);

/// Runs the app until it is told to finish.
pub(crate) fn run(config: &Path) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(config)
        .with_context(|| format!("cannot read {}", config.display()))?;
    let config: AppConfig = serde_json::from_str(&text)
        .with_context(|| format!("{} is no app configuration", config.display()))?;
    let film = Film::render(&config.film, config.rate_hz)?;
    say(&Said::Rendered {
        frames: film.day.len() + film.dark.len(),
        bytes: film.bytes(),
    })?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let outcome = runtime.block_on(live(&config, film));
    if let Err(error) = &outcome {
        say(&Said::Failed {
            reason: format!("{error:#}"),
        })?;
    }
    outcome
}

fn say(said: &Said) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    serde_json::to_writer(&mut stdout, said)?;
    stdout.write_all(b"\n")?;
    Ok(stdout.flush()?)
}

async fn live(config: &AppConfig, film: Film) -> anyhow::Result<()> {
    let read = |path: &Path| {
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
    };
    let settings = Settings {
        coordinator: vec![config.coordinator],
        local: config.local,
        server_trust: ServerTrust::AuthorityFingerprint(
            config
                .authority
                .parse()
                .context("the authority's fingerprint")?,
        ),
        token: read(&config.token_file)?.trim().to_owned(),
        query_yaml: read(&config.query_file)?,
    };
    let mut commanded = commands();
    match commanded.recv().await {
        Some(Command::Register) => {}
        other => anyhow::bail!("expected to be told to register, not {other:?}"),
    }
    let app = App::register(settings).await?;
    let mut camera = Camera::new(app, film);
    let zero_unix_ms = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)?
        .as_secs_f64()
        * 1e3;
    say(&Said::Registered { zero_unix_ms })?;

    let mut next = Instant::now();
    let every = Duration::from_secs_f64(1.0 / config.rate_hz);
    loop {
        tokio::select! {
            biased;
            () = tokio::time::sleep_until(next) => {
                camera.capture(next)?;
                next += every;
            }
            event = camera.app.next_event() => match event {
                Some(event) => camera.hear(event).await?,
                None => return Ok(()),
            },
            command = commanded.recv() => match command {
                Some(Command::LightsOut) => camera.is_dark = true,
                Some(Command::Register) => {}
                Some(Command::Finish) | None => break,
            },
        }
    }
    camera.finish().await
}

/// What the demo says on standard input; ends when that does.
fn commands() -> mpsc::Receiver<Command> {
    let (commands, commanded) = mpsc::channel(8);
    tokio::spawn(async move {
        let mut lines = BufReader::new(tokio::io::stdin()).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            match serde_json::from_str::<Command>(&line) {
                Ok(command) if commands.send(command).await.is_ok() => {}
                _ => return,
            }
        }
    });
    commanded
}

/// A frame under way or waiting to be scored.
#[derive(Debug, Clone)]
struct Sent {
    at_ms: f64,
    truth: Arc<[u8]>,
    counted: bool,
    end: Option<End>,
}

#[derive(Debug, Clone)]
struct End {
    outcome: Outcome,
    latency_ms: Option<f64>,
    generation: Option<u64>,
    boxes: Option<Vec<u8>>,
}

struct Camera {
    app: App,
    film: Film,
    began: Instant,
    is_dark: bool,
    shown_day: usize,
    shown_dark: usize,
    planned: bool,
    sent: BTreeMap<FrameId, Sent>,
    /// The oldest frame not yet scored, 0 before the first: frames are scored in order, for an answer holds until the next.
    next_to_score: FrameId,
    held: HeldAnswer,
    lateness_ms: Vec<f64>,
}

impl Camera {
    fn new(app: App, film: Film) -> Self {
        Self {
            app,
            film,
            began: Instant::now(),
            is_dark: false,
            shown_day: 0,
            shown_dark: 0,
            planned: false,
            sent: BTreeMap::new(),
            next_to_score: FrameId(0),
            held: HeldAnswer::new(Evaluator::DetectionF1),
            lateness_ms: Vec::new(),
        }
    }

    fn now_ms(&self) -> f64 {
        self.began.elapsed().as_secs_f64() * 1e3
    }

    fn capture(&mut self, due: Instant) -> anyhow::Result<()> {
        self.lateness_ms.push(due.elapsed().as_secs_f64() * 1e3);
        let Shot { jpeg, truth } = if self.is_dark {
            if self.shown_dark == 0 {
                say(&Said::Dark {
                    at_ms: self.now_ms(),
                })?;
            }
            self.shown_dark += 1;
            self.film.dark[(self.shown_dark - 1) % self.film.dark.len()].clone()
        } else {
            self.shown_day += 1;
            self.film.day[(self.shown_day - 1) % self.film.day.len()].clone()
        };
        let at_ms = self.now_ms();
        let frame = self.app.send("jpeg", jpeg.to_vec());
        if self.next_to_score == FrameId(0) {
            self.next_to_score = frame;
        }
        self.sent.insert(
            frame,
            Sent {
                at_ms,
                truth,
                counted: self.planned,
                end: None,
            },
        );
        Ok(())
    }

    async fn hear(&mut self, event: Event) -> anyhow::Result<()> {
        match event {
            Event::Result(answer) => self.answered(answer)?,
            Event::Ended { frame, outcome } => self.ended(
                frame,
                End {
                    outcome,
                    latency_ms: None,
                    generation: None,
                    boxes: None,
                },
            )?,
            Event::PlanChanged {
                generation,
                trigger,
                summary,
            } => {
                if !self.planned {
                    self.planned = true;
                    // How punctual the camera was while operators were being profiled is no part of the story.
                    self.lateness_ms.clear();
                }
                say(&Said::Plan {
                    at_ms: self.now_ms(),
                    generation: generation.0,
                    trigger: trigger.to_string(),
                    summary,
                })?;
            }
            Event::Infeasible(report) => say(&Said::Infeasible { report })?,
            Event::LabelsWanted { set, frames } => {
                let labels = frames
                    .into_iter()
                    .filter_map(|frame| Some((frame, self.sent.get(&frame)?.truth.to_vec())));
                self.app.label(set, labels.collect()).await;
            }
            Event::Connection(what) => say(&Said::Connection {
                at_ms: self.now_ms(),
                what,
            })?,
            // Frames of a camera are no requests.
            Event::Refused { .. } => {}
            Event::Closed(reason) => anyhow::bail!("the query ended: {reason}"),
        }
        Ok(())
    }

    fn answered(&mut self, answer: Answer) -> anyhow::Result<()> {
        let end = End {
            outcome: answer.outcome,
            latency_ms: Some(answer.latency.as_secs_f64() * 1e3),
            generation: Some(answer.generation.0),
            boxes: Some(boxes_of(&answer.payload)?),
        };
        self.ended(answer.frame, end)
    }

    fn ended(&mut self, frame: FrameId, end: End) -> anyhow::Result<()> {
        if let Some(sent) = self.sent.get_mut(&frame) {
            sent.end.get_or_insert(end);
        }
        self.score()
    }

    /// Scores and reports frames in order up to the first that is still under way.
    fn score(&mut self) -> anyhow::Result<()> {
        while let Some(sent) = self.sent.get(&self.next_to_score) {
            let Some(end) = sent.end.clone() else { break };
            let frame = self.next_to_score;
            self.next_to_score = frame.next();
            let late = end.outcome == Outcome::Late;
            // A late answer is too old to show, so it does not replace the one held.
            let boxes = end.boxes.as_deref().filter(|_| !late);
            let accuracy = self.held.score(&sent.truth, boxes)?;
            let Sent { at_ms, counted, .. } = *sent;
            if !counted {
                continue;
            }
            if let Some(accuracy) = accuracy {
                self.app.accuracy(accuracy);
            }
            let End {
                outcome,
                latency_ms,
                generation,
                ..
            } = end;
            say(&Said::Frame {
                frame: frame.0,
                at_ms,
                latency_ms,
                outcome,
                generation,
                accuracy,
            })?;
        }
        while self.sent.len() > REMEMBERED
            && self
                .sent
                .first_key_value()
                .is_some_and(|(frame, _)| *frame < self.next_to_score)
        {
            self.sent.pop_first();
        }
        Ok(())
    }

    async fn finish(mut self) -> anyhow::Result<()> {
        let give_up = Instant::now() + GOODBYE;
        while self.app.in_flight() > 0 {
            match tokio::time::timeout_at(give_up, self.app.next_event()).await {
                Ok(Some(event)) => self.hear(event).await?,
                Ok(None) | Err(_) => break,
            }
        }
        self.app.withdraw().await;
        while let Ok(Some(event)) = tokio::time::timeout_at(give_up, self.app.next_event()).await {
            if matches!(event, Event::Closed(_)) {
                break;
            }
            self.hear(event).await?;
        }
        say(&Said::Goodbye {
            counts: self.app.counts(),
            timer_lateness_p99_ms: quantile(&self.lateness_ms, 0.99),
        })
    }
}

/// The boxes within an answer of the responder, in the encoding of detections.
pub(super) fn boxes_of(answer: &[u8]) -> anyhow::Result<Vec<u8>> {
    #[derive(serde::Deserialize)]
    struct WithBoxes {
        boxes: serde_json::Value,
    }
    let answer: WithBoxes =
        serde_json::from_slice(answer).context("the answer is not what the responder gives")?;
    Ok(serde_json::to_vec(&answer.boxes)?)
}
