//! Errors as the API sends them.

use axum::Json;
use axum::http::header::WWW_AUTHENTICATE;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};

use crate::control::{Refusal, RefusalKind};

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = match self.kind {
            RefusalKind::Invalid => StatusCode::UNPROCESSABLE_ENTITY,
            RefusalKind::Unauthenticated => StatusCode::UNAUTHORIZED,
            RefusalKind::Forbidden => StatusCode::FORBIDDEN,
            RefusalKind::NotFound => StatusCode::NOT_FOUND,
            RefusalKind::Conflict => StatusCode::CONFLICT,
            RefusalKind::TooMuch => StatusCode::PAYLOAD_TOO_LARGE,
            RefusalKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            RefusalKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        };
        if status.is_server_error() {
            tracing::error!(error = self.error, object = self.object, "request failed");
        }
        let mut answer = (status, Json(self.body())).into_response();
        if status == StatusCode::UNAUTHORIZED {
            answer.headers_mut().insert(
                WWW_AUTHENTICATE,
                axum::http::HeaderValue::from_static("Bearer"),
            );
        }
        answer
    }
}

/// For paths that do not exist.
pub(super) async fn no_such_path(uri: Uri) -> Refusal {
    Refusal::new(RefusalKind::NotFound, format!("there is no {}", uri.path()))
        .hint("see /v1/openapi.json")
}

/// For methods that a path does not have.
pub(super) async fn no_such_method(uri: Uri) -> Response {
    let refusal = Refusal::new(
        RefusalKind::Invalid,
        format!("{} does not take this method", uri.path()),
    )
    .hint("see /v1/openapi.json");
    (StatusCode::METHOD_NOT_ALLOWED, Json(refusal.body())).into_response()
}

/// A request that axum could not take apart, in our words.
pub(super) fn unreadable(error: impl std::fmt::Display) -> Refusal {
    Refusal::new(RefusalKind::Invalid, error.to_string())
}
