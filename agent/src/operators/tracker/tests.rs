use super::*;

fn detection(class: u16, x: f32, y: f32) -> Detection {
    Detection {
        class,
        score: 0.9,
        x,
        y,
        w: 0.1,
        h: 0.1,
    }
}

fn ids(tracks: &[WrittenTrack]) -> Vec<u64> {
    tracks.iter().map(|t| t.id).collect()
}

#[test]
fn objects_keep_their_identity_while_they_move_and_cross() {
    let mut state = State::default();
    for frame in 0..30_u64 {
        let x = 0.025 * frame as f32;
        // Two of a class move towards each other and pass; listed in changing order.
        let mut now = vec![detection(0, 0.05 + x, 0.40), detection(0, 0.85 - x, 0.46)];
        if frame % 2 == 1 {
            now.reverse();
        }
        let tracks = state.update(frame, &now);
        assert_eq!(tracks.len(), 2, "frame {frame}");
        for track in tracks {
            let expected = if track.y < 0.43 { 0.05 + x } else { 0.85 - x };
            assert!((track.x - expected).abs() < 1e-5);
            assert_eq!(track.id, u64::from(track.y > 0.43), "frame {frame}");
        }
    }
}

#[test]
fn fast_objects_are_followed_at_a_low_frame_rate() {
    let mut state = State::default();
    for frame in [0, 10, 20, 30_u64] {
        let tracks = state.update(frame, &[detection(1, 0.02 * frame as f32, 0.5)]);
        assert_eq!(ids(&tracks), [0], "frame {frame}");
    }
}

#[test]
fn classes_are_not_mixed_up_and_far_objects_are_new() {
    let mut state = State::default();
    state.update(0, &[detection(0, 0.5, 0.5)]);
    assert_eq!(ids(&state.update(1, &[detection(1, 0.5, 0.5)])), [1]);
    assert_eq!(ids(&state.update(2, &[detection(0, 0.05, 0.05)])), [2]);
}

#[test]
fn a_flicker_is_bridged_and_an_absence_is_not() {
    let mut state = State::default();
    for frame in 0..3 {
        state.update(frame, &[detection(0, 0.1 * frame as f32, 0.5)]);
    }
    let bridged = state.update(3, &[]);
    assert_eq!(ids(&bridged), [0]);
    assert!((bridged[0].x - 0.3).abs() < 0.02, "carried on: {bridged:?}");
    assert_eq!(state.update(4, &[]), []);
    assert_eq!(ids(&state.update(5, &[detection(0, 0.5, 0.5)])), [0]);
    for frame in 6..=6 + u64::from(MISSES_MAX) {
        state.update(frame, &[]);
    }
    assert_eq!(ids(&state.update(20, &[detection(0, 0.5, 0.5)])), [1]);
}

#[test]
fn a_snapshot_keeps_identities_and_a_reset_begins_anew() {
    let input = |x: f32| compass_shared::evaluate::encode_detections(&[detection(2, x, 0.5)]);
    let run = |tracker: &mut Tracker, frame: u64, x: f32| {
        let bytes = input(x);
        let input = Input {
            content: "detections",
            bytes: &bytes,
        };
        let Produced::Payload { bytes, .. } = tracker.process("q", frame, &[input]).unwrap() else {
            panic!("tracks come out");
        };
        let tracks: Vec<WrittenTrack> = serde_json::from_slice(&bytes).unwrap();
        ids(&tracks)
    };
    let mut old = Tracker::default();
    run(&mut old, 0, 0.9);
    old.reset("q");
    run(&mut old, 0, 0.1);
    assert_eq!(run(&mut old, 1, 0.5), [1], "too far to be the same");
    let mut new = Tracker::default();
    new.restore("q", &old.snapshot("q").unwrap()).unwrap();
    assert_eq!(run(&mut new, 2, 0.52), [1]);
    assert!(new.restore("q", b"{}").is_err());
    assert_eq!(
        run(&mut new, 3, 0.54),
        [1],
        "a bad snapshot changes nothing"
    );
}

#[test]
fn frames_out_of_order_and_garbage_do_no_harm() {
    let mut state = State::default();
    state.update(10, &[detection(0, 0.5, 0.5)]);
    assert_eq!(ids(&state.update(9, &[detection(0, 0.51, 0.5)])), [0]);
    let many: Vec<_> = (0..1000)
        .map(|n| detection(n, (n % 37) as f32 / 37.0, 0.5))
        .collect();
    assert!(state.update(11, &many).len() <= TRACKS_MAX);
    let mut tracker = Tracker::default();
    for (content, bytes) in [("jpeg", &b"[]"[..]), ("detections", b"[{]")] {
        assert!(
            tracker
                .process("q", 0, &[Input { content, bytes }])
                .is_err()
        );
    }
    assert!(matches!(
        tracker.process("q", 0, &[]),
        Err(OperatorError::Inputs(0))
    ));
}
