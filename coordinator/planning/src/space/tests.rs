use super::*;
use crate::tests::fixture;
use compass_shared::model::cluster::Scheduling;

fn space() -> Space {
    Space::new(&fixture::pipeline(), &fixture::catalogue()).unwrap()
}

#[test]
fn points_number_every_normalised_configuration_once() {
    let space = space();
    assert_eq!(space.len(), 4 * 3 * 3);
    assert_eq!(space.configurations_len(), 4 * 4 * 3 * 3);
    let mut points = space.points();
    assert_eq!(points.len(), 36);
    for point in &points {
        assert_eq!(
            space.point_of(&space.configuration(point)).as_ref(),
            Some(point)
        );
        assert_eq!(&space.normalised(point), point);
    }
    points.sort();
    points.dedup();
    assert_eq!(points.len(), 36);
    assert!(points.contains(&space.golden()));
}

#[test]
fn filters_open_and_close_without_a_new_trial() {
    let space = space();
    let with = space.with_filters(&space.golden());
    assert_eq!(with.len(), 4);
    for point in &with {
        assert_eq!(space.normalised(point), space.golden());
    }
}

#[test]
fn features_scale_ordinal_knobs_and_leave_filters_out() {
    let space = space();
    let golden = space.features(&space.golden(), None);
    assert_eq!(golden, [1.0, 1.0, 1.0]);
    let least = space.features(&space.point(0), None);
    assert_eq!(least, [0.0, 0.0, 0.0]);
    assert_eq!(space.features(&space.golden(), Some(&[1])).len(), 2);
    assert!(space.caution(&space.golden()) > space.caution(&space.point(0)));
}

#[test]
fn a_knob_or_value_the_catalogue_lacks_is_named() {
    let mut pipeline = fixture::pipeline();
    pipeline.operators[1].knobs[0]
        .values
        .push(KnobValue::Integer(9000));
    let error = Space::new(&pipeline, &fixture::catalogue()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "operator prepare: resolution=9000 is not offered by the catalogue"
    );
    pipeline.operators[1].kind = OperatorKind::new("nothing").unwrap();
    assert!(matches!(
        Space::new(&pipeline, &fixture::catalogue()),
        Err(InvalidSpace::UnknownKind { .. })
    ));
}

#[test]
fn placements_go_outwards_and_keep_to_constraints() {
    let cluster = fixture::cluster();
    let mut query = fixture::query();
    let all = placements(&query, &cluster);
    // Non-decreasing sequences of 5 operators over 4 nodes: C(8, 3).
    assert_eq!(all.len(), 56);
    query.constraints = vec![Constraint::StayWithinSite {
        output_of: Some(fixture::operator_id("prepare")),
    }];
    let within: Vec<_> = placements(&query, &cluster);
    assert!(
        within
            .iter()
            .all(|p| ["edge-1", "near-1"].contains(&p.0[2].as_str()))
    );
    assert!(within.iter().any(|p| p.0[3].as_str() == "cloud-1"));
    query.constraints = vec![Constraint::OperatorTiers {
        operator: fixture::operator_id("detector"),
        tiers: vec![Tier::Cloud],
    }];
    assert!(
        placements(&query, &cluster)
            .iter()
            .all(|p| p.0[2].as_str() == "cloud-1")
    );
}

#[test]
fn nodes_that_take_no_work_and_links_that_do_not_exist_are_avoided() {
    let query = fixture::query();
    let mut cluster = fixture::cluster();
    cluster
        .nodes
        .get_mut(&fixture::node_id("cloud-1"))
        .unwrap()
        .scheduling = Scheduling::Cordoned;
    cluster
        .nodes
        .get_mut(&fixture::node_id("metro-1"))
        .unwrap()
        .online = false;
    let all = placements(&query, &cluster);
    assert_eq!(all.len(), 6, "5 operators over edge and near");
    cluster
        .links
        .remove(&(fixture::node_id("near-1"), fixture::node_id("edge-1")));
    assert_eq!(
        placements(&query, &cluster).len(),
        1,
        "a result cannot come back from near-1"
    );
}

#[test]
fn a_space_too_large_to_list_is_thinned_over_all_values() {
    let mut pipeline = fixture::pipeline();
    let mut catalogue = (*fixture::catalogue()).clone();
    let many: Vec<KnobValue> = (0..400).map(KnobValue::Integer).collect();
    for (operator, kind) in [(1, "prepare"), (2, "detector")] {
        pipeline.operators[operator].knobs[0].values = many.clone();
        let kind = OperatorKind::new(kind).unwrap();
        catalogue.0.get_mut(&kind).unwrap().knobs[0].values = many.clone();
    }
    let space = Space::new(&pipeline, &catalogue).unwrap();
    assert_eq!(space.len(), 400 * 3 * 400);
    let points = space.points();
    assert!(points.len() as u64 <= POINTS_MAX + 1);
    let seen: std::collections::BTreeSet<usize> = points.iter().map(|p| p.0[1]).collect();
    assert_eq!(seen.len(), 400);
}
