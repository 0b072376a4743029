//! Follows objects from frame to frame: detections in, tracks (detections with an identity) out.
//!
//! Start at [`State::update`]. Objects are assumed to move on straight at the speed last seen. A detection belongs to the track of its
//! class whose expected box overlaps it most; what is left is matched by distance, because at a low frame rate a fast object's boxes
//! do not overlap. A track that is not seen is carried on for a moment and then forgotten.

use compass_shared::evaluate::decode_detections;
use compass_shared::vision::{Detection, overlap};
use serde::{Deserialize, Serialize};

use super::memory::Memory;
use super::{Input, Operator, OperatorError, Produced, only};

#[cfg(test)]
mod tests;

/// Expected box and detection must overlap by this much (intersection over union) to be one object.
const OVERLAP_MIN: f32 = 0.25;
/// Without overlap: centres may be this many box diagonals apart.
const DIAGONALS_MAX: f32 = 1.5;
/// Weight of the newest displacement in the speed.
const SPEED_GAIN: f32 = 0.6;
/// A track unseen for more updates than this is forgotten.
const MISSES_MAX: u32 = 5;
/// A track seen this often is still reported when it is missed once: detectors flicker.
const SURE_FROM: u32 = 3;
/// Tracks kept for one query.
const TRACKS_MAX: usize = 256;

/// A tracked object, as it is remembered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Track {
    id: u64,
    class: u16,
    score: f32,
    /// Left, top, width, height as parts of the picture.
    area: [f32; 4],
    /// Of the centre, in parts of the picture per frame number.
    speed: [f32; 2],
    seen: u32,
    missed: u32,
}

/// A track as it is written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct WrittenTrack {
    pub(super) id: u64,
    pub(super) class: u16,
    pub(super) score: f32,
    pub(super) x: f32,
    pub(super) y: f32,
    pub(super) w: f32,
    pub(super) h: f32,
}

/// All tracks of one query.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
struct State {
    next_id: u64,
    frame: Option<u64>,
    tracks: Vec<Track>,
}

impl State {
    /// Takes in one frame's detections and gives the tracks seen now.
    fn update(&mut self, frame: u64, detections: &[Detection]) -> Vec<WrittenTrack> {
        // A frame that comes late (out of order) changes nothing about where objects are going.
        let passed = self.frame.map_or(0, |last| frame.saturating_sub(last));
        self.frame = Some(self.frame.unwrap_or(0).max(frame));
        let passed = passed as f32;
        for track in &mut self.tracks {
            track.area[0] += track.speed[0] * passed;
            track.area[1] += track.speed[1] * passed;
        }
        let owners = assign(&self.tracks, detections);
        let mut found = vec![false; self.tracks.len()];
        for (detection, owner) in detections.iter().zip(owners) {
            match owner {
                Some(index) => {
                    found[index] = true;
                    self.tracks[index].see(detection, passed);
                }
                None => self.begin(detection),
            }
        }
        for (track, found) in self.tracks.iter_mut().zip(found) {
            if !found {
                track.missed += 1;
            }
        }
        self.tracks
            .retain(|t| t.missed <= MISSES_MAX && t.is_in_picture());
        let reported = |t: &&Track| t.missed == 0 || (t.missed == 1 && t.seen >= SURE_FROM);
        self.tracks
            .iter()
            .filter(reported)
            .map(Track::written)
            .collect()
    }

    fn begin(&mut self, detection: &Detection) {
        if self.tracks.len() >= TRACKS_MAX {
            return;
        }
        self.tracks.push(Track {
            id: self.next_id,
            class: detection.class,
            score: detection.score,
            area: area(detection),
            speed: [0.0; 2],
            seen: 1,
            missed: 0,
        });
        self.next_id += 1;
    }
}

impl Track {
    /// Takes in that it is here now, `passed` frame numbers after the last update.
    fn see(&mut self, detection: &Detection, passed: f32) {
        let now = area(detection);
        if passed > 0.0 {
            // The expected place was moved by the present speed; what is left over corrects it.
            let since_seen = passed * (self.missed + 1) as f32;
            let [x, y] = centre(&self.area);
            let [new_x, new_y] = centre(&now);
            let gain = if self.seen == 1 { 1.0 } else { SPEED_GAIN };
            self.speed[0] += gain * (new_x - x) / since_seen;
            self.speed[1] += gain * (new_y - y) / since_seen;
        }
        self.area = now;
        self.score = detection.score;
        self.seen = self.seen.saturating_add(1);
        self.missed = 0;
    }

    fn is_in_picture(&self) -> bool {
        let [x, y] = centre(&self.area);
        (0.0..=1.0).contains(&x) && (0.0..=1.0).contains(&y)
    }

    fn written(&self) -> WrittenTrack {
        let [x, y, w, h] = self.area;
        let (left, top) = (x.max(0.0), y.max(0.0));
        WrittenTrack {
            id: self.id,
            class: self.class,
            score: self.score,
            x: left,
            y: top,
            w: (x + w).min(1.0) - left,
            h: (y + h).min(1.0) - top,
        }
    }
}

/// Which track each detection belongs to: the best pairs first, by overlap, then by distance.
fn assign(tracks: &[Track], detections: &[Detection]) -> Vec<Option<usize>> {
    let mut pairs = Vec::new();
    for (d, detection) in detections.iter().enumerate() {
        let here = area(detection);
        for (t, track) in tracks.iter().enumerate() {
            if track.class != detection.class {
                continue;
            }
            let shared = overlap(here, track.area);
            let diagonal = (here[2].hypot(here[3])).max(track.area[2].hypot(track.area[3]));
            let ([x, y], [tx, ty]) = (centre(&here), centre(&track.area));
            let diagonals = (x - tx).hypot(y - ty) / diagonal.max(f32::EPSILON);
            if shared >= OVERLAP_MIN {
                pairs.push((shared, d, t));
            } else if diagonals <= DIAGONALS_MAX {
                // After all that overlap, the nearest first.
                pairs.push((-diagonals, d, t));
            }
        }
    }
    // Detections come surest first and tracks oldest first, which breaks ties.
    pairs.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    let mut owners = vec![None; detections.len()];
    let mut taken = vec![false; tracks.len()];
    for (_, d, t) in pairs {
        if owners[d].is_none() && !taken[t] {
            owners[d] = Some(t);
            taken[t] = true;
        }
    }
    owners
}

fn area(detection: &Detection) -> [f32; 4] {
    [detection.x, detection.y, detection.w, detection.h]
}

fn centre([x, y, w, h]: &[f32; 4]) -> [f32; 2] {
    [x + w / 2.0, y + h / 2.0]
}

/// See the head of this file.
#[derive(Default)]
pub(super) struct Tracker {
    memory: Memory<State>,
}

impl Operator for Tracker {
    fn process(
        &mut self,
        query: &str,
        frame: u64,
        inputs: &[Input<'_>],
    ) -> Result<Produced, OperatorError> {
        let input = only(inputs)?;
        if input.content != "detections" {
            return Err(OperatorError::Content {
                expected: "`detections`",
                found: input.content.to_owned(),
            });
        }
        let detections =
            decode_detections(input.bytes).map_err(|e| OperatorError::Unreadable(e.to_string()))?;
        let tracks = self.memory.of(query).update(frame, &detections);
        Ok(Produced::Payload {
            content: "tracks".to_owned(),
            bytes: serde_json::to_vec(&tracks)
                .map_err(|e| OperatorError::Unreadable(e.to_string()))?,
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
