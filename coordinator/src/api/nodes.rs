//! Nodes and links.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use compass_shared::api::{LinkView, NodeView, Role, SetScheduling};
use compass_shared::ids::NodeId;
use compass_shared::model::cluster::Resources;

use super::Shared;
use super::auth::Caller;
use super::errors::unreadable;
use crate::control::Refusal;
use crate::plane::Plane;
use crate::store::records::NodeRecord;
use crate::store::{get, scan};

pub(super) async fn list(State(plane): Shared) -> Result<Json<Vec<NodeView>>, Refusal> {
    let records = scan::<NodeRecord>(plane.office.store())?;
    let granted = plane.picture.granted();
    let views = records
        .into_iter()
        .filter_map(|record| view(&plane, record, &granted));
    Ok(Json(views.collect()))
}

pub(super) async fn one(
    State(plane): Shared,
    Path(id): Path<String>,
) -> Result<Json<NodeView>, Refusal> {
    Ok(Json(view_of(&plane, &name(&id)?)?))
}

pub(super) async fn set_scheduling(
    State(plane): Shared,
    caller: Caller,
    Path(id): Path<String>,
    body: Result<Json<SetScheduling>, JsonRejection>,
) -> Result<Json<NodeView>, Refusal> {
    caller.require(Role::Operator)?;
    let Json(body) = body.map_err(|error| unreadable(error.body_text()))?;
    let node = name(&id)?;
    let reason = body.reason.as_deref().unwrap_or("no reason given");
    plane
        .set_scheduling(&node, body.scheduling, &caller.actor(), reason)
        .await?;
    Ok(Json(view_of(&plane, &node)?))
}

pub(super) async fn remove(
    State(plane): Shared,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<StatusCode, Refusal> {
    caller.require(Role::Admin)?;
    plane.remove_node(&name(&id)?, &caller.actor()).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn links(State(plane): Shared) -> Json<Vec<LinkView>> {
    let cluster = plane.picture.cluster();
    let views = cluster.links.iter().map(|((from, to), link)| LinkView {
        from: from.clone(),
        to: to.clone(),
        bandwidth_mbit_s: link.bandwidth.mbit_s(),
        lower_bound: link.lower_bound,
        rtt_ms: link.rtt_ms,
        loss: link.loss,
    });
    Json(views.collect())
}

fn name(text: &str) -> Result<NodeId, Refusal> {
    NodeId::new(text).map_err(unreadable)
}

fn view_of(plane: &Plane, node: &NodeId) -> Result<NodeView, Refusal> {
    let unknown = || Refusal::unknown("node", node, "compass node list");
    let found = get::<NodeRecord>(plane.office.store(), &NodeRecord::key_of(node))?;
    let (record, _) = found.ok_or_else(unknown)?;
    let granted = plane.picture.granted();
    view(plane, record, &granted).ok_or_else(|| unknown().hint("it has joined but never connected"))
}

/// A node as people see it; none while it has joined but never connected, because nothing is known of it.
fn view(
    plane: &Plane,
    record: NodeRecord,
    granted: &BTreeMap<NodeId, Resources>,
) -> Option<NodeView> {
    let seat = plane.fleet.seat(&record.id);
    let description = match &seat {
        Some(seat) => seat.registration.description.clone(),
        None => record.description?,
    };
    let cluster = plane.picture.cluster();
    // The monitor's judgement where it has one: a session that is up but silent is not a node that works.
    let online = cluster
        .nodes
        .get(&record.id)
        .map_or(seat.is_some(), |node| node.online);
    let report = seat.as_ref().and_then(|seat| seat.report());
    let (sent_bytes, received_bytes) = report
        .as_ref()
        .map_or((0, 0), |report| (report.sent_bytes, report.received_bytes));
    Some(NodeView {
        tier: description.tier,
        site: description.site.to_string(),
        device: description.device_label(),
        online,
        scheduling: record.scheduling,
        capacity: description.capacity,
        granted: granted.get(&record.id).copied().unwrap_or_default(),
        address: seat.as_ref().map(|seat| seat.address.to_string()),
        since_unix_ms: seat.as_ref().map(|seat| seat.since_unix_ms),
        applied: seat.as_ref().and_then(|seat| seat.applied().0),
        telemetry: report.as_ref().map(|report| report.telemetry.clone()),
        instances: report
            .as_ref()
            .map(|report| report.instances.clone())
            .unwrap_or_default(),
        sent_bytes,
        received_bytes,
        id: record.id,
    })
}
