use super::*;
use crate::diff;
use crate::tests::fixture;
use compass_shared::model::plan::{
    Assignment, Estimate, Expectation, OperatorPlan, PlanStatus, instance_id,
};
use compass_shared::model::trigger::Trigger;
use compass_shared::units::Millicores;

/// A plan with every operator of the fixture's pipeline on the given nodes.
pub(crate) fn plan(generation: u64, nodes: [&str; 5], cpu: u32) -> QueryPlan {
    let query = fixture::query();
    let configuration = fixture::configuration(320, 75, "m");
    let operators = query
        .pipeline
        .operators
        .iter()
        .zip(nodes)
        .map(|(operator, node)| {
            let own = configuration.of(&operator.id).cloned().unwrap();
            let node = fixture::node_id(node);
            OperatorPlan {
                operator: operator.id.clone(),
                instance: instance_id(&operator.kind, None, &own, &node),
                configuration: own,
                node,
                share: Resources {
                    cpu: Millicores(cpu),
                    memory_mib: 64,
                    gpu_percent: 0,
                },
                artifact: None,
            }
        })
        .collect();
    QueryPlan {
        query: query.id,
        generation: Generation(generation),
        parent: None,
        operators,
        status: PlanStatus::Guessed,
        trigger: Trigger::QueryRegistered,
        expected: Expectation {
            latency_ms: Estimate::exact(1.0),
            accuracy: Estimate::exact(1.0),
            cost_usd_per_h: 0.0,
        },
    }
}

const CLOUD: [&str; 5] = ["edge-1", "edge-1", "cloud-1", "cloud-1", "cloud-1"];
const NEAR: [&str; 5] = ["edge-1", "edge-1", "near-1", "near-1", "near-1"];

fn targets(plans: &[&QueryPlan], current: u64) -> BTreeMap<NodeId, NodeTarget> {
    let query = fixture::query();
    let live = [LiveQuery {
        query: &query,
        app: None,
        current: Generation(current),
        plans: plans.to_vec(),
        standby: &[],
    }];
    node_targets(
        &live,
        &fixture::catalogue(),
        &fixture::cluster(),
        Commit { term: 1, number: 1 },
    )
}

#[test]
fn before_there_is_a_plan_the_entry_node_knows_the_query_and_nothing_else() {
    let all = targets(&[], 0);
    assert_eq!(all.len(), 1);
    let entry = &all[&fixture::node_id("edge-1")];
    assert!(entry.instances.is_empty());
    assert_eq!(entry.queries[0].current, Generation(0));
    assert!(entry.queries[0].routes.is_empty());
}

#[test]
fn an_instance_of_two_generations_is_granted_once() {
    let (old, new) = (plan(1, CLOUD, 300), plan(2, NEAR, 400));
    let all = targets(&[&old, &new], 1);
    let edge = &all[&fixture::node_id("edge-1")];
    assert_eq!(edge.instances.len(), 2);
    assert!(
        edge.instances
            .iter()
            .all(|i| i.share.cpu == Millicores(400))
    );
    assert_eq!(edge.queries[0].routes.len(), 2);
    assert_eq!(all[&fixture::node_id("cloud-1")].instances.len(), 3);
    let peers: Vec<_> = edge.peers.iter().map(|p| p.node.as_str()).collect();
    assert_eq!(peers, ["cloud-1", "near-1"]);
}

#[test]
fn on_a_crowded_node_new_frames_come_first_and_the_rest_makes_do() {
    let mut new = plan(2, CLOUD, 300);
    for part in &mut new.operators {
        part.instance = compass_shared::ids::InstanceId(part.instance.0 + 1);
    }
    let old = plan(1, CLOUD, 300);
    let share = |node: &str, current: u64, instance| {
        let all = targets(&[&old, &new], current);
        let instances = &all[&fixture::node_id(node)].instances;
        assert!(instances.iter().map(|i| i.share.cpu.0).sum::<u32>() <= 1000);
        instances
            .iter()
            .find(|i| i.instance == instance)
            .unwrap()
            .share
            .cpu
            .0
    };
    let (old_sampler, new_sampler) = (old.operators[0].instance, new.operators[0].instance);
    assert_eq!(
        share("edge-1", 1, old_sampler),
        300,
        "new frames still go there"
    );
    assert_eq!(share("edge-1", 1, new_sampler), 200, "half of what is left");
    assert_eq!(share("edge-1", 2, new_sampler), 300);
    assert_eq!(share("edge-1", 2, old_sampler), 200);
    let (old_detector, new_detector) = (old.operators[2].instance, new.operators[2].instance);
    assert_eq!(share("cloud-1", 1, new_detector), 100, "the floor");
    assert_eq!(
        share("cloud-1", 1, old_detector),
        233,
        "three quarters and a bit"
    );
}

#[test]
fn shares_of_queries_that_use_one_instance_add_up() {
    let (a, b) = (
        fixture::query(),
        compass_shared::model::query::Query {
            id: fixture::query_id("second"),
            ..fixture::query()
        },
    );
    let (first, second) = (plan(1, CLOUD, 300), plan(1, CLOUD, 200));
    let live = [(&a, &first), (&b, &second)].map(|(query, plan)| LiveQuery {
        query,
        app: None,
        current: Generation(1),
        plans: vec![plan],
        standby: &[],
    });
    let all = node_targets(
        &live,
        &fixture::catalogue(),
        &fixture::cluster(),
        Commit { term: 1, number: 1 },
    );
    let cloud = &all[&fixture::node_id("cloud-1")];
    assert_eq!(cloud.instances.len(), 3);
    assert!(
        cloud
            .instances
            .iter()
            .all(|i| i.share.cpu == Millicores(500))
    );
    assert_eq!(
        granted(&all)[&fixture::node_id("cloud-1")].cpu,
        Millicores(1500)
    );
    assert_eq!(
        diff::crowded(&all, &fixture::cluster()).len(),
        1 + usize::from(granted(&all)[&fixture::node_id("edge-1")].cpu > Millicores(1000))
    );
}

#[test]
fn a_change_is_made_before_the_old_is_broken() {
    let assignment = |plan: QueryPlan| Assignment {
        commit: Commit::default(),
        plans: [(plan.query.clone(), plan)].into(),
    };
    let (old, new) = (
        assignment(plan(1, CLOUD, 300)),
        assignment(plan(2, NEAR, 300)),
    );
    let steps = diff::diff(&old, &new, &fixture::cluster());
    let kinds: Vec<_> = steps
        .iter()
        .map(|s| match s {
            diff::Step::Start { .. } => "start",
            diff::Step::Switch { .. } => "switch",
            diff::Step::Stop { .. } => "stop",
            diff::Step::Resize { .. } => "resize",
            diff::Step::Break { .. } => "break",
        })
        .collect();
    assert_eq!(
        kinds,
        ["start", "start", "start", "switch", "stop", "stop", "stop"]
    );
    assert!(diff::diff(&old, &old, &fixture::cluster()).is_empty());
    let empty = Assignment::default();
    assert_eq!(diff::diff(&empty, &old, &fixture::cluster()).len(), 6);
    assert_eq!(diff::diff(&old, &empty, &fixture::cluster()).len(), 6);
}

#[test]
fn where_both_copies_do_not_fit_the_break_is_declared() {
    let assignment = |plan: QueryPlan| Assignment {
        commit: Commit::default(),
        plans: [(plan.query.clone(), plan)].into(),
    };
    // A CPU can be shared for the time of a switch, memory cannot.
    let heavy = |mut plan: QueryPlan| {
        for part in &mut plan.operators {
            part.share.memory_mib = 400;
        }
        plan
    };
    let mut other = heavy(plan(2, CLOUD, 310));
    for part in &mut other.operators[2..] {
        part.instance = compass_shared::ids::InstanceId(part.instance.0 + 1);
    }
    let steps = diff::diff(
        &assignment(heavy(plan(1, CLOUD, 300))),
        &assignment(other),
        &fixture::cluster(),
    );
    assert!(
        matches!(&steps[0], diff::Step::Break { node, .. } if node.as_str() == "cloud-1"),
        "{steps:?}"
    );
    assert!(steps[0].to_string().contains("a gap is expected"));
}

#[test]
fn models_a_plan_may_need_are_fetched_ahead_where_the_site_may_be_cut_off() {
    let query = fixture::query();
    let profile = fixture::profile(&fixture::all_configurations(), 1.0);
    let all = standby(&query, &fixture::catalogue(), &profile, u64::MAX);
    assert!(!all.is_empty());
    let sizes: Vec<u64> = all.iter().map(|one| one.artifact.bytes).collect();
    assert!(sizes.is_sorted(), "small ones first: {sizes:?}");
    let some = standby(&query, &fixture::catalogue(), &profile, sizes[0]);
    assert_eq!(some, all[..1]);
    let live = [LiveQuery {
        query: &query,
        app: None,
        current: Generation(0),
        plans: vec![],
        standby: &all,
    }];
    let commit = Commit { term: 1, number: 1 };
    let told = node_targets(&live, &fixture::catalogue(), &fixture::cluster(), commit);
    let with: Vec<&str> = told
        .iter()
        .filter(|(_, target)| !target.standby.is_empty())
        .map(|(node, _)| node.as_str())
        .collect();
    assert_eq!(with, ["edge-1", "near-1"]);
}
