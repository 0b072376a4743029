//! `compass token`

use compass_shared::api::{CreateToken, Role, TokenCreated, TokenPurpose, TokenView};
use serde_json::json;

use super::{by_prefix, confirm};
use crate::arguments::{Global, RoleName, Token};
use crate::http::Api;
use crate::output::{Shown, duration, print_text};

/// What the API calls the end of a token that has none.
const NEVER: u64 = u64::MAX;

pub(crate) fn list(global: &Global, api: &Api) -> anyhow::Result<()> {
    let tokens: Vec<TokenView> = api.get("/v1/tokens")?;
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)?
        .as_millis() as u64;
    let row = |token: &TokenView| {
        vec![
            token.id.clone(),
            purpose(&token.purpose),
            token
                .uses_left
                .map_or_else(|| "any".to_owned(), |n| n.to_string()),
            state(token, now),
        ]
    };
    let names = tokens.iter().map(|token| token.id.clone()).collect();
    let rows = tokens.iter().map(row).collect();
    Shown {
        header: vec!["id", "purpose", "uses left", "state"],
        narrow: 4,
        names,
        rows,
        data: tokens,
    }
    .print(global)
}

/// How a token stands at a time in ms since 1970.
fn state(token: &TokenView, now: u64) -> String {
    match token.expires_unix_ms.checked_sub(now) {
        _ if token.revoked => "revoked".to_owned(),
        _ if token.expires_unix_ms == NEVER => "never expires".to_owned(),
        None | Some(0) => "expired".to_owned(),
        Some(left) => format!("expires in {}", duration(left / 1000)),
    }
}

pub(crate) fn run(global: &Global, api: &Api, command: &Token) -> anyhow::Result<()> {
    match command {
        Token::Create {
            node,
            role,
            ttl,
            uses,
        } => {
            let (purpose, uses) = match (node, role) {
                (Some(node), _) => (TokenPurpose::Join(node.parse()?), Some(*uses)),
                (None, role) => (
                    TokenPurpose::Api(role.map_or(Role::Viewer, Role::from)),
                    None,
                ),
            };
            let request = CreateToken {
                purpose: purpose.clone(),
                ttl_s: ttl.as_secs(),
                uses,
            };
            let created: TokenCreated = api.post("/v1/tokens", &request)?;
            // The token alone on standard output, so that `$(compass token create …)` is the token.
            eprintln!(
                "expires in {}, {}{}",
                duration(ttl.as_secs()),
                uses.map_or_else(String::new, |n| format!(
                    "{n} use{}, ",
                    if n == 1 { "" } else { "s" }
                )),
                self::purpose(&purpose)
            );
            let data = json!({ "token": created.token, "id": created.view.id, "expires_unix_ms": created.view.expires_unix_ms });
            print_text(
                global,
                &data,
                &created.view.id,
                &format!("{}\n", created.token),
            )
        }
        Token::Revoke { id } => {
            let tokens: Vec<TokenView> = api.get("/v1/tokens")?;
            let id = by_prefix("token", id, tokens.iter().map(|token| token.id.as_str()))?;
            confirm(
                global,
                &format!("Revoke token {id}? Whoever holds it loses access."),
            )?;
            api.delete(&format!("/v1/tokens/{id}"))?;
            print_text(
                global,
                &json!({ "revoked": id }),
                id,
                &format!("token {id} revoked\n"),
            )
        }
        Token::List => list(global, api),
    }
}

fn purpose(purpose: &TokenPurpose) -> String {
    match purpose {
        TokenPurpose::Join(node) => format!("node \"{node}\""),
        TokenPurpose::Api(role) => format!("role {}", format!("{role:?}").to_lowercase()),
    }
}

impl From<RoleName> for Role {
    fn from(name: RoleName) -> Self {
        match name {
            RoleName::Viewer => Self::Viewer,
            RoleName::App => Self::App,
            RoleName::Operator => Self::Operator,
            RoleName::Admin => Self::Admin,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_says_how_long_it_is_good_for() {
        let token = |expires_unix_ms, revoked| TokenView {
            id: "t1".to_owned(),
            purpose: TokenPurpose::Api(Role::Admin),
            expires_unix_ms,
            uses_left: None,
            revoked,
        };
        let now = 1_800_000_000_000;
        for (expires, revoked, expected) in [
            (NEVER, false, "never expires"),
            (NEVER, true, "revoked"),
            (now + 60_000, false, "expires in 60s"),
            (now + 3 * 86_400_000, false, "expires in 3d"),
            (now, false, "expired"),
            (now - 1, false, "expired"),
        ] {
            assert_eq!(state(&token(expires, revoked), now), expected);
        }
    }
}
