//! One bottleneck: a FIFO queue with tail drop before a server of a given rate. Pure; time is an argument.
//!
//! The packet at the head is in service; when the rate changes, what is left of it goes on at the new rate, so a cut of the
//! uplink slows the packets that are already waiting, as on a real link.

use std::collections::VecDeque;
use std::time::Duration;

use super::rate::{RateSchedule, Work};

/// Rate and queue bound of a pipe.
#[derive(Debug, Clone)]
pub struct PipeModel {
    /// The rate over time.
    pub schedule: RateSchedule,
    /// A packet whose wait before service would exceed this is dropped.
    pub queue: Duration,
}

/// A pipe and what waits in it.
#[derive(Debug)]
pub struct Pipe<T> {
    model: PipeModel,
    head: Option<Head<T>>,
    waiting: VecDeque<(T, usize)>,
    waiting_bytes: usize,
    /// Stands in for the rate during an outage, so that the queue bound stays a number of bytes.
    last_positive_rate: u64,
}

#[derive(Debug)]
struct Head<T> {
    item: T,
    bytes: usize,
    left: Work,
    since: Duration,
}

impl<T> Pipe<T> {
    /// An empty pipe.
    pub fn new(model: PipeModel) -> Self {
        Self {
            model,
            head: None,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            last_positive_rate: 0,
        }
    }

    /// Changes rate and queue bound from `now` on; nothing that waits is dropped.
    pub fn set(&mut self, now: Duration, model: PipeModel) {
        self.note_rate(now);
        let old = std::mem::replace(&mut self.model, model);
        if let Some(head) = &mut self.head {
            head.left = head.left.minus(old.schedule.work_between(head.since, now));
            head.since = now;
        }
    }

    /// Puts a packet at the end of the queue, or gives it back when the wait before its service would exceed the bound.
    /// An idle pipe takes every packet.
    pub fn enqueue(&mut self, now: Duration, item: T, bytes: usize) -> Result<(), T> {
        self.note_rate(now);
        if self.head.is_none() {
            self.head = Some(Head {
                item,
                bytes,
                left: Work::of_bytes(bytes),
                since: now,
            });
            return Ok(());
        }
        if self.wait(now).is_none_or(|wait| wait > self.model.queue) {
            return Err(item);
        }
        self.waiting.push_back((item, bytes));
        self.waiting_bytes += bytes;
        Ok(())
    }

    /// When the packet in service will be through; nothing when the pipe is idle or stands still.
    pub fn head_finish(&self) -> Option<Duration> {
        let head = self.head.as_ref()?;
        self.model.schedule.finish(head.since, head.left)
    }

    /// Takes the packet whose service ended at `at` and begins the next.
    pub fn finish_head(&mut self, at: Duration) -> Option<(T, usize)> {
        let done = self.head.take()?;
        if let Some((item, bytes)) = self.waiting.pop_front() {
            self.waiting_bytes -= bytes;
            self.head = Some(Head {
                item,
                bytes,
                left: Work::of_bytes(bytes),
                since: at,
            });
        }
        Some((done.item, done.bytes))
    }

    /// Bytes in the pipe, the packet in service included.
    pub fn backlog_bytes(&self) -> usize {
        self.waiting_bytes + self.head.as_ref().map_or(0, |head| head.bytes)
    }

    /// The delay that a trace adds to a packet leaving at `at`.
    pub fn delay_at(&self, at: Duration) -> Duration {
        self.model.schedule.delay_at(at)
    }

    /// How long a packet that came now would wait before its service, at today's rate; nothing when that is for ever.
    pub fn wait(&self, now: Duration) -> Option<Duration> {
        let Some(head) = &self.head else {
            return Some(Duration::ZERO);
        };
        let Some(rate) = self.model.schedule.rate_at(now) else {
            return Some(Duration::ZERO);
        };
        let rate = if rate == 0 {
            self.last_positive_rate
        } else {
            rate
        };
        let head_left = head
            .left
            .minus(self.model.schedule.work_between(head.since, now));
        Work(head_left.0 + Work::of_bytes(self.waiting_bytes).0).time_at(rate)
    }

    fn note_rate(&mut self, now: Duration) {
        if let Some(rate) = self.model.schedule.rate_at(now).filter(|rate| *rate > 0) {
            self.last_positive_rate = rate;
        }
    }
}
