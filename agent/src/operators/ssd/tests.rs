use super::*;

const CLASSES: usize = 3;

/// A decoder and the outputs of a network that sees nothing.
fn blank(side: usize) -> (Decoder, Vec<f32>, Vec<f32>) {
    let decoder = Decoder {
        anchors: anchors(side),
        score_min: 0.5,
        classes: None,
    };
    let number = decoder.anchors.len();
    (decoder, vec![0.0; number * 4], vec![-9.0; number * CLASSES])
}

fn close(a: f32, b: f32) -> bool {
    (a - b).abs() < 1e-4
}

#[test]
fn the_native_side_has_the_familys_1917_anchors_and_sizes_stay_in_pixels() {
    let native = anchors(300);
    assert_eq!(native.len(), 1917);
    assert!(close(native[0].w, 0.1) && close(native[0].x, 0.5 / 19.0));
    let second_layer = &native[19 * 19 * 3..];
    assert!(close(second_layer[0].w, 0.35) && close(second_layer[0].h, 0.35));
    assert!(close(second_layer[5].w, (0.35_f32 * 0.5).sqrt()));
    let last = native[1916];
    assert!(close(last.w, 0.95_f32.sqrt()) && close(last.x, 0.5));
    let double = anchors(600);
    assert!(close(double[0].w * 600.0, 30.0));
}

#[test]
fn values_move_and_stretch_an_anchor() {
    let (decoder, mut boxes, mut logits) = blank(300);
    // A square anchor of 0.35 in the middle of the second layer.
    let anchor = 19 * 19 * 3 + (4 * 10 + 4) * 6;
    boxes[anchor * 4..anchor * 4 + 4].copy_from_slice(&[1.0, -1.0, 0.0, 5.0 * 2.0_f32.ln()]);
    logits[anchor * CLASSES + 2] = 3.0;
    let found = decoder.decode(&boxes, &logits, CLASSES);
    assert_eq!(found.len(), 1);
    let Detection {
        class, x, y, w, h, ..
    } = found[0];
    assert_eq!(class, 1, "the background is not counted");
    assert!(close(h, 0.35) && close(y, 0.45 + 0.035 - 0.175));
    assert!(close(w, 0.7) && close(x, 0.415 - 0.35), "{found:?}");
}

#[test]
fn doubles_of_a_class_go_and_other_classes_and_garbage_do_not_disturb() {
    let (mut decoder, mut boxes, mut logits) = blank(300);
    let anchor = 19 * 19 * 3 + (4 * 10 + 4) * 6;
    logits[anchor * CLASSES + 1] = 2.0;
    logits[anchor * CLASSES + 2] = 1.0;
    // The same box by another anchor of the cell, less sure.
    logits[(anchor + 5) * CLASSES + 1] = 1.5;
    // The background is no object, and what is not a number is no box.
    logits[5 * CLASSES] = 9.0;
    logits[7 * CLASSES + 1] = 9.0;
    boxes[7 * 4] = f32::NAN;
    let found = decoder.decode(&boxes, &logits, CLASSES);
    let classes = |found: &[Detection]| found.iter().map(|d| d.class).collect::<Vec<_>>();
    assert_eq!(classes(&found), [0, 1]);
    assert!(close(found[0].score, 0.8808));
    decoder.classes = Some(class_list("1, 5").unwrap());
    assert_eq!(classes(&decoder.decode(&boxes, &logits, CLASSES)), [1]);
    assert!(class_list("person").is_err());
}

#[test]
fn pixels_are_scaled_in_either_layout() {
    let rgb = [0, 255, 51, 255, 0, 204];
    assert_eq!(normalised(&rgb, false)[..2], [-1.0, 1.0]);
    let planes = normalised(&rgb, true);
    assert_eq!(planes[..4], [-1.0, 1.0, 1.0, -1.0]);
    assert!(close(planes[4], -0.6) && close(planes[5], 0.6));
}
