use super::*;
use crate::store::redb::RedbStore;

const HOUR_MS: u64 = 3_600_000;

async fn tokens() -> Tokens {
    let store = Arc::new(RedbStore::in_memory().unwrap());
    Tokens::new(Arc::new(Office::take(store, "test").await.unwrap()))
}

fn key(n: u8) -> Digest {
    Digest::of(&[n])
}

fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

fn join(node: Option<&str>, uses_max: u32, expires_unix_ms: Option<u64>) -> NewToken {
    NewToken {
        purpose: TokenPurpose::Join {
            node: node.map(|name| NodeId::new(name).unwrap()),
            uses_max,
            used_by: vec![],
        },
        note: String::new(),
        expires_unix_ms,
    }
}

fn api(role: Role) -> NewToken {
    NewToken {
        purpose: TokenPurpose::Api { role },
        note: String::new(),
        expires_unix_ms: None,
    }
}

#[tokio::test]
async fn a_join_token_lets_one_key_in_and_the_same_key_may_ask_again() {
    let tokens = tokens().await;
    tokens
        .create(digest_of("t"), join(Some("edge-7"), 1, None), 0)
        .await
        .unwrap();
    let first = tokens
        .admit(&digest_of("t"), Some(&node("edge-7")), key(1), 5)
        .await
        .unwrap();
    assert!(!first.repeated);
    assert_eq!(first.node.fingerprint, key(1));
    let again = tokens
        .admit(&digest_of("t"), Some(&node("edge-7")), key(1), 6)
        .await
        .unwrap();
    assert!(again.repeated);
    assert_eq!(again.node, first.node);
    let other = tokens
        .admit(&digest_of("t"), Some(&node("edge-7")), key(2), 7)
        .await;
    assert!(
        matches!(other, Err(TokenError::NodeTaken { .. })),
        "{other:?}"
    );
}

#[tokio::test]
async fn a_token_for_one_node_gives_its_name_and_one_for_any_asks_for_it() {
    let tokens = tokens().await;
    let (one, any) = (digest_of("one"), digest_of("any"));
    tokens
        .create(one, join(Some("edge-7"), 1, None), 0)
        .await
        .unwrap();
    tokens.create(any, join(None, 1, None), 0).await.unwrap();
    let named = tokens.admit(&one, None, key(1), 0).await.unwrap();
    assert_eq!(named.node.id, node("edge-7"));
    let nameless = tokens.admit(&any, None, key(2), 0).await;
    assert!(
        matches!(nameless, Err(TokenError::NameNeeded { .. })),
        "{nameless:?}"
    );
}

#[tokio::test]
async fn a_used_up_token_is_refused_for_another_node() {
    let tokens = tokens().await;
    tokens
        .create(digest_of("t"), join(None, 1, None), 0)
        .await
        .unwrap();
    tokens
        .admit(&digest_of("t"), Some(&node("a")), key(1), 0)
        .await
        .unwrap();
    let refused = tokens
        .admit(&digest_of("t"), Some(&node("b")), key(2), 0)
        .await;
    assert!(
        matches!(refused, Err(TokenError::UsedUp { .. })),
        "{refused:?}"
    );
    let renamed = tokens
        .admit(&digest_of("t"), Some(&node("b")), key(1), 0)
        .await;
    assert!(
        matches!(renamed, Err(TokenError::UsedUp { .. })),
        "one key is not let in under two names by one use: {renamed:?}"
    );
}

#[tokio::test]
async fn two_keys_that_race_for_one_use_get_exactly_one() {
    let tokens = tokens().await;
    tokens
        .create(digest_of("t"), join(None, 1, None), 0)
        .await
        .unwrap();
    let (t, node_a, node_b) = (digest_of("t"), node("a"), node("b"));
    let (a, b) = tokio::join!(
        tokens.admit(&t, Some(&node_a), key(1), 0),
        tokens.admit(&t, Some(&node_b), key(2), 0)
    );
    assert_eq!(
        usize::from(a.is_ok()) + usize::from(b.is_ok()),
        1,
        "{a:?} {b:?}"
    );
}

#[tokio::test]
async fn expired_revoked_forged_and_misused_tokens_are_each_named() {
    let tokens = tokens().await;
    let t = tokens
        .create(digest_of("t"), join(Some("edge-7"), 1, Some(HOUR_MS)), 0)
        .await
        .unwrap();
    let expired = tokens
        .admit(&digest_of("t"), Some(&node("edge-7")), key(1), HOUR_MS)
        .await;
    assert!(expired.unwrap_err().to_string().contains("expired"));
    let wrong_node = tokens
        .admit(&digest_of("t"), Some(&node("edge-8")), key(1), 0)
        .await;
    assert!(matches!(wrong_node, Err(TokenError::WrongNode { .. })));
    let forged = tokens
        .admit(&digest_of("t2"), Some(&node("edge-7")), key(1), 0)
        .await;
    assert!(matches!(forged, Err(TokenError::Unknown)));
    let misused = tokens.authenticate("t", Role::Viewer, 0);
    assert!(misused.unwrap_err().to_string().contains("join token"));
    tokens.revoke(&t.id).await.unwrap();
    let revoked = tokens
        .admit(&digest_of("t"), Some(&node("edge-7")), key(1), 0)
        .await;
    assert!(matches!(revoked, Err(TokenError::Revoked { .. })));
    assert!(matches!(
        tokens.revoke("tk-none").await,
        Err(TokenError::Unknown)
    ));
}

#[tokio::test]
async fn roles_contain_the_ones_below_them() {
    let tokens = tokens().await;
    for role in [Role::Viewer, Role::App, Role::Operator, Role::Admin] {
        let text = random_token();
        tokens.create(digest_of(&text), api(role), 0).await.unwrap();
        for wanted in [Role::Viewer, Role::App, Role::Operator, Role::Admin] {
            let found = tokens.authenticate(&text, wanted, 0);
            assert_eq!(found.is_ok(), role >= wanted, "{role} for {wanted}");
        }
    }
    let refused = tokens.authenticate("", Role::Viewer, 0);
    assert!(matches!(refused, Err(TokenError::Unknown)));
}

#[tokio::test]
async fn secrets_are_not_stored() {
    let tokens = tokens().await;
    let text = random_token();
    let record = tokens
        .create(digest_of(&text), api(Role::Admin), 0)
        .await
        .unwrap();
    assert!(text.starts_with(API_TOKEN_PREFIX) && text.len() == 68);
    assert_ne!(text, random_token());
    let stored = tokens.office.store().scan("", None, 100).unwrap();
    let secret = &text[API_TOKEN_PREFIX.len()..];
    for (key, value) in stored {
        let json = String::from_utf8(value.json).unwrap();
        assert!(!json.contains(secret) && !key.contains(secret));
    }
    assert!(!record.id.contains(&secret[..8]));
}
