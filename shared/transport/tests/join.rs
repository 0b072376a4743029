//! Joining, renewing, and every way in which a token can be no good, over real QUIC.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use common::{Fleet, local, node, patience};
use compass_shared::ids::{Digest, NodeId};
use compass_transport::identity::AuthoritySettings;
use compass_transport::join::{JoinError, Served, join, renew, serve};
use compass_transport::{
    Alpn, CertificateAuthority, CloseCode, Closed, Dial, Endpoint, EndpointConfig, IdentityFolder,
    JoinAuthority, JoinRefusal, JoinToken, PrivateKey, Role, ServerTrust, TokenHash, Trust,
    WallClock,
};

/// A day in 2030.
const NOW: u64 = 1_900_000_000;
const DAY: u64 = 24 * 3600;

#[derive(Debug, Clone)]
struct Record {
    node: Option<NodeId>,
    expires_unix_s: u64,
    used_by: Option<Digest>,
}

/// The smallest store that keeps the rules.
#[derive(Debug, Default)]
struct Store {
    tokens: BTreeMap<TokenHash, Record>,
    keys: BTreeMap<NodeId, Digest>,
}

struct Registrar {
    clock: Arc<WallClock>,
    store: Mutex<Store>,
}

#[async_trait]
impl JoinAuthority for Registrar {
    async fn consume(
        &self,
        token: &TokenHash,
        wanted: Option<&NodeId>,
        key: Digest,
    ) -> Result<NodeId, JoinRefusal> {
        let mut store = self.store.lock().unwrap();
        let record = store
            .tokens
            .get_mut(token)
            .ok_or(JoinRefusal::UnknownToken)?;
        let node = match (&record.node, wanted) {
            (Some(bound), Some(wanted)) if bound != wanted => {
                return Err(JoinRefusal::OtherNode {
                    expected: bound.clone(),
                });
            }
            (Some(bound), _) => bound.clone(),
            (None, Some(wanted)) => wanted.clone(),
            (None, None) => return Err(JoinRefusal::NameNeeded),
        };
        match record.used_by {
            Some(used_by) if used_by == key => return Ok(node),
            Some(_) => return Err(JoinRefusal::UsedToken),
            None => {}
        }
        if self.clock.now_unix_s() > record.expires_unix_s {
            return Err(JoinRefusal::ExpiredToken);
        }
        record.used_by = Some(key);
        store.keys.insert(node.clone(), key);
        Ok(node)
    }

    async fn registered_key(&self, node: &NodeId) -> Result<Option<Digest>, JoinRefusal> {
        Ok(self.store.lock().unwrap().keys.get(node).copied())
    }
}

/// A coordinator that serves the joining protocol, on a clock the test moves.
struct Coordinator {
    clock: Arc<WallClock>,
    authority: Arc<CertificateAuthority>,
    registrar: Arc<Registrar>,
    addresses: Vec<SocketAddr>,
    served: tokio::sync::mpsc::UnboundedReceiver<Result<Served, String>>,
}

impl Coordinator {
    fn start() -> Self {
        let clock = WallClock::manual(NOW);
        let authority = Arc::new(CertificateAuthority::in_memory(
            Arc::clone(&clock),
            AuthoritySettings::default(),
        ));
        let endpoint = Endpoint::bind(
            EndpointConfig::new(local(), &[Alpn::Agent, Alpn::Join]),
            Trust::new(authority.certificate().clone(), Arc::clone(&clock)),
            Some(authority.identity(&Role::Coordinator).unwrap()),
        )
        .unwrap();
        let registrar = Arc::new(Registrar {
            clock: Arc::clone(&clock),
            store: Mutex::default(),
        });
        let addresses = endpoint.local_addresses();
        let (sender, served) = tokio::sync::mpsc::unbounded_channel();
        let (issuer, keeper) = (Arc::clone(&authority), Arc::clone(&registrar));
        tokio::spawn(async move {
            while let Some((_, session)) = endpoint.accept().await {
                let (issuer, keeper) = (Arc::clone(&issuer), Arc::clone(&keeper));
                let sender = sender.clone();
                tokio::spawn(async move {
                    let result = serve(&*session, &issuer, &*keeper, patience()).await;
                    let _ = sender.send(result.map_err(|error| error.to_string()));
                });
            }
        });
        Self {
            clock,
            authority,
            registrar,
            addresses,
            served,
        }
    }

    fn token(&self, node: Option<&str>) -> JoinToken {
        let token = JoinToken::mint(self.authority.fingerprint());
        let record = Record {
            node: node.map(common::node),
            expires_unix_s: NOW + 1_800,
            used_by: None,
        };
        self.registrar
            .store
            .lock()
            .unwrap()
            .tokens
            .insert(token.hash(), record);
        token
    }

    fn newcomer(&self) -> Endpoint {
        Endpoint::bind(
            EndpointConfig::new(local(), &[Alpn::Data]),
            Trust::none(Arc::clone(&self.clock)),
            None,
        )
        .unwrap()
    }

    async fn join(
        &self,
        endpoint: &Endpoint,
        token: &JoinToken,
        wanted: Option<&str>,
        key: &PrivateKey,
    ) -> Result<compass_transport::Identity, JoinError> {
        let wanted = wanted.map(common::node);
        join(endpoint, &self.addresses, token, wanted, key, patience()).await
    }
}

fn refusal(result: Result<compass_transport::Identity, JoinError>) -> JoinRefusal {
    match result.unwrap_err() {
        JoinError::Refused(refusal) => refusal,
        other => panic!("expected a refusal, got: {other}"),
    }
}

#[tokio::test]
async fn a_node_joins_and_connects() {
    let mut coordinator = Coordinator::start();
    let token = coordinator.token(Some("edge-7"));
    let folder = tempfile::tempdir().unwrap();
    let stored = IdentityFolder::new(folder.path());
    let newcomer = coordinator.newcomer();
    let token = JoinToken::parse(&token.reveal()).unwrap();
    let identity = coordinator
        .join(&newcomer, &token, None, &stored.key_or_create().unwrap())
        .await
        .unwrap();
    assert_eq!(identity.role(), &Role::Node(node("edge-7")));
    stored.save(&identity).unwrap();
    assert_eq!(
        coordinator.served.recv().await.unwrap().unwrap(),
        Served::Joined {
            node: node("edge-7"),
            key: identity.key().fingerprint()
        }
    );

    newcomer.trust().set_authority(identity.authority().clone());
    newcomer.set_identity(identity).unwrap();
    let dial = Dial::new(Alpn::Agent, Role::Coordinator);
    newcomer
        .connect(&coordinator.addresses, &dial, patience())
        .await
        .expect("a member is let in");
}

#[tokio::test]
async fn the_same_key_may_repeat_its_request_and_no_other() {
    let coordinator = Coordinator::start();
    let token = coordinator.token(Some("edge-7"));
    let newcomer = coordinator.newcomer();
    let key = PrivateKey::generate();
    let first = coordinator
        .join(&newcomer, &token, None, &key)
        .await
        .unwrap();
    let second = coordinator
        .join(&newcomer, &token, None, &key)
        .await
        .unwrap();
    assert_eq!(first.role(), second.role());
    let thief = PrivateKey::generate();
    assert_eq!(
        refusal(coordinator.join(&newcomer, &token, None, &thief).await),
        JoinRefusal::UsedToken
    );
}

#[tokio::test]
async fn each_bad_token_has_its_own_answer() {
    let coordinator = Coordinator::start();
    let newcomer = coordinator.newcomer();
    let key = PrivateKey::generate();

    let forged = JoinToken::mint(coordinator.authority.fingerprint());
    assert_eq!(
        refusal(coordinator.join(&newcomer, &forged, None, &key).await),
        JoinRefusal::UnknownToken
    );
    let bound = coordinator.token(Some("edge-7"));
    assert_eq!(
        refusal(
            coordinator
                .join(&newcomer, &bound, Some("edge-8"), &key)
                .await
        ),
        JoinRefusal::OtherNode {
            expected: node("edge-7")
        }
    );
    let free = coordinator.token(None);
    assert_eq!(
        refusal(coordinator.join(&newcomer, &free, None, &key).await),
        JoinRefusal::NameNeeded
    );
    coordinator.clock.set(NOW + 1_801);
    let refused = refusal(coordinator.join(&newcomer, &bound, None, &key).await);
    assert_eq!(refused, JoinRefusal::ExpiredToken);
    assert!(
        refused.to_string().contains("compass token create"),
        "says what to do"
    );
}

#[tokio::test]
async fn a_coordinator_of_another_fleet_gets_no_secret() {
    let coordinator = Coordinator::start();
    let impostor = Coordinator::start();
    let token = coordinator.token(Some("edge-7"));
    let newcomer = coordinator.newcomer();
    let key = PrivateKey::generate();
    let error = impostor
        .join(&newcomer, &token, None, &key)
        .await
        .unwrap_err();
    assert!(matches!(error, JoinError::Connect(_)), "{error}");
    assert!(
        error.to_string().contains("does not belong to the fleet"),
        "{error}"
    );
}

#[tokio::test]
async fn certificates_renew_valid_and_expired_by_the_registered_key() {
    let coordinator = Coordinator::start();
    let token = coordinator.token(Some("edge-7"));
    let agent = coordinator.newcomer();
    let identity = coordinator
        .join(&agent, &token, None, &PrivateKey::generate())
        .await
        .unwrap();
    agent.trust().set_authority(identity.authority().clone());
    agent.set_identity(identity.clone()).unwrap();

    let renewed = renew(&agent, &coordinator.addresses, patience())
        .await
        .unwrap();
    assert_ne!(renewed.certificate(), identity.certificate());

    coordinator.clock.set(NOW + 40 * DAY);
    let dial = Dial::new(Alpn::Agent, Role::Coordinator);
    let refused = agent
        .connect(&coordinator.addresses, &dial, patience())
        .await
        .unwrap_err();
    assert!(refused.to_string().contains("expired"), "{refused}");
    assert!(refused.is_lasting());
    let renewed = renew(&agent, &coordinator.addresses, patience())
        .await
        .unwrap();
    agent.set_identity(renewed).unwrap();
    agent
        .connect(&coordinator.addresses, &dial, patience())
        .await
        .expect("the renewed certificate holds");

    // Another key took the name, or the node was removed: the old key renews nothing.
    let edge = node("edge-7");
    coordinator
        .registrar
        .store
        .lock()
        .unwrap()
        .keys
        .insert(edge.clone(), Digest::of(b"another"));
    assert_eq!(
        refusal(renew(&agent, &coordinator.addresses, patience()).await),
        JoinRefusal::OtherKey { node: edge.clone() }
    );
    coordinator
        .registrar
        .store
        .lock()
        .unwrap()
        .keys
        .remove(&edge);
    assert_eq!(
        refusal(renew(&agent, &coordinator.addresses, patience()).await),
        JoinRefusal::NotAMember { node: edge }
    );
}

#[tokio::test]
async fn damaged_requests_are_told_so_and_consume_nothing() {
    let mut coordinator = Coordinator::start();
    let newcomer = coordinator.newcomer();
    let dial = Dial::new(Alpn::Join, Role::Coordinator)
        .trusting(ServerTrust::AuthorityFingerprint(
            coordinator.authority.fingerprint(),
        ))
        .anonymous();
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 64], &[0, 0]] {
        let session = newcomer
            .connect(&coordinator.addresses, &dial, patience())
            .await
            .unwrap();
        let (mut send, _recv) = session.take_control().unwrap();
        send.write_bytes(bytes.to_vec().into(), patience())
            .await
            .unwrap();
        send.finish().unwrap();
        let closed = session.closed().await;
        let Closed::ByPeer { code, reason } = closed else {
            panic!("the coordinator says why: {closed}");
        };
        assert_eq!(code, CloseCode::BAD_MESSAGE, "{reason}");
        assert!(!reason.is_empty());
        assert!(coordinator.served.recv().await.unwrap().is_err());
    }
    let token = coordinator.token(Some("edge-7"));
    coordinator
        .join(&newcomer, &token, None, &PrivateKey::generate())
        .await
        .expect("others are not disturbed");
}

#[tokio::test]
async fn other_protocols_are_not_served_here() {
    let fleet = Fleet::new();
    let pair = fleet.pair().await;
    let registrar = Registrar {
        clock: WallClock::manual(NOW),
        store: Mutex::default(),
    };
    let error = serve(&*pair.far, &fleet.authority, &registrar, patience())
        .await
        .unwrap_err();
    assert!(matches!(error, JoinError::WrongProtocol));
}
