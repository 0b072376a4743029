use super::*;

fn query() -> QueryId {
    QueryId::new("cam").unwrap()
}

fn payload(frame: u64, bytes: usize) -> Payload {
    Payload {
        content: "bytes".to_owned(),
        bytes: vec![frame as u8; bytes].into(),
    }
}

fn request(segments: u32, frames_per_segment: u32, deadline: Duration) -> CaptureSamples {
    CaptureSamples {
        query: query(),
        set: SampleSetId(7),
        segments,
        frames_per_segment,
        deadline,
    }
}

fn ids(segments: &[Vec<FrameId>]) -> Vec<Vec<u64>> {
    let plain = |run: &Vec<FrameId>| run.iter().map(|frame| frame.0).collect();
    segments.iter().map(plain).collect()
}

const LONG: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_capture_takes_what_is_fresh_and_waits_for_the_rest() {
    let store = SampleStore::new(1000);
    for frame in [2, 1, 3, 3] {
        store.offer(&query(), FrameId(frame), &payload(frame, 10));
    }
    let feed = async {
        for frame in 4..20 {
            tokio::task::yield_now().await;
            store.offer(&query(), FrameId(frame), &payload(frame, 10));
            store.offer(
                &QueryId::new("other").unwrap(),
                FrameId(frame),
                &payload(0, 1),
            );
        }
    };
    let (captured, ()) = tokio::join!(store.capture(request(2, 3, LONG)), feed);
    assert_eq!(ids(&captured.segments), [[1, 2, 3], [4, 5, 6]]);
    assert_eq!(captured.bytes, 60);
    let held = store.captured(&query(), SampleSetId(7), &[FrameId(5), FrameId(2)]);
    let expected = vec![
        (FrameId(5), Some(payload(5, 10))),
        (FrameId(2), Some(payload(2, 10))),
    ];
    assert_eq!(held, Some(expected));
    assert_eq!(
        store.captured(&query(), SampleSetId(7), &[FrameId(7)]),
        None
    );
    assert_eq!(
        store.captured(
            &QueryId::new("other").unwrap(),
            SampleSetId(7),
            &[FrameId(2)]
        ),
        None
    );
    store.drop_set(SampleSetId(7));
    assert_eq!(
        store.captured(&query(), SampleSetId(7), &[FrameId(2)]),
        None
    );
    assert!(lock(&store.state).wanted_since.is_empty());
}

#[tokio::test]
async fn at_its_deadline_a_capture_freezes_what_there_is() {
    let store = SampleStore::new(1000);
    let nothing = store.capture(request(2, 3, Duration::from_millis(5))).await;
    assert_eq!((nothing.segments.len(), nothing.bytes), (0, 0));
    for frame in [1, 2, 9, 20, 21, 22] {
        store.offer(&query(), FrameId(frame), &payload(frame, 10));
    }
    let some = store.capture(request(2, 5, Duration::from_millis(5))).await;
    assert_eq!(ids(&some.segments), [vec![1, 2], vec![20, 21, 22]]);
}

#[test]
fn runs_bridge_small_gaps_only() {
    let frames: Vec<FrameId> = [1, 2, 4, 5, 9, 10, 11, 12].map(FrameId).into();
    let cut = |number, length, complete| runs(&frames, number, length, complete).map(|r| ids(&r));
    assert_eq!(
        cut(2, 4, true),
        Some(vec![vec![1, 2, 4, 5], vec![9, 10, 11, 12]])
    );
    assert_eq!(cut(3, 4, true), None);
    assert_eq!(cut(1, 5, false), Some(vec![vec![1, 2, 4, 5]]));
    assert_eq!(cut(0, 0, true), Some(vec![]));
    assert_eq!(runs(&[], 2, 2, false), Some(vec![]));
}

#[test]
fn memory_stays_bounded() {
    let store = SampleStore::new(100);
    for frame in 0..50 {
        store.offer(&query(), FrameId(frame), &payload(frame, 30));
        store.offer(
            &QueryId::new("other").unwrap(),
            FrameId(frame),
            &payload(frame, 30),
        );
        assert!(lock(&store.state).recent_bytes <= 100);
    }
    store.offer(&query(), FrameId(99), &payload(0, 101));
    store.forget(&query());
    store.forget(&QueryId::new("other").unwrap());
    assert_eq!(lock(&store.state).recent_bytes, 0);
    for set in (0..10).rev() {
        store.offer(&query(), FrameId(set), &payload(set, 40));
        let mut one = request(1, 1, LONG);
        one.set = SampleSetId(set);
        store
            .freeze(&one, Instant::now().checked_sub(LONG).unwrap(), true)
            .unwrap();
        assert!(
            lock(&store.state)
                .sets
                .values()
                .map(|s| s.bytes)
                .sum::<u64>()
                <= 100
        );
        let is_there = lock(&store.state).sets.contains_key(&SampleSetId(set));
        assert!(is_there, "the newest stays");
    }
}

#[test]
fn old_frames_are_not_kept_for_the_next_capture() {
    let store = SampleStore::new(1000);
    store.offer(&query(), FrameId(1), &payload(1, 10));
    let later = Instant::now() + FRESH + Duration::from_millis(1);
    lock(&store.state).age(later, 1000);
    assert!(lock(&store.state).recent.is_empty());
    store.offer(&query(), FrameId(2), &payload(2, 10));
    let _wanted = Wanted::new(&store, query(), Instant::now().checked_sub(FRESH).unwrap());
    lock(&store.state).age(later, 1000);
    assert_eq!(lock(&store.state).recent_bytes, 10);
}

#[tokio::test]
async fn frames_from_before_a_change_of_content_are_in_no_new_set() {
    let store = SampleStore::new(1000);
    for frame in 1..=3 {
        store.offer(&query(), FrameId(frame), &payload(frame, 10));
    }
    store.content_changed(&query());
    for frame in 4..=6 {
        store.offer(&query(), FrameId(frame), &payload(frame, 10));
    }
    let captured = store.capture(request(1, 3, LONG)).await;
    assert_eq!(ids(&captured.segments), [[4, 5, 6]]);
}
