//! Counts what a path delivers and whether it was the path that limited it.
//!
//! The controller that decides how fast to send is quinn's own; [`Counting`] stands around it and listens. A delivered
//! rate is a capacity only while the sender had more to send than the path took, so both sums are kept.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use quinn::congestion::{BbrConfig, Controller, ControllerFactory, ControllerMetrics, CubicConfig};
use quinn_proto::RttEstimator;
use tokio::sync::watch;

use crate::settings::Congestion;

/// What was delivered on one session so far.
#[derive(Debug)]
pub(crate) struct Delivered {
    /// Bytes acknowledged.
    pub(crate) bytes: AtomicU64,
    /// Of those, bytes acknowledged while the sender was waiting for the network.
    pub(crate) network_limited_bytes: AtomicU64,
    /// Bytes sent and not yet acknowledged, after the latest acknowledgement.
    pub(crate) in_flight_bytes: AtomicU64,
    /// When the newest acknowledged packet was sent.
    newest_acknowledged: watch::Sender<Option<Instant>>,
}

impl Delivered {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            bytes: AtomicU64::new(0),
            network_limited_bytes: AtomicU64::new(0),
            in_flight_bytes: AtomicU64::new(0),
            newest_acknowledged: watch::Sender::new(None),
        })
    }

    fn acknowledged(&self, sent: Instant) {
        // Nobody waits most of the time, and this runs for every packet.
        if self.newest_acknowledged.receiver_count() == 0 {
            return;
        }
        self.newest_acknowledged.send_if_modified(|newest| {
            let newer = newest.is_none_or(|newest| sent > newest);
            if newer {
                *newest = Some(sent);
            }
            newer
        });
    }

    /// Follows when the newest acknowledged packet was sent.
    pub(crate) fn acknowledgements(&self) -> watch::Receiver<Option<Instant>> {
        self.newest_acknowledged.subscribe()
    }
}

/// Makes a [`Counting`] controller for each session.
///
/// One factory serves one session, so that the counters outlive a controller that is rebuilt on a new path.
#[derive(Debug)]
pub(crate) struct CountingFactory {
    pub(crate) congestion: Congestion,
    pub(crate) delivered: Arc<Delivered>,
}

impl ControllerFactory for CountingFactory {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        let inner = match self.congestion {
            Congestion::Cubic => Arc::new(CubicConfig::default()).build(now, current_mtu),
            Congestion::Bbr => Arc::new(BbrConfig::default()).build(now, current_mtu),
        };
        Box::new(Counting {
            inner,
            delivered: Arc::clone(&self.delivered),
        })
    }
}

struct Counting {
    inner: Box<dyn Controller>,
    delivered: Arc<Delivered>,
}

impl Controller for Counting {
    fn on_sent(&mut self, now: Instant, bytes: u64, last_packet_number: u64) {
        self.inner.on_sent(now, bytes, last_packet_number);
    }

    fn on_ack(
        &mut self,
        now: Instant,
        sent: Instant,
        bytes: u64,
        app_limited: bool,
        rtt: &RttEstimator,
    ) {
        self.delivered.bytes.fetch_add(bytes, Ordering::Relaxed);
        if !app_limited {
            self.delivered
                .network_limited_bytes
                .fetch_add(bytes, Ordering::Relaxed);
        }
        self.delivered.acknowledged(sent);
        self.inner.on_ack(now, sent, bytes, app_limited, rtt);
    }

    fn on_end_acks(
        &mut self,
        now: Instant,
        in_flight: u64,
        app_limited: bool,
        largest_packet_num_acked: Option<u64>,
    ) {
        self.delivered
            .in_flight_bytes
            .store(in_flight, Ordering::Relaxed);
        self.inner
            .on_end_acks(now, in_flight, app_limited, largest_packet_num_acked);
    }

    fn on_congestion_event(
        &mut self,
        now: Instant,
        sent: Instant,
        is_persistent_congestion: bool,
        lost_bytes: u64,
    ) {
        self.inner
            .on_congestion_event(now, sent, is_persistent_congestion, lost_bytes);
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.inner.on_mtu_update(new_mtu);
    }

    fn window(&self) -> u64 {
        self.inner.window()
    }

    fn metrics(&self) -> ControllerMetrics {
        self.inner.metrics()
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Self {
            inner: self.inner.clone_box(),
            delivered: Arc::clone(&self.delivered),
        })
    }

    fn initial_window(&self) -> u64 {
        self.inner.initial_window()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
