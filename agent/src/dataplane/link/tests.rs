use proptest::prelude::*;

use super::*;

/// A link emulated in virtual time: frames queue, travel at a rate, and are acknowledged a round trip later.
struct Emulated {
    estimator: LinkEstimator,
    now: Moment,
    rate: f64,
    rtt: Duration,
    free_at: Moment,
    arriving: Vec<(Moment, u64, u64)>,
    counters: Counters,
    next: u64,
    changes: Vec<(Moment, LinkChange)>,
    probing: Option<(Moment, Duration)>,
    /// Bytes that the node's other links deliver per slice.
    beside: u64,
}

impl Emulated {
    fn new(rate_mbit: f64, rtt_ms: u64) -> Self {
        let now = Moment(1_000_000);
        let mut estimator = LinkEstimator::new(LinkPolicy::default(), now);
        estimator.pong(now, Duration::from_millis(rtt_ms));
        Self {
            estimator,
            now,
            rate: rate_mbit * 1e6,
            rtt: Duration::from_millis(rtt_ms),
            free_at: now,
            arriving: vec![],
            counters: Counters::default(),
            next: 0,
            changes: vec![],
            probing: None,
            beside: 0,
        }
    }

    fn transmit(&mut self, bytes: u64) -> Moment {
        let start = self.free_at.max(self.now);
        self.free_at = start + usual_time(bytes, self.rate);
        self.free_at + self.rtt
    }

    /// Runs for a while with frames of a size at a rate; `stall` holds everything the host does back.
    fn run(&mut self, duration_ms: u64, frames_per_s: u64, bytes: u64) {
        let end = self.now + Duration::from_millis(duration_ms);
        let mut since_frame = 0;
        let mut since_slice = 0;
        while self.now < end {
            self.now = self.now + Duration::from_millis(1);
            since_frame += 1;
            since_slice += 1;
            if frames_per_s > 0 && since_frame * frames_per_s >= 1_000 {
                since_frame = 0;
                // The window holds frames back as the core does.
                let under_way: u64 = self.arriving.iter().map(|(_, _, b)| b).sum();
                if under_way < self.estimator.window().max(1) {
                    self.next += 1;
                    let when = self.transmit(bytes);
                    self.arriving.push((when, self.next, bytes));
                    self.estimator.sent(self.now, self.next, bytes);
                }
            }
            let now = self.now;
            for (_, id, bytes) in self.arriving.extract_if(.., |(when, ..)| *when <= now) {
                self.counters.delivered_bytes += bytes;
                self.estimator.received(now, id);
            }
            if let Some((when, spread)) = self.probing
                && when <= now
            {
                self.probing = None;
                let change = self.estimator.probe_report(now, spread);
                self.changes.extend(change.map(|c| (now, c)));
            }
            if since_slice >= 100 {
                since_slice = 0;
                if let Some(bytes) = self.estimator.wants_probe(now, None) {
                    let when = self.transmit(bytes);
                    self.probing = Some((when, usual_time(bytes, self.rate)));
                }
                let change = self.estimator.slice(now, self.acknowledged(), self.beside);
                self.changes.extend(change.map(|c| (now, c)));
            }
        }
    }

    /// Packets are acknowledged one by one, also those of frames that have not arrived whole.
    fn acknowledged(&self) -> Counters {
        let part = |(end, _, bytes): &(Moment, u64, u64)| {
            let left = end.since(self.now).as_secs_f64() * self.rate / 8.0;
            bytes.saturating_sub(left as u64)
        };
        let parts: u64 = self.arriving.iter().map(part).sum();
        Counters {
            delivered_bytes: self.counters.delivered_bytes + parts,
            ..self.counters
        }
    }

    fn degraded_after(&self, since: Moment) -> Option<Duration> {
        self.changes
            .iter()
            .find(|(_, change)| matches!(change, LinkChange::Degraded(_)))
            .map(|(at, _)| at.since(since))
    }
}

#[test]
fn a_link_cut_to_a_twentieth_is_noticed_within_a_second() {
    for (frames_per_s, bytes) in [
        (5, 12_000),
        (5, 25_000),
        (10, 10_000),
        (10, 20_000),
        (20, 8_000),
    ] {
        let mut link = Emulated::new(20.0, 30);
        link.run(5_000, frames_per_s, bytes);
        assert_eq!(link.changes, vec![]);
        link.rate /= 20.0;
        let cut = link.now;
        link.run(1_200, frames_per_s, bytes);
        let noticed = link.degraded_after(cut);
        assert!(
            noticed.is_some_and(|t| t <= Duration::from_millis(1_100)),
            "{frames_per_s}/s of {bytes}: {noticed:?}"
        );
        let LinkChange::Degraded(m) = link.changes[0].1 else {
            panic!("{:?}", link.changes)
        };
        assert!(m.value < 4.0 && m.bound > 10.0, "{m:?}");
        assert!(link.estimator.measured(link.now).1);
        link.run(2_000, frames_per_s, bytes);
        let rate = link.estimator.rate().unwrap() / 1e6;
        assert!((0.5..2.0).contains(&rate), "{rate} Mbit/s");
    }
}

#[test]
fn a_stall_of_the_host_is_not_a_bad_link() {
    let mut link = Emulated::new(20.0, 30);
    link.run(3_000, 10, 20_000);
    for _ in 0..10 {
        // For a quarter of a second nothing is read or acknowledged.
        link.free_at = link.now + Duration::from_millis(250);
        link.run(1_000, 10, 20_000);
    }
    assert_eq!(link.changes, vec![]);
}

#[test]
fn a_degraded_link_without_traffic_is_found_recovered_by_probes() {
    let mut link = Emulated::new(20.0, 30);
    link.run(3_000, 10, 20_000);
    link.rate /= 20.0;
    link.run(1_500, 10, 20_000);
    assert_eq!(link.changes.len(), 1);
    link.run(8_000, 0, 0);
    assert_eq!(link.changes.len(), 1, "still bad: {:?}", link.changes);
    link.rate *= 20.0;
    let back = link.now;
    link.run(8_000, 0, 0);
    let Some((at, LinkChange::Recovered(m))) = link.changes.last() else {
        panic!("{:?}", link.changes)
    };
    assert!(at.since(back) <= Duration::from_secs(5));
    assert!(m.value > m.bound * 5.0, "{m:?}");
    assert!(!link.estimator.is_degraded());
}

#[test]
fn a_degraded_link_in_use_is_found_recovered_by_its_frames() {
    let mut link = Emulated::new(20.0, 30);
    link.run(3_000, 5, 20_000);
    link.rate /= 20.0;
    link.run(1_500, 5, 20_000);
    link.rate *= 20.0;
    link.run(2_500, 5, 20_000);
    let names: Vec<_> = link
        .changes
        .iter()
        .map(|(_, change)| matches!(change, LinkChange::Recovered(_)))
        .collect();
    assert_eq!(names, [false, true], "{:?}", link.changes);
}

#[test]
fn an_unused_link_that_becomes_bad_is_found_by_probes() {
    let mut link = Emulated::new(20.0, 30);
    link.run(2_000, 0, 0);
    assert!(link.estimator.rate().is_some(), "probed at first contact");
    link.rate /= 20.0;
    link.run(60_000, 0, 0);
    assert!(
        matches!(link.changes[..], [(_, LinkChange::Degraded(_))]),
        "{:?}",
        link.changes
    );
}

#[test]
fn what_another_link_takes_of_a_shared_way_is_no_degradation() {
    for (beside, expected) in [(45_000, false), (0, true)] {
        let mut link = Emulated::new(4.0, 30);
        link.run(5_000, 5, 12_000);
        assert_eq!(link.changes, vec![]);
        // Samples go to another node over the same uplink: a twentieth of it is left.
        link.rate /= 20.0;
        link.beside = beside;
        link.run(2_000, 5, 12_000);
        let is_degraded = matches!(link.changes[..], [(_, LinkChange::Degraded(_)), ..]);
        assert_eq!(is_degraded, expected, "{:?}", link.changes);
    }
}

#[test]
fn silence_is_no_slow_link() {
    let mut link = Emulated::new(4.0, 30);
    link.run(5_000, 5, 12_000);
    // Nothing gets through any more.
    link.rate = 1e-3;
    link.run(3_000, 5, 12_000);
    assert_eq!(link.changes, vec![]);
}

#[test]
fn trains_are_short_while_another_link_is_narrow_and_the_slow_one_is_confirmed_briefly() {
    let policy = LinkPolicy::default();
    let now = Moment(1_000_000);
    let mut link = LinkEstimator::new(policy, now);
    link.pong(now, Duration::from_millis(30));
    let mut at = now;
    let mut probe = |link: &mut LinkEstimator, others, rate: f64| {
        loop {
            at = at + Duration::from_millis(100);
            if let Some(bytes) = link.wants_probe(at, others) {
                assert!(link.has_probe_out(at));
                at = at + usual_time(bytes, rate);
                link.probe_report(at, usual_time(bytes, rate));
                return bytes;
            }
        }
    };
    for _ in 0..policy.probes_first {
        assert_eq!(probe(&mut link, None, 20e6), policy.probe_first_bytes);
    }
    assert_eq!(probe(&mut link, None, 20e6), policy.probe_bytes);
    assert!(probe(&mut link, Some(0.2e6), 20e6) < 4_000);
    assert_eq!(
        probe(&mut link, None, 0.2e6),
        policy.probe_bytes,
        "it was fine"
    );
    assert!(probe(&mut link, None, 0.2e6) < 4_000, "to confirm");
    assert!(link.is_degraded());
}

#[test]
fn first_contact_gives_an_estimate_of_the_rate() {
    let mut link = Emulated::new(8.0, 20);
    link.run(2_000, 0, 0);
    let rate = link.estimator.rate().unwrap() / 1e6;
    assert!((6.0..9.0).contains(&rate), "{rate}");
}

#[test]
fn a_neighbour_is_unreachable_after_two_silent_pings() {
    let start = Moment(10_000_000);
    let mut liveness = Liveness::new(start);
    let mut datagrams = 1;
    let mut now = start;
    let mut silent_since = None;
    for step in 0..200 {
        now = now + Duration::from_millis(100);
        if step < 50 {
            datagrams += 1;
        } else {
            silent_since.get_or_insert(now);
        }
        match liveness.step(now, datagrams, true, Some(Duration::from_millis(20))) {
            LivenessStep::Unreachable => {
                let after = now.since(silent_since.expect("not while it was heard"));
                assert!(after <= Duration::from_millis(1_100), "{after:?}");
                return;
            }
            LivenessStep::Ping(_) | LivenessStep::Wait => {}
        }
    }
    panic!("never noticed");
}

#[test]
fn a_slow_neighbour_is_given_two_round_trips() {
    let mut liveness = Liveness::new(Moment(10_000_000));
    let rtt = Some(Duration::from_millis(900));
    let mut pings = 0;
    for step in 1..=18_u64 {
        let now = Moment(10_000_000) + Duration::from_millis(step * 100);
        match liveness.step(now, 1, true, rtt) {
            LivenessStep::Ping(_) => pings += 1,
            LivenessStep::Unreachable => panic!("after {step} slices"),
            LivenessStep::Wait => {}
        }
    }
    assert_eq!(pings, 1);
}

proptest! {
    /// Whatever a steady link is asked to carry, it does not count as degraded.
    #[test]
    fn a_steady_link_is_never_degraded(
        rate in 1.0_f64..200.0,
        rtt in 0_u64..120,
        frames_per_s in 1_u64..40,
        bytes in 500_u64..60_000,
    ) {
        let mut link = Emulated::new(rate, rtt);
        link.run(10_000, frames_per_s, bytes);
        prop_assert!(link.changes.is_empty(), "{:?}", link.changes);
    }
}
