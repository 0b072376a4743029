//! Who is connected: one seat per node with a live session, its newest report, and the ways to reach it.
//!
//! Start at [`Fleet::take_seat`]. Session tasks stamp and store here what they hear, without going through any actor: when something was
//! last heard of a node is an atomic, its report is a latest-value slot, and so is the target to be sent. The monitor's pulse reads both at
//! the moment it runs, so neither a flood of reports nor a busy actor makes a live node look dead.
//!
//! Deliberately absent: judging what was heard (the monitor's), QUIC (the gateway's; a seat only holds the session to close it).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use compass_shared::ids::{Commit, Digest, NodeId};
use compass_shared::model::plan::{NodeTarget, Peer};
use compass_shared::time::Moment;
use compass_shared::wire::v1::{
    AgentReport, CoordinatorToAgent, InstanceStatus, LinkReport, Registration,
};
use compass_transport::Session;
use tokio::sync::{mpsc, watch};

use crate::clock::Clock;
use crate::metrics::{Kind, Metrics, count};

#[cfg(test)]
mod tests;

/// Messages that may wait for one node; what needs more than that is a latest-value slot.
pub const OUTBOX_MAX: usize = 256;

/// Neighbours one node measures links to at once: bounds probes and the message's size.
pub const PEERS_MAX: usize = 64;

/// A node's live session.
#[derive(Debug)]
pub struct Seat {
    /// The node, from its certificate.
    pub node: NodeId,
    /// Tells this session from the node's other ones; grows.
    pub epoch: u64,
    /// The key it proved.
    pub key: Digest,
    /// What it said when it came.
    pub registration: Registration,
    /// Where from.
    pub address: SocketAddr,
    /// Wall time, for people.
    pub since_unix_ms: u64,
    /// Its session.
    pub session: Arc<dyn Session>,
    heard_us: AtomicU64,
    outbox: mpsc::Sender<CoordinatorToAgent>,
    target: watch::Sender<Option<Arc<NodeTarget>>>,
    peers: watch::Sender<Vec<Peer>>,
    slot: Mutex<Slot>,
}

/// What was heard last.
#[derive(Debug, Default)]
struct Slot {
    report: Option<Arc<AgentReport>>,
    is_unread: bool,
    heard_unread: bool,
    applied: Option<Commit>,
    instances: Vec<InstanceStatus>,
}

/// The receiving ends of a seat, for its session's writer.
#[derive(Debug)]
pub struct Outgoing {
    /// Messages, in order.
    pub outbox: mpsc::Receiver<CoordinatorToAgent>,
    /// The newest target.
    pub target: watch::Receiver<Option<Arc<NodeTarget>>>,
    /// The newest list of neighbours.
    pub peers: watch::Receiver<Vec<Peer>>,
}

/// Why a message did not go out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Undeliverable {
    /// No session.
    #[error("the node has no session")]
    Offline,
    /// It does not take its messages.
    #[error("the node does not take its messages")]
    Stuck,
}

impl Seat {
    /// Something was heard of the node.
    pub fn stamp(&self, now: Moment) {
        self.heard_us.fetch_max(now.0, Ordering::Relaxed);
        self.slot().heard_unread = true;
    }

    /// When something was last heard.
    pub fn heard(&self) -> Moment {
        Moment(self.heard_us.load(Ordering::Relaxed))
    }

    /// Queues a message.
    ///
    /// # Errors
    /// [`Undeliverable`]; the message is lost.
    pub fn send(&self, message: CoordinatorToAgent) -> Result<(), Undeliverable> {
        self.outbox.try_send(message).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Undeliverable::Stuck,
            mpsc::error::TrySendError::Closed(_) => Undeliverable::Offline,
        })
    }

    /// Sets the target to be sent; a newer one replaces one that is still waiting.
    pub fn set_target(&self, target: Arc<NodeTarget>) {
        self.target.send_replace(Some(target));
    }

    /// Remembers how far the node is.
    pub fn set_applied(&self, commit: Option<Commit>, instances: Vec<InstanceStatus>) {
        let mut slot = self.slot();
        slot.applied = slot.applied.max(commit);
        slot.instances = instances;
    }

    /// How far the node is, and what it runs.
    pub fn applied(&self) -> (Option<Commit>, Vec<InstanceStatus>) {
        let slot = self.slot();
        (slot.applied, slot.instances.clone())
    }

    /// The newest report, if one has come.
    pub fn report(&self) -> Option<Arc<AgentReport>> {
        self.slot().report.clone()
    }

    fn slot(&self) -> std::sync::MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What was heard of a node since the last look.
#[derive(Debug)]
pub struct Heard {
    /// The node.
    pub node: NodeId,
    /// Its newest report, if one has come since.
    pub report: Option<Arc<AgentReport>>,
}

/// Locks by node, so that arrivals of one node come one after the other.
type Arrivals = BTreeMap<NodeId, Arc<tokio::sync::Mutex<()>>>;

/// All seats.
#[derive(Debug)]
pub struct Fleet {
    seats: RwLock<BTreeMap<NodeId, Arc<Seat>>>,
    next_epoch: AtomicU64,
    arrivals: Mutex<Arrivals>,
    clock: Clock,
    metrics: Arc<Metrics>,
}

impl Fleet {
    /// Nobody is connected yet.
    pub fn new(clock: Clock, metrics: Arc<Metrics>) -> Self {
        Self {
            seats: RwLock::default(),
            next_epoch: AtomicU64::new(1),
            arrivals: Mutex::default(),
            clock,
            metrics,
        }
    }

    /// Waits for other arrivals of the same node to be done with; theirs wait for the guard.
    pub async fn arrival(&self, node: &NodeId) -> tokio::sync::OwnedMutexGuard<()> {
        let lock = {
            let mut arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
            // Nobody waits for a lock that only this map holds.
            arrivals.retain(|_, lock| Arc::strong_count(lock) > 1);
            arrivals.entry(node.clone()).or_default().clone()
        };
        lock.lock_owned().await
    }

    /// Seats a node; a session it had before loses its seat (the caller closes it).
    pub fn take_seat(
        &self,
        node: NodeId,
        key: Digest,
        registration: Registration,
        session: Arc<dyn Session>,
    ) -> (Arc<Seat>, Outgoing, Option<Arc<Seat>>) {
        let (outbox, outbox_end) = mpsc::channel(OUTBOX_MAX);
        let (target, target_end) = watch::channel(None);
        let (peers, peers_end) = watch::channel(Vec::new());
        let seat = Arc::new(Seat {
            node: node.clone(),
            epoch: self.next_epoch.fetch_add(1, Ordering::Relaxed),
            key,
            address: session.remote_address(),
            since_unix_ms: crate::events::now_unix_ms(),
            session,
            heard_us: AtomicU64::new(self.clock.now().0),
            outbox,
            target,
            peers,
            slot: Mutex::new(Slot {
                applied: registration.applied,
                instances: registration.instances.clone(),
                heard_unread: true,
                ..Slot::default()
            }),
            registration,
        });
        let before = self.seats_mut().insert(node, seat.clone());
        self.count_sessions();
        let outgoing = Outgoing {
            outbox: outbox_end,
            target: target_end,
            peers: peers_end,
        };
        (seat, outgoing, before)
    }

    /// Takes a node's seat away if it still belongs to this session; tells whether it did.
    pub fn leave(&self, node: &NodeId, epoch: u64) -> bool {
        let mut seats = self.seats_mut();
        let is_its = seats.get(node).is_some_and(|seat| seat.epoch == epoch);
        if is_its {
            seats.remove(node);
        }
        drop(seats);
        self.count_sessions();
        is_its
    }

    /// A node's seat.
    pub fn seat(&self, node: &NodeId) -> Option<Arc<Seat>> {
        self.seats
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(node)
            .cloned()
    }

    /// All seats, by node.
    pub fn seats(&self) -> Vec<Arc<Seat>> {
        self.seats
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .values()
            .cloned()
            .collect()
    }

    /// How many nodes are connected.
    pub fn len(&self) -> usize {
        self.seats
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .len()
    }

    /// Whether nobody is connected.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Queues a message to a node.
    ///
    /// # Errors
    /// [`Undeliverable`]; the message is lost.
    pub fn send(&self, node: &NodeId, message: CoordinatorToAgent) -> Result<(), Undeliverable> {
        self.seat(node).ok_or(Undeliverable::Offline)?.send(message)
    }

    /// Takes a report in: cleans it of impossible figures and keeps it if it is newer than the one before.
    pub fn report(&self, seat: &Seat, mut report: AgentReport) {
        seat.stamp(self.clock.now());
        self.metrics.reports.inc();
        report.telemetry.sanitise();
        report.links.truncate(PEERS_MAX);
        report.links.retain(is_possible);
        let mut slot = seat.slot();
        if let Some(before) = &slot.report
            && report.sequence <= before.sequence
        {
            count(&self.metrics.reports_dropped, "stale");
            return;
        }
        if slot.is_unread {
            count(&self.metrics.reports_dropped, "superseded");
        }
        slot.applied = slot.applied.max(report.applied);
        slot.report = Some(Arc::new(report));
        slot.is_unread = true;
    }

    /// What was heard since the last look, by node.
    pub fn take_heard(&self) -> Vec<Heard> {
        let mut heard = Vec::new();
        for seat in self.seats() {
            let mut slot = seat.slot();
            let is_unread = std::mem::take(&mut slot.is_unread);
            if std::mem::take(&mut slot.heard_unread) || is_unread {
                heard.push(Heard {
                    node: seat.node.clone(),
                    report: slot.report.clone().filter(|_| is_unread),
                });
            }
        }
        heard
    }

    /// A connected node as its neighbours know it.
    pub fn peer(&self, node: &NodeId) -> Option<Peer> {
        self.seat(node).map(|seat| peer_of(&seat))
    }

    /// Tells every node its neighbours: all others that are connected, those of the same site first, then by tier and name.
    pub fn introduce(&self) {
        let seats = self.seats();
        for seat in &seats {
            let own = &seat.registration.description;
            let mut others: Vec<_> = seats.iter().filter(|o| o.node != seat.node).collect();
            others.sort_by_key(|other| {
                let description = &other.registration.description;
                let is_remote = description.site != own.site;
                (is_remote, description.tier, other.node.clone())
            });
            let peers: Vec<Peer> = others
                .into_iter()
                .take(PEERS_MAX)
                .map(|o| peer_of(o))
                .collect();
            seat.peers.send_if_modified(|before| {
                let is_news = *before != peers;
                *before = peers;
                is_news
            });
        }
    }

    /// Makes sure that a node accepts another as a neighbour, for a transfer between just these two.
    pub fn pair(&self, node: &NodeId, other: &NodeId) {
        let (Some(seat), Some(other)) = (self.seat(node), self.peer(other)) else {
            return;
        };
        seat.peers.send_if_modified(|peers| {
            if peers.contains(&other) {
                return false;
            }
            peers.retain(|peer| peer.node != other.node);
            if peers.len() >= PEERS_MAX {
                peers.pop();
            }
            peers.insert(0, other);
            true
        });
    }

    fn seats_mut(&self) -> std::sync::RwLockWriteGuard<'_, BTreeMap<NodeId, Arc<Seat>>> {
        self.seats.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn count_sessions(&self) {
        let agents = i64::try_from(self.len()).unwrap_or(i64::MAX);
        self.metrics
            .sessions
            .get_or_create(&Kind { kind: "agent" })
            .set(agents);
    }
}

fn peer_of(seat: &Seat) -> Peer {
    Peer {
        node: seat.node.clone(),
        addresses: seat.registration.description.advertised.clone(),
        fingerprint: seat.key,
    }
}

/// Whether a link's figures can be: what is not is dropped before it reaches the planner.
fn is_possible(link: &LinkReport) -> bool {
    let rtt_is_possible = link.rtt_ms.is_none_or(|rtt| rtt.is_finite() && rtt >= 0.0);
    rtt_is_possible && (0.0..=1.0).contains(&link.loss)
}
