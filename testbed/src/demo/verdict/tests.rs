use super::super::pass::Done;
use super::super::record::Verdict;
use super::super::report::fixture;
use super::*;

/// The fixture's story as the player would have seen it.
fn pass(run: &RunRecord) -> Pass {
    let done = |act, index: usize| Done {
        act,
        at_ms: run.events[index].at_ms,
        what: String::new(),
    };
    Pass {
        done: vec![done(Act::CutUplink, 0), done(Act::LightsOut, 1)],
        ..Pass::default()
    }
}

fn failed(run: &RunRecord, pass: &Pass) -> Vec<String> {
    judge(run, pass, None)
        .into_iter()
        .filter(|check| !check.passed)
        .map(|check| format!("{}: {}", check.name, check.detail))
        .collect()
}

#[test]
fn a_good_run_passes_every_check() {
    for seed in 0..5 {
        let run = fixture::good(seed);
        assert_eq!(failed(&run, &pass(&run)), Vec::<String>::new());
        assert!(invalid_reasons(&run.host).is_empty());
    }
}

#[test]
fn each_thing_that_goes_wrong_is_named() {
    type Change = fn(&mut RunRecord);
    let cases: [(Change, &str); 9] = [
        (|run| run.first_plan_s = None, "never"),
        (
            |run| run.phases[1].met = false,
            "uplink cut to 1/20: all three SLOs met",
        ),
        (
            |run| drop(run.phases.pop()),
            "lights out: all three SLOs met: not reached",
        ),
        (
            |run| run.replans[0].event_ms = None,
            "no plan after 40 s names link-degraded",
        ),
        (
            |run| run.replans[1].changed.clear(),
            "the dark led to another plan",
        ),
        (|run| run.frames.lost = 1, "none was lost"),
        (
            |run| {
                let new = run.points.iter().position(|p| p.generation == Some(2));
                run.points[new.unwrap() + 5].outcome = Outcome::Expired;
            },
            "1 after the switch to plan 2",
        ),
        (
            |run| run.nodes[0].own_sent_bytes = Some(1),
            "edge-1 -100.0 %",
        ),
        (
            |run| {
                for phase in &mut run.phases {
                    phase.static_attainment = Some(1.0);
                    phase.static_accuracy = Some(1.0);
                }
            },
            "the day's plan left alone breaks an SLO",
        ),
    ];
    for (change, expected) in cases {
        let mut run = fixture::good(3);
        let pass = pass(&run);
        change(&mut run);
        let failed = failed(&run, &pass);
        assert_eq!(failed.len(), 1, "{expected}: {failed:?}");
        let text = failed[0].replace('\u{a0}', " ");
        assert!(text.contains(expected), "{expected} not in {text}");
    }
}

#[test]
fn a_story_that_broke_off_says_why() {
    let run = fixture::good(3);
    let pass = Pass {
        failed: Some("the app's process has ended".to_owned()),
        ..pass(&run)
    };
    assert!(failed(&run, &pass)[0].contains("the app's process has ended"));
}

#[test]
fn a_host_that_is_too_slow_makes_a_run_invalid_not_failed() {
    let mut run = fixture::good(3);
    run.host.busy = 0.95;
    run.host.timer_lateness_p99_ms = 11.0;
    let reasons = invalid_reasons(&run.host);
    assert_eq!(reasons.len(), 2, "{reasons:?}");
    run.valid = false;
    run.passed = false;
    assert_eq!(run.verdict(), Verdict::Invalid);
}
