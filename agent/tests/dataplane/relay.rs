//! A UDP relay in front of one node: it can be slowed down or cut without a word to anybody.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::net::UdpSocket;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Longest queue in time; what would wait longer is dropped.
const QUEUE: Duration = Duration::from_millis(400);

pub(crate) struct Relay {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    _tasks: JoinSet<()>,
}

struct Shared {
    bits_per_s: AtomicU64,
    is_cut: AtomicBool,
}

impl Relay {
    /// Relays to `server`, everybody's packets in one queue per direction.
    pub(crate) async fn start(server: SocketAddr, mbit_s: f64) -> Self {
        let inside = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
        let address = inside.local_addr().unwrap();
        let shared = Arc::new(Shared {
            bits_per_s: AtomicU64::new((mbit_s * 1e6) as u64),
            is_cut: AtomicBool::new(false),
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(inward(inside, server, Arc::clone(&shared)));
        Self {
            address,
            shared,
            _tasks: tasks,
        }
    }

    pub(crate) fn set_rate(&self, mbit_s: f64) {
        let bits = (mbit_s * 1e6) as u64;
        self.shared.bits_per_s.store(bits, Ordering::Relaxed);
    }

    /// From now on nothing comes through.
    pub(crate) fn cut(&self) {
        self.shared.is_cut.store(true, Ordering::Relaxed);
    }
}

type Packets = mpsc::UnboundedSender<(Instant, Vec<u8>)>;

/// One direction: packets leave at the rate, in order, to `address` (or where the socket is connected to).
fn queue(
    shared: &Arc<Shared>,
    tasks: &mut JoinSet<()>,
    socket: Arc<UdpSocket>,
    address: Option<SocketAddr>,
) -> Packets {
    let (sender, mut packets) = mpsc::unbounded_channel::<(Instant, Vec<u8>)>();
    let shared = Arc::clone(shared);
    tasks.spawn(async move {
        let mut free_at = Instant::now();
        while let Some((arrived, packet)) = packets.recv().await {
            let start = free_at.max(arrived);
            if start.saturating_duration_since(arrived) > QUEUE {
                continue;
            }
            let bits = packet.len() as f64 * 8.0;
            let rate = shared.bits_per_s.load(Ordering::Relaxed).max(1) as f64;
            free_at = start + Duration::from_secs_f64(bits / rate);
            tokio::time::sleep_until(free_at).await;
            if !shared.is_cut.load(Ordering::Relaxed) {
                let _ = match address {
                    Some(address) => socket.send_to(&packet, address).await,
                    None => socket.send(&packet).await,
                };
            }
        }
    });
    sender
}

async fn read(socket: Arc<UdpSocket>, to: Packets) {
    let mut buffer = vec![0; 65_536];
    loop {
        if let Ok(bytes) = socket.recv(&mut buffer).await {
            let _ = to.send((Instant::now(), buffer[..bytes].to_vec()));
        }
    }
}

async fn inward(inside: Arc<UdpSocket>, server: SocketAddr, shared: Arc<Shared>) {
    let mut tasks = JoinSet::new();
    let mut clients: BTreeMap<SocketAddr, Packets> = BTreeMap::new();
    let mut buffer = vec![0; 65_536];
    loop {
        let Ok((bytes, client)) = inside.recv_from(&mut buffer).await else {
            continue;
        };
        let to_server = match clients.entry(client) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let outside = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
                outside.connect(server).await.unwrap();
                let back = queue(&shared, &mut tasks, Arc::clone(&inside), Some(client));
                tasks.spawn(read(Arc::clone(&outside), back));
                new.insert(queue(&shared, &mut tasks, outside, None))
            }
        };
        let _ = to_server.send((Instant::now(), buffer[..bytes].to_vec()));
    }
}
