//! The hub: one task that owns the core and the neighbours, and performs what the core decides.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use compass_shared::detect::{Breach, Edge};
use compass_shared::ids::{Generation, InstanceId, NodeId, OperatorId, QueryId};
use compass_shared::model::plan::{NodeTarget, Peer};
use compass_shared::model::trigger::Measurement;
use compass_shared::time::{Moment, ms};
use compass_shared::wire::v1::{AgentEvent, HopControl};
use compass_transport::{Deadline, Principal, Session};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::AbortHandle;

use crate::workers::{Output, Payload, ProcessError, Processed};

use super::connection::{Arrival, Arrived, ConnectionId, Inbox};
use super::core::{Core, Effect, Input, Job, JobEnd, JobId, Neighbour, SendId};
use super::link::{LinkChange, LivenessStep};
use super::neighbours::{Delivered, LOST_FOR, NEVER_FOR, Neighbours, Taken, beside};
use super::{Board, DataPlaneConfig, Operator, Tuning, peer_requests};

/// Arrivals that may wait for the hub; beyond, the tasks that read connections wait, and with them their peers.
const ARRIVALS: usize = 256;

/// Kibibytes of frames that may be arriving at once, over all connections.
const ROOM_KIB: usize = 128 << 10;

/// How exactly deadlines of frames are kept.
const TICK_BUSY: Duration = Duration::from_millis(25);

/// Wake-ups of a data plane without frames and with quiet connections.
const TICK_IDLE: Duration = Duration::from_millis(500);

/// Events that wait for their reader.
const EVENTS_WAITING: usize = 256;

/// Slices in a row that a queue must be too old to be reported.
const QUEUE_SLICES: u32 = 3;

/// The clock's start: every frame's age can be subtracted from any moment.
const CLOCK_START: Duration = Duration::from_secs(24 * 3600);

/// Longest wait for a state, shorter than the core's, so that its answer is still worth something.
const STATE_WAIT: Duration = Duration::from_millis(250);

/// What the hub is told by others than connections.
pub(super) enum Command {
    Accepted(Principal, Arc<dyn Session>),
    Apply(Box<NodeTarget>),
    Peers(Vec<Peer>),
    InstanceReady(InstanceId, Arc<dyn Operator>),
    InstanceStopped(InstanceId),
    OperatorOf {
        query: QueryId,
        operator: OperatorId,
        generation: Generation,
        reply: oneshot::Sender<Option<Arc<dyn Operator>>>,
    },
    Dialled {
        node: NodeId,
        result: Result<Arc<dyn Session>, String>,
    },
    Finished {
        job: JobId,
        end: JobEnd,
    },
    StateSettled {
        query: QueryId,
        operator: OperatorId,
        instance: InstanceId,
    },
}

pub(super) struct Hub {
    config: DataPlaneConfig,
    tuning: Tuning,
    commands: mpsc::UnboundedSender<Command>,
    board: Arc<Board>,
    began: Instant,
    core: Core,
    neighbours: Neighbours,
    arrivals: mpsc::Receiver<Arrival>,
    operators: BTreeMap<InstanceId, Arc<dyn Operator>>,
    sends: BTreeMap<SendId, AbortHandle>,
    serving: BTreeMap<NodeId, AbortHandle>,
    aged: BTreeMap<InstanceId, Breach>,
    events: VecDeque<AgentEvent>,
    last_slice: Moment,
}

impl Hub {
    pub(super) fn new(
        config: DataPlaneConfig,
        tuning: Tuning,
        commands: mpsc::UnboundedSender<Command>,
        board: Arc<Board>,
    ) -> Self {
        let (sender, arrivals) = mpsc::channel(ARRIVALS);
        let inbox = Inbox {
            arrivals: sender,
            room: Arc::new(Semaphore::new(ROOM_KIB)),
        };
        let neighbours = Neighbours::new(
            config.node.clone(),
            tuning.links,
            Arc::clone(&config.endpoint),
            commands.clone(),
            inbox,
        );
        Self {
            core: Core::new(config.node.clone(), tuning.limits),
            config,
            tuning,
            commands,
            board,
            began: Instant::now(),
            neighbours,
            arrivals,
            operators: BTreeMap::new(),
            sends: BTreeMap::new(),
            serving: BTreeMap::new(),
            aged: BTreeMap::new(),
            events: VecDeque::new(),
            last_slice: Moment::default(),
        }
    }

    /// Runs until aborted.
    pub(super) async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<Command>) {
        loop {
            let tick = if self.core.is_active() {
                TICK_BUSY
            } else if self.neighbours.is_restless() || !self.events.is_empty() {
                self.tuning.links.slice
            } else {
                TICK_IDLE
            };
            tokio::select! {
                command = inbox.recv() => match command {
                    Some(command) => self.command(command),
                    None => return,
                },
                Some(arrival) = self.arrivals.recv() => self.arrival(arrival),
                () = tokio::time::sleep(tick) => self.input(Input::Tick),
            }
            let now = self.now();
            // A slice may be cut short by a millisecond rather than skipped for a tick.
            if now.since(self.last_slice) + Duration::from_millis(1) >= self.tuning.links.slice {
                self.slice(now);
            }
        }
    }

    fn now(&self) -> Moment {
        Moment::from_duration(CLOCK_START + self.began.elapsed())
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Accepted(principal, session) => self.take(&principal, session, None),
            Command::Dialled { node, result } => self.dialled(&node, result),
            Command::Apply(target) => self.apply(target),
            Command::Peers(peers) => {
                let dropped = self.neighbours.measure(self.now(), peers);
                self.dropped(dropped);
            }
            Command::InstanceReady(instance, operator) => {
                self.operators.insert(instance, operator);
                self.input(Input::InstanceReady(instance));
            }
            Command::InstanceStopped(instance) => {
                self.operators.remove(&instance);
                self.input(Input::InstanceStopped(instance));
            }
            Command::OperatorOf {
                query,
                operator,
                generation,
                reply,
            } => {
                let instance = self.core.instance_of(&query, &operator, generation);
                let found = instance.and_then(|instance| self.operators.get(&instance).cloned());
                // The asker may have given up.
                let _ = reply.send(found);
            }
            Command::Finished { job, end } => self.input(Input::Finished { job, end }),
            Command::StateSettled {
                query,
                operator,
                instance,
            } => self.input(Input::StateSettled {
                query,
                operator,
                instance,
            }),
        }
    }

    fn apply(&mut self, target: Box<NodeTarget>) {
        let now = self.now();
        let here: Vec<QueryId> = self.entering();
        let routed = super::core::Routes::new(&target).neighbours();
        let dropped = self.neighbours.apply(now, &target, &routed);
        self.input(Input::Target(target));
        self.dropped(dropped);
        let still = self.entering();
        for query in here.iter().filter(|query| !still.contains(query)) {
            self.config.samples.forget(query);
        }
        let is_here = |query: &QueryId| still.contains(query);
        self.board.shown().content.retain(is_here);
        self.aged.clear();
        self.neighbours.dial(now, &self.core.wanted());
    }

    /// Queries whose frames enter at this node.
    fn entering(&self) -> Vec<QueryId> {
        let queries = self.core.routes().queries();
        let here = queries.filter(|query| query.entry == self.config.node);
        here.map(|query| query.query.clone()).collect()
    }

    fn dropped(&mut self, dropped: Vec<Neighbour>) {
        for neighbour in dropped {
            self.input(Input::Disconnected(neighbour));
        }
        self.show_sessions();
    }

    fn dialled(&mut self, node: &NodeId, result: Result<Arc<dyn Session>, String>) {
        let now = self.now();
        match result {
            Ok(session) => {
                self.neighbours.dialled(now, node, true);
                let principal = session.principal().clone();
                self.take(&principal, session, Some(self.config.node.clone()));
            }
            Err(error) => {
                tracing::debug!(%node, error, "neighbour not reached");
                self.neighbours.dialled(now, node, false);
            }
        }
    }

    fn take(
        &mut self,
        principal: &Principal,
        session: Arc<dyn Session>,
        dialled_by: Option<NodeId>,
    ) {
        let now = self.now();
        let taken = self
            .neighbours
            .take(now, principal, Arc::clone(&session), dialled_by);
        let Taken::Active(neighbour) = taken else {
            return;
        };
        tracing::debug!(peer = %principal, address = %session.remote_address(), "data connection");
        if let Neighbour::Node(node) = &neighbour {
            let serve = peer_requests::serve(
                session,
                Arc::clone(&self.config.trials),
                self.commands.clone(),
            );
            let task = tokio::spawn(serve).abort_handle();
            if let Some(before) = self.serving.insert(node.clone(), task) {
                before.abort();
            }
        }
        // A connection that took the place of another: what that one carried counts as lost.
        self.input(Input::Disconnected(neighbour.clone()));
        self.input(Input::Connected(neighbour.clone()));
        // A new connection does not make a bad link good.
        let is_degraded = matches!(&neighbour, Neighbour::Node(node)
            if self.neighbours.peers.get(node).is_some_and(|line| line.link.is_degraded()));
        if is_degraded {
            self.input(Input::Degraded {
                to: neighbour,
                degraded: true,
            });
        }
        self.show_sessions();
    }

    fn show_sessions(&self) {
        self.board.sessions.send_replace(self.neighbours.sessions());
    }

    fn arrival(&mut self, arrival: Arrival) {
        let Arrival { connection, what } = arrival;
        let Some(from) = self.neighbours.owner(connection).cloned() else {
            return; // Of a connection that has been replaced; what it carried will be sent again.
        };
        match what {
            Arrived::Frame {
                header,
                payload,
                link,
            } => self.input(Input::Frame {
                from,
                header,
                payload,
                link,
            }),
            Arrived::Control(message) => self.control(from, message),
            Arrived::SendFailed(send) => self.input(Input::SendFailed { to: from, send }),
            Arrived::Lost(why) => self.lost(connection, &why),
        }
    }

    fn lost(&mut self, connection: ConnectionId, why: &str) {
        let now = self.now();
        if let Some(neighbour) = self.neighbours.lost(now, connection) {
            tracing::debug!(?neighbour, why, "data connection lost");
            self.input(Input::Disconnected(neighbour));
            self.show_sessions();
            self.neighbours.dial(now, &self.core.wanted());
        }
    }

    fn control(&mut self, from: Neighbour, message: HopControl) {
        let now = self.now();
        if let Neighbour::Node(node) = &from
            && let Some(line) = self.neighbours.peers.get_mut(node)
        {
            match &message {
                HopControl::Pong(number) => {
                    if let Some(sent) = line.pings.remove(number) {
                        line.link.pong(now, now.since(sent));
                    }
                    return;
                }
                HopControl::ProbeReport { micros, .. } => {
                    let change = line.link.probe_report(now, Duration::from_micros(*micros));
                    let node = node.clone();
                    return self.link_changed(&node, change);
                }
                HopControl::Received { query, frame, to } => {
                    let key = ((query.clone(), *frame), to.clone());
                    if let Some(send) = line.under_way.remove(&key) {
                        line.link.received(now, send.0);
                        self.sends.remove(&send);
                    }
                }
                HopControl::Credit { .. }
                | HopControl::Ended { .. }
                | HopControl::Ping(_)
                | HopControl::Probe { .. }
                | HopControl::Requests { .. }
                | HopControl::RetryAfter { .. } => {}
            }
        }
        self.input(Input::Control { from, message });
    }

    fn input(&mut self, input: Input) {
        let effects = self.core.handle(self.now(), input);
        for effect in effects {
            self.perform(effect);
        }
        self.show_in_flight();
    }

    fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Send {
                to,
                send,
                header,
                payload,
                deadline,
            } => {
                let now = self.now();
                if let Neighbour::Node(node) = &to
                    && let Some(line) = self.neighbours.peers.get_mut(node)
                {
                    let key = ((header.query.clone(), header.frame), header.to.clone());
                    line.under_way.insert(key, send);
                    line.link.sent(now, send.0, payload.len() as u64);
                }
                if let Some(connection) = self.neighbours.connection(&to) {
                    let writing = connection.send(send, header, payload, deadline);
                    if let Some(task) = writing {
                        self.sends.insert(send, task);
                    }
                }
            }
            Effect::Cancel { to, send } => {
                if let Some(task) = self.sends.remove(&send) {
                    task.abort();
                }
                let now = self.now();
                if let Neighbour::Node(node) = &to
                    && let Some(line) = self.neighbours.peers.get_mut(node)
                {
                    line.under_way.retain(|_, under_way| *under_way != send);
                    line.link.gone(now, send.0);
                }
            }
            Effect::Control { to, message } => {
                if let Some(connection) = self.neighbours.connection(&to) {
                    connection.say(message);
                }
            }
            Effect::Run(job) => self.run_job(job),
            Effect::Observe {
                query,
                frame,
                payload,
            } => self.observe(&query, frame, &payload),
            Effect::TakeState {
                query,
                operator,
                into,
                holder,
                holder_instance,
                generation,
            } => {
                let from = if holder == self.config.node {
                    Holder::Here(self.operators.get(&holder_instance).cloned())
                } else {
                    // Without a connection the state is as good as gone: waiting for one would only age frames.
                    let holder = Neighbour::Node(holder);
                    let connection = self.neighbours.connection(&holder);
                    Holder::There(connection.map(|connection| Arc::clone(&connection.session)))
                };
                self.move_state(from, query, operator, into, generation);
            }
        }
    }

    fn run_job(&self, job: Job) {
        let operator = self.operators.get(&job.instance).cloned();
        let commands = self.commands.clone();
        tokio::spawn(async move {
            let end = match operator {
                Some(operator) => {
                    let processed = operator
                        .process(&job.query, job.frame, job.inputs, job.deadline)
                        .await;
                    job_end(&job.operator, processed)
                }
                None => JobEnd::Failed,
            };
            // Fails only when the hub has ended.
            let _ = commands.send(Command::Finished { job: job.id, end });
        });
    }

    fn observe(&mut self, query: &QueryId, frame: compass_shared::ids::FrameId, payload: &Payload) {
        self.config.samples.offer(query, frame, payload);
        let now = self.now();
        let change = self.board.shown().content.observe(now, query, payload);
        if let Some(event) = change {
            self.config.samples.content_changed(query);
            self.report(event);
        }
    }

    fn move_state(
        &self,
        from: Holder,
        query: QueryId,
        operator: OperatorId,
        into: InstanceId,
        generation: Generation,
    ) {
        let target = self.operators.get(&into).cloned();
        let commands = self.commands.clone();
        tokio::spawn(async move {
            let moved = tokio::time::timeout(STATE_WAIT, async {
                let target = target.ok_or("its new instance is not ready")?;
                let state = match from {
                    Holder::Here(Some(old)) => {
                        old.snapshot(&query).await.map_err(|e| e.to_string())?
                    }
                    Holder::Here(None) => return Err("its old instance is gone".to_owned()),
                    Holder::There(None) => return Err("its old node is not connected".to_owned()),
                    Holder::There(Some(session)) => {
                        let deadline = Deadline::after(STATE_WAIT);
                        let asked = (query.clone(), operator.clone());
                        let taken = peer_requests::take_state(
                            &session, asked.0, asked.1, generation, deadline,
                        );
                        taken.await?.to_vec()
                    }
                };
                target
                    .restore(&query, state)
                    .await
                    .map_err(|error| error.to_string())
            });
            match moved.await {
                Ok(Ok(())) => tracing::info!(%query, %operator, "state moved here"),
                Ok(Err(reason)) => {
                    tracing::warn!(%query, %operator, reason, "state not moved; starting fresh");
                }
                Err(_) => {
                    tracing::warn!(%query, %operator, "state not moved in time; starting fresh");
                }
            }
            // Fails only when the hub has ended.
            let _ = commands.send(Command::StateSettled {
                query,
                operator,
                instance: into,
            });
        });
    }

    /// The evaluation every 100 ms.
    fn slice(&mut self, now: Moment) {
        self.last_slice = now;
        self.sends.retain(|_, task| !task.is_finished());
        let nodes: Vec<NodeId> = self.neighbours.peers.keys().cloned().collect();
        let delivered = self.neighbours.delivered();
        for node in &nodes {
            self.slice_peer(now, node, &delivered);
        }
        self.neighbours.dial(now, &self.core.wanted());
        self.slice_queues(now);
        self.flush_events();
        let links = self.neighbours.reports(now);
        self.board.shown().links = links;
    }

    fn slice_peer(&mut self, now: Moment, node: &NodeId, delivered: &[Delivered]) {
        let may_probe = !self.neighbours.has_probe_out(now);
        let others_bps = self.neighbours.narrowest_degraded_bps();
        let Some(line) = self.neighbours.peers.get_mut(node) else {
            return;
        };
        let Some((counters, datagrams)) = line.counters() else {
            let is_missing = line.was_connected || line.is_routed;
            let patience = if line.was_connected {
                LOST_FOR
            } else {
                NEVER_FOR
            };
            if is_missing && !line.is_reported && now.since(line.lost_at) >= patience {
                line.is_reported = true;
                let peer = node.clone();
                self.report(AgentEvent::PeerUnreachable { peer });
            }
            return;
        };
        let beside = beside(node, line.link.reference(), delivered);
        let change = line.link.slice(now, counters, beside);
        let window = line.link.window();
        let is_new_window = window.abs_diff(line.window) > line.window / 8;
        if is_new_window {
            line.window = window;
        }
        let is_busy = !line.under_way.is_empty();
        let step = line
            .liveness
            .step(now, datagrams, is_busy, line.link.rtt_newest());
        // Two trains at once would measure half of what they share.
        let probe = may_probe
            .then(|| line.link.wants_probe(now, others_bps))
            .flatten();
        match step {
            LivenessStep::Wait => {}
            LivenessStep::Ping(number) => {
                line.pings
                    .retain(|_, sent| now.since(*sent) < TICK_IDLE * 20);
                line.pings.insert(number, now);
                if let Some(connection) = &line.connection {
                    connection.say(HopControl::Ping(number));
                }
            }
            LivenessStep::Unreachable => {
                line.is_reported = true;
                return self.unreachable(now, node);
            }
        }
        if let (Some(bytes), Some(connection)) = (probe, &line.connection) {
            connection.probe(bytes);
        }
        if is_new_window {
            let to = Neighbour::Node(node.clone());
            self.input(Input::Window { to, bytes: window });
        }
        self.link_changed(node, change);
    }

    fn unreachable(&mut self, now: Moment, node: &NodeId) {
        tracing::warn!(%node, "neighbour does not answer");
        self.neighbours.give_up(now, node, "no answer to two pings");
        self.report(AgentEvent::PeerUnreachable { peer: node.clone() });
        self.input(Input::Disconnected(Neighbour::Node(node.clone())));
        self.show_sessions();
    }

    fn link_changed(&mut self, node: &NodeId, change: Option<LinkChange>) {
        let to = Neighbour::Node(node.clone());
        let peer = node.clone();
        match change {
            None => {}
            Some(LinkChange::Degraded(measurement)) => {
                tracing::info!(%node, now_mbit_s = measurement.value, before_mbit_s = measurement.bound, "link degraded");
                self.report(AgentEvent::LinkDegraded { peer, measurement });
                self.input(Input::Degraded { to, degraded: true });
            }
            Some(LinkChange::Recovered(measurement)) => {
                tracing::info!(%node, now_mbit_s = measurement.value, before_mbit_s = measurement.bound, "link recovered");
                self.report(AgentEvent::LinkRecovered { peer, measurement });
                self.input(Input::Degraded {
                    to,
                    degraded: false,
                });
            }
        }
    }

    fn slice_queues(&mut self, now: Moment) {
        let bounds = self.core.routes().queue_bounds();
        let mut ages = BTreeMap::new();
        let mut found = Vec::new();
        for (instance, bound) in bounds {
            let age = self.core.queue_age(now, instance).unwrap_or_default();
            ages.insert(instance, age);
            let breach = self
                .aged
                .entry(instance)
                .or_insert_with(|| Breach::new(QUEUE_SLICES));
            let bound = ms(bound);
            if breach.above(ms(age), bound, bound / 2.0) == Some(Edge::Raised) {
                let measurement = Measurement {
                    value: ms(age),
                    bound,
                    window_ms: ms(self.tuning.links.slice * QUEUE_SLICES) as u64,
                };
                found.push(AgentEvent::QueueAged {
                    instance,
                    measurement,
                });
            }
        }
        self.board.shown().queue_ages = ages;
        for event in found {
            self.report(event);
        }
    }

    fn report(&mut self, event: AgentEvent) {
        if self.events.len() >= EVENTS_WAITING {
            self.events.pop_front();
            tracing::warn!("an event was dropped: nobody takes them");
        }
        self.events.push_back(event);
        self.flush_events();
    }

    fn flush_events(&mut self) {
        while let Some(event) = self.events.pop_front() {
            match self.config.events.try_send(event) {
                Ok(()) => {}
                Err(mpsc::error::TrySendError::Full(event)) => {
                    self.events.push_front(event);
                    return;
                }
                Err(mpsc::error::TrySendError::Closed(_)) => {}
            }
        }
    }

    fn show_in_flight(&self) {
        let mut shown = self.board.shown();
        if self.core.has_in_flight(&shown.in_flight) {
            return;
        }
        let now = self.core.in_flight();
        let is_there = |old: &(QueryId, Generation, u32)| {
            now.iter().any(|new| (&new.0, new.1) == (&old.0, old.1))
        };
        let has_drained = !shown.in_flight.iter().all(is_there);
        shown.in_flight = now;
        drop(shown);
        if has_drained {
            self.board.drained.send_modify(|count| *count += 1);
        }
    }
}

/// Who has an operator's state.
enum Holder {
    Here(Option<Arc<dyn Operator>>),
    There(Option<Arc<dyn Session>>),
}

fn job_end(operator: &OperatorId, processed: Result<Processed, ProcessError>) -> JobEnd {
    match processed {
        Ok(Processed {
            output: Output::Payload(payload),
            ..
        }) => JobEnd::Output(payload),
        Ok(Processed {
            output: Output::Skipped,
            ..
        }) => JobEnd::Skipped,
        Err(ProcessError::Expired) => JobEnd::Expired,
        Err(error @ (ProcessError::BadInput(_) | ProcessError::Down(_))) => {
            tracing::warn!(%operator, %error, "frame rejected");
            JobEnd::Refused
        }
        Err(error @ (ProcessError::Crashed(_) | ProcessError::Stopped)) => {
            tracing::warn!(%operator, %error, "frame will be tried once more");
            JobEnd::Failed
        }
    }
}
