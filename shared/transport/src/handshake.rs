//! The exchange of hellos that turns a QUIC connection into a session.
//!
//! The dialler opens the control stream and writes its hello; the accepting side reads it, decides on the version and
//! answers with its own. Until that answer has come nobody counts as connected: QUIC calls a dialler connected before
//! the other side has looked at its certificate.

use compass_shared::wire::hello::{HEAD_BYTES, Hello, HelloError, NoCommonVersion};

use crate::deadline::Deadline;
use crate::error::{CloseCode, TransportError};
use crate::stream::{RecvStream, SendStream};

/// What the exchange agreed on.
#[derive(Debug)]
pub(crate) struct Greeted {
    pub(crate) version: u16,
    pub(crate) peer: Hello,
    pub(crate) control: (SendStream, RecvStream),
}

/// Why the exchange failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GreetingError {
    #[error(transparent)]
    Hello(#[from] HelloError),
    #[error(transparent)]
    Version(#[from] NoCommonVersion),
    #[error("no hello: {0}")]
    Transport(#[from] TransportError),
}

impl GreetingError {
    /// What to tell the peer.
    pub(crate) fn close_code(&self) -> CloseCode {
        match self {
            Self::Version(_) => CloseCode::NO_COMMON_VERSION,
            Self::Hello(_) | Self::Transport(_) => CloseCode::BAD_HELLO,
        }
    }
}

/// The dialling side.
pub(crate) async fn greet(
    connection: &quinn::Connection,
    ours: &Hello,
    deadline: Deadline,
) -> Result<Greeted, GreetingError> {
    let streams = deadline
        .run("opening the control stream", connection.open_bi())
        .await?
        .map_err(TransportError::from)?;
    let mut control = unversioned(streams);
    control
        .0
        .write_bytes(ours.encode()?.into(), deadline)
        .await?;
    let peer = read_hello(&mut control.1, deadline).await?;
    agree(ours, peer, control)
}

/// The accepting side.
pub(crate) async fn answer(
    connection: &quinn::Connection,
    ours: &Hello,
    deadline: Deadline,
) -> Result<Greeted, GreetingError> {
    let streams = deadline
        .run("waiting for the control stream", connection.accept_bi())
        .await?
        .map_err(TransportError::from)?;
    let mut control = unversioned(streams);
    let peer = read_hello(&mut control.1, deadline).await?;
    let mut greeted = agree(ours, peer, control)?;
    greeted
        .control
        .0
        .write_bytes(ours.encode()?.into(), deadline)
        .await?;
    Ok(greeted)
}

/// The hello belongs to no version; the streams learn theirs once it is agreed.
fn unversioned(streams: (quinn::SendStream, quinn::RecvStream)) -> (SendStream, RecvStream) {
    (SendStream::new(streams.0, 0), RecvStream::new(streams.1, 0))
}

fn agree(
    ours: &Hello,
    peer: Hello,
    mut control: (SendStream, RecvStream),
) -> Result<Greeted, GreetingError> {
    let version = ours.negotiate(&peer)?;
    control.0.set_version(version);
    control.1.set_version(version);
    Ok(Greeted {
        version,
        peer,
        control,
    })
}

async fn read_hello(stream: &mut RecvStream, deadline: Deadline) -> Result<Hello, GreetingError> {
    let head = stream.read_bytes(HEAD_BYTES, deadline).await?;
    let head: &[u8; HEAD_BYTES] = head
        .first_chunk()
        .expect("read_bytes gives as many bytes as asked for");
    let text_bytes = Hello::text_bytes(head)?;
    let mut whole = head.to_vec();
    whole.extend_from_slice(&stream.read_bytes(text_bytes, deadline).await?);
    Ok(Hello::decode(&whole)?)
}
