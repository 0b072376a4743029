//! The HTTP API: thin handlers over [`crate::control`] and the registries, typed by `compass_shared::api`.
//!
//! Start at [`router`]. Every path but `/healthz` wants a bearer token; the layer that checks it stands before all of them, so that a new
//! path cannot forget it, and each handler states the role it needs. Bodies are bounded; errors are `{error, object, hint}`.
//!
//! Deliberately absent: TLS (the API listens on loopback unless an administrator puts a proxy before it) and any decision.

mod artifacts;
mod auth;
mod document;
mod dry_run;
mod errors;
mod events;
mod nodes;
mod queries;
mod serve;
mod tokens;
mod upload;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use axum::extract::{DefaultBodyLimit, State};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, put};
use axum::{Json, Router, middleware};
use compass_shared::api::Health;

use crate::metrics;
use crate::plane::Plane;

pub use serve::serve;

/// Largest body of a request that is read whole: a spec.
const BODY_BYTES_MAX: usize = compass_shared::spec::SPEC_BYTES_MAX;

/// What handlers work on.
type Shared = State<Arc<Plane>>;

/// All paths.
pub fn router(plane: Arc<Plane>) -> Router {
    let guarded = Router::new()
        .route("/metrics", get(metrics_text))
        .route("/v1/nodes", get(nodes::list))
        .route("/v1/nodes/{id}", get(nodes::one).delete(nodes::remove))
        .route("/v1/nodes/{id}/scheduling", put(nodes::set_scheduling))
        .route("/v1/links", get(nodes::links))
        .route("/v1/queries", get(queries::list).post(queries::register))
        .route("/v1/queries/plan", axum::routing::post(dry_run::plan))
        .route("/v1/queries/{id}", get(queries::one).delete(queries::stop))
        .route("/v1/queries/{id}/plans", get(queries::plans))
        .route(
            "/v1/queries/{id}/plans/{generation}/explain",
            get(queries::explain),
        )
        .route("/v1/events", get(events::list))
        .route("/v1/trials", get(events::trials))
        .route("/v1/tokens", get(tokens::list).post(tokens::create))
        .route("/v1/tokens/{id}", delete(tokens::revoke))
        .route("/v1/artifacts", get(artifacts::list))
        .route("/v1/catalogue", get(catalogue))
        .route("/v1/pipelines", get(pipelines))
        .route("/v1/openapi.json", get(document::openapi))
        .layer(middleware::from_fn(upload::read_whole))
        // Too large to be read whole: goes to the disk as it comes.
        .route(
            "/v1/artifacts/{name}",
            put(artifacts::push).layer(DefaultBodyLimit::disable()),
        )
        .fallback(errors::no_such_path)
        .method_not_allowed_fallback(errors::no_such_method)
        .layer(middleware::from_fn_with_state(plane.clone(), auth::check));
    Router::new()
        .route("/healthz", get(healthz))
        .merge(guarded)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(middleware::from_fn_with_state(plane.clone(), count_answer))
        .with_state(plane)
}

async fn count_answer(
    State(plane): Shared,
    request: axum::extract::Request,
    next: middleware::Next,
) -> Response {
    let answer = next.run(request).await;
    let class = match answer.status().as_u16() {
        200..300 => "2xx",
        400..500 => "4xx",
        500.. => "5xx",
        _ => "other",
    };
    metrics::count(&plane.metrics.http, class);
    answer
}

async fn healthz(State(plane): Shared) -> Response {
    let mut troubles = plane.health.troubles();
    if let Some(failure) = plane.office.store().failure() {
        troubles.push(failure);
    }
    let health = Health {
        ok: troubles.is_empty(),
        term: plane.office.term(),
        authority: plane.authority.fingerprint(),
        troubles,
    };
    let status = if health.ok {
        axum::http::StatusCode::OK
    } else {
        axum::http::StatusCode::SERVICE_UNAVAILABLE
    };
    (status, Json(health)).into_response()
}

async fn metrics_text(State(plane): Shared) -> Response {
    (
        [(CONTENT_TYPE, metrics::CONTENT_TYPE)],
        plane.metrics.text(),
    )
        .into_response()
}

async fn catalogue(State(plane): Shared) -> Response {
    Json(&*plane.configs.catalogue).into_response()
}

async fn pipelines(State(plane): Shared) -> Response {
    Json(&*plane.configs.pipelines).into_response()
}
