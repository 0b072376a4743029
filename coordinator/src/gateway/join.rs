//! Joining and renewing: the transport's protocol over our tokens and node records.

use std::sync::Arc;

use async_trait::async_trait;
use compass_shared::ids::{Digest, NodeId};
use compass_transport::join::Served;
use compass_transport::{Deadline, JoinAuthority, JoinRefusal, Session, TokenHash};

use super::node_object;
use crate::events::Event;
use crate::metrics::count;
use crate::plane::Plane;
use crate::store::get;
use crate::store::records::NodeRecord;
use crate::tokens::TokenError;

/// From the request to the peer's leaving.
const WHOLE_S: u64 = 15;

pub(super) async fn serve(plane: &Arc<Plane>, session: &dyn Session) {
    let address = session.remote_address();
    let registrar = Registrar(plane.clone());
    let deadline = Deadline::after_s(WHOLE_S);
    match compass_transport::join::serve(session, &plane.authority, &registrar, deadline).await {
        Ok(Served::Joined { node, key }) => {
            count(&plane.metrics.joins, "joined");
            let text = format!("joined from {address} with key {}", key.short());
            plane
                .events
                .record(Event::new("node", node_object(&node), "gateway", text));
        }
        Ok(Served::Renewed { node }) => {
            count(&plane.metrics.joins, "renewed");
            tracing::info!(%node, %address, "certificate renewed");
        }
        Ok(Served::Refused(refusal)) => {
            count(&plane.metrics.joins, "refused");
            tracing::warn!(%address, reason = %refusal, "join refused");
        }
        Err(error) => {
            count(&plane.metrics.joins, "broken-off");
            tracing::info!(%address, %error, "join broken off");
        }
    }
}

struct Registrar(Arc<Plane>);

#[async_trait]
impl JoinAuthority for Registrar {
    async fn consume(
        &self,
        token: &TokenHash,
        wanted: Option<&NodeId>,
        key: Digest,
    ) -> Result<NodeId, JoinRefusal> {
        let now = self.0.authority.clock().now_unix_s() * 1000;
        let admitted = self.0.tokens.admit(&token.0, wanted, key, now).await;
        admitted.map(|admitted| admitted.node.id).map_err(refusal)
    }

    async fn registered_key(&self, node: &NodeId) -> Result<Option<Digest>, JoinRefusal> {
        let found = get::<NodeRecord>(self.0.office.store(), &NodeRecord::key_of(node));
        let found = found.map_err(|error| JoinRefusal::Unavailable(error.to_string()))?;
        Ok(found.map(|(record, _)| record.fingerprint))
    }
}

fn refusal(error: TokenError) -> JoinRefusal {
    match error {
        TokenError::Unknown | TokenError::WrongPurpose { .. } => JoinRefusal::UnknownToken,
        TokenError::Expired { .. } => JoinRefusal::ExpiredToken,
        TokenError::Revoked { .. } => JoinRefusal::RevokedToken,
        TokenError::UsedUp { .. } => JoinRefusal::UsedToken,
        TokenError::WrongNode { for_node, .. } => JoinRefusal::OtherNode { expected: for_node },
        TokenError::NameNeeded { .. } => JoinRefusal::NameNeeded,
        TokenError::NodeTaken { node } => JoinRefusal::OtherKey { node },
        error @ (TokenError::TooMany | TokenError::Store(_)) => {
            JoinRefusal::Unavailable(error.to_string())
        }
    }
}
