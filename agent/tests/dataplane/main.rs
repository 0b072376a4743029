//! Data planes over real connections: frames cross nodes, nodes fall silent, links become slow, operators move.

#![allow(clippy::unwrap_used, reason = "test code")]

mod fleet;
mod relay;

use std::sync::atomic::Ordering;
use std::time::Duration;

use compass_agent::trials::StageFetch;
use compass_shared::codec::encode_frame;
use compass_shared::ids::{Commit, Digest, FrameId, Generation, SampleSetId};
use compass_shared::model::outcome::Outcome;
use compass_shared::model::plan::NodeTarget;
use compass_shared::model::trial::CaptureSamples;
use compass_shared::wire::v1::{AgentEvent, FrameHeader, LinkReport};
use compass_transport::{
    Alpn, CloseCode, Closed, ConnectError, Deadline, Dial, ResetCode, Role, ServerTrust,
    TransportError,
};

use fleet::{Fleet, PATIENCE, chain, node, query};
use relay::Relay;

/// Waits for an event that fits; others pass by.
async fn event(
    events: &mut tokio::sync::mpsc::Receiver<AgentEvent>,
    fits: impl Fn(&AgentEvent) -> bool,
) -> AgentEvent {
    let found = async {
        loop {
            let event = events.recv().await.unwrap();
            if fits(&event) {
                return event;
            }
        }
    };
    tokio::time::timeout(PATIENCE, found).await.unwrap()
}

async fn frames_cross_three_nodes(clocks: &[(&str, i64)]) {
    let mut fleet = Fleet::with_clocks(clocks);
    let route = chain(
        1,
        &[
            ("sampler", "edge"),
            ("detector", "near"),
            ("tracker", "cloud"),
        ],
    );
    fleet.apply(1, &[route]);
    let app = fleet.app(&["edge", "cloud"]).await;
    for frame in 0..40 {
        app.send(frame).await;
        app.ends(frame..frame + 1).await;
    }
    let results = app.results();
    assert_eq!(results.len(), 40);
    for (frame, seen) in results {
        let expected = format!("f{frame}/sampler/detector/tracker").into_bytes();
        assert_eq!(seen, [(Generation(1), expected)]);
    }
    for (at, operator) in [
        ("edge", "sampler"),
        ("near", "detector"),
        ("cloud", "tracker"),
    ] {
        assert_eq!(fleet.fake(at, operator).most_runs(), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_cross_nodes_and_every_result_comes_back() {
    frames_cross_three_nodes(&[("edge", 0), ("near", 0), ("cloud", 0)]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clocks_hours_apart_change_nothing() {
    const HOUR: i64 = 3600;
    frames_cross_three_nodes(&[
        ("edge", -7 * HOUR),
        ("near", 5 * HOUR),
        ("cloud", 11 * HOUR),
    ])
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frame_sent_twice_is_run_once() {
    let mut fleet = Fleet::new(&["edge", "near"]);
    let route = chain(1, &[("sampler", "edge"), ("detector", "near")]);
    fleet.apply(1, &[route]);
    let app = fleet.app(&["edge", "near"]).await;
    fleet.fake("near", "detector").holds.send_replace(true);
    app.send(7).await;
    app.send_again(7, 1).await;
    fleet.fake("near", "detector").holds.send_replace(false);
    assert_eq!(app.ends(7..8).await[&7], Outcome::Answered);
    app.send_again(7, 2).await;
    app.send(8).await;
    app.ends(8..9).await;
    assert_eq!(fleet.fake("edge", "sampler").most_runs(), 1);
    assert_eq!(fleet.fake("near", "detector").most_runs(), 1);
    assert_eq!(app.results()[&7].len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_frames_are_refused_and_disturb_nobody() {
    let mut fleet = Fleet::new(&["edge", "near"]);
    let route = chain(1, &[("sampler", "edge"), ("detector", "near")]);
    fleet.apply(1, &[route]);
    let app = fleet.app(&["edge", "near"]).await;
    app.send(0).await;
    app.ends(0..1).await;

    let header = |payload_bytes| FrameHeader {
        query: query(),
        generation: Generation(0),
        frame: FrameId(99),
        from: None,
        to: None,
        age_us: 0,
        content: "bytes".to_owned(),
        attempt: 0,
        payload_bytes,
    };
    let good = encode_frame(1, &header(1_000)).unwrap();
    let mut newer = good.clone();
    newer[6] = 9;
    let mut oversized = good.clone();
    oversized[0] = 0xff;
    let mut cut_within = encode_frame(1, &header(1)).unwrap();
    // A text that claims to be longer than the message.
    cut_within[7] = 250;
    let damaged = [
        ("another version", newer),
        ("an oversized header", oversized),
        ("a header that ends within a text", cut_within),
        (
            "an oversized payload",
            encode_frame(1, &header(u32::MAX)).unwrap(),
        ),
        ("another protocol", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        (
            "noise",
            (0..2_000_u32).map(|n| ((n * 7_919) >> 3) as u8).collect(),
        ),
    ];
    for (what, bytes) in damaged {
        let refused = app.send_raw(bytes).await;
        assert!(
            matches!(refused, TransportError::Stopped(ResetCode::BAD_MESSAGE)),
            "{what}: {refused}"
        );
    }
    for is_finished in [false, true] {
        app.send_part(good[..good.len() / 2].to_vec(), is_finished)
            .await;
        app.send_part(good.clone(), is_finished).await;
        app.send_part(Vec::new(), is_finished).await;
    }

    // The same connection goes on, with all its credit, and nothing of it has reached an operator.
    for frame in 1..20 {
        app.send(frame).await;
        app.ends(frame..frame + 1).await;
    }
    let ends = app.ends(0..20).await;
    assert!(ends.values().all(|o| *o == Outcome::Answered), "{ends:?}");
    assert!(!ends.contains_key(&99));
    assert_eq!(fleet.fake("edge", "sampler").runs.lock().unwrap().len(), 20);
    assert_eq!(
        fleet.fake("near", "detector").runs.lock().unwrap().len(),
        20
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_silent_node_held_is_answered_by_its_successor() {
    let mut fleet = Fleet::new(&["edge", "near", "metro"]);
    // Near is reached through a relay that will be cut without a word; its own dials pass it by, and it never dials the edge, whose
    // id is smaller.
    let address = fleet.nodes["near"].peer.addresses[0];
    let relay = Relay::start(address, 1_000.0).await;
    fleet.nodes.get_mut("near").unwrap().peer.addresses = vec![relay.address];
    let old = chain(1, &[("sampler", "edge"), ("detector", "near")]);
    let new = chain(2, &[("sampler", "edge"), ("detector", "metro")]);
    fleet.apply(1, std::slice::from_ref(&old));
    let app = fleet.app(&["edge", "near", "metro"]).await;
    app.send(0).await;
    app.ends(0..1).await;
    fleet.fake("near", "detector").holds.send_replace(true);
    // No more than wait for one operator, or the oldest would rightly be rejected.
    for frame in 1..4 {
        app.send(frame).await;
    }
    relay.cut();
    let events = &mut fleet.nodes.get_mut("edge").unwrap().events;
    event(
        events,
        |e| matches!(e, AgentEvent::PeerUnreachable { peer } if *peer == node("near")),
    )
    .await;
    fleet.apply(2, &[old, new]);
    app.ends(1..4).await;
    app.send(4).await;
    let ends = app.ends(0..5).await;
    assert!(ends.values().all(|o| *o == Outcome::Answered), "{ends:?}");
    assert_eq!(fleet.fake("metro", "detector").most_runs(), 1);
    assert_eq!(fleet.fake("edge", "sampler").most_runs(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_cut_to_a_twentieth_is_reported() {
    let mut fleet = Fleet::new(&["edge", "near"]);
    fleet.output_bytes = 20_000;
    let address = fleet.nodes["near"].peer.addresses[0];
    let relay = Relay::start(address, 20.0).await;
    fleet.nodes.get_mut("near").unwrap().peer.addresses = vec![relay.address];
    let route = chain(1, &[("sampler", "edge"), ("detector", "near")]);
    fleet.apply(1, &[route]);
    let app = fleet.app(&["edge"]).await;
    let mut frame = 0;
    let mut stream_for = async |seconds: u64| {
        let until = tokio::time::Instant::now() + Duration::from_secs(seconds);
        while tokio::time::Instant::now() < until {
            app.send(frame).await;
            frame += 1;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    stream_for(3).await;
    let before = fleet.nodes["edge"].plane.link_reports();
    assert!(before[0].delivered_bps > 0, "{before:?}");
    // What a busy machine may have caused so far does not count.
    let events = &mut fleet.nodes.get_mut("edge").unwrap().events;
    while events.try_recv().is_ok() {}
    relay.set_rate(1.0);
    let degraded = event(events, |e| matches!(e, AgentEvent::LinkDegraded { .. }));
    let degraded = tokio::select! {
        event = degraded => event,
        () = stream_for(60) => panic!("never noticed"),
    };
    let AgentEvent::LinkDegraded { peer, measurement } = degraded else {
        unreachable!()
    };
    assert_eq!(peer, node("near"));
    assert!(
        measurement.value < 4.0 && measurement.bound > measurement.value * 3.0,
        "{measurement:?}"
    );
    stream_for(2).await;
    let report = &fleet.nodes["edge"].plane.link_reports()[0];
    assert!(
        report.network_limited && report.delivered_bps < 3_000_000,
        "{report:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_that_moves_takes_its_state_along() {
    let mut fleet = Fleet::new(&["edge", "near", "cloud"]);
    let old = chain(1, &[("sampler", "edge"), ("tracker", "cloud")]);
    let new = chain(2, &[("sampler", "edge"), ("tracker", "near")]);
    fleet.apply(1, std::slice::from_ref(&old));
    let app = fleet.app(&["edge", "near", "cloud"]).await;
    app.send(0).await;
    app.ends(0..1).await;
    *fleet.fake("cloud", "tracker").state.lock().unwrap() = b"three people".to_vec();
    fleet.apply(1, &[old.clone(), new.clone()]);
    app.send(1).await;
    app.ends(1..2).await;
    assert!(
        fleet
            .fake("near", "tracker")
            .state
            .lock()
            .unwrap()
            .is_empty()
    );
    // So that the answer does not depend on how fast the two have connected.
    assert!(
        fleet.nodes["near"]
            .plane
            .fetch(
                &node("cloud"),
                &query(),
                SampleSetId(1),
                Digest::of(b""),
                &[]
            )
            .await
            .is_err()
    );
    fleet.apply(2, &[old, new]);
    app.send(2).await;
    assert_eq!(app.ends(2..3).await[&2], Outcome::Answered);
    assert_eq!(
        *fleet.fake("near", "tracker").state.lock().unwrap(),
        b"three people"
    );
    let generations: Vec<_> = app.results().values().map(|r| r[0].0).collect();
    assert_eq!(generations, [Generation(1), Generation(1), Generation(2)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn captured_frames_are_fetched_from_the_entry() {
    let mut fleet = Fleet::new(&["edge", "near"]);
    fleet.apply(0, &[]);
    let app = fleet.app(&["edge"]).await;
    let capture = fleet.nodes["edge"].samples.capture(CaptureSamples {
        query: query(),
        set: SampleSetId(3),
        segments: 1,
        frames_per_segment: 4,
        deadline: PATIENCE,
    });
    let stream = async {
        for frame in 0.. {
            app.send(frame).await;
        }
    };
    let captured = tokio::select! {
        captured = capture => captured,
        () = stream => unreachable!(),
    };
    let frames: Vec<FrameId> = captured.segments.concat();
    assert_eq!(frames.len(), 4);
    let near = &fleet.nodes["near"].plane;
    let fetched = near
        .fetch(
            &node("edge"),
            &query(),
            SampleSetId(3),
            Digest::of(b""),
            &frames,
        )
        .await
        .unwrap();
    for ((frame, payload), wanted) in fetched.iter().zip(&frames) {
        assert_eq!(frame, wanted);
        assert_eq!(
            payload.as_ref().unwrap().bytes,
            format!("f{frame}").as_bytes()
        );
    }
    let missing = near
        .fetch(
            &node("edge"),
            &query(),
            SampleSetId(99),
            Digest::of(b""),
            &frames,
        )
        .await;
    assert!(missing.is_err());
    // Before there is a plan every frame is for profiling only.
    assert!(
        app.ends(0..4)
            .await
            .values()
            .all(|o| *o == Outcome::Rejected)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_result_waits_for_an_app_that_comes_back() {
    let mut fleet = Fleet::new(&["edge"]);
    fleet.apply(1, &[chain(1, &[("sampler", "edge")])]);
    let app = fleet.app(&["edge"]).await;
    fleet.fake("edge", "sampler").holds.send_replace(true);
    app.send(0).await;
    let sampler = fleet.fake("edge", "sampler");
    while sampler.most_runs() == 0 {
        tokio::task::yield_now().await;
    }
    app.leave().await;
    sampler.holds.send_replace(false);
    let again = fleet.app(&["edge"]).await;
    assert_eq!(again.ends(0..1).await[&0], Outcome::Answered);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frame_that_breaks_its_worker_twice_is_rejected() {
    let mut fleet = Fleet::new(&["edge", "near"]);
    fleet.apply(1, &[chain(1, &[("sampler", "edge"), ("detector", "near")])]);
    let app = fleet.app(&["edge", "near"]).await;
    let detector = fleet.fake("near", "detector");
    detector.is_broken.store(true, Ordering::Relaxed);
    app.send(0).await;
    assert_eq!(app.ends(0..1).await[&0], Outcome::Rejected);
    assert_eq!(detector.most_runs(), 2);
    detector.is_broken.store(false, Ordering::Relaxed);
    app.send(1).await;
    assert_eq!(app.ends(1..2).await[&1], Outcome::Answered);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_not_named_by_the_target_is_refused() {
    let mut fleet = Fleet::new(&["edge"]);
    fleet.apply(1, &[chain(1, &[("sampler", "edge")])]);
    let other = compass_shared::ids::QueryId::new("other").unwrap();
    for role in [
        Role::App(query()),
        Role::App(other),
        Role::Node(node("rogue")),
    ] {
        let endpoint = fleet.app_endpoint(fleet.stranger(&role));
        let peer = &fleet.nodes["edge"].peer;
        let dial = Dial::new(Alpn::Data, Role::Node(peer.node.clone()))
            .trusting(ServerTrust::Key(peer.fingerprint));
        // The refusal comes after the hello or, when the other side is quicker, in its place.
        let session = match endpoint
            .connect(&peer.addresses, &dial, Deadline::after(PATIENCE))
            .await
        {
            Ok(session) => session,
            Err(ConnectError::Refused { code, .. }) => {
                assert_eq!(code, CloseCode::REFUSED);
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let closed = tokio::time::timeout(PATIENCE, session.closed())
            .await
            .unwrap();
        assert!(
            matches!(
                closed,
                Closed::ByPeer {
                    code: CloseCode::REFUSED,
                    ..
                }
            ),
            "{role}: {closed:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn links_to_peers_named_by_the_coordinator_are_measured() {
    let fleet = Fleet::new(&["edge", "near"]);
    introduce(&fleet);
    let measured = async {
        loop {
            let both = ["edge", "near"].map(|name| fleet.nodes[name].plane.link_reports());
            let is_known = |links: &Vec<compass_shared::wire::v1::LinkReport>| {
                links.len() == 1 && links[0].rtt_ms.is_some() && links[0].delivered_bps > 0
            };
            if both.iter().all(is_known) {
                return both;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let [edge, near] = tokio::time::timeout(PATIENCE, measured).await.unwrap();
    assert_eq!(edge[0].peer, node("near"));
    // Both count the same packets of one connection; some may be on their way.
    assert!(edge[0].sent_bytes > 30_000 && near[0].received_bytes > 30_000);
}

/// Two nodes that are introduced to each other and of which no target says anything.
fn introduce(fleet: &Fleet) {
    for (me, other) in [("edge", "near"), ("near", "edge")] {
        let peer = fleet.nodes[other].peer.clone();
        fleet.nodes[me].plane.peers(vec![peer]);
    }
}

/// Waits until the edge has measured its one link, and it is as wanted.
async fn link_of_the_edge(fleet: &Fleet, fits: impl Fn(&LinkReport) -> bool) -> LinkReport {
    let measured = async {
        loop {
            let links = fleet.nodes["edge"].plane.link_reports();
            if let [link] = links.as_slice()
                && fits(link)
            {
                return link.clone();
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(PATIENCE, measured).await.unwrap()
}

/// By near's clock every certificate of the fleet has expired: it lives by the keys it was told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_empty_target_does_not_end_the_measuring_of_introduced_peers() {
    let fleet = Fleet::with_clocks(&[("edge", 0), ("near", 400 * 86_400)]);
    introduce(&fleet);
    for name in ["edge", "near"] {
        fleet.nodes[name].plane.apply(&nothing_for(name, 1));
    }
    link_of_the_edge(&fleet, |link| {
        link.rtt_ms.is_some() && link.delivered_bps > 0
    })
    .await;
    for (me, other) in [("edge", "near"), ("near", "edge")] {
        let pinned = fleet.nodes[me].endpoint.trust().peer(&node(other));
        assert_eq!(pinned, Some(fleet.nodes[other].peer.fingerprint));
    }
}

/// A target by which a node has nothing to do and no neighbours.
fn nothing_for(name: &str, term: u64) -> NodeTarget {
    NodeTarget {
        commit: Commit { term, number: 1 },
        node: node(name),
        instances: vec![],
        queries: vec![],
        peers: vec![],
        standby: vec![],
    }
}

/// A coordinator that has just started introduces nodes as they come back: for a moment nobody names the neighbour.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_degraded_link_is_still_known_as_such_when_its_peer_is_introduced_again() {
    let mut fleet = Fleet::new(&["edge", "near"]);
    fleet.output_bytes = 20_000;
    let address = fleet.nodes["near"].peer.addresses[0];
    let relay = Relay::start(address, 4.0).await;
    fleet.nodes.get_mut("near").unwrap().peer.addresses = vec![relay.address];
    introduce(&fleet);
    link_of_the_edge(&fleet, |link| link.delivered_bps > 0).await;
    let routes = [chain(1, &[("sampler", "edge"), ("detector", "near")])];
    fleet.apply(1, &routes);
    let app = fleet.app(&["edge", "near"]).await;
    for frame in 0..20 {
        app.send(frame).await;
        app.ends(frame..frame + 1).await;
    }
    relay.set_rate(0.4);
    let stream = async {
        for frame in 20.. {
            app.send(frame).await;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        _ = link_of_the_edge(&fleet, |link| link.degraded) => {}
        () = stream => unreachable!(),
    }
    // The query goes, and so do the introductions: nobody names near.
    for name in ["edge", "near"] {
        fleet.nodes[name].plane.apply(&nothing_for(name, 2));
        fleet.nodes[name].plane.peers(vec![]);
    }
    let none = async {
        while !fleet.nodes["edge"].plane.link_reports().is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, none).await.unwrap();
    introduce(&fleet);
    let first = link_of_the_edge(&fleet, |_| true).await;
    assert!(first.degraded, "{first:?}");
    // When it is well again, it is measured without a frame of anybody, and said.
    relay.set_rate(4.0);
    let events = &mut fleet.nodes.get_mut("edge").unwrap().events;
    let recovered = event(events, |e| matches!(e, AgentEvent::LinkRecovered { .. })).await;
    let AgentEvent::LinkRecovered { peer, .. } = recovered else {
        unreachable!()
    };
    assert_eq!(peer, node("near"));
    link_of_the_edge(&fleet, |link| !link.degraded).await;
}
