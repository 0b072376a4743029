//! A small fleet in virtual time: the four roles, four agents that do as they are told, an app, links and light under control.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use compass_shared::evaluate::encode_detections;
use compass_shared::ids::{Commit, Digest, FrameId, Generation, InstanceId, NodeId, TrialId};
use compass_shared::model::outcome::{AppReport, OutcomeCounts};
use compass_shared::model::pipeline::PipelineConfiguration;
use compass_shared::model::plan::{NodeTarget, QueryPlan};
use compass_shared::model::query::Query;
use compass_shared::model::telemetry::NodeTelemetry;
use compass_shared::model::trial::{
    CaptureSamples, RunStage, SampleMeasure, SamplesCaptured, StageDone,
};
use compass_shared::model::trigger::{Measurement, Trigger};
use compass_shared::seed::Seed;
use compass_shared::time::{Moment, from_ms};
use compass_shared::vision::Detection;
use compass_shared::wire::v1::{AgentEvent, AgentReport, ContentReport, InstanceState, LinkReport};

use super::fixture;
use crate::Settings;
use crate::roles::{explorer, monitor, profiler, scheduler};

/// Frames per second.
const RATE_HZ: u64 = 10;
/// One way between an agent and the coordinator.
const MESSAGE: Duration = Duration::from_millis(10);
/// Start of a worker.
const COLD_START: Duration = Duration::from_millis(400);
/// Objects in each frame.
const OBJECTS: u64 = 12;

/// Something that will happen.
enum Event {
    Explorer(explorer::Input),
    Profiler(profiler::Input),
    Scheduler(scheduler::Input),
    Monitor(monitor::Input),
    Target(NodeId, Box<NodeTarget>),
    Report(NodeId),
    Second,
    Tick,
}

#[derive(Default)]
struct FakeNode {
    applied: Option<Commit>,
    target: Option<NodeTarget>,
    /// When each instance is ready.
    ready: BTreeMap<InstanceId, Moment>,
    /// When the entry left each generation.
    left: BTreeMap<Generation, Moment>,
}

pub(super) struct Fleet {
    pub(super) now: Moment,
    queue: BTreeMap<(Moment, u64), Event>,
    events: u64,
    pub(super) query: Arc<Query>,
    explorer: explorer::Explorer,
    profiler: profiler::Profiler,
    pub(super) scheduler: scheduler::Scheduler,
    monitor: monitor::Monitor,
    nodes: BTreeMap<NodeId, FakeNode>,
    dead: BTreeSet<NodeId>,
    mute: BTreeSet<NodeId>,
    prefixes: BTreeMap<Digest, PipelineConfiguration>,
    /// Part of its nominal rate that the uplink of the plant has.
    uplink: f64,
    /// From when on an agent holds a link degraded, or no longer.
    verdicts: BTreeMap<(NodeId, NodeId), (Moment, bool)>,
    /// Light as of each moment it changed.
    light: Vec<(Moment, f64)>,
    pub(super) has_labels: bool,
    app_plan: Option<QueryPlan>,
    pub(super) changes: Vec<scheduler::PlanChange>,
    pub(super) alarms: Vec<String>,
    pub(super) infeasible: Vec<String>,
    pub(super) triggers: Vec<(Moment, Trigger)>,
    pub(super) trials: u32,
    pub(super) certified: u32,
    pub(super) finished: Vec<crate::search::Stop>,
    pub(super) reports: Vec<(Moment, f64, f64)>,
    sequence: u64,
}

impl Fleet {
    pub(super) fn new(query: Query, seed: u64) -> Self {
        let query = Arc::new(query);
        let catalogue = fixture::catalogue();
        let settings = Settings::default();
        let mut prefixes = BTreeMap::new();
        for configuration in fixture::all_configurations() {
            for operator in &query.pipeline.operators {
                let prefix = configuration.prefix(&query.pipeline, &operator.id);
                prefixes.insert(prefix, configuration.clone());
            }
        }
        let explorer = explorer::Explorer::new(
            Arc::clone(&query),
            Arc::clone(&catalogue),
            settings.clone(),
            Seed(seed),
            1,
            None,
        )
        .unwrap();
        let mut fleet = Self {
            now: Moment(0),
            queue: BTreeMap::new(),
            events: 0,
            explorer,
            profiler: profiler::Profiler::new(
                Arc::clone(&catalogue),
                settings.trial.clone(),
                TrialId(1 << 32),
            ),
            scheduler: scheduler::Scheduler::new(catalogue, settings.clone(), 1),
            monitor: monitor::Monitor::new(settings.detect, fixture::prices()),
            query,
            nodes: BTreeMap::new(),
            dead: BTreeSet::new(),
            mute: BTreeSet::new(),
            prefixes,
            uplink: 1.0,
            verdicts: BTreeMap::new(),
            light: vec![(Moment(0), 1.0)],
            has_labels: true,
            app_plan: None,
            changes: Vec::new(),
            alarms: Vec::new(),
            infeasible: Vec::new(),
            triggers: Vec::new(),
            trials: 0,
            certified: 0,
            finished: Vec::new(),
            reports: Vec::new(),
            sequence: 0,
        };
        for name in ["edge-1", "near-1", "metro-1", "cloud-1"] {
            fleet.join(name);
        }
        let query = Arc::clone(&fleet.query);
        fleet.after(
            Duration::from_millis(2500),
            Event::Scheduler(scheduler::Input::Register {
                query: Arc::clone(&query),
                app: None,
            }),
        );
        fleet.after(
            Duration::from_millis(2500),
            Event::Monitor(monitor::Input::QueryUp(query)),
        );
        fleet.after(
            Duration::from_millis(2500),
            Event::Explorer(explorer::Input::Start),
        );
        fleet.after(Duration::from_millis(100), Event::Tick);
        fleet.after(Duration::from_secs(1), Event::Second);
        fleet
    }

    pub(super) fn join(&mut self, name: &str) {
        let node = fixture::node_id(name);
        self.dead.remove(&node);
        self.nodes.entry(node.clone()).or_default();
        self.say_up(&node);
        self.after(
            MESSAGE,
            Event::Monitor(monitor::Input::NodeUp {
                node: node.clone(),
                description: fixture::description(name),
            }),
        );
    }

    /// The scheduler is told what a node has and runs.
    fn say_up(&mut self, node: &NodeId) {
        let Some(state) = self.nodes.get(node) else {
            return;
        };
        let instances = state
            .ready
            .keys()
            .map(|instance| fixture::status(*instance, InstanceState::Ready));
        let fact = scheduler::Input::NodeUp {
            node: node.clone(),
            applied: state.applied,
            instances: instances.collect(),
        };
        self.after(MESSAGE, Event::Scheduler(fact));
    }

    /// Nothing is heard of a node for a while; it works on.
    pub(super) fn mute(&mut self, name: &str, is_mute: bool) {
        let node = fixture::node_id(name);
        if is_mute {
            self.mute.insert(node);
        } else {
            self.mute.remove(&node);
        }
    }

    fn after(&mut self, delay: Duration, event: Event) {
        self.events += 1;
        self.queue.insert((self.now + delay, self.events), event);
    }

    /// Runs until a moment since the start.
    pub(super) fn run_until(&mut self, seconds: f64) {
        let end = Moment::from_duration(Duration::from_secs_f64(seconds));
        while let Some((&(at, number), _)) = self.queue.first_key_value() {
            if at > end {
                break;
            }
            let event = self.queue.remove(&(at, number)).unwrap();
            self.now = at;
            self.happen(event);
        }
        self.now = end;
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Explorer(input) => {
                let effects = self.explorer.handle(self.now, input);
                self.on_explorer(effects);
            }
            Event::Profiler(input) => {
                let effects = self.profiler.handle(self.now, input);
                self.on_profiler(effects);
            }
            Event::Scheduler(input) => {
                let effects = self.scheduler.handle(self.now, input);
                self.on_scheduler(effects);
            }
            Event::Monitor(input) => {
                let effects = self.monitor.handle(self.now, input);
                self.on_monitor(effects);
            }
            Event::Target(node, target) => self.apply(node, *target),
            Event::Report(node) => self.report_applied(&node),
            Event::Second => self.second(),
            Event::Tick => {
                self.happen(Event::Monitor(monitor::Input::Tick));
                self.happen(Event::Explorer(explorer::Input::Tick));
                self.happen(Event::Profiler(profiler::Input::Tick));
                self.happen(Event::Scheduler(scheduler::Input::Tick));
                self.after(Duration::from_millis(100), Event::Tick);
            }
        }
    }

    fn on_explorer(&mut self, effects: Vec<explorer::Effect>) {
        for effect in effects {
            match effect {
                explorer::Effect::Capture { request, .. } => self.capture(&request),
                explorer::Effect::DropSamples(set) => {
                    self.happen(Event::Profiler(profiler::Input::DropSet(set)));
                }
                explorer::Effect::WantLabels { set, frames } => {
                    if self.has_labels {
                        let labels = frames.iter().map(|f| (*f, truth(*f))).collect();
                        let input = explorer::Input::Labels { set, labels };
                        self.after(MESSAGE * 3, Event::Explorer(input));
                    }
                }
                explorer::Effect::RunTrial(request) => {
                    self.trials += 1;
                    self.happen(Event::Profiler(profiler::Input::Trial(request)));
                }
                explorer::Effect::CancelTrials(query) => {
                    self.happen(Event::Profiler(profiler::Input::Cancel(query)));
                }
                explorer::Effect::Propose(proposal) => {
                    self.certified += u32::from(proposal.certified);
                    self.happen(Event::Scheduler(scheduler::Input::Propose(proposal)));
                }
                explorer::Effect::Infeasible { report } => self.infeasible.push(report),
                explorer::Effect::Finished { stop, .. } => self.finished.push(stop),
                explorer::Effect::WakeAt(_) => {}
            }
        }
    }

    fn on_profiler(&mut self, effects: Vec<profiler::Effect>) {
        for effect in effects {
            match effect {
                profiler::Effect::RunStage { node, stage } => self.run_stage(node, &stage),
                profiler::Effect::Outcome(outcome) => {
                    self.happen(Event::Explorer(explorer::Input::Trial(outcome)));
                }
                profiler::Effect::Transfer {
                    from,
                    to,
                    bytes,
                    ms,
                } => self.happen(Event::Monitor(monitor::Input::Transfer {
                    from,
                    to,
                    bytes,
                    ms,
                })),
                profiler::Effect::CancelStage { .. }
                | profiler::Effect::Pair { .. }
                | profiler::Effect::Ran(_)
                | profiler::Effect::WakeAt(_) => {}
            }
        }
    }

    fn on_scheduler(&mut self, effects: Vec<scheduler::Effect>) {
        for effect in effects {
            match effect {
                scheduler::Effect::SendTarget { node, target } => {
                    self.after(MESSAGE, Event::Target(node, target));
                }
                scheduler::Effect::PlanChanged(change) => {
                    self.app_plan = Some(change.plan.clone());
                    self.changes.push((*change).clone());
                    let plan = change.plan;
                    self.happen(Event::Monitor(monitor::Input::PlanInForce(Box::new(
                        plan.clone(),
                    ))));
                    self.happen(Event::Explorer(explorer::Input::PlanInForce {
                        generation: plan.generation,
                        operators: plan.operators,
                    }));
                }
                scheduler::Effect::Infeasible { report, .. } => self.infeasible.push(report),
                scheduler::Effect::Reopen { trigger, .. } => {
                    self.happen(Event::Explorer(explorer::Input::Reopen(trigger)));
                }
                scheduler::Effect::Alarm(text) => self.alarms.push(text),
                scheduler::Effect::Persist(_) | scheduler::Effect::WakeAt(_) => {}
            }
        }
        let granted = self.scheduler.granted();
        let cluster = Arc::new(self.monitor.cluster().clone());
        let effects = self
            .profiler
            .handle(self.now, profiler::Input::Cluster { cluster, granted });
        self.on_profiler(effects);
    }

    fn on_monitor(&mut self, effects: Vec<monitor::Effect>) {
        for effect in effects {
            match effect {
                monitor::Effect::Cluster { cluster, triggers } => {
                    self.triggers
                        .extend(triggers.iter().map(|t| (self.now, t.clone())));
                    self.happen(Event::Explorer(explorer::Input::Cluster(Arc::clone(
                        &cluster,
                    ))));
                    for trigger in &triggers {
                        if let Trigger::NodeJoined(node) = trigger {
                            self.say_up(node);
                        }
                    }
                    self.happen(Event::Scheduler(scheduler::Input::Cluster {
                        cluster,
                        triggers,
                    }));
                }
                monitor::Effect::Noticed { query, trigger } => {
                    self.triggers.push((self.now, trigger.clone()));
                    if matches!(trigger, Trigger::ContentDrifted { .. }) {
                        self.happen(Event::Explorer(explorer::Input::ContentDrifted(
                            trigger.clone(),
                        )));
                    }
                    self.happen(Event::Scheduler(scheduler::Input::Noticed {
                        query,
                        trigger,
                    }));
                }
                monitor::Effect::Observed { observation, .. } => {
                    self.happen(Event::Explorer(explorer::Input::Observed(*observation)));
                }
                monitor::Effect::Alarm(text) => self.alarms.push(text),
            }
        }
    }

    // ---- agents ----

    fn capture(&mut self, request: &CaptureSamples) {
        let wanted = u64::from(request.segments * request.frames_per_segment);
        let period = 1_000_000 / RATE_HZ;
        let newest = self.now.0 / period;
        // Runs begin a second and a half ago, or when the content changed; what is not there yet is waited for.
        let changed = self.light.last().unwrap().0.0.div_ceil(period);
        let first = newest.saturating_sub(RATE_HZ * 3 / 2).max(changed).max(1);
        let last = first + wanted - 1;
        let until = Moment(last * period).since(self.now);
        let segments: Vec<Vec<FrameId>> = (first..=last)
            .map(FrameId)
            .collect::<Vec<_>>()
            .chunks(request.frames_per_segment as usize)
            .map(<[FrameId]>::to_vec)
            .collect();
        let samples = SamplesCaptured {
            set: request.set,
            segments,
            bytes: wanted * fixture::FRAME_BYTES as u64,
        };
        self.after(
            until + MESSAGE * 2,
            Event::Explorer(explorer::Input::Captured(samples)),
        );
    }

    fn light_of(&self, frame: FrameId) -> f64 {
        let at = Moment(frame.0 * (1_000_000 / RATE_HZ));
        let before = self.light.iter().rev().find(|(since, _)| *since <= at);
        before.map_or(1.0, |(_, light)| *light)
    }

    /// Bits per second and round trip in ms of a link now.
    fn link(&self, from: &NodeId, to: &NodeId) -> (f64, f64) {
        let (mbit_s, rtt_ms) = fixture::nominal(from.as_str(), to.as_str());
        let is_home = |node: &NodeId| ["edge-1", "near-1"].contains(&node.as_str());
        let factor = if is_home(from) == is_home(to) {
            1.0
        } else {
            self.uplink
        };
        (mbit_s * 1e6 * factor, rtt_ms)
    }

    fn run_stage(&mut self, node: NodeId, stage: &RunStage) {
        assert!(
            !self.dead.contains(&node),
            "a stage was sent to a dead node"
        );
        let configuration = self.prefixes[&stage.prefix].clone();
        let kind = stage.instance.kind.as_str();
        let speed = fixture::description(node.as_str()).emulated_speed.unwrap();
        let frames: Vec<FrameId> = stage.segments.iter().flatten().copied().collect();
        let work = fixture::work_ms(kind, &configuration);
        let input_kind = match stage.inputs[0].operator.as_ref() {
            None => "source",
            Some(operator) => operator.as_str(),
        };
        let bytes_in = match input_kind {
            "source" => fixture::FRAME_BYTES,
            other => fixture::bytes_out(other, &configuration),
        };
        let mut wall = 80.0;
        let mut transfer = None;
        if stage.inputs[0].holder != node {
            let (bps, rtt_ms) = self.link(&stage.inputs[0].holder, &node);
            let bytes = bytes_in * frames.len() as f64;
            let ms = rtt_ms * 1.5 + bytes * 8e3 / bps;
            transfer = Some((ms, bytes as u64));
            wall += ms;
        }
        let samples: Vec<SampleMeasure> = frames
            .iter()
            .map(|frame| {
                let jitter = 0.9 + 0.2 * part(frame.0, 77);
                let cpu_ms = work * jitter;
                wall += cpu_ms / speed;
                SampleMeasure {
                    frame: *frame,
                    wall_ms: cpu_ms / speed,
                    cpu_ms,
                    bytes_in: bytes_in as u64,
                    bytes_out: fixture::bytes_out(kind, &configuration) as u64,
                    skipped: false,
                    output: stage.return_outputs.then(|| {
                        found(
                            *frame,
                            fixture::recall(&configuration, self.light_of(*frame)),
                        )
                    }),
                }
            })
            .collect();
        let done = StageDone {
            trial: stage.trial,
            samples,
            cold_start_ms: 80.0,
            transfer,
            achieved_cores: 1.0,
        };
        self.after(
            from_ms(wall) + MESSAGE * 2,
            Event::Profiler(profiler::Input::StageDone { node, done }),
        );
    }

    fn apply(&mut self, node: NodeId, target: NodeTarget) {
        if self.dead.contains(&node) {
            return;
        }
        let now = self.now;
        let state = self.nodes.get_mut(&node).unwrap();
        assert!(
            state.applied.is_none_or(|applied| applied < target.commit),
            "{node} is told {} after {:?}",
            target.commit,
            state.applied
        );
        let wanted: BTreeSet<InstanceId> = target.instances.iter().map(|i| i.instance).collect();
        state.ready.retain(|id, _| wanted.contains(id));
        for id in wanted {
            state.ready.entry(id).or_insert(now + COLD_START);
        }
        for query in &target.queries {
            let before = state
                .target
                .as_ref()
                .and_then(|t| t.queries.iter().find(|q| q.query == query.query))
                .map(|q| q.current);
            if let Some(before) = before
                && before != query.current
            {
                state.left.insert(before, now);
            }
        }
        state.applied = Some(target.commit);
        state.target = Some(target);
        self.check_no_frame_is_lost(&node);
        self.after(MESSAGE, Event::Report(node.clone()));
        self.after(COLD_START + MESSAGE, Event::Report(node.clone()));
        self.after(Duration::from_millis(300), Event::Report(node));
    }

    /// Where an entry node sends new frames, everything is ready to take them (but for a declared gap), and whoever may still have
    /// frames keeps its instances.
    fn check_no_frame_is_lost(&self, entry: &NodeId) {
        let target = self.nodes[entry].target.as_ref().unwrap();
        for query in target.queries.iter().filter(|q| q.entry == *entry) {
            let Some(route) = query.routes.iter().find(|r| r.generation == query.current) else {
                continue;
            };
            let phase = self.scheduler.phase(&query.query);
            let has_gap = phase == Some(format!("warming generation {}", query.current));
            for step in &route.steps {
                if has_gap || self.dead.contains(&step.node) {
                    continue;
                }
                let ready = self.nodes[&step.node].ready.get(&step.instance);
                assert!(
                    ready.is_some_and(|at| *at <= self.now),
                    "new frames would meet no instance of {} on {} ({ready:?} at {:?}): {} {:?} {:?}",
                    step.operator,
                    step.node,
                    self.now,
                    self.scheduler.phase(&query.query).unwrap_or_default(),
                    query.current,
                    target
                        .instances
                        .iter()
                        .map(|i| (i.kind.as_str(), i.share.cpu.0))
                        .collect::<Vec<_>>(),
                );
            }
        }
    }

    fn report_applied(&mut self, node: &NodeId) {
        if self.dead.contains(node) {
            return;
        }
        let state = &self.nodes[node];
        let (Some(commit), Some(target)) = (state.applied, &state.target) else {
            return;
        };
        let instances = state
            .ready
            .iter()
            .map(|(instance, at)| {
                fixture::status(
                    *instance,
                    if *at <= self.now {
                        InstanceState::Ready
                    } else {
                        InstanceState::Starting
                    },
                )
            })
            .collect();
        let in_flight = target
            .queries
            .iter()
            .flat_map(|q| q.routes.iter().map(|r| (q.query.clone(), r.generation)))
            .map(|(query, generation)| {
                let left = state.left.get(&generation);
                let is_empty =
                    left.is_some_and(|at| self.now.since(*at) >= Duration::from_millis(200));
                (query, generation, if is_empty { 0 } else { 2 })
            })
            .collect();
        self.happen(Event::Scheduler(scheduler::Input::Applied {
            node: node.clone(),
            commit,
            instances,
            in_flight,
        }));
    }

    // ---- the world ----

    pub(super) fn kill(&mut self, name: &str) {
        let node = fixture::node_id(name);
        self.dead.insert(node.clone());
        let state = self.nodes.get_mut(&node).unwrap();
        // What it ran is gone; its target lies on its disk.
        state.ready.clear();
    }

    /// The plant's uplink has this part of its rate from now on. Agents notice what they use, or find the rest by probing.
    pub(super) fn set_uplink(&mut self, part: f64) {
        let is_worse = part < self.uplink;
        self.uplink = part;
        let home = ["edge-1", "near-1"].map(fixture::node_id);
        let away = ["metro-1", "cloud-1"].map(fixture::node_id);
        for from in &home {
            for to in &away {
                let needed = self.demand(from, to);
                let (bps, _) = self.link(from, to);
                let (nominal, _) = fixture::nominal(from.as_str(), to.as_str());
                let measurement = Measurement {
                    value: bps / 1e6,
                    bound: nominal,
                    window_ms: 500,
                };
                let (delay, event) = if is_worse {
                    let delay = if needed > bps { 600 } else { 4000 };
                    let peer = to.clone();
                    (delay, AgentEvent::LinkDegraded { peer, measurement })
                } else {
                    let peer = to.clone();
                    (3000, AgentEvent::LinkRecovered { peer, measurement })
                };
                let delay = Duration::from_millis(delay);
                self.verdicts
                    .insert((from.clone(), to.clone()), (self.now + delay, is_worse));
                self.after(
                    delay,
                    Event::Monitor(monitor::Input::Event {
                        node: from.clone(),
                        event,
                    }),
                );
            }
        }
    }

    pub(super) fn set_light(&mut self, light: f64) {
        let before = self.light.last().unwrap().1;
        self.light.push((self.now, light));
        let event = AgentEvent::ContentDrifted {
            query: self.query.id.clone(),
            descriptor: "luma mean".to_owned(),
            measurement: Measurement {
                value: 10.0 + 110.0 * light,
                bound: 10.0 + 110.0 * before,
                window_ms: 800,
            },
        };
        self.after(
            Duration::from_millis(900),
            Event::Monitor(monitor::Input::Event {
                node: self.query.entry.clone(),
                event,
            }),
        );
    }

    fn configuration(plan: &QueryPlan) -> PipelineConfiguration {
        plan.configuration()
    }

    /// Bits per second the plan in force sends over a link.
    fn demand(&self, from: &NodeId, to: &NodeId) -> f64 {
        let Some(plan) = &self.app_plan else {
            return 0.0;
        };
        let configuration = Self::configuration(plan);
        let rate = sampling_rate(&configuration);
        let mut bits = 0.0;
        let mut at = self.query.entry.clone();
        let mut bytes = fixture::FRAME_BYTES;
        let mut hz = RATE_HZ as f64;
        for part in &plan.operators {
            if at == *from && part.node == *to {
                bits += bytes * 8.0 * hz;
            }
            at = part.node.clone();
            bytes = fixture::bytes_out(part.operator.as_str(), &configuration);
            hz = rate;
        }
        bits
    }

    /// What the app sees: latency in ms and accuracy.
    pub(super) fn truth_of(&self, plan: &QueryPlan) -> (f64, f64) {
        let configuration = Self::configuration(plan);
        let mut ms = 3.0;
        let mut at = self.query.entry.clone();
        let mut bytes = fixture::FRAME_BYTES;
        let mut sources = vec![at.clone()];
        for part in &plan.operators {
            if at != part.node {
                let (bps, rtt_ms) = self.link(&at, &part.node);
                let is_full = self.demand(&at, &part.node) > bps;
                ms += bytes * 8e3 / bps + rtt_ms / 2.0 + if is_full { 3000.0 } else { 2.0 };
            }
            let kind = part.operator.as_str();
            let speed = fixture::description(part.node.as_str())
                .emulated_speed
                .unwrap();
            ms += fixture::work_ms(kind, &configuration) / speed / part.share.cpu.cores().min(1.0);
            at = part.node.clone();
            bytes = fixture::bytes_out(kind, &configuration);
            sources.push(at.clone());
        }
        if at != self.query.entry {
            let (bps, rtt_ms) = self.link(&at, &self.query.entry);
            ms += bytes * 8e3 / bps + rtt_ms / 2.0 + 2.0;
        }
        if sources.iter().any(|node| self.dead.contains(node)) {
            ms = f64::INFINITY;
        }
        let interval = (RATE_HZ as f64 / sampling_rate(&configuration)).max(1.0) as u64;
        // Boxes two frames old no longer overlap enough.
        let held = 2.0_f64.min(interval as f64) / interval as f64;
        let light = self.light.last().unwrap().1;
        (ms, held * fixture::recall(&configuration, light))
    }

    pub(super) fn in_force(&self) -> &QueryPlan {
        self.app_plan.as_ref().expect("a plan is in force")
    }

    fn second(&mut self) {
        self.sequence += 1;
        let names: Vec<NodeId> = self.nodes.keys().cloned().collect();
        for node in &names {
            if self.dead.contains(node) || self.mute.contains(node) {
                continue;
            }
            let report = Box::new(self.agent_report(node));
            self.happen(Event::Monitor(monitor::Input::Report {
                node: node.clone(),
                report,
            }));
        }
        if let Some(plan) = self.app_plan.clone() {
            let (latency, accuracy) = self.truth_of(&plan);
            let rate = sampling_rate(&Self::configuration(&plan)) as u64;
            let frames = rate.min(RATE_HZ);
            let is_answering = latency < 1e4;
            self.reports.push((self.now, latency, accuracy));
            let mut counts = OutcomeCounts {
                sent: RATE_HZ,
                ..OutcomeCounts::default()
            };
            let mut latencies_ms = Vec::new();
            let mut accuracies = Vec::new();
            for i in 0..frames {
                if is_answering {
                    counts.answered += 1;
                    latencies_ms.push((latency * (0.95 + 0.01 * i as f64)) as f32);
                    accuracies.push(accuracy as f32);
                } else {
                    counts.expired += 1;
                }
            }
            counts.skipped = RATE_HZ - frames;
            let report = AppReport {
                generation: Some(plan.generation),
                window_ms: 1000,
                counts,
                latencies_ms,
                accuracies,
            };
            self.happen(Event::Monitor(monitor::Input::App {
                query: self.query.id.clone(),
                report,
            }));
        }
        self.after(Duration::from_secs(1), Event::Second);
    }

    fn agent_report(&self, node: &NodeId) -> AgentReport {
        let links = self
            .nodes
            .keys()
            .filter(|peer| *peer != node && !self.dead.contains(*peer))
            .map(|peer| {
                let (bps, rtt_ms) = self.link(node, peer);
                let demand = self.demand(node, peer);
                LinkReport {
                    peer: peer.clone(),
                    rtt_ms: Some(rtt_ms),
                    delivered_bps: demand.min(bps) as u64,
                    network_limited: demand > bps,
                    degraded: self
                        .verdicts
                        .get(&(node.clone(), peer.clone()))
                        .is_some_and(|(since, degraded)| (self.now >= *since) == *degraded),
                    loss: 0.0,
                    sent_bytes: self.sequence * 1000,
                    received_bytes: self.sequence * 1000,
                }
            })
            .collect();
        let light = self.light.last().unwrap().1;
        let content = if *node == self.query.entry {
            vec![ContentReport {
                query: self.query.id.clone(),
                frames: 10,
                luma_mean: 10.0 + 110.0 * light,
                luma_spread: 10.0 + 30.0 * light,
                chroma: 5.0 + 30.0 * light,
                motion: 4.0,
                arrival_hz: RATE_HZ as f64,
            }]
        } else {
            Vec::new()
        };
        AgentReport {
            sequence: self.sequence,
            telemetry: NodeTelemetry::default(),
            links,
            instances: Vec::new(),
            content,
            applied: self.nodes[node].applied,
            sent_bytes: 0,
            received_bytes: 0,
        }
    }

    pub(super) fn cache_hits(&self) -> u64 {
        self.profiler.cache_hits()
    }
}

fn sampling_rate(configuration: &PipelineConfiguration) -> f64 {
    configuration
        .of(&fixture::operator_id("sampler"))
        .and_then(|c| c.integer("rate"))
        .unwrap_or(RATE_HZ as i64) as f64
}

/// A number between 0 and 1 that depends on two others.
fn part(a: u64, b: u64) -> f64 {
    let digest = Digest::of(format!("{a} {b}").as_bytes());
    f64::from(u16::from_be_bytes([
        digest.as_bytes()[0],
        digest.as_bytes()[1],
    ])) / f64::from(u16::MAX)
}

/// An object moves a fifth of its width per frame and keeps to its lane.
fn object(frame: FrameId, number: u64) -> Detection {
    Detection {
        class: 1,
        score: 0.9,
        x: ((frame.0 as f64 * 0.02 + part(number, 1)) % 0.9) as f32,
        y: (number as f64 / OBJECTS as f64) as f32,
        w: 0.1,
        h: 0.08,
    }
}

fn truth(frame: FrameId) -> Vec<u8> {
    let all: Vec<_> = (0..OBJECTS).map(|n| object(frame, n)).collect();
    encode_detections(&all)
}

/// Objects found at a score; as many false alarms as misses, so that F1 is the score.
fn found(frame: FrameId, score: f64) -> Vec<u8> {
    let mut all = Vec::new();
    for n in 0..OBJECTS {
        let mut detection = object(frame, n);
        if part(frame.0, 1000 + n) > score {
            detection.class = 2;
        }
        all.push(detection);
    }
    encode_detections(&all)
}
