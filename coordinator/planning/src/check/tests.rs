use super::*;
use crate::candidate::{Front, Preference, enumerate};
use crate::predict::{Context, PredictSettings};
use crate::space::Space;
use crate::targets::{LiveQuery, node_targets};
use crate::tests::fixture;
use compass_shared::ids::{Digest, InstanceId, KnobName};
use compass_shared::model::cluster::Tier;
use compass_shared::model::pipeline::KnobValue;
use compass_shared::model::plan::PlanStatus;
use compass_shared::model::trigger::Trigger;
use compass_shared::units::Millicores;
use std::sync::Arc;

/// A valid plan that uses several nodes, and everything around it.
struct World {
    query: Query,
    catalogue: Arc<Catalogue>,
    cluster: Cluster,
    plan: QueryPlan,
    newest: Generation,
}

impl World {
    fn new() -> Self {
        let query = fixture::query();
        let catalogue = fixture::catalogue();
        let cluster = fixture::cluster();
        let front = Front {
            profile: fixture::profile(&fixture::all_configurations(), 1.0),
            preference: Preference::Cheapest,
        };
        let settings = PredictSettings::default();
        let context = Context {
            query: &query,
            catalogue: &catalogue,
            cluster: &cluster,
            profile: &front.profile,
            settings: &settings,
            rate_hz: 10.0,
        };
        let space = Space::new(&query.pipeline, &catalogue).unwrap();
        let found = enumerate(&context, &space, &front);
        let candidate = found.feasible.iter().find(|c| c.nodes.len() > 1).unwrap();
        let plan = QueryPlan {
            query: query.id.clone(),
            generation: Generation(7),
            parent: Some(Generation(6)),
            operators: candidate.operators.clone(),
            status: PlanStatus::Guessed,
            trigger: Trigger::QueryRegistered,
            expected: candidate.expected,
        };
        Self {
            query,
            catalogue,
            cluster,
            plan,
            newest: Generation(6),
        }
    }

    fn broken(&self) -> Vec<&'static str> {
        let context = PlanContext {
            query: &self.query,
            catalogue: &self.catalogue,
            cluster: &self.cluster,
            newest: self.newest,
            in_force: None,
        };
        let mut names: Vec<_> = plan(&context, &self.plan)
            .iter()
            .map(|v| v.rule.name())
            .collect();
        names.dedup();
        names
    }

    fn targets(&self) -> BTreeMap<NodeId, NodeTarget> {
        let live = [LiveQuery {
            query: &self.query,
            app: None,
            current: self.plan.generation,
            plans: vec![&self.plan],
            standby: &[],
        }];
        node_targets(
            &live,
            &self.catalogue,
            &self.cluster,
            Commit { term: 1, number: 5 },
        )
    }

    fn broken_step(&self, targets: &BTreeMap<NodeId, NodeTarget>) -> Vec<&'static str> {
        let queries = [(
            self.query.id.clone(),
            QueryStep {
                query: &self.query,
                current: self.plan.generation,
                plans: vec![&self.plan],
            },
        )];
        let before = BTreeMap::new();
        let violations = step(&Step {
            cluster: &self.cluster,
            queries: queries.into(),
            targets,
            before: &before,
            last: Commit { term: 1, number: 4 },
        });
        let mut names: Vec<_> = violations.iter().map(|v| v.rule.name()).collect();
        names.dedup();
        names
    }
}

/// A corruption of a valid plan: its name, the rule that must refuse it, and what it does.
type Corruption = (&'static str, &'static str, fn(&mut World));

const CORRUPTIONS: [Corruption; 16] = [
    ("an operator is left out", "operators-complete", |w| {
        w.plan.operators.pop();
    }),
    (
        "a knob has a value nobody offered",
        "configuration-allowed",
        |w| {
            let knob = KnobName::new("quality").unwrap();
            w.plan.operators[1]
                .configuration
                .0
                .insert(knob, KnobValue::Integer(99));
            refresh_instance(w, 1);
        },
    ),
    (
        "a model that belongs to another configuration",
        "artifact-fits",
        |w| {
            w.plan.operators[2].artifact.as_mut().unwrap().digest = Digest::of(b"other");
            refresh_instance(w, 2);
        },
    ),
    ("an instance id of something else", "instance-id", |w| {
        w.plan.operators[0].instance = InstanceId(1);
    }),
    ("a node nobody knows", "node-known", |w| {
        w.plan.operators[4].node = fixture::node_id("ghost");
        refresh_instance(w, 4);
    }),
    ("a node that is offline", "node-takes-work", |w| {
        let node = w.plan.operators[2].node.clone();
        w.cluster.nodes.get_mut(&node).unwrap().online = false;
    }),
    ("a node that drains", "node-takes-work", |w| {
        let node = w.plan.operators[2].node.clone();
        w.cluster.nodes.get_mut(&node).unwrap().scheduling = Scheduling::Draining;
    }),
    ("a tier the query forbids", "tier-allowed", |w| {
        let tier = w.cluster.nodes[&w.plan.operators[2].node].description.tier;
        w.query.constraints.push(Constraint::OperatorTiers {
            operator: fixture::operator_id("detector"),
            tiers: Tier::ALL.into_iter().filter(|t| *t != tier).collect(),
        });
    }),
    ("data that leaves its site", "stays-within-site", |w| {
        move_to(w, 2, "cloud-1");
        w.query.constraints.push(Constraint::StayWithinSite {
            output_of: Some(fixture::operator_id("prepare")),
        });
    }),
    ("two nodes without a link", "link-usable", |w| {
        let (from, to) = crate::targets::hops(&w.query, &w.plan)
            .into_iter()
            .next()
            .unwrap();
        w.cluster.links.remove(&(from, to));
    }),
    ("a share of nothing", "share-positive", |w| {
        w.plan.operators[2].share.cpu = Millicores(0);
    }),
    ("less memory than the kind needs", "memory-granted", |w| {
        w.plan.operators[2].share.memory_mib = 1;
    }),
    ("a cost above the cap", "cost-cap", |w| {
        w.plan.expected.cost_usd_per_h = 5.0;
    }),
    (
        "an expectation that is no number",
        "expectation-finite",
        |w| {
            w.plan.expected.latency_ms.value = f64::NAN;
        },
    ),
    ("more than a node has", "plan-fits-node", |w| {
        w.plan.operators[2].share.cpu = Millicores(5000);
    }),
    (
        "a generation that was there before",
        "generation-grows",
        |w| {
            w.newest = Generation(7);
        },
    ),
];

fn refresh_instance(world: &mut World, index: usize) {
    let kind = world.query.pipeline.operators[index].kind.clone();
    let part = &mut world.plan.operators[index];
    part.instance = compass_shared::model::plan::instance_id(
        &kind,
        part.artifact.as_ref().map(|a| &a.digest),
        &part.configuration,
        &part.node,
    );
}

fn move_to(world: &mut World, index: usize, node: &str) {
    world.plan.operators[index].node = fixture::node_id(node);
    refresh_instance(world, index);
}

#[test]
fn a_valid_plan_passes() {
    let world = World::new();
    assert!(world.broken().is_empty(), "{:?}", world.broken());
    assert!(world.broken_step(&world.targets()).is_empty());
}

#[test]
fn every_corruption_of_a_plan_is_refused_by_its_own_rule() {
    for (what, rule, corrupt) in CORRUPTIONS {
        let mut world = World::new();
        corrupt(&mut world);
        let broken = world.broken();
        assert!(
            broken.contains(&rule),
            "{what}: {broken:?} instead of {rule}"
        );
        // The rule itself catches it: others may follow from the same corruption, but only few do.
        assert!(broken.len() <= 3, "{what}: {broken:?}");
    }
}

type TargetCorruption = (
    &'static str,
    &'static str,
    fn(&World, &mut BTreeMap<NodeId, NodeTarget>),
);

fn detector_node(world: &World) -> NodeId {
    world.plan.operators[2].node.clone()
}

const TARGET_CORRUPTIONS: [TargetCorruption; 9] = [
    ("more granted than there is", "capacity", |w, t| {
        t.get_mut(&detector_node(w)).unwrap().instances[0].share.cpu = Millicores(5000);
    }),
    (
        "a route that leads elsewhere",
        "route-matches-plan",
        |w, t| {
            let target = t.get_mut(&w.query.entry).unwrap();
            target.queries[0].routes[0].steps[2].node = fixture::node_id("near-1");
        },
    ),
    ("a reader too few", "route-matches-plan", |w, t| {
        t.get_mut(&w.query.entry).unwrap().queries[0].routes[0].steps[1]
            .readers
            .clear();
    }),
    (
        "frames for a generation without a route",
        "current-routed",
        |w, t| {
            t.get_mut(&w.query.entry).unwrap().queries[0].current = Generation(9);
        },
    ),
    ("an instance that is missing", "instance-present", |w, t| {
        t.get_mut(&detector_node(w)).unwrap().instances.clear();
    }),
    ("an instance nobody needs", "instance-needed", |w, t| {
        let target = t.get_mut(&detector_node(w)).unwrap();
        let mut extra = target.instances[0].clone();
        extra.instance = InstanceId(5);
        extra.share.cpu = Millicores(1);
        target.instances.push(extra);
    }),
    ("a neighbour with another key", "peers-known", |w, t| {
        t.get_mut(&w.query.entry).unwrap().peers[0].fingerprint = Digest::of(b"impostor");
    }),
    (
        "a node that is not told of the query",
        "query-present",
        |w, t| {
            let target = t.get_mut(&detector_node(w)).unwrap();
            target.queries.clear();
            target.instances.clear();
        },
    ),
    ("an old commit", "commit-grows", |w, t| {
        t.get_mut(&w.query.entry).unwrap().commit = Commit { term: 1, number: 3 };
    }),
];

#[test]
fn every_corruption_of_a_step_is_refused_by_its_own_rule() {
    let world = World::new();
    for (what, rule, corrupt) in TARGET_CORRUPTIONS {
        let mut targets = world.targets();
        corrupt(&world, &mut targets);
        let broken = world.broken_step(&targets);
        assert!(
            broken.contains(&rule),
            "{what}: {broken:?} instead of {rule}"
        );
    }
}

#[test]
fn a_node_that_has_shrunk_may_be_told_what_does_not_make_it_worse() {
    let mut world = World::new();
    let targets = world.targets();
    let node = detector_node(&world);
    world
        .cluster
        .nodes
        .get_mut(&node)
        .unwrap()
        .description
        .capacity
        .cpu = Millicores(1);
    assert!(world.broken_step(&targets).contains(&"capacity"));
    let mut queries = BTreeMap::new();
    queries.insert(
        world.query.id.clone(),
        QueryStep {
            query: &world.query,
            current: world.plan.generation,
            plans: vec![&world.plan],
        },
    );
    let violations = step(&Step {
        cluster: &world.cluster,
        queries,
        targets: &targets,
        before: &targets,
        last: Commit { term: 1, number: 5 },
    });
    assert!(violations.is_empty(), "{violations:?}");
}

#[test]
fn a_cordoned_node_keeps_what_it_has_and_gets_no_more() {
    let mut world = World::new();
    let node = detector_node(&world);
    world.cluster.nodes.get_mut(&node).unwrap().scheduling = Scheduling::Cordoned;
    assert!(world.broken().contains(&"node-takes-work"));
    let before = world.plan.clone();
    world.plan.generation = Generation(8);
    let context = PlanContext {
        query: &world.query,
        catalogue: &world.catalogue,
        cluster: &world.cluster,
        newest: Generation(7),
        in_force: Some(&before),
    };
    assert!(plan(&context, &world.plan).is_empty());
}

#[test]
fn an_overlap_excuses_a_smaller_share_on_its_own_nodes_only() {
    let world = World::new();
    let mine = world.plan.operators[0].node.clone();
    let elsewhere = ["edge-1", "near-1", "metro-1", "cloud-1"]
        .map(fixture::node_id)
        .into_iter()
        .find(|node| !world.plan.nodes().contains(node))
        .unwrap();
    for (place, is_excused) in [(&mine, true), (&elsewhere, false)] {
        let mut other = world.query.clone();
        other.id = fixture::query_id("other");
        // One operator, configured otherwise, so that it shares no instance; two generations of it overlap.
        let mut part = world.plan.operators[0].clone();
        part.node = place.clone();
        part.instance = InstanceId(part.instance.0 ^ 1);
        let generation = |number| QueryPlan {
            query: other.id.clone(),
            generation: Generation(number),
            operators: vec![part.clone()],
            ..world.plan.clone()
        };
        let (old, new) = (generation(1), generation(2));
        let live = [
            LiveQuery {
                query: &world.query,
                app: None,
                current: world.plan.generation,
                plans: vec![&world.plan],
                standby: &[],
            },
            LiveQuery {
                query: &other,
                app: None,
                current: new.generation,
                plans: vec![&old, &new],
                standby: &[],
            },
        ];
        let commit = Commit { term: 1, number: 5 };
        let mut targets = node_targets(&live, &world.catalogue, &world.cluster, commit);
        let own = world.plan.operators[0].instance;
        let told = &mut targets.get_mut(&mine).unwrap().instances;
        let told = told.iter_mut().find(|i| i.instance == own).unwrap();
        told.share.cpu = Millicores(told.share.cpu.0 * 4 / 5);
        let queries = live.iter().map(|one| {
            let step = QueryStep {
                query: one.query,
                current: one.current,
                plans: one.plans.clone(),
            };
            (one.query.id.clone(), step)
        });
        let violations = step(&Step {
            cluster: &world.cluster,
            queries: queries.collect(),
            targets: &targets,
            before: &BTreeMap::new(),
            last: Commit { term: 1, number: 4 },
        });
        let is_refused = violations
            .iter()
            .any(|v| v.rule.name() == "instance-present");
        assert_eq!(is_refused, !is_excused, "{place}: {violations:?}");
    }
}
