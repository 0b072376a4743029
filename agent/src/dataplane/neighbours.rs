//! The connections of a node's data plane: one per neighbour, dialled by the one with the smaller id, and one per app.
//!
//! Start at [`Neighbours::take`]. Both sides must agree which connection counts, for credits belong to a connection: it is the newest
//! one dialled by the node with the smaller id, else the newest dialled by the other, which dials only after it has waited in vain.
//! A connection that loses is closed at once.
//!
//! This is the one owner of the set of neighbours: whoever the newest target names and whoever the coordinator introduced, in whatever
//! order the two come. The keys that certificates are judged by follow that set, and what is known of a link outlives the set for a while.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use compass_shared::ids::{Digest, NodeId, QueryId};
use compass_shared::model::plan::{NodeTarget, Peer};
use compass_shared::time::{Moment, ms};
use compass_shared::wire::v1::LinkReport;
use compass_transport::{
    Alpn, CloseCode, Deadline, Dial, Endpoint, Principal, Role, ServerTrust, Session,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::connection::{Connection, ConnectionId, Inbox};
use super::core::{FrameKey, Neighbour, Reader, SendId};
use super::hub::Command;
use super::link::{Counters, LinkEstimator, LinkPolicy, Liveness};

/// How long the node with the larger id waits to be dialled before it dials itself.
const DIAL_LATE: Duration = Duration::from_millis(1_500);

/// One attempt to connect.
const DIAL_S: u64 = 5;

/// Least and longest wait between attempts; frames live for a second or two.
const REDIAL: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(2));

/// A neighbour without a connection for this long is reported as unreachable: as long as two pings take.
pub(super) const LOST_FOR: Duration = Duration::from_millis(600);

/// The same for one that was never connected: it may not have got its target yet.
pub(super) const NEVER_FOR: Duration = Duration::from_secs(3);

/// What is known of a link is kept for this long after nobody names the neighbour any more: a coordinator that has just started introduces
/// nodes as they come back, and a link that was degraded before is not to be taken for a healthy narrow one after.
const FORMER_FOR: Duration = Duration::from_secs(600);

/// And of no more neighbours than this: twice what a coordinator introduces.
const FORMER_MAX: usize = 128;

/// One neighbouring node.
#[derive(Debug)]
pub(super) struct PeerLine {
    pub(super) peer: Peer,
    /// Whether frames travel between the two, by the newest routes.
    pub(super) is_routed: bool,
    pub(super) connection: Option<Connection>,
    dialled_by: NodeId,
    pub(super) link: LinkEstimator,
    pub(super) liveness: Liveness,
    pub(super) pings: BTreeMap<u64, Moment>,
    pub(super) under_way: BTreeMap<(FrameKey, Reader), SendId>,
    pub(super) window: u64,
    dialling: Option<AbortHandle>,
    next_dial: Moment,
    failures: u32,
    pub(super) lost_at: Moment,
    pub(super) was_connected: bool,
    pub(super) is_reported: bool,
    /// UDP bytes of earlier connections, sent and received.
    carried: (u64, u64),
}

/// All of them.
#[derive(Debug)]
pub(super) struct Neighbours {
    me: NodeId,
    policy: LinkPolicy,
    endpoint: Arc<Endpoint>,
    commands: mpsc::UnboundedSender<Command>,
    inbox: Inbox,
    next_id: u64,
    pub(super) peers: BTreeMap<NodeId, PeerLine>,
    apps: BTreeMap<QueryId, Connection>,
    app_keys: BTreeMap<QueryId, Digest>,
    owners: BTreeMap<ConnectionId, Neighbour>,
    random: StdRng,
    from_target: Vec<Peer>,
    from_coordinator: Vec<Peer>,
    former: BTreeMap<NodeId, Former>,
}

/// A neighbour that nobody names any more.
#[derive(Debug)]
struct Former {
    fingerprint: Digest,
    link: LinkEstimator,
    carried: (u64, u64),
    since: Moment,
}

/// What a link has delivered within a slice.
#[derive(Debug)]
pub(super) struct Delivered {
    node: NodeId,
    bytes: u64,
    usual_bps: Option<f64>,
}

/// A link with more than this multiple of another's usual rate does not lead through the same narrow part.
const SAME_WAY_RATIO: f64 = 3.0;

/// Bytes delivered over the other links that may share the narrow part of the way to this neighbour.
pub(super) fn beside(node: &NodeId, usual_bps: Option<f64>, delivered: &[Delivered]) -> u64 {
    let Some(usual) = usual_bps else { return 0 };
    let may_share = |other: &&Delivered| {
        other.node != *node
            && other
                .usual_bps
                .is_none_or(|bps| bps <= usual * SAME_WAY_RATIO)
    };
    delivered.iter().filter(may_share).map(|d| d.bytes).sum()
}

/// What became of a session that was handed over.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// It is the neighbour's connection now; one it had before is gone.
    Active(Neighbour),
    /// It was closed.
    Refused,
}

impl Neighbours {
    pub(super) fn new(
        me: NodeId,
        policy: LinkPolicy,
        endpoint: Arc<Endpoint>,
        commands: mpsc::UnboundedSender<Command>,
        inbox: Inbox,
    ) -> Self {
        Self {
            me,
            policy,
            endpoint,
            commands,
            inbox,
            next_id: 0,
            peers: BTreeMap::new(),
            apps: BTreeMap::new(),
            app_keys: BTreeMap::new(),
            owners: BTreeMap::new(),
            random: StdRng::from_os_rng(),
            from_target: vec![],
            from_coordinator: vec![],
            former: BTreeMap::new(),
        }
    }

    /// Takes who may connect from a newer target; returns neighbours that are dropped.
    pub(super) fn apply(
        &mut self,
        now: Moment,
        target: &NodeTarget,
        routed: &BTreeSet<NodeId>,
    ) -> Vec<Neighbour> {
        self.from_target = target.peers.clone();
        self.app_keys = target
            .queries
            .iter()
            .filter_map(|query| Some((query.query.clone(), query.app_fingerprint?)))
            .collect();
        let mut dropped = self.name_peers(now);
        for (node, line) in &mut self.peers {
            line.is_routed = routed.contains(node);
        }
        let gone: Vec<QueryId> = self
            .apps
            .iter()
            .filter(|(query, app)| !self.is_app(query, app.session.principal()))
            .map(|(query, _)| query.clone())
            .collect();
        for query in gone {
            if let Some(app) = self.apps.remove(&query) {
                self.owners.remove(&app.id);
                app.session
                    .close(CloseCode::DONE, "the query no longer passes this node");
                dropped.push(Neighbour::App(query));
            }
        }
        dropped
    }

    /// Takes the coordinator's wish for links to measure.
    pub(super) fn measure(&mut self, now: Moment, peers: Vec<Peer>) -> Vec<Neighbour> {
        self.from_coordinator = peers;
        self.name_peers(now)
    }

    /// Everybody who is named, by target or introduction.
    fn named(&self) -> BTreeMap<NodeId, Peer> {
        let mut named: BTreeMap<NodeId, Peer> = BTreeMap::new();
        // The target's word counts more: it is what the plan rests on. Where a node listens now may be known only by the introduction.
        for peer in self.from_target.iter().chain(&self.from_coordinator) {
            if peer.node == self.me {
                continue;
            }
            let known = named
                .entry(peer.node.clone())
                .or_insert_with(|| peer.clone());
            if known.fingerprint == peer.fingerprint {
                for address in &peer.addresses {
                    if !known.addresses.contains(address) {
                        known.addresses.push(*address);
                    }
                }
            }
        }
        named
    }

    /// Keeps a line to each peer that is named and drops the others.
    fn name_peers(&mut self, now: Moment) -> Vec<Neighbour> {
        let named = self.named();
        let keys = named.values().map(|p| (p.node.clone(), p.fingerprint));
        self.endpoint.trust().set_peers(keys);
        let gone: Vec<NodeId> = self
            .peers
            .iter()
            .filter(|(node, line)| {
                named
                    .get(*node)
                    .is_none_or(|peer| peer.fingerprint != line.peer.fingerprint)
            })
            .map(|(node, _)| node.clone())
            .collect();
        let mut dropped = Vec::new();
        for node in gone {
            if let Some(mut line) = self.peers.remove(&node) {
                if let Some(task) = line.dialling.take() {
                    task.abort();
                }
                if let Some(connection) = line.lose(now) {
                    self.owners.remove(&connection.id);
                    connection
                        .session
                        .close(CloseCode::DONE, "not a neighbour any more");
                    dropped.push(Neighbour::Node(node.clone()));
                }
                self.former.insert(node, line.into_former(now));
            }
        }
        for (node, peer) in named {
            match self.peers.get_mut(&node) {
                Some(line) => line.peer = peer,
                None => {
                    let former = self.former.remove(&node);
                    let mut line = PeerLine::new(peer, self.me.clone(), self.policy, now);
                    if let Some(former) = former.filter(|f| f.is_of(&line.peer, now)) {
                        line.link = former.link;
                        line.carried = former.carried;
                    }
                    self.peers.insert(node, line);
                }
            }
        }
        self.forget_former(now);
        dropped
    }

    fn forget_former(&mut self, now: Moment) {
        self.former.retain(|_, former| !former.is_over(now));
        while self.former.len() > FORMER_MAX {
            let oldest = self.former.iter().min_by_key(|(_, former)| former.since);
            let Some(oldest) = oldest.map(|(node, _)| node.clone()) else {
                return;
            };
            self.former.remove(&oldest);
        }
    }

    fn is_app(&self, query: &QueryId, principal: &Principal) -> bool {
        matches!(principal, Principal::App { query: of, key }
            if of == query && self.app_keys.get(query) == Some(key))
    }

    /// Takes over a session, accepted or dialled.
    pub(super) fn take(
        &mut self,
        now: Moment,
        principal: &Principal,
        session: Arc<dyn Session>,
        dialled_by: Option<NodeId>,
    ) -> Taken {
        match principal {
            Principal::App { query, .. } if self.is_app(query, principal) => {
                self.take_app(query.clone(), session)
            }
            Principal::Agent { node, key }
                if self
                    .peers
                    .get(node)
                    .is_some_and(|line| line.peer.fingerprint == *key) =>
            {
                let dialled_by = dialled_by.unwrap_or_else(|| node.clone());
                self.take_peer(now, &node.clone(), session, dialled_by)
            }
            other => {
                tracing::debug!(peer = %other, "data connection refused: the target does not name it");
                session.close(
                    CloseCode::REFUSED,
                    "the target of this node does not name you (yet)",
                );
                Taken::Refused
            }
        }
    }

    fn take_app(&mut self, query: QueryId, session: Arc<dyn Session>) -> Taken {
        let Some(connection) = self.connect(session) else {
            return Taken::Refused;
        };
        let neighbour = Neighbour::App(query.clone());
        self.owners.insert(connection.id, neighbour.clone());
        if let Some(before) = self.apps.insert(query, connection) {
            self.owners.remove(&before.id);
            before
                .session
                .close(CloseCode::REPLACED, "a newer connection of this app");
        }
        Taken::Active(neighbour)
    }

    fn take_peer(
        &mut self,
        now: Moment,
        node: &NodeId,
        session: Arc<dyn Session>,
        dialled_by: NodeId,
    ) -> Taken {
        let smaller = self.me.clone().min(node.clone());
        let keeps = self.peers.get(node).is_some_and(|line| {
            let lives = line
                .connection
                .as_ref()
                .is_some_and(|c| c.session.closed_reason().is_none());
            lives && line.dialled_by == smaller && dialled_by != smaller
        });
        if keeps {
            session.close(CloseCode::REPLACED, "another connection is in use");
            return Taken::Refused;
        }
        let Some(connection) = self.connect(session) else {
            return Taken::Refused;
        };
        let neighbour = Neighbour::Node(node.clone());
        self.owners.insert(connection.id, neighbour.clone());
        let Some(line) = self.peers.get_mut(node) else {
            return Taken::Refused;
        };
        line.dialled_by = dialled_by;
        line.failures = 0;
        line.next_dial = now + REDIAL.0;
        line.was_connected = true;
        line.is_reported = false;
        line.liveness = Liveness::new(now);
        line.link.reconnected(now);
        line.window = 0;
        if let Some(before) = line.lose(now) {
            self.owners.remove(&before.id);
            before
                .session
                .close(CloseCode::REPLACED, "a newer connection is in use");
        }
        line.connection = Some(connection);
        Taken::Active(neighbour)
    }

    fn connect(&mut self, session: Arc<dyn Session>) -> Option<Connection> {
        self.next_id += 1;
        Connection::new(ConnectionId(self.next_id), session, self.inbox.clone())
    }

    /// Whose connection it is, if it is one in use.
    pub(super) fn owner(&self, connection: ConnectionId) -> Option<&Neighbour> {
        self.owners.get(&connection)
    }

    /// A connection has ended; returns whose it was, if it was in use.
    pub(super) fn lost(&mut self, now: Moment, connection: ConnectionId) -> Option<Neighbour> {
        let neighbour = self.owners.remove(&connection)?;
        match &neighbour {
            Neighbour::App(query) => {
                self.apps.remove(query);
            }
            Neighbour::Node(node) => {
                self.peers.get_mut(node)?.lose(now)?;
            }
        }
        Some(neighbour)
    }

    /// Gives up a neighbour's connection.
    pub(super) fn give_up(&mut self, now: Moment, node: &NodeId, why: &str) {
        let connection = self.peers.get_mut(node).and_then(|line| line.lose(now));
        if let Some(connection) = connection {
            self.owners.remove(&connection.id);
            connection.session.close(CloseCode::DONE, why);
        }
    }

    /// The connection to a neighbour.
    pub(super) fn connection(&self, to: &Neighbour) -> Option<&Connection> {
        match to {
            Neighbour::App(query) => self.apps.get(query),
            Neighbour::Node(node) => self.peers.get(node)?.connection.as_ref(),
        }
    }

    /// Sessions with nodes, for requests between them.
    pub(super) fn sessions(&self) -> BTreeMap<NodeId, Arc<dyn Session>> {
        let session = |(node, line): (&NodeId, &PeerLine)| {
            let connection = line.connection.as_ref()?;
            Some((node.clone(), Arc::clone(&connection.session)))
        };
        self.peers.iter().filter_map(session).collect()
    }

    /// Dials those that should be dialled now; `wanted` have frames waiting.
    pub(super) fn dial(&mut self, now: Moment, wanted: &[NodeId]) {
        for (node, line) in &mut self.peers {
            if line.connection.is_some() || line.dialling.is_some() || now < line.next_dial {
                continue;
            }
            let patience = if wanted.contains(node) {
                DIAL_LATE / 5
            } else {
                DIAL_LATE
            };
            if self.me > *node && now.since(line.lost_at) < patience {
                continue;
            }
            let dial = Dial::new(Alpn::Data, Role::Node(node.clone()))
                .trusting(ServerTrust::Key(line.peer.fingerprint));
            let (endpoint, commands) = (Arc::clone(&self.endpoint), self.commands.clone());
            let (node, addresses) = (node.clone(), line.peer.addresses.clone());
            let task = tokio::spawn(async move {
                let dialled = endpoint
                    .connect(&addresses, &dial, Deadline::after_s(DIAL_S))
                    .await;
                let result = dialled.map_err(|error| error.to_string());
                // Fails only when the hub has ended.
                let _ = commands.send(Command::Dialled { node, result });
            });
            line.dialling = Some(task.abort_handle());
        }
    }

    /// An attempt to dial has ended.
    pub(super) fn dialled(&mut self, now: Moment, node: &NodeId, is_connected: bool) {
        let Some(line) = self.peers.get_mut(node) else {
            return;
        };
        line.dialling = None;
        if !is_connected {
            let doubled = REDIAL.0 * 2_u32.saturating_pow(line.failures.min(8));
            line.failures += 1;
            let jitter = self.random.random_range(0.5..=1.0);
            line.next_dial = now + doubled.min(REDIAL.1).mul_f64(jitter);
        }
    }

    /// Whether anything needs attention every slice.
    pub(super) fn is_restless(&self) -> bool {
        self.peers.values().any(|line| {
            line.connection.is_none()
                || !line.under_way.is_empty()
                || !line.pings.is_empty()
                || line.link.is_degraded()
                || line.link.is_probing()
        })
    }

    /// What was delivered over each link since the last slice.
    pub(super) fn delivered(&self) -> Vec<Delivered> {
        let each = |(node, line): (&NodeId, &PeerLine)| {
            let (counters, _) = line.counters()?;
            Some(Delivered {
                node: node.clone(),
                bytes: line.link.delivered_since(&counters),
                usual_bps: line.link.reference(),
            })
        };
        self.peers.iter().filter_map(each).collect()
    }

    /// Whether a probe train is under way to any neighbour.
    pub(super) fn has_probe_out(&self, now: Moment) -> bool {
        self.peers.values().any(|line| line.link.has_probe_out(now))
    }

    /// Rate in bit/s of the narrowest link that counts as degraded.
    pub(super) fn narrowest_degraded_bps(&self) -> Option<f64> {
        let degraded = self.peers.values().filter(|line| line.link.is_degraded());
        degraded
            .filter_map(|line| line.link.rate())
            .min_by(f64::total_cmp)
    }

    /// Links as last measured.
    pub(super) fn reports(&self, now: Moment) -> Vec<LinkReport> {
        self.peers
            .iter()
            .map(|(node, line)| line.report(now, node))
            .collect()
    }
}

impl Former {
    fn is_over(&self, now: Moment) -> bool {
        now.since(self.since) >= FORMER_FOR
    }

    /// Whether what is known of it is known of this peer, and not too old.
    fn is_of(&self, peer: &Peer, now: Moment) -> bool {
        self.fingerprint == peer.fingerprint && !self.is_over(now)
    }
}

impl PeerLine {
    fn new(peer: Peer, me: NodeId, policy: LinkPolicy, now: Moment) -> Self {
        Self {
            peer,
            is_routed: false,
            connection: None,
            dialled_by: me,
            link: LinkEstimator::new(policy, now),
            liveness: Liveness::new(now),
            pings: BTreeMap::new(),
            under_way: BTreeMap::new(),
            window: 0,
            dialling: None,
            next_dial: now,
            failures: 0,
            lost_at: now,
            was_connected: false,
            is_reported: false,
            carried: (0, 0),
        }
    }

    /// Takes the connection out and keeps what it carried.
    fn lose(&mut self, now: Moment) -> Option<Connection> {
        let connection = self.connection.take()?;
        let stats = connection.session.stats();
        self.carried.0 += stats.udp_sent_bytes;
        self.carried.1 += stats.udp_received_bytes;
        self.lost_at = now;
        self.pings.clear();
        self.under_way.clear();
        Some(connection)
    }

    fn into_former(self, now: Moment) -> Former {
        Former {
            fingerprint: self.peer.fingerprint,
            link: self.link,
            carried: self.carried,
            since: now,
        }
    }

    /// The transport's counters.
    pub(super) fn counters(&self) -> Option<(Counters, u64)> {
        let stats = self.connection.as_ref()?.session.stats();
        let counters = Counters {
            delivered_bytes: stats.delivered_bytes,
            sent_packets: stats.sent_packets,
            lost_packets: stats.lost_packets,
            congestion_window_bytes: stats.congestion_window_bytes,
            rtt_min: stats.rtt_min,
        };
        Some((counters, stats.udp_received_datagrams))
    }

    fn report(&self, now: Moment, node: &NodeId) -> LinkReport {
        let (mut sent_bytes, mut received_bytes) = self.carried;
        if let Some(connection) = &self.connection {
            let stats = connection.session.stats();
            sent_bytes += stats.udp_sent_bytes;
            received_bytes += stats.udp_received_bytes;
        }
        let (delivered_bps, network_limited) = self.link.measured(now);
        LinkReport {
            peer: node.clone(),
            rtt_ms: self.link.rtt().map(ms),
            delivered_bps: delivered_bps as u64,
            network_limited,
            degraded: self.link.is_degraded(),
            loss: self.link.loss(),
            sent_bytes,
            received_bytes,
        }
    }
}
