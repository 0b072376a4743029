//! Lost or slow: how long nothing was heard of a node, and what its neighbours say.

use compass_shared::time::Moment;

use super::DetectSettings;

/// What is known of one node's being alive.
#[derive(Debug, Clone, PartialEq)]
pub struct Liveness {
    heard: Moment,
    unreachable_said: Option<Moment>,
    seen_by_peers: Option<Moment>,
    down: bool,
    lost: bool,
}

/// A change of state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LivenessVerdict {
    /// It counts as lost from now on.
    Lost,
    /// It is back.
    Back,
}

impl Liveness {
    /// Heard of just now.
    pub const fn new(now: Moment) -> Self {
        Self {
            heard: now,
            unreachable_said: None,
            seen_by_peers: None,
            down: false,
            lost: false,
        }
    }

    /// Something came from it.
    pub const fn heard(&mut self, now: Moment) -> Option<LivenessVerdict> {
        self.heard = now;
        self.unreachable_said = None;
        self.down = false;
        if self.lost {
            self.lost = false;
            return Some(LivenessVerdict::Back);
        }
        None
    }

    /// A neighbour got no answer from it.
    pub const fn unreachable(&mut self, now: Moment) {
        self.unreachable_said = Some(now);
    }

    /// Its session has ended: it restarts, or it is gone.
    pub const fn down(&mut self) {
        self.down = true;
    }

    /// A neighbour received data from it.
    pub const fn seen(&mut self, now: Moment) {
        self.seen_by_peers = Some(now);
    }

    /// Looks at the clock.
    pub fn tick(&mut self, now: Moment, settings: &DetectSettings) -> Option<LivenessVerdict> {
        if self.lost {
            return None;
        }
        let silence = now.since(self.heard);
        let is_confirmed = self.unreachable_said.is_some();
        // Neighbours report once a second, so what they saw since the silence began may be that old.
        let is_seen = self
            .seen_by_peers
            .is_some_and(|seen| seen > self.heard + settings.silence_confirmed);
        let bound = if is_confirmed {
            settings.silence_confirmed
        } else if is_seen {
            settings.silence_seen_by_peers
        } else if self.down {
            settings.silence_confirmed
        } else {
            settings.silence
        };
        if silence < bound {
            return None;
        }
        self.lost = true;
        Some(LivenessVerdict::Lost)
    }

    /// Whether it counts as lost.
    pub const fn is_lost(&self) -> bool {
        self.lost
    }

    /// When something was last heard of it.
    pub const fn last_heard(&self) -> Moment {
        self.heard
    }
}
