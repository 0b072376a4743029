//! A made-up run for tests of the report, from a seed: the story as it should go.

use std::collections::BTreeMap;

use compass_shared::model::outcome::Outcome;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::super::record::{
    CheckRecord, EventRecord, FrameCounts, HostRecord, NodeRecord, PhaseRecord, PlanOperator,
    PlanRecord, Point, Quantiles, ReplanRecord, RunRecord, SloRecord, TrialRecord,
};

/// First captured frame that counts, the uplink's cut, lights out, end; in ms.
const TIMES: [f64; 4] = [18_000.0, 40_000.0, 64_000.0, 88_000.0];
/// From the events to the first answers by the new plans.
const RECOVERIES: [f64; 2] = [1_420.0, 2_310.0];

fn operator(name: &str, node: &str, knobs: &[(&str, &str)], cpu_millicores: u32) -> PlanOperator {
    PlanOperator {
        operator: name.to_owned(),
        node: node.to_owned(),
        configuration: knobs
            .iter()
            .map(|(knob, value)| ((*knob).to_owned(), (*value).to_owned()))
            .collect::<BTreeMap<_, _>>(),
        cpu_millicores,
    }
}

fn plan(
    generation: u64,
    trigger: &str,
    detector: (&str, &str),
    resolution: &str,
    (latency, f1): (f64, f64),
    applied_ms: f64,
) -> PlanRecord {
    let (node, model) = detector;
    PlanRecord {
        generation,
        summary: format!(
            "sampler{{rate=10}}@edge-1 prepare@edge-1 detector{{model={model}}}@{node}"
        ),
        status: "certified".to_owned(),
        trigger: trigger.to_owned(),
        applied_ms: Some(applied_ms),
        operators: vec![
            operator("sampler", "edge-1", &[("rate", "10")], 40),
            operator(
                "prepare",
                "edge-1",
                &[("quality", "80"), ("resolution", resolution)],
                260,
            ),
            operator("detector", node, &[("model", model)], 420),
            operator("tracker", node, &[], 30),
            operator("responder", "edge-1", &[], 20),
        ],
        expected_latency_ms: latency,
        expected_accuracy: f1,
        cost_per_h: 0.02 + 0.01 * generation as f64,
    }
}

fn points(
    seed: u64,
    mut frame_at: impl FnMut(&mut StdRng, f64) -> (Outcome, f64, f64, u64),
) -> Vec<Point> {
    let mut random = StdRng::seed_from_u64(seed);
    let count = ((TIMES[3] - TIMES[0]) / 100.0) as u64;
    (0..count)
        .map(|index| {
            let at_ms = TIMES[0] + 100.0 * index as f64;
            let (outcome, latency, accuracy, generation) = frame_at(&mut random, at_ms);
            let has_result = matches!(outcome, Outcome::Answered | Outcome::Late);
            Point {
                frame: 180 + index,
                at_ms,
                latency_ms: has_result.then_some(latency),
                outcome,
                generation: has_result.then_some(generation),
                accuracy: Some(accuracy),
            }
        })
        .collect()
}

fn story(random: &mut StdRng, at_ms: f64) -> (Outcome, f64, f64, u64) {
    let noise = random.random_range(-1.0..1.0) + random.random_range(-1.0..1.0);
    let f1 = |mean: f64| (mean + 0.09 * noise).clamp(0.0, 1.0);
    let (cut, dark) = (TIMES[1], TIMES[2]);
    if (cut..cut + RECOVERIES[0] - 600.0).contains(&at_ms) {
        let latency = 150.0 + (at_ms - cut) * 0.9;
        let outcome = if latency < 300.0 {
            Outcome::Answered
        } else if random.random_bool(0.3) {
            Outcome::Expired
        } else {
            Outcome::Late
        };
        return (outcome, latency, f1(0.7), 1);
    }
    let switched = (dark..dark + RECOVERIES[1]).contains(&at_ms);
    let (latency, accuracy, generation) = match at_ms {
        at if at < cut => (130.0, 0.86, 1),
        at if at < dark => (210.0, 0.83, 2),
        _ if switched => (205.0, 0.41, 2),
        _ => (240.0, 0.8, 3),
    };
    (
        Outcome::Answered,
        latency + 22.0 * noise,
        f1(accuracy),
        generation,
    )
}

fn left_alone(random: &mut StdRng, at_ms: f64) -> (Outcome, f64, f64, u64) {
    let noise = random.random_range(-1.0..1.0);
    match at_ms {
        at if at < TIMES[1] => (Outcome::Answered, 130.0 + 30.0 * noise, 0.86, 1),
        _ if random.random_bool(0.7) => (Outcome::Expired, 0.0, 0.2, 1),
        _ => (Outcome::Late, 900.0 + 200.0 * noise, 0.3 + 0.1 * noise, 1),
    }
}

fn phase(index: usize, name: &str, f1: (f64, f64), fixed: (f64, f64)) -> PhaseRecord {
    PhaseRecord {
        name: name.to_owned(),
        from_ms: TIMES[index],
        to_ms: TIMES[index + 1],
        slo_attainment: 0.99,
        whole_attainment: 0.95,
        latency_ms: Quantiles {
            p50: 150.0,
            p95: 214.0,
            p99: 251.0,
        },
        accuracy_true: f1.0,
        accuracy_believed: f1.1,
        cost_per_h: 0.03 + 0.01 * index as f64,
        static_attainment: Some(fixed.0),
        static_accuracy: Some(fixed.1),
        met: true,
    }
}

fn replan(index: usize, trigger: &str, reason: &str, changed: &[&str]) -> ReplanRecord {
    let event = TIMES[index + 1];
    let applied = event + RECOVERIES[index];
    ReplanRecord {
        generation: index as u64 + 2,
        trigger: trigger.to_owned(),
        reason: reason.to_owned(),
        event_ms: Some(event),
        detected_ms: Some(event + 0.44 * RECOVERIES[index]),
        planned_ms: Some(event + 0.47 * RECOVERIES[index]),
        applied_ms: Some(applied),
        changed: changed.iter().map(|change| (*change).to_owned()).collect(),
    }
}

fn node(name: &str, tier: Option<&str>, device: Option<&str>, cpu_s: f64, sent: u64) -> NodeRecord {
    NodeRecord {
        name: name.to_owned(),
        tier: tier.map(str::to_owned),
        device: device.map(str::to_owned),
        cpu_s,
        rss_mib: 19.0,
        relay_sent_bytes: sent,
        own_sent_bytes: tier.map(|_| sent + sent / 200),
    }
}

fn trials() -> Vec<TrialRecord> {
    let nodes = ["edge-1", "near-1", "metro-1", "cloud-1"];
    let models = ["s", "m", "l"];
    nodes
        .iter()
        .flat_map(|node| models.iter().map(move |model| (node, model)))
        .map(|(node, model)| TrialRecord {
            node: (*node).to_owned(),
            plan: format!("detector{{model={model}}}"),
            samples: 12,
            wall_ms: 610.0,
            cpu_ms: 240.0,
        })
        .collect()
}

fn frames(points: &[Point]) -> FrameCounts {
    let count = |outcome| {
        points
            .iter()
            .filter(|point| point.outcome == outcome)
            .count() as u64
    };
    FrameCounts {
        sent: points.len() as u64,
        answered: count(Outcome::Answered),
        late: count(Outcome::Late),
        skipped: count(Outcome::Skipped),
        expired: count(Outcome::Expired),
        rejected: count(Outcome::Rejected),
        lost: 0,
    }
}

fn plans() -> Vec<PlanRecord> {
    vec![
        plan(
            1,
            "query-registered",
            ("cloud-1", "m"),
            "320",
            (160.0, 0.85),
            17_900.0,
        ),
        plan(
            2,
            "link-degraded",
            ("near-1", "m"),
            "224",
            (230.0, 0.84),
            TIMES[1] + RECOVERIES[0],
        ),
        plan(
            3,
            "content-drifted",
            ("near-1", "l"),
            "320",
            (260.0, 0.79),
            TIMES[2] + RECOVERIES[1],
        ),
    ]
}

fn replans() -> Vec<ReplanRecord> {
    vec![
        replan(
            0,
            "link-degraded",
            "link edge-1->cloud-1 degraded: 0.98 against 14.20 Mbit/s",
            &[
                "detector: cloud-1 → near-1",
                "prepare.resolution: 320 → 224",
            ],
        ),
        replan(
            1,
            "content-drifted",
            "content drifted: luma mean 11.2, was 108.4",
            &["detector.model: m → l", "prepare.resolution: 224 → 320"],
        ),
    ]
}

fn nodes() -> Vec<NodeRecord> {
    vec![
        node(
            "edge-1",
            Some("edge"),
            Some("emulated ×0.15"),
            9.1,
            31_000_000,
        ),
        node(
            "near-1",
            Some("near-edge"),
            Some("emulated ×0.4"),
            18.4,
            2_400_000,
        ),
        node(
            "metro-1",
            Some("near-cloud"),
            Some("emulated ×0.7"),
            0.6,
            120_000,
        ),
        node("cloud-1", Some("cloud"), Some("emulated ×1"), 6.2, 900_000),
        node("coordinator", None, None, 1.4, 400_000),
        node("relay", None, None, 2.1, 0),
        node("app", None, None, 4.8, 48_000_000),
    ]
}

/// A run that went well.
pub(crate) fn good(seed: u64) -> RunRecord {
    let points = points(seed, story);
    RunRecord {
        seed,
        source: "rendered scenes".to_owned(),
        flags: vec!["--loss".to_owned(), "2%".to_owned()],
        zero_unix_ms: 1_796_066_102_000.0,
        rate_hz: 10.0,
        valid: true,
        invalid_reasons: Vec::new(),
        passed: true,
        failures: Vec::new(),
        checks: vec![CheckRecord {
            name: "every frame is accounted for".to_owned(),
            passed: true,
            detail: format!("{} sent, 0 lost", points.len()),
        }],
        slo: SloRecord {
            latency_percentile: 95.0,
            latency_ms: 300.0,
            accuracy_min: 0.72,
            cost_max_usd_per_h: 0.06,
        },
        first_plan_s: Some(17.9),
        trials: trials(),
        cache_hits: 31,
        frames: frames(&points),
        phases: vec![
            phase(0, "day, good uplink", (0.861, 0.85), (0.99, 0.86)),
            phase(1, "uplink cut to 1/20", (0.829, 0.84), (0.0, 0.21)),
            phase(2, "lights out", (0.802, 0.79), (0.0, 0.12)),
        ],
        replans: replans(),
        plans: plans(),
        events: vec![
            EventRecord {
                at_ms: TIMES[1],
                what: "uplink of site plant cut from 20 to 1 Mbit/s".to_owned(),
            },
            EventRecord {
                at_ms: TIMES[2],
                what: "lights out: brightness 1 to 0.1".to_owned(),
            },
        ],
        points,
        static_points: self::points(seed, left_alone),
        nodes: nodes(),
        host: HostRecord {
            cores: 2,
            processor: "Example CPU".to_owned(),
            busy: 0.61,
            own_cores: 1.18,
            story_s: 88.0,
            total_s: 151.0,
            relay_lateness_p99_ms: 1.4,
            timer_lateness_p99_ms: 2.2,
        },
    }
}
