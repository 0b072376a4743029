//! Taking connections off the wire and carrying each to an answered hello.
//!
//! Start at [`run`]. The loop itself waits only for the next connection. Above a first bound of handshakes in progress a
//! newcomer has to prove its address with one more round trip, so that forged addresses cannot fill the second bound,
//! above which newcomers are refused.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use quinn::crypto::rustls::HandshakeData;
use rustls_pki_types::CertificateDer;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::Shared;
use crate::authorise::{Alpn, Principal, authorise};
use crate::congestion::Delivered;
use crate::deadline::Deadline;
use crate::error::{CloseCode, describe, reason_bytes};
use crate::handshake;
use crate::session::{Established, QuicSession, Session};

#[derive(Debug, Default)]
pub(super) struct AcceptCounters {
    accepted: AtomicU64,
    validated: AtomicU64,
    overloaded: AtomicU64,
    failed: AtomicU64,
    refused: AtomicU64,
}

/// How accepting went since the endpoint was bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AcceptStats {
    /// Peers that became sessions.
    pub accepted: u64,
    /// Peers that had to prove their address first.
    pub validated: u64,
    /// Peers turned away because too many were connecting.
    pub overloaded: u64,
    /// Handshakes or hellos that failed.
    pub failed: u64,
    /// Peers refused by `authorise`.
    pub refused: u64,
}

impl AcceptCounters {
    pub(super) fn read(&self) -> AcceptStats {
        AcceptStats {
            accepted: self.accepted.load(Ordering::Relaxed),
            validated: self.validated.load(Ordering::Relaxed),
            overloaded: self.overloaded.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
        }
    }
}

/// What to do with a connection that has just arrived.
#[derive(Debug, PartialEq, Eq)]
enum Admission {
    Accept,
    ProveAddress,
    Refuse,
}

fn admission(
    in_progress: usize,
    is_validated: bool,
    unvalidated_max: usize,
    max: usize,
) -> Admission {
    if in_progress >= max {
        Admission::Refuse
    } else if in_progress >= unvalidated_max && !is_validated {
        Admission::ProveAddress
    } else {
        Admission::Accept
    }
}

/// Accepts on one socket until it is closed.
pub(super) async fn run(
    endpoint: quinn::Endpoint,
    shared: Arc<Shared>,
    accepted: mpsc::Sender<(Principal, Arc<dyn Session>)>,
) {
    // Dropping the set with the loop ends every handshake in progress.
    let mut in_progress = JoinSet::new();
    while let Some(incoming) = endpoint.accept().await {
        while in_progress.try_join_next().is_some() {}
        let settings = &shared.settings;
        let counters = &shared.accept_counters;
        match admission(
            in_progress.len(),
            incoming.remote_address_validated(),
            settings.half_open_unvalidated_max,
            settings.half_open_max,
        ) {
            Admission::Accept => {
                in_progress.spawn(carry(incoming, Arc::clone(&shared), accepted.clone()));
            }
            Admission::ProveAddress => {
                counters.validated.fetch_add(1, Ordering::Relaxed);
                // Fails only for a validated address, which `admission` rules out.
                let _ = incoming.retry();
            }
            Admission::Refuse => {
                counters.overloaded.fetch_add(1, Ordering::Relaxed);
                incoming.refuse();
            }
        }
    }
}

/// Carries one connection to its end: a session handed over, or a reason told.
async fn carry(
    incoming: quinn::Incoming,
    shared: Arc<Shared>,
    accepted: mpsc::Sender<(Principal, Arc<dyn Session>)>,
) {
    let deadline = Deadline::after(shared.settings.handshake_timeout);
    let remote = incoming.remote_address();
    let Some(established) = establish(incoming, remote, &shared, deadline).await else {
        return;
    };
    let principal = established.principal.clone();
    let session: Arc<dyn Session> = Arc::new(QuicSession::from(established));
    let handed_over = deadline.run(
        "handing over a session",
        accepted.send((principal, Arc::clone(&session))),
    );
    if let Ok(Ok(())) = handed_over.await {
        shared
            .accept_counters
            .accepted
            .fetch_add(1, Ordering::Relaxed);
    } else {
        session.close(CloseCode::BUSY, "this side does not take new sessions");
    }
}

async fn establish(
    incoming: quinn::Incoming,
    remote: SocketAddr,
    shared: &Shared,
    deadline: Deadline,
) -> Option<Established> {
    let counters = &shared.accept_counters;
    let failed = |reason: &str| {
        counters.failed.fetch_add(1, Ordering::Relaxed);
        tracing::info!(%remote, reason, "handshake failed");
    };
    let delivered = Delivered::new();
    let connection = match shake_hands(incoming, shared, &delivered, deadline).await {
        Ok(connection) => connection,
        Err(reason) => {
            failed(&reason);
            return None;
        }
    };
    let close = |code: CloseCode, reason: &str| {
        connection.close(code.0.into(), reason_bytes(reason));
    };
    let Some(alpn) = negotiated(&connection) else {
        close(CloseCode::REFUSED, "no protocol was negotiated");
        failed("no protocol was negotiated");
        return None;
    };
    let chain = certificates(&connection);
    let principal = match authorise(alpn, &chain, &shared.trust) {
        Ok(principal) => principal,
        Err(refused) => {
            counters.refused.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(%remote, %alpn, reason = %refused, "peer refused");
            close(CloseCode::REFUSED, &refused.to_string());
            return None;
        }
    };
    match handshake::answer(&connection, &shared.hello, deadline).await {
        Ok(greeted) => {
            tracing::debug!(%remote, %alpn, %principal, version = greeted.version, "peer connected");
            Some(Established {
                connection,
                principal,
                alpn,
                version: greeted.version,
                peer: greeted.peer,
                control: greeted.control,
                delivered,
            })
        }
        Err(error) => {
            failed(&error.to_string());
            close(error.close_code(), &error.to_string());
            None
        }
    }
}

/// The QUIC and TLS handshake, with counters of its own for the session.
async fn shake_hands(
    incoming: quinn::Incoming,
    shared: &Shared,
    delivered: &Arc<Delivered>,
    deadline: Deadline,
) -> Result<quinn::Connection, String> {
    let config = shared.server_config(delivered).ok_or("no identity yet")?;
    let connecting = incoming
        .accept_with(Arc::new(config))
        .map_err(|error| describe(&error))?;
    match deadline.run("the handshake", connecting).await {
        Ok(Ok(connection)) => Ok(connection),
        Ok(Err(error)) => Err(describe(&error)),
        Err(passed) => Err(passed.to_string()),
    }
}

fn negotiated(connection: &quinn::Connection) -> Option<Alpn> {
    let data = connection
        .handshake_data()?
        .downcast::<HandshakeData>()
        .ok()?;
    Alpn::parse(&data.protocol?)
}

pub(super) fn certificates(connection: &quinn::Connection) -> Vec<CertificateDer<'static>> {
    connection
        .peer_identity()
        .and_then(|identity| identity.downcast::<Vec<CertificateDer<'static>>>().ok())
        .map(|chain| *chain)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn admission_bounds_half_open_peers() {
        let cases = [
            (0, false, Admission::Accept),
            (1, false, Admission::Accept),
            (2, false, Admission::ProveAddress),
            (2, true, Admission::Accept),
            (3, true, Admission::Accept),
            (4, true, Admission::Refuse),
            (4, false, Admission::Refuse),
        ];
        for (in_progress, is_validated, expected) in cases {
            assert_eq!(
                admission(in_progress, is_validated, 2, 4),
                expected,
                "{in_progress} {is_validated}"
            );
        }
    }
}
