use super::*;

fn point(at_ms: f64, latency_ms: Option<f64>, outcome: Outcome, generation: u64) -> Point {
    Point {
        frame: 0,
        at_ms,
        latency_ms,
        outcome,
        generation: latency_ms.map(|_| generation),
        accuracy: Some(0.8),
    }
}

fn pass(first_answer_ms: f64, acts: &[(Act, f64)], ended_ms: f64) -> Pass {
    Pass {
        first_answer_ms: Some(first_answer_ms),
        done: acts
            .iter()
            .map(|(act, at_ms)| Done {
                act: *act,
                at_ms: *at_ms,
                what: String::new(),
            })
            .collect(),
        ended_ms,
        ..Pass::default()
    }
}

#[test]
fn phases_run_from_event_to_event_and_faults_do_not_part_them() {
    let acts = [
        (Act::KillCoordinator, 4_000.0),
        (Act::CutUplink, 9_000.0),
        (Act::LightsOut, 20_000.0),
    ];
    let whole = pass(1_000.0, &acts, 31_000.0);
    let expected = [
        (1_000.0, 9_000.0),
        (9_000.0, 20_000.0),
        (20_000.0, 31_000.0),
    ];
    assert_eq!(spans(&whole), expected);
    let mut broken_off = pass(1_000.0, &acts[..2], 0.0);
    broken_off
        .points
        .push(point(12_000.0, None, Outcome::Expired, 1));
    assert_eq!(
        spans(&broken_off),
        [(1_000.0, 9_000.0), (9_000.0, 12_000.0)]
    );
    assert!(spans(&Pass::default()).is_empty());
}

#[test]
fn frames_without_an_answer_count_as_endless_latency_and_skipped_ones_not_at_all() {
    let mut points: Vec<Point> = (0..19)
        .map(|_| point(0.0, Some(100.0), Outcome::Answered, 1))
        .collect();
    points.push(point(0.0, None, Outcome::Skipped, 1));
    points.push(point(0.0, None, Outcome::Expired, 1));
    let all: Vec<&Point> = points.iter().collect();
    assert_eq!(latency_of_all(&all, 0.95), 100.0);
    points.push(point(0.0, None, Outcome::Rejected, 1));
    let all: Vec<&Point> = points.iter().collect();
    assert_eq!(latency_of_all(&all, 0.95), f64::INFINITY);
    assert_eq!(latency_of_all(&[], 0.95), f64::INFINITY);
    assert!((attainment(&all) - 19.0 / 21.0).abs() < 1e-9);
}

#[test]
fn a_plan_answers_when_the_first_result_computed_by_it_arrives() {
    let points = [
        point(100.0, Some(900.0), Outcome::Late, 2),
        point(300.0, Some(150.0), Outcome::Answered, 2),
        point(400.0, Some(10.0), Outcome::Answered, 1),
    ];
    assert_eq!(first_arrival(&points, 2), Some(450.0));
    assert_eq!(first_arrival(&points, 3), None);
}

#[test]
fn what_differs_between_plans_is_told_in_words() {
    let operator = |name: &str, node: &str, model: &str, cpu_millicores| PlanOperator {
        operator: name.to_owned(),
        node: node.to_owned(),
        configuration: [("model".to_owned(), model.to_owned())].into(),
        cpu_millicores,
    };
    let plan = |operators| PlanRecord {
        generation: 1,
        summary: String::new(),
        status: String::new(),
        trigger: String::new(),
        applied_ms: None,
        operators,
        expected_latency_ms: 0.0,
        expected_accuracy: 0.0,
        cost_per_h: 0.0,
    };
    let before = plan(vec![operator("detector", "cloud-1", "m", 200)]);
    let after = plan(vec![operator("detector", "near-1", "l", 450)]);
    assert_eq!(
        difference(&before, &after),
        [
            "detector: cloud-1 → near-1",
            "detector.model: m → l",
            "detector: 0.20 → 0.45 core of near-1"
        ]
    );
    assert!(difference(&before, &before).is_empty());
}

#[test]
fn the_comparison_is_moved_phase_by_phase_and_cut_to_length() {
    let acts = |cut, dark| [(Act::CutUplink, cut), (Act::LightsOut, dark)];
    let here = pass(10_000.0, &acts(20_000.0, 30_000.0), 40_000.0);
    let mut there = pass(1_000.0, &acts(5_000.0, 17_000.0), 20_000.0);
    for at_ms in [2_000.0, 6_000.0, 16_500.0, 18_000.0] {
        there
            .points
            .push(point(at_ms, Some(1.0), Outcome::Answered, 1));
    }
    let moved: Vec<f64> = aligned(&here, &there).iter().map(|p| p.at_ms).collect();
    assert_eq!(moved, [11_000.0, 21_000.0, 31_000.0]);
}
