//! A data connection to a node: frames go out on it when frames enter there, results come in on it when they are made there.

use std::sync::Arc;
use std::time::Duration;

use compass_shared::ids::FrameId;
use compass_shared::model::outcome::Outcome;
use compass_shared::model::plan::Peer;
use compass_shared::wire::v1::{FrameHeader, HopControl};
use compass_transport::{
    Alpn, Backoff, BackoffSettings, Deadline, Dial, Priority, RecvStream, Role, SendStream,
    ServerTrust, Session, TransportError,
};
use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::app::{Answer, Event, Shared};

const CONNECT_S: u64 = 5;
/// Largest control message or header accepted, encoded.
const MESSAGE_BYTES_MAX: usize = 1 << 20;

const MESSAGE_S: u64 = 5;

/// Longest wait between attempts: a frame is worth a second or two, so waiting longer helps nobody.
const RETRY_MAX: Duration = Duration::from_secs(2);

/// Largest result accepted.
const RESULT_BYTES_MAX: u32 = 8 << 20;

/// Control messages that may wait to be written.
const CONTROL_QUEUE: usize = 256;

/// Keeps the connection until aborted.
pub(crate) async fn run(shared: Arc<Shared>, peer: Peer) {
    let mut backoff = Backoff::new(BackoffSettings {
        base: Duration::from_millis(100),
        cap: RETRY_MAX,
        ..BackoffSettings::default()
    });
    let mut random = StdRng::from_os_rng();
    let dial = Dial::new(Alpn::Data, Role::Node(peer.node.clone()))
        .trusting(ServerTrust::Key(peer.fingerprint));
    loop {
        let began = Instant::now();
        match shared
            .endpoint
            .connect(&peer.addresses, &dial, Deadline::after_s(CONNECT_S))
            .await
        {
            Ok(session) => {
                let error = serve(&shared, &peer, session).await;
                tracing::debug!(node = %peer.node, %error, "data connection ended");
                shared
                    .tell(Event::Connection(format!(
                        "the connection to node {} was lost: {error}",
                        peer.node
                    )))
                    .await;
            }
            Err(error) => tracing::debug!(node = %peer.node, %error, "node not reached"),
        }
        backoff.session_ended(began.elapsed());
        tokio::time::sleep(backoff.next_delay(&mut random)).await;
    }
}

/// One connection; returns why it ended.
async fn serve(shared: &Arc<Shared>, peer: &Peer, session: Arc<dyn Session>) -> TransportError {
    let Some((send, receive)) = session.take_control() else {
        return TransportError::AlreadyFinished;
    };
    let (say, to_say) = mpsc::channel(CONTROL_QUEUE);
    let is_entry = *shared.entry.borrow() == peer.node;
    if is_entry {
        shared.state().outbox.restart();
    }
    let outcome = tokio::select! {
        error = speak(send, to_say) => error,
        error = listen(shared, receive, &say) => error,
        error = take_results(shared, &session, &say) => error,
        error = send_frames(shared, peer, &session, &say) => error,
    };
    session.close(
        compass_transport::CloseCode::DONE,
        "the connection is not needed any more",
    );
    outcome
}

async fn speak(mut send: SendStream, mut to_say: mpsc::Receiver<HopControl>) -> TransportError {
    send.set_priority(Priority::Control);
    while let Some(message) = to_say.recv().await {
        if let Err(error) = send
            .write_frame(&message, Deadline::after_s(MESSAGE_S))
            .await
        {
            return error;
        }
    }
    TransportError::AlreadyFinished
}

async fn listen(
    shared: &Arc<Shared>,
    mut receive: RecvStream,
    say: &mpsc::Sender<HopControl>,
) -> TransportError {
    loop {
        match receive
            .next_frame(MESSAGE_BYTES_MAX, Deadline::never())
            .await
        {
            Ok(Some(HopControl::Credit { query, frames })) if query == shared.query => {
                shared.state().outbox.grant(frames);
                shared.sendable.notify_one();
            }
            Ok(Some(HopControl::Ended {
                query,
                frame,
                outcome,
                ..
            })) if query == shared.query => match outcome {
                // The result itself comes by the other connection; until then the frame is kept against its deadline.
                Outcome::Answered | Outcome::Late => shared.state().outbox.forget(frame),
                other => shared.ended(frame, other).await,
            },
            Ok(Some(HopControl::RetryAfter { query, frame, ms })) if query == shared.query => {
                let retry_after = Duration::from_millis(u64::from(ms));
                let mut state = shared.state();
                // Only what is on its way can be refused; its end takes this out again.
                if state.ledger.captured(frame).is_some() {
                    state.requests.refused.insert(frame, retry_after);
                }
            }
            Ok(Some(HopControl::Ping(number))) => {
                let _ = say.send(HopControl::Pong(number)).await;
            }
            Ok(Some(_)) => {}
            Ok(None) => return TransportError::AlreadyFinished,
            Err(error) => return error,
        }
    }
}

async fn take_results(
    shared: &Arc<Shared>,
    session: &Arc<dyn Session>,
    say: &mpsc::Sender<HopControl>,
) -> TransportError {
    loop {
        match session.accept_uni(Deadline::never()).await {
            Ok(stream) => {
                let (shared, say) = (Arc::clone(shared), say.clone());
                tokio::spawn(async move {
                    if let Err(error) = take_result(&shared, stream, &say).await {
                        tracing::debug!(%error, "a result was not read");
                    }
                });
            }
            Err(error) => return error,
        }
    }
}

async fn take_result(
    shared: &Shared,
    mut stream: RecvStream,
    say: &mpsc::Sender<HopControl>,
) -> Result<(), TransportError> {
    let header: FrameHeader = stream
        .read_frame(MESSAGE_BYTES_MAX, Deadline::after_s(MESSAGE_S))
        .await?;
    let expected = header.query == shared.query
        && header.to.is_none()
        && header.payload_bytes <= RESULT_BYTES_MAX;
    if !expected {
        stream.stop(compass_transport::ResetCode::ABANDONED);
        return Ok(());
    }
    let payload = stream
        .read_bytes(header.payload_bytes as usize, Deadline::after_s(MESSAGE_S))
        .await?;
    let frame: FrameId = header.frame;
    let recorded = {
        let now = shared.now();
        let mut state = shared.state();
        state.outbox.forget(frame);
        let recorded = state.ledger.result(now, frame, header.generation);
        if let Some((latency, _)) = recorded {
            state.requests.answered(latency);
        }
        recorded
    };
    let outcome = recorded.map_or(Outcome::Expired, |(_, outcome)| outcome);
    let query = shared.query.clone();
    // Both may fail only when the connection is going down; the sender then learns the outcome when it sends again.
    let _ = say
        .send(HopControl::Received {
            query: query.clone(),
            frame,
            to: None,
        })
        .await;
    let _ = say
        .send(HopControl::Ended {
            query,
            frame,
            to: None,
            outcome,
        })
        .await;
    if let Some((latency, outcome)) = recorded {
        let answer = Answer {
            frame,
            generation: header.generation,
            latency,
            outcome,
            content: header.content,
            payload,
        };
        shared.tell(Event::Result(answer)).await;
    }
    Ok(())
}

/// Sends waiting frames while this node is the entry.
async fn send_frames(
    shared: &Arc<Shared>,
    peer: &Peer,
    session: &Arc<dyn Session>,
    say: &mpsc::Sender<HopControl>,
) -> TransportError {
    let mut entry = shared.entry.subscribe();
    let mut has_said = false;
    loop {
        if *entry.borrow_and_update() != peer.node {
            if entry.changed().await.is_err() {
                return TransportError::AlreadyFinished;
            }
            if *entry.borrow() == peer.node {
                shared.state().outbox.restart();
            }
            continue;
        }
        let next = shared.state().outbox.pop();
        let Some((frame, held)) = next else {
            tokio::select! {
                () = shared.sendable.notified() => {}
                _ = entry.changed() => entry.mark_changed(),
            }
            continue;
        };
        let age = {
            let now = shared.now();
            shared
                .state()
                .ledger
                .captured(frame)
                .map(|captured| now.since(captured))
        };
        let Some(age) = age else { continue };
        if !has_said && shared.state().requests.are_sent {
            has_said = true;
            let query = shared.query.clone();
            // Fails only when the connection is going down.
            let _ = say.send(HopControl::Requests { query }).await;
        }
        let header = FrameHeader {
            query: shared.query.clone(),
            generation: compass_shared::ids::Generation(0),
            frame,
            from: None,
            to: None,
            age_us: age.as_micros() as u64,
            content: held.content,
            attempt: held.attempt,
            payload_bytes: held.payload.len() as u32,
        };
        if let Err(error) = send_frame(session, &header, held.payload).await {
            return error;
        }
    }
}

async fn send_frame(
    session: &Arc<dyn Session>,
    header: &FrameHeader,
    payload: bytes::Bytes,
) -> Result<(), TransportError> {
    let deadline = Deadline::after_s(MESSAGE_S);
    let mut stream = session.open_uni(deadline).await?;
    stream.set_priority(Priority::Live);
    stream.write_frame(header, deadline).await?;
    stream.write_bytes(payload, deadline).await?;
    stream.finish()
}
