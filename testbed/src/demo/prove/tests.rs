use std::time::Duration;

use compass_shared::model::pipeline::PipelineConfiguration;

use super::super::view::for_this_terminal;
use super::choose::{is_hopeless, survey};
use super::compose::{HOP_MS, Layout, Place, WIRE, WORKER_MS, Way};
use super::*;

/// 100 bytes per ms up, without end elsewhere; two nodes, the second four times as fast, ten times as cheap and 10 ms away.
fn ground() -> Ground {
    let place = |name: &str, speed, core_price| Place {
        name: name.to_owned(),
        speed,
        millicores: 1_000,
        core_price,
    };
    let far = |pipe, rate| Way {
        pipes: vec![(pipe, rate)],
        delay_ms: 10.0,
        leaves_site: true,
    };
    Ground {
        places: vec![place("here", 0.25, 0.10), place("there", 1.0, 0.01)],
        entry: 0,
        ways: vec![
            Way::default(),
            far(0, 100.0),
            far(1, f64::INFINITY),
            Way::default(),
        ],
        camera: [Way::default(), Way::default()],
        pipes: 2,
        egress: 0.0,
        rate_hz: 10.0,
    }
}

/// A sampler that keeps every frame or every other, a detector of 10 ms with an output of 100 bytes.
fn candidate(every: usize, accuracy: Option<f64>) -> Candidate {
    Candidate {
        configuration: PipelineConfiguration::default(),
        kept: (0..20).map(|frame| frame % every == 0).collect(),
        bytes: vec![vec![1_000.0; 20], vec![100.0; 20]],
        cpu_ms: vec![vec![0.0], vec![10.0]],
        filters: 1,
        accuracy,
    }
}

fn input() -> Input {
    Input {
        bytes: vec![1_000.0; 20],
        lead_in: 0,
    }
}

fn slo(latency_ms: f64, accuracy_min: f64, cost_max_usd_per_h: f64) -> SloRecord {
    SloRecord {
        latency_percentile: 95.0,
        latency_ms,
        accuracy_min,
        cost_max_usd_per_h,
    }
}

fn near(value: f64, expected: f64) {
    assert!((value - expected).abs() < 0.01, "{value}, not {expected}");
}

#[test]
fn latency_is_hops_and_service_over_speed_and_share() {
    let at = |nodes: &[usize], shares: &[u32]| {
        let layout = Layout {
            nodes: nodes.to_vec(),
            shares: shares.to_vec(),
        };
        ground().latencies_ms(&candidate(2, None), &input().bytes, 0, &layout)
    };
    let here = at(&[0, 0], &[50, 500]);
    assert_eq!(here.len(), 10, "frames left out have no latency");
    let fixed = 2.0 * (HOP_MS + WORKER_MS);
    near(here[3], fixed + 10.0 / 0.25 / 0.5);
    // A frame of 1000 bytes up, an answer back on a way that is as wide as may be.
    let there = at(&[0, 1], &[50, 1_000]);
    near(
        there[3],
        fixed + 2.0 * HOP_MS + 10.0 * WIRE + 10.0 + 10.0 + 10.0,
    );
}

#[test]
fn frames_wait_for_each_other() {
    let slow = Layout {
        nodes: vec![0, 0],
        shares: vec![50, 200],
    };
    // 200 ms each, one every 100 ms.
    let latencies = ground().latencies_ms(&candidate(1, None), &input().bytes, 0, &slow);
    near(latencies[1] - latencies[0], 100.0);
    near(latencies[19] - latencies[0], 1_900.0);
}

#[test]
fn the_cheapest_plan_is_where_the_work_costs_least_within_the_bound() {
    let candidates = [candidate(2, Some(0.9)), candidate(1, Some(0.95))];
    let all = |slo: &SloRecord| survey(&ground(), &candidates, &input(), slo).unwrap();
    let easy = all(&slo(300.0, 0.8, 1.0));
    assert_eq!((easy.plans, easy.compliant), (8, 8));
    assert_eq!(easy.best_accuracy, Some(0.95));
    let best = easy.cheapest.unwrap();
    assert_eq!((best.candidate, best.layout.nodes), (0, vec![1, 1]));
    // The sampler sends half the frames on: it is worth its price on the dear node only where the link asks for it.
    let mut thin = ground();
    thin.ways[1].pipes[0].1 = 7.0;
    let thin = survey(&thin, &candidates, &input(), &slo(300.0, 0.8, 1.0)).unwrap();
    let best = thin.cheapest.unwrap();
    assert_eq!((best.candidate, best.layout.nodes), (0, vec![0, 1]));
    // Only the second candidate is accurate enough.
    let strict = all(&slo(300.0, 0.93, 1.0));
    assert_eq!(strict.compliant, 4);
    assert_eq!(strict.cheapest.unwrap().candidate, 1);
}

#[test]
fn the_nearest_miss_is_told_where_nothing_meets_all() {
    let tally = |slo: &SloRecord| {
        let candidates = [candidate(2, Some(0.9)), candidate(1, Some(0.95))];
        let tally = survey(&ground(), &candidates, &input(), slo).unwrap();
        assert_eq!(tally.compliant, 0);
        tally.nearest.unwrap()
    };
    let accuracy = tally(&slo(300.0, 0.99, 1.0));
    assert_eq!(accuracy.candidate, 1);
    near(
        accuracy.figures.shortfall(&slo(300.0, 0.99, 1.0)),
        0.04 / 0.99,
    );
    let latency = tally(&slo(20.0, 0.8, 1.0));
    assert!(latency.figures.latency_ms > 20.0);
    let cost = tally(&slo(300.0, 0.8, 1e-4));
    assert!(cost.figures.cost_usd_per_h > 1e-4);
    assert_eq!(cost.layout.nodes, [1, 1]);
}

#[test]
fn what_no_node_keeps_up_with_is_not_looked_at() {
    let mut heavy = candidate(1, None);
    heavy.cpu_ms[1] = vec![120.0];
    let bounds = slo(300.0, 0.8, 1.0);
    assert!(is_hopeless(&ground(), &heavy, &bounds));
    heavy.kept = candidate(2, None).kept;
    assert!(!is_hopeless(&ground(), &heavy, &bounds));
}

/// The demo's world, cut down: one second of each phase, two rates, one picture size, two networks.
fn tiny() -> Scenario {
    let mut scenario = Scenario::new().unwrap();
    scenario.proved = Duration::from_secs(1);
    for operator in &mut scenario.query.pipeline.operators {
        for knob in &mut operator.knobs {
            let last = knob.values.len() - 1;
            let from = match knob.name.as_str() {
                "rate" => 1,
                "model" => 0,
                _ => last,
            };
            let to = if knob.name.as_str() == "model" {
                1
            } else {
                last
            };
            knob.values = knob.values[from..=to].to_vec();
        }
    }
    scenario
}

#[test]
fn a_small_world_is_proved_or_not_by_its_slos() {
    let mut view = for_this_terminal(true);
    let mut scenario = tiny();
    scenario.slo = slo(2_000.0, 0.05, 10.0);
    let proof = prove(&scenario, 1, view.as_mut()).unwrap();
    assert!(proof.proved);
    let counts: Vec<_> = proof
        .phases
        .iter()
        .map(|phase| (phase.configurations, phase.placements, phase.plans))
        .collect();
    assert_eq!(counts, [(4, 1_024, 4_096); 3]);
    for phase in &proof.phases {
        let best = phase.cheapest.as_ref().unwrap();
        assert!(best.misses.is_empty());
        assert!(best.latency_ms.unwrap() <= 2_000.0);
        assert!(best.accuracy.unwrap() >= 0.05);
        assert!(phase.compliant_with_room <= phase.compliant);
    }
    let text = table::text(&proof);
    assert!(text.contains("PROVED  every phase"), "{text}");

    scenario.slo.accuracy_min = 1.01;
    let proof = prove(&scenario, 1, view.as_mut()).unwrap();
    assert!(!proof.proved);
    let miss = proof.phases[0].nearest_miss.as_ref().unwrap();
    assert_eq!(miss.misses, ["accuracy"]);
    let text = table::text(&proof);
    assert!(text.contains("NOT PROVED"), "{text}");
}
