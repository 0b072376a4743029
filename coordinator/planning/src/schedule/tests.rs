use super::*;
use compass_shared::model::plan::{Estimate, Expectation};
use compass_shared::units::Millicores;
use proptest::prelude::*;

fn node(index: usize) -> NodeId {
    NodeId::new(format!("n{index}")).unwrap()
}

fn query(index: usize) -> QueryId {
    QueryId::new(format!("q{index}")).unwrap()
}

fn cpu(millicores: u32) -> Resources {
    Resources {
        cpu: Millicores(millicores),
        memory_mib: 1,
        gpu_percent: 0,
    }
}

/// A candidate that needs so much of one node.
fn candidate(node_index: usize, need: u32, cost: f64) -> Candidate {
    Candidate {
        operators: Vec::new(),
        expected: Expectation {
            latency_ms: Estimate::exact(10.0),
            accuracy: Estimate::exact(1.0),
            cost_usd_per_h: cost,
        },
        links: BTreeMap::new(),
        nodes: [(node(node_index), cpu(need))].into(),
        caution: 0.5,
        safety: 1.5,
        measured: true,
        content: Digest::of(format!("{node_index} {need} {cost}").as_bytes()),
    }
}

fn demand(index: usize, priority: u32, mut candidates: Vec<Candidate>) -> Demand {
    candidates.sort_by(|a, b| {
        a.expected
            .cost_usd_per_h
            .total_cmp(&b.expected.cost_usd_per_h)
    });
    Demand {
        query: query(index),
        priority,
        candidates,
        current: None,
        may_improve: true,
        preference: Preference::Cheapest,
    }
}

fn problem(nodes: &[u32], demands: Vec<Demand>) -> Problem {
    Problem {
        nodes: nodes
            .iter()
            .enumerate()
            .map(|(i, c)| {
                let capacity = Resources {
                    cpu: Millicores(*c),
                    memory_mib: 1000,
                    gpu_percent: 0,
                };
                (node(i), capacity)
            })
            .collect(),
        links: BTreeMap::new(),
        demands,
    }
}

fn served(schedule: &Schedule) -> usize {
    schedule
        .decisions
        .values()
        .filter(|d| **d != Decision::Unserved)
        .count()
}

/// The same problem with the schedule in force.
fn applied(problem: &Problem, schedule: &Schedule) -> Problem {
    let mut next = problem.clone();
    for demand in &mut next.demands {
        demand.current = match schedule.decisions[&demand.query] {
            Decision::Keep => demand.current.clone(),
            Decision::Unserved => None,
            Decision::Take(index) => {
                let c = &demand.candidates[index];
                Some(Current {
                    content: c.content,
                    nodes: c.nodes.clone(),
                    links: c.links.clone(),
                    cost_usd_per_h: c.expected.cost_usd_per_h,
                })
            }
        };
    }
    next
}

#[test]
fn each_query_gets_its_cheapest_candidate_when_there_is_room() {
    let p = problem(
        &[1000, 1000],
        vec![
            demand(0, 50, vec![candidate(0, 400, 2.0), candidate(1, 400, 1.0)]),
            demand(1, 50, vec![candidate(0, 400, 1.0)]),
        ],
    );
    let s = schedule(&p, &ScheduleSettings::default());
    assert_eq!(served(&s), 2);
    assert_eq!(s.decisions[&query(0)], Decision::Take(0));
}

#[test]
fn a_full_node_sends_a_query_to_its_next_candidate() {
    let p = problem(
        &[500, 500],
        vec![
            demand(0, 50, vec![candidate(0, 400, 1.0)]),
            demand(1, 50, vec![candidate(0, 400, 1.0), candidate(1, 400, 2.0)]),
        ],
    );
    let s = schedule(&p, &ScheduleSettings::default());
    assert_eq!(served(&s), 2);
}

#[test]
fn higher_priority_pushes_out_lower_but_never_equal() {
    let low = demand(0, 10, vec![candidate(0, 400, 1.0)]);
    let p = applied(
        &problem(&[500], vec![low.clone()]),
        &schedule(&problem(&[500], vec![low]), &ScheduleSettings::default()),
    );
    let mut with_high = p.clone();
    with_high
        .demands
        .push(demand(1, 90, vec![candidate(0, 400, 1.0)]));
    let s = schedule(&with_high, &ScheduleSettings::default());
    assert_eq!(s.decisions[&query(0)], Decision::Unserved);
    assert_eq!(s.decisions[&query(1)], Decision::Take(0));
    let mut with_equal = p;
    with_equal
        .demands
        .push(demand(1, 10, vec![candidate(0, 400, 1.0)]));
    let s = schedule(&with_equal, &ScheduleSettings::default());
    assert_eq!(s.decisions[&query(0)], Decision::Keep);
    assert_eq!(s.decisions[&query(1)], Decision::Unserved);
}

#[test]
fn an_improvement_must_pay_for_the_switch_and_wait_for_its_time() {
    let mut d = demand(0, 50, vec![candidate(0, 100, 0.95)]);
    d.current = Some(Current {
        content: Digest::of(b"old"),
        nodes: [(node(0), cpu(100))].into(),
        links: BTreeMap::new(),
        cost_usd_per_h: 1.0,
    });
    let decide = |d: &Demand| {
        schedule(
            &problem(&[1000], vec![d.clone()]),
            &ScheduleSettings::default(),
        )
        .decisions[&query(0)]
    };
    assert_eq!(decide(&d), Decision::Keep, "5 % does not pay for a switch");
    d.candidates = vec![candidate(0, 100, 0.5)];
    assert_eq!(decide(&d), Decision::Take(0));
    d.may_improve = false;
    assert_eq!(decide(&d), Decision::Keep);
}

#[test]
fn with_unknown_accuracy_cheaper_is_not_better() {
    let mut d = demand(0, 50, vec![]);
    d.candidates = vec![candidate(0, 100, 2.0), candidate(0, 100, 1.0)];
    d.preference = Preference::Safest;
    let s = schedule(&problem(&[1000], vec![d]), &ScheduleSettings::default());
    assert_eq!(s.decisions[&query(0)], Decision::Take(0));
}

/// The most queries that can be served, by trying everything.
fn optimum(sizes: &[u32], bins: &mut [u32]) -> usize {
    let Some((first, rest)) = sizes.split_first() else {
        return 0;
    };
    let mut best = optimum(rest, bins);
    for i in 0..bins.len() {
        if bins[i] >= *first {
            bins[i] -= first;
            best = best.max(1 + optimum(rest, bins));
            bins[i] += first;
        }
    }
    best
}

fn problems() -> impl Strategy<Value = Problem> {
    let candidates = proptest::collection::vec((0_usize..4, 50_u32..900, 1_u32..100), 0..6);
    let demands = proptest::collection::vec(
        (prop_oneof![Just(50_u32), Just(10), Just(90)], candidates),
        0..8,
    );
    (proptest::collection::vec(100_u32..1500, 4), demands).prop_map(|(nodes, demands)| {
        let demands = demands
            .into_iter()
            .enumerate()
            .map(|(i, (priority, list))| {
                let list = list
                    .into_iter()
                    .map(|(n, need, cost)| candidate(n, need, f64::from(cost)))
                    .collect();
                demand(i, priority, list)
            })
            .collect();
        problem(&nodes, demands)
    })
}

proptest! {
    #[test]
    fn capacity_is_never_exceeded(p in problems()) {
        let s = schedule(&p, &ScheduleSettings::default());
        prop_assert!(is_within_capacity(&p, &s));
        prop_assert_eq!(s.decisions.len(), p.demands.len());
    }

    #[test]
    fn scheduling_a_schedule_changes_nothing(p in problems()) {
        let settings = ScheduleSettings::default();
        let first = schedule(&p, &settings);
        let second = schedule(&applied(&p, &first), &settings);
        for (id, decision) in second.decisions {
            let expected = if first.decisions[&id] == Decision::Unserved { Decision::Unserved } else { Decision::Keep };
            prop_assert_eq!(decision, expected, "{}", id);
        }
    }

    #[test]
    fn the_order_of_the_input_does_not_matter(p in problems(), rotate in 0_usize..8) {
        let settings = ScheduleSettings::default();
        let mut other = p.clone();
        if !other.demands.is_empty() {
            let by = rotate % other.demands.len();
            other.demands.rotate_left(by);
            other.demands.reverse();
        }
        prop_assert_eq!(schedule(&p, &settings), schedule(&other, &settings));
    }

    #[test]
    fn with_room_for_all_arrivals_one_by_one_end_where_all_at_once_does(mut p in problems()) {
        let settings = ScheduleSettings::default();
        for capacity in p.nodes.values_mut() {
            *capacity = Resources { cpu: Millicores(1_000_000), memory_mib: 1_000_000, gpu_percent: 0 };
        }
        let at_once = schedule(&p, &settings);
        let mut grown = Problem { demands: Vec::new(), ..p.clone() };
        for demand in &p.demands {
            grown.demands.push(demand.clone());
            let s = schedule(&grown, &settings);
            grown = applied(&grown, &s);
        }
        for demand in &grown.demands {
            let expected = match at_once.decisions[&demand.query] {
                Decision::Take(index) => Some(p.demands.iter().find(|d| d.query == demand.query).unwrap().candidates[index].content),
                _ => None,
            };
            prop_assert_eq!(demand.current.as_ref().map(|c| c.content), expected);
        }
    }

    #[test]
    fn first_fit_of_the_smallest_serves_at_least_half_of_what_is_possible(bins in proptest::collection::vec(1_u32..30, 1..3), sizes in proptest::collection::vec(1_u32..20, 0..7)) {
        let demands = sizes
            .iter()
            .enumerate()
            .map(|(i, size)| demand(i, 50, (0..bins.len()).map(|b| candidate(b, *size, 1.0)).collect()))
            .collect();
        let s = schedule(&problem(&bins, demands), &ScheduleSettings::default());
        let best = optimum(&sizes, &mut bins.clone());
        prop_assert!(2 * served(&s) >= best, "{} of {}", served(&s), best);
    }
}
