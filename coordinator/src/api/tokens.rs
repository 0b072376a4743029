//! Tokens: shown once, listed without their secrets.

use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use compass_shared::api::{CreateToken, Role, TokenCreated, TokenPurpose, TokenView};
use compass_transport::JoinToken;

use super::Shared;
use super::auth::Caller;
use super::errors::unreadable;
use crate::control::{Refusal, RefusalKind};
use crate::events::Event;
use crate::store::records::{self, TokenRecord};
use crate::tokens::{NewToken, TokenError, digest_of, random_token};

/// Longest time a token may live: longer ones are forgotten, not renewed.
const TTL_S_MAX: u64 = 10 * 365 * 24 * 3600;
/// Most keys one join token may register.
const USES_MAX: u32 = 1_000;

pub(super) async fn list(
    State(plane): Shared,
    caller: Caller,
) -> Result<Json<Vec<TokenView>>, Refusal> {
    caller.require(Role::Operator)?;
    let tokens = plane.tokens.list()?;
    Ok(Json(tokens.into_iter().map(view).collect()))
}

pub(super) async fn create(
    State(plane): Shared,
    caller: Caller,
    body: Result<Json<CreateToken>, JsonRejection>,
) -> Result<(StatusCode, Json<TokenCreated>), Refusal> {
    let Json(wanted) = body.map_err(|error| unreadable(error.body_text()))?;
    if wanted.ttl_s == 0 || wanted.ttl_s > TTL_S_MAX {
        return Err(unreadable(format!(
            "ttl_s {} is not between 1 and {TTL_S_MAX}",
            wanted.ttl_s
        )));
    }
    let now = plane.authority.clock().now_unix_s() * 1000;
    let expires_unix_ms = Some(now + wanted.ttl_s * 1000);
    let (text, digest, purpose, what) = match wanted.purpose {
        TokenPurpose::Join(node) => {
            caller.require(Role::Operator)?;
            let uses_max = wanted.uses.unwrap_or(1);
            if uses_max == 0 || uses_max > USES_MAX {
                return Err(unreadable(format!(
                    "uses {uses_max} is not between 1 and {USES_MAX}"
                )));
            }
            let token = JoinToken::mint(plane.authority.fingerprint());
            let what = format!("join token for node {node}, {uses_max} uses");
            let purpose = records::TokenPurpose::Join {
                node: Some(node),
                uses_max,
                used_by: Vec::new(),
            };
            (token.reveal().to_string(), token.hash().0, purpose, what)
        }
        TokenPurpose::Api(role) => {
            caller.require(Role::Admin)?;
            if wanted.uses.is_some() {
                return Err(unreadable("uses are for join tokens only"));
            }
            let text = random_token();
            let digest = digest_of(&text);
            let what = format!("API token of role {role}");
            (text, digest, records::TokenPurpose::Api { role }, what)
        }
    };
    let new = NewToken {
        purpose,
        note: String::new(),
        expires_unix_ms,
    };
    let record = plane.tokens.create(digest, new, now).await?;
    let object = format!("token {}", record.id);
    let event = Event::new("token", object, caller.actor(), format!("created: {what}"));
    plane.events.record(event);
    let created = TokenCreated {
        token: text,
        view: view(record),
    };
    Ok((StatusCode::CREATED, Json(created)))
}

pub(super) async fn revoke(
    State(plane): Shared,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<StatusCode, Refusal> {
    caller.require(Role::Admin)?;
    match plane.tokens.revoke(&id).await {
        Ok(record) => {
            let object = format!("token {}", record.id);
            plane
                .events
                .record(Event::new("token", object, caller.actor(), "revoked"));
            Ok(StatusCode::NO_CONTENT)
        }
        Err(TokenError::Unknown) => Err(Refusal::unknown("token", id, "compass token list")),
        Err(error) => Err(Refusal::new(RefusalKind::Internal, error.to_string())),
    }
}

fn view(record: TokenRecord) -> TokenView {
    let (purpose, uses_left) = match record.purpose {
        records::TokenPurpose::Join {
            node,
            uses_max,
            used_by,
        } => {
            let used = u32::try_from(used_by.len()).unwrap_or(u32::MAX);
            let left = Some(uses_max.saturating_sub(used));
            match node {
                Some(node) => (TokenPurpose::Join(node), left),
                None => (TokenPurpose::Api(Role::Viewer), left),
            }
        }
        records::TokenPurpose::Api { role } => (TokenPurpose::Api(role), None),
    };
    TokenView {
        id: record.id,
        purpose,
        expires_unix_ms: record.expires_unix_ms.unwrap_or(u64::MAX),
        uses_left,
        revoked: record.revoked,
    }
}
