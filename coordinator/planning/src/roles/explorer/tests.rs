use super::*;
use crate::candidate::Preference;
use crate::profile::Truth;
use crate::roles::profiler::StageResult;
use crate::tests::fixture;
use compass_shared::model::trial::{SampleMeasure, StageDone, StageFailure};
use compass_shared::model::trigger::{Measurement, SloKind};
use std::time::Duration;

struct World {
    explorer: Explorer,
    now: Moment,
    effects: Vec<Effect>,
    frames: u64,
}

impl World {
    fn new() -> Self {
        Self::of(fixture::query(), None)
    }

    fn of(query: Query, front: Option<Front>) -> Self {
        let explorer = Explorer::new(
            Arc::new(query),
            fixture::catalogue(),
            Settings::default(),
            Seed(1),
            1,
            front,
        )
        .unwrap();
        let mut world = Self {
            explorer,
            now: Moment(0),
            effects: Vec::new(),
            frames: 0,
        };
        world.handle(Input::Cluster(Arc::new(fixture::cluster())));
        world
    }

    fn handle(&mut self, input: Input) -> Vec<Effect> {
        let effects = self.explorer.handle(self.now, input);
        self.effects.extend(effects.clone());
        effects
    }

    fn set(&self) -> SampleSetId {
        self.effects
            .iter()
            .rev()
            .find_map(|e| match e {
                Effect::Capture { request, .. } => Some(request.set),
                _ => None,
            })
            .expect("samples were asked for")
    }

    fn capture(&mut self) -> Vec<Effect> {
        self.frames += 8;
        let first = self.frames - 8;
        let samples = SamplesCaptured {
            set: self.set(),
            segments: vec![(first..self.frames).map(FrameId).collect()],
            bytes: 8 * fixture::FRAME_BYTES as u64,
        };
        self.handle(Input::Captured(samples))
    }

    fn label(&mut self, label: &[u8]) -> Vec<Effect> {
        let labels = (self.frames - 8..self.frames)
            .map(|f| (FrameId(f), label.to_vec()))
            .collect();
        let set = self.set();
        self.handle(Input::Labels { set, labels })
    }

    /// Ends every trial that was asked for in these effects, with this output of the judged operator.
    fn end_trials(&mut self, effects: &[Effect], output: &[u8]) -> Vec<Effect> {
        let mut all = Vec::new();
        for request in requests(effects) {
            let outcome = TrialOutcome {
                query: request.query.id.clone(),
                number: request.number,
                set: request.set,
                configuration: request.configuration.clone(),
                result: Ok(stages(&request, output)),
            };
            all.extend(self.handle(Input::Trial(Box::new(outcome))));
        }
        all
    }
}

impl World {
    /// Lets every trial fail that is asked for, and those asked for then, until no more are.
    fn fail_trials(&mut self, effects: &[Effect], failure: &StageFailure) -> Vec<Effect> {
        let mut all = Vec::new();
        let mut waiting = requests(effects);
        while let Some(request) = waiting.pop() {
            let outcome = TrialOutcome {
                query: request.query.id.clone(),
                number: request.number,
                set: request.set,
                configuration: request.configuration.clone(),
                result: Err((fixture::operator_id("detector"), failure.clone())),
            };
            let effects = self.handle(Input::Trial(Box::new(outcome)));
            waiting.extend(requests(&effects));
            all.extend(effects);
        }
        all
    }
}

fn reports(effects: &[Effect]) -> Vec<&str> {
    effects
        .iter()
        .filter_map(|e| match e {
            Effect::Infeasible { report } => Some(report.as_str()),
            _ => None,
        })
        .collect()
}

fn requests(effects: &[Effect]) -> Vec<TrialRequest> {
    effects
        .iter()
        .filter_map(|e| match e {
            Effect::RunTrial(request) => Some((**request).clone()),
            _ => None,
        })
        .collect()
}

fn stages(request: &TrialRequest, output: &[u8]) -> Vec<StageResult> {
    request
        .query
        .pipeline
        .operators
        .iter()
        .map(|operator| {
            let kind = operator.kind.as_str();
            let samples = request.segments[0]
                .iter()
                .map(|frame| SampleMeasure {
                    frame: *frame,
                    wall_ms: fixture::work_ms(kind, &request.configuration),
                    cpu_ms: fixture::work_ms(kind, &request.configuration),
                    bytes_in: 1,
                    bytes_out: fixture::bytes_out(kind, &request.configuration) as u64,
                    skipped: false,
                    output: (kind == "detector").then(|| output.to_vec()),
                })
                .collect();
            StageResult {
                operator: operator.id.clone(),
                node: fixture::node_id("cloud-1"),
                done: StageDone {
                    trial: compass_shared::ids::TrialId(1),
                    samples,
                    cold_start_ms: 10.0,
                    transfer: None,
                    achieved_cores: 1.0,
                },
                cached: false,
            }
        })
        .collect()
}

const BOX: &[u8] = br#"[{"class":1,"score":0.9,"x":0.1,"y":0.1,"w":0.2,"h":0.2}]"#;

/// Elsewhere.
const OTHER_BOX: &[u8] = br#"[{"class":1,"score":0.9,"x":0.6,"y":0.6,"w":0.2,"h":0.2}]"#;

fn proposals(effects: &[Effect]) -> Vec<&Proposal> {
    effects
        .iter()
        .filter_map(|e| match e {
            Effect::Propose(p) => Some(&**p),
            _ => None,
        })
        .collect()
}

#[test]
fn a_source_that_sends_nothing_is_asked_again_after_a_pause() {
    let mut world = World::new();
    world.handle(Input::Start);
    let first = world.set();
    world.handle(Input::Captured(SamplesCaptured {
        set: first,
        segments: vec![],
        bytes: 0,
    }));
    assert_eq!(world.set(), first, "not at once");
    world.now = world.now + Duration::from_millis(1100);
    world.handle(Input::Tick);
    assert_ne!(world.set(), first);
    // An entry node that never answers is asked again as well.
    let second = world.set();
    world.now = world.now + Duration::from_secs(7);
    world.handle(Input::Tick);
    assert_ne!(world.set(), second);
}

#[test]
fn with_labels_the_first_feasible_configuration_is_proposed_at_once() {
    let mut world = World::new();
    world.handle(Input::Start);
    let asked = world.capture();
    assert!(
        asked
            .iter()
            .any(|e| matches!(e, Effect::WantLabels { frames, .. } if frames.len() == 8))
    );
    assert_eq!(
        requests(&asked).len(),
        3,
        "trials begin while labels are on their way"
    );
    world.label(BOX);
    let effects = world.end_trials(&asked[..], BOX);
    let proposed = proposals(&effects);
    assert!(!proposed.is_empty());
    assert_eq!(proposed[0].trigger, Trigger::QueryRegistered);
    assert!(
        proposed[1..]
            .iter()
            .all(|p| p.trigger == Trigger::SearchImproved)
    );
    assert!(
        proposed[0]
            .front
            .profile
            .configurations
            .values()
            .all(|c| c.truth == Truth::Labels)
    );
}

#[test]
fn without_labels_the_golden_configuration_stands_in_for_the_truth() {
    for answers in [false, true] {
        let mut world = World::new();
        world.handle(Input::Start);
        let asked = world.capture();
        if answers {
            // Labels nobody can read are none.
            world.label(b"not a list");
        } else {
            world.now = world.now + Duration::from_secs(2);
            world.handle(Input::Tick);
        }
        let effects = world.end_trials(&asked, BOX);
        assert!(
            proposals(&effects).is_empty(),
            "nothing is known to be right yet"
        );
        let golden = world.explorer.space.golden();
        let golden = world.explorer.space.configuration(&golden);
        let next = requests(&effects);
        assert!(next.iter().any(|r| r.configuration == golden));
        let effects = world.end_trials(&effects, BOX);
        assert!(!proposals(&effects).is_empty());
        let rows = &world.explorer.front().profile.configurations;
        assert!(rows.values().any(|c| c.truth == Truth::Golden));
    }
}

#[test]
fn where_samples_cannot_tell_more_are_drawn_a_few_times() {
    for answer_comes in [true, false] {
        let mut query = fixture::query();
        // One configuration only: there is nothing else to try.
        for operator in &mut query.pipeline.operators {
            for knob in &mut operator.knobs {
                // The last rate answers every frame.
                knob.values.reverse();
                knob.values.truncate(1);
            }
        }
        let mut world = World::of(query, Some(Front::default()));
        world.handle(Input::Start);
        let mut sets = vec![world.set()];
        for round in 0..10 {
            let asked = world.capture();
            // In one frame of four there is something to find and it is not found.
            let set = world.set();
            let label = |frame: u64| match frame % 4 {
                0 if round == 0 || !answer_comes => OTHER_BOX.to_vec(),
                _ => BOX.to_vec(),
            };
            let labels = (world.frames - 8..world.frames)
                .map(|frame| (FrameId(frame), label(frame)))
                .collect();
            world.handle(Input::Labels { set, labels });
            world.end_trials(&asked, BOX);
            if world.set() == *sets.last().unwrap() {
                break;
            }
            sets.push(world.set());
        }
        let infeasible = |e: &Effect| matches!(e, Effect::Infeasible { .. });
        let told = world.effects.iter().filter(|e| infeasible(e)).count();
        if answer_comes {
            assert!((2..=4).contains(&sets.len()), "{}", sets.len());
            assert_eq!(told, 0);
            assert!(!world.explorer.candidates().feasible.is_empty());
        } else {
            assert!((2..=4).contains(&sets.len()), "bounded: {}", sets.len());
            assert_eq!(told, 1, "said once, at the end");
        }
    }
}

#[test]
fn outputs_that_cannot_be_judged_and_trials_that_die_rule_a_configuration_out() {
    let mut world = World::new();
    world.handle(Input::Start);
    let asked = world.capture();
    world.label(BOX);
    let requests = requests(&asked);
    let outcome = |request: &TrialRequest, result| {
        Box::new(TrialOutcome {
            query: request.query.id.clone(),
            number: request.number,
            set: request.set,
            configuration: request.configuration.clone(),
            result,
        })
    };
    world.handle(Input::Trial(outcome(
        &requests[0],
        Ok(stages(&requests[0], b"\xff\xfe")),
    )));
    let died = (
        fixture::operator_id("detector"),
        StageFailure::Crashed("exit 137".to_owned()),
    );
    world.handle(Input::Trial(outcome(&requests[1], Err(died))));
    world.handle(Input::Trial(outcome(
        &requests[2],
        Ok(stages(&requests[2], BOX)),
    )));
    let rows = &world.explorer.front().profile.configurations;
    let failed: Vec<_> = rows.values().filter_map(|c| c.failed.as_deref()).collect();
    assert_eq!(failed.len(), 2, "{failed:?}");
    assert!(failed.iter().any(|f| f.contains("137")));
    assert!(failed.iter().any(|f| f.contains("cannot be judged")));
    assert_eq!(
        proposals(&world.effects).len(),
        1,
        "the one that works is proposed"
    );
}

#[test]
fn a_search_whose_every_trial_is_kept_from_running_says_so_and_begins_again() {
    let mut world = World::new();
    world.handle(Input::Start);
    let asked = world.capture();
    world.label(BOX);
    let cut = StageFailure::Unavailable("model detector-m was not fetched within 20 s".to_owned());
    let effects = world.fail_trials(&asked, &cut);
    let said = reports(&effects);
    assert_eq!(said.len(), 1, "{said:?}");
    for part in [
        "INFEASIBLE",
        "detector-m was not fetched",
        "compass artifact list",
        "again in 15 s",
    ] {
        assert!(said[0].contains(part), "{part}: {}", said[0]);
    }
    assert!(effects.iter().any(
        |e| matches!(e, Effect::Finished { stop: Stop::Failing, trials: 0, failed, .. } if *failed >= 8)
    ));
    let rows = &world.explorer.front().profile.configurations;
    assert!(rows.values().all(|row| row.failed.is_none()));

    // The pause grows with each search that is kept from its trials.
    for (pause, next) in [(15, 30), (30, 60)] {
        world.now = world.now + Duration::from_millis(pause * 1000 - 1);
        let early = world.handle(Input::Tick);
        assert!(early.is_empty(), "{early:?}");
        world.now = world.now + Duration::from_millis(1);
        world.handle(Input::Tick);
        let asked = world.capture();
        world.label(BOX);
        let effects = world.fail_trials(&asked, &cut);
        let again = format!("again in {next} s");
        assert!(reports(&effects)[0].contains(&again), "{effects:?}");
    }

    // A node that comes back may bring what was missing; what could not be tried is tried.
    let mut cluster = fixture::cluster();
    let gone = fixture::node_id("cloud-1");
    cluster.nodes.get_mut(&gone).unwrap().online = false;
    world.handle(Input::Cluster(Arc::new(cluster)));
    world.handle(Input::Cluster(Arc::new(fixture::cluster())));
    world.now = world.now + Duration::from_secs(15);
    world.handle(Input::Tick);
    let asked = world.capture();
    let once_more: Vec<_> = requests(&asked)
        .into_iter()
        .map(|r| r.configuration)
        .collect();
    assert!(!once_more.is_empty());
    world.label(BOX);
    let effects = world.end_trials(&asked, BOX);
    assert!(!proposals(&effects).is_empty());
}

#[test]
fn a_bad_model_stays_failed_with_its_reason_while_others_are_tried_again() {
    let mut world = World::new();
    world.handle(Input::Start);
    let asked = world.capture();
    world.label(BOX);
    let corrupt = requests(&asked).remove(0);
    let outcome = TrialOutcome {
        query: corrupt.query.id.clone(),
        number: corrupt.number,
        set: corrupt.set,
        configuration: corrupt.configuration.clone(),
        result: Err((
            fixture::operator_id("detector"),
            StageFailure::Artifact("artifact 12ab is corrupt".to_owned()),
        )),
    };
    let effects = world.handle(Input::Trial(Box::new(outcome)));
    let mut others: Vec<Effect> = asked
        .into_iter()
        .filter(|e| !matches!(e, Effect::RunTrial(r) if r.number == corrupt.number))
        .collect();
    others.extend(effects);
    let lost = StageFailure::Unavailable("cloud-1 gave no answer".to_owned());
    let effects = world.fail_trials(&others, &lost);
    let said = reports(&effects)[0];
    assert!(said.contains("1 of the configurations tried gave no result: detector: its model cannot be used: artifact 12ab is corrupt"), "{said}");
    assert!(said.contains("compass artifact push"), "{said}");

    // Everything else is measured the next time, the bad one is not asked for again.
    world.now = world.now + Duration::from_secs(15);
    world.handle(Input::Tick);
    let mut asked = world.capture();
    world.label(BOX);
    while !requests(&asked).is_empty() {
        assert!(
            requests(&asked)
                .iter()
                .all(|r| r.configuration != corrupt.configuration)
        );
        asked = world.end_trials(&asked, BOX);
    }
    let row = world
        .explorer
        .front()
        .profile
        .configuration(&corrupt.configuration);
    let failed = row.unwrap().failed.as_ref().unwrap();
    assert!(failed.contains("is corrupt"), "{failed}");
}

/// Without labels the golden configuration stands in for the truth; when it cannot run, nothing will ever be judged.
#[test]
fn a_search_without_any_truth_ends_when_there_is_nothing_left_to_try() {
    let mut world = World::new();
    world.handle(Input::Start);
    let asked = world.capture();
    world.now = world.now + Duration::from_secs(2);
    let more = world.handle(Input::Tick);
    let died = StageFailure::Crashed("exit 137".to_owned());
    let both: Vec<Effect> = asked.into_iter().chain(more).collect();
    let effects = world.fail_trials(&both, &died);
    let said = reports(&effects);
    assert!(said[0].contains("its worker failed: exit 137"), "{said:?}");
    assert_eq!(world.explorer.phase(), "idle");
}

#[test]
fn a_drift_voids_what_was_known_and_something_cautious_is_proposed_at_once() {
    let mut world = World::new();
    world.handle(Input::Start);
    let asked = world.capture();
    world.label(BOX);
    let running = world.end_trials(&asked, BOX);
    let drift = Trigger::ContentDrifted {
        descriptor: "luma mean".to_owned(),
        measurement: Measurement {
            value: 10.0,
            bound: 120.0,
            window_ms: 700,
        },
    };
    let effects = world.handle(Input::ContentDrifted(drift.clone()));
    let proposed = proposals(&effects);
    assert_eq!(proposed[0].trigger, drift);
    assert_eq!(proposed[0].front.preference, Preference::Safest);
    assert!(
        proposed[0]
            .front
            .profile
            .configurations
            .values()
            .all(|c| c.scores.is_empty())
    );
    assert!(effects.iter().any(|e| matches!(e, Effect::CancelTrials(_))));
    assert!(
        effects.iter().any(|e| matches!(e, Effect::Capture { .. })),
        "fresh samples"
    );
    // What the old samples still bring is not learnt from.
    let late = world.end_trials(&running, BOX);
    assert!(proposals(&late).is_empty());
    let asked = world.capture();
    world.label(BOX);
    let effects = world.end_trials(&asked, BOX);
    let proposed = proposals(&effects);
    assert_eq!(proposed[0].trigger, drift);
    assert_eq!(
        proposed[0].front.preference,
        Preference::Safest,
        "few samples: the most accurate, not the cheapest of those that look good"
    );
}

#[test]
fn what_the_app_refutes_is_believed_less_of_everything() {
    let mut world = World::new();
    world.handle(Input::Start);
    let asked = world.capture();
    world.label(BOX);
    let effects = world.end_trials(&asked, BOX);
    let plan = crate::targets::tests::plan(
        1,
        ["edge-1", "edge-1", "cloud-1", "cloud-1", "cloud-1"],
        300,
    );
    let request = &requests(&asked)[0];
    let mut operators = plan.operators;
    for part in &mut operators {
        part.configuration = request.configuration.of(&part.operator).cloned().unwrap();
    }
    world.handle(Input::PlanInForce {
        generation: Generation(1),
        operators,
    });
    drop(effects);
    world.handle(Input::Reopen(Trigger::SloViolated {
        slo: SloKind::Accuracy,
        measurement: Measurement {
            value: 0.6,
            bound: 0.75,
            window_ms: 3000,
        },
    }));
    let bias = world.explorer.front().profile.accuracy_bias;
    assert!(
        (bias + 0.4).abs() < 1e-6,
        "samples say 1.0, the app says 0.6: {bias}"
    );
}

#[test]
fn a_stored_front_is_taken_up_without_a_new_search() {
    let front = Front {
        profile: fixture::profile(&fixture::all_configurations(), 1.0),
        preference: Preference::Cheapest,
    };
    let mut explorer = Explorer::new(
        Arc::new(fixture::query()),
        fixture::catalogue(),
        Settings::default(),
        Seed(1),
        2,
        Some(front),
    )
    .unwrap();
    explorer.handle(Moment(0), Input::Cluster(Arc::new(fixture::cluster())));
    let effects = explorer.handle(Moment(0), Input::Start);
    assert!(effects.is_empty(), "{effects:?}");
    assert_eq!(explorer.phase(), "idle");
}
