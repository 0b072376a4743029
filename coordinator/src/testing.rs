//! What unit tests share: a session that carries nothing.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use compass_transport::{
    Alpn, CloseCode, Closed, Deadline, Principal, RecvStream, SendStream, Session, SessionStats,
    TransportError,
};

/// A session to nowhere.
#[derive(Debug)]
pub(crate) struct NoSession {
    principal: Principal,
    closed: Mutex<Option<CloseCode>>,
}

impl NoSession {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            principal: Principal::Newcomer,
            closed: Mutex::default(),
        })
    }
}

fn nothing() -> TransportError {
    TransportError::Closed(Closed::ByUs)
}

#[async_trait]
impl Session for NoSession {
    fn principal(&self) -> &Principal {
        &self.principal
    }

    fn alpn(&self) -> Alpn {
        Alpn::Agent
    }

    fn version(&self) -> u16 {
        1
    }

    fn peer_build(&self) -> &str {
        "test"
    }

    fn remote_address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], 9))
    }

    fn take_control(&self) -> Option<(SendStream, RecvStream)> {
        None
    }

    async fn open_bi(&self, _: Deadline) -> Result<(SendStream, RecvStream), TransportError> {
        Err(nothing())
    }

    async fn open_uni(&self, _: Deadline) -> Result<SendStream, TransportError> {
        Err(nothing())
    }

    async fn accept_bi(&self, _: Deadline) -> Result<(SendStream, RecvStream), TransportError> {
        Err(nothing())
    }

    async fn accept_uni(&self, _: Deadline) -> Result<RecvStream, TransportError> {
        Err(nothing())
    }

    fn send_datagram(&self, _: &[u8]) -> Result<(), TransportError> {
        Err(nothing())
    }

    async fn read_datagram(&self, _: Deadline) -> Result<Bytes, TransportError> {
        Err(nothing())
    }

    fn datagram_bytes_max(&self) -> Option<usize> {
        None
    }

    async fn ping(&self, _: Deadline) -> Result<Duration, TransportError> {
        Err(nothing())
    }

    fn stats(&self) -> SessionStats {
        SessionStats::default()
    }

    fn closed_reason(&self) -> Option<Closed> {
        let closed = self.closed.lock().unwrap();
        closed.map(|_| Closed::ByUs)
    }

    async fn closed(&self) -> Closed {
        std::future::pending().await
    }

    fn close(&self, code: CloseCode, _: &str) {
        *self.closed.lock().unwrap() = Some(code);
    }
}
