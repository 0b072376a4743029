//! A seeded UDP link emulator: every packet between two emulated nodes crosses it.
//!
//! Each node sends from its own loopback address (`127.1.0.N`) and advertises its relay address (`127.2.0.N:port`). The
//! relay listens there, knows the sender by the packet's source address, picks the path (source → destination), shapes the
//! packet, and passes it on from a socket that stands for that one flow, so that the destination sees one stable peer, as
//! behind a NAT. What comes back to that socket is shaped as destination → source and leaves from the address the source
//! dialled.
//!
//! Start at [`network::Network`], the pure core (no clock, no socket), then [`engine`], the thin shell around it:
//! one thread, one epoll set, one timer. [`Relay::start`] runs it inside a process (tests), `compass-testbed role relay`
//! as a process of its own (demo) that a [`ControlClient`] steers; both answer to [`RelayControl`].
//!
//! Deliberately absent: ECN bits and segmentation offload (datagrams are passed on one by one, with fresh headers), IPv6,
//! duplication, anything above UDP. Rates and byte counts are of UDP payload, the bytes a QUIC stack says it sent.

pub mod config;
pub mod control;
pub mod counters;
pub mod engine;
pub mod flows;
pub mod lateness;
pub mod network;
pub mod pipe;
pub mod rate;
pub mod role;
pub mod shape;
mod sockets;
pub mod topology;
pub mod trace;

#[cfg(test)]
mod tests;

pub use config::{NodeConfig, PathConfig, PipeConfig, RelayConfig, ServiceConfig};
pub use control::{ControlClient, Description, RelayControl, Request, Response};
pub use counters::{Count, DropCause, LinkCounters, PipeCounters, RelayCounters};
pub use engine::{Relay, RelayHandle};
pub use lateness::Lateness;
pub use shape::{PathShape, PipeShape, TraceFile};
pub use topology::Topology;
pub use trace::{Trace, TraceError};
