use super::*;

const ROWS: usize = 6;
const COLUMNS: usize = 8;

/// Output planes for two classes with nothing in them.
fn empty_cells() -> Vec<f32> {
    let mut cells = vec![0.0; (2 + BOX_VALUES) * ROWS * COLUMNS];
    cells[..2 * ROWS * COLUMNS].fill(-9.0);
    cells
}

fn put(cells: &mut [f32], plane: usize, row: usize, column: usize, value: f32) {
    cells[(plane * ROWS + row) * COLUMNS + column] = value;
}

/// An object of two by one cells whose centre is in the middle of the cell.
fn put_object(cells: &mut [f32], class: usize, row: usize, column: usize, logit: f32) {
    put(cells, class, row, column, logit);
    for (plane, value) in [(2, 0.5), (3, 0.5), (4, 2.0_f32.ln()), (5, 0.0)] {
        put(cells, plane, row, column, value);
    }
}

fn decode(cells: &[f32]) -> Vec<Detection> {
    decode_center_head(cells, 2, ROWS, COLUMNS, &DecodeOptions::default())
        .expect("the shape is right")
}

#[test]
fn a_peak_becomes_a_box_around_its_centre() {
    let mut cells = empty_cells();
    put_object(&mut cells, 1, 2, 3, 2.0);
    let found = decode(&cells);
    assert_eq!(found.len(), 1);
    let expected = [2.5 / 8.0, 2.0 / 6.0, 2.0 / 8.0, 1.0 / 6.0];
    for (value, wanted) in area(&found[0]).iter().zip(expected) {
        assert!((value - wanted).abs() < 1e-5, "{found:?}");
    }
    assert_eq!(found[0].class, 1);
    assert!((found[0].score - 0.8808).abs() < 1e-3);
}

#[test]
fn neighbours_below_the_peak_and_faint_cells_are_left_out() {
    let mut cells = empty_cells();
    put_object(&mut cells, 0, 2, 3, 2.0);
    put_object(&mut cells, 0, 2, 4, 1.0);
    put_object(&mut cells, 0, 5, 7, -1.0);
    assert_eq!(decode(&cells).len(), 1);
}

#[test]
fn of_two_classes_at_one_place_the_surer_stays() {
    let mut cells = empty_cells();
    put_object(&mut cells, 0, 2, 3, 1.0);
    put_object(&mut cells, 1, 2, 3, 2.0);
    let found = decode(&cells);
    assert_eq!(found.iter().map(|d| d.class).collect::<Vec<_>>(), [1]);
}

#[test]
fn objects_apart_are_all_found_surest_first_up_to_the_limit() {
    let mut cells = empty_cells();
    put_object(&mut cells, 0, 1, 1, 1.0);
    put_object(&mut cells, 0, 4, 6, 3.0);
    let found = decode(&cells);
    assert_eq!(found.len(), 2);
    assert!(found[0].score > found[1].score);
    let one = DecodeOptions {
        max_detections: 1,
        ..DecodeOptions::default()
    };
    let limited = decode_center_head(&cells, 2, ROWS, COLUMNS, &one).expect("the shape is right");
    assert_eq!(limited, found[..1]);
}

#[test]
fn values_that_are_not_finite_give_no_detection() {
    let mut cells = empty_cells();
    put_object(&mut cells, 0, 1, 1, f32::NAN);
    put_object(&mut cells, 0, 4, 4, 2.0);
    put(&mut cells, 4, 4, 4, f32::NAN);
    put_object(&mut cells, 1, 1, 6, 2.0);
    put(&mut cells, 2, 1, 6, f32::INFINITY);
    assert_eq!(decode(&cells), []);
}

#[test]
fn a_box_is_clipped_to_the_picture() {
    let mut cells = empty_cells();
    put_object(&mut cells, 0, 0, 0, 2.0);
    put(&mut cells, 4, 0, 0, 50.0);
    let found = decode(&cells);
    assert_eq!((found[0].x, found[0].w), (0.0, 1.0));
}

#[test]
fn a_wrong_length_is_an_error_that_says_so() {
    let error = decode_center_head(&[0.0; 7], 2, ROWS, COLUMNS, &DecodeOptions::default())
        .expect_err("too short");
    assert_eq!(
        error.to_string(),
        "the network's output has 7 values where its shape needs 288"
    );
    assert!(decode_center_head(&[], usize::MAX, ROWS, COLUMNS, &DecodeOptions::default()).is_err());
    assert!(standardise(&[0; 11], 2, 2).is_err());
}

#[test]
fn no_cells_and_no_classes_are_fine() {
    assert_eq!(
        decode_center_head(&[], 2, 0, 0, &DecodeOptions::default()),
        Ok(vec![])
    );
}

#[test]
fn standardise_centres_and_splits_channels_into_planes() {
    let planes = standardise(&[0, 100, 200, 50, 100, 150], 2, 1).expect("the shape is right");
    let deviation = (25_000.0_f32 / 6.0).sqrt() + 1.0;
    let expected = [-100.0, -50.0, 0.0, 0.0, 100.0, 50.0].map(|v: f32| v / deviation);
    for (value, wanted) in planes.iter().zip(expected) {
        assert!((value - wanted).abs() < 1e-5, "{planes:?}");
    }
    // A flat picture has no contrast to amplify.
    assert!(
        standardise(&[9; 12], 2, 2)
            .expect("the shape is right")
            .iter()
            .all(|v| v.abs() < 1e-6)
    );
}

fn object(class: u16, x: f32) -> TrueObject {
    TrueObject {
        class,
        x,
        y: 0.2,
        w: 0.1,
        h: 0.1,
    }
}

fn detection(class: u16, score: f32, x: f32) -> Detection {
    Detection {
        class,
        score,
        x,
        y: 0.2,
        w: 0.1,
        h: 0.1,
    }
}

#[test]
fn match_counts_hits_doubles_wrong_classes_and_misses() {
    let truth = [object(0, 0.1), object(1, 0.5), object(2, 0.8)];
    let detections = [
        detection(0, 0.9, 0.11),
        // The second on the same object is false.
        detection(0, 0.8, 0.1),
        // Right place, wrong class.
        detection(3, 0.7, 0.5),
        // Right class, too far off.
        detection(2, 0.6, 0.86),
    ];
    let counts = match_f1(&detections, &truth, 0.5);
    assert_eq!(
        counts,
        Counts {
            true_positives: 1,
            false_positives: 3,
            false_negatives: 2
        }
    );
    assert!((counts.f1() - 2.0 / 7.0).abs() < 1e-12);
}

#[test]
fn f1_of_nothing_is_perfect_and_counts_add_up() {
    assert!((match_f1(&[], &[], 0.5).f1() - 1.0).abs() < 1e-12);
    let total: Counts = [
        match_f1(&[detection(0, 0.9, 0.1)], &[object(0, 0.1)], 0.5),
        match_f1(&[], &[object(0, 0.1)], 0.5),
    ]
    .into_iter()
    .sum();
    assert_eq!(
        total,
        Counts {
            true_positives: 1,
            false_positives: 0,
            false_negatives: 1
        }
    );
}

#[test]
fn overlap_of_halves_is_a_third() {
    assert!((overlap([0.0, 0.0, 0.2, 0.1], [0.1, 0.0, 0.2, 0.1]) - 1.0 / 3.0).abs() < 1e-6);
    assert!(overlap([0.0, 0.0, 0.1, 0.1], [0.5, 0.5, 0.1, 0.1]).abs() < 1e-9);
    assert!(overlap([0.0; 4], [0.0; 4]).abs() < 1e-9);
}

#[test]
fn resize_keeps_even_surfaces_and_means() {
    for (from, to) in [
        ((8, 6), (3, 2)),
        ((7, 5), (7, 9)),
        ((640, 2), (160, 1)),
        ((1, 1), (4, 4)),
    ] {
        let even = resize(&vec![201; from.0 * from.1 * 3], from, to).expect("the shape is right");
        assert_eq!(even, vec![201; to.0 * to.1 * 3], "{from:?} to {to:?}");
    }
    let ramp: Vec<u8> = (0..64_u8).flat_map(|x| [x * 4, 255 - x * 4, 7]).collect();
    let half = resize(&ramp, (64, 1), (32, 1)).expect("the shape is right");
    for x in 1..31_usize {
        let expected = (x * 8 + 2) as i32;
        assert!((i32::from(half[x * 3]) - expected).abs() <= 1, "column {x}");
        assert!(
            (i32::from(half[x * 3 + 1]) - (255 - expected)).abs() <= 1,
            "column {x}"
        );
        assert_eq!(half[x * 3 + 2], 7);
    }
}

#[test]
fn resize_averages_noise_instead_of_skipping_pixels() {
    // A chequered picture becomes grey, whichever pixels a skipping filter would have hit.
    let board: Vec<u8> = (0..32 * 32)
        .flat_map(|i| [if (i % 32 + i / 32) % 2 == 0 { 0 } else { 200 }; 3])
        .collect();
    let small = resize(&board, (32, 32), (8, 8)).expect("the shape is right");
    assert!(small.iter().all(|v| (96..=104).contains(v)), "{small:?}");
}

#[test]
fn resize_refuses_wrong_shapes_and_takes_empty_targets() {
    assert!(resize(&[0; 5], (1, 2), (1, 1)).is_err());
    assert!(resize(&[], (0, 0), (2, 2)).is_err());
    assert_eq!(resize(&[1, 2, 3], (1, 1), (0, 4)), Ok(vec![]));
    assert_eq!(resize(&[1, 2, 3], (1, 1), (1, 1)), Ok(vec![1, 2, 3]));
}
