//! Bearer tokens: who may speak to the API with which rights, and which nodes may join.
//!
//! Start at [`Tokens`]. A token is a random text that is shown once; the store keeps its digest only, under an id that is part of the
//! digest and may be shown and logged. A join token is consumed in the transaction that records the node's key: the same key may repeat
//! its request (its answer may have been lost), another may not.
//!
//! Deliberately absent: certificates (the transport issues them) and the wall clock (time is an argument).

use std::sync::Arc;

use compass_shared::api::Role;
use compass_shared::ids::{Digest, NodeId};
use compass_shared::model::cluster::Scheduling;
use rand::TryRngCore;

use crate::store::records::{NodeRecord, TokenPurpose, TokenRecord};
use crate::store::{Office, StoreError, get, scan};

#[cfg(test)]
mod tests;

/// Begins every API token, so that one can be recognised (and looked for in logs and repositories).
pub const API_TOKEN_PREFIX: &str = "ck1.";

/// Most tokens kept; the oldest useless ones are forgotten first.
const TOKENS_MAX: usize = 10_000;

/// How often a transaction is repeated when others change the same records; each loser sees one winner.
const CONFLICT_RETRIES: usize = 16;

/// Who a request comes from, once its token is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bearer {
    /// The token's id, for the audit log.
    pub token_id: String,
    /// Its rights.
    pub role: Role,
}

/// Why a token was not accepted.
#[derive(Debug, Clone, thiserror::Error)]
pub enum TokenError {
    /// Unknown, mistyped or forged; the same answer for all, so that nothing can be learned from it.
    #[error("the token is not known here")]
    Unknown,
    /// Its time is over.
    #[error("token {id} has expired: ask for a new one")]
    Expired {
        /// Its id.
        id: String,
    },
    /// A person has taken it back.
    #[error("token {id} was revoked")]
    Revoked {
        /// Its id.
        id: String,
    },
    /// It is good for something else.
    #[error("token {id} is {is}, this needs {wanted}")]
    WrongPurpose {
        /// Its id.
        id: String,
        /// What it is.
        is: String,
        /// What is needed.
        wanted: String,
    },
    /// All its uses are taken by other keys.
    #[error(
        "token {id} was already used by another key: create a token per node, or one with --uses"
    )]
    UsedUp {
        /// Its id.
        id: String,
    },
    /// It names another node.
    #[error("token {id} is for node {for_node}, not for {wanted}")]
    WrongNode {
        /// Its id.
        id: String,
        /// The node it is for.
        for_node: NodeId,
        /// The node that asked.
        wanted: NodeId,
    },
    /// It names no node, and the newcomer did not say its name.
    #[error("token {id} is for any node: say the node's name")]
    NameNeeded {
        /// Its id.
        id: String,
    },
    /// The name belongs to another key.
    #[error(
        "node {node} is already registered with another key: choose another name, or remove the old node first (compass node remove {node})"
    )]
    NodeTaken {
        /// The name.
        node: NodeId,
    },
    /// Too many tokens.
    #[error("there are already {TOKENS_MAX} usable tokens: revoke some first")]
    TooMany,
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// What a new token is to be.
#[derive(Debug, Clone)]
pub struct NewToken {
    /// What it is good for.
    pub purpose: TokenPurpose,
    /// For people.
    pub note: String,
    /// Wall time after which it is refused.
    pub expires_unix_ms: Option<u64>,
}

/// A node that a token lets in.
#[derive(Debug, Clone, PartialEq)]
pub struct Admitted {
    /// Its record as it now stands.
    pub node: NodeRecord,
    /// The token's id.
    pub token_id: String,
    /// Whether the same key had been admitted before with the same token.
    pub repeated: bool,
}

/// All tokens, in the store.
#[derive(Debug, Clone)]
pub struct Tokens {
    office: Arc<Office>,
}

impl Tokens {
    /// The tokens kept in a store.
    pub fn new(office: Arc<Office>) -> Self {
        Self { office }
    }

    /// Records a token by the digest of its text (or, for join tokens, of what it presents); the text itself is never seen here.
    ///
    /// # Errors
    /// [`TokenError::TooMany`], or when the store fails.
    pub async fn create(
        &self,
        digest: Digest,
        new: NewToken,
        now_unix_ms: u64,
    ) -> Result<TokenRecord, TokenError> {
        self.forget_useless(now_unix_ms).await?;
        let record = TokenRecord {
            id: id_of(&digest),
            digest,
            purpose: new.purpose,
            note: new.note,
            created_unix_ms: now_unix_ms,
            expires_unix_ms: new.expires_unix_ms,
            revoked: false,
        };
        let transaction = self
            .office
            .begin()
            .expecting(TokenRecord::key_of(&record.id), None)
            .put(&record);
        self.office.commit(transaction).await?;
        Ok(record)
    }

    /// All tokens, without their secrets.
    ///
    /// # Errors
    /// When the store fails.
    pub fn list(&self) -> Result<Vec<TokenRecord>, StoreError> {
        scan(self.office.store())
    }

    /// Takes a token back; it stays in the list as revoked.
    ///
    /// # Errors
    /// [`TokenError::Unknown`], or when the store fails.
    pub async fn revoke(&self, id: &str) -> Result<TokenRecord, TokenError> {
        for _ in 0..CONFLICT_RETRIES {
            let key = TokenRecord::key_of(id);
            let Some((mut record, revision)) = get::<TokenRecord>(self.office.store(), &key)?
            else {
                return Err(TokenError::Unknown);
            };
            record.revoked = true;
            let transaction = self
                .office
                .begin()
                .expecting(key, Some(revision))
                .put(&record);
            match self.office.commit(transaction).await {
                Ok(_) => return Ok(record),
                Err(StoreError::Conflict { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(conflict(id))
    }

    /// Who this API token belongs to, if it has at least the wanted role.
    ///
    /// # Errors
    /// Why not.
    pub fn authenticate(
        &self,
        text: &str,
        wanted: Role,
        now_unix_ms: u64,
    ) -> Result<Bearer, TokenError> {
        let (record, _) = self.find(&digest_of(text))?;
        check_usable(&record, now_unix_ms)?;
        let TokenPurpose::Api { role } = record.purpose else {
            return Err(TokenError::WrongPurpose {
                id: record.id,
                is: "a join token".to_owned(),
                wanted: format!("an API token of role {wanted}"),
            });
        };
        if role < wanted {
            return Err(TokenError::WrongPurpose {
                id: record.id,
                is: format!("an API token of role {role}"),
                wanted: format!("role {wanted}"),
            });
        }
        Ok(Bearer {
            token_id: record.id,
            role,
        })
    }

    /// Lets a node in: consumes one use of the token and records the node's key, in one transaction. A token made for one node gives that
    /// node's name; otherwise `wanted` does.
    ///
    /// # Errors
    /// Why not; nothing is consumed then.
    pub async fn admit(
        &self,
        digest: &Digest,
        wanted: Option<&NodeId>,
        fingerprint: Digest,
        now_unix_ms: u64,
    ) -> Result<Admitted, TokenError> {
        for _ in 0..CONFLICT_RETRIES {
            let (record, revision) = self.find(digest)?;
            let id = record.id.clone();
            match self
                .try_admit(record, revision, wanted, fingerprint, now_unix_ms)
                .await
            {
                Err(TokenError::Store(StoreError::Conflict { .. })) => {
                    tracing::debug!(token = id, "another node used the token meanwhile");
                }
                result => return result,
            }
        }
        Err(conflict(&id_of(digest)))
    }

    async fn try_admit(
        &self,
        mut record: TokenRecord,
        revision: u64,
        wanted: Option<&NodeId>,
        fingerprint: Digest,
        now_unix_ms: u64,
    ) -> Result<Admitted, TokenError> {
        let id = record.id.clone();
        if record.revoked {
            return Err(TokenError::Revoked { id });
        }
        let is_expired = is_expired(&record, now_unix_ms);
        let TokenPurpose::Join {
            node,
            uses_max,
            used_by,
        } = &mut record.purpose
        else {
            return Err(TokenError::WrongPurpose {
                id,
                is: "an API token".to_owned(),
                wanted: "a join token".to_owned(),
            });
        };
        if let (Some(for_node), Some(wanted)) = (&*node, wanted)
            && for_node != wanted
        {
            return Err(TokenError::WrongNode {
                id,
                for_node: for_node.clone(),
                wanted: wanted.clone(),
            });
        }
        let Some(wanted) = node.clone().or_else(|| wanted.cloned()) else {
            return Err(TokenError::NameNeeded { id });
        };
        let repeated = used_by.contains(&(fingerprint, wanted.clone()));
        if is_expired && !repeated {
            return Err(TokenError::Expired { id });
        }
        let key = NodeRecord::key_of(&wanted);
        let found = get::<NodeRecord>(self.office.store(), &key)?;
        if let Some((node, _)) = &found
            && node.fingerprint != fingerprint
        {
            return Err(TokenError::NodeTaken { node: wanted });
        }
        if repeated && let Some((node, _)) = found {
            return Ok(Admitted {
                node,
                token_id: id,
                repeated,
            });
        }
        if !repeated {
            if used_by.len() >= *uses_max as usize {
                return Err(TokenError::UsedUp { id });
            }
            used_by.push((fingerprint, wanted.clone()));
        }
        let seen = found.as_ref().map(|(_, revision)| *revision);
        let node = found.map_or_else(
            || NodeRecord {
                id: wanted,
                fingerprint,
                joined_unix_ms: now_unix_ms,
                joined_with: id.clone(),
                scheduling: Scheduling::Open,
                description: None,
                boot: 0,
            },
            |(node, _)| node,
        );
        let transaction = self
            .office
            .begin()
            .expecting(TokenRecord::key_of(&id), Some(revision))
            .expecting(key, seen)
            .put(&record)
            .put(&node);
        self.office.commit(transaction).await?;
        Ok(Admitted {
            node,
            token_id: id,
            repeated,
        })
    }

    fn find(&self, digest: &Digest) -> Result<(TokenRecord, u64), TokenError> {
        let key = TokenRecord::key_of(&id_of(digest));
        let (record, revision) =
            get::<TokenRecord>(self.office.store(), &key)?.ok_or(TokenError::Unknown)?;
        if !is_equal_in_constant_time(&record.digest, digest) {
            return Err(TokenError::Unknown);
        }
        Ok((record, revision))
    }

    /// Forgets tokens that nobody can use any more, oldest first, once there are many.
    async fn forget_useless(&self, now_unix_ms: u64) -> Result<(), TokenError> {
        let mut all = self.list()?;
        if all.len() < TOKENS_MAX {
            return Ok(());
        }
        all.retain(|token| token.revoked || is_expired(token, now_unix_ms));
        all.sort_by_key(|token| token.created_unix_ms);
        let Some(oldest) = all.first() else {
            return Err(TokenError::TooMany);
        };
        let transaction = self.office.begin().delete(TokenRecord::key_of(&oldest.id));
        self.office.commit(transaction).await?;
        Ok(())
    }
}

/// A new API token: 32 random bytes.
///
/// # Panics
/// When the operating system has no entropy to give.
pub fn random_token() -> String {
    let mut secret = [0; 32];
    rand::rngs::OsRng
        .try_fill_bytes(&mut secret)
        .expect("the operating system supplies entropy");
    format!("{API_TOKEN_PREFIX}{}", hex::encode(secret))
}

/// What the store keeps of an API token.
pub fn digest_of(text: &str) -> Digest {
    Digest::of(text.as_bytes())
}

/// The part of a token's digest that names it: 48 bits tell a fleet's tokens apart and say nothing about the 256 secret ones.
fn id_of(digest: &Digest) -> String {
    format!("tk-{}", digest.short())
}

fn is_expired(record: &TokenRecord, now_unix_ms: u64) -> bool {
    record
        .expires_unix_ms
        .is_some_and(|expires| now_unix_ms >= expires)
}

fn check_usable(record: &TokenRecord, now_unix_ms: u64) -> Result<(), TokenError> {
    if record.revoked {
        return Err(TokenError::Revoked {
            id: record.id.clone(),
        });
    }
    if is_expired(record, now_unix_ms) {
        return Err(TokenError::Expired {
            id: record.id.clone(),
        });
    }
    Ok(())
}

fn conflict(id: &str) -> TokenError {
    TokenError::Store(StoreError::Conflict {
        key: TokenRecord::key_of(id),
    })
}

/// Compares two digests in a time that does not depend on where they differ.
fn is_equal_in_constant_time(a: &Digest, b: &Digest) -> bool {
    let difference = a
        .as_bytes()
        .iter()
        .zip(b.as_bytes())
        .fold(0_u8, |sum, (a, b)| std::hint::black_box(sum | (a ^ b)));
    difference == 0
}
