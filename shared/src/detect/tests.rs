use super::*;

fn at(ms: u64) -> Moment {
    Moment(ms * 1000)
}

#[test]
fn an_ewma_follows_by_half_life_and_ignores_what_is_no_number() {
    let mut level = Ewma::new(Duration::from_secs(1));
    assert_eq!(level.value(), None);
    assert_eq!(level.observe(at(0), f64::NAN), None);
    assert_eq!(level.observe(at(0), 10.0), Some(10.0));
    let after = level.observe(at(1000), 20.0).unwrap();
    assert!((after - 15.0).abs() < 1e-9, "{after}");
    assert_eq!(level.observe(at(2000), f64::INFINITY), Some(after));
}

#[test]
fn page_hinkley_sees_a_lasting_step_once_and_no_noise() {
    let mut test = PageHinkley::new(0.5, 5.0, 10);
    let noise = |i: u32| f64::from(i * 7919 % 11) / 11.0 - 0.45;
    for i in 0..500 {
        assert_eq!(test.observe(100.0 + noise(i)), None, "sample {i}");
    }
    let changes: Vec<_> = (0..200)
        .filter_map(|i| test.observe(105.0 + noise(i)))
        .collect();
    assert_eq!(changes, [Change::Up]);
    let changes: Vec<_> = (0..200)
        .filter_map(|i| test.observe(100.0 + noise(i)))
        .collect();
    assert_eq!(changes, [Change::Down]);
    assert_eq!(test.observe(f64::NAN), None);
}

#[test]
fn a_breach_needs_several_in_a_row_and_clears_well_inside() {
    let mut breach = Breach::new(3);
    let seen: Vec<_> = [11.0, 11.0, 9.0, 11.0, 11.0, 11.0, 12.0, 9.5, 11.0, 8.0, 8.0]
        .into_iter()
        .map(|v| breach.above(v, 10.0, 9.0))
        .collect();
    assert_eq!(seen[5], Some(Edge::Raised));
    assert_eq!(
        seen[9],
        Some(Edge::Cleared),
        "9.5 lies between the two levels and clears nothing"
    );
    assert_eq!(seen.iter().flatten().count(), 2);
    assert_eq!(breach.above(f64::NAN, 10.0, 9.0), None);
    let mut low = Breach::new(1);
    assert_eq!(low.below(1.0, 2.0, 2.2), Some(Edge::Raised));
    assert_eq!(low.below(2.1, 2.0, 2.2), None);
    assert_eq!(low.below(2.3, 2.0, 2.2), Some(Edge::Cleared));
}

fn scene() -> ModeWatch {
    let descriptor = |name, matters| Descriptor { name, matters };
    ModeWatch::new(
        vec![descriptor("luma mean", 25.0), descriptor("chroma", 10.0)],
        Settling::default(),
    )
}

/// Feeds 10 samples a second and returns what was reported.
fn play(watch: &mut ModeWatch, start_ms: u64, seconds: f64, values: [f64; 2]) -> Vec<ModeChange> {
    (0..(seconds * 10.0) as u64)
        .filter_map(|i| {
            let noise = [(i % 3) as f64 - 1.0, (i % 2) as f64];
            watch.observe(
                at(start_ms + i * 100),
                &[values[0] + noise[0], values[1] + noise[1]],
            )
        })
        .collect()
}

#[test]
fn field_066_a_camera_that_flips_three_times_reports_each_settled_mode_once() {
    let mut watch = scene();
    let mut now = 0;
    let mut changes = Vec::new();
    for _ in 0..3 {
        for (seconds, values) in [
            (20.0, [120.0, 40.0]),
            (0.3, [250.0, 5.0]),
            (19.7, [60.0, 1.0]),
        ] {
            changes.extend(play(&mut watch, now, seconds, values));
            now += (seconds * 1e3) as u64;
        }
    }
    let levels: Vec<_> = changes.iter().map(|c| c.descriptor).collect();
    assert_eq!(changes.len(), 5, "{levels:?}");
    assert!(changes[0].before > 110.0 || changes[0].descriptor == "chroma");
    assert!(changes.iter().all(|c| c.window < Duration::from_secs(2)));
}

#[test]
fn a_flash_is_no_mode() {
    let mut watch = scene();
    assert!(play(&mut watch, 0, 5.0, [120.0, 40.0]).is_empty());
    assert!(play(&mut watch, 5000, 0.4, [250.0, 5.0]).is_empty());
    assert!(play(&mut watch, 5400, 5.0, [120.0, 40.0]).is_empty());
}

#[test]
fn a_scene_that_never_rests_is_given_a_mode_after_a_while() {
    let mut watch = scene();
    watch.observe(at(0), &[120.0, 40.0]);
    let changes: Vec<_> = (1..80_u64)
        .filter_map(|i| watch.observe(at(i * 100), &[if i % 2 == 0 { 20.0 } else { 220.0 }, 40.0]))
        .collect();
    assert_eq!(changes.len(), 1);
}

#[test]
fn slow_dusk_is_reported_when_it_has_become_dark() {
    let mut watch = scene();
    let changes: Vec<_> = (0..600_u64)
        .filter_map(|i| watch.observe(at(i * 100), &[120.0 - i as f64 * 0.1, 40.0]))
        .collect();
    assert!(
        (1..=2).contains(&changes.len()),
        "60 steps of brightness: {changes:?}"
    );
}

#[test]
fn values_that_are_no_numbers_leave_a_mode_alone() {
    let mut watch = scene();
    watch.observe(at(0), &[f64::NAN, 40.0]);
    assert_eq!(watch.mode(), None);
    watch.observe(at(0), &[120.0, 40.0]);
    assert_eq!(watch.observe(at(100), &[120.0]), None);
    assert_eq!(watch.mode(), Some(&[120.0, 40.0][..]));
}

#[test]
fn percentiles_interpolate_and_have_no_value_without_samples() {
    assert_eq!(percentile(&[], 50.0), None);
    assert_eq!(percentile(&[f64::NAN], 50.0), None);
    assert_eq!(percentile(&[4.0, 1.0, 3.0, 2.0], 50.0), Some(2.5));
    assert_eq!(percentile(&[4.0, 1.0], 100.0), Some(4.0));
}
