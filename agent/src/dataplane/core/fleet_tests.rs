//! Several cores, an app and a network of messages in virtual time: frames are conserved whatever breaks and whenever plans change.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use compass_shared::ids::{Commit, Digest, OperatorKind};
use compass_shared::model::catalogue::{Runtime, StateKind};
use compass_shared::model::cluster::Resources;
use compass_shared::model::pipeline::Configuration;
use compass_shared::model::plan::{InstanceTarget, QueryTarget, Route, RouteStep};
use compass_shared::seed::Seed;
use proptest::prelude::*;
use rand::Rng;
use rand::rngs::StdRng;

use super::*;

const DEADLINE: Duration = Duration::from_millis(1_200);

pub(super) fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

pub(super) fn query() -> QueryId {
    QueryId::new("q").unwrap()
}

pub(super) fn operator(name: &str) -> OperatorId {
    OperatorId::new(name).unwrap()
}

/// The instance of an operator on a node.
pub(super) fn instance(operator: &str, node: &str) -> InstanceId {
    let digest = Digest::of(format!("{operator}@{node}").as_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&digest.as_bytes()[..8]);
    InstanceId(u64::from_be_bytes(first))
}

/// `(operator, inputs, node)`, in topological order.
pub(super) type Placement<'a> = &'a [(&'a str, &'a [&'a str], &'a str)];

pub(super) fn route(generation: u64, placement: Placement<'_>) -> Route {
    let steps = placement.iter().map(|(name, inputs, at)| RouteStep {
        operator: operator(name),
        node: node(at),
        instance: instance(name, at),
        inputs: inputs.iter().map(|i| operator(i)).collect(),
        readers: placement
            .iter()
            .filter(|(_, inputs, _)| inputs.contains(name))
            .map(|(reader, ..)| operator(reader))
            .collect(),
    });
    Route {
        generation: Generation(generation),
        steps: steps.collect(),
    }
}

/// The target of one node for some routes, the last of which is the current one.
pub(super) fn target(me: &str, commit: u64, routes: &[Route]) -> NodeTarget {
    let mut instances: BTreeMap<InstanceId, InstanceTarget> = BTreeMap::new();
    for step in routes.iter().flat_map(|route| &route.steps) {
        if step.node == node(me) {
            let is_tracker = step.operator.as_str() == "tracker";
            instances.insert(
                step.instance,
                InstanceTarget {
                    instance: step.instance,
                    kind: OperatorKind::new(step.operator.as_str()).unwrap(),
                    runtime: Runtime::Native("pass".into()),
                    configuration: Configuration::default(),
                    artifact: None,
                    share: Resources::default(),
                    state: if is_tracker {
                        StateKind::Snapshot
                    } else {
                        StateKind::None
                    },
                },
            );
        }
    }
    NodeTarget {
        commit: Commit {
            term: 1,
            number: commit,
        },
        node: node(me),
        instances: instances.into_values().collect(),
        queries: vec![QueryTarget {
            query: query(),
            current: routes.last().map_or(Generation(0), |r| r.generation),
            routes: routes.to_vec(),
            entry: node("edge"),
            frame_deadline: DEADLINE,
            app_fingerprint: None,
        }],
        peers: vec![],
        standby: vec![],
    }
}

#[derive(Debug, Clone)]
enum Event {
    /// A message travels; the epoch of the pair tells whether its connection still stands.
    Deliver {
        from: Place,
        to: Place,
        epoch: u64,
        item: Item,
    },
    JobDone {
        at: NodeId,
        life: u64,
        job: Job,
    },
    StateMoved {
        at: NodeId,
        operator: OperatorId,
        instance: InstanceId,
    },
    Capture(u64),
    Kill(NodeId),
    Revive(NodeId),
    Notice(NodeId),
    Target(NodeId, Box<NodeTarget>),
    Tick,
}

#[derive(Debug, Clone)]
enum Item {
    Frame(FrameHeader, Bytes),
    Control(HopControl),
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    App,
    Node(NodeId),
}

/// What the app knows of its frames.
#[derive(Debug, Default)]
struct App {
    credits: u32,
    waiting: Vec<u64>,
    born: BTreeMap<u64, Moment>,
    sent: BTreeMap<u64, u16>,
    ends: BTreeMap<u64, Outcome>,
    results: BTreeMap<u64, (Generation, Vec<u8>)>,
    duplicates: u32,
}

struct Fleet {
    now: Moment,
    rng: StdRng,
    cores: BTreeMap<NodeId, Core>,
    targets: BTreeMap<NodeId, NodeTarget>,
    alive: BTreeSet<NodeId>,
    lives: BTreeMap<NodeId, u64>,
    epochs: BTreeMap<(Place, Place), u64>,
    events: BinaryHeap<Reverse<(Moment, u64)>>,
    bodies: BTreeMap<u64, Event>,
    count: u64,
    app: App,
    link_ms: (u64, u64),
    service_ms: (u64, u64),
    runs: BTreeMap<(NodeId, u64, OperatorId, FrameId), u32>,
    states_taken: Vec<(OperatorId, NodeId)>,
    sampler_keeps: u64,
}

impl Fleet {
    fn new(seed: u64, nodes: &[&str]) -> Self {
        let cores = nodes.iter().map(|name| {
            let id = node(name);
            (id.clone(), Core::new(id, Limits::default()))
        });
        let mut fleet = Self {
            now: Moment(1_000_000),
            rng: Seed(seed).child("fleet").rng(),
            cores: cores.collect(),
            targets: BTreeMap::new(),
            alive: nodes.iter().map(|n| node(n)).collect(),
            lives: BTreeMap::new(),
            epochs: BTreeMap::new(),
            events: BinaryHeap::new(),
            bodies: BTreeMap::new(),
            count: 0,
            app: App::default(),
            link_ms: (1, 30),
            service_ms: (1, 20),
            runs: BTreeMap::new(),
            states_taken: vec![],
            sampler_keeps: 1,
        };
        for a in fleet.alive.clone() {
            fleet.connect_all(&a);
        }
        fleet
    }

    fn at(&mut self, when: Moment, event: Event) {
        self.count += 1;
        self.events.push(Reverse((when, self.count)));
        self.bodies.insert(self.count, event);
    }

    fn after_ms(&mut self, ms: u64, event: Event) {
        let when = self.now + Duration::from_millis(ms);
        self.at(when, event);
    }

    fn epoch(&self, a: &Place, b: &Place) -> u64 {
        let pair = if a < b { (a, b) } else { (b, a) };
        self.epochs
            .get(&(pair.0.clone(), pair.1.clone()))
            .copied()
            .unwrap_or(0)
    }

    fn new_epoch(&mut self, a: &Place, b: &Place) {
        let pair = if a < b {
            (a.clone(), b.clone())
        } else {
            (b.clone(), a.clone())
        };
        *self.epochs.entry(pair).or_default() += 1;
    }

    fn neighbour(place: &Place) -> Neighbour {
        match place {
            Place::App => Neighbour::App(query()),
            Place::Node(node) => Neighbour::Node(node.clone()),
        }
    }

    fn connect_all(&mut self, joining: &NodeId) {
        let others: Vec<_> = self
            .alive
            .iter()
            .filter(|n| *n != joining)
            .cloned()
            .collect();
        self.new_epoch(&Place::App, &Place::Node(joining.clone()));
        for other in others {
            self.new_epoch(&Place::Node(other.clone()), &Place::Node(joining.clone()));
            self.input(&other, Input::Connected(Neighbour::Node(joining.clone())));
            self.input(joining, Input::Connected(Neighbour::Node(other)));
        }
        self.input(joining, Input::Connected(Neighbour::App(query())));
        if *joining == node("edge") {
            self.app.credits = 0;
        }
    }

    fn input(&mut self, at: &NodeId, input: Input) {
        if !self.alive.contains(at) {
            return;
        }
        let now = self.now;
        let effects = self.cores.get_mut(at).unwrap().handle(now, input);
        for effect in effects {
            self.effect(at, effect);
        }
    }

    fn effect(&mut self, at: &NodeId, effect: Effect) {
        let from = Place::Node(at.clone());
        match effect {
            Effect::Send {
                to,
                header,
                payload,
                ..
            } => self.travel(from, &to, Item::Frame(header, payload)),
            Effect::Control { to, message } => self.travel(from, &to, Item::Control(message)),
            Effect::Run(job) => {
                let life = self.lives.get(at).copied().unwrap_or(0);
                let key = (at.clone(), life, job.operator.clone(), job.frame);
                *self.runs.entry(key).or_default() += 1;
                let ms = self.rng.random_range(self.service_ms.0..=self.service_ms.1);
                let at = at.clone();
                self.after_ms(ms, Event::JobDone { at, life, job });
            }
            Effect::TakeState {
                operator,
                into,
                holder,
                ..
            } => {
                self.states_taken.push((operator.clone(), holder));
                let at = at.clone();
                self.after_ms(
                    10,
                    Event::StateMoved {
                        at,
                        operator,
                        instance: into,
                    },
                );
            }
            Effect::Cancel { .. } | Effect::Observe { .. } => {}
        }
    }

    fn travel(&mut self, from: Place, to: &Neighbour, item: Item) {
        let to = match to {
            Neighbour::App(_) => Place::App,
            Neighbour::Node(node) => Place::Node(node.clone()),
        };
        // Control messages keep their order on a link; frames travel on streams of their own.
        let ms = match item {
            Item::Frame(..) => self.rng.random_range(self.link_ms.0..=self.link_ms.1),
            Item::Control(_) => self.link_ms.1,
        };
        let epoch = self.epoch(&from, &to);
        self.after_ms(
            ms,
            Event::Deliver {
                from,
                to,
                epoch,
                item,
            },
        );
    }

    fn run_until_ms(&mut self, end_ms: u64) {
        let end = Moment(1_000_000) + Duration::from_millis(end_ms);
        while let Some(Reverse((when, id))) = self.events.peek().copied() {
            if when > end {
                break;
            }
            self.events.pop();
            self.now = when;
            let event = self.bodies.remove(&id).unwrap();
            self.perform(event);
        }
        self.now = end;
    }

    fn perform(&mut self, event: Event) {
        match event {
            Event::Deliver {
                from,
                to,
                epoch,
                item,
            } => {
                if self.epoch(&from, &to) != epoch {
                    return;
                }
                match to {
                    Place::App => self.app_hears(&from, item),
                    Place::Node(at) => {
                        let from = Self::neighbour(&from);
                        let input = match item {
                            Item::Frame(header, payload) => Input::Frame {
                                from,
                                header,
                                payload,
                                link: Duration::from_millis(self.link_ms.0),
                            },
                            Item::Control(message) => Input::Control { from, message },
                        };
                        self.input(&at, input);
                    }
                }
            }
            Event::JobDone { at, life, job } => {
                if self.lives.get(&at).copied().unwrap_or(0) == life {
                    let end = self.work(&job);
                    self.input(&at, Input::Finished { job: job.id, end });
                }
            }
            Event::StateMoved {
                at,
                operator,
                instance,
            } => self.input(
                &at,
                Input::StateSettled {
                    query: query(),
                    operator,
                    instance,
                },
            ),
            Event::Capture(frame) => self.capture(frame),
            Event::Kill(at) => {
                self.alive.remove(&at);
                *self.lives.entry(at.clone()).or_default() += 1;
                self.cores
                    .insert(at.clone(), Core::new(at.clone(), Limits::default()));
                self.new_epoch(&Place::App, &Place::Node(at.clone()));
                for other in self.alive.clone() {
                    self.new_epoch(&Place::Node(other), &Place::Node(at.clone()));
                }
                self.after_ms(600, Event::Notice(at));
            }
            Event::Notice(at) => {
                for other in self.alive.clone() {
                    self.input(&other, Input::Disconnected(Neighbour::Node(at.clone())));
                }
            }
            Event::Revive(at) => {
                self.alive.insert(at.clone());
                if let Some(target) = self.targets.get(&at).cloned() {
                    self.apply(&at, &target);
                }
                self.connect_all(&at);
                if at == node("edge") {
                    self.app_sends_again();
                }
            }
            Event::Target(at, target) => {
                self.targets.insert(at.clone(), (*target).clone());
                self.apply(&at, &target);
            }
            Event::Tick => {
                for at in self.alive.clone() {
                    self.input(&at, Input::Tick);
                }
                self.after_ms(25, Event::Tick);
            }
        }
    }

    fn apply(&mut self, at: &NodeId, target: &NodeTarget) {
        self.input(at, Input::Target(Box::new(target.clone())));
        for instance in &target.instances {
            self.input(at, Input::InstanceReady(instance.instance));
        }
    }

    /// Targets reach the nodes one after the other, in a random order.
    fn switch(&mut self, at_ms: u64, commit: u64, routes: &[Route]) {
        let names: Vec<NodeId> = self.cores.keys().cloned().collect();
        for name in names {
            let delay = self.rng.random_range(0..40);
            let when = Moment(1_000_000) + Duration::from_millis(at_ms + delay);
            let target = target(name.as_str(), commit, routes);
            self.at(when, Event::Target(name, Box::new(target)));
        }
    }

    /// Each operator appends its name; the sampler leaves frames out.
    fn work(&self, job: &Job) -> JobEnd {
        let is_sampler = job.operator.as_str() == "sampler";
        if is_sampler && !job.frame.0.is_multiple_of(self.sampler_keeps) {
            return JobEnd::Skipped;
        }
        let mut bytes: Vec<u8> = Vec::new();
        for input in &job.inputs {
            bytes.extend_from_slice(&input.bytes);
        }
        bytes.extend_from_slice(format!("/{}", job.operator).as_bytes());
        JobEnd::Output(Payload {
            content: "bytes".into(),
            bytes: bytes.into(),
        })
    }

    fn capture(&mut self, frame: u64) {
        self.app.born.insert(frame, self.now);
        self.app.waiting.push(frame);
        while self.app.waiting.len() > 4 {
            let oldest = self.app.waiting.remove(0);
            self.app.ends.insert(oldest, Outcome::Rejected);
        }
        self.app_pump();
    }

    fn app_pump(&mut self) {
        while self.app.credits > 0 && !self.app.waiting.is_empty() {
            let frame = self.app.waiting.remove(0);
            self.app.credits -= 1;
            let attempt = *self
                .app
                .sent
                .entry(frame)
                .and_modify(|a| *a += 1)
                .or_default();
            let body = Bytes::from(format!("f{frame}"));
            let header = FrameHeader {
                query: query(),
                generation: Generation(0),
                frame: FrameId(frame),
                from: None,
                to: None,
                age_us: u64::try_from(self.now.since(self.app.born[&frame]).as_micros()).unwrap(),
                content: "raw".into(),
                attempt,
                payload_bytes: u32::try_from(body.len()).unwrap(),
            };
            let entry = Neighbour::Node(node("edge"));
            self.travel(Place::App, &entry, Item::Frame(header, body));
        }
    }

    fn app_sends_again(&mut self) {
        let open: Vec<u64> = self
            .app
            .sent
            .keys()
            .filter(|f| !self.app.ends.contains_key(f))
            .copied()
            .collect();
        self.app.waiting.splice(0..0, open);
    }

    fn app_hears(&mut self, from: &Place, item: Item) {
        match item {
            Item::Frame(header, payload) => {
                let to = Self::neighbour(from);
                for message in [
                    HopControl::Received {
                        query: query(),
                        frame: header.frame,
                        to: None,
                    },
                    HopControl::Ended {
                        query: query(),
                        frame: header.frame,
                        to: None,
                        outcome: Outcome::Answered,
                    },
                ] {
                    self.travel(Place::App, &to, Item::Control(message));
                }
                let frame = header.frame.0;
                let value = (header.generation, payload.to_vec());
                if self.app.results.insert(frame, value).is_some() {
                    self.app.duplicates += 1;
                }
                self.app.ends.entry(frame).or_insert(Outcome::Answered);
            }
            Item::Control(HopControl::Credit { frames, .. }) => {
                if *from == Place::Node(node("edge")) {
                    self.app.credits += frames;
                    self.app_pump();
                }
            }
            Item::Control(HopControl::Ended { frame, outcome, .. }) => {
                self.app.ends.entry(frame.0).or_insert(outcome);
            }
            Item::Control(_) => {}
        }
    }

    fn stream(&mut self, frames: std::ops::Range<u64>, every_ms: u64) {
        for frame in frames {
            let when = Moment(1_000_000) + Duration::from_millis(100 + frame * every_ms);
            self.at(when, Event::Capture(frame));
        }
        self.after_ms(25, Event::Tick);
    }

    fn count(&self, outcome: Outcome) -> usize {
        self.app.ends.values().filter(|o| **o == outcome).count()
    }

    /// Nothing is left anywhere, each captured frame has ended, each result is what the pipeline makes of it.
    fn assert_settled(&self, expected_suffix: &str) {
        for frame in self.app.born.keys() {
            assert!(
                self.app.ends.contains_key(frame),
                "frame {frame} has no end"
            );
        }
        for (frame, (_, payload)) in &self.app.results {
            let text = String::from_utf8(payload.clone()).unwrap();
            let expected = expected_suffix.replace('#', &format!("f{frame}"));
            assert_eq!(text, expected, "frame {frame}");
        }
        for (id, core) in &self.cores {
            assert!(core.frames.is_empty(), "{id} still holds {:?}", core.frames);
            assert_eq!(core.held_bytes, 0, "{id}");
            assert_eq!(core.in_flight(), vec![], "{id}");
        }
        for ((at, _, operator, frame), runs) in &self.runs {
            assert_eq!(*runs, 1, "{operator} ran {frame} {runs} times on {at}");
        }
    }
}

const CHAIN: [(&str, &[&str]); 4] = [
    ("sampler", &[]),
    ("prepare", &["sampler"]),
    ("detector", &["prepare"]),
    ("tracker", &["detector"]),
];
const CHAIN_RESULT: &str = "#/sampler/prepare/detector/tracker";

fn chain(generation: u64, places: [&'static str; 4]) -> Route {
    let placement: Vec<(&str, &[&str], &str)> = CHAIN
        .iter()
        .zip(places)
        .map(|((name, inputs), at)| (*name, *inputs, at))
        .collect();
    route(generation, &placement)
}

const NODES: [&str; 4] = ["edge", "near", "metro", "cloud"];

#[test]
fn frames_cross_several_nodes_and_every_result_comes_back() {
    let mut fleet = Fleet::new(1, &NODES);
    fleet.switch(0, 1, &[chain(1, ["edge", "edge", "near", "cloud"])]);
    fleet.stream(0..100, 100);
    fleet.run_until_ms(14_000);
    fleet.assert_settled(CHAIN_RESULT);
    assert_eq!(fleet.count(Outcome::Answered), 100);
    assert_eq!(fleet.app.duplicates, 0);
}

#[test]
fn a_knob_that_leaves_frames_out_ends_them_as_skipped() {
    let mut fleet = Fleet::new(2, &NODES);
    fleet.sampler_keeps = 2;
    fleet.switch(0, 1, &[chain(1, ["edge", "edge", "near", "cloud"])]);
    fleet.stream(0..100, 100);
    fleet.run_until_ms(14_000);
    fleet.assert_settled(CHAIN_RESULT);
    assert_eq!(fleet.count(Outcome::Skipped), 50);
    assert_eq!(fleet.count(Outcome::Answered), 50);
}

#[test]
fn branches_join_by_frame() {
    let mut fleet = Fleet::new(3, &NODES);
    let placement: Placement<'_> = &[
        ("split", &[], "edge"),
        ("faces", &["split"], "near"),
        ("plates", &["split"], "cloud"),
        ("merge", &["faces", "plates"], "metro"),
    ];
    fleet.switch(0, 1, &[route(1, placement)]);
    fleet.stream(0..60, 100);
    fleet.run_until_ms(9_000);
    fleet.assert_settled("#/split/faces#/split/plates/merge");
    assert_eq!(fleet.count(Outcome::Answered), 60);
}

#[test]
fn before_there_is_a_plan_frames_are_rejected_at_once() {
    let mut fleet = Fleet::new(4, &NODES);
    fleet.switch(0, 1, &[]);
    fleet.stream(0..10, 100);
    fleet.run_until_ms(3_000);
    fleet.assert_settled(CHAIN_RESULT);
    assert_eq!(fleet.count(Outcome::Rejected), 10);
}

#[test]
fn a_planned_switch_loses_and_expires_nothing_and_moves_the_state() {
    for seed in 0..20 {
        let mut fleet = Fleet::new(seed, &NODES);
        let old = chain(1, ["edge", "edge", "near", "cloud"]);
        let new = chain(2, ["edge", "edge", "edge", "near"]);
        fleet.switch(0, 1, std::slice::from_ref(&old));
        // Make before break: both routes are known everywhere before the entry gives out the new generation.
        fleet.switch(3_000, 2, &[new.clone(), old.clone()]);
        fleet.switch(3_500, 3, &[old, new.clone()]);
        fleet.switch(6_000, 4, &[new]);
        fleet.stream(0..80, 100);
        fleet.run_until_ms(12_000);
        fleet.assert_settled(CHAIN_RESULT);
        assert_eq!(fleet.count(Outcome::Answered), 80, "seed {seed}");
        assert_eq!(
            fleet.states_taken,
            vec![(operator("tracker"), node("cloud"))],
            "seed {seed}"
        );
        let generations: BTreeSet<_> = fleet.app.results.values().map(|(g, _)| *g).collect();
        assert_eq!(generations.len(), 2);
    }
}

#[test]
fn what_a_dead_node_held_is_answered_by_its_successor() {
    for seed in 0..20 {
        let mut fleet = Fleet::new(seed, &NODES);
        let old = chain(1, ["edge", "edge", "near", "cloud"]);
        let new = chain(2, ["edge", "edge", "metro", "cloud"]);
        fleet.switch(0, 1, std::slice::from_ref(&old));
        fleet.after_ms(3_010, Event::Kill(node("near")));
        fleet.switch(3_700, 2, &[old, new]);
        fleet.stream(0..80, 100);
        fleet.run_until_ms(12_000);
        fleet.assert_settled(CHAIN_RESULT);
        assert!(
            fleet.count(Outcome::Answered) >= 72,
            "seed {seed}: {:?}",
            fleet.app.ends
        );
        let later = fleet.app.ends.iter().filter(|(f, _)| **f >= 42);
        assert!(
            later.clone().all(|(_, o)| *o == Outcome::Answered),
            "seed {seed}"
        );
    }
}

#[test]
fn a_node_that_is_too_slow_rejects_the_oldest_and_keeps_answering() {
    let mut fleet = Fleet::new(5, &NODES);
    fleet.service_ms = (150, 160);
    fleet.switch(0, 1, &[chain(1, ["edge", "near", "metro", "cloud"])]);
    fleet.stream(0..200, 50);
    fleet.run_until_ms(15_000);
    fleet.assert_settled(CHAIN_RESULT);
    let answered = fleet.count(Outcome::Answered);
    assert!(answered >= 55, "{answered}");
    // A full queue in front of the first operator alone takes half of a frame's life.
    assert!(fleet.count(Outcome::Expired) <= 10);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Nodes die and come back at any moment (the entry, too), plans change at any moment: each frame still ends once, nothing stays
    /// behind, and no node runs an operator twice on one frame in one life.
    #[test]
    fn frames_are_conserved_whatever_happens(
        seed in any::<u64>(),
        kills in proptest::collection::vec((0_usize..4, 500_u64..8_000, 50_u64..3_000), 0..4),
        switches in proptest::collection::vec((500_u64..8_000, proptest::collection::vec(0_usize..4, 4)), 0..4),
        slow in 0_u64..120,
    ) {
        let mut fleet = Fleet::new(seed, &NODES);
        fleet.service_ms = (1, 1 + slow);
        fleet.sampler_keeps = 1 + seed % 2;
        let mut routes = vec![chain(1, ["edge", "near", "metro", "cloud"])];
        fleet.switch(0, 1, &routes);
        let mut ordered = switches;
        ordered.sort();
        for (index, (at_ms, places)) in ordered.iter().enumerate() {
            let generation = u64::try_from(index).unwrap() + 2;
            let places = [NODES[places[0]], NODES[places[1]], NODES[places[2]], NODES[places[3]]];
            routes.push(chain(generation, places));
            if routes.len() > 2 {
                routes.remove(0);
            }
            fleet.switch(*at_ms, generation, &routes);
        }
        for (who, at_ms, away_ms) in kills {
            let at = node(NODES[who]);
            fleet.after_ms(at_ms, Event::Kill(at.clone()));
            fleet.after_ms(at_ms + 600 + away_ms, Event::Revive(at));
        }
        fleet.stream(0..80, 100);
        fleet.run_until_ms(25_000);
        // A frame whose entry died for good before it said anything is the app's to give up.
        for (frame, born) in fleet.app.born.clone() {
            if fleet.now.since(born) > DEADLINE * 2 {
                fleet.app.ends.entry(frame).or_insert(Outcome::Expired);
            }
        }
        fleet.assert_settled(CHAIN_RESULT);
    }
}
