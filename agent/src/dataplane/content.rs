//! Watches what the frames that enter here look like: figures for reports, and changes of mode that have settled.

use std::collections::BTreeMap;
use std::time::Duration;

use compass_shared::detect::{Descriptor, ModeWatch, Settling};
use compass_shared::ids::QueryId;
use compass_shared::model::trigger::Measurement;
use compass_shared::time::{Moment, ms};
use compass_shared::wire::v1::{AgentEvent, ContentReport};

use crate::operators::{Descriptors, describe};
use crate::workers::Payload;

/// Least time between two frames that are looked at: scenes change over seconds, frames may come by the hundred.
const LOOK_EVERY: Duration = Duration::from_millis(90);

/// What is watched for changes of mode. Differences that matter: a step of one exposure value in brightness, from colour to grey, from
/// flat to full contrast.
const WATCHED: [Descriptor; 3] = [
    Descriptor {
        name: "luma mean",
        matters: 25.0,
    },
    Descriptor {
        name: "chroma",
        matters: 10.0,
    },
    Descriptor {
        name: "luma spread",
        matters: 20.0,
    },
];

/// All queries that enter here.
#[derive(Debug, Default)]
pub(super) struct ContentWatch {
    queries: BTreeMap<QueryId, Watched>,
}

#[derive(Debug)]
struct Watched {
    mode: ModeWatch,
    last: Option<(Moment, Descriptors)>,
    window: Window,
    began: Moment,
    newest: Moment,
}

#[derive(Debug, Default)]
struct Window {
    arrived: u32,
    described: u32,
    luma_mean: f64,
    luma_spread: f64,
    chroma: f64,
    motion: f64,
}

impl ContentWatch {
    /// Takes note of a frame and tells of a change of mode.
    pub(super) fn observe(
        &mut self,
        now: Moment,
        query: &QueryId,
        payload: &Payload,
    ) -> Option<AgentEvent> {
        let watched = self
            .queries
            .entry(query.clone())
            .or_insert_with(|| Watched::new(now));
        watched.window.arrived += 1;
        watched.newest = now;
        let seen = watched.last.as_ref().map(|(at, _)| now.since(*at));
        if seen.is_some_and(|since| since < LOOK_EVERY) {
            return None;
        }
        let look = describe(payload)?;
        let motion = watched
            .last
            .as_ref()
            .map_or(0.0, |(_, earlier)| look.motion_since(earlier));
        watched.window.add(&look, motion);
        let values = [look.luma_mean, look.chroma, look.luma_spread];
        watched.last = Some((now, look));
        let change = watched.mode.observe(now, &values)?;
        Some(AgentEvent::ContentDrifted {
            query: query.clone(),
            descriptor: change.descriptor.to_owned(),
            measurement: Measurement {
                value: change.now,
                bound: change.before,
                window_ms: ms(change.window) as u64,
            },
        })
    }

    /// Figures since the last call.
    pub(super) fn take_reports(&mut self) -> Vec<ContentReport> {
        self.queries
            .iter_mut()
            .filter(|(_, watched)| watched.window.arrived > 0)
            .map(|(query, watched)| watched.report(query))
            .collect()
    }

    /// Keeps only these queries.
    pub(super) fn retain(&mut self, is_here: impl Fn(&QueryId) -> bool) {
        self.queries.retain(|query, _| is_here(query));
    }
}

impl Watched {
    fn new(now: Moment) -> Self {
        Self {
            mode: ModeWatch::new(WATCHED.to_vec(), Settling::default()),
            last: None,
            window: Window::default(),
            began: now,
            newest: now,
        }
    }

    fn report(&mut self, query: &QueryId) -> ContentReport {
        let window = std::mem::take(&mut self.window);
        let seconds = self.newest.since(self.began).as_secs_f64();
        self.began = self.newest;
        let described = f64::from(window.described.max(1));
        ContentReport {
            query: query.clone(),
            frames: window.described,
            luma_mean: window.luma_mean / described,
            luma_spread: window.luma_spread / described,
            chroma: window.chroma / described,
            motion: window.motion / described,
            arrival_hz: if seconds > 0.0 {
                f64::from(window.arrived) / seconds
            } else {
                0.0
            },
        }
    }
}

impl Window {
    fn add(&mut self, look: &Descriptors, motion: f64) {
        self.described += 1;
        self.luma_mean += look.luma_mean;
        self.luma_spread += look.luma_spread;
        self.chroma += look.chroma;
        self.motion += motion;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(level: u8) -> Payload {
        Payload {
            content: "rgb8 16x12".to_owned(),
            bytes: vec![level; 16 * 12 * 3].into(),
        }
    }

    #[test]
    fn lights_out_is_reported_once_after_it_has_settled() {
        let query = QueryId::new("q").unwrap();
        let mut watch = ContentWatch::default();
        let mut events = Vec::new();
        for frame in 0..100_u64 {
            let level = if frame < 50 { 120 } else { 30 };
            let now = Moment(1_000_000 + frame * 100_000);
            events.extend(watch.observe(now, &query, &picture(level)));
        }
        let [
            AgentEvent::ContentDrifted {
                descriptor,
                measurement,
                ..
            },
        ] = &events[..]
        else {
            panic!("{events:?}")
        };
        assert_eq!(descriptor, "luma mean");
        assert_eq!((measurement.value, measurement.bound), (30.0, 120.0));
        assert!(measurement.window_ms < 2_000);
        let reports = watch.take_reports();
        assert_eq!(reports.len(), 1);
        assert_eq!(reports[0].frames, 100);
        assert!((reports[0].arrival_hz - 10.0).abs() < 0.2);
        assert_eq!(watch.take_reports(), vec![]);
    }

    #[test]
    fn what_is_not_a_picture_counts_as_an_arrival_only() {
        let query = QueryId::new("q").unwrap();
        let mut watch = ContentWatch::default();
        let bytes = Payload {
            content: "bytes".to_owned(),
            bytes: vec![1, 2, 3].into(),
        };
        assert_eq!(watch.observe(Moment(1), &query, &bytes), None);
        assert_eq!(watch.take_reports()[0].frames, 0);
    }
}
