//! The bearer token on every request.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Request, State};
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use compass_shared::api::Role;

use crate::control::{Refusal, RefusalKind};
use crate::plane::Plane;
use crate::tokens::Bearer;

/// Longest token looked at, in bytes; a real one has 68.
const TOKEN_BYTES_MAX: usize = 256;

/// Lets a request pass whose token counts, with its bearer attached.
pub(super) async fn check(
    State(plane): State<Arc<Plane>>,
    mut request: Request,
    next: Next,
) -> Response {
    match bearer(&plane, &request) {
        Ok(bearer) => {
            request.extensions_mut().insert(bearer);
            next.run(request).await
        }
        Err(refusal) => refusal.into_response(),
    }
}

fn bearer(plane: &Plane, request: &Request) -> Result<Bearer, Refusal> {
    let header = request.headers().get(AUTHORIZATION);
    let token = header
        .and_then(|header| header.to_str().ok())
        .and_then(|header| header.strip_prefix("Bearer "))
        .map(str::trim)
        .filter(|token| !token.is_empty() && token.len() <= TOKEN_BYTES_MAX)
        .ok_or_else(|| {
            Refusal::new(RefusalKind::Unauthenticated, "a bearer token is needed").hint(
                "send `Authorization: Bearer …`; the administrator's first token is in the coordinator's data folder",
            )
        })?;
    let now = plane.authority.clock().now_unix_s() * 1000;
    Ok(plane.tokens.authenticate(token, Role::Viewer, now)?)
}

/// The bearer of a request that passed [`check`].
pub(super) struct Caller(pub(super) Bearer);

impl Caller {
    /// Demands a role.
    pub(super) fn require(&self, role: Role) -> Result<&Bearer, Refusal> {
        if self.0.role >= role {
            return Ok(&self.0);
        }
        Err(Refusal::new(
            RefusalKind::Forbidden,
            format!("this needs role {role}, the token has role {}", self.0.role),
        )
        .about(format!("token {}", self.0.token_id))
        .hint(format!("compass token create --role {role}")))
    }

    /// As the audit log names it.
    pub(super) fn actor(&self) -> String {
        format!("token {}", self.0.token_id)
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Refusal> {
        let bearer = parts.extensions.get::<Bearer>().cloned();
        bearer.map(Self).ok_or_else(|| {
            Refusal::new(
                RefusalKind::Internal,
                "a path outside of the token check asked for its bearer",
            )
        })
    }
}
