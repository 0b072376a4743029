use super::*;

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
