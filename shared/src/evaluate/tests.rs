use super::*;

fn boxes(list: &[(u16, f32, f32)]) -> Vec<u8> {
    let detections: Vec<_> = list
        .iter()
        .map(|(class, x, score)| Detection {
            class: *class,
            score: *score,
            x: *x,
            y: 0.1,
            w: 0.1,
            h: 0.1,
        })
        .collect();
    encode_detections(&detections)
}

#[test]
fn what_is_written_is_read_back() {
    let bytes = boxes(&[(1, 0.25, 0.5), (3, 0.5, 1.0)]);
    let read = decode_detections(&bytes).unwrap();
    assert_eq!(encode_detections(&read), bytes);
    assert_eq!(read.len(), 2);
}

#[test]
fn tracks_and_labels_read_as_boxes() {
    let tracks =
        br#"[{"id": 7, "class": 1, "score": 0.5, "x": 0.1, "y": 0.1, "w": 0.1, "h": 0.1}]"#;
    let label = br#"[{"class": 1, "x": 0.1, "y": 0.1, "w": 0.1, "h": 0.1}]"#;
    assert_eq!(judge(Evaluator::DetectionF1, tracks, label).unwrap(), 1.0);
}

#[test]
fn f1_counts_hits_false_alarms_and_misses() {
    let truth = boxes(&[(1, 0.1, 1.0), (1, 0.5, 1.0)]);
    let f1 =
        |found: &[(u16, f32, f32)]| judge(Evaluator::DetectionF1, &boxes(found), &truth).unwrap();
    assert_eq!(f1(&[(1, 0.1, 0.9), (1, 0.5, 0.9)]), 1.0);
    assert!((f1(&[(1, 0.1, 0.9)]) - 2.0 / 3.0).abs() < 1e-9);
    assert!((f1(&[(1, 0.1, 0.9), (1, 0.8, 0.9)]) - 0.5).abs() < 1e-9);
    assert_eq!(f1(&[(2, 0.1, 0.9)]), 0.0, "another class is no hit");
    assert_eq!(
        judge(Evaluator::DetectionF1, b"[]", b"[]").unwrap(),
        1.0,
        "nothing there and nothing found"
    );
    assert_eq!(judge(Evaluator::DetectionF1, b"[]", &truth).unwrap(), 0.0);
}

#[test]
fn what_is_no_list_of_boxes_is_an_error_and_never_a_score() {
    for bad in [&b""[..], b"{}", b"[1]", b"\xff", br#"[{"class": 1}]"#] {
        assert!(judge(Evaluator::DetectionF1, bad, b"[]").is_err());
        assert!(judge(Evaluator::DetectionF1, b"[]", bad).is_err());
    }
    let huge = format!(
        "[{}]",
        vec![r#"{"class":1,"x":0,"y":0,"w":1,"h":1}"#; BOXES_MAX + 1].join(",")
    );
    assert!(matches!(
        decode_detections(huge.as_bytes()),
        Err(Unreadable::TooMany(_))
    ));
    let infinite = br#"[{"class":1,"x":1e300,"y":0,"w":1,"h":1}]"#;
    assert!(decode_detections(infinite).is_err());
}

#[test]
fn exact_match_compares_bytes() {
    assert_eq!(judge(Evaluator::ExactMatch, b"a", b"a").unwrap(), 1.0);
    assert_eq!(judge(Evaluator::ExactMatch, b"a", b"b").unwrap(), 0.0);
}

#[test]
fn an_answer_is_held_over_the_frames_without_one() {
    let mut held = HeldAnswer::new(Evaluator::ExactMatch);
    let scores: Vec<_> = [
        ("a", None),
        ("a", Some("a")),
        ("a", None),
        ("b", None),
        ("b", Some("b")),
    ]
    .into_iter()
    .map(|(truth, answer)| {
        held.score(truth.as_bytes(), answer.map(str::as_bytes))
            .unwrap()
    })
    .collect();
    assert_eq!(scores, [None, Some(1.0), Some(1.0), Some(0.0), Some(1.0)]);
}
