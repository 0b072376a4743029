//! Who may speak which protocol: the one door every accepted connection passes before its first application byte.
//!
//! Start at [`authorise`]. TLS has by then proved that the peer holds the private key of the certificate it showed, and
//! nothing else: whether the certificate counts is decided here, so that a refused peer hears the reason in words.
//!
//! Deliberately absent: whether a node was removed from the fleet or its key replaced. That is the coordinator's
//! knowledge, to be compared with the key in the [`Principal`].

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use compass_shared::ids::{Digest, NodeId, QueryId};
use rustls_pki_types::CertificateDer;

use crate::clock::WallClock;
use crate::identity::{CertificateFacts, Role, Standing, standing};

/// The protocols, by the names TLS negotiates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Alpn {
    /// `compass/1`: an agent at the coordinator.
    Agent,
    /// `compass-app/1`: an app at the coordinator.
    App,
    /// `compass-data/1`: frames between nodes, from apps and to apps.
    Data,
    /// `compass-join/1`: getting or renewing a node's certificate.
    Join,
}

impl Alpn {
    /// Every protocol.
    pub const ALL: [Self; 4] = [Self::Agent, Self::App, Self::Data, Self::Join];

    /// The name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Agent => "compass/1",
            Self::App => "compass-app/1",
            Self::Data => "compass-data/1",
            Self::Join => "compass-join/1",
        }
    }

    /// Reads the name on the wire.
    pub fn parse(name: &[u8]) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|alpn| alpn.name().as_bytes() == name)
    }
}

impl fmt::Display for Alpn {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// Who the peer of a session is, proved by its certificate and never by its messages.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Principal {
    /// The coordinator.
    Coordinator,
    /// A node of the fleet.
    Agent {
        /// Its id.
        node: NodeId,
        /// SHA-256 of its public key.
        key: Digest,
    },
    /// An app with its query's certificate.
    App {
        /// Its query.
        query: QueryId,
        /// SHA-256 of its public key.
        key: Digest,
    },
    /// An app without a certificate: it may only register, with a token in its first message.
    AppNewcomer,
    /// Somebody without a certificate at the joining protocol: may only join, with a token.
    Newcomer,
    /// A node at the joining protocol, perhaps with an expired certificate: may only renew, if its key is the
    /// registered one.
    Renewing {
        /// Its id.
        node: NodeId,
        /// SHA-256 of its public key.
        key: Digest,
    },
}

impl Principal {
    pub(crate) fn of_role(role: &Role, key: Digest) -> Self {
        match role {
            Role::Coordinator => Self::Coordinator,
            Role::Node(node) => Self::Agent {
                node: node.clone(),
                key,
            },
            Role::App(query) => Self::App {
                query: query.clone(),
                key,
            },
        }
    }
}

impl fmt::Display for Principal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Coordinator => formatter.write_str("the coordinator"),
            Self::Agent { node, .. } => write!(formatter, "node {node}"),
            Self::App { query, .. } => write!(formatter, "app of query {query}"),
            Self::AppNewcomer => formatter.write_str("an unregistered app"),
            Self::Newcomer => formatter.write_str("a node that wants to join"),
            Self::Renewing { node, .. } => write!(formatter, "node {node} (renewing)"),
        }
    }
}

/// Why a peer is not let in. The text goes to the peer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The protocol is not for strangers.
    #[error("{alpn} needs a certificate of this fleet")]
    CertificateRequired {
        /// The protocol.
        alpn: Alpn,
    },
    /// The certificate is none of ours in form.
    #[error("certificate not usable: {reason}")]
    Unusable {
        /// What is wrong.
        reason: String,
    },
    /// Another authority issued it.
    #[error("certificate of {role} does not belong to this fleet: {reason}")]
    Foreign {
        /// Who it claims to be for.
        role: Role,
        /// What is wrong.
        reason: String,
    },
    /// It no longer holds.
    #[error("certificate of {role} expired {ago_s} s ago; {remedy}")]
    Expired {
        /// Whose.
        role: Role,
        /// How long ago, in seconds, by this side's clock.
        ago_s: u64,
        /// What to do.
        remedy: &'static str,
    },
    /// It does not hold yet; temporary.
    #[error(
        "certificate of {role} begins to hold in {in_s} s by this side's clock: one of the clocks is wrong"
    )]
    NotYetValid {
        /// Whose.
        role: Role,
        /// How long until then, in seconds.
        in_s: u64,
    },
    /// A fleet member of the wrong kind.
    #[error("{role} may not use {alpn}")]
    WrongRole {
        /// Who.
        role: Role,
        /// The protocol.
        alpn: Alpn,
    },
    /// A node that is known by another key.
    #[error("{role} shows key {found}, but is known by key {expected}")]
    WrongKey {
        /// Who.
        role: Role,
        /// First digits of the key shown.
        found: String,
        /// First digits of the key known.
        expected: String,
    },
    /// This side does not know yet to which fleet it belongs.
    #[error("this side has not joined a fleet yet")]
    NoAuthority,
}

/// What this process believes: its fleet's authority, its clock, and the keys of its neighbours.
#[derive(Debug)]
pub struct Trust {
    clock: Arc<WallClock>,
    authority: RwLock<Option<CertificateDer<'static>>>,
    peers: RwLock<BTreeMap<NodeId, Digest>>,
}

impl Trust {
    /// Trust in one fleet.
    pub fn new(authority: CertificateDer<'static>, clock: Arc<WallClock>) -> Arc<Self> {
        let trust = Self::none(clock);
        trust.set_authority(authority);
        trust
    }

    /// For a process that has not joined a fleet yet.
    pub fn none(clock: Arc<WallClock>) -> Arc<Self> {
        Arc::new(Self {
            clock,
            authority: RwLock::new(None),
            peers: RwLock::new(BTreeMap::new()),
        })
    }

    /// Believes in an authority from now on.
    pub fn set_authority(&self, authority: CertificateDer<'static>) {
        *self
            .authority
            .write()
            .unwrap_or_else(PoisonError::into_inner) = Some(authority);
    }

    /// The authority believed in.
    pub fn authority(&self) -> Option<CertificateDer<'static>> {
        self.authority
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Replaces the keys of the neighbours: of those the newest target names and those the coordinator introduced. A neighbour's key is trusted even after its
    /// certificate has expired, so that a site survives a long absence of the coordinator; a node that shows another
    /// key than the one named here is refused.
    pub fn set_peers(&self, peers: impl IntoIterator<Item = (NodeId, Digest)>) {
        *self.peers.write().unwrap_or_else(PoisonError::into_inner) = peers.into_iter().collect();
    }

    /// The key a neighbour is known by.
    pub fn peer(&self, node: &NodeId) -> Option<Digest> {
        self.peers
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(node)
            .copied()
    }

    /// The clock certificates are judged by.
    pub fn clock(&self) -> &Arc<WallClock> {
        &self.clock
    }
}

/// Decides who a peer is and whether it may speak the protocol. `chain` is what it showed, leaf first, with possession
/// of the leaf's key already proved; empty when it showed nothing.
///
/// # Errors
/// Why not, in words fit for the peer.
pub fn authorise(
    alpn: Alpn,
    chain: &[CertificateDer<'_>],
    trust: &Trust,
) -> Result<Principal, Refused> {
    let Some(leaf) = chain.first() else {
        return match alpn {
            Alpn::App => Ok(Principal::AppNewcomer),
            Alpn::Join => Ok(Principal::Newcomer),
            Alpn::Agent | Alpn::Data => Err(Refused::CertificateRequired { alpn }),
        };
    };
    let facts = CertificateFacts::read(leaf).map_err(|error| Refused::Unusable {
        reason: error.to_string(),
    })?;
    let authority = trust.authority().ok_or(Refused::NoAuthority)?;
    let now = trust.clock().now_unix_s();
    let standing = standing(leaf, &facts, &authority, now).map_err(|reason| Refused::Foreign {
        role: facts.role.clone(),
        reason,
    })?;
    let CertificateFacts { role, key, .. } = facts;
    match (alpn, &role) {
        (Alpn::Agent, Role::Node(_)) | (Alpn::App, Role::App(_)) | (Alpn::Data, Role::App(_)) => {
            demand_valid(&role, standing, now)?;
            Ok(Principal::of_role(&role, key))
        }
        (Alpn::Data, Role::Node(node)) => {
            match trust.peer(node) {
                Some(known) if known == key => {}
                Some(known) => {
                    return Err(Refused::WrongKey {
                        role,
                        found: key.short(),
                        expected: known.short(),
                    });
                }
                None => demand_valid(&role, standing, now)?,
            }
            Ok(Principal::of_role(&role, key))
        }
        (Alpn::Join, Role::Node(node)) => match standing {
            Standing::Valid | Standing::Expired { .. } => Ok(Principal::Renewing {
                node: node.clone(),
                key,
            }),
            Standing::NotYetValid { .. } => Err(demand_valid(&role, standing, now)
                .expect_err("a certificate that does not hold yet is not valid")),
        },
        (Alpn::Agent, Role::App(_) | Role::Coordinator)
        | (Alpn::App, Role::Node(_) | Role::Coordinator)
        | (Alpn::Data, Role::Coordinator)
        | (Alpn::Join, Role::App(_) | Role::Coordinator) => Err(Refused::WrongRole { role, alpn }),
    }
}

fn demand_valid(role: &Role, standing: Standing, now_unix_s: u64) -> Result<(), Refused> {
    match standing {
        Standing::Valid => Ok(()),
        Standing::Expired { since_unix_s } => Err(Refused::Expired {
            role: role.clone(),
            ago_s: now_unix_s.saturating_sub(since_unix_s),
            remedy: match role {
                Role::App(_) => "register the query again",
                Role::Node(_) | Role::Coordinator => "renew it",
            },
        }),
        Standing::NotYetValid { from_unix_s } => Err(Refused::NotYetValid {
            role: role.clone(),
            in_s: from_unix_s.saturating_sub(now_unix_s),
        }),
    }
}

#[cfg(test)]
mod tests;
