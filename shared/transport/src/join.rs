//! Getting a node's first certificate with a token, and later ones with the registered key.
//!
//! Start at [`JoinToken`], then [`join`] on the node's side and [`serve`] on the coordinator's. The node knows from the
//! token which authority the coordinator must belong to, so it can tell it from an impostor before it sends the secret.
//! [`renew`] works with a valid and with an expired certificate: what counts is that the node still holds the key it is
//! registered with.
//!
//! Deliberately absent: the store of tokens and keys. It is the coordinator's, behind [`JoinAuthority`].

mod message;
mod token;

use std::net::SocketAddr;

use async_trait::async_trait;
use compass_shared::ids::{Digest, NodeId};

use crate::authorise::{Alpn, Principal};
use crate::deadline::Deadline;
use crate::endpoint::{ConnectError, Dial, Endpoint};
use crate::error::{CloseCode, Closed, TransportError};
use crate::identity::{
    CertificateAuthority, Identity, IdentityError, PrivateKey, Role, request_fingerprint,
};
use crate::session::Session;
use crate::tls::ServerTrust;

pub use message::JoinRefusal;
use message::{JoinRequest, JoinResponse};
pub use token::{JoinToken, TokenError, TokenHash, TokenId};

/// Largest message of this protocol in bytes: a signing request, or a chain of two certificates.
const MESSAGE_BYTES_MAX: usize = 16 * 1024;

/// The coordinator's store of tokens and node keys.
#[async_trait]
pub trait JoinAuthority: Send + Sync {
    /// Consumes one use of a token and records the node's key, in one transaction, and gives the node's id.
    ///
    /// `wanted` is the name the node would like, if it said one. A key that has already used this token may repeat its
    /// request (its answer may have been lost) and gets the same id; another key may not.
    ///
    /// # Errors
    /// Why the token does not count, in the words the node is told.
    async fn consume(
        &self,
        token: &TokenHash,
        wanted: Option<&NodeId>,
        key: Digest,
    ) -> Result<NodeId, JoinRefusal>;

    /// The key a node is registered with; `None` when it is no (longer a) member of the fleet.
    ///
    /// # Errors
    /// When the store cannot tell.
    async fn registered_key(&self, node: &NodeId) -> Result<Option<Digest>, JoinRefusal>;
}

/// Why joining or renewing failed.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The coordinator was not reached, or is not the one the token names.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The coordinator said no.
    #[error("the coordinator refuses: {0}")]
    Refused(JoinRefusal),
    /// The conversation broke off.
    #[error("the conversation broke off: {0}")]
    Transport(#[from] TransportError),
    /// The certificate received cannot be used.
    #[error("the coordinator's answer cannot be used: {0}")]
    Identity(#[from] IdentityError),
    /// The session is not one of the joining protocol.
    #[error("not a session of {}", Alpn::Join)]
    WrongProtocol,
}

/// What became of a request that was served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Served {
    /// A node joined, or repeated its request.
    Joined {
        /// Its id.
        node: NodeId,
        /// Its key.
        key: Digest,
    },
    /// A node got a newer certificate.
    Renewed {
        /// Its id.
        node: NodeId,
    },
    /// The request was refused, and the peer was told why.
    Refused(JoinRefusal),
}

/// Joins a fleet: presents a token and a key, and gets an identity. `wanted` is the name the node would like; a token
/// made for one node gives that node's name.
///
/// Needs no identity; the endpoint's own is not shown.
///
/// # Errors
/// When the coordinator is not reached, is not the one the token names, or refuses.
pub async fn join(
    endpoint: &Endpoint,
    addresses: &[SocketAddr],
    token: &JoinToken,
    wanted: Option<NodeId>,
    key: &PrivateKey,
    deadline: Deadline,
) -> Result<Identity, JoinError> {
    let dial = Dial::new(Alpn::Join, Role::Coordinator)
        .trusting(ServerTrust::AuthorityFingerprint(token.authority()))
        .anonymous();
    let session = endpoint.connect(addresses, &dial, deadline).await?;
    let request = JoinRequest::Join {
        token: token.presented(),
        wanted,
        request_der: key.signing_request(),
    };
    let chain_der = ask(&*session, &request, deadline).await?;
    let identity = Identity::from_chain(key.clone(), chain_der)?;
    if crate::identity::key_fingerprint(identity.authority()) != Some(token.authority()) {
        return Err(IdentityError::Mismatch(
            "it comes from another authority than the token's".to_owned(),
        )
        .into());
    }
    Ok(identity)
}

/// Renews the endpoint's own certificate, valid or expired, for the same key.
///
/// # Errors
/// When the coordinator is not reached or refuses.
pub async fn renew(
    endpoint: &Endpoint,
    addresses: &[SocketAddr],
    deadline: Deadline,
) -> Result<Identity, JoinError> {
    let identity = endpoint.identity().ok_or(ConnectError::NoIdentity)?;
    let dial = Dial::new(Alpn::Join, Role::Coordinator);
    let session = endpoint.connect(addresses, &dial, deadline).await?;
    let request = JoinRequest::Renew {
        request_der: identity.key().signing_request(),
    };
    let chain_der = ask(&*session, &request, deadline).await?;
    Ok(identity.renewed(chain_der)?)
}

async fn ask(
    session: &dyn Session,
    request: &JoinRequest,
    deadline: Deadline,
) -> Result<Vec<Vec<u8>>, JoinError> {
    let (mut send, mut recv) = session.take_control().ok_or(JoinError::WrongProtocol)?;
    send.write_frame(request, deadline).await?;
    send.finish()?;
    let response = recv.read_frame(MESSAGE_BYTES_MAX, deadline).await?;
    session.close(CloseCode::DONE, "");
    match response {
        JoinResponse::Issued { chain_der } => Ok(chain_der),
        JoinResponse::Refused(refusal) => Err(JoinError::Refused(refusal)),
    }
}

/// Serves one accepted session of the joining protocol to its end.
///
/// # Errors
/// When the peer does not speak the protocol or goes away; a refusal is not an error.
pub async fn serve(
    session: &dyn Session,
    authority: &CertificateAuthority,
    registrar: &dyn JoinAuthority,
    deadline: Deadline,
) -> Result<Served, JoinError> {
    if session.alpn() != Alpn::Join {
        return Err(JoinError::WrongProtocol);
    }
    let (mut send, mut recv) = session.take_control().ok_or(JoinError::WrongProtocol)?;
    let request = match recv.read_frame(MESSAGE_BYTES_MAX, deadline).await {
        Ok(request) => request,
        Err(error) => {
            session.close(CloseCode::BAD_MESSAGE, &error.to_string());
            return Err(error.into());
        }
    };
    let (served, response) = match decide(session.principal(), request, authority, registrar).await
    {
        Ok((served, chain_der)) => (served, JoinResponse::Issued { chain_der }),
        Err(refusal) => (
            Served::Refused(refusal.clone()),
            JoinResponse::Refused(refusal),
        ),
    };
    send.write_frame(&response, deadline).await?;
    match send.deliver(deadline).await {
        // The peer hangs up as soon as it has the answer; that may be heard before the acknowledgement.
        Ok(())
        | Err(TransportError::Closed(Closed::ByPeer {
            code: CloseCode::DONE,
            ..
        })) => {}
        Err(error) => return Err(error.into()),
    }
    // The peer closes once it has read the answer; this side only bounds the wait.
    let _ = deadline
        .run("waiting for the peer to leave", session.closed())
        .await;
    session.close(CloseCode::DONE, "");
    Ok(served)
}

async fn decide(
    principal: &Principal,
    request: JoinRequest,
    authority: &CertificateAuthority,
    registrar: &dyn JoinAuthority,
) -> Result<(Served, Vec<Vec<u8>>), JoinRefusal> {
    match (principal, request) {
        (
            Principal::Newcomer,
            JoinRequest::Join {
                token,
                wanted,
                request_der,
            },
        ) => {
            // The request is judged before the token is consumed: a damaged one costs nothing.
            let key = request_fingerprint(&request_der).map_err(bad_request)?;
            let node = registrar
                .consume(&token.hash(), wanted.as_ref(), key)
                .await?;
            let chain = authority
                .issue(&Role::Node(node.clone()), &request_der)
                .map_err(bad_request)?;
            Ok((Served::Joined { node, key }, chain))
        }
        (Principal::Renewing { node, key }, JoinRequest::Renew { request_der }) => {
            match registrar.registered_key(node).await? {
                Some(registered) if registered == *key => {}
                Some(_) => return Err(JoinRefusal::OtherKey { node: node.clone() }),
                None => return Err(JoinRefusal::NotAMember { node: node.clone() }),
            }
            let chain = authority
                .renew(&Role::Node(node.clone()), *key, &request_der)
                .map_err(bad_request)?;
            Ok((Served::Renewed { node: node.clone() }, chain))
        }
        (principal, _) => Err(JoinRefusal::BadRequest(format!(
            "{principal} may not ask for this"
        ))),
    }
}

fn bad_request(error: IdentityError) -> JoinRefusal {
    JoinRefusal::BadRequest(error.to_string())
}
