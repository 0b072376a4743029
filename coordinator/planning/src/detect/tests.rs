use std::time::Duration;

use compass_shared::model::outcome::{AppReport, OutcomeCounts};
use compass_shared::model::query::{LatencySlo, Slo};
use compass_shared::model::trigger::{LinkQuantity, Measurement, SloKind};
use compass_shared::time::Moment;
use compass_shared::units::Bandwidth;

use super::*;

fn at(ms: u64) -> Moment {
    Moment(ms * 1000)
}

fn settings() -> DetectSettings {
    DetectSettings::default()
}

// ---- liveness ----

/// When a node last heard of at 10 s counts as lost, in ms after that, looked at every 50 ms.
fn lost_after(prepare: impl Fn(&mut Liveness, u64)) -> Option<u64> {
    let mut node = Liveness::new(at(10_000));
    (0..400).map(|i| i * 50).find(|ms| {
        prepare(&mut node, *ms);
        node.tick(at(10_000 + ms), &settings()) == Some(LivenessVerdict::Lost)
    })
}

#[test]
fn a_silent_node_is_lost_within_two_and_a_half_seconds() {
    let alone = lost_after(|_, _| {}).unwrap();
    assert!((2000..=2500).contains(&alone), "{alone}");
}

#[test]
fn a_neighbours_word_makes_it_faster_but_never_faster_than_two_reports() {
    let confirmed = lost_after(|node, ms| {
        if ms == 300 {
            node.unreachable(at(10_300));
        }
    })
    .unwrap();
    assert!((1100..2000).contains(&confirmed), "{confirmed}");
    let ended = lost_after(|node, ms| {
        if ms == 0 {
            node.down();
        }
    })
    .unwrap();
    assert_eq!(ended, confirmed);
}

#[test]
fn a_node_that_neighbours_still_receive_from_is_not_lost_for_want_of_reports() {
    let seen = lost_after(|node, ms| {
        if ms % 1000 == 0 {
            node.seen(at(10_000 + ms));
        }
    })
    .unwrap();
    assert!(seen >= 10_000, "{seen}");
}

#[test]
fn whoever_reports_every_second_is_never_lost_and_a_lost_one_comes_back_once() {
    let mut node = Liveness::new(at(0));
    for ms in (0..60_000).step_by(50) {
        if ms % 1000 == 0 {
            assert_eq!(node.heard(at(ms)), None);
            node.unreachable(at(ms + 1));
        }
        assert_eq!(node.tick(at(ms), &settings()), None, "{ms}");
    }
    assert_eq!(
        node.tick(at(70_000), &settings()),
        Some(LivenessVerdict::Lost)
    );
    assert_eq!(node.tick(at(71_000), &settings()), None, "said once");
    assert!(node.is_lost());
    assert_eq!(node.heard(at(72_000)), Some(LivenessVerdict::Back));
    assert_eq!(node.heard(at(72_001)), None);
}

// ---- links ----

fn link_at(mbit_s: f64) -> LinkWatch {
    let mut link = LinkWatch::new(at(0));
    link.path(at(0), Some(20.0), 0.0, &settings());
    link.rate(at(0), mbit_s * 1e6, true, &settings());
    link
}

fn rate(link: &LinkWatch) -> f64 {
    link.link().unwrap().bandwidth.mbit_s()
}

#[test]
fn a_rate_counts_as_capacity_only_while_the_sender_was_limited_by_the_network() {
    let mut link = LinkWatch::new(at(0));
    assert_eq!(link.link(), None, "nobody has answered yet");
    assert_eq!(
        link.path(at(0), Some(20.0), 0.0, &settings()),
        Some(LinkVerdict::News)
    );
    link.rate(at(1000), 2e6, false, &settings());
    assert!(link.link().unwrap().lower_bound);
    link.rate(at(2000), 1e6, false, &settings());
    assert!(
        (rate(&link) - 2.0).abs() < 1e-9,
        "less use is not less capacity"
    );
    link.rate(at(3000), 8e6, true, &settings());
    assert!(!link.link().unwrap().lower_bound);
    assert!((rate(&link) - 8.0).abs() < 1e-9);
    link.rate(at(4000), 9e6, false, &settings());
    assert!(
        !link.link().unwrap().lower_bound,
        "a capacity once measured stays one"
    );
}

fn measured(value: f64, bound: f64) -> Measurement {
    Measurement {
        value,
        bound,
        window_ms: 300,
    }
}

fn is_verdict(verdict: &Option<LinkVerdict>) -> bool {
    matches!(
        verdict,
        Some(LinkVerdict::Degraded(..) | LinkVerdict::Recovered(_))
    )
}

#[test]
fn a_drop_is_raised_once_with_its_measurement_and_a_return_is_too() {
    let mut link = link_at(20.0);
    let verdict = link.event(at(1000), true, measured(1.0, 20.0), &settings());
    let Some(LinkVerdict::Degraded(LinkQuantity::Rate, measurement)) = verdict else {
        panic!("{verdict:?}");
    };
    assert!((measurement.value - 1.0).abs() < 1e-9 && (measurement.bound - 20.0).abs() < 1e-9);
    for i in 0..20 {
        let hovering = if i % 2 == 0 { 0.5e6 } else { 2.5e6 };
        let verdict = link.report(at(2000 + i * 1000), hovering, true, true, &settings());
        assert!(!is_verdict(&verdict), "{i}: {verdict:?}");
    }
    assert!(matches!(
        link.event(at(30_000), false, measured(19.0, 1.0), &settings()),
        Some(LinkVerdict::Recovered(_))
    ));
}

#[test]
fn a_report_that_was_under_way_with_the_event_does_not_undo_it() {
    let mut link = link_at(20.0);
    link.event(at(1000), true, measured(1.0, 20.0), &settings());
    assert_eq!(link.report(at(1030), 18e6, true, false, &settings()), None);
    assert!((rate(&link) - 1.0).abs() < 1e-9);
    // Said again, the event that it has recovered must have been lost.
    let mut verdicts: Vec<_> = (2..10)
        .map(|s| link.report(at(s * 1000), 18e6, true, false, &settings()))
        .collect();
    verdicts.retain(is_verdict);
    assert!(
        matches!(verdicts[..], [Some(LinkVerdict::Recovered(_))]),
        "{verdicts:?}"
    );
}

#[test]
fn without_an_event_reports_have_to_agree() {
    let mut link = link_at(20.0);
    let report = |link: &mut LinkWatch, s: u64, mbit_s: f64| {
        link.report(at(s * 1000), mbit_s * 1e6, true, false, &settings())
    };
    assert!(!is_verdict(&report(&mut link, 1, 2.0)));
    assert!(!is_verdict(&report(&mut link, 2, 20.0)));
    let first = (3..20).find(|s| is_verdict(&report(&mut link, *s, 2.0)));
    assert!(first.is_some_and(|s| (5..=8).contains(&s)), "{first:?}");
}

#[test]
fn a_slow_decline_is_noticed_when_it_has_become_as_large_as_a_drop() {
    let mut link = link_at(20.0);
    let raised: Vec<u64> = (1..=60)
        .filter(|i| {
            let value = 20e6 - 0.3e6 * *i as f64;
            matches!(
                link.rate(at(i * 1000), value, true, &settings()),
                Some(LinkVerdict::Degraded(..))
            )
        })
        .collect();
    assert!(!raised.is_empty());
    assert!((20..=40).contains(&raised[0]), "{raised:?}");
}

#[test]
fn a_longer_round_trip_is_a_degraded_link_and_jitter_is_not() {
    let mut link = link_at(20.0);
    assert_eq!(link.path(at(1000), Some(35.0), 0.0, &settings()), None);
    assert!(matches!(
        link.path(at(2000), Some(90.0), 0.0, &settings()),
        Some(LinkVerdict::Degraded(..))
    ));
    assert_eq!(
        link.path(at(3000), Some(f64::NAN), f64::NAN, &settings()),
        None
    );
    assert!(link.link().unwrap().rtt_ms.is_finite());
}

#[test]
fn a_suspected_link_falls_silently_and_rises_when_cleared_or_measured() {
    let mut link = link_at(20.0);
    link.suspect(at(1000), 0.05, Bandwidth::from_mbit_s(1.0));
    assert!((rate(&link) - 1.0).abs() < 1e-6);
    link.suspect(at(1100), 0.05, Bandwidth::from_mbit_s(1.0));
    assert!((rate(&link) - 1.0).abs() < 1e-6, "suspected once");
    link.clear(at(2000));
    assert!((rate(&link) - 20.0).abs() < 1e-6);
    link.suspect(at(3000), 0.05, Bandwidth::from_mbit_s(1.0));
    link.rate(at(4000), 18e6, true, &settings());
    link.clear(at(5000));
    assert!(
        rate(&link) > 10.0 && rate(&link) < 20.0,
        "measured since: {}",
        rate(&link)
    );
}

#[test]
fn nonsense_leaves_a_link_alone() {
    let mut link = link_at(20.0);
    for bps in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
        assert_eq!(link.rate(at(1000), bps, true, &settings()), None);
    }
    let nothing = Measurement {
        value: f64::NAN,
        bound: 1.0,
        window_ms: 0,
    };
    assert_eq!(link.event(at(1000), true, nothing, &settings()), None);
    assert!((rate(&link) - 20.0).abs() < 1e-9);
}

// ---- load ----

#[test]
fn field_059_no_traffic_is_a_fact_and_no_telemetry_is_none() {
    let mut load = LoadWatch::new(10.0, &settings());
    for s in 0..300 {
        assert_eq!(load.report(at(s * 1000), 10.0, &settings()), None);
        assert_eq!(load.tick(at(s * 1000 + 500), &settings()), None);
    }
    let shifted: Vec<_> = (300..400)
        .filter_map(|s| load.report(at(s * 1000), 0.0, &settings()))
        .collect();
    assert_eq!(shifted.len(), 1);
    assert!(matches!(shifted[0], LoadVerdict::Shifted(m) if m.value == 0.0 && m.bound == 10.0));
    let mut silent = LoadWatch::new(10.0, &settings());
    silent.report(at(0), 10.0, &settings());
    let verdicts: Vec<_> = (0..100)
        .filter_map(|s| silent.tick(at(s * 1000), &settings()))
        .collect();
    assert_eq!(verdicts, [LoadVerdict::Unknown], "held, and said once");
    assert_eq!(
        silent.report(at(200_000), 10.0, &settings()),
        Some(LoadVerdict::Known)
    );
}

#[test]
fn field_063_load_at_the_edge_of_noise_shifts_nothing() {
    let mut load = LoadWatch::new(6.0, &settings());
    let noise = |i: u64| 6.0 + 0.2 * ((i * 7 % 5) as f64 - 2.0) / 2.0;
    let shifts = (0..100)
        .filter(|i| load.report(at(i * 1000), noise(*i), &settings()).is_some())
        .count();
    assert_eq!(shifts, 0);
}

#[test]
fn a_source_that_has_not_begun_has_not_stopped() {
    let mut load = LoadWatch::new(10.0, &settings());
    assert!((0..60).all(|s| load.report(at(s * 1000), 0.0, &settings()).is_none()));
    assert!((60..70).all(|s| load.report(at(s * 1000), 10.0, &settings()).is_none()));
}

#[test]
fn a_lasting_rise_and_its_return_are_two_shifts() {
    let mut load = LoadWatch::new(10.0, &settings());
    load.report(at(0), 10.0, &settings());
    let shifts = |load: &mut LoadWatch, from: u64, hz: f64| {
        (from..from + 20)
            .filter(|s| load.report(at(s * 1000), hz, &settings()).is_some())
            .count()
    };
    assert_eq!(shifts(&mut load, 1, 20.0), 1);
    assert_eq!(shifts(&mut load, 30, 10.0), 1);
}

// ---- SLOs ----

fn slo() -> Slo {
    Slo {
        latency: Some(LatencySlo {
            percentile: 95.0,
            bound: Duration::from_millis(300),
        }),
        accuracy_min: Some(0.7),
        cost_max: None,
    }
}

fn window(latency: f32, accuracy: f32, expired: u64) -> AppReport {
    AppReport {
        generation: None,
        window_ms: 1000,
        counts: OutcomeCounts {
            expired,
            ..OutcomeCounts::default()
        },
        latencies_ms: if latency > 0.0 {
            vec![latency; 5]
        } else {
            vec![]
        },
        accuracies: if accuracy > 0.0 {
            vec![accuracy; 5]
        } else {
            vec![]
        },
    }
}

#[test]
fn a_spike_breaks_nothing_and_a_lasting_breach_is_raised_once_for_a_while() {
    let mut watch = SloWatch::new(slo(), &settings());
    let mut raised = Vec::new();
    for s in 0..40_u64 {
        let latency = if (20..35).contains(&s) || s == 5 {
            500.0
        } else {
            200.0
        };
        if let Some((kind, measurement)) =
            watch.report(at(s * 1000), &window(latency, 0.8, 0), &settings())
        {
            assert_eq!(kind, SloKind::Latency);
            assert!(measurement.value > 300.0);
            raised.push(s);
        }
    }
    // The percentile looks back over three windows, so the one spike fills three of them: that is as much as a breach may take.
    assert!(
        raised.iter().filter(|s| **s >= 20).count() == 1,
        "{raised:?}"
    );
    assert!(raised.len() <= 2, "{raised:?}");
}

#[test]
fn frames_that_never_came_back_count_as_late() {
    let mut watch = SloWatch::new(slo(), &settings());
    let raised: Vec<_> = (0..10)
        .filter_map(|s| watch.report(at(s * 1000), &window(0.0, 0.0, 10), &settings()))
        .collect();
    assert_eq!(raised.len(), 1);
}

#[test]
fn a_few_hard_seconds_break_no_accuracy_slo_and_a_lasting_shortfall_does() {
    let mut watch = SloWatch::new(slo(), &settings());
    let floor = slo().accuracy_min.unwrap();
    let raised_at = |watch: &mut SloWatch, from: u64, accuracy: &dyn Fn(u64) -> f64| {
        (from..from + 40).find(|s| {
            let window = window(100.0, accuracy(*s) as f32, 0);
            watch.report(at(s * 1000), &window, &settings()).is_some()
        })
    };
    // What passes by is hard to see for four seconds in eight.
    let varied = |s: u64| floor + if s % 8 < 4 { -0.1 } else { 0.2 };
    assert_eq!(raised_at(&mut watch, 0, &varied), None);
    let short = |s: u64| floor - 0.03 + if s.is_multiple_of(2) { 0.06 } else { -0.06 };
    let raised = raised_at(&mut watch, 40, &short);
    assert!(raised.is_some_and(|s| s <= 52), "{raised:?}");
}

#[test]
fn accuracy_is_raised_apart_and_nothing_is_judged_right_after_a_switch() {
    let mut watch = SloWatch::new(slo(), &settings());
    watch.switched(at(0), &settings());
    let raised: Vec<_> = (0..10)
        .filter_map(|s| {
            let verdict = watch.report(at(s * 1000), &window(100.0, 0.5, 0), &settings())?;
            Some((s, verdict.0))
        })
        .collect();
    assert_eq!(raised, [(5, SloKind::Accuracy)]);
}
