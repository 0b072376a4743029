//! Sessions over real QUIC on the loopback interface: streams, frames, deadlines, datagrams, ends.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::time::Duration;

use bytes::Bytes;
use common::{Fleet, local, node, patience};
use compass_transport::{
    Alpn, CloseCode, Closed, Deadline, Dial, Endpoint, EndpointConfig, Principal, Priority,
    ResetCode, Role, TransportError,
};
use serde::{Deserialize, Serialize};

const LIMIT: usize = 1 << 20;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Message {
    Hello(String),
    Number(u64),
}

#[tokio::test]
async fn control_stream_carries_frames_both_ways() {
    let pair = Fleet::new().pair().await;
    assert!(matches!(&pair.principal, Principal::Agent { node, .. } if node.as_str() == "edge-1"));
    assert_eq!(pair.near.principal(), &Principal::Coordinator);
    assert_eq!(pair.near.version(), 1);
    assert!(pair.far.peer_build().starts_with("compass "));

    let (mut near_send, mut near_recv) = pair.near.take_control().unwrap();
    let (mut far_send, mut far_recv) = pair.far.take_control().unwrap();
    assert!(pair.near.take_control().is_none(), "only once");
    near_send.set_priority(Priority::Control);
    near_send
        .write_frame(&Message::Hello("hi".to_owned()), patience())
        .await
        .unwrap();
    let message: Message = far_recv.read_frame(LIMIT, patience()).await.unwrap();
    assert_eq!(message, Message::Hello("hi".to_owned()));
    far_send
        .write_frame(&Message::Number(7), patience())
        .await
        .unwrap();
    assert_eq!(
        near_recv
            .next_frame::<Message>(LIMIT, patience())
            .await
            .unwrap(),
        Some(Message::Number(7))
    );
    far_send.finish().unwrap();
    assert_eq!(
        near_recv
            .next_frame::<Message>(LIMIT, patience())
            .await
            .unwrap(),
        None
    );
    assert_eq!(
        near_recv
            .read_frame::<Message>(LIMIT, patience())
            .await
            .unwrap_err(),
        TransportError::EndOfStream
    );
}

#[tokio::test]
async fn a_frame_is_followed_by_raw_payload() {
    let pair = Fleet::new().pair().await;
    let payload = Bytes::from(vec![7_u8; 300_000]);
    let sent = payload.clone();
    let near = pair.near.clone();
    let sending = tokio::spawn(async move {
        let mut stream = near.open_uni(patience()).await.unwrap();
        let header = Message::Number(sent.len() as u64);
        stream
            .write_frame_and_bytes(&header, sent, patience())
            .await
            .unwrap();
        stream.deliver(patience()).await.unwrap();
    });
    let mut stream = pair.far.accept_uni(patience()).await.unwrap();
    let Message::Number(count) = stream.read_frame(LIMIT, patience()).await.unwrap() else {
        panic!("a number was sent");
    };
    let received = stream
        .read_bytes(usize::try_from(count).unwrap(), patience())
        .await
        .unwrap();
    assert_eq!(received, payload);
    assert_eq!(stream.read_some(10, patience()).await.unwrap(), None);
    sending.await.unwrap();
    let stats = pair.near.stats();
    assert!(stats.udp_sent_bytes > 300_000 && stats.delivered_bytes > 300_000);
    assert!(stats.rtt > Duration::ZERO && stats.congestion_window_bytes > 0);
    assert!(pair.agent.socket_stats().sent_bytes >= stats.udp_sent_bytes);
}

#[tokio::test]
async fn a_read_given_up_loses_nothing() {
    let pair = Fleet::new().pair().await;
    let (mut send, _recv) = pair.near.take_control().unwrap();
    let (_far_send, mut far_recv) = pair.far.take_control().unwrap();
    let frame = compass_shared::codec::encode_frame(1, &Message::Number(1_000_000)).unwrap();
    send.write_bytes(Bytes::copy_from_slice(&frame[..9]), patience())
        .await
        .unwrap();
    let error = far_recv
        .next_frame::<Message>(LIMIT, Deadline::after_ms(50))
        .await
        .unwrap_err();
    assert!(
        matches!(error, TransportError::Deadline { .. }),
        "{error:?}"
    );
    send.write_bytes(Bytes::copy_from_slice(&frame[9..]), patience())
        .await
        .unwrap();
    assert_eq!(
        far_recv
            .read_frame::<Message>(LIMIT, patience())
            .await
            .unwrap(),
        Message::Number(1_000_000)
    );
}

#[tokio::test]
async fn a_dropped_stream_is_reset_not_finished() {
    let pair = Fleet::new().pair().await;
    let mut send = pair.near.open_uni(patience()).await.unwrap();
    send.write_bytes(Bytes::from_static(b"half"), patience())
        .await
        .unwrap();
    let mut recv = pair.far.accept_uni(patience()).await.unwrap();
    assert_eq!(recv.read_bytes(4, patience()).await.unwrap(), &b"half"[..]);
    drop(send);
    assert_eq!(
        recv.read_to_end(LIMIT, patience()).await.unwrap_err(),
        TransportError::Reset(ResetCode::ABANDONED)
    );
}

#[tokio::test]
async fn a_reader_can_refuse_the_rest() {
    let pair = Fleet::new().pair().await;
    let mut send = pair.near.open_uni(patience()).await.unwrap();
    send.write_bytes(Bytes::from_static(b"unwanted"), patience())
        .await
        .unwrap();
    let mut recv = pair.far.accept_uni(patience()).await.unwrap();
    recv.stop(ResetCode::STALE);
    assert_eq!(
        send.stopped().await,
        TransportError::Stopped(ResetCode::STALE)
    );
}

#[tokio::test]
async fn damaged_frames_are_errors_on_their_stream_only() {
    let pair = Fleet::new().pair().await;
    let good = compass_shared::codec::encode_frame(1, &Message::Number(5)).unwrap();
    let mut wrong_version = good.clone();
    wrong_version[6] = 9;
    let mut oversized = good.clone();
    oversized[0] = 0xff;
    let cases: [(&str, Vec<u8>); 4] = [
        ("truncated", good[..good.len() - 1].to_vec()),
        ("schema version 9", wrong_version),
        ("exceeds the limit", oversized),
        ("codec", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
    ];
    for (name, bytes) in cases {
        let mut send = pair.near.open_uni(patience()).await.unwrap();
        send.write_bytes(Bytes::from(bytes), patience())
            .await
            .unwrap();
        send.finish().unwrap();
        let mut recv = pair.far.accept_uni(patience()).await.unwrap();
        let error = recv
            .next_frame::<Message>(LIMIT, patience())
            .await
            .unwrap_err();
        assert!(!error.is_closed(), "{name}: {error}");
        match name {
            "truncated" => assert!(matches!(error, TransportError::Truncated { .. }), "{error}"),
            _ => assert!(
                error.to_string().contains(name) || error.to_string().contains("limit"),
                "{name}: {error}"
            ),
        }
    }
    // The session itself is undisturbed.
    let mut send = pair.near.open_uni(patience()).await.unwrap();
    send.write_frame(&Message::Number(6), patience())
        .await
        .unwrap();
    send.finish().unwrap();
    let mut recv = pair.far.accept_uni(patience()).await.unwrap();
    assert_eq!(
        recv.read_frame::<Message>(LIMIT, patience()).await.unwrap(),
        Message::Number(6)
    );
}

#[tokio::test]
async fn read_to_end_has_a_limit() {
    let pair = Fleet::new().pair().await;
    for (bytes, limit, fits) in [(10, 10, true), (11, 10, false)] {
        let mut send = pair.near.open_uni(patience()).await.unwrap();
        send.write_bytes(Bytes::from(vec![1; bytes]), patience())
            .await
            .unwrap();
        send.finish().unwrap();
        let mut recv = pair.far.accept_uni(patience()).await.unwrap();
        let result = recv.read_to_end(limit, patience()).await;
        assert_eq!(result.is_ok(), fits, "{result:?}");
    }
}

#[tokio::test]
async fn datagrams_and_pings_do_not_mix() {
    let pair = Fleet::new().pair().await;
    let there_and_back = pair.near.ping(patience()).await.unwrap();
    assert!(there_and_back > Duration::ZERO);
    pair.near.send_datagram(b"probe").unwrap();
    assert_eq!(
        pair.far.read_datagram(patience()).await.unwrap(),
        &b"probe"[..]
    );
    let most = pair.near.datagram_bytes_max().unwrap();
    assert!(pair.near.send_datagram(&vec![0; most]).is_ok());
    assert!(matches!(
        pair.near.send_datagram(&vec![0; most + 1]).unwrap_err(),
        TransportError::Datagram { .. }
    ));
}

#[tokio::test]
async fn a_ping_to_a_peer_that_is_gone_fails() {
    let pair = Fleet::new().pair().await;
    pair.far.close(CloseCode::SHUTDOWN, "going away");
    let error = loop {
        // The close may still be under way when the first ping leaves.
        if let Err(error) = pair.near.ping(patience()).await {
            break error;
        }
    };
    let expected = Closed::ByPeer {
        code: CloseCode::SHUTDOWN,
        reason: "going away".to_owned(),
    };
    assert_eq!(error, TransportError::Closed(expected.clone()));
    assert_eq!(pair.near.closed().await, expected);
    assert_eq!(pair.near.closed_reason(), Some(expected));
    assert_eq!(pair.far.closed().await, Closed::ByUs);
    assert!(
        pair.near
            .open_uni(patience())
            .await
            .unwrap_err()
            .is_closed()
    );
}

#[tokio::test]
async fn shutting_an_endpoint_tells_its_peers() {
    let pair = Fleet::new().pair().await;
    pair.coordinator
        .close(CloseCode::SHUTDOWN, "update", patience())
        .await;
    assert_eq!(
        pair.near.closed().await,
        Closed::ByPeer {
            code: CloseCode::SHUTDOWN,
            reason: "update".to_owned()
        }
    );
    assert!(pair.coordinator.accept().await.is_none());
}

/// A killed process says no farewell; the next one on its address ends the sessions of the earlier one with its first answer, long
/// before the idle timeout would.
#[test]
fn a_restarted_peer_is_noticed_with_the_first_packet() {
    let fleet = Fleet::new();
    let restart_key = fleet.authority.restart_key();
    let start = |address| {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let endpoint = runtime.block_on(async {
            let mut config = EndpointConfig::new(address, &[Alpn::Agent]);
            config.settings.idle_timeout = Duration::from_secs(600);
            config.restart_key = Some(restart_key.clone());
            let identity = fleet.authority.identity(&Role::Coordinator).unwrap();
            Endpoint::bind(config, fleet.trust(), Some(identity))
        });
        (runtime, endpoint)
    };
    let (first_life, endpoint) = start(local());
    let endpoint = endpoint.unwrap();
    let address = endpoint.local_addresses()[0];
    let agents = tokio::runtime::Runtime::new().unwrap();
    let (agent, session) = agents.block_on(async {
        let mut config = EndpointConfig::new(local(), &[]);
        config.settings.idle_timeout = Duration::from_secs(600);
        let agent = fleet.endpoint(&Role::Node(node("edge-1")), config);
        let dial = Dial::new(Alpn::Agent, Role::Coordinator);
        let session = agent.connect(&[address], &dial, patience()).await.unwrap();
        (agent, session)
    });
    // Its tasks end without another packet, then its socket is closed.
    first_life.shutdown_timeout(Duration::from_secs(10));
    drop(endpoint);
    let (second_life, _endpoint) = loop {
        match start(address) {
            (runtime, Ok(endpoint)) => break (runtime, endpoint),
            (_, Err(_)) => std::thread::yield_now(),
        }
    };
    let closed = agents.block_on(async {
        let mut stream = session.open_uni(patience()).await.unwrap();
        let noticed = async {
            while session.closed_reason().is_none() {
                let _ = stream
                    .write_bytes(Bytes::from_static(b"report"), patience())
                    .await;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            session.closed().await
        };
        tokio::time::timeout(Duration::from_secs(30), noticed).await
    });
    assert_eq!(
        closed.expect("noticed long before the idle timeout"),
        Closed::Lost("the peer has restarted".to_owned())
    );
    drop((agent, second_life));
}
