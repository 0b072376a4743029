use super::*;
use proptest::prelude::*;

#[test]
fn field_057_intervals_are_defined_for_none_one_equal_and_missing_samples() {
    assert_eq!(Moments::default().accuracy().high, 1.0);
    for values in [
        vec![0.5],
        vec![0.5; 20],
        vec![1.0; 3],
        vec![0.0; 3],
        vec![0.4, f64::NAN, 0.6],
    ] {
        let estimate = Moments::of(values.clone()).accuracy();
        for number in [estimate.value, estimate.low, estimate.high] {
            assert!((0.0..=1.0).contains(&number), "{values:?} {estimate:?}");
        }
        assert!(
            estimate.low < estimate.high,
            "{values:?}: nothing is known for sure"
        );
    }
}

#[test]
fn more_samples_narrow_the_interval() {
    let width = |n: usize| {
        let e = Moments::of((0..n).map(|i| if i % 2 == 0 { 0.7 } else { 0.9 })).accuracy();
        e.high - e.low
    };
    assert!(width(96) < width(24));
    assert!(width(24) < width(8));
}

#[test]
fn holding_an_answer_costs_what_later_frames_show() {
    let row = ConfigurationRow {
        configuration: PipelineConfiguration::default(),
        scores: vec![
            Moments::of([0.9; 24]),
            Moments::of([0.7; 24]),
            Moments::of([0.5; 24]),
        ],
        truth: Truth::Labels,
        failed: None,
    };
    let at = |interval: f64| row.accuracy(interval).unwrap();
    assert!((at(1.0).value - 0.9).abs() < 1e-9);
    assert!((at(2.0).value - 0.8).abs() < 1e-9);
    assert!((at(3.0).value - 0.7).abs() < 1e-9);
    assert!((at(2.5).value - (0.9 + 0.7 + 0.25) / 2.5).abs() < 1e-9);
    let far = at(10.0);
    assert!((far.value - (0.9 + 0.7 + 8.0 * 0.5) / 10.0).abs() < 1e-9);
    assert!(far.low < at(3.0).low, "what was never seen is not claimed");
}

#[test]
fn a_change_of_content_voids_scores_and_keeps_times() {
    let mut profile =
        crate::tests::fixture::profile(&[crate::tests::fixture::configuration(320, 75, "m")], 1.0);
    let rows = profile.operators.clone();
    profile.forget_scores();
    assert_eq!(profile.operators, rows);
    assert_eq!(profile.content_epoch, 1);
    assert!(
        profile
            .configurations
            .values()
            .all(|c| c.accuracy(1.0).is_none())
    );
}

#[test]
fn a_profile_survives_a_restart() {
    let profile =
        crate::tests::fixture::profile(&[crate::tests::fixture::configuration(320, 75, "m")], 1.0);
    let text = serde_json::to_string(&profile).unwrap();
    let back: QueryProfile = serde_json::from_str(&text).unwrap();
    assert!(back.operators.keys().eq(profile.operators.keys()));
    for (key, row) in &profile.configurations {
        let read = &back.configurations[key];
        assert_eq!(read.configuration, row.configuration);
        for (a, b) in read.scores.iter().zip(&row.scores) {
            assert!((a.mean - b.mean).abs() < 1e-12 && a.count == b.count);
        }
    }
}

proptest! {
    #[test]
    fn merging_is_the_same_as_observing_all(a in proptest::collection::vec(0.0..1.0_f64, 0..30), b in proptest::collection::vec(0.0..1.0_f64, 0..30)) {
        let merged = Moments::of(a.clone()).merged(&Moments::of(b.clone()));
        let all = Moments::of(a.into_iter().chain(b));
        prop_assert_eq!(merged.count, all.count);
        prop_assert!((merged.mean - all.mean).abs() < 1e-9);
        prop_assert!((merged.deviation() - all.deviation()).abs() < 1e-9);
    }
}
