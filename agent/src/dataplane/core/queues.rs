//! Queues in front of instances, runs of operators, and the gates that hold an operator's first frame until its state has moved here.

use compass_shared::ids::{FrameId, Generation, InstanceId, OperatorId, QueryId};
use compass_shared::model::outcome::Outcome;
use compass_shared::time::Moment;

use super::frames::Stage;
use crate::workers::Payload;

use super::{Core, Effect, FrameKey, Job, JobEnd, JobId, Reader};

/// Runs of one frame after which a failing operator has had its chance: one crash may be the worker's fault, two are the frame's.
const TRIES_MAX: u8 = 2;

/// Frames that wait for one instance; it runs one at a time.
#[derive(Debug, Default)]
pub(super) struct InstanceQueue {
    pub(super) ready: bool,
    pub(super) running: Option<Running>,
    /// Oldest frame first.
    pub(super) waiting: Vec<Waiting>,
}

#[derive(Debug)]
pub(super) struct Running {
    job: JobId,
    waiting: Waiting,
}

#[derive(Debug, Clone)]
pub(super) struct Waiting {
    key: FrameKey,
    reader: Reader,
    tries: u8,
    pub(super) since: Moment,
}

/// Holds an operator's frames back until its state has moved here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gate {
    /// The state was asked for at this moment.
    Asked(Moment),
    /// Frames pass.
    Open,
}

impl Core {
    /// Puts a work whose inputs are complete in front of its instance.
    pub(super) fn enqueue(&mut self, instance: InstanceId, key: &FrameKey, reader: &Reader) {
        let now = self.now;
        if let Some(work) = self
            .frames
            .get_mut(key)
            .and_then(|f| f.works.get_mut(reader))
        {
            work.stage = Stage::Queued;
        }
        let queue = self.queues.entry(instance).or_default();
        let entry = Waiting {
            key: key.clone(),
            reader: reader.clone(),
            tries: 0,
            since: now,
        };
        let order = |w: &Waiting| (w.key.1, w.key.0.clone());
        let position = queue.waiting.partition_point(|w| order(w) <= order(&entry));
        queue.waiting.insert(position, entry);
        self.pump_instance(instance);
        self.trim_queue(instance, &key.0, reader);
    }

    /// Beyond the bound the oldest waiting frame has no room.
    fn trim_queue(&mut self, instance: InstanceId, query: &QueryId, reader: &Reader) {
        loop {
            let Some(queue) = self.queues.get(&instance) else {
                return;
            };
            let mut of_query = queue
                .waiting
                .iter()
                .filter(|w| w.key.0 == *query && w.reader == *reader);
            let oldest = of_query.next().map(|w| w.key.clone());
            if of_query.count() < self.limits.queue_frames {
                return;
            }
            let Some(key) = oldest else { return };
            self.end(&key, reader, Outcome::Rejected);
        }
    }

    /// Starts the next frame of an instance that is ready and idle.
    pub(super) fn pump_instance(&mut self, instance: InstanceId) {
        loop {
            let Some(queue) = self.queues.get(&instance) else {
                return;
            };
            if !queue.ready || queue.running.is_some() {
                return;
            }
            let candidates: Vec<(FrameKey, Reader)> = queue
                .waiting
                .iter()
                .map(|w| (w.key.clone(), w.reader.clone()))
                .collect();
            let next = candidates
                .into_iter()
                .find(|(key, reader)| self.passes_gate(key, reader, instance));
            let Some((key, reader)) = next else { return };
            self.start(instance, &key, &reader);
        }
    }

    fn start(&mut self, instance: InstanceId, key: &FrameKey, reader: &Reader) {
        let deadline = self.deadline_of(key);
        let now = self.now;
        let age = self.work(key, reader).map(|work| now.since(work.born));
        let left = age.and_then(|age| deadline.checked_sub(age));
        let Some(left) = left.filter(|left| !left.is_zero()) else {
            self.leave_queues(key, reader);
            return self.end(key, reader, Outcome::Expired);
        };
        let job = JobId(self.new_id());
        let Some(operator) = reader.clone() else {
            return;
        };
        let Some(queue) = self.queues.get_mut(&instance) else {
            return;
        };
        let Some(position) = queue
            .waiting
            .iter()
            .position(|w| w.key == *key && w.reader == *reader)
        else {
            return;
        };
        let waiting = queue.waiting.remove(position);
        let Some(work) = self
            .frames
            .get_mut(key)
            .and_then(|f| f.works.get_mut(reader))
        else {
            return;
        };
        work.stage = Stage::Running(job);
        let step = self.routes.step(&key.0, work.generation, &operator);
        let order: Vec<Reader> = match step {
            Some(step) if !step.inputs.is_empty() => {
                step.inputs.iter().cloned().map(Some).collect()
            }
            Some(_) => vec![None],
            None => work.inputs.keys().cloned().collect(),
        };
        let inputs: Vec<Payload> = order
            .iter()
            .filter_map(|input| work.inputs.get(input).cloned())
            .collect();
        queue.running = Some(Running { job, waiting });
        self.effects.push(Effect::Run(Job {
            id: job,
            instance,
            query: key.0.clone(),
            frame: key.1,
            operator,
            inputs,
            deadline: left,
        }));
        self.pay_owed(key, reader);
    }

    pub(super) fn finished(&mut self, job: JobId, end: JobEnd) {
        let found = self
            .queues
            .iter_mut()
            .find(|(_, queue)| queue.running.as_ref().is_some_and(|r| r.job == job));
        let Some((instance, queue)) = found else {
            return;
        };
        let instance = *instance;
        let Some(Running { waiting, .. }) = queue.running.take() else {
            return;
        };
        let (key, reader) = (waiting.key.clone(), waiting.reader.clone());
        let is_mine = self
            .work(&key, &reader)
            .is_some_and(|work| work.stage == Stage::Running(job));
        if is_mine {
            match end {
                JobEnd::Output(payload) => self.produced(&key, &reader, payload),
                JobEnd::Skipped => self.end(&key, &reader, Outcome::Skipped),
                JobEnd::Failed if waiting.tries + 1 < TRIES_MAX => {
                    self.try_again(instance, waiting)
                }
                JobEnd::Expired => self.end(&key, &reader, Outcome::Expired),
                JobEnd::Failed | JobEnd::Refused => self.end(&key, &reader, Outcome::Rejected),
            }
        }
        self.pump_instance(instance);
    }

    fn try_again(&mut self, instance: InstanceId, mut waiting: Waiting) {
        waiting.tries += 1;
        if let Some(work) = self
            .frames
            .get_mut(&waiting.key)
            .and_then(|f| f.works.get_mut(&waiting.reader))
        {
            work.stage = Stage::Queued;
        }
        self.queues
            .entry(instance)
            .or_default()
            .waiting
            .insert(0, waiting);
    }

    fn produced(&mut self, key: &FrameKey, reader: &Reader, payload: Payload) {
        let Some(work) = self.work(key, reader) else {
            return;
        };
        let generation = work.generation;
        if self.now.since(work.born) >= self.deadline_of(key) {
            return self.end(key, reader, Outcome::Expired);
        }
        let step = reader
            .as_ref()
            .and_then(|operator| self.routes.step(&key.0, generation, operator));
        let Some(step) = step else {
            return self.end(key, reader, Outcome::Rejected);
        };
        let readers: Vec<Reader> = if step.readers.is_empty() {
            vec![None]
        } else {
            step.readers.iter().cloned().map(Some).collect()
        };
        self.hand(key, reader, readers, payload);
    }

    /// Takes a work that has ended out of the queue it waits in.
    pub(super) fn leave_queues(&mut self, key: &FrameKey, reader: &Reader) {
        for queue in self.queues.values_mut() {
            queue
                .waiting
                .retain(|w| w.key != *key || w.reader != *reader);
        }
    }

    /// The instance that ran an operator in a generation, for a neighbour that asks for its state.
    pub fn instance_of(
        &self,
        query: &QueryId,
        operator: &OperatorId,
        generation: Generation,
    ) -> Option<InstanceId> {
        self.routes
            .route(query, generation)?
            .steps
            .iter()
            .find(|step| step.operator == *operator && step.node == *self.routes.me())
            .map(|step| step.instance)
    }

    /// Forgets the gates of instances that only older generations use: should the operator come back, its state moves again.
    pub(super) fn forget_gates(&mut self) {
        let routes = &self.routes;
        self.gates.retain(|(query, operator, instance), _| {
            routes.query(query).is_some_and(|target| {
                target
                    .routes
                    .iter()
                    .filter(|route| route.generation >= target.current)
                    .flat_map(|route| &route.steps)
                    .any(|step| step.operator == *operator && step.instance == *instance)
            })
        });
    }

    /// Whether an operator's frames may run. The first one at a new place sets the move of its state going; what an older generation
    /// has left finishes where it began.
    fn passes_gate(&mut self, key: &FrameKey, reader: &Reader, instance: InstanceId) -> bool {
        let (Some(operator), Some(work)) = (reader, self.work(key, reader)) else {
            return true;
        };
        let generation = work.generation;
        let current = self.routes.current(&key.0).map(|route| route.generation);
        let is_older = current.is_some_and(|current| generation < current);
        if is_older || !self.routes.is_stateful(instance) {
            return true;
        }
        let gate_key = (key.0.clone(), operator.clone(), instance);
        if let Some(gate) = self.gates.get(&gate_key) {
            return *gate == Gate::Open;
        }
        let Some((left, step)) = self.routes.left(&key.0, generation, operator, instance) else {
            self.gates.insert(gate_key, Gate::Open);
            return true;
        };
        self.effects.push(Effect::TakeState {
            query: key.0.clone(),
            operator: operator.clone(),
            into: instance,
            holder: step.node.clone(),
            holder_instance: step.instance,
            generation: left,
        });
        self.gates.insert(gate_key, Gate::Asked(self.now));
        false
    }

    pub(super) fn open_gate(
        &mut self,
        query: &QueryId,
        operator: &OperatorId,
        instance: InstanceId,
    ) {
        let key = (query.clone(), operator.clone(), instance);
        if let Some(gate) = self.gates.get_mut(&key) {
            *gate = Gate::Open;
            self.pump_instance(instance);
        }
    }

    /// Lets frames pass whose operator's state did not come in time: it starts fresh.
    pub(super) fn expire_gates(&mut self) {
        let wait = self.limits.state_wait;
        let due: Vec<_> = self
            .gates
            .iter()
            .filter(|(_, gate)| matches!(gate, Gate::Asked(at) if self.now.since(*at) >= wait))
            .map(|(key, _)| key.clone())
            .collect();
        for (query, operator, instance) in due {
            self.open_gate(&query, &operator, instance);
        }
    }

    /// The frames an instance works on or holds, for people.
    pub fn queue_length(&self, instance: InstanceId) -> usize {
        self.queues
            .get(&instance)
            .map_or(0, |q| q.waiting.len() + usize::from(q.running.is_some()))
    }

    /// The frame an instance works on.
    pub fn running_frame(&self, instance: InstanceId) -> Option<FrameId> {
        let running = self.queues.get(&instance)?.running.as_ref()?;
        Some(running.waiting.key.1)
    }
}
