use super::*;

fn at(features: &[f64]) -> Vec<f64> {
    features.to_vec()
}

#[test]
fn an_additive_quantity_is_learnt_from_few_points_and_unsure_far_away() {
    let truth = |a: f64, b: f64| 2.0 + 1.4 * a + 0.7 * b;
    let seen: Vec<_> = [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.5, 0.5)]
        .iter()
        .map(|(a, b)| (at(&[*a, *b]), truth(*a, *b)))
        .collect();
    let model = Ridge::fit(&seen, 2.0).unwrap();
    let guess = model.guess(&[1.0, 1.0]);
    assert!((guess.mean - truth(1.0, 1.0)).abs() < 0.3, "{guess:?}");
    assert!(model.guess(&[3.0, 3.0]).deviation > guess.deviation);
}

#[test]
fn field_055_equal_observations_give_that_value_and_no_nan() {
    let seen = vec![(at(&[0.0, 1.0]), 42.0); 20];
    let model = Ridge::fit(&seen, 1.0).unwrap();
    let guess = model.guess(&[0.0, 1.0]);
    assert!((guess.mean - 42.0).abs() < 1e-3, "{guess:?}");
    assert!(guess.deviation.is_finite() && guess.deviation > 0.0);
    assert!(model.guess(&[1.0, 0.0]).mean.is_finite());
}

#[test]
fn field_053_nan_is_left_out_and_nothing_gives_nothing() {
    assert_eq!(Ridge::fit(&[], 1.0), None);
    assert_eq!(Ridge::fit(&[(at(&[0.0]), f64::NAN)], 1.0), None);
    let seen = [
        (at(&[0.0]), 1.0),
        (at(&[0.5]), f64::NAN),
        (at(&[1.0]), f64::INFINITY),
        (at(&[1.0]), 2.0),
    ];
    let guess = Ridge::fit(&seen, 2.0).unwrap().guess(&[0.5]);
    assert!((guess.mean - 1.5).abs() < 0.1, "{guess:?}");
    let other = Ridge::fit(&seen, 2.0).unwrap().guess(&[0.5, 0.5]);
    assert!(other.mean.is_finite() && other.deviation.is_finite());
}
