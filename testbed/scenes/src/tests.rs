use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::draw::Style;
use crate::random::Draws;

fn scene(seed: u64) -> Scene {
    Scene::new(seed, SceneSettings::default())
}

#[test]
fn the_same_seed_time_and_light_give_the_same_frame() {
    let (a, b) = (scene(7), scene(7));
    // Rendered in another order, from another instance.
    let later = b.frame(9.3, 0.4);
    assert_eq!(a.frame(2.1, 1.0), b.frame(2.1, 1.0));
    assert_eq!(a.frame(9.3, 0.4), later);
}

#[test]
fn another_seed_gives_another_scene() {
    let (a, b) = (scene(1).frame(0.0, 1.0), scene(2).frame(0.0, 1.0));
    assert_ne!(a.truth, b.truth);
    assert_ne!(a.rgb, b.rgb);
}

#[test]
fn truth_lies_inside_the_frame_and_names_each_object_once() {
    for seed in 0..6 {
        let scene = scene(seed);
        for step in 0..8 {
            let frame = scene.frame_without_noise(f64::from(step) * 1.7);
            assert_eq!(frame.rgb.len(), 640 * 480 * 3);
            let ids: BTreeSet<u64> = frame.truth.iter().map(|t| t.id).collect();
            assert_eq!(ids.len(), frame.truth.len());
            for t in &frame.truth {
                assert!(usize::from(t.class) < CLASS_NAMES.len());
                assert!(
                    t.x >= 0.0 && t.y >= 0.0 && t.x + t.w <= 1.0001 && t.y + t.h <= 1.0001,
                    "{t:?}"
                );
                assert!(t.w > 0.0 && t.h > 0.0);
            }
        }
    }
}

#[test]
fn objects_of_every_class_and_many_sizes_enter_move_smoothly_and_leave() {
    let mut classes = BTreeSet::new();
    let mut heights_px: Vec<f32> = Vec::new();
    let (mut entered, mut left) = (0, 0);
    for seed in 0..4 {
        let scene = scene(seed);
        let mut before: BTreeMap<u64, TruthBox> = BTreeMap::new();
        for step in 0..100 {
            let now: BTreeMap<u64, TruthBox> = scene
                .truth(f64::from(step) * 0.2)
                .into_iter()
                .map(|t| (t.id, t))
                .collect();
            for (id, t) in &now {
                classes.insert(t.class);
                heights_px.push(t.h * 480.0);
                match before.get(id) {
                    Some(earlier) => {
                        assert_eq!(earlier.class, t.class);
                        assert!(
                            (earlier.x - t.x).abs() * 640.0 < 40.0,
                            "{earlier:?} jumped to {t:?}"
                        );
                    }
                    None => entered += 1,
                }
            }
            left += before.keys().filter(|id| !now.contains_key(id)).count();
            before = now;
        }
    }
    assert_eq!(classes.len(), CLASS_NAMES.len());
    assert!(entered > 40 && left > 20, "{entered} entered, {left} left");
    heights_px.sort_by(f32::total_cmp);
    assert!(
        heights_px[heights_px.len() / 20] < 22.0,
        "small objects are part of every scene"
    );
    assert!(
        heights_px[heights_px.len() * 19 / 20] > 80.0,
        "large objects are part of every scene"
    );
}

#[test]
fn light_scales_the_picture_and_noise_keeps_its_size() {
    let scene = scene(3);
    let clean = scene.frame_without_noise(1.0);
    for brightness in [0.5_f32, 0.12] {
        let dark = scene.frame(1.0, brightness);
        let errors: Vec<f64> = clean
            .rgb
            .iter()
            .zip(&dark.rgb)
            .map(|(c, d)| f64::from(*d) - f64::from(*c) * f64::from(brightness))
            // Where the noise would clip, its size is not visible.
            .zip(&clean.rgb)
            .filter(|(_, c)| {
                f32::from(**c) * brightness > 14.0 && f32::from(**c) * brightness < 240.0
            })
            .map(|(error, _)| error)
            .collect();
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        let sigma =
            (errors.iter().map(|e| (e - mean).powi(2)).sum::<f64>() / errors.len() as f64).sqrt();
        assert!(
            mean.abs() < 0.1,
            "brightness {brightness}: mean error {mean}"
        );
        assert!(
            (sigma - f64::from(NOISE_SIGMA)).abs() < 0.1,
            "brightness {brightness}: sigma {sigma}"
        );
    }
}

#[test]
fn noise_differs_from_frame_to_frame() {
    let still = Scene::new(
        5,
        SceneSettings {
            lanes: 0,
            ..SceneSettings::default()
        },
    );
    assert_eq!(
        still.frame_without_noise(0.0),
        still.frame_without_noise(0.1)
    );
    assert_ne!(still.frame(0.0, 1.0).rgb, still.frame(0.1, 1.0).rgb);
}

#[test]
fn what_a_nearer_object_hides_is_not_in_the_truth() {
    let scene = scene(1);
    let object = |id: u64, area: [f32; 4]| Placed {
        id,
        class: 1,
        area,
        style: Style::draw(&mut Draws::new(id, &[])),
        phase: 0.0,
        faces_left: false,
    };
    let hidden = object(1, [100.0, 100.0, 60.0, 30.0]);
    let beside = object(2, [300.0, 100.0, 60.0, 30.0]);
    let in_front = object(3, [95.0, 70.0, 90.0, 70.0]);
    let mut rgb = scene.background.clone();
    let truth = scene.paint(&mut rgb, &[hidden, beside, in_front]);
    assert_eq!(truth.iter().map(|t| t.id).collect::<Vec<_>>(), [2, 3]);
}

#[test]
fn odd_settings_and_times_are_tamed() {
    let tiny = Scene::new(
        1,
        SceneSettings {
            width: 0,
            height: 1,
            lanes: 1,
            distractors: 1,
            speed: f32::NAN,
            place: None,
        },
    );
    let frame = tiny.frame(-3.0, f32::NAN);
    assert_eq!(
        (frame.width, frame.height, frame.rgb.len()),
        (64, 64, 64 * 64 * 3)
    );
    assert_eq!(scene(1).truth(f64::NAN), scene(1).truth(0.0));
}

#[test]
fn a_long_video_never_runs_dry() {
    let scene = scene(11);
    for hour in 0..5 {
        assert!(!scene.truth(f64::from(hour) * 3600.0).is_empty());
    }
}
