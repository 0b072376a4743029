//! A UDP relay with the habits of middle boxes: it forgets mappings after silence, changes ports, and drops large packets.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::net::UdpSocket;
use tokio::task::AbortHandle;
use tokio::time::Instant;

/// Relays between one client and one server.
pub struct Relay {
    pub address: SocketAddr,
    shared: Arc<Shared>,
    task: AbortHandle,
}

struct Shared {
    /// UDP payloads above this are dropped without a word.
    payload_max: AtomicUsize,
    /// The mapping is to be forgotten before the next packet.
    forget: AtomicBool,
}

struct Mapping {
    client: SocketAddr,
    outside: UdpSocket,
    last: Instant,
}

impl Relay {
    /// Relays to `server`; a mapping is forgotten after `forgets_after` without a packet from the client.
    pub async fn start(server: SocketAddr, forgets_after: Duration) -> Self {
        let inside = UdpSocket::bind(super::local()).await.unwrap();
        let address = inside.local_addr().unwrap();
        let shared = Arc::new(Shared {
            payload_max: AtomicUsize::new(usize::MAX),
            forget: AtomicBool::new(false),
        });
        let task = tokio::spawn(run(inside, server, forgets_after, Arc::clone(&shared)));
        Self {
            address,
            shared,
            task: task.abort_handle(),
        }
    }

    pub fn drop_payloads_above(&self, bytes: usize) {
        self.shared.payload_max.store(bytes, Ordering::Relaxed);
    }

    pub fn forget(&self) {
        self.shared.forget.store(true, Ordering::Relaxed);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn run(inside: UdpSocket, server: SocketAddr, forgets_after: Duration, shared: Arc<Shared>) {
    let mut mapping: Option<Mapping> = None;
    let (mut from_client, mut from_server) = ([0; 65_536], [0; 65_536]);
    loop {
        let answer = async {
            match &mapping {
                Some(mapping) => mapping.outside.recv(&mut from_server).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            received = inside.recv_from(&mut from_client) => {
                let Ok((bytes, client)) = received else { continue };
                let is_stale = mapping.as_ref().is_none_or(|mapping| {
                    mapping.client != client || mapping.last.elapsed() > forgets_after
                });
                if shared.forget.swap(false, Ordering::Relaxed) || is_stale {
                    let outside = UdpSocket::bind(super::local()).await.unwrap();
                    outside.connect(server).await.unwrap();
                    mapping = Some(Mapping { client, outside, last: Instant::now() });
                }
                if let Some(mapping) = &mut mapping
                    && bytes <= shared.payload_max.load(Ordering::Relaxed)
                {
                    mapping.last = Instant::now();
                    let _ = mapping.outside.send(&from_client[..bytes]).await;
                }
            }
            received = answer => {
                let Ok(bytes) = received else { continue };
                if let Some(mapping) = &mapping
                    && mapping.last.elapsed() <= forgets_after
                    && bytes <= shared.payload_max.load(Ordering::Relaxed)
                {
                    let _ = inside.send_to(&from_server[..bytes], mapping.client).await;
                }
            }
        }
    }
}
