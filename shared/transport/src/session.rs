//! A connection to one authorised peer, as everything above the transport sees it.
//!
//! Start at [`Session`]. It is a trait so that another carrier (TLS over TCP where UDP is blocked) can take quinn's
//! place without its users noticing; [`QuicSession`] is the one implementation today.

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::{BufMut, Bytes, BytesMut};
use compass_shared::wire::hello::Hello;
use quinn::VarInt;
use tokio::time::Instant;

use crate::authorise::{Alpn, Principal};
use crate::congestion::Delivered;
use crate::deadline::Deadline;
use crate::error::{CloseCode, Closed, TransportError, reason_bytes};
use crate::stream::{RecvStream, SendStream};

/// What a session knows about its path. Counters grow from the session's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SessionStats {
    /// Smoothed round-trip time.
    pub rtt: Duration,
    /// Smallest round-trip time seen.
    pub rtt_min: Duration,
    /// Bytes that may be in flight.
    pub congestion_window_bytes: u64,
    /// Bytes in flight after the latest acknowledgement.
    pub in_flight_bytes: u64,
    /// Packet size in use.
    pub mtu_bytes: u16,
    /// Packets sent.
    pub sent_packets: u64,
    /// Packets taken for lost.
    pub lost_packets: u64,
    /// Bytes taken for lost.
    pub lost_bytes: u64,
    /// How often congestion was inferred.
    pub congestion_events: u64,
    /// UDP payload bytes sent, repetitions included.
    pub udp_sent_bytes: u64,
    /// UDP payload bytes received.
    pub udp_received_bytes: u64,
    /// UDP datagrams sent.
    pub udp_sent_datagrams: u64,
    /// UDP datagrams received.
    pub udp_received_datagrams: u64,
    /// Packet bytes that the peer acknowledged.
    pub delivered_bytes: u64,
    /// Of those, bytes acknowledged while there was more to send than the path took. The rate over an interval is a
    /// capacity only as far as this part of it goes, else a lower bound.
    pub delivered_network_limited_bytes: u64,
}

impl SessionStats {
    /// Whether the path, not the sender, limited at least half of what was delivered since `before`.
    pub fn is_network_limited_since(&self, before: &Self) -> bool {
        let delivered = self.delivered_bytes.saturating_sub(before.delivered_bytes);
        let limited = self
            .delivered_network_limited_bytes
            .saturating_sub(before.delivered_network_limited_bytes);
        delivered > 0 && limited * 2 >= delivered
    }
}

/// An established, authorised connection: both hellos have been read.
#[async_trait]
pub trait Session: Send + Sync + fmt::Debug {
    /// Who the peer is.
    fn principal(&self) -> &Principal;

    /// Which protocol is spoken.
    fn alpn(&self) -> Alpn;

    /// Which protocol version was negotiated.
    fn version(&self) -> u16;

    /// What the peer said about its build, for people.
    fn peer_build(&self) -> &str;

    /// Where the peer is reached at the moment.
    fn remote_address(&self) -> SocketAddr;

    /// The control stream, on which the hellos were exchanged. The first caller gets it.
    fn take_control(&self) -> Option<(SendStream, RecvStream)>;

    /// Opens a stream that both sides write. The peer sees it with the first byte.
    async fn open_bi(&self, deadline: Deadline)
    -> Result<(SendStream, RecvStream), TransportError>;

    /// Opens a stream that this side writes. The peer sees it with the first byte.
    async fn open_uni(&self, deadline: Deadline) -> Result<SendStream, TransportError>;

    /// Waits for the peer to open a stream that both sides write.
    async fn accept_bi(
        &self,
        deadline: Deadline,
    ) -> Result<(SendStream, RecvStream), TransportError>;

    /// Waits for the peer to open a stream that it writes.
    async fn accept_uni(&self, deadline: Deadline) -> Result<RecvStream, TransportError>;

    /// Sends an unreliable datagram; dropped without a word when the path is full.
    fn send_datagram(&self, payload: &[u8]) -> Result<(), TransportError>;

    /// Waits for a datagram.
    async fn read_datagram(&self, deadline: Deadline) -> Result<Bytes, TransportError>;

    /// Largest datagram payload in bytes; `None` when the peer takes none.
    fn datagram_bytes_max(&self) -> Option<usize>;

    /// Proves that the peer is alive and gives the time to it and back. Its application need not take part.
    async fn ping(&self, deadline: Deadline) -> Result<Duration, TransportError>;

    /// What is known about the path.
    fn stats(&self) -> SessionStats;

    /// How the session ended; `None` while it lives.
    fn closed_reason(&self) -> Option<Closed>;

    /// Waits for the session to end.
    async fn closed(&self) -> Closed;

    /// Ends the session at once; undelivered data is lost (see [`SendStream::deliver`]).
    fn close(&self, code: CloseCode, reason: &str);
}

/// First byte of a datagram: whose it is.
const DATAGRAM_PING: u8 = 0;
const DATAGRAM_PAYLOAD: u8 = 1;

/// A session over QUIC.
pub struct QuicSession {
    connection: quinn::Connection,
    principal: Principal,
    alpn: Alpn,
    version: u16,
    peer: Hello,
    control: Mutex<Option<(SendStream, RecvStream)>>,
    delivered: Arc<Delivered>,
}

/// What a finished handshake knows.
pub(crate) struct Established {
    pub(crate) connection: quinn::Connection,
    pub(crate) principal: Principal,
    pub(crate) alpn: Alpn,
    pub(crate) version: u16,
    pub(crate) peer: Hello,
    pub(crate) control: (SendStream, RecvStream),
    pub(crate) delivered: Arc<Delivered>,
}

impl From<Established> for QuicSession {
    fn from(established: Established) -> Self {
        Self {
            connection: established.connection,
            principal: established.principal,
            alpn: established.alpn,
            version: established.version,
            peer: established.peer,
            control: Mutex::new(Some(established.control)),
            delivered: established.delivered,
        }
    }
}

impl QuicSession {
    fn pair(&self, streams: (quinn::SendStream, quinn::RecvStream)) -> (SendStream, RecvStream) {
        (
            SendStream::new(streams.0, self.version),
            RecvStream::new(streams.1, self.version),
        )
    }

    fn send_marked(&self, mark: u8, payload: &[u8]) -> Result<(), TransportError> {
        let mut datagram = BytesMut::with_capacity(1 + payload.len());
        datagram.put_u8(mark);
        datagram.extend_from_slice(payload);
        self.connection
            .send_datagram(datagram.freeze())
            .map_err(|error| match error {
                quinn::SendDatagramError::ConnectionLost(error) => error.into(),
                other => TransportError::Datagram {
                    bytes: payload.len(),
                    reason: other.to_string(),
                },
            })
    }
}

impl fmt::Debug for QuicSession {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "QuicSession({} with {} at {})",
            self.alpn,
            self.principal,
            self.remote_address()
        )
    }
}

#[async_trait]
impl Session for QuicSession {
    fn principal(&self) -> &Principal {
        &self.principal
    }

    fn alpn(&self) -> Alpn {
        self.alpn
    }

    fn version(&self) -> u16 {
        self.version
    }

    fn peer_build(&self) -> &str {
        &self.peer.build
    }

    fn remote_address(&self) -> SocketAddr {
        self.connection.remote_address()
    }

    fn take_control(&self) -> Option<(SendStream, RecvStream)> {
        self.control
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    async fn open_bi(
        &self,
        deadline: Deadline,
    ) -> Result<(SendStream, RecvStream), TransportError> {
        let streams = deadline
            .run("opening a stream", self.connection.open_bi())
            .await??;
        Ok(self.pair(streams))
    }

    async fn open_uni(&self, deadline: Deadline) -> Result<SendStream, TransportError> {
        let stream = deadline
            .run("opening a stream", self.connection.open_uni())
            .await??;
        Ok(SendStream::new(stream, self.version))
    }

    async fn accept_bi(
        &self,
        deadline: Deadline,
    ) -> Result<(SendStream, RecvStream), TransportError> {
        let streams = deadline
            .run("waiting for a stream", self.connection.accept_bi())
            .await??;
        Ok(self.pair(streams))
    }

    async fn accept_uni(&self, deadline: Deadline) -> Result<RecvStream, TransportError> {
        let stream = deadline
            .run("waiting for a stream", self.connection.accept_uni())
            .await??;
        Ok(RecvStream::new(stream, self.version))
    }

    fn send_datagram(&self, payload: &[u8]) -> Result<(), TransportError> {
        self.send_marked(DATAGRAM_PAYLOAD, payload)
    }

    async fn read_datagram(&self, deadline: Deadline) -> Result<Bytes, TransportError> {
        deadline
            .run("waiting for a datagram", async {
                loop {
                    let mut datagram = self.connection.read_datagram().await?;
                    // Pings and marks of later versions are nobody's payload.
                    if datagram.first() == Some(&DATAGRAM_PAYLOAD) {
                        return Ok(datagram.split_off(1));
                    }
                }
            })
            .await?
    }

    fn datagram_bytes_max(&self) -> Option<usize> {
        self.connection
            .max_datagram_size()
            .map(|bytes| bytes.saturating_sub(1))
    }

    async fn ping(&self, deadline: Deadline) -> Result<Duration, TransportError> {
        let mut acknowledged = self.delivered.acknowledgements();
        let sent = Instant::now();
        self.send_marked(DATAGRAM_PING, &[])?;
        let answered = acknowledged.wait_for(|newest| {
            // Whatever was sent at or after the ping proves as much as the ping itself.
            newest.is_some_and(|newest| newest >= sent.into_std())
        });
        deadline
            .run("waiting for a ping's answer", async {
                tokio::select! {
                    _ = answered => Ok(sent.elapsed()),
                    error = self.connection.closed() => Err(error.into()),
                }
            })
            .await?
    }

    fn stats(&self) -> SessionStats {
        let stats = self.connection.stats();
        let delivered = &self.delivered;
        SessionStats {
            rtt: stats.path.rtt,
            rtt_min: stats.path.min_rtt,
            congestion_window_bytes: stats.path.cwnd,
            in_flight_bytes: delivered.in_flight_bytes.load(Ordering::Relaxed),
            mtu_bytes: stats.path.current_mtu,
            sent_packets: stats.path.sent_packets,
            lost_packets: stats.path.lost_packets,
            lost_bytes: stats.path.lost_bytes,
            congestion_events: stats.path.congestion_events,
            udp_sent_bytes: stats.udp_tx.bytes,
            udp_received_bytes: stats.udp_rx.bytes,
            udp_sent_datagrams: stats.udp_tx.datagrams,
            udp_received_datagrams: stats.udp_rx.datagrams,
            delivered_bytes: delivered.bytes.load(Ordering::Relaxed),
            delivered_network_limited_bytes: delivered
                .network_limited_bytes
                .load(Ordering::Relaxed),
        }
    }

    fn closed_reason(&self) -> Option<Closed> {
        self.connection.close_reason().map(Closed::from)
    }

    async fn closed(&self) -> Closed {
        self.connection.closed().await.into()
    }

    fn close(&self, code: CloseCode, reason: &str) {
        self.connection
            .close(VarInt::from_u32(code.0), reason_bytes(reason));
    }
}
