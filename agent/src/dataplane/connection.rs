//! One data connection: the tasks that wait for its streams, and the ways to send on it.
//!
//! Start at [`Connection::new`]. Everything that arrives becomes an [`Arrival`] for the hub, except what needs no decision: pings are
//! answered, probe trains are timed and reported here.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use compass_shared::wire::v1::{FrameHeader, HopControl};
use compass_transport::{
    CloseCode, Deadline, Priority, RecvStream, ResetCode, SendStream, Session, TransportError,
};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{AbortHandle, JoinSet};

use super::core::SendId;

/// Largest control message or frame header accepted, encoded.
const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// Largest payload accepted: an uncompressed 4K picture is 25 MB, which nobody should send from node to node.
const PAYLOAD_BYTES_MAX: u32 = 32 << 20;

/// Time for one message to be taken by the peer, or for a frame to arrive once it has begun.
const MESSAGE_S: u64 = 10;

/// Control messages that may wait to be written; a peer that lets this many pile up is as good as gone.
const CONTROL_QUEUE: usize = 1_024;

/// Payload of one part of a probe train: fills a packet.
const PROBE_PART_BYTES: usize = 1_100;

/// Names a connection within this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ConnectionId(pub(super) u64);

/// Something that came over a connection.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) connection: ConnectionId,
    pub(super) what: Arrived,
}

#[derive(Debug)]
pub(super) enum Arrived {
    /// A frame, whole; `link` is the estimated time between the nodes.
    Frame {
        header: FrameHeader,
        payload: Bytes,
        link: Duration,
    },
    /// A message on the control stream that needs the hub.
    Control(HopControl),
    /// A frame could not be written.
    SendFailed(SendId),
    /// It is over; why.
    Lost(String),
}

/// Where arrivals go, and how much may be on its way there.
#[derive(Debug, Clone)]
pub(super) struct Inbox {
    pub(super) arrivals: mpsc::Sender<Arrival>,
    /// Permits for payload kibibytes that are being read.
    pub(super) room: Arc<Semaphore>,
}

/// A connection the hub holds. Dropping it ends its tasks, not the session.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) id: ConnectionId,
    pub(super) session: Arc<dyn Session>,
    control: mpsc::Sender<HopControl>,
    inbox: Inbox,
    _tasks: JoinSet<()>,
}

impl Connection {
    /// Starts the tasks. `None` when the session's control stream is taken already.
    pub(super) fn new(id: ConnectionId, session: Arc<dyn Session>, inbox: Inbox) -> Option<Self> {
        let (send, receive) = session.take_control()?;
        let (control, to_write) = mpsc::channel(CONTROL_QUEUE);
        let mut tasks = JoinSet::new();
        let reader = Reader {
            id,
            session: Arc::clone(&session),
            inbox: inbox.clone(),
        };
        tasks.spawn(reader.clone().run(send, receive, to_write, control.clone()));
        Some(Self {
            id,
            session,
            control,
            inbox,
            _tasks: tasks,
        })
    }

    /// Says something on the control stream; a peer that does not listen loses the connection.
    pub(super) fn say(&self, message: HopControl) {
        if self.control.try_send(message).is_err() {
            self.session
                .close(CloseCode::BUSY, "the control stream is not being read");
        }
    }

    /// Sends a frame on a stream of its own; gives a handle that stops it while it is being written, `None` when it is already.
    pub(super) fn send(
        &self,
        send: SendId,
        header: FrameHeader,
        payload: Bytes,
        deadline: Duration,
    ) -> Option<AbortHandle> {
        let session = Arc::clone(&self.session);
        let (id, arrivals) = (self.id, self.inbox.arrivals.clone());
        now_or_spawn(async move {
            let sent = send_frame(&*session, &header, payload, Deadline::after(deadline)).await;
            if sent.is_err_and(|error| !error.is_closed()) {
                let what = Arrived::SendFailed(send);
                // Fails only when the hub has ended.
                let _ = arrivals
                    .send(Arrival {
                        connection: id,
                        what,
                    })
                    .await;
            }
        })
    }

    /// Sends a probe train: the number in each part counts down to zero.
    pub(super) fn probe(&self, bytes: u64) {
        let parts = bytes
            .div_ceil(PROBE_PART_BYTES as u64)
            .clamp(2, CONTROL_QUEUE as u64 / 4);
        for number in (0..parts).rev() {
            self.say(HopControl::Probe {
                sequence: u32::try_from(number).unwrap_or(u32::MAX),
                padding: vec![0; PROBE_PART_BYTES],
            });
        }
    }
}

/// Does on the spot what can be done without waiting, and the rest in a task: most frames fit into the windows, and a task costs as
/// much as writing one.
fn now_or_spawn(work: impl Future<Output = ()> + Send + 'static) -> Option<AbortHandle> {
    let mut work = Box::pin(work);
    // If it has to wait, the task's first poll leaves a waker of its own in place of this one.
    match work.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(()) => None,
        Poll::Pending => Some(tokio::spawn(work).abort_handle()),
    }
}

async fn send_frame(
    session: &dyn Session,
    header: &FrameHeader,
    payload: Bytes,
    deadline: Deadline,
) -> Result<(), TransportError> {
    let mut stream = session.open_uni(deadline).await?;
    stream.set_priority(Priority::Live);
    stream
        .write_frame_and_bytes(header, payload, deadline)
        .await?;
    stream.finish()
}

/// Reads everything that comes on a session.
#[derive(Debug, Clone)]
struct Reader {
    id: ConnectionId,
    session: Arc<dyn Session>,
    inbox: Inbox,
}

impl Reader {
    async fn run(
        self,
        send: SendStream,
        receive: RecvStream,
        to_write: mpsc::Receiver<HopControl>,
        control: mpsc::Sender<HopControl>,
    ) {
        let (code, why) = tokio::select! {
            error = write_control(send, to_write) => (CloseCode::DONE, error.to_string()),
            error = self.read_control(receive, control) => {
                let code = if is_bad_message(&error) { CloseCode::BAD_MESSAGE } else { CloseCode::DONE };
                (code, error.to_string())
            }
            error = self.read_frames() => (CloseCode::DONE, error.to_string()),
            closed = self.session.closed() => (CloseCode::DONE, closed.to_string()),
        };
        self.session.close(code, &why);
        self.tell(Arrived::Lost(why)).await;
    }

    async fn tell(&self, what: Arrived) {
        let arrival = Arrival {
            connection: self.id,
            what,
        };
        // Fails only when the hub has ended.
        let _ = self.inbox.arrivals.send(arrival).await;
    }

    async fn read_control(
        &self,
        mut receive: RecvStream,
        control: mpsc::Sender<HopControl>,
    ) -> TransportError {
        let mut train: Option<(Instant, u64)> = None;
        loop {
            let message = match receive
                .next_frame::<HopControl>(MESSAGE_BYTES_MAX, Deadline::never())
                .await
            {
                Ok(Some(message)) => message,
                Ok(None) => return TransportError::EndOfStream,
                Err(error) => return error,
            };
            let answer = match message {
                HopControl::Ping(number) => HopControl::Pong(number),
                HopControl::Probe { sequence, padding } => {
                    let (began, bytes) = train.unwrap_or((Instant::now(), 0));
                    let bytes = bytes + padding.len() as u64;
                    if sequence > 0 {
                        train = Some((began, bytes));
                        continue;
                    }
                    train = None;
                    let micros = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
                    HopControl::ProbeReport { bytes, micros }
                }
                other => {
                    self.tell(Arrived::Control(other)).await;
                    continue;
                }
            };
            // A full queue will be noticed by the hub; the answer would be late anyway.
            let _ = control.try_send(answer);
        }
    }

    async fn read_frames(&self) -> TransportError {
        let mut streams = JoinSet::new();
        loop {
            match self.session.accept_uni(Deadline::never()).await {
                Ok(mut stream) => {
                    let reader = self.clone();
                    let mut read = Box::pin(async move {
                        if let Err(error) = reader.read_frame(&mut stream).await {
                            tracing::debug!(%error, session = ?reader.session, "a frame was not read");
                            if is_bad_message(&error) {
                                stream.stop(ResetCode::BAD_MESSAGE);
                            }
                        }
                    });
                    // A small frame is there whole when its stream is.
                    if read
                        .as_mut()
                        .poll(&mut Context::from_waker(Waker::noop()))
                        .is_pending()
                    {
                        streams.spawn(read);
                    }
                }
                Err(error) => return error,
            }
            while streams.try_join_next().is_some() {}
        }
    }

    async fn read_frame(&self, stream: &mut RecvStream) -> Result<(), TransportError> {
        let deadline = Deadline::after_s(MESSAGE_S);
        let header: FrameHeader = stream.read_frame(MESSAGE_BYTES_MAX, deadline).await?;
        let began = Instant::now();
        if header.payload_bytes > PAYLOAD_BYTES_MAX {
            return Err(TransportError::TooLong {
                limit: PAYLOAD_BYTES_MAX as usize,
            });
        }
        let room = self
            .inbox
            .room
            .acquire_many(1 + header.payload_bytes / 1024);
        let Ok(_permit) = room.await else {
            return Ok(()); // The hub has ended.
        };
        let count = header.payload_bytes as usize;
        let payload = stream.read_bytes(count, deadline).await?;
        // The frame's way: half a round trip for its first byte, then the time in which the rest came in.
        let link = self.session.stats().rtt / 2 + began.elapsed();
        self.tell(Arrived::Frame {
            header,
            payload,
            link,
        })
        .await;
        // Takes note of the end, so that the stream is not reported as given up.
        let _ = stream.read_some(1, deadline).await;
        Ok(())
    }
}

/// Whether it is the peer that is at fault: what it sent cannot be read.
fn is_bad_message(error: &TransportError) -> bool {
    matches!(
        error,
        TransportError::Codec(_)
            | TransportError::TooLong { .. }
            | TransportError::Truncated { .. }
    )
}

async fn write_control(
    mut send: SendStream,
    mut to_write: mpsc::Receiver<HopControl>,
) -> TransportError {
    send.set_priority(Priority::Control);
    while let Some(message) = to_write.recv().await {
        if let Err(error) = send
            .write_frame(&message, Deadline::after_s(MESSAGE_S))
            .await
        {
            return error;
        }
    }
    TransportError::AlreadyFinished
}
