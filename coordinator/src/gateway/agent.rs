//! One agent's session.

use std::sync::Arc;

use bytes::Bytes;
use compass_planning::roles::{explorer, monitor, profiler, scheduler};
use compass_shared::ids::{Digest, NodeId};
use compass_shared::model::trial::StageDone;
use compass_shared::model::trigger::Measurement;
use compass_shared::wire::v1::{
    AgentEvent, AgentReport, AgentRequest, AgentResponse, AgentToCoordinator, CoordinatorToAgent,
    InstanceState, Registration,
};
use compass_transport::{
    CloseCode, Deadline, Priority, RecvStream, ResetCode, SendStream, Session, TransportError,
};
use tokio::task::JoinSet;

use super::pace::Pace;
use super::{FIRST_MESSAGE_S, WRITE_S, is_alive, node_object};
use crate::artifacts::read_chunk;
use crate::events::{Event, now_unix_ms};
use crate::fleet::{Outgoing, Seat};
use crate::metrics::count;
use crate::plane::Plane;
use crate::store::records::NodeRecord;
use crate::store::{StoreError, get};

/// Largest message of an agent, encoded: a finished stage with its outputs.
const MESSAGE_BYTES_MAX: usize = 8 << 20;
/// Largest periodic report, encoded.
const REPORT_BYTES_MAX: usize = 1 << 20;
/// A report or request must have arrived whole by then.
const READ_S: u64 = 10;
/// Reports of one node on their way in at once.
const REPORTS_AT_ONCE: usize = 4;
/// Requests of one node served at once; artifacts among them.
const REQUESTS_AT_ONCE: usize = 8;
/// Bytes of an artifact in memory per request.
const CHUNK_BYTES: usize = 256 * 1024;
/// A chunk of an artifact must be taken by then; it travels below live traffic, so this is generous.
const CHUNK_S: u64 = 120;
/// Facts of one node at once, and per second in the long run: ten times what a busy agent has to say.
const FACTS_BURST: u32 = 500;
const FACTS_PER_SECOND: u32 = 200;
/// Lists in a registration are cut to this.
const LIST_MAX: usize = 4_096;
/// Labels and addresses of a node are cut to this.
const LABELS_MAX: usize = 64;

pub(super) async fn serve(
    plane: &Arc<Plane>,
    node: NodeId,
    key: Digest,
    session: Arc<dyn Session>,
) {
    let Some((mut send, mut receive)) = session.take_control() else {
        return;
    };
    send.set_priority(Priority::Control);
    let first = receive
        .read_frame(MESSAGE_BYTES_MAX, Deadline::after_s(FIRST_MESSAGE_S))
        .await;
    let mut registration = match first {
        Ok(AgentToCoordinator::Register(registration)) => registration,
        Ok(_) => {
            session.close(
                CloseCode::BAD_MESSAGE,
                "the first message must be a registration",
            );
            return;
        }
        Err(error) => {
            session.close(CloseCode::BAD_MESSAGE, &error.to_string());
            return;
        }
    };
    clean(&mut registration, key);
    // Arrivals of one node one after the other: two newcomers with one identity must not both find the old session silent.
    let arrival = plane.fleet.arrival(&node).await;
    if let Err((code, reason)) = admit(plane, &node, key, &registration, &*session).await {
        count(&plane.metrics.sessions_refused, "agent");
        tracing::warn!(%node, address = %session.remote_address(), reason, "agent refused");
        let refused = CoordinatorToAgent::Refused {
            reason: reason.clone(),
        };
        let _ = send.write_frame(&refused, Deadline::after_s(WRITE_S)).await;
        let _ = send.deliver(Deadline::after_s(WRITE_S)).await;
        session.close(code, &reason);
        return;
    }
    let welcome = CoordinatorToAgent::Welcome {
        term: plane.office.term(),
        report_every: plane.settings.report_every,
    };
    if let Err(error) = send.write_frame(&welcome, Deadline::after_s(WRITE_S)).await {
        tracing::info!(%node, %error, "agent left before it was welcomed");
        return;
    }
    let (seat, outgoing, before) =
        plane
            .fleet
            .take_seat(node.clone(), key, registration, session.clone());
    if let Some(before) = before {
        before.session.close(
            CloseCode::REPLACED,
            "a newer session of this node took its place",
        );
    }
    drop(arrival);
    arrived(plane, &seat);
    let reason = tokio::select! {
        reason = read_messages(plane, &seat, receive) => reason,
        reason = write_messages(send, outgoing) => reason,
        reason = take_reports(plane, &seat) => reason,
        reason = take_requests(plane, &seat) => reason,
        closed = session.closed() => closed.to_string(),
    };
    session.close(CloseCode::BAD_MESSAGE, &reason);
    left(plane, &seat, &reason);
}

/// Whether this session may speak for the node: a member with this key, and no other live session.
async fn admit(
    plane: &Plane,
    node: &NodeId,
    key: Digest,
    registration: &Registration,
    session: &dyn Session,
) -> Result<(), (CloseCode, String)> {
    let unavailable = |error: StoreError| (CloseCode::BUSY, error.to_string());
    let record_key = NodeRecord::key_of(node);
    let found = get::<NodeRecord>(plane.office.store(), &record_key).map_err(unavailable)?;
    let Some((mut record, revision)) = found else {
        let reason =
            format!("node {node} is not a member of this fleet: join it again with a token");
        return Err((CloseCode::REFUSED, reason));
    };
    if record.fingerprint != key {
        let reason = format!("node {node} is registered with another key");
        return Err((CloseCode::REFUSED, reason));
    }
    if let Some(old) = plane.fleet.seat(node) {
        if is_alive(&*old.session).await {
            let here = session.remote_address();
            let reason = format!(
                "node {node} is already connected from {}; this one comes from {here}: two machines have the same identity (a copied data folder?); give this one a fresh identity with `compass-agent join`",
                old.address
            );
            let event = Event::new("alarm", node_object(node), "gateway", reason.clone());
            plane.events.record(event);
            return Err((CloseCode::CONFLICT, reason));
        }
    } else if plane.fleet.len() >= plane.settings.limits.nodes {
        return Err((
            CloseCode::BUSY,
            "the coordinator has all the nodes it may have".to_owned(),
        ));
    }
    if registration.boot < record.boot {
        let text = format!(
            "boot counter went back from {} to {}: its data folder was restored or copied",
            record.boot, registration.boot
        );
        plane
            .events
            .record(Event::new("alarm", node_object(node), "gateway", text));
    }
    let description = Some(registration.description.clone());
    let boot = registration.boot.max(record.boot);
    if record.description != description || record.boot != boot {
        record.description = description;
        record.boot = boot;
        let transaction = plane
            .office
            .begin()
            .expecting(&record_key, Some(revision))
            .put(&record);
        match plane.office.commit(transaction).await {
            // Somebody drained the node meanwhile: what it says of itself is kept next time.
            Ok(_) | Err(StoreError::Conflict { .. }) => {}
            Err(error) => return Err(unavailable(error)),
        }
    }
    Ok(())
}

/// Makes what a node says of itself fit to be kept: its key is the one it proved, lists are bounded, figures possible.
fn clean(registration: &mut Registration, key: Digest) {
    let description = &mut registration.description;
    description.fingerprint = key;
    description.emulated_speed = description
        .emulated_speed
        .filter(|speed| speed.is_finite() && *speed > 0.0);
    description.advertised.truncate(LABELS_MAX);
    while description.labels.len() > LABELS_MAX {
        description.labels.pop_last();
    }
    description.device_class = printable(&description.device_class);
    registration.instances.truncate(LIST_MAX);
    registration.artifacts.truncate(LIST_MAX);
}

fn printable(text: &str) -> String {
    const CHARACTERS_MAX: usize = 64;
    let printable = text.chars().filter(|c| !c.is_control());
    printable.take(CHARACTERS_MAX).collect()
}

fn arrived(plane: &Plane, seat: &Seat) {
    let (node, registration) = (&seat.node, &seat.registration);
    let text = format!(
        "connected from {} ({}, {}, {} instances)",
        seat.address,
        registration.description.tier,
        registration.description.device_label(),
        registration.instances.len()
    );
    plane
        .events
        .record(Event::new("node", node_object(node), "gateway", text));
    let fact = monitor::Input::NodeUp {
        node: node.clone(),
        description: registration.description.clone(),
    };
    plane.roles.monitor.tell(fact.into());
    // During a takeover the scheduler is told of all nodes at its end.
    if plane.takeover.is_over() {
        let fact = scheduler::Input::NodeUp {
            node: node.clone(),
            applied: registration.applied,
            instances: registration.instances.clone(),
        };
        plane.roles.scheduler.tell(fact.into());
    }
    plane.dispatch.node_arrived(seat);
    plane.fleet.introduce();
}

fn left(plane: &Plane, seat: &Seat, reason: &str) {
    if !plane.fleet.leave(&seat.node, seat.epoch) {
        // Another session has its place: the node is not gone.
        return;
    }
    let text = format!("session ended: {reason}");
    plane
        .events
        .record(Event::new("node", node_object(&seat.node), "gateway", text));
    let fact = monitor::Input::NodeDown(seat.node.clone());
    plane.roles.monitor.tell(fact.into());
    plane.fleet.introduce();
}

async fn read_messages(plane: &Arc<Plane>, seat: &Seat, mut receive: RecvStream) -> String {
    let mut pace = Pace::new(FACTS_BURST, FACTS_PER_SECOND);
    loop {
        match receive
            .next_frame(MESSAGE_BYTES_MAX, Deadline::never())
            .await
        {
            Ok(Some(message)) => {
                seat.stamp(plane.clock.now());
                pace.take().await;
                if let Err(reason) = take_message(plane, seat, message).await {
                    return reason;
                }
            }
            Ok(None) => return "the agent ended its control stream".to_owned(),
            Err(error) => return error.to_string(),
        }
    }
}

async fn take_message(
    plane: &Arc<Plane>,
    seat: &Seat,
    message: AgentToCoordinator,
) -> Result<(), String> {
    let node = seat.node.clone();
    match message {
        AgentToCoordinator::Register(_) => {
            return Err("a registration must be the first message only".to_owned());
        }
        AgentToCoordinator::Pong(_) => {}
        AgentToCoordinator::Event(event) => {
            if is_possible(&event) {
                tracing::debug!(%node, ?event, "event");
                plane
                    .roles
                    .monitor
                    .tell(monitor::Input::Event { node, event }.into());
            }
        }
        AgentToCoordinator::Applied {
            commit,
            instances,
            in_flight,
        } => {
            let is_ready = instances
                .iter()
                .all(|instance| instance.state == InstanceState::Ready);
            seat.set_applied(Some(commit), instances.clone());
            let fact = scheduler::Input::Applied {
                node: node.clone(),
                commit,
                instances,
                in_flight,
            };
            plane.roles.scheduler.tell(fact.into());
            if is_ready {
                note_applied(plane, &node, commit).await;
            }
        }
        AgentToCoordinator::TargetRefused { commit, reason } => {
            let text = format!("refused target {commit}: {reason}");
            plane
                .events
                .record(Event::new("alarm", node_object(&node), "gateway", text));
            let fact = scheduler::Input::TargetRefused {
                node,
                commit,
                reason,
            };
            plane.roles.scheduler.tell(fact.into());
        }
        AgentToCoordinator::Captured(captured) => {
            if let Some(query) = plane.queries.query_of_set(captured.set) {
                let fact = explorer::Input::Captured(captured);
                plane.roles.tell_explorer(&query, fact);
            }
        }
        AgentToCoordinator::StageDone(mut done) => {
            if plane.trials.node_of(done.trial).as_ref() != Some(&node) {
                return Ok(());
            }
            clean_stage(&mut done);
            plane.trials.done(&done, &plane.metrics);
            plane
                .roles
                .profiler
                .tell(profiler::Input::StageDone { node, done });
        }
        AgentToCoordinator::StageFailed { trial, failure } => {
            if plane.trials.node_of(trial).as_ref() != Some(&node) {
                return Ok(());
            }
            tracing::debug!(%node, %trial, ?failure, "stage failed");
            plane.trials.failed(trial, &failure, &plane.metrics);
            let fact = profiler::Input::StageFailed {
                node,
                trial,
                failure,
            };
            plane.roles.profiler.tell(fact);
        }
    }
    Ok(())
}

/// Drops measurements that cannot be.
fn clean_stage(done: &mut StageDone) {
    let is_time = |ms: f64| ms.is_finite() && ms >= 0.0;
    done.samples
        .retain(|sample| is_time(sample.wall_ms) && is_time(sample.cpu_ms));
    if !is_time(done.cold_start_ms) {
        done.cold_start_ms = 0.0;
    }
    done.transfer = done.transfer.filter(|(ms, _)| is_time(*ms));
    if !done.achieved_cores.is_finite() {
        done.achieved_cores = 0.0;
    }
}

/// Whether an event's figures can be: what is not is dropped before it reaches the planner.
fn is_possible(event: &AgentEvent) -> bool {
    let is_finite = |m: &Measurement| m.value.is_finite() && m.bound.is_finite();
    match event {
        AgentEvent::LinkDegraded { measurement, .. }
        | AgentEvent::LinkRecovered { measurement, .. }
        | AgentEvent::QueueAged { measurement, .. }
        | AgentEvent::ContentDrifted { measurement, .. } => is_finite(measurement),
        AgentEvent::PeerUnreachable { .. } | AgentEvent::WorkerCrashed { .. } => true,
    }
}

/// A node has carried out a target: plans that are thereby in force everywhere get their time.
async fn note_applied(plane: &Plane, node: &NodeId, commit: compass_shared::ids::Commit) {
    for (query, generation) in plane.dispatch.applied(node, commit) {
        let now = now_unix_ms();
        let noted = plane
            .note_on_plan(&query, generation, |record| {
                record.applied_unix_ms = Some(now);
            })
            .await;
        if let Err(error) = noted {
            tracing::warn!(%query, %generation, %error, "time of application not recorded");
        }
        tracing::info!(%query, %generation, %commit, "plan applied on all its nodes");
    }
}

async fn write_messages(mut send: SendStream, mut outgoing: Outgoing) -> String {
    loop {
        let message = tokio::select! {
            biased;
            message = outgoing.outbox.recv() => match message {
                Some(message) => message,
                None => return "the seat was taken away".to_owned(),
            },
            Ok(()) = outgoing.target.changed() => {
                let target = outgoing.target.borrow_and_update().clone();
                let Some(target) = target else { continue };
                CoordinatorToAgent::Target((*target).clone())
            }
            Ok(()) = outgoing.peers.changed() => {
                CoordinatorToAgent::Peers(outgoing.peers.borrow_and_update().clone())
            }
        };
        if let Err(error) = send.write_frame(&message, Deadline::after_s(WRITE_S)).await {
            return format!("the agent does not take its messages: {error}");
        }
    }
}

/// Takes periodic reports in, each on a stream of its own; a slow or damaged one holds up no other.
async fn take_reports(plane: &Arc<Plane>, seat: &Arc<Seat>) -> String {
    let mut incoming = JoinSet::new();
    loop {
        while incoming.len() >= REPORTS_AT_ONCE {
            incoming.join_next().await;
        }
        let stream = match seat.session.accept_uni(Deadline::never()).await {
            Ok(stream) => stream,
            Err(error) => return error.to_string(),
        };
        let (plane, seat) = (plane.clone(), seat.clone());
        incoming.spawn(async move { take_report(&plane, &seat, stream).await });
    }
}

async fn take_report(plane: &Plane, seat: &Seat, mut stream: RecvStream) {
    let deadline = Deadline::after_s(READ_S);
    match stream
        .read_frame::<AgentReport>(REPORT_BYTES_MAX, deadline)
        .await
    {
        Ok(report) => plane.fleet.report(seat, report),
        Err(error) => {
            count(&plane.metrics.reports_dropped, "damaged");
            tracing::debug!(node = %seat.node, %error, "report dropped");
            stream.stop(ResetCode::BAD_MESSAGE);
        }
    }
}

async fn take_requests(plane: &Arc<Plane>, seat: &Arc<Seat>) -> String {
    let mut incoming = JoinSet::new();
    loop {
        while incoming.len() >= REQUESTS_AT_ONCE {
            incoming.join_next().await;
        }
        let streams = match seat.session.accept_bi(Deadline::never()).await {
            Ok(streams) => streams,
            Err(error) => return error.to_string(),
        };
        let (plane, seat) = (plane.clone(), seat.clone());
        incoming.spawn(async move {
            if let Err(error) = answer(&plane, streams).await {
                tracing::debug!(node = %seat.node, %error, "request not answered");
            }
        });
    }
}

async fn answer(
    plane: &Arc<Plane>,
    (mut send, mut receive): (SendStream, RecvStream),
) -> Result<(), TransportError> {
    let deadline = Deadline::after_s(READ_S);
    let request = match receive.read_frame(REPORT_BYTES_MAX, deadline).await {
        Ok(request) => request,
        Err(error) => {
            receive.stop(ResetCode::BAD_MESSAGE);
            return Err(error);
        }
    };
    match request {
        AgentRequest::Artifact { digest, offset } => {
            send.set_priority(Priority::Bulk);
            send_artifact(plane, &mut send, digest, offset).await?;
        }
    }
    send.finish()
}

async fn send_artifact(
    plane: &Arc<Plane>,
    send: &mut SendStream,
    digest: Digest,
    offset: u64,
) -> Result<(), TransportError> {
    let opened = blocking({
        let plane = plane.clone();
        move || {
            plane
                .artifacts
                .open_at(&digest, offset)
                .map_err(|error| error.to_string())
        }
    })
    .await;
    let (mut file, total_bytes) = match opened {
        Ok(opened) => opened,
        Err(reason) => {
            let refused = AgentResponse::Refused { reason };
            return send.write_frame(&refused, Deadline::after_s(WRITE_S)).await;
        }
    };
    let head = AgentResponse::Artifact { total_bytes };
    send.write_frame(&head, Deadline::after_s(WRITE_S)).await?;
    loop {
        let read = blocking(move || {
            let chunk = read_chunk(&mut file, CHUNK_BYTES).map_err(|error| error.to_string())?;
            Ok((file, chunk))
        })
        .await;
        let (back, chunk) = match read {
            Ok(read) => read,
            Err(error) => {
                // Dropping the stream without finishing it tells the agent that this is not the whole file.
                tracing::error!(%digest, error, "artifact cannot be read");
                send.reset(ResetCode::ABANDONED);
                return Ok(());
            }
        };
        if chunk.is_empty() {
            return Ok(());
        }
        file = back;
        plane.metrics.artifact_bytes.inc_by(chunk.len() as u64);
        send.write_bytes(Bytes::from(chunk), Deadline::after_s(CHUNK_S))
            .await?;
    }
}

async fn blocking<T: Send + 'static>(
    call: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    tokio::task::spawn_blocking(call)
        .await
        .unwrap_or_else(|error| Err(error.to_string()))
}
