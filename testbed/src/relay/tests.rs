//! The relay over real loopback sockets. Nothing here depends on how long something takes: tests assert counts, order,
//! addresses and conservation.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use super::config::{node_address, relay_address};
use super::control;
use super::topology::LinkSpec;
use super::*;

/// Only met when something is broken.
const DEADLINE: Duration = Duration::from_secs(30);

fn node_socket(n: u8) -> UdpSocket {
    let socket = UdpSocket::bind((node_address(n), 0)).unwrap();
    // A test that is not scheduled for a while must not lose what it has not read yet.
    socket2::SockRef::from(&socket)
        .set_recv_buffer_size(4 << 20)
        .unwrap();
    socket.set_read_timeout(Some(DEADLINE)).unwrap();
    socket
}

fn receive(socket: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    let mut buffer = vec![0; 65_536];
    let (bytes, from) = socket
        .recv_from(&mut buffer)
        .expect("a datagram before the deadline");
    buffer.truncate(bytes);
    (buffer, from)
}

/// Asks the relay until it says so.
fn until(relay: &impl RelayControl, condition: impl Fn(&RelayCounters) -> bool) -> RelayCounters {
    let begin = Instant::now();
    loop {
        let counters = relay.counters().unwrap();
        if condition(&counters) {
            return counters;
        }
        assert!(
            begin.elapsed() < DEADLINE,
            "not within the deadline: {counters:#?}"
        );
        std::thread::yield_now();
    }
}

/// Two nodes `a` and `b` (numbers 1 and 2), `b` listening; nothing between them but `shape`.
fn pair(shape: PathShape) -> (RelayHandle, UdpSocket, UdpSocket) {
    let mut config = RelayConfig::new(7);
    config.other_paths = Some(shape);
    config.nodes = vec![NodeConfig::new("a", 1), NodeConfig::new("b", 2)];
    let relay = Relay::start(config).unwrap();
    let (a, b) = (node_socket(1), node_socket(2));
    relay.set_target("b", b.local_addr().unwrap()).unwrap();
    (relay, a, b)
}

fn offered(counters: &RelayCounters, from: &str, to: &str) -> u64 {
    counters.link(from, to).unwrap().offered.packets
}

fn settled(counters: &RelayCounters, from: &str, to: &str, packets: u64) -> bool {
    offered(counters, from, to) == packets
        && counters.link(from, to).unwrap().under_way() == Count::default()
}

#[test]
fn a_flow_crosses_both_ways_between_stable_addresses() {
    let (relay, a, b) = pair(PathShape::delay(1.0));
    let b_advertised = relay.advertised("b").unwrap();
    assert_eq!(b_advertised.ip(), IpAddr::V4(relay_address(2)));
    let mut peers = Vec::new();
    for round in 0..3_u8 {
        a.send_to(&[round; 100], b_advertised).unwrap();
        let (data, peer) = receive(&b);
        assert_eq!(data, [round; 100]);
        peers.push(peer);
        b.send_to(&[round; 50], peer).unwrap();
        let (data, from) = receive(&a);
        assert_eq!(
            (data, from),
            (vec![round; 50], b_advertised),
            "the answer comes from the address that was dialled"
        );
    }
    assert_eq!(
        peers[0].ip(),
        IpAddr::V4(relay_address(1)),
        "b sees the relay's address for a"
    );
    assert!(peers.iter().all(|peer| *peer == peers[0]));
    let counters = relay.counters().unwrap();
    assert_eq!(
        counters.link("a", "b").unwrap().delivered,
        Count {
            packets: 3,
            bytes: 300
        }
    );
    assert_eq!(
        counters.link("b", "a").unwrap().delivered,
        Count {
            packets: 3,
            bytes: 150
        }
    );
    assert_eq!(
        (
            counters.sent_by("a").bytes,
            counters.delivered_to("a").bytes,
            counters.flows_open
        ),
        (300, 150, 1)
    );
    assert_eq!(counters.own_faults(), 0);
    assert_eq!(relay.lateness().unwrap().count(), 6);
}

#[test]
fn each_source_port_is_a_flow_of_its_own() {
    let (relay, a, b) = pair(PathShape::default());
    let other = node_socket(1);
    a.send_to(b"first", relay.advertised("b").unwrap()).unwrap();
    let (_, first) = receive(&b);
    other
        .send_to(b"second", relay.advertised("b").unwrap())
        .unwrap();
    let (_, second) = receive(&b);
    assert_ne!(first, second);
    b.send_to(b"to the second", second).unwrap();
    assert_eq!(receive(&other).0, b"to the second");
}

#[test]
fn packets_keep_their_order_through_a_shared_bottleneck_and_none_is_unaccounted_for() {
    let config = Topology::new()
        .site("plant", LinkSpec::mbit_s(20.0, 20.0, 2.0))
        .node("a", "plant", LinkSpec::mbit_s(100.0, 100.0, 0.5))
        .node("b", "cloud", LinkSpec::ideal())
        .relay_config(7)
        .unwrap();
    let relay = Relay::start(config).unwrap();
    relay
        .set_pipe(
            "plant uplink up",
            PipeShape::mbit_s(20.0).with_queue_ms(10_000.0),
        )
        .unwrap();
    relay
        .set_pipe(
            "a access up",
            PipeShape::mbit_s(100.0).with_queue_ms(10_000.0),
        )
        .unwrap();
    let (a, b) = (node_socket(1), node_socket(2));
    relay.set_target("b", b.local_addr().unwrap()).unwrap();
    let address = relay.advertised("b").unwrap();
    for round in 0..300_u32 {
        a.send_to(&[&round.to_le_bytes()[..], &[0; 1_196]].concat(), address)
            .unwrap();
    }
    for round in 0..300_u32 {
        assert_eq!(receive(&b).0[..4], round.to_le_bytes());
    }
    let counters = relay.counters().unwrap();
    let all = Count {
        packets: 300,
        bytes: 360_000,
    };
    assert_eq!(counters.link("a", "b").unwrap().delivered, all);
    assert_eq!(
        counters.pipes["plant uplink up"],
        PipeCounters {
            passed: all,
            ..PipeCounters::default()
        }
    );
}

#[test]
fn a_full_queue_drops_and_says_how_many() {
    let config = Topology::new()
        .node("a", "plant", LinkSpec::mbit_s(0.1, 0.1, 0.0))
        .node("b", "plant", LinkSpec::ideal())
        .relay_config(7)
        .unwrap();
    let relay = Relay::start(config).unwrap();
    relay
        .set_pipe(
            "a access up",
            PipeShape {
                rate_bps: Some(0),
                queue_ms: 0.0,
                trace: None,
            },
        )
        .unwrap();
    let (a, b) = (node_socket(1), node_socket(2));
    relay.set_target("b", b.local_addr().unwrap()).unwrap();
    for _ in 0..50 {
        a.send_to(&[0; 1_000], relay.advertised("b").unwrap())
            .unwrap();
    }
    let counters = until(&relay, |counters| offered(counters, "a", "b") == 50);
    let link = counters.link("a", "b").unwrap();
    assert_eq!(
        link.dropped_for(DropCause::Queue),
        Count {
            packets: 49,
            bytes: 49_000
        }
    );
    assert_eq!(
        link.under_way(),
        Count {
            packets: 1,
            bytes: 1_000
        },
        "the one in service waits for the rate to return"
    );
    relay
        .set_pipe("a access up", PipeShape::mbit_s(1.0))
        .unwrap();
    assert_eq!(receive(&b).0.len(), 1_000);
}

#[test]
fn loss_is_the_seed_s_choice_whatever_the_timing() {
    let survivors = || {
        let (relay, a, b) = pair(PathShape {
            loss: 0.3,
            ..PathShape::default()
        });
        for round in 0..200_u8 {
            a.send_to(&[round], relay.advertised("b").unwrap()).unwrap();
        }
        let counters = until(&relay, |counters| settled(counters, "a", "b", 200));
        let link = counters.link("a", "b").unwrap().clone();
        assert_eq!(
            link.delivered.packets + link.dropped_for(DropCause::Loss).packets,
            200
        );
        (0..link.delivered.packets)
            .map(|_| receive(&b).0[0])
            .collect::<Vec<_>>()
    };
    let first = survivors();
    assert!(
        (100..180).contains(&first.len()),
        "{} of 200 survived a loss of 30 %",
        first.len()
    );
    assert_eq!(first, survivors());
}

#[test]
fn a_cut_works_in_one_direction_and_can_be_mended() {
    let (relay, a, b) = pair(PathShape::default());
    let address = relay.advertised("b").unwrap();
    a.send_to(b"hello", address).unwrap();
    let (_, peer) = receive(&b);
    relay.cut("a", "b").unwrap();
    a.send_to(b"into the void", address).unwrap();
    b.send_to(b"back", peer).unwrap();
    assert_eq!(receive(&a).0, b"back");
    let counters = until(&relay, |counters| settled(counters, "a", "b", 2));
    assert_eq!(
        counters.link("a", "b").unwrap().dropped_for(DropCause::Cut),
        Count {
            packets: 1,
            bytes: 13
        }
    );
    relay.isolate("b").unwrap();
    assert!(relay.path("b", "a").unwrap().cut && relay.path("a", "b").unwrap().cut);
    relay.rejoin("b").unwrap();
    a.send_to(b"again", address).unwrap();
    assert_eq!(receive(&b).0, b"again");
}

#[test]
fn an_mtu_drops_what_is_larger_and_large_datagrams_pass_without_one() {
    let (relay, a, b) = pair(PathShape {
        mtu_bytes: Some(1_400),
        ..PathShape::default()
    });
    let address = relay.advertised("b").unwrap();
    a.send_to(&[0; 1_401], address).unwrap();
    a.send_to(&[1; 1_400], address).unwrap();
    assert_eq!(receive(&b).0, [1; 1_400]);
    assert_eq!(
        relay
            .counters()
            .unwrap()
            .link("a", "b")
            .unwrap()
            .dropped_for(DropCause::Mtu)
            .packets,
        1
    );
    relay.set_path("a", "b", PathShape::default()).unwrap();
    a.send_to(&[2; 60_000], address).unwrap();
    assert_eq!(receive(&b).0, [2; 60_000]);
}

#[test]
fn strangers_are_dropped_and_counted() {
    let (relay, a, b) = pair(PathShape::default());
    let address = relay.advertised("b").unwrap();
    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    stranger.send_to(&[0; 10], address).unwrap();
    until(&relay, |counters| {
        counters.unknown_source
            == Count {
                packets: 1,
                bytes: 10,
            }
    });
    a.send_to(b"hello", address).unwrap();
    let (_, peer) = receive(&b);
    stranger.send_to(&[0; 20], peer).unwrap();
    until(&relay, |counters| {
        counters.stray
            == Count {
                packets: 1,
                bytes: 20,
            }
    });
}

#[test]
fn without_a_path_or_a_target_nothing_passes() {
    let mut config = RelayConfig::new(7);
    config.nodes = vec![
        NodeConfig::new("a", 1),
        NodeConfig::new("b", 2),
        NodeConfig::new("c", 3),
    ];
    config.paths = vec![PathConfig {
        from: "a".to_owned(),
        to: "b".to_owned(),
        pipes: Vec::new(),
        shape: PathShape::default(),
    }];
    let relay = Relay::start(config).unwrap();
    let a = node_socket(1);
    a.send_to(&[0; 10], relay.advertised("c").unwrap()).unwrap();
    a.send_to(&[0; 10], relay.advertised("b").unwrap()).unwrap();
    let counters = until(&relay, |counters| {
        settled(counters, "a", "b", 1) && counters.no_path.packets == 1
    });
    assert_eq!(
        counters
            .link("a", "b")
            .unwrap()
            .dropped_for(DropCause::NoTarget)
            .packets,
        1
    );
    assert!(
        relay
            .set_target("b", "127.1.0.3:9".parse().unwrap())
            .is_err(),
        "that is c's address"
    );
    let b = node_socket(2);
    relay.set_target("b", b.local_addr().unwrap()).unwrap();
    a.send_to(b"now", relay.advertised("b").unwrap()).unwrap();
    assert_eq!(receive(&b).0, b"now");
}

#[test]
fn field_019_a_forgotten_flow_comes_back_from_another_port() {
    let (relay, a, b) = pair(PathShape::default());
    let address = relay.advertised("b").unwrap();
    a.send_to(b"before", address).unwrap();
    let (_, before) = receive(&b);
    relay.forget_flows(Some("a")).unwrap();
    assert_eq!(relay.counters().unwrap().flows_open, 0);
    b.send_to(b"to nobody", before).unwrap();
    a.send_to(b"after", address).unwrap();
    let (_, after) = receive(&b);
    assert_ne!(before, after);
    b.send_to(b"to the new mapping", after).unwrap();
    assert_eq!(receive(&a), (b"to the new mapping".to_vec(), address));
}

#[test]
fn silence_ends_a_flow() {
    let mut config = RelayConfig::new(7);
    config.flow_idle_s = 0.05;
    config.other_paths = Some(PathShape::default());
    config.nodes = vec![NodeConfig::new("a", 1), NodeConfig::new("b", 2)];
    let relay = Relay::start(config).unwrap();
    node_socket(1)
        .send_to(b"only once", relay.advertised("b").unwrap())
        .unwrap();
    until(&relay, |counters| {
        counters.flows_forgotten == 1 && counters.flows_open == 0
    });
}

#[test]
fn the_control_connection_does_what_the_handle_does_and_survives_nonsense() {
    let (relay, a, b) = pair(PathShape::delay(3.0));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    control::serve(listener, relay.clone()).unwrap();
    let client = ControlClient::connect(address).unwrap();
    assert_eq!(client.describe().unwrap(), relay.describe().unwrap());
    client
        .set_path(
            "a",
            "b",
            PathShape {
                loss: 1.0,
                ..PathShape::default()
            },
        )
        .unwrap();
    assert_eq!(relay.path("a", "b").unwrap().loss, 1.0);
    a.send_to(b"lost", client.advertised("b").unwrap()).unwrap();
    let counters = until(&client, |counters| settled(counters, "a", "b", 1));
    assert_eq!(counters, relay.counters().unwrap());
    client.set_target("b", b.local_addr().unwrap()).unwrap();

    for (result, expected) in [
        (
            client.set_pipe("uplink", PipeShape::default()),
            "there is no pipe `uplink`",
        ),
        (
            client.set_path("a", "z", PathShape::default()),
            "there is no node `z`",
        ),
        (
            client.set_path(
                "a",
                "b",
                PathShape {
                    loss: 2.0,
                    ..PathShape::default()
                },
            ),
            "loss 2 is not between 0 and 1",
        ),
        (
            client.set_pipe(
                "uplink",
                PipeShape {
                    trace: Some(TraceFile {
                        file: "no.csv".into(),
                        scale: 1.0,
                    }),
                    ..PipeShape::default()
                },
            ),
            "cannot read trace no.csv",
        ),
    ] {
        let error = format!("{:#}", result.unwrap_err());
        assert!(error.contains(expected), "{expected} not in {error}");
    }

    let mut raw = TcpStream::connect(address).unwrap();
    raw.set_read_timeout(Some(DEADLINE)).unwrap();
    let mut answers = BufReader::new(raw.try_clone().unwrap()).lines();
    for nonsense in [
        "",
        "{}",
        "\u{1}",
        r#"{"op":"set_path","from":"a","to":"b","shape":{},"speed":1}"#,
    ] {
        raw.write_all(format!("{nonsense}\n").as_bytes()).unwrap();
        let answer = answers.next().unwrap().unwrap();
        assert!(
            answer.starts_with(r#"{"refused":"not a request"#),
            "{nonsense:?}: {answer}"
        );
    }
    raw.write_all(b"{\"op\":\"lateness\"}\n").unwrap();
    assert!(answers.next().unwrap().unwrap().contains("p99_ms"));
    // The relay closes this connection, perhaps while it is still being written to.
    let _closed = raw.write_all(&[b'x'; 100_000]);
    assert!(
        !matches!(answers.next(), Some(Ok(_))),
        "an endless line ends its connection"
    );
    client.counters().unwrap();
}

#[test]
fn a_stopped_relay_frees_its_sockets_and_says_that_it_has_stopped() {
    let mut config = RelayConfig::new(7);
    config.nodes = vec![NodeConfig::new("a", 1)];
    let relay = Relay::start(config.clone()).unwrap();
    let SocketAddr::V4(address) = relay.advertised("a").unwrap() else {
        panic!("an IPv4 address")
    };
    drop(relay);
    config.nodes[0].services[0].port = address.port();
    let relay = Relay::start(config.clone()).unwrap();
    let error = format!("{:#}", Relay::start(config).unwrap_err());
    assert!(
        error.contains(&format!("cannot bind UDP {address}")),
        "{error}"
    );
    drop(relay);
}
