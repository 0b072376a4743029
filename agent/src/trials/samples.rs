//! Recent frames of the queries that enter here, and the sets frozen from them.
//!
//! Frames come in by [`SampleStore::offer`] and are kept for a few seconds only: a trial must show how operators do on what the camera
//! sees now, not on what it saw before the light went out. [`SampleStore::capture`] freezes runs of them under a name.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use compass_shared::ids::{FrameId, QueryId, SampleSetId};
use compass_shared::model::trial::{CaptureSamples, SamplesCaptured};
use tokio::sync::Notify;

use super::{StageOutputs, lock};
use crate::workers::Payload;

#[cfg(test)]
mod tests;

/// Frames this old are still taken into a new set.
const FRESH: Duration = Duration::from_millis(1500);
/// A run of frames may miss some: one lost on the way does not end it.
const GAP_MAX: u64 = 3;

/// See the head of this file.
#[derive(Debug)]
pub struct SampleStore {
    max_bytes: u64,
    state: Mutex<State>,
    offered: Notify,
}

#[derive(Debug, Default)]
struct State {
    recent: BTreeMap<QueryId, BTreeMap<FrameId, (Instant, Payload)>>,
    recent_bytes: u64,
    /// Captures under way: they want frames from these moments on.
    wanted_since: Vec<(QueryId, Instant)>,
    sets: BTreeMap<SampleSetId, Set>,
    /// Sets frozen so far: their ids say nothing about their age.
    frozen: u64,
}

#[derive(Debug)]
struct Set {
    number: u64,
    query: QueryId,
    frames: BTreeMap<FrameId, Payload>,
    bytes: u64,
}

impl SampleStore {
    /// Keeps at most this many bytes of recent frames, and as many again of frozen sets.
    pub fn new(max_bytes: u64) -> Self {
        Self {
            max_bytes,
            state: Mutex::default(),
            offered: Notify::new(),
        }
    }

    /// Notes a frame that enters here; the oldest go when room is needed.
    pub fn offer(&self, query: &QueryId, frame: FrameId, payload: &Payload) {
        let bytes = payload.bytes.len() as u64;
        if bytes > self.max_bytes {
            return;
        }
        let now = Instant::now();
        let mut state = lock(&self.state);
        let frames = state.recent.entry(query.clone()).or_default();
        if frames.contains_key(&frame) {
            // Sent again by its owner.
            return;
        }
        frames.insert(frame, (now, payload.clone()));
        state.recent_bytes += bytes;
        state.age(now, self.max_bytes);
        drop(state);
        self.offered.notify_waiters();
    }

    /// The content of a query has changed: what entered until now shows how it was.
    pub fn content_changed(&self, query: &QueryId) {
        let mut state = lock(&self.state);
        let gone = state.recent.remove(query).unwrap_or_default();
        let bytes = gone.values().map(|(_, payload)| payload.bytes.len() as u64);
        state.recent_bytes -= bytes.sum::<u64>();
    }

    /// Freezes runs of frames that entered just now or enter until the deadline.
    pub async fn capture(&self, request: CaptureSamples) -> SamplesCaptured {
        let since = Instant::now()
            .checked_sub(FRESH)
            .unwrap_or_else(Instant::now);
        let _wanted = Wanted::new(self, request.query.clone(), since);
        let deadline = tokio::time::sleep(request.deadline);
        tokio::pin!(deadline);
        loop {
            let offered = self.offered.notified();
            tokio::pin!(offered);
            // Listen before looking, so that no frame falls between.
            offered.as_mut().enable();
            if let Some(captured) = self.freeze(&request, since, true) {
                return captured;
            }
            tokio::select! {
                () = offered => {}
                () = &mut deadline => break,
            }
        }
        self.freeze(&request, since, false)
            .unwrap_or_else(|| SamplesCaptured {
                set: request.set,
                segments: Vec::new(),
                bytes: 0,
            })
    }

    /// Freezes what is asked for, or (when it may be less) what there is.
    fn freeze(
        &self,
        request: &CaptureSamples,
        since: Instant,
        complete: bool,
    ) -> Option<SamplesCaptured> {
        let mut state = lock(&self.state);
        let recent = state.recent.get(&request.query)?;
        let fresh = recent.iter().filter(|(_, (at, _))| *at >= since);
        let ids: Vec<FrameId> = fresh.map(|(frame, _)| *frame).collect();
        let segments = runs(
            &ids,
            request.segments as usize,
            request.frames_per_segment as usize,
            complete,
        )?;
        let frames: BTreeMap<FrameId, Payload> = segments
            .iter()
            .flatten()
            .filter_map(|frame| Some((*frame, recent.get(frame)?.1.clone())))
            .collect();
        let bytes = frames
            .values()
            .map(|payload| payload.bytes.len() as u64)
            .sum();
        state.frozen += 1;
        let set = Set {
            number: state.frozen,
            query: request.query.clone(),
            frames,
            bytes,
        };
        state.sets.insert(request.set, set);
        state.forget_old_sets(self.max_bytes);
        Some(SamplesCaptured {
            set: request.set,
            segments,
            bytes,
        })
    }

    /// Frames of a frozen set, if all of them are in it.
    pub(super) fn captured(
        &self,
        query: &QueryId,
        set: SampleSetId,
        frames: &[FrameId],
    ) -> Option<StageOutputs> {
        let state = lock(&self.state);
        let set = state.sets.get(&set).filter(|set| set.query == *query)?;
        let one = |frame: &FrameId| Some((*frame, Some(set.frames.get(frame)?.clone())));
        frames.iter().map(one).collect()
    }

    pub(super) fn drop_set(&self, set: SampleSetId) {
        lock(&self.state).sets.remove(&set);
    }

    /// Forgets the recent frames of a query that no longer enters here (its frozen sets stay until dropped).
    pub fn forget(&self, query: &QueryId) {
        let mut state = lock(&self.state);
        if let Some(frames) = state.recent.remove(query) {
            let bytes: u64 = frames.values().map(|(_, p)| p.bytes.len() as u64).sum();
            state.recent_bytes -= bytes;
        }
    }
}

impl State {
    /// Drops recent frames that are too old, and the oldest while there are too many bytes.
    fn age(&mut self, now: Instant, max_bytes: u64) {
        for (query, frames) in &mut self.recent {
            let wanted = self
                .wanted_since
                .iter()
                .filter(|(q, _)| q == query)
                .map(|(_, since)| *since);
            let fresh = now.checked_sub(FRESH).unwrap_or(now);
            let since = wanted.fold(fresh, Instant::min);
            frames.retain(|_, (at, payload)| {
                let keep = *at >= since;
                if !keep {
                    self.recent_bytes -= payload.bytes.len() as u64;
                }
                keep
            });
        }
        while self.recent_bytes > max_bytes {
            let oldest = |frames: &BTreeMap<FrameId, (Instant, Payload)>| {
                frames.first_key_value().map(|(_, (at, _))| *at)
            };
            let Some(frames) = self
                .recent
                .values_mut()
                .filter(|frames| !frames.is_empty())
                .min_by_key(|frames| oldest(frames))
            else {
                break;
            };
            if let Some((_, (_, payload))) = frames.pop_first() {
                self.recent_bytes -= payload.bytes.len() as u64;
            }
        }
        self.recent.retain(|_, frames| !frames.is_empty());
    }

    /// Drops the oldest sets while there are too many bytes.
    fn forget_old_sets(&mut self, max_bytes: u64) {
        let total = |sets: &BTreeMap<SampleSetId, Set>| sets.values().map(|s| s.bytes).sum::<u64>();
        while total(&self.sets) > max_bytes && self.sets.len() > 1 {
            let oldest = self.sets.iter().min_by_key(|(_, set)| set.number);
            if let Some(set) = oldest.map(|(id, _)| *id) {
                tracing::warn!(%set, "a sample set is forgotten to make room");
                self.sets.remove(&set);
            }
        }
    }
}

/// Keeps frames of a query for a capture under way.
struct Wanted<'a> {
    store: &'a SampleStore,
    key: (QueryId, Instant),
}

impl<'a> Wanted<'a> {
    fn new(store: &'a SampleStore, query: QueryId, since: Instant) -> Self {
        let key = (query, since);
        lock(&store.state).wanted_since.push(key.clone());
        Self { store, key }
    }
}

impl Drop for Wanted<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.store.state);
        if let Some(index) = state.wanted_since.iter().position(|key| *key == self.key) {
            state.wanted_since.swap_remove(index);
        }
    }
}

/// Cuts frames (ascending) into runs of the wanted length. When it must be `complete`, all runs or nothing; else the longest runs
/// there are, in order of time.
fn runs(
    frames: &[FrameId],
    number: usize,
    length: usize,
    complete: bool,
) -> Option<Vec<Vec<FrameId>>> {
    let mut all: Vec<Vec<FrameId>> = Vec::new();
    for frame in frames {
        match all.last_mut() {
            Some(run)
                if run.len() < length
                    && run.last().is_some_and(|last| frame.0 - last.0 <= GAP_MAX) =>
            {
                run.push(*frame);
            }
            _ => all.push(vec![*frame]),
        }
    }
    if complete {
        all.retain(|run| run.len() >= length);
        if all.len() < number {
            return None;
        }
        all.truncate(number);
        return Some(all);
    }
    let mut by_length: Vec<usize> = (0..all.len()).collect();
    by_length.sort_by_key(|index| (std::cmp::Reverse(all[*index].len()), *index));
    by_length.truncate(number);
    by_length.sort_unstable();
    Some(
        by_length
            .into_iter()
            .map(|index| all[index].clone())
            .collect(),
    )
}
