//! What a query would get today, from what has been learnt so far; changes nothing.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::extract::rejection::StringRejection;
use compass_planning::candidate::{Candidate, Front, enumerate};
use compass_planning::predict::Context;
use compass_planning::space::Space;
use compass_shared::api::{DryRun, Role};
use compass_shared::ids::Generation;
use compass_shared::model::cluster::Resources;
use compass_shared::model::plan::{PlanStatus, QueryPlan};
use compass_shared::model::query::Query;
use compass_shared::model::trigger::Trigger;

use super::Shared;
use super::auth::Caller;
use super::queries::spec;
use crate::control::{Refusal, RefusalKind};
use crate::plane::Plane;
use crate::store::get;
use crate::store::records::FrontRecord;

pub(super) async fn plan(
    State(plane): Shared,
    caller: Caller,
    yaml: Result<String, StringRejection>,
) -> Result<Json<DryRun>, Refusal> {
    caller.require(Role::Viewer)?;
    let query = plane.parse_query(&spec(yaml)?)?;
    let key = FrontRecord::key_of(&query.id);
    let front = get::<FrontRecord>(plane.office.store(), &key)?
        .map(|(record, _)| record.front)
        .unwrap_or_default();
    let current = plane
        .queries
        .view(&query.id)
        .in_force
        .map(|in_force| in_force.plan);
    let shared = Arc::clone(&plane);
    let answer = plane
        .search_pool
        .run(move || decide(&shared, &query, &front, current.as_ref()))
        .await
        .map_err(|error| Refusal::new(RefusalKind::Internal, error.to_string()))?;
    answer.map(Json)
}

fn decide(
    plane: &Plane,
    query: &Query,
    front: &Front,
    current: Option<&QueryPlan>,
) -> Result<DryRun, Refusal> {
    let catalogue = &plane.configs.catalogue;
    let space = Space::new(&query.pipeline, catalogue)
        .map_err(|error| Refusal::new(RefusalKind::Invalid, error.to_string()))?;
    if front.profile.configurations.is_empty() {
        return Ok(DryRun {
            plan: None,
            changed: false,
            report: format!(
                "nothing is known of query {} yet ({} configurations): register it and send frames, so that it can be profiled",
                query.id,
                space.len()
            ),
        });
    }
    let cluster = plane.picture.cluster();
    let context = Context {
        query,
        catalogue,
        cluster: &cluster,
        profile: &front.profile,
        settings: &plane.settings.planning.predict,
        rate_hz: query.rate_hz(),
    };
    let all = enumerate(&context, &space, front);
    let chosen = all
        .feasible
        .iter()
        .find(|candidate| fits(plane, candidate, current));
    let Some(chosen) = chosen else {
        let nearest = all.nearest.as_ref().map_or_else(String::new, |nearest| {
            format!(
                "; nearest fails on {}: expected latency {:.0} ms, accuracy {:.2}, cost {:.4} USD/h",
                nearest.reason.name(),
                nearest.expected.latency_ms.value,
                nearest.expected.accuracy.value,
                nearest.expected.cost_usd_per_h
            )
        });
        let crowded = all.feasible.len();
        let room = match crowded {
            0 => String::new(),
            _ => format!("; {crowded} would, but other queries hold the room"),
        };
        return Ok(DryRun {
            plan: None,
            changed: false,
            report: format!(
                "INFEASIBLE: none of {} combinations meets the SLOs{nearest}{room}",
                all.considered
            ),
        });
    };
    let parent = current.map(|plan| plan.generation);
    let plan = QueryPlan {
        query: query.id.clone(),
        generation: parent.map_or(Generation(1), Generation::next),
        parent,
        operators: chosen.operators.clone(),
        status: PlanStatus::Guessed,
        trigger: current.map_or(Trigger::QueryRegistered, |_| Trigger::SearchImproved),
        expected: chosen.expected,
    };
    let changed = current.is_none_or(|current| current.content_hash() != plan.content_hash());
    Ok(DryRun {
        report: format!(
            "{} of {} combinations are feasible: {}",
            all.feasible.len(),
            all.considered,
            plan.summary()
        ),
        plan: Some(plan),
        changed,
    })
}

/// Whether a candidate fits beside what other queries hold.
fn fits(plane: &Plane, candidate: &Candidate, current: Option<&QueryPlan>) -> bool {
    let cluster = plane.picture.cluster();
    let granted = plane.picture.granted();
    candidate.nodes.iter().all(|(node, needed)| {
        let Some(description) = cluster.nodes.get(node).map(|node| &node.description) else {
            return false;
        };
        let own = current.map_or_else(Resources::default, |plan| {
            let here = plan
                .operators
                .iter()
                .filter(|operator| operator.node == *node);
            here.fold(Resources::default(), |sum, operator| {
                sum.plus(&operator.share)
            })
        });
        let held = granted.get(node).copied().unwrap_or_default();
        let by_others = held.minus(&own).unwrap_or_default();
        let left = description.capacity.minus(&by_others).unwrap_or_default();
        left.fits(needed)
    })
}
