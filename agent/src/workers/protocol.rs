//! The messages between the agent and a worker, and how they are laid out in bytes. `PROTOCOL.md` says the same for people.
//!
//! One layout serves both directions: two big-endian 32-bit lengths, a JSON header, raw payload bytes. JSON, because children in any
//! language must be able to speak it; raw payloads, because a camera frame is a megabyte. Lengths are checked before anything is
//! allocated: a broken child must not make the agent eat memory.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::path::PathBuf;

use bytes::{Bytes, BytesMut};
use compass_shared::model::catalogue::Runtime;
use compass_shared::model::pipeline::{Configuration, KnobValue};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The version of this protocol; a child that does not know it should answer the start with an error.
pub(crate) const PROTOCOL: u32 = 1;
/// No header is larger than this.
const HEADER_BYTES_MAX: u32 = 64 * 1024;
/// No payload is larger than this: an uncompressed 4K frame has 25 MB.
pub(crate) const PAYLOAD_BYTES_MAX: u32 = 64 * 1024 * 1024;

/// Agent to worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase")]
pub(crate) enum Request {
    /// First message: load what is needed, then answer `ready`.
    Start(Start),
    /// Process a frame; the payload is all inputs' bytes one after another.
    Frame {
        /// The query.
        query: String,
        /// The frame's number.
        frame: u64,
        /// One per input of the operator.
        inputs: Vec<InputHeader>,
    },
    /// Answer with what is remembered of a query.
    Snapshot {
        /// The query.
        query: String,
    },
    /// Remember the payload, which is an earlier snapshot.
    Restore {
        /// The query.
        query: String,
    },
    /// Forget a query.
    Reset {
        /// The query.
        query: String,
    },
}

/// What a worker is to be.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Start {
    /// Version of this protocol.
    pub(crate) protocol: u32,
    /// The operator kind's name in the catalogue.
    pub(crate) kind: String,
    /// One value per knob: numbers and words.
    pub(crate) configuration: BTreeMap<String, Knob>,
    /// The model file.
    pub(crate) artifact: Option<PathBuf>,
    /// For the built-in worker only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) runtime: Option<Runtime>,
}

/// A knob's value as plain JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Knob {
    /// A number.
    Integer(i64),
    /// A word.
    Text(String),
}

/// Knobs as plain JSON values.
pub(crate) fn knobs(configuration: &Configuration) -> BTreeMap<String, Knob> {
    configuration
        .0
        .iter()
        .map(|(name, value)| {
            let value = match value {
                KnobValue::Integer(number) => Knob::Integer(*number),
                KnobValue::Text(word) => Knob::Text(word.clone()),
            };
            (name.as_str().to_owned(), value)
        })
        .collect()
}

/// One input of a frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InputHeader {
    /// How to read it.
    pub(crate) content: String,
    /// Its size. When the worker said that it wants no payloads, the bytes themselves are left out.
    pub(crate) bytes: u32,
}

/// Worker to agent; exactly one per request, in order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "lowercase")]
pub(crate) enum Answer {
    /// Before the first request: the limits are taken on. Foreign programs do not send it, it is sent before they are executed.
    Confined {
        /// Limits that the kernel does not apply although it was asked to, in words.
        broken: Vec<String>,
        /// Whether the kernel holds the CPU share.
        cpu_enforced: bool,
        /// The bound on its memory that was set, in bytes.
        memory_bytes: Option<u64>,
    },
    /// To `start`: it is warm.
    Ready {
        /// Whether it wants to see payloads; one that decides by the frame's number alone does not.
        #[serde(default = "yes")]
        payload: bool,
    },
    /// To `frame`: the payload is the output.
    Output {
        /// How to read it.
        content: String,
        /// CPU time it took in microseconds; measured from outside when it is left out.
        #[serde(default)]
        cpu_us: Option<u64>,
    },
    /// To `frame`: the output is this input, unchanged (and not sent again).
    Forward {
        /// Which, from 0.
        input: usize,
        /// See `Output`.
        #[serde(default)]
        cpu_us: Option<u64>,
    },
    /// To `frame`: a knob leaves it out.
    Skipped {
        /// See `Output`.
        #[serde(default)]
        cpu_us: Option<u64>,
    },
    /// To `snapshot`: the payload is the state.
    State,
    /// To `restore` and `reset`.
    Done,
    /// To anything: it cannot be done; the worker goes on.
    Error {
        /// Why, in words.
        message: String,
    },
}

const fn yes() -> bool {
    true
}

/// The first eight bytes and the header of a message.
pub(crate) fn head(header: &impl Serialize, payload_bytes: usize) -> io::Result<Vec<u8>> {
    let mut head = vec![0; 8];
    serde_json::to_writer(&mut head, header)?;
    let header_bytes = u32::try_from(head.len() - 8)
        .ok()
        .filter(|n| *n <= HEADER_BYTES_MAX)
        .ok_or_else(|| too_large("header", head.len() as u64))?;
    let payload_bytes = u32::try_from(payload_bytes)
        .ok()
        .filter(|n| *n <= PAYLOAD_BYTES_MAX)
        .ok_or_else(|| too_large("payload", payload_bytes as u64))?;
    head[..4].copy_from_slice(&header_bytes.to_be_bytes());
    head[4..8].copy_from_slice(&payload_bytes.to_be_bytes());
    Ok(head)
}

fn too_large(what: &str, bytes: u64) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("a {what} of {bytes} bytes is too large"),
    )
}

/// Header and payload lengths from a message's first eight bytes.
fn lengths(first: [u8; 8]) -> io::Result<(usize, usize)> {
    let [a, b, c, d, e, f, g, h] = first;
    let (header, payload) = (
        u32::from_be_bytes([a, b, c, d]),
        u32::from_be_bytes([e, f, g, h]),
    );
    if header > HEADER_BYTES_MAX {
        return Err(too_large("header", header.into()));
    }
    if payload > PAYLOAD_BYTES_MAX {
        return Err(too_large("payload", payload.into()));
    }
    Ok((header as usize, payload as usize))
}

/// Writes a message whose payload comes in pieces.
pub(crate) async fn send<W: AsyncWrite + Unpin>(
    to: &mut W,
    header: &impl Serialize,
    payload: &[Bytes],
) -> io::Result<()> {
    let head = head(header, payload.iter().map(Bytes::len).sum())?;
    to.write_all(&head).await?;
    for piece in payload {
        to.write_all(piece).await?;
    }
    to.flush().await
}

/// Reads a message; an end of file anywhere is an error.
pub(crate) async fn receive<R: AsyncRead + Unpin>(from: &mut R) -> io::Result<(Answer, Bytes)> {
    let mut first = [0; 8];
    from.read_exact(&mut first).await?;
    // Most often a program that prints to its standard output, which belongs to the messages.
    let broken = |error: io::Error| {
        let reason = format!("its standard output is no worker's message: {error}");
        io::Error::new(io::ErrorKind::InvalidData, reason)
    };
    let (header_bytes, payload_bytes) = lengths(first).map_err(broken)?;
    let mut header = vec![0; header_bytes];
    from.read_exact(&mut header).await?;
    let answer = serde_json::from_slice(&header).map_err(|e| broken(e.into()))?;
    let mut payload = BytesMut::with_capacity(payload_bytes);
    let mut rest = from.take(payload_bytes as u64);
    while payload.len() < payload_bytes {
        if rest.read_buf(&mut payload).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok((answer, payload.freeze()))
}

/// Reads a message on the worker's side into a buffer that is used again; `None` at the end of the input.
pub(crate) fn receive_blocking(
    from: &mut impl Read,
    payload: &mut Vec<u8>,
) -> io::Result<Option<Request>> {
    let mut first = [0; 8];
    let mut got = 0;
    while got < first.len() {
        match from.read(&mut first[got..]) {
            Ok(0) if got == 0 => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => got += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let (header_bytes, payload_bytes) = lengths(first)?;
    let mut header = vec![0; header_bytes];
    from.read_exact(&mut header)?;
    payload.resize(payload_bytes, 0);
    from.read_exact(payload)?;
    Ok(Some(serde_json::from_slice(&header)?))
}

/// Writes a message on the worker's side.
pub(crate) fn send_blocking(
    to: &mut impl Write,
    answer: &Answer,
    payload: &[u8],
) -> io::Result<()> {
    to.write_all(&head(answer, payload.len())?)?;
    to.write_all(payload)?;
    to.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_two_lengths_a_json_header_and_the_payload() {
        let mut bytes = Vec::new();
        let answer = Answer::Output {
            content: "text".to_owned(),
            cpu_us: Some(7),
        };
        send_blocking(&mut bytes, &answer, b"hi").unwrap();
        let header = br#"{"is":"output","content":"text","cpu_us":7}"#;
        assert_eq!(bytes[..8], [0, 0, 0, header.len() as u8, 0, 0, 0, 2]);
        assert_eq!(&bytes[8..8 + header.len()], header);
        assert_eq!(&bytes[8 + header.len()..], b"hi");
    }

    #[tokio::test]
    async fn requests_reach_the_worker_and_the_end_of_input_is_told_from_a_cut() {
        let mut bytes = Vec::new();
        let request = Request::Frame {
            query: "q".to_owned(),
            frame: 3,
            inputs: vec![InputHeader {
                content: "bytes".to_owned(),
                bytes: 4,
            }],
        };
        send(
            &mut bytes,
            &request,
            &[Bytes::from_static(b"ab"), Bytes::from_static(b"cd")],
        )
        .await
        .unwrap();
        let mut payload = Vec::new();
        let got = receive_blocking(&mut &bytes[..], &mut payload).unwrap();
        assert_eq!((got, &payload[..]), (Some(request), &b"abcd"[..]));
        assert_eq!(receive_blocking(&mut &[][..], &mut payload).unwrap(), None);
        for cut in [1, 8, 12, bytes.len() - 1] {
            assert!(receive_blocking(&mut &bytes[..cut], &mut payload).is_err());
        }
    }

    #[tokio::test]
    async fn lengths_beyond_the_bounds_are_refused_before_allocating() {
        for first in [[0xff; 8], [0, 0, 0, 1, 0xff, 0, 0, 0]] {
            let error = receive(&mut &first[..]).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            assert!(receive_blocking(&mut &first[..], &mut Vec::new()).is_err());
        }
    }

    #[tokio::test]
    async fn a_short_answer_from_a_child_gets_defaults_and_ignores_what_it_does_not_know() {
        let header = br#"{"is":"ready","model":"x"}"#;
        let mut bytes = vec![0, 0, 0, header.len() as u8, 0, 0, 0, 0];
        bytes.extend_from_slice(header);
        let (answer, _) = receive(&mut &bytes[..]).await.unwrap();
        assert_eq!(answer, Answer::Ready { payload: true });
    }
}
