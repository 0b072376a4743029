use super::*;
use crate::candidate::prefixes;
use crate::space::{Space, placements};
use crate::tests::fixture;
use proptest::prelude::*;

struct World {
    query: Query,
    cluster: Cluster,
    profile: QueryProfile,
    settings: PredictSettings,
    catalogue: std::sync::Arc<Catalogue>,
}

impl World {
    fn new() -> Self {
        Self {
            query: fixture::query(),
            cluster: fixture::cluster(),
            profile: fixture::profile(&fixture::all_configurations(), 1.0),
            settings: PredictSettings::default(),
            catalogue: fixture::catalogue(),
        }
    }

    fn context(&self) -> Context<'_> {
        Context {
            query: &self.query,
            catalogue: &self.catalogue,
            cluster: &self.cluster,
            profile: &self.profile,
            settings: &self.settings,
            rate_hz: 10.0,
        }
    }

    fn with_model<T>(
        &self,
        configuration: &PipelineConfiguration,
        nodes: &[&str],
        then: impl FnOnce(&Model<'_>) -> T,
    ) -> T {
        let context = self.context();
        let space = Space::new(&self.query.pipeline, &self.catalogue).unwrap();
        let known = known(&context, configuration, &prefixes(&space, configuration)).unwrap();
        let placement = Placement(nodes.iter().map(|n| fixture::node_id(n)).collect());
        then(&Model::new(&context, configuration, &known, &placement).unwrap())
    }
}

const SPLIT: [&str; 5] = ["edge-1", "edge-1", "cloud-1", "cloud-1", "cloud-1"];

#[test]
fn latency_is_the_sum_of_its_parts() {
    let world = World::new();
    let configuration = fixture::configuration(320, 75, "m");
    let latency = world.with_model(&configuration, &SPLIT, |m| {
        m.latency(&[Millicores(1000); 5])
    });
    // On the edge (0.15): 0.2 + 3 ms of work; in the cloud 6 + 0.4 + 0.2.
    let work = 3.2 / 0.15 + 6.6;
    assert!(
        (latency.operators_ms - work - 2.5).abs() < 2.0,
        "{latency:?}"
    );
    // 9 kB over 6 Mbit/s = 12 ms, half of 40 ms each way.
    assert!(
        (latency.links_ms - (12.0 + 20.0 + 20.0 + 6.0)).abs() < 1.5,
        "{latency:?}"
    );
    assert!(latency.at_percentile.value >= latency.mean_ms);
    assert!(!latency.measured, "times were measured in the cloud only");
}

#[test]
fn a_slow_link_and_a_lost_packet_cost_time() {
    let mut world = World::new();
    let configuration = fixture::configuration(320, 75, "m");
    let value = |world: &World| {
        world.with_model(&configuration, &SPLIT, |m| {
            m.latency(&[Millicores(1000); 5]).at_percentile.value
        })
    };
    let good = value(&world);
    let pair = (fixture::node_id("edge-1"), fixture::node_id("cloud-1"));
    world.cluster.links.get_mut(&pair).unwrap().loss = 0.02;
    let lossy = value(&world);
    assert!(lossy > good + 10.0);
    world.cluster.links.get_mut(&pair).unwrap().bandwidth = Bandwidth::from_mbit_s(1.0);
    assert!(value(&world) > lossy + 60.0);
    assert!(world.with_model(&configuration, &SPLIT, |m| m.hops().len()) == 2);
}

#[test]
fn control_traffic_is_nothing_on_a_wide_link_and_fills_a_narrow_one() {
    let settings = PredictSettings::default();
    let mean = |mbit_s: f64| {
        let link = Link {
            bandwidth: Bandwidth::from_mbit_s(mbit_s),
            lower_bound: false,
            rtt_ms: 30.0,
            loss: 0.0,
        };
        let alone = PredictSettings {
            control_rate: Bandwidth(0),
            ..settings.clone()
        };
        let time = |settings| hop_time(&link, 700.0, 10.0, settings).0;
        (time(&alone), time(&settings))
    };
    let (alone, shared) = mean(4.0);
    assert!(shared - alone < 0.5, "{alone} {shared}");
    let (alone, shared) = mean(0.2);
    assert!(shared > alone + 50.0, "{alone} {shared}");
    let (_, full) = mean(0.05);
    assert!(full > 1_000.0 && full.is_finite(), "{full}");
    let link = Link {
        bandwidth: rate_needed(60_000.0, &settings),
        lower_bound: false,
        rtt_ms: 1.0,
        loss: 0.0,
    };
    assert!((usable_bps(&link, &settings) - 60_000.0).abs() < 2.0);
}

#[test]
fn a_link_nobody_has_filled_is_taken_for_the_assumed_rate() {
    let settings = PredictSettings::default();
    let link = Link {
        bandwidth: Bandwidth(1000),
        lower_bound: true,
        rtt_ms: 1.0,
        loss: 0.0,
    };
    assert_eq!(planned_rate(&link, &settings), settings.assumed_bandwidth);
    let measured = Link {
        lower_bound: false,
        ..link
    };
    assert_eq!(planned_rate(&measured, &settings), Bandwidth(1000));
}

#[test]
fn a_time_from_another_class_is_scaled_and_in_doubt() {
    let world = World::new();
    let context = world.context();
    let configuration = fixture::configuration(320, 75, "m");
    let space = Space::new(&world.query.pipeline, &world.catalogue).unwrap();
    let known = known(&context, &configuration, &prefixes(&space, &configuration)).unwrap();
    let on = |name: &str| {
        known[2]
            .on(&fixture::description(name), &world.settings)
            .unwrap()
    };
    assert!(on("cloud-1").measured);
    assert!(!on("edge-1").measured);
    assert!((on("edge-1").mean_ms - 6.0 / 0.15).abs() < 1e-9);
    assert!(on("edge-1").doubt > on("cloud-1").doubt);
    let mut real = fixture::description("edge-1");
    real.emulated_speed = None;
    real.device_class = "jetson".to_owned();
    assert!(known[2].on(&real, &world.settings).unwrap().doubt >= 0.5);
}

#[test]
fn a_filter_lowers_load_and_cost_of_what_follows() {
    let world = World::new();
    let open = fixture::configuration(320, 75, "m");
    let mut closed = open.clone();
    let rate = compass_shared::ids::KnobName::new("rate").unwrap();
    closed
        .0
        .get_mut(&fixture::operator_id("sampler"))
        .unwrap()
        .0
        .insert(rate, compass_shared::model::pipeline::KnobValue::Integer(2));
    let context = world.context();
    let space = Space::new(&world.query.pipeline, &world.catalogue).unwrap();
    let known = known(&context, &closed, &prefixes(&space, &open)).unwrap();
    let placement = Placement(SPLIT.iter().map(|n| fixture::node_id(n)).collect());
    let low = Model::new(&context, &closed, &known, &placement).unwrap();
    let high = world.with_model(&open, &SPLIT, |m| m.utilisation(2, Millicores(1000)));
    assert!((low.utilisation(2, Millicores(1000)) - high / 5.0).abs() < 1e-9);
    assert!((low.result_hz() - 2.0).abs() < 1e-9);
}

#[test]
fn what_is_missing_is_named() {
    let mut world = World::new();
    let configuration = fixture::configuration(320, 75, "m");
    world.profile = fixture::profile(&[fixture::configuration(160, 50, "s")], 1.0);
    let context = world.context();
    let space = Space::new(&world.query.pipeline, &world.catalogue).unwrap();
    let error = known(&context, &configuration, &prefixes(&space, &configuration)).unwrap_err();
    assert_eq!(
        error,
        Unpredictable::NotMeasured(fixture::operator_id("prepare"))
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn more_share_is_never_slower_or_busier(which in 0_usize..36, place in 0_usize..56, operator in 0_usize..5, a in 20_u32..1000, b in 20_u32..1000) {
        let world = World::new();
        let context = world.context();
        let configuration = fixture::all_configurations()[which].clone();
        let space = Space::new(&world.query.pipeline, &world.catalogue).unwrap();
        let known = known(&context, &configuration, &prefixes(&space, &configuration)).unwrap();
        let placement = placements(&world.query, &world.cluster)[place].clone();
        let model = Model::new(&context, &configuration, &known, &placement).unwrap();
        let with = |share: u32| {
            let mut shares = [Millicores(500); 5];
            shares[operator] = Millicores(share);
            model.latency(&shares).at_percentile.value
        };
        let (low, high) = (a.min(b), a.max(b));
        prop_assert!(with(high) <= with(low) + 1e-9);
        prop_assert!(model.utilisation(operator, Millicores(high)) <= model.utilisation(operator, Millicores(low)));
    }
}
