//! The session with the coordinator: registering, plans, reports, and coming back after a loss.

use std::sync::Arc;
use std::time::Duration;

use compass_shared::ids::QueryId;
use compass_shared::model::plan::Peer;
use compass_shared::wire::v1::{AppToCoordinator, CoordinatorToApp};
use compass_transport::{
    Alpn, Backoff, BackoffSettings, Deadline, Dial, Endpoint, EndpointConfig, Identity, Priority,
    PrivateKey, RecvStream, Role, SendStream, Session, Trust, WallClock,
};
use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::app::{ClientError, Event, Settings, Shared};

/// Reaching the coordinator once, all addresses together.
const CONNECT_S: u64 = 15;

/// One message to the coordinator, or its answer to a registration.
const MESSAGE_S: u64 = 10;

/// Largest message accepted, encoded.
const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// Windows of reports, and how often deadlines are looked at.
const REPORT_EVERY: Duration = Duration::from_secs(1);
const SWEEP_EVERY: Duration = Duration::from_millis(100);

/// A registration that was accepted.
pub(crate) struct Registered {
    pub(crate) query: QueryId,
    pub(crate) endpoint: Endpoint,
    pub(crate) entry: Peer,
    pub(crate) latency_bound: Option<Duration>,
    pub(crate) frame_deadline: Duration,
    pub(crate) session: Arc<dyn Session>,
    pub(crate) streams: (SendStream, RecvStream),
}

/// Connects without a certificate, registers, and takes the certificate that comes back.
pub(crate) async fn register(
    settings: &Settings,
    key: &PrivateKey,
) -> Result<Registered, ClientError> {
    let trust = Trust::none(WallClock::system());
    let endpoint = Endpoint::bind(EndpointConfig::new(settings.local, &[]), trust, None)?;
    let dial = Dial::new(Alpn::App, Role::Coordinator)
        .trusting(settings.server_trust)
        .anonymous();
    let session = endpoint
        .connect(&settings.coordinator, &dial, Deadline::after_s(CONNECT_S))
        .await?;
    let (mut send, mut receive) = session.take_control().ok_or(ClientError::OutOfTurn)?;
    let message = AppToCoordinator::Register {
        token: settings.token.clone(),
        query_yaml: settings.query_yaml.clone(),
        request_der: key.signing_request(),
    };
    send.write_frame(&message, Deadline::after_s(MESSAGE_S))
        .await?;
    match receive
        .read_frame(MESSAGE_BYTES_MAX, Deadline::after_s(MESSAGE_S))
        .await?
    {
        CoordinatorToApp::Registered {
            query,
            chain_der,
            authority_der,
            entry,
            latency_bound,
            frame_deadline,
        } => {
            let identity = Identity::from_chain(key.clone(), chain_der)?;
            endpoint.trust().set_authority(authority_der.into());
            endpoint
                .set_identity(identity)
                .map_err(|error| ClientError::Tls(error.to_string()))?;
            Ok(Registered {
                query,
                endpoint,
                entry,
                latency_bound,
                frame_deadline,
                session,
                streams: (send, receive),
            })
        }
        CoordinatorToApp::Rejected { reason } => Err(ClientError::Rejected(reason)),
        _ => Err(ClientError::OutOfTurn),
    }
}

/// Talks to the coordinator until the query ends, over as many sessions as it takes.
pub(crate) async fn run(
    shared: Arc<Shared>,
    settings: Settings,
    session: Arc<dyn Session>,
    streams: (SendStream, RecvStream),
    mut outgoing: mpsc::Receiver<AppToCoordinator>,
) {
    let mut backoff = Backoff::new(BackoffSettings::default());
    let mut random = StdRng::from_os_rng();
    let mut current = Some((session, streams));
    loop {
        if let Some((session, streams)) = current.take() {
            let began = Instant::now();
            if talk(&shared, &session, streams, &mut outgoing)
                .await
                .is_break()
            {
                return;
            }
            backoff.session_ended(began.elapsed());
            shared
                .tell(Event::Connection(
                    "the session with the coordinator was lost; frames go on".to_owned(),
                ))
                .await;
        }
        let wait = backoff.next_delay(&mut random);
        tokio::time::sleep(wait).await;
        let dial = Dial::new(Alpn::App, Role::Coordinator);
        match shared
            .endpoint
            .connect(&settings.coordinator, &dial, Deadline::after_s(CONNECT_S))
            .await
        {
            Ok(session) => current = attach(&shared, session).await,
            Err(error) => tracing::debug!(%error, "coordinator not reached"),
        }
    }
}

async fn attach(
    shared: &Shared,
    session: Arc<dyn Session>,
) -> Option<(Arc<dyn Session>, (SendStream, RecvStream))> {
    let (mut send, receive) = session.take_control()?;
    match send
        .write_frame(&AppToCoordinator::Attach, Deadline::after_s(MESSAGE_S))
        .await
    {
        Ok(()) => {
            shared
                .tell(Event::Connection(
                    "the session with the coordinator is back".to_owned(),
                ))
                .await;
            Some((session, (send, receive)))
        }
        Err(error) => {
            tracing::debug!(%error, "attaching failed");
            None
        }
    }
}

/// One session. Breaks when the query has ended.
async fn talk(
    shared: &Arc<Shared>,
    session: &Arc<dyn Session>,
    (mut send, mut receive): (SendStream, RecvStream),
    outgoing: &mut mpsc::Receiver<AppToCoordinator>,
) -> std::ops::ControlFlow<()> {
    send.set_priority(Priority::Control);
    loop {
        let message = tokio::select! {
            message = receive.next_frame(MESSAGE_BYTES_MAX, Deadline::never()) => message,
            Some(message) = outgoing.recv() => {
                if let Err(error) = send.write_frame(&message, Deadline::after_s(MESSAGE_S)).await {
                    tracing::debug!(%error, "a message to the coordinator was not sent");
                    return std::ops::ControlFlow::Continue(());
                }
                continue;
            }
        };
        match message {
            Ok(Some(CoordinatorToApp::Ping(number))) => {
                // A full queue means that writing is stuck; the pong would be late anyway.
                let _ = shared
                    .to_coordinator
                    .try_send(AppToCoordinator::Pong(number));
            }
            Ok(Some(CoordinatorToApp::Withdrawn)) => {
                shared
                    .tell(Event::Closed("the query was withdrawn".to_owned()))
                    .await;
                return std::ops::ControlFlow::Break(());
            }
            Ok(Some(CoordinatorToApp::Rejected { reason })) => {
                shared.tell(Event::Closed(reason)).await;
                return std::ops::ControlFlow::Break(());
            }
            Ok(Some(message)) => hear(shared, message).await,
            Ok(None) | Err(_) => {
                tracing::debug!(closed = ?session.closed_reason(), "the session with the coordinator ended");
                return std::ops::ControlFlow::Continue(());
            }
        }
    }
}

async fn hear(shared: &Arc<Shared>, message: CoordinatorToApp) {
    match message {
        CoordinatorToApp::Registered { entry, .. } => {
            shared.entry.send_replace(entry.node.clone());
            if !shared.state().planned {
                shared.keep_links(&[&entry]);
            }
        }
        CoordinatorToApp::PlanChanged {
            route,
            trigger,
            summary,
        } => {
            shared.state().planned = true;
            shared.entry.send_replace(route.entry.node.clone());
            shared.keep_links(&[&route.entry, &route.sink]);
            shared.sendable.notify_one();
            shared
                .tell(Event::PlanChanged {
                    generation: route.generation,
                    trigger,
                    summary,
                })
                .await;
        }
        CoordinatorToApp::Infeasible { report } => shared.tell(Event::Infeasible(report)).await,
        CoordinatorToApp::LabelsWanted { set, frames } => {
            shared.tell(Event::LabelsWanted { set, frames }).await
        }
        CoordinatorToApp::Ping(_)
        | CoordinatorToApp::Withdrawn
        | CoordinatorToApp::Rejected { .. } => {}
    }
}

/// Ends frames at their deadlines and reports what was measured.
pub(crate) async fn measure(shared: Arc<Shared>) {
    let mut tick = tokio::time::interval(SWEEP_EVERY);
    let mut next_report = Instant::now() + REPORT_EVERY;
    loop {
        tick.tick().await;
        let expired = {
            let now = shared.now();
            let mut state = shared.state();
            let expired = state.ledger.sweep(now);
            for frame in &expired {
                state.outbox.forget(*frame);
                state.requests.refused.remove(frame);
            }
            expired
        };
        for frame in expired {
            shared
                .tell(Event::Ended {
                    frame,
                    outcome: compass_shared::model::outcome::Outcome::Expired,
                })
                .await;
        }
        if Instant::now() >= next_report {
            next_report += REPORT_EVERY;
            let (planned, report) = {
                let now = shared.now();
                let mut state = shared.state();
                (state.planned, state.ledger.take_report(now))
            };
            // Only the newest window matters; when the coordinator is away it is dropped.
            if planned {
                let _ = shared
                    .to_coordinator
                    .try_send(AppToCoordinator::Report(report));
            }
        }
    }
}
