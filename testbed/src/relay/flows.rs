//! Which flows (source address → service of a node) are known, as in a NAT: each is made by its first packet and forgotten
//! after long silence. Pure; time is an argument. `S` is the socket that stands for a flow.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::time::Duration;

/// More flows than any emulated fleet opens; a bound because each holds a socket.
pub const FLOWS_MAX: usize = 1_024;

/// A flow; ids are never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowId(pub u64);

/// What makes two packets the same flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FlowKey {
    /// The sender's address and port.
    pub source: SocketAddr,
    /// The service that it dialled.
    pub service: usize,
}

/// A known flow.
#[derive(Debug)]
pub struct Flow<S> {
    /// What it is.
    pub key: FlowKey,
    /// The node that owns the source address.
    pub source_node: usize,
    /// The socket from which the destination sees it.
    pub socket: S,
    last_used: Duration,
}

/// All known flows.
#[derive(Debug)]
pub struct FlowTable<S> {
    idle_limit: Duration,
    by_key: HashMap<FlowKey, FlowId>,
    by_id: BTreeMap<FlowId, Flow<S>>,
    next_id: u64,
    forgotten: u64,
}

impl<S> FlowTable<S> {
    /// An empty table whose flows live through this much silence.
    pub fn new(idle_limit: Duration) -> Self {
        Self {
            idle_limit,
            by_key: HashMap::new(),
            by_id: BTreeMap::new(),
            next_id: 0,
            forgotten: 0,
        }
    }

    /// The flow of a packet, if it is known.
    pub fn find(&self, key: FlowKey) -> Option<FlowId> {
        self.by_key.get(&key).copied()
    }

    /// Whether there is room for another flow.
    pub fn has_room(&self) -> bool {
        self.by_id.len() < FLOWS_MAX
    }

    /// The id that the next flow will get.
    pub fn next_id(&self) -> FlowId {
        FlowId(self.next_id)
    }

    /// Adds a flow.
    pub fn insert(&mut self, now: Duration, key: FlowKey, source_node: usize, socket: S) -> FlowId {
        let id = self.next_id();
        self.next_id += 1;
        self.by_key.insert(key, id);
        self.by_id.insert(
            id,
            Flow {
                key,
                source_node,
                socket,
                last_used: now,
            },
        );
        id
    }

    /// A known flow.
    pub fn get(&self, id: FlowId) -> Option<&Flow<S>> {
        self.by_id.get(&id)
    }

    /// Notes a packet of a flow, in either direction.
    pub fn touch(&mut self, now: Duration, id: FlowId) {
        if let Some(flow) = self.by_id.get_mut(&id) {
            flow.last_used = now;
        }
    }

    /// Takes out the flows that have been silent for too long.
    pub fn expire(&mut self, now: Duration) -> Vec<Flow<S>> {
        let idle_limit = self.idle_limit;
        self.take_where(|flow| now.saturating_sub(flow.last_used) >= idle_limit)
    }

    /// Takes out the flows of one source node, or all.
    pub fn forget(&mut self, source_node: Option<usize>) -> Vec<Flow<S>> {
        self.take_where(|flow| source_node.is_none_or(|node| node == flow.source_node))
    }

    /// Takes out one flow.
    pub fn forget_one(&mut self, id: FlowId) -> Option<Flow<S>> {
        let flow = self.by_id.remove(&id)?;
        self.by_key.remove(&flow.key);
        self.forgotten += 1;
        Some(flow)
    }

    /// All known flows.
    pub fn iter(&self) -> impl Iterator<Item = &Flow<S>> {
        self.by_id.values()
    }

    /// When the next flow will have been silent for too long, if no more packets come.
    pub fn next_expiry(&self) -> Option<Duration> {
        self.by_id
            .values()
            .map(|flow| flow.last_used + self.idle_limit)
            .min()
    }

    /// Number of known flows.
    pub fn open(&self) -> u64 {
        self.by_id.len() as u64
    }

    /// Number of flows forgotten so far.
    pub fn forgotten(&self) -> u64 {
        self.forgotten
    }

    fn take_where(&mut self, condition: impl Fn(&Flow<S>) -> bool) -> Vec<Flow<S>> {
        let gone: Vec<FlowId> = self
            .by_id
            .iter()
            .filter(|(_, flow)| condition(flow))
            .map(|(id, _)| *id)
            .collect();
        gone.into_iter()
            .filter_map(|id| self.forget_one(id))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn field_019_a_mapping_is_dropped_after_twenty_seconds_of_silence() {
        let mut flows = FlowTable::new(Duration::from_secs(20));
        let key = |port| FlowKey {
            source: SocketAddr::from(([127, 1, 0, 1], port)),
            service: 0,
        };
        let at = Duration::from_secs;
        let quiet = flows.insert(at(0), key(1), 0, ());
        let kept = flows.insert(at(0), key(2), 0, ());
        flows.touch(at(15), kept);
        assert_eq!(flows.next_expiry(), Some(at(20)));
        assert!(flows.expire(at(19)).is_empty());
        assert_eq!(flows.expire(at(20)).len(), 1);
        assert_eq!((flows.find(key(1)), flows.find(key(2))), (None, Some(kept)));
        assert!(flows.get(quiet).is_none());
        assert_eq!(
            (flows.open(), flows.forgotten(), flows.next_expiry()),
            (1, 1, Some(at(35)))
        );
        let renewed = flows.insert(at(21), key(1), 0, ());
        assert_ne!(
            renewed, quiet,
            "a packet for the old mapping must not find the new one"
        );
    }

    #[test]
    fn the_flows_of_one_node_can_be_forgotten() {
        let mut flows = FlowTable::new(Duration::from_secs(20));
        for node in 0..3 {
            let key = FlowKey {
                source: SocketAddr::from(([127, 1, 0, node as u8], 1)),
                service: 0,
            };
            flows.insert(Duration::ZERO, key, node, ());
        }
        assert_eq!(flows.forget(Some(1)).len(), 1);
        assert_eq!(flows.forget(None).len(), 2);
        assert_eq!(flows.open(), 0);
    }
}
