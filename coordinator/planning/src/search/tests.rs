use super::*;
use crate::candidate::{Preference, enumerate};
use crate::predict::PredictSettings;
use crate::profile::QueryProfile;
use crate::tests::fixture;
use compass_shared::model::cluster::Cluster;
use compass_shared::model::query::Query;
use compass_shared::seed::Seed;
use std::collections::BTreeSet;

/// A search against the fixture's truth.
struct Run {
    query: Query,
    cluster: Cluster,
    space: Space,
    front: Front,
    search: Feasible,
    light: f64,
    tried: Vec<Point>,
}

impl Run {
    fn new(seed: u64) -> Self {
        let query = fixture::query();
        Self {
            space: Space::new(&query.pipeline, &fixture::catalogue()).unwrap(),
            query,
            cluster: fixture::cluster(),
            front: Front {
                profile: QueryProfile {
                    input_bytes: fixture::FRAME_BYTES,
                    ..QueryProfile::default()
                },
                preference: Preference::Cheapest,
            },
            search: Feasible::new(SearchSettings::default(), Seed(seed)),
            light: 1.0,
            tried: Vec::new(),
        }
    }

    fn context<'a>(
        &'a self,
        catalogue: &'a compass_shared::model::catalogue::Catalogue,
        settings: &'a PredictSettings,
    ) -> Context<'a> {
        Context {
            query: &self.query,
            catalogue,
            cluster: &self.cluster,
            profile: &self.front.profile,
            settings,
            rate_hz: 10.0,
        }
    }

    fn ask(&mut self, count: usize) -> Next {
        let (catalogue, settings) = (fixture::catalogue(), PredictSettings::default());
        let mut search = std::mem::replace(
            &mut self.search,
            Feasible::new(SearchSettings::default(), Seed(0)),
        );
        let view = View {
            context: self.context(&catalogue, &settings),
            space: &self.space,
            front: &self.front,
            frames: 8,
        };
        let next = search.ask(&view, count);
        self.search = search;
        next
    }

    /// Measures a point as the fixture's truth has it.
    fn measure(&mut self, point: &Point) {
        self.tried.push(point.clone());
        let measured = fixture::profile(&[self.space.configuration(point)], self.light);
        self.front.profile.operators.extend(measured.operators);
        self.front
            .profile
            .configurations
            .extend(measured.configurations);
        self.search.tell(point, Told::Measured);
    }

    fn cheapest(&self) -> Option<f64> {
        let (catalogue, settings) = (fixture::catalogue(), PredictSettings::default());
        let found = enumerate(
            &self.context(&catalogue, &settings),
            &self.space,
            &self.front,
        );
        Some(found.feasible.first()?.expected.cost_usd_per_h)
    }

    /// Runs to the end; trials until the first feasible plan, and in all.
    fn run(&mut self) -> (Option<usize>, usize, Stop) {
        let mut first = None;
        loop {
            match self.ask(1) {
                Next::Done(stop) => return (first, self.tried.len(), stop),
                Next::Try(asks) => {
                    assert!(!asks.is_empty(), "nothing is under way");
                    for ask in asks {
                        self.measure(&ask.point);
                    }
                }
            }
            if first.is_none() && self.cheapest().is_some() {
                first = Some(self.tried.len());
            }
        }
    }
}

#[test]
fn a_feasible_plan_comes_soon_and_a_near_optimal_one_before_the_space_is_exhausted() {
    let mut everything = Run::new(0);
    everything.front.profile = fixture::profile(&fixture::all_configurations(), 1.0);
    let best = everything.cheapest().unwrap();
    let mut firsts = Vec::new();
    for seed in 0..5 {
        let mut run = Run::new(seed);
        let (first, trials, _) = run.run();
        firsts.push(first.unwrap());
        assert!(trials < 36, "seed {seed}: {trials} trials");
        let found = run.cheapest().unwrap();
        assert!(found <= best * 1.15, "seed {seed}: {found} against {best}");
    }
    assert!(firsts.iter().sum::<usize>() <= 5 * 4, "{firsts:?}");
}

#[test]
fn field_047_051_nothing_is_tried_twice_and_an_exhausted_space_ends() {
    let mut run = Run::new(3);
    // An accuracy nobody reaches: the search has to look everywhere.
    run.query.slo.accuracy_min = Some(0.999);
    let (first, trials, stop) = run.run();
    assert_eq!(first, None);
    assert_eq!((trials, stop), (36, Stop::Exhausted));
    let distinct: BTreeSet<_> = run.tried.iter().collect();
    assert_eq!(distinct.len(), 36);
}

#[test]
fn field_049_without_hope_the_budget_is_kept_and_the_nearest_is_found() {
    let mut run = Run::new(4);
    run.query.slo.latency.as_mut().unwrap().bound = std::time::Duration::from_millis(20);
    run.search = Feasible::new(
        SearchSettings {
            trials_max: 20,
            ..SearchSettings::default()
        },
        Seed(4),
    );
    let (first, trials, stop) = run.run();
    assert_eq!((first, trials, stop), (None, 20, Stop::Budget));
    let (catalogue, settings) = (fixture::catalogue(), PredictSettings::default());
    let found = enumerate(&run.context(&catalogue, &settings), &run.space, &run.front);
    assert_eq!(found.nearest.unwrap().reason.name(), "latency");
}

#[test]
fn field_053_configurations_that_fail_are_left_alone_and_the_search_goes_on() {
    let mut run = Run::new(5);
    let mut failed = 0;
    loop {
        match run.ask(1) {
            Next::Done(_) => break,
            Next::Try(asks) => {
                for ask in asks {
                    if (ask.point.0[1] + ask.point.0[3]) % 3 == 0 {
                        failed += 1;
                        run.tried.push(ask.point.clone());
                        run.search.tell(&ask.point, Told::Failed);
                    } else {
                        run.measure(&ask.point);
                    }
                }
            }
        }
    }
    assert!(failed > 0);
    assert!(run.cheapest().is_some_and(f64::is_finite));
    let distinct: BTreeSet<_> = run.tried.iter().collect();
    assert_eq!(distinct.len(), run.tried.len());
}

#[test]
fn the_same_seed_asks_the_same_and_a_replayed_log_goes_on_where_it_stopped() {
    let asked = |seed: u64| {
        let mut run = Run::new(seed);
        run.run();
        run.tried
    };
    assert_eq!(asked(7), asked(7));
    assert_ne!(asked(7), asked(8));
    let mut first = Run::new(9);
    for _ in 0..5 {
        let Next::Try(asks) = first.ask(1) else {
            panic!("too early")
        };
        first.measure(&asks[0].point);
    }
    let mut second = Run::new(9);
    second.front = first.front.clone();
    for point in first.tried.clone() {
        second.search.tell(&point, Told::Measured);
    }
    let (Next::Try(a), Next::Try(b)) = (first.ask(1), second.ask(1)) else {
        panic!("both go on");
    };
    assert!(!first.tried.contains(&b[0].point));
    assert_eq!(a, b);
}

#[test]
fn golden_comes_first_when_it_stands_in_for_the_truth_and_warm_points_after_a_drift() {
    let mut run = Run::new(1);
    run.search.require_golden();
    let Next::Try(asks) = run.ask(2) else {
        panic!("it has begun")
    };
    assert_eq!(asks[0].why, Why::Golden);
    assert_eq!(asks[0].point, run.space.golden());
    run.measure(&asks[0].point.clone());
    run.search.tell(&asks[1].point, Told::Cancelled);
    let warm = run.space.point(7);
    run.search.reopen(vec![warm.clone()]);
    let Next::Try(asks) = run.ask(1) else {
        panic!("it goes on")
    };
    assert_eq!((asks[0].why, &asks[0].point), (Why::Warm, &warm));
}

#[test]
fn a_space_of_one_point_is_tried_once() {
    let mut run = Run::new(1);
    for operator in &mut run.query.pipeline.operators {
        for knob in &mut operator.knobs {
            knob.values.truncate(1);
        }
    }
    run.space = Space::new(&run.query.pipeline, &fixture::catalogue()).unwrap();
    let Next::Try(asks) = run.ask(3) else {
        panic!("one is there")
    };
    assert_eq!(asks.len(), 1);
    run.search.tell(&asks[0].point, Told::Failed);
    assert_eq!(run.ask(3), Next::Done(Stop::Exhausted));
}
