//! Queries and their plans.

use axum::Json;
use axum::extract::rejection::StringRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use compass_shared::api::{CandidateView, Explanation, PlanView, QueryState, QueryView, Role};
use compass_shared::ids::{Generation, QueryId};
use compass_shared::model::plan::QueryPlan;

use super::Shared;
use super::auth::Caller;
use super::errors::unreadable;
use crate::control::{Refusal, RefusalKind};
use crate::plane::Plane;
use crate::queries::live_slo;
use crate::store::records::{
    PlanRecord, QueryRecord, QueryState as StoredState, decode, scan_below,
};
use crate::store::{get, scan};

/// Plans that were not chosen, in an explanation.
const REJECTED_MAX: usize = 16;

pub(super) async fn list(State(plane): Shared) -> Result<Json<Vec<QueryView>>, Refusal> {
    let records = scan::<QueryRecord>(plane.office.store())?;
    let active = records
        .into_iter()
        .filter(|record| record.state == StoredState::Active);
    Ok(Json(active.map(|record| view(&plane, record)).collect()))
}

pub(super) async fn register(
    State(plane): Shared,
    caller: Caller,
    yaml: Result<String, StringRejection>,
) -> Result<(StatusCode, Json<QueryView>), Refusal> {
    let bearer = caller.require(Role::App)?;
    let yaml = spec(yaml)?;
    let registered = plane.register_query(&yaml, None, bearer).await?;
    let view = view(&plane, registered.record);
    Ok((StatusCode::CREATED, Json(view)))
}

pub(super) async fn one(
    State(plane): Shared,
    Path(id): Path<String>,
) -> Result<Json<QueryView>, Refusal> {
    let record = active(&plane, &name(&id)?)?;
    Ok(Json(view(&plane, record)))
}

pub(super) async fn stop(
    State(plane): Shared,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<StatusCode, Refusal> {
    caller.require(Role::App)?;
    plane
        .stop_query(&name(&id)?, &caller.actor(), "stopped over the API")
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn plans(
    State(plane): Shared,
    Path(id): Path<String>,
) -> Result<Json<Vec<PlanView>>, Refusal> {
    let query = name(&id)?;
    let current = plane.queries.generation(&query);
    let records = plan_records(&plane, &query)?;
    if records.is_empty() {
        // A query without plans is not an error, one that never was is.
        known(&plane, &query)?;
    }
    let views = records.into_iter().map(|record| plan_view(record, current));
    Ok(Json(views.collect()))
}

pub(super) async fn explain(
    State(plane): Shared,
    Path((id, generation)): Path<(String, u64)>,
) -> Result<Json<Explanation>, Refusal> {
    let query = name(&id)?;
    let generation = Generation(generation);
    let key = PlanRecord::key_of(&query, generation);
    let Some((record, _)) = get::<PlanRecord>(plane.office.store(), &key)? else {
        return Err(Refusal::unknown(
            "plan",
            format!("{query} {generation}"),
            "compass query history",
        ));
    };
    let explanation = record.explanation;
    let text = compass_planning::explain::render(&explanation, REJECTED_MAX);
    let mut candidates = vec![CandidateView {
        summary: explanation.chosen,
        expected: explanation.expected,
        feasible: explanation.feasible > 0,
        rejected: None,
    }];
    candidates.extend(
        explanation
            .rejected
            .into_iter()
            .map(|rejected| CandidateView {
                summary: rejected.plan,
                expected: rejected.expected,
                feasible: false,
                rejected: Some(match rejected.flips_if {
                    Some(flips_if) => format!("{}; feasible if {flips_if}", rejected.reason),
                    None => rejected.reason,
                }),
            }),
    );
    Ok(Json(Explanation {
        query,
        generation,
        lines: text.lines().map(str::to_owned).collect(),
        candidates,
    }))
}

/// A body that is a spec.
pub(super) fn spec(yaml: Result<String, StringRejection>) -> Result<String, Refusal> {
    yaml.map_err(|error| {
        let too_large = error.status() == StatusCode::PAYLOAD_TOO_LARGE;
        let kind = if too_large {
            RefusalKind::TooMuch
        } else {
            RefusalKind::Invalid
        };
        Refusal::new(kind, error.body_text())
    })
}

pub(super) fn name(text: &str) -> Result<QueryId, Refusal> {
    QueryId::new(text).map_err(unreadable)
}

fn active(plane: &Plane, query: &QueryId) -> Result<QueryRecord, Refusal> {
    let record = known(plane, query)?;
    match record.state {
        StoredState::Active => Ok(record),
        StoredState::Stopped { reason } => Err(Refusal::new(
            RefusalKind::NotFound,
            format!("query {query} was stopped: {reason}"),
        )
        .about(format!("query {query}"))
        .hint("register it again")),
    }
}

fn known(plane: &Plane, query: &QueryId) -> Result<QueryRecord, Refusal> {
    let found = get::<QueryRecord>(plane.office.store(), &QueryRecord::key_of(query))?;
    found
        .map(|(record, _)| record)
        .ok_or_else(|| Refusal::unknown("query", query, "compass query list"))
}

/// The plans of a query, oldest first; one that cannot be read any more is left out, loudly.
fn plan_records(plane: &Plane, query: &QueryId) -> Result<Vec<PlanRecord>, Refusal> {
    let prefix = PlanRecord::prefix_of(query);
    match scan_below::<PlanRecord>(plane.office.store(), &prefix) {
        Ok(records) => Ok(records),
        Err(error) => {
            tracing::error!(%query, %error, "history is not complete");
            let all = plane.office.store().scan(&prefix, None, usize::MAX)?;
            let readable = all
                .iter()
                .filter_map(|(key, stored)| decode(key, stored).ok());
            Ok(readable.collect())
        }
    }
}

fn plan_view(record: PlanRecord, current: Option<Generation>) -> PlanView {
    PlanView {
        current: current == Some(record.plan.generation),
        plan: record.plan,
        detected_unix_ms: record.detected_unix_ms,
        committed_unix_ms: record.committed_unix_ms,
        applied_unix_ms: record.applied_unix_ms,
    }
}

fn view(plane: &Plane, record: QueryRecord) -> QueryView {
    let query = record.query;
    let live = plane.queries.view(&query.id);
    let plan = live.in_force.map(|in_force| in_force.plan);
    let expected = plan.as_ref().map(|plan| plan.expected);
    let slo = live_slo(&query, &live.reports, expected.as_ref());
    let state = match &plan {
        _ if live.trouble.is_some() || live.infeasible.is_some() => QueryState::Infeasible,
        None => QueryState::Searching,
        Some(plan) if can_run(plane, plan) => QueryState::Running,
        Some(_) => QueryState::Waiting,
    };
    QueryView {
        pipeline: query.pipeline.name.clone(),
        entry: query.entry.clone(),
        state,
        slo: query.slo,
        slo_status: slo.status,
        app_online: live.app_online,
        counts: live.counts,
        plan: plan.map(|plan| current_plan_view(plane, plan)),
        report: live.trouble.or(live.infeasible),
        registered_unix_ms: record.registered_unix_ms,
        id: query.id,
    }
}

/// Whether every node of a plan is there.
fn can_run(plane: &Plane, plan: &QueryPlan) -> bool {
    let cluster = plane.picture.cluster();
    plan.nodes().into_iter().all(|node| {
        let judged = cluster.nodes.get(node).map(|node| node.online);
        judged.unwrap_or_else(|| plane.fleet.seat(node).is_some())
    })
}

fn current_plan_view(plane: &Plane, plan: QueryPlan) -> PlanView {
    let key = PlanRecord::key_of(&plan.query, plan.generation);
    match get::<PlanRecord>(plane.office.store(), &key) {
        Ok(Some((record, _))) => plan_view(record, Some(plan.generation)),
        _ => PlanView {
            plan,
            detected_unix_ms: 0,
            committed_unix_ms: 0,
            applied_unix_ms: None,
            current: true,
        },
    }
}
