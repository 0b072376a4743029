use super::*;
use crate::candidate::Preference;
use crate::targets::granted;
use crate::tests::fixture;
use compass_shared::ids::InstanceId;
use compass_shared::model::cluster::Scheduling;
use compass_shared::model::plan::PlanStatus;
use compass_shared::model::trigger::{LinkQuantity, Measurement};
use compass_shared::units::Bandwidth;
use compass_shared::wire::v1::InstanceState;
use std::collections::BTreeSet;

/// A scheduler among agents that do at once what they are told.
struct World {
    scheduler: Scheduler,
    cluster: Cluster,
    now: Moment,
    effects: Vec<Effect>,
    told: BTreeMap<NodeId, NodeTarget>,
    /// Agents that say nothing of what they are told.
    mute: BTreeSet<NodeId>,
    /// Instances that fail.
    broken: BTreeSet<InstanceId>,
    /// Frames that never leave a left generation.
    stuck: bool,
}

/// The fixture's fleet, with an edge too small for everything and a near box so dear that nobody stays there without need.
fn dear_site() -> Cluster {
    let mut cluster = fixture::cluster();
    let edge = cluster.nodes.get_mut(&fixture::node_id("edge-1")).unwrap();
    edge.description.capacity.cpu.0 = 400;
    cluster
        .prices
        .core_hour
        .insert(compass_shared::model::cluster::Tier::NearEdge, 0.12);
    cluster
}

const NODES: [&str; 4] = ["edge-1", "near-1", "metro-1", "cloud-1"];

impl World {
    fn new() -> Self {
        let mut world = Self {
            scheduler: Scheduler::new(fixture::catalogue(), Settings::default(), 1),
            cluster: dear_site(),
            now: Moment(1_000_000),
            effects: Vec::new(),
            told: BTreeMap::new(),
            mute: BTreeSet::new(),
            broken: BTreeSet::new(),
            stuck: false,
        };
        world.meet();
        world
    }

    /// All nodes connect, and the query is registered.
    fn meet(&mut self) {
        self.tell_cluster(vec![]);
        for name in NODES {
            self.handle(Input::NodeUp {
                node: fixture::node_id(name),
                applied: None,
                instances: vec![],
            });
        }
        self.register(fixture::query());
    }

    fn register(&mut self, query: Query) {
        self.handle(Input::Register {
            query: Arc::new(query),
            app: None,
        });
    }

    /// Hands over a fact, and lets agents answer until all is quiet.
    fn handle(&mut self, input: Input) {
        let mut inputs = vec![input];
        while let Some(input) = inputs.pop() {
            let effects = self.scheduler.handle(self.now, input);
            for effect in &effects {
                if let Effect::SendTarget { node, target } = effect {
                    let before = self.told.insert(node.clone(), (**target).clone());
                    assert!(before.is_none_or(|b| b.commit < target.commit));
                    if !self.mute.contains(node) {
                        inputs.insert(0, self.answer(node));
                    }
                }
            }
            self.effects.extend(effects);
        }
    }

    fn answer(&self, node: &NodeId) -> Input {
        let target = &self.told[node];
        Input::Applied {
            node: node.clone(),
            commit: target.commit,
            instances: target
                .instances
                .iter()
                .map(|i| {
                    fixture::status(
                        i.instance,
                        if self.broken.contains(&i.instance) {
                            InstanceState::Failed("no such file".to_owned())
                        } else {
                            InstanceState::Ready
                        },
                    )
                })
                .collect(),
            in_flight: target
                .queries
                .iter()
                .flat_map(|q| {
                    q.routes
                        .iter()
                        .map(|r| (q.query.clone(), r.generation, q.current))
                })
                .map(|(query, generation, current)| {
                    let frames = u32::from(self.stuck || generation == current);
                    (query, generation, frames)
                })
                .collect(),
        }
    }

    fn tell_cluster(&mut self, triggers: Vec<Trigger>) {
        self.handle(Input::Cluster {
            cluster: Arc::new(self.cluster.clone()),
            triggers,
        });
    }

    fn propose(&mut self, light: f64, preference: Preference, trigger: Trigger) {
        let mut profile = fixture::profile(&fixture::all_configurations(), light);
        if preference == Preference::Safest {
            profile.forget_scores();
        }
        self.handle(Input::Propose(Box::new(Proposal {
            query: fixture::query_id("gate-camera"),
            front: Front {
                profile,
                preference,
            },
            trigger,
            trials: 5,
            cache_hits: 3,
            certified: false,
        })));
    }

    fn planned() -> Self {
        let mut world = Self::new();
        world.propose(1.0, Preference::Cheapest, Trigger::QueryRegistered);
        world
    }

    fn wait(&mut self, seconds: f64) {
        self.now = self.now + Duration::from_secs_f64(seconds);
        self.handle(Input::Tick);
    }

    fn plan(&self) -> &QueryPlan {
        &self.scheduler.assignment().plans[&fixture::query_id("gate-camera")]
    }

    fn changes(&self) -> Vec<&PlanChange> {
        self.effects
            .iter()
            .filter_map(|e| match e {
                Effect::PlanChanged(change) => Some(&**change),
                _ => None,
            })
            .collect()
    }

    fn alarms(&self) -> Vec<&str> {
        self.effects
            .iter()
            .filter_map(|e| match e {
                Effect::Alarm(text) => Some(text.as_str()),
                _ => None,
            })
            .collect()
    }

    fn assert_alarm(&self, part: &str) {
        let alarms = self.alarms();
        assert!(alarms.iter().any(|a| a.contains(part)), "{alarms:?}");
    }

    fn assert_nothing_refused(&self) {
        let alarms = self.alarms();
        assert!(alarms.iter().all(|a| !a.contains("refused")), "{alarms:?}");
    }

    /// The uplink of the plant at a part of its rate.
    fn degrade(&mut self, part: f64) -> Trigger {
        let is_home = |n: &NodeId| ["edge-1", "near-1"].contains(&n.as_str());
        for ((from, to), link) in &mut self.cluster.links {
            if is_home(from) != is_home(to) {
                let (nominal, _) = fixture::nominal(from.as_str(), to.as_str());
                link.bandwidth = Bandwidth::from_mbit_s(nominal * part);
            }
        }
        let measurement = Measurement {
            value: 6.0 * part,
            bound: 6.0,
            window_ms: 500,
        };
        let (from, to) = (fixture::node_id("edge-1"), fixture::node_id("cloud-1"));
        if part < 1.0 {
            Trigger::LinkDegraded {
                from,
                to,
                quantity: LinkQuantity::Rate,
                measurement,
            }
        } else {
            Trigger::LinkRecovered {
                from,
                to,
                measurement,
            }
        }
    }
}

#[test]
fn before_a_plan_the_entry_node_alone_is_told_of_the_query() {
    let world = World::new();
    assert_eq!(world.told.len(), 1);
    let entry = &world.told[&fixture::node_id("edge-1")];
    assert_eq!(entry.queries[0].current, Generation(0));
    assert!(world.changes().is_empty());
}

#[test]
fn a_plan_is_persisted_warmed_and_only_then_in_force() {
    let mut world = World::new();
    world.mute = NODES.map(fixture::node_id).into();
    world.propose(1.0, Preference::Cheapest, Trigger::QueryRegistered);
    assert!(
        world.changes().is_empty(),
        "nobody has said that it is ready"
    );
    let entry = &world.told[&fixture::node_id("edge-1")];
    assert_eq!(entry.queries[0].current, Generation(0));
    assert_eq!(entry.queries[0].routes.len(), 1);
    world.mute.clear();
    let nodes: Vec<_> = world.told.keys().cloned().collect();
    for node in nodes {
        let answer = world.answer(&node);
        world.handle(answer);
    }
    assert_eq!(world.changes().len(), 1);
    assert_eq!(world.changes()[0].route.generation, Generation(1));
    assert_eq!(
        world.told[&fixture::node_id("edge-1")].queries[0].current,
        Generation(1)
    );
    let order: Vec<&str> = world
        .effects
        .iter()
        .filter_map(|e| match e {
            Effect::Persist(p) => Some(match **p {
                Persist::Plan { .. } => "plan",
                Persist::Assignment(_) => "assignment",
                Persist::Term(_) => "term",
            }),
            Effect::PlanChanged(_) => Some("changed"),
            _ => None,
        })
        .collect();
    assert_eq!(order, ["plan", "assignment", "changed"]);
    assert!(
        world
            .scheduler
            .explanation(&fixture::query_id("gate-camera"))
            .is_some()
    );
}

#[test]
fn a_degraded_link_is_answered_at_once_make_before_break() {
    let mut world = World::planned();
    let before = world.plan().clone();
    world.stuck = true;
    let trigger = world.degrade(0.01);
    world.tell_cluster(vec![trigger]);
    assert_ne!(world.plan().content_hash(), before.content_hash());
    assert_eq!(world.changes().len(), 2);
    assert_eq!(world.changes()[1].gap, None);
    assert_eq!(world.changes()[1].trigger.name(), "link-degraded");
    // Frames of the old plan are still in flight: its instances stay.
    let old: Vec<_> = before
        .operators
        .iter()
        .map(|o| (o.node.clone(), o.instance))
        .collect();
    let runs = |world: &World, (node, instance): &(NodeId, InstanceId)| {
        world.told[node]
            .instances
            .iter()
            .any(|i| i.instance == *instance)
    };
    assert!(old.iter().all(|o| runs(&world, o)));
    world.wait(3.0);
    let new: Vec<_> = world
        .plan()
        .operators
        .iter()
        .map(|o| (o.node.clone(), o.instance))
        .collect();
    assert!(
        old.iter()
            .filter(|o| !new.contains(o))
            .all(|o| !runs(&world, o)),
        "gone after the frame deadline"
    );
    assert_eq!(
        world
            .scheduler
            .phase(&fixture::query_id("gate-camera"))
            .unwrap(),
        "steady"
    );
    assert!(world.alarms().is_empty(), "{:?}", world.alarms());
}

#[test]
fn an_empty_old_generation_is_stopped_without_waiting_for_the_deadline() {
    let mut world = World::planned();
    let trigger = world.degrade(0.01);
    world.tell_cluster(vec![trigger]);
    assert_eq!(
        world
            .scheduler
            .phase(&fixture::query_id("gate-camera"))
            .unwrap(),
        "steady"
    );
}

#[test]
fn an_improvement_waits_for_its_dwell_time_and_a_repair_does_not() {
    let mut world = World::planned();
    let trigger = world.degrade(0.01);
    world.tell_cluster(vec![trigger]);
    assert_eq!(
        world.changes().len(),
        2,
        "a repair right after the first plan"
    );
    let near = world.plan().clone();
    let trigger = world.degrade(1.0);
    world.tell_cluster(vec![trigger]);
    assert_eq!(
        world.plan().generation,
        near.generation,
        "better could be had, but not yet"
    );
    world.wait(5.0);
    assert_eq!(world.plan().generation, near.generation);
    world.wait(6.0);
    assert_eq!(world.changes().len(), 3);
    assert!(world.plan().expected.cost_usd_per_h < near.expected.cost_usd_per_h);
    assert_eq!(world.plan().trigger.name(), "link-recovered");
}

#[test]
fn an_instance_that_fails_calls_the_plan_off_and_another_is_chosen() {
    let mut world = World::planned();
    let first = world.plan().clone();
    let trigger = world.degrade(0.01);
    // Whatever detector comes next fails.
    world.mute = NODES.map(fixture::node_id).into();
    world.tell_cluster(vec![trigger]);
    let new: Vec<InstanceId> = world
        .told
        .values()
        .flat_map(|t| &t.instances)
        .filter(|i| i.kind.as_str() == "detector" && i.instance != first.operators[2].instance)
        .map(|i| i.instance)
        .collect();
    assert_eq!(new.len(), 1);
    world.broken.extend(new);
    world.mute.clear();
    for name in NODES {
        if world.told.contains_key(&fixture::node_id(name)) {
            let answer = world.answer(&fixture::node_id(name));
            world.handle(answer);
        }
    }
    world.assert_alarm("was called off");
    assert!(
        world
            .plan()
            .operators
            .iter()
            .all(|o| !world.broken.contains(&o.instance))
    );
    assert_ne!(world.plan().generation, first.generation);
}

#[test]
fn a_plan_that_is_never_ready_is_called_off_after_its_time() {
    let mut world = World::planned();
    let trigger = world.degrade(0.01);
    world.mute = NODES.map(fixture::node_id).into();
    world.tell_cluster(vec![trigger]);
    assert_eq!(world.changes().len(), 1);
    world.wait(31.0);
    world.assert_alarm("was not ready within 30 s");
}

#[test]
fn a_lost_node_is_replaced_and_told_what_it_has_to_forget_when_it_is_back() {
    let mut world = World::planned();
    let victim = world.plan().operators[2].node.clone();
    world.cluster.nodes.get_mut(&victim).unwrap().online = false;
    world.mute.insert(victim.clone());
    world.tell_cluster(vec![Trigger::NodeLost(victim.clone())]);
    assert!(!world.plan().nodes().contains(&victim));
    assert_eq!(
        world.changes()[1].trigger,
        Trigger::NodeLost(victim.clone())
    );
    world.wait(5.0);
    let stale = world.told[&victim].clone();
    assert!(!stale.instances.is_empty());
    world.cluster.nodes.get_mut(&victim).unwrap().online = true;
    world.mute.clear();
    world.tell_cluster(vec![Trigger::NodeJoined(victim.clone())]);
    world.handle(Input::NodeUp {
        node: victim.clone(),
        applied: Some(stale.commit),
        instances: stale
            .instances
            .iter()
            .map(|i| fixture::status(i.instance, InstanceState::Ready))
            .collect(),
    });
    let told = &world.told[&victim];
    assert!(told.commit > stale.commit);
    let needed: Vec<_> = world
        .plan()
        .operators
        .iter()
        .filter(|o| o.node == victim)
        .map(|o| o.instance)
        .collect();
    assert!(told.instances.iter().all(|i| needed.contains(&i.instance)));
}

#[test]
fn field_033_a_node_that_reconnects_with_what_it_should_have_is_told_nothing() {
    let mut world = World::planned();
    let node = world.plan().operators[2].node.clone();
    let target = world.told[&node].clone();
    world.effects.clear();
    world.handle(Input::NodeUp {
        node,
        applied: Some(target.commit),
        instances: target
            .instances
            .iter()
            .map(|i| fixture::status(i.instance, InstanceState::Ready))
            .collect(),
    });
    assert!(
        !world
            .effects
            .iter()
            .any(|e| matches!(e, Effect::SendTarget { .. } | Effect::PlanChanged(_))),
        "{:?}",
        world.effects
    );
}

fn restored(world: &World, term: u64) -> World {
    let query = fixture::query();
    let front = Front {
        profile: fixture::profile(&fixture::all_configurations(), 1.0),
        preference: Preference::Cheapest,
    };
    World {
        scheduler: Scheduler::restore(
            fixture::catalogue(),
            Settings::default(),
            term,
            world.scheduler.assignment().clone(),
            vec![Restored {
                query: Arc::new(query),
                app: None,
                front: Some(front),
                newest: Generation(4),
            }],
        ),
        cluster: world.cluster.clone(),
        now: Moment(5),
        effects: Vec::new(),
        told: BTreeMap::new(),
        mute: BTreeSet::new(),
        broken: BTreeSet::new(),
        stuck: false,
    }
}

fn reconnect(world: &mut World, before: &World) {
    for name in NODES {
        let node = fixture::node_id(name);
        let target = before.told.get(&node);
        world.handle(Input::NodeUp {
            node: node.clone(),
            applied: target.map(|t| t.commit),
            instances: target
                .iter()
                .flat_map(|t| &t.instances)
                .map(|i| fixture::status(i.instance, InstanceState::Ready))
                .collect(),
        });
    }
}

#[test]
fn a_restored_scheduler_adopts_what_runs_and_restarts_nothing() {
    let before = World::planned();
    let mut after = restored(&before, 2);
    after.tell_cluster(vec![]);
    assert!(
        after.told.is_empty(),
        "nothing is sent before a node has said what it runs"
    );
    reconnect(&mut after, &before);
    assert_eq!(after.plan(), before.plan());
    assert!(after.changes().is_empty());
    for (node, target) in &before.told {
        let Some(now) = after.told.get(node) else {
            assert!(
                target.instances.is_empty(),
                "{node} is not told what it runs"
            );
            continue;
        };
        assert_eq!(now.instances, target.instances, "{node}");
        assert_eq!(now.queries, target.queries, "{node}");
        assert!(now.commit > target.commit);
    }
    // The next plan does not reuse a generation that was decided but never came into force.
    let trigger = after.degrade(0.01);
    after.tell_cluster(vec![trigger]);
    assert_eq!(after.plan().generation, Generation(5));
}

#[test]
fn a_fleet_that_is_ahead_of_a_restored_snapshot_is_overtaken_by_a_new_term() {
    let mut before = World::planned();
    for target in before.told.values_mut() {
        target.commit = Commit { term: 9, number: 3 };
    }
    let mut after = restored(&before, 2);
    after.tell_cluster(vec![]);
    reconnect(&mut after, &before);
    let terms: Vec<u64> = after
        .effects
        .iter()
        .filter_map(|e| match e {
            Effect::Persist(p) => match **p {
                Persist::Term(term) => Some(term),
                _ => None,
            },
            _ => None,
        })
        .collect();
    assert_eq!(terms, [10]);
    assert!(after.told.values().all(|t| t.commit.term == 10));
}

#[test]
fn a_withdrawn_query_leaves_nothing_behind() {
    let mut world = World::planned();
    world.handle(Input::Withdraw(fixture::query_id("gate-camera")));
    assert!(world.scheduler.assignment().plans.is_empty());
    assert!(
        world
            .told
            .values()
            .all(|t| t.instances.is_empty() && t.queries.is_empty())
    );
    assert!(world.scheduler.granted().values().all(|r| r.cpu.0 == 0));
}

#[test]
fn darkness_brings_the_cautious_plan_first_and_the_measured_one_when_it_is_due() {
    let mut world = World::planned();
    let day = world.plan().clone();
    let drift = Trigger::ContentDrifted {
        descriptor: "luma mean".to_owned(),
        measurement: Measurement {
            value: 10.0,
            bound: 120.0,
            window_ms: 700,
        },
    };
    world.propose(0.0, Preference::Safest, drift.clone());
    let safe = world.plan().clone();
    assert_ne!(safe.content_hash(), day.content_hash());
    assert_eq!(safe.trigger, drift);
    world.propose(0.0, Preference::Cheapest, drift);
    world.wait(11.0);
    let night = world.plan();
    assert!(fixture::recall(&night.configuration(), 0.0) >= 0.75);
    assert!(night.expected.cost_usd_per_h <= safe.expected.cost_usd_per_h);
    assert!(world.alarms().is_empty(), "{:?}", world.alarms());
}

#[test]
fn what_the_app_sees_and_the_model_does_not_reopens_the_search_once() {
    let mut world = World::planned();
    let broken = Trigger::SloViolated {
        slo: compass_shared::model::trigger::SloKind::Latency,
        measurement: Measurement {
            value: 400.0,
            bound: 300.0,
            window_ms: 3000,
        },
    };
    for _ in 0..3 {
        world.handle(Input::Noticed {
            query: fixture::query_id("gate-camera"),
            trigger: broken.clone(),
        });
    }
    let reopened = world
        .effects
        .iter()
        .filter(|e| matches!(e, Effect::Reopen { .. }))
        .count();
    assert_eq!(reopened, 1);
    world.propose(1.0, Preference::Cheapest, Trigger::SearchImproved);
    world.handle(Input::Noticed {
        query: fixture::query_id("gate-camera"),
        trigger: broken,
    });
    let reopened = world
        .effects
        .iter()
        .filter(|e| matches!(e, Effect::Reopen { .. }))
        .count();
    assert_eq!(
        reopened, 2,
        "after the search has answered it may be asked again"
    );
}

#[test]
fn no_traffic_releases_shares_and_its_return_takes_them_again() {
    let mut world = World::planned();
    let cpu = |world: &World| {
        world
            .plan()
            .operators
            .iter()
            .map(|o| o.share.cpu.0)
            .sum::<u32>()
    };
    let busy = cpu(&world);
    let shift = |value: f64, bound: f64| {
        Trigger::LoadShifted(Measurement {
            value,
            bound,
            window_ms: 5000,
        })
    };
    world.wait(15.0);
    world.handle(Input::Noticed {
        query: fixture::query_id("gate-camera"),
        trigger: shift(0.0, 10.0),
    });
    world.wait(15.0);
    let idle = cpu(&world);
    assert!(idle <= busy);
    world.handle(Input::Noticed {
        query: fixture::query_id("gate-camera"),
        trigger: shift(10.0, 0.0),
    });
    world.wait(15.0);
    assert!(cpu(&world) >= idle);
    assert!(world.alarms().is_empty(), "{:?}", world.alarms());
}

#[test]
fn a_second_repair_for_the_same_cause_is_an_alarm() {
    let mut world = World::planned();
    let trigger = world.degrade(0.03);
    world.tell_cluster(vec![trigger]);
    let first = world.changes().len();
    let trigger = world.degrade(0.001);
    world.tell_cluster(vec![trigger]);
    if world.changes().len() > first && first > 1 {
        world.assert_alarm("second repair for link-degraded");
    }
    assert!(
        world
            .plan()
            .operators
            .iter()
            .all(|o| ["edge-1", "near-1"].contains(&o.node.as_str()))
    );
}

#[test]
fn a_rollback_is_a_new_generation_with_old_content_checked_against_today() {
    let mut world = World::planned();
    let first = world.plan().clone();
    let trigger = world.degrade(0.01);
    world.tell_cluster(vec![trigger]);
    let trigger = world.degrade(1.0);
    world.tell_cluster(vec![trigger]);
    world.handle(Input::Rollback {
        query: first.query.clone(),
        plan: Box::new(first.clone()),
    });
    assert_eq!(
        world.plan().content_hash(),
        first.content_hash(),
        "{:?} {:?}",
        world.alarms(),
        world.scheduler.phase(&first.query)
    );
    assert!(world.plan().generation > first.generation);
    assert_eq!(world.plan().trigger, Trigger::Reverted(first.generation));
    // To a node that is gone there is no way back.
    let trigger = world.degrade(0.01);
    world.tell_cluster(vec![trigger]);
    let held = world.plan().clone();
    let node = first.operators[4].node.clone();
    assert_ne!(node.as_str(), "edge-1");
    world.cluster.nodes.get_mut(&node).unwrap().online = false;
    world.tell_cluster(vec![Trigger::NodeLost(node)]);
    world.handle(Input::Rollback {
        query: first.query.clone(),
        plan: Box::new(first),
    });
    assert_eq!(world.plan().content_hash(), held.content_hash());
    world.assert_alarm("was refused and the last good plan stays: node-takes-work");
}

#[test]
fn a_drained_node_is_left_and_a_cordoned_one_keeps_what_it_has() {
    let mut world = World::planned();
    let node = world.plan().operators[2].node.clone();
    world.cluster.nodes.get_mut(&node).unwrap().scheduling = Scheduling::Cordoned;
    world.tell_cluster(vec![]);
    assert_eq!(world.plan().operators[2].node, node);
    world.cluster.nodes.get_mut(&node).unwrap().scheduling = Scheduling::Draining;
    world.tell_cluster(vec![Trigger::NodeLost(node.clone())]);
    assert!(!world.plan().nodes().contains(&node));
    assert!(world.alarms().is_empty(), "{:?}", world.alarms());
}

#[test]
fn two_queries_share_the_fleet_within_its_capacity() {
    let mut world = World::planned();
    for i in 0..6 {
        let query = Query {
            id: fixture::query_id(&format!("more-{i}")),
            ..fixture::query()
        };
        let id = query.id.clone();
        world.register(query);
        world.handle(Input::Propose(Box::new(Proposal {
            query: id,
            front: Front {
                profile: fixture::profile(&fixture::all_configurations(), 1.0),
                preference: Preference::Cheapest,
            },
            trigger: Trigger::QueryRegistered,
            trials: 1,
            cache_hits: 0,
            certified: false,
        })));
    }
    assert!(world.scheduler.assignment().plans.len() >= 2);
    for (node, total) in granted(&world.told) {
        assert!(
            world.cluster.nodes[&node].description.capacity.fits(&total),
            "{node}: {total:?}"
        );
    }
    world.assert_nothing_refused();
}

#[test]
fn a_query_of_higher_priority_takes_the_place_of_a_lower_one_and_gives_it_back() {
    let mut world = World::planned();
    let mut names = vec![fixture::query_id("gate-camera")];
    for i in 0..8_u32 {
        let query = Query {
            id: fixture::query_id(&format!("more-{i}")),
            priority: 60 + i,
            ..fixture::query()
        };
        names.push(query.id.clone());
        let id = query.id.clone();
        world.register(query);
        world.handle(Input::Propose(Box::new(Proposal {
            query: id,
            front: Front {
                profile: fixture::profile(&fixture::all_configurations(), 1.0),
                preference: Preference::Cheapest,
            },
            trigger: Trigger::QueryRegistered,
            trials: 1,
            cache_hits: 0,
            certified: false,
        })));
    }
    world.wait(5.0);
    // Only when all are thought of together does one give way to another.
    world.tell_cluster(vec![Trigger::PriceChanged { version: 1 }]);
    world.wait(5.0);
    let plans = &world.scheduler.assignment().plans;
    let served: Vec<bool> = names.iter().map(|id| plans.contains_key(id)).collect();
    assert!(
        served.iter().any(|s| !s),
        "there is not room for all: {served:?}"
    );
    assert!(served[8], "the highest priority is served: {served:?}");
    world.assert_nothing_refused();
    for (node, total) in granted(&world.told) {
        assert!(
            world.cluster.nodes[&node].description.capacity.fits(&total),
            "{node}: {total:?}"
        );
    }
    for id in names.iter().rev().take(6) {
        world.handle(Input::Withdraw(id.clone()));
    }
    world.wait(15.0);
    assert!(world.scheduler.assignment().plans.contains_key(&names[0]));
}

#[test]
fn a_certified_proposal_marks_the_plan_it_speaks_of() {
    let mut world = World::planned();
    assert_eq!(world.plan().status, PlanStatus::Guessed);
    world.handle(Input::Propose(Box::new(Proposal {
        query: fixture::query_id("gate-camera"),
        front: Front {
            profile: fixture::profile(&fixture::all_configurations(), 1.0),
            preference: Preference::Cheapest,
        },
        trigger: Trigger::SearchImproved,
        trials: 9,
        cache_hits: 3,
        certified: true,
    })));
    assert_eq!(world.plan().status, PlanStatus::Certified);
}
