//! QUIC sessions on one side, facts and messages on the other; nothing else.
//!
//! Start at [`run`]. The accept loop takes a session and gives it a task of its own; a peer that is slow, silent or hostile holds up nobody
//! but itself. Who a peer is comes from its certificate. Session tasks stamp liveness and store reports themselves (see `fleet`); what they
//! pass to the roles is paced per session.
//!
//! Deliberately absent: decisions; certificates and joining (the transport's, with our store behind them in [`join`]).

mod agent;
mod app;
mod join;
mod pace;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use compass_shared::ids::NodeId;
use compass_shared::wire::v1::CoordinatorToAgent;
use compass_transport::{CloseCode, Deadline, Endpoint, Principal, Session};
use tokio::task::JoinSet;

use crate::metrics::count;
use crate::plane::Plane;

/// The first message of a session must be there by then.
const FIRST_MESSAGE_S: u64 = 10;
/// A message must be taken by the peer by then.
const WRITE_S: u64 = 10;
/// A session that may be dead is asked and given this long to answer.
const PING: Duration = Duration::from_secs(1);
/// Sessions that are neither seated nor refused yet, joins among them: bounds what strangers can hold.
const UNSEATED_MAX: usize = 512;
/// How often silent nodes are looked for.
const SILENCE_CHECK: Duration = Duration::from_millis(250);

/// Serves every session until the endpoint is closed.
pub async fn run(plane: Arc<Plane>, endpoint: Arc<Endpoint>) {
    let mut sessions = JoinSet::new();
    sessions.spawn(ask_silent_nodes(plane.clone()));
    while let Some((principal, session)) = endpoint.accept().await {
        while let Some(ended) = sessions.try_join_next() {
            if let Err(error) = ended {
                tracing::error!(%error, "a session's task failed");
            }
        }
        let limit = plane.settings.limits.nodes + plane.settings.limits.queries + UNSEATED_MAX;
        if sessions.len() >= limit {
            count(&plane.metrics.sessions_refused, "busy");
            session.close(CloseCode::BUSY, "the coordinator has too many sessions");
            continue;
        }
        sessions.spawn(serve(plane.clone(), principal, session));
    }
}

async fn serve(plane: Arc<Plane>, principal: Principal, session: Arc<dyn Session>) {
    match principal {
        Principal::Agent { node, key } => agent::serve(&plane, node, key, session).await,
        Principal::App { query, key } => {
            app::serve(&plane, app::Shown::Certificate(query, key), session).await;
        }
        Principal::AppNewcomer => app::serve(&plane, app::Shown::Nothing, session).await,
        Principal::Newcomer | Principal::Renewing { .. } => join::serve(&plane, &*session).await,
        Principal::Coordinator => {
            session.close(
                CloseCode::REFUSED,
                "a coordinator does not connect to another",
            );
        }
    }
}

/// Whether the peer of a session is still there: asked, and given [`PING`] to answer.
async fn is_alive(session: &dyn Session) -> bool {
    session.closed_reason().is_none() && session.ping(Deadline::after(PING)).await.is_ok()
}

/// Asks nodes of which nothing was heard for longer than a report takes: their answer overtakes reports that are stuck.
async fn ask_silent_nodes(plane: Arc<Plane>) {
    let silent_after = plane.settings.report_every.mul_f64(1.2);
    let mut number = 0;
    loop {
        tokio::time::sleep(SILENCE_CHECK).await;
        let now = plane.clock.now();
        for seat in plane.fleet.seats() {
            if now.since(seat.heard()) > silent_after {
                number += 1;
                // A full outbox is itself a sign of silence; the monitor judges.
                let _ = seat.send(CoordinatorToAgent::Ping(number));
            }
        }
    }
}

/// The object of an audit line about a node.
fn node_object(node: &NodeId) -> String {
    format!("node {node}")
}
