//! Reaching peers: names, keys, families, resolvers, versions, and what a refused dialler is told.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use common::{Fleet, Pair, local, node, patience, query};
use compass_shared::wire::hello::Hello;
use compass_transport::{
    Alpn, BindError, CloseCode, ConnectError, Dial, Dialler, Endpoint, EndpointConfig, Principal,
    Resolver, Role, ServerTrust, Trust, WallClock,
};

fn agent_dial() -> Dial {
    Dial::new(Alpn::Agent, Role::Coordinator)
}

/// A resolver that answers from a script, then fails.
struct Scripted(Mutex<VecDeque<Vec<SocketAddr>>>);

impl Scripted {
    fn new(answers: impl IntoIterator<Item = Vec<SocketAddr>>) -> Arc<Self> {
        Arc::new(Self(Mutex::new(answers.into_iter().collect())))
    }
}

#[async_trait]
impl Resolver for Scripted {
    async fn resolve(&self, _target: &str) -> io::Result<Vec<SocketAddr>> {
        self.0
            .lock()
            .unwrap()
            .pop_front()
            .ok_or_else(|| io::Error::other("name server unreachable"))
    }
}

fn has_ipv6() -> bool {
    std::net::UdpSocket::bind("[::1]:0").is_ok()
}

fn reason_of(error: &ConnectError) -> &str {
    match error {
        ConnectError::Refused { reason, .. } => reason,
        other => panic!("expected a refusal with a reason, got: {other}"),
    }
}

#[tokio::test]
async fn the_exact_name_is_demanded() {
    let fleet = Fleet::new();
    let target = fleet.agent("edge-2");
    let dialler = fleet.agent("edge-1");
    let dial = Dial::new(Alpn::Data, Role::Node(node("edge-3")));
    let message = dialler
        .connect(&target.local_addresses(), &dial, patience())
        .await
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("edge-2.node.compass") && message.contains("edge-3.node.compass"),
        "{message}"
    );
}

#[tokio::test]
async fn between_agents_the_named_key_is_demanded() {
    let fleet = Fleet::new();
    let target = fleet.agent("edge-2");
    let dialler = fleet.agent("edge-1");
    let key = target.identity().unwrap().key().fingerprint();
    let dial = Dial::new(Alpn::Data, Role::Node(node("edge-2")));
    let session = dialler
        .connect(
            &target.local_addresses(),
            &dial.clone().trusting(ServerTrust::Key(key)),
            patience(),
        )
        .await
        .unwrap();
    assert_eq!(
        session.principal(),
        &Principal::Agent {
            node: node("edge-2"),
            key
        }
    );
    let wrong = dialler.identity().unwrap().key().fingerprint();
    let message = dialler
        .connect(
            &target.local_addresses(),
            &dial.trusting(ServerTrust::Key(wrong)),
            patience(),
        )
        .await
        .unwrap_err()
        .to_string();
    assert!(message.contains("shows key"), "{message}");
}

/// A site survives the coordinator's absence: named keys are trusted past every certificate's end.
#[tokio::test]
async fn expired_neighbours_still_speak() {
    let clock = WallClock::manual(1_900_000_000);
    let authority = compass_transport::CertificateAuthority::in_memory(
        Arc::clone(&clock),
        compass_transport::identity::AuthoritySettings::default(),
    );
    let agent = |name: &str| {
        Endpoint::bind(
            EndpointConfig::new(local(), &[Alpn::Data]),
            Trust::new(authority.certificate().clone(), Arc::clone(&clock)),
            Some(authority.identity(&Role::Node(node(name))).unwrap()),
        )
        .unwrap()
    };
    let (one, two) = (agent("edge-1"), agent("edge-2"));
    clock.set(1_900_000_000 + 90 * 24 * 3600);
    let key = two.identity().unwrap().key().fingerprint();
    let dial = Dial::new(Alpn::Data, Role::Node(node("edge-2"))).trusting(ServerTrust::Key(key));
    let refused = one
        .connect(&two.local_addresses(), &dial, patience())
        .await
        .unwrap_err();
    assert!(reason_of(&refused).contains("expired"), "{refused}");

    let own = one.identity().unwrap().key().fingerprint();
    two.trust().set_peers([(node("edge-1"), own)]);
    one.connect(&two.local_addresses(), &dial, patience())
        .await
        .expect("each knows the other's key");
}

/// QUIC calls a dialler connected before the server has looked at its certificate; we do not, and the reason arrives.
#[tokio::test]
async fn refused_diallers_hear_why() {
    let fleet = Fleet::new();
    let stranger = Fleet::new();
    let coordinator = fleet.coordinator();
    let addresses = coordinator.local_addresses();
    let key = coordinator.identity().unwrap().key().fingerprint();

    let foreign = stranger.agent("edge-1");
    let error = foreign
        .connect(
            &addresses,
            &agent_dial().trusting(ServerTrust::Key(key)),
            patience(),
        )
        .await
        .unwrap_err();
    assert!(
        reason_of(&error).contains("does not belong to this fleet"),
        "{error}"
    );
    assert!(error.is_lasting());

    let member = fleet.agent("edge-1");
    let nameless = agent_dial().anonymous();
    let error = member
        .connect(&addresses, &nameless, patience())
        .await
        .unwrap_err();
    assert!(reason_of(&error).contains("needs a certificate"), "{error}");

    let dial = Dial::new(Alpn::App, Role::Coordinator);
    let error = member
        .connect(&addresses, &dial, patience())
        .await
        .unwrap_err();
    assert!(
        reason_of(&error).contains("may not use compass-app/1"),
        "{error}"
    );

    let dial = Dial::new(Alpn::Data, Role::Coordinator);
    let error = member
        .connect(&addresses, &dial, patience())
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("does not serve this protocol"),
        "{error}"
    );
    assert_eq!(coordinator.accept_stats().refused, 3);

    // And a peer that is welcome is not disturbed by any of it.
    Pair::connect(member, coordinator).await;
}

#[tokio::test]
async fn apps_register_without_a_certificate_and_return_with_one() {
    let fleet = Fleet::new();
    let coordinator = fleet.coordinator();
    let app = Endpoint::bind(
        EndpointConfig::new(local(), &[]),
        Trust::none(Arc::clone(&fleet.clock)),
        None,
    )
    .unwrap();
    let dial = Dial::new(Alpn::App, Role::Coordinator).trusting(ServerTrust::AuthorityFingerprint(
        fleet.authority.fingerprint(),
    ));
    let addresses = coordinator.local_addresses();
    assert!(matches!(
        app.connect(&addresses, &dial, patience()).await,
        Err(ConnectError::NoIdentity)
    ));
    let newcomer = dial.clone().anonymous();
    let (near, accepted) = tokio::join!(
        app.connect(&addresses, &newcomer, patience()),
        coordinator.accept()
    );
    near.unwrap();
    assert_eq!(accepted.unwrap().0, Principal::AppNewcomer);

    let identity = fleet
        .authority
        .identity(&Role::App(query("plant")))
        .unwrap();
    app.set_identity(identity).unwrap();
    let (near, accepted) = tokio::join!(
        app.connect(&addresses, &dial, patience()),
        coordinator.accept()
    );
    near.unwrap();
    let (principal, session) = accepted.unwrap();
    assert!(
        matches!(&principal, Principal::App { query, .. } if query.as_str() == "plant"),
        "{principal}"
    );
    assert_eq!(session.alpn(), Alpn::App);

    // With it, and only with it, the app may speak to nodes.
    let agent = fleet.agent("edge-1");
    app.trust()
        .set_authority(fleet.authority.certificate().clone());
    let data = Dial::new(Alpn::Data, Role::Node(node("edge-1")));
    app.connect(&agent.local_addresses(), &data, patience())
        .await
        .unwrap();
    assert!(
        app.connect(&agent.local_addresses(), &data.anonymous(), patience())
            .await
            .is_err()
    );
}

#[tokio::test]
async fn versions_meet_or_both_are_named() {
    let fleet = Fleet::new();
    let with_versions = |lowest, highest| {
        let mut config = EndpointConfig::new(local(), &[Alpn::Agent]);
        config.hello = Hello {
            lowest,
            highest,
            build: format!("build {highest}"),
        };
        config
    };
    let coordinator = fleet.endpoint(&Role::Coordinator, with_versions(2, 3));
    let edge = Role::Node(node("edge-1"));
    let older = fleet.endpoint(&edge, with_versions(1, 2));
    let pair = Pair::connect(older, coordinator).await;
    assert_eq!((pair.near.version(), pair.far.version()), (2, 2));
    assert_eq!(pair.far.peer_build(), "build 2");

    let ancient = fleet.endpoint(&edge, with_versions(1, 1));
    let error = ancient
        .connect(
            &pair.coordinator.local_addresses(),
            &agent_dial(),
            patience(),
        )
        .await
        .unwrap_err();
    let ConnectError::Refused { code, reason, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(*code, CloseCode::NO_COMMON_VERSION);
    assert!(
        reason.contains("versions 2 to 3") && reason.contains("version 1 "),
        "{reason}"
    );
    assert!(error.retry_after() >= Duration::from_secs(60));
}

/// Field report 27 (a): the resolver gives IPv6 first, the server has IPv4 only.
#[tokio::test]
async fn field_027_all_addresses_of_all_families_are_tried() {
    let fleet = Fleet::new();
    let coordinator = fleet.coordinator();
    let right = coordinator.local_addresses()[0];
    let wrong: SocketAddr = format!("[::1]:{}", right.port()).parse().unwrap();
    let agent = fleet.agent("edge-1");
    agent
        .connect(&[wrong, right], &agent_dial(), patience())
        .await
        .expect("the second address works");

    let message = agent
        .connect(&[wrong], &agent_dial(), patience())
        .await
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("[::1]") && message.contains("no IPv6 socket"),
        "the mismatch is named: {message}"
    );
    let mapped: SocketAddr = format!("[::ffff:127.0.0.1]:{}", right.port())
        .parse()
        .unwrap();
    agent
        .connect(&[mapped], &agent_dial(), patience())
        .await
        .expect("an IPv4 address written as IPv6 is one");
}

/// Field report 27 (b): an address that cannot be bound costs only itself.
#[tokio::test]
async fn field_027_bind_per_family() {
    let fleet = Fleet::new();
    // An address this host does not have stands for a family it does not have.
    let missing: SocketAddr = "[2001:db8::1]:0".parse().unwrap();
    let mut config = EndpointConfig::new(missing, &[Alpn::Agent]);
    config.listen.push(local());
    let coordinator = fleet.endpoint(&Role::Coordinator, config);
    assert_eq!(coordinator.unbound().len(), 1);
    assert_eq!(coordinator.unbound()[0].0, missing);
    Pair::connect(fleet.agent("edge-1"), coordinator).await;

    let error = Endpoint::bind(
        EndpointConfig::new(missing, &[]),
        Trust::none(WallClock::system()),
        None,
    )
    .unwrap_err();
    assert!(matches!(error, BindError::NoSocket(_)));
    assert!(error.to_string().contains("2001:db8::1"), "{error}");
}

/// Field report 27 (c): IPv6 only, and both families on one endpoint.
#[tokio::test]
async fn field_027_ipv6_only() {
    if !has_ipv6() {
        // (b) covers hosts without it.
        return;
    }
    let fleet = Fleet::new();
    let loopback: SocketAddr = "[::1]:0".parse().unwrap();
    let coordinator = fleet.endpoint(
        &Role::Coordinator,
        EndpointConfig::new(loopback, &[Alpn::Agent]),
    );
    let mut both = EndpointConfig::new(local(), &[Alpn::Data]);
    both.listen.push(loopback);
    let agent = fleet.endpoint(&Role::Node(node("edge-1")), both);
    assert_eq!(agent.local_addresses().len(), 2);
    Pair::connect(agent, coordinator).await;
}

#[tokio::test]
async fn silent_addresses_are_named_and_do_not_hold_up_others() {
    let fleet = Fleet::new();
    let coordinator = fleet.coordinator();
    let right = coordinator.local_addresses()[0];
    // Bound and never answering: what a blocked port looks like.
    let hole = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let silent = hole.local_addr().unwrap();
    let mut config = EndpointConfig::new(local(), &[Alpn::Data]);
    config.settings.dial_timeout = Duration::from_millis(300);
    config.settings.dial_stagger = Duration::from_millis(20);
    let edge = Role::Node(node("edge-1"));
    let agent = fleet.endpoint(&edge, config.clone());
    let message = agent
        .connect(&[silent], &agent_dial(), patience())
        .await
        .unwrap_err()
        .to_string();
    assert!(
        message.contains(&silent.to_string()) && message.contains("UDP may be blocked"),
        "{message}"
    );
    // The silent address has all the time in the world: the other one is tried beside it.
    config.settings.dial_timeout = Duration::from_secs(3600);
    let agent = fleet.endpoint(&edge, config);
    agent
        .connect(&[silent, right], &agent_dial(), patience())
        .await
        .unwrap();
    let none = agent.connect(&[], &agent_dial(), patience()).await;
    assert!(matches!(none, Err(ConnectError::NoAddress { .. })));
}

/// Field report 28: names are resolved on every reconnect; when that fails the last good address is used.
#[tokio::test]
async fn field_028_a_coordinator_that_moves_is_found() {
    let fleet = Fleet::new();
    let first = fleet.coordinator();
    let second = fleet.coordinator();
    let (a, b) = (first.local_addresses(), second.local_addresses());
    let agent = Arc::new(fleet.agent("edge-1"));
    let mut dialler = Dialler::new(
        Arc::clone(&agent),
        Scripted::new([a.clone(), b.clone()]),
        vec!["coordinator.example:4433".to_owned()],
        agent_dial(),
    );
    let session = dialler.connect(patience()).await.unwrap();
    assert_eq!(session.remote_address(), a[0]);
    first.close(CloseCode::SHUTDOWN, "moved", patience()).await;
    drop(first);
    session.closed().await;

    // The resolver now knows the new place; the old one is not even asked.
    let session = dialler.connect(patience()).await.unwrap();
    assert_eq!(session.remote_address(), b[0]);
    assert_eq!(dialler.last_good(), Some(b[0]));

    // The resolver fails from here on; the coordinator restarts where it was.
    second
        .close(CloseCode::SHUTDOWN, "restart", patience())
        .await;
    drop(second);
    session.closed().await;
    let restarted = loop {
        // The old socket is gone once quinn's tasks have noticed.
        let config = EndpointConfig::new(b[0], &[Alpn::Agent]);
        let identity = fleet.authority.identity(&Role::Coordinator).unwrap();
        match Endpoint::bind(config, fleet.trust(), Some(identity)) {
            Ok(endpoint) => break endpoint,
            Err(_) => tokio::task::yield_now().await,
        }
    };
    let session = dialler.connect(patience()).await.unwrap();
    assert_eq!(session.remote_address(), b[0]);
    drop(restarted);
}

#[tokio::test]
async fn a_resolver_that_fails_from_the_start_is_named() {
    let fleet = Fleet::new();
    let mut dialler = Dialler::new(
        Arc::new(fleet.agent("edge-1")),
        Scripted::new([]),
        vec!["coordinator.example:4433".to_owned()],
        agent_dial(),
    );
    let message = dialler.connect(patience()).await.unwrap_err().to_string();
    assert!(
        message.contains("coordinator.example:4433") && message.contains("name server unreachable"),
        "{message}"
    );
}

#[tokio::test]
async fn a_node_that_has_not_joined_accepts_nobody_until_it_has() {
    let fleet = Fleet::new();
    let trust = Trust::none(Arc::clone(&fleet.clock));
    let config = EndpointConfig::new(local(), &[Alpn::Data]);
    let young = Endpoint::bind(config.clone(), Arc::clone(&trust), None).unwrap();
    let mut impatient = config;
    impatient.settings.dial_timeout = Duration::from_millis(300);
    let peer = fleet.endpoint(&Role::Node(node("edge-2")), impatient);
    let dial = Dial::new(Alpn::Data, Role::Node(node("edge-1")));
    let addresses = young.local_addresses();
    assert!(peer.connect(&addresses, &dial, patience()).await.is_err());
    trust.set_authority(fleet.authority.certificate().clone());
    young
        .set_identity(
            fleet
                .authority
                .identity(&Role::Node(node("edge-1")))
                .unwrap(),
        )
        .unwrap();
    fleet
        .agent("edge-3")
        .connect(&addresses, &dial, patience())
        .await
        .expect("it has joined meanwhile");
}
