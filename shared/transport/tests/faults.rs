//! What the network and bad peers do: broken offload, peers that never read, half-open floods, damaged first frames.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use common::relay::Relay;
use common::{Fleet, Pair, local, node, patience};
use compass_transport::{
    Alpn, Deadline, Dial, Endpoint, EndpointConfig, Role, SendStream, Session, TransportError,
};
use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, UdpPoller};

/// Claims segmentation offload and fails it with EIO after a number of packets: once, or for ever.
#[derive(Debug)]
struct BrokenOffload {
    inner: Arc<dyn AsyncUdpSocket>,
    good_packets: usize,
    failures_max: usize,
    packets: AtomicUsize,
    failures: Arc<AtomicUsize>,
}

impl AsyncUdpSocket for BrokenOffload {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.inner).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        /// Linux's EIO.
        const EIO: i32 = 5;
        let segments = transmit
            .segment_size
            .map_or(1, |size| transmit.contents.len().div_ceil(size));
        let before = self.packets.fetch_add(segments, Ordering::Relaxed);
        if segments > 1
            && before >= self.good_packets
            && self.failures.load(Ordering::Relaxed) < self.failures_max
        {
            self.failures.fetch_add(1, Ordering::Relaxed);
            return Err(io::Error::from_raw_os_error(EIO));
        }
        // The real socket may lack offload: send one by one, as the failing host would have liked to.
        let Some(size) = transmit.segment_size else {
            return self.inner.try_send(transmit);
        };
        for contents in transmit.contents.chunks(size) {
            let single = Transmit {
                destination: transmit.destination,
                ecn: transmit.ecn,
                contents,
                segment_size: None,
                src_ip: transmit.src_ip,
            };
            // A full socket loses packets here; QUIC repeats them.
            let _ = self.inner.try_send(&single);
        }
        Ok(())
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.inner.poll_recv(cx, bufs, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        10
    }

    fn max_receive_segments(&self) -> usize {
        self.inner.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.inner.may_fragment()
    }
}

async fn send_through_broken_offload(failures_max: usize) {
    let fleet = Fleet::new();
    let failures = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&failures);
    let agent = Endpoint::bind_wrapped(
        EndpointConfig::new(local(), &[Alpn::Data]),
        fleet.trust(),
        Some(
            fleet
                .authority
                .identity(&Role::Node(node("edge-1")))
                .unwrap(),
        ),
        &|inner| {
            Arc::new(BrokenOffload {
                inner,
                good_packets: 1_000,
                failures_max,
                packets: AtomicUsize::new(0),
                failures: Arc::clone(&counted),
            })
        },
    )
    .unwrap();
    let pair = Pair::connect(agent, fleet.coordinator()).await;
    // Reports of 20 kB: 2 000 packets and more, in bursts that offload would carry.
    let near = Arc::clone(&pair.near);
    let reporting = tokio::spawn(async move {
        for number in 0..200_u64 {
            let mut stream = near.open_uni(patience()).await.unwrap();
            stream.write_frame(&number, patience()).await.unwrap();
            stream
                .write_bytes(Bytes::from(vec![0; 20_000]), patience())
                .await
                .unwrap();
            stream.deliver(patience()).await.unwrap();
        }
    });
    let mut received = 0;
    while received < 200 {
        let mut stream = pair.far.accept_uni(patience()).await.unwrap();
        let _: u64 = stream.read_frame(100, patience()).await.unwrap();
        let payload = stream.read_to_end(20_000, patience()).await.unwrap();
        assert_eq!(payload.len(), 20_000);
        received += 1;
    }
    reporting.await.unwrap();
    assert!(
        failures.load(Ordering::Relaxed) > 0,
        "the fault was exercised"
    );
    let stats = pair.agent.socket_stats();
    assert!(stats.offload_failures > 0);
    assert_eq!(pair.near.closed_reason(), None, "the session lives on");
}

/// Field report 18: a multi-segment send fails once with EIO; the session goes on without offload.
#[tokio::test]
async fn field_018_offload_fails_once() {
    send_through_broken_offload(1).await;
}

/// Field report 18: every multi-segment send fails; the session goes on without offload.
#[tokio::test]
async fn field_018_offload_fails_always() {
    send_through_broken_offload(usize::MAX).await;
}

/// Field report 18: offload can be switched off by a setting.
#[tokio::test]
async fn field_018_offload_can_be_switched_off() {
    let fleet = Fleet::new();
    let failures = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&failures);
    let mut config = EndpointConfig::new(local(), &[Alpn::Data]);
    config.settings.segmentation_offload = false;
    let identity = fleet
        .authority
        .identity(&Role::Node(node("edge-1")))
        .unwrap();
    let agent = Endpoint::bind_wrapped(config, fleet.trust(), Some(identity), &|inner| {
        Arc::new(BrokenOffload {
            inner,
            good_packets: 0,
            failures_max: usize::MAX,
            packets: AtomicUsize::new(0),
            failures: Arc::clone(&counted),
        })
    })
    .unwrap();
    let pair = Pair::connect(agent, fleet.coordinator()).await;
    let near = Arc::clone(&pair.near);
    let sending = tokio::spawn(async move {
        let mut stream = near.open_uni(patience()).await.unwrap();
        stream
            .write_bytes(Bytes::from(vec![0; 300_000]), patience())
            .await
            .unwrap();
        stream.deliver(patience()).await.unwrap();
    });
    let mut stream = pair.far.accept_uni(patience()).await.unwrap();
    stream.read_to_end(300_000, patience()).await.unwrap();
    sending.await.unwrap();
    assert_eq!(failures.load(Ordering::Relaxed), 0, "never tried");
}

/// Field report 25: a peer that never reads blocks nobody beyond a deadline, and hears the newest report first when it
/// reads again.
#[tokio::test]
async fn field_025_a_peer_that_never_reads() {
    let fleet = Fleet::new();
    let mut config = EndpointConfig::new(local(), &[Alpn::Agent]);
    config.settings.uni_streams_max = 8;
    config.settings.stream_receive_window = 2_000;
    config.settings.receive_window = 8_000;
    let coordinator = fleet.endpoint(&Role::Coordinator, config);
    let pair = Pair::connect(fleet.agent("edge-1"), coordinator).await;
    let newest: Arc<tokio::sync::watch::Sender<u64>> = Arc::new(tokio::sync::watch::Sender::new(0));
    let stuck = Duration::from_millis(20);
    let report = async |number: u64| -> Result<SendStream, TransportError> {
        let mut stream = pair.near.open_uni(Deadline::after(stuck)).await?;
        stream.write_frame(&number, Deadline::after(stuck)).await?;
        stream
            .write_bytes(Bytes::from(vec![0; 1_500]), Deadline::after(stuck))
            .await?;
        stream.finish()?;
        Ok(stream)
    };
    let mut sent = Vec::new();
    let mut held_back = 0;
    for number in 1..=500_u64 {
        // Newest report replaces the queued one: only the number is kept while the peer does not read.
        newest.send_replace(number);
        if number > 20 {
            // Nobody reads: each further report would only cost its deadline.
            held_back += 1;
            continue;
        }
        match report(number).await {
            Ok(stream) => sent.push(stream),
            Err(TransportError::Deadline { after, .. }) => {
                assert_eq!(after, stuck);
                held_back += 1;
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert!(sent.len() <= 8 && held_back >= 492, "{} sent", sent.len());
    // The stale ones are given up, so that the newest comes first when reading resumes.
    for stream in &mut sent {
        stream.reset(compass_transport::ResetCode::STALE);
    }
    drop(sent);
    let far = Arc::clone(&pair.far);
    let first = tokio::spawn(async move {
        loop {
            let mut stream = far.accept_uni(patience()).await.unwrap();
            match stream.read_frame::<u64>(100, patience()).await {
                Ok(number) if number > 20 => {
                    stream.read_to_end(2_000, patience()).await.unwrap();
                    return number;
                }
                // Bytes of the first eight may have arrived before they were given up.
                Ok(_) | Err(TransportError::Reset(_)) => {}
                Err(other) => panic!("{other}"),
            }
        }
    });
    let mut stream = pair.near.open_uni(patience()).await.unwrap();
    let number = *newest.borrow();
    stream.write_frame(&number, patience()).await.unwrap();
    stream
        .write_bytes(Bytes::from(vec![0; 1_500]), patience())
        .await
        .unwrap();
    stream.finish().unwrap();
    assert_eq!(first.await.unwrap(), 500);
}

/// Field report 25: a write to a stream that nobody reads ends at its deadline and resets the stream.
#[tokio::test]
async fn field_025_a_write_ends_at_its_deadline() {
    let pair = Fleet::new().pair().await;
    let mut stream = pair.near.open_uni(patience()).await.unwrap();
    let error = stream
        .write_bytes(Bytes::from(vec![0; 50_000_000]), Deadline::after_ms(50))
        .await
        .unwrap_err();
    assert!(matches!(error, TransportError::Deadline { .. }), "{error}");
    assert_eq!(
        stream.finish().unwrap_err(),
        TransportError::AlreadyFinished
    );
    let mut recv = pair.far.accept_uni(patience()).await.unwrap();
    let error = recv.read_to_end(50_000_000, patience()).await.unwrap_err();
    assert_eq!(
        error,
        TransportError::Reset(compass_transport::ResetCode::DEADLINE)
    );
    pair.near.ping(patience()).await.expect("the session lives");
}

/// Field report 19: a middle box forgets mappings after some silence; a session on which nobody speaks lives on, and a
/// push to the quiet side arrives. Times are a tenth of the report's.
#[tokio::test]
async fn field_019_a_quiet_session_outlives_forgetful_routers() {
    let fleet = Fleet::new();
    let quick = |mut config: EndpointConfig| {
        config.settings.idle_timeout = Duration::from_secs(3);
        config
    };
    let coordinator = fleet.endpoint(
        &Role::Coordinator,
        quick(EndpointConfig::new(local(), &[Alpn::Agent])),
    );
    let agent = fleet.endpoint(
        &Role::Node(node("edge-1")),
        quick(EndpointConfig::new(local(), &[Alpn::Data])),
    );
    let relay = Relay::start(coordinator.local_addresses()[0], Duration::from_secs(2)).await;
    let pair = Pair::connect_via(&[relay.address], agent, coordinator).await;
    let before = pair.far.remote_address();
    let quiet = tokio::time::timeout(Duration::from_secs(5), pair.near.closed()).await;
    assert!(quiet.is_err(), "closed after silence: {quiet:?}");
    assert_eq!(pair.far.remote_address(), before, "the mapping was kept");
    let mut push = pair.far.open_uni(patience()).await.unwrap();
    push.write_frame("plan", patience()).await.unwrap();
    push.finish().unwrap();
    let mut stream = pair.near.accept_uni(patience()).await.unwrap();
    let plan: String = stream.read_frame(100, patience()).await.unwrap();
    assert_eq!(plan, "plan");
}

/// A router that forgot the mapping gives the next packet another port: the session goes on.
#[tokio::test]
async fn a_session_survives_a_changed_port() {
    let fleet = Fleet::new();
    let coordinator = fleet.coordinator();
    let relay = Relay::start(coordinator.local_addresses()[0], Duration::MAX).await;
    let pair = Pair::connect_via(&[relay.address], fleet.agent("edge-1"), coordinator).await;
    let before = pair.far.remote_address();
    relay.forget();
    pair.near.ping(patience()).await.unwrap();
    pair.far.ping(patience()).await.unwrap();
    assert_ne!(pair.far.remote_address(), before);
}

/// Field report 22: the path begins to drop large packets without a word; a large message still arrives.
#[tokio::test]
async fn field_022_large_packets_vanish() {
    let fleet = Fleet::new();
    let coordinator = fleet.coordinator();
    let relay = Relay::start(coordinator.local_addresses()[0], Duration::MAX).await;
    let pair = Pair::connect_via(&[relay.address], fleet.agent("edge-1"), coordinator).await;
    while pair.far.stats().mtu_bytes <= 1_252 {
        // Larger packets are found by probing beside other traffic.
        pair.far.ping(patience()).await.unwrap();
    }
    relay.drop_payloads_above(1_252);
    let far = Arc::clone(&pair.far);
    let pushing = tokio::spawn(async move {
        let mut stream = far.open_uni(patience()).await.unwrap();
        stream
            .write_bytes(Bytes::from(vec![7; 300_000]), patience())
            .await
            .unwrap();
        stream.deliver(patience()).await.unwrap();
    });
    let mut stream = pair.near.accept_uni(patience()).await.unwrap();
    let plan = stream.read_to_end(300_000, patience()).await.unwrap();
    assert_eq!(plan.len(), 300_000);
    pushing.await.unwrap();
    assert!(pair.far.stats().mtu_bytes <= 1_252);
}

/// A dialler made of bare quinn, to say what no honest peer says.
async fn bare_dialler(fleet: &Fleet, to: SocketAddr) -> (quinn::Endpoint, quinn::Connection) {
    #[derive(Debug)]
    struct Anyone;
    use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
    use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
    impl ServerCertVerifier for Anyone {
        fn verify_server_cert(
            &self,
            _: &CertificateDer<'_>,
            _: &[CertificateDer<'_>],
            _: &ServerName<'_>,
            _: &[u8],
            _: UnixTime,
        ) -> Result<ServerCertVerified, rustls::Error> {
            Ok(ServerCertVerified::assertion())
        }
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &rustls::DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            Ok(HandshakeSignatureValid::assertion())
        }
        fn verify_tls13_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &rustls::DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            Ok(HandshakeSignatureValid::assertion())
        }
        fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
            vec![rustls::SignatureScheme::ECDSA_NISTP256_SHA256]
        }
    }
    let identity = fleet
        .authority
        .identity(&Role::Node(node("edge-9")))
        .unwrap();
    let pem = identity.key().to_pem();
    let key = <PrivateKeyDer<'static> as rustls_pki_types::pem::PemObject>::from_pem_slice(
        pem.as_bytes(),
    )
    .unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut crypto = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anyone))
        .with_client_auth_cert(vec![identity.certificate().clone()], key)
        .unwrap();
    crypto.alpn_protocols = vec![b"compass/1".to_vec()];
    let crypto = quinn::crypto::rustls::QuicClientConfig::try_from(crypto).unwrap();
    let endpoint = quinn::Endpoint::client(local()).unwrap();
    let connection = endpoint
        .connect_with(
            quinn::ClientConfig::new(Arc::new(crypto)),
            to,
            "coordinator.compass",
        )
        .unwrap()
        .await
        .unwrap();
    (endpoint, connection)
}

async fn reason_for(fleet: &Fleet, to: SocketAddr, first: &[u8]) -> String {
    let (_endpoint, connection) = bare_dialler(fleet, to).await;
    let (mut send, _recv) = connection.open_bi().await.unwrap();
    send.write_all(first).await.unwrap();
    let _ = send.finish();
    match connection.closed().await {
        quinn::ConnectionError::ApplicationClosed(close) => {
            String::from_utf8(close.reason.to_vec()).unwrap()
        }
        other => panic!("expected a reason, got {other}"),
    }
}

#[tokio::test]
async fn damaged_first_frames_are_told_so_and_disturb_nobody() {
    let fleet = Fleet::new();
    let pair = fleet.pair().await;
    let to = pair.coordinator.local_addresses()[0];
    let cases: [(&[u8], &str); 6] = [
        (b"CM", "2 of 9 bytes"),
        (b"GET / HTTP/1.1\r\n\r\n", "not a Compass hello"),
        (&[0xff; 4_000], "not a Compass hello"),
        (b"CMPS\x00\x01\x00\x01\xffoversized", "the limit is 120"),
        (b"CMPS\x00\x07\x00\x09\x03new", "no common protocol version"),
        (b"CMPS\x00\x02\x00\x01\x00", "impossible version range"),
    ];
    for (first, expected) in cases {
        let reason = reason_for(&fleet, to, first).await;
        assert!(reason.contains(expected), "{reason}");
    }
    assert_eq!(pair.coordinator.accept_stats().failed, 6);
    pair.near
        .ping(patience())
        .await
        .expect("the session beside them is undisturbed");
    assert_eq!(pair.far.closed_reason(), None);
}

#[tokio::test]
async fn silent_peers_are_bounded_and_let_others_through() {
    let fleet = Fleet::new();
    let mut config = EndpointConfig::new(local(), &[Alpn::Agent]);
    config.settings.half_open_unvalidated_max = 2;
    config.settings.half_open_max = 4;
    config.settings.handshake_timeout = Duration::from_secs(120);
    let coordinator = fleet.endpoint(&Role::Coordinator, config);
    let to = coordinator.local_addresses()[0];
    // Two that shake hands and then say nothing.
    let mut silent = vec![
        bare_dialler(&fleet, to).await,
        bare_dialler(&fleet, to).await,
    ];
    assert_eq!(coordinator.accept_stats().validated, 0);
    // Above the first bound newcomers prove their address, and get in.
    let pair = Pair::connect(fleet.agent("edge-1"), coordinator).await;
    assert_eq!(pair.coordinator.accept_stats().validated, 1);
    assert_eq!(pair.coordinator.accept_stats().accepted, 1);
    // Above the second they are refused at once, and told so.
    silent.push(bare_dialler(&fleet, to).await);
    silent.push(bare_dialler(&fleet, to).await);
    let late = fleet.agent("edge-2");
    let dial = Dial::new(Alpn::Agent, Role::Coordinator);
    let message = late
        .connect(&[to], &dial, patience())
        .await
        .unwrap_err()
        .to_string();
    assert!(message.contains("busy"), "{message}");
    assert!(pair.coordinator.accept_stats().overloaded >= 1);
    // Once they are gone there is room again.
    for (endpoint, connection) in &silent {
        connection.close(0_u32.into(), b"");
        endpoint.wait_idle().await;
    }
    loop {
        // The places become free when the coordinator has noticed.
        if late.connect(&[to], &dial, patience()).await.is_ok() {
            break;
        }
    }
}

#[tokio::test]
async fn a_silent_peer_is_given_up() {
    let fleet = Fleet::new();
    let mut config = EndpointConfig::new(local(), &[Alpn::Agent]);
    config.settings.handshake_timeout = Duration::from_secs(2);
    let coordinator = fleet.endpoint(&Role::Coordinator, config);
    let (_endpoint, connection) = bare_dialler(&fleet, coordinator.local_addresses()[0]).await;
    match connection.closed().await {
        quinn::ConnectionError::ApplicationClosed(close) => {
            let reason = String::from_utf8_lossy(&close.reason).into_owned();
            assert!(reason.contains("no hello"), "{reason}");
        }
        other => panic!("{other}"),
    }
}

/// The counters that tell a capacity from a lower bound.
#[tokio::test]
async fn a_full_path_is_told_from_an_idle_sender() {
    let pair = Fleet::new().pair().await;
    let idle = pair.near.stats();
    for _ in 0..5 {
        pair.near.ping(patience()).await.unwrap();
    }
    let after_pings = pair.near.stats();
    assert!(after_pings.delivered_bytes > idle.delivered_bytes);
    assert!(
        !after_pings.is_network_limited_since(&idle),
        "{after_pings:?}"
    );
    let near = Arc::clone(&pair.near);
    let sending = tokio::spawn(async move {
        let mut stream = near.open_uni(patience()).await.unwrap();
        stream
            .write_bytes(Bytes::from(vec![0; 8_000_000]), patience())
            .await
            .unwrap();
        stream.deliver(patience()).await.unwrap();
    });
    let mut stream = pair.far.accept_uni(patience()).await.unwrap();
    stream.read_to_end(8_000_000, patience()).await.unwrap();
    sending.await.unwrap();
    let busy = pair.near.stats();
    assert!(busy.delivered_bytes - after_pings.delivered_bytes >= 8_000_000);
    assert!(
        busy.delivered_network_limited_bytes > after_pings.delivered_network_limited_bytes,
        "{busy:?}"
    );
}

/// Sessions are used through the trait alone.
#[tokio::test]
async fn the_session_trait_is_object_safe() {
    let pair = Fleet::new().pair().await;
    let sessions: Vec<Arc<dyn Session>> = vec![Arc::clone(&pair.near), Arc::clone(&pair.far)];
    for session in &sessions {
        session.ping(patience()).await.unwrap();
    }
}
