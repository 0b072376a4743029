//! Frames this side still owns: waiting to be sent, or sent and not yet known to have ended.
//!
//! Pure. A live source that is not given room drops its oldest waiting frame rather than fall behind.

use std::collections::{BTreeMap, VecDeque};

use compass_shared::ids::FrameId;

/// A frame and its payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) content: String,
    pub(crate) payload: bytes::Bytes,
    pub(crate) attempt: u16,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Outbox {
    frames: BTreeMap<FrameId, Held>,
    waiting: VecDeque<FrameId>,
    credit: u32,
    waiting_max: usize,
}

impl Outbox {
    pub(crate) fn new(waiting_max: usize) -> Self {
        Self {
            frames: BTreeMap::new(),
            waiting: VecDeque::new(),
            credit: 0,
            waiting_max,
        }
    }

    /// Takes a frame; returns the one that had to give way, if any.
    pub(crate) fn push(
        &mut self,
        frame: FrameId,
        content: &str,
        payload: bytes::Bytes,
    ) -> Option<FrameId> {
        self.frames.insert(
            frame,
            Held {
                content: content.to_owned(),
                payload,
                attempt: 0,
            },
        );
        self.waiting.push_back(frame);
        if self.waiting.len() <= self.waiting_max {
            return None;
        }
        let oldest = self.waiting.pop_front()?;
        self.frames.remove(&oldest);
        Some(oldest)
    }

    /// The next frame to send, when there is one and the receiver has room.
    pub(crate) fn pop(&mut self) -> Option<(FrameId, Held)> {
        if self.credit == 0 {
            return None;
        }
        let frame = self.waiting.pop_front()?;
        self.credit -= 1;
        self.frames.get(&frame).map(|held| (frame, held.clone()))
    }

    /// Whether a frame that comes now would go out at once.
    pub(crate) fn has_room(&self) -> bool {
        (self.credit as usize) > self.waiting.len()
    }

    pub(crate) fn grant(&mut self, frames: u32) {
        self.credit = self.credit.saturating_add(frames);
    }

    /// The frame has ended.
    pub(crate) fn forget(&mut self, frame: FrameId) {
        self.frames.remove(&frame);
        self.waiting.retain(|waiting| *waiting != frame);
    }

    /// A new connection: whatever has not ended is sent again, oldest first; credit starts anew.
    pub(crate) fn restart(&mut self) {
        self.credit = 0;
        for (frame, held) in &mut self.frames {
            if !self.waiting.contains(frame) {
                held.attempt = held.attempt.saturating_add(1);
            }
        }
        self.waiting = self.frames.keys().copied().collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(outbox: &mut Outbox, n: u64) -> Option<FrameId> {
        outbox.push(FrameId(n), "bytes", bytes::Bytes::new())
    }

    #[test]
    fn without_room_the_oldest_waiting_frame_gives_way() {
        let mut outbox = Outbox::new(2);
        assert_eq!(push(&mut outbox, 1), None);
        assert_eq!(push(&mut outbox, 2), None);
        assert_eq!(push(&mut outbox, 3), Some(FrameId(1)));
        assert!(outbox.pop().is_none(), "no credit yet");
        outbox.grant(1);
        assert_eq!(outbox.pop().unwrap().0, FrameId(2));
        assert!(outbox.pop().is_none());
    }

    #[test]
    fn there_is_room_for_as_many_as_there_is_credit() {
        let mut outbox = Outbox::new(4);
        assert!(!outbox.has_room());
        outbox.grant(2);
        push(&mut outbox, 1);
        assert!(outbox.has_room());
        push(&mut outbox, 2);
        assert!(!outbox.has_room(), "both credits are spoken for");
        outbox.pop();
        assert!(!outbox.has_room());
        outbox.grant(1);
        assert!(outbox.has_room());
    }

    #[test]
    fn after_a_new_connection_unended_frames_go_again_in_order() {
        let mut outbox = Outbox::new(4);
        for n in 1..=3 {
            push(&mut outbox, n);
        }
        outbox.grant(2);
        outbox.pop();
        outbox.pop();
        outbox.forget(FrameId(1));
        outbox.restart();
        assert!(outbox.pop().is_none(), "credit belongs to a connection");
        outbox.grant(9);
        let (frame, held) = outbox.pop().unwrap();
        assert_eq!((frame, held.attempt), (FrameId(2), 1));
        assert_eq!(
            outbox.pop().unwrap().1.attempt,
            0,
            "it had not been sent yet"
        );
    }
}
