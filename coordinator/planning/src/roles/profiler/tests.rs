use super::*;
use crate::tests::fixture;
use compass_shared::model::query::Constraint;
use compass_shared::model::trial::SampleMeasure;

struct World {
    pool: Profiler,
    cluster: Cluster,
    query: Arc<Query>,
    now: Moment,
    numbers: u64,
    /// Stages under way: node and request, in the order they were started.
    running: Vec<(NodeId, RunStage)>,
    outcomes: Vec<TrialOutcome>,
    started: Vec<(NodeId, String)>,
    /// When the pool asked last to be woken.
    wake: Option<Moment>,
}

impl World {
    fn new() -> Self {
        let mut world = Self {
            pool: Profiler::new(fixture::catalogue(), TrialSettings::default(), TrialId(100)),
            cluster: fixture::cluster(),
            query: Arc::new(fixture::query()),
            now: Moment(0),
            numbers: 0,
            running: Vec::new(),
            outcomes: Vec::new(),
            started: Vec::new(),
            wake: None,
        };
        world.tell_cluster();
        world
    }

    fn tell_cluster(&mut self) {
        let cluster = Arc::new(self.cluster.clone());
        self.handle(Input::Cluster {
            cluster,
            granted: BTreeMap::new(),
        });
    }

    fn handle(&mut self, input: Input) {
        for effect in self.pool.handle(self.now, input) {
            match effect {
                Effect::RunStage { node, stage } => {
                    self.started
                        .push((node.clone(), stage.operator.to_string()));
                    self.running.push((node, *stage));
                }
                Effect::CancelStage { node, trial } => {
                    self.running.retain(|(n, s)| *n != node || s.trial != trial);
                }
                Effect::Outcome(outcome) => self.outcomes.push(*outcome),
                Effect::WakeAt(moment) => self.wake = Some(moment),
                Effect::Pair { .. } | Effect::Ran(_) | Effect::Transfer { .. } => {}
            }
        }
    }

    fn trial(&mut self, configuration: PipelineConfiguration, set: u64) {
        self.numbers += 1;
        let request = TrialRequest {
            query: Arc::clone(&self.query),
            number: self.numbers,
            configuration,
            set: SampleSetId(set),
            segments: vec![(0..8).map(FrameId).collect()],
            frame_bytes: fixture::FRAME_BYTES,
            wanted: vec![fixture::operator_id("detector")],
            judged: Some(fixture::operator_id("detector")),
        };
        self.handle(Input::Trial(Box::new(request)));
    }

    /// The oldest stage under way is done.
    fn finish_one(&mut self) -> bool {
        if self.running.is_empty() {
            return false;
        }
        let (node, stage) = self.running.remove(0);
        let samples = stage.segments[0]
            .iter()
            .map(|frame| SampleMeasure {
                frame: *frame,
                wall_ms: 5.0,
                cpu_ms: 5.0,
                bytes_in: 1000,
                bytes_out: 1000,
                skipped: false,
                output: stage.return_outputs.then(|| b"[]".to_vec()),
            })
            .collect();
        let done = StageDone {
            trial: stage.trial,
            samples,
            cold_start_ms: 100.0,
            transfer: None,
            achieved_cores: 1.0,
        };
        self.handle(Input::StageDone { node, done });
        true
    }

    fn finish_all(&mut self) {
        while self.finish_one() {}
    }

    fn count(&self, operator: &str) -> usize {
        self.started.iter().filter(|(_, o)| o == operator).count()
    }
}

#[test]
fn a_trial_runs_its_stages_in_order_and_returns_the_judged_outputs() {
    let mut world = World::new();
    world.trial(fixture::configuration(320, 75, "m"), 1);
    world.finish_all();
    let order: Vec<_> = world.started.iter().map(|(_, o)| o.as_str()).collect();
    assert_eq!(order, ["sampler", "prepare", "detector"]);
    let stages = world.outcomes[0].result.as_ref().unwrap();
    assert_eq!(stages.len(), 3);
    assert!(stages[2].done.samples.iter().all(|s| s.output.is_some()));
    assert!(stages[0].done.samples.iter().all(|s| s.output.is_none()));
    assert!(stages.iter().all(|s| !s.cached));
}

#[test]
fn what_an_earlier_trial_ran_is_not_run_again_on_the_same_samples() {
    let mut world = World::new();
    world.trial(fixture::configuration(320, 75, "m"), 1);
    world.finish_all();
    world.trial(fixture::configuration(320, 75, "l"), 1);
    world.finish_all();
    assert_eq!(
        (
            world.count("sampler"),
            world.count("prepare"),
            world.count("detector")
        ),
        (1, 1, 2)
    );
    assert_eq!(world.pool.cache_hits(), 2);
    let cached: Vec<_> = world.outcomes[1]
        .result
        .as_ref()
        .unwrap()
        .iter()
        .map(|s| s.cached)
        .collect();
    assert_eq!(cached, [true, true, false]);
    world.trial(fixture::configuration(320, 75, "l"), 2);
    world.finish_all();
    assert_eq!(world.count("prepare"), 2, "other samples are other inputs");
}

#[test]
fn trials_at_the_same_time_share_stages_under_way_and_a_node_runs_one_at_a_time() {
    let mut world = World::new();
    for model in ["s", "m", "l"] {
        world.trial(fixture::configuration(320, 75, model), 1);
    }
    assert_eq!(
        world.running.len(),
        1,
        "all three wait for the one sampler stage"
    );
    loop {
        let mut nodes: Vec<_> = world.running.iter().map(|(n, _)| n.clone()).collect();
        let count = nodes.len();
        nodes.sort();
        nodes.dedup();
        assert_eq!(nodes.len(), count, "two stages on one node");
        if !world.finish_one() {
            break;
        }
    }
    assert_eq!(world.outcomes.len(), 3);
    assert_eq!(
        (
            world.count("sampler"),
            world.count("prepare"),
            world.count("detector")
        ),
        (1, 1, 3)
    );
}

#[test]
fn stages_keep_to_the_querys_constraints() {
    let mut world = World::new();
    let mut query = fixture::query();
    query.constraints = vec![
        Constraint::StayWithinSite { output_of: None },
        Constraint::StayWithinSite {
            output_of: Some(fixture::operator_id("prepare")),
        },
    ];
    world.query = Arc::new(query);
    world.trial(fixture::configuration(320, 75, "m"), 1);
    world.finish_all();
    for (node, operator) in &world.started {
        if operator != "prepare" {
            assert!(
                ["edge-1", "near-1"].contains(&node.as_str()),
                "{operator} on {node}"
            );
        }
    }
}

#[test]
fn field_058_a_stage_that_dies_or_hangs_fails_its_trial_and_nothing_else() {
    let mut world = World::new();
    world.trial(fixture::configuration(320, 75, "l"), 1);
    world.finish_one();
    world.finish_one();
    for _ in 0..2 {
        let (node, stage) = world.running.remove(0);
        world.handle(Input::StageFailed {
            node,
            trial: stage.trial,
            failure: StageFailure::Crashed("exit status 137".to_owned()),
        });
        world.now = world.now + Duration::from_secs(1);
        world.handle(Input::Tick);
    }
    assert!(
        matches!(&world.outcomes[0].result, Err((operator, StageFailure::Crashed(_))) if operator.as_str() == "detector")
    );
    world.trial(fixture::configuration(320, 75, "m"), 1);
    // This one hangs, and its node does not say so: no answer ever, not the second time either.
    for _ in 0..4 {
        world.now = world.now + Duration::from_secs(30);
        world.handle(Input::Tick);
    }
    assert!(matches!(
        &world.outcomes[1].result,
        Err((_, StageFailure::Unavailable(_)))
    ));
    assert!(world.running.is_empty());
    world.trial(fixture::configuration(320, 75, "s"), 1);
    world.finish_all();
    assert!(world.outcomes[2].result.is_ok());
}

#[test]
fn a_measurement_that_is_no_number_fails_its_stage() {
    let mut world = World::new();
    world.trial(fixture::configuration(320, 75, "m"), 1);
    let (node, stage) = world.running.remove(0);
    let sample = SampleMeasure {
        frame: FrameId(0),
        wall_ms: f64::NAN,
        cpu_ms: 1.0,
        bytes_in: 1,
        bytes_out: 1,
        skipped: false,
        output: None,
    };
    world.handle(Input::StageDone {
        node,
        done: StageDone {
            trial: stage.trial,
            samples: vec![sample],
            cold_start_ms: 0.0,
            transfer: None,
            achieved_cores: 1.0,
        },
    });
    assert!(world.outcomes[0].result.is_err());
}

#[test]
fn a_busy_node_is_asked_again_and_inputs_that_are_gone_are_made_again() {
    let mut world = World::new();
    world.trial(fixture::configuration(320, 75, "m"), 1);
    let (node, stage) = world.running.remove(0);
    world.handle(Input::StageFailed {
        node: node.clone(),
        trial: stage.trial,
        failure: StageFailure::Busy,
    });
    assert!(world.running.iter().all(|(n, _)| *n != node), "not at once");
    world.now = world.now + Duration::from_millis(300);
    world.handle(Input::Tick);
    assert_eq!(world.count("sampler"), 2);
    world.finish_one();
    let (node, stage) = world.running.remove(0);
    world.handle(Input::StageFailed {
        node,
        trial: stage.trial,
        failure: StageFailure::InputsUnavailable("restarted".to_owned()),
    });
    world.now = world.now + Duration::from_millis(300);
    world.handle(Input::Tick);
    world.finish_all();
    assert_eq!(world.count("sampler"), 3);
    assert!(world.outcomes[0].result.is_ok());
}

/// Every node refuses every stage, as fast as it is asked, for as long as the pool asks.
#[test]
fn busy_nodes_are_asked_ever_less_often_and_given_up_in_the_end() {
    let mut world = World::new();
    for model in ["s", "m", "l"] {
        world.trial(fixture::configuration(320, 75, model), 1);
    }
    let mut asked: BTreeMap<NodeId, Vec<Moment>> = BTreeMap::new();
    let mut steps = 0;
    while world.outcomes.len() < 3 {
        steps += 1;
        assert!(steps < 1_000, "the pool goes round and round");
        while let Some((node, stage)) = world.running.pop() {
            asked.entry(node.clone()).or_default().push(world.now);
            let failure = StageFailure::Busy;
            let trial = stage.trial;
            world.handle(Input::StageFailed {
                node,
                trial,
                failure,
            });
        }
        let wake = world.wake.filter(|at| *at > world.now);
        match wake {
            Some(at) => world.now = at,
            None => assert_eq!(world.outcomes.len(), 3, "nothing would ever go on"),
        }
        world.handle(Input::Tick);
    }
    assert!(
        world
            .outcomes
            .iter()
            .all(|o| matches!(o.result, Err((_, StageFailure::Busy))))
    );
    // Half a minute of pauses that grow from a quarter of a second to five.
    for moments in asked.values() {
        assert!(moments.len() <= 12, "{moments:?}");
        let pauses: Vec<_> = moments.windows(2).map(|w| w[1].since(w[0])).collect();
        assert!(pauses.iter().all(|p| *p >= Duration::from_millis(250)));
        assert!(pauses.is_sorted(), "{pauses:?}");
    }
    // A node that takes a stage again is not held to its past.
    world.now = world.now + Duration::from_secs(10);
    world.trial(fixture::configuration(320, 75, "m"), 2);
    let before = world.now;
    world.finish_all();
    assert!(world.outcomes[3].result.is_ok());
    assert_eq!(world.now, before, "without a pause");
}

#[test]
fn while_one_node_is_busy_another_takes_the_stage() {
    let mut world = World::new();
    world.trial(fixture::configuration(320, 75, "m"), 1);
    let (first, stage) = world.running.remove(0);
    world.handle(Input::StageFailed {
        node: first.clone(),
        trial: stage.trial,
        failure: StageFailure::Busy,
    });
    // Each has its turn, the slowest too, unless waiting for the first is quicker.
    assert!(
        world.running.iter().all(|(node, _)| *node != first),
        "{:?}",
        world.started
    );
    world.finish_all();
    world.now = world.now + Duration::from_millis(250);
    world.handle(Input::Tick);
    world.finish_all();
    assert!(world.outcomes[0].result.is_ok());
}

#[test]
fn a_lost_nodes_stages_and_outputs_go_to_others() {
    let mut world = World::new();
    world.trial(fixture::configuration(320, 75, "m"), 1);
    world.finish_one();
    let (lost, _) = world.running[0].clone();
    if lost.as_str() == "edge-1" {
        // The source's own node holds the frames; without it there is nothing to run on.
        world.finish_one();
    }
    let (lost, _) = world.running[0].clone();
    world.running.clear();
    world.cluster.nodes.get_mut(&lost).unwrap().online = false;
    world.tell_cluster();
    world.finish_all();
    assert!(world.outcomes[0].result.is_ok());
    let last = world.started.last().unwrap();
    assert_ne!(last.0, lost);
}

#[test]
fn a_cancelled_query_stops_its_stages_and_hears_of_it() {
    let mut world = World::new();
    world.trial(fixture::configuration(320, 75, "m"), 1);
    world.trial(fixture::configuration(320, 75, "l"), 1);
    world.handle(Input::Cancel(world.query.id.clone()));
    assert!(world.running.is_empty());
    assert_eq!(world.outcomes.len(), 2);
    assert!(
        world
            .outcomes
            .iter()
            .all(|o| matches!(o.result, Err((_, StageFailure::Cancelled))))
    );
    // A late answer is nobody's.
    world.handle(Input::StageDone {
        node: fixture::node_id("edge-1"),
        done: StageDone {
            trial: TrialId(100),
            samples: vec![],
            cold_start_ms: 0.0,
            transfer: None,
            achieved_cores: 0.0,
        },
    });
    assert_eq!(world.outcomes.len(), 2);
}

#[test]
fn live_work_keeps_its_share_from_trials() {
    let mut world = World::new();
    let full = |name: &str| {
        let capacity = fixture::description(name).capacity;
        (fixture::node_id(name), capacity)
    };
    let cluster = Arc::new(world.cluster.clone());
    world.handle(Input::Cluster {
        cluster,
        granted: ["near-1", "metro-1", "cloud-1"].map(full).into(),
    });
    world.trial(fixture::configuration(320, 75, "m"), 1);
    world.finish_all();
    assert!(
        world
            .started
            .iter()
            .all(|(node, _)| node.as_str() == "edge-1"),
        "{:?}",
        world.started
    );
}
