use super::*;
use crate::workers::protocol::Knob;

fn responder(labels: &str) -> Responder {
    let knobs = BTreeMap::from([("labels".to_owned(), Knob::Text(labels.to_owned()))]);
    Responder::new(&Knobs(&knobs))
}

fn answer(responder: &mut Responder, frame: u64, tracks: &[(u64, u16)]) -> serde_json::Value {
    let tracks: Vec<_> = tracks
        .iter()
        .map(|(id, class)| WrittenTrack {
            id: *id,
            class: *class,
            score: 0.5,
            x: 0.25,
            y: 0.5,
            w: 0.125,
            h: 0.25,
        })
        .collect();
    let bytes = serde_json::to_vec(&tracks).unwrap();
    let input = Input {
        content: "tracks",
        bytes: &bytes,
    };
    match responder.process("q", frame, &[input]).unwrap() {
        Produced::Payload { content, bytes } => {
            assert_eq!(content, "answer");
            serde_json::from_slice(&bytes).unwrap()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_answer_counts_names_and_tells_who_came_and_went() {
    let mut responder = responder("car, person");
    let first = answer(&mut responder, 0, &[(1, 0), (2, 0), (3, 1)]);
    assert_eq!(
        first["text"],
        "I see 2 cars, 1 person; car 1 entered; car 2 entered; person 3 entered"
    );
    assert_eq!(first["counts"], serde_json::json!({"car": 2, "person": 1}));
    assert_eq!(first["boxes"][2]["id"], 3);
    let unsettled = answer(&mut responder, LEFT_AFTER - 1, &[(1, 0)]);
    assert_eq!(unsettled["text"], "I see 1 car");
    let later = answer(&mut responder, LEFT_AFTER, &[]);
    assert_eq!(later["text"], "I see nothing; car 2 left; person 3 left");
    assert_eq!(
        later["left"][1],
        serde_json::json!({"id": 3, "label": "person"})
    );
    let unknown = answer(&mut responder, LEFT_AFTER + 1, &[(9, 7)]);
    assert_eq!(unknown["counts"], serde_json::json!({"object": 1}));
}

#[test]
fn what_it_knows_moves_with_a_snapshot() {
    let mut old = responder("car");
    answer(&mut old, 0, &[(1, 0)]);
    let mut new = responder("car");
    new.restore("q", &old.snapshot("q").unwrap()).unwrap();
    assert_eq!(answer(&mut new, 1, &[(1, 0)])["text"], "I see 1 car");
}

#[test]
fn boxes_are_read_by_the_evaluator() {
    let value = answer(&mut responder(""), 0, &[(1, 0)]);
    let boxes = serde_json::to_vec(&value["boxes"]).unwrap();
    let read = compass_shared::evaluate::decode_detections(&boxes).unwrap();
    assert_eq!((read[0].class, read[0].x, read[0].h), (0, 0.25, 0.25));
}
