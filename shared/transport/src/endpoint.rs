//! One process's presence on the network: its sockets, what it accepts, and whom it dials.
//!
//! Start at [`Endpoint::bind`], then [`Endpoint::accept`] and [`Endpoint::connect`]. Client and server share one UDP
//! socket per address family. Accepting is split in two so that no peer can hold up another: a task per socket takes
//! connections off the wire and never waits for one of them (see `accept`), and a bounded number of tasks carry
//! handshakes, authorisation and hellos to their end.

mod accept;
mod dial;

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};

use compass_shared::wire::hello::Hello;
use quinn::{AsyncUdpSocket, IdleTimeout, Runtime, TokioRuntime, TransportConfig, VarInt};
use tokio::sync::{Mutex, mpsc};
use tokio::task::AbortHandle;

use crate::authorise::{Alpn, Principal, Trust};
use crate::congestion::{CountingFactory, Delivered};
use crate::deadline::Deadline;
use crate::error::{CloseCode, reason_bytes};
use crate::identity::Identity;
use crate::restart::RestartKey;
use crate::session::Session;
use crate::settings::{SettingsError, TransportSettings};
use crate::socket::{self, SocketCounters, SocketReport, SocketStats, SteadySocket};
use crate::tls;

pub use accept::AcceptStats;
pub use dial::{Attempt, ConnectError, Dial, Dialler, Resolver, Show, SystemResolver};

/// Accepted sessions that wait to be taken by [`Endpoint::accept`]; the owner takes them at once.
const ACCEPTED_QUEUE: usize = 64;

/// How to bind an endpoint.
#[derive(Debug, Clone)]
pub struct EndpointConfig {
    /// Local addresses, one socket each; port 0 lets the system choose.
    pub listen: Vec<SocketAddr>,
    /// Protocols accepted; empty for a process that only dials.
    pub accept: Vec<Alpn>,
    /// Timers and limits.
    pub settings: TransportSettings,
    /// What the hello says about this build and the versions it speaks.
    pub hello: Hello,
    /// Lets peers notice at once when this process has restarted; derived from the identity's key when there is none.
    pub restart_key: Option<RestartKey>,
}

impl EndpointConfig {
    /// An endpoint on one address, with default settings.
    pub fn new(listen: SocketAddr, accept: &[Alpn]) -> Self {
        Self {
            listen: vec![listen],
            accept: accept.to_vec(),
            settings: TransportSettings::default(),
            hello: Hello::ours(concat!("compass ", env!("CARGO_PKG_VERSION"))),
            restart_key: None,
        }
    }
}

/// Why an endpoint could not be made.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The settings contradict each other.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// No address could be bound; names each.
    #[error("cannot listen: {}", list(.0))]
    NoSocket(Vec<(SocketAddr, String)>),
    /// The identity cannot be used for TLS.
    #[error("identity not usable: {0}")]
    Identity(rustls::Error),
}

fn list(failures: &[(SocketAddr, String)]) -> String {
    if failures.is_empty() {
        return "no address given".to_owned();
    }
    let each: Vec<String> = failures
        .iter()
        .map(|(address, reason)| format!("{address}: {reason}"))
        .collect();
    each.join("; ")
}

/// One bound socket.
struct Bound {
    quinn: quinn::Endpoint,
    local: SocketAddr,
    report: SocketReport,
    counters: Arc<SocketCounters>,
}

/// What the endpoint and its tasks share.
struct Shared {
    accept: Vec<Alpn>,
    settings: TransportSettings,
    hello: Hello,
    trust: Arc<Trust>,
    identity: RwLock<Option<Arc<Identity>>>,
    server: RwLock<Option<quinn::ServerConfig>>,
    accept_counters: accept::AcceptCounters,
}

/// A process's sockets, identity and accepted sessions.
pub struct Endpoint {
    sockets: Vec<Bound>,
    unbound: Vec<(SocketAddr, String)>,
    shared: Arc<Shared>,
    accepted: Mutex<mpsc::Receiver<(Principal, Arc<dyn Session>)>>,
    accepting: Vec<AbortHandle>,
}

/// Puts something between the transport and a UDP socket, for tests.
pub type SocketWrap<'a> = &'a dyn Fn(Arc<dyn AsyncUdpSocket>) -> Arc<dyn AsyncUdpSocket>;

impl Endpoint {
    /// Binds every address it can and starts accepting. Must be called within a tokio runtime.
    ///
    /// Without an identity nothing is accepted until [`Endpoint::set_identity`].
    ///
    /// # Errors
    /// When the settings contradict each other, or no address could be bound. If some could, the others are in
    /// [`Endpoint::unbound`].
    pub fn bind(
        config: EndpointConfig,
        trust: Arc<Trust>,
        identity: Option<Identity>,
    ) -> Result<Self, BindError> {
        Self::bind_wrapped(config, trust, identity, &|socket| socket)
    }

    /// As [`Endpoint::bind`], with each socket wrapped.
    ///
    /// # Errors
    /// As [`Endpoint::bind`].
    pub fn bind_wrapped(
        config: EndpointConfig,
        trust: Arc<Trust>,
        identity: Option<Identity>,
        wrap: SocketWrap<'_>,
    ) -> Result<Self, BindError> {
        config.settings.validate()?;
        let restart_key = config
            .restart_key
            .or_else(|| identity.as_ref().map(|one| one.key().restart_key()));
        let mut sockets = Vec::new();
        let mut unbound = Vec::new();
        for address in config.listen {
            match bind_one(address, &config.settings, restart_key.as_ref(), wrap) {
                Ok(bound) => sockets.push(bound),
                Err(error) => unbound.push((address, describe_bind(address, &error))),
            }
        }
        if sockets.is_empty() {
            return Err(BindError::NoSocket(unbound));
        }
        for (address, reason) in &unbound {
            tracing::warn!(%address, reason, "address not bound; going on with the others");
        }
        let shared = Arc::new(Shared {
            accept: config.accept,
            settings: config.settings,
            hello: config.hello,
            trust,
            identity: RwLock::new(None),
            server: RwLock::new(None),
            accept_counters: accept::AcceptCounters::default(),
        });
        let (accepted_sender, accepted) = mpsc::channel(ACCEPTED_QUEUE);
        let accepting = if shared.accept.is_empty() {
            Vec::new()
        } else {
            sockets
                .iter()
                .map(|bound| {
                    let task = accept::run(
                        bound.quinn.clone(),
                        Arc::clone(&shared),
                        accepted_sender.clone(),
                    );
                    tokio::spawn(task).abort_handle()
                })
                .collect()
        };
        let endpoint = Self {
            sockets,
            unbound,
            shared,
            accepted: Mutex::new(accepted),
            accepting,
        };
        if let Some(identity) = identity {
            endpoint
                .set_identity(identity)
                .map_err(BindError::Identity)?;
        }
        Ok(endpoint)
    }

    /// Uses an identity from now on: after joining, and after each renewal. Sessions that exist go on.
    ///
    /// # Errors
    /// When TLS cannot use it.
    pub fn set_identity(&self, identity: Identity) -> Result<(), rustls::Error> {
        if !self.shared.accept.is_empty() {
            let crypto = tls::server_config(&identity, &self.shared.accept, &self.shared.trust)?;
            let mut config = quinn::ServerConfig::with_crypto(Arc::new(crypto));
            // A peer whose address changes (a router forgot the mapping) keeps its session.
            config.migration(true);
            config.max_incoming(self.shared.settings.half_open_max);
            for bound in &self.sockets {
                bound.quinn.set_server_config(Some(config.clone()));
            }
            *self
                .shared
                .server
                .write()
                .unwrap_or_else(PoisonError::into_inner) = Some(config);
        }
        *self
            .shared
            .identity
            .write()
            .unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(identity));
        Ok(())
    }

    /// The identity in use.
    pub fn identity(&self) -> Option<Arc<Identity>> {
        self.shared.identity()
    }

    /// What this process believes.
    pub fn trust(&self) -> &Arc<Trust> {
        &self.shared.trust
    }

    /// The next peer that was authorised and whose hello was answered; `None` when nothing is accepted any more.
    pub async fn accept(&self) -> Option<(Principal, Arc<dyn Session>)> {
        self.accepted.lock().await.recv().await
    }

    /// The addresses actually bound.
    pub fn local_addresses(&self) -> Vec<SocketAddr> {
        self.sockets.iter().map(|bound| bound.local).collect()
    }

    /// Addresses that could not be bound, and why.
    pub fn unbound(&self) -> &[(SocketAddr, String)] {
        &self.unbound
    }

    /// Buffer sizes per bound address.
    pub fn socket_reports(&self) -> Vec<(SocketAddr, SocketReport)> {
        self.sockets
            .iter()
            .map(|bound| (bound.local, bound.report))
            .collect()
    }

    /// What the sockets carried, all together.
    pub fn socket_stats(&self) -> SocketStats {
        let mut total = SocketStats::default();
        for bound in &self.sockets {
            let stats = bound.counters.read();
            total.sent_bytes += stats.sent_bytes;
            total.received_bytes += stats.received_bytes;
            total.failed_sends += stats.failed_sends;
            total.offload_failures += stats.offload_failures;
        }
        total
    }

    /// How accepting went so far.
    pub fn accept_stats(&self) -> AcceptStats {
        self.shared.accept_counters.read()
    }

    /// Closes every session and waits, at most until the deadline, for the peers to have heard it.
    pub async fn close(&self, code: CloseCode, reason: &str, deadline: Deadline) {
        for task in &self.accepting {
            task.abort();
        }
        for bound in &self.sockets {
            bound
                .quinn
                .close(VarInt::from_u32(code.0), reason_bytes(reason));
        }
        for bound in &self.sockets {
            // A peer that does not answer must not hold up a shutdown.
            let _ = deadline
                .run("closing sessions", bound.quinn.wait_idle())
                .await;
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        for task in &self.accepting {
            task.abort();
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Endpoint")
            .field("local", &self.local_addresses())
            .field("accept", &self.shared.accept)
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn identity(&self) -> Option<Arc<Identity>> {
        self.identity
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// How to serve one session, whose deliveries are counted in `delivered`; `None` without an identity.
    fn server_config(&self, delivered: &Arc<Delivered>) -> Option<quinn::ServerConfig> {
        let mut config = self
            .server
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()?;
        config.transport_config(Arc::new(self.transport_config(delivered)));
        Some(config)
    }

    /// QUIC's settings for one session, whose deliveries are counted in `delivered`.
    fn transport_config(&self, delivered: &Arc<Delivered>) -> TransportConfig {
        let settings = &self.settings;
        let mut config = TransportConfig::default();
        let idle = IdleTimeout::try_from(settings.idle_timeout)
            .unwrap_or(IdleTimeout::from(VarInt::from_u32(u32::MAX)));
        config
            .max_idle_timeout(Some(idle))
            .keep_alive_interval(Some(settings.keep_alive_interval()))
            .stream_receive_window(settings.stream_receive_window.into())
            .receive_window(settings.receive_window.into())
            .send_window(settings.send_window)
            .max_concurrent_bidi_streams(settings.bi_streams_max.into())
            .max_concurrent_uni_streams(settings.uni_streams_max.into())
            .datagram_receive_buffer_size(Some(settings.datagram_buffer))
            .datagram_send_buffer_size(settings.datagram_buffer)
            .enable_segmentation_offload(settings.segmentation_offload)
            .initial_mtu(settings.mtu_initial)
            .congestion_controller_factory(Arc::new(CountingFactory {
                congestion: settings.congestion,
                delivered: Arc::clone(delivered),
            }));
        if !settings.mtu_discovery {
            config.mtu_discovery_config(None);
        }
        config
    }
}

fn bind_one(
    address: SocketAddr,
    settings: &TransportSettings,
    restart_key: Option<&RestartKey>,
    wrap: SocketWrap<'_>,
) -> std::io::Result<Bound> {
    let (socket, report) = socket::bind(address, settings.socket_buffer)?;
    let local = socket.local_addr()?;
    if report.is_short() {
        tracing::info!(
            %local,
            asked = report.asked,
            receive_granted = report.receive_granted,
            send_granted = report.send_granted,
            "the kernel grants smaller UDP buffers than asked; packets may be dropped under load (net.core.rmem_max, net.core.wmem_max)"
        );
    }
    let runtime = Arc::new(TokioRuntime);
    let counters = Arc::new(SocketCounters::default());
    let steady = SteadySocket::new(
        wrap(runtime.wrap_udp_socket(socket)?),
        Arc::clone(&counters),
    );
    let quinn = quinn::Endpoint::new_with_abstract_socket(
        restart_key.map_or_else(quinn::EndpointConfig::default, RestartKey::quic_config),
        None,
        Arc::new(steady),
        runtime,
    )?;
    Ok(Bound {
        quinn,
        local,
        report,
        counters,
    })
}

fn describe_bind(address: SocketAddr, error: &std::io::Error) -> String {
    use std::io::ErrorKind;
    if address.is_ipv6()
        && matches!(
            error.kind(),
            ErrorKind::AddrNotAvailable | ErrorKind::Unsupported
        )
    {
        return format!("IPv6 is not available on this host ({error})");
    }
    error.to_string()
}
