//! What nodes ask of each other beside frames: outputs of trial stages, and the state of an operator that moves.
//!
//! Each request has a bidirectional stream of its own: request, response, raw bytes.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use compass_shared::ids::{Digest, FrameId, Generation, NodeId, OperatorId, QueryId, SampleSetId};
use compass_shared::wire::v1::{PeerRequest, PeerResponse};
use compass_transport::{Deadline, Priority, RecvStream, SendStream, Session, TransportError};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use crate::trials::{StageOutputs, Trials};
use crate::workers::Payload;

use super::Board;
use super::hub::Command;
use super::pace::Pace;

/// Largest request or response accepted, encoded: frame numbers and sizes of some thousand samples.
const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// Time for a request to be read and answered, its raw bytes apart.
const ANSWER_S: u64 = 10;

/// Time for the inputs of a trial stage to come over: a few megabytes on a link of a megabit.
const STAGE_S: u64 = 60;

/// Longest wait for a connection to a holder.
const CONNECT_S: u64 = 5;

/// Bytes of one stage's inputs accepted from another node.
const STAGE_BYTES_MAX: u64 = 256 << 20;

/// Largest state of an operator that is moved.
const STATE_BYTES_MAX: u32 = 64 << 20;

/// A transfer that stands back for others still sends a part this often: a trial must end some day.
const STAND_BACK_MAX: Duration = Duration::from_secs(1);

/// Time between two looks at a link that is full.
const LOOK: Duration = Duration::from_millis(5);

/// Requests of one peer that are served at once.
const SERVED_AT_ONCE: usize = 8;

/// The connection to a node, once there is one.
pub(super) async fn session_to(board: &Board, node: &NodeId) -> Result<Arc<dyn Session>, String> {
    let mut sessions = board.sessions.subscribe();
    let found = tokio::time::timeout(Duration::from_secs(CONNECT_S), async {
        let known = sessions
            .wait_for(|sessions| sessions.contains_key(node))
            .await;
        known.ok().and_then(|known| known.get(node).cloned())
    })
    .await;
    found
        .ok()
        .flatten()
        .ok_or_else(|| format!("there is no connection to node {node}"))
}

async fn ask(
    session: &Arc<dyn Session>,
    request: &PeerRequest,
    deadline: Deadline,
) -> Result<(PeerResponse, RecvStream), TransportError> {
    let (mut send, mut receive) = session.open_bi(deadline).await?;
    send.set_priority(Priority::Bulk);
    send.write_frame(request, deadline).await?;
    send.finish()?;
    let response = receive.read_frame(MESSAGE_BYTES_MAX, deadline).await?;
    Ok((response, receive))
}

/// Outputs of a stage (or captured frames) from the node that holds them.
pub(super) async fn fetch_stage(
    session: &Arc<dyn Session>,
    query: &QueryId,
    set: SampleSetId,
    prefix: Digest,
    frames: &[FrameId],
) -> Result<StageOutputs, String> {
    let request = PeerRequest::FetchStage {
        query: query.clone(),
        set,
        prefix,
        frames: frames.to_vec(),
    };
    let deadline = Deadline::after_s(STAGE_S);
    let (response, mut receive) = ask(session, &request, deadline)
        .await
        .map_err(|error| error.to_string())?;
    let listed = match response {
        PeerResponse::Stage { frames } => frames,
        PeerResponse::Refused { reason } => return Err(reason),
        PeerResponse::State { .. } => return Err("the peer answered something else".to_owned()),
    };
    let sizes = listed.iter().filter_map(|(_, output)| output.as_ref());
    let total: u64 = sizes.map(|(_, bytes)| u64::from(*bytes)).sum();
    if total > STAGE_BYTES_MAX {
        return Err(format!("{total} bytes of inputs are too many"));
    }
    if listed.iter().map(|(frame, _)| frame).ne(frames) {
        return Err("the peer answered for other frames".to_owned());
    }
    let mut outputs = Vec::with_capacity(listed.len());
    for (frame, output) in listed {
        let payload = match output {
            None => None,
            Some((content, bytes)) => Some(Payload {
                content,
                bytes: receive
                    .read_bytes(bytes as usize, deadline)
                    .await
                    .map_err(|error| error.to_string())?,
            }),
        };
        outputs.push((frame, payload));
    }
    Ok(outputs)
}

/// The state of an operator from the node it leaves.
pub(super) async fn take_state(
    session: &Arc<dyn Session>,
    query: QueryId,
    operator: OperatorId,
    generation: Generation,
    deadline: Deadline,
) -> Result<Bytes, String> {
    let request = PeerRequest::TakeState {
        query,
        operator,
        generation,
    };
    let (response, mut receive) = ask(session, &request, deadline)
        .await
        .map_err(|error| error.to_string())?;
    match response {
        PeerResponse::State { bytes } if bytes <= STATE_BYTES_MAX => receive
            .read_bytes(bytes as usize, deadline)
            .await
            .map_err(|error| error.to_string()),
        PeerResponse::State { bytes } => Err(format!("a state of {bytes} bytes is too large")),
        PeerResponse::Refused { reason } => Err(reason),
        PeerResponse::Stage { .. } => Err("the peer answered something else".to_owned()),
    }
}

/// Serves the requests of one node until its session ends.
pub(super) async fn serve(
    session: Arc<dyn Session>,
    trials: Arc<Trials>,
    commands: mpsc::UnboundedSender<Command>,
) {
    let mut served = JoinSet::new();
    while let Ok((send, receive)) = session.accept_bi(Deadline::never()).await {
        if served.len() >= SERVED_AT_ONCE {
            served.join_next().await;
        }
        let (trials, commands) = (Arc::clone(&trials), commands.clone());
        let session = Arc::clone(&session);
        served.spawn(async move {
            if let Err(error) = answer(&*session, send, receive, &trials, &commands).await {
                tracing::debug!(%error, "a peer's request was not served");
            }
        });
        while served.try_join_next().is_some() {}
    }
}

async fn answer(
    session: &dyn Session,
    mut send: SendStream,
    mut receive: RecvStream,
    trials: &Trials,
    commands: &mpsc::UnboundedSender<Command>,
) -> Result<(), TransportError> {
    let request: PeerRequest = receive
        .read_frame(MESSAGE_BYTES_MAX, Deadline::after_s(ANSWER_S))
        .await?;
    let mut pace = None;
    let (response, payloads) = match request {
        PeerRequest::FetchStage {
            query,
            set,
            prefix,
            frames,
        } => {
            send.set_priority(Priority::Bulk);
            pace = Some(Pace::new(&session.stats()));
            stage(trials.serve(&query, set, prefix, &frames))
        }
        PeerRequest::TakeState {
            query,
            operator,
            generation,
        } => {
            send.set_priority(Priority::Live);
            state(commands, query, operator, generation).await
        }
    };
    send.write_frame(&response, Deadline::after_s(ANSWER_S))
        .await?;
    let deadline = Deadline::after_s(STAGE_S);
    for payload in payloads {
        if let Some(pace) = &mut pace {
            let room = async {
                while !pace.may_send(&session.stats()) {
                    tokio::time::sleep(LOOK).await;
                }
            };
            // In vain: a part goes all the same.
            let _ = tokio::time::timeout(STAND_BACK_MAX, room).await;
            pace.sent(payload.len() as u64);
        }
        send.write_bytes(payload, deadline).await?;
    }
    send.finish()
}

fn stage(outputs: Result<StageOutputs, String>) -> (PeerResponse, Vec<Bytes>) {
    let outputs = match outputs {
        Ok(outputs) => outputs,
        Err(reason) => return (PeerResponse::Refused { reason }, vec![]),
    };
    let mut frames = Vec::with_capacity(outputs.len());
    let mut payloads = Vec::new();
    for (frame, output) in outputs {
        let listed = output.map(|payload| {
            let bytes = u32::try_from(payload.bytes.len()).unwrap_or(u32::MAX);
            payloads.push(payload.bytes);
            (payload.content, bytes)
        });
        frames.push((frame, listed));
    }
    (PeerResponse::Stage { frames }, payloads)
}

async fn state(
    commands: &mpsc::UnboundedSender<Command>,
    query: QueryId,
    operator: OperatorId,
    generation: Generation,
) -> (PeerResponse, Vec<Bytes>) {
    let refused = |reason: String| (PeerResponse::Refused { reason }, vec![]);
    let (reply, found) = oneshot::channel();
    let asked = commands.send(Command::OperatorOf {
        query: query.clone(),
        operator,
        generation,
        reply,
    });
    let holder = match (asked, found.await) {
        (Ok(()), Ok(Some(holder))) => holder,
        _ => return refused("that operator does not run here".to_owned()),
    };
    match holder.snapshot(&query).await {
        Ok(state) => {
            let bytes = u32::try_from(state.len()).unwrap_or(u32::MAX);
            (PeerResponse::State { bytes }, vec![state.into()])
        }
        Err(error) => refused(error.to_string()),
    }
}
