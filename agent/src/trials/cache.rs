//! Outputs of stages, by sample set and prefix, within a bound of bytes; the least recently used go first.

use std::collections::BTreeMap;

use compass_shared::ids::{Digest, FrameId, QueryId, SampleSetId};

use super::{StageOutputs, total_bytes};
use crate::workers::Payload;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct StageCache {
    max_bytes: u64,
    bytes: u64,
    uses: u64,
    stages: BTreeMap<(SampleSetId, Digest), Stage>,
}

#[derive(Debug)]
struct Stage {
    query: QueryId,
    used: u64,
    outputs: BTreeMap<FrameId, Option<Payload>>,
}

fn bytes_of(output: Option<&Payload>) -> u64 {
    // A frame costs something even when it was skipped.
    64 + output.map_or(0, |payload| payload.bytes.len() as u64)
}

impl StageCache {
    pub(super) fn new(max_bytes: u64) -> Self {
        Self {
            max_bytes,
            bytes: 0,
            uses: 0,
            stages: BTreeMap::new(),
        }
    }

    /// Keeps outputs, unless they alone are more than the bound.
    pub(super) fn insert(
        &mut self,
        query: &QueryId,
        set: SampleSetId,
        prefix: Digest,
        outputs: StageOutputs,
    ) {
        if total_bytes(&outputs) > self.max_bytes {
            tracing::warn!(%query, %set, "the outputs of a stage are too large to be kept");
            return;
        }
        self.uses += 1;
        let stage = self.stages.entry((set, prefix)).or_insert_with(|| Stage {
            query: query.clone(),
            used: 0,
            outputs: BTreeMap::new(),
        });
        stage.used = self.uses;
        for (frame, output) in outputs {
            self.bytes += bytes_of(output.as_ref());
            if let Some(old) = stage.outputs.insert(frame, output) {
                self.bytes -= bytes_of(old.as_ref());
            }
        }
        while self.bytes > self.max_bytes {
            let oldest = self.stages.iter().min_by_key(|(_, stage)| stage.used);
            let Some(key) = oldest.map(|(key, _)| *key) else {
                break;
            };
            self.remove(key);
        }
    }

    /// The outputs for these frames, if all of them are here.
    pub(super) fn get(
        &mut self,
        query: &QueryId,
        set: SampleSetId,
        prefix: Digest,
        frames: &[FrameId],
    ) -> Option<StageOutputs> {
        let stage = self.stages.get_mut(&(set, prefix))?;
        if stage.query != *query {
            return None;
        }
        self.uses += 1;
        stage.used = self.uses;
        let one = |frame: &FrameId| Some((*frame, stage.outputs.get(frame)?.clone()));
        frames.iter().map(one).collect()
    }

    pub(super) fn drop_set(&mut self, set: SampleSetId) {
        let first = (set, Digest::from_bytes([0; 32]));
        let last = (set, Digest::from_bytes([0xff; 32]));
        let keys: Vec<_> = self
            .stages
            .range(first..=last)
            .map(|(key, _)| *key)
            .collect();
        keys.into_iter().for_each(|key| self.remove(key));
    }

    fn remove(&mut self, key: (SampleSetId, Digest)) {
        if let Some(stage) = self.stages.remove(&key) {
            let freed: u64 = stage.outputs.values().map(|o| bytes_of(o.as_ref())).sum();
            self.bytes -= freed;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outputs(frames: &[u64], bytes: usize) -> StageOutputs {
        let payload = |frame: &u64| {
            let payload = Payload {
                content: "bytes".to_owned(),
                bytes: vec![*frame as u8; bytes].into(),
            };
            (FrameId(*frame), frame.is_multiple_of(2).then_some(payload))
        };
        frames.iter().map(payload).collect()
    }

    #[test]
    fn outputs_are_found_by_set_prefix_and_query_and_forgotten_with_the_set() {
        let mut cache = StageCache::new(10_000);
        let (query, other) = (QueryId::new("q").unwrap(), QueryId::new("p").unwrap());
        let (set, prefix) = (SampleSetId(1), Digest::of(b"a"));
        cache.insert(&query, set, prefix, outputs(&[1, 2], 10));
        cache.insert(&query, set, prefix, outputs(&[2, 3], 20));
        let found = cache.get(&query, set, prefix, &[FrameId(3), FrameId(2)]);
        assert_eq!(found, Some(outputs(&[3, 2], 20)));
        assert_eq!(cache.get(&query, set, prefix, &[FrameId(4)]), None);
        assert_eq!(cache.get(&other, set, prefix, &[FrameId(2)]), None);
        assert_eq!(cache.bytes, 3 * 64 + 20);
        cache.insert(&query, SampleSetId(2), prefix, outputs(&[2], 10));
        cache.drop_set(set);
        assert_eq!(cache.get(&query, set, prefix, &[FrameId(2)]), None);
        assert!(
            cache
                .get(&query, SampleSetId(2), prefix, &[FrameId(2)])
                .is_some()
        );
        assert_eq!(cache.bytes, 64 + 10);
    }

    #[test]
    fn the_least_recently_used_stage_goes_when_room_is_needed() {
        let mut cache = StageCache::new(400);
        let query = QueryId::new("q").unwrap();
        let set = SampleSetId(1);
        let prefixes = [b"a", b"b", b"c"].map(|text| Digest::of(text));
        for prefix in prefixes {
            let first = cache.get(&query, set, prefixes[0], &[FrameId(2)]);
            cache.insert(&query, set, prefix, outputs(&[2], 100));
            assert!(first.is_some() || prefix == prefixes[0]);
        }
        assert!(cache.get(&query, set, prefixes[1], &[FrameId(2)]).is_none());
        assert!(cache.get(&query, set, prefixes[2], &[FrameId(2)]).is_some());
        cache.insert(&query, set, prefixes[1], outputs(&[2], 500));
        assert!(cache.get(&query, set, prefixes[1], &[FrameId(2)]).is_none());
        assert!(cache.bytes <= 400);
    }
}
