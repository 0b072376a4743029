//! What can go wrong on an established session, and the codes in which peers tell each other why they hang up.

use std::fmt;
use std::time::Duration;

use compass_shared::codec::CodecError;

/// Longest reason text sent when closing, in bytes: it must fit one packet.
const REASON_BYTES_MAX: usize = 480;

/// Why a side closed a session; part of the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CloseCode(pub u32);

impl CloseCode {
    /// Nothing more to say.
    pub const DONE: Self = Self(0);
    /// The peer's certificate does not give it access here.
    pub const REFUSED: Self = Self(1);
    /// The first frame was not a hello.
    pub const BAD_HELLO: Self = Self(2);
    /// The version ranges do not meet.
    pub const NO_COMMON_VERSION: Self = Self(3);
    /// Too many peers at once.
    pub const BUSY: Self = Self(4);
    /// A newer session of the same peer took this one's place.
    pub const REPLACED: Self = Self(5);
    /// Another live session has the same identity.
    pub const CONFLICT: Self = Self(6);
    /// A message was damaged, too large, or not allowed here.
    pub const BAD_MESSAGE: Self = Self(7);
    /// The process is going away; come back later.
    pub const SHUTDOWN: Self = Self(8);

    /// Whether trying again soon is pointless without a change on one side.
    pub fn is_lasting(self) -> bool {
        matches!(
            self,
            Self::REFUSED | Self::BAD_HELLO | Self::NO_COMMON_VERSION | Self::CONFLICT
        )
    }
}

impl fmt::Display for CloseCode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match *self {
            Self::DONE => "done",
            Self::REFUSED => "refused",
            Self::BAD_HELLO => "bad hello",
            Self::NO_COMMON_VERSION => "no common version",
            Self::BUSY => "busy",
            Self::REPLACED => "replaced",
            Self::CONFLICT => "identity conflict",
            Self::BAD_MESSAGE => "bad message",
            Self::SHUTDOWN => "shutting down",
            Self(code) => return write!(formatter, "code {code}"),
        };
        formatter.write_str(name)
    }
}

/// Why a single stream was cut off; part of the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ResetCode(pub u32);

impl ResetCode {
    /// The sender or reader dropped the stream before its end.
    pub const ABANDONED: Self = Self(1);
    /// A deadline passed in the middle.
    pub const DEADLINE: Self = Self(2);
    /// What the stream carried is no longer wanted (a newer frame, a withdrawn query).
    pub const STALE: Self = Self(3);
    /// The reader could not make sense of the bytes.
    pub const BAD_MESSAGE: Self = Self(4);
}

/// How a session ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Closed {
    /// The peer closed it.
    #[error("closed by the peer ({code}): {reason}")]
    ByPeer {
        /// Why, for programs.
        code: CloseCode,
        /// Why, for people.
        reason: String,
    },
    /// This side closed it.
    #[error("closed by this side")]
    ByUs,
    /// Nothing was heard from the peer for the idle timeout.
    #[error("peer fell silent")]
    TimedOut,
    /// The peer restarted, or the connection broke for another reason.
    #[error("connection lost: {0}")]
    Lost(String),
}

/// What can go wrong when a session or one of its streams is used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransportError {
    /// The peer did not keep up. A write that fails so has reset its stream; a read can be repeated.
    #[error("{what} took longer than {after:?}")]
    Deadline {
        /// What was being done.
        what: &'static str,
        /// How long it was allowed to take.
        after: Duration,
    },
    /// The whole session is over.
    #[error(transparent)]
    Closed(#[from] Closed),
    /// The peer cut off its sending side of this stream.
    #[error("stream was reset by the peer (code {})", .0.0)]
    Reset(ResetCode),
    /// The peer does not want to read this stream any more.
    #[error("peer stopped reading the stream (code {})", .0.0)]
    Stopped(ResetCode),
    /// The stream was already finished or reset by this side.
    #[error("stream is already finished")]
    AlreadyFinished,
    /// The stream ended where a message was expected.
    #[error("stream ended where a message was expected")]
    EndOfStream,
    /// The stream ended in the middle of a message.
    #[error("stream ended after {found} of {expected} bytes")]
    Truncated {
        /// Bytes that arrived.
        found: usize,
        /// Bytes announced.
        expected: usize,
    },
    /// More raw bytes than the reader allows.
    #[error("stream carries more than {limit} bytes")]
    TooLong {
        /// The reader's limit.
        limit: usize,
    },
    /// A message could not be written or read.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// A datagram cannot be sent on this session.
    #[error("datagram of {bytes} bytes cannot be sent: {reason}")]
    Datagram {
        /// Its size.
        bytes: usize,
        /// Why not.
        reason: String,
    },
}

impl TransportError {
    /// Whether the whole session is over.
    pub fn is_closed(&self) -> bool {
        matches!(self, Self::Closed(_))
    }
}

/// Cuts a reason to what fits a packet, at a character boundary.
pub(crate) fn reason_bytes(reason: &str) -> &[u8] {
    let mut end = reason.len().min(REASON_BYTES_MAX);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    &reason.as_bytes()[..end]
}

impl From<quinn::ConnectionError> for Closed {
    fn from(error: quinn::ConnectionError) -> Self {
        use quinn::ConnectionError as Quic;
        match error {
            Quic::ApplicationClosed(close) => Self::ByPeer {
                code: CloseCode(u32::try_from(close.error_code.into_inner()).unwrap_or(u32::MAX)),
                reason: printable(&close.reason),
            },
            Quic::LocallyClosed => Self::ByUs,
            Quic::TimedOut => Self::TimedOut,
            Quic::Reset => Self::Lost("the peer has restarted".to_owned()),
            other => Self::Lost(describe(&other)),
        }
    }
}

/// A reason text from the network, made fit to be logged.
fn printable(reason: &[u8]) -> String {
    String::from_utf8_lossy(reason)
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

/// Says in our words why a connection could not be made or was lost.
pub(crate) fn describe(error: &quinn::ConnectionError) -> String {
    use quinn::ConnectionError as Quic;
    /// TLS alert `no_application_protocol`, as QUIC carries it.
    const NO_APPLICATION_PROTOCOL: u64 = 0x100 + 120;
    match error {
        Quic::TimedOut => "no answer".to_owned(),
        Quic::ConnectionClosed(close) if u64::from(close.error_code) == NO_APPLICATION_PROTOCOL => {
            "the peer does not serve this protocol".to_owned()
        }
        Quic::ConnectionClosed(close)
            if close.error_code == quinn::TransportErrorCode::CONNECTION_REFUSED =>
        {
            "the peer is busy and refused the connection".to_owned()
        }
        Quic::ConnectionClosed(close) => {
            format!("closed by the peer: {}", printable(&close.reason))
        }
        Quic::TransportError(error) => error.reason.clone(),
        other => other.to_string(),
    }
}

impl From<quinn::ConnectionError> for TransportError {
    fn from(error: quinn::ConnectionError) -> Self {
        Self::Closed(error.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_reasons_are_cut_between_characters() {
        let reason = "é".repeat(600);
        let bytes = reason_bytes(&reason);
        assert!(bytes.len() <= REASON_BYTES_MAX);
        assert!(std::str::from_utf8(bytes).is_ok());
        assert_eq!(reason_bytes("short"), b"short");
    }

    #[test]
    fn reasons_from_the_network_are_safe_to_log() {
        assert_eq!(printable(b"a\x1b[31m\nb\xff"), "a [31m b\u{fffd}");
    }
}
