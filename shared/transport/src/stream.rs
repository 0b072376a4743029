//! The two halves of a stream: typed frames over the codec, and raw bytes for payloads.
//!
//! Start at [`SendStream::write_frame`] and [`RecvStream::next_frame`]. Every operation has a deadline. A stream ends
//! in one of two ways: [`SendStream::finish`] says that everything was sent, and anything else (dropping it, a deadline
//! in the middle of a write) resets it, so that a reader never takes half a message for a whole one.

use bytes::{Bytes, BytesMut};
use compass_shared::codec::{self, FrameHeader, HEADER_BYTES};
use quinn::VarInt;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::deadline::Deadline;
use crate::error::{Closed, ResetCode, TransportError};

/// Sending order within a session: higher first. Few levels, because each costs bookkeeping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Artifacts and trial inputs: below live traffic.
    Bulk,
    /// Periodic reports.
    Report,
    /// Frames and results.
    Live,
    /// Control messages.
    Control,
    /// A breach that must be known at once.
    Event,
}

impl Priority {
    fn level(self) -> i32 {
        match self {
            Self::Bulk => -20,
            Self::Report => -10,
            Self::Live => 0,
            Self::Control => 10,
            Self::Event => 20,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sending {
    /// Between writes.
    Idle,
    /// Within a write; found here by a later call, that write was given up in the middle.
    Writing,
    /// Everything was sent; what is buffered is still delivered.
    Finished,
    /// Given up.
    Reset,
}

/// The sending half of a stream.
#[derive(Debug)]
pub struct SendStream {
    inner: quinn::SendStream,
    version: u16,
    state: Sending,
}

/// Least bytes to take at once while a message is read: its header, its body and a small payload come in one packet.
const READ_AHEAD_BYTES: usize = 2 * 1024;

/// Largest first allocation for a message whose length the peer announces, in bytes; more is allocated as it arrives.
const RESERVE_BYTES_MAX: usize = 256 * 1024;

impl SendStream {
    pub(crate) fn new(inner: quinn::SendStream, version: u16) -> Self {
        Self {
            inner,
            version,
            state: Sending::Idle,
        }
    }

    pub(crate) fn set_version(&mut self, version: u16) {
        self.version = version;
    }

    /// Sends one message as a frame.
    ///
    /// # Errors
    /// After an error other than [`TransportError::Codec`] the stream is reset.
    pub async fn write_frame<T: Serialize + ?Sized>(
        &mut self,
        message: &T,
        deadline: Deadline,
    ) -> Result<(), TransportError> {
        let frame = codec::encode_frame(self.version, message)?;
        self.write_bytes(Bytes::from(frame), deadline).await
    }

    /// Sends raw bytes without copying them.
    ///
    /// # Errors
    /// After an error the stream is reset.
    pub async fn write_bytes(
        &mut self,
        bytes: Bytes,
        deadline: Deadline,
    ) -> Result<(), TransportError> {
        self.write_chunks(&mut [bytes], deadline).await
    }

    /// Sends a message as a frame and raw bytes after it, together: fewer packets than one after the other.
    ///
    /// # Errors
    /// As [`SendStream::write_frame`].
    pub async fn write_frame_and_bytes<T: Serialize + ?Sized>(
        &mut self,
        message: &T,
        bytes: Bytes,
        deadline: Deadline,
    ) -> Result<(), TransportError> {
        let frame = Bytes::from(codec::encode_frame(self.version, message)?);
        self.write_chunks(&mut [frame, bytes], deadline).await
    }

    async fn write_chunks(
        &mut self,
        chunks: &mut [Bytes],
        deadline: Deadline,
    ) -> Result<(), TransportError> {
        match self.state {
            Sending::Idle => {}
            Sending::Writing => {
                self.reset(ResetCode::ABANDONED);
                return Err(TransportError::AlreadyFinished);
            }
            Sending::Finished | Sending::Reset => return Err(TransportError::AlreadyFinished),
        }
        self.state = Sending::Writing;
        match deadline
            .run("writing to a stream", self.inner.write_all_chunks(chunks))
            .await
        {
            Ok(Ok(())) => {
                self.state = Sending::Idle;
                Ok(())
            }
            Ok(Err(error)) => {
                self.reset(ResetCode::ABANDONED);
                Err(error.into())
            }
            Err(passed) => {
                self.reset(ResetCode::DEADLINE);
                Err(passed)
            }
        }
    }

    /// Says that everything was sent. Returns at once; what is buffered is still delivered while the session lives.
    ///
    /// # Errors
    /// When the stream was finished or reset before.
    pub fn finish(&mut self) -> Result<(), TransportError> {
        if self.state != Sending::Idle {
            return Err(TransportError::AlreadyFinished);
        }
        self.state = Sending::Finished;
        self.inner
            .finish()
            .map_err(|_| TransportError::AlreadyFinished)
    }

    /// Finishes, then waits until the peer has received everything: to be called before closing a session.
    ///
    /// # Errors
    /// When the peer stopped reading, the session ended, or the deadline passed.
    pub async fn deliver(&mut self, deadline: Deadline) -> Result<(), TransportError> {
        self.finish()?;
        match deadline
            .run("delivering a stream", self.inner.stopped())
            .await?
        {
            Ok(None) => Ok(()),
            Ok(Some(code)) => Err(TransportError::Stopped(reset_code(code))),
            Err(quinn::StoppedError::ConnectionLost(error)) => Err(error.into()),
            Err(quinn::StoppedError::ZeroRttRejected) => Err(zero_rtt()),
        }
    }

    /// Waits until the peer says it does not want the rest; never returns otherwise while the session lives.
    pub async fn stopped(&mut self) -> TransportError {
        match self.inner.stopped().await {
            Ok(Some(code)) => TransportError::Stopped(reset_code(code)),
            Ok(None) => TransportError::AlreadyFinished,
            Err(quinn::StoppedError::ConnectionLost(error)) => error.into(),
            Err(quinn::StoppedError::ZeroRttRejected) => zero_rtt(),
        }
    }

    /// Gives the stream up, finished or not; what was not delivered yet is dropped.
    pub fn reset(&mut self, code: ResetCode) {
        if self.state != Sending::Reset {
            self.state = Sending::Reset;
            // Fails only when everything has been delivered already.
            let _ = self.inner.reset(VarInt::from_u32(code.0));
        }
    }

    /// Sets its place in the sending order.
    pub fn set_priority(&self, priority: Priority) {
        // Fails only when the stream is over, when it no longer matters.
        let _ = self.inner.set_priority(priority.level());
    }
}

impl Drop for SendStream {
    fn drop(&mut self) {
        if self.state != Sending::Finished {
            self.reset(ResetCode::ABANDONED);
        }
    }
}

/// The receiving half of a stream. Reads may be given up and repeated: bytes already received are kept.
#[derive(Debug)]
pub struct RecvStream {
    inner: quinn::RecvStream,
    version: u16,
    buffer: BytesMut,
    is_over: bool,
}

impl RecvStream {
    pub(crate) fn new(inner: quinn::RecvStream, version: u16) -> Self {
        Self {
            inner,
            version,
            buffer: BytesMut::new(),
            is_over: false,
        }
    }

    pub(crate) fn set_version(&mut self, version: u16) {
        self.version = version;
    }

    /// Reads one message of at most `limit` encoded bytes; `None` when the sender finished before another began.
    ///
    /// # Errors
    /// When the frame is damaged, too large or cut short, the stream or session ended, or the deadline passed.
    pub async fn next_frame<T: DeserializeOwned>(
        &mut self,
        limit: usize,
        deadline: Deadline,
    ) -> Result<Option<T>, TransportError> {
        deadline
            .run("waiting for a message", self.frame(limit))
            .await?
    }

    /// Reads one message where one is due.
    ///
    /// # Errors
    /// As [`RecvStream::next_frame`], and [`TransportError::EndOfStream`] when there is none.
    pub async fn read_frame<T: DeserializeOwned>(
        &mut self,
        limit: usize,
        deadline: Deadline,
    ) -> Result<T, TransportError> {
        self.next_frame(limit, deadline)
            .await?
            .ok_or(TransportError::EndOfStream)
    }

    /// Reads exactly `count` raw bytes.
    ///
    /// # Errors
    /// When the stream or session ends before, or the deadline passes; what was received stays readable.
    pub async fn read_bytes(
        &mut self,
        count: usize,
        deadline: Deadline,
    ) -> Result<Bytes, TransportError> {
        deadline
            .run("waiting for bytes", self.exactly(count))
            .await??;
        Ok(self.buffer.split_to(count).freeze())
    }

    /// Reads the next raw bytes, at most `count`; `None` at the end. For payloads that are not held in memory whole.
    ///
    /// # Errors
    /// When the stream was reset, the session ended, or the deadline passed.
    pub async fn read_some(
        &mut self,
        count: usize,
        deadline: Deadline,
    ) -> Result<Option<Bytes>, TransportError> {
        if !self.buffer.is_empty() {
            let count = count.min(self.buffer.len());
            return Ok(Some(self.buffer.split_to(count).freeze()));
        }
        deadline.run("waiting for bytes", self.chunk(count)).await?
    }

    /// Reads raw bytes until the sender finishes, at most `limit`.
    ///
    /// # Errors
    /// [`TransportError::TooLong`] above the limit; otherwise as [`RecvStream::read_some`].
    pub async fn read_to_end(
        &mut self,
        limit: usize,
        deadline: Deadline,
    ) -> Result<Bytes, TransportError> {
        deadline
            .run("waiting for the end of a stream", async {
                // One byte above the limit tells an exact fit from too much.
                while let Some(chunk) = self.chunk(limit + 1 - self.buffer.len()).await? {
                    self.buffer.extend_from_slice(&chunk);
                    if self.buffer.len() > limit {
                        return Err(TransportError::TooLong { limit });
                    }
                }
                Ok(())
            })
            .await??;
        Ok(self.buffer.split().freeze())
    }

    /// Tells the sender that the rest is not wanted. Without effect when the stream has ended.
    pub fn stop(&mut self, code: ResetCode) {
        if !self.is_over {
            self.is_over = true;
            // Fails only when the stream is over already.
            let _ = self.inner.stop(VarInt::from_u32(code.0));
        }
    }

    async fn frame<T: DeserializeOwned>(
        &mut self,
        limit: usize,
    ) -> Result<Option<T>, TransportError> {
        if self.fill(HEADER_BYTES).await? == 0 {
            return Ok(None);
        }
        let Some(header) = self.buffer.first_chunk::<HEADER_BYTES>() else {
            return Err(self.truncated(HEADER_BYTES));
        };
        let body_bytes = FrameHeader::from_bytes(*header).check(self.version, limit)?;
        let whole = HEADER_BYTES + body_bytes;
        self.exactly(whole).await?;
        let frame = self.buffer.split_to(whole);
        Ok(Some(codec::decode(&frame[HEADER_BYTES..])?))
    }

    /// Buffers at least `count` bytes or fails.
    async fn exactly(&mut self, count: usize) -> Result<(), TransportError> {
        if self.fill(count).await? < count {
            return Err(self.truncated(count));
        }
        Ok(())
    }

    /// Buffers `count` bytes or a little more and says how many there are; fewer only at the end of the stream.
    async fn fill(&mut self, count: usize) -> Result<usize, TransportError> {
        if self.buffer.len() < count {
            self.buffer
                .reserve((count - self.buffer.len()).min(RESERVE_BYTES_MAX));
        }
        while self.buffer.len() < count {
            let wanted = (count - self.buffer.len()).max(READ_AHEAD_BYTES);
            let Some(chunk) = self.chunk(wanted).await? else {
                break;
            };
            self.buffer.extend_from_slice(&chunk);
        }
        Ok(self.buffer.len())
    }

    /// The next bytes off the wire, past the buffer.
    async fn chunk(&mut self, count: usize) -> Result<Option<Bytes>, TransportError> {
        if self.is_over {
            return Ok(None);
        }
        match self.inner.read_chunk(count, true).await {
            Ok(Some(chunk)) => Ok(Some(chunk.bytes)),
            Ok(None) => {
                self.is_over = true;
                Ok(None)
            }
            Err(error) => {
                if matches!(error, quinn::ReadError::Reset(_)) {
                    self.is_over = true;
                }
                Err(error.into())
            }
        }
    }

    fn truncated(&self, expected: usize) -> TransportError {
        TransportError::Truncated {
            found: self.buffer.len(),
            expected,
        }
    }
}

impl Drop for RecvStream {
    fn drop(&mut self) {
        self.stop(ResetCode::ABANDONED);
    }
}

fn reset_code(code: VarInt) -> ResetCode {
    ResetCode(u32::try_from(code.into_inner()).unwrap_or(u32::MAX))
}

fn zero_rtt() -> TransportError {
    TransportError::Closed(Closed::Lost("early data is never used".to_owned()))
}

impl From<quinn::WriteError> for TransportError {
    fn from(error: quinn::WriteError) -> Self {
        match error {
            quinn::WriteError::Stopped(code) => Self::Stopped(reset_code(code)),
            quinn::WriteError::ConnectionLost(error) => error.into(),
            quinn::WriteError::ClosedStream => Self::AlreadyFinished,
            quinn::WriteError::ZeroRttRejected => zero_rtt(),
        }
    }
}

impl From<quinn::ReadError> for TransportError {
    fn from(error: quinn::ReadError) -> Self {
        match error {
            quinn::ReadError::Reset(code) => Self::Reset(reset_code(code)),
            quinn::ReadError::ConnectionLost(error) => error.into(),
            quinn::ReadError::ClosedStream | quinn::ReadError::IllegalOrderedRead => {
                Self::AlreadyFinished
            }
            quinn::ReadError::ZeroRttRejected => zero_rtt(),
        }
    }
}
