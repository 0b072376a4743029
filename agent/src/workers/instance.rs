//! The handle of one instance, and the place where instances are started.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use compass_shared::ids::{FrameId, QueryId};
use compass_shared::model::cluster::Resources;
use compass_shared::model::plan::InstanceTarget;
use compass_shared::model::telemetry::Enforcement;
use compass_shared::wire::v1::{InstanceReport, InstanceState, InstanceStatus};
use tokio::sync::{broadcast, mpsc, oneshot, watch};

use super::pace::{Pace, Window};
use super::process::{self, Process};
use super::protocol::{Answer, InputHeader, Request};
use super::supervisor::{Job, Served, Supervisor, Wish};
use super::{
    Output, Payload, ProcessError, Processed, Purpose, WorkerError, WorkerEvent, WorkerSettings,
};

/// Requests that may wait for one instance. Who sends frames bounds them by credits, far below; this is the backstop.
const QUEUE_MAX: usize = 256;
/// Events kept for a slow listener.
const EVENTS_MAX: usize = 256;

/// Starts instances.
#[derive(Debug)]
pub struct Workers {
    settings: Arc<WorkerSettings>,
    events: broadcast::Sender<WorkerEvent>,
    granted: Arc<Granted>,
}

/// Shares of the live instances, by a number of their own (an instance may overlap with its successor).
#[derive(Debug, Default)]
struct Granted {
    next: AtomicU64,
    live: Mutex<BTreeMap<u64, Resources>>,
}

impl Workers {
    /// Nothing runs yet.
    pub fn new(settings: WorkerSettings) -> Self {
        Self {
            settings: Arc::new(settings),
            events: broadcast::channel(EVENTS_MAX).0,
            granted: Arc::default(),
        }
    }

    /// What happens to instances from now on; a receiver that lags misses the oldest.
    pub fn events(&self) -> broadcast::Receiver<WorkerEvent> {
        self.events.subscribe()
    }

    /// Speed of this node's core relative to the host's when the device is emulated.
    pub fn emulated_speed(&self) -> Option<f64> {
        self.settings.emulated_speed
    }

    /// What the live instances are granted together.
    pub fn granted_live(&self) -> Resources {
        lock(&self.granted.live)
            .values()
            .fold(Resources::default(), |sum, share| sum.plus(share))
    }

    /// Starts an instance and returns when it is warm. From then on it is kept running until it is stopped or its last handle is
    /// dropped.
    ///
    /// # Errors
    /// See [`WorkerError`].
    pub async fn start(
        &self,
        target: &InstanceTarget,
        artifact: Option<&Path>,
        purpose: Purpose,
    ) -> Result<Arc<Instance>, WorkerError> {
        let grant =
            (purpose == Purpose::Live).then(|| Grant::new(self.granted.clone(), target.share));
        let first = Process::start(&self.settings, target, artifact, purpose).await?;
        let now = Instant::now();
        let shared = Arc::new(Shared {
            status: Mutex::new((InstanceState::Ready, Some(first.pid()), 0)),
            waiting: Mutex::default(),
            window: Mutex::new(Window::new(now)),
            pace: Mutex::new(first.pace),
        });
        let (jobs, inbox) = mpsc::channel(QUEUE_MAX);
        let (wish, wished) = watch::channel(Wish::Run);
        let (share, wanted_share) = watch::channel(target.share);
        let supervisor = Supervisor {
            settings: self.settings.clone(),
            target: target.clone(),
            artifact: artifact.map(PathBuf::from),
            purpose,
            shared: shared.clone(),
            events: self.events.clone(),
            jobs: inbox,
            wish: wished,
            share: wanted_share,
            free_at: now,
        };
        tokio::spawn(supervisor.run(first));
        Ok(Arc::new(Instance {
            target: target.clone(),
            shared,
            jobs,
            wish,
            share,
            grant,
        }))
    }
}

/// Counts a live share for as long as it lives.
#[derive(Debug)]
struct Grant {
    granted: Arc<Granted>,
    number: u64,
}

impl Grant {
    fn new(granted: Arc<Granted>, share: Resources) -> Self {
        let number = granted.next.fetch_add(1, Ordering::Relaxed);
        lock(&granted.live).insert(number, share);
        Self { granted, number }
    }
}

impl Grant {
    fn set(&self, share: Resources) {
        lock(&self.granted.live).insert(self.number, share);
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        lock(&self.granted.live).remove(&self.number);
    }
}

/// What the handle and the task behind it both see.
#[derive(Debug)]
pub(super) struct Shared {
    status: Mutex<(InstanceState, Option<u32>, u32)>,
    /// When each waiting request was queued, oldest first.
    waiting: Mutex<VecDeque<Instant>>,
    window: Mutex<Window>,
    pace: Mutex<Pace>,
}

impl Shared {
    pub(super) fn set(&self, state: InstanceState, pid: Option<u32>) {
        let mut status = lock(&self.status);
        (status.0, status.1) = (state, pid);
    }

    pub(super) fn restarted(&self, process: &Process) {
        let mut status = lock(&self.status);
        *status = (InstanceState::Ready, Some(process.pid()), status.2 + 1);
        *lock(&self.pace) = process.pace;
    }

    pub(super) fn now_paced(&self, pace: Pace) {
        *lock(&self.pace) = pace;
    }

    pub(super) fn left_queue(&self) {
        lock(&self.waiting).pop_front();
    }

    pub(super) fn measured(&self, wall: Duration, cpu: Duration) {
        lock(&self.window).add(wall, cpu);
    }
}

/// One operator in one configuration in a process of its own.
#[derive(Debug)]
pub struct Instance {
    target: InstanceTarget,
    shared: Arc<Shared>,
    jobs: mpsc::Sender<Job>,
    wish: watch::Sender<Wish>,
    /// What it is granted now.
    share: watch::Sender<Resources>,
    grant: Option<Grant>,
}

impl Instance {
    /// What it was started as, with the share it has now.
    pub fn target(&self) -> InstanceTarget {
        InstanceTarget {
            share: *self.share.borrow(),
            ..self.target.clone()
        }
    }

    /// Changes its share from the next frame on; what the operator remembers stays.
    pub fn set_share(&self, share: Resources) {
        if let Some(grant) = &self.grant {
            grant.set(share);
        }
        self.share.send_if_modified(|now| {
            let changes = *now != share;
            *now = share;
            changes
        });
    }

    /// Runs one frame through the operator; frames are served one after another in the order of these calls.
    ///
    /// `deadline` counts from the call. When it passes while the worker is at work, the result is dropped and the worker lives on.
    ///
    /// # Errors
    /// See [`ProcessError`]. A frame that crashed the worker will likely do so again.
    pub async fn process(
        &self,
        query: &QueryId,
        frame: FrameId,
        inputs: Vec<Payload>,
        deadline: Duration,
    ) -> Result<Processed, ProcessError> {
        let headers = inputs
            .iter()
            .map(|input| {
                Ok(InputHeader {
                    content: input.content.clone(),
                    bytes: u32::try_from(input.bytes.len())
                        .map_err(|_| ProcessError::BadInput("an input is too large".to_owned()))?,
                })
            })
            .collect::<Result<_, ProcessError>>()?;
        let request = Request::Frame {
            query: query.to_string(),
            frame: frame.0,
            inputs: headers,
        };
        let payload = inputs.iter().map(|input| input.bytes.clone()).collect();
        let until = Instant::now().checked_add(deadline);
        let served = tokio::time::timeout(deadline, self.ask(request, payload, until))
            .await
            .map_err(|_| ProcessError::Expired)??;
        let output = match served.answer {
            Answer::Output { content, .. } => Output::Payload(Payload {
                content,
                bytes: served.payload,
            }),
            Answer::Forward { input, .. } => {
                let forwarded = inputs.into_iter().nth(input).ok_or_else(|| {
                    ProcessError::BadInput(format!(
                        "the operator forwards input {input}, which it was not given"
                    ))
                })?;
                Output::Payload(forwarded)
            }
            Answer::Skipped { .. } => Output::Skipped,
            other => {
                return Err(ProcessError::BadInput(format!(
                    "the operator answered a frame with {other:?}"
                )));
            }
        };
        Ok(Processed {
            output,
            wall: served.wall,
            cpu: served.cpu,
        })
    }

    /// Takes out what the operator remembers of a query.
    ///
    /// # Errors
    /// See [`ProcessError`].
    pub async fn snapshot(&self, query: &QueryId) -> Result<Vec<u8>, ProcessError> {
        let query = query.to_string();
        let served = self.ask(Request::Snapshot { query }, vec![], None).await?;
        Ok(served.payload.to_vec())
    }

    /// Puts in what an operator of the same kind remembered of a query.
    ///
    /// # Errors
    /// See [`ProcessError`].
    pub async fn restore(&self, query: &QueryId, state: Vec<u8>) -> Result<(), ProcessError> {
        let query = query.to_string();
        let request = Request::Restore { query };
        self.ask(request, vec![state.into()], None).await.map(drop)
    }

    /// Makes the operator forget a query.
    ///
    /// # Errors
    /// See [`ProcessError`].
    pub async fn reset(&self, query: &QueryId) -> Result<(), ProcessError> {
        let query = query.to_string();
        self.ask(Request::Reset { query }, vec![], None)
            .await
            .map(drop)
    }

    async fn ask(
        &self,
        request: Request,
        payload: Vec<Bytes>,
        deadline: Option<Instant>,
    ) -> Result<Served, ProcessError> {
        let (reply, served) = oneshot::channel();
        let stopped = |_| ProcessError::Stopped;
        let place = self
            .jobs
            .reserve()
            .await
            .map_err(|_| ProcessError::Stopped)?;
        let queued = Instant::now();
        lock(&self.shared.waiting).push_back(queued);
        place.send(Job {
            request,
            payload,
            queued,
            deadline,
            reply,
        });
        let served = served.await.map_err(stopped)??;
        match served.answer {
            Answer::Error { message } => Err(ProcessError::BadInput(message)),
            _ => Ok(served),
        }
    }

    /// How it is.
    pub fn status(&self) -> InstanceStatus {
        let (state, pid, restarts) = lock(&self.shared.status).clone();
        InstanceStatus {
            instance: self.target.instance,
            state,
            pid,
            restarts,
        }
    }

    /// What was measured since the last call; meant for one caller, once a second.
    pub fn report(&self) -> InstanceReport {
        let summary = lock(&self.shared.window).take(Instant::now(), &lock(&self.shared.pace));
        InstanceReport {
            instance: self.target.instance,
            frames: summary.frames,
            service_ms: summary.service_ms,
            queue_age_ms: self.queue_age().as_secs_f64() * 1e3,
            busy_cores: summary.busy_cores,
            granted_cores: self.share.borrow().cpu.cores(),
            memory_mib: self.status().pid.and_then(process::resident_mib),
        }
    }

    /// Cores of the node it had while it had work, since the last report; `None` when it had none.
    pub fn achieved_cores(&self) -> Option<f64> {
        lock(&self.shared.window).achieved_cores(&lock(&self.shared.pace))
    }

    /// How its CPU share holds.
    pub fn enforcement(&self) -> Enforcement {
        lock(&self.shared.pace).enforcement()
    }

    /// Age of the oldest frame that waits for its turn; zero when none does.
    pub fn queue_age(&self) -> Duration {
        lock(&self.shared.waiting)
            .front()
            .map_or(Duration::ZERO, Instant::elapsed)
    }

    /// Ends it: no new frames, the one being served finishes, then the process is gone when this returns.
    pub async fn stop(&self) {
        self.end(Wish::Stop).await;
    }

    /// Ends it at once, also in the middle of a frame.
    pub async fn kill(&self) {
        self.end(Wish::Kill).await;
    }

    async fn end(&self, wish: Wish) {
        if wish == Wish::Stop {
            lock(&self.shared.status).0 = InstanceState::Draining;
        }
        self.wish.send_if_modified(|now| {
            let changes = *now != Wish::Kill && *now != wish;
            if changes {
                *now = wish;
            }
            changes
        });
        self.jobs.closed().await;
        self.wish.closed().await;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these mutexes guard is whole after every statement, so a panic elsewhere does not spoil it.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
