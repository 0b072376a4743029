//! Turns tracks into the answer an app reads: what is there, what has entered, what has left.
//!
//! The answer is a JSON object: `text` (one sentence), `counts` (per label), `entered` and `left` (ids with labels), and `boxes` (the
//! tracks as they came). Labels come from the knob `labels`, a word of comma-separated names in the order of the classes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::memory::Memory;
use super::tracker::WrittenTrack;
use super::{Input, Knobs, Operator, OperatorError, Produced, only};

#[cfg(test)]
mod tests;

/// An object not among the tracks for this many frame numbers has left: trackers lose sight for a moment.
const LEFT_AFTER: u64 = 10;
/// Tracks in one answer.
const TRACKS_MAX: usize = 4096;

/// What is known to be there: per id its class and when it was last seen.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Present(BTreeMap<u64, (u16, u64)>);

/// The answer.
#[derive(Debug, Serialize)]
struct Answer<'a> {
    text: String,
    counts: BTreeMap<&'a str, u32>,
    entered: Vec<Named<'a>>,
    left: Vec<Named<'a>>,
    boxes: &'a [WrittenTrack],
}

/// An object in an event.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Named<'a> {
    id: u64,
    label: &'a str,
}

pub(super) struct Responder {
    labels: Vec<String>,
    memory: Memory<Present>,
}

impl Responder {
    pub(super) fn new(knobs: &Knobs<'_>) -> Self {
        let labels = knobs.text("labels").map(|text| {
            let names = text.split(',').map(|name| name.trim().to_owned());
            names.collect()
        });
        Self {
            labels: labels.unwrap_or_default(),
            memory: Memory::default(),
        }
    }
}

fn label(labels: &[String], class: u16) -> &str {
    labels
        .get(usize::from(class))
        .filter(|name| !name.is_empty())
        .map_or("object", String::as_str)
}

impl Present {
    /// Takes in one frame's tracks; gives the ids (with classes) that are new and those that have gone.
    fn update(&mut self, frame: u64, tracks: &[WrittenTrack]) -> [Vec<(u64, u16)>; 2] {
        let mut entered = Vec::new();
        for track in tracks {
            if self.0.insert(track.id, (track.class, frame)).is_none() {
                entered.push((track.id, track.class));
            }
        }
        let gone = |last: u64| frame.saturating_sub(last) >= LEFT_AFTER;
        let left = self.0.iter().filter(|(_, (_, last))| gone(*last));
        let left = left.map(|(id, (class, _))| (*id, *class)).collect();
        self.0.retain(|_, (_, last)| !gone(*last));
        [entered, left]
    }
}

fn sentence(counts: &BTreeMap<&str, u32>, entered: &[Named<'_>], left: &[Named<'_>]) -> String {
    let mut parts: Vec<String> = counts
        .iter()
        .map(|(label, count)| format!("{count} {label}{}", if *count == 1 { "" } else { "s" }))
        .collect();
    if parts.is_empty() {
        parts.push("nothing".to_owned());
    }
    let mut text = format!("I see {}", parts.join(", "));
    for (events, verb) in [(entered, "entered"), (left, "left")] {
        for Named { id, label } in events {
            text.push_str(&format!("; {label} {id} {verb}"));
        }
    }
    text
}

impl Operator for Responder {
    fn process(
        &mut self,
        query: &str,
        frame: u64,
        inputs: &[Input<'_>],
    ) -> Result<Produced, OperatorError> {
        let input = only(inputs)?;
        if input.content != "tracks" {
            return Err(OperatorError::Content {
                expected: "`tracks`",
                found: input.content.to_owned(),
            });
        }
        let unreadable = |e: serde_json::Error| OperatorError::Unreadable(e.to_string());
        let mut tracks: Vec<WrittenTrack> =
            serde_json::from_slice(input.bytes).map_err(unreadable)?;
        tracks.truncate(TRACKS_MAX);
        let labels = &self.labels;
        let [entered, left] = self.memory.of(query).update(frame, &tracks).map(|events| {
            let named = events.into_iter().map(|(id, class)| Named {
                id,
                label: label(labels, class),
            });
            named.collect::<Vec<_>>()
        });
        let mut counts = BTreeMap::new();
        for track in &tracks {
            *counts.entry(label(labels, track.class)).or_default() += 1;
        }
        let answer = Answer {
            text: sentence(&counts, &entered, &left),
            counts,
            entered,
            left,
            boxes: &tracks,
        };
        Ok(Produced::Payload {
            content: "answer".to_owned(),
            bytes: serde_json::to_vec(&answer).map_err(unreadable)?,
        })
    }

    fn snapshot(&mut self, query: &str) -> Result<Vec<u8>, OperatorError> {
        self.memory.snapshot(query)
    }

    fn restore(&mut self, query: &str, state: &[u8]) -> Result<(), OperatorError> {
        self.memory.restore(query, state)
    }

    fn reset(&mut self, query: &str) {
        self.memory.forget(query);
    }
}
