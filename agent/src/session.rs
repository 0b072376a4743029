//! The session with the coordinator: registering, targets in, reports and events out, again and again.
//!
//! Start at [`SessionLoop::run`]. Nothing here stops local work: while the coordinator is away the node goes on with its last target.
//! Reports are latest-value: one is under way at a time, and a coordinator that does not read gets the newest when it reads again.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use compass_shared::ids::{Commit, Digest, Generation, NodeId, QueryId};
use compass_shared::model::cluster::NodeDescription;
use compass_shared::wire::v1::{
    AgentEvent, AgentReport, AgentRequest, AgentResponse, AgentToCoordinator, CoordinatorToAgent,
    InstanceStatus, Registration,
};
use compass_transport::{
    Alpn, Backoff, BackoffSettings, Deadline, Dial, Dialler, Endpoint, Priority, RecvStream,
    ResetCode, Role, SendStream, Session, SystemResolver, TransportError,
};
use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::sync::{broadcast, mpsc};
use tokio::time::{Instant, MissedTickBehavior};

use crate::artifacts::{ArtifactCache, ArtifactSink, ArtifactSource};
use crate::dataplane::DataPlane;
use crate::node::{Applied, Node};
use crate::telemetry::TelemetryCollector;
use crate::trials::{SampleStore, Trials};
use crate::workers::{WorkerEvent, WorkerEventKind};

const CONNECT_S: u64 = 15;
const MESSAGE_S: u64 = 10;

/// A report that has not been read by then is taken back for a newer one.
const REPORT_PATIENCE: Duration = Duration::from_secs(5);

/// Between two pieces of an artifact.
const PIECE_S: u64 = 30;

/// Largest message accepted, encoded.
const MESSAGE_BYTES_MAX: usize = 4 << 20;

/// Messages that may wait for the control stream.
const OUTGOING_MAX: usize = 256;

/// How often in-flight counts are looked at while an old generation drains.
const DRAIN_LOOK_EVERY: Duration = Duration::from_millis(100);

/// Longest wait between attempts to reach the coordinator.
const RETRY_MAX: Duration = Duration::from_secs(30);

/// Fetches artifacts over whatever session is alive.
#[derive(Debug, Default)]
pub struct SessionSource {
    session: Mutex<Option<Arc<dyn Session>>>,
}

impl SessionSource {
    fn set(&self, session: Option<Arc<dyn Session>>) {
        *self.session.lock().unwrap_or_else(PoisonError::into_inner) = session;
    }
}

#[async_trait]
impl ArtifactSource for SessionSource {
    async fn fetch(
        &self,
        digest: Digest,
        offset: u64,
        sink: &mut (dyn ArtifactSink + Send),
    ) -> Result<(), String> {
        let session = self
            .session
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let session = session.ok_or("there is no session with the coordinator")?;
        fetch(&*session, digest, offset, sink).await
    }
}

async fn fetch(
    session: &dyn Session,
    digest: Digest,
    offset: u64,
    sink: &mut (dyn ArtifactSink + Send),
) -> Result<(), String> {
    let words = |error: TransportError| error.to_string();
    let (mut send, mut receive) = session
        .open_bi(Deadline::after_s(MESSAGE_S))
        .await
        .map_err(words)?;
    send.set_priority(Priority::Bulk);
    send.write_frame(
        &AgentRequest::Artifact { digest, offset },
        Deadline::after_s(MESSAGE_S),
    )
    .await
    .map_err(words)?;
    send.finish().map_err(words)?;
    let total = match receive
        .read_frame(MESSAGE_BYTES_MAX, Deadline::after_s(MESSAGE_S))
        .await
        .map_err(words)?
    {
        AgentResponse::Artifact { total_bytes } => total_bytes,
        AgentResponse::Refused { reason } => return Err(reason),
    };
    let mut left = total.saturating_sub(offset);
    while left > 0 {
        let piece = receive
            .read_some(left.min(1 << 20) as usize, Deadline::after_s(PIECE_S))
            .await
            .map_err(words)?;
        let Some(piece) = piece else {
            return Err(format!(
                "the coordinator stopped {left} bytes before the end"
            ));
        };
        sink.write(&piece).map_err(|error| error.to_string())?;
        left -= piece.len() as u64;
    }
    Ok(())
}

/// What every session of this node needs.
pub struct SessionLoop {
    /// Its id, from its certificate.
    pub id: NodeId,
    /// What it says of itself.
    pub description: NodeDescription,
    /// Number of this start.
    pub boot: u64,
    /// `host:port` of the coordinator, best first.
    pub coordinator: Vec<String>,
    /// Its one endpoint.
    pub endpoint: Arc<Endpoint>,
    /// What runs.
    pub node: Arc<Node>,
    /// Where frames flow.
    pub data_plane: Arc<DataPlane>,
    /// What trials run.
    pub trials: Arc<Trials>,
    /// Recent frames.
    pub samples: Arc<SampleStore>,
    /// Models on disk.
    pub artifacts: Arc<ArtifactCache>,
    /// Lets artifacts be fetched over the session.
    pub source: Arc<SessionSource>,
    /// Host and devices.
    pub telemetry: Mutex<TelemetryCollector>,
    /// When this process started.
    pub started: Instant,
}

impl SessionLoop {
    /// Connects, serves the session, and begins again, for ever.
    pub async fn run(
        self: Arc<Self>,
        mut events: mpsc::Receiver<AgentEvent>,
        mut workers: broadcast::Receiver<WorkerEvent>,
    ) -> Infallible {
        let dial = Dial::new(Alpn::Agent, Role::Coordinator);
        let mut dialler = Dialler::new(
            Arc::clone(&self.endpoint),
            Arc::new(SystemResolver),
            self.coordinator.clone(),
            dial,
        );
        let mut backoff = Backoff::new(BackoffSettings {
            cap: RETRY_MAX,
            ..BackoffSettings::default()
        });
        let mut random = StdRng::from_os_rng();
        loop {
            let began = Instant::now();
            match dialler.connect(Deadline::after_s(CONNECT_S)).await {
                Ok(session) => {
                    self.source.set(Some(Arc::clone(&session)));
                    let ended = self.serve(&session, &mut events, &mut workers).await;
                    self.source.set(None);
                    match ended {
                        Ended::Refused(reason) => tracing::error!(
                            reason,
                            "the coordinator refuses this node; it goes on with its last target"
                        ),
                        Ended::Lost(reason) => tracing::warn!(
                            reason,
                            "the session with the coordinator was lost; the node goes on with its last target"
                        ),
                    }
                }
                Err(error) => tracing::warn!(%error, "the coordinator was not reached"),
            }
            backoff.session_ended(began.elapsed());
            let wait = tokio::time::sleep(backoff.next_delay(&mut random));
            tokio::pin!(wait);
            // Events of the time without a coordinator are history: the registration states what is true when it is back.
            loop {
                tokio::select! {
                    () = &mut wait => break,
                    Some(_) = events.recv() => {}
                    Ok(event) = workers.recv() => self.node.worker_changed(event.instance),
                }
            }
        }
    }

    async fn serve(
        self: &Arc<Self>,
        session: &Arc<dyn Session>,
        events: &mut mpsc::Receiver<AgentEvent>,
        workers: &mut broadcast::Receiver<WorkerEvent>,
    ) -> Ended {
        let Some((mut send, mut receive)) = session.take_control() else {
            return Ended::Lost("the control stream is gone".to_owned());
        };
        send.set_priority(Priority::Control);
        let report_every = match self.register(&mut send, &mut receive).await {
            Ok(report_every) => report_every,
            Err(ended) => return ended,
        };
        let (say, to_say) = mpsc::channel(OUTGOING_MAX);
        tokio::select! {
            ended = speak(send, to_say) => ended,
            ended = self.listen(receive, &say) => ended,
            ended = self.report(session, report_every) => ended,
            ended = self.tell_progress(&say) => ended,
            ended = self.tell_events(&say, events, workers) => ended,
            closed = session.closed() => Ended::Lost(closed.to_string()),
        }
    }

    async fn register(
        &self,
        send: &mut SendStream,
        receive: &mut RecvStream,
    ) -> Result<Duration, Ended> {
        let registration = Registration {
            description: self.description.clone(),
            boot: self.boot,
            applied: self.node.commit(),
            instances: self.node.statuses(),
            artifacts: self.artifacts.held(),
        };
        let lost = |error: TransportError| Ended::Lost(error.to_string());
        send.write_frame(
            &AgentToCoordinator::Register(registration),
            Deadline::after_s(MESSAGE_S),
        )
        .await
        .map_err(lost)?;
        match receive
            .read_frame(MESSAGE_BYTES_MAX, Deadline::after_s(MESSAGE_S))
            .await
            .map_err(lost)?
        {
            CoordinatorToAgent::Welcome { term, report_every } => {
                tracing::info!(term, "registered with the coordinator");
                Ok(report_every.max(Duration::from_millis(100)))
            }
            CoordinatorToAgent::Refused { reason } => Err(Ended::Refused(reason)),
            other => Err(Ended::Lost(format!(
                "the coordinator answered a registration with {other:?}"
            ))),
        }
    }

    async fn listen(
        self: &Arc<Self>,
        mut receive: RecvStream,
        say: &mpsc::Sender<AgentToCoordinator>,
    ) -> Ended {
        loop {
            let message = match receive
                .next_frame(MESSAGE_BYTES_MAX, Deadline::never())
                .await
            {
                Ok(Some(message)) => message,
                Ok(None) => return Ended::Lost("the coordinator ended the session".to_owned()),
                Err(error) => return Ended::Lost(error.to_string()),
            };
            match message {
                CoordinatorToAgent::Ping(number) => {
                    // A full queue means that writing is stuck; the pong would be late anyway.
                    let _ = say.try_send(AgentToCoordinator::Pong(number));
                }
                CoordinatorToAgent::Target(target) => self.take_target(target, say).await,
                CoordinatorToAgent::Peers(peers) => self.data_plane.peers(peers),
                CoordinatorToAgent::Capture(request) => {
                    let (samples, say) = (Arc::clone(&self.samples), say.clone());
                    tokio::spawn(async move {
                        let captured = samples.capture(request).await;
                        let _ = say.send(AgentToCoordinator::Captured(captured)).await;
                    });
                }
                CoordinatorToAgent::DropSamples(set) => self.trials.drop_set(set),
                CoordinatorToAgent::RunStage(stage) => {
                    let (this, say) = (Arc::clone(self), say.clone());
                    tokio::spawn(async move {
                        let trial = stage.trial;
                        let answer = match this
                            .trials
                            .run(*stage, &*this.data_plane, &*this.source)
                            .await
                        {
                            Ok(done) => AgentToCoordinator::StageDone(done),
                            Err(failure) => AgentToCoordinator::StageFailed { trial, failure },
                        };
                        let _ = say.send(answer).await;
                    });
                }
                CoordinatorToAgent::CancelStage(trial) => self.trials.cancel(trial),
                CoordinatorToAgent::Refused { reason } => return Ended::Refused(reason),
                CoordinatorToAgent::Welcome { .. } => {}
            }
        }
    }

    async fn take_target(
        &self,
        target: compass_shared::model::plan::NodeTarget,
        say: &mpsc::Sender<AgentToCoordinator>,
    ) {
        let commit = target.commit;
        match self.node.apply(target, &self.id) {
            Applied::Accepted | Applied::NotNewer => {
                let _ = say.send(self.progress()).await;
            }
            Applied::Refused(reason) => {
                tracing::error!(%commit, reason, "target refused");
                let _ = say
                    .send(AgentToCoordinator::TargetRefused { commit, reason })
                    .await;
            }
        }
    }

    fn progress(&self) -> AgentToCoordinator {
        let commit = self.node.commit().unwrap_or_default();
        AgentToCoordinator::Applied {
            commit,
            instances: self.node.statuses(),
            in_flight: self.data_plane.in_flight(),
        }
    }

    /// Says how far the target is carried out whenever that changes.
    async fn tell_progress(&self, say: &mpsc::Sender<AgentToCoordinator>) -> Ended {
        type Progress = (
            Option<Commit>,
            Vec<InstanceStatus>,
            BTreeMap<(QueryId, Generation), bool>,
        );
        let mut changes = self.node.changes();
        let mut look = tokio::time::interval(DRAIN_LOOK_EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut last: Option<Progress> = None;
        loop {
            tokio::select! {
                changed = changes.changed() => if changed.is_err() {
                    return Ended::Lost("the node has ended".to_owned());
                },
                _ = look.tick() => {}
            }
            // Only whether a generation still has frames is news; their number changes all the time.
            let busy = self
                .data_plane
                .in_flight()
                .into_iter()
                .map(|(query, generation, frames)| ((query, generation), frames > 0))
                .collect();
            let now = (self.node.commit(), self.node.statuses(), busy);
            if now.0.is_some() && last.as_ref() != Some(&now) {
                last = Some(now);
                if say.send(self.progress()).await.is_err() {
                    return Ended::Lost("writing has stopped".to_owned());
                }
            }
        }
    }

    async fn tell_events(
        &self,
        say: &mpsc::Sender<AgentToCoordinator>,
        events: &mut mpsc::Receiver<AgentEvent>,
        workers: &mut broadcast::Receiver<WorkerEvent>,
    ) -> Ended {
        loop {
            let event = tokio::select! {
                Some(event) = events.recv() => event,
                event = workers.recv() => match event {
                    Ok(event) => {
                        self.node.worker_changed(event.instance);
                        match event.what {
                            WorkerEventKind::Crashed(reason) | WorkerEventKind::Failed(reason) => AgentEvent::WorkerCrashed { instance: event.instance, reason },
                            WorkerEventKind::Ready => continue,
                        }
                    }
                    Err(broadcast::error::RecvError::Lagged(_)) => continue,
                    Err(broadcast::error::RecvError::Closed) => return Ended::Lost("the workers have ended".to_owned()),
                },
            };
            tracing::info!(?event, "event");
            if say.send(AgentToCoordinator::Event(event)).await.is_err() {
                return Ended::Lost("writing has stopped".to_owned());
            }
        }
    }

    /// Sends a report every so often; the next is made only when the last has left, so the newest always goes first.
    async fn report(&self, session: &Arc<dyn Session>, every: Duration) -> Ended {
        let mut tick = tokio::time::interval(every);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut sequence = 0;
        loop {
            tick.tick().await;
            sequence += 1;
            let report = self.make_report(sequence);
            match send_report(&**session, &report, REPORT_PATIENCE).await {
                Ok(()) => {}
                Err(error) if error.is_closed() => return Ended::Lost(error.to_string()),
                Err(error) => tracing::debug!(%error, sequence, "report given up for a newer one"),
            }
        }
    }

    fn make_report(&self, sequence: u64) -> AgentReport {
        let pids = self
            .node
            .statuses()
            .into_iter()
            .filter_map(|status| status.pid)
            .collect();
        let now = compass_shared::time::Moment::from_duration(self.started.elapsed());
        let telemetry = {
            let mut collector = self
                .telemetry
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            collector.set_children(pids);
            collector.collect(now)
        };
        let socket = self.endpoint.socket_stats();
        let instances = self.node.reports();
        tracing::debug!(?instances, "report");
        AgentReport {
            sequence,
            telemetry,
            links: self.data_plane.link_reports(),
            instances,
            content: self.data_plane.content_reports(),
            applied: self.node.commit(),
            sent_bytes: socket.sent_bytes,
            received_bytes: socket.received_bytes,
        }
    }
}

/// How a session ended.
#[derive(Debug)]
enum Ended {
    /// The coordinator does not want this node (now).
    Refused(String),
    /// Something broke.
    Lost(String),
}

async fn speak(mut send: SendStream, mut to_say: mpsc::Receiver<AgentToCoordinator>) -> Ended {
    while let Some(message) = to_say.recv().await {
        if let Err(error) = send
            .write_frame(&message, Deadline::after_s(MESSAGE_S))
            .await
        {
            return Ended::Lost(error.to_string());
        }
    }
    Ended::Lost("nobody has anything to say".to_owned())
}

/// Sends one report and waits until the coordinator has read it. The stream is not finished: who has read a report lets go of its
/// stream, and until then it can be taken back, so that a coordinator that was busy never works through old ones.
async fn send_report(
    session: &dyn Session,
    report: &AgentReport,
    patience: Duration,
) -> Result<(), TransportError> {
    let deadline = Deadline::after(patience);
    let mut stream = session.open_uni(deadline).await?;
    stream.set_priority(Priority::Report);
    stream.write_frame(report, deadline).await?;
    match tokio::time::timeout(deadline.left(), stream.stopped()).await {
        Ok(TransportError::Stopped(_)) => Ok(()),
        Ok(error) => Err(error),
        Err(_) => {
            stream.reset(ResetCode::STALE);
            Err(TransportError::Deadline {
                what: "waiting for a report to be read",
                after: patience,
            })
        }
    }
}

#[cfg(test)]
mod tests;
