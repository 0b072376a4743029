//! Dialling a peer: every address of every family, the exact role expected there, and again after each loss.
//!
//! Start at [`Endpoint::connect`] for one connection, at [`Dialler`] for a peer that is to be reached again and again.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::task::JoinSet;

use super::{Bound, Endpoint};
use crate::authorise::{Alpn, Principal};
use crate::congestion::Delivered;
use crate::deadline::Deadline;
use crate::error::{CloseCode, Closed, TransportError, describe};
use crate::handshake::{self, GreetingError};
use crate::identity::{CertificateFacts, Identity, IdentityError, Role};
use crate::session::{Established, QuicSession, Session};
use crate::tls::{self, ServerTrust};

/// Most addresses tried in one call; a resolver that gives more is not worth believing.
const ADDRESSES_MAX: usize = 16;

/// How long to leave a peer alone that refused for a reason which will not pass by itself.
const LASTING_RETRY: Duration = Duration::from_secs(60);

/// Whom to dial and how.
#[derive(Debug, Clone)]
pub struct Dial {
    /// The protocol.
    pub alpn: Alpn,
    /// Who must answer.
    pub expect: Role,
    /// What counts as proof that it is them.
    pub server_trust: ServerTrust,
    /// Whether this process shows its own certificate.
    pub show: Show,
}

/// What a dialler shows of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Show {
    /// The endpoint's identity; dialling fails without one.
    Identity,
    /// Nothing: for joining and registering.
    Nothing,
}

impl Dial {
    /// Dials as oneself, believing one's own authority.
    pub fn new(alpn: Alpn, expect: Role) -> Self {
        Self {
            alpn,
            expect,
            server_trust: ServerTrust::Authority,
            show: Show::Identity,
        }
    }

    /// Takes another proof of the peer's identity.
    #[must_use]
    pub fn trusting(mut self, server_trust: ServerTrust) -> Self {
        self.server_trust = server_trust;
        self
    }

    /// Shows no certificate.
    #[must_use]
    pub fn anonymous(mut self) -> Self {
        self.show = Show::Nothing;
        self
    }
}

/// One address that did not work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The address.
    pub address: SocketAddr,
    /// Why, in words.
    pub reason: String,
}

impl fmt::Display for Attempt {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.address, self.reason)
    }
}

fn list(attempts: &[Attempt]) -> String {
    let each: Vec<String> = attempts.iter().map(Attempt::to_string).collect();
    each.join("; ")
}

/// Why a peer was not reached, or did not let us in.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No address is known.
    #[error("no address of {peer} is known: {reason}")]
    NoAddress {
        /// Whom.
        peer: Role,
        /// Why, in words.
        reason: String,
    },
    /// No address answered as expected; names each.
    #[error("cannot reach {peer}: {}", list(.attempts))]
    Unreachable {
        /// Whom.
        peer: Role,
        /// One line per address.
        attempts: Vec<Attempt>,
    },
    /// The peer answered and said no.
    #[error("{peer} at {address} does not let us in ({code}): {reason}")]
    Refused {
        /// Whom.
        peer: Role,
        /// Where.
        address: SocketAddr,
        /// Why, for programs.
        code: CloseCode,
        /// Why, for people.
        reason: String,
    },
    /// The connection stood but no valid hello came back.
    #[error("{peer} at {address} did not answer as expected: {reason}")]
    Greeting {
        /// Whom.
        peer: Role,
        /// Where.
        address: SocketAddr,
        /// What happened.
        reason: String,
    },
    /// This process has nothing to show.
    #[error("this process has no certificate yet")]
    NoIdentity,
    /// The role cannot be dialled.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// TLS cannot be set up with this identity.
    #[error("identity not usable: {0}")]
    Tls(rustls::Error),
}

impl ConnectError {
    /// The least time to wait before the next try (see [`crate::Backoff::server_asked`]): zero, or a minute where
    /// trying again soon is pointless.
    pub fn retry_after(&self) -> Duration {
        if self.is_lasting() {
            LASTING_RETRY
        } else {
            Duration::ZERO
        }
    }

    /// Whether trying again soon is pointless without a change on one side.
    pub fn is_lasting(&self) -> bool {
        match self {
            Self::Refused { code, .. } => code.is_lasting(),
            Self::NoIdentity | Self::Identity(_) | Self::Tls(_) => true,
            Self::NoAddress { .. } | Self::Unreachable { .. } | Self::Greeting { .. } => false,
        }
    }
}

impl Endpoint {
    /// Connects to the first of `addresses` that answers as `dial` expects, and exchanges hellos with it.
    ///
    /// Addresses are tried in order, the next one beside the last as soon as that fails or stays silent for a moment.
    ///
    /// # Errors
    /// Names each address and why it did not work, or what the peer said.
    pub async fn connect(
        &self,
        addresses: &[SocketAddr],
        dial: &Dial,
        deadline: Deadline,
    ) -> Result<Arc<dyn Session>, ConnectError> {
        let identity = match dial.show {
            Show::Identity => Some(self.identity().ok_or(ConnectError::NoIdentity)?),
            Show::Nothing => None,
        };
        let reached = self
            .reach(addresses, dial, identity.as_deref(), deadline)
            .await?;
        let address = reached.connection.remote_address();
        let settings = &self.shared.settings;
        let deadline = deadline.sooner(Deadline::after(settings.handshake_timeout));
        let greeted = handshake::greet(&reached.connection, &self.shared.hello, deadline)
            .await
            .map_err(|error| {
                reached
                    .connection
                    .close(error.close_code().0.into(), error.to_string().as_bytes());
                not_greeted(dial.expect.clone(), address, error)
            })?;
        let principal = peer_principal(&reached.connection, &dial.expect);
        Ok(Arc::new(QuicSession::from(Established {
            connection: reached.connection,
            principal,
            alpn: dial.alpn,
            version: greeted.version,
            peer: greeted.peer,
            control: greeted.control,
            delivered: reached.delivered,
        })))
    }

    /// The QUIC and TLS handshake with the first address that answers as expected.
    async fn reach(
        &self,
        addresses: &[SocketAddr],
        dial: &Dial,
        identity: Option<&Identity>,
        deadline: Deadline,
    ) -> Result<Reached, ConnectError> {
        let server_name = dial.expect.server_name()?;
        let settings = &self.shared.settings;
        let mut waiting = distinct(addresses).into_iter();
        let mut trying = JoinSet::new();
        let mut attempts = Vec::new();
        loop {
            if let Some(address) = waiting.next() {
                match self.socket_for(address) {
                    Ok(bound) => {
                        let delivered = Delivered::new();
                        let config = self.client_config(identity, dial, &delivered)?;
                        let limit = deadline.sooner(Deadline::after(settings.dial_timeout));
                        match bound.quinn.connect_with(config, address, &server_name) {
                            Ok(connecting) => {
                                trying.spawn(try_one(connecting, address, delivered, limit));
                            }
                            Err(error) => attempts.push(Attempt {
                                address,
                                reason: error.to_string(),
                            }),
                        }
                    }
                    Err(reason) => attempts.push(Attempt { address, reason }),
                }
            }
            if trying.is_empty() {
                if waiting.len() == 0 {
                    return Err(unreachable(&dial.expect, attempts));
                }
                continue;
            }
            let patience = if waiting.len() == 0 {
                Deadline::never()
            } else {
                Deadline::after(settings.dial_stagger)
            };
            match patience.run("an address", trying.join_next()).await {
                Ok(Some(Ok(Ok(reached)))) => return Ok(reached),
                Ok(Some(Ok(Err(attempt)))) => attempts.push(attempt),
                // A task that was cancelled or panicked tells nothing about its address.
                Ok(Some(Err(_)) | None) => {}
                // Silent so far: try the next one beside it.
                Err(_) => {}
            }
        }
    }

    /// The socket of the address's family.
    fn socket_for(&self, address: SocketAddr) -> Result<&Bound, String> {
        self.sockets
            .iter()
            .find(|bound| bound.local.is_ipv4() == address.is_ipv4())
            .ok_or_else(|| {
                let family = |address: &SocketAddr| {
                    if address.is_ipv4() { "IPv4" } else { "IPv6" }
                };
                let local: Vec<String> = self
                    .sockets
                    .iter()
                    .map(|bound| bound.local.to_string())
                    .collect();
                format!(
                    "this process has no {} socket (bound to {})",
                    family(&address),
                    local.join(", ")
                )
            })
    }

    fn client_config(
        &self,
        identity: Option<&Identity>,
        dial: &Dial,
        delivered: &Arc<Delivered>,
    ) -> Result<quinn::ClientConfig, ConnectError> {
        let crypto = tls::client_config(
            identity,
            dial.alpn,
            dial.expect.clone(),
            dial.server_trust,
            &self.shared.trust,
        )
        .map_err(ConnectError::Tls)?;
        let mut config = quinn::ClientConfig::new(Arc::new(crypto));
        config.transport_config(Arc::new(self.shared.transport_config(delivered)));
        Ok(config)
    }
}

/// A finished handshake, before any hello.
struct Reached {
    connection: quinn::Connection,
    delivered: Arc<Delivered>,
}

async fn try_one(
    connecting: quinn::Connecting,
    address: SocketAddr,
    delivered: Arc<Delivered>,
    deadline: Deadline,
) -> Result<Reached, Attempt> {
    let reason = match deadline.run("waiting for an answer", connecting).await {
        Ok(Ok(connection)) => {
            return Ok(Reached {
                connection,
                delivered,
            });
        }
        Ok(Err(quinn::ConnectionError::TimedOut)) | Err(TransportError::Deadline { .. }) => {
            "no answer (not running there, or UDP may be blocked)".to_owned()
        }
        Ok(Err(error)) => describe(&error),
        Err(error) => error.to_string(),
    };
    Err(Attempt { address, reason })
}

/// In order, without repetition, and IPv4 written as IPv4.
fn distinct(addresses: &[SocketAddr]) -> Vec<SocketAddr> {
    let mut distinct = Vec::new();
    for address in addresses {
        let address = SocketAddr::new(address.ip().to_canonical(), address.port());
        if !distinct.contains(&address) {
            distinct.push(address);
        }
    }
    distinct.truncate(ADDRESSES_MAX);
    distinct
}

fn unreachable(peer: &Role, attempts: Vec<Attempt>) -> ConnectError {
    if attempts.is_empty() {
        return ConnectError::NoAddress {
            peer: peer.clone(),
            reason: "none was given".to_owned(),
        };
    }
    ConnectError::Unreachable {
        peer: peer.clone(),
        attempts,
    }
}

fn not_greeted(peer: Role, address: SocketAddr, error: GreetingError) -> ConnectError {
    match error {
        GreetingError::Transport(TransportError::Closed(Closed::ByPeer { code, reason })) => {
            ConnectError::Refused {
                peer,
                address,
                code,
                reason,
            }
        }
        GreetingError::Version(error) => ConnectError::Refused {
            peer,
            address,
            code: CloseCode::NO_COMMON_VERSION,
            reason: error.to_string(),
        },
        other => ConnectError::Greeting {
            peer,
            address,
            reason: other.to_string(),
        },
    }
}

/// Who answered: TLS has already checked that it is the role expected.
fn peer_principal(connection: &quinn::Connection, expected: &Role) -> Principal {
    let key = super::accept::certificates(connection)
        .first()
        .and_then(|leaf| CertificateFacts::read(leaf).ok())
        .map(|facts| facts.key)
        .expect("a server whose certificate cannot be read fails the handshake");
    Principal::of_role(expected, key)
}

/// Turns a name into addresses.
#[async_trait]
pub trait Resolver: Send + Sync {
    /// Resolves `host:port`.
    async fn resolve(&self, target: &str) -> std::io::Result<Vec<SocketAddr>>;
}

/// The host's own resolver.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemResolver;

#[async_trait]
impl Resolver for SystemResolver {
    async fn resolve(&self, target: &str) -> std::io::Result<Vec<SocketAddr>> {
        Ok(tokio::net::lookup_host(target).await?.collect())
    }
}

/// Connects to one peer again and again: resolves its names each time, and keeps the last address that worked for when
/// the resolver does not.
pub struct Dialler {
    endpoint: Arc<Endpoint>,
    resolver: Arc<dyn Resolver>,
    targets: Vec<String>,
    dial: Dial,
    last_good: Option<SocketAddr>,
}

impl Dialler {
    /// For a peer reachable at any of `targets` (each `host:port`).
    pub fn new(
        endpoint: Arc<Endpoint>,
        resolver: Arc<dyn Resolver>,
        targets: Vec<String>,
        dial: Dial,
    ) -> Self {
        Self {
            endpoint,
            resolver,
            targets,
            dial,
            last_good: None,
        }
    }

    /// The last address that worked.
    pub fn last_good(&self) -> Option<SocketAddr> {
        self.last_good
    }

    /// One try at connecting, over all addresses.
    ///
    /// # Errors
    /// As [`Endpoint::connect`]; a resolver's failure is named when no address remains.
    pub async fn connect(&mut self, deadline: Deadline) -> Result<Arc<dyn Session>, ConnectError> {
        let mut addresses = Vec::new();
        let mut failures = Vec::new();
        for target in &self.targets {
            match deadline
                .run("resolving a name", self.resolver.resolve(target))
                .await
            {
                Ok(Ok(found)) if found.is_empty() => {
                    failures.push(format!("{target} resolves to nothing"));
                }
                Ok(Ok(found)) => addresses.extend(found),
                Ok(Err(error)) => failures.push(format!("{target}: {error}")),
                Err(passed) => failures.push(format!("{target}: {passed}")),
            }
        }
        // What the resolver says comes first: a peer that has moved is not to be looked for where it was.
        addresses.extend(self.last_good);
        if addresses.is_empty() {
            return Err(ConnectError::NoAddress {
                peer: self.dial.expect.clone(),
                reason: failures.join("; "),
            });
        }
        let session = self
            .endpoint
            .connect(&addresses, &self.dial, deadline)
            .await?;
        self.last_good = Some(session.remote_address());
        Ok(session)
    }
}

impl fmt::Debug for Dialler {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Dialler")
            .field("targets", &self.targets)
            .field("dial", &self.dial)
            .field("last_good", &self.last_good)
            .finish_non_exhaustive()
    }
}
