//! The data plane's decisions: who owns a frame, where it goes next, when it has ended.
//!
//! Start at [`Core::handle`]: one input in, a list of [`Effect`]s out; the hub performs them and feeds back what came of it. No
//! clock, no I/O, no randomness, so that fleets of these are tested in virtual time with connections that break at any moment.
//!
//! A node's part in a frame's way is a *work*: the frame at one of the query's operators here, or at the entry (reader `None`),
//! where the app hands it over. What a work has produced leaves as *hops*, one per reader elsewhere. A hop is kept until the other
//! side says how the frame ended; when the other side fails, it is sent again along the newest route. A work ends with the first
//! outcome any of its readers reports (with one result operator per pipeline no other branch can answer any more), or on its own:
//! left out by a knob, expired, or without room; then everybody it was received from is told, back to the app.
//!
//! Deliberately absent: sockets, streams and pings (the hub and its connections), link measurement (`link`), how operators run.

mod frames;
mod hops;
mod queues;
mod routes;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use compass_shared::ids::{FrameId, Generation, InstanceId, NodeId, OperatorId, QueryId};
use compass_shared::model::outcome::Outcome;
use compass_shared::model::plan::NodeTarget;
use compass_shared::time::Moment;
use compass_shared::wire::v1::{FrameHeader, HopControl};

use crate::workers::Payload;

use frames::Frame;
use hops::Line;
use queues::{Gate, InstanceQueue};
pub use routes::Routes;

#[cfg(test)]
mod fleet_tests;
#[cfg(test)]
mod tests;

/// Who reads a payload: an operator; `None` stands for the entry where the app hands a frame over and, on a hop, for the app that
/// gets the result.
pub type Reader = Option<OperatorId>;

/// A frame of a query.
pub type FrameKey = (QueryId, FrameId);

/// The other end of a data connection.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Neighbour {
    /// The app of a query.
    App(QueryId),
    /// Another node.
    Node(NodeId),
}

/// Names one sending of one hop, so that news of an earlier one is recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SendId(pub u64);

/// Names one run of an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub u64);

/// One run of an operator on one frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// Names the answer.
    pub id: JobId,
    /// Which instance runs it.
    pub instance: InstanceId,
    /// Whose frame it is; state is kept per query.
    pub query: QueryId,
    /// Which frame.
    pub frame: FrameId,
    /// The operator, for logs.
    pub operator: OperatorId,
    /// One payload per input, in the route's order.
    pub inputs: Vec<Payload>,
    /// The frame's remaining life.
    pub deadline: Duration,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JobEnd {
    /// With an output.
    Output(Payload),
    /// The operator left the frame out on purpose.
    Skipped,
    /// The worker died over it; the frame is tried once more.
    Failed,
    /// The operator cannot read its input, or is down.
    Refused,
    /// The frame's deadline passed first.
    Expired,
}

/// What the core is told.
#[derive(Debug, Clone)]
pub enum Input {
    /// A newer target: routes and instances.
    Target(Box<NodeTarget>),
    /// A data connection is ready.
    Connected(Neighbour),
    /// The neighbour is gone or does not answer; what it held has to be sent again.
    Disconnected(Neighbour),
    /// A frame has arrived whole; `link` is the estimated time it spent between the two nodes.
    Frame {
        /// Who sent it, by its certificate.
        from: Neighbour,
        /// As sent.
        header: FrameHeader,
        /// As sent.
        payload: Bytes,
        /// Estimated time between the nodes.
        link: Duration,
    },
    /// Credit, receipt or end of a frame; other messages are not for the core.
    Control {
        /// Who says so.
        from: Neighbour,
        /// What.
        message: HopControl,
    },
    /// A frame could not be written although the connection stands.
    SendFailed {
        /// Where it was to go.
        to: Neighbour,
        /// Which sending.
        send: SendId,
    },
    /// A run has ended.
    Finished {
        /// Which.
        job: JobId,
        /// How.
        end: JobEnd,
    },
    /// The instance takes frames.
    InstanceReady(InstanceId),
    /// The instance takes no frames for now.
    InstanceStopped(InstanceId),
    /// The state asked for was put in place, or is not to be had.
    StateSettled {
        /// The query.
        query: QueryId,
        /// The operator.
        operator: OperatorId,
        /// The instance it was for.
        instance: InstanceId,
    },
    /// How many bytes may be unacknowledged towards a neighbour before the next frame waits: its bandwidth-delay product.
    Window {
        /// The neighbour.
        to: Neighbour,
        /// In bytes.
        bytes: u64,
    },
    /// Whether the link to a neighbour is much worse than it was: what is stuck in it may go another way.
    Degraded {
        /// The neighbour.
        to: Neighbour,
        /// Whether it is.
        degraded: bool,
    },
    /// Time has passed.
    Tick,
}

/// What the hub has to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// Send a frame; its age is filled in as of now.
    Send {
        /// To whom.
        to: Neighbour,
        /// Names the sending.
        send: SendId,
        /// As it goes on the wire.
        header: FrameHeader,
        /// The bytes.
        payload: Bytes,
        /// After this long the frame is worthless.
        deadline: Duration,
    },
    /// Stop a sending that is under way.
    Cancel {
        /// To whom it goes.
        to: Neighbour,
        /// Which.
        send: SendId,
    },
    /// Say something on a connection's control stream.
    Control {
        /// To whom.
        to: Neighbour,
        /// What.
        message: HopControl,
    },
    /// Run an operator.
    Run(Job),
    /// A frame entered here: keep it for trials, describe its content.
    Observe {
        /// The query.
        query: QueryId,
        /// The frame.
        frame: FrameId,
        /// The app's own input.
        payload: Payload,
    },
    /// Fetch an operator's state before its first frame here.
    TakeState {
        /// The query.
        query: QueryId,
        /// The operator.
        operator: OperatorId,
        /// Where it is to be put.
        into: InstanceId,
        /// The node that has it.
        holder: NodeId,
        /// The instance that has it.
        holder_instance: InstanceId,
        /// The generation that is being left.
        generation: Generation,
    },
}

/// Bounds of the core, each with its reason.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Frames a neighbour may have under way to us per query before it has to wait: a 200 ms round trip at 30 frames/s.
    pub credit_frames: u32,
    /// Frames that wait for one operator of one query; more would only age.
    pub queue_frames: usize,
    /// Frames of one query that wait to be sent to a neighbour that answers: beyond, the oldest has no chance.
    pub waiting_frames: usize,
    /// The same while the neighbour is away: what a re-plan takes (about 1.5 s) at 20 frames/s.
    pub waiting_frames_away: usize,
    /// Frames of one query in this node's care at once.
    pub frames_per_query: usize,
    /// Payload bytes in this node's care at once.
    pub held_bytes: u64,
    /// Frames held for a route that is not known yet (its target is on its way).
    pub unrouted_frames: usize,
    /// How long after a frame's deadline to wait for news of it from downstream.
    pub grace: Duration,
    /// Longest wait for an operator's state before it starts fresh.
    pub state_wait: Duration,
    /// Deadline of frames whose query is not known yet.
    pub unknown_deadline: Duration,
    /// How many ended frames are remembered, so that a duplicate is answered and not run again.
    pub remembered: usize,
    /// How long they are at most remembered: by then a duplicate has expired.
    pub remembered_for: Duration,
    /// Sendings of one hop before it counts as having no room.
    pub attempts: u16,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            credit_frames: 8,
            queue_frames: 4,
            waiting_frames: 4,
            waiting_frames_away: 32,
            frames_per_query: 256,
            held_bytes: 256 << 20,
            unrouted_frames: 64,
            grace: Duration::from_millis(250),
            state_wait: Duration::from_millis(300),
            unknown_deadline: Duration::from_secs(2),
            remembered: 8_192,
            remembered_for: Duration::from_secs(15),
            attempts: 16,
        }
    }
}

/// The state of one node's data plane.
#[derive(Debug)]
pub struct Core {
    limits: Limits,
    now: Moment,
    routes: Routes,
    frames: BTreeMap<FrameKey, Frame>,
    held_bytes: u64,
    lines: BTreeMap<Neighbour, Line>,
    queues: BTreeMap<InstanceId, InstanceQueue>,
    gates: BTreeMap<(QueryId, OperatorId, InstanceId), Gate>,
    ended: BTreeMap<(FrameKey, Reader), Outcome>,
    ended_order: VecDeque<(Moment, FrameKey, Reader)>,
    in_flight: BTreeMap<(QueryId, Generation), u32>,
    /// Queries whose frames are requests: see [`HopControl::Requests`].
    requests: BTreeSet<QueryId>,
    /// How long their answers take, as of late.
    answer_times: BTreeMap<QueryId, Duration>,
    next_id: u64,
    effects: Vec<Effect>,
}

impl Core {
    /// An empty data plane of a node.
    pub fn new(me: NodeId, limits: Limits) -> Self {
        Self {
            limits,
            now: Moment::default(),
            routes: Routes::empty(me),
            frames: BTreeMap::new(),
            held_bytes: 0,
            lines: BTreeMap::new(),
            queues: BTreeMap::new(),
            gates: BTreeMap::new(),
            ended: BTreeMap::new(),
            ended_order: VecDeque::new(),
            in_flight: BTreeMap::new(),
            requests: BTreeSet::new(),
            answer_times: BTreeMap::new(),
            next_id: 0,
            effects: Vec::new(),
        }
    }

    /// Takes one input at a moment of this node's monotonic clock and gives what is to be done, in order.
    pub fn handle(&mut self, now: Moment, input: Input) -> Vec<Effect> {
        self.now = self.now.max(now);
        match input {
            Input::Target(target) => self.target(&target),
            Input::Connected(neighbour) => self.connected(&neighbour),
            Input::Disconnected(neighbour) => self.disconnected(&neighbour),
            Input::Frame {
                from,
                header,
                payload,
                link,
            } => self.frame_arrived(&from, header, payload, link),
            Input::Control { from, message } => self.control(&from, message),
            Input::SendFailed { to, send } => self.send_failed(&to, send),
            Input::Finished { job, end } => self.finished(job, end),
            Input::InstanceReady(instance) => {
                self.queues.entry(instance).or_default().ready = true;
                self.pump_instance(instance);
            }
            Input::InstanceStopped(instance) => {
                if let Some(queue) = self.queues.get_mut(&instance) {
                    queue.ready = false;
                }
            }
            Input::StateSettled {
                query,
                operator,
                instance,
            } => self.open_gate(&query, &operator, instance),
            Input::Window { to, bytes } => {
                self.lines.entry(to.clone()).or_default().window = bytes;
                self.pump_line(&to);
            }
            Input::Degraded { to, degraded } => self.set_degraded(&to, degraded),
            Input::Tick => {}
        }
        self.expire();
        std::mem::take(&mut self.effects)
    }

    /// Whether frames are in this node's care: only then does time matter.
    pub fn is_active(&self) -> bool {
        !self.frames.is_empty()
    }

    /// Frames that entered here and have not ended, per query and generation.
    pub fn in_flight(&self) -> Vec<(QueryId, Generation, u32)> {
        self.in_flight
            .iter()
            .map(|((query, generation), count)| (query.clone(), *generation, *count))
            .collect()
    }

    /// Whether this is what [`Core::in_flight`] would give.
    pub fn has_in_flight(&self, shown: &[(QueryId, Generation, u32)]) -> bool {
        let shown = shown
            .iter()
            .map(|(query, generation, count)| (query, *generation, *count));
        let now = self.in_flight.iter();
        now.map(|((query, generation), count)| (query, *generation, *count))
            .eq(shown)
    }

    /// Whether an instance has frames waiting or running.
    pub fn is_busy(&self, instance: InstanceId) -> bool {
        self.queues
            .get(&instance)
            .is_some_and(|queue| queue.running.is_some() || !queue.waiting.is_empty())
    }

    /// Age in the queue of the oldest frame that waits for an instance.
    pub fn queue_age(&self, now: Moment, instance: InstanceId) -> Option<Duration> {
        let queue = self.queues.get(&instance)?;
        queue
            .waiting
            .iter()
            .map(|waiting| now.since(waiting.since))
            .max()
    }

    /// The routes in force.
    pub fn routes(&self) -> &Routes {
        &self.routes
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Takes a newer target: frames that wait for a route, and hops that have not left yet, look again.
    fn target(&mut self, target: &NodeTarget) {
        let before = std::mem::replace(&mut self.routes, Routes::new(target));
        self.forget_gates();
        for queue in self.routes.instances() {
            self.queues.entry(queue).or_default();
        }
        let routes = &self.routes;
        self.queues.retain(|instance, queue| {
            queue.running.is_some() || !queue.waiting.is_empty() || routes.has_instance(*instance)
        });
        self.drop_withdrawn(&before);
        let routes = &self.routes;
        self.answer_times
            .retain(|query, _| routes.query(query).is_some());
        let neighbours: Vec<_> = self.lines.keys().cloned().collect();
        for neighbour in &neighbours {
            self.grant(neighbour);
        }
        self.advance_unrouted();
        self.replace_hops();
        for neighbour in &neighbours {
            self.pump_line(neighbour);
        }
    }
}
