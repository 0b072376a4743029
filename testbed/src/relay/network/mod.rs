//! The emulated network as a pure state machine: packets go in with a time, come out with the time they are due.
//!
//! [`Network::offer`] puts a packet onto a link (one direction between two nodes), [`Network::poll`] gives the packets that
//! are due, [`Network::next_due`] says when to come back. Each packet crosses the pipes of its link one after the other,
//! then the link's delay. Events are handled in the order of their own times, however late `poll` is called, so a busy host
//! makes deliveries late but never changes what is dropped or the order of packets.
//!
//! Why not one verdict per offer: pipes are shared and their rates change, so when a packet leaves its second pipe depends
//! on packets that are offered after it.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use compass_shared::seed::Seed;
use rand::Rng;
use rand::rngs::StdRng;

use super::counters::{Count, DropCause, LinkCounters, PipeCounters};
use super::pipe::{Pipe, PipeModel};
use super::shape::PathShape;

#[cfg(test)]
mod tests;

/// The most the emulator holds; more means that it (or its configuration) is broken, not that a link is slow.
const UNDER_WAY_BYTES_MAX: usize = 64 << 20;

/// A pipe of one network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PipeId(usize);

/// A link (one direction between two nodes) of one network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkId(usize);

/// A packet that has crossed the network.
#[derive(Debug)]
pub struct Delivery<P> {
    /// The link it crossed.
    pub link: LinkId,
    /// When it should leave.
    pub due: Duration,
    /// Its size.
    pub bytes: usize,
    /// What was offered.
    pub payload: P,
}

/// All pipes and links of one emulation; `P` is what the shell needs to pass a packet on.
#[derive(Debug)]
pub struct Network<P> {
    seed: Seed,
    pipes: Vec<PipeState<P>>,
    links: Vec<Link>,
    events: BinaryHeap<Event<P>>,
    ready: VecDeque<Delivery<P>>,
    /// Orders events of the same time by their creation.
    next_sequence: u64,
    under_way_bytes: usize,
}

#[derive(Debug)]
struct PipeState<P> {
    pipe: Pipe<Packet<P>>,
    counters: PipeCounters,
    /// Announcements of a packet's end of service made before this are void.
    epoch: u64,
}

#[derive(Debug)]
struct Link {
    shape: PathShape,
    pipes: Vec<PipeId>,
    counters: LinkCounters,
    loss: StdRng,
    jitter: StdRng,
    last_due: Duration,
}

#[derive(Debug)]
struct Packet<P> {
    link: LinkId,
    bytes: usize,
    payload: P,
    /// Pipes crossed so far.
    stage: usize,
    /// Delay collected from traces.
    extra: Duration,
}

#[derive(Debug)]
struct Event<P> {
    at: Duration,
    sequence: u64,
    kind: EventKind<P>,
}

#[derive(Debug)]
enum EventKind<P> {
    Served { pipe: PipeId, epoch: u64 },
    Arrived(Packet<P>),
}

impl<P> Network<P> {
    /// A network without pipes and links. All its randomness comes from `seed`, per link and purpose.
    pub fn new(seed: Seed) -> Self {
        Self {
            seed,
            pipes: Vec::new(),
            links: Vec::new(),
            events: BinaryHeap::new(),
            ready: VecDeque::new(),
            next_sequence: 0,
            under_way_bytes: 0,
        }
    }

    /// Adds a pipe.
    pub fn add_pipe(&mut self, model: PipeModel) -> PipeId {
        self.pipes.push(PipeState {
            pipe: Pipe::new(model),
            counters: PipeCounters::default(),
            epoch: 0,
        });
        PipeId(self.pipes.len() - 1)
    }

    /// Adds a link; `name` only separates its random draws from those of other links.
    pub fn add_link(&mut self, name: &str, shape: PathShape, pipes: Vec<PipeId>) -> LinkId {
        let seed = self.seed.child("link").child(name);
        self.links.push(Link {
            shape,
            pipes,
            counters: LinkCounters::default(),
            loss: seed.child("loss").rng(),
            jitter: seed.child("jitter").rng(),
            last_due: Duration::ZERO,
        });
        LinkId(self.links.len() - 1)
    }

    /// Changes a pipe from `now` on; packets in it go on at the new rate.
    pub fn set_pipe(&mut self, now: Duration, id: PipeId, model: PipeModel) {
        self.advance(now);
        self.pipes[id.0].pipe.set(now, model);
        self.announce(id);
    }

    /// Changes a link; delay and loss hold for packets that enter their delay or the link from now on, a cut at once.
    pub fn set_link(&mut self, now: Duration, id: LinkId, shape: PathShape) {
        self.advance(now);
        self.links[id.0].shape = shape;
    }

    /// The shape of a link.
    pub fn link_shape(&self, id: LinkId) -> PathShape {
        self.links[id.0].shape
    }

    /// What a link has counted.
    pub fn link_counters(&self, id: LinkId) -> &LinkCounters {
        &self.links[id.0].counters
    }

    /// What a pipe has counted and holds.
    pub fn pipe_counters(&self, id: PipeId) -> PipeCounters {
        let state = &self.pipes[id.0];
        PipeCounters {
            backlog_bytes: state.pipe.backlog_bytes() as u64,
            ..state.counters
        }
    }

    /// Puts a packet onto a link. A packet dropped here or later is counted on its link, not reported.
    pub fn offer(&mut self, now: Duration, link: LinkId, bytes: usize, payload: P) {
        self.advance(now);
        let entry = &mut self.links[link.0];
        entry.counters.offered += Count::one(bytes);
        // Drawn for every packet, so that a cut or another bound does not move later losses.
        let lost = entry.loss.random::<f64>() < entry.shape.loss;
        let refusal = if entry.shape.cut {
            Some(DropCause::Cut)
        } else if entry.shape.mtu_bytes.is_some_and(|mtu| bytes > mtu) {
            Some(DropCause::Mtu)
        } else if lost {
            Some(DropCause::Loss)
        } else if self.under_way_bytes + bytes > UNDER_WAY_BYTES_MAX {
            Some(DropCause::Overload)
        } else {
            None
        };
        if let Some(cause) = refusal {
            entry.counters.drop_packet(cause, bytes);
            return;
        }
        self.under_way_bytes += bytes;
        self.step(
            now,
            Packet {
                link,
                bytes,
                payload,
                stage: 0,
                extra: Duration::ZERO,
            },
        );
        self.advance(now);
    }

    /// The next packet that is due at `now`, in the order of their due times.
    pub fn poll(&mut self, now: Duration) -> Option<Delivery<P>> {
        self.advance(now);
        self.ready.pop_front()
    }

    /// When [`Self::poll`] should be called next; nothing when no packet is under way.
    pub fn next_due(&mut self) -> Option<Duration> {
        if let Some(ready) = self.ready.front() {
            return Some(ready.due);
        }
        while let Some(event) = self.events.peek() {
            match event.kind {
                EventKind::Served { pipe, epoch } if epoch != self.pipes[pipe.0].epoch => {
                    self.events.pop();
                }
                _ => return Some(event.at),
            }
        }
        None
    }

    /// Turns a delivery into a drop, when the shell could not pass it on.
    pub fn not_delivered(&mut self, link: LinkId, bytes: usize, cause: DropCause) {
        let counters = &mut self.links[link.0].counters;
        counters.delivered -= Count::one(bytes);
        counters.drop_packet(cause, bytes);
    }

    /// Handles every event that is due, each at its own time.
    fn advance(&mut self, now: Duration) {
        while self.events.peek().is_some_and(|event| event.at <= now) {
            let Some(Event { at, kind, .. }) = self.events.pop() else {
                return;
            };
            match kind {
                EventKind::Served { pipe, epoch } if epoch == self.pipes[pipe.0].epoch => {
                    self.served(at, pipe)
                }
                EventKind::Served { .. } => {}
                EventKind::Arrived(packet) => self.arrived(at, packet),
            }
        }
    }

    fn served(&mut self, at: Duration, id: PipeId) {
        let state = &mut self.pipes[id.0];
        let Some((mut packet, bytes)) = state.pipe.finish_head(at) else {
            return;
        };
        state.counters.passed += Count::one(bytes);
        packet.extra += state.pipe.delay_at(at);
        packet.stage += 1;
        self.announce(id);
        self.step(at, packet);
    }

    /// Puts a packet into its next pipe, or into the delay line behind the last.
    fn step(&mut self, at: Duration, packet: Packet<P>) {
        let link = &mut self.links[packet.link.0];
        let Some(&id) = link.pipes.get(packet.stage) else {
            let due = link.due(at + packet.extra);
            self.push(due, EventKind::Arrived(packet));
            return;
        };
        let (link, bytes) = (packet.link, packet.bytes);
        let state = &mut self.pipes[id.0];
        let was_idle = state.pipe.backlog_bytes() == 0;
        match state.pipe.enqueue(at, packet, bytes) {
            Ok(()) if was_idle => self.announce(id),
            Ok(()) => {}
            Err(_) => {
                state.counters.dropped += Count::one(bytes);
                self.drop_under_way(link, bytes, DropCause::Queue);
            }
        }
    }

    fn arrived(&mut self, at: Duration, packet: Packet<P>) {
        let Packet {
            link,
            bytes,
            payload,
            ..
        } = packet;
        if self.links[link.0].shape.cut {
            self.drop_under_way(link, bytes, DropCause::Cut);
            return;
        }
        self.under_way_bytes -= bytes;
        self.links[link.0].counters.delivered += Count::one(bytes);
        self.ready.push_back(Delivery {
            link,
            due: at,
            bytes,
            payload,
        });
    }

    fn drop_under_way(&mut self, link: LinkId, bytes: usize, cause: DropCause) {
        self.under_way_bytes -= bytes;
        self.links[link.0].counters.drop_packet(cause, bytes);
    }

    /// Schedules the end of service of the packet at a pipe's head and voids what was scheduled for it before.
    fn announce(&mut self, id: PipeId) {
        let state = &mut self.pipes[id.0];
        state.epoch += 1;
        let epoch = state.epoch;
        if let Some(at) = state.pipe.head_finish() {
            self.push(at, EventKind::Served { pipe: id, epoch });
        }
    }

    fn push(&mut self, at: Duration, kind: EventKind<P>) {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.events.push(Event { at, sequence, kind });
    }
}

impl Link {
    /// When a packet that has crossed all pipes at `at` arrives.
    fn due(&mut self, at: Duration) -> Duration {
        let shift = self.jitter.random_range(-1.0..=1.0) * self.shape.jitter_ms;
        let delay_ms = (self.shape.delay_ms + shift).max(0.0);
        let due = at + Duration::from_secs_f64(delay_ms / 1e3);
        let due = if self.shape.reorder {
            due
        } else {
            due.max(self.last_due)
        };
        self.last_due = due;
        due
    }
}

impl<P> Ord for Event<P> {
    /// Reversed: the heap gives the earliest first.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.sequence).cmp(&(self.at, self.sequence))
    }
}

impl<P> PartialOrd for Event<P> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<P> PartialEq for Event<P> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<P> Eq for Event<P> {}
