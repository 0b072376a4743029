//! Hops: frames on their way to another node or to the app, in this node's care until the other side says how they ended.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use compass_shared::ids::{FrameId, Generation, NodeId, OperatorId, QueryId};
use compass_shared::model::outcome::Outcome;
use compass_shared::time::Moment;
use compass_shared::wire::v1::{FrameHeader, HopControl};

use super::frames::{Arrival, Upstream};
use crate::workers::Payload;

use super::{Core, Effect, FrameKey, Neighbour, Reader, SendId};

/// Credits one neighbour may pile up with us per query; more is a fault of its side.
const CREDITS_MAX: u32 = 64;

/// Bytes towards a neighbour before anything is known of the link: what fits an unmeasured broadband uplink.
const WINDOW_UNKNOWN: u64 = 64 << 10;

/// A payload on its way to one reader.
#[derive(Debug)]
pub(super) struct Hop {
    /// The operator here that made it; `None` for the app's own input.
    pub(super) from: Reader,
    pub(super) to: Reader,
    payload: Payload,
    born: Moment,
    generation: Generation,
    attempt: u16,
    sendings: u16,
    place: Option<Neighbour>,
    state: HopState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HopState {
    Waiting,
    Sent { send: SendId, received: bool },
}

impl Hop {
    pub(super) fn new(
        from: Reader,
        to: Reader,
        payload: Payload,
        born: Moment,
        generation: Generation,
        attempt: u16,
    ) -> Self {
        Self {
            from,
            to,
            payload,
            born,
            generation,
            attempt,
            sendings: 0,
            place: None,
            state: HopState::Waiting,
        }
    }

    /// Whether it is the output of this work and has not left yet.
    pub(super) fn waits(&self, maker: &Reader) -> bool {
        self.from == *maker && self.state == HopState::Waiting
    }

    fn bytes(&self) -> u64 {
        self.payload.bytes.len() as u64
    }

    fn is_under_way(&self) -> bool {
        matches!(
            self.state,
            HopState::Sent {
                received: false,
                ..
            }
        )
    }
}

/// The connection with one neighbour, both directions.
#[derive(Debug)]
pub(super) struct Line {
    connected: bool,
    /// Grows with each connection: credits of an earlier one are void.
    epoch: u64,
    credits: BTreeMap<QueryId, u32>,
    granted: BTreeSet<QueryId>,
    /// Bytes sent and not yet received, as far as known.
    under_way: u64,
    pub(super) window: u64,
    degraded: bool,
    waiting: VecDeque<(FrameKey, Reader, Reader)>,
}

impl Default for Line {
    fn default() -> Self {
        Self {
            connected: false,
            epoch: 0,
            credits: BTreeMap::new(),
            granted: BTreeSet::new(),
            under_way: 0,
            window: WINDOW_UNKNOWN,
            degraded: false,
            waiting: VecDeque::new(),
        }
    }
}

impl Core {
    pub(super) fn connected(&mut self, neighbour: &Neighbour) {
        let line = self.lines.entry(neighbour.clone()).or_default();
        line.connected = true;
        line.epoch += 1;
        line.credits.clear();
        line.granted.clear();
        self.grant(neighbour);
        self.pump_line(neighbour);
    }

    /// What the neighbour held is sent again, along the newest route.
    pub(super) fn disconnected(&mut self, neighbour: &Neighbour) {
        if let Neighbour::App(query) = neighbour {
            self.requests.remove(query);
        }
        let Some(line) = self.lines.get_mut(neighbour) else {
            return;
        };
        line.connected = false;
        line.epoch += 1;
        line.credits.clear();
        line.granted.clear();
        line.under_way = 0;
        line.degraded = false;
        let mut lost = Vec::new();
        for (key, frame) in &mut self.frames {
            let held = frame.hops.extract_if(.., |hop| {
                hop.place.as_ref() == Some(neighbour) && matches!(hop.state, HopState::Sent { .. })
            });
            lost.extend(held.map(|hop| (key.clone(), hop)));
        }
        for (key, mut hop) in lost {
            hop.state = HopState::Waiting;
            hop.attempt = hop.attempt.saturating_add(1);
            self.route_again(&key, hop);
        }
        self.replace_hops();
    }

    /// Lets the neighbour send frames of every query known that it has not been let yet.
    pub(super) fn grant(&mut self, neighbour: &Neighbour) {
        let Some(line) = self.lines.get_mut(neighbour) else {
            return;
        };
        if !line.connected {
            return;
        }
        for target in self.routes.queries() {
            let may_send = match neighbour {
                Neighbour::Node(_) => true,
                Neighbour::App(query) => *query == target.query,
            };
            if may_send && line.granted.insert(target.query.clone()) {
                self.effects.push(Effect::Control {
                    to: neighbour.clone(),
                    message: HopControl::Credit {
                        query: target.query.clone(),
                        frames: self.limits.credit_frames,
                    },
                });
            }
        }
    }

    pub(super) fn control(&mut self, from: &Neighbour, message: HopControl) {
        match message {
            HopControl::Credit { query, .. }
            | HopControl::Received { query, .. }
            | HopControl::Ended { query, .. }
                if matches!(from, Neighbour::App(own) if *own != query) => {}
            HopControl::Credit { query, frames } => {
                if let Some(line) = self.lines.get_mut(from) {
                    let credits = line.credits.entry(query).or_default();
                    *credits = credits.saturating_add(frames).min(CREDITS_MAX);
                }
                self.pump_line(from);
            }
            HopControl::Received { query, frame, to } => self.received(from, &(query, frame), &to),
            HopControl::Ended {
                query,
                frame,
                to,
                outcome,
            } => self.hop_ended(from, &(query, frame), &to, outcome),
            HopControl::Requests { query } => {
                // Only an app says this of its own frames; what a node says of others' is not heard.
                if matches!(from, Neighbour::App(own) if *own == query) {
                    self.requests.insert(query);
                }
            }
            HopControl::Ping(_)
            | HopControl::Pong(_)
            | HopControl::Probe { .. }
            | HopControl::ProbeReport { .. }
            | HopControl::RetryAfter { .. } => {}
        }
    }

    fn received(&mut self, from: &Neighbour, key: &FrameKey, to: &Reader) {
        let Some(frame) = self.frames.get_mut(key) else {
            return;
        };
        let hop = frame
            .hops
            .iter_mut()
            .find(|hop| hop.to == *to && hop.place.as_ref() == Some(from) && hop.is_under_way());
        let Some(hop) = hop else { return };
        let bytes = hop.bytes();
        if let HopState::Sent { received, .. } = &mut hop.state {
            *received = true;
        }
        self.off_the_line(from, bytes);
        self.pump_line(from);
    }

    /// Word of a frame's end. From a place that was left since, only word of a real end counts: that it had no room or time there
    /// says nothing about the new place.
    fn hop_ended(&mut self, from: &Neighbour, key: &FrameKey, to: &Reader, outcome: Outcome) {
        let is_final = matches!(
            outcome,
            Outcome::Answered | Outcome::Late | Outcome::Skipped
        );
        let Some(frame) = self.frames.get_mut(key) else {
            return;
        };
        let ended: Vec<Hop> = frame
            .hops
            .extract_if(.., |hop| {
                let is_there =
                    hop.place.as_ref() == Some(from) && matches!(hop.state, HopState::Sent { .. });
                hop.to == *to && (is_there || is_final)
            })
            .collect();
        for hop in ended {
            let maker = hop.from.clone();
            self.drop_hop(key, hop);
            self.end(key, &maker, outcome);
        }
        self.pump_line(from);
    }

    pub(super) fn send_failed(&mut self, to: &Neighbour, send: SendId) {
        let mut failed = Vec::new();
        for (key, frame) in &mut self.frames {
            let held = frame.hops.extract_if(.., |hop| {
                hop.place.as_ref() == Some(to)
                    && matches!(hop.state, HopState::Sent { send: id, .. } if id == send)
            });
            failed.extend(held.map(|hop| (key.clone(), hop)));
        }
        for (key, mut hop) in failed {
            if hop.is_under_way() {
                self.off_the_line(to, hop.bytes());
            }
            hop.state = HopState::Waiting;
            hop.attempt = hop.attempt.saturating_add(1);
            self.route_again(&key, hop);
        }
    }

    pub(super) fn set_degraded(&mut self, to: &Neighbour, degraded: bool) {
        self.lines.entry(to.clone()).or_default().degraded = degraded;
        if degraded {
            self.replace_hops();
        }
    }

    /// Takes a hop into care and sends it when its turn comes.
    pub(super) fn route_hop(&mut self, key: &FrameKey, mut hop: Hop) {
        if self.work(key, &hop.from).is_none() {
            return; // Its maker has ended meanwhile.
        }
        let place = match hop.to.clone() {
            None => Some(Neighbour::App(key.0.clone())),
            Some(operator) => self.place(key, &mut hop, &operator),
        };
        if self.is_me(place.as_ref()) {
            return self.hand_over(key, hop);
        }
        hop.place = place.clone();
        let waiting = (key.clone(), hop.from.clone(), hop.to.clone());
        let Some(frame) = self.frames.get_mut(key) else {
            return;
        };
        frame.hops.push(hop);
        if let Some(place) = place {
            self.lines
                .entry(place.clone())
                .or_default()
                .waiting
                .push_back(waiting);
            self.pump_line(&place);
            self.trim_waiting(&place, &key.0);
        }
    }

    /// Where the reader of a hop is: on the route of the frame's own generation, unless that way is barred and there is a newer one.
    fn place(&self, key: &FrameKey, hop: &mut Hop, operator: &OperatorId) -> Option<Neighbour> {
        let own = self.routes.step(&key.0, hop.generation, operator);
        let current = self.routes.current(&key.0);
        let newer = current
            .and_then(|route| {
                Some((
                    route.generation,
                    route.steps.iter().find(|s| s.operator == *operator)?,
                ))
            })
            .filter(|(generation, step)| *generation > hop.generation && step.inputs.len() <= 1);
        let place = own.map(|step| Neighbour::Node(step.node.clone()));
        let is_good = place.as_ref().is_some_and(|place| {
            let line = self.lines.get(place);
            self.is_me(Some(place)) || line.is_some_and(|line| line.connected && !line.degraded)
        });
        match newer {
            Some((generation, step)) if !is_good => {
                hop.generation = generation;
                Some(Neighbour::Node(step.node.clone()))
            }
            _ => place,
        }
    }

    /// The same for a hop that lost its place: it follows the current route from here on.
    fn route_again(&mut self, key: &FrameKey, mut hop: Hop) {
        if let Some(current) = self.routes.current(&key.0) {
            hop.generation = hop.generation.max(current.generation);
        }
        if hop.sendings >= self.limits.attempts {
            let maker = hop.from.clone();
            return self.end(key, &maker, Outcome::Rejected);
        }
        self.route_hop(key, hop);
    }

    /// An operator of this node reads it.
    fn hand_over(&mut self, key: &FrameKey, hop: Hop) {
        let arrival = Arrival {
            born: hop.born,
            generation: hop.generation,
            attempt: hop.attempt,
            from: hop.from.clone(),
            payload: hop.payload,
            upstream: Upstream::Local(hop.from),
            owed: None,
        };
        self.arrive(key, &hop.to, arrival);
    }

    /// After a change of routes, connections or links: hops that have not left, and those stuck in a link that has become bad, go where
    /// the current route says. Readers that join several inputs are left alone, for all inputs of one frame must meet in one place.
    pub(super) fn replace_hops(&mut self) {
        let mut moving: Vec<(FrameKey, Hop)> = Vec::new();
        let Self {
            frames,
            routes,
            lines,
            ..
        } = self;
        for (key, frame) in frames.iter_mut() {
            let Some(current) = routes.current(&key.0) else {
                continue;
            };
            let found = frame.hops.extract_if(.., |hop| {
                let Some(operator) = &hop.to else {
                    return false;
                };
                let Some(step) = current.steps.iter().find(|s| s.operator == *operator) else {
                    return false;
                };
                let line = hop.place.as_ref().and_then(|place| lines.get(place));
                let is_alive = line.is_some_and(|line| line.connected);
                let joins = step.inputs.len() > 1;
                let is_free = hop.state == HopState::Waiting
                    || (hop.is_under_way() && line.is_some_and(|line| line.degraded));
                let elsewhere = hop.place != Some(Neighbour::Node(step.node.clone()));
                is_free && elsewhere && (!joins || !is_alive)
            });
            moving.extend(found.map(|hop| (key.clone(), hop)));
        }
        for (key, mut hop) in moving {
            self.leave_line(&key, &hop);
            if hop.is_under_way() {
                hop.attempt = hop.attempt.saturating_add(1);
            }
            hop.state = HopState::Waiting;
            self.route_again(&key, hop);
        }
    }

    /// Sends what may be sent to a neighbour, oldest first.
    pub(super) fn pump_line(&mut self, neighbour: &Neighbour) {
        while let Some((key, from, to)) = self.next_to_send(neighbour) {
            let send = SendId(self.new_id());
            let deadline = self.deadline_of(&key);
            let now = self.now;
            let Some(hop) = self.frames.get_mut(&key).and_then(|frame| {
                let mut hops = frame.hops.iter_mut();
                hops.find(|hop| hop.from == from && hop.to == to)
            }) else {
                continue;
            };
            let age = now.since(hop.born);
            hop.sendings += 1;
            hop.state = HopState::Sent {
                send,
                received: false,
            };
            let header = FrameHeader {
                query: key.0.clone(),
                generation: hop.generation,
                frame: key.1,
                from,
                to,
                age_us: u64::try_from(age.as_micros()).unwrap_or(u64::MAX),
                content: hop.payload.content.clone(),
                attempt: hop.attempt,
                payload_bytes: u32::try_from(hop.payload.bytes.len()).unwrap_or(u32::MAX),
            };
            let payload = hop.payload.bytes.clone();
            let bytes = hop.bytes();
            let line = self.lines.entry(neighbour.clone()).or_default();
            line.under_way += bytes;
            if let (Neighbour::Node(_), Some(credits)) = (neighbour, line.credits.get_mut(&key.0)) {
                *credits = credits.saturating_sub(1);
            }
            self.effects.push(Effect::Send {
                to: neighbour.clone(),
                send,
                header,
                payload,
                deadline: deadline.saturating_sub(age),
            });
        }
    }

    /// Takes the first waiting hop that has credit, if the line has room; forgets entries whose hop is gone or has moved.
    fn next_to_send(&mut self, neighbour: &Neighbour) -> Option<(FrameKey, Reader, Reader)> {
        let Self { lines, frames, .. } = self;
        let line = lines.get_mut(neighbour)?;
        line.waiting
            .retain(|entry| is_waiting_at(frames, neighbour, entry));
        if !line.connected || line.under_way >= line.window.max(1) {
            return None;
        }
        let position = line.waiting.iter().position(|(key, ..)| match neighbour {
            Neighbour::App(_) => true,
            Neighbour::Node(_) => line.credits.get(&key.0).is_some_and(|credits| *credits > 0),
        })?;
        line.waiting.remove(position)
    }

    /// A live source drops its oldest waiting frame.
    fn trim_waiting(&mut self, neighbour: &Neighbour, query: &QueryId) {
        let Some(line) = self.lines.get(neighbour) else {
            return;
        };
        let allowed = match neighbour {
            Neighbour::Node(_) if line.connected => self.limits.waiting_frames,
            _ => self.limits.waiting_frames_away,
        };
        let of_query: Vec<_> = line
            .waiting
            .iter()
            .filter(|entry| entry.0.0 == *query && is_waiting_at(&self.frames, neighbour, entry))
            .cloned()
            .collect();
        let surplus = of_query.len().saturating_sub(allowed);
        let mut oldest = of_query;
        oldest.sort_by_key(|(key, ..)| key.1);
        for (key, from, _) in oldest.into_iter().take(surplus) {
            self.end(&key, &from, Outcome::Rejected);
        }
    }

    /// Lets go of a hop whose frame has ended.
    pub(super) fn drop_hop(&mut self, key: &FrameKey, hop: Hop) {
        self.leave_line(key, &hop);
    }

    /// Takes a hop that is under way off its line: its sending is stopped, its bytes no longer count.
    fn leave_line(&mut self, key: &FrameKey, hop: &Hop) {
        if let (
            Some(place),
            HopState::Sent {
                send,
                received: false,
            },
        ) = (&hop.place, hop.state)
        {
            self.off_the_line(place, hop.bytes());
            // Whether the other side will ever see it, and so give its credit back, cannot be known.
            if let Some(line) = self.lines.get_mut(place) {
                let credits = line.credits.entry(key.0.clone()).or_default();
                *credits = (*credits + 1).min(CREDITS_MAX);
            }
            self.effects.push(Effect::Cancel {
                to: place.clone(),
                send,
            });
        }
    }

    fn off_the_line(&mut self, neighbour: &Neighbour, bytes: u64) {
        if let Some(line) = self.lines.get_mut(neighbour) {
            line.under_way = line.under_way.saturating_sub(bytes);
        }
    }

    fn is_me(&self, place: Option<&Neighbour>) -> bool {
        matches!(place, Some(Neighbour::Node(node)) if node == self.routes.me())
    }

    pub(super) fn say(&mut self, to: &Neighbour, message: HopControl) {
        if self.lines.get(to).is_some_and(|line| line.connected) {
            self.effects.push(Effect::Control {
                to: to.clone(),
                message,
            });
        }
    }

    pub(super) fn epoch(&self, neighbour: &Neighbour) -> u64 {
        self.lines.get(neighbour).map_or(0, |line| line.epoch)
    }

    pub(super) fn give_credit(&mut self, to: &Neighbour, query: &QueryId, frames: u32) {
        self.say(
            to,
            HopControl::Credit {
                query: query.clone(),
                frames,
            },
        );
    }

    /// Gives one credit back, if the connection it belongs to still stands.
    pub(super) fn pay(&mut self, neighbour: &Neighbour, epoch: u64, query: &QueryId) {
        if self.epoch(neighbour) == epoch {
            self.give_credit(neighbour, query, 1);
        }
    }

    /// Gives back the credits a work came with.
    pub(super) fn pay_owed(&mut self, key: &FrameKey, reader: &Reader) {
        let work = self
            .frames
            .get_mut(key)
            .and_then(|frame| frame.works.get_mut(reader));
        let owed = work.map(|work| std::mem::take(&mut work.owed));
        for (neighbour, epoch) in owed.unwrap_or_default() {
            self.pay(&neighbour, epoch, &key.0);
        }
    }

    /// Nodes that frames are waiting for: those to be dialled.
    pub fn wanted(&self) -> Vec<NodeId> {
        self.lines
            .iter()
            .filter(|(_, line)| !line.connected && !line.waiting.is_empty())
            .filter_map(|(neighbour, _)| match neighbour {
                Neighbour::Node(node) => Some(node.clone()),
                Neighbour::App(_) => None,
            })
            .collect()
    }

    /// Time since the oldest frame under way to a neighbour was captured; `None` when nothing is under way.
    pub fn oldest_under_way(&self, neighbour: &Neighbour) -> Option<(FrameId, Duration)> {
        self.frames
            .iter()
            .flat_map(|(key, frame)| frame.hops.iter().map(move |hop| (key, hop)))
            .filter(|(_, hop)| hop.place.as_ref() == Some(neighbour) && hop.is_under_way())
            .map(|(key, hop)| (key.1, self.now.since(hop.born)))
            .max_by_key(|(_, age)| *age)
    }
}

fn is_waiting_at(
    frames: &BTreeMap<FrameKey, super::frames::Frame>,
    neighbour: &Neighbour,
    (key, from, to): &(FrameKey, Reader, Reader),
) -> bool {
    frames.get(key).is_some_and(|frame| {
        frame.hops.iter().any(|hop| {
            hop.from == *from
                && hop.to == *to
                && hop.state == HopState::Waiting
                && hop.place.as_ref() == Some(neighbour)
        })
    })
}
