//! Compass's own QUIC sessions across the relay: what it counts is what they say they sent, loss is repaired, and a NAT that
//! forgets a mapping costs no session.

#![expect(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::net::SocketAddr;
use std::sync::Arc;

use compass_shared::ids::NodeId;
use compass_testbed::relay::config::node_address;
use compass_testbed::relay::counters::Count;
use compass_testbed::relay::topology::LinkSpec;
use compass_testbed::relay::{PathShape, Relay, RelayControl, RelayHandle, Topology};
use compass_transport::identity::AuthoritySettings;
use compass_transport::{
    Alpn, CertificateAuthority, Deadline, Dial, Endpoint, EndpointConfig, Role, Session, Trust,
    WallClock,
};

/// Only met when something is broken.
fn patience() -> Deadline {
    Deadline::after_s(60)
}

struct Fleet {
    relay: RelayHandle,
    edge: Endpoint,
    _cloud: Endpoint,
    /// The edge's side of the session, which it opened.
    near: Arc<dyn Session>,
    /// The cloud's side.
    far: Arc<dyn Session>,
}

/// Two agents, an edge behind an uplink of 20 Mbit/s and a cloud, with a session between them.
async fn fleet(loss: f64) -> Fleet {
    let uplink = LinkSpec {
        shape: PathShape {
            loss,
            ..PathShape::delay(5.0)
        },
        ..LinkSpec::mbit_s(20.0, 20.0, 0.0)
    };
    let topology = Topology::new().site("plant", uplink);
    let topology =
        topology
            .node("edge", "plant", LinkSpec::ideal())
            .node("cloud", "cloud", LinkSpec::ideal());
    let relay = Relay::start(topology.relay_config(7).unwrap()).unwrap();

    let clock = WallClock::system();
    let authority =
        CertificateAuthority::in_memory(Arc::clone(&clock), AuthoritySettings::default());
    let trust = Trust::new(authority.certificate().clone(), clock);
    let endpoint = |name: &str, n: u8| {
        let role = Role::Node(NodeId::new(name).unwrap());
        let listen = SocketAddr::from((node_address(n), 0));
        let config = EndpointConfig::new(listen, &[Alpn::Data]);
        let identity = authority.identity(&role).unwrap();
        (
            Endpoint::bind(config, Arc::clone(&trust), Some(identity)).unwrap(),
            role,
        )
    };
    let ((edge, _), (cloud, cloud_role)) = (endpoint("edge", 1), endpoint("cloud", 2));
    relay
        .set_target("cloud", cloud.local_addresses()[0])
        .unwrap();
    let advertised = [relay.advertised("cloud").unwrap()];
    let dial = Dial::new(Alpn::Data, cloud_role);
    let (near, far) = tokio::join!(edge.connect(&advertised, &dial, patience()), cloud.accept());
    let (near, (_, far)) = (near.unwrap(), far.unwrap());
    Fleet {
        relay,
        edge,
        _cloud: cloud,
        near,
        far,
    }
}

async fn send_and_compare(from: &Arc<dyn Session>, to: &Arc<dyn Session>, bytes: usize) {
    let data: Vec<u8> = (0..bytes).map(|index| (index % 251) as u8).collect();
    let mut stream = from.open_uni(patience()).await.unwrap();
    let sending = async {
        stream
            .write_bytes(data.clone().into(), patience())
            .await
            .unwrap();
        stream.deliver(patience()).await.unwrap();
    };
    let receiving = async {
        let mut stream = to.accept_uni(patience()).await.unwrap();
        stream.read_to_end(bytes, patience()).await.unwrap()
    };
    let ((), received) = tokio::join!(sending, receiving);
    assert!(received == data, "what arrives is what was sent");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_relay_counts_what_the_sessions_say_they_sent() {
    let fleet = fleet(0.02).await;
    send_and_compare(&fleet.near, &fleet.far, 400_000).await;
    send_and_compare(&fleet.far, &fleet.near, 100_000).await;
    let counters = fleet.relay.counters().unwrap();
    for (from, to, session) in [
        ("edge", "cloud", &fleet.near),
        ("cloud", "edge", &fleet.far),
    ] {
        let link = counters.link(from, to).unwrap();
        let said = session.stats().udp_sent_bytes as f64;
        let counted = link.offered.bytes as f64;
        assert!(
            (counted / said - 1.0).abs() < 0.05,
            "{from}: {said} bytes said, {counted} counted"
        );
        assert!(
            link.dropped_total() != Count::default(),
            "two percent of hundreds of packets: {link:?}"
        );
    }
    assert!(fleet.near.stats().lost_packets > 0);
    assert_eq!(counters.own_faults(), 0, "{counters:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn field_019_a_session_survives_a_nat_that_forgets_its_mapping() {
    let fleet = fleet(0.0).await;
    send_and_compare(&fleet.near, &fleet.far, 10_000).await;
    let before = fleet.far.remote_address();
    fleet.relay.forget_flows(Some("edge")).unwrap();
    // Whoever is behind the NAT speaks first; then the other side knows the new way back.
    send_and_compare(&fleet.near, &fleet.far, 10_000).await;
    send_and_compare(&fleet.far, &fleet.near, 10_000).await;
    assert_ne!(fleet.far.remote_address(), before);
    assert_eq!(fleet.relay.counters().unwrap().flows_forgotten, 1);
    assert!(fleet.near.closed_reason().is_none() && fleet.far.closed_reason().is_none());
    drop(fleet.edge);
}
