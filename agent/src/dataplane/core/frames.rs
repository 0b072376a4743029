//! Works: a frame at one operator (or at the entry) of this node, from its arrival to its end.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::Duration;

use bytes::Bytes;
use compass_shared::ids::{FrameId, Generation, QueryId};
use compass_shared::model::outcome::Outcome;
use compass_shared::model::plan::QueryTarget;
use compass_shared::time::Moment;
use compass_shared::wire::v1::{FrameHeader, HopControl};

use super::hops::Hop;
use super::routes::Routes;
use crate::workers::Payload;

use super::{Core, Effect, FrameKey, JobId, Neighbour, Reader};

/// A refused request is not asked to come again sooner than this.
const RETRY_AFTER_MIN: Duration = Duration::from_millis(10);

/// Added to an operator's deadline before a run that never answers is given up here.
const RUN_GRACE: Duration = Duration::from_secs(5);

/// Everything this node holds of one frame.
#[derive(Debug, Default)]
pub(super) struct Frame {
    pub(super) works: BTreeMap<Reader, Work>,
    pub(super) hops: Vec<Hop>,
}

/// A frame at one operator.
#[derive(Debug)]
pub(super) struct Work {
    /// When the frame was captured, on this node's clock (its age subtracted from its arrival).
    pub(super) born: Moment,
    pub(super) generation: Generation,
    /// Carried along, so that the app can tell a result that took a detour.
    pub(super) attempt: u16,
    pub(super) inputs: BTreeMap<Reader, Payload>,
    pub(super) upstreams: Vec<Upstream>,
    /// Credits to give back once the frame leaves the queue, with the connection they belong to.
    pub(super) owed: Vec<(Neighbour, u64)>,
    pub(super) stage: Stage,
}

/// Who has to hear of a work's end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Upstream {
    /// A neighbour, which called the reader this on the wire.
    Remote(Neighbour, Reader),
    /// The work of this node that made the input.
    Local(Reader),
}

/// How far a work is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Its route is not known yet.
    Unrouted,
    /// Some inputs are missing.
    Gathering,
    /// It waits for its instance.
    Queued,
    /// Its operator works on it.
    Running(JobId),
    /// Its output is with its readers.
    Handed,
}

impl Core {
    pub(super) fn frame_arrived(
        &mut self,
        from: &Neighbour,
        header: FrameHeader,
        payload: Bytes,
        link: Duration,
    ) {
        let key: FrameKey = (header.query.clone(), header.frame);
        let to = header.to.clone();
        let reader = match from {
            // An app speaks for its own query only (whose the connection is, its certificate says), and enters at the entry.
            Neighbour::App(query) if *query != header.query => return,
            Neighbour::App(_) => None,
            // The entry is for apps, a result is not for a node.
            Neighbour::Node(_) if to.is_none() => return,
            Neighbour::Node(_) => to.clone(),
        };
        self.say(
            from,
            HopControl::Received {
                query: header.query.clone(),
                frame: header.frame,
                to: to.clone(),
            },
        );
        if let Some(outcome) = self.ended.get(&(key.clone(), reader.clone())).copied() {
            self.give_credit(from, &header.query, 1);
            self.say(
                from,
                HopControl::Ended {
                    query: header.query,
                    frame: header.frame,
                    to,
                    outcome,
                },
            );
            return;
        }
        let age = Duration::from_micros(header.age_us).saturating_add(link);
        let arrival = Arrival {
            born: self.now - age,
            generation: header.generation,
            attempt: header.attempt,
            from: header.from,
            payload: Payload {
                content: header.content,
                bytes: payload,
            },
            upstream: Upstream::Remote(from.clone(), to),
            owed: Some((from.clone(), self.epoch(from))),
        };
        self.arrive(&key, &reader, arrival);
    }

    /// Joins an input to the frame's work at `reader`, which is made on the first one.
    pub(super) fn arrive(&mut self, key: &FrameKey, reader: &Reader, arrival: Arrival) {
        let outcome = self.ended.get(&(key.clone(), reader.clone())).copied();
        if let (Some(outcome), Upstream::Local(parent)) = (outcome, &arrival.upstream) {
            let parent = parent.clone();
            return self.end(key, &parent, outcome);
        }
        if let Some(refusal) = self.refusal(key, reader, &arrival) {
            self.make_work(key, reader, arrival);
            return self.end(key, reader, refusal);
        }
        self.make_work(key, reader, arrival);
        self.advance(key, reader);
    }

    /// Whether there is no room for a frame that is new here.
    fn refusal(&self, key: &FrameKey, reader: &Reader, arrival: &Arrival) -> Option<Outcome> {
        let known = self.frames.get(key);
        if known.is_some_and(|frame| frame.works.contains_key(reader)) {
            return None;
        }
        if self.now.since(arrival.born) >= self.deadline_of(key) {
            return Some(Outcome::Expired);
        }
        let is_request = reader.is_none() && self.requests.contains(&key.0);
        if is_request && self.requests_in_care(&key.0) >= self.requests_max() {
            return Some(Outcome::Rejected);
        }
        let count = self.frames_of(&key.0).count();
        let is_full = known.is_none() && count >= self.limits.frames_per_query;
        let bytes = arrival.payload.bytes.len() as u64;
        let is_heavy = self.held_bytes.saturating_add(bytes) > self.limits.held_bytes;
        (is_full || is_heavy).then_some(Outcome::Rejected)
    }

    fn frames_of(&self, query: &QueryId) -> impl Iterator<Item = &Frame> {
        let of_query = self.frames.range((query.clone(), FrameId(0))..);
        of_query
            .take_while(move |((of, _), _)| of == query)
            .map(|(_, frame)| frame)
    }

    /// Requests of a query that were let in here and have not ended.
    fn requests_in_care(&self, query: &QueryId) -> usize {
        let entered = |frame: &&Frame| frame.works.contains_key(&None);
        self.frames_of(query).filter(entered).count()
    }

    /// As many requests of a query as may wait in any one place on their way, so that none is given up for a later one.
    fn requests_max(&self) -> usize {
        self.limits.queue_frames.min(self.limits.waiting_frames)
    }

    /// When a request that is refused may find room: as long as it takes at the present pace until one of those let in has ended.
    fn retry_after(&self, query: &QueryId) -> Duration {
        let deadline = self
            .routes
            .deadline(query)
            .unwrap_or(self.limits.unknown_deadline);
        let answer_time = self.answer_times.get(query).copied();
        let in_care = u32::try_from(self.requests_in_care(query)).unwrap_or(u32::MAX);
        (answer_time.unwrap_or(deadline) / in_care.max(1)).clamp(RETRY_AFTER_MIN, deadline)
    }

    fn note_answer_time(&mut self, query: &QueryId, took: Duration) {
        let known = self.answer_times.entry(query.clone()).or_insert(took);
        *known = known.mul_f64(0.8) + took.mul_f64(0.2);
    }

    fn make_work(&mut self, key: &FrameKey, reader: &Reader, arrival: Arrival) {
        let frame = self.frames.entry(key.clone()).or_default();
        let work = frame.works.entry(reader.clone()).or_insert_with(|| Work {
            born: arrival.born,
            generation: arrival.generation,
            attempt: arrival.attempt,
            inputs: BTreeMap::new(),
            upstreams: Vec::new(),
            owed: Vec::new(),
            stage: Stage::Gathering,
        });
        work.born = work.born.min(arrival.born);
        work.attempt = work.attempt.max(arrival.attempt);
        if !work.upstreams.contains(&arrival.upstream) {
            work.upstreams.push(arrival.upstream);
        }
        let takes_inputs = matches!(work.stage, Stage::Gathering | Stage::Unrouted);
        if takes_inputs {
            work.generation = work.generation.max(arrival.generation);
            if let Entry::Vacant(input) = work.inputs.entry(arrival.from) {
                self.held_bytes += arrival.payload.bytes.len() as u64;
                input.insert(arrival.payload);
            }
            work.owed.extend(arrival.owed);
        } else if let Some((neighbour, epoch)) = arrival.owed {
            self.pay(&neighbour, epoch, &key.0);
        }
    }

    /// Moves a work on as far as it goes without waiting.
    pub(super) fn advance(&mut self, key: &FrameKey, reader: &Reader) {
        let Some(work) = self.work(key, reader) else {
            return;
        };
        if !matches!(work.stage, Stage::Gathering | Stage::Unrouted) {
            return;
        }
        let Some(operator) = reader else {
            return self.enter(key);
        };
        let generation = work.generation;
        if self.routes.query(&key.0).is_none() || self.routes.is_unknown(&key.0, generation) {
            return self.wait_for_route(key, reader);
        }
        let Some(step) = self.routes.step(&key.0, generation, operator) else {
            return self.end(key, reader, Outcome::Rejected);
        };
        if step.node != *self.routes.me() {
            return self.end(key, reader, Outcome::Rejected);
        }
        let instance = step.instance;
        let work = self
            .frames
            .get_mut(key)
            .and_then(|f| f.works.get_mut(reader));
        let Some(work) = work else { return };
        let expected: Vec<Reader> = if step.inputs.is_empty() {
            vec![None]
        } else {
            step.inputs.iter().cloned().map(Some).collect()
        };
        if expected.iter().all(|input| work.inputs.contains_key(input)) {
            self.enqueue(instance, key, reader);
        } else {
            work.stage = Stage::Gathering;
        }
    }

    /// A frame of the app: it is shown to the samples, stamped with the current generation and handed to the first operator.
    fn enter(&mut self, key: &FrameKey) {
        let Some(payload) = self.work(key, &None).and_then(|w| w.inputs.get(&None)) else {
            return;
        };
        let payload = payload.clone();
        self.effects.push(Effect::Observe {
            query: key.0.clone(),
            frame: key.1,
            payload: payload.clone(),
        });
        let first = self.routes.current(&key.0).and_then(|route| {
            Routes::first(route).map(|step| (route.generation, step.operator.clone()))
        });
        let Some((generation, first)) = first else {
            return self.end(key, &None, Outcome::Rejected); // Before there is a plan frames are only for profiling.
        };
        if let Some(work) = self
            .frames
            .get_mut(key)
            .and_then(|f| f.works.get_mut(&None))
        {
            work.generation = generation;
        }
        *self
            .in_flight
            .entry((key.0.clone(), generation))
            .or_default() += 1;
        self.hand(key, &None, vec![Some(first)], payload);
    }

    /// Gives a work's output to its readers, here or elsewhere; from now on the work waits for word of them.
    pub(super) fn hand(
        &mut self,
        key: &FrameKey,
        reader: &Reader,
        readers: Vec<Reader>,
        payload: Payload,
    ) {
        self.pay_owed(key, reader);
        let Some(work) = self
            .frames
            .get_mut(key)
            .and_then(|f| f.works.get_mut(reader))
        else {
            return;
        };
        work.stage = Stage::Handed;
        let inputs = std::mem::take(&mut work.inputs);
        let (born, generation, attempt) = (work.born, work.generation, work.attempt);
        self.release(inputs.values());
        for to in readers {
            if self.work(key, reader).is_none() {
                return; // A reader has ended the frame already.
            }
            let hop = Hop::new(
                reader.clone(),
                to,
                payload.clone(),
                born,
                generation,
                attempt,
            );
            self.route_hop(key, hop);
        }
    }

    /// Ends a work: whoever gave it the frame is told, and what it handed on needs no care any more.
    pub(super) fn end(&mut self, key: &FrameKey, reader: &Reader, outcome: Outcome) {
        self.pay_owed(key, reader);
        let Some(frame) = self.frames.get_mut(key) else {
            return;
        };
        let Some(work) = frame.works.remove(reader) else {
            return;
        };
        let (gone, kept) = std::mem::take(&mut frame.hops)
            .into_iter()
            .partition(|hop| hop.from == *reader);
        frame.hops = kept;
        if frame.works.is_empty() && frame.hops.is_empty() {
            self.frames.remove(key);
        }
        self.release(work.inputs.values());
        if work.stage == Stage::Queued {
            self.leave_queues(key, reader);
        }
        if reader.is_none() && work.stage == Stage::Handed {
            self.left(&key.0, work.generation);
        }
        self.remember(key, reader, outcome);
        for hop in gone {
            self.drop_hop(key, hop);
        }
        let is_request = reader.is_none() && self.requests.contains(&key.0);
        if is_request && matches!(outcome, Outcome::Answered | Outcome::Late) {
            self.note_answer_time(&key.0, self.now.since(work.born));
        }
        if is_request && outcome == Outcome::Rejected {
            let ms = compass_shared::time::ms(self.retry_after(&key.0)).ceil() as u32;
            let message = HopControl::RetryAfter {
                query: key.0.clone(),
                frame: key.1,
                ms,
            };
            self.say(&Neighbour::App(key.0.clone()), message);
        }
        for upstream in work.upstreams {
            match upstream {
                Upstream::Remote(neighbour, to) => self.say(
                    &neighbour,
                    HopControl::Ended {
                        query: key.0.clone(),
                        frame: key.1,
                        to,
                        outcome,
                    },
                ),
                Upstream::Local(parent) => self.end(key, &parent, outcome),
            }
        }
    }

    /// Ends what has passed its deadline.
    pub(super) fn expire(&mut self) {
        let mut late: Vec<(FrameKey, Reader)> = Vec::new();
        for (key, frame) in &self.frames {
            let deadline = self.deadline_of(key);
            for (reader, work) in &frame.works {
                let allowed = match work.stage {
                    Stage::Unrouted | Stage::Gathering | Stage::Queued => deadline,
                    Stage::Running(_) => deadline + RUN_GRACE,
                    Stage::Handed if frame.hops.iter().any(|h| h.waits(reader)) => deadline,
                    Stage::Handed => deadline + self.limits.grace,
                };
                if self.now.since(work.born) >= allowed {
                    late.push((key.clone(), reader.clone()));
                }
            }
        }
        for (key, reader) in late {
            self.end(&key, &reader, Outcome::Expired);
        }
        self.expire_gates();
        self.forget_ended();
    }

    /// Frames whose query is gone end as rejected, and so do those of an app that has been replaced by another one: it numbers its
    /// frames from the start again, so that nothing may be remembered of the old ones.
    pub(super) fn drop_withdrawn(&mut self, before: &Routes) {
        let is_other = |query: &QueryTarget| {
            let now = self.routes.query(&query.query);
            now.is_none_or(|now| {
                query.app_fingerprint.is_some() && now.app_fingerprint != query.app_fingerprint
            })
        };
        let gone: Vec<_> = before
            .queries()
            .filter(|query| is_other(query))
            .map(|query| query.query.clone())
            .collect();
        for query in gone {
            let works: Vec<(FrameKey, Reader)> = self
                .frames
                .iter()
                .filter(|((of, _), _)| *of == query)
                .flat_map(|(key, frame)| frame.works.keys().map(|r| (key.clone(), r.clone())))
                .collect();
            for (key, reader) in works {
                self.end(&key, &reader, Outcome::Rejected);
            }
            self.ended.retain(|((of, _), _), _| *of != query);
        }
    }

    /// Frames that waited for a newer target look for their route again.
    pub(super) fn advance_unrouted(&mut self) {
        let waiting: Vec<(FrameKey, Reader)> = self
            .frames
            .iter()
            .flat_map(|(key, frame)| {
                frame
                    .works
                    .iter()
                    .filter(|(_, work)| matches!(work.stage, Stage::Unrouted | Stage::Gathering))
                    .map(|(reader, _)| (key.clone(), reader.clone()))
            })
            .collect();
        for (key, reader) in waiting {
            self.advance(&key, &reader);
        }
    }

    fn wait_for_route(&mut self, key: &FrameKey, reader: &Reader) {
        let unrouted = self
            .frames
            .values()
            .flat_map(|frame| frame.works.values())
            .filter(|work| work.stage == Stage::Unrouted)
            .count();
        let Some(work) = self
            .frames
            .get_mut(key)
            .and_then(|f| f.works.get_mut(reader))
        else {
            return;
        };
        if work.stage != Stage::Unrouted && unrouted >= self.limits.unrouted_frames {
            return self.end(key, reader, Outcome::Rejected);
        }
        work.stage = Stage::Unrouted;
    }

    pub(super) fn work(&self, key: &FrameKey, reader: &Reader) -> Option<&Work> {
        self.frames.get(key)?.works.get(reader)
    }

    pub(super) fn deadline_of(&self, key: &FrameKey) -> Duration {
        self.routes
            .deadline(&key.0)
            .unwrap_or(self.limits.unknown_deadline)
    }

    fn release<'a>(&mut self, payloads: impl Iterator<Item = &'a Payload>) {
        let bytes: u64 = payloads.map(|p| p.bytes.len() as u64).sum();
        self.held_bytes = self.held_bytes.saturating_sub(bytes);
    }

    fn left(&mut self, query: &QueryId, generation: Generation) {
        let key = (query.clone(), generation);
        if let Some(count) = self.in_flight.get_mut(&key) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.in_flight.remove(&key);
            }
        }
    }

    fn remember(&mut self, key: &FrameKey, reader: &Reader, outcome: Outcome) {
        self.ended.insert((key.clone(), reader.clone()), outcome);
        self.ended_order
            .push_back((self.now, key.clone(), reader.clone()));
        if self.ended_order.len() > self.limits.remembered {
            self.forget_oldest();
        }
    }

    /// Forgets frames whose end lies so far back that a duplicate would have expired.
    pub(super) fn forget_ended(&mut self) {
        let allowed = self.limits.remembered_for;
        while let Some((at, ..)) = self.ended_order.front()
            && self.now.since(*at) > allowed
        {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        if let Some((_, key, reader)) = self.ended_order.pop_front() {
            self.ended.remove(&(key, reader));
        }
    }
}

/// An input of a work as it arrives.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) born: Moment,
    pub(super) generation: Generation,
    pub(super) attempt: u16,
    /// The operator that made the payload.
    pub(super) from: Reader,
    pub(super) payload: Payload,
    pub(super) upstream: Upstream,
    /// The credit it came with.
    pub(super) owed: Option<(Neighbour, u64)>,
}
