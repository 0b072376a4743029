//! The task behind an instance: serves its queue one request after another, replaces its process when that dies or hangs.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use compass_shared::model::cluster::Resources;
use compass_shared::model::plan::InstanceTarget;
use compass_shared::wire::v1::InstanceState;
use tokio::sync::{broadcast, mpsc, oneshot, watch};

use super::instance::Shared;
use super::pace::Restarts;
use super::process::{self, Process};
use super::protocol::{Answer, Request};
use super::{ProcessError, Purpose, WorkerEvent, WorkerEventKind, WorkerSettings};

/// One request in an instance's queue.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) request: Request,
    pub(super) payload: Vec<Bytes>,
    pub(super) queued: Instant,
    /// After this moment nobody wants the answer.
    pub(super) deadline: Option<Instant>,
    pub(super) reply: oneshot::Sender<Result<Served, ProcessError>>,
}

/// What came of a job.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) answer: Answer,
    pub(super) payload: Bytes,
    pub(super) wall: Duration,
    pub(super) cpu: Duration,
}

/// What the owner wants of the instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wish {
    Run,
    /// Finish the job at hand, then end.
    Stop,
    /// End at once.
    Kill,
}

/// Why serving a process came to an end.
enum End {
    /// As wished.
    Wished(Wish),
    /// The process is broken; the job it was at, if any, waits to be told why.
    Broken(
        io::Error,
        Option<oneshot::Sender<Result<Served, ProcessError>>>,
    ),
}

pub(super) struct Supervisor {
    pub(super) settings: Arc<WorkerSettings>,
    pub(super) target: InstanceTarget,
    pub(super) artifact: Option<PathBuf>,
    pub(super) purpose: Purpose,
    pub(super) shared: Arc<Shared>,
    pub(super) events: broadcast::Sender<WorkerEvent>,
    pub(super) jobs: mpsc::Receiver<Job>,
    pub(super) wish: watch::Receiver<Wish>,
    /// The share it is to have.
    pub(super) share: watch::Receiver<Resources>,
    /// When the device is free again by its own reckoning.
    pub(super) free_at: Instant,
}

impl Supervisor {
    /// Runs until the instance is stopped, killed or dropped.
    pub(super) async fn run(mut self, first: Process) {
        let mut process = first;
        let mut restarts = Restarts::default();
        let mut since = Instant::now();
        loop {
            match self.serve(&mut process).await {
                End::Wished(Wish::Kill) => {
                    process.kill().await;
                    break;
                }
                End::Wished(_) => {
                    process.close().await;
                    break;
                }
                End::Broken(error, at_hand) => {
                    self.shared.set(InstanceState::Starting, None);
                    let reason = process.bury(&error).await;
                    if let Some(reply) = at_hand {
                        let _ = reply.send(Err(ProcessError::Crashed(reason.clone())));
                    }
                    match self.replace(&mut restarts, reason, since.elapsed()).await {
                        Some(next) => process = next,
                        None => break,
                    }
                    since = Instant::now();
                    self.free_at = since;
                }
            }
        }
        self.shared.set(InstanceState::Draining, None);
        self.jobs.close();
        while let Some(job) = self.jobs.recv().await {
            self.shared.left_queue();
            let _ = job.reply.send(Err(ProcessError::Stopped));
        }
    }

    async fn serve(&mut self, process: &mut Process) -> End {
        loop {
            let job = tokio::select! {
                biased;
                wish = wished(&mut self.wish) => return End::Wished(wish),
                Ok(()) = self.share.changed() => {
                    self.target.share = *self.share.borrow_and_update();
                    process.set_share(&self.settings, &self.target.share);
                    self.shared.now_paced(process.pace);
                    continue;
                }
                error = process.ended() => return End::Broken(error, None),
                job = self.jobs.recv() => match job {
                    Some(job) => job,
                    None => return End::Wished(Wish::Kill),
                },
            };
            self.shared.left_queue();
            if job.reply.is_closed() {
                continue;
            }
            if job
                .deadline
                .is_some_and(|deadline| deadline <= Instant::now())
            {
                let _ = job.reply.send(Err(ProcessError::Expired));
                continue;
            }
            if let Some(end) = self.serve_one(process, job).await {
                return end;
            }
        }
    }

    async fn serve_one(&mut self, process: &mut Process, job: Job) -> Option<End> {
        let is_frame = matches!(job.request, Request::Frame { .. });
        let cpu_before = process::cpu_time(process.pid()).filter(|_| is_frame);
        let begun = job.queued.max(self.free_at);
        let stall_after = self.settings.stall_after;
        let payload = if process.wants_payload || !is_frame {
            &job.payload[..]
        } else {
            &[]
        };
        let asked = tokio::select! {
            biased;
            () = killed(&mut self.wish) => return Some(End::Wished(Wish::Kill)),
            asked = tokio::time::timeout(stall_after, process.ask(&job.request, payload)) => asked,
        };
        let (answer, payload) = match asked {
            Ok(Ok(answered)) => answered,
            Ok(Err(error)) => return Some(End::Broken(error, Some(job.reply))),
            Err(_) => {
                let error = io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("it did not answer within {stall_after:?}"),
                );
                return Some(End::Broken(error, Some(job.reply)));
            }
        };
        let ended = Instant::now();
        let (mut wall, mut cpu) = (ended - begun.min(ended), Duration::ZERO);
        if is_frame {
            cpu = stated_cpu(&answer)
                .or_else(|| process::cpu_time(process.pid())?.checked_sub(cpu_before?))
                .unwrap_or(Duration::ZERO);
            let done = process.pace.done_at(begun, ended, cpu);
            wall = done - begun.min(done);
            if let Some(until) = timer_for(ended, done) {
                tokio::select! {
                    biased;
                    () = killed(&mut self.wish) => return Some(End::Wished(Wish::Kill)),
                    () = tokio::time::sleep_until(until.into()) => {}
                }
            }
            // By the device's reckoning, so that a late timer does not slow it down.
            self.free_at = done;
            self.shared.measured(wall, cpu);
        }
        let _ = job.reply.send(Ok(Served {
            answer,
            payload,
            wall,
            cpu,
        }));
        None
    }

    /// Starts a successor, after pauses; `None` when the instance is to end.
    async fn replace(
        &mut self,
        restarts: &mut Restarts,
        reason: String,
        alive: Duration,
    ) -> Option<Process> {
        let (mut reason, mut alive) = (reason, Some(alive));
        loop {
            let (pause, failed) = restarts.crashed(alive);
            tracing::warn!(
                kind = %self.target.kind, instance = %self.target.instance, failed,
                pause_ms = pause.as_millis() as u64, "worker crashed: {reason}"
            );
            self.tell(WorkerEventKind::Crashed(reason.clone()));
            if failed {
                self.shared.set(InstanceState::Failed(reason.clone()), None);
                self.tell(WorkerEventKind::Failed(reason.clone()));
            }
            self.pause(pause, failed.then_some(&reason)).await?;
            let started = tokio::select! {
                biased;
                _ = wished(&mut self.wish) => return None,
                started = Process::start(&self.settings, &self.target, self.artifact.as_deref(), self.purpose) => started,
            };
            match started {
                Ok(process) => {
                    self.shared.restarted(&process);
                    self.tell(WorkerEventKind::Ready);
                    return Some(process);
                }
                Err(error) => (reason, alive) = (error.to_string(), None),
            }
        }
    }

    /// Waits before a restart. Frames wait along, unless the instance counts as failed. `None` when it is to end.
    async fn pause(&mut self, pause: Duration, failed: Option<&String>) -> Option<()> {
        let over = tokio::time::sleep(pause);
        tokio::pin!(over);
        loop {
            tokio::select! {
                biased;
                _ = wished(&mut self.wish) => return None,
                () = &mut over => return Some(()),
                job = self.jobs.recv(), if failed.is_some() => {
                    let job = job?;
                    self.shared.left_queue();
                    let reason = failed.cloned().unwrap_or_default();
                    let _ = job.reply.send(Err(ProcessError::Down(reason)));
                }
            }
        }
    }

    fn tell(&self, what: WorkerEventKind) {
        // Nobody listening is fine.
        let _ = self.events.send(WorkerEvent {
            instance: self.target.instance,
            purpose: self.purpose,
            what,
        });
    }
}

/// The runtime's timers count whole milliseconds and fire late, by half of one on average.
const TIMER_STEP: Duration = Duration::from_millis(1);

/// What to set a timer to so that holding a result ends about when it should; `None` when the rest is below a timer's step. What is
/// early here is made up for by the next frame, which cannot begin before the device is free by its own reckoning.
fn timer_for(ended: Instant, done: Instant) -> Option<Instant> {
    (done.saturating_duration_since(ended) >= TIMER_STEP).then(|| done - TIMER_STEP / 2)
}

/// Returns when the instance is to end; a dropped handle means at once.
async fn wished(wish: &mut watch::Receiver<Wish>) -> Wish {
    match wish.wait_for(|wish| *wish != Wish::Run).await {
        Ok(wish) => *wish,
        Err(_) => Wish::Kill,
    }
}

/// Returns when the instance is to end at once.
async fn killed(wish: &mut watch::Receiver<Wish>) {
    let _ = wish.wait_for(|wish| *wish == Wish::Kill).await;
}

fn stated_cpu(answer: &Answer) -> Option<Duration> {
    match answer {
        Answer::Output { cpu_us, .. }
        | Answer::Forward { cpu_us, .. }
        | Answer::Skipped { cpu_us } => cpu_us.map(Duration::from_micros),
        _ => None,
    }
}
