use compass_shared::model::telemetry::NodeTelemetry;
use compass_transport::identity::AuthoritySettings;
use compass_transport::{CertificateAuthority, EndpointConfig, Trust, WallClock};

use super::*;

/// Only ever reached on failure.
const FAILS_AFTER: Duration = Duration::from_secs(30);

/// A session of node `edge-1` with a coordinator that so far reads nothing: both sides, and what keeps them.
async fn pair() -> (Arc<dyn Session>, Arc<dyn Session>, [Endpoint; 2]) {
    let clock = WallClock::system();
    let authority =
        CertificateAuthority::in_memory(Arc::clone(&clock), AuthoritySettings::default());
    let bind = |role: Role, accept: &[Alpn]| {
        let trust = Trust::new(authority.certificate().clone(), Arc::clone(&clock));
        let config = EndpointConfig::new("127.0.0.1:0".parse().unwrap(), accept);
        Endpoint::bind(config, trust, Some(authority.identity(&role).unwrap())).unwrap()
    };
    let coordinator = bind(Role::Coordinator, &[Alpn::Agent]);
    let agent = bind(Role::Node(NodeId::new("edge-1").unwrap()), &[]);
    let dial = Dial::new(Alpn::Agent, Role::Coordinator);
    let addresses = coordinator.local_addresses();
    let (near, far) = tokio::join!(
        agent.connect(&addresses, &dial, Deadline::after(FAILS_AFTER)),
        coordinator.accept()
    );
    (near.unwrap(), far.unwrap().1, [agent, coordinator])
}

fn report(sequence: u64) -> AgentReport {
    AgentReport {
        sequence,
        telemetry: NodeTelemetry::default(),
        links: vec![],
        instances: vec![],
        content: vec![],
        applied: None,
        sent_bytes: 0,
        received_bytes: 0,
    }
}

/// Reads the first report that was not taken back.
async fn read(session: &dyn Session) -> AgentReport {
    loop {
        let deadline = Deadline::after(FAILS_AFTER);
        let mut stream = session.accept_uni(deadline).await.unwrap();
        if let Ok(report) = stream.read_frame(1 << 20, deadline).await {
            return report;
        }
    }
}

/// Field report 25: a coordinator that never reads blocks nobody, and gets the newest report first when it reads again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn field_025_unread_reports_give_way_to_newer_ones() {
    let (near, far, _endpoints) = pair().await;
    for sequence in 1..=100 {
        let unread = send_report(&*near, &report(sequence), Duration::from_millis(20)).await;
        assert!(
            matches!(unread, Err(TransportError::Deadline { .. })),
            "{unread:?}"
        );
    }
    // The last report was taken back, but word of it may still be under way; a ping goes behind it.
    near.ping(Deadline::after(FAILS_AFTER)).await.unwrap();
    let newest = report(101);
    let (sent, seen) = tokio::join!(send_report(&*near, &newest, FAILS_AFTER), read(&*far));
    assert_eq!(seen.sequence, 101);
    assert_eq!(sent, Ok(()));
    let next = report(102);
    let (sent, seen) = tokio::join!(send_report(&*near, &next, FAILS_AFTER), read(&*far));
    assert_eq!((sent, seen.sequence), (Ok(()), 102));
}
