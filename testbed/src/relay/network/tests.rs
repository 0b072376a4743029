//! Properties of the emulated network on a virtual clock.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::relay::rate::RateSchedule;
use crate::relay::trace::Trace;

fn pipe(rate_bps: u64, queue_ms: u64) -> PipeModel {
    PipeModel {
        schedule: RateSchedule::Constant(rate_bps),
        queue: Duration::from_millis(queue_ms),
    }
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Runs a network to its end; gives (link, payload, due).
fn drain(network: &mut Network<u32>) -> Vec<(LinkId, u32, Duration)> {
    let mut arrivals = Vec::new();
    while let Some(due) = network.next_due() {
        while let Some(delivery) = network.poll(due) {
            arrivals.push((delivery.link, delivery.payload, delivery.due));
        }
    }
    arrivals
}

#[test]
fn a_packet_takes_its_service_time_and_the_delay() {
    let mut network = Network::new(Seed(1));
    let uplink = network.add_pipe(pipe(1_000_000, 100));
    let link = network.add_link("a>b", PathShape::delay(20.0), vec![uplink]);
    network.offer(ms(5), link, 1_250, 0);
    network.offer(ms(5), link, 1_250, 1);
    // 1 250 bytes at 1 Mbit/s take 10 ms.
    assert_eq!(drain(&mut network), [(link, 0, ms(35)), (link, 1, ms(45))]);
}

#[test]
fn a_cut_of_the_rate_slows_what_already_waits() {
    let mut network = Network::new(Seed(1));
    let uplink = network.add_pipe(pipe(1_000_000, 100));
    let link = network.add_link("a>b", PathShape::default(), vec![uplink]);
    network.offer(ms(0), link, 1_250, 0);
    network.offer(ms(0), link, 1_250, 1);
    network.set_pipe(ms(5), uplink, pipe(50_000, 100));
    // Half of the first packet is through; the rest takes twenty times as long.
    assert_eq!(
        drain(&mut network),
        [(link, 0, ms(105)), (link, 1, ms(305))]
    );
}

#[test]
fn a_pipe_that_stands_still_goes_on_when_its_rate_returns() {
    let mut network = Network::new(Seed(1));
    let uplink = network.add_pipe(pipe(1_000_000, 25));
    let link = network.add_link("a>b", PathShape::default(), vec![uplink]);
    network.offer(ms(0), link, 1_250, 0);
    network.set_pipe(ms(5), uplink, pipe(0, 25));
    assert_eq!(network.next_due(), None);
    for payload in 1..10 {
        network.offer(ms(50), link, 1_250, payload);
    }
    network.set_pipe(ms(1_000), uplink, pipe(1_000_000, 25));
    let arrivals = drain(&mut network);
    // At the rate before the outage the queue takes what waits at most 25 ms: behind 5 ms of the first, three more.
    assert_eq!(
        arrivals,
        [
            (link, 0, ms(1_005)),
            (link, 1, ms(1_015)),
            (link, 2, ms(1_025)),
            (link, 3, ms(1_035))
        ]
    );
    assert_eq!(
        network.link_counters(link).dropped_for(DropCause::Queue),
        Count {
            packets: 6,
            bytes: 7_500
        }
    );
}

#[test]
fn a_full_pipe_of_its_own_does_not_block_the_shared_one() {
    let mut network = Network::new(Seed(1));
    let access = network.add_pipe(pipe(100_000, 5_000));
    let uplink = network.add_pipe(pipe(1_000_000, 5_000));
    let slow = network.add_link("a>c", PathShape::default(), vec![access, uplink]);
    let fast = network.add_link("b>c", PathShape::default(), vec![uplink]);
    for payload in 0..10 {
        network.offer(ms(0), slow, 1_250, payload);
    }
    network.offer(ms(10), fast, 1_250, 99);
    let arrivals = drain(&mut network);
    assert_eq!(
        arrivals[0],
        (fast, 99, ms(20)),
        "the uplink is idle while the access link serves its first packet"
    );
}

#[test]
fn links_over_one_pipe_share_its_rate() {
    let mut network = Network::new(Seed(1));
    let uplink = network.add_pipe(pipe(1_000_000, 10_000));
    let links =
        ["a>c", "b>c"].map(|name| network.add_link(name, PathShape::default(), vec![uplink]));
    for payload in 0..20 {
        network.offer(ms(0), links[payload as usize % 2], 1_250, payload);
    }
    let arrivals = drain(&mut network);
    assert_eq!(arrivals.last().map(|(_, _, due)| *due), Some(ms(200)));
    assert_eq!(
        network.pipe_counters(uplink).passed,
        Count {
            packets: 20,
            bytes: 25_000
        }
    );
}

#[test]
fn each_cause_of_a_drop_is_counted_as_such() {
    let mut network = Network::new(Seed(1));
    let uplink = network.add_pipe(pipe(1_000_000, 0));
    let link = network.add_link(
        "a>b",
        PathShape {
            mtu_bytes: Some(1_400),
            ..PathShape::default()
        },
        vec![uplink],
    );
    network.offer(ms(0), link, 1_401, 0);
    network.offer(ms(0), link, 1_400, 1);
    network.offer(ms(0), link, 1_400, 2);
    network.set_link(
        ms(0),
        link,
        PathShape {
            loss: 1.0,
            ..PathShape::default()
        },
    );
    network.offer(ms(0), link, 1_400, 3);
    network.set_link(
        ms(0),
        link,
        PathShape {
            cut: true,
            ..PathShape::default()
        },
    );
    network.offer(ms(0), link, 1_400, 4);
    assert_eq!(
        drain(&mut network),
        [],
        "the packet under way is cut off too"
    );
    let counters = network.link_counters(link);
    let packets = |cause| counters.dropped_for(cause).packets;
    assert_eq!(
        [
            DropCause::Mtu,
            DropCause::Queue,
            DropCause::Loss,
            DropCause::Cut
        ]
        .map(packets),
        [1, 1, 1, 2],
        "{counters:?}"
    );
    assert_eq!(counters.under_way(), Count::default());
}

#[test]
fn an_absurd_amount_under_way_is_refused_as_overload() {
    let mut network = Network::new(Seed(1));
    let link = network.add_link("a>b", PathShape::delay(60_000.0), vec![]);
    for payload in 0..1_100 {
        network.offer(ms(0), link, 65_000, payload);
    }
    assert!(
        network
            .link_counters(link)
            .dropped_for(DropCause::Overload)
            .packets
            > 0
    );
}

#[test]
fn a_trace_adds_half_its_round_trip() {
    let trace = Trace::parse("time_s,bandwidth_mbps,rtt_ms\n0,1,40\n1,1,80\n").unwrap();
    let schedule = RateSchedule::Trace {
        trace: Arc::new(trace),
        anchor: Duration::ZERO,
    };
    let mut network = Network::new(Seed(1));
    let uplink = network.add_pipe(PipeModel {
        schedule,
        queue: ms(100),
    });
    let link = network.add_link("a>b", PathShape::delay(5.0), vec![uplink]);
    network.offer(ms(0), link, 1_250, 0);
    network.offer(ms(1_000), link, 1_250, 1);
    assert_eq!(
        drain(&mut network),
        [(link, 0, ms(35)), (link, 1, ms(1_055))]
    );
}

#[test]
fn loss_is_seeded_near_its_rate_and_independent_of_other_links() {
    let run = |seed: u64, with_other: bool| {
        let mut network = Network::new(Seed(seed));
        let lossy = PathShape {
            loss: 0.1,
            ..PathShape::default()
        };
        let link = network.add_link("a>b", lossy, vec![]);
        let other = network.add_link("c>d", lossy, vec![]);
        for payload in 0..10_000 {
            network.offer(ms(u64::from(payload)), link, 100, payload);
            if with_other {
                network.offer(ms(u64::from(payload)), other, 100, payload);
            }
        }
        drain(&mut network)
            .into_iter()
            .filter(|arrival| arrival.0 == link)
            .map(|arrival| arrival.1)
            .collect::<Vec<_>>()
    };
    let survivors = run(7, false);
    assert!(
        (8_800..9_200).contains(&survivors.len()),
        "{} of 10 000 survived a loss of 10 %",
        survivors.len()
    );
    assert_eq!(survivors, run(7, true));
    assert_ne!(survivors, run(8, false));
}

#[test]
fn jitter_keeps_the_order_unless_told_otherwise() {
    let order = |reorder| {
        let mut network = Network::new(Seed(3));
        let shape = PathShape {
            delay_ms: 20.0,
            jitter_ms: 10.0,
            reorder,
            ..PathShape::default()
        };
        let link = network.add_link("a>b", shape, vec![]);
        for payload in 0..200 {
            network.offer(ms(u64::from(payload)), link, 100, payload);
        }
        let arrivals = drain(&mut network);
        for (_, payload, due) in &arrivals {
            let latest = if reorder { ms(30) } else { ms(40) };
            let transit = *due - ms(u64::from(*payload));
            assert!(
                transit >= ms(10) && transit <= latest,
                "{payload} took {transit:?}"
            );
        }
        arrivals
            .into_iter()
            .map(|arrival| arrival.1)
            .collect::<Vec<_>>()
    };
    assert!(order(false).is_sorted());
    assert!(!order(true).is_sorted());
}

/// A step of a random run.
#[derive(Debug, Clone)]
enum Act {
    Wait { us: u64 },
    Offer { link: usize, bytes: usize },
    Rate { pipe: usize, rate_bps: u64 },
    Shape { link: usize, shape: PathShape },
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let shape = (
        0.0..50.0_f64,
        0.0..20.0_f64,
        any::<bool>(),
        0.0..0.3_f64,
        any::<bool>(),
    )
        .prop_map(|(delay_ms, jitter_ms, reorder, loss, cut)| PathShape {
            delay_ms,
            jitter_ms,
            reorder,
            loss,
            cut,
            mtu_bytes: Some(1_400),
        });
    let act = prop_oneof![
        2 => (0_u64..20_000).prop_map(|us| Act::Wait { us }),
        6 => (0_usize..3, 1_usize..1_500).prop_map(|(link, bytes)| Act::Offer { link, bytes }),
        1 => (0_usize..2, 0_u64..20_000_000).prop_map(|(pipe, rate_bps)| Act::Rate { pipe, rate_bps }),
        1 => (0_usize..3, shape).prop_map(|(link, shape)| Act::Shape { link, shape }),
    ];
    proptest::collection::vec(act, 1..300)
}

/// Plays a run; `poll_every` says after how many acts packets are fetched (lateness must change nothing).
fn play(
    acts: &[Act],
    seed: u64,
    poll_every: usize,
) -> (Network<u32>, Vec<(LinkId, u32, Duration)>) {
    let mut network = Network::new(Seed(seed));
    let pipes = [pipe(2_000_000, 50), pipe(5_000_000, 50)].map(|model| network.add_pipe(model));
    let links = [vec![pipes[0]], vec![pipes[0], pipes[1]], vec![]];
    let links: Vec<LinkId> = links
        .into_iter()
        .enumerate()
        .map(|(index, pipes)| network.add_link(&index.to_string(), PathShape::delay(5.0), pipes))
        .collect();
    let (mut now, mut arrivals) = (Duration::ZERO, Vec::new());
    for (index, act) in acts.iter().enumerate() {
        match act {
            Act::Wait { us } => now += Duration::from_micros(*us),
            Act::Offer { link, bytes } => network.offer(now, links[*link], *bytes, index as u32),
            Act::Rate { pipe: id, rate_bps } => {
                network.set_pipe(now, pipes[*id], pipe(*rate_bps, 50))
            }
            Act::Shape { link, shape } => network.set_link(now, links[*link], *shape),
        }
        if index % poll_every == 0 {
            while let Some(delivery) = network.poll(now) {
                arrivals.push((delivery.link, delivery.payload, delivery.due));
            }
        }
    }
    for id in pipes {
        network.set_pipe(now, id, pipe(1_000_000, 50));
    }
    arrivals.extend(drain(&mut network));
    (network, arrivals)
}

proptest! {
    #[test]
    fn everything_offered_is_delivered_or_dropped_for_a_cause(acts in acts(), seed: u64) {
        let (network, arrivals) = play(&acts, seed, 1);
        let mut delivered = 0;
        for link in &network.links {
            prop_assert_eq!(link.counters.under_way(), Count::default());
            delivered += link.counters.delivered.packets;
        }
        prop_assert_eq!(delivered, arrivals.len() as u64);
        prop_assert_eq!(network.under_way_bytes, 0);
        prop_assert!(arrivals.iter().map(|arrival| arrival.2).is_sorted(), "deliveries come in the order of their times");
    }

    #[test]
    fn a_late_caller_sees_the_same_deliveries(acts in acts(), seed: u64) {
        prop_assert_eq!(play(&acts, seed, 1).1, play(&acts, seed, 37).1);
    }

    #[test]
    fn the_rate_holds_over_every_window_and_the_queue_bound_over_every_packet(
        offers in proptest::collection::vec((0_u64..4_000, 1_usize..1_500), 1..200),
        rate_bps in 100_000_u64..20_000_000,
        queue_ms in 0_u64..200,
    ) {
        let mut network = Network::new(Seed(1));
        let uplink = network.add_pipe(pipe(rate_bps, queue_ms));
        let link = network.add_link("a>b", PathShape::delay(10.0), vec![uplink]);
        let mut now = Duration::ZERO;
        let mut offered = Vec::new();
        for (index, (wait_us, bytes)) in offers.iter().enumerate() {
            now += Duration::from_micros(*wait_us);
            network.offer(now, link, *bytes, index as u32);
            offered.push((now, *bytes));
        }
        let mut arrivals = Vec::new();
        while let Some(due) = network.next_due() {
            while let Some(delivery) = network.poll(due) {
                arrivals.push((delivery.payload as usize, delivery.due));
            }
        }
        prop_assert!(arrivals.iter().map(|arrival| arrival.0).is_sorted(), "no jitter, no reordering");
        for (payload, due) in &arrivals {
            let (came, bytes) = offered[*payload];
            let service = Duration::from_nanos((bytes as u128 * 8_000_000_000).div_ceil(u128::from(rate_bps)) as u64);
            let wait = *due - came - ms(10) - service;
            prop_assert!(wait <= ms(queue_ms) + Duration::from_nanos(arrivals.len() as u64), "waited {wait:?}");
        }
        for (first, (_, from)) in arrivals.iter().enumerate() {
            let mut bits = 0_u128;
            for (payload, to) in &arrivals[first + 1..] {
                bits += offered[*payload].1 as u128 * 8;
                let allowed = u128::from(rate_bps) * (*to - *from).as_nanos();
                prop_assert!(bits * 1_000_000_000 <= allowed, "{bits} bits between {from:?} and {to:?}");
            }
        }
    }
}
