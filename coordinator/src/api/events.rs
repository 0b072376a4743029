//! The audit log and the stage runs.

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use compass_shared::api::{EventView, Trials};
use serde::Deserialize;

use super::Shared;
use super::errors::unreadable;
use super::queries::name;
use crate::control::Refusal;
use crate::store::records::EventRecord;

/// Lines in one answer.
const LINES_MAX: usize = 1_000;
/// Lines when no number is given: what fits a screen or two.
const LINES_DEFAULT: usize = 200;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct After {
    after: Option<u64>,
    limit: Option<usize>,
}

pub(super) async fn list(
    State(plane): Shared,
    query: Result<Query<After>, QueryRejection>,
) -> Result<Json<Vec<EventView>>, Refusal> {
    let Query(After { after, limit }) = query.map_err(|error| unreadable(error.body_text()))?;
    let lines = match after {
        Some(after) => plane
            .events
            .after(after, limit.unwrap_or(LINES_MAX).min(LINES_MAX))?,
        None => plane
            .events
            .newest(limit.unwrap_or(LINES_DEFAULT).min(LINES_MAX)),
    };
    Ok(Json(lines.into_iter().map(view).collect()))
}

fn view(line: EventRecord) -> EventView {
    let by = match line.actor.as_str() {
        "" => String::new(),
        actor => format!(" (by {actor})"),
    };
    EventView {
        sequence: line.sequence,
        unix_ms: line.unix_ms,
        kind: line.kind,
        object: line.object,
        message: format!("{}{by}", line.text),
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct OfQuery {
    query: Option<String>,
}

pub(super) async fn trials(
    State(plane): Shared,
    query: Result<Query<OfQuery>, QueryRejection>,
) -> Result<Json<Trials>, Refusal> {
    let Query(OfQuery { query }) = query.map_err(|error| unreadable(error.body_text()))?;
    let query = query.as_deref().map(name).transpose()?;
    let (trials, cache_hits) = plane.trials.list(query.as_ref());
    Ok(Json(Trials { trials, cache_hits }))
}
