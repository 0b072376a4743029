//! The UDP socket under an endpoint: bound per family, with buffers of known size, and hard to break.
//!
//! Start at [`bind`]. [`SteadySocket`] stands between quinn and the kernel: a send that fails is a lost packet, which
//! QUIC repairs, never the end of a connection; and when a send of several packets in one call fails, it goes on
//! without segmentation offload, which some drivers and hosts advertise but do not carry out.

use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, UdpPoller};
use socket2::{Domain, Protocol, Socket, Type};

/// Buffer sizes of a socket, in bytes each way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketReport {
    /// What the settings asked for.
    pub asked: usize,
    /// What the kernel granted for receiving.
    pub receive_granted: usize,
    /// What the kernel granted for sending.
    pub send_granted: usize,
}

impl SocketReport {
    /// Whether the kernel granted less than asked: packets may be dropped under load. On Linux raise
    /// `net.core.rmem_max` and `net.core.wmem_max`.
    pub fn is_short(&self) -> bool {
        self.receive_granted < self.asked || self.send_granted < self.asked
    }
}

/// What a socket carried and what went wrong on it.
#[derive(Debug, Default)]
pub(crate) struct SocketCounters {
    sent_bytes: AtomicU64,
    received_bytes: AtomicU64,
    failed_sends: AtomicU64,
    offload_failures: AtomicU64,
}

/// What a socket carried and what went wrong on it, since it was bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SocketStats {
    /// UDP payload bytes handed to the kernel.
    pub sent_bytes: u64,
    /// UDP payload bytes received.
    pub received_bytes: u64,
    /// Packets the kernel refused; treated as lost.
    pub failed_sends: u64,
    /// Sends of several packets in one call that failed and were repeated one by one.
    pub offload_failures: u64,
}

impl SocketCounters {
    pub(crate) fn read(&self) -> SocketStats {
        SocketStats {
            sent_bytes: self.sent_bytes.load(Ordering::Relaxed),
            received_bytes: self.received_bytes.load(Ordering::Relaxed),
            failed_sends: self.failed_sends.load(Ordering::Relaxed),
            offload_failures: self.offload_failures.load(Ordering::Relaxed),
        }
    }
}

/// Binds a UDP socket for one family only and sizes its buffers.
pub(crate) fn bind(address: SocketAddr, buffer: usize) -> io::Result<(UdpSocket, SocketReport)> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::DGRAM,
        Some(Protocol::UDP),
    )?;
    if address.is_ipv6() {
        // Left to the system's default, one address would mean one family here and two there.
        socket.set_only_v6(true)?;
    }
    // The kernel caps silently; what it granted is read back.
    let _ = socket.set_recv_buffer_size(buffer);
    let _ = socket.set_send_buffer_size(buffer);
    let report = SocketReport {
        asked: buffer,
        receive_granted: usable(socket.recv_buffer_size()?),
        send_granted: usable(socket.send_buffer_size()?),
    };
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok((socket.into(), report))
}

/// Linux reports twice the size that was set, for its own bookkeeping.
fn usable(reported: usize) -> usize {
    if cfg!(target_os = "linux") {
        reported / 2
    } else {
        reported
    }
}

/// A socket that turns failed sends into lost packets and does without segmentation offload once that has failed.
#[derive(Debug)]
pub(crate) struct SteadySocket {
    inner: Arc<dyn AsyncUdpSocket>,
    counters: Arc<SocketCounters>,
    offload_failed: AtomicBool,
    failing: AtomicBool,
}

impl SteadySocket {
    pub(crate) fn new(inner: Arc<dyn AsyncUdpSocket>, counters: Arc<SocketCounters>) -> Self {
        Self {
            inner,
            counters,
            offload_failed: AtomicBool::new(false),
            failing: AtomicBool::new(false),
        }
    }

    /// Sends what one call could not, one packet at a time. What does not go out now is lost, and QUIC repeats it.
    fn send_singly(&self, transmit: &Transmit<'_>, segment_size: usize) {
        for contents in transmit.contents.chunks(segment_size) {
            let single = Transmit {
                destination: transmit.destination,
                ecn: transmit.ecn,
                contents,
                segment_size: None,
                src_ip: transmit.src_ip,
            };
            match self.inner.try_send(&single) {
                Ok(()) => self.sent(contents.len()),
                Err(error) => self.failed(&error),
            }
        }
    }

    fn sent(&self, bytes: usize) {
        self.counters
            .sent_bytes
            .fetch_add(bytes as u64, Ordering::Relaxed);
        if self.failing.load(Ordering::Relaxed) && self.failing.swap(false, Ordering::Relaxed) {
            tracing::info!("UDP sends succeed again");
        }
    }

    fn failed(&self, error: &io::Error) {
        self.counters.failed_sends.fetch_add(1, Ordering::Relaxed);
        // Once per change of state, not per packet.
        if !self.failing.swap(true, Ordering::Relaxed) {
            tracing::warn!(%error, "UDP send failed; treating packets as lost");
        }
    }
}

impl AsyncUdpSocket for SteadySocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.inner).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let several = transmit
            .segment_size
            .filter(|size| *size > 0 && *size < transmit.contents.len());
        match self.inner.try_send(transmit) {
            Ok(()) => self.sent(transmit.contents.len()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(error),
            Err(error) => match several {
                Some(segment_size) => {
                    self.counters
                        .offload_failures
                        .fetch_add(1, Ordering::Relaxed);
                    if !self.offload_failed.swap(true, Ordering::Relaxed) {
                        tracing::warn!(
                            %error,
                            "sending several packets in one call failed; going on without segmentation offload"
                        );
                    }
                    self.send_singly(transmit, segment_size);
                }
                None => self.failed(&error),
            },
        }
        Ok(())
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let received = ready!(self.inner.poll_recv(cx, bufs, meta))?;
        let bytes: usize = meta.iter().take(received).map(|meta| meta.len).sum();
        self.counters
            .received_bytes
            .fetch_add(bytes as u64, Ordering::Relaxed);
        Poll::Ready(Ok(received))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        if self.offload_failed.load(Ordering::Relaxed) {
            1
        } else {
            self.inner.max_transmit_segments()
        }
    }

    fn max_receive_segments(&self) -> usize {
        self.inner.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.inner.may_fragment()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_bound_apart_and_buffers_reported() {
        let (socket, report) = bind("127.0.0.1:0".parse().unwrap(), 256 * 1024).unwrap();
        assert!(socket.local_addr().unwrap().is_ipv4());
        assert_eq!(report.asked, 256 * 1024);
        assert!(report.receive_granted > 0 && report.send_granted > 0);

        let (_, greedy) = bind("127.0.0.1:0".parse().unwrap(), 1 << 30).unwrap();
        assert!(
            greedy.is_short(),
            "the kernel caps and we say so: {greedy:?}"
        );
    }
}
